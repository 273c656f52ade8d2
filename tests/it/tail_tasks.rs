//! The end of the log for those who may not block: tasks, whatever runs them, and poll loops.

use std::os::fd::AsFd;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use futures_core::Stream;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sapwood::io::sim::{Effect, Fault, OpKind, SimDisk};
use sapwood::{Batch, Broker, Durability, Partition, Stepper, TailEvent, TailStream, Ticket, TopicConfig, Visibility};

use crate::sim::{DATA, EIO, create as create_simulated, tiny};
use crate::support::{Row, TOPIC, append, assert_in_order, config, read_all, seed, segments_of, small};
use crate::tail::each_disk;

/// Unparks the thread, and counts how often.
struct ThreadWaker(Thread, AtomicU64);

impl Wake for ThreadWaker {
    fn wake(self: Arc<Self>) {
        self.1.fetch_add(1, Ordering::SeqCst);
        self.0.unpark();
    }
}

fn this_thread() -> (Arc<ThreadWaker>, Waker) {
    let waker = Arc::new(ThreadWaker(thread::current(), AtomicU64::new(0)));
    (Arc::clone(&waker), Waker::from(waker))
}

/// The smallest of runtimes: the future is polled only when it was woken.
fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let (count, waker) = this_thread();
    let mut woken = 0;
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        while count.1.load(Ordering::SeqCst) == woken {
            thread::park();
        }
        woken += 1;
    }
}

fn ticket(partition: &Partition, value: &str) -> Ticket {
    partition.append(Batch::of(None, value.as_bytes()).unwrap()).unwrap()
}

fn poll_once<S: Stream + Unpin>(stream: &mut S, waker: &Waker) -> Poll<Option<S::Item>> {
    Pin::new(stream).poll_next(&mut Context::from_waker(waker))
}

#[test]
fn a_ticket_is_a_future_of_its_offsets() {
    each_disk(&small(), |broker, partition| {
        assert_eq!(block_on(ticket(&partition, "one")).unwrap(), 0..1);
        // Many at once, as one task and as several.
        let tickets: Vec<_> = (0..50).map(|number| ticket(&partition, &format!("{number}"))).collect();
        block_on(async {
            for (offset, ticket) in (1..).zip(tickets) {
                assert_eq!(ticket.await.unwrap().start, offset);
            }
        });
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..50).for_each(|_| assert!(block_on(ticket(&partition, "x")).is_ok())));
            }
        });
        assert_eq!(partition.durable_end(), 251);
        broker.close().unwrap();
        let refused = partition.append(Batch::of(None, b"late").unwrap()).and_then(block_on);
        assert!(refused.unwrap_err().is_closed());
    });
}

#[test]
fn a_ticket_that_is_dropped_leaves_its_append_as_it_is() {
    let (sim, _broker, partition) = create_simulated(seed(), &small());
    let hold = sim.hold(OpKind::Write, Some(".log"));
    let (count, waker) = this_thread();
    let mut tickets: Vec<_> = (0..3).map(|number| ticket(&partition, &format!("{number}"))).collect();
    let mut context = Context::from_waker(&waker);
    assert!(tickets.iter_mut().all(|ticket| Pin::new(ticket).poll(&mut context).is_pending()));
    // One is dropped once it was polled, one is waited for by a thread after all.
    drop(tickets.remove(0));
    let last = tickets.pop().unwrap();
    hold.release();
    assert_eq!(last.wait().unwrap(), 2..3);
    assert_eq!(block_on(tickets.pop().unwrap()).unwrap(), 1..2);
    partition.sync().unwrap();
    assert_eq!(read_all(&partition).len(), 3);
    drop(waker);
    assert_eq!(Arc::strong_count(&count), 1, "a waker was left behind");
    assert!(count.1.load(Ordering::SeqCst) <= 2, "the dropped one needs no wake");
}

#[test]
fn a_ticket_whose_write_fails_tells_its_task() {
    let (sim, _broker, partition) = create_simulated(seed(), &tiny(1 << 20));
    append(&partition, b"", b"one");
    let hold = sim.hold(OpKind::Write, Some(".log"));
    sim.fail(Fault::next(OpKind::Write, Effect::Error(EIO)).path(".log"));
    let tickets: Vec<_> = (0..5).map(|number| ticket(&partition, &format!("{number}"))).collect();
    let waiting = thread::spawn(move || tickets.into_iter().map(block_on).collect::<Vec<_>>());
    hold.wait_until_held();
    hold.release();
    assert!(waiting.join().unwrap().into_iter().all(|answer| answer.unwrap_err().is_failed()));
}

