//! The one writer of a partition: a state machine that takes messages, fills commits, and answers when they are durable.
//!
//! [`Writer::step`] decides and starts; [`Writer::work`] is the loop around it that waits. One durable write is under way at a
//! time. Where there is something to do meanwhile (records to encode, many to answer), it is the ring's, and the next commit is
//! filled beside it; where there is not, a plain call on this thread is the fastest way to have one write done. Everything that
//! is not the commit itself goes to [`Upkeep`].
//!
//! Invariants:
//! - Offsets are given out in the order of the queue, without gaps; a commit's records directly follow those before it.
//! - A waiter is answered after the commit with its last record completed, and only then do readers see it. The first commits
//!   of a segment also wait until its name is durable.
//! - An error from `step` ends the writer for good: the partition is latched, and dropping the writer drops every
//!   answer that is owed, which its ticket takes for the latch's error.
//!
//! Everything here runs on the writer's own thread, but for [`Writer::commit`], which a producer calls that found the writer idle;
//! the [`Helm`](super::helm::Helm) sees to it that only one thread is at it.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::active::{self, Active, Denied, Prepared};
use super::checkpoint::Checkpoint;
use super::commit::{self, Commit, Lists, Waiter};
use super::cut::Cut;
use super::queue::{Bell, Hearing, Inbox, Message, WORTH_WAKING, Where};
use super::recent::Memory;
use super::reply::{Answerer, Crowd};
use super::ticket::Answer;
use super::upkeep::{Done, Job, Upkeep};
use super::zeroing::{Space, ZeroAhead};
use super::{Appender, Shared};
use crate::clock::Clock;
use crate::config::{Durability, WaitStrategy};
use crate::error::{Error, Result};
use crate::guard::{self, Guard};
use crate::io::transfer::{self, Place, Transfers, write_all_at, write_blocks_at};
use crate::io::{Action, BLOCK, Buffer, Disk, File, RingConfig, Slot, Token};
use crate::record::{Batch, to_u64, to_usize};
use crate::segment::{IndexEntry, Kind, Segment, is_indexed};

/// How long an idle writer leaves index entries in memory, and how many of them wait at most.
const INDEX_PATIENCE: Duration = Duration::from_millis(100);
const PENDING_ENTRIES: usize = 4096;

/// A checkpoint is written after so many bytes, or so long after the first of them: about what a restart reads in 50 ms.
const CHECKPOINT_BYTES: u64 = 32 << 20;
const CHECKPOINT_AGE: Duration = Duration::from_secs(5);

/// How long a roll that an old segment calls for is put off, where there was no room for it.
const ROLL_PATIENCE: Duration = Duration::from_secs(10);

const COMMIT: Token = Token(0);

/// Operations that a writer has in flight at most.
const DEPTH: u32 = 1;

/// A writer that had nothing to do for so long gives back what it holds for its commits: memory, ring, upkeep's thread.
const REST: Duration = Duration::from_secs(5);

/// What the loop is to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Call again.
    Again,
    /// Wait there for its completion or for the bell, which rings for what is worth hearing, or until that time.
    Wait(Where, Hearing, Option<Duration>),
    /// Let go of what the next commit can do without, on the writer's own thread.
    Rest,
    /// Closed.
    End,
}

/// Why the writer's thread lets go of the writer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pause {
    /// To wait for the bell there, at most so long.
    Wait(Where, Option<Duration>),
    /// To let others take a step, where there are any.
    BetweenSteps,
    /// Closed.
    End,
}

/// A batch whose records are not all in a commit yet.
#[derive(Debug)]
struct Carried {
    batch: Batch,
    answer: Answerer<Answer>,
    /// The next record's place in the batch.
    at: usize,
    /// The first record's offset, and how many have one.
    first: u64,
    placed: u64,
    timestamp: u64,
    /// Whether the rest that goes into the active segment was given room.
    has_room: bool,
    /// Whether it waits for upkeep to end rather than for a commit.
    waits: bool,
}

/// An end of the log.
#[derive(Debug, Clone)]
struct End {
    segment: Arc<Segment>,
    position: u64,
    offset: u64,
}

/// Why a batch's next record did not go into the open commit.
enum Blocked {
    CommitFull,
    SegmentFull,
    /// Room is being made, or is about to be given back.
    NoRoomYet,
    /// There is none, and nothing was written.
    Refused(Error),
}

/// Whether a batch finds room in the active segment.
enum Room {
    There,
    /// It is worth waiting for.
    Later,
    /// Nothing was written, and what is there is intact.
    Refused(Error),
}

/// What is done while nothing else is, and holds up what was queued behind it.
#[derive(Debug)]
enum Pending {
    /// The next segment begins; asked for, or because this one is old enough.
    Roll(Option<Answerer<Result<()>>>),
    TruncateAfter(u64, Answerer<Result<()>>),
    Close(Answerer<Result<()>>),
}

/// The ring, and the active log's place in it.
#[derive(Debug)]
struct InRing {
    transfers: Transfers,
    slot: Slot,
}

