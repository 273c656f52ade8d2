//! Where threads that many partitions share for their upkeep take the jobs from: those of one partition in order and one at a time, those
//! of different ones in turn.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};

use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Condvar, Mutex, MutexGuard};

/// One partition's work: upkeep's [`Worker`](super::upkeep::Worker), or what stands for it in a model.
pub(super) trait Chores {
    /// Does one job, if there is one to do.
    fn work_once(&mut self) -> bool;
    /// Whether nothing is to be done now.
    fn is_idle(&self) -> bool;
}

/// Those that are called wait here for a thread.
#[derive(Debug)]
pub(super) struct Bench<W> {
    waiting: Mutex<Waiting<W>>,
    changed: Condvar,
}

#[derive(Debug)]
struct Waiting<W> {
    errands: VecDeque<Arc<Errand<W>>>,
    closed: bool,
}

/// The upkeep of one partition: one thread at a time is at it.
#[derive(Debug)]
pub(super) struct Errand<W> {
    /// Until it is finished.
    worker: Mutex<Option<W>>,
    /// Whether it waits for a thread, or one is at it.
    called: AtomicBool,
}

impl<W: Chores> Errand<W> {
    pub(super) fn new(worker: W) -> Arc<Self> {
        Arc::new(Self { worker: Mutex::new(Some(worker)), called: AtomicBool::new(false) })
    }

    fn worker(&self) -> MutexGuard<'_, Option<W>> {
        // A panic of a job is caught by the worker.
        self.worker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does one job here, if there is one to do.
    pub(super) fn work_once(&self) {
        if let Some(worker) = &mut *self.worker() {
            worker.work_once();
        }
    }

    /// Waits for the job that is being done. What is left is done here, in its order. Nobody calls it any more.
    pub(super) fn finish(&self) {
        let worker = self.worker().take();
        if let Some(mut worker) = worker {
            while worker.work_once() {}
        }
    }
}

impl<W: Chores> Bench<W> {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { waiting: Mutex::new(Waiting { errands: VecDeque::new(), closed: false }), changed: Condvar::new() })
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting<W>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a thread look for a job. To be called after it was sent.
    ///
    /// No job is missed: (1) whoever calls has sent its job, then swaps `called`; (2) the thread that did a job swaps it back, then looks for
    /// more. One swap is before the other: either the caller finds it cleared, or the thread's swap acquires what the caller's released, and it
    /// sees the job.
    pub(super) fn call(&self, errand: &Arc<Errand<W>>) {
        if !errand.called.swap(true, Ordering::AcqRel) {
            self.waiting().errands.push_back(Arc::clone(errand));
            self.changed.notify_one();
        }
    }

    /// Ends the threads, once nobody waits.
    pub(super) fn close(&self) {
        self.waiting().closed = true;
        self.changed.notify_all();
    }

    /// Does jobs, one of each partition in turn, until the bench is closed.
    pub(super) fn work(&self) {
        while let Some(errand) = self.next() {
            errand.work_once();
            errand.called.swap(false, Ordering::AcqRel);
            let has_more = errand.worker().as_ref().is_some_and(|worker| !worker.is_idle());
            if has_more {
                self.call(&errand);
            }
        }
    }

    fn next(&self) -> Option<Arc<Errand<W>>> {
        let mut waiting = self.waiting();
        loop {
            if let Some(errand) = waiting.errands.pop_front() {
                return Some(errand);
            }
            if waiting.closed {
                return None;
            }
            waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(all(test, loom))]
mod models;
