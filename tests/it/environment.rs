//! What a system may do to a process, by kinds that others met: io_uring denied, transfers of any length, signals, writes that are refused.

use std::ops::RangeInclusive;
use std::sync::Arc;

use sapwood::io::OsDisk;
use sapwood::io::sim::{Effect, Fault, OpKind, RandomFault, SimDisk};
use sapwood::{Backend, Batch, Broker, Durability, Error, TopicConfig};
use serde_json::json;

use crate::child::{self, Child, backend, backend_name, say};
use crate::oracle::assert_closed;
use crate::sim::{self, DATA, tiny};
use crate::support::{
    TOPIC, TestClock, append, assert_in_order, batch, config, contents, create, each_backend, open, partition_dir, partition_of, read_all,
    scratch, seed, small,
};
use crate::warnings::Warnings;

/// Records of many lengths.
fn records(count: u32) -> Vec<(Vec<u8>, Vec<u8>)> {
    (0..count).map(|number| (number.to_be_bytes().to_vec(), vec![number as u8; (number * 37 % 3000) as usize])).collect()
}

/// The files of a partition to which such records were appended on a disk of which every write moves as much as `effect` lets it.
fn files_by(
    effect: Option<Effect>,
    durability: Durability,
    direct: bool,
    records: &[(Vec<u8>, Vec<u8>)],
) -> Vec<(String, Option<Vec<u8>>)> {
    let sim = SimDisk::new(7);
    sim.refuse_direct(!direct);
    let topic = TopicConfig { durability, ..tiny(200_000) };
    let clock = Arc::new(TestClock::at(1_700_000_000_000_000_000));
    let broker = Broker::open_on(Arc::new(sim.clone()), clock, DATA, config(Backend::Auto, topic.clone())).unwrap();
    let partition = broker.create_topic(TOPIC, topic).unwrap().partition(0).unwrap();
    if let Some(effect) = effect {
        sim.fail_by_chance(RandomFault { on: OpKind::Write, path_suffix: None, per_million: 1_000_000, effect });
    }
    for some in records.chunks(7) {
        partition.append(batch(some)).unwrap().wait().unwrap();
    }
    partition.sync().unwrap();
    sim.clear_faults();
    assert!(contents(&read_all(&partition)) == records);
    drop(partition);
    broker.close().unwrap();
    sim::files(&sim).into_iter().filter(|(name, _)| name != "checkpoint").collect()
}

#[test]
fn b128_b137_short_writes_of_any_length_leave_the_bytes_of_whole_ones() {
    for (durability, direct) in [(Durability::Durable, true), (Durability::Durable, false), (Durability::Os, false)] {
        // Past the page cache whole blocks are moved, or repeated: one that never came further would never be written.
        let lengths: &[usize] = if direct { &[4096, 12_288, 65_536] } else { &[1, 27, 28, 511, 65_536] };
        let records = records(60);
        let whole = files_by(None, durability, direct, &records);
        for &length in lengths {
            let cut = files_by(Some(Effect::Short(length)), durability, direct, &records);
            assert!(cut == whole, "{durability:?}, direct {direct}: writes of {length} bytes leave other files");
        }
    }
}

#[test]
fn b136_batches_of_thousands_of_records_are_one_durable_write() {
    for count in [1025, 2048, 5000] {
        let (sim, broker, partition) =
            sim::create(seed(), &TopicConfig { commit_bytes: 1 << 20, preallocate_bytes: 1 << 20, ..tiny(1 << 22) });
        append(&partition, b"", b"the room is made");
        sim.clear_ops();
        let many = vec![(b"", b"v"); count];
        assert_eq!(partition.append(batch(&many)).unwrap().wait().unwrap(), 1..count as u64 + 1);
        let writes: Vec<_> =
            sim.ops().into_iter().filter(|op| op.kind == OpKind::Write && op.path.to_string_lossy().ends_with(".log")).collect();
        assert_eq!(writes.len(), 1, "{writes:?}");
        assert!(writes[0].durable);
        drop(partition);
        broker.close().unwrap();
        assert_eq!(sim::assert_closed(&sim, 1).next_offset, count as u64 + 1);
    }
}

