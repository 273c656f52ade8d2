//! Loom's models of the bell, the budget, and the end of the queue. Run by `scripts/loom`.
//!
//! A wake that is lost leaves a thread parked for ever, which loom reports as a deadlock.

use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread::{JoinHandle, spawn};

use super::super::reply::{self, Reply};
use super::*;
use crate::sync::model;

fn message() -> (Message, Reply<Answer>) {
    let (answer, reply) = reply::pair();
    (Message::Append { batch: Batch::of(None, b"x").unwrap(), answer }, reply)
}

fn small(batches: usize) -> (Queue, Inbox, Arc<Bell>) {
    let bell = Arc::new(Bell::new());
    let (queue, inbox) = queue(batches, 1 << 20, Arc::clone(&bell));
    (queue, inbox, bell)
}

fn join(threads: [JoinHandle<()>; 2]) {
    for thread in threads {
        thread.join().unwrap();
    }
}

/// The writer's own thread, reduced to its waits: takes so many messages.
fn take_all(inbox: &Inbox, bell: &Bell, most: u32, hearing: Hearing) {
    let mut taken = 0;
    loop {
        inbox.stop_listening();
        while inbox.take().is_some() {
            taken += 1;
        }
        if taken == most {
            return;
        }
        if inbox.listen(Where::Parked, hearing) {
            bell.wait(Where::Parked, None);
        }
    }
}

#[test]
fn loom_no_wake_is_lost() {
    model(3, || {
        let (queue, inbox, bell) = small(2);
        let producer = spawn(move || queue.send(message().0).unwrap());
        take_all(&inbox, &bell, 1, Hearing::Anything);
        producer.join().unwrap();
    });
}

#[test]
fn loom_no_wake_of_two_producers_is_lost() {
    model(2, || {
        let (queue, inbox, bell) = small(2);
        let producers: [_; 2] = std::array::from_fn(|_| {
            let queue = queue.clone();
            spawn(move || queue.send(message().0).unwrap())
        });
        take_all(&inbox, &bell, 2, Hearing::Anything);
        join(producers);
    });
}

#[test]
fn loom_news_beside_the_queue_are_heard() {
    // What upkeep has to tell is no message: it is put down, then the bell is rung.
    model(3, || {
        let (_queue, inbox, bell) = small(1);
        let news = Arc::new(AtomicU64::new(0));
        let upkeep = {
            let (bell, news) = (Arc::clone(&bell), Arc::clone(&news));
            spawn(move || {
                news.store(1, Ordering::Relaxed);
                bell.sound();
            })
        };
        loop {
            let may_wait = inbox.listen(Where::Parked, Hearing::Anything);
            if news.load(Ordering::Relaxed) == 1 {
                break;
            }
            if may_wait {
                bell.wait(Where::Parked, None);
            }
        }
        upkeep.join().unwrap();
    });
}

#[test]
fn loom_room_that_comes_free_is_told_to_all_who_wait() {
    model(2, || {
        let (queue, inbox, bell) = small(1);
        let producers: [_; 2] = std::array::from_fn(|_| {
            let queue = queue.clone();
            spawn(move || queue.send(message().0).unwrap())
        });
        take_all(&inbox, &bell, 2, Hearing::Anything);
        join(producers);
    });
}

#[test]
fn loom_no_message_slips_in_behind_the_end() {
    model(3, || {
        let (queue, inbox, _bell) = small(1);
        let producers: [_; 2] = std::array::from_fn(|_| {
            let queue = queue.clone();
            spawn(move || {
                let (message, reply) = message();
                match queue.send(message) {
                    // The queue lives on: only its end lets go of what is in it, and of the answer.
                    Ok(()) => assert!(reply.wait().is_none()),
                    Err(refused) => assert!(matches!(refused, Refused::Closed(_))),
                }
            })
        });
        drop(inbox);
        join(producers);
        assert!(matches!(queue.try_send(message().0), Err(Refused::Closed(_))));
    });
}

/// What `helm.rs` and the writer's `commit` do with the bell, around a writer of which only its inbox is left.
struct Helm {
    writer: Mutex<(Inbox, u32)>,
    bell: Arc<Bell>,
}

impl Helm {
    fn work(&self, most: u32) {
        let mut held = self.writer.lock().unwrap();
        loop {
            held.0.stop_listening();
            while held.0.take().is_some() {
                held.1 += 1;
            }
            if held.1 == most {
                return;
            }
            if held.0.listen(Where::Parked, Hearing::Anything) {
                drop(held);
                self.bell.wait(Where::Parked, None);
                held = self.writer.lock().unwrap();
            }
        }
    }

    fn try_commit(&self, most: u32) -> bool {
        let Ok(mut held) = self.writer.try_lock() else { return false };
        if !held.0.is_empty() {
            return false;
        }
        held.0.hand_over();
        held.1 += 1;
        // The model's end is the one thing that its own thread must be woken for beside messages.
        let can_wait = held.1 < most && held.0.listen(Where::Parked, Hearing::Anything);
        drop(held);
        if !can_wait {
            self.bell.wake();
        }
        true
    }
}

#[test]
fn loom_a_producer_that_commits_hides_no_message_of_another() {
    model(3, || {
        let (queue, inbox, bell) = small(2);
        let helm = Arc::new(Helm { writer: Mutex::new((inbox, 0)), bell });
        let alone = {
            let (helm, queue) = (Arc::clone(&helm), queue.clone());
            spawn(move || {
                if !helm.try_commit(2) {
                    queue.send(message().0).unwrap();
                }
            })
        };
        let other = spawn(move || queue.send(message().0).unwrap());
        helm.work(2);
        alone.join().unwrap();
        other.join().unwrap();
    });
}
