//! From one segment to the next, back to an earlier end, and to the last one of all.

use std::sync::Arc;
use std::time::Duration;

use super::super::active::{self, Active, Denied, Prepared};
use super::super::checkpoint::Checkpoint;
use super::super::cut::Cut;
use super::super::upkeep::Job;
use super::{CHECKPOINT_BYTES, ROLL_PATIENCE, UnderWay, Writer};
use crate::config::Durability;
use crate::error::{Error, Result};
use crate::guard::{self, Guard};
use crate::io::File;
use crate::record::to_usize;
use crate::segment::Kind;

impl Writer {
    /// Finds out how old the segment is that was there when the partition was opened or its log cut, where that matters. From then on no jump
    /// of the wall clock changes it.
    pub(super) fn learn_age(&mut self) {
        if self.age.is_some() || self.end == 0 || self.shared.live.segment_age().is_none() {
            return;
        }
        // One whose first record cannot be read begins now.
        let first = self.active.segment.read_first_time(&*self.shared.disk);
        let had = first.map_or(0, |time| self.clock.wall_ns().saturating_sub(time));
        self.age = Some((self.clock.monotonic(), Duration::from_nanos(had)));
    }

    /// When the active segment will be too old for more records; that is put off where there was no room for the next.
    pub(super) fn roll_at(&self) -> Option<Duration> {
        let (age, (since, had)) = (self.shared.live.segment_age()?, self.age?);
        Some(since.saturating_add(age.saturating_sub(had)).max(self.no_roll_before))
    }

    pub(super) fn roll_is_due(&self) -> bool {
        self.roll_at().is_some_and(|at| at <= self.clock.monotonic())
    }

    /// Whether the active segment is to be left because of its age, and the next one is there if it can be made ahead.
    pub(super) fn may_roll_by_age(&self) -> bool {
        let is_to_come = self.prepared.is_none() && self.may_prepare && self.zero_ahead.has_begun();
        self.roll_is_due() && !self.under_way.prepare && !(is_to_come && active::is_worth_preparing(self.segment_bytes))
    }

    /// Takes the end of a roll that nobody asked for.
    pub(super) fn put_off_roll(&mut self, rolled: Result<()>) {
        if let Err(error) = rolled {
            tracing::warn!(%error, path = %self.shared.dir.display(), "no next segment for one that is old enough; trying again later");
            self.no_roll_before = self.clock.monotonic() + ROLL_PATIENCE;
        }
    }

    /// Whether nothing stands in the way of the next segment. One that was made ahead needs only that nobody else is at the
    /// active log.
    pub(super) fn may_roll(&self) -> bool {
        let UnderWay { extend, prepare, names, seals, .. } = &self.under_way;
        // One segment at a time is left to be sealed: opening counts on that.
        let nobody_else = !*extend && !*prepare && !*names && seals.is_empty();
        if self.rolls_ahead() { nobody_else } else { self.upkeep.is_idle() }
    }

    /// Whether the next segment can take its place before this one is sealed: it is there, and all of this one is durable.
    fn rolls_ahead(&self) -> bool {
        self.prepared.is_some() && self.shared.config.durability == Durability::Durable
    }

