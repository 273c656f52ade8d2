//! Taking messages from the queue into the open commit.

use std::time::Duration;

use super::super::active::Denied;
use super::super::commit::{Commit, Waiter};
use super::super::queue::{Message, WORTH_WAKING};
use super::super::reply::Answerer;
use super::super::ticket::Answer;
use super::{Blocked, Carried, Pending, Room, Writer};
use crate::error::{Error, Result};
use crate::record::{Batch, to_u64, to_usize};
use crate::segment::{IndexEntry, is_indexed};

impl Writer {
    /// Puts what waits into the open commit, as far as there is room.
    pub(super) fn fill(&mut self) -> Result<()> {
        self.learn_age();
        loop {
            if let Some(carried) = self.carried.take()
                && !self.place(carried)?
            {
                return Ok(());
            }
            if self.pending.is_none() && self.may_roll_by_age() {
                self.pending = Some(Pending::Roll(None));
            }
            if self.pending.is_some() {
                return Ok(());
            }
            self.segment_bytes = self.shared.live.segment_bytes();
            match self.inbox.take() {
                Some(Message::Append { batch, answer }) => self.carried = Some(self.carry(batch, answer)),
                Some(Message::Sync { answer }) => self.syncs.push((self.next_offset, answer)),
                Some(Message::Roll { answer }) => self.pending = Some(Pending::Roll(Some(answer))),
                Some(Message::TruncateAfter { offset, answer }) => self.pending = Some(Pending::TruncateAfter(offset, answer)),
                Some(Message::Close { answer }) => self.pending = Some(Pending::Close(answer)),
                None => return Ok(()),
            }
            self.watch_until = self.clock.monotonic().saturating_add(self.watches);
        }
    }

    /// A batch whose turn has come.
    pub(super) fn carry(&self, batch: Batch, answer: Answerer<Answer>) -> Carried {
        let timestamp = self.clock.wall_ns().max(self.last_timestamp);
        Carried { batch, answer, at: 0, first: self.next_offset, placed: 0, timestamp, has_room: false, waits: false }
    }

    /// Places the rest of a batch. False if not all of it could be: then it is carried on.
    pub(super) fn place(&mut self, mut carried: Carried) -> Result<bool> {
        carried.waits = false;
        let records = carried.batch.len();
        if carried.at == 0 && records > u64::MAX - self.next_offset {
            let (path, next) = (self.shared.dir.to_path_buf(), self.next_offset);
            return self.refuse(carried, Error::OffsetsUsedUp { path, next, records }).map(|()| true);
        }
        loop {
            if self.is_commit_of_its_own(&carried) && self.has_room_for_rest(&mut carried)? {
                self.take_as_commit(carried);
                return Ok(true);
            }
            match self.place_records(&mut carried) {
                Ok(None) => {
                    let Carried { batch, answer, first, placed, .. } = carried;
                    let open = self.open.as_mut().expect("a batch holds a record, and the last one went into the open commit");
                    open.lists.waiters.push(Waiter { answer, offsets: first..first + placed });
                    self.inbox.give_back(batch);
                    return Ok(true);
                }
                Ok(Some(Blocked::CommitFull)) => {
                    self.carried = Some(carried);
                    return Ok(false);
                }
                Ok(Some(Blocked::NoRoomYet)) => {
                    carried.waits = true;
                    self.carried = Some(carried);
                    return Ok(false);
                }
                Ok(Some(Blocked::SegmentFull)) => {
                    // Every record before is on its way before the new segment holds any.
                    let launched = self.open.is_none() && self.flight.is_none();
                    if !launched || !self.finished.is_empty() || !self.may_roll() {
                        carried.waits = launched;
                        self.carried = Some(carried);
                        return Ok(false);
                    }
                    if let Err(refusal) = self.roll()? {
                        return self.refuse(carried, refusal).map(|()| true);
                    }
                    carried.has_room = false;
                }
                Ok(Some(Blocked::Refused(error))) => return self.refuse(carried, error).map(|()| true),
                Err(error) => return Err(error),
            }
        }
    }

    /// Answers a batch for which there is no room, or no segment. Nothing was written for what is left of it; an error that
    /// cannot tell how much that is latches.
    fn refuse(&mut self, carried: Carried, error: Error) -> Result<()> {
        let error = match error {
            Error::DiskFull { path, needed, .. } => Error::DiskFull { path, needed, appended: carried.placed },
            Error::TooManyOpenFiles { path, limit, .. } => Error::TooManyOpenFiles { path, limit, appended: carried.placed },
            error if carried.placed == 0 => error,
            error => return Err(error),
        };
        tracing::warn!(%error, "an append is refused");
        carried.answer.send(Err(error));
        Ok(())
    }

    /// Encodes records until the batch, the commit or the segment is at its end. With the last record, the answer is owed.
    fn place_records(&mut self, carried: &mut Carried) -> Result<Option<Blocked>> {
        while let Some(bytes) = carried.batch.record_bytes(carried.at) {
            let position = self.end;
            if position > 0 && position + to_u64(bytes) > self.segment_bytes {
                return Ok(Some(Blocked::SegmentFull));
            }
            if !carried.has_room {
                match self.make_room(carried, position, bytes)? {
                    Room::There => {}
                    Room::Later => return Ok(Some(Blocked::NoRoomYet)),
                    Room::Refused(error) => return Ok(Some(Blocked::Refused(error))),
                }
            }
            if self.open.as_ref().is_some_and(|open| !self.fits(open, bytes)) {
                return Ok(Some(Blocked::CommitFull));
            }
            let offset = self.next_offset;
            let timestamp = carried.timestamp;
            let base = self.active.segment.base();
            let indexed = is_indexed(base, offset, self.shared.config.index_interval);
            let open = self.open_commit(bytes, carried.batch.bytes() - to_u64(carried.at))?;
            open.push(&carried.batch, carried.at, bytes, offset, timestamp);
            if indexed {
                open.lists.entries.push(IndexEntry { offset, position, timestamp });
            }
            if let Some(open) = &self.open {
                // While the record is in the CPU's caches.
                self.active.sum.update(open.newest(bytes));
            }
            self.end += to_u64(bytes);
            self.next_offset = offset.checked_add(1).expect("a batch is placed only where the offsets suffice");
            self.last_timestamp = timestamp;
            carried.at += bytes;
            carried.placed += 1;
        }
        Ok(None)
    }

