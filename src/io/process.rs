//! Which process this is, as far as fork(2) goes: a child has copies of its parent's handles, and none of its threads.
//!
//! What a child did with them would reach the parent: files and rings are shared, and so is the lock of a data directory. So everything that
//! changes something asks first whether it still is in the process that made it. That must cost nothing: one load of a number which
//! a handler in the child raises (`pthread_atfork`), no system call. It raises nothing in a process that is started in the usual ways
//! (`posix_spawn`, `vfork`), for such a child shares the parent's memory until it runs another program. A raw `clone` past the C library goes unseen.
//!
//! `unsafe` here: registering that handler.
#![allow(unsafe_code, reason = "the handler is registered by a call of the C library")]

use std::fmt;
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// How many forks lie between the first process and this one, since anybody asked.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// The process that something was made in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process(u32);

impl Process {
    /// This one.
    ///
    /// # Errors
    /// The C library has no memory to note that forks are to be counted.
    pub fn current() -> io::Result<Self> {
        static REGISTERED: OnceLock<i32> = OnceLock::new();
        match *REGISTERED.get_or_init(count_forks) {
            0 => Ok(Self(FORKS.load(Ordering::Relaxed))),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    /// Whether this still is that process, and not a child of it.
    pub fn is_current(self) -> bool {
        // The handler runs in the child before anything else does, on its only thread.
        self.0 == FORKS.load(Ordering::Relaxed)
    }

    /// An error in a child, which [`is_forked`] knows.
    pub(super) fn check(self) -> io::Result<()> {
        if self.is_current() { Ok(()) } else { Err(io::Error::other(Forked)) }
    }
}

/// Whether something was refused because it belongs to the process that this one was forked from.
pub fn is_forked(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<Forked>())
}

#[derive(Debug)]
struct Forked;

impl fmt::Display for Forked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("it belongs to the process that this one was forked from")
    }
}

impl std::error::Error for Forked {}

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

#[cfg(not(miri))]
fn count_forks() -> i32 {
    // SAFETY: the handler is a function without arguments that lives as long as the program, and does nothing but change an atomic,
    // which is allowed wherever a signal handler may run.
    unsafe { libc::pthread_atfork(None, None, Some(in_child)) }
}

/// Nothing forks there.
#[cfg(miri)]
fn count_forks() -> i32 {
    let _ = in_child;
    0
}
