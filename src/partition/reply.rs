//! One answer to one question, in memory that is used again: an append costs no allocation once its partition is warm.
//!
//! A pair of ends over a slot. The answering end, dropped without an answer, tells the other that none will come. Either end
//! may be on any thread.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};

/// The end that answers.
#[derive(Debug)]
pub(super) struct Answerer<T>(Option<Arc<Slot<T>>>);

/// The end that waits for the answer.
#[derive(Debug)]
pub(super) struct Reply<T> {
    slot: Arc<Slot<T>>,
    /// Where the slot goes once it was answered.
    pool: Option<Pool<T>>,
}

/// Slots that are used again. Clones share them.
#[derive(Debug)]
pub(super) struct Pool<T> {
    put: Sender<Arc<Slot<T>>>,
    take: Receiver<Arc<Slot<T>>>,
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
enum State<T> {
    Open,
    Answered(T),
    Gone,
}

impl<T> Slot<T> {
    fn new() -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(State::Open), changed: Condvar::new() })
    }

    fn state(&self) -> MutexGuard<'_, State<T>> {
        // One assignment changes it: whole at every moment that a panic could leave it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, state: State<T>) {
        *self.state() = state;
        // Without the lock, so that whoever wakes finds it free. By now the slot may serve another pair, which finds itself
        // woken for nothing and waits on.
        self.changed.notify_one();
    }
}

/// A pair in memory of its own.
pub(super) fn pair<T>() -> (Answerer<T>, Reply<T>) {
    let slot = Slot::new();
    (Answerer(Some(Arc::clone(&slot))), Reply { slot, pool: None })
}

impl<T> Pool<T> {
    /// A pool that keeps at most so many slots that nobody uses.
    pub(super) fn new(most: usize) -> Self {
        let (put, take) = crossbeam_channel::bounded(most);
        Self { put, take }
    }

    /// A pair whose memory comes from the pool, and goes back to it once the answer was taken.
    pub(super) fn pair(&self) -> (Answerer<T>, Reply<T>) {
        let slot = self.take.try_recv().unwrap_or_else(|_| Slot::new());
        (Answerer(Some(Arc::clone(&slot))), Reply { slot, pool: Some(self.clone()) })
    }
}

impl<T> Clone for Pool<T> {
    fn clone(&self) -> Self {
        Self { put: self.put.clone(), take: self.take.clone() }
    }
}

impl<T> Answerer<T> {
    /// Answers. Nobody may be waiting any more.
    pub(super) fn send(mut self, answer: T) {
        if let Some(slot) = self.0.take() {
            slot.set(State::Answered(answer));
        }
    }
}

impl<T> Drop for Answerer<T> {
    fn drop(&mut self) {
        if let Some(slot) = self.0.take() {
            slot.set(State::Gone);
        }
    }
}

impl<T> Reply<T> {
    /// Waits for the answer; none if none will come.
    pub(super) fn wait(self) -> Option<T> {
        let mut state = self.slot.state();
        loop {
            match self.taken(&mut state) {
                Ok(answer) => return Some(answer),
                Err(NoReply::Gone) => return None,
                Err(NoReply::Pending) => state = self.slot.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Waits at most so long.
    pub(super) fn wait_timeout(&self, timeout: Duration) -> Result<T, NoReply> {
        // A time that no clock can show is no limit.
        let deadline = Instant::now().checked_add(timeout);
        let mut state = self.slot.state();
        loop {
            match self.taken(&mut state) {
                Err(NoReply::Pending) => {}
                result => return result,
            }
            let left = deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Err(NoReply::Pending);
            }
            state = self.slot.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The answer, if it is there.
    pub(super) fn try_take(&self) -> Result<T, NoReply> {
        self.taken(&mut self.slot.state())
    }

    /// Takes the answer out. With it the slot is free for the next pair: the answering end let go of it before it answered.
    fn taken(&self, state: &mut State<T>) -> Result<T, NoReply> {
        match std::mem::replace(state, State::Open) {
            State::Answered(answer) => {
                if let Some(pool) = &self.pool {
                    // A full pool has enough.
                    let _ = pool.put.try_send(Arc::clone(&self.slot));
                }
                Ok(answer)
            }
            State::Open => Err(NoReply::Pending),
            State::Gone => {
                *state = State::Gone;
                Err(NoReply::Gone)
            }
        }
    }
}

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
                    for round in 0..5_000 {
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
        assert!(!pool.take.is_empty());
    }
}