    /// Whether the batch is worth a commit without others, which spares copying it: where any bytes can be written, and the call
    /// costs little beside the bytes.
    fn is_commit_of_its_own(&self, carried: &Carried) -> bool {
        let (config, bytes) = (&self.shared.config, carried.batch.bytes());
        !self.active.direct
            && self.open.is_none()
            && carried.at == 0
            && (WORTH_WAKING..=config.commit_bytes).contains(&bytes)
            && carried.batch.len() <= config.commit_records
            && self.end + bytes <= self.segment_bytes
    }

    fn has_room_for_rest(&mut self, carried: &mut Carried) -> Result<bool> {
        if carried.has_room {
            return Ok(true);
        }
        // What is refused, is refused by the way that all batches go.
        Ok(matches!(self.make_room(carried, self.end, to_usize(carried.batch.bytes()))?, Room::There))
    }

    /// Makes the batch the open commit.
    fn take_as_commit(&mut self, carried: Carried) {
        let Carried { mut batch, answer, first, timestamp, .. } = carried;
        let mut lists = self.spare_lists.pop().unwrap_or_default();
        let base = self.active.segment.base();
        let (start, mut at) = (self.end, 0);
        while let Some(bytes) = batch.record_bytes(at) {
            batch.complete_record(at, self.next_offset, timestamp);
            if is_indexed(base, self.next_offset, self.shared.config.index_interval) {
                lists.entries.push(IndexEntry { offset: self.next_offset, position: start + to_u64(at), timestamp });
            }
            at += bytes;
            self.next_offset = self.next_offset.checked_add(1).expect("a batch is placed only where the offsets suffice");
        }
        self.active.sum.update(batch.as_stored());
        self.end = start + to_u64(at);
        self.last_timestamp = timestamp;
        lists.waiters.push(Waiter { answer, offsets: first..self.next_offset });
        self.open = Some(Commit::of_batch(batch, start, self.next_offset, lists, self.clock.monotonic()));
    }

    /// Room for as much of the batch as can go into this segment, before any of that is encoded: a disk that is full
    /// refuses whole batches, except those that span segments.
    fn make_room(&mut self, carried: &mut Carried, position: u64, bytes: usize) -> Result<Room> {
        if self.owes_last_block {
            match self.active.last_block(&*self.shared.disk) {
                Ok(block) => self.last_block = block,
                Err(error) => return Ok(Room::Refused(error)),
            }
            self.owes_last_block = false;
        }
        let limit = self.segment_bytes;
        let rest = carried.batch.bytes() - to_u64(carried.at);
        let end = (position + rest).min(limit).max(position + to_u64(bytes));
        if !self.active.has_room(end) {
            if self.under_way.extend {
                return Ok(Room::Later);
            }
            let mut made = self.active.make_room(&self.shared, end, limit);
            if matches!(&made, Err(Denied::Refused(error)) if error.is_disk_full()) {
                // What was set aside for later is needed now.
                if self.under_way.prepare {
                    return Ok(Room::Later);
                }
                if self.prepared.is_some() {
                    self.discard_prepared();
                    made = self.active.make_room(&self.shared, end, limit);
                }
            }
            match made {
                Ok(()) => {}
                Err(Denied::Refused(error)) => return Ok(Room::Refused(error)),
                Err(Denied::Failed(error)) => return Err(error),
            }
        }
        carried.has_room = true;
        Ok(Room::There)
    }

    fn fits(&self, open: &Commit, bytes: usize) -> bool {
        let config = &self.shared.config;
        open.has_room(bytes) && open.bytes() + to_u64(bytes) <= config.commit_bytes && open.records() < config.commit_records
    }

    /// The commit that is being filled, with room for `bytes` more; `rest` bytes are at hand.
    fn open_commit(&mut self, bytes: usize, rest: u64) -> Result<&mut Commit> {
        if self.open.is_none() {
            let prefix = if self.active.direct { self.last_block.as_slice() } else { &[] };
            let needed = prefix.len() + bytes;
            let at_hand = (rest + self.inbox.queued_bytes()).clamp(WORTH_WAKING, self.shared.config.commit_bytes.max(WORTH_WAKING));
            // Where the written space comes to its end, zeros want room as well.
            let zeros = self.zero_ahead.behind(self.end + at_hand, self.active.zeroed, self.active.allocated);
            let buffer = self.memory.take(&self.shared.recent, needed, prefix.len() + to_usize(at_hand + zeros));
            let buffer = buffer.map_err(Error::io("find memory for a commit of", &self.shared.dir))?;
            let lists = self.spare_lists.pop().unwrap_or_default();
            self.open = Some(Commit::new(buffer, self.end, prefix, lists, self.clock.monotonic()));
        }
        Ok(self.open.as_mut().expect("made above"))
    }

    pub(super) fn linger(&self) -> Duration {
        self.shared.live.linger()
    }
}
