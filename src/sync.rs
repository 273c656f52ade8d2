//! What the partition's threads meet at: the primitives of std, or loom's where its models run (`scripts/loom`).
//!
//! Loom tries every order in which a few threads can act, and every value that a weak memory lets them read. It knows no
//! crossbeam channel; a stand-in with the same few methods promises less than that does.

#[cfg(not(all(test, loom)))]
mod primitives {
    pub(crate) use crossbeam_channel as channel;
    pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
    pub(crate) use std::thread;

    pub(crate) mod atomic {
        pub(crate) use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering, fence};
    }
}

#[cfg(all(test, loom))]
mod primitives {
    pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};

    pub(crate) mod atomic {
        pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering, fence};
    }

    /// Parking, made of a lock and a condition: loom's own mistakes an unpark for the end of whatever else its thread waits for.
    pub(crate) mod thread {
        use std::sync::Arc;
        use std::time::Duration;

        use loom::sync::{Condvar, Mutex};

        #[derive(Debug, Default)]
        struct Token {
            given: Mutex<bool>,
            changed: Condvar,
        }

        #[derive(Debug, Clone)]
        pub(crate) struct Thread(Arc<Token>);

        loom::thread_local! {
            static CURRENT: Arc<Token> = Arc::default();
        }

        pub(crate) fn current() -> Thread {
            Thread(CURRENT.with(Arc::clone))
        }

        impl Thread {
            pub(crate) fn unpark(&self) {
                *self.0.given.lock().unwrap() = true;
                self.0.changed.notify_one();
            }
        }

        pub(crate) fn park() {
            let Thread(token) = current();
            let mut given = token.given.lock().unwrap();
            while !std::mem::take(&mut *given) {
                given = token.changed.wait(given).unwrap();
            }
        }

        /// Time does not pass in a model: whoever waits is woken, or hangs, and that is found.
        pub(crate) fn park_timeout(_: Duration) {
            park();
        }
    }

    /// A bounded channel of two ends that any thread may use.
    pub(crate) mod channel {
        use std::collections::VecDeque;
        use std::sync::Arc;

        use loom::sync::Mutex;

        #[derive(Debug)]
        struct Channel<T> {
            most: usize,
            queue: Mutex<VecDeque<T>>,
        }

        #[derive(Debug)]
        pub(crate) struct Sender<T>(Arc<Channel<T>>);

        #[derive(Debug)]
        pub(crate) struct Receiver<T>(Arc<Channel<T>>);

        pub(crate) fn bounded<T>(most: usize) -> (Sender<T>, Receiver<T>) {
            let channel = Arc::new(Channel { most, queue: Mutex::default() });
            (Sender(Arc::clone(&channel)), Receiver(channel))
        }

        impl<T> Sender<T> {
            pub(crate) fn try_send(&self, value: T) -> Result<(), T> {
                let mut queue = self.0.queue.lock().unwrap();
                if queue.len() == self.0.most {
                    return Err(value);
                }
                queue.push_back(value);
                Ok(())
            }
        }

        impl<T> Receiver<T> {
            pub(crate) fn try_recv(&self) -> Result<T, Empty> {
                self.0.queue.lock().unwrap().pop_front().ok_or(Empty)
            }

            pub(crate) fn is_empty(&self) -> bool {
                self.0.queue.lock().unwrap().is_empty()
            }
        }

        #[derive(Debug)]
        pub(crate) struct Empty;

        impl<T> Clone for Sender<T> {
            fn clone(&self) -> Self {
                Self(Arc::clone(&self.0))
            }
        }

        impl<T> Clone for Receiver<T> {
            fn clone(&self) -> Self {
                Self(Arc::clone(&self.0))
            }
        }
    }
}

pub(crate) use primitives::{Condvar, Mutex, MutexGuard, atomic, channel, thread};

/// Runs a model with so many switches at most that no thread asked for. Few show nearly all faults, and more of them take hours.
#[cfg(all(test, loom))]
pub(crate) fn model(preemptions: usize, body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(body);
}
