//! Who does a partition's work: threads of its own, or, in a simulation, whoever would wait for it.

use std::io;
use std::thread::{self, JoinHandle};
use std::time::Duration;

#[cfg(feature = "sim")]
use super::stepper::{Stepper, TaskId};
use super::upkeep::Worker;

/// Who runs writers and upkeep.
#[derive(Debug, Clone, Default)]
pub(crate) enum Workers {
    /// A thread for each.
    #[default]
    Threads,
    /// Nobody, until somebody steps them or waits for them.
    #[cfg(feature = "sim")]
    Stepped(Stepper),
}

/// Upkeep at work. Dropped, it first does what it was asked for.
#[derive(Debug)]
pub(super) enum AtWork {
    Thread(Option<JoinHandle<()>>),
    #[cfg(feature = "sim")]
    Stepped(Stepper, TaskId),
}

impl Workers {
    /// To be called before a wait: where no thread does what is waited for, it is done here, until it is `ready`.
    pub(super) fn work_until(&self, ready: impl Fn() -> bool) {
        match self {
            Self::Threads => drop(ready),
            #[cfg(feature = "sim")]
            Self::Stepped(stepper) => stepper.work_until(ready),
        }
    }

    /// Where no thread does what is waited for: does it here until it is `ready` or so much time has passed, and tells whether it is ready. None
    /// where threads do it: wait yourself.
    pub(super) fn work_for(&self, timeout: Option<Duration>, ready: impl Fn() -> bool) -> Option<bool> {
        match self {
            Self::Threads => {
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
            #[cfg(feature = "sim")]
            Self::Stepped(stepper) => Ok(AtWork::Stepped(stepper.clone(), stepper.add_upkeep(worker))),
        }
    }
}

impl AtWork {
    /// Ends the work, once the jobs' sender is gone.
    pub(super) fn finish(&mut self) {
        match self {
            Self::Thread(thread) => {
                if let Some(thread) = thread.take() {
                    let _ = thread.join();
                }
            }
            #[cfg(feature = "sim")]
            Self::Stepped(stepper, task) => stepper.finish(*task),
        }
    }
}
