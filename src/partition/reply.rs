//! One answer to one question, in memory that is used again: an append costs no allocation once its partition is warm.
//!
//! A pair of ends over a slot. The answering end, dropped without an answer, tells the other that none will come. Either end
//! may be on any thread.
//!
//! Many are answered at once by [`Crowd`]: the answers are all there before anybody is woken, then one is woken, and whoever
//! wakes wakes two more. Waking a thread costs more than appending a record, and the one thread that all of them wait for
//! next has better things to do.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};
use std::task::Waker;
use std::time::{Duration, Instant};

use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Condvar, Mutex, MutexGuard};

/// The end that answers.
#[derive(Debug)]
pub(super) struct Answerer<T>(Option<Arc<Slot<T>>>);

/// The end that waits for the answer.
#[derive(Debug)]
pub(super) struct Reply<T> {
    slot: Arc<Slot<T>>,
    /// Where the slot goes once it was answered.
    pool: Option<Pool<T>>,
    answered: AtomicBool,
}

/// Slots that are used again. Clones share them.
#[derive(Debug)]
pub(super) struct Pool<T>(Arc<Unused<T>>);

/// A list and not a channel, whose places would take memory in every partition that was never waited at.
#[derive(Debug)]
struct Unused<T> {
    most: usize,
    /// The one that rested longest is used next: it is no longer being woken.
    slots: Mutex<VecDeque<Arc<Slot<T>>>>,
}

/// No answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoReply {
    /// Not yet.
    Pending,
    /// None will come: the answering end is gone.
    Gone,
}

#[derive(Debug)]
struct Slot<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

#[derive(Debug)]
struct State<T> {
    answer: Answered<T>,
    /// Somebody waits, or is about to.
    waiting: bool,
    /// The task that waits. Here only while the answer is open.
    waker: Option<Waker>,
    /// Whom the one who waits here is to wake next.
    next: Option<Arc<Sleepers<T>>>,
}

#[derive(Debug)]
enum Answered<T> {
    Open,
    With(T),
    Gone,
}

/// Slots that were answered and whose owners were not woken yet.
#[derive(Debug)]
struct Sleepers<T>(Mutex<Vec<Arc<Slot<T>>>>);

/// How many each of them wakes: few, so that none of them is held up, and more than one, so that a long queue is woken soon.
const FAN_OUT: usize = 2;

impl<T> Sleepers<T> {
    fn list(&self) -> MutexGuard<'_, Vec<Arc<Slot<T>>>> {
        // A push or a pop is whole or did not happen.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes so many, and leaves the others to them.
    fn wake(this: &Arc<Self>, most: usize) {
        for _ in 0..most {
            loop {
                let Some(slot) = this.list().pop() else { return };
                // One whose owner looked in the meantime needs nobody; its slot may even serve another pair by now. If somebody
                // waits there, that one wakes, and passes this on, whatever it waits for.
                let mut state = slot.state();
                if state.waiting && state.next.is_none() {
                    state.next = Some(Arc::clone(this));
                    drop(state);
                    slot.changed.notify_one();
                    break;
                }
            }
        }
    }
}

/// Answers many at once. Keeps its memory.
#[derive(Debug)]
pub(super) struct Crowd<T> {
    sleepers: Vec<Arc<Sleepers<T>>>,
    wakers: Vec<Waker>,
}

impl<T> Crowd<T> {
    pub(super) fn new() -> Self {
        Self { sleepers: Vec::new(), wakers: Vec::new() }
    }