#[test]
fn b134_a_write_that_the_file_system_does_not_know_is_a_clear_error_and_no_silent_loss() {
    const EOPNOTSUPP: i32 = 95;
    for durability in [Durability::Durable, Durability::Os] {
        let (sim, broker, partition) = sim::create(seed(), &TopicConfig { durability, ..tiny(1 << 20) });
        sim.fail(Fault::next(OpKind::Write, Effect::Error(EOPNOTSUPP)).path(".log"));
        let error = partition.append(Batch::of(None, b"lost").unwrap()).unwrap().wait().unwrap_err();
        let Error::Failed { cause, .. } = &error else { panic!("{error}") };
        assert!(matches!(&**cause, Error::Io { source, .. } if source.raw_os_error() == Some(EOPNOTSUPP)), "{cause}");
        assert_eq!((partition.next_offset(), partition.durable_end()), (0, 0));
        drop((partition, broker));
        let broker = sim::open(&sim);
        assert_eq!(append(&partition_of(&broker), b"", b"goes on"), 0);
    }
}

#[test]
fn b126_b140_what_is_in_flight_when_everybody_lets_go_is_written_as_it_was_given() {
    for durability in [Durability::Durable, Durability::Os] {
        let (sim, broker, partition) = sim::create(seed(), &TopicConfig { durability, ..tiny(30_000) });
        append(&partition, b"", b"the first");
        let records = records(100);
        let hold = sim.hold(OpKind::Write, Some(".log"));
        // Half of the answers are let go of at once, with the records.
        let tickets: Vec<_> = records
            .iter()
            .enumerate()
            .filter_map(|(number, record)| {
                let ticket = partition.append(batch(std::slice::from_ref(record))).unwrap();
                (number % 2 == 0).then_some(ticket)
            })
            .collect();
        hold.wait_until_held();
        std::thread::scope(|scope| {
            scope.spawn(move || drop((partition, broker)));
            hold.release();
        });
        for (number, ticket) in (0..).zip(tickets) {
            assert_eq!(ticket.wait().unwrap().start, 1 + 2 * number);
        }
        let broker = sim::open(&sim);
        let rows = read_all(&partition_of(&broker));
        assert_in_order(&rows, 0);
        assert!(contents(&rows)[1..] == records);
    }
}

/// The calls of io_uring, on every architecture: one to set it up, one to enter it, one to register with it.
const IO_URING: RangeInclusive<u32> = 425..=427;

fn statement(code: u32, k: u32, jt: u8, jf: u8) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt, jf, k }
}

/// Lets these system calls fail in this process from now on, as a container's profile does, with that errno.
pub fn refuse_call(calls: RangeInclusive<u32>, errno: u32) {
    // The number of the call is the first word.
    filter_calls(&mut [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, *calls.start(), 0, 2),
        statement(libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K, *calls.end(), 1, 0),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | errno, 0, 0),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0),
    ]);
}

/// Lets the kernel know of no way to ask a ring for its operations, as before Linux 5.6.
fn refuse_probes() {
    const EINVAL: u32 = 22;
    const REGISTER_PROBE: u32 = 8;
    // What is to be registered is the second argument; its lower half is where this machine keeps it.
    let second = 24 + if cfg!(target_endian = "big") { 4 } else { 0 };
    filter_calls(&mut [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, *IO_URING.end(), 0, 3),
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, second, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, REGISTER_PROBE, 0, 1),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | EINVAL, 0, 0),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0),
    ]);
}

#[allow(unsafe_code, reason = "a filter of system calls is installed by a call of the C library")]
fn filter_calls(filter: &mut [libc::sock_filter]) {
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program and its filter live until the call returns, which copies them.
    let denied = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
    };
    assert!(denied, "{}", std::io::Error::last_os_error());
}

pub fn no_uring_role() {
    refuse_call(IO_URING, child::argument("errno").as_u64().unwrap() as u32);
    let data = std::path::PathBuf::from(child::text("data"));
    let wanted = data.join("wanted");
    match Broker::open(&wanted, config(Backend::Uring, small())) {
        Err(error @ Error::IoUringUnavailable { .. }) => {
            let Error::IoUringUnavailable { source } = &error else { unreachable!() };
            assert_eq!(source.raw_os_error().map(i64::from), child::argument("errno").as_i64());
            assert!(error.to_string().contains("Backend::Auto"), "{error}");
        }
        other => panic!("{:?}", other.map(|broker| broker.backend())),
    }
    assert!(!wanted.exists(), "something was made");
    let (broker, partition) = create(&data.join("auto"), Backend::Auto, &small());
    assert_eq!((broker.backend(), append(&partition, b"k", b"v")), ("posix", 0));
    assert_eq!(read_all(&partition).len(), 1);
    drop(partition);
    broker.close().unwrap();
    say("done");
}

