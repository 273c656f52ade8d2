//! The bounded way from the producers to a partition's writer, and the bell that wakes it.
//!
//! A [`Budget`] holds the messages and bounds their number and bytes; its memory is what waited at once. The writer waits in one of two
//! places: in its ring while a write is in flight, else parked; whoever has something for it looks at the [`Bell`], which
//! says where it is and what it wants to hear.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::hands::{Desk, Key};
use super::reply::{Answerer, Pool, Reply};
use super::ticket::Answer;
use crate::error::Result;
use crate::io::Waker;
use crate::record::{Batch, to_u64};
use crate::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering, fence};
use crate::sync::channel::{self, Receiver, Sender};
use crate::sync::thread::{self, Thread};
use crate::sync::{Condvar, Mutex, MutexGuard};

/// What the writer is asked for.
#[derive(Debug)]
pub(super) enum Message {
    Append {
        batch: Batch,
        answer: Answerer<Answer>,
    },
    /// Answered when all that was queued before is on the device.
    Sync {
        answer: Answerer<Result<()>>,
    },
    /// Answered when all that was queued before is in a segment that takes no more records.
    Roll {
        answer: Answerer<Result<()>>,
    },
    /// Answered when all that was queued before was written and the records from `offset` on are gone, durably.
    TruncateAfter {
        offset: u64,
        answer: Answerer<Result<()>>,
    },
    /// Answered when all that was queued before is done and the files are closed.
    Close {
        answer: Answerer<Result<()>>,
    },
}

impl Message {
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Append { batch, .. } => batch.bytes(),
            Self::Sync { .. } | Self::Roll { .. } | Self::TruncateAfter { .. } | Self::Close { .. } => 0,
        }
    }
}

/// Why a message was not queued.
#[derive(Debug)]
pub(super) enum Refused {
    /// Only by `try_send`.
    Full(Message),
    /// The writer is gone.
    Closed(Message),
}

/// The producers' end.
#[derive(Debug, Clone)]
pub(super) struct Queue {
    shared: Arc<Shared>,
}

/// The writer's end. Dropping it refuses what is queued and what comes.
#[derive(Debug)]
pub(super) struct Inbox {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    budget: Budget,
    bell: Arc<Bell>,
    /// Batches whose records are in the log, empty, with their memory.
    empty: (Sender<Batch>, Receiver<Batch>),
    answers: Pool<Answer>,
}

/// Batches kept for their memory at most, and the most memory of one.
const EMPTY_BATCHES: usize = 64;
const EMPTY_BATCH_BYTES: usize = 1 << 20;

/// Answers' memory that is kept at most: more appends than that are seldom waited for at once.
const ANSWERS: usize = 1024;

/// Bytes in the queue that are worth waking a writer for whose write is in flight: about what it encodes in the time
/// that the waking takes.
pub(super) const WORTH_WAKING: u64 = 64 << 10;

/// What a writer that waits wants to be woken for by producers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hearing {
    /// Nothing: it could not take a message.
    Nothing,
    /// A write is in flight; fewer than [`WORTH_WAKING`] bytes can as well be encoded after it.
    Plenty,
    /// Any message.
    Anything,
}

/// Where the writer waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Where {
    /// Awake, with its eyes on the bell.
    Watching,
    /// Parked: nothing is in flight.
    Parked,
    /// In its ring, for a completion.
    InRing,
}

/// Whom the bell calls.
#[derive(Debug)]
enum Called {
    /// The writer's own thread.
    Own(Thread),
    /// One that works for others as well, and was not called yet if this is false.
    Shared { desk: Arc<Desk>, key: Key, called: AtomicBool },
}

/// Wakes the writer of a partition.
#[derive(Debug)]
pub(super) struct Bell {
    /// Where the writer waits and for what: [`AT_WORK`], [`BY_PRODUCER`], else see [`state`].
    waiting: AtomicU8,
    writer: Called,
    /// Of the ring that the writer waits in, while it has one.
    ring: Mutex<Option<Waker>>,
    /// That the writer was woken, for one that is stepped and has no thread of its own.
    #[cfg(feature = "sim")]
    woken: AtomicBool,
}