impl InRing {
    /// Makes a ring with so many regions of so many bytes, as far as they can be registered, on the thread that will use it.
    fn make(disk: &dyn Disk, (buffers, buffer_bytes): (usize, usize), log: &Arc<dyn File>) -> io::Result<(Self, Vec<Buffer>)> {
        let config = RingConfig { depth: DEPTH, files: 2, register_files: true, buffers, buffer_bytes, one_thread: true };
        let mut transfers = Transfers::new(disk.ring(&config)?);
        let slot = transfers.attach(Arc::clone(log))?;
        let regions = transfers.take_buffers();
        Ok((Self { transfers, slot }, regions))
    }
}

/// What a writer finds at a thread that works for others as well.
#[derive(Debug, Clone, Copy)]
pub(super) struct Company {
    /// Whether the thread's ring has a place for a write.
    pub(super) has_place: bool,
    /// Whether others have something to do, which they would not while this writer waits for its write.
    pub(super) is_there: bool,
}

/// A write that the thread is to start, past the page cache. What comes of it is given to the writer's next turn.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) log: Arc<dyn File>,
    pub(super) durable: bool,
    pub(super) position: u64,
    pub(super) buffer: Buffer,
    pub(super) range: Range<usize>,
}

/// How a writer is at work on a thread that it shares.
#[derive(Debug)]
struct Shares {
    company: Company,
    outgoing: Option<Outgoing>,
    landed: Option<transfer::Done>,
}

/// What upkeep was begun and not ended.
#[derive(Debug, Default)]
struct UnderWay {
    index: bool,
    extend: bool,
    prepare: bool,
    /// The active segment's name is not durable yet, and appends wait for it.
    names: bool,
    /// Where the log ended when the sync began.
    sync: Option<End>,
    /// Segments that are being sealed, oldest first.
    seals: VecDeque<End>,
    checkpoint: bool,
}

/// Everything that whoever works as the writer owns.
#[derive(Debug)]
pub(super) struct Writer {
    // Dropped in this order: whoever waits is told before the ring waits for the device.
    inbox: Inbox,
    carried: Option<Carried>,
    open: Option<Commit>,
    /// The commit whose write is in flight; its buffer is the ring's meanwhile.
    flight: Option<Commit>,
    /// Written, and waiting for the segment's name to be durable.
    finished: VecDeque<Commit>,
    /// Their records are as durable as they asked for; they are not told yet.
    unanswered: Vec<Waiter>,
    crowd: Crowd<Answer>,
    syncs: Vec<(u64, Answerer<Result<()>>)>,
    /// Nothing more is taken from the queue until that is done.
    pending: Option<Pending>,
    shared: Arc<Shared>,
    bell: Arc<Bell>,
    clock: Arc<dyn Clock>,
    active: Active,
    /// The next segment, if it was made ahead.
    prepared: Option<Prepared>,
    /// Whether it is to be made: not again before the next roll if there was no room for it.
    may_prepare: bool,
    /// Made with its first use, and dropped when the partition rests.
    ring: Option<InRing>,
    /// False where every write is a plain call.
    may_use_ring: bool,
    /// There if its thread works for others as well, and has the ring.
    shares: Option<Shares>,
    memory: Memory,
    /// When the last commit was completed, and whether the partition came to rest since.
    last_use: Duration,
    rests: bool,
    /// The bytes of the block in which the next commit begins, before its first record.
    last_block: Vec<u8>,
    /// Whether it was not read yet: only the first append needs it.
    owes_last_block: bool,
    /// One past the last byte of the last record that has a place.
    end: u64,
    next_offset: u64,
    last_timestamp: u64,
    /// The segments' size, as it was when the batch at hand had its turn: room is made for as much of it as that allows.
    segment_bytes: u64,
    /// The changes of the settings that it saw.
    seen_changes: u64,
    /// Bytes that were queued or encoded while the last write was under way.
    came_meanwhile: u64,
    zero_ahead: ZeroAhead,
    /// Bytes that the kernel has and no sync was begun for, and since when.
    unsynced: Option<(u64, Duration)>,
    /// Durable bytes that no checkpoint tells of, and since when.
    unnoted: Option<(u64, Duration)>,
    /// Index entries that wait, and since when.
    pending_entries: usize,
    index_since: Option<Duration>,
    /// Since when the active segment has records, and how old its first one was then.
    age: Option<(Duration, Duration)>,
    no_roll_before: Duration,
    /// Whether no entry of the active segment was written yet.
    owes_first_entry: bool,
    spare_lists: Vec<Lists>,
    /// How long the thread watches before it parks, and until when it does since the last message.
    watches: Duration,
    watch_until: Duration,
    /// When the thread that waits comes back by itself.
    parked_until: Option<Duration>,
    under_way: UnderWay,
    upkeep: Upkeep,
}

