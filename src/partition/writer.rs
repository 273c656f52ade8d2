//! The one writer of a partition: a state machine that takes messages, fills commits, and answers when they are durable.
//!
//! [`Writer::step`] decides and starts, and blocks only where files are opened, sealed or given room; [`run`] is the
//! loop around it that waits. One durable write is in flight at a time, and the next commit is filled meanwhile.
//!
//! Invariants:
//! - Offsets are given out in the order of the queue, without gaps; a commit's records directly follow those before it.
//! - A waiter is answered after the commit with its last record completed, and only then do readers see it.
//! - An error from `step` ends the writer for good: the partition is latched, and dropping the writer drops every
//!   answer that is owed, which its ticket takes for the latch's error.
//!
//! Everything here runs on the writer's own thread.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::active::{Active, NoSegment};
use super::checkpoint::{Checkpoint, Checkpoints};
use super::commit::{Commit, Waiter};
use super::queue::{Hearing, Inbox, Message};
use super::syncer::Syncer;
use super::ticket::Answer;
use super::{Appender, Shared};
use crate::clock::Clock;
use crate::config::Durability;
use crate::error::{Error, Result};
use crate::io::transfer::{Done, Place, Transfers};
use crate::io::{Action, BLOCK, Buffer, Slot, Token};
use crate::record::{Batch, to_u64, to_usize};
use crate::segment::{IndexEntry, Kind, is_indexed};

/// How long an idle writer leaves index entries in memory.
const INDEX_PATIENCE: Duration = Duration::from_millis(100);

/// Above this, a commit's own write dwarfs the journal commit that zeros ahead of it would save.
const ZEROING_PAYS_BELOW: u64 = 256 << 10;

/// How many commits' worth of zeros one write ahead holds, and its bounds.
const ZERO_COMMITS: u64 = 32;
const ZERO_LEAST: u64 = 256 << 10;
const ZERO_MOST: u64 = 1 << 20;

const COMMIT: Token = Token(0);
const ZEROS: Token = Token(1);

/// Operations that a writer has in flight at most: a commit and zeros ahead of it.
pub(super) const DEPTH: u32 = 2;

/// What the loop is to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Call again.
    Again,
    /// Wait for a completion, for what is worth hearing, or for so long.
    Wait(Hearing, Option<Duration>),
    /// Closed.
    End,
}

/// A batch whose records are not all in a commit yet.
#[derive(Debug)]
struct Carried {
    batch: Batch,
    answer: oneshot::Sender<Answer>,
    /// The next record's place in the batch.
    at: usize,
    /// The first record's offset, and how many have one.
    first: u64,
    placed: u64,
    timestamp: u64,
    /// Whether the rest that goes into the active segment was given room.
    has_room: bool,
    /// Whether it waits for the next segment.
    needs_roll: bool,
}

/// An end of the log.
#[derive(Debug, Clone, Copy)]
struct End {
    position: u64,
    offset: u64,
}

/// Why a batch's next record did not go into the open commit.
enum Blocked {
    CommitFull,
    SegmentFull,
}

/// Everything that the writer's thread owns.
#[derive(Debug)]
pub(super) struct Writer {
    // Dropped in this order: whoever waits is told before the ring waits for the device.
    inbox: Inbox,
    carried: Option<Carried>,
    open: Option<Commit>,
    /// The commit whose write is in flight; its buffer is the ring's meanwhile.
    flight: Option<Commit>,
    syncs: Vec<(u64, oneshot::Sender<Result<()>>)>,
    closing: Option<oneshot::Sender<Result<()>>>,
    shared: Arc<Shared>,
    clock: Arc<dyn Clock>,
    active: Active,
    slot: Slot,
    /// The bytes of the block in which the next commit begins, before its first record.
    last_block: Vec<u8>,
    next_offset: u64,
    last_timestamp: u64,
    checkpoints: Checkpoints,
    spare: Vec<Buffer>,
    zeros: Option<Buffer>,
    /// The zeros that are being written.
    zeroing: Option<Range<u64>>,
    /// Bytes per commit, smoothed.
    typical_bytes: u64,
    /// Bytes that the kernel has and no sync was begun for, and since when.
    unsynced: Option<(u64, Duration)>,
    syncer: Option<Syncer>,
    /// Where the log ended when the sync under way began.
    syncing: Option<End>,
    /// Since when index entries wait.
    index_since: Option<Duration>,
    transfers: Transfers,
}