const AT_WORK: u8 = 0;
/// At work on a producer's thread; its own goes on waiting.
const BY_PRODUCER: u8 = 1;
const NOTHING: u8 = 2;
const PLENTY: u8 = 3;
const ANYTHING: u8 = 4;
const WATCHING: u8 = 1 << 6;
const IN_RING: u8 = 1 << 7;

/// One number for both, above those of a writer at work.
fn state(place: Where, hearing: Hearing) -> u8 {
    let hearing = match hearing {
        Hearing::Nothing => NOTHING,
        Hearing::Plenty => PLENTY,
        Hearing::Anything => ANYTHING,
    };
    match place {
        Where::Parked => hearing,
        Where::Watching => hearing | WATCHING,
        Where::InRing => hearing | IN_RING,
    }
}

impl Bell {
    /// The bell of the thread that calls.
    pub(super) fn new() -> Self {
        Self {
            waiting: AtomicU8::new(AT_WORK),
            writer: Called::Own(thread::current()),
            ring: Mutex::new(None),
            #[cfg(feature = "sim")]
            woken: AtomicBool::new(false),
        }
    }

    /// The bell of a writer that a desk's thread serves. That waits for all of its writers at once: where one waits is of no concern.
    pub(super) fn at(desk: Arc<Desk>, key: Key) -> Self {
        Self { writer: Called::Shared { desk, key, called: AtomicBool::new(false) }, ..Self::new() }
    }

    /// To be called by the thread that was called, before it looks for what there is to do.
    pub(super) fn answer(&self) {
        if let Called::Shared { called, .. } = &self.writer {
            // Whoever finds it called still made its news visible before; this makes them visible here.
            called.swap(false, Ordering::AcqRel);
        }
    }

    /// Ends the writer's wait, whatever it is for.
    pub(super) fn sound(&self) {
        self.ring_if(|_| true);
    }

    /// Ends the writer's wait if it wants to hear of a message, with so many bytes in the queue.
    ///
    /// No wake is lost: (1) the caller made its news visible, fences, then reads `waiting`; (2) the writer sets `waiting`,
    /// fences, then looks for news. The fences are totally ordered, so either the caller sees that the writer waits, or the
    /// writer sees the news. (3) Only who changes `waiting` back wakes: one system call per wait, none if the writer watches. Whoever finds it changed
    /// meanwhile leaves the news to the thread that did: it looks before it waits.
    fn ring_for(&self, queued_bytes: u64) {
        self.ring_if(|waiting| match waiting & !(IN_RING | WATCHING) {
            PLENTY => queued_bytes >= WORTH_WAKING,
            hearing => hearing == ANYTHING,
        });
    }

    fn ring_if(&self, wanted: impl Fn(u8) -> bool) {
        fence(Ordering::SeqCst);
        let waiting = self.waiting.load(Ordering::Relaxed);
        if waiting <= BY_PRODUCER || !wanted(waiting) {
            return;
        }
        if self.waiting.compare_exchange(waiting, AT_WORK, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return;
        }
        if waiting & IN_RING != 0 && matches!(self.writer, Called::Own(_)) {
            // One that is gone was left meanwhile, and whoever is awake looks before it waits.
            let ring = self.ring().clone();
            if let Some(ring) = ring {
                ring.wake();
            }
        } else if waiting & WATCHING == 0 {
            self.wake();
        }
    }

    fn ring(&self) -> MutexGuard<'_, Option<Waker>> {
        // A single assignment changes it.
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The ring that the writer waits in from now on.
    pub(super) fn set_ring(&self, waker: Option<Waker>) {
        *self.ring() = waker;
    }

    /// Wakes the writer's own thread, if it is parked, or from its next park.
    pub(super) fn wake(&self) {
        #[cfg(feature = "sim")]
        self.woken.store(true, Ordering::Release);
        match &self.writer {
            Called::Own(thread) => thread.unpark(),
            Called::Shared { desk, key, called } => {
                if !called.swap(true, Ordering::AcqRel) {
                    desk.call(*key);
                }
            }
        }
    }

