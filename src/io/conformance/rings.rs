//! [`Ring`]: operations in, completions out.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use super::super::{Action, Buffer, Completion, Create, Disk, File, Op, Open, Ring, RingConfig, Slot, Token};
use super::{BLOCK, Mode, RING, blocks, in_every_mode, on_every_backend, read_all, values};

in_every_mode! {
    writes_and_reads_with_registered_buffers
    writes_and_reads_with_buffers_of_no_ring
    a_buffer_of_another_ring_serves
    only_the_range_is_moved
    tokens_tell_operations_apart
    reads_end_at_the_end
    a_durable_write_tells_its_bytes
    a_failed_operation_gives_its_buffer_back
    slots_are_used_again
    a_ring_keeps_its_files_open
    many_operations_one_after_the_other
    a_ring_dropped_with_operations_in_flight
    a_ring_moves_between_threads
    positions_past_32_bits_are_no_others
}

on_every_backend! {
    more_than_the_depth_is_refused
    more_files_than_asked_for_are_refused
    buffers_are_given_once
    reaping_alone_finds_completions
    reaping_without_operations
    waiting_ends_by_a_completion
    waiting_ends_by_time
    waiting_ends_by_the_waker
    a_wake_before_the_wait_ends_it
    a_long_timeout_is_no_short_one
    wakers_outlive_their_ring
    operations_of_many_bytes
}

const B: u64 = 4096;
const WRITE: Action = Action::Write { durable: false };

fn ring(disk: &dyn Disk) -> Box<dyn Ring> {
    disk.ring(&RING).unwrap()
}

fn attached(disk: &dyn Disk, dir: &Path, mode: Mode, ring: &mut dyn Ring) -> (Arc<dyn File>, Slot) {
    let file = mode.open(disk, &dir.join("f"), Create::Empty);
    let slot = ring.attach(Arc::clone(&file)).unwrap();
    (file, slot)
}

fn op(action: Action, slot: Slot, position: u64, buffer: Buffer) -> Op {
    let range = 0..buffer.len();
    Op { action, slot, position, buffer, range }
}

fn next(ring: &mut dyn Ring) -> Completion {
    loop {
        if let Some(completion) = ring.reap().unwrap() {
            return completion;
        }
        ring.wait(None).unwrap();
    }
}

/// Performs one operation that must succeed.
fn perform(ring: &mut dyn Ring, op: Op) -> (usize, Buffer) {
    let token = Token(op.position ^ 0xABCD);
    ring.submit(token, op).unwrap();
    let Completion { token: ended, result, buffer } = next(ring);
    assert_eq!(ended, token);
    (result.unwrap(), buffer)
}

// ---- transfers ----

fn writes_and_reads(disk: &dyn Disk, dir: &Path, mode: Mode, ring: &mut dyn Ring, mut buffer: Buffer) {
    let (_file, slot) = attached(disk, dir, mode, ring);
    let memory = buffer.as_ptr();
    for (block, value) in buffer.chunks_mut(BLOCK).zip(1..) {
        block.fill(value);
    }
    let before = buffer.to_vec();
    let (written, mut buffer) = perform(ring, op(WRITE, slot, B, buffer));
    assert_eq!((written, buffer.as_ptr(), buffer[..] == before[..]), (before.len(), memory, true), "given back as it was");
    assert_eq!(read_all(disk, &dir.join("f"))[BLOCK..], before);
    buffer.fill(0xEE);
    let (read, buffer) = perform(ring, op(Action::Read, slot, B, buffer));
    assert_eq!((read, buffer.as_ptr(), buffer[..] == before[..]), (before.len(), memory, true));
}

fn writes_and_reads_with_registered_buffers(disk: &dyn Disk, dir: &Path, mode: Mode) {
    let mut ring = ring(disk);
    for buffer in ring.take_buffers() {
        if disk.backend() == "uring" && !buffer.is_registered() {
            println!("the limit of locked memory lets this ring register nothing");
        }
        assert!(disk.backend() == "uring" || !buffer.is_registered());
        writes_and_reads(disk, dir, mode, &mut *ring, buffer);
    }
}

fn writes_and_reads_with_buffers_of_no_ring(disk: &dyn Disk, dir: &Path, mode: Mode) {
    writes_and_reads(disk, dir, mode, &mut *ring(disk), blocks(&[0; 5]));
}

