//! The figures of a run, as a table for people and as JSON for programs. Pure.
//!
//! JSON: schema 1. Fields are added without a new number; one that changes its meaning or goes away takes a new one.

use std::fmt::Write;

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::host::Host;
use crate::units::{count, float, plural, rate, size, time};

/// Everything that a run tells.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Version of this form: 1.
    pub schema: u32,
    /// Version of the program.
    pub version: &'static str,
    /// Measured records.
    pub records: u64,
    /// Bytes of their keys and values.
    pub bytes: u64,
    /// What they took, up to the last answer.
    pub seconds: f64,
    pub records_per_second: f64,
    pub mib_per_second: f64,
    /// Of one append. Null if none was measured.
    pub latency_us: Option<Latency>,
    /// What consumers did. Null if there were none, or the run was interrupted before they began.
    pub read: Option<ReadShape>,
    /// Writes of the log during the measured time.
    pub commits: u64,
    pub records_per_commit: f64,
    pub durability: &'static str,
    /// What carried the hot path: uring or posix.
    pub backend: &'static str,
    /// Records that were read back as they were acknowledged, those of the warm-up among them; 0 without verification.
    pub verified_records: u64,
    /// The disk's own limit. Null if it could not be measured.
    pub floor_us: Option<Latency>,
    /// p50 of one append to that of one bare write of the same size.
    pub ratio_to_floor: Option<f64>,
    pub host: Host,

    pub r#loop: Loop,
    pub load: LoadShape,
    pub floor: FloorShape,
    pub verification: VerificationShape,
    /// Records that were answered, those of the warm-up among them.
    pub acknowledged_records: u64,
    /// Bytes that the engine stored in the measured time, and what else it did.
    pub stored_bytes: u64,
    pub rolls: u64,
    pub syncs: u64,
    /// Ctrl-C ended the run.
    pub interrupted: bool,
    /// The append that failed first, if one did.
    pub error: Option<String>,
    /// Where the topic was left.
    pub kept: Option<String>,
    #[serde(skip)]
    pub data_dir: String,
}

/// Percentiles in microseconds.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Latency {
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
    pub samples: u64,
    #[serde(skip)]
    ns: [u64; 5],
}

impl Latency {
    /// Of nanoseconds. None without a sample.
    pub fn of(histogram: &Histogram<u64>) -> Option<Self> {
        if histogram.is_empty() {
            return None;
        }
        let [p50, p90, p99, p999] = [0.5, 0.9, 0.99, 0.999].map(|quantile| histogram.value_at_quantile(quantile));
        let ns = [p50, p90, p99, p999, histogram.max()];
        let [p50, p90, p99, p999, max] = ns.map(|ns| float(ns) / 1e3);
        Some(Self { p50, p90, p99, p999, max, samples: histogram.len(), ns })
    }

    /// p50, p90, p99, p99.9 and the maximum.
    pub fn nanos(&self) -> [u64; 5] {
        self.ns
    }
}

/// Whether producers waited.
#[derive(Debug, Serialize)]
#[serde(tag = "mode", rename_all = "lowercase")]
pub enum Loop {
    /// Each producer waited for its answer before its next append.
    Closed,
    /// Appends were due at fixed times.
    Open {
        /// Records per second that were asked for, and what came of it.
        target: u64,
        achieved: f64,
        reached: bool,
        /// Records on the timetable that were not appended when time was up.
        unsent_records: u64,
        /// How late appends began, which is part of their latency.
        lag_us: Option<Latency>,
    },
}

impl Loop {
    /// An open loop with its verdict: the rate is reached from 99 % of it on.
    pub fn open(target: u64, achieved: f64, unsent_records: u64, lag_us: Option<Latency>) -> Self {
        let reached = achieved >= 0.99 * float(target) && float(unsent_records) <= 0.01 * float(target);
        Self::Open { target, achieved, reached, unsent_records, lag_us }
    }
}

/// What was asked for.
#[derive(Debug, Serialize)]
pub struct LoadShape {
    pub topic: String,
    pub partitions: u32,
    pub writers: String,
    pub producers: u32,
    /// Null where the values are the lines of a file.
    pub record_bytes: Option<u64>,
    pub input: Option<String>,
    pub keys: u64,
    pub batch_records: u64,
    pub linger_us: u64,
    pub segment_bytes: u64,
    pub index_interval: u32,
    pub warmup_seconds: f64,
    pub seed: u64,
}