    /// Whether the writer's own thread would be awake by now that waits there; told once.
    #[cfg(feature = "sim")]
    pub(super) fn has_woken(&self, place: Where) -> bool {
        let seen = place == Where::Watching && self.waiting.load(Ordering::Relaxed) == AT_WORK;
        self.woken.swap(false, Ordering::Acquire) || seen
    }

    /// Waits as the writer's own thread, for at most so long; it may also return for nothing.
    pub(super) fn wait(&self, place: Where, timeout: Option<Duration>) {
        match timeout {
            Some(time) if place == Where::Watching => self.watch(time),
            Some(timeout) => thread::park_timeout(timeout),
            None => thread::park(),
        }
    }

    /// Watches, without sleeping, for as long as no producer does the work.
    fn watch(&self, time: Duration) {
        let start = Instant::now();
        loop {
            // A look at the clock costs more than some looks at the bell.
            for _ in 0..32 {
                match self.waiting.load(Ordering::Relaxed) {
                    AT_WORK => return,
                    waiting if waiting & WATCHING != 0 => std::hint::spin_loop(),
                    _ => return thread::park_timeout(time.saturating_sub(start.elapsed())),
                }
            }
            if start.elapsed() >= time {
                return;
            }
        }
    }

    fn hand_over(&self) {
        self.waiting.store(BY_PRODUCER, Ordering::Relaxed);
    }

