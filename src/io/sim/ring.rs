//! A ring whose operations take their time, and overtake each other.
//!
//! An operation waits until the ring is looked at; then, as the seed decides, one of those that wait is performed, or none. A
//! process that dies before has not performed it; one that dies while it is performed has in part, like any other write.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::super::{BlockingRing, Buffer, Completion, File, Op, Rejected, Ring, Slot, Token, Waker};
use super::rng::Rng;
use super::state::Shared;
use super::to_u64;
use super::to_usize;

#[derive(Debug)]
pub(super) struct SlowRing {
    inner: BlockingRing,
    waiting: Vec<(Token, Op)>,
    /// Performed, and its completion not taken.
    done: usize,
    shared: Arc<Shared>,
}

impl SlowRing {
    pub(super) fn new(inner: BlockingRing, shared: Arc<Shared>) -> Self {
        Self { inner, waiting: Vec::new(), done: 0, shared }
    }

    fn choose<T>(&self, choice: impl FnOnce(&mut Rng) -> T) -> T {
        choice(&mut self.shared.lock().rng)
    }

    /// Performs one of those that wait.
    fn perform_one(&mut self) -> io::Result<()> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        let chosen = to_usize(self.choose(|rng| rng.below(to_u64(self.waiting.len()))));
        let (token, op) = self.waiting.swap_remove(chosen);
        self.inner.submit(token, op).map_err(|rejected| rejected.error)?;
        self.done += 1;
        Ok(())
    }
}

impl Ring for SlowRing {
    fn take_buffers(&mut self) -> Vec<Buffer> {
        self.inner.take_buffers()
    }

    fn attach(&mut self, file: Arc<dyn File>) -> io::Result<Slot> {
        self.inner.attach(file)
    }

    fn detach(&mut self, slot: Slot) {
        self.inner.detach(slot);
    }

    fn submit(&mut self, token: Token, op: Op) -> Result<(), Rejected> {
        if self.waiting.len() + self.done >= self.inner.depth() {
            return Err(Rejected { error: io::Error::other("more operations than the ring's depth"), buffer: op.buffer });
        }
        self.waiting.push((token, op));
        Ok(())
    }

    fn reap(&mut self) -> io::Result<Option<Completion>> {
        if self.choose(Rng::coin) {
            self.perform_one()?;
        }
        let completion = self.inner.reap()?;
        self.done -= usize::from(completion.is_some());
        Ok(completion)
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        if self.done == 0 {
            self.perform_one()?;
        }
        self.inner.wait(timeout)
    }

    fn waker(&mut self) -> Waker {
        self.inner.waker()
    }
}

impl Drop for SlowRing {
    fn drop(&mut self) {
        // What was submitted happens, also where nobody asks any more.
        while !self.waiting.is_empty() && self.done < self.inner.depth() {
            if self.perform_one().is_err() {
                return;
            }
        }
    }
}
