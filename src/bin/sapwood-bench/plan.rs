//! From the command line to a run that can be done: everything is checked here, before anything is made.

use std::path::Path;
use std::time::Duration;

use sapwood::{BrokerConfig, Durability, HEADER_BYTES, TopicConfig};

use crate::Stop;
use crate::args::{DurabilityArg, ReadArg, ReadModeArg, RunArgs};
use crate::payload::{Lines, Payload};
use crate::schedule::Shape;
use crate::units::to_u64;

/// What `--durability interval` stands for.
const INTERVAL: Durability = Durability::Interval { bytes: 16 << 20, time: Duration::from_millis(100) };

/// A checked run.
#[derive(Debug)]
pub struct Plan {
    /// What the records hold.
    pub payload: Payload,
    /// How many of them, and by whom.
    pub shape: Shape,
    /// Open loop, with so many records per second.
    pub rate: Option<u64>,
    /// The engine's settings.
    pub broker: BrokerConfig,
    /// The topic's settings.
    pub topic: TopicConfig,
    /// Stored bytes of the average append.
    pub append_bytes: u64,
}

impl Plan {
    /// Checks what was asked for, and reads the input file.
    pub fn new(args: &RunArgs) -> Result<Self, Stop> {
        let payload = match &args.input {
            Some(path) => Payload::lines(Lines::read(path).map_err(Stop::Usage)?, args.keys, args.seed),
            None => Payload::noise(args.record_bytes, args.keys, args.seed),
        };
        if payload.largest() > u64::from(u32::MAX) {
            return Err(Stop::Usage(format!(
                "a record of {} bytes of key and value; the format holds at most {}",
                payload.largest(),
                u32::MAX
            )));
        }
        let header = to_u64(HEADER_BYTES);
        let topic = topic(args, payload.largest_batch(args.batch_records, header));
        topic.validate().map_err(|error| Stop::Usage(hint(&error.to_string())))?;
        check_json(args.json.as_deref())?;
        check_reading(args)?;
        Ok(Self {
            shape: Shape {
                producers: args.producers,
                batch: args.batch_records,
                warmup: args.warmup(),
                duration: args.duration(),
                records: args.records,
            },
            rate: args.rate,
            broker: BrokerConfig { backend: args.backend.into(), writers: args.writers, ..BrokerConfig::default() },
            topic,
            append_bytes: payload.average().saturating_add(header).saturating_mul(args.batch_records),
            payload,
        })
    }
}

fn topic(args: &RunArgs, largest_batch: u64) -> TopicConfig {
    let default = TopicConfig::default();
    TopicConfig {
        partitions: args.partitions,
        segment_bytes: args.segment_bytes,
        index_interval: args.index_interval,
        durability: match args.durability {
            DurabilityArg::Durable => Durability::Durable,
            DurabilityArg::Interval => INTERVAL,
            DurabilityArg::Os => Durability::Os,
        },
        linger_us: args.linger_us,
        max_batch_bytes: default.max_batch_bytes.max(largest_batch),
        ..default
    }
}

/// The one setting that has no flag of its own is explained by those that it follows from.
fn hint(error: &str) -> String {
    if error.starts_with("max_batch_bytes") {
        return format!("the largest append, of --batch-records records, is too large: {error}");
    }
    error.to_owned()
}

/// A word that would be without effect is a mistake.
fn check_reading(args: &RunArgs) -> Result<(), Stop> {
    let why = match args.consumers() {
        _ if args.read_mode == ReadModeArg::Buffered => return Ok(()),
        None => "there are no --consumers",
        Some((ReadArg::Tail, _)) => "the end of the log is in memory, and tails read past the page cache never",
        Some(_) => return Ok(()),
    };
    Err(Stop::Usage(format!("--read-mode {}: {why}", args.read_mode.name())))
}

/// After a long run is too late to learn that the figures cannot be written.
pub fn check_json(path: Option<&Path>) -> Result<(), Stop> {
    let Some(path) = path else { return Ok(()) };
    if path.is_dir() {
        return Err(Stop::Usage(format!("--json {path:?} is a directory")));
    }
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    match parent {
        Some(parent) if !parent.is_dir() => Err(Stop::Usage(format!("--json {path:?}: there is no directory {parent:?}"))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::Cli;

    fn plan(args: &[&str]) -> Result<Plan, String> {
        let args = Cli::try_parse_from([&["sapwood-bench"], args].concat()).unwrap().into_run();
        Plan::new(&args).map_err(|stop| {
            assert!(matches!(stop, Stop::Usage(_)));
            stop.to_string()
        })
    }

    #[test]
    fn the_default_is_a_valid_run() {
        let plan = plan(&[]).unwrap();
        assert_eq!((plan.append_bytes, plan.topic.max_batch_bytes), (1028, TopicConfig::default().max_batch_bytes));
    }

    #[test]
    fn the_batch_limit_follows_what_is_asked_for() {
        let plan = plan(&["--record-bytes", "64MiB", "--batch-records", "4"]).unwrap();
        assert_eq!(plan.topic.max_batch_bytes, 4 * ((64 << 20) + 28));
    }

    #[test]
    fn what_cannot_be_done_is_said() {
        let wrong: [(&[&str], &str); 10] = [
            (&["--record-bytes", "4GiB"], "at most 4294967295"),
            (&["--record-bytes", "4294967295", "--keys", "1"], "at most 4294967295"),
            (&["--record-bytes", "1GiB", "--batch-records", "5"], "--batch-records"),
            (&["--segment-bytes", "0"], "segment_bytes"),
            (&["--linger-us", "60000001"], "linger_us"),
            (&["--input", "/nonexistent"], "/nonexistent"),
            (&["--input", "/dev/null"], "empty"),
            (&["--json", "/nonexistent/figures.json"], "/nonexistent"),
            (&["--read-mode", "direct"], "no --consumers"),
            (&["--read-mode", "direct", "--consumers", "1"], "tails"),
        ];
        for (args, part) in wrong {
            let error = plan(args).unwrap_err();
            assert!(error.contains(part), "{args:?}: {error}");
        }
    }
}
