//! A log to read: sealed segments of records of one size.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use sapwood::{Partition, TopicConfig};

use crate::load::{Engine, make_batch};
use crate::units::to_u64;
use crate::{Context, Outcome, named, reads};

/// So much is appended behind what is read, so that nothing of that is in the engine's memory any more.
const BEHIND: u64 = 8 << 20;

/// What there is to be.
#[derive(Debug, Clone, Copy)]
pub struct Contents {
    pub segments: u64,
    pub segment_bytes: u64,
    pub value_bytes: usize,
    pub index_interval: u32,
}

impl Contents {
    /// One segment of a GiB; in a trial of 4 MiB.
    pub fn one_segment(context: &Context, value_bytes: usize) -> Self {
        Self { segments: 1, segment_bytes: if context.trial { 4 << 20 } else { 1 << 30 }, value_bytes, index_interval: 1 }
    }
}

/// Sealed segments, and an active one behind them, which nobody reads.
pub struct Filled {
    engine: Engine,
    /// The first segment's log.
    pub log: PathBuf,
    /// Bytes of that.
    pub log_bytes: u64,
    /// Records of that.
    pub log_records: u64,
    /// Records of all sealed segments.
    pub records: u64,
}

impl Filled {
    /// Fills it through the engine, durably: past the page cache, so that nothing of it is there.
    pub fn new(context: &Context, contents: Contents) -> Outcome<Arc<Self>> {
        let Contents { segments, segment_bytes, value_bytes, index_interval } = contents;
        let engine = Engine::open(context, TopicConfig { segment_bytes, index_interval, ..TopicConfig::default() })?;
        let partition = engine.partition(0);
        let value = vec![7; value_bytes];
        append_while(partition, &value, || partition.stats().rolls < segments)?;
        let bases = bases(partition.path())?;
        let sealed = partition.stats().bytes;
        append_while(partition, &value, || partition.stats().bytes < sealed + BEHIND)?;
        let (Some(log_records), Some(records)) = (bases.get(1).copied(), bases.last().copied()) else {
            return Err("there are no two segments after a roll".to_owned());
        };
        let log = segment(partition.path(), 0, "log");
        // All records are alike, and a sealed log ends with its last one.
        let log_bytes = log_records * to_u64(value_bytes + sapwood::HEADER_BYTES);
        Ok(Arc::new(Self { log, log_bytes, log_records, records, engine }))
    }

    /// Where it is.
    pub fn partition(&self) -> &Partition {
        self.engine.partition(0)
    }

    /// An index file of the first segment.
    pub fn index(&self) -> PathBuf {
        self.log.with_extension("index")
    }

    /// Reads index files into the page cache.
    pub fn warm_indexes(&self) -> Outcome<()> {
        for base in bases(self.partition().path())? {
            for extension in ["index", "timeindex"] {
                std::fs::read(segment(self.partition().path(), base, extension)).map_err(named("an index"))?;
            }
        }
        Ok(())
    }

    /// Reads all logs into the page cache.
    pub fn warm_logs(&self) -> Outcome<()> {
        for base in bases(self.partition().path())? {
            std::fs::read(segment(self.partition().path(), base, "log")).map_err(named("a log"))?;
        }
        Ok(())
    }

    /// Forgets what the page cache has of the first log.
    pub fn evict_log(&self) -> Outcome<()> {
        reads::evict(&self.log)
    }
}

/// Four batches at a time.
fn append_while(partition: &Partition, value: &[u8], more: impl Fn() -> bool) -> Outcome<()> {
    while more() {
        let tickets: Vec<_> =
            (0..4).map(|_| partition.append(make_batch(partition, value, 256)?).map_err(named("append"))).collect::<Result<_, _>>()?;
        for ticket in tickets {
            ticket.wait().map_err(named("append"))?;
        }
    }
    Ok(())
}

fn segment(dir: &Path, base: u64, extension: &str) -> PathBuf {
    dir.join(format!("{base:020}.{extension}"))
}

/// Of all segments, in order.
fn bases(dir: &Path) -> Outcome<Vec<u64>> {
    let mut bases = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(named("the partition's directory"))? {
        let name = entry.map_err(named("the partition's directory"))?.file_name();
        bases.extend(name.to_str().and_then(|name| name.strip_suffix(".log")?.parse::<u64>().ok()));
    }
    bases.sort_unstable();
    Ok(bases)
}