#[test]
fn b121_where_io_uring_is_denied_that_is_said_or_done_without() {
    const EPERM: u32 = 1;
    const ENOSYS: u32 = 38;
    for errno in [EPERM, ENOSYS] {
        let data = scratch();
        let mut child = Child::start("no uring", &json!({ "data": data.path(), "errno": errno }));
        assert_eq!(child.expect_line(), "done");
        assert!(child.finish().success());
    }
}

pub fn no_probe_role() {
    refuse_probes();
    let warnings = Warnings::collect();
    let assert_named = |text: &str| {
        assert!(text.contains("lacks IORING_OP_READ, which Linux 5.6 and later have, IORING_OP_WRITE, which Linux 5.6"), "{text}");
    };
    let data = std::path::PathBuf::from(child::text("data"));
    let wanted = data.join("wanted");
    match Broker::open(&wanted, config(Backend::Uring, small())) {
        Err(error @ Error::IoUringUnavailable { .. }) => assert_named(&error.to_string()),
        other => panic!("{:?}", other.map(|broker| broker.backend())),
    }
    assert!(!wanted.exists(), "something was made");
    assert_eq!(warnings.all(), Vec::<String>::new());
    let (broker, partition) = create(&data.join("auto"), Backend::Auto, &small());
    assert_eq!((broker.backend(), append(&partition, b"k", b"v")), ("posix", 0));
    assert_eq!(read_all(&partition).len(), 1);
    drop(partition);
    broker.close().unwrap();
    let all = warnings.all();
    assert_eq!(all.len(), 1, "{all:?}");
    assert_named(&all[0]);
    say("done");
}

#[test]
fn b133_a_kernel_whose_rings_cannot_do_all_is_told_at_the_start_and_done_without() {
    if let Err(error) = OsDisk::new(Backend::Uring) {
        eprintln!("skipped: {error}");
        return;
    }
    let data = scratch();
    let mut child = Child::start("no probe", &json!({ "data": data.path() }));
    assert_eq!(child.expect_line(), "done");
    assert!(child.finish().success());
}

#[allow(unsafe_code, reason = "a timer's signals are asked for by calls of the C library")]
pub fn signals_role() {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: the handler does nothing; the structures live until the calls return, which copy them.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let handler: extern "C" fn(libc::c_int) = nothing;
        action.sa_sigaction = handler as usize;
        assert_eq!(libc::sigaction(libc::SIGALRM, &raw const action, std::ptr::null_mut()), 0);
        let time = libc::timeval { tv_sec: 0, tv_usec: 1000 };
        let timer = libc::itimerval { it_interval: time, it_value: time };
        assert_eq!(libc::syscall(libc::SYS_setitimer, libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut::<libc::itimerval>()), 0);
    }
    let topic = TopicConfig { segment_bytes: 100_000, ..small() };
    let (broker, partition) = create(std::path::Path::new(&child::text("data")), backend(), &topic);
    std::thread::scope(|scope| {
        for producer in 0..4u32 {
            let partition = &partition;
            scope.spawn(move || {
                for number in 0..500u32 {
                    partition.append_and_wait(batch(&[(producer.to_be_bytes(), number.to_be_bytes())])).unwrap();
                }
            });
        }
    });
    let mut rows: Vec<_> = contents(&read_all(&partition));
    rows.sort();
    rows.dedup();
    assert_eq!(rows.len(), 2000, "a record is there twice, or not at all");
    drop(partition);
    broker.close().unwrap();
    say("done");
}

#[test]
fn b131_signals_that_interrupt_every_wait_fail_no_append_and_repeat_none() {
    each_backend(|backend| {
        let data = scratch();
        let mut child = Child::start("signals", &json!({ "data": data.path(), "backend": backend_name(backend) }));
        assert_eq!(child.expect_line(), "done");
        assert!(child.finish().success());
        assert_eq!(assert_closed(&partition_dir(data.path()), 1).next_offset, 2000);
        let broker = open(data.path(), backend, &small());
        assert_eq!(partition_of(&broker).next_offset(), 2000);
    });
}