    /// Ends the active segment and opens the next, named by the next offset. The inner error leaves the active segment as it
    /// was, and able to take what still fits.
    pub(super) fn roll(&mut self) -> Result<Result<(), Error>> {
        // Before anything is changed: once there is a new name, it must become durable, descriptors left or not.
        let names = match self.shared.disk.open_dir(&self.shared.dir).map_err(Error::io("open", &self.shared.dir)) {
            Ok(names) => names,
            Err(error) => return Ok(Err(error)),
        };
        let ahead = self.rolls_ahead();
        if ahead {
            // A sealed log ends with its last record, whatever a crash leaves of what follows.
            self.active.cut()?;
        } else {
            // What comes next must not outlive what was before.
            self.active.seal(&self.shared)?;
            self.everything_is_durable();
        }
        let renamed = self.prepared.is_some();
        let made = match self.prepared.take() {
            Some(prepared) => prepared.take_place(&self.shared, self.next_offset).inspect_err(|_| self.discard_prepared()),
            None => Active::create(&self.shared, &*names, self.next_offset),
        };
        let next = match made {
            Ok(next) => next,
            Err(Denied::Refused(error)) => return Ok(Err(error)),
            Err(Denied::Failed(error)) => return Err(error),
        };
        self.attach(&next.log)?;
        let end = self.appended();
        self.shared.push_segment(Arc::clone(&next.segment));
        let before = std::mem::replace(&mut self.active, next);
        if renamed && guard::stands(Guard::RenamesBeforeAnswers) {
            if ahead && self.upkeep.is_idle() {
                // Beside the next commit, whose answers wait for it.
                self.upkeep.begin(Job::SyncNames { names });
                self.under_way.names = true;
            } else {
                // It would wait for whatever else is being done; or answers do not wait, and index entries would be written into
                // files whose log's name a power loss can take back.
                names.sync().map_err(Error::io("sync the directory", &self.shared.dir))?;
            }
        }
        // Nobody waits for the rest of the sealing.
        let (segment, next_offset) = (Arc::clone(&before.segment), end.offset);
        if ahead {
            self.upkeep.begin(Job::Seal { log: before.log, index: before.index, segment: before.segment });
            self.under_way.seals.push_back(end);
        }
        self.upkeep.begin(Job::Sum { segment, sum: before.sum, next_offset });
        self.last_block.clear();
        self.owes_last_block = false;
        self.end = 0;
        self.pending_entries = 0;
        self.index_since = None;
        self.age = None;
        self.owes_first_entry = true;
        self.may_prepare = true;
        self.shared.metrics.roll();
        // The checkpoint is of the segment before.
        self.unnoted = Some((CHECKPOINT_BYTES, self.clock.monotonic()));
        Ok(Ok(()))
    }

    /// Cuts the log so that `offset` is the next. The inner error left everything as it was.
    pub(super) fn truncate_after(&mut self, offset: u64) -> Result<Result<()>> {
        let shared = Arc::clone(&self.shared);
        let alone = shared.alone();
        let (first, next) = (shared.first_offset(), self.next_offset);
        if offset < first || offset > next {
            return Ok(Err(Error::OffsetOutOfRange { offset, first, next }));
        }
        if offset == next {
            return Ok(Ok(()));
        }
        self.active.index.write(&*self.shared.disk, u64::MAX);
        if self.shared.config.durability != Durability::Durable {
            // What stays is vouched for from now on, by a checkpoint and to readers. The logs before were synced when they were sealed.
            let end = self.appended();
            self.active.log.sync().map_err(Error::io("sync", &end.segment.path(Kind::Log)))?;
            self.mark_durable(&end);
        }
        let cut = match Cut::find(&self.shared, offset).and_then(|cut| cut.announce(&self.shared).map(|()| cut)) {
            Ok(cut) => cut,
            Err(error) => return Ok(Err(error)),
        };
        if self.prepared.is_some() {
            self.discard_prepared();
        }
        let segment = cut.make(&shared)?;
        self.memory.forget(&self.shared.recent);
        let active = Active::open(&self.shared, segment, to_usize(cut.entries))?;
        self.attach(&active.log)?;
        self.age = None;
        self.last_block.clear();
        self.owes_last_block = active.direct;
        self.end = cut.position;
        self.next_offset = cut.offset;
        self.last_timestamp = cut.last_timestamp;
        self.pending_entries = 0;
        self.index_since = None;
        self.owes_first_entry = !active.index.has_entries();
        self.may_prepare = true;
        self.unsynced = None;
        self.unnoted = None;
        self.active = active;
        // Of those that waited, all was written.
        self.syncs.iter_mut().for_each(|(offset, _)| *offset = cut.offset.min(*offset));
        cut.tell(&shared);
        drop(alone);
        Ok(Ok(()))
    }

    /// Gives the ring, if there is one, another log in the place of the active one.
    fn attach(&mut self, log: &Arc<dyn File>) -> Result<()> {
        if let Some(ring) = &mut self.ring {
            let slot = ring.transfers.attach(Arc::clone(log)).map_err(Error::io("attach to the ring", &self.shared.dir))?;
            ring.transfers.detach(std::mem::replace(&mut ring.slot, slot));
        }
        Ok(())
    }

    pub(super) fn discard_prepared(&mut self) {
        self.prepared = None;
        Prepared::discard(&*self.shared.disk, &self.shared.dir);
    }

    pub(super) fn close(&mut self) -> Result<()> {
        if self.prepared.is_some() {
            self.discard_prepared();
        }
        self.active.seal(&self.shared)?;
        self.everything_is_durable();
        self.answer_syncs();
        self.shared.write_checkpoint(&Checkpoint { entries: self.active.index.sealed_entries(), clean: true, ..self.checkpoint() });
        Ok(())
    }
}
