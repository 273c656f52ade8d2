//! Loom's models of answers and of the crowd's wakes. Run by `scripts/loom`.
//!
//! A waiter that nobody wakes is a deadlock to loom. Time does not pass in a model: waits that end by themselves are left to the
//! tests beside.

use loom::thread::spawn;

use super::*;
use crate::sync::model;

#[test]
fn loom_an_answer_or_its_absence_is_told() {
    loom::model(|| {
        let (answerer, reply) = pair();
        let server = spawn(move || answerer.send(7));
        assert_eq!(reply.wait(), Some(7));
        server.join().unwrap();
        let (answerer, reply) = pair::<u32>();
        let server = spawn(move || drop(answerer));
        assert_eq!(reply.wait(), None);
        server.join().unwrap();
    });
}

#[test]
fn loom_a_slot_that_is_used_again_gets_its_own_answer() {
    model(3, || {
        let pool = Pool::new(1);
        let (first, reply) = pool.pair();
        let server = spawn(move || first.send(1));
        assert_eq!(reply.wait(), Some(1));
        // The first server may not have woken anybody yet: it will wake whoever waits here now.
        let (second, reply) = pool.pair();
        let other = spawn(move || second.send(2));
        assert_eq!(reply.wait(), Some(2));
        server.join().unwrap();
        other.join().unwrap();
    });
}

#[test]
fn loom_a_slot_whose_answer_nobody_took_serves_no_other_pair() {
    model(3, || {
        let pool = Pool::new(1);
        let (first, reply) = pool.pair();
        let server = spawn(move || first.send(1));
        drop(reply);
        let (second, reply) = pool.pair();
        let other = spawn(move || second.send(2));
        assert_eq!(reply.wait(), Some(2));
        server.join().unwrap();
        other.join().unwrap();
    });
}

/// So many threads that wait for an answer each, all given by one.
fn crowd(waiters: usize, preemptions: usize) {
    model(preemptions, move || {
        let pool = Pool::new(4);
        let (answerers, waiting): (Vec<_>, Vec<_>) = (0..waiters)
            .map(|number| {
                let (answerer, reply) = pool.pair();
                (answerer, spawn(move || assert_eq!(reply.wait(), Some(number))))
            })
            .unzip();
        Crowd::new().answer(answerers.into_iter().zip(0..));
        for waiter in waiting {
            waiter.join().unwrap();
        }
    });
}

#[test]
fn loom_a_pair_is_woken_whole() {
    crowd(2, 3);
}

#[test]
fn loom_a_crowd_is_woken_whole_by_its_members() {
    crowd(3, 2);
}

#[test]
fn loom_one_crowd_after_another_is_woken() {
    // Who was answered asks again at once, in the same slot, while the first crowd is still being woken.
    model(2, || {
        let pool = Pool::new(2);
        let (mut answerers, mut waiting) = (Vec::new(), Vec::new());
        for number in 0..2 {
            let (first, reply) = pool.pair();
            let (second, again) = pool.pair();
            answerers.push((first, second));
            waiting.push(spawn(move || {
                assert_eq!(reply.wait(), Some(number));
                assert_eq!(again.wait(), Some(number + 10));
            }));
        }
        let (first, second): (Vec<_>, Vec<_>) = answerers.into_iter().unzip();
        let mut crowd = Crowd::new();
        crowd.answer(first.into_iter().zip(0..));
        crowd.answer(second.into_iter().zip(10..));
        for waiter in waiting {
            waiter.join().unwrap();
        }
    });
}

#[test]
fn loom_one_that_only_looks_holds_up_nobody() {
    model(3, || {
        let (first, looks) = pair();
        let (second, waits) = pair();
        let looker = spawn(move || {
            let _ = looks.try_take();
        });
        let waiter = spawn(move || assert_eq!(waits.wait(), Some(2)));
        Crowd::new().answer([(first, 1), (second, 2)].into_iter());
        looker.join().unwrap();
        waiter.join().unwrap();
    });
}

#[test]
fn loom_one_that_woke_by_itself_holds_up_nobody() {
    // A late wake by the pair that the slot served before, or a time that ended: its owner is gone when its turn comes.
    model(3, || {
        let (first, woken) = pair();
        let (second, waits) = pair();
        let slot = Arc::clone(&woken.slot);
        let late = spawn(move || slot.changed.notify_one());
        let first_waiter = spawn(move || assert_eq!(woken.wait(), Some(1)));
        let second_waiter = spawn(move || assert_eq!(waits.wait(), Some(2)));
        Crowd::new().answer([(first, 1), (second, 2)].into_iter());
        for thread in [late, first_waiter, second_waiter] {
            thread.join().unwrap();
        }
    });
}
