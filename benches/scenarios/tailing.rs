//! From the append to the consumer: one producer, and none, one or several consumers at the tail.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use sapwood::{Tail, TopicConfig};

use crate::load::{Engine, alone, make_batch};
use crate::report::Pair;
use crate::units::{float, nanos, to_u64};
use crate::{Context, Outcome, named};

const VALUE_BYTES: usize = 1_000;
const READ_BYTES: usize = 1 << 20;
/// How often a consumer to which nothing comes looks whether that was all.
const LOOK: Duration = Duration::from_millis(20);

/// One durable append after another, and what consumers saw of them.
struct Run {
    /// Of each append, in nanoseconds.
    appended: Histogram<u64>,
    /// Of each append and consumer, from the call until the record was seen.
    seen: Histogram<u64>,
    per_second: f64,
}

/// From the call until one consumer has the record: beside the append of a load without one, and beside the same appends.
pub fn latency(context: &Context) -> Outcome<Vec<Pair>> {
    let without = run(context, 0)?;
    let with = run(context, 1)?;
    let p50 = |histogram: &Histogram<u64>| float(histogram.value_at_quantile(0.5)) / 1e3;
    let pair = |appended| Pair { engine: p50(&with.seen), limit: Some(p50(appended)) };
    Ok(vec![pair(&without.appended), pair(&with.appended)])
}

/// What consumers leave of the producer's rate.
pub fn rate(context: &Context, consumers: usize) -> Outcome<Vec<Pair>> {
    let without = run(context, 0)?;
    let with = run(context, consumers)?;
    Ok(vec![Pair { engine: with.per_second, limit: Some(without.per_second) }])
}

fn run(context: &Context, consumers: usize) -> Outcome<Run> {
    let engine = Engine::open(context, TopicConfig::default())?;
    let partition = engine.partition(0);
    let tails: Vec<Tail> = (0..consumers).map(|_| partition.tail(0)).collect::<Result<_, _>>().map_err(named("a tail"))?;
    // How many records there will be; known when the last one was appended.
    let total = AtomicU64::new(u64::MAX);
    let (appends, seen) = thread::scope(|scope| {
        let threads: Vec<_> = tails.into_iter().map(|tail| scope.spawn(|| follow(tail, &total))).collect();
        let appends = alone(|| append(context, &engine));
        total.store(appends.as_ref().map_or(0, |done| to_u64(done.appends.len())), Ordering::Release);
        let seen: Vec<_> =
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect();
        (appends, seen)
    });
    engine.close()?;
    let (appends, seen) = (appends?, seen.into_iter().collect::<Outcome<Vec<_>>>()?);
    summary(context, &appends, &seen)
}

struct Appends {
    start: Instant,
    /// Beginning and end of each, which gets the offset of its place.
    appends: Vec<(Instant, Instant)>,
}

fn append(context: &Context, engine: &Engine) -> Outcome<Appends> {
    let partition = engine.partition(0);
    let value = vec![7; VALUE_BYTES];
    let mut appends = Vec::with_capacity(1 << 16);
    let start = Instant::now();
    loop {
        let batch = make_batch(partition, &value, 1)?;
        let begun = Instant::now();
        // One append is measured, however slow it is.
        let measured = appends.last().is_some_and(|(last, _)| *last >= start + context.warmup);
        if measured && begun >= start + context.warmup + context.engine_time {
            return Ok(Appends { start, appends });
        }
        partition.append_and_wait(batch).map_err(named("append"))?;
        appends.push((begun, Instant::now()));
    }
}

/// When each record came, which is that of its place.
fn follow(mut tail: Tail, total: &AtomicU64) -> Outcome<Vec<Instant>> {
    let mut seen = Vec::with_capacity(1 << 16);
    while tail.position() < total.load(Ordering::Acquire) {
        let Some(records) = tail.next_batch(READ_BYTES, Some(LOOK)).map_err(named("a tail"))? else { continue };
        let now = Instant::now();
        seen.extend(records.iter().map(|_| now));
    }
    Ok(seen)
}

fn summary(context: &Context, done: &Appends, consumers: &[Vec<Instant>]) -> Outcome<Run> {
    let new = || Histogram::new(3).expect("3 significant digits are allowed");
    let add = |histogram: &mut Histogram<u64>, from: Instant, to: Instant| {
        histogram.record(nanos(to.saturating_duration_since(from))).expect("a histogram that grows takes every number");
    };
    let mut run = Run { appended: new(), seen: new(), per_second: 0.0 };
    let start = done.start + context.warmup;
    let mut last = start;
    for (place, (begun, ended)) in done.appends.iter().enumerate().filter(|(_, (begun, _))| *begun >= start) {
        add(&mut run.appended, *begun, *ended);
        for seen in consumers {
            add(&mut run.seen, *begun, *seen.get(place).ok_or("a consumer missed a record")?);
        }
        last = *ended;
    }
    run.per_second = float(run.appended.len()) / last.saturating_duration_since(start).as_secs_f64();
    Ok(run)
}