fn positions_past_32_bits_are_no_others(disk: &dyn Disk, dir: &Path, mode: Mode) {
    let mut ring = ring(disk);
    let (file, slot) = attached(disk, dir, mode, &mut *ring);
    file.write_at(&blocks(&[9]), 0, true).unwrap();
    let mut registered = ring.take_buffers().remove(0);
    registered.fill(1);
    for (edge, buffer) in [(1 << 32, registered), (5 << 30, blocks(&[2, 2])), (1 << 40, blocks(&[3, 3]))] {
        let (value, len) = (buffer[0], buffer.len());
        let (written, mut buffer) = perform(&mut *ring, op(WRITE, slot, edge - B, buffer));
        assert_eq!(written, len);
        buffer.fill(0xEE);
        let (read, buffer) = perform(&mut *ring, op(Action::Read, slot, edge - B, buffer));
        assert!(read == len && buffer.iter().all(|byte| *byte == value), "at {edge}");
    }
    let (_, start) = perform(&mut *ring, op(Action::Read, slot, 0, blocks(&[0, 0])));
    assert_eq!(values(&start), [9, 0], "what was written far behind went to the beginning");
}

fn a_buffer_of_another_ring_serves(disk: &dyn Disk, dir: &Path, mode: Mode) {
    let mut first = ring(disk);
    let mut second = ring(disk);
    // Numbered from the other end, a number mistaken for the second ring's own would name other memory.
    let mut own = second.take_buffers();
    own.iter_mut().for_each(|buffer| buffer.fill(0x55));
    for buffer in first.take_buffers().into_iter().rev() {
        writes_and_reads(disk, dir, mode, &mut *second, buffer);
    }
    assert!(own.iter().all(|buffer| buffer.iter().all(|byte| *byte == 0x55)));
    // Its own ring being gone changes nothing.
    let orphan = ring(disk).take_buffers().remove(1);
    writes_and_reads(disk, dir, mode, &mut *second, orphan);
}

fn only_the_range_is_moved(disk: &dyn Disk, dir: &Path, mode: Mode) {
    let mut ring = ring(disk);
    let (_file, slot) = attached(disk, dir, mode, &mut *ring);
    let mut registered = ring.take_buffers().remove(0);
    for (block, value) in registered.chunks_mut(BLOCK).zip(1..) {
        block.fill(value);
    }
    for buffer in [registered, blocks(&[1, 2, 3, 4, 5, 6, 7, 8])] {
        let write = Op { range: 2 * BLOCK..4 * BLOCK, ..op(WRITE, slot, 0, buffer) };
        let (written, mut buffer) = perform(&mut *ring, write);
        assert_eq!((written, values(&read_all(disk, &dir.join("f")))), (2 * BLOCK, vec![3, 4]));
        buffer.fill(0xEE);
        let read = Op { range: 5 * BLOCK..6 * BLOCK, ..op(Action::Read, slot, B, buffer) };
        let (read, buffer) = perform(&mut *ring, read);
        assert_eq!((read, values(&buffer)), (BLOCK, vec![0xEE, 0xEE, 0xEE, 0xEE, 0xEE, 4, 0xEE, 0xEE]));
    }
}

fn tokens_tell_operations_apart(disk: &dyn Disk, dir: &Path, mode: Mode) {
    let mut ring = ring(disk);
    let (file, slot) = attached(disk, dir, mode, &mut *ring);
    file.write_at(&blocks(&[10, 11, 12, 13]), 0, false).unwrap();
    for round in 0..20_u64 {
        let mut expected = BTreeMap::new();
        for block in [3, 0, 2, 1_u64] {
            let token = Token(u64::MAX - round * 10 - block);
            expected.insert(token.0, 10 + u8::try_from(block).unwrap());
            ring.submit(token, op(Action::Read, slot, block * B, blocks(&[0]))).unwrap();
        }
        while !expected.is_empty() {
            let Completion { token, result, buffer } = next(&mut *ring);
            assert_eq!(result.unwrap(), BLOCK);
            assert_eq!(Some(buffer[0]), expected.remove(&token.0), "{token:?}");
        }
        assert!(ring.reap().unwrap().is_none(), "each completes once");
    }
}

