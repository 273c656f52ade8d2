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

/// The writer, until it stopped.
#[derive(Debug)]
pub(super) struct Helm {
    writer: Mutex<Option<Writer>>,
    bell: Arc<Bell>,
    shared: Arc<Shared>,
}

impl Helm {
    pub(super) fn new(writer: Writer, bell: Arc<Bell>, shared: Arc<Shared>) -> Self {
        Self { writer: Mutex::new(Some(writer)), bell, shared }
    }

    /// Works until the writer stops: what its own thread does, which is the one that the bell wakes. Only this thread lets go of the
    /// writer, also of one that a producer's commit stopped: the ring is this thread's.
    pub(super) fn work(&self) {
        let mut held = self.take();
        while let Some(writer) = held.as_mut().filter(|_| !self.has_stopped()) {
            match self.guard(|| writer.work()) {
                Ok(Pause::Wait(place, timeout)) => {
                    drop(held);
                    self.bell.wait(place, timeout);
                    held = self.take();
                }
                Ok(Pause::End) => self.stop(None),
                Err(error) => self.stop(Some(error)),
            }
        }
        // With it goes every answer that it owes, and whoever waits looks for the reason, which is there.
        *held = None;
        drop(held);
        if let Some(Some(error)) = self.shared.stopped.get() {
            tracing::error!(%error, path = %self.shared.dir.display(), "the partition takes no more appends until it is opened again");
        }
    }

    /// Commits a batch on this thread if the writer is idle and needs nothing else for it; both back if not. The answer is
    /// there when this returns, or comes later from the writer's own thread.
    pub(super) fn try_commit(&self, batch: Batch, answer: Answerer<Answer>) -> Result<(), (Batch, Answerer<Answer>)> {
        let mut held = match self.writer.try_lock() {
            Ok(held) => held,
            Err(TryLockError::Poisoned(held)) => held.into_inner(),
            Err(TryLockError::WouldBlock) => return Err((batch, answer)),
        };
        let Some(writer) = held.as_mut().filter(|writer| !self.has_stopped() && writer.is_free_for(&batch)) else {
            return Err((batch, answer));
        };
        let can_wait = self.guard(|| writer.commit(batch, answer)).unwrap_or_else(|error| {
            self.stop(Some(error));
            false
        });
        drop(held);
        if !can_wait {
            self.bell.wake();
        }
        Ok(())
    }

    fn take(&self) -> MutexGuard<'_, Option<Writer>> {
        // A panic of the writer is caught before it could poison the lock.
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has_stopped(&self) -> bool {
        self.shared.stopped.get().is_some()
    }

    /// A panic is an error like any other.
    fn guard<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        panic::catch_unwind(AssertUnwindSafe(work))
            .unwrap_or_else(|panic| Err(Error::WriterPanicked { path: self.shared.dir.to_path_buf(), message: panic_message(&*panic) }))
    }

    /// Says why the writer stops, while it is held: from then on nobody works as it. However it ends, whoever waits learns why.
    fn stop(&self, error: Option<Error>) {
        let first = self.shared.stopped.set(error).is_ok();
        assert!(first, "a partition has one writer, which stops once");
    }
}
