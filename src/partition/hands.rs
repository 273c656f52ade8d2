//! Threads that each work as the writer of many partitions.
//!
//! A [`Hand`] gives each of its writers a turn when it was called to it, by the writer's bell, when its time has come, or when its
//! write completed. A turn is one step of the writer and one commit at most, so that no partition keeps the others waiting for longer. A write for
//! which the hand would have to wait goes to the hand's ring, and other writers have their turns meanwhile; a partition that is alone
//! has its commits written by plain calls, as on a thread of its own. The hand waits in one place for all of them: in its ring while
//! anything is in flight there, else parked, and it has no timer but the next one that a writer asked for.
//!
//! What is in flight belongs to the hand: a partition that ends, for whatever reason, is over only once its write has completed, for
//! whoever opens it next must not find the kernel still writing.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fmt::Debug;
use std::io;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::queue::Bell;
use super::reply::Answerer;
use super::writer::{Company, Outgoing, Pause};
use crate::clock::Clock;
use crate::io::transfer::{Done, Place, Transfers};
use crate::io::{Action, Buffer, Disk, RingConfig, Slot, Token, Waker};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::thread::{self, Thread};
use crate::sync::{Mutex, MutexGuard};

/// Writes that a hand has in flight at most. With more, commits are written by plain calls.
const DEPTH: u32 = 64;

/// A partition's number at its desk.
pub(super) type Key = u64;

/// A writer as its hand sees it: the [`Helm`](super::helm::Helm), or what stands for one in a model.
pub(super) trait Served: Debug + Send + Sync {
    /// The one that calls the hand.
    fn bell(&self) -> &Bell;
    /// One step, with the write that the hand is to start for it. `landed` is what came of the one before. None once it ended.
    fn serve(&self, company: Company, landed: Option<Done>) -> Option<(Pause, Option<Outgoing>)>;
    /// Ends it where the hand cannot go on.
    fn abandon(&self);
}

/// Where a hand is called.
#[derive(Debug)]
pub(super) struct Desk {
    calls: Mutex<Calls>,
    last_key: AtomicU64,
}

#[derive(Debug, Default)]
struct Calls {
    newcomers: Vec<(Key, Seat)>,
    called: Vec<Key>,
    /// No partition comes any more.
    closed: bool,
    /// Nobody is there to hear.
    gone: bool,
    waits: Option<Waits>,
}

/// Where the hand waits for a call.
#[derive(Debug)]
enum Waits {
    Parked(Thread),
    InRing(Waker),
}

/// A writer among those of a hand.
#[derive(Debug)]
struct Seat {
    /// Until it ended.
    helm: Option<Arc<dyn Served>>,
    /// Told when the partition is over. Dropped says the same.
    _over: Answerer<()>,
    /// When it wants a turn without being called.
    until: Option<Duration>,
    /// Among those that are to have a turn.
    is_next: bool,
    in_flight: bool,
    /// Where the log of what is in flight is attached.
    slot: Option<Slot>,
    landed: Option<Done>,
}

impl Desk {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { calls: Mutex::default(), last_key: AtomicU64::new(0) })
    }

    fn calls(&self) -> MutexGuard<'_, Calls> {
        // Single pushes and assignments change it.
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number for a partition to come.
    pub(super) fn next_key(&self) -> Key {
        self.last_key.fetch_add(1, Ordering::Relaxed)
    }

    /// Has a writer served, beginning with a turn. `over` is dropped when the partition has ended and nothing of it is in flight.
    pub(super) fn join(&self, key: Key, helm: Arc<dyn Served>, over: Answerer<()>) {
        let seat = Seat { helm: Some(helm), _over: over, until: None, is_next: false, in_flight: false, slot: None, landed: None };
        let turned_away = self.tell(|calls| {
            if calls.gone {
                Some(seat)
            } else {
                calls.newcomers.push((key, seat));
                None
            }
        });
        if let Some(helm) = turned_away.and_then(|seat| seat.helm) {
            helm.abandon();
        }
    }

    /// Has a writer given a turn.
    pub(super) fn call(&self, key: Key) {
        self.tell(|calls| calls.called.push(key));
    }

    /// Ends the hand once its partitions have ended.
    pub(super) fn close(&self) {
        self.tell(|calls| calls.closed = true);
    }

    fn tell<T>(&self, change: impl FnOnce(&mut Calls) -> T) -> T {
        let (told, waits) = {
            let mut calls = self.calls();
            (change(&mut calls), calls.waits.take())
        };
        match waits {
            None => {}
            Some(Waits::Parked(thread)) => thread.unpark(),
            Some(Waits::InRing(waker)) => waker.wake(),
        }
        told
    }
}

