//! Loom's models of a desk and the hand at it, with the bells and queues of its partitions. Run by `scripts/loom`.
//!
//! Of a writer only the inbox is left, and what it does with it in a turn. A call that is lost leaves the hand parked for ever, and whoever
//! waits for an answer: a deadlock to loom; in its ring the hand watches in a model, and loom ends a watch that nobody ends.

use std::collections::VecDeque;

use loom::sync::atomic::AtomicBool;
use loom::thread::{JoinHandle, spawn};

use super::super::queue::{self, Hearing, Inbox, Message, Queue, Refused, Where};
use super::super::reply::{self, Reply};
use super::super::ticket::Answer;
use super::*;
use crate::clock::SystemClock;
use crate::error::Result;
use crate::io::sim::SimDisk;
use crate::io::{BlockingRing, Completion, Create, File, Op, Open, Rejected, Ring};
use crate::record::Batch;

/// Few switches show nearly all faults, and more of them take hours.
fn model(preemptions: usize, body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 10_000;
    builder.check(body);
}

/// A writer that answers each append in a turn of its own, after its write if it has a log.
#[derive(Debug)]
struct Writer {
    held: Mutex<Option<Held>>,
    bell: Arc<Bell>,
    log: Option<Arc<dyn File>>,
}

#[derive(Debug)]
struct Held {
    inbox: Inbox,
    flight: Option<Answerer<Answer>>,
}

impl Writer {
    /// What `helm.rs` and the writer's `commit` do with the bell for a producer that finds it idle. False if it is not.
    fn try_commit(&self) -> bool {
        let Ok(held) = self.held.try_lock() else { return false };
        let Some(Held { inbox, .. }) = held.as_ref().filter(|held| held.inbox.is_empty()) else { return false };
        inbox.hand_over();
        let can_wait = inbox.listen(Where::Parked, Hearing::Anything);
        drop(held);
        if !can_wait {
            self.bell.wake();
        }
        true
    }
}

impl Served for Writer {
    fn bell(&self) -> &Bell {
        &self.bell
    }

    fn serve(&self, company: Company, landed: Option<Done>) -> Option<(Pause, Option<Outgoing>)> {
        let mut held = self.held.lock().unwrap();
        let Held { inbox, flight } = held.as_mut()?;
        inbox.stop_listening();
        if landed.is_some() {
            flight.take().unwrap().send(Ok(0..1));
        }
        let (place, hearing) = if flight.is_some() { (Where::InRing, Hearing::Nothing) } else { (Where::Parked, Hearing::Anything) };
        let mut outgoing = None;
        let message = if flight.is_some() { None } else { inbox.take() };
        let may_wait = match message {
            Some(Message::Append { answer, .. }) => {
                if let Some(log) = self.log.as_ref().filter(|_| company.has_place) {
                    let (log, buffer) = (Arc::clone(log), Buffer::new(4096).unwrap());
                    outgoing = Some(Outgoing { log, durable: true, position: 0, buffer, range: 0..4096 });
                    *flight = Some(answer);
                } else {
                    answer.send(Ok(0..1));
                }
                false
            }
            Some(Message::Close { answer }) => {
                answer.send(Ok(()));
                *held = None;
                return None;
            }
            Some(other) => unreachable!("nobody asks for {other:?}"),
            None => inbox.listen(place, hearing),
        };
        Some((if may_wait { Pause::Wait(place, None) } else { Pause::BetweenSteps }, outgoing))
    }

    fn abandon(&self) {
        *self.held.lock().unwrap() = None;
    }
}

/// What the producers have of a partition.
struct Partition {
    queue: Queue,
    writer: Arc<Writer>,
    is_over: Reply<()>,
}

fn join(desk: &Arc<Desk>, log: Option<Arc<dyn File>>) -> Partition {
    let key = desk.next_key();
    let bell = Arc::new(Bell::at(Arc::clone(desk), key));
    let (queue, inbox) = queue::queue(2, 1 << 20, Arc::clone(&bell));
    let (over, is_over) = reply::pair();
    let writer = Arc::new(Writer { held: Mutex::new(Some(Held { inbox, flight: None })), bell, log });
    desk.join(key, Arc::<Writer>::clone(&writer), over);
    Partition { queue, writer, is_over }
}

/// Appends as a producer that waits. False if the partition had ended.
fn append(queue: &Queue) -> bool {
    let (answer, reply) = reply::pair();
    match queue.send(Message::Append { batch: Batch::of(None, b"x").unwrap(), answer }) {
        Ok(()) => reply.wait().is_some(),
        Err(refused) => {
            assert!(matches!(refused, Refused::Closed(_)));
            false
        }
    }
}

fn close(Partition { queue, is_over, .. }: Partition) {
    let (answer, reply) = reply::pair::<Result<()>>();
    queue.send(Message::Close { answer }).unwrap();
    reply.wait().unwrap().unwrap();
    assert!(is_over.wait().is_none());
}

fn hand(desk: &Arc<Desk>) -> Hand {
    Hand::new(&SimDisk::new(1), Arc::new(SystemClock::new()), Arc::clone(desk)).unwrap()
}

fn at_work(desk: &Arc<Desk>) -> JoinHandle<()> {
    let desk = Arc::clone(desk);
    spawn(move || hand(&desk).work())
}

#[test]
fn loom_a_call_finds_a_hand_that_is_about_to_wait() {
    model(3, || {
        let desk = Desk::new();
        let hand = at_work(&desk);
        // It comes while the hand begins, looks, waits, or has not begun.
        let partition = join(&desk, None);
        assert!(append(&partition.queue));
        // The first turn after the answer may be the one that ends in a wait.
        assert!(append(&partition.queue));
        close(partition);
        desk.close();
        hand.join().unwrap();
    });
}

