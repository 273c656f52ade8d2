//! Written space ahead of the records: when a commit takes zeros along behind its records, and how many.
//!
//! Allocated space is not yet written space: on ext4 and xfs the first write into it changes the file's map, and a durable
//! write then waits for the file system's journal. A commit that comes to the end of the written space therefore writes a piece of
//! zeros behind its own records, in the same write, and so pays the journal for all the commits that fit in the piece. That costs
//! the zeros' own bytes in bandwidth. Which is more depends on the size of the commits and on the device, by a factor of ten from one
//! to the next, so it is measured as it goes: how long commits take into space that was written, into space that was not, and
//! with zeros. With room for `n` commits in the zeros, these pay while
//!
//! ```text
//! time with zeros + n * time into written space  <  (n + 1) * time into unwritten space
//! ```
//!
//! (perf/README.md, "Zeros ahead", shows where that is on one machine, and that zeros written beside the commits, by another
//! thread, are worth less: a commit's sync then waits for them too.) What is not known yet is found out: commits of up to
//! [`WORTH_TRYING`] are given zeros, now and then again.

use std::ops::Range;
use std::time::Duration;

use crate::io::BLOCK;

/// Larger commits, in the mean, never take zeros along: their own write dwarfs what could be saved.
const WORTH_TRYING: u64 = 256 << 10;

/// Measured before anything is decided, and how much is written before it is measured anew.
const SAMPLES: u32 = 8;
const MEASURED_ANEW_AFTER: u64 = 256 << 20;

/// Bytes of a piece: room for several commits, and no more than the device writes in the time of a slow append.
const PIECE: Range<u64> = 256 << 10..1 << 20;

/// Before so much was written since the partition was opened, there are no zeros: a thousand partitions of a few records each
/// do not write gigabytes.
const NOT_BEFORE: u64 = 64 << 10;

/// The next segment begins with so many zeros, where they pay: enough until its commits bring their own.
const NEXT_SEGMENT: u64 = 2 << 20;

/// Where a commit went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Space {
    /// All into space that was written before.
    Written,
    /// Some of it into space that was only allocated.
    Unwritten,
    /// The same, with so many bytes of zeros behind.
    WithZeros(u64),
}

/// What decides it.
#[derive(Debug, Default)]
pub(super) struct ZeroAhead {
    /// Bytes by which a commit lengthens the log, smoothed.
    typical: u64,
    /// Bytes of records since the partition was opened.
    written: u64,
    /// Commits of about `timed_at` bytes, in seconds.
    into_written: Mean,
    into_unwritten: Mean,
    with_zeros: Mean,
    /// Bytes of zeros that those last took along: a piece, or what there was room for.
    zeros: Mean,
    timed_at: u64,
    timed_until: u64,
    /// Zeros are of no use on this file system.
    off: bool,
}

/// A smoothed mean.
#[derive(Debug, Default, Clone, Copy)]
struct Mean {
    value: f64,
    samples: u32,
}

impl Mean {
    fn add(&mut self, sample: f64) {
        self.samples = self.samples.saturating_add(1);
        // The plain mean at first, then the last ones count.
        self.value += (sample - self.value) / f64::from(self.samples.min(4 * SAMPLES));
    }

    fn known(&self) -> Option<f64> {
        (self.samples >= SAMPLES).then_some(self.value)
    }
}

impl ZeroAhead {
    /// A commit of so many bytes of records was written in so long.
    pub(super) fn commit(&mut self, bytes: u64, took: Duration, space: Space) {
        self.typical = if self.written == 0 { bytes } else { (self.typical * 7 + bytes) / 8 };
        self.written = self.written.saturating_add(bytes);
        if !is_like(self.typical, self.timed_at) || self.written > self.timed_until {
            (self.into_written, self.into_unwritten, self.with_zeros, self.zeros) = Default::default();
            self.timed_at = self.typical;
            self.timed_until = self.written.saturating_add(MEASURED_ANEW_AFTER);
        }
        if is_like(bytes, self.timed_at) {
            let seconds = took.as_secs_f64();
            match space {
                Space::Written => self.into_written.add(seconds),
                Space::Unwritten => self.into_unwritten.add(seconds),
                Space::WithZeros(zeros) => {
                    self.with_zeros.add(seconds);
                    self.zeros.add(float(zeros));
                }
            }
        }
    }

