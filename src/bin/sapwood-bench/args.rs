//! The command line: names, defaults and limits of the flags.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use sapwood::{Backend, ReadMode, Writers};

use crate::units::{parse_duration, parse_size, parse_some_duration};

/// What an append survives, by its name on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DurabilityArg {
    /// Answered when it is on the device
    Durable,
    /// Answered when the kernel has it, synced every 16 MiB or 100 ms
    Interval,
    /// Answered when the kernel has it, which writes it when it likes
    Os,
}

impl DurabilityArg {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Durable => "durable",
            Self::Interval => "interval",
            Self::Os => "os",
        }
    }
}

/// Which system interface, by its name on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BackendArg {
    /// io_uring where the kernel grants it, else posix
    Auto,
    /// io_uring, or an error
    Uring,
    /// pwritev2 and pread
    Posix,
}

impl From<BackendArg> for Backend {
    fn from(arg: BackendArg) -> Self {
        match arg {
            BackendArg::Auto => Self::Auto,
            BackendArg::Uring => Self::Uring,
            BackendArg::Posix => Self::Posix,
        }
    }
}

/// What consumers do, by its name on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ReadArg {
    /// Read on at the end of the log, beside the producers. Latency is that of a record, from where its append's latency counts from until
    /// the consumer has it
    Tail,
    /// Read all that was written, once, after the load: how fast a consumer that was away is back. Latency is that of a batch of up to
    /// 256 KiB
    CatchUp,
    /// Look up records at random offsets, after the load, for --duration, and --records in all. Latency is that of a look-up, the record
    /// read
    Random,
    /// Look up the first record at or after a random moment, else as random
    Time,
}

impl ReadArg {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tail => "tail",
            Self::CatchUp => "catch-up",
            Self::Random => "random",
            Self::Time => "time",
        }
    }
}

/// How consumers get at the bytes, by its name on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ReadModeArg {
    /// Through the page cache
    Buffered,
    /// Past it, where the file system can
    Direct,
}

impl ReadModeArg {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Buffered => "buffered",
            Self::Direct => "direct",
        }
    }
}

impl From<ReadModeArg> for ReadMode {
    fn from(arg: ReadModeArg) -> Self {
        match arg {
            ReadModeArg::Buffered => Self::Buffered,
            ReadModeArg::Direct => Self::Direct,
        }
    }
}

/// `per-partition` or `shared:N`.
fn parse_writers(text: &str) -> Result<Writers, String> {
    let threads = text.strip_prefix("shared:").and_then(|threads| threads.parse().ok());
    match (text, threads) {
        ("per-partition", _) => Ok(Writers::PerPartition),
        (_, Some(threads)) if (1..=1024).contains(&threads) => Ok(Writers::Shared(threads)),
        _ => Err("per-partition, or shared:N with N from 1 to 1024".to_owned()),
    }
}

/// The name on the command line.
pub fn writers_name(writers: Writers) -> String {
    match writers {
        Writers::PerPartition => "per-partition".to_owned(),
        Writers::Shared(threads) => format!("shared:{threads}"),
    }
}

/// Puts load on a sapwood commit log, reads every acknowledged record back, and reports.
///
/// Without anything: one producer appends 1 kB records for 10 s, each durable before the next, into a directory
/// of its own below the current one; then each record is read back and compared, and the directory is removed.
#[derive(Debug, Parser)]
#[command(name = "sapwood-bench", version, args_conflicts_with_subcommands = true, after_long_help = EXIT_CODES)]
pub struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    run: RunArgs,
}

const EXIT_CODES: &str = "Exit codes: 0 the run and its verification went well, 1 an append or a consumer failed or a record was not as it was written, 2 wrong usage.";

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Append, measure, read back and compare (what happens without a command, too)
    #[command(after_long_help = EXIT_CODES)]
    Run(Box<RunArgs>),
    /// Measure the disk's own limit, without the engine: durable writes of 4 KiB to 1 MiB, one at a time and eight at a time
    #[command(after_long_help = LIMITS_EXIT_CODES)]
    Limits(LimitsArgs),
}

const LIMITS_EXIT_CODES: &str = "Exit codes: 0 measured (what this disk refuses is said in its row), 1 a write failed, 2 wrong usage.";

impl Cli {
    /// What to do. Flags without a command are those of a run.
    pub fn into_command(self) -> Command {
        self.command.unwrap_or_else(|| Command::Run(Box::new(self.run)))
    }
}

