//! Retention: when it is enforced, and what time it goes by.

use std::io;
use std::sync::{Arc, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TryRecvError};

use super::{Broker, Inner};
use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::io::Process;
use crate::partition::Removed;

/// How far the wall clock may be ahead of where it should be, and be believed at once.
const TOLERANCE: Duration = Duration::from_secs(60);
/// How long it must stay there to be believed otherwise.
const SETTLING: Duration = Duration::from_secs(3600);

/// What enforcing the topics' retention did.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct RetentionReport {
    /// What went, of each partition of which anything did.
    pub removed: Vec<Removed>,
    /// Why it was not done in others: it goes on with the next pass.
    pub failed: Vec<Error>,
    /// The wall clock is ahead of where it should be, by so much, and not believed yet: ages go by the time that it should show.
    pub doubted: Option<Duration>,
}

/// The time that ages go by: see [`Broker::enforce_retention`].
#[derive(Debug)]
pub(super) struct SoundTime {
    /// A moment whose time was believed: wall clock, nanoseconds since 1970, and monotonic.
    known: (u64, Duration),
    /// Since when the wall clock has been ahead without a further jump, and what it showed last.
    doubt: Option<Doubt>,
}

#[derive(Debug, Clone, Copy)]
struct Doubt {
    since: Duration,
    last: (u64, Duration),
}

impl SoundTime {
    /// Begins with a moment that is known to be past, and the clocks' first reading.
    pub(super) fn new(past: Option<u64>, clock: &dyn Clock) -> Self {
        let (wall, monotonic) = (clock.wall_ns(), clock.monotonic());
        let mut time = Self { known: (past.unwrap_or(wall).min(wall), monotonic), doubt: None };
        time.read(wall, monotonic);
        time
    }

    /// What time it is, and how far the wall clock is ahead of that.
    fn read(&mut self, wall: u64, monotonic: Duration) -> (u64, Duration) {
        let expected = on_from(self.known, monotonic);
        if wall <= expected.saturating_add(nanos(TOLERANCE)) {
            // Back it may go as it likes: nothing goes too early by that.
            self.believe(wall, monotonic);
            return (wall, Duration::ZERO);
        }
        let goes_on = |doubt: &Doubt| wall.abs_diff(on_from(doubt.last, monotonic)) <= nanos(TOLERANCE);
        let since = self.doubt.filter(goes_on).map_or(monotonic, |doubt| doubt.since);
        if monotonic.saturating_sub(since) >= SETTLING {
            self.believe(wall, monotonic);
            return (wall, Duration::ZERO);
        }
        self.doubt = Some(Doubt { since, last: (wall, monotonic) });
        (expected, Duration::from_nanos(wall - expected))
    }

    fn believe(&mut self, wall: u64, monotonic: Duration) {
        *self = Self { known: (wall, monotonic), doubt: None };
    }
}

