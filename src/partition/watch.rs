//! Waiting for a watermark to move: no polling, and one atomic look for the writer where nobody waits.
//!
//! Whoever waits leaves a [`Waker`] and the offset that the end is to pass: a thread's, that unparks it, an async task's, or one that
//! raises a descriptor. Each is woken once, outside of the lock, because a waker runs code of others. Watching is no reading: what is
//! found there, and whether it is enough, is for the woken to see. Of several threads the writer wakes one, which wakes the others: a
//! system call each, which would stand between two commits.
//!
//! No wake-up is lost: (1) the writer moves the end, then looks at [`Watch::lowest`]; (2) a waiter enters its offset there, then looks
//! at the end; (3) a fence lies between the two on either side, so at least one of them sees what the other did; (4) a thread is given others to
//! wake under the lock, as long as it stands in the list, and wakes them after it left that for good, however it ends its wait.

use std::mem;
use std::sync::{Arc, PoisonError};
use std::task::Waker;
use std::time::{Duration, Instant};

use crate::sync::atomic::{AtomicU64, Ordering, fence};
use crate::sync::thread::{self, Thread};
use crate::sync::{Mutex, MutexGuard};

/// Those who wait for one watermark.
#[derive(Debug)]
pub(super) struct Watch {
    /// The lowest offset that any of them waits for the end to pass; [`NOBODY`] without any.
    lowest: AtomicU64,
    waiters: Mutex<Waiters>,
}

#[derive(Debug, Default)]
struct Waiters {
    list: Vec<Waiter>,
    last_place: u64,
}

#[derive(Debug)]
struct Waiter {
    place: u64,
    past: u64,
    whom: Whom,
}

/// Whom to wake.
#[derive(Debug)]
enum Whom {
    Task(Waker),
    Thread(Arc<Parked>),
}

/// A thread that waits.
#[derive(Debug)]
struct Parked {
    thread: Thread,
    /// To be woken by it.
    others: Mutex<Vec<Arc<Self>>>,
}

/// The thread's own hand on that: dropped, it leaves nobody asleep.
struct Sleeper(Arc<Parked>);

/// No end passes it.
const NOBODY: u64 = u64::MAX;

/// A place for one waiter at a time. Dropped, it leaves nothing behind.
#[derive(Debug)]
pub(super) struct Place {
    watch: Arc<Watch>,
    number: u64,
}

impl Watch {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { lowest: AtomicU64::new(NOBODY), waiters: Mutex::default() })
    }

    /// Wakes those who wait for the end to pass an offset below this one. To be called once the end is there to be seen.
    pub(super) fn tell(&self, end: u64) {
        fence(Ordering::SeqCst);
        if self.lowest.load(Ordering::Relaxed) < end {
            self.wake(|waiter| waiter.past < end);
        }
    }

    /// Wakes all: the end moves no more. To be called once that is there to be seen.
    pub(super) fn tell_all(&self) {
        self.wake(|_| true);
    }

    fn wake(&self, whether: impl Fn(&Waiter) -> bool) {
        let (mut tasks, mut threads) = (Vec::new(), Vec::new());
        {
            let mut waiters = self.waiters();
            for waiter in waiters.list.extract_if(.., |waiter| whether(waiter)) {
                match waiter.whom {
                    Whom::Task(waker) => tasks.push(waker),
                    Whom::Thread(thread) => threads.push(thread),
                }
            }
            self.note_lowest(&waiters);
            if threads.len() > 1 {
                let others = threads.split_off(1);
                threads[0].others().extend(others);
            }
        }
        threads.into_iter().for_each(|parked| parked.thread.unpark());
        tasks.into_iter().for_each(Waker::wake);
    }

    /// A place among them, which waits for nothing yet.
    pub(super) fn place(self: &Arc<Self>) -> Place {
        let mut waiters = self.waiters();
        waiters.last_place += 1;
        Place { watch: Arc::clone(self), number: waiters.last_place }
    }

    /// Blocks the thread until it is `ready`, which it becomes when the end passes that offset or moves no more, or until the deadline.
    /// True if it is ready.
    pub(super) fn wait(self: &Arc<Self>, past: u64, deadline: Option<Instant>, ready: impl Fn() -> bool) -> bool {
        Self::wait_for_any([(self, past)], deadline, ready)
    }

    /// The same for several ends, each with its offset: any of them makes it ready.
    pub(super) fn wait_for_any<'a>(
        ends: impl IntoIterator<Item = (&'a Arc<Self>, u64)>,
        deadline: Option<Instant>,
        ready: impl Fn() -> bool,
    ) -> bool {
        let sleeper = Sleeper(Arc::new(Parked { thread: thread::current(), others: Mutex::default() }));
        // Left before the sleeper goes.
        let places: Vec<_> = ends.into_iter().map(|(watch, past)| (watch.place(), past)).collect();
        loop {
            places.iter().for_each(|(place, past)| place.enter(*past, Whom::Thread(Arc::clone(&sleeper.0))));
            if ready() {
                return true;
            }
            // It may return for nothing.
            match deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())) {
                None => thread::park(),
                Some(Duration::ZERO) => return false,
                Some(left) => thread::park_timeout(left),
            }
            sleeper.wake_others();
        }
    }

    fn waiters(&self) -> MutexGuard<'_, Waiters> {
        // Nothing of others' runs under the lock, and nothing in it panics halfway.
        self.waiters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note_lowest(&self, waiters: &Waiters) {
        let lowest = waiters.list.iter().map(|waiter| waiter.past).min().unwrap_or(NOBODY);
        self.lowest.store(lowest, Ordering::Relaxed);
    }
}