    /// No zeros from now on.
    pub(super) fn stop(&mut self) {
        self.off = true;
    }

    /// Whether anything was written since the partition was opened: one that is only read needs nothing ahead.
    pub(super) fn has_begun(&self) -> bool {
        self.written > 0
    }

    pub(super) fn pays(&self) -> bool {
        if self.off || self.written < NOT_BEFORE || self.typical > WORTH_TRYING {
            return false;
        }
        // While there are zeros, nothing is written into unwritten space: that is measured first.
        let Some(unwritten) = self.into_unwritten.known() else { return false };
        match (self.into_written.known(), self.with_zeros.known()) {
            (Some(written), Some(with_zeros)) => {
                // Of commits smaller than a block, only those that come to a new one find it unwritten.
                let commits = self.zeros.value / float(self.timed_at.max(BLOCK));
                with_zeros + commits * written < (commits + 1.0) * unwritten
            }
            // What there is room for holds not even one commit.
            (None, Some(_)) => false,
            (_, None) => true,
        }
    }

    /// Bytes of one piece of zeros.
    pub(super) fn piece(&self) -> u64 {
        (4 * self.timed_at).next_power_of_two().clamp(PIECE.start, PIECE.end)
    }

    /// Bytes of zeros, whole blocks, for a write that ends at byte `end` of the log. Up to `written_to` everything was written before;
    /// there is room up to `allocated`.
    pub(super) fn behind(&self, end: u64, written_to: u64, allocated: u64) -> u64 {
        if end <= written_to || !self.pays() {
            return 0;
        }
        let room = (allocated - allocated % BLOCK).saturating_sub(end);
        self.piece().min(room)
    }

    /// How much of the segment that comes next is written ahead, with room for `allocated` bytes in it.
    pub(super) fn of_next_segment(&self, allocated: u64) -> u64 {
        if self.pays() { NEXT_SEGMENT.min(allocated) / BLOCK * BLOCK } else { 0 }
    }
}

/// Whether commits of these sizes take about as long: whole blocks are written.
fn is_like(bytes: u64, other: u64) -> bool {
    let (bytes, other) = (bytes.max(BLOCK), other.max(BLOCK));
    bytes <= other.saturating_mul(2) && other <= bytes.saturating_mul(2)
}

