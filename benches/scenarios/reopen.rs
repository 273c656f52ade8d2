//! Opening after a crash, and after a clean close.
//!
//! A child process, this program again, fills the active segment and kills itself. The page cache is left as that leaves it; the
//! log was written past it.

use std::ops::Range;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use rustix::process::{Signal, getpid, kill_process};
use sapwood::{Backend, Broker, BrokerConfig, TopicConfig};

use crate::load::{make_batch, open};
use crate::report::Pair;
use crate::{Context, Outcome, limit, named};

/// The first argument of the child: directory, bytes and backend follow.
pub const FILL: &str = "--fill";

/// Fills a segment, kills the process that did, reads what is past the checkpoint, opens, closes, opens.
pub fn round(context: &Context, bytes: u64) -> Outcome<Vec<Pair>> {
    let dir = tempfile::tempdir_in(&context.dir).map_err(named("a directory for the engine"))?;
    let program = std::env::current_exe().map_err(named("this program's path"))?;
    let mut child = Command::new(program);
    child.arg(FILL).arg(dir.path()).arg(bytes.to_string()).arg(backend_name(context.backend));
    let ended = child.status().map_err(named("start a child process"))?;
    if ended.signal() != Some(Signal::KILL.as_raw()) {
        return Err(format!("the child that fills the segment ended otherwise than by SIGKILL: {ended}"));
    }
    let log = only_log(dir.path())?;
    let reading = limit::read(&log, &past_checkpoint(&log)?)?;
    let config = BrokerConfig { backend: context.backend, ..BrokerConfig::default() };
    let begun = Instant::now();
    let broker = Broker::open(dir.path(), config.clone()).map_err(named("open after SIGKILL"))?;
    let ready = begun.elapsed();
    broker.close().map_err(named("close"))?;
    let begun = Instant::now();
    let broker = Broker::open(dir.path(), config).map_err(named("open after a clean close"))?;
    let clean = begun.elapsed();
    broker.close().map_err(named("close"))?;
    let millis = |seconds: f64| seconds * 1e3;
    Ok(vec![
        Pair { engine: millis(ready.as_secs_f64()), limit: Some(millis(reading.as_secs_f64())) },
        Pair { engine: millis(clean.as_secs_f64()), limit: None },
    ])
}

/// What opening cannot do without reading: from where the newest checkpoint says that the log was durable (docs/format.md has the
/// layout) to the end of the file, room that was allocated ahead of the records included.
fn past_checkpoint(log: &Path) -> Outcome<Range<u64>> {
    let len = std::fs::metadata(log).map_err(named("the log"))?.len();
    let slots = std::fs::read(log.with_file_name("checkpoint")).unwrap_or_default();
    let word = |slot: &[u8], at: usize| slot.get(at..at + 8)?.try_into().ok().map(u64::from_be_bytes);
    let newest = slots.chunks(4096).filter_map(|slot| Some((word(slot, 16)?, word(slot, 32)?))).max();
    let position = newest.map_or(0, |(_, position)| position);
    // Past the page cache whole blocks are read.
    Ok(position - position % 4096..len)
}

/// The child. It does not return.
pub fn fill(mut words: impl Iterator<Item = String>) -> Outcome<()> {
    let mut word = || words.next().ok_or("the child wants a directory, bytes and a backend");
    let (dir, bytes, backend) = (word()?, word()?.parse::<u64>().map_err(named("bytes"))?, parse_backend(&word()?)?);
    let topic = TopicConfig { segment_bytes: bytes.saturating_mul(2), ..TopicConfig::default() };
    let (_broker, partitions) = open(Path::new(&dir), BrokerConfig { backend, ..BrokerConfig::default() }, topic)?;
    let partition = partitions.first().ok_or("no partition")?;
    let value = vec![7; 1_000];
    while partition.stats().bytes < bytes {
        let tickets: Vec<_> =
            (0..4).map(|_| partition.append(make_batch(partition, &value, 256)?).map_err(named("append"))).collect::<Result<_, _>>()?;
        for ticket in tickets {
            ticket.wait().map_err(named("append"))?;
        }
    }
    kill_process(getpid(), Signal::KILL).map_err(named("SIGKILL"))
}

/// The log file somewhere below a directory, of which there is one.
fn only_log(dir: &Path) -> Outcome<PathBuf> {
    let mut logs = Vec::new();
    let mut dirs = vec![dir.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(&dir).map_err(named("the data directory"))? {
            let path = entry.map_err(named("the data directory"))?.path();
            if path.is_dir() {
                dirs.push(path);
            } else if path.extension().is_some_and(|extension| extension == "log") {
                logs.push(path);
            }
        }
    }
    match <[PathBuf; 1]>::try_from(logs) {
        Ok([log]) => Ok(log),
        Err(logs) => Err(format!("{} log files where there should be one", logs.len())),
    }
}

/// As on the command line.
pub fn backend_name(backend: Backend) -> &'static str {
    match backend {
        Backend::Auto => "auto",
        Backend::Uring => "uring",
        Backend::Posix => "posix",
    }
}

/// The other way round.
pub fn parse_backend(word: &str) -> Outcome<Backend> {
    let all = [Backend::Auto, Backend::Uring, Backend::Posix];
    all.into_iter()
        .find(|backend| backend_name(*backend) == word)
        .ok_or_else(|| format!("no backend is called {word:?}; there are uring, posix and auto"))
}
