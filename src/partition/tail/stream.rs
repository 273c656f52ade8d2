//! A [`Tail`] as a stream, for any runtime: it knows no other than the waker of whoever polls it.

use std::future::{self, Future};
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_core::stream::{FusedStream, Stream};

use super::Tail;
use crate::error::Result;
use crate::partition::records::OwnedRecord;
use crate::partition::watch::Place;

/// The records of a [`Tail`] as they come: made by [`Tail::into_stream`]. It ends after an error.
///
/// Dropped at any moment, it loses nothing and leaves nothing behind; [`Self::into_tail`] goes on where it was.
///
/// # Blocking
/// Only the wait is asynchronous. At the end of the log records come from memory or from the page cache; a tail that is far
/// behind reads from the device, a few at a time, and blocks the thread that polls it meanwhile.
#[derive(Debug)]
#[must_use = "a stream does nothing unless it is polled"]
pub struct TailStream {
    tail: Tail,
    place: Place,
    over: bool,
}

impl Tail {
    /// The records as they come, for a task to wait for.
    pub fn into_stream(self) -> TailStream {
        let place = self.watch().place();
        TailStream { tail: self, place, over: false }
    }
}

impl TailStream {
    /// The next record: what `StreamExt::next` does, without a crate for it. Dropping the future loses nothing.
    pub fn next_record(&mut self) -> impl Future<Output = Option<Result<OwnedRecord>>> + '_ {
        future::poll_fn(|context| Pin::new(&mut *self).poll_next(context))
    }

    /// The tail that it was, where it goes on.
    pub fn into_tail(self) -> Tail {
        self.tail
    }

    /// The tail that it is.
    pub fn tail(&self) -> &Tail {
        &self.tail
    }

    fn poll_record(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<OwnedRecord>>> {
        let tail = &mut self.tail;
        tail.drop_cut();
        if tail.ahead.is_empty() {
            if !tail.has_more()? {
                self.place.ask(tail.position, context.waker().clone());
                if !tail.has_more()? {
                    return Poll::Pending;
                }
                self.place.leave();
            }
            tail.read_ahead()?;
        }
        Poll::Ready(Ok(tail.take_ahead()))
    }
}

impl Stream for TailStream {
    type Item = Result<OwnedRecord>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.over {
            return Poll::Ready(None);
        }
        let next = self.poll_record(context).map(Result::transpose);
        self.over = matches!(next, Poll::Ready(None | Some(Err(_))));
        next
    }
}

impl FusedStream for TailStream {
    fn is_terminated(&self) -> bool {
        self.over
    }
}
