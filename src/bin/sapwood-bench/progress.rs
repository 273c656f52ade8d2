//! How it goes, live on a terminal: counters that the working threads feed, and a line that one thread draws from them.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use hdrhistogram::Histogram;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::schedule::Shape;
use crate::units::{float, nanos, rate, time};

/// Counters of all threads that take answers.
pub struct Live {
    gauges: Vec<Gauge>,
}

/// One thread's counters, on a cache line of their own.
#[derive(Default)]
#[repr(align(128))]
pub struct Gauge {
    records: AtomicU64,
    measured: AtomicU64,
    bytes: AtomicU64,
    /// Coarse, and only while somebody looks.
    latency: Option<Mutex<Histogram<u64>>>,
}

impl Live {
    /// For so many threads; with latencies only if they are shown.
    pub fn new(threads: usize, visible: bool) -> Self {
        let latency = || visible.then(|| Mutex::new(coarse()));
        Self { gauges: (0..threads).map(|_| Gauge { latency: latency(), ..Gauge::default() }).collect() }
    }

    /// One thread's.
    pub fn gauge(&self, thread: u32) -> &Gauge {
        &self.gauges[usize::try_from(thread).expect("a u32 fits in usize")]
    }

    fn sum(&self, of: impl Fn(&Gauge) -> &AtomicU64) -> u64 {
        self.gauges.iter().map(|gauge| of(gauge).load(Ordering::Relaxed)).sum()
    }

    fn latency(&self) -> Histogram<u64> {
        let mut all = coarse();
        for latency in self.gauges.iter().filter_map(|gauge| gauge.latency.as_ref()) {
            let _ = all.add(&*latency.lock().unwrap_or_else(PoisonError::into_inner));
        }
        all
    }
}

impl Gauge {
    /// Counts an answer. Only the thread whose gauge it is calls this, and the sums are for people: relaxed is enough.
    pub fn add(&self, records: u64, bytes: u64, measured: bool, latency: u64) {
        self.records.fetch_add(records, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        if measured {
            self.measured.fetch_add(records, Ordering::Relaxed);
            if let Some(histogram) = &self.latency {
                let _ = histogram.lock().unwrap_or_else(PoisonError::into_inner).record(latency);
            }
        }
    }
}

/// Small enough to be added up five times a second without holding anybody up.
fn coarse() -> Histogram<u64> {
    Histogram::new(2).expect("2 significant digits are allowed")
}

/// The line on the terminal; nothing where stderr is none. All clones draw the same one.
#[derive(Clone)]
pub struct Progress {
    bar: ProgressBar,
}

const STEPS: u64 = 1000;

impl Progress {
    /// Not drawn yet.
    pub fn new() -> Self {
        let bar = ProgressBar::with_draw_target(Some(STEPS), ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template("[{bar:20}] {msg}").expect("the template is well-formed");
        bar.set_style(style.progress_chars("=> "));
        Self { bar }
    }

    /// Whether anybody sees it.
    pub fn is_visible(&self) -> bool {
        !self.bar.is_hidden()
    }

    /// Begins a step that has no measure of its own.
    pub fn step(&self, message: &'static str) {
        self.bar.set_position(0);
        self.bar.set_message(message);
        self.bar.tick();
    }

    /// How far a step of known size is.
    pub fn part(&self, done: u64, of: u64) {
        self.bar.set_position(permille(done, of));
    }

    /// How the load goes.
    pub fn show(&self, live: &Live, shape: &Shape, elapsed: Duration) {
        if !self.is_visible() {
            return;
        }
        let warm = elapsed < shape.warmup;
        let by_time = shape.deadline().map(|deadline| permille(nanos(elapsed), nanos(deadline)));
        let by_count = shape.records.map(|records| permille(live.sum(|gauge| &gauge.measured), records));
        let seconds = elapsed.as_secs_f64().max(1e-9);
        let records = float(live.sum(|gauge| &gauge.records)) / seconds;
        let mib = float(live.sum(|gauge| &gauge.bytes)) / seconds / float(1 << 20);
        let latency = live.latency();
        let p99 = if latency.is_empty() { "-".to_owned() } else { time(latency.value_at_quantile(0.99)) };
        let step = if warm { "warm-up" } else { "load" };
        self.bar.set_position(by_time.max(by_count).unwrap_or(0));
        self.bar.set_message(format!("{step}: {} records/s  {} MiB/s  p99 {p99}", rate(records), rate(mib)));
    }

    /// Writes to stderr without getting into the line's way.
    pub fn stderr(&self) -> Above {
        Above { bar: self.bar.clone() }
    }

    /// Takes the line away.
    pub fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

/// Stderr, above the progress line.
pub struct Above {
    bar: ProgressBar,
}

impl io::Write for Above {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bar.suspend(|| io::stderr().write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

fn permille(done: u64, of: u64) -> u64 {
    let steps = u128::from(done) * u128::from(STEPS) / u128::from(of.max(1));
    u64::try_from(steps).map_or(STEPS, |steps| steps.min(STEPS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_thousand() {
        for (done, of, steps) in [(0, 10, 0), (5, 10, 500), (10, 10, 1000), (20, 10, 1000), (1, 3, 333), (0, 0, 0), (u64::MAX, 1, 1000)] {
            assert_eq!(permille(done, of), steps, "{done} of {of}");
        }
    }

    #[test]
    fn sums_over_threads() {
        let live = Live::new(2, true);
        live.gauge(0).add(1, 10, true, 1000);
        live.gauge(1).add(2, 20, false, 9000);
        assert_eq!((live.sum(|gauge| &gauge.records), live.sum(|gauge| &gauge.bytes), live.sum(|gauge| &gauge.measured)), (3, 30, 1));
        assert_eq!(live.latency().len(), 1);
        assert!(Live::new(1, false).latency().is_empty());
    }
}