fn reads_end_at_the_end(disk: &dyn Disk, dir: &Path, mode: Mode) {
    let mut ring = ring(disk);
    let (file, slot) = attached(disk, dir, mode, &mut *ring);
    file.write_at(&blocks(&[1, 2]), 0, false).unwrap();
    let (read, buffer) = perform(&mut *ring, op(Action::Read, slot, B, blocks(&[9, 9, 9])));
    assert_eq!((read, values(&buffer[..BLOCK])), (BLOCK, vec![2]));
    assert_eq!(perform(&mut *ring, op(Action::Read, slot, 2 * B, buffer)).0, 0);
    let nothing = Op { range: 0..0, ..op(WRITE, slot, 0, blocks(&[9])) };
    assert_eq!(perform(&mut *ring, nothing).0, 0);
    assert_eq!(values(&read_all(disk, &dir.join("f"))), [1, 2]);
}

fn a_durable_write_tells_its_bytes(disk: &dyn Disk, dir: &Path, mode: Mode) {
    let mut ring = ring(disk);
    let (_file, slot) = attached(disk, dir, mode, &mut *ring);
    let mut buffers = ring.take_buffers();
    buffers.push(blocks(&[0, 0, 0]));
    for (mut buffer, value) in buffers.into_iter().zip(1..) {
        buffer.fill(value);
        let len = buffer.len();
        let (written, _) = perform(&mut *ring, op(Action::Write { durable: true }, slot, 0, buffer));
        assert_eq!(written, len);
        assert!(read_all(disk, &dir.join("f"))[..len].iter().all(|byte| *byte == value));
    }
}

fn a_failed_operation_gives_its_buffer_back(disk: &dyn Disk, dir: &Path, mode: Mode) {
    let mut ring = ring(disk);
    mode.open(disk, &dir.join("f"), Create::New).write_at(&blocks(&[1]), 0, false).unwrap();
    let file = disk.open(&dir.join("f"), Open { direct: mode == Mode::Direct, ..Open::READ }).unwrap();
    let slot = ring.attach(file).unwrap();
    for (round, buffer) in (0..).zip([ring.take_buffers().remove(1), blocks(&[7])]) {
        let memory = buffer.as_ptr();
        ring.submit(Token(round), op(Action::Write { durable: true }, slot, 0, buffer)).unwrap();
        let Completion { token, result, buffer } = next(&mut *ring);
        assert!(result.is_err(), "a file opened for reading was written");
        assert_eq!((token, buffer.as_ptr()), (Token(round), memory));
        assert_eq!(perform(&mut *ring, op(Action::Read, slot, 0, buffer)).0, BLOCK, "the ring goes on");
    }
    assert_eq!(values(&read_all(disk, &dir.join("f"))), [1]);
}

fn slots_are_used_again(disk: &dyn Disk, dir: &Path, mode: Mode) {
    let mut ring = ring(disk);
    let files: Vec<_> = (0..7_u8).map(|name| mode.open(disk, &dir.join(name.to_string()), Create::New)).collect();
    let mut attached: Vec<(usize, Slot)> = Vec::new();
    for round in 0..200_usize {
        if attached.len() == 4 {
            ring.detach(attached.remove(round % 4).1);
        }
        let file = round % files.len();
        attached.push((file, ring.attach(Arc::clone(&files[file])).unwrap()));
        for (file, slot) in &attached {
            let value = u8::try_from(round).unwrap();
            perform(&mut *ring, op(WRITE, *slot, 0, blocks(&[value])));
            assert_eq!(read_all(disk, &dir.join(file.to_string()))[0], value, "the slot is another file's");
        }
    }
}

fn a_ring_keeps_its_files_open(disk: &dyn Disk, dir: &Path, mode: Mode) {
    let mut ring = ring(disk);
    let (file, slot) = attached(disk, dir, mode, &mut *ring);
    let weak = Arc::downgrade(&file);
    drop(file);
    disk.remove_file(&dir.join("f")).unwrap();
    // Another file takes the descriptor's number if it is free.
    let _other = Mode::Buffered.open(disk, &dir.join("other"), Create::New);
    perform(&mut *ring, op(WRITE, slot, 0, blocks(&[5])));
    let (_, buffer) = perform(&mut *ring, op(Action::Read, slot, 0, blocks(&[0])));
    assert_eq!(values(&buffer), [5]);
    assert_eq!(read_all(disk, &dir.join("other")), b"");
    assert_eq!(weak.strong_count(), 1, "only the ring has it");
    ring.detach(slot);
    assert_eq!(weak.strong_count(), 0, "forgotten");
    let (file, _) = attached(disk, dir, mode, &mut *ring);
    drop(ring);
    assert_eq!(Arc::strong_count(&file), 1);
}

