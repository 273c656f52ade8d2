//! What a roll to the next segment does to the appends around it.

use std::time::{Duration, Instant};

use sapwood::TopicConfig;

use crate::load::{Engine, make_batch};
use crate::report::Pair;
use crate::units::{float, nanos, to_u64, to_usize};
use crate::{Context, Outcome, named};

/// An append counts as one near a roll if there are at most so long between the two.
const NEAR: Duration = Duration::from_millis(2);
const RECORDS: u64 = 64;
const VALUE_BYTES: usize = 1_000;
const SEGMENT_BYTES: u64 = 16 << 20;
/// So large that the load without rolls never fills one.
const ENDLESS: u64 = 1 << 40;
/// Appends that do not count; far fewer than a segment takes.
const WARMUP: u64 = 64;

/// One append, and how many rolls there had been when it was answered.
struct Append {
    begun: Instant,
    ended: Instant,
    rolls: u64,
}

/// The same appends into one segment, then into so many more.
pub fn round(context: &Context, rolls: u64) -> Outcome<Vec<Pair>> {
    let record_bytes = to_u64(VALUE_BYTES + sapwood::HEADER_BYTES);
    // A few beyond the last roll, for what comes soon after it is near it, too.
    let appends = (rolls * SEGMENT_BYTES).div_ceil(RECORDS * record_bytes) + 8;
    let quiet = run(context, ENDLESS, appends)?;
    let rolling = run(context, SEGMENT_BYTES, appends)?;
    let came = rolling.last().map_or(0, |append| append.rolls);
    if came < rolls || quiet.last().is_some_and(|append| append.rolls > 0) {
        return Err(format!("{came} rolls where there should be {rolls}"));
    }
    let worst = near_rolls(&rolling).max().ok_or("no append was near a roll")?;
    Ok(vec![Pair { engine: micros(worst), limit: Some(micros(p999(&quiet))) }])
}

/// One append after another.
fn run(context: &Context, segment_bytes: u64, appends: u64) -> Outcome<Vec<Append>> {
    let engine = Engine::open(context, TopicConfig { segment_bytes, ..TopicConfig::default() })?;
    let partition = engine.partition(0);
    let value = vec![7; VALUE_BYTES];
    let mut done = Vec::with_capacity(to_usize(appends));
    for number in 0..appends {
        let batch = make_batch(partition, &value, RECORDS)?;
        let begun = Instant::now();
        partition.append_and_wait(batch).map_err(named("append"))?;
        let ended = Instant::now();
        if number >= WARMUP {
            done.push(Append { begun, ended, rolls: partition.stats().rolls });
        }
    }
    engine.close()?;
    Ok(done)
}

/// A roll happened between the answers to two neighbours; what overlaps that time, or comes close to it, is near.
fn near_rolls(appends: &[Append]) -> impl Iterator<Item = Duration> {
    let times: Vec<_> =
        appends.windows(2).filter(|pair| pair[1].rolls > pair[0].rolls).map(|pair| (pair[0].ended, pair[1].ended)).collect();
    appends.iter().filter_map(move |append| {
        let near = |(from, to): &(Instant, Instant)| append.ended + NEAR >= *from && append.begun <= *to + NEAR;
        times.iter().any(near).then(|| append.ended - append.begun)
    })
}

fn p999(appends: &[Append]) -> Duration {
    let mut times: Vec<_> = appends.iter().map(|append| append.ended - append.begun).collect();
    times.sort_unstable();
    times.get(times.len() * 999 / 1_000).copied().unwrap_or_default()
}

fn micros(time: Duration) -> f64 {
    float(nanos(time)) / 1e3
}