/// What consumers did, all of them together.
#[derive(Debug, Serialize)]
pub struct ReadShape {
    /// What: tail, catch-up, random or time.
    pub mode: &'static str,
    /// How many of each partition.
    pub consumers: u32,
    /// How they got at the bytes: buffered or direct.
    pub read_mode: &'static str,
    /// Records read, each as often as there were consumers to read it; at the tail, those that came after the warm-up.
    pub records: u64,
    /// Bytes of their keys and values.
    pub bytes: u64,
    /// What they took, up to the last one.
    pub seconds: f64,
    pub records_per_second: f64,
    pub mib_per_second: f64,
    /// At the tail of a measured record, from where its append's latency counts from until a consumer had it; in catch-up of a batch, else of a
    /// look-up. Null if none was measured.
    pub latency_us: Option<Latency>,
    /// What the first consumer that failed met.
    pub error: Option<String>,
}

impl ReadShape {
    fn who(&self) -> String {
        let what = match self.mode {
            "tail" => "at the tail",
            "catch-up" => "reading all of it",
            "random" => "looking up offsets",
            _ => "looking up times",
        };
        let how = if self.read_mode == "direct" { ", past the page cache" } else { "" };
        format!("{} of each partition {what}{how}", plural(self.consumers.into(), "consumer"))
    }

    /// What latency is of, and from where.
    fn of(&self) -> (&'static str, &'static str) {
        match self.mode {
            "tail" => ("  to be seen", "a record, from its append on"),
            "catch-up" => ("  a batch", ""),
            _ => ("  a look-up", ""),
        }
    }
}

/// How the disk's own limit was measured.
#[derive(Debug, Serialize)]
pub struct FloorShape {
    pub write_bytes: u64,
    pub method: Option<&'static str>,
    /// Why it was not.
    pub error: Option<String>,
}

/// How reading back went.
#[derive(Debug, Serialize)]
pub struct VerificationShape {
    pub wanted: bool,
    /// Everything was read and nothing differed. Null where it was not wanted.
    pub passed: Option<bool>,
    /// False if Ctrl-C ended it.
    pub complete: bool,
    pub seconds: f64,
    pub differences: u64,
    /// The first few, in words.
    pub shown: Vec<String>,
    /// Records of appends that failed, and are there nonetheless.
    pub unanswered_records: u64,
}

impl Report {
    /// Whether the run was good: exit code 0 or 1.
    pub fn passed(&self) -> bool {
        self.error.is_none() && self.read.as_ref().is_none_or(|read| read.error.is_none()) && self.verification.passed != Some(false)
    }