/// For ratios: what is lost beyond 2^53 does not matter.
#[allow(clippy::cast_precision_loss, reason = "bytes of a commit or of a piece of zeros are far below 2^53")]
fn float(bytes: u64) -> f64 {
    bytes as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device: seconds of the journal, of a durable write, and of a byte.
    #[derive(Clone, Copy)]
    struct Device {
        journal: f64,
        commit: f64,
        byte: f64,
    }

    impl Device {
        /// Writes so many bytes of records in commits of one size, with zeros as they are asked for; tells how many those were.
        fn write(self, policy: &mut ZeroAhead, commit: u64, total: u64) -> u64 {
            self.write_within(policy, commit, total, u64::MAX)
        }

        /// The same from memory that has room for so many bytes.
        fn write_within(self, policy: &mut ZeroAhead, commit: u64, total: u64, memory: u64) -> u64 {
            let (mut end, mut written_to, mut all_zeros) = (0, 0, 0);
            while end < total {
                end += commit;
                let write_end = end.next_multiple_of(BLOCK);
                let zeros = policy.behind(write_end, written_to, u64::MAX).min(memory - commit.next_multiple_of(BLOCK));
                let space = match zeros {
                    0 if write_end <= written_to => Space::Written,
                    0 => Space::Unwritten,
                    zeros => Space::WithZeros(zeros),
                };
                let journal = if space == Space::Written { 0.0 } else { self.journal };
                let seconds = self.commit + self.byte * float(commit.max(BLOCK) + zeros) + journal;
                policy.commit(commit, Duration::from_secs_f64(seconds), space);
                written_to = written_to.max(write_end + zeros);
                all_zeros += zeros;
            }
            all_zeros
        }
    }

    /// About what was measured on a slow and on a fast virtual disk: 3.5 ns and 0.35 ns per byte.
    const SLOW: Device = Device { journal: 150e-6, commit: 120e-6, byte: 3.5e-9 };
    const FAST: Device = Device { journal: 150e-6, commit: 95e-6, byte: 0.35e-9 };

    #[test]
    fn commits_take_zeros_along_for_which_they_pay() {
        let total = 64 << 20;
        for (device, commit, pays) in [
            (SLOW, 100, true),
            (SLOW, 4 << 10, true),
            (SLOW, 16 << 10, true),
            (SLOW, 64 << 10, false),
            (SLOW, 200 << 10, false),
            (FAST, 4 << 10, true),
            (FAST, 128 << 10, true),
            (FAST, 400 << 10, false),
            (FAST, 1 << 20, false),
        ] {
            let mut policy = ZeroAhead::default();
            let zeros = device.write(&mut policy, commit, total);
            assert_eq!(policy.pays(), pays, "commits of {commit}");
            // Finding out costs little where it does not pay; where it does, nearly everything is zeros first.
            let bounds = if pays { total / 2..total + (2 << 20) } else { 0..total / 4 };
            assert!(bounds.contains(&zeros), "commits of {commit}: {zeros} bytes of zeros");
        }
    }

    #[test]
    fn pieces_that_never_fit_are_judged_by_what_fits() {
        for (commit, memory, pays) in
            [(200 << 10, 1 << 20, false), (130 << 10, 256 << 10, false), (8 << 10, 64 << 10, true), (4 << 10, 8 << 10, true)]
        {
            let mut policy = ZeroAhead::default();
            let zeros = SLOW.write_within(&mut policy, commit, 64 << 20, memory);
            assert_eq!(policy.pays(), pays, "commits of {commit} in {memory}, {zeros} bytes of zeros");
        }
    }

    #[test]
    fn a_load_that_changes_is_judged_anew() {
        let mut policy = ZeroAhead::default();
        SLOW.write(&mut policy, 8 << 10, 8 << 20);
        assert!(policy.pays());
        SLOW.write(&mut policy, 200 << 10, 64 << 20);
        assert!(!policy.pays());
        SLOW.write(&mut policy, 8 << 10, 8 << 20);
        assert!(policy.pays());
        // So is a device that changes.
        SLOW.write(&mut policy, 128 << 10, 64 << 20);
        assert!(!policy.pays());
        FAST.write(&mut policy, 128 << 10, 2 * MEASURED_ANEW_AFTER);
        assert!(policy.pays());
        policy.stop();
        assert!(!policy.pays() && policy.behind(1 << 20, 0, 1 << 30) == 0);
    }

    #[test]
    fn zeros_begin_with_the_unwritten_space_and_never_pass_the_room() {
        let after = |count: u32, bytes: u64| {
            let mut policy = ZeroAhead::default();
            (0..count).for_each(|_| policy.commit(bytes, Duration::from_micros(100), Space::Unwritten));
            policy
        };
        assert!(!after(0, 0).pays() && !after(SAMPLES - 1, 10_000).pays() && !after(SAMPLES, 1000).pays());
        let policy = after(100, 1000);
        assert_eq!(policy.behind(1 << 20, 1 << 20, 1 << 30), 0);
        assert_eq!(policy.behind(1 << 20, (1 << 20) - BLOCK, 1 << 30), PIECE.start);
        assert_eq!(policy.behind(1 << 20, 0, (1 << 20) + 9000), 8192);
        assert_eq!(policy.behind(1 << 20, 0, 1 << 20), 0);
        assert_eq!((policy.of_next_segment(64 << 20), policy.of_next_segment(9000)), (NEXT_SEGMENT, 8192));
        assert_eq!((after(100, 250_000).piece(), after(100, 250_000).behind(1 << 20, 0, 1 << 30)), (PIECE.end, PIECE.end));
        assert_eq!(after(100, 1 << 20).of_next_segment(64 << 20), 0);
    }
}
