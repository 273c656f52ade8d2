//! What is measured of writing: a table of perf/README.md, one entry per scenario.

use std::time::Duration;

use sapwood::{BrokerConfig, Durability, TopicConfig, WaitStrategy};

use crate::limit::{self, Bare};
use crate::load::{Engine, Measured, Shape, Until, closed, timetable};
use crate::report::{Measure, Pair, Target};
use crate::units::{float, size, to_u64};
use crate::{Context, Outcome, ahead, alloc, reopen, rolls};

const BLOCK: usize = 4 << 10;
const LARGE: usize = 256 << 10;

/// One entry: lines that come from the same rounds.
pub struct Scenario {
    pub name: &'static str,
    /// Those of each round's pairs.
    pub measures: Vec<Measure>,
    /// A round that takes long is not done more often than this.
    pub rounds_at_most: usize,
    pub prepare: Prepare,
}

/// Makes ready, outside the time: written space above all.
pub type Prepare = Box<dyn Fn(&Context) -> Outcome<Prepared>>;

/// What can be measured now, and how the limit beside it is.
pub struct Prepared {
    pub round: Round,
    pub note: String,
}

/// The limit, then the engine; a pair per measure.
pub type Round = Box<dyn FnMut() -> Outcome<Vec<Pair>>>;

/// Those of writing, in the order of the table.
pub fn all() -> Vec<Scenario> {
    vec![
        latency("durable-1x100B", 100),
        latency("durable-1x1kB", 1_000),
        spinning("durable-1x1kB-spin", 1_000),
        throughput("batch-256x1kB-1p", batches(1, 1_000, 1), Target::AtLeast(0.85)),
        throughput("batch-256x1kB-1p-2deep", batches(1, 1_000, 2), Target::None),
        throughput("batch-256x1kB-4p", batches(4, 1_000, 1), Target::AtLeast(1.3)),
        throughput("batch-256x1kB-4p-2deep", batches(4, 1_000, 2), Target::None),
        records("batch-256x128B-4p", batches(4, 128, 1), Target::AtLeast(550.0)),
        records("batch-256x128B-4p-2deep", batches(4, 128, 2), Target::None),
        records("durable-16x1kB", Shape::single(16, 1_000), Target::AtLeast(8.0)),
        records("durable-64x128B", Shape::single(64, 128), Target::AtLeast(20.0)),
        page_cache("os-batch-256x1kB-1p", batches(1, 1_000, 1)),
        partitions("partitions-2-of-8x1kB"),
        open_loop("open-loop-1x1kB"),
        rolling("rolls-64x1kB"),
        reopening("reopen"),
        allocations("allocations"),
        zeros_ahead("zeros-ahead-4KiB", 4 << 10),
        zeros_ahead("zeros-ahead-16KiB", 16 << 10),
        zeros_ahead("zeros-ahead-64KiB", 64 << 10),
        zeros_ahead("zeros-ahead-256KiB", 256 << 10),
        zeros_ahead("zeros-ahead-1MiB", 1 << 20),
    ]
}

fn batches(producers: usize, value_bytes: usize, in_flight: usize) -> Shape {
    Shape { producers, records: 256, value_bytes, in_flight }
}

pub fn measure(measure: &'static str, units: [&'static str; 2], target: Target) -> Measure {
    Measure { measure, units, target }
}

pub fn often(name: &'static str, measures: Vec<Measure>, prepare: Prepare) -> Scenario {
    Scenario { name, measures, rounds_at_most: usize::MAX, prepare }
}