/// The thread at a desk.
pub(super) struct Hand {
    // Dropped first: what is in flight is waited for before anybody learns that a partition is over.
    ring: Option<Transfers>,
    desk: Arc<Desk>,
    clock: Arc<dyn Clock>,
    seats: HashMap<Key, Seat>,
    /// Who wants a turn when.
    times: BTreeSet<(Duration, Key)>,
    next: VecDeque<Key>,
    in_flight: u32,
}

impl Hand {
    /// A hand on the thread that calls.
    ///
    /// # Errors
    /// What the system says to a ring.
    pub(super) fn new(disk: &dyn Disk, clock: Arc<dyn Clock>, desk: Arc<Desk>) -> io::Result<Self> {
        let config = RingConfig { depth: DEPTH, files: DEPTH, register_files: false, buffers: 0, buffer_bytes: 0, one_thread: true };
        let ring = if disk.rings_overlap() { Some(Transfers::new(disk.ring(&config)?)) } else { None };
        Ok(Self { ring, desk, clock, seats: HashMap::new(), times: BTreeSet::new(), next: VecDeque::new(), in_flight: 0 })
    }

    /// Works until the desk is closed and every partition has ended.
    pub(super) fn work(mut self) {
        loop {
            let closed = self.hear();
            self.reap();
            self.look_at_the_clock();
            match self.next.pop_front() {
                Some(key) => self.give_turn(key),
                None if closed && self.seats.is_empty() => return,
                None => self.wait(),
            }
        }
    }

    fn hear(&mut self) -> bool {
        let (newcomers, called, closed) = {
            let mut calls = self.desk.calls();
            calls.waits = None;
            (std::mem::take(&mut calls.newcomers), std::mem::take(&mut calls.called), calls.closed)
        };
        for (key, seat) in newcomers {
            self.seats.insert(key, seat);
            self.enqueue(key);
        }
        for key in called {
            self.enqueue(key);
        }
        closed
    }

    /// One that has ended gets no turn.
    fn enqueue(&mut self, key: Key) {
        if let Some(seat) = self.seats.get_mut(&key).filter(|seat| !seat.is_next && seat.helm.is_some()) {
            seat.is_next = true;
            self.next.push_back(key);
        }
    }

    fn look_at_the_clock(&mut self) {
        if self.times.is_empty() {
            return;
        }
        let now = self.clock.monotonic();
        while let Some(&(_, key)) = self.times.first().filter(|(until, _)| *until <= now) {
            self.times.pop_first();
            if let Some(seat) = self.seats.get_mut(&key) {
                seat.until = None;
            }
            self.enqueue(key);
        }
    }

    fn give_turn(&mut self, key: Key) {
        let company =
            Company { has_place: self.ring.is_some() && self.in_flight < DEPTH, is_there: self.in_flight > 0 || !self.next.is_empty() };
        let Some(seat) = self.seats.get_mut(&key) else { return };
        let Some(helm) = &seat.helm else { return };
        seat.is_next = false;
        if let Some(until) = seat.until.take() {
            self.times.remove(&(until, key));
        }
        // Before the step looks for what there is to do: what comes from here on calls again.
        helm.bell().answer();
        match helm.serve(company, seat.landed.take()) {
            None => {
                seat.helm = None;
                self.leave(key);
            }
            Some((pause, outgoing)) => {
                if let Some(outgoing) = outgoing {
                    self.send(key, outgoing);
                }
                match pause {
                    Pause::BetweenSteps => self.enqueue(key),
                    Pause::Wait(_, Some(time)) => {
                        let until = self.clock.monotonic().saturating_add(time);
                        self.times.insert((until, key));
                        if let Some(seat) = self.seats.get_mut(&key) {
                            seat.until = Some(until);
                        }
                    }
                    Pause::Wait(_, None) | Pause::End => {}
                }
            }
        }
    }