    /// Answers all, and sees to it that all who wait are woken.
    pub(super) fn answer(&mut self, answers: impl Iterator<Item = (Answerer<T>, T)>) {
        // One that nobody else holds is through.
        let index = self.sleepers.iter_mut().position(|sleepers| Arc::get_mut(sleepers).is_some());
        let index = index.unwrap_or_else(|| {
            self.sleepers.push(Arc::new(Sleepers(Mutex::default())));
            self.sleepers.len() - 1
        });
        let sleepers = &self.sleepers[index];
        {
            let mut list = sleepers.list();
            list.clear();
            list.extend(answers.filter_map(|(mut answerer, answer)| {
                let slot = answerer.0.take()?;
                let waiting = {
                    let mut state = slot.state();
                    state.answer = Answered::With(answer);
                    self.wakers.extend(state.waker.take());
                    state.waiting
                };
                waiting.then_some(slot)
            }));
            // The first that came is woken first.
            list.reverse();
        }
        Sleepers::wake(sleepers, 1);
        // Tasks are many to a thread, and wake nobody; they run code of others, which no lock is held for.
        self.wakers.drain(..).for_each(Waker::wake);
    }
}

impl<T> Slot<T> {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State { answer: Answered::Open, waiting: false, waker: None, next: None }),
            changed: Condvar::new(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State<T>> {
        // Single assignments change it: whole at every moment that a panic could leave it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, answer: Answered<T>) {
        let waker = {
            let mut state = self.state();
            state.answer = answer;
            state.waker.take()
        };
        // Without the lock, so that whoever wakes finds it free. By now the slot may serve another pair, which finds itself
        // woken for nothing and waits on.
        self.changed.notify_one();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// A pair in memory of its own.
pub(super) fn pair<T>() -> (Answerer<T>, Reply<T>) {
    let slot = Slot::new();
    (Answerer(Some(Arc::clone(&slot))), Reply { slot, pool: None, answered: AtomicBool::new(false) })
}

impl<T> Pool<T> {
    /// A pool that keeps at most so many slots that nobody uses.
    pub(super) fn new(most: usize) -> Self {
        Self(Arc::new(Unused { most, slots: Mutex::new(VecDeque::new()) }))
    }

    fn slots(&self) -> MutexGuard<'_, VecDeque<Arc<Slot<T>>>> {
        // A push or a pop is whole or did not happen.
        self.0.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give_back(&self, slot: Arc<Slot<T>>) {
        let mut slots = self.slots();
        if slots.len() < self.0.most {
            slots.push_back(slot);
        }
    }

    /// Lets go of the memory of all slots that nobody uses.
    pub(super) fn clear(&self) {
        *self.slots() = VecDeque::new();
    }

    /// A pair whose memory comes from the pool, and goes back to it once the answer was taken.
    pub(super) fn pair(&self) -> (Answerer<T>, Reply<T>) {
        let unused = self.slots().pop_front();
        let slot = unused.unwrap_or_else(Slot::new);
        (Answerer(Some(Arc::clone(&slot))), Reply { slot, pool: Some(self.clone()), answered: AtomicBool::new(false) })
    }
}

impl<T> Clone for Pool<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Answerer<T> {
    /// Answers. Nobody may be waiting any more.
    pub(super) fn send(mut self, answer: T) {
        if let Some(slot) = self.0.take() {
            slot.set(Answered::With(answer));
        }
    }
}

impl<T> Drop for Answerer<T> {
    fn drop(&mut self) {
        if let Some(slot) = self.0.take() {
            slot.set(Answered::Gone);
        }
    }
}

impl<T> Reply<T> {
    /// Waits for the answer; none if none will come.
    pub(super) fn wait(self) -> Option<T> {
        self.wait_until(None).ok()
    }

    /// Waits at most so long.
    pub(super) fn wait_timeout(&self, timeout: Duration) -> Result<T, NoReply> {
        // A time that no clock can show is no limit.
        self.wait_until(Instant::now().checked_add(timeout))
    }

    /// The answer, if it is there.
    pub(super) fn try_take(&self) -> Result<T, NoReply> {
        self.taken(&mut self.slot.state())
    }

    /// The answer, if it is there; else the task is woken when it comes.
    #[cfg(any(feature = "async", test))]
    pub(super) fn poll(&self, context: &std::task::Context<'_>) -> Result<T, NoReply> {
        let waker = context.waker().clone();
        let mut state = self.slot.state();
        let result = self.taken(&mut state);
        let before = if let Err(NoReply::Pending) = result { state.waker.replace(waker) } else { None };
        // Dropping a waker runs code of others.
        drop((state, before));
        result
    }

    /// Whether a wait would end at once.
    pub(super) fn is_over(&self) -> bool {
        !matches!(self.slot.state().answer, Answered::Open)
    }

    fn wait_until(&self, deadline: Option<Instant>) -> Result<T, NoReply> {
        let mut state = self.slot.state();
        let result = loop {
            match self.taken(&mut state) {
                Err(NoReply::Pending) => {}
                result => break result,
            }
            state.waiting = true;
            state = match deadline {
                None => self.slot.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        break Err(NoReply::Pending);
                    }
                    self.slot.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
            // More than one crowd may count on this one, and the second may come while the first is woken.
            while let Some(next) = state.next.take() {
                // Whoever was woken wakes others first: they may have waited for longer.
                drop(state);
                Sleepers::wake(&next, FAN_OUT);
                state = self.slot.state();
            }
        };
        state.waiting = false;
        // It came just now, between the last wait and the end of the time.
        if let Some(next) = state.next.take() {
            drop(state);
            Sleepers::wake(&next, FAN_OUT);
        }
        result
    }

    /// Takes the answer out.
    fn taken(&self, state: &mut State<T>) -> Result<T, NoReply> {
        match std::mem::replace(&mut state.answer, Answered::Open) {
            Answered::With(answer) => {
                self.answered.store(true, Ordering::Relaxed);
                Ok(answer)
            }
            Answered::Open => Err(NoReply::Pending),
            Answered::Gone => {
                state.answer = Answered::Gone;
                Err(NoReply::Gone)
            }
        }
    }
}

impl<T> Drop for Reply<T> {
    fn drop(&mut self) {
        // Once it was answered, the answering end has let go of it, and it can serve the next pair. One that was dropped
        // before its answer came cannot.
        if !self.answered.load(Ordering::Relaxed) {
            // Nobody waits for it any more.
            let waker = self.slot.state().waker.take();
            drop(waker);
        } else if let Some(pool) = &self.pool {
            // A full pool has enough.
            pool.give_back(Arc::clone(&self.slot));
        }
    }
}

#[cfg(all(test, loom))]
mod models;

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn an_answer_comes_once_and_its_absence_is_told() {
        let (answerer, reply) = pair();
        assert_eq!(reply.try_take(), Err(NoReply::Pending));
        assert_eq!(reply.wait_timeout(Duration::from_millis(1)), Err(NoReply::Pending));
        answerer.send(7);
        assert_eq!(reply.try_take(), Ok(7));
        let (answerer, reply) = pair::<u32>();
        drop(answerer);
        assert_eq!((reply.try_take(), reply.wait_timeout(Duration::MAX), reply.wait()), (Err(NoReply::Gone), Err(NoReply::Gone), None));
        let (answerer, reply) = pair();
        drop(reply);
        answerer.send(8);
    }

    #[test]
    fn a_task_is_woken_when_its_answer_comes_and_not_once_it_is_gone() {
        struct Count(std::sync::atomic::AtomicU64);
        impl std::task::Wake for Count {
            fn wake(self: Arc<Self>) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        let count = Arc::new(Count(0.into()));
        let waker = Waker::from(Arc::clone(&count));
        let woken = || count.0.load(Ordering::Relaxed);
        let context = std::task::Context::from_waker(&waker);
        let pool = Pool::new(4);
        let polled = || {
            let (answerer, reply) = pool.pair();
            assert_eq!((reply.poll(&context), reply.poll(&context)), (Err(NoReply::Pending), Err(NoReply::Pending)));
            (answerer, reply)
        };
        let (answerer, reply) = polled();
        answerer.send(1);
        assert_eq!((woken(), reply.poll(&context)), (1, Ok(1)));
        let (answerer, reply) = polled();
        drop(answerer);
        assert_eq!((woken(), reply.poll(&context)), (2, Err(NoReply::Gone)));
        let (answerer, reply) = polled();
        drop(reply);
        answerer.send(3);
        assert_eq!(woken(), 2);
        // Several at once, some of whom gave up.
        let mut pairs: Vec<_> = (0..4).map(|_| polled()).collect();
        drop(pairs.remove(1).1);
        let (answerers, replies): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        Crowd::new().answer(answerers.into_iter().zip(10..));
        assert_eq!(woken(), 5);
        assert!(replies.iter().zip(10..).all(|(reply, answer)| reply.poll(&context) == Ok(answer)));
        drop((replies, waker));
        assert_eq!(Arc::strong_count(&count), 1, "a waker was left behind");
    }

    #[test]
    fn slots_are_used_again_and_never_mixed_up() {
        let pool = Pool::new(4);
        let (requests, asked) = crossbeam_channel::bounded::<(u64, Answerer<u64>)>(8);
        let server = thread::spawn(move || {
            for (number, answerer) in asked {
                if number % 7 == 3 { drop(answerer) } else { answerer.send(number * 2) }
            }
        });
        let clients: Vec<_> = (0..4_u64)
            .map(|client| {
                let (pool, requests) = (pool.clone(), requests.clone());
                thread::spawn(move || {
                    for round in 0..if cfg!(miri) { 20 } else { 5_000 } {
                        let number = client * 100_000 + round;
                        let (answerer, reply) = pool.pair();
                        requests.send((number, answerer)).unwrap();
                        let answer = match round % 3 {
                            0 => reply.wait(),
                            1 => reply.wait_timeout(Duration::MAX).ok(),
                            _ => loop {
                                match reply.try_take() {
                                    Ok(answer) => break Some(answer),
                                    Err(NoReply::Gone) => break None,
                                    Err(NoReply::Pending) => thread::yield_now(),
                                }
                            },
                        };
                        assert_eq!(answer, (number % 7 != 3).then_some(number * 2));
                    }
                })
            })
            .collect();
        drop(requests);
        for client in clients {
            client.join().unwrap();
        }
        server.join().unwrap();
        assert!(!pool.slots().is_empty());
    }

    #[test]
    fn a_crowd_is_answered_whole_however_its_members_wait() {
        let pool = Pool::new(64);
        let (requests, asked) = crossbeam_channel::bounded::<(u64, Answerer<u64>)>(64);
        let server = thread::spawn(move || {
            let mut crowd = Crowd::new();
            let mut waiting = Vec::new();
            while let Ok(request) = asked.recv() {
                waiting.push(request);
                waiting.extend(asked.try_iter());
                crowd.answer(waiting.drain(..).map(|(number, answerer)| (answerer, number * 2)));
            }
            crowd.sleepers.len()
        });
        let clients: Vec<_> = (0..if cfg!(miri) { 6 } else { 24 })
            .map(|client| {
                let (pool, requests) = (pool.clone(), requests.clone());
                thread::spawn(move || {
                    for round in 0..if cfg!(miri) { 8 } else { 1_000 } {
                        let number = client * 100_000 + round;
                        let (answerer, reply) = pool.pair();
                        requests.send((number, answerer)).unwrap();
                        let answer = loop {
                            // Some give up waiting again and again, at every moment.
                            let answer = match (client + round) % 4 {
                                0 => reply.try_take(),
                                1 => reply.wait_timeout(Duration::from_nanos(round * 37 % 50_000)),
                                2 => reply.wait_timeout(Duration::MAX),
                                _ => break reply.wait().unwrap(),
                            };
                            match answer {
                                Ok(answer) => break answer,
                                Err(NoReply::Pending) => thread::yield_now(),
                                Err(NoReply::Gone) => panic!("the server answers all"),
                            }
                        };
                        assert_eq!(answer, number * 2);
                    }
                })
            })
            .collect();
        drop(requests);
        for client in clients {
            client.join().unwrap();
        }
        assert!(server.join().unwrap() < 24, "its memory is used again");
    }
}
