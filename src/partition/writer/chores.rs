//! What is done beside the commits: index entries, checkpoints, syncs, sums. When each is due, and what follows from its end.

use std::io;
use std::sync::Arc;

use super::super::active;
use super::super::checkpoint::Checkpoint;
use super::super::upkeep::{Done, Job};
use super::{CHECKPOINT_AGE, CHECKPOINT_BYTES, End, PENDING_ENTRIES, Writer};
use crate::config::Durability;
use crate::error::{Error, Result};
use crate::guard::{self, Guard};
use crate::io::BLOCK;
use crate::segment::Kind;

impl Writer {
    /// Takes the ends of what was begun.
    pub(super) fn hear_upkeep(&mut self) -> Result<()> {
        while let Some(done) = self.upkeep.take() {
            match done {
                Done::Sync(result) => self.finish_sync(result)?,
                Done::SyncNames(result) => {
                    result.map_err(Error::io("sync the directory", &self.shared.dir))?;
                    self.under_way.names = false;
                    while let Some(commit) = self.finished.pop_front() {
                        self.publish(commit);
                    }
                }
                Done::Index => {
                    self.under_way.index = false;
                    self.pending_entries = self.active.segment.pending().len();
                    self.index_since = (self.pending_entries > 0).then(|| self.clock.monotonic());
                }
                Done::Extend(result) => {
                    self.under_way.extend = false;
                    self.active.extended(&self.shared, result)?;
                }
                Done::Prepare(result) => {
                    self.under_way.prepare = false;
                    self.prepared = result.inspect_err(|error| tracing::debug!(%error, "the next segment is made when it is needed")).ok();
                    // What could not be made ahead is not tried again at once; room for it may be missing.
                    self.may_prepare = false;
                }
                Done::Seal(result) => self.finish_seal(result)?,
                Done::Sum => {}
                Done::Checkpoint => self.under_way.checkpoint = false,
                Done::Panicked(message) => return Err(Error::WriterPanicked { path: self.shared.dir.to_path_buf(), message }),
            }
        }
        Ok(())
    }

    /// Begins what is to be there before a commit needs it.
    pub(super) fn look_ahead(&mut self) {
        if self.pending.is_some() || !self.zero_ahead.has_begun() {
            return;
        }
        // The first commit is always this thread's own, for it needs room, and so is the first after a rest; a producer's thread starts none.
        if !self.rests {
            self.upkeep.start();
        }
        if self.pending_entries >= PENDING_ENTRIES && !self.under_way.index && !self.active.index.failed() {
            self.begin_index();
        }
        let limit = self.segment_bytes;
        if !self.under_way.extend
            && let Some(range) = self.active.to_extend(self.end, limit)
        {
            let durable = self.shared.config.durability == Durability::Durable;
            self.upkeep.begin(Job::Extend { log: Arc::clone(&self.active.log), range, durable });
            self.under_way.extend = true;
        }
        if self.checkpoint_is_due() {
            self.begin_checkpoint();
        }
        let wants_successor =
            self.active.wants_successor(&self.shared, self.end) || (self.roll_is_due() && active::is_worth_preparing(limit));
        if self.may_prepare && !self.under_way.prepare && self.prepared.is_none() && wants_successor {
            let room = limit.min(self.shared.config.preallocate_bytes).next_multiple_of(BLOCK);
            let zeros = if self.active.takes_zeros() { self.zero_ahead.of_next_segment(room) } else { 0 };
            self.upkeep.begin(Job::Prepare { room, zeros });
            self.under_way.prepare = true;
        }
    }

    /// So many bytes more are durable.
    pub(super) fn note(&mut self, bytes: u64) {
        let (before, since) = self.unnoted.unwrap_or_else(|| (0, self.clock.monotonic()));
        self.unnoted = Some((before + bytes, since));
    }

    fn checkpoint_is_due(&self) -> bool {
        let due = |(bytes, since)| bytes >= CHECKPOINT_BYTES || self.clock.monotonic() >= since + CHECKPOINT_AGE;
        self.may_checkpoint() && self.unnoted.is_some_and(due)
    }