/// What a clock shows by now that showed `wall` at that moment.
fn on_from((wall, at): (u64, Duration), now: Duration) -> u64 {
    wall.saturating_add(nanos(now.saturating_sub(at)))
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Broker {
    /// Removes the segments that their topics' settings no longer keep: those whose newest record is older than
    /// [`retention_age`](crate::TopicConfig::retention_age), strictly, and the oldest while all logs of a partition are together larger than
    /// [`retention_bytes`](crate::TopicConfig::retention_bytes). Whole segments go, oldest first. The one that takes the appends stays, unless all its
    /// records are too old: then the next one begins, and is there before it goes. The broker does this by itself, too, every
    /// [`retention_every`](crate::BrokerConfig::retention_every).
    ///
    /// # Clocks
    /// A clock that is wrong once must not empty a topic, nor keep it for ever.
    /// - The wall clock is believed as long as it goes with the monotonic one. Where it is more than a minute ahead, ages go by the time that it
    ///   should show, until it has been ahead for an hour without a further jump. Backward steps are followed at once.
    /// - After opening, time goes on from the newest record that is not in the future. So where nothing was appended for longer than a minute
    ///   before, what became too old meanwhile goes an hour after opening.
    /// - A record that is stamped in the future has no age. Its segment's is told by when the kernel saw its log change last, of the one that takes the
    ///   appends, too; where that is in the future as well, the next one begins, and the age is that of the sealing. Closing a
    ///   partition is such a change: where it is closed and opened again more often than that, its last segment stays. No segment is kept when one
    ///   behind it, which is younger, is too old.
    ///
    /// # Durability
    /// What went is gone durably. After a crash at any moment each log is without a gap, and its next offset as it was.
    ///
    /// # Blocking
    /// For the file system, and, of topics that have such settings, for rolls. Neither appends nor reads wait for it.
    ///
    /// # Errors
    /// [`Error::Closed`]. What fails in a partition is in the report, and the others go on.
    pub fn enforce_retention(&self) -> Result<RetentionReport> {
        self.0.enforce_retention(|| true)
    }
}

impl Inner {
    /// One pass, as long as it `goes_on`.
    fn enforce_retention(&self, goes_on: impl Fn() -> bool) -> Result<RetentionReport> {
        let (clock, topics) = self.topics.all()?;
        // One pass at a time, so that each reading of the clocks is later than the one before.
        let mut time = self.time.lock().unwrap_or_else(PoisonError::into_inner);
        let (now, ahead) = time.read(clock.wall_ns(), clock.monotonic());
        let mut report = RetentionReport { doubted: (ahead > Duration::ZERO).then_some(ahead), ..RetentionReport::default() };
        for partition in topics.iter().flat_map(|topic| topic.partitions()).take_while(|_| goes_on()) {
            let (removed, result) = partition.enforce_retention(now);
            if removed.segments > 0 {
                report.removed.push(removed);
            }
            // A topic that was closed or deleted meanwhile has nothing to keep, and of a partition that moves nothing goes.
            report.failed.extend(result.err().filter(|error| !error.is_closed() && !error.is_moved()));
        }
        Ok(report)
    }
}

/// Enforces retention every so often, on a thread of its own, until it is dropped: then a pass that is under way has ended.
#[derive(Debug)]
pub(super) struct Schedule {
    /// Dropped to end it.
    goes_on: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
    process: Process,
}

impl Schedule {
    pub(super) fn start(broker: Arc<Inner>, every: Duration) -> io::Result<Self> {
        let process = Process::current()?;
        let (goes_on, ended) = crossbeam_channel::bounded(0);
        let thread = thread::Builder::new().name("log retention".to_owned()).spawn(move || run(&broker, every, &ended))?;
        Ok(Self { goes_on: Some(goes_on), thread: Some(thread), process })
    }
}

impl Drop for Schedule {
    fn drop(&mut self) {
        if !self.process.is_current() {
            // In a child there is no such thread, and it may have been at the channel when it was left behind.
            std::mem::forget((self.goes_on.take(), self.thread.take()));
            return;
        }
        self.goes_on = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn run(broker: &Inner, every: Duration, ended: &Receiver<()>) {
    while matches!(ended.recv_timeout(every), Err(RecvTimeoutError::Timeout)) {
        let goes_on = || ended.try_recv() == Err(TryRecvError::Empty);
        let Ok(RetentionReport { removed, failed, doubted }) = broker.enforce_retention(goes_on) else { return };
        for went in removed {
            tracing::info!(path = %went.path.display(), records = ?went.records, segments = went.segments, bytes = went.bytes, "retention");
        }
        for error in failed {
            tracing::warn!(%error, "retention could not be enforced; the next pass tries again");
        }
        if let Some(ahead) = doubted {
            tracing::warn!(?ahead, "the wall clock is ahead of where it should be; retention waits to see whether it stays there");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;
    const START: u64 = 1_000_000 * SECOND;
    const CENTURY: u64 = 100 * 365 * 24 * 3600 * SECOND;

    fn time() -> SoundTime {
        SoundTime { known: (START, Duration::ZERO), doubt: None }
    }

    fn read(time: &mut SoundTime, wall: u64, seconds: u64) -> u64 {
        time.read(wall, Duration::from_secs(seconds)).0
    }

    #[test]
    fn a_clock_that_goes_right_is_believed() {
        let mut time = time();
        for seconds in [0, 1, 60, 4000, 1_000_000] {
            // Half a minute of drift at any reading.
            let wall = START + (seconds + seconds % 7) * SECOND;
            assert_eq!(read(&mut time, wall, seconds), wall);
        }
    }

    #[test]
    fn b084_a_jump_ahead_is_believed_after_an_hour_and_not_before() {
        let mut time = time();
        assert_eq!(read(&mut time, START + CENTURY, 10), START + 10 * SECOND);
        assert_eq!(read(&mut time, START + CENTURY + 3599 * SECOND, 3609), START + 3609 * SECOND);
        let later = START + CENTURY + 3600 * SECOND;
        assert_eq!(read(&mut time, later, 3610), later);
        assert_eq!(read(&mut time, later + SECOND, 3611), later + SECOND);
    }

    #[test]
    fn b084_one_wrong_reading_is_forgotten() {
        let mut time = time();
        for round in 0..10 {
            let seconds = round * 3000;
            assert_eq!(read(&mut time, START + CENTURY + seconds * SECOND, seconds), START + seconds * SECOND);
            assert_eq!(read(&mut time, START + (seconds + 1) * SECOND, seconds + 1), START + (seconds + 1) * SECOND);
        }
    }

    #[test]
    fn a_clock_that_jumps_on_and_on_is_not_believed() {
        let mut time = time();
        for round in 1..100 {
            let seconds = round * 600;
            assert_eq!(read(&mut time, START + round * (CENTURY / 100), seconds), START + seconds * SECOND);
        }
    }

    #[test]
    fn backward_steps_are_followed() {
        let mut time = time();
        assert_eq!(read(&mut time, 5 * SECOND, 10), 5 * SECOND);
        // And the way back is a jump ahead.
        assert_eq!(read(&mut time, START, 20), 15 * SECOND);
        assert_eq!(read(&mut time, START + 3600 * SECOND, 3620), START + 3600 * SECOND);
    }

    #[test]
    fn the_ends_of_the_numbers_are_no_trouble() {
        let mut time = SoundTime { known: (u64::MAX, Duration::ZERO), doubt: None };
        assert_eq!(read(&mut time, u64::MAX, 1 << 40), u64::MAX);
        assert_eq!(time.read(0, Duration::MAX).0, 0);
        assert_eq!(time.read(u64::MAX, Duration::MAX).0, 0);
    }
}