    /// Takes a partition out that has ended, unless its write is in flight.
    fn leave(&mut self, key: Key) {
        if self.seats.get(&key).is_some_and(|seat| seat.helm.is_none() && !seat.in_flight) {
            self.seats.remove(&key);
        }
    }

    /// Starts a write. It ends in [`Self::land`], however it does.
    fn send(&mut self, key: Key, outgoing: Outgoing) {
        let Outgoing { log, durable, position, buffer, range } = outgoing;
        let Some(seat) = self.seats.get_mut(&key) else { return };
        seat.in_flight = true;
        self.in_flight += 1;
        let attached = match &mut self.ring {
            Some(ring) => ring.attach(log),
            None => Err(io::Error::other("the ring of the writers' thread is lost")),
        };
        match (attached, &mut self.ring) {
            (Ok(slot), Some(ring)) => {
                seat.slot = Some(slot);
                ring.start(Token(key), Action::Write { durable }, Place { slot, position, direct: true }, buffer, range);
            }
            (Err(error), _) => self.land(Done { token: Token(key), result: Err(error), buffer }),
            (Ok(_), None) => unreachable!("only a ring attaches"),
        }
    }

    fn land(&mut self, done: Done) {
        let Token(key) = done.token;
        self.in_flight -= 1;
        if let Some(seat) = self.seats.get_mut(&key) {
            seat.in_flight = false;
            seat.landed = Some(done);
            self.enqueue(key);
            self.leave(key);
        }
    }

    fn reap(&mut self) {
        while self.in_flight > 0
            && let Some(ring) = &mut self.ring
        {
            match ring.next() {
                Ok(None) => return,
                Ok(Some(done)) => {
                    let seat = self.seats.get_mut(&done.token.0);
                    if let Some(slot) = seat.and_then(|seat| seat.slot.take()) {
                        ring.detach(slot);
                    }
                    self.land(done);
                }
                Err(error) => self.lose_ring(&error),
            }
        }
    }

    /// Goes on without a ring that fails. Whoever has a write there is told that it failed, once it can do no more harm.
    fn lose_ring(&mut self, error: &io::Error) {
        tracing::error!(%error, "the ring of a writers' thread fails; it goes on without");
        // Waits for what is in flight.
        self.ring = None;
        let waiting: Vec<Key> = self.seats.iter().filter(|(_, seat)| seat.in_flight).map(|(&key, _)| key).collect();
        for key in waiting {
            let result = Err(io::Error::other(error.to_string()));
            self.land(Done { token: Token(key), result, buffer: Buffer::new(0).expect("one page of memory") });
        }
    }

    /// Waits for a call, a completion, or the time of the first that wants a turn then.
    fn wait(&mut self) {
        let first = self.times.first().map(|(until, _)| *until);
        let timeout = first.map(|until| until.saturating_sub(self.clock.monotonic()));
        {
            let mut calls = self.desk.calls();
            if !(calls.newcomers.is_empty() && calls.called.is_empty()) || (calls.closed && self.seats.is_empty()) {
                return;
            }
            calls.waits = Some(match &mut self.ring {
                Some(ring) if self.in_flight > 0 => Waits::InRing(ring.waker()),
                _ => Waits::Parked(thread::current()),
            });
        }
        let ring = self.ring.as_mut().filter(|_| self.in_flight > 0);
        match (ring, timeout) {
            (Some(ring), timeout) => {
                if let Err(error) = ring.wait(timeout) {
                    self.lose_ring(&error);
                }
            }
            (None, Some(timeout)) => thread::park_timeout(timeout),
            (None, None) => thread::park(),
        }
    }
}

impl Drop for Hand {
    fn drop(&mut self) {
        // A bug ends it early: nobody must wait for what does not come.
        self.ring = None;
        let late = {
            let mut calls = self.desk.calls();
            calls.gone = true;
            std::mem::take(&mut calls.newcomers)
        };
        for (_, seat) in self.seats.drain().chain(late) {
            if let Some(helm) = seat.helm {
                helm.abandon();
            }
        }
    }
}

#[cfg(all(test, loom))]
mod models;
