//! Who works as the writer: its own thread, or for one commit a producer that found it idle.
//!
//! Handing one append to another thread and its answer back takes two wakes, which cost a good part of what the device's write
//! does. A producer that waits for its answer anyway, while nobody else appends, therefore writes its commit itself; with
//! company, the writer's own thread commits for all of them. Either way there is one writer, and whoever holds it is it.

use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use super::queue::Bell;
use super::reply::Answerer;
use super::ticket::Answer;
use super::writer::{Pause, Writer};
use super::{Shared, panic_message};
use crate::error::{Error, Result};
use crate::record::Batch;

/// The writer, until it ended.
#[derive(Debug)]
pub(super) struct Helm {
    writer: Mutex<Option<Writer>>,
    bell: Arc<Bell>,
    shared: Arc<Shared>,
}

type Held<'a> = MutexGuard<'a, Option<Writer>>;

impl Helm {
    pub(super) fn new(writer: Writer, bell: Arc<Bell>, shared: Arc<Shared>) -> Self {
        Self { writer: Mutex::new(Some(writer)), bell, shared }
    }

    /// Works until the writer ends: what its own thread does, which is the one that the bell wakes.
    pub(super) fn work(&self) {
        loop {
            // A panic is caught before it could poison the lock.
            let mut held = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(writer) = held.as_mut() else { return };
            match self.guard(|| writer.work()) {
                Ok(Pause::Wait(place, timeout)) => {
                    drop(held);
                    self.bell.wait(place, timeout);
                }
                Ok(Pause::End) => return self.end(held, None),
                Err(error) => return self.end(held, Some(error)),
            }
        }
    }

    /// Commits a batch on this thread if the writer is idle and needs nothing else for it; the batch back if not. The answer is
    /// there when this returns, or comes later from the writer's own thread.
    pub(super) fn try_commit(&self, batch: Batch, answer: impl FnOnce() -> Answerer<Answer>) -> Result<(), Batch> {
        let mut held = match self.writer.try_lock() {
            Ok(held) => held,
            Err(TryLockError::Poisoned(held)) => held.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(batch),
        };
        let Some(writer) = held.as_mut().filter(|writer| writer.is_free_for(&batch)) else { return Err(batch) };
        match self.guard(|| writer.commit(batch, answer())) {
            Ok(true) => {}
            Ok(false) => {
                drop(held);
                self.bell.wake();
            }
            Err(error) => {
                self.end(held, Some(error));
                self.bell.wake();
            }
        }
        Ok(())
    }

    /// A panic is an error like any other.
    fn guard<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        panic::catch_unwind(AssertUnwindSafe(work))
            .unwrap_or_else(|panic| Err(Error::WriterPanicked { path: self.shared.dir.to_path_buf(), message: panic_message(&*panic) }))
    }

    /// Ends the writer. However it ends, whoever waits learns why.
    fn end(&self, mut held: Held<'_>, error: Option<Error>) {
        if let Some(error) = &error {
            tracing::error!(%error, path = %self.shared.dir.display(), "the partition takes no more appends until it is opened again");
        }
        // Before the writer goes, and with it every answer that it owes.
        let first = self.shared.stopped.set(error).is_ok();
        assert!(first, "a partition has one writer, which stops once");
        *held = None;
    }
}