impl Place {
    /// Has the waker woken, once, when the end passes that offset or moves no more. Takes the place of what was asked for here before.
    ///
    /// What happened before is not told: look for yourself afterwards.
    pub(super) fn ask(&self, past: u64, waker: Waker) {
        self.enter(past, Whom::Task(waker));
    }

    fn enter(&self, past: u64, whom: Whom) {
        let before = self.exchange(Some(Waiter { place: self.number, past, whom }));
        fence(Ordering::SeqCst);
        // Dropping a waker is code of others, too.
        drop(before);
    }

    /// Takes back what was asked for. False if there is nothing: it was woken.
    pub(super) fn leave(&self) -> bool {
        self.exchange(None).is_some()
    }

    fn exchange(&self, waiter: Option<Waiter>) -> Option<Waiter> {
        let mut waiters = self.watch.waiters();
        let index = waiters.list.iter().position(|waiter| waiter.place == self.number);
        let before = index.map(|index| waiters.list.swap_remove(index));
        waiters.list.extend(waiter);
        self.watch.note_lowest(&waiters);
        before
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.leave();
    }
}

impl Parked {
    fn others(&self) -> MutexGuard<'_, Vec<Arc<Self>>> {
        // Nothing panics under it.
        self.others.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sleeper {
    fn wake_others(&self) {
        let others = mem::take(&mut *self.0.others());
        others.iter().for_each(|parked| parked.thread.unpark());
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        self.wake_others();
    }
}

#[cfg(all(test, loom))]
mod models;

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize};
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn counting() -> (Arc<Count>, Waker) {
        let count = Arc::new(Count::default());
        (Arc::clone(&count), Waker::from(count))
    }

    #[test]
    fn each_is_woken_once_and_only_for_what_it_waits_for() {
        let watch = Watch::new();
        let (low, high) = (watch.place(), watch.place());
        let ((low_count, low_waker), (high_count, high_waker)) = (counting(), counting());
        let woken = || (low_count.0.load(Ordering::Relaxed), high_count.0.load(Ordering::Relaxed));
        low.ask(3, low_waker.clone());
        high.ask(7, high_waker.clone());
        watch.tell(3);
        assert_eq!(woken(), (0, 0));
        watch.tell(4);
        watch.tell(7);
        assert_eq!(woken(), (1, 0));
        watch.tell(8);
        watch.tell(9);
        watch.tell_all();
        assert_eq!(woken(), (1, 1));
        low.ask(20, low_waker);
        high.ask(u64::MAX - 1, high_waker);
        watch.tell_all();
        assert_eq!(woken(), (2, 2));
    }

    #[test]
    fn who_leaves_is_not_woken_and_leaves_nothing_behind() {
        let watch = Watch::new();
        let (count, waker) = counting();
        let place = watch.place();
        place.ask(0, waker.clone());
        place.ask(5, waker.clone());
        assert_eq!(watch.waiters().list.len(), 1);
        assert!(place.leave() && !place.leave());
        place.ask(2, waker.clone());
        drop(place);
        assert_eq!(watch.lowest.load(Ordering::Relaxed), NOBODY);
        watch.tell(9);
        drop(waker);
        assert_eq!((Arc::strong_count(&count), count.0.load(Ordering::Relaxed)), (1, 0));
    }

    /// Ends its place, and asks for another, in the middle of being woken.
    struct Meddler(Mutex<Option<Place>>, Arc<Watch>);

    impl Wake for Meddler {
        fn wake(self: Arc<Self>) {
            *self.0.lock().unwrap() = None;
            self.1.place().ask(1, Waker::noop().clone());
        }
    }

    #[test]
    fn a_waker_may_use_the_watch_itself() {
        let watch = Watch::new();
        let meddler = Arc::new(Meddler(Mutex::new(Some(watch.place())), Arc::clone(&watch)));
        let waker = Waker::from(Arc::clone(&meddler));
        meddler.0.lock().unwrap().as_ref().unwrap().ask(0, waker);
        watch.tell(1);
        assert!(meddler.0.lock().unwrap().is_none());
    }

    #[test]
    fn a_wait_ends_with_its_time() {
        let watch = Watch::new();
        let looked = AtomicUsize::new(0);
        let ready = || {
            looked.fetch_add(1, Ordering::Relaxed);
            false
        };
        assert!(!watch.wait(0, Some(Instant::now()), ready));
        assert!(!watch.wait(0, Instant::now().checked_add(Duration::from_millis(20)), ready));
        assert!(watch.waiters().list.is_empty());
        assert!(watch.wait(0, None, || true));
    }

    #[test]
    fn any_of_several_ends_ends_a_wait() {
        let watches = [Watch::new(), Watch::new(), Watch::new()];
        for moved in &watches {
            let ready = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| Watch::wait_for_any(watches.iter().zip([4, 5, 6]), None, || ready.load(Ordering::SeqCst)));
                // Told before it waits, and in the middle of it.
                ready.store(true, Ordering::SeqCst);
                moved.tell(7);
                assert!(waiting.join().unwrap());
            });
            assert!(watches.iter().all(|watch| watch.waiters().list.is_empty()));
        }
    }
}