fn many_operations_one_after_the_other(disk: &dyn Disk, dir: &Path, mode: Mode) {
    let mut ring = ring(disk);
    let (_file, slot) = attached(disk, dir, mode, &mut *ring);
    let mut buffer = ring.take_buffers().remove(0);
    for round in 0..500_u64 {
        let value = round.to_le_bytes()[0] | 1;
        let position = B * (round * 7 % 13);
        buffer[..BLOCK].fill(value);
        buffer = perform(&mut *ring, Op { range: 0..BLOCK, ..op(WRITE, slot, position, buffer) }).1;
        buffer[..BLOCK].fill(0);
        buffer = perform(&mut *ring, Op { range: 0..BLOCK, ..op(Action::Read, slot, position, buffer) }).1;
        assert_eq!(values(&buffer[..BLOCK]), [value]);
    }
}

fn a_ring_dropped_with_operations_in_flight(disk: &dyn Disk, dir: &Path, mode: Mode) {
    // Under Miri a round takes seconds.
    for round in 0..if cfg!(miri) { 4 } else { 30_u8 } {
        let mut ring = ring(disk);
        let (file, slot) = attached(disk, dir, mode, &mut *ring);
        file.write_at(&blocks(&[200; 16]), 0, false).unwrap();
        let mut buffers = ring.take_buffers();
        buffers.extend([blocks(&[0; 8]), blocks(&[0; 8])]);
        for (mut buffer, number) in buffers.into_iter().zip(0..4_u64) {
            buffer.fill(round);
            let action = if number % 2 == 0 { Action::Write { durable: true } } else { Action::Read };
            ring.submit(Token(number), op(action, slot, number / 2 * 8 * B, buffer)).unwrap();
        }
        if round % 2 == 0 {
            ring.waker().wake();
            ring.wait(None).unwrap();
        }
        drop(ring);
        assert_eq!(Arc::strong_count(&file), 1, "nothing is left in flight");
        // Each write was performed whole or not at all: nothing else ever was in that memory.
        assert!(values(&read_all(disk, &dir.join("f"))).iter().all(|value| [200, round].contains(value)));
    }
}

fn a_ring_moves_between_threads(disk: &dyn Disk, dir: &Path, mode: Mode) {
    let mut ring = disk.ring(&RingConfig { one_thread: false, ..RING }).unwrap();
    let (_file, slot) = attached(disk, dir, mode, &mut *ring);
    for round in 1..20_u8 {
        // Submitted here, taken there.
        ring.submit(Token(1), op(WRITE, slot, 0, blocks(&[round]))).unwrap();
        ring = thread::scope(|scope| {
            let there = scope.spawn(move || {
                assert_eq!(next(&mut *ring).token, Token(1));
                let (_, buffer) = perform(&mut *ring, op(Action::Read, slot, 0, blocks(&[0])));
                assert_eq!(values(&buffer), [round]);
                ring
            });
            there.join().unwrap()
        });
    }
}

// ---- limits ----

fn more_than_the_depth_is_refused(disk: &dyn Disk, dir: &Path) {
    let mut ring = ring(disk);
    let (file, slot) = attached(disk, dir, Mode::Buffered, &mut *ring);
    file.write_at(&blocks(&[1; 8]), 0, false).unwrap();
    for round in 0..10 {
        for number in 0..4 {
            ring.submit(Token(number), op(Action::Read, slot, 0, blocks(&[0]))).unwrap();
        }
        for _ in 0..3 {
            let buffer = blocks(&[77]);
            let memory = buffer.as_ptr();
            let rejected = ring.submit(Token(9), op(Action::Read, slot, 0, buffer)).expect_err("a fifth of four");
            assert_eq!((rejected.buffer.as_ptr(), rejected.buffer[0]), (memory, 77), "round {round}");
        }
        assert_eq!(next(&mut *ring).result.unwrap(), BLOCK);
        ring.submit(Token(5), op(Action::Read, slot, 0, blocks(&[0]))).unwrap();
        let mut tokens: Vec<_> = (0..4).map(|_| next(&mut *ring).token.0).collect();
        tokens.sort_unstable();
        assert_eq!(tokens[3], 5);
        assert!(ring.reap().unwrap().is_none(), "what was refused never completes");
    }
}