#[test]
fn a_stream_gives_each_record_as_it_comes() {
    each_disk(&segments_of(16 << 10), |broker, partition| {
        let rounds = 500;
        let mut stream = partition.tail(0).unwrap().into_stream();
        let (seen, was_seen) = mpsc::channel();
        let consumer = thread::spawn(move || {
            block_on(async {
                for _ in 0..rounds {
                    seen.send(Row::from(stream.next_record().await.unwrap().unwrap())).unwrap();
                }
                let error = stream.next_record().await.unwrap().unwrap_err();
                assert!(error.is_closed(), "{error}");
                assert!(stream.next_record().await.is_none());
            });
        });
        let rows: Vec<Row> = (0..rounds)
            .map(|round| {
                if round % 2 == 0 {
                    drop(ticket(&partition, "x"))
                } else {
                    let _ = append(&partition, b"", b"x");
                }
                was_seen.recv().unwrap()
            })
            .collect();
        assert_in_order(&rows, 0);
        broker.close().unwrap();
        consumer.join().unwrap();
    });
}

#[test]
fn a_stream_that_is_dropped_or_turned_back_loses_and_leaves_nothing() {
    each_disk(&small(), |_broker, partition| {
        let (count, waker) = this_thread();
        let mut stream = partition.tail(0).unwrap().into_stream();
        assert!(poll_once(&mut stream, &waker).is_pending() && poll_once(&mut stream, &waker).is_pending());
        drop(stream);
        for number in 0..5 {
            append(&partition, b"", format!("{number}").as_bytes());
        }
        assert_eq!((Arc::strong_count(&count), count.1.load(Ordering::SeqCst)), (2, 0), "a dropped stream left its waker behind");

        let mut stream = partition.tail(0).unwrap().into_stream();
        for offset in 0..3 {
            let Poll::Ready(Some(Ok(record))) = poll_once(&mut stream, &waker) else { panic!("record {offset} is there") };
            assert_eq!(record.offset, offset);
        }
        // A future of the next record, dropped before it was polled to its end.
        drop(stream.next_record());
        assert_eq!(stream.tail().position(), 3);
        let mut tail = stream.into_tail();
        assert_eq!(tail.next_record(None).unwrap().unwrap().offset, 3);
        let mut stream = tail.into_stream();
        assert!(poll_once(&mut stream, &waker).is_ready());
        assert!(poll_once(&mut stream, &waker).is_pending());
        assert_eq!(count.1.load(Ordering::SeqCst), 0);
        append(&partition, b"", b"last");
        let next = block_on(stream.next_record()).unwrap().unwrap();
        assert_eq!(next.value, "last");
        assert!(count.1.load(Ordering::SeqCst) <= 1);
    });
}

#[test]
fn a_task_is_woken_once_for_what_it_waits_for_and_for_nothing_else() {
    let stepper = Stepper::new(seed());
    let sim = Arc::new(SimDisk::new(1));
    let broker = Broker::open_stepped(sim, &stepper, DATA, config(sapwood::Backend::Auto, TopicConfig::default())).unwrap();
    let durability = Durability::Interval { bytes: 1 << 40, time: Duration::from_secs(3600) };
    let partition = broker.create_topic(TOPIC, TopicConfig { durability, ..tiny(1 << 20) }).unwrap().partition(0).unwrap();
    let settle = || stepper.settle(Duration::from_secs(20));
    let ((early_count, early_waker), (late_count, late_waker)) = (this_thread(), this_thread());
    let woken = || (early_count.1.load(Ordering::SeqCst), late_count.1.load(Ordering::SeqCst));
    let stream = |visibility| -> TailStream { partition.tail_with(0, visibility).unwrap().into_stream() };
    let (mut early, mut late) = (stream(Visibility::Appended), stream(Visibility::Durable));
    assert!(poll_once(&mut early, &early_waker).is_pending() && poll_once(&mut late, &late_waker).is_pending());
    settle();
    assert_eq!(woken(), (0, 0));
    for number in 0..3 {
        drop(ticket(&partition, &format!("{number}")));
    }
    settle();
    assert_eq!(woken(), (1, 0), "three records came before it was polled again");
    for offset in 0..3 {
        assert!(matches!(poll_once(&mut early, &early_waker), Poll::Ready(Some(Ok(record))) if record.offset == offset));
    }
    assert!(poll_once(&mut early, &early_waker).is_pending() && poll_once(&mut late, &late_waker).is_pending());
    partition.sync().unwrap();
    assert_eq!(woken(), (1, 1));
    assert!(poll_once(&mut late, &late_waker).is_ready());
    // A ticket is polled, not driven: somebody else takes the steps.
    let (count, waker) = this_thread();
    let mut append = ticket(&partition, "last");
    assert!(Pin::new(&mut append).poll(&mut Context::from_waker(&waker)).is_pending());
    settle();
    assert_eq!((count.1.load(Ordering::SeqCst), block_on(append).unwrap()), (1, 3..4));
    broker.close().unwrap();
    assert_eq!(woken(), (2, 1), "the end wakes those who wait, and only them");
}