impl Writer {
    /// A writer that goes on behind what recovery found.
    pub(super) fn new(shared: Arc<Shared>, clock: Arc<dyn Clock>, inbox: Inbox, mut transfers: Transfers, start: Appender) -> Result<Self> {
        let Appender { active, next_offset, last_timestamp, checkpoints } = start;
        let slot = transfers.attach(Arc::clone(&active.log)).map_err(Error::io("attach to the ring", &shared.dir))?;
        let last_block = active.last_block(&*shared.disk)?;
        let spare = transfers.take_buffers();
        Ok(Self {
            inbox,
            carried: None,
            open: None,
            flight: None,
            syncs: Vec::new(),
            closing: None,
            shared,
            clock,
            active,
            slot,
            last_block,
            next_offset,
            last_timestamp,
            checkpoints,
            spare,
            zeros: None,
            zeroing: None,
            typical_bytes: 0,
            unsynced: None,
            syncer: None,
            syncing: None,
            index_since: None,
            transfers,
        })
    }

    /// Does what can be done now.
    ///
    /// # Errors
    /// The failure that latches the partition.
    pub(super) fn step(&mut self) -> Result<Step> {
        self.reap()?;
        self.fill()?;
        self.launch();
        // A ring of blocking calls is done already: its waiters come before the upkeep, which else runs in the write's shadow.
        self.reap()?;
        if self.active.owes_index() {
            self.write_index();
        }
        self.zero_ahead();
        self.finish_sync()?;
        if self.sync_is_due() {
            self.begin_sync()?;
        }
        self.answer_syncs();
        if self.is_idle()
            && let Some(answer) = self.closing.take()
        {
            let closed = self.close();
            // Nobody may be waiting: a dropped partition closes too.
            let _ = answer.send(closed);
            return Ok(Step::End);
        }
        Ok(self.what_next())
    }

    /// The loop around [`Self::step`].
    pub(super) fn run(&mut self) -> Result<()> {
        loop {
            match self.step()? {
                Step::Again => {}
                Step::Wait(hearing, timeout) => {
                    if self.inbox.listen(hearing) {
                        self.transfers.wait(timeout).map_err(Error::io("wait for", &self.shared.dir))?;
                        self.inbox.stop_listening();
                    }
                }
                Step::End => return Ok(()),
            }
        }
    }

    /// Nothing is under way or half done.
    fn is_idle(&self) -> bool {
        self.flight.is_none() && self.open.is_none() && self.carried.is_none() && self.is_rested()
    }

    /// No upkeep is under way that the active segment's end must wait for.
    fn is_rested(&self) -> bool {
        self.zeroing.is_none() && self.syncing.is_none()
    }

    fn what_next(&mut self) -> Step {
        let launchable = self.open_is_due() || self.carried.is_some() || self.closing.is_some();
        let ends_segment = self.closing.is_some() || self.carried.as_ref().is_some_and(|carried| carried.needs_roll);
        if self.flight.is_some() || self.zeroing.is_some() && launchable || self.syncing.is_some() && ends_segment {
            // A completion comes by itself. Until then, only a batch that there is room for is worth hearing of.
            let takes_more = self.carried.is_none() && self.closing.is_none();
            return Step::Wait(if takes_more { Hearing::Plenty } else { Hearing::Nothing }, None);
        }
        if launchable {
            return Step::Again;
        }
        let now = self.clock.monotonic();
        if self.index_since.is_none() && !self.active.segment.pending().is_empty() {
            self.index_since = Some(now);
        }
        let index = self.index_since.map(|since| (since + INDEX_PATIENCE).saturating_sub(now));
        if index.is_some_and(|wait| wait.is_zero()) {
            self.write_index();
            return Step::Again;
        }
        let linger = self.open.as_ref().map(|open| (open.since + self.linger()).saturating_sub(now));
        // While a sync is under way, its end is what brings the next.
        let sync = self.unsynced.filter(|_| self.syncing.is_none()).and_then(|(_, since)| match self.shared.config.durability {
            Durability::Interval { time, .. } => Some((since + time).saturating_sub(now)),
            Durability::Durable | Durability::Os => None,
        });
        Step::Wait(Hearing::Anything, [linger, index, sync].into_iter().flatten().min())
    }

    // ---------------------------------------------------------------- taking messages

    /// Puts what waits into the open commit, as far as there is room.
    fn fill(&mut self) -> Result<()> {
        loop {
            if let Some(carried) = self.carried.take()
                && !self.place(carried)?
            {
                return Ok(());
            }
            if self.closing.is_some() {
                return Ok(());
            }
            match self.inbox.take() {
                Some(Message::Append { batch, answer }) => {
                    let timestamp = self.clock.wall_ns().max(self.last_timestamp);
                    let first = self.next_offset;
                    self.carried = Some(Carried { batch, answer, at: 0, first, placed: 0, timestamp, has_room: false, needs_roll: false });
                }
                Some(Message::Sync { answer }) => self.syncs.push((self.next_offset, answer)),
                Some(Message::Close { answer }) => self.closing = Some(answer),
                None => return Ok(()),
            }
        }
    }