/// A scenario against durable writes of this size: what a round makes of both is the last argument's to say.
fn beside_bare<F>(name: &'static str, bytes: usize, wait: WaitStrategy, shape: Shape, measures: Vec<Measure>, pairs: F) -> Scenario
where
    F: Fn(&limit::Writes, &Measured) -> Vec<Pair> + Copy + 'static,
{
    let prepare = move |context: &Context| {
        let context = context.clone();
        let mut bare = Bare::prepare(&context.dir, bytes)?;
        let note = bare.describe();
        let round = move || {
            let writes = bare.run(context.limit_time)?;
            let engine = Engine::open_with(&context, BrokerConfig { wait, ..BrokerConfig::default() }, TopicConfig::default())?;
            let measured = closed(&engine, shape, context.warmup, Until::Time(context.engine_time))?;
            engine.close()?;
            Ok(pairs(&writes, &measured))
        };
        Ok(Prepared { round: Box::new(round), note })
    };
    often(name, measures, Box::new(prepare))
}

/// One record after another against one block after another.
fn latency(name: &'static str, value_bytes: usize) -> Scenario {
    latency_with(name, WaitStrategy::Block, value_bytes, 1.15)
}

/// The same with a writer that watches its queue for longer than an append takes.
fn spinning(name: &'static str, value_bytes: usize) -> Scenario {
    latency_with(name, WaitStrategy::Spin(Duration::from_millis(1)), value_bytes, 1.05)
}

fn latency_with(name: &'static str, wait: WaitStrategy, value_bytes: usize, p50_at_most: f64) -> Scenario {
    let measures = vec![
        measure("p50 append : p50 of the bare loop", ["µs", "µs"], Target::AtMost(p50_at_most)),
        measure("p99.9 append : p99.9 of the bare loop", ["µs", "µs"], Target::AtMost(1.5)),
    ];
    beside_bare(name, BLOCK, wait, Shape::single(1, value_bytes), measures, |writes, measured| {
        let pair = |quantile| Pair {
            engine: float(measured.latency.value_at_quantile(quantile)) / 1e3,
            limit: Some(float(writes.latency.value_at_quantile(quantile)) / 1e3),
        };
        vec![pair(0.5), pair(0.999)]
    })
}

fn throughput(name: &'static str, shape: Shape, target: Target) -> Scenario {
    let measures = vec![measure("MiB/s of values : MiB/s of the bare loop", ["MiB/s", "MiB/s"], target)];
    beside_bare(name, LARGE, WaitStrategy::Block, shape, measures, |writes, measured| {
        vec![Pair { engine: measured.mib_per_second(), limit: Some(writes.mib_per_second()) }]
    })
}

fn records(name: &'static str, shape: Shape, target: Target) -> Scenario {
    let measures = vec![measure("records/s : writes/s of the bare loop", ["rec/s", "writes/s"], target)];
    beside_bare(name, BLOCK, WaitStrategy::Block, shape, measures, |writes, measured| {
        vec![Pair { engine: measured.records_per_second(), limit: Some(writes.per_second()) }]
    })
}

/// Neither side waits for the device. So much is written that it counts, and so little that the kernel need not write it back.
fn page_cache(name: &'static str, shape: Shape) -> Scenario {
    let measures = vec![measure("MiB/s of values : MiB/s of bare pwrite", ["MiB/s", "MiB/s"], Target::AtLeast(0.8))];
    let prepare = move |context: &Context| {
        let context = context.clone();
        let total: u64 = if context.trial { 4 << 20 } else { 512 << 20 };
        let note = format!("pwrite of {}, no sync, {} into a growing file", size(256 << 10), size(total));
        let round = move || {
            let bare = limit::growing(&context.dir, LARGE, total)?;
            let engine = Engine::open(&context, TopicConfig { durability: Durability::Os, ..TopicConfig::default() })?;
            let appends = total / (256 * 1_000);
            let measured = closed(&engine, shape, context.warmup.min(Duration::from_millis(20)), Until::Appends(appends))?;
            engine.close()?;
            Ok(vec![Pair { engine: measured.mib_per_second(), limit: Some(bare) }])
        };
        Ok(Prepared { round: Box::new(round), note })
    };
    often(name, measures, Box::new(prepare))
}

/// The engine against itself.
fn partitions(name: &'static str) -> Scenario {
    let measures = vec![measure("records/s of 2 partitions : of 1", ["rec/s", "rec/s"], Target::AtLeast(1.6))];
    let prepare = move |context: &Context| {
        let context = context.clone();
        let round = move || {
            let rate = |partitions: u32, producers| {
                let engine = Engine::open(&context, TopicConfig { partitions, ..TopicConfig::default() })?;
                let measured = closed(&engine, Shape::single(producers, 1_000), context.warmup, Until::Time(context.engine_time))?;
                engine.close()?;
                Ok::<_, String>(measured.records_per_second())
            };
            let one = rate(1, 8)?;
            Ok(vec![Pair { engine: rate(2, 16)?, limit: Some(one) }])
        };
        Ok(Prepared { round: Box::new(round), note: "1 partition with 8 producers, then 2 with 8 each".to_owned() })
    };
    often(name, measures, Box::new(prepare))
}

/// A rate that leaves room: half of what the closed loop of the same round did.
fn open_loop(name: &'static str) -> Scenario {
    let measures = vec![
        measure("p99.9 response : p99.9 of the bare loop", ["µs", "µs"], Target::AtMost(2.0)),
        measure("p99.9 response : that of bare writes by the timetable", ["µs", "µs"], Target::None),
    ];
    let prepare = move |context: &Context| {
        let context = context.clone();
        let mut bare = Bare::prepare(&context.dir, BLOCK)?;
        let note = format!("{}; the timetable has half the rate of the closed loop in the same round", bare.describe());
        let round = move || {
            let shape = Shape::single(1, 1_000);
            let writes = bare.run(context.limit_time)?;
            let engine = Engine::open(&context, TopicConfig::default())?;
            let full = closed(&engine, shape, context.warmup, Until::Time(context.engine_time / 2))?;
            let rate = full.records_per_second() / 2.0;
            let measured = timetable(&engine, shape, rate, context.warmup, context.engine_time)?;
            engine.close()?;
            let by_timetable = bare.timetable(rate, context.warmup, context.engine_time)?;
            let p999 = |latency: &hdrhistogram::Histogram<u64>| float(latency.value_at_quantile(0.999)) / 1e3;
            let pair = |limit| Pair { engine: p999(&measured.latency), limit: Some(p999(limit)) };
            Ok(vec![pair(&writes.latency), pair(&by_timetable)])
        };
        Ok(Prepared { round: Box::new(round), note })
    };
    often(name, measures, Box::new(prepare))
}

fn rolling(name: &'static str) -> Scenario {
    let measures = vec![measure("worst append near a roll : p99.9 without", ["µs", "µs"], Target::AtMost(2.0))];
    let prepare = move |context: &Context| {
        let context = context.clone();
        let count = if context.trial { 2 } else { 100 };
        let note = format!("{count} rolls a round, segments of 16 MiB; near is within 2 ms; the same appends into one segment beside it");
        Ok(Prepared { round: Box::new(move || rolls::round(&context, count)), note })
    };
    Scenario { name, measures, rounds_at_most: 3, prepare: Box::new(prepare) }
}

fn reopening(name: &'static str) -> Scenario {
    let measures = vec![
        measure("time to ready after SIGKILL : to read past the checkpoint", ["ms", "ms"], Target::AtMost(2.0)),
        measure("time to ready after a clean close", ["ms", ""], Target::AtMost(50.0)),
    ];
    let prepare = move |context: &Context| {
        let context = context.clone();
        let bytes = if context.trial { 4 << 20 } else { 1 << 30 };
        let note = format!(
            "{} in the active segment; read by one thread, 1 MiB at a time, {}: what lies past the checkpoint, room ahead of the \
             records included; caches as the killed process left them",
            size(bytes),
            limit::describe_reads(&context.dir)?,
        );
        Ok(Prepared { round: Box::new(move || reopen::round(&context, bytes)), note })
    };
    Scenario { name, measures, rounds_at_most: 3, prepare: Box::new(prepare) }
}

fn allocations(name: &'static str) -> Scenario {
    let measures = vec![
        measure("allocations per record, single records", ["", ""], Target::AtMost(0.0)),
        measure("allocations per record, batches of 256", ["", ""], Target::AtMost(0.0)),
    ];
    let prepare = move |context: &Context| {
        let context = context.clone();
        let appends = if context.trial { 32 } else { 4_000 };
        let note = "all threads; as many appends before as are counted".to_owned();
        Ok(Prepared { round: Box::new(move || alloc::round(&context, appends)), note })
    };
    Scenario { name, measures, rounds_at_most: 3, prepare: Box::new(prepare) }
}

/// Without the engine: what its policy has to get right.
fn zeros_ahead(name: &'static str, bytes: usize) -> Scenario {
    let measures = vec![
        measure("MiB/s with zeros taken along : into allocated space", ["MiB/s", "MiB/s"], Target::None),
        measure("MiB/s with zeros by a second thread : into allocated space", ["MiB/s", "MiB/s"], Target::None),
        measure("MiB/s into written space : into allocated space", ["MiB/s", "MiB/s"], Target::None),
    ];
    let prepare = move |context: &Context| {
        let context = context.clone();
        let note = format!("durable writes of {}, one after another; zeros 256 KiB at a time", size(to_u64(bytes)));
        Ok(Prepared { round: Box::new(move || ahead::round(&context, bytes)), note })
    };
    often(name, measures, Box::new(prepare))
}
