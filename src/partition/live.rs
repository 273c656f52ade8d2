//! The settings that may change while a partition is open, and those that may not.
//!
//! Any thread may ask for a setting at any time, at the cost of a relaxed load; whoever needs the same answer twice keeps it. The writer learns
//! of a change by [`Live::changes`], which it looks at before it waits.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::config::{Durability, TopicConfig};

/// Stands for a time or a size that is not limited; the largest that may be set is far below.
const NONE: u64 = u64::MAX;

/// The settings that are the same for as long as a partition is open.
#[derive(Debug)]
pub(super) struct Fixed {
    pub(super) partitions: u32,
    pub(super) preallocate_bytes: u64,
    pub(super) index_interval: u32,
    pub(super) durability: Durability,
    pub(super) commit_bytes: u64,
    pub(super) commit_records: u64,
    pub(super) tail_bytes: u64,
    pub(super) queue_bytes: u64,
    pub(super) queue_batches: u32,
}

/// The settings that may change.
#[derive(Debug)]
pub(super) struct Live {
    segment_bytes: AtomicU64,
    segment_age_ns: AtomicU64,
    retention_age_ns: AtomicU64,
    retention_bytes: AtomicU64,
    linger_us: AtomicU64,
    max_batch_bytes: AtomicU64,
    /// How often they were set.
    changes: AtomicU64,
}

/// A topic's settings, by what may become of them.
pub(super) fn split(config: &TopicConfig) -> (Fixed, Live) {
    let TopicConfig { partitions, preallocate_bytes, index_interval, durability, commit_bytes, commit_records, tail_bytes, .. } = *config;
    let TopicConfig { queue_bytes, queue_batches, .. } = *config;
    let fixed = Fixed {
        partitions,
        preallocate_bytes,
        index_interval,
        durability,
        commit_bytes,
        commit_records,
        tail_bytes,
        queue_bytes,
        queue_batches,
    };
    let none = || AtomicU64::new(NONE);
    let live = Live {
        segment_bytes: none(),
        segment_age_ns: none(),
        retention_age_ns: none(),
        retention_bytes: none(),
        linger_us: none(),
        max_batch_bytes: none(),
        changes: AtomicU64::new(0),
    };
    live.set(config);
    (fixed, live)
}

impl Live {
    /// Takes what may change from there. Whoever sees the change counted sees the settings.
    pub(super) fn set(&self, config: &TopicConfig) {
        let put = |setting: &AtomicU64, value| setting.store(value, Ordering::Relaxed);
        put(&self.segment_bytes, config.segment_bytes);
        put(&self.segment_age_ns, config.segment_age.map_or(NONE, to_ns));
        put(&self.retention_age_ns, config.retention_age.map_or(NONE, to_ns));
        put(&self.retention_bytes, config.retention_bytes.unwrap_or(NONE));
        put(&self.linger_us, config.linger_us);
        put(&self.max_batch_bytes, config.max_batch_bytes);
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// How often they were set so far.
    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    pub(super) fn segment_bytes(&self) -> u64 {
        self.segment_bytes.load(Ordering::Relaxed)
    }

    pub(super) fn segment_age(&self) -> Option<Duration> {
        limited(&self.segment_age_ns).map(Duration::from_nanos)
    }

    pub(super) fn retention_age(&self) -> Option<Duration> {
        limited(&self.retention_age_ns).map(Duration::from_nanos)
    }

    pub(super) fn retention_bytes(&self) -> Option<u64> {
        limited(&self.retention_bytes)
    }

    pub(super) fn linger(&self) -> Duration {
        Duration::from_micros(self.linger_us.load(Ordering::Relaxed))
    }

    pub(super) fn max_batch_bytes(&self) -> u64 {
        self.max_batch_bytes.load(Ordering::Relaxed)
    }

    /// All settings, as they are now.
    pub(super) fn with(&self, fixed: &Fixed) -> TopicConfig {
        let &Fixed { partitions, preallocate_bytes, index_interval, durability, commit_bytes, commit_records, .. } = fixed;
        let &Fixed { tail_bytes, queue_bytes, queue_batches, .. } = fixed;
        TopicConfig {
            partitions,
            segment_bytes: self.segment_bytes(),
            segment_age: self.segment_age(),
            retention_age: self.retention_age(),
            retention_bytes: self.retention_bytes(),
            preallocate_bytes,
            index_interval,
            durability,
            linger_us: self.linger_us.load(Ordering::Relaxed),
            commit_bytes,
            commit_records,
            tail_bytes,
            max_batch_bytes: self.max_batch_bytes(),
            queue_bytes,
            queue_batches,
        }
    }
}

fn limited(setting: &AtomicU64) -> Option<u64> {
    Some(setting.load(Ordering::Relaxed)).filter(|&value| value != NONE)
}

fn to_ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).expect("100 years at most, which validated settings are")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_come_back_as_they_went_in() {
        let century = Duration::from_secs(100 * 365 * 24 * 3600);
        let odd = TopicConfig {
            partitions: 2,
            segment_bytes: 3,
            segment_age: Some(Duration::new(4, 5)),
            retention_age: Some(century),
            retention_bytes: Some(1 << 62),
            preallocate_bytes: 8192,
            index_interval: 7,
            durability: Durability::Os,
            linger_us: 9,
            commit_bytes: 5000,
            commit_records: 11,
            tail_bytes: 12,
            max_batch_bytes: 1313,
            queue_bytes: 14,
            queue_batches: 15,
        };
        odd.validate().unwrap();
        for config in [odd.clone(), TopicConfig::default(), TopicConfig { retention_bytes: Some(0), ..TopicConfig::default() }] {
            let (fixed, live) = split(&config);
            assert_eq!(live.with(&fixed), config);
        }
    }

    #[test]
    fn a_change_is_counted_and_takes_what_may_change_and_nothing_else() {
        let (fixed, live) = split(&TopicConfig::default());
        let before = live.changes();
        let changed =
            TopicConfig { segment_bytes: 1 << 20, linger_us: 5, retention_age: Some(Duration::from_secs(60)), ..TopicConfig::default() };
        live.set(&TopicConfig { partitions: 9, index_interval: 9, ..changed.clone() });
        assert_eq!(live.with(&fixed), changed);
        assert_ne!(live.changes(), before);
    }
}
