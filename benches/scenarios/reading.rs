//! What is measured of reading: a table of perf/README.md, one entry per scenario.
//!
//! Both sides of a round take turns, so that what slows the machine down slows both: passes over a file one by one, look-ups
//! a few at a time. They run on one thread.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use sapwood::{ReadMode, Reader, ReaderConfig};

use crate::filled::{Contents, Filled};
use crate::load::alone;
use crate::reads::{Blocks, Random, Scan, Sequential, evict};
use crate::report::{Measure, Pair, Target};
use crate::scenarios::{Prepare, Prepared, Scenario, measure, often};
use crate::tailing;
use crate::units::{float, nanos, size, to_u64};
use crate::{Context, Outcome, named};

/// Bytes that are asked for at once: more than a reader reads at once.
const READ_BYTES: usize = 1 << 20;
/// Look-ups of one side before the other's turn.
const TURN: usize = 64;

/// Those of reading, in the order of the table.
pub fn all() -> Vec<Scenario> {
    vec![
        scan(
            "read-scan-1kB",
            1_000,
            "MiB/s",
            &[
                (0, "MiB/s : MiB/s of pread and CRC-32 over all of it", Target::AtLeast(0.95)),
                (1_028, "the same : the same loop, CRC-32 per record", Target::None),
            ],
        ),
        pieces("read-pieces"),
        scan("read-scan-100B", 100, "rec/s", &[(128, "records/s : the same loop, CRC-32 per 128 bytes", Target::AtLeast(0.85))]),
        scan_cold("read-scan-cold-1kB"),
        read_ahead("read-ahead"),
        point_warm("read-point-warm", 1, Target::AtMost(1.5)),
        point_warm("read-point-warm-sparse", 16, Target::None),
        point_cold("read-point-cold"),
        tail("read-tail-1x1kB"),
        tails("read-tail-8x1kB", 8),
        time("read-time-100-segments"),
    ]
}

/// What a round of a log that is prepared does.
fn over_log<M, R>(name: &'static str, measures: Vec<Measure>, contents: impl Fn(&Context) -> Contents + 'static, make: M) -> Scenario
where
    M: Fn(&Context, &Arc<Filled>) -> Outcome<(R, String)> + 'static,
    R: FnMut() -> Outcome<Vec<Pair>> + Send + 'static,
{
    let prepare: Prepare = Box::new(move |context| {
        let log = Filled::new(context, contents(context))?;
        let (round, note) = make(context, &log)?;
        let mut held = Held { round, _log: log };
        Ok(Prepared { round: Box::new(move || held.round()), note })
    });
    often(name, measures, prepare)
}

/// Dropped in this order: the readers of a round, then the log with its directory.
struct Held<R> {
    round: R,
    _log: Arc<Filled>,
}

impl<R: FnMut() -> Outcome<Vec<Pair>> + Send> Held<R> {
    fn round(&mut self) -> Outcome<Vec<Pair>> {
        alone(&mut self.round)
    }
}

/// All of a segment, checked and gone through record by record; all of it in the page cache. Beside it loops with a checksum over as many bytes, or
/// over all of each read.
fn scan(name: &'static str, value_bytes: usize, unit: &'static str, beside: &'static [(usize, &'static str, Target)]) -> Scenario {
    let measures = beside.iter().map(|(_, words, target)| measure(words, [unit, unit], *target)).collect();
    let contents = move |context: &Context| Contents::one_segment(context, value_bytes);
    over_log(name, measures, contents, move |context, log| {
        let (time, log) = (context.limit_time, Arc::clone(log));
        let bare = beside.iter().map(|(checksum, ..)| Scan::prepare(&log.log, log.log_bytes, *checksum));
        let mut bare = bare.collect::<Outcome<Vec<Scan>>>()?;
        let pieces: Vec<_> = bare.iter().map(|bare| size(to_u64(bare.piece()))).collect();
        let note = format!("one segment of {}; pread of {}", size(log.log_bytes), pieces.join(", "));
        let amount = if unit == "MiB/s" { float(log.log_bytes) / float(1 << 20) } else { float(log.log_records) };
        let mut reader = log.partition().reader().map_err(named("a reader"))?;
        let round = move || {
            let (mut took, mut engine_took) = (vec![Duration::ZERO; bare.len()], Duration::ZERO);
            let mut passes = 0;
            while took.iter().chain([&engine_took]).any(|took| *took < time) {
                for (took, bare) in took.iter_mut().zip(&mut bare) {
                    *took += timed(|| bare.pass())?;
                }
                engine_took += timed(|| read_all(&mut reader, log.log_records))?;
                passes += 1;
            }
            let rate = |took: Duration| amount * float(passes) / took.as_secs_f64();
            Ok(took.into_iter().map(|took| Pair { engine: rate(engine_took), limit: Some(rate(took)) }).collect())
        };
        Ok((round, note))
    })
}