    /// Places the rest of a batch. False if not all of it could be: then it is carried on.
    fn place(&mut self, mut carried: Carried) -> Result<bool> {
        loop {
            match self.place_records(&mut carried) {
                Ok(None) => {
                    let Carried { answer, first, placed, .. } = carried;
                    let open = self.open.as_mut().expect("a batch holds a record, and the last one went into the open commit");
                    open.waiters.push(Waiter { answer, offsets: first..first + placed });
                    return Ok(true);
                }
                Ok(Some(Blocked::CommitFull)) => {
                    self.carried = Some(carried);
                    return Ok(false);
                }
                Ok(Some(Blocked::SegmentFull)) => {
                    // Every record before is durable before the new segment holds any.
                    if self.open.is_some() || self.flight.is_some() || !self.is_rested() {
                        carried.needs_roll = true;
                        self.carried = Some(carried);
                        return Ok(false);
                    }
                    if let Err(refusal) = self.roll()? {
                        return self.refuse(carried, refusal).map(|()| true);
                    }
                    carried.has_room = false;
                    carried.needs_roll = false;
                }
                Err(error @ Error::DiskFull { .. }) => return self.refuse(carried, error).map(|()| true),
                Err(error) => return Err(error),
            }
        }
    }

    /// Answers a batch for which there is no room, or no segment. Nothing was written for what is left of it; an error that
    /// cannot tell how much that is latches.
    fn refuse(&mut self, carried: Carried, error: Error) -> Result<()> {
        let error = match error {
            Error::DiskFull { path, needed, .. } => Error::DiskFull { path, needed, appended: carried.placed },
            error if carried.placed == 0 => error,
            error => return Err(error),
        };
        tracing::warn!(%error, "an append is refused");
        let _ = carried.answer.send(Err(error));
        Ok(())
    }

    /// Encodes records until the batch, the commit or the segment is at its end. With the last record, the answer is owed.
    fn place_records(&mut self, carried: &mut Carried) -> Result<Option<Blocked>> {
        while let Some(bytes) = carried.batch.record_bytes(carried.at) {
            let position = self.end();
            if position > 0 && position + to_u64(bytes) > self.shared.config.segment_bytes {
                return Ok(Some(Blocked::SegmentFull));
            }
            if !carried.has_room {
                self.make_room(carried, position, bytes)?;
            }
            if self.open.as_ref().is_some_and(|open| !self.fits(open, bytes)) {
                return Ok(Some(Blocked::CommitFull));
            }
            let offset = self.next_offset;
            let timestamp = carried.timestamp;
            let base = self.active.segment.base();
            let indexed = is_indexed(base, offset, self.shared.config.index_interval);
            let open = self.open_commit(bytes)?;
            open.push(&carried.batch, carried.at, bytes, offset, timestamp);
            if indexed {
                open.entries.push(IndexEntry { offset, position, timestamp });
            }
            self.next_offset = offset.checked_add(1).expect("fewer than 2^64 records");
            self.last_timestamp = timestamp;
            carried.at += bytes;
            carried.placed += 1;
        }
        Ok(None)
    }

    /// Room for as much of the batch as can go into this segment, before any of that is encoded: a disk that is full
    /// refuses whole batches, except those that span segments.
    fn make_room(&mut self, carried: &mut Carried, position: u64, bytes: usize) -> Result<()> {
        let config = &self.shared.config;
        let rest = carried.batch.bytes() - to_u64(carried.at);
        let end = (position + rest).min(config.segment_bytes).max(position + to_u64(bytes));
        self.active.make_room(&self.shared, end, config.segment_bytes)?;
        carried.has_room = true;
        Ok(())
    }

    fn fits(&self, open: &Commit, bytes: usize) -> bool {
        open.has_room(bytes) && open.bytes() + to_u64(bytes) <= self.shared.config.commit_bytes
    }

    /// The commit that is being filled, with room for `bytes` more.
    fn open_commit(&mut self, bytes: usize) -> Result<&mut Commit> {
        if self.open.is_none() {
            let prefix = if self.active.direct { self.last_block.as_slice() } else { &[] };
            let needed = prefix.len() + bytes;
            let buffer = match self.spare.pop() {
                Some(buffer) if buffer.len() >= needed => buffer,
                small => {
                    // A record larger than the buffers gets memory of its own for its commit.
                    self.spare.extend(small);
                    Buffer::new(needed).map_err(Error::io("find memory for a commit of", &self.shared.dir))?
                }
            };
            let start = self.end();
            self.open = Some(Commit::new(buffer, start, prefix, self.clock.monotonic()));
        }
        Ok(self.open.as_mut().expect("made above"))
    }