impl Writer {
    /// A writer that goes on behind what recovery found.
    pub(super) fn new(
        shared: Arc<Shared>,
        clock: Arc<dyn Clock>,
        wait: WaitStrategy,
        (inbox, bell): (Inbox, Arc<Bell>),
        start: Appender,
        shares_thread: bool,
    ) -> Self {
        let Appender { active, next_offset, last_timestamp } = start;
        let shares = shares_thread.then(|| Shares { company: Company { has_place: false, is_there: false }, outgoing: None, landed: None });
        let pending_entries = active.segment.pending().len();
        let (regions, region_bytes) = shared.regions();
        Self {
            inbox,
            carried: None,
            open: None,
            flight: None,
            finished: VecDeque::new(),
            unanswered: Vec::new(),
            crowd: Crowd::new(),
            syncs: Vec::new(),
            pending: None,
            clock,
            prepared: None,
            may_prepare: true,
            ring: None,
            may_use_ring: active.direct && shared.disk.rings_overlap(),
            shares,
            memory: Memory::new(Arc::clone(&shared.buffers), regions, region_bytes),
            last_use: Duration::ZERO,
            rests: true,
            last_block: Vec::new(),
            owes_last_block: active.direct,
            end: active.segment.appended(),
            next_offset,
            last_timestamp,
            segment_bytes: shared.live.segment_bytes(),
            seen_changes: shared.live.changes(),
            came_meanwhile: 0,
            zero_ahead: ZeroAhead::default(),
            unsynced: None,
            unnoted: None,
            pending_entries,
            index_since: None,
            age: None,
            no_roll_before: Duration::ZERO,
            owes_first_entry: !active.index.has_entries(),
            spare_lists: Vec::new(),
            watches: match wait {
                WaitStrategy::Spin(time) if !shares_thread => time,
                WaitStrategy::Block | WaitStrategy::Spin(_) => Duration::ZERO,
            },
            watch_until: Duration::ZERO,
            parked_until: None,
            under_way: UnderWay::default(),
            upkeep: Upkeep::new(Arc::clone(&shared), Arc::clone(&bell)),
            active,
            bell,
            shared,
        }
    }

    /// Does what can be done now.
    ///
    /// # Errors
    /// The failure that latches the partition.
    pub(super) fn step(&mut self) -> Result<Step> {
        // Before anything is decided by them: one that comes later is noticed before the wait.
        self.seen_changes = self.shared.live.changes();
        self.reap()?;
        self.hear_upkeep()?;
        self.fill()?;
        self.launch()?;
        self.follow_up()?;
        match self.pending.take() {
            Some(pending) if self.may_perform(&pending) => self.perform(pending),
            pending => {
                self.pending = pending;
                self.what_next()
            }
        }
    }

    /// Whether nothing is in its way any more.
    fn may_perform(&self, pending: &Pending) -> bool {
        self.has_nothing_half_done()
            && match pending {
                Pending::Roll(_) => self.may_roll(),
                Pending::TruncateAfter(..) | Pending::Close(_) => self.upkeep.is_idle(),
            }
    }

    fn has_nothing_half_done(&self) -> bool {
        self.flight.is_none() && self.open.is_none() && self.carried.is_none() && self.finished.is_empty()
    }

    /// Does what was waited for with all else.
    fn perform(&mut self, pending: Pending) -> Result<Step> {
        match pending {
            Pending::Roll(answer) => {
                // An empty segment is the next one already.
                let rolled = if self.end > 0 { self.roll()? } else { Ok(()) };
                match answer {
                    Some(answer) => answer.send(rolled),
                    None => self.put_off_roll(rolled),
                }
                Ok(Step::Again)
            }
            Pending::TruncateAfter(offset, answer) => {
                answer.send(self.truncate_after(offset)?);
                Ok(Step::Again)
            }
            Pending::Close(answer) => {
                // Nobody may be waiting: a dropped partition closes too.
                let closed = self.close();
                answer.send(closed.clone());
                closed.map(|()| Step::End)
            }
        }
    }

    /// What there is to do once a write was started, in its shadow if it is in flight.
    fn follow_up(&mut self) -> Result<()> {
        self.answer();
        self.look_ahead()?;
        if self.sync_is_due() {
            self.begin_sync()?;
        }
        self.answer_syncs();
        Ok(())
    }

    /// The loop around [`Self::step`], until there is nothing to do for a thread that need not hold the writer to wait.
    pub(super) fn work(&mut self) -> Result<Pause> {
        self.inbox.stop_listening();
        loop {
            match self.step()? {
                Step::Again => {}
                Step::Wait(place, hearing, until) => match self.pause(place, hearing, until) {
                    None => {}
                    Some(Pause::Wait(Where::InRing, timeout)) => {
                        let ring = self.ring.as_mut().expect("only a write in the ring is waited for there");
                        ring.transfers.wait(timeout).map_err(Error::io("wait for", &self.shared.dir))?;
                        self.inbox.stop_listening();
                    }
                    Some(pause) => return Ok(pause),
                },
                Step::Rest => self.rest(),
                Step::End => return Ok(Pause::End),
            }
        }
    }

    /// As much of [`Self::work`] as is one step. With `goes_on`, the last one ended in the middle of it.
    #[cfg(feature = "sim")]
    pub(super) fn work_for_one_step(&mut self, goes_on: bool) -> Result<Pause> {
        if !goes_on || self.flight.is_some() {
            self.inbox.stop_listening();
        }
        self.one_step()
    }

