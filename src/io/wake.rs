//! Ending another's wait by an eventfd: one that a ring waits on beside its completions, and one for poll loops of others.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};

/// Ends a ring's wait. Cheap to clone; any thread may use it, also after the ring is gone.
#[derive(Debug, Clone)]
pub struct Waker(Arc<OwnedFd>);

impl Waker {
    pub(super) fn new() -> io::Result<Self> {
        // Blocking: some kernels answer io_uring's read of a non-blocking file with EAGAIN at once, instead of waiting.
        Ok(Self(Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?)))
    }

    /// Makes the ring's current or next wait return.
    pub fn wake(&self) {
        // The counter saturates only after 2^64 - 2 unread wakes, and a full one still wakes: no error to act on.
        let _ = rustix::io::write(&*self.0, &1_u64.to_ne_bytes());
    }

    /// Whether a wait would return.
    #[cfg(all(test, loom))]
    pub(crate) fn is_raised(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        poll(&mut [PollFd::new(self, PollFlags::IN)], Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(1)
    }

    /// Takes all wakes so far, so that the next wait blocks again. Blocks if there was none.
    pub(super) fn clear(&self) {
        let mut counter = [0; 8];
        let _ = rustix::io::read(&*self.0, &mut counter);
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A descriptor that is readable while it is raised.
#[derive(Debug)]
pub struct Signal(OwnedFd);

impl Signal {
    /// One that is not raised.
    ///
    /// # Errors
    /// What the system says to one more descriptor.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Makes it readable.
    pub fn raise(&self) {
        // A full counter is readable, too: no error to act on.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Makes it unreadable, until it is raised again.
    pub fn lower(&self) {
        let mut counter = [0; 8];
        // It was not raised, at worst.
        let _ = rustix::io::read(&self.0, &mut counter);
    }
}

impl AsFd for Signal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    #[test]
    fn a_signal_is_readable_while_it_is_raised() {
        let signal = Signal::new().unwrap();
        let readable = || poll(&mut [PollFd::new(&signal, PollFlags::IN)], Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1;
        assert!(!readable());
        signal.lower();
        signal.raise();
        signal.raise();
        assert!(readable() && readable());
        signal.lower();
        assert!(!readable());
    }
}