    /// One past the last byte of the last record that has a place.
    fn end(&self) -> u64 {
        let commit = self.open.as_ref().or(self.flight.as_ref());
        commit.map_or_else(|| self.active.segment.appended(), Commit::end)
    }

    fn linger(&self) -> Duration {
        Duration::from_micros(self.shared.config.linger_us)
    }

    // ---------------------------------------------------------------- the write

    /// Whether the open commit waits for nothing but the device.
    fn open_is_due(&self) -> bool {
        let hurried = self.carried.is_some() || self.closing.is_some() || !self.syncs.is_empty();
        self.open.as_ref().is_some_and(|open| {
            hurried || open.bytes() >= self.shared.config.commit_bytes || self.clock.monotonic() >= open.since + self.linger()
        })
    }

    /// Starts the open commit's write if it is due and nothing is in its way.
    fn launch(&mut self) {
        if self.flight.is_some() || !self.open_is_due() {
            return;
        }
        let direct = self.active.direct;
        let Some(mut commit) = self.open.take() else { return };
        let overlaps = |zeros: &Range<u64>| zeros.start < commit.written_end(direct) && commit.written_start() < zeros.end;
        if self.zeroing.as_ref().is_some_and(overlaps) {
            self.open = Some(commit);
            return;
        }
        let (buffer, range, position) = commit.launch(direct, &mut self.last_block);
        let durable = self.shared.config.durability == Durability::Durable;
        self.flight = Some(commit);
        self.transfers.start(COMMIT, Action::Write { durable }, Place { slot: self.slot, position, direct }, buffer, range);
    }

    fn reap(&mut self) -> Result<()> {
        while let Some(done) = self.transfers.next().map_err(Error::io("reap completions of", &self.shared.dir))? {
            match done.token {
                COMMIT => self.finish_commit(done)?,
                _ => self.finish_zeros(done),
            }
        }
        Ok(())
    }

    /// Publishes a commit whose write ended, and answers who waits for it.
    fn finish_commit(&mut self, done: Done) -> Result<()> {
        let commit = self.flight.take().expect("only a commit in flight completes");
        let segment = Arc::clone(&self.active.segment);
        done.result.map_err(Error::io("write", &segment.path(Kind::Log)))?;
        segment.extend(commit.end(), &commit.entries);
        self.shared.set_appended_end(commit.end_offset());
        if self.shared.config.durability == Durability::Durable {
            segment.set_durable(commit.end());
            self.shared.set_durable_end(commit.end_offset());
        } else {
            let (bytes, since) = self.unsynced.unwrap_or_else(|| (0, self.clock.monotonic()));
            self.unsynced = Some((bytes + commit.bytes(), since));
        }
        self.shared.metrics.commit(commit.records(), commit.bytes());
        if self.active.owes_first_entry() {
            self.active.write_index(&*self.shared.disk);
        }
        self.typical_bytes = (self.typical_bytes * 7 + (commit.end() - commit.written_start())) / 8;
        for waiter in commit.waiters {
            // A dropped ticket is an append that nobody waits for.
            let _ = waiter.answer.send(Ok(waiter.offsets));
        }
        self.active.zeroed = self.active.zeroed.max(segment.appended().next_multiple_of(BLOCK));
        if done.buffer.len() == self.shared.buffer_bytes() {
            self.spare.push(done.buffer);
        }
        Ok(())
    }

    // ---------------------------------------------------------------- upkeep

    fn write_index(&mut self) {
        self.active.write_index(&*self.shared.disk);
        self.index_since = None;
    }

    /// Starts writing zeros ahead of the commits, where that pays and they run out.
    fn zero_ahead(&mut self) {
        let pays = self.active.direct && self.active.zeroing_pays && self.typical_bytes <= ZEROING_PAYS_BELOW;
        if !pays || self.zeroing.is_some() || self.closing.is_some() {
            return;
        }
        let bytes = (self.typical_bytes * ZERO_COMMITS).clamp(ZERO_LEAST, ZERO_MOST).next_multiple_of(BLOCK);
        let end = self.end();
        if self.active.zeroed > end + bytes / 2 {
            return;
        }
        let range = self.active.to_zero(end, bytes);
        if range.is_empty() {
            return;
        }
        let Some(zeros) = self.zeros.take().or_else(|| Buffer::new(to_usize(ZERO_MOST)).ok()) else { return };
        let place = Place { slot: self.slot, position: range.start, direct: true };
        self.transfers.start(ZEROS, Action::Write { durable: false }, place, zeros, 0..to_usize(range.end - range.start));
        self.zeroing = Some(range);
    }