    /// One step, for a thread that has other writers to serve.
    ///
    /// # Errors
    /// As for [`Self::step`].
    pub(super) fn work_in_turn(&mut self, company: Company, landed: Option<transfer::Done>) -> Result<Pause> {
        let shares = self.shares.as_mut().expect("only a writer that shares its thread takes turns");
        shares.company = company;
        shares.landed = landed;
        self.inbox.stop_listening();
        self.one_step()
    }

    /// The write that the last turn left to the thread.
    pub(super) fn take_outgoing(&mut self) -> Option<Outgoing> {
        self.shares.as_mut()?.outgoing.take()
    }

    fn one_step(&mut self) -> Result<Pause> {
        Ok(match self.step()? {
            Step::Again => Pause::BetweenSteps,
            Step::Wait(place, hearing, until) => self.pause(place, hearing, until).unwrap_or(Pause::BetweenSteps),
            Step::Rest => {
                self.rest();
                Pause::BetweenSteps
            }
            Step::End => Pause::End,
        })
    }

    /// How to wait, with the bell told of it; none if there is something to hear already.
    fn pause(&mut self, place: Where, hearing: Hearing, until: Option<Duration>) -> Option<Pause> {
        let now = self.clock.monotonic();
        let watches = place == Where::Parked && hearing == Hearing::Anything && now < self.watch_until;
        let (place, until) = if watches {
            (Where::Watching, Some(until.map_or(self.watch_until, |until| until.min(self.watch_until))))
        } else {
            (place, until)
        };
        if !self.listen(place, hearing) {
            return None;
        }
        if place != Where::InRing {
            self.parked_until = until;
        }
        Some(Pause::Wait(place, until.map(|until| until.saturating_sub(now))))
    }

    /// To be called before the thread waits. False if there is something to hear already.
    fn listen(&self, place: Where, hearing: Hearing) -> bool {
        if !self.inbox.listen(place, hearing) {
            return false;
        }
        if self.upkeep.has_news() || self.shared.live.changes() != self.seen_changes {
            self.inbox.stop_listening();
            return false;
        }
        true
    }

    // ---------------------------------------------------------------- by a producer

    /// Whether a commit with this batch alone is all that there is to do, and takes nothing but its write. With company during the
    /// last write it is not: more records will come, and one commit of them all is better made by the writer's own thread.
    pub(super) fn is_free_for(&self, batch: &Batch) -> bool {
        let config = &self.shared.config;
        let end = self.end + batch.bytes();
        self.came_meanwhile == 0
            && self.linger().is_zero()
            && self.segment_bytes == self.shared.live.segment_bytes()
            && end <= self.segment_bytes
            && batch.bytes() <= config.commit_bytes
            && self.active.has_room(end)
            && self.flight.is_none()
            && self.open.is_none()
            && self.carried.is_none()
            && self.finished.is_empty()
            && self.pending.is_none()
            && !self.roll_is_due()
            && self.upkeep.is_started()
            && !self.upkeep.has_news()
            && self.inbox.is_empty()
    }

    /// Commits a batch that the writer [is free for](Self::is_free_for), on a thread that is not its own. True if its own can go on
    /// waiting.
    ///
    /// # Errors
    /// As for [`Self::step`].
    pub(super) fn commit(&mut self, batch: Batch, answer: Answerer<Answer>) -> Result<bool> {
        // What comes from here on finds the writer at work.
        self.inbox.hand_over();
        if let Some(shares) = &mut self.shares {
            // The ring is not this thread's.
            shares.company.has_place = false;
        }
        let carried = self.carry(batch, answer);
        self.place(carried)?;
        self.launch()?;
        self.follow_up()?;
        match self.what_next()? {
            Step::Wait(Where::Parked, Hearing::Anything, until) => {
                let wakes_in_time = until.is_none_or(|until| self.parked_until.is_some_and(|parked| parked <= until));
                Ok(wakes_in_time && self.listen(Where::Parked, Hearing::Anything))
            }
            _ => Ok(false),
        }
    }