fn more_files_than_asked_for_are_refused(disk: &dyn Disk, dir: &Path) {
    let mut ring = ring(disk);
    let file = disk.open(&dir.join("f"), Open::NEW).unwrap();
    let slots: Vec<_> = (0..4).map(|_| ring.attach(Arc::clone(&file)).unwrap()).collect();
    assert!(slots.iter().enumerate().all(|(index, slot)| !slots[..index].contains(slot)));
    for _ in 0..3 {
        assert!(ring.attach(Arc::clone(&file)).is_err());
    }
    assert_eq!(Arc::strong_count(&file), 5, "a file that was refused is not kept");
    ring.detach(slots[2]);
    assert_eq!(ring.attach(file).unwrap(), slots[2]);
}

fn buffers_are_given_once(disk: &dyn Disk, dir: &Path) {
    let mut ring = ring(disk);
    let buffers = ring.take_buffers();
    assert_eq!(buffers.iter().map(|buffer| buffer.len()).collect::<Vec<_>>(), [8 * BLOCK; 2]);
    assert!(buffers.iter().all(|buffer| buffer.iter().all(|byte| *byte == 0)));
    assert!(ring.take_buffers().is_empty());
    let mut none = disk.ring(&RingConfig { buffers: 0, ..RING }).unwrap();
    assert!(none.take_buffers().is_empty());
    writes_and_reads(disk, dir, Mode::Buffered, &mut *none, blocks(&[0]));
    let memory = buffers[1].as_ptr();
    drop(ring);
    assert_eq!((buffers[1].as_ptr(), buffers[1][8 * BLOCK - 1]), (memory, 0), "memory outlives the ring");
}

// ---- waiting ----

fn reaping_alone_finds_completions(disk: &dyn Disk, dir: &Path) {
    for one_thread in [true, false] {
        let mut ring = disk.ring(&RingConfig { one_thread, ..RING }).unwrap();
        let (file, slot) = attached(disk, dir, Mode::Buffered, &mut *ring);
        file.write_at(&blocks(&[1]), 0, false).unwrap();
        for durable in [false, true] {
            ring.submit(Token(1), op(Action::Write { durable }, slot, 0, blocks(&[1]))).unwrap();
            let completion = loop {
                match ring.reap().unwrap() {
                    Some(completion) => break completion,
                    None => thread::yield_now(),
                }
            };
            assert_eq!(completion.result.unwrap(), BLOCK);
        }
    }
}

fn reaping_without_operations(disk: &dyn Disk, dir: &Path) {
    let mut ring = ring(disk);
    assert!((0..100).all(|_| ring.reap().unwrap().is_none()));
    let waker = ring.waker();
    waker.wake();
    ring.wait(None).unwrap();
    assert!((0..100).all(|_| ring.reap().unwrap().is_none()), "a wake is no completion");
    let (_file, slot) = attached(disk, dir, Mode::Buffered, &mut *ring);
    assert_eq!(perform(&mut *ring, op(WRITE, slot, 0, blocks(&[1]))).0, BLOCK);
    assert!(ring.reap().unwrap().is_none());
}

fn waiting_ends_by_a_completion(disk: &dyn Disk, dir: &Path) {
    let mut ring = ring(disk);
    let (_file, slot) = attached(disk, dir, Mode::Buffered, &mut *ring);
    for armed in [false, true] {
        if armed {
            let _ = ring.waker();
        }
        for timeout in [None, Some(Duration::from_secs(3600))] {
            ring.submit(Token(1), op(Action::Write { durable: true }, slot, 0, blocks(&[1]))).unwrap();
            // Nobody wakes it: only the completion ends this, and one that is there ends it again and again.
            while ring.reap().unwrap().is_none() {
                ring.wait(timeout).unwrap();
            }
            ring.submit(Token(1), op(WRITE, slot, 0, blocks(&[1]))).unwrap();
            (0..3).for_each(|_| ring.wait(timeout).unwrap());
            assert!(ring.reap().unwrap().is_some());
        }
    }
}

fn waiting_ends_by_time(disk: &dyn Disk, _dir: &Path) {
    let mut ring = ring(disk);
    for armed in [false, true] {
        if armed {
            let _ = ring.waker();
        }
        for timeout in [Duration::ZERO, Duration::from_nanos(1), Duration::from_millis(2)] {
            ring.wait(Some(timeout)).unwrap();
            assert!(ring.reap().unwrap().is_none());
        }
    }
}

