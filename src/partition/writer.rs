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

mod chores;
mod filling;
mod segments;
mod writing;

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::active::{Active, Prepared};
use super::commit::{Commit, Lists, Waiter};
use super::queue::{Bell, Hearing, Inbox, Where};
use super::recent::Memory;
use super::reply::{Answerer, Crowd};
use super::ticket::Answer;
use super::upkeep::Upkeep;
use super::zeroing::ZeroAhead;
use super::{Appender, Shared};
use crate::clock::Clock;
use crate::config::{Durability, WaitStrategy};
use crate::error::{Error, Result};
use crate::io::transfer::{self, Transfers};
use crate::io::{Buffer, Disk, File, RingConfig, Slot, Token};
use crate::record::Batch;
use crate::segment::Segment;

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
        self.upkeep.ask_again(|| self.clock.monotonic());
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
        self.look_ahead();
        if self.sync_is_due() {
            self.begin_sync();
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
            && self.upkeep.has_thread()
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
            self.begin_index();
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
}