    /// Whether a checkpoint would be begun if it were due.
    pub(super) fn may_checkpoint(&self) -> bool {
        !self.under_way.checkpoint && !self.under_way.names && self.zero_ahead.has_begun() && self.pending.is_none()
    }

    fn begin_checkpoint(&mut self) {
        self.under_way.checkpoint = true;
        self.unnoted = None;
        self.upkeep.begin(Job::Checkpoint { index: Arc::clone(&self.active.index), checkpoint: self.checkpoint() });
    }

    /// What is durable now. A segment begins after everything before it is, so the durable end lies in the active one.
    pub(super) fn checkpoint(&self) -> Checkpoint {
        let End { segment, position, offset } = if guard::stands(Guard::CheckpointsAreDurable) { self.durable() } else { self.appended() };
        Checkpoint { base: segment.base(), position, next_offset: offset, last_timestamp: self.last_timestamp, entries: 0, clean: false }
    }

    pub(super) fn begin_index(&mut self) {
        self.under_way.index = true;
        self.index_since = None;
        let index = Arc::clone(&self.active.index);
        self.upkeep.begin(Job::Index { index, up_to: self.shared.appended_end() });
    }

    /// Whether what the kernel has is to be synced now.
    pub(super) fn sync_is_due(&self) -> bool {
        let Some((bytes, since)) = self.unsynced else { return false };
        let asked = self.syncs.iter().any(|(offset, _)| *offset <= self.shared.appended_end());
        let interval = match self.shared.config.durability {
            Durability::Interval { bytes: limit, time } => bytes >= limit || self.clock.monotonic() >= since.saturating_add(time),
            Durability::Durable | Durability::Os => false,
        };
        self.under_way.sync.is_none() && (asked || interval)
    }

    /// Has everything synced that the kernel has now. Appends go on meanwhile.
    pub(super) fn begin_sync(&mut self) {
        self.upkeep.begin(Job::Sync { log: Arc::clone(&self.active.log) });
        self.under_way.sync = Some(self.appended());
        self.unsynced = None;
    }

    fn finish_sync(&mut self, result: io::Result<()>) -> Result<()> {
        let end = self.under_way.sync.take().expect("only a sync that was begun ends");
        if guard::stands(Guard::FailedSyncsStop) {
            result.map_err(Error::io("sync", &end.segment.path(Kind::Log)))?;
        }
        self.mark_durable(&end);
        Ok(())
    }

    fn finish_seal(&mut self, result: Result<()>) -> Result<()> {
        let end = self.under_way.seals.pop_front().expect("only a sealing that was begun ends");
        result?;
        self.mark_durable(&end);
        Ok(())
    }

    /// Everything up to there was synced. Syncs end in the order in which they were begun, so the ends only grow.
    pub(super) fn mark_durable(&mut self, end: &End) {
        self.shared.metrics.sync();
        let bytes = end.position - end.segment.durable();
        end.segment.set_durable(end.position);
        if self.shared.config.durability != Durability::Durable {
            self.note(bytes);
            // After the segment's own: whoever sees this end finds the records below it.
            self.shared.set_durable_end(end.offset);
        }
    }

    /// Where the log ends that the kernel has.
    pub(super) fn appended(&self) -> End {
        End { segment: Arc::clone(&self.active.segment), position: self.active.segment.appended(), offset: self.shared.appended_end() }
    }

    /// Where it ends on the device.
    fn durable(&self) -> End {
        End { segment: Arc::clone(&self.active.segment), position: self.active.segment.durable(), offset: self.shared.durable_end() }
    }

    pub(super) fn everything_is_durable(&mut self) {
        self.unsynced = None;
        self.shared.set_durable_end(self.shared.appended_end());
    }

    /// Answers the syncs whose records are all on the device.
    pub(super) fn answer_syncs(&mut self) {
        if self.syncs.is_empty() {
            return;
        }
        let durable_end = self.shared.durable_end();
        for (offset, answer) in std::mem::take(&mut self.syncs) {
            if offset <= durable_end {
                answer.send(Ok(()));
            } else {
                self.syncs.push((offset, answer));
            }
        }
    }
}
