//! Closing a broker, for as long as it takes or within a limit.

use std::io;
use std::panic;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crossbeam_channel::{RecvTimeoutError, SendError};

use super::{Broker, Inner};
use crate::error::{Error, Result};
use crate::partition::Partition;
use crate::topic::Topic;

impl Broker {
    /// Writes everything that is queued, gives preallocated space back, and lets go of the directory. All handles, clones of
    /// this one among them, get [`Error::Closed`] from then on.
    ///
    /// # Blocking
    /// Until the device has everything, and who makes, alters or deletes a topic, or takes a partition in, is done: without limit, if a write or a sync never
    /// completes. [`Self::close_within`] has one. Dropping the last handle waits like this, too.
    ///
    /// # Errors
    /// The first failure; everything is closed all the same. A partition that had stopped tells why.
    pub fn close(self) -> Result<()> {
        self.0.topics.end()?;
        self.0.close_all()
    }

    /// [`Self::close`], for no longer than `limit`: for a device that may have stopped answering. The partitions are closed side by side, so that one
    /// that hangs holds up no other, but where they share a thread ([`Writers::Shared`](crate::Writers::Shared)).
    ///
    /// Where the time does not suffice, closing goes on by itself. All handles get [`Error::Closed`] nevertheless; whoever waits by then, for the
    /// answer to an append or for room to queue one, waits until the device has answered. Until it has, memory that it may still read or
    /// write stays allocated, and the data directory stays locked, here and for other processes: a write that is under way could otherwise land in what
    /// another broker has made of its file. Then the directory is let go of as by [`Self::close`]. The end of the process lets go of it, too, as soon as
    /// the kernel has ended what is under way: what was acknowledged is there at the next opening, of the rest any part may be.
    ///
    /// # Blocking
    /// For `limit` at most, and the moments that the scheduler takes. Only where the system grants no thread for it, it is closed on this one,
    /// without a limit.
    ///
    /// # Errors
    /// [`Error::CloseTimedOut`] after `limit`; before, as for [`Self::close`].
    pub fn close_within(self, limit: Duration) -> Result<()> {
        if !self.0.by_itself {
            // Who steps waits for nothing that could hang.
            return self.close();
        }
        let topics = self.0.topics.end()?;
        let inner = Arc::clone(&self.0);
        let (done, closed) = crossbeam_channel::bounded(0);
        let close = move || {
            let result = self.0.topics.take().and_then(|topics| close_side_by_side(&topics));
            self.0.workers.end();
            // It may be the last handle, whose end waits for a retention pass.
            drop(self);
            if let Err(SendError(Err(error))) = done.send(result) {
                tracing::warn!(%error, "a broker that was left to close by itself could not be closed cleanly");
            }
        };
        let Ok(closing) = thread::Builder::new().name("log closing".to_owned()).spawn(close) else {
            return inner.close_all();
        };
        match closed.recv_timeout(limit) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => {
                topics.iter().for_each(Topic::leave_to_close);
                Err(Error::CloseTimedOut { path: inner.dir.clone(), limit })
            }
            Err(RecvTimeoutError::Disconnected) => match closing.join() {
                Ok(()) => unreachable!("it tells before it ends"),
                Err(bug) => panic::resume_unwind(bug),
            },
        }
    }
}

impl Inner {
    /// Closes one partition after the other, and ends the threads that they shared.
    fn close_all(&self) -> Result<()> {
        let closed = self.topics.take()?.iter().map(Topic::close).fold(Ok(()), Result::and);
        self.workers.end();
        closed
    }
}

/// Closes all partitions of the topics, each on a thread of its own. Gives the first failure.
fn close_side_by_side(topics: &[Topic]) -> Result<()> {
    let partitions: Vec<_> = topics.iter().flat_map(Topic::partitions).collect();
    thread::scope(|scope| {
        let close_one = |partition| {
            let begun = thread::Builder::new().name("log closing".to_owned()).spawn_scoped(scope, move || Partition::close(partition));
            (partition, begun)
        };
        let closing: Vec<_> = partitions.iter().map(close_one).collect();
        let close = |(partition, thread): (&Partition, io::Result<thread::ScopedJoinHandle<'_, _>>)| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|bug| panic::resume_unwind(bug)),
            // The system grants no more.
            Err(_) => partition.close(),
        };
        closing.into_iter().map(close).fold(Ok(()), Result::and)
    })
}