    /// Zeros hold nothing: where they cannot be written, commits only take longer.
    fn finish_zeros(&mut self, done: Done) {
        let range = self.zeroing.take().expect("only zeros in flight complete");
        self.zeros = Some(done.buffer);
        match done.result {
            Ok(_) => self.active.zeroed = self.active.zeroed.max(range.end),
            Err(error) => {
                tracing::warn!(%error, path = %self.active.segment.path(Kind::Log).display(), "zeros could not be written ahead");
                self.active.zeroing_pays = false;
            }
        }
    }

    /// Whether what the kernel has is to be synced now.
    fn sync_is_due(&self) -> bool {
        let Some((bytes, since)) = self.unsynced else { return false };
        let asked = self.syncs.iter().any(|(offset, _)| *offset <= self.shared.appended_end());
        let interval = match self.shared.config.durability {
            Durability::Interval { bytes: limit, time } => bytes >= limit || self.clock.monotonic() >= since + time,
            Durability::Durable | Durability::Os => false,
        };
        self.syncing.is_none() && (asked || interval)
    }

    /// Has everything synced that the kernel has now. Appends go on meanwhile.
    fn begin_sync(&mut self) -> Result<()> {
        if self.syncer.is_none() {
            let started = Syncer::start("log sync".to_owned(), self.transfers.waker());
            self.syncer = Some(started.map_err(Error::io("start a syncing thread for", &self.shared.dir))?);
        }
        if let Some(syncer) = &self.syncer {
            syncer.begin(Arc::clone(&self.active.log));
        }
        self.syncing = Some(End { position: self.active.segment.appended(), offset: self.shared.appended_end() });
        self.unsynced = None;
        Ok(())
    }

    fn finish_sync(&mut self) -> Result<()> {
        let Some(End { position, offset }) = self.syncing else { return Ok(()) };
        let Some(result) = self.syncer.as_ref().and_then(Syncer::result) else { return Ok(()) };
        let segment = &self.active.segment;
        result.map_err(Error::io("sync", &segment.path(Kind::Log)))?;
        self.syncing = None;
        segment.set_durable(position);
        self.shared.set_durable_end(offset);
        self.shared.metrics.sync();
        Ok(())
    }

    fn everything_is_durable(&mut self) {
        self.unsynced = None;
        self.shared.set_durable_end(self.shared.appended_end());
    }

    /// Answers the syncs whose records are all on the device.
    fn answer_syncs(&mut self) {
        if self.syncs.is_empty() {
            return;
        }
        let durable_end = self.shared.durable_end();
        for (offset, answer) in std::mem::take(&mut self.syncs) {
            if offset <= durable_end {
                let _ = answer.send(Ok(()));
            } else {
                self.syncs.push((offset, answer));
            }
        }
    }

    /// Seals the active segment and opens the next, named by the next offset. Everything before is durable then. The inner
    /// error leaves the active segment as it was, and able to take what still fits.
    fn roll(&mut self) -> Result<Result<(), Error>> {
        self.active.seal(&self.shared)?;
        self.everything_is_durable();
        let next = match Active::create(&self.shared, self.next_offset) {
            Ok(next) => next,
            Err(NoSegment::Refused(error)) => return Ok(Err(error)),
            Err(NoSegment::Failed(error)) => return Err(error),
        };
        let slot = self.transfers.attach(Arc::clone(&next.log)).map_err(Error::io("attach to the ring", &self.shared.dir))?;
        self.transfers.detach(std::mem::replace(&mut self.slot, slot));
        self.shared.push_segment(Arc::clone(&next.segment));
        self.active = next;
        self.last_block.clear();
        self.index_since = None;
        self.shared.metrics.roll();
        Ok(Ok(()))
    }

    fn close(&mut self) -> Result<()> {
        self.active.seal(&self.shared)?;
        self.everything_is_durable();
        self.answer_syncs();
        let written = self.checkpoints.write(&Checkpoint {
            base: self.active.segment.base(),
            position: self.active.segment.durable(),
            next_offset: self.next_offset,
            last_timestamp: self.last_timestamp,
            entries: self.active.sealed_entries(),
            clean: true,
        });
        self.checkpoints.tell(written);
        Ok(())
    }
}
