//! Who does a partition's work: threads of its own, threads that many share, or, in a simulation, whoever would wait for it.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::bench::{Bench, Errand};
use super::hands::{Desk, Hand};
use super::reply;
#[cfg(feature = "sim")]
use super::stepper::{Stepper, TaskId};
use super::upkeep::Worker;
use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::io::{Disk, Process};
use crate::record::to_usize;

/// Who runs writers and upkeep.
#[derive(Debug, Clone, Default)]
pub(crate) enum Workers {
    /// A thread for each.
    #[default]
    Threads,
    /// A few threads for all.
    Shared(Arc<Crew>),
    /// Nobody, until somebody steps them or waits for them.
    #[cfg(feature = "sim")]
    Stepped(Stepper),
}

/// Upkeep at work. Dropped, it first does what it was asked for.
#[derive(Debug)]
pub(super) enum AtWork {
    Thread(Option<JoinHandle<()>>),
    Shared(Arc<Bench<Worker>>, Arc<Errand<Worker>>),
    /// No thread is to be had: whoever calls does the job at once.
    Caller(Arc<Errand<Worker>>),
    #[cfg(feature = "sim")]
    Stepped(Stepper, TaskId),
}

impl Workers {
    /// So many threads for the writers of all partitions, each pinned to the CPU that `next_core` gives it, and as many for upkeep, but two
    /// at least: one long job, the checksum of a log, holds up no other.
    ///
    /// # Errors
    /// What the system says to the threads, or to a ring.
    pub(crate) fn shared(
        disk: &Arc<dyn Disk>,
        clock: &Arc<dyn Clock>,
        dir: &Path,
        writers: u32,
        next_core: impl Fn() -> Option<core_affinity::CoreId>,
    ) -> Result<Self> {
        let process = Process::current().map_err(Error::io("look out for forks of", dir))?;
        // What was started is ended with the crew, also where the rest cannot be.
        let crew = Crew {
            process,
            bench: Bench::new(),
            desks: (0..writers).map(|_| Desk::new()).collect(),
            threads: Mutex::default(),
            turn: AtomicU32::new(0),
        };
        for (number, desk) in crew.desks.iter().enumerate() {
            let (ready, started) = reply::pair();
            let (core, disk, clock, desk) = (next_core(), Arc::clone(disk), Arc::clone(clock), Arc::clone(desk));
            let body = move || {
                super::pin(core);
                match Hand::new(&*disk, clock, desk) {
                    Ok(hand) => {
                        drop(disk);
                        ready.send(Ok(()));
                        hand.work();
                    }
                    Err(error) => ready.send(Err(error)),
                }
            };
            let thread = thread::Builder::new().name(format!("log writer {number}")).spawn(body);
            crew.threads().push(thread.map_err(Error::io("start a writer thread for", dir))?);
            let started = started.wait().unwrap_or_else(|| Err(io::Error::other("it ended while it started")));
            started.map_err(Error::io("make a ring for", dir))?;
        }
        for _ in 0..writers.max(2) {
            let bench = Arc::clone(&crew.bench);
            let thread = thread::Builder::new().name("log upkeep".to_owned()).spawn(move || bench.work());
            crew.threads().push(thread.map_err(Error::io("start an upkeep thread for", dir))?);
        }
        Ok(Self::Shared(Arc::new(crew)))
    }

    /// Ends the threads that the partitions shared, once they are closed.
    pub(crate) fn end(&self) {
        if let Self::Shared(crew) = self {
            crew.end();
        }
    }

    /// To be called before a wait: where no thread does what is waited for, it is done here, until it is `ready`.
    pub(super) fn work_until(&self, ready: impl Fn() -> bool) {
        match self {
            Self::Threads | Self::Shared(_) => drop(ready),
            #[cfg(feature = "sim")]
            Self::Stepped(stepper) => stepper.work_until(ready),
        }
    }

    /// Where no thread does what is waited for: does it here until it is `ready` or so much time has passed, and tells whether it is ready. None
    /// where threads do it: wait yourself.
    pub(super) fn work_for(&self, timeout: Option<Duration>, ready: impl Fn() -> bool) -> Option<bool> {
        match self {
            Self::Threads | Self::Shared(_) => {
                drop((timeout, ready));
                None
            }
            #[cfg(feature = "sim")]
            Self::Stepped(stepper) => Some(stepper.work_for(timeout, ready)),
        }
    }

    /// Has the jobs done that the worker is sent.
    pub(super) fn start(&self, worker: Worker) -> io::Result<AtWork> {
        match self {
            Self::Threads => {
                let thread = thread::Builder::new().name("log upkeep".to_owned()).spawn(move || worker.work())?;
                Ok(AtWork::Thread(Some(thread)))
            }
            Self::Shared(crew) => Ok(AtWork::Shared(Arc::clone(&crew.bench), Errand::new(worker))),
            #[cfg(feature = "sim")]
            Self::Stepped(stepper) => Ok(AtWork::Stepped(stepper.clone(), stepper.add_upkeep(worker))),
        }
    }
}

impl AtWork {
    /// By whoever calls, on whichever thread that is.
    pub(super) fn by_caller(worker: Worker) -> Self {
        Self::Caller(Errand::new(worker))
    }

    pub(super) fn is_by_caller(&self) -> bool {
        matches!(self, Self::Caller(_))
    }

    /// There is a job for it.
    pub(super) fn call(&self) {
        match self {
            Self::Shared(bench, errand) => bench.call(errand),
            Self::Caller(errand) => errand.work_once(),
            Self::Thread(_) => {}
            #[cfg(feature = "sim")]
            Self::Stepped(..) => {}
        }
    }

    /// Ends the work, once the jobs' sender is gone.
    pub(super) fn finish(&mut self) {
        match self {
            Self::Thread(thread) => {
                if let Some(thread) = thread.take() {
                    let _ = thread.join();
                }
            }
            Self::Shared(_, errand) | Self::Caller(errand) => errand.finish(),
            #[cfg(feature = "sim")]
            Self::Stepped(stepper, task) => stepper.finish(*task),
        }
    }
}

/// The threads that the partitions of a broker share.
#[derive(Debug)]
pub(crate) struct Crew {
    process: Process,
    desks: Vec<Arc<Desk>>,
    bench: Arc<Bench<Worker>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Which desk the next partition gets.
    turn: AtomicU32,
}

impl Crew {
    /// The desk of the next partition.
    pub(super) fn desk(&self) -> &Arc<Desk> {
        let turn = to_usize(self.turn.fetch_add(1, Ordering::Relaxed).into());
        &self.desks[turn % self.desks.len()]
    }

    fn threads(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self) {
        self.desks.iter().for_each(|desk| desk.close());
        self.bench.close();
        let threads = std::mem::take(&mut *self.threads());
        for thread in threads {
            // One of them may be the last to let go of what belongs to a partition; it ends by itself.
            if thread.thread().id() != thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        if !self.process.is_current() {
            // A child has none of the threads; they may have been at a desk or at the bench when they were left behind, and held its lock.
            let threads = self.threads.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget((std::mem::take(&mut self.desks), Arc::clone(&self.bench), std::mem::take(threads)));
            return;
        }
        self.end();
    }
}