/// The flags of `limits`.
#[derive(Debug, Clone, Args)]
pub struct LimitsArgs {
    /// Where to write, and so which disk; the files are removed afterwards, and the directory if this run made it
    /// [default: a new directory sapwood-bench-data below the current one]
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// How long to measure each size, method and depth, e.g. 2s, 500ms
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = parse_some_duration)]
    pub duration: Duration,
    /// Write the figures to this file, too
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// The flags of `run`.
#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    /// Where the log lies; made if it is not there. Afterwards the topic is deleted again, and the directory if this run
    /// made it [default: a new directory sapwood-bench-data below the current one]
    #[arg(long, value_name = "DIR", help_heading = "Log")]
    pub data_dir: Option<PathBuf>,
    /// The topic to make; none of that name may be there
    #[arg(long, value_name = "NAME", default_value = "bench", help_heading = "Log")]
    pub topic: String,
    /// Partitions of the topic
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65_536), help_heading = "Log")]
    pub partitions: u32,
    /// Writer threads: per-partition, or shared:N for N that all partitions share
    #[arg(long, value_name = "HOW", default_value = "per-partition", value_parser = parse_writers, help_heading = "Log")]
    pub writers: Writers,
    /// What an answered append survives
    #[arg(long, value_enum, default_value_t = DurabilityArg::Durable, help_heading = "Log")]
    pub durability: DurabilityArg,
    /// Which system interface carries reads and writes
    #[arg(long, value_enum, default_value_t = BackendArg::Auto, help_heading = "Log")]
    pub backend: BackendArg,
    /// How long a commit waits for company, in microseconds
    #[arg(long, value_name = "US", default_value_t = 0, help_heading = "Log")]
    pub linger_us: u64,
    /// Size at which a segment is full
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = parse_size, help_heading = "Log")]
    pub segment_bytes: u64,
    /// Every how many records one is entered in the indexes
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..), help_heading = "Log")]
    pub index_interval: u32,

    /// Threads that append
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024), help_heading = "Load")]
    pub producers: u32,
    /// Size of each record's value
    #[arg(long, value_name = "SIZE", default_value = "1000", value_parser = parse_size, conflicts_with = "input", help_heading = "Load")]
    pub record_bytes: u64,
    /// Distinct keys, key-0, key-1 and so on in turn; 0: records without a key, partitions in turn
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Load")]
    pub keys: u64,
    /// Append the lines of this file instead, any bytes, again and again; it is held in memory
    #[arg(long, value_name = "FILE", help_heading = "Load")]
    pub input: Option<PathBuf>,
    /// Records per append
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1 << 24), help_heading = "Load")]
    pub batch_records: u64,
    /// Open loop: so many records per second over all producers, on a fixed schedule; latency counts from the moment on the
    /// schedule, so that a stall is not hidden [default: closed loop, each producer waits for its append before the next]
    #[arg(long, value_name = "RECORDS/S", value_parser = clap::value_parser!(u64).range(1..=1_000_000_000), help_heading = "Load")]
    pub rate: Option<u64>,
    /// How long to measure, e.g. 10s, 500ms, 2m [default: 10s, or until --records are done]
    #[arg(long, value_name = "TIME", value_parser = parse_some_duration, help_heading = "Load")]
    pub duration: Option<Duration>,
    /// How many records to measure, over all producers
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Load")]
    pub records: Option<u64>,
    /// Load before the measured one: verified, but left out of the figures [default: 1s, or 0 with --records]
    #[arg(long, value_name = "TIME", value_parser = parse_duration, help_heading = "Load")]
    pub warmup: Option<Duration>,
    /// What the values are made from; the same seed makes the same values
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Load")]
    pub seed: u64,

    /// Consumers of each partition, a thread each; what they read is checked for whole offsets and checksums, and a failure fails the
    /// run [default: none, or 1 with --read]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024), help_heading = "Reading")]
    pub consumers: Option<u32>,
    /// What they do. After the load the log lies as that left it: durable appends go past the page cache, so that what is read first
    /// comes from the disk [default: tail]
    #[arg(long, value_enum, value_name = "WHAT", help_heading = "Reading")]
    pub read: Option<ReadArg>,
    /// How they get at the bytes; tails always through memory and the page cache
    #[arg(long, value_enum, value_name = "MODE", default_value_t = ReadModeArg::Buffered, help_heading = "Reading")]
    pub read_mode: ReadModeArg,

    /// Read every acknowledged record back and compare bytes, offsets and order (the default)
    #[arg(long, overrides_with = "no_verify", help_heading = "Result")]
    verify: bool,
    /// Do not read back
    #[arg(long, overrides_with = "verify", help_heading = "Result")]
    no_verify: bool,
    /// Leave the topic where it is
    #[arg(long, help_heading = "Result")]
    pub keep: bool,
    /// Write the figures to this file, too
    #[arg(long, value_name = "FILE", help_heading = "Result")]
    pub json: Option<PathBuf>,
}

impl RunArgs {
    /// Whether to read back and compare.
    pub fn verify(&self) -> bool {
        self.verify || !self.no_verify
    }