    fn what_next(&mut self) -> Result<Step> {
        if self.flight.is_some() {
            // A completion comes by itself. Until then, only a batch that there is room for is worth hearing of.
            let takes_more = self.carried.is_none() && self.pending.is_none();
            return Ok(Step::Wait(Where::InRing, if takes_more { Hearing::Plenty } else { Hearing::Nothing }, None));
        }
        let deaf = Step::Wait(Where::Parked, Hearing::Nothing, None);
        if self.open_is_due() {
            return Ok(Step::Again);
        }
        if let Some(carried) = &self.carried {
            return Ok(if carried.waits { deaf } else { Step::Again });
        }
        if let Some(pending) = &self.pending {
            return Ok(if self.may_perform(pending) { Step::Again } else { deaf });
        }
        let now = self.clock.monotonic();
        let index = self.index_since.filter(|_| !self.under_way.index).map(|since| since + INDEX_PATIENCE);
        if index.is_some_and(|due| due <= now) {
            self.begin_index()?;
            return Ok(Step::Again);
        }
        let linger = self.open.as_ref().map(|open| open.since + self.linger());
        let note = self.unnoted.filter(|_| self.may_checkpoint()).map(|(_, since)| since + CHECKPOINT_AGE);
        // While a sync is under way, its end is what brings the next.
        let sync = self.unsynced.filter(|_| self.under_way.sync.is_none()).and_then(|(_, since)| match self.shared.config.durability {
            Durability::Interval { time, .. } => Some(since.saturating_add(time)),
            Durability::Durable | Durability::Os => None,
        });
        // Once it is due, the segment that it waits for is being made.
        let roll = self.roll_at().filter(|at| *at > now);
        let can_rest =
            self.has_what_it_can_do_without() && self.index_since.is_none() && self.has_nothing_half_done() && self.upkeep.is_idle();
        let rest = can_rest.then(|| self.last_use + REST);
        if rest.is_some_and(|due| due <= now) {
            return Ok(Step::Rest);
        }
        Ok(Step::Wait(Where::Parked, Hearing::Anything, [linger, index, note, sync, roll, rest].into_iter().flatten().min()))
    }

    // ---------------------------------------------------------------- at rest

    fn has_what_it_can_do_without(&self) -> bool {
        !self.rests || self.upkeep.is_started()
    }

    /// Lets go of what only a busy partition needs. A ring is its thread's, and so are its end and that of upkeep's thread.
    fn rest(&mut self) {
        self.rests = true;
        self.ring = None;
        self.bell.set_ring(None);
        self.memory.rest(&self.shared.recent);
        self.upkeep.rest();
        self.inbox.rest();
        self.active.index.rest();
        (self.crowd, self.spare_lists, self.unanswered) = (Crowd::new(), Vec::new(), Vec::new());
        (self.syncs, self.finished) = (Vec::new(), VecDeque::new());
    }

    // ---------------------------------------------------------------- taking messages

