//! The promise of an answer to one append.

use std::ops::Range;
#[cfg(feature = "async")]
use std::pin::Pin;
use std::sync::Arc;
#[cfg(feature = "async")]
use std::task::{Context, Poll};
use std::time::Duration;

use super::Shared;
use super::reply::{NoReply, Reply};
use crate::error::{Error, Result};
use crate::record::Batch;

/// The answer to an append: the offsets of its records, or why they are not there.
pub(super) type Answer = Result<Range<u64>>;

/// An append that is queued. Dropping it leaves the append as it is: it happens, and nobody waits for it.
#[derive(Debug)]
#[must_use = "an append is acknowledged only once its ticket said so"]
pub struct Ticket {
    answer: Reply<Answer>,
    shared: Arc<Shared>,
}

impl Ticket {
    pub(super) fn new(answer: Reply<Answer>, shared: Arc<Shared>) -> Self {
        Self { answer, shared }
    }

    /// Waits for the answer: the offsets of the batch's records.
    ///
    /// # Durability
    /// As the topic's [`Durability`](crate::Durability) says; with the default, the records are on the device.
    ///
    /// # Blocking
    /// Until the commit that holds the batch's last record is durable, or failed. It never waits for ever: a writer that
    /// ends, however it ends, answers.
    ///
    /// # Errors
    /// - [`Error::DiskFull`] if there was no room, [`Error::TooManyOpenFiles`] if a new segment could not be opened, [`Error::Io`] if the
    ///   device refused to set room aside: later appends may succeed.
    /// - [`Error::OffsetsUsedUp`] if fewer offsets are left than the batch has records.
    /// - [`Error::Failed`] if a write failed: the records may or may not be in the log when it is opened again.
    /// - [`Error::Closed`] if the partition was closed before the append's turn came.
    pub fn wait(self) -> Result<Range<u64>> {
        let Self { answer, shared } = self;
        shared.check_process()?;
        shared.workers.work_until(|| answer.is_over());
        // Without an answer the writer is gone, and said why before it let go of its end.
        answer.wait().unwrap_or_else(|| Err(shared.why_stopped()))
    }

    /// The answer if it is there, or the ticket back.
    ///
    /// # Errors
    /// The inner result is that of [`Self::wait`].
    pub fn try_wait(self) -> Result<Result<Range<u64>>, Self> {
        if let Err(error) = self.shared.check_process() {
            return Ok(Err(error));
        }
        let reply = self.answer.try_take();
        self.or_back(reply)
    }

    /// Waits at most so long for the answer; the ticket back if it did not come.
    ///
    /// # Errors
    /// The inner result is that of [`Self::wait`].
    pub fn wait_timeout(self, timeout: Duration) -> Result<Result<Range<u64>>, Self> {
        if let Err(error) = self.shared.check_process() {
            return Ok(Err(error));
        }
        let reply = self.answer.wait_timeout(timeout);
        self.or_back(reply)
    }

    fn or_back(self, reply: Result<Answer, NoReply>) -> Result<Answer, Self> {
        match reply {
            Ok(answer) => Ok(answer),
            Err(NoReply::Gone) => Ok(Err(self.shared.why_stopped())),
            Err(NoReply::Pending) => Err(self),
        }
    }
}

/// Polled, it is woken when the answer is there; it must not be polled again after that. Dropped, it is an append that nobody waits for.
#[cfg(feature = "async")]
impl Future for Ticket {
    type Output = Result<Range<u64>>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Err(error) = self.shared.check_process() {
            return Poll::Ready(Err(error));
        }
        match self.answer.poll(context) {
            Ok(answer) => Poll::Ready(answer),
            Err(NoReply::Gone) => Poll::Ready(Err(self.shared.why_stopped())),
            Err(NoReply::Pending) => Poll::Pending,
        }
    }
}

/// An append that was not queued, with its batch.
#[derive(Debug)]
pub struct TryAppendError {
    /// The batch, given back.
    pub batch: Batch,
    /// Why; none if the queue was full.
    pub error: Option<Error>,
}

impl std::fmt::Display for TryAppendError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.error {
            Some(error) => error.fmt(f),
            None => f.write_str("the partition's queue is full"),
        }
    }
}

impl std::error::Error for TryAppendError {}
