//! Time, behind a trait, so that tests decide what it is.

use std::fmt::Debug;
use std::time::{Duration, Instant, SystemTime};

/// Where records get their timestamps from, and waits their length.
pub trait Clock: Debug + Send + Sync {
    /// Wall clock, nanoseconds since 1970-01-01 UTC. May jump, also backwards.
    fn wall_ns(&self) -> u64;
    /// Time since some fixed moment. Never goes back.
    fn monotonic(&self) -> Duration;
}

/// The machine's clocks.
#[derive(Debug)]
pub struct SystemClock {
    start: Instant,
}

impl SystemClock {
    /// A clock whose monotonic time starts now.
    pub fn new() -> Self {
        Self { start: Instant::now() }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn wall_ns(&self) -> u64 {
        // Before 1970 counts as 1970; the year 2554 is the format's end.
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    }

    fn monotonic(&self) -> Duration {
        self.start.elapsed()
    }
}
