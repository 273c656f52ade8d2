//! Which records a producer appends next, and when: the open loop's timetable and the closed loop's claims. Pure.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::units::nanos;

/// What is to be appended.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Threads that append.
    pub producers: u32,
    /// Records per append.
    pub batch: u64,
    /// Load that is not measured, before the one that is.
    pub warmup: Duration,
    /// The measured load ends after so long.
    pub duration: Option<Duration>,
    /// The measured load ends after so many records.
    pub records: Option<u64>,
}

impl Shape {
    /// Since the start, when no further append begins.
    pub fn deadline(&self) -> Option<Duration> {
        self.duration.map(|duration| self.warmup.saturating_add(duration))
    }
}

/// The open loop: append number `slot` of the run is due at a fixed time, whatever became of those before it.
/// Producers take slots in turn.
#[derive(Debug, Clone, Copy)]
pub struct Timetable {
    shape: Shape,
    /// Records per second, over all producers.
    rate: u64,
    /// Appends that are due before the warm-up is over.
    warm_slots: u64,
}

impl Timetable {
    /// A timetable for a rate of at least 1.
    pub fn new(shape: Shape, rate: u64) -> Self {
        let mut table = Self { shape, rate, warm_slots: 0 };
        table.warm_slots = table.slots_before(shape.warmup);
        table
    }

    /// The `turn`-th slot of a producer.
    pub fn slot(&self, producer: u32, turn: u64) -> u64 {
        turn.saturating_mul(self.shape.producers.into()).saturating_add(producer.into())
    }

    /// When it is due, since the start.
    pub fn due(&self, slot: u64) -> Duration {
        let records = u128::from(slot) * u128::from(self.shape.batch);
        // Longer than 584 years counts as 584 years.
        Duration::from_nanos(u64::try_from(records * 1_000_000_000 / u128::from(self.rate)).unwrap_or(u64::MAX))
    }

    /// Which records it appends; none when all were scheduled before.
    pub fn sequences(&self, slot: u64) -> Range<u64> {
        let limit = self.shape.records.map_or(u64::MAX, |records| self.warm_records().saturating_add(records));
        let start = slot.saturating_mul(self.shape.batch).min(limit);
        start..start.saturating_add(self.shape.batch).min(limit)
    }

    /// Whether it counts in the figures.
    pub fn is_measured(&self, slot: u64) -> bool {
        slot >= self.warm_slots
    }

    /// How many measured records the whole timetable has.
    pub fn measured_records(&self) -> u64 {
        let by_time =
            self.shape.deadline().map(|deadline| (self.slots_before(deadline) - self.warm_slots).saturating_mul(self.shape.batch));
        [by_time, self.shape.records].into_iter().flatten().min().unwrap_or(u64::MAX)
    }

    /// How long so many records take when the rate is kept.
    pub fn span(&self, records: u64) -> Duration {
        Duration::from_nanos(u64::try_from(u128::from(records) * 1_000_000_000 / u128::from(self.rate)).unwrap_or(u64::MAX))
    }

    fn warm_records(&self) -> u64 {
        self.warm_slots.saturating_mul(self.shape.batch)
    }

    /// How many slots are due before a time.
    fn slots_before(&self, time: Duration) -> u64 {
        // due(slot) < time, that is: slot * batch * 10^9 / rate < ns, rounded down, so slot * batch * 10^9 < ns * rate.
        let slots = (u128::from(nanos(time)) * u128::from(self.rate)).div_ceil(u128::from(self.shape.batch) * 1_000_000_000);
        u64::try_from(slots).unwrap_or(u64::MAX)
    }
}

/// The closed loop: whoever is ready takes the next records.
#[derive(Debug)]
pub struct Claims {
    shape: Shape,
    next: AtomicU64,
    measured: AtomicU64,
}

impl Claims {
    /// Nothing is taken yet.
    pub fn new(shape: Shape) -> Self {
        Self { shape, next: AtomicU64::new(0), measured: AtomicU64::new(0) }
    }