/// What the default for pieces through the page cache is chosen by.
fn pieces(name: &'static str) -> Scenario {
    const TRIED: [(usize, &str); 5] = [
        (32 << 10, "MiB/s, pieces of 32 KiB : by default"),
        (64 << 10, "MiB/s, pieces of 64 KiB : by default"),
        (128 << 10, "MiB/s, pieces of 128 KiB : by default"),
        (256 << 10, "MiB/s, pieces of 256 KiB : by default"),
        (1 << 20, "MiB/s, pieces of 1 MiB : by default"),
    ];
    let measures = TRIED.iter().map(|(_, words)| measure(words, ["MiB/s", "MiB/s"], Target::None)).collect();
    over_log(
        name,
        measures,
        |context| Contents::one_segment(context, 1_000),
        |_, log| {
            let log = Arc::clone(log);
            log.warm_logs()?;
            let note = format!("the default is {}; all of the log in the page cache", size(to_u64(ReaderConfig::default().piece_bytes)));
            let round = move || {
                let warm_pass = |piece_bytes| -> Outcome<f64> {
                    let config = ReaderConfig { piece_bytes, ..ReaderConfig::default() };
                    let mut reader = log.partition().reader_with(config).map_err(named("a reader"))?;
                    Ok(mib_per_second(&log, timed(|| read_all(&mut reader, log.log_records))?))
                };
                let limit = Some(warm_pass(ReaderConfig::default().piece_bytes)?);
                TRIED.iter().map(|(piece_bytes, _)| Ok(Pair { engine: warm_pass(*piece_bytes)?, limit })).collect()
            };
            Ok((round, note))
        },
    )
}

/// All of a segment that is on the disk alone.
fn scan_cold(name: &'static str) -> Scenario {
    let measures = vec![measure("MiB/s, Direct : MiB/s of the disk at its best depth", ["MiB/s", "MiB/s"], Target::AtLeast(0.9))];
    over_log(
        name,
        measures,
        |context| Contents::one_segment(context, 1_000),
        |_, log| {
            let log = Arc::clone(log);
            let bare = Sequential::prepare(&log.log, log.log_bytes)?;
            let note = format!("one segment of {}, evicted before each pass; the disk: {}", size(log.log_bytes), bare.describe());
            let round = move || {
                log.evict_log()?;
                let limit = bare.pass()?;
                let engine = cold_pass(&log, &direct())?;
                Ok(vec![Pair { engine: mib_per_second(&log, engine), limit: Some(mib_per_second(&log, limit)) }])
            };
            Ok((round, note))
        },
    )
}

/// What the default for reads ahead is chosen by.
fn read_ahead(name: &'static str) -> Scenario {
    const TRIED: [(usize, usize, &str); 8] = [
        (256 << 10, 2, "MiB/s, Direct, 2 x 256 KiB ahead : by default"),
        (256 << 10, 4, "MiB/s, Direct, 4 x 256 KiB ahead : by default"),
        (256 << 10, 8, "MiB/s, Direct, 8 x 256 KiB ahead : by default"),
        (512 << 10, 2, "MiB/s, Direct, 2 x 512 KiB ahead : by default"),
        (1 << 20, 1, "MiB/s, Direct, 1 x 1 MiB ahead : by default"),
        (1 << 20, 2, "MiB/s, Direct, 2 x 1 MiB ahead : by default"),
        (1 << 20, 4, "MiB/s, Direct, 4 x 1 MiB ahead : by default"),
        (2 << 20, 2, "MiB/s, Direct, 2 x 2 MiB ahead : by default"),
    ];
    let measures = TRIED.iter().map(|(_, _, words)| measure(words, ["MiB/s", "MiB/s"], Target::None)).collect();
    over_log(
        name,
        measures,
        |context| Contents::one_segment(context, 1_000),
        |_, log| {
            let log = Arc::clone(log);
            let ReaderConfig { piece_bytes, read_ahead, .. } = direct();
            let note = format!("the default is {read_ahead} x {}; the log is evicted before each pass", size(to_u64(piece_bytes)));
            let round = move || {
                let limit = Some(mib_per_second(&log, cold_pass(&log, &direct())?));
                let tried = TRIED.iter().map(|(piece_bytes, read_ahead, _)| {
                    let config = ReaderConfig { piece_bytes: *piece_bytes, read_ahead: *read_ahead, ..direct() };
                    Ok(Pair { engine: mib_per_second(&log, cold_pass(&log, &config)?), limit })
                });
                tried.collect()
            };
            Ok((round, note))
        },
    )
}

