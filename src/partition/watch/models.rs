//! Loom's models of waiting for a watermark. Run by `scripts/loom`. A waiter that nobody wakes is a deadlock to loom.

use loom::thread::spawn;

use super::*;
use crate::partition::ends::Ends;
use crate::sync::atomic::AtomicBool;

#[test]
fn loom_a_move_of_the_end_is_never_missed() {
    loom::model(|| {
        let (ends, watch) = (Arc::new(Ends::new(0)), Watch::new());
        let (its, told) = (Arc::clone(&ends), Arc::clone(&watch));
        let writer = spawn(move || {
            for end in 1..=2 {
                its.set_durable(end);
                told.tell(end);
            }
        });
        for past in 0..2 {
            assert!(watch.wait(past, None, || ends.durable() > past));
        }
        writer.join().unwrap();
    });
}

#[test]
fn loom_two_waiters_are_woken_by_one_move() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(|| {
        let (ends, watch) = (Arc::new(Ends::new(0)), Watch::new());
        let waiters: Vec<_> = (0..2)
            .map(|_| {
                let (ends, watch) = (Arc::clone(&ends), Arc::clone(&watch));
                spawn(move || assert!(watch.wait(0, None, || ends.appended() > 0)))
            })
            .collect();
        ends.set_appended(1);
        watch.tell(1);
        waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
    });
}

/// One of them gives up, just when it may have been given the other to wake.
#[test]
fn loom_whoever_gives_up_leaves_nobody_asleep() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(|| {
        let (ends, watch) = (Arc::new(Ends::new(0)), Watch::new());
        let (its, told) = (Arc::clone(&ends), Arc::clone(&watch));
        let waiter = spawn(move || assert!(told.wait(0, None, || its.appended() > 0)));
        let told = Arc::clone(&watch);
        let other = spawn(move || assert!(!told.wait(0, Some(Instant::now()), || false)));
        ends.set_appended(1);
        watch.tell(1);
        waiter.join().unwrap();
        other.join().unwrap();
    });
}

#[test]
fn loom_the_stop_is_never_missed() {
    loom::model(|| {
        let (stopped, watch) = (Arc::new(AtomicBool::new(false)), Watch::new());
        let (its, told) = (Arc::clone(&stopped), Arc::clone(&watch));
        let writer = spawn(move || {
            its.store(true, Ordering::Release);
            told.tell_all();
        });
        assert!(watch.wait(0, None, || stopped.load(Ordering::Acquire)));
        writer.join().unwrap();
    });
}