#[test]
fn loom_no_call_of_two_partitions_is_lost() {
    model(2, || {
        let desk = Desk::new();
        let partitions = [join(&desk, None), join(&desk, None)];
        let hand = at_work(&desk);
        let producers = partitions.each_ref().map(|partition| {
            let queue = partition.queue.clone();
            spawn(move || assert!(append(&queue)))
        });
        producers.into_iter().for_each(|producer| producer.join().unwrap());
        partitions.into_iter().for_each(close);
        desk.close();
        hand.join().unwrap();
    });
}

#[test]
fn loom_two_producers_of_a_partition_are_both_answered() {
    model(2, || {
        let desk = Desk::new();
        let partition = join(&desk, None);
        let hand = at_work(&desk);
        let queue = partition.queue.clone();
        let other = spawn(move || assert!(append(&queue)));
        assert!(append(&partition.queue));
        other.join().unwrap();
        close(partition);
        desk.close();
        hand.join().unwrap();
    });
}

#[test]
fn loom_a_producer_that_commits_hides_no_message_from_the_hand() {
    model(3, || {
        let desk = Desk::new();
        let partition = join(&desk, None);
        let hand = at_work(&desk);
        let (writer, queue) = (Arc::clone(&partition.writer), partition.queue.clone());
        let alone = spawn(move || assert!(writer.try_commit() || append(&queue)));
        assert!(append(&partition.queue));
        alone.join().unwrap();
        close(partition);
        desk.close();
        hand.join().unwrap();
    });
}

#[test]
fn loom_an_append_beside_the_close_is_answered_or_refused_and_the_hand_ends() {
    model(3, || {
        let desk = Desk::new();
        let partition = join(&desk, None);
        let hand = at_work(&desk);
        let queue = partition.queue.clone();
        // Calls that come after the partition ended are of nobody.
        let producer = spawn(move || {
            append(&queue);
        });
        close(partition);
        // While the producer may still call, and the hand may be about to wait.
        desk.close();
        producer.join().unwrap();
        hand.join().unwrap();
    });
}

#[test]
fn loom_whoever_comes_to_a_hand_that_ends_early_is_turned_away() {
    model(3, || {
        let desk = Desk::new();
        let first = join(&desk, None);
        let ending = {
            let desk = Arc::clone(&desk);
            spawn(move || drop(hand(&desk)))
        };
        let second = join(&desk, None);
        assert!(!append(&first.queue) && !append(&second.queue));
        assert!(first.is_over.wait().is_none() && second.is_over.wait().is_none());
        ending.join().unwrap();
    });
}

/// A ring whose operations complete once they are let go.
#[derive(Debug)]
struct Device {
    /// Gives places and a waker.
    inner: BlockingRing,
    waker: Waker,
    goes_on: Arc<AtomicBool>,
    held: VecDeque<Completion>,
}

impl Device {
    fn new(goes_on: &Arc<AtomicBool>) -> Self {
        let config = RingConfig { depth: 1, files: 1, register_files: false, buffers: 0, buffer_bytes: 0, one_thread: true };
        let mut inner = BlockingRing::new(&config).unwrap();
        let waker = inner.waker();
        Self { inner, waker, goes_on: Arc::clone(goes_on), held: VecDeque::new() }
    }
}

impl Ring for Device {
    fn take_buffers(&mut self) -> Vec<Buffer> {
        Vec::new()
    }

    fn attach(&mut self, file: Arc<dyn File>) -> io::Result<Slot> {
        self.inner.attach(file)
    }

    fn detach(&mut self, slot: Slot) {
        self.inner.detach(slot);
    }

    fn submit(&mut self, token: Token, Op { buffer, range, .. }: Op) -> Result<(), Rejected> {
        self.held.push_back(Completion { token, result: Ok(range.len()), buffer });
        Ok(())
    }

    fn reap(&mut self) -> io::Result<Option<Completion>> {
        Ok(if self.goes_on.load(Ordering::Acquire) { self.held.pop_front() } else { None })
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        assert_eq!(timeout, None, "nobody asked for a time");
        while !(self.goes_on.load(Ordering::Acquire) && !self.held.is_empty()) {
            if self.waker.is_raised() {
                // Takes the wake.
                return self.inner.wait(None);
            }
            loom::thread::yield_now();
        }
        Ok(())
    }

    fn waker(&mut self) -> Waker {
        self.waker.clone()
    }
}

#[test]
fn loom_a_call_finds_a_hand_that_waits_in_its_ring() {
    model(2, || {
        let (desk, goes_on) = (Desk::new(), Arc::new(AtomicBool::new(false)));
        let log = SimDisk::new(1).open("/log".as_ref(), Open { create: Create::New, ..Open::WRITE }).unwrap();
        let slow = join(&desk, Some(log));
        let quick = join(&desk, None);
        let hand = {
            let (desk, goes_on) = (Arc::clone(&desk), Arc::clone(&goes_on));
            spawn(move || {
                let mut hand = hand(&desk);
                hand.ring = Some(Transfers::new(Box::new(Device::new(&goes_on))));
                hand.work();
            })
        };
        let queue = slow.queue.clone();
        let waiting = spawn(move || assert!(append(&queue)));
        // The write in flight ends only after this was answered.
        assert!(append(&quick.queue));
        goes_on.store(true, Ordering::Release);
        waiting.join().unwrap();
        close(slow);
        close(quick);
        desk.close();
        hand.join().unwrap();
    });
}
