//! The bounded way from the producers to a partition's writer.
//!
//! A crossbeam channel carries the messages, a [`Budget`] bounds their number and bytes. The writer waits on its ring, not
//! on the channel, so that one wait serves both; a producer ends that wait only when the writer says it wants to hear.

use std::sync::atomic::{AtomicU8, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crossbeam_channel::{Receiver, Sender};

use super::ticket::Answer;
use crate::error::Result;
use crate::io::Waker;
use crate::record::{Batch, to_u64};

/// What the writer is asked for.
#[derive(Debug)]
pub(super) enum Message {
    Append {
        batch: Batch,
        answer: oneshot::Sender<Answer>,
    },
    /// Answered when all that was queued before is on the device.
    Sync {
        answer: oneshot::Sender<Result<()>>,
    },
    /// Answered when all that was queued before is done and the files are closed.
    Close {
        answer: oneshot::Sender<Result<()>>,
    },
}

impl Message {
    fn bytes(&self) -> u64 {
        match self {
            Self::Append { batch, .. } => batch.bytes(),
            Self::Sync { .. } | Self::Close { .. } => 0,
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
    sender: Sender<Message>,
    shared: Arc<Shared>,
    waker: Waker,
}

/// The writer's end. Dropping it refuses what is queued and what comes.
#[derive(Debug)]
pub(super) struct Inbox {
    receiver: Receiver<Message>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    budget: Budget,
    hearing: AtomicU8,
}

/// What a writer that waits wants to be woken for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hearing {
    /// Nothing: it is at work, or could not take a message.
    Nothing = 0,
    /// A write is in flight; fewer than [`WORTH_WAKING`] bytes can as well be encoded after it.
    Plenty = 1,
    /// Any message.
    Anything = 2,
}

/// Bytes in the queue that are worth waking a writer for whose write is in flight: about what it encodes in the time
/// that the waking takes.
const WORTH_WAKING: u64 = 64 << 10;

/// A queue of at most `batches` and `bytes`.
pub(super) fn queue(batches: usize, bytes: u64, waker: Waker) -> (Queue, Inbox) {
    let (sender, receiver) = crossbeam_channel::bounded(batches);
    let budget = Budget { bytes, messages: to_u64(batches), used: Mutex::default(), freed: Condvar::new() };
    let shared = Arc::new(Shared { budget, hearing: AtomicU8::new(Hearing::Nothing as u8) });
    (Queue { sender, shared: Arc::clone(&shared), waker }, Inbox { receiver, shared })
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

    fn put(&self, message: Message, wait: bool) -> Result<(), Refused> {
        let bytes = message.bytes();
        let waiting_bytes = {
            let mut used = match self.shared.budget.take(bytes, wait) {
                Ok(used) => used,
                Err(Unavailable::Full) => return Err(Refused::Full(message)),
                Err(Unavailable::Closed) => return Err(Refused::Closed(message)),
            };
            // Under the lock: closing takes it too, so no message slips in behind the closing's last look.
            let queued = self.sender.try_send(message);
            assert!(queued.is_ok(), "the budget leaves a place in the channel for every message that it admits");
            used.bytes += bytes;
            used.messages += 1;
            used.bytes
        };
        self.wake_writer(waiting_bytes);
        Ok(())
    }

    /// Ends the writer's wait if it wants to hear of what is queued.
    ///
    /// No wake is lost: (1) this thread queues, fences, then reads `hearing`; (2) the writer sets `hearing`, fences, then
    /// looks at the queue. The fences are totally ordered, so either this thread sees what the writer wants to hear, or
    /// the writer sees the message. (3) Only the producer that swaps `hearing` back wakes: one system call per wait.
    fn wake_writer(&self, waiting_bytes: u64) {
        fence(Ordering::SeqCst);
        let hearing = self.shared.hearing.load(Ordering::Relaxed);
        let wanted = hearing == Hearing::Anything as u8 || hearing == Hearing::Plenty as u8 && waiting_bytes >= WORTH_WAKING;
        if wanted && self.shared.hearing.swap(Hearing::Nothing as u8, Ordering::Relaxed) != Hearing::Nothing as u8 {
            self.waker.wake();
        }
    }
}

impl Inbox {
    /// The next message, if there is one; its bytes are free for others.
    pub(super) fn take(&self) -> Option<Message> {
        let message = self.receiver.try_recv().ok()?;
        self.shared.budget.give_back(message.bytes());
        Some(message)
    }

    /// To be called before the writer waits. False if there is something to hear already: then it must not wait.
    pub(super) fn listen(&self, hearing: Hearing) -> bool {
        self.shared.hearing.store(hearing as u8, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let heard = match hearing {
            Hearing::Nothing => false,
            Hearing::Plenty => self.shared.budget.used().bytes >= WORTH_WAKING,
            Hearing::Anything => !self.receiver.is_empty(),
        };
        if heard {
            self.stop_listening();
        }
        !heard
    }

    /// To be called after the wait.
    pub(super) fn stop_listening(&self) {
        self.shared.hearing.store(Hearing::Nothing as u8, Ordering::Relaxed);
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        // The channel keeps what is queued for as long as there is a sender; whoever waits for an answer would wait that long.
        let mut used = self.shared.budget.used();
        used.closed = true;
        while self.receiver.try_recv().is_ok() {}
        drop(used);
        self.shared.budget.freed.notify_all();
    }
}

/// What may wait for the writer. A message larger than the limit passes while nothing else waits.
#[derive(Debug)]
struct Budget {
    bytes: u64,
    messages: u64,
    used: Mutex<Used>,
    freed: Condvar,
}

#[derive(Debug, Default)]
struct Used {
    bytes: u64,
    messages: u64,
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
        // Plain numbers, changed together: whole at every moment that a panic could leave them.
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sees to room for a message of `bytes`, which is there for as long as the guard is held.
    fn take(&self, bytes: u64, wait: bool) -> Result<MutexGuard<'_, Used>, Unavailable> {
        let mut used = self.used();
        loop {
            if used.closed {
                return Err(Unavailable::Closed);
            }
            let fits = used.bytes == 0 || used.bytes.saturating_add(bytes) <= self.bytes;
            if fits && used.messages < self.messages {
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

    fn give_back(&self, bytes: u64) {
        let mut used = self.used();
        used.bytes -= bytes;
        used.messages -= 1;
        let waited_for = used.waiting > 0;
        drop(used);
        if waited_for {
            self.freed.notify_all();
        }
    }
}