fn direct() -> ReaderConfig {
    ReaderConfig::by(ReadMode::Direct)
}

fn cold_pass(log: &Filled, config: &ReaderConfig) -> Outcome<Duration> {
    log.evict_log()?;
    let mut reader = log.partition().reader_with(config.clone()).map_err(named("a reader"))?;
    timed(|| read_all(&mut reader, log.log_records))
}

fn mib_per_second(log: &Filled, took: Duration) -> f64 {
    float(log.log_bytes) / float(1 << 20) / took.as_secs_f64()
}

/// Single records at random offsets of a segment that is in the page cache, with its index.
fn point_warm(name: &'static str, index_interval: u32, target: Target) -> Scenario {
    let measures = vec![measure("p50 point read : p50 of one pread of 4 KiB", ["µs", "µs"], target)];
    let contents = move |context: &Context| Contents { index_interval, ..Contents::one_segment(context, 1_000) };
    over_log(name, measures, contents, move |context, log| {
        let (time, log) = (context.limit_time, Arc::clone(log));
        log.warm_indexes()?;
        log.warm_logs()?;
        let mut bare = Blocks::open(&log.log, log.log_bytes, false)?;
        let mut reader = log.partition().reader().map_err(named("a reader"))?;
        let mut random = Random(1);
        let note = format!("one segment of {}, index interval {index_interval}; in turns of {TURN}", size(log.log_bytes));
        let round = move || {
            let turns = in_turns(time, TURN, || bare.read(), || read_one(&mut reader, random.below(log.log_records)), || Ok(()));
            Ok(vec![p50s(&turns?)])
        };
        Ok((round, note))
    })
}

/// The same from the disk: with the index there, too, and with the index in the page cache.
fn point_cold(name: &'static str) -> Scenario {
    let words = ["p50 point read, Direct, index evicted : p50 of one direct read of 4 KiB", "the same, index in the page cache"];
    let measures = vec![measure(words[0], ["µs", "µs"], Target::AtMost(2.2)), measure(words[1], ["µs", "µs"], Target::AtMost(1.2))];
    over_log(
        name,
        measures,
        |context| Contents::one_segment(context, 1_000),
        |context, log| {
            let (time, log) = (context.limit_time, Arc::clone(log));
            let mut bare = Blocks::open(&log.log, log.log_bytes, true)?;
            let mut reader = log.partition().reader_with(direct()).map_err(named("a reader"))?;
            let mut random = Random(1);
            let note = format!("one segment of {}, O_DIRECT; one by one in turns", size(log.log_bytes));
            let round = move || {
                let mut lookup = || read_one(&mut reader, random.below(log.log_records));
                let cold = in_turns(time, 1, || bare.read(), &mut lookup, || evict(&log.index()))?;
                log.warm_indexes()?;
                let cached = in_turns(time, 1, || bare.read(), &mut lookup, || Ok(()))?;
                Ok(vec![p50s(&cold), p50s(&cached)])
            };
            Ok((round, note))
        },
    )
}

fn tail(name: &'static str) -> Scenario {
    let measures = vec![
        measure("p50 append to record seen : p50 append without a consumer", ["µs", "µs"], Target::AtMost(1.15)),
        measure("p50 append to record seen : p50 of the same appends", ["µs", "µs"], Target::None),
    ];
    let note = "1 producer, 1 kB; without a consumer, then with one at the tail";
    let prepare: Prepare = Box::new(move |context| {
        let context = context.clone();
        Ok(Prepared { round: Box::new(move || tailing::latency(&context)), note: note.to_owned() })
    });
    often(name, measures, prepare)
}

