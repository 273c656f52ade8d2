//! Who works as the writer: its own thread, or for one commit a producer that found it idle.
//!
//! Handing one append to another thread and its answer back takes two wakes, which cost a good part of what the device's write
//! does. A producer that waits for its answer anyway, while nobody else appends, therefore writes its commit itself; with
//! company, the writer's own thread commits for all of them. Either way there is one writer, and whoever holds it is it.

use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

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
    state: Mutex<State>,
    bell: Arc<Bell>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct State {
    writer: Option<Writer>,
    /// A producer's commit ended it. Only its own thread may let go of it: the ring is that thread's.
    ended: bool,
}

impl Helm {
    pub(super) fn new(writer: Writer, bell: Arc<Bell>, shared: Arc<Shared>) -> Self {
        Self { state: Mutex::new(State { writer: Some(writer), ended: false }), bell, shared }
    }

    /// Works until the writer ends: what its own thread does, which is the one that the bell wakes.
    pub(super) fn work(&self) {
        loop {
            // A panic is caught before it could poison the lock.
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let State { writer: Some(writer), ended: false } = &mut *state else { break };
            match self.guard(|| writer.work()) {
                Ok(Pause::Wait(place, timeout)) => {
                    drop(state);
                    self.bell.wait(place, timeout);
                }
                Ok(Pause::End) => {
                    self.stop(None);
                    break;
                }
                Err(error) => {
                    self.stop(Some(error));
                    break;
                }
            }
        }
        // With it goes every answer that it owes, and whoever waits looks for the reason, which is there.
        self.state.lock().unwrap_or_else(PoisonError::into_inner).writer = None;
        if let Some(Some(error)) = self.shared.stopped.get() {
            tracing::error!(%error, path = %self.shared.dir.display(), "the partition takes no more appends until it is opened again");
        }
    }

    /// Commits a batch on this thread if the writer is idle and needs nothing else for it; the batch back if not. The answer is
    /// there when this returns, or comes later from the writer's own thread.
    pub(super) fn try_commit(&self, batch: Batch, answer: impl FnOnce() -> Answerer<Answer>) -> Result<(), Batch> {
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(state)) => state.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(batch),
        };
        let State { writer: Some(writer), ended } = &mut *state else { return Err(batch) };
        if *ended || !writer.is_free_for(&batch) {
            return Err(batch);
        }
        let can_wait = match self.guard(|| writer.commit(batch, answer())) {
            Ok(can_wait) => can_wait,
            Err(error) => {
                self.stop(Some(error));
                *ended = true;
                false
            }
        };
        drop(state);
        if !can_wait {
            self.bell.wake();
        }
        Ok(())
    }

    /// A panic is an error like any other.
    fn guard<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        panic::catch_unwind(AssertUnwindSafe(work))
            .unwrap_or_else(|panic| Err(Error::WriterPanicked { path: self.shared.dir.to_path_buf(), message: panic_message(&*panic) }))
    }

    /// Says why the writer stops, before it lets go of anything. However it ends, whoever waits learns why.
    fn stop(&self, error: Option<Error>) {
        let first = self.shared.stopped.set(error).is_ok();
        assert!(first, "a partition has one writer, which stops once");
    }
}