    /// For programs: one object, indented.
    pub fn json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("a report is plain numbers and text");
        text.push('\n');
        text
    }

    /// For people.
    pub fn table(&self) -> String {
        let mut table = Table::default();
        let out = &mut table;
        out.line("data", &self.place());
        out.line("engine", &format!("{}, {}, segments of {}", self.backend, self.durability, size(self.load.segment_bytes)));
        out.line("load", &self.load_words());
        out.line("host", &format!("Linux {}, {}", self.host.kernel, plural(self.host.cpus.try_into().unwrap_or(0), "CPU")));
        out.blank();
        out.line(
            "throughput",
            &format!("{} records/s, {} MiB/s of keys and values", rate(self.records_per_second), rate(self.mib_per_second)),
        );
        out.line("measured", &format!("{}, {} in {:.2} s", plural(self.records, "record"), size(self.bytes), self.seconds));
        out.line("commits", &format!("{}, {:.2} records each", count(self.commits), self.records_per_commit));
        if let Some(read) = &self.read {
            out.line(
                "read",
                &format!("{} records/s, {} MiB/s by {}", rate(read.records_per_second), rate(read.mib_per_second), read.who()),
            );
            out.line("", &format!("{}, {} in {:.2} s", plural(read.records, "record"), size(read.bytes), read.seconds));
        }
        out.blank();
        self.latencies(out);
        out.blank();
        out.line("verified", &self.verified());
        for difference in &self.verification.shown {
            out.line("", difference);
        }
        out.blank();
        for (name, note) in self.notes() {
            out.line(name, &note);
        }
        table.text
    }

    fn place(&self) -> String {
        let after = if self.kept.is_some() { "kept" } else { "removed afterwards" };
        format!("topic {} in {} ({}), {after}", self.load.topic, self.data_dir, self.host.filesystem)
    }

    fn load_words(&self) -> String {
        let LoadShape { producers, partitions, batch_records, keys, .. } = self.load;
        let mode = match self.r#loop {
            Loop::Closed => "closed loop".to_owned(),
            Loop::Open { target, .. } => format!("open loop of {} records/s", count(target)),
        };
        let values = match (&self.load.input, self.load.record_bytes) {
            (Some(input), _) => format!("lines of {input}"),
            (None, bytes) => format!("values of {} B", count(bytes.unwrap_or(0))),
        };
        let keys = if keys == 0 { "no keys".to_owned() } else { plural(keys, "key") };
        format!(
            "{mode}, {} to {}, {} per append, {values}, {keys}",
            plural(producers.into(), "producer"),
            plural(partitions.into(), "partition"),
            plural(batch_records, "record"),
        )
    }

    fn latencies(&self, out: &mut Table) {
        let times = |latency: Latency| latency.ns.map(time);
        out.columns("latency", &["p50", "p90", "p99", "p99.9", "max"].map(str::to_owned), "");
        match self.latency_us {
            Some(append) => out.columns("  an append", &times(append), ""),
            None => out.line("  an append", "none was measured"),
        }
        match self.floor_us {
            Some(floor) => {
                let how = format!("one write of {}, {}", size(self.floor.write_bytes), self.floor.method.unwrap_or_default());
                out.columns("  this disk", &times(floor), &how);
            }
            None => out.line("  this disk", &format!("not measured: {}", self.floor.error.as_deref().unwrap_or("interrupted"))),
        }
        if let (Some(append), Some(floor)) = (self.latency_us, self.floor_us) {
            let ratio = |at: usize| format!("{:.2}x", float(append.ns[at]) / float(floor.ns[at].max(1)));
            out.columns("  ratio", &[0, 1, 2, 3, 4].map(ratio), "");
        }
        if let Loop::Open { lag_us: Some(lag), .. } = self.r#loop {
            out.columns("  begun late", &times(lag), "part of the append's latency");
        }
        if let Some(read) = &self.read {
            let (what, from) = read.of();
            match read.latency_us {
                Some(latency) => out.columns(what, &times(latency), from),
                None => out.line(what, "none was measured"),
            }
        }
    }

    fn verified(&self) -> String {
        let VerificationShape { wanted, passed, complete, seconds, differences, unanswered_records, .. } = self.verification;
        let records = plural(self.verified_records, "record");
        if !wanted {
            return "no, as asked for".to_owned();
        }
        let mut text = match (passed, complete) {
            (Some(true), _) => format!("{records} read back in {seconds:.2} s: keys, values, offsets and order as acknowledged"),
            (_, false) => format!(
                "interrupted: {records} of {} read back as acknowledged, {}",
                count(self.acknowledged_records),
                plural(differences, "difference")
            ),
            _ => format!(
                "FAILED: {}; {records} of {} are as acknowledged",
                plural(differences, "difference"),
                count(self.acknowledged_records)
            ),
        };
        if unanswered_records > 0 {
            let _ = write!(text, "; {} of failed appends are there, too", plural(unanswered_records, "record"));
        }
        text
    }

    /// What one should know about the figures.
    fn notes(&self) -> Vec<(&'static str, String)> {
        let mut notes = Vec::new();
        if self.host.in_memory {
            notes.push(("WARNING", format!("the data directory is on {}, in memory: durable means nothing there", self.host.filesystem)));
        }
        if let Some(error) = &self.error {
            notes.push(("FAILED", error.clone()));
        }
        if let Some(error) = self.read.as_ref().and_then(|read| read.error.as_ref()) {
            notes.push(("FAILED", error.clone()));
        }
        if self.interrupted {
            notes.push(("interrupted", "the run ended early; the figures are those up to there".to_owned()));
        }
        match &self.r#loop {
            Loop::Closed => notes.push((
                "closed loop",
                "each producer waits for its answer, so a stall holds back the appends that would show it; --rate measures those, too"
                    .to_owned(),
            )),
            Loop::Open { target, achieved, reached, unsent_records, .. } => {
                notes.push((
                    "open loop",
                    "latency counts from the moment on the schedule, so it holds what a stall did to those behind it".to_owned(),
                ));
                let share = 100.0 * achieved / float((*target).max(1));
                if *reached {
                    notes.push(("rate", format!("reached: {} of {} records/s", rate(*achieved), count(*target))));
                } else {
                    let mut text = format!("NOT REACHED: {} of {} records/s, {share:.1} %", rate(*achieved), count(*target));
                    if *unsent_records > 0 {
                        let _ = write!(text, "; {} still due at the end, in none of the figures", plural(*unsent_records, "record"));
                    }
                    notes.push(("rate", text));
                }
            }
        }
        if let Some(kept) = &self.kept {
            notes.push(("kept", kept.clone()));
        }
        notes
    }
}