fn tails(name: &'static str, consumers: usize) -> Scenario {
    let measures = vec![measure("records/s with consumers : without", ["rec/s", "rec/s"], Target::AtLeast(0.7))];
    let prepare: Prepare = Box::new(move |context| {
        let context = context.clone();
        let note = format!("1 producer, 1 kB; without consumers, then with {consumers} at the tail");
        Ok(Prepared { round: Box::new(move || tailing::rate(&context, consumers)), note })
    });
    often(name, measures, prepare)
}

/// The first record at or after a random moment, against the record at a random offset.
fn time(name: &'static str) -> Scenario {
    let measures = vec![measure("p50 time look-up : p50 point read", ["µs", "µs"], Target::AtMost(3.0))];
    let contents = |context: &Context| {
        let (segments, segment_bytes) = if context.trial { (10, 64 << 10) } else { (100, 10 << 20) };
        Contents { segments, segment_bytes, value_bytes: 1_000, index_interval: 1 }
    };
    over_log(name, measures, contents, |context, log| {
        let (time, log) = (context.limit_time, Arc::clone(log));
        log.warm_indexes()?;
        log.warm_logs()?;
        let mut reader = log.partition().reader().map_err(named("a reader"))?;
        let mut seeker = log.partition().reader().map_err(named("a reader"))?;
        let mut timestamp = |offset| reader.read_one(offset).map(|record| record.timestamp).map_err(named("a timestamp"));
        let (first, last) = (timestamp(0)?, timestamp(log.records - 1)?);
        let (mut places, mut moments) = (Random(1), Random(2));
        let note = format!("{} records in segments of {}, in the page cache; in turns of {TURN}", log.records, size(log.log_bytes));
        let round = move || {
            let lookup = || find_time(&mut seeker, first + moments.below(last - first + 1));
            Ok(vec![p50s(&in_turns(time, TURN, || read_one(&mut reader, places.below(log.records)), lookup, || Ok(()))?)])
        };
        Ok((round, note))
    })
}

fn timed(work: impl FnOnce() -> Outcome<()>) -> Outcome<Duration> {
    let begun = Instant::now();
    work()?;
    Ok(begun.elapsed())
}

/// From the first record to the one before `end`, each looked at.
fn read_all(reader: &mut Reader, end: u64) -> Outcome<()> {
    let (mut next, mut bytes) = (0, 0);
    while next < end {
        let records = reader.read(next, READ_BYTES).map_err(named("a read"))?;
        bytes += records.iter().map(|record| record.value.len()).sum::<usize>();
        next = records.next_offset();
    }
    std::hint::black_box(bytes);
    Ok(())
}

fn read_one(reader: &mut Reader, offset: u64) -> Outcome<()> {
    let record = reader.read_one(offset).map_err(named("a point read"))?;
    std::hint::black_box(record.value.len());
    Ok(())
}

fn find_time(reader: &mut Reader, time: u64) -> Outcome<()> {
    std::hint::black_box(reader.offset_for_time(time).map_err(named("a time look-up"))?);
    Ok(())
}

/// What each of a number of calls took, in nanoseconds.
struct Turns {
    limit: Histogram<u64>,
    engine: Histogram<u64>,
}

/// The limit a few times, then the engine as often, and so on, each for so long; `before` comes before each of the engine's calls, outside the time.
fn in_turns(
    time: Duration,
    turn: usize,
    mut limit: impl FnMut() -> Outcome<()>,
    mut engine: impl FnMut() -> Outcome<()>,
    before: impl Fn() -> Outcome<()>,
) -> Outcome<Turns> {
    let new = || Histogram::new(3).expect("3 significant digits are allowed");
    let mut turns = Turns { limit: new(), engine: new() };
    let mut took = [Duration::ZERO; 2];
    while took.iter().min().is_some_and(|least| *least < time) {
        for _ in 0..turn {
            took[0] += note(&mut turns.limit, &mut limit)?;
        }
        for _ in 0..turn {
            before()?;
            took[1] += note(&mut turns.engine, &mut engine)?;
        }
    }
    Ok(turns)
}

fn note(histogram: &mut Histogram<u64>, call: impl FnOnce() -> Outcome<()>) -> Outcome<Duration> {
    let took = timed(call)?;
    histogram.record(nanos(took)).expect("a histogram that grows takes every number");
    Ok(took)
}

fn p50s(turns: &Turns) -> Pair {
    let p50 = |histogram: &Histogram<u64>| float(histogram.value_at_quantile(0.5)) / 1e3;
    Pair { engine: p50(&turns.engine), limit: Some(p50(&turns.limit)) }
}