/// Waits until another thread, which starts at the same time, says so by `said` and the waker.
fn wait_for_waker(ring: &mut dyn Ring, timeout: Option<Duration>, wait: impl Fn(&mut dyn Ring, Option<Duration>, &AtomicBool)) {
    let waker = ring.waker();
    let start = Barrier::new(2);
    let said = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            start.wait();
            (0..50).for_each(|_| thread::yield_now());
            said.store(true, Ordering::SeqCst);
            waker.wake();
        });
        start.wait();
        wait(ring, timeout, &said);
    });
}

fn waiting_ends_by_the_waker(disk: &dyn Disk, dir: &Path) {
    let mut ring = ring(disk);
    let until_said = |ring: &mut dyn Ring, timeout, said: &AtomicBool| {
        while !said.load(Ordering::SeqCst) {
            ring.wait(timeout).unwrap();
            assert!(ring.reap().unwrap().is_none());
        }
    };
    for round in 0..100 {
        let timeout = if round % 2 == 0 { None } else { Some(Duration::from_secs(3600)) };
        wait_for_waker(&mut *ring, timeout, until_said);
    }
    let (_file, slot) = attached(disk, dir, Mode::Buffered, &mut *ring);
    assert_eq!(perform(&mut *ring, op(WRITE, slot, 0, blocks(&[1]))).0, BLOCK, "operations go on between wakes");
}

fn a_wake_before_the_wait_ends_it(disk: &dyn Disk, dir: &Path) {
    let mut ring = ring(disk);
    let waker = ring.waker();
    for round in 0..20 {
        (0..round % 3 + 1).for_each(|_| waker.clone().wake());
        ring.wait(None).unwrap();
        assert!(ring.reap().unwrap().is_none());
    }
    // Also while the ring waits already, as far as the kernel knows: after a wait that ended by time.
    ring.wait(Some(Duration::ZERO)).unwrap();
    waker.wake();
    ring.wait(None).unwrap();
    // A wake is not lost to a completion that is there at the same time.
    let (_file, slot) = attached(disk, dir, Mode::Buffered, &mut *ring);
    while ring.reap().unwrap().is_some() {}
    ring.submit(Token(1), op(WRITE, slot, 0, blocks(&[1]))).unwrap();
    ring.wait(None).unwrap();
    waker.wake();
    assert_eq!(next(&mut *ring).token, Token(1));
    ring.wait(None).unwrap();
}

fn a_long_timeout_is_no_short_one(disk: &dyn Disk, _dir: &Path) {
    let mut ring = ring(disk);
    let once = |ring: &mut dyn Ring, timeout, said: &AtomicBool| {
        ring.wait(timeout).unwrap();
        assert!(said.load(Ordering::SeqCst), "{timeout:?} were over at once");
        assert!(ring.reap().unwrap().is_none());
    };
    for timeout in [Duration::from_secs(3600), Duration::from_secs(u64::from(u32::MAX)), Duration::from_secs(1 << 62), Duration::MAX] {
        for _ in 0..20 {
            // Wakes of earlier rounds are over: each ended its wait.
            wait_for_waker(&mut *ring, Some(timeout), once);
        }
    }
}

fn wakers_outlive_their_ring(disk: &dyn Disk, _dir: &Path) {
    let mut ring = ring(disk);
    let waker = ring.waker();
    ring.wait(Some(Duration::ZERO)).unwrap();
    drop(ring);
    waker.wake();
}

fn operations_of_many_bytes(disk: &dyn Disk, dir: &Path) {
    let mut ring = ring(disk);
    let (_file, slot) = attached(disk, dir, Mode::Buffered, &mut *ring);
    let len = (4 << 20) + 3;
    let mut buffer = Buffer::new(len).unwrap();
    let bytes = super::pattern(len);
    buffer[..len].copy_from_slice(&bytes);
    // In one operation or, where the kernel made it shorter, in as many as it takes.
    let mut done = 0;
    while done < len {
        let position = 100 + u64::try_from(done).unwrap();
        let (written, back) = perform(&mut *ring, Op { range: done..len, ..op(WRITE, slot, position, buffer) });
        assert!(written > 0);
        (done, buffer) = (done + written, back);
    }
    assert_eq!(done, len);
    assert!(read_all(disk, &dir.join("f"))[100..] == bytes);
}
