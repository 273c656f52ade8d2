//! How much memory the partitions of a broker may hold in buffers together.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A number of bytes, and how many of them are taken. Any thread may take and give back; nobody waits.
#[derive(Debug)]
pub(crate) struct BufferBudget {
    bytes: u64,
    used: AtomicU64,
}

/// Bytes that were taken; dropped, they are given back.
#[derive(Debug)]
pub(super) struct Grant {
    budget: Arc<BufferBudget>,
    bytes: u64,
}

impl BufferBudget {
    pub(crate) fn new(bytes: u64) -> Arc<Self> {
        Arc::new(Self { bytes, used: AtomicU64::new(0) })
    }

    /// Takes so many bytes, if they are left. More than the budget has are granted while nobody else holds any.
    pub(super) fn take(self: &Arc<Self>, bytes: u64) -> Option<Grant> {
        let more = |used: u64| Some(used.saturating_add(bytes)).filter(|&sum| used == 0 || sum <= self.bytes);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        Some(Grant { budget: Arc::clone(self), bytes })
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_granted_than_there_is_but_to_one_alone() {
        let budget = BufferBudget::new(10);
        let (six, four) = (budget.take(6).unwrap(), budget.take(4).unwrap());
        assert!(budget.take(1).is_none());
        drop(six);
        assert!(budget.take(7).is_none());
        let six = budget.take(6).unwrap();
        drop((six, four));
        let all = budget.take(u64::MAX).unwrap();
        assert!(budget.take(0).is_none());
        drop(all);
        assert_eq!(budget.used.load(Ordering::Relaxed), 0);
    }
}