/// Whether it is readable, at once or in the end.
fn readable(event: &TailEvent, waits: bool) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(event, PollFlags::IN)], (!waits).then_some(&now)).unwrap() == 1
}

const NO_TIME: Option<Duration> = Some(Duration::ZERO);

#[test]
fn a_descriptor_is_readable_unless_there_was_nothing() {
    each_disk(&small(), |broker, partition| {
        let mut tail = partition.tail(0).unwrap();
        let event = tail.event().unwrap();
        assert!(readable(&event, false), "nothing was read yet");
        assert!(tail.next_batch(100, NO_TIME).unwrap().is_none());
        assert!(!readable(&event, false));
        append(&partition, b"", b"one");
        assert!(readable(&event, true) && readable(&tail.event().unwrap(), false), "every call gives the same");
        append(&partition, b"", b"two");
        // Not all was read: it stays.
        assert!(tail.next_batch(1, NO_TIME).unwrap().is_some());
        assert!(readable(&event, false));
        assert!(tail.next_record(NO_TIME).unwrap().is_some() && tail.next_record(NO_TIME).unwrap().is_none());
        assert!(!readable(&event, false));
        // A wait between polls: what it left is told.
        append(&partition, b"", b"three");
        append(&partition, b"", b"four");
        assert!(tail.next_batch(1, None).unwrap().is_some());
        assert!(readable(&event, true));
        assert_eq!(tail.records(NO_TIME).count(), 1);
        assert!(!readable(&event, false));
        assert!(tail.next_batch(1, Some(Duration::from_millis(5))).unwrap().is_none());
        assert!(!readable(&event, false));
        // From another place nothing was asked for yet.
        tail.seek(2).unwrap();
        assert!(readable(&event, false));
        assert_eq!(tail.records(NO_TIME).count(), 2);
        assert!(!readable(&event, false));
        broker.close().unwrap();
        assert!(readable(&event, true));
        assert!(tail.next_batch(100, NO_TIME).unwrap_err().is_closed());
        // Others may hold it for longer than the tail, and poll it for longer than there is anything to come.
        drop(tail);
        assert!(readable(&event, false));
        assert!(event.as_fd().try_clone_to_owned().is_ok());
    });
}

#[test]
fn a_poll_loop_misses_nothing() {
    each_disk(&segments_of(16 << 10), |_broker, partition| {
        let rounds = 1000;
        let mut tail = partition.tail(0).unwrap();
        let (seen, was_seen) = mpsc::channel();
        let consumer = thread::spawn(move || {
            let event = tail.event().unwrap();
            let mut polls = 0;
            while tail.position() < rounds {
                while let Some(record) = tail.next_record(NO_TIME).unwrap() {
                    seen.send(record.offset).unwrap();
                }
                if tail.position() < rounds {
                    assert!(readable(&event, true));
                    polls += 1;
                }
            }
            polls
        });
        for offset in 0..rounds {
            if offset % 2 == 0 {
                drop(ticket(&partition, "x"))
            } else {
                let _ = append(&partition, b"", b"x");
            }
            assert_eq!(was_seen.recv(), Ok(offset));
        }
        // Each poll ended for a record, or for one that was read before it was told, or for the first look.
        let polls = consumer.join().unwrap();
        assert!(polls <= 2 * rounds + 1, "{polls}");
    });
}