    /// What consumers do, and how many of each partition do it, if there are any.
    pub fn consumers(&self) -> Option<(ReadArg, u32)> {
        match (self.read, self.consumers) {
            (None, None) => None,
            (read, consumers) => Some((read.unwrap_or(ReadArg::Tail), consumers.unwrap_or(1))),
        }
    }

    /// Load that is not measured comes first, for so long.
    pub fn warmup(&self) -> Duration {
        self.warmup.unwrap_or(if self.records.is_some() { Duration::ZERO } else { Duration::from_secs(1) })
    }

    /// The measured load ends after so long, if not before.
    pub fn duration(&self) -> Option<Duration> {
        self.duration.or(if self.records.is_some() { None } else { Some(Duration::from_secs(10)) })
    }
}

#[cfg(test)]
impl Cli {
    /// The flags of the run, wherever they stood.
    pub fn into_run(self) -> RunArgs {
        match self.into_command() {
            Command::Run(run) => *run,
            Command::Limits(_) => panic!("no run"),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(args: &[&str]) -> Result<RunArgs, clap::Error> {
        Cli::try_parse_from([&["sapwood-bench"], args].concat()).map(Cli::into_run)
    }

    fn parse_limits(args: &[&str]) -> Result<LimitsArgs, clap::Error> {
        match Cli::try_parse_from([&["sapwood-bench", "limits"], args].concat())?.into_command() {
            Command::Limits(limits) => Ok(limits),
            Command::Run(_) => panic!("limits is no run"),
        }
    }

    #[test]
    fn limits_has_flags_of_its_own() {
        let limits = parse_limits(&[]).unwrap();
        assert_eq!((limits.duration, limits.data_dir, limits.json), (Duration::from_secs(2), None, None));
        assert_eq!(parse_limits(&["--duration", "50ms"]).unwrap().duration, Duration::from_millis(50));
        for args in [&["--duration", "0s"][..], &["--producers", "2"]] {
            assert!(parse_limits(args).is_err(), "{args:?}");
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn nothing_is_a_ten_second_run_that_verifies() {
        for args in [&[][..], &["run"]] {
            let run = parse(args).unwrap();
            assert_eq!((run.duration(), run.warmup(), run.records), (Some(Duration::from_secs(10)), Duration::from_secs(1), None));
            assert_eq!((run.producers, run.partitions, run.record_bytes, run.batch_records), (1, 1, 1000, 1));
            assert!(run.verify() && !run.keep && run.rate.is_none());
        }
    }

    #[test]
    fn flags_stand_with_and_without_the_command() {
        for args in [&["--records", "7", "--no-verify"][..], &["run", "--records", "7", "--no-verify"]] {
            let run = parse(args).unwrap();
            assert_eq!((run.records, run.duration(), run.warmup()), (Some(7), None, Duration::ZERO));
            assert!(!run.verify());
        }
        assert!(parse(&["--records", "7", "run"]).is_err());
    }

    #[test]
    fn the_last_of_verify_and_no_verify_counts() {
        assert!(parse(&["--no-verify", "--verify"]).unwrap().verify());
        assert!(!parse(&["--verify", "--no-verify"]).unwrap().verify());
    }

    #[test]
    fn one_word_makes_consumers() {
        let consumers = |args: &[&str]| parse(args).unwrap().consumers();
        assert_eq!(consumers(&[]), None);
        assert_eq!(consumers(&["--consumers", "3"]), Some((ReadArg::Tail, 3)));
        for read in ReadArg::value_variants() {
            assert_eq!(consumers(&["--read", read.name()]), Some((*read, 1)));
            assert_eq!(consumers(&["--read", read.name(), "--consumers", "2"]), Some((*read, 2)));
        }
    }

    #[test]
    fn writers_go_by_the_names_that_the_report_gives_them() {
        for writers in [Writers::PerPartition, Writers::Shared(1), Writers::Shared(1024)] {
            assert_eq!(parse(&["--writers", &writers_name(writers)]).unwrap().writers, writers);
        }
    }

    #[test]
    fn wrong_values_are_refused() {
        let wrong = [
            ["--producers", "0"],
            ["--partitions", "0"],
            ["--partitions", "65537"],
            ["--batch-records", "0"],
            ["--rate", "0"],
            ["--records", "0"],
            ["--duration", "0s"],
            ["--duration", "soon"],
            ["--record-bytes", "1k"],
            ["--durability", "maybe"],
            ["--backend", "sim"],
            ["--writers", "shared"],
            ["--writers", "shared:0"],
            ["--writers", "shared:1025"],
            ["--writers", "2"],
            ["--index-interval", "0"],
            ["--consumers", "0"],
            ["--read", "backwards"],
            ["--read-mode", "mapped"],
        ];
        for args in wrong {
            assert!(parse(&args).is_err(), "{args:?}");
        }
    }
}