    /// Puts what waits into the open commit, as far as there is room.
    fn fill(&mut self) -> Result<()> {
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
    fn carry(&self, batch: Batch, answer: Answerer<Answer>) -> Carried {
        let timestamp = self.clock.wall_ns().max(self.last_timestamp);
        Carried { batch, answer, at: 0, first: self.next_offset, placed: 0, timestamp, has_room: false, waits: false }
    }

    /// Places the rest of a batch. False if not all of it could be: then it is carried on.
    fn place(&mut self, mut carried: Carried) -> Result<bool> {
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

    fn linger(&self) -> Duration {
        self.shared.live.linger()
    }

    // ---------------------------------------------------------------- the write

    /// Whether the open commit waits for nothing but the device.
    fn open_is_due(&self) -> bool {
        let hurried = self.carried.is_some() || self.pending.is_some() || !self.syncs.is_empty();
        self.open.as_ref().is_some_and(|open| {
            hurried || open.bytes() >= self.shared.config.commit_bytes || self.clock.monotonic() >= open.since + self.linger()
        })
    }

    /// Whether there is enough to do during the next write to leave it to the ring: as much as came during the last one. A plain
    /// call is done sooner.
    fn has_something_to_do_meanwhile(&self) -> bool {
        self.came_meanwhile >= WORTH_WAKING
    }

    /// Whether the next write is left to a ring. A shared thread has more to do meanwhile than this writer knows.
    fn writes_by_ring(&mut self) -> bool {
        match &self.shares {
            None => self.has_something_to_do_meanwhile() && self.has_ring(),
            Some(Shares { company, .. }) => company.has_place && (company.is_there || self.has_something_to_do_meanwhile()),
        }
    }

    /// Whether there is a ring; one that is missing is made. What a ring does a plain call does as well: one that cannot be had is no
    /// error.
    fn has_ring(&mut self) -> bool {
        if self.ring.is_none() && self.may_use_ring {
            match InRing::make(&*self.shared.disk, self.memory.held(), &self.active.log) {
                Ok((mut ring, regions)) => {
                    if self.memory.holds_regions() {
                        self.memory.replace(&self.shared.recent, regions);
                    }
                    self.bell.set_ring(Some(ring.transfers.waker()));
                    self.ring = Some(ring);
                }
                Err(error) => {
                    tracing::warn!(%error, path = %self.shared.dir.display(), "no ring is to be had; writing by plain calls");
                    self.may_use_ring = false;
                }
            }
        }
        self.ring.is_some()
    }

    /// Starts the open commit's write if it is due and nothing is in its way.
    fn launch(&mut self) -> Result<()> {
        if self.flight.is_some() || !self.open_is_due() {
            return Ok(());
        }
        let direct = self.active.direct;
        // Buffered writes through a ring go to kernel workers, at a multiple of the call's own cost.
        let by_ring = direct && self.writes_by_ring();
        if !by_ring {
            // They need not wait for the call.
            self.answer();
        }
        let Some(mut commit) = self.open.take() else { return Ok(()) };
        let zeros = self.zeros_behind(&commit);
        let space = match zeros {
            0 if commit.written_end(direct) <= self.active.zeroed => Space::Written,
            0 => Space::Unwritten,
            zeros => Space::WithZeros(zeros),
        };
        commit.launched = (self.clock.monotonic(), space);
        let (mut memory, range, position) = commit.launch(direct, to_usize(zeros), &mut self.last_block);
        if let commit::Memory::Buffer(buffer) = &mut memory {
            let unused = buffer.split_off(to_usize(to_u64(range.end).next_multiple_of(BLOCK)));
            self.memory.give_back(unused);
        }
        let durable = self.writes_durably();
        if !guard::stands(Guard::AnswersAfterWrites) {
            commit.lists.waiters.drain(..).for_each(|Waiter { answer, offsets }| answer.send(Ok(offsets)));
        }
        match memory {
            commit::Memory::Buffer(buffer) if by_ring => {
                self.flight = Some(commit);
                self.start(durable, position, buffer, range);
                Ok(())
            }
            memory => {
                let write = if direct { write_blocks_at } else { write_all_at };
                let result = write(&*self.active.log, &memory[range], position, durable);
                self.complete(commit, memory, result)
            }
        }
    }

    /// Has the ring write, the writer's own or its thread's.
    fn start(&mut self, durable: bool, position: u64, buffer: Buffer, range: Range<usize>) {
        if let Some(shares) = &mut self.shares {
            shares.outgoing = Some(Outgoing { log: Arc::clone(&self.active.log), durable, position, buffer, range });
        } else {
            let ring = self.ring.as_mut().expect("what is left to a ring has one");
            let place = Place { slot: ring.slot, position, direct: true };
            ring.transfers.start(COMMIT, Action::Write { durable }, place, buffer, range);
        }
    }

    fn writes_durably(&self) -> bool {
        self.shared.config.durability == Durability::Durable && guard::stands(Guard::DurableWrites)
    }

    /// Bytes of zeros that the commit takes along.
    fn zeros_behind(&self, commit: &Commit) -> u64 {
        if !self.active.takes_zeros() {
            return 0;
        }
        let zeros = self.zero_ahead.behind(commit.written_end(true), self.active.zeroed, self.active.allocated);
        let spare = to_u64(commit.spare());
        zeros.min(spare - spare % BLOCK)
    }

    fn reap(&mut self) -> Result<()> {
        if let Some(transfer::Done { result, buffer, .. }) = self.shares.as_mut().and_then(|shares| shares.landed.take()) {
            let commit = self.flight.take().expect("only a commit in flight lands");
            self.complete(commit, commit::Memory::Buffer(buffer), result.map(|_| ()))?;
        }
        while let Some(ring) = &mut self.ring
            && let Some(transfer::Done { result, buffer, .. }) =
                ring.transfers.next().map_err(Error::io("reap completions of", &self.shared.dir))?
        {
            let commit = self.flight.take().expect("only a commit in flight completes");
            self.complete(commit, commit::Memory::Buffer(buffer), result.map(|_| ()))?;
        }
        Ok(())
    }

    /// Takes the end of a commit's write.
    fn complete(&mut self, commit: Commit, memory: commit::Memory, result: io::Result<()>) -> Result<()> {
        self.came_meanwhile = self.inbox.queued_bytes() + self.open.as_ref().map_or(0, Commit::bytes);
        match result {
            Err(error) if self.active.direct && error.kind() == io::ErrorKind::InvalidInput => {
                self.write_through_the_page_cache(&commit, &memory)
            }
            Err(_) if !guard::stands(Guard::FailedWritesStop) => Ok(()),
            // The path is made only where it is told.
            result => result.map_err(|error| Error::io("write", &self.active.segment.path(Kind::Log))(error)),
        }?;
        let place = (commit.written_start(), commit.start(), commit.end());
        let (begun, space) = commit.launched;
        let mut written_end = commit.end().next_multiple_of(BLOCK);
        match memory {
            commit::Memory::Buffer(mut buffer) if self.active.direct => {
                if let Space::WithZeros(zeros) = space {
                    let unused = buffer.split_off(to_usize(written_end - commit.written_start()));
                    self.memory.give_back(unused);
                    written_end += zeros;
                }
                self.memory.keep(&self.shared.recent, self.active.segment.base(), place, buffer);
            }
            // The page cache holds it.
            commit::Memory::Buffer(buffer) => self.memory.give_back(buffer),
            commit::Memory::Batch(batch) => self.inbox.give_back(batch),
        }
        self.last_use = self.clock.monotonic();
        self.rests = false;
        self.zero_ahead.commit(commit.bytes(), self.last_use.saturating_sub(begun), space);
        if commit.start() == 0 {
            self.age = Some((self.last_use, Duration::ZERO));
        }
        self.active.zeroed = self.active.zeroed.max(written_end);
        if self.under_way.names {
            self.finished.push_back(commit);
        } else {
            self.publish(commit);
        }
        Ok(())
    }

    /// Does the write again where it turns out that direct writes are refused, and goes on in that way.
    fn write_through_the_page_cache(&mut self, commit: &Commit, memory: &commit::Memory) -> Result<()> {
        self.active.go_through_the_page_cache(&self.shared)?;
        self.zero_ahead.stop();
        self.last_block.clear();
        let len = to_usize(commit.end() - commit.written_start());
        let written = write_all_at(&*self.active.log, &memory[..len], commit.written_start(), self.writes_durably());
        written.map_err(Error::io("write", &self.active.segment.path(Kind::Log)))
    }

    /// Lets readers see a commit, and owes its waiters their answers.
    fn publish(&mut self, mut commit: Commit) {
        let segment = Arc::clone(&self.active.segment);
        let Lists { mut waiters, mut entries } = std::mem::take(&mut commit.lists);
        // Of what is in a later commit already none is older.
        segment.note_last_time(self.last_timestamp);
        segment.extend(commit.end(), &entries);
        self.shared.set_appended_end(commit.end_offset());
        if self.shared.config.durability == Durability::Durable {
            segment.set_durable(commit.end());
            self.shared.set_durable_end(commit.end_offset());
            self.note(commit.bytes());
        } else {
            let (bytes, since) = self.unsynced.unwrap_or_else(|| (0, self.clock.monotonic()));
            self.unsynced = Some((bytes + commit.bytes(), since));
        }
        self.shared.metrics.commit(commit.records(), commit.bytes());
        self.pending_entries += entries.len();
        if self.owes_first_entry && !entries.is_empty() {
            // A log with acknowledged records never stands beside an empty index.
            self.owes_first_entry = false;
            self.active.index.write(&*self.shared.disk, u64::MAX);
            self.pending_entries = segment.pending().len();
        }
        if self.pending_entries > 0 && self.index_since.is_none() {
            self.index_since = Some(self.clock.monotonic());
        }
        entries.clear();
        self.unanswered.append(&mut waiters);
        self.spare_lists.push(Lists { waiters, entries });
    }

    /// Answers who waits for records that were published, and then wakes who watches for them: producers wait for no consumer.
    fn answer(&mut self) {
        match self.unanswered.len() {
            0 => {}
            // A dropped ticket is an append that nobody waits for.
            1 => self.unanswered.drain(..).for_each(|Waiter { answer, offsets }| answer.send(Ok(offsets))),
            _ => self.crowd.answer(self.unanswered.drain(..).map(|Waiter { answer, offsets }| (answer, Ok(offsets)))),
        }
        self.shared.tell_watchers();
    }

    // ---------------------------------------------------------------- upkeep

    /// Takes the ends of what was begun.
    fn hear_upkeep(&mut self) -> Result<()> {
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
    fn look_ahead(&mut self) -> Result<()> {
        if self.pending.is_some() || !self.zero_ahead.has_begun() {
            return Ok(());
        }
        // The first commit is always this thread's own, for it needs room, and so is the first after a rest; a producer's thread starts none.
        if !self.rests {
            self.upkeep.start()?;
        }
        if self.pending_entries >= PENDING_ENTRIES && !self.under_way.index && !self.active.index.failed() {
            self.begin_index()?;
        }
        let limit = self.segment_bytes;
        if !self.under_way.extend
            && let Some(range) = self.active.to_extend(self.end, limit)
        {
            let durable = self.shared.config.durability == Durability::Durable;
            self.upkeep.begin(Job::Extend { log: Arc::clone(&self.active.log), range, durable })?;
            self.under_way.extend = true;
        }
        if self.checkpoint_is_due() {
            self.begin_checkpoint()?;
        }
        let wants_successor =
            self.active.wants_successor(&self.shared, self.end) || (self.roll_is_due() && active::is_worth_preparing(limit));
        if self.may_prepare && !self.under_way.prepare && self.prepared.is_none() && wants_successor {
            let room = limit.min(self.shared.config.preallocate_bytes).next_multiple_of(BLOCK);
            let zeros = if self.active.takes_zeros() { self.zero_ahead.of_next_segment(room) } else { 0 };
            self.upkeep.begin(Job::Prepare { room, zeros })?;
            self.under_way.prepare = true;
        }
        Ok(())
    }

    /// So many bytes more are durable.
    fn note(&mut self, bytes: u64) {
        let (before, since) = self.unnoted.unwrap_or_else(|| (0, self.clock.monotonic()));
        self.unnoted = Some((before + bytes, since));
    }

    fn checkpoint_is_due(&self) -> bool {
        let due = |(bytes, since)| bytes >= CHECKPOINT_BYTES || self.clock.monotonic() >= since + CHECKPOINT_AGE;
        self.may_checkpoint() && self.unnoted.is_some_and(due)
    }

    /// Whether a checkpoint would be begun if it were due.
    fn may_checkpoint(&self) -> bool {
        !self.under_way.checkpoint && !self.under_way.names && self.zero_ahead.has_begun() && self.pending.is_none()
    }

    fn begin_checkpoint(&mut self) -> Result<()> {
        self.under_way.checkpoint = true;
        self.unnoted = None;
        self.upkeep.begin(Job::Checkpoint { index: Arc::clone(&self.active.index), checkpoint: self.checkpoint() })
    }

    /// What is durable now. A segment begins after everything before it is, so the durable end lies in the active one.
    fn checkpoint(&self) -> Checkpoint {
        let End { segment, position, offset } = if guard::stands(Guard::CheckpointsAreDurable) { self.durable() } else { self.appended() };
        Checkpoint { base: segment.base(), position, next_offset: offset, last_timestamp: self.last_timestamp, entries: 0, clean: false }
    }

    fn begin_index(&mut self) -> Result<()> {
        self.under_way.index = true;
        self.index_since = None;
        let index = Arc::clone(&self.active.index);
        self.upkeep.begin(Job::Index { index, up_to: self.shared.appended_end() })
    }

    /// Whether what the kernel has is to be synced now.
    fn sync_is_due(&self) -> bool {
        let Some((bytes, since)) = self.unsynced else { return false };
        let asked = self.syncs.iter().any(|(offset, _)| *offset <= self.shared.appended_end());
        let interval = match self.shared.config.durability {
            Durability::Interval { bytes: limit, time } => bytes >= limit || self.clock.monotonic() >= since.saturating_add(time),
            Durability::Durable | Durability::Os => false,
        };
        self.under_way.sync.is_none() && (asked || interval)
    }

    /// Has everything synced that the kernel has now. Appends go on meanwhile.
    fn begin_sync(&mut self) -> Result<()> {
        self.upkeep.begin(Job::Sync { log: Arc::clone(&self.active.log) })?;
        self.under_way.sync = Some(self.appended());
        self.unsynced = None;
        Ok(())
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
    fn mark_durable(&mut self, end: &End) {
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
    fn appended(&self) -> End {
        End { segment: Arc::clone(&self.active.segment), position: self.active.segment.appended(), offset: self.shared.appended_end() }
    }

    /// Where it ends on the device.
    fn durable(&self) -> End {
        End { segment: Arc::clone(&self.active.segment), position: self.active.segment.durable(), offset: self.shared.durable_end() }
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
                answer.send(Ok(()));
            } else {
                self.syncs.push((offset, answer));
            }
        }
    }

    // ---------------------------------------------------------------- from one segment to the next

    /// Finds out how old the segment is that was there when the partition was opened or its log cut, where that matters. From then on no jump
    /// of the wall clock changes it.
    fn learn_age(&mut self) {
        if self.age.is_some() || self.end == 0 || self.shared.live.segment_age().is_none() {
            return;
        }
        // One whose first record cannot be read begins now.
        let first = self.active.segment.read_first_time(&*self.shared.disk);
        let had = first.map_or(0, |time| self.clock.wall_ns().saturating_sub(time));
        self.age = Some((self.clock.monotonic(), Duration::from_nanos(had)));
    }

    /// When the active segment will be too old for more records; that is put off where there was no room for the next.
    fn roll_at(&self) -> Option<Duration> {
        let (age, (since, had)) = (self.shared.live.segment_age()?, self.age?);
        Some(since.saturating_add(age.saturating_sub(had)).max(self.no_roll_before))
    }

    fn roll_is_due(&self) -> bool {
        self.roll_at().is_some_and(|at| at <= self.clock.monotonic())
    }

    /// Whether the active segment is to be left because of its age, and the next one is there if it can be made ahead.
    fn may_roll_by_age(&self) -> bool {
        let is_to_come = self.prepared.is_none() && self.may_prepare && self.zero_ahead.has_begun();
        self.roll_is_due() && !self.under_way.prepare && !(is_to_come && active::is_worth_preparing(self.segment_bytes))
    }

    /// Takes the end of a roll that nobody asked for.
    fn put_off_roll(&mut self, rolled: Result<()>) {
        if let Err(error) = rolled {
            tracing::warn!(%error, path = %self.shared.dir.display(), "no next segment for one that is old enough; trying again later");
            self.no_roll_before = self.clock.monotonic() + ROLL_PATIENCE;
        }
    }

    /// Whether nothing stands in the way of the next segment. One that was made ahead needs only that nobody else is at the
    /// active log.
    fn may_roll(&self) -> bool {
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
    fn roll(&mut self) -> Result<Result<(), Error>> {
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
                self.upkeep.begin(Job::SyncNames { names })?;
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
            self.upkeep.begin(Job::Seal { log: before.log, index: before.index, segment: before.segment })?;
            self.under_way.seals.push_back(end);
        }
        self.upkeep.begin(Job::Sum { segment, sum: before.sum, next_offset })?;
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
    fn truncate_after(&mut self, offset: u64) -> Result<Result<()>> {
        let (first, next) = (self.shared.first_offset(), self.next_offset);
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
        let shared = Arc::clone(&self.shared);
        let alone = shared.removing.lock();
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

    fn discard_prepared(&mut self) {
        self.prepared = None;
        Prepared::discard(&*self.shared.disk, &self.shared.dir);
    }

    fn close(&mut self) -> Result<()> {
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