/// Lines of a name and what belongs to it.
#[derive(Default)]
struct Table {
    text: String,
}

const NAME: usize = 13;
const COLUMN: usize = 10;

impl Table {
    fn line(&mut self, name: &str, value: &str) {
        let line = format!("{name:<NAME$}{value}");
        self.text.push_str(line.trim_end());
        self.text.push('\n');
    }

    fn columns(&mut self, name: &str, values: &[String], after: &str) {
        let mut line = String::new();
        for value in values {
            let _ = write!(line, "{value:>COLUMN$}");
        }
        if !after.is_empty() {
            let _ = write!(line, "   {after}");
        }
        self.line(name, &line);
    }

    fn blank(&mut self) {
        self.text.push('\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn histogram(ns: impl IntoIterator<Item = u64>) -> Histogram<u64> {
        let mut histogram = Histogram::new(3).unwrap();
        ns.into_iter().for_each(|ns| histogram.record(ns).unwrap());
        histogram
    }

    fn report() -> Report {
        let append = Latency::of(&histogram((1..=1000).map(|at| at * 1000))).unwrap();
        let floor = Latency::of(&histogram((1..=1000).map(|at| at * 500))).unwrap();
        Report {
            schema: 1,
            version: "0.1.0",
            records: 20_000,
            bytes: 20_000_000,
            seconds: 2.0,
            records_per_second: 10_000.0,
            mib_per_second: 9.54,
            latency_us: Some(append),
            read: None,
            commits: 10_000,
            records_per_commit: 2.0,
            durability: "durable",
            backend: "uring",
            verified_records: 20_000,
            floor_us: Some(floor),
            ratio_to_floor: Some(append.p50 / floor.p50),
            host: Host { kernel: "6.18".to_owned(), cpus: 2, filesystem: "ext4".to_owned(), in_memory: false },
            r#loop: Loop::Closed,
            load: LoadShape {
                topic: "bench".to_owned(),
                partitions: 1,
                writers: "per-partition".into(),
                producers: 2,
                record_bytes: Some(1000),
                input: None,
                keys: 0,
                batch_records: 1,
                linger_us: 0,
                segment_bytes: 1 << 30,
                index_interval: 1,
                warmup_seconds: 1.0,
                seed: 1,
            },
            floor: FloorShape { write_bytes: 4096, method: Some("O_DIRECT + RWF_DSYNC"), error: None },
            verification: VerificationShape {
                wanted: true,
                passed: Some(true),
                complete: true,
                seconds: 0.5,
                differences: 0,
                shown: vec![],
                unanswered_records: 0,
            },
            acknowledged_records: 20_000,
            stored_bytes: 20_560_000,
            rolls: 0,
            syncs: 0,
            interrupted: false,
            error: None,
            kept: None,
            data_dir: "sapwood-bench-data".to_owned(),
        }
    }

    #[test]
    fn the_table_of_a_good_run() {
        let expected = "\
data         topic bench in sapwood-bench-data (ext4), removed afterwards
engine       uring, durable, segments of 1 GiB
load         closed loop, 2 producers to 1 partition, 1 record per append, values of 1,000 B, no keys
host         Linux 6.18, 2 CPUs

throughput   10,000 records/s, 9.54 MiB/s of keys and values
measured     20,000 records, 19.1 MiB in 2.00 s
commits      10,000, 2.00 records each

latency             p50       p90       p99     p99.9       max
  an append      500 µs    900 µs    990 µs    999 µs   1.00 ms
  this disk      250 µs    450 µs    495 µs    500 µs    500 µs   one write of 4 KiB, O_DIRECT + RWF_DSYNC
  ratio           2.00x     2.00x     2.00x     2.00x     2.00x

verified     20,000 records read back in 0.50 s: keys, values, offsets and order as acknowledged

closed loop  each producer waits for its answer, so a stall holds back the appends that would show it; --rate measures those, too
";
        assert_eq!(report().table(), expected);
        assert!(report().passed());
    }

    fn read(mode: &'static str) -> ReadShape {
        ReadShape {
            mode,
            consumers: 2,
            read_mode: "buffered",
            records: 40_000,
            bytes: 40_000_000,
            seconds: 2.0,
            records_per_second: 20_000.0,
            mib_per_second: 19.07,
            latency_us: Latency::of(&histogram((1..=1000).map(|at| at * 2000))),
            error: None,
        }
    }

    #[test]
    fn consumers_have_lines_of_their_own() {
        let mut report = Report { read: Some(read("tail")), ..report() };
        let table = report.table();
        let lines = "\
commits      10,000, 2.00 records each
read         20,000 records/s, 19.1 MiB/s by 2 consumers of each partition at the tail
             40,000 records, 38.1 MiB in 2.00 s
";
        let latency = "  to be seen    1.00 ms   1.80 ms   1.98 ms   2.00 ms   2.00 ms   a record, from its append on\n";
        assert!(table.contains(lines) && table.contains(latency), "{table}");
        for (mode, what) in [("catch-up", "  a batch"), ("random", "  a look-up"), ("time", "  a look-up")] {
            report.read = Some(ReadShape { read_mode: "direct", consumers: 1, ..read(mode) });
            let table = report.table();
            assert!(table.contains(&format!("\n{what}")) && table.contains("1 consumer of each partition "), "{table}");
            assert!(table.contains(", past the page cache\n"), "{table}");
        }
        let json: serde_json::Value = serde_json::from_str(&report.json()).unwrap();
        for field in "mode records bytes seconds records_per_second mib_per_second latency_us".split(' ') {
            assert!(!json["read"][field].is_null(), "{field}");
        }
        for field in ["p50", "p90", "p99", "p999", "max"] {
            assert!(json["read"]["latency_us"][field].as_f64().unwrap() > 0.0, "{field}");
        }
    }

    #[test]
    fn a_consumer_that_failed_fails_the_run() {
        let error = Some("consumer 1 of partition 0: offset 7 came where 6 should".to_owned());
        let report = Report { read: Some(ReadShape { error, latency_us: None, ..read("tail") }), ..report() };
        assert!(!report.passed());
        let table = report.table();
        assert!(
            table.contains("FAILED       consumer 1 of partition 0: offset 7") && table.contains("to be seen none was measured"),
            "{table}"
        );
    }

    #[test]
    fn the_json_has_every_field_of_the_schema() {
        let json: serde_json::Value = serde_json::from_str(&report().json()).unwrap();
        let fields = "schema records bytes seconds records_per_second mib_per_second latency_us commits records_per_commit durability backend verified_records floor_us ratio_to_floor host";
        for field in fields.split(' ') {
            assert!(!json[field].is_null(), "{field}");
        }
        for field in ["p50", "p90", "p99", "p999", "max"] {
            assert!(json["latency_us"][field].as_f64().unwrap() > 0.0, "{field}");
        }
        assert!(json["floor_us"]["p50"].is_f64() && json["floor_us"]["p99"].is_f64());
        for field in ["kernel", "cpus", "filesystem"] {
            assert!(!json["host"][field].is_null(), "{field}");
        }
        assert_eq!((&json["schema"], &json["loop"]["mode"]), (&1.into(), &"closed".into()));
    }

    #[test]
    fn what_went_wrong_is_said() {
        let mut bad = report();
        bad.host.in_memory = true;
        bad.host.filesystem = "tmpfs".to_owned();
        bad.error = Some("the disk is full".to_owned());
        bad.interrupted = true;
        bad.r#loop = Loop::open(1000, 500.0, 40, None);
        bad.verification =
            VerificationShape { passed: Some(false), differences: 3, shown: vec!["offset 7 is wrong".to_owned()], ..bad.verification };
        let table = bad.table();
        for part in [
            "tmpfs, in memory",
            "the disk is full",
            "ended early",
            "NOT REACHED: 500 of 1,000 records/s, 50.0 %",
            "FAILED: 3 differences",
            "offset 7 is wrong",
        ] {
            assert!(table.contains(part), "{part}\n{table}");
        }
        assert!(!bad.passed());
    }

    #[test]
    fn a_rate_is_reached_or_not() {
        let reached = |achieved, unsent| matches!(Loop::open(1000, achieved, unsent, None), Loop::Open { reached: true, .. });
        assert!(reached(1000.0, 0) && reached(990.0, 10));
        assert!(!reached(989.0, 0) && !reached(1000.0, 11));
    }

    #[test]
    fn nothing_measured_is_no_figure() {
        assert!(Latency::of(&histogram([])).is_none());
        let mut none = report();
        (none.latency_us, none.floor_us, none.ratio_to_floor) = (None, None, None);
        assert!(none.table().contains("none was measured"));
        let json: serde_json::Value = serde_json::from_str(&none.json()).unwrap();
        assert!(json["latency_us"].is_null());
    }
}