    /// The records of the next append, none if those to be measured are all taken.
    pub fn take(&self, measured: bool) -> Option<Range<u64>> {
        let mut records = self.shape.batch;
        if let (true, Some(limit)) = (measured, self.shape.records) {
            // Both counters only give out numbers, and publish nothing: relaxed is enough. Past the limit the sum grows by a batch
            // per producer, each of which asks once more and stops.
            let before = self.measured.fetch_add(records, Ordering::Relaxed);
            records = records.min(limit.saturating_sub(before));
        }
        if records == 0 {
            return None;
        }
        let start = self.next.fetch_add(records, Ordering::Relaxed);
        Some(start..start + records)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(batch: u64, warmup_ms: u64, duration_ms: Option<u64>, records: Option<u64>) -> Shape {
        let [warmup, duration] = [Some(warmup_ms), duration_ms].map(|ms| ms.map(Duration::from_millis));
        Shape { producers: 3, batch, warmup: warmup.unwrap(), duration, records }
    }

    #[test]
    fn slots_are_due_in_even_steps_and_go_round_the_producers() {
        let table = Timetable::new(shape(10, 0, Some(1000), None), 1000);
        assert_eq!([0, 1, 2, 99].map(|slot| table.due(slot)), [0, 10, 20, 990].map(Duration::from_millis));
        let all: Vec<u64> = (0..2).flat_map(|turn| (0..3).map(move |producer| (producer, turn))).map(|(p, t)| table.slot(p, t)).collect();
        assert_eq!(all, [0, 1, 2, 3, 4, 5]);
        assert_eq!((table.sequences(0), table.sequences(7)), (0..10, 70..80));
        assert_eq!(table.measured_records(), 1000);
        assert_eq!(table.span(500), Duration::from_millis(500));
    }

    #[test]
    fn no_step_is_lost_to_rounding() {
        let table = Timetable::new(shape(1, 0, None, None), 3);
        assert_eq!(table.due(3_000_000), Duration::from_secs(1_000_000));
        assert_eq!(table.due(1), Duration::from_nanos(333_333_333));
        for rate in [1, 3, 7, 999, 1_000_000_000] {
            let table = Timetable::new(shape(7, 0, Some(12_345), None), rate);
            let slots = table.slots_before(Duration::from_millis(12_345));
            assert!(slots == 0 || table.due(slots - 1) < Duration::from_millis(12_345), "{rate}");
            assert!(table.due(slots) >= Duration::from_millis(12_345), "{rate}");
        }
    }

    #[test]
    fn the_warm_up_comes_before_the_records_that_are_counted() {
        let table = Timetable::new(shape(10, 100, None, Some(25)), 1000);
        assert!(!table.is_measured(9) && table.is_measured(10));
        assert_eq!(table.sequences(9), 90..100);
        assert_eq!([10, 11, 12, 13].map(|slot| table.sequences(slot)), [100..110, 110..120, 120..125, 125..125]);
        assert_eq!(table.measured_records(), 25);
    }

    #[test]
    fn time_and_count_whichever_is_first() {
        let table = |duration, records| Timetable::new(shape(1, 50, Some(duration), Some(records)), 1000).measured_records();
        assert_eq!((table(100, 1000), table(100, 30)), (100, 30));
        assert_eq!(shape(1, 50, Some(100), None).deadline(), Some(Duration::from_millis(150)));
        assert_eq!(shape(1, 50, None, Some(1)).deadline(), None);
    }

    #[test]
    fn claims_give_each_record_once_and_end_at_the_limit() {
        let claims = Claims::new(shape(10, 100, None, Some(25)));
        let taken: Vec<_> = [false, true, false, true, true, true, false].map(|measured| claims.take(measured)).into();
        assert_eq!(taken, [Some(0..10), Some(10..20), Some(20..30), Some(30..40), Some(40..45), None, Some(45..55)]);
        let endless = Claims::new(shape(10, 0, Some(1), None));
        assert_eq!((endless.take(true), endless.take(true)), (Some(0..10), Some(10..20)));
    }
}
