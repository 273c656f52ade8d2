//! Who works as the writer: its own thread, or for one commit a producer that found it idle.
//!
//! Handing one append to another thread and its answer back takes two wakes, which cost a good part of what the device's write
//! does. A producer that waits for its answer anyway, while nobody else appends, therefore writes its commit itself; with
//! company, the writer's own thread commits for all of them. That thread may work for other partitions as well: see [`hands`](super::hands).
//! Either way there is one writer, and whoever holds it is it.

use std::panic::{self, AssertUnwindSafe};
#[cfg(feature = "sim")]
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use super::hands::Served;
use super::queue::Bell;
#[cfg(feature = "sim")]
use super::queue::Where;
use super::reply::Answerer;
use super::ticket::Answer;
use super::writer::{Company, Outgoing, Pause, Writer};
use super::{Shared, panic_message};
use crate::error::{Error, Result};
use crate::io::transfer::Done;
use crate::record::Batch;

/// The writer, until it stopped.
#[derive(Debug)]
pub(super) struct Helm {
    writer: Mutex<Option<Writer>>,
    bell: Arc<Bell>,
    shared: Arc<Shared>,
    /// Whether a stepped writer is between two steps of its own, which a thread would not let go of it for.
    #[cfg(feature = "sim")]
    between_steps: AtomicBool,
}

impl Helm {
    pub(super) fn new(writer: Writer, bell: Arc<Bell>, shared: Arc<Shared>) -> Self {
        Self {
            writer: Mutex::new(Some(writer)),
            bell,
            shared,
            #[cfg(feature = "sim")]
            between_steps: AtomicBool::new(false),
        }
    }

    /// Works until the writer stops: what its own thread does, which is the one that the bell wakes.
    pub(super) fn work(&self) {
        while let Some(Pause::Wait(place, timeout)) = self.take_turn(Writer::work) {
            self.bell.wait(place, timeout);
        }
    }

    /// Works as the writer's own thread until there is nothing to do, and tells how to wait then; none once the writer stopped. Only
    /// this thread lets go of the writer, also of one that a producer's commit stopped: the ring is this thread's.
    fn take_turn(&self, work: impl FnOnce(&mut Writer) -> Result<Pause>) -> Option<Pause> {
        let mut held = self.take();
        if let Some(writer) = held.as_mut().filter(|_| !self.has_stopped()) {
            match self.guard(|| work(writer)) {
                Ok(Pause::End) => self.stop(None),
                Err(error) => self.stop(Some(error)),
                Ok(pause) => return Some(pause),
            }
        }
        // With it goes every answer that it owes, and whoever waits looks for the reason, which is there.
        *held = None;
        drop(held);
        if let Some(Some(error)) = self.shared.stopped.get() {
            tracing::error!(%error, path = %self.shared.dir.display(), "the partition takes no more appends until it is opened again");
        }
        None
    }

    /// One step of what [`Self::work`] does, for a writer without a thread.
    #[cfg(feature = "sim")]
    pub(super) fn step(&self) -> Option<Pause> {
        let goes_on = self.between_steps.load(Ordering::Relaxed);
        let pause = self.take_turn(|writer| writer.work_for_one_step(goes_on));
        let holds_on = matches!(pause, Some(Pause::BetweenSteps | Pause::Wait(Where::InRing, _)));
        self.between_steps.store(holds_on, Ordering::Relaxed);
        pause
    }

    /// Whether a stepped writer would be woken by now that waits there.
    #[cfg(feature = "sim")]
    pub(super) fn has_woken(&self, place: Where) -> bool {
        self.bell.has_woken(place)
    }

    /// Has the writer look at what it waits for: there is news that no message brings.
    pub(super) fn tell(&self) {
        self.bell.sound();
    }

    /// Whether the writer is gone.
    #[cfg(feature = "sim")]
    pub(super) fn is_over(&self) -> bool {
        self.take().is_none()
    }

    /// Commits a batch on this thread if the writer is idle and needs nothing else for it; both back if not. The answer is
    /// there when this returns, or comes later from the writer's own thread.
    pub(super) fn try_commit(&self, batch: Batch, answer: Answerer<Answer>) -> Result<(), (Batch, Answerer<Answer>)> {
        #[cfg(feature = "sim")]
        if self.between_steps.load(Ordering::Relaxed) {
            return Err((batch, answer));
        }
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
        self.shared.stop(error);
    }
}

impl Served for Helm {
    fn bell(&self) -> &Bell {
        &self.bell
    }

    fn serve(&self, company: Company, landed: Option<Done>) -> Option<(Pause, Option<Outgoing>)> {
        let mut outgoing = None;
        let pause = self.take_turn(|writer| {
            let pause = writer.work_in_turn(company, landed)?;
            outgoing = writer.take_outgoing();
            Ok(pause)
        })?;
        Some((pause, outgoing))
    }

    fn abandon(&self) {
        let mut held = self.take();
        if held.is_some() && !self.has_stopped() {
            let message = "the thread that works for it ended".to_owned();
            self.stop(Some(Error::WriterPanicked { path: self.shared.dir.to_path_buf(), message }));
        }
        *held = None;
    }
}