    fn listen(&self, place: Where, hearing: Hearing) {
        self.waiting.store(state(place, hearing), Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    fn stop_listening(&self) {
        self.waiting.store(AT_WORK, Ordering::Relaxed);
    }
}

/// A queue of at most `batches` and `bytes`.
pub(super) fn queue(batches: usize, bytes: u64, bell: Arc<Bell>) -> (Queue, Inbox) {
    let budget = Budget { bytes, messages: to_u64(batches), used: Mutex::default(), waiting: AtomicU64::new(0), freed: Condvar::new() };
    let shared = Arc::new(Shared { budget, bell, empty: channel::bounded(EMPTY_BATCHES), answers: Pool::new(ANSWERS) });
    (Queue { shared: Arc::clone(&shared) }, Inbox { shared })
}

impl Queue {
    /// Queues a message; blocks while there is no room.
    pub(super) fn send(&self, message: Message) -> Result<(), Refused> {
        self.put(message, true)
    }

    /// Queues a message if there is room now.
    pub(super) fn try_send(&self, message: Message) -> Result<(), Refused> {
        self.put(message, false)
    }

    /// Whether a message of so many bytes would not have to wait.
    pub(super) fn has_room(&self, bytes: u64) -> bool {
        let used = self.shared.budget.used();
        used.closed || self.shared.budget.fits(&used, bytes)
    }

    /// An empty batch, with memory that was used before if there is any.
    pub(super) fn empty_batch(&self) -> Batch {
        self.shared.empty.1.try_recv().unwrap_or_default()
    }

    /// A place for one answer, and who waits for it.
    pub(super) fn answer(&self) -> (Answerer<Answer>, Reply<Answer>) {
        self.shared.answers.pair()
    }

    fn put(&self, message: Message, wait: bool) -> Result<(), Refused> {
        let bytes = message.bytes();
        let queued_bytes = {
            let mut used = match self.shared.budget.take(bytes, wait) {
                Ok(used) => used,
                Err(Unavailable::Full) => return Err(Refused::Full(message)),
                Err(Unavailable::Closed) => return Err(Refused::Closed(message)),
            };
            // Under the lock: closing takes it too, so no message slips in behind the closing's last look.
            used.queue.push_back(message);
            self.shared.budget.waiting.store(to_u64(used.queue.len()), Ordering::Relaxed);
            used.bytes += bytes;
            used.bytes
        };
        self.shared.bell.ring_for(queued_bytes);
        Ok(())
    }
}

impl Inbox {
    /// The next message, if there is one; its bytes are free for others.
    pub(super) fn take(&self) -> Option<Message> {
        self.shared.budget.next()
    }

    /// Whether nothing waits. Orders nothing by itself.
    pub(super) fn is_empty(&self) -> bool {
        self.shared.budget.waiting.load(Ordering::Relaxed) == 0
    }

    /// Bytes that wait.
    pub(super) fn queued_bytes(&self) -> u64 {
        self.shared.budget.used().bytes
    }

    /// Keeps the memory of a batch whose records were encoded, for the producers.
    pub(super) fn give_back(&self, mut batch: Batch) {
        if batch.capacity() <= EMPTY_BATCH_BYTES {
            batch.clear();
            // Enough are there already.
            let _ = self.shared.empty.0.try_send(batch);
        }
    }

    /// To be called before the writer waits. False if there is something to hear already: then it must not wait.
    pub(super) fn listen(&self, place: Where, hearing: Hearing) -> bool {
        self.shared.bell.listen(place, hearing);
        let heard = match hearing {
            Hearing::Nothing => false,
            Hearing::Plenty => self.queued_bytes() >= WORTH_WAKING,
            Hearing::Anything => !self.is_empty(),
        };
        if heard {
            self.stop_listening();
        }
        !heard
    }

    /// Lets go of memory that is kept for the next appends.
    pub(super) fn rest(&self) {
        while self.shared.empty.1.try_recv().is_ok() {}
        self.shared.answers.clear();
        self.shared.budget.used().queue.shrink_to_fit();
    }

    /// To be called when a producer begins to work as the writer.
    pub(super) fn hand_over(&self) {
        self.shared.bell.hand_over();
    }

    /// To be called after the wait.
    pub(super) fn stop_listening(&self) {
        self.shared.bell.stop_listening();
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        // What is queued would stay for as long as there is a producer; whoever waits for an answer would wait that long.
        let mut used = self.shared.budget.used();
        used.closed = true;
        let unheard = std::mem::take(&mut used.queue);
        drop(used);
        self.shared.budget.freed.notify_all();
        drop(unheard);
    }
}

/// What may wait for the writer. A message larger than the limit passes while nothing else waits.
#[derive(Debug)]
struct Budget {
    bytes: u64,
    messages: u64,
    used: Mutex<Used>,
    /// How many messages wait, for who looks without the lock.
    waiting: AtomicU64,
    freed: Condvar,
}

#[derive(Debug, Default)]
struct Used {
    queue: VecDeque<Message>,
    /// Of the messages.
    bytes: u64,
    /// Producers that wait for room.
    waiting: u64,
    /// The writer is gone.
    closed: bool,
}

enum Unavailable {
    Full,
    Closed,
}

impl Budget {
    fn used(&self) -> MutexGuard<'_, Used> {
        // Changed together, by what does not panic in between: whole at every moment that a panic could leave it.
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sees to room for a message of `bytes`, which is there for as long as the guard is held.
    fn take(&self, bytes: u64, wait: bool) -> Result<MutexGuard<'_, Used>, Unavailable> {
        let mut used = self.used();
        loop {
            if used.closed {
                return Err(Unavailable::Closed);
            }
            if self.fits(&used, bytes) {
                return Ok(used);
            }
            if !wait {
                return Err(Unavailable::Full);
            }
            used.waiting += 1;
            used = self.freed.wait(used).unwrap_or_else(PoisonError::into_inner);
            used.waiting -= 1;
        }
    }

    fn fits(&self, used: &Used, bytes: u64) -> bool {
        let fits = used.bytes == 0 || used.bytes.saturating_add(bytes) <= self.bytes;
        fits && to_u64(used.queue.len()) < self.messages
    }

    /// The next message; its room is free for others.
    fn next(&self) -> Option<Message> {
        if self.waiting.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let mut used = self.used();
        let message = used.queue.pop_front()?;
        self.waiting.store(to_u64(used.queue.len()), Ordering::Relaxed);
        used.bytes -= message.bytes();
        let waited_for = used.waiting > 0;
        drop(used);
        if waited_for {
            self.freed.notify_all();
        }
        Some(message)
    }
}

#[cfg(all(test, loom))]
mod models;
