//! Syncs that the writer does not wait for: appends that are answered by the kernel go on while the device catches up.
//!
//! A thread of its own per partition, started with the first sync; partitions whose commits are durable by themselves have none.

use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use crossbeam_channel::{Receiver, Sender, TryRecvError};

use crate::io::{File, Waker};

/// One sync at a time, on another thread.
#[derive(Debug)]
pub(super) struct Syncer {
    /// Dropped to end the thread.
    files: Option<Sender<Arc<dyn File>>>,
    results: Receiver<io::Result<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Syncer {
    /// A thread that syncs what it is given, and ends the writer's wait when that is done.
    pub(super) fn start(name: String, waker: Waker) -> io::Result<Self> {
        let (files, to_sync) = crossbeam_channel::bounded::<Arc<dyn File>>(1);
        let (results, finished) = crossbeam_channel::bounded(1);
        let work = move || {
            for file in to_sync {
                let result = file.sync();
                drop(file);
                if results.send(result).is_err() {
                    return;
                }
                waker.wake();
            }
        };
        let thread = thread::Builder::new().name(name).spawn(work)?;
        Ok(Self { files: Some(files), results: finished, thread: Some(thread) })
    }

    /// Begins a sync. The one before must have ended.
    pub(super) fn begin(&self, file: Arc<dyn File>) {
        // A thread that is gone shows as a failure when the result is asked for.
        let _ = self.files.as_ref().map(|files| files.send(file));
    }

    /// The result of the sync that was begun, once it is there.
    pub(super) fn result(&self) -> Option<io::Result<()>> {
        match self.results.try_recv() {
            Ok(result) => Some(result),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => Some(Err(io::Error::other("the syncing thread is gone"))),
        }
    }
}

impl Drop for Syncer {
    fn drop(&mut self) {
        self.files = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
