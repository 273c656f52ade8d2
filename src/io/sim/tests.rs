//! What survives a crash of the process, each kind of power loss, and each fault.
//!
//! Where the seed chooses, a test collects the outcomes of many seeds and compares them with all that may happen: neither
//! an outcome that may not be, nor one that never comes, passes.

use std::collections::BTreeSet;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::thread;

use super::super::{Action, Buffer, Disk, File, Op, Open, RingConfig, Token};
use super::*;

const EIO: i32 = 5;
const ENOSPC: i32 = 28;
const EINVAL: i32 = 22;
/// Enough for every outcome of the few choices in one test to come.
const SEEDS: u64 = 400;

const DIRECT: Open = Open { direct: true, ..Open::WRITE };

fn at(path: &str) -> &Path {
    Path::new(path)
}

/// A disk with the durable file `/f`.
fn with_file(seed: u64, bytes: &[u8]) -> (SimDisk, Arc<dyn File>) {
    let sim = SimDisk::new(seed);
    sim.write_file(at("/f"), bytes);
    let file = sim.open(at("/f"), Open::WRITE).unwrap();
    (sim, file)
}

fn pages(values: &[u8]) -> Vec<u8> {
    values.iter().flat_map(|value| [*value; 4096]).collect()
}

fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().expect("an error of the kernel's")
}

fn names(sim: &SimDisk, dir: &str) -> String {
    let entries = sim.clone().list(at(dir)).unwrap();
    entries.iter().map(|entry| entry.name.to_str().unwrap()).collect::<Vec<_>>().join(" ")
}

/// All outcomes of `run` after a power loss, over many seeds.
fn outcomes<T: Ord>(run: impl Fn(&SimDisk), outcome: impl Fn(&SimDisk) -> T) -> BTreeSet<T> {
    let one = |seed| {
        let sim = SimDisk::new(seed);
        run(&sim);
        sim.power_loss();
        outcome(&sim)
    };
    (0..SEEDS).map(one).collect()
}

/// The first byte of each page of `/f`.
fn shape(sim: &SimDisk) -> Vec<u8> {
    sim.read_file(at("/f")).chunks(4096).map(|page| page[0]).collect()
}

fn set<T: Ord, const N: usize>(all: [T; N]) -> BTreeSet<T> {
    BTreeSet::from(all)
}

// ---- lives ----

#[test]
fn a_process_crash_keeps_all_that_was_seen() {
    let (sim, file) = with_file(1, b"old");
    file.write_at(b"NEW and more", 0, false).unwrap();
    file.set_len(7).unwrap();
    sim.create_dir(at("/d")).unwrap();
    sim.open(at("/d/x"), Open::NEW).unwrap().write_at(b"x", 0, false).unwrap();
    sim.rename(at("/d/x"), at("/y")).unwrap();
    sim.crash_process();
    assert_eq!(sim.read_file(at("/f")), b"NEW and");
    assert_eq!(sim.read_file(at("/y")), b"x");
    assert_eq!((names(&sim, "/"), names(&sim, "/d")), ("d f y".into(), String::new()));
    sim.power_loss_keeping_nothing();
    assert_eq!(sim.read_file(at("/f")), b"old", "a process crash makes nothing durable");
}

#[test]
fn a_crash_ends_every_handle() {
    let (sim, file) = with_file(1, b"old");
    let other = sim.clone();
    let mut ring =
        sim.ring(&RingConfig { depth: 1, files: 1, register_files: true, buffers: 1, buffer_bytes: 4096, one_thread: true }).unwrap();
    let slot = ring.attach(Arc::clone(&file)).unwrap();
    let lock = sim.lock(at("/lock")).unwrap();
    assert_eq!(sim.lock(at("/lock")).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    sim.crash_process();
    let mut byte = [0];
    assert!(file.len().is_err() && file.read_at(&mut byte, 0).is_err() && file.write_at(&byte, 0, false).is_err());
    assert!(file.set_len(0).is_err() && file.allocate(0..1).is_err() && file.sync().is_err());
    let op = Op { action: Action::Write { durable: false }, slot, position: 0, buffer: Buffer::new(1).unwrap(), range: 0..1 };
    ring.submit(Token(1), op).unwrap();
    assert!(ring.reap().unwrap().unwrap().result.is_err());
    assert!(other.list(at("/")).is_err() && other.create_dir(at("/d")).is_err() && other.remove_file(at("/f")).is_err());
    assert_eq!(sim.read_file(at("/f")), b"old");
    // The handle that crashed and those cloned since are of the new life, also those cloned from an old one.
    let lock_again = sim.lock(at("/lock")).unwrap();
    drop(lock);
    assert_eq!(other.clone().lock(at("/lock")).unwrap_err().kind(), io::ErrorKind::WouldBlock, "the dead lock released the new one");
    drop(lock_again);
    other.clone().lock(at("/lock")).unwrap();
}

#[test]
fn the_same_seed_decides_the_same() {
    let run = |seed: u64| {
        let (sim, file) = with_file(seed, &pages(&[1; 64]));
        file.write_at(&pages(&[2; 64]), 0, false).unwrap();
        sim.power_loss();
        shape(&sim)
    };
    assert!((0..20).all(|seed| run(seed) == run(seed)));
    assert!((0..20).map(run).collect::<BTreeSet<_>>().len() > 5);
}

// ---- bytes and lengths ----

#[test]
fn the_strictest_power_loss_keeps_what_is_durable_only() {
    let (sim, file) = with_file(1, &pages(&[1, 1, 1]));
    file.write_at(&pages(&[2]), 0, false).unwrap();
    file.write_at(b"durable", 4096 + 10, true).unwrap();
    file.write_at(b"gone", 4096 + 20, false).unwrap();
    file.set_len(5 * 4096).unwrap();
    file.write_at(&pages(&[3]), 4 * 4096, false).unwrap();
    let mut expected = pages(&[1, 1, 1]);
    expected[4106..4113].copy_from_slice(b"durable");
    assert_eq!(sim.durable_file(at("/f")), Some(expected.clone()));
    sim.power_loss_keeping_nothing();
    assert_eq!(sim.read_file(at("/f")), expected);
}

#[test]
fn a_durable_write_takes_the_length_with_it_and_nothing_else() {
    let (sim, file) = with_file(1, b"");
    file.allocate(0..4 * 4096).unwrap();
    file.write_at(b"dirty", 0, false).unwrap();
    file.write_at(b"durable", 2 * 4096, true).unwrap();
    file.write_at(b"longer", 9 * 4096, false).unwrap();
    sim.power_loss_keeping_nothing();
    let bytes = sim.read_file(at("/f"));
    assert!((2 * 4096 + 7..=4 * 4096).contains(&bytes.len()));
    assert_eq!(&bytes[2 * 4096..2 * 4096 + 7], b"durable");
    assert!(bytes[..2 * 4096].iter().all(|byte| *byte == 0));
}

#[test]
fn sync_makes_bytes_and_length_durable() {
    let (sim, file) = with_file(1, &pages(&[1, 1]));
    file.write_at(&pages(&[2]), 4096, false).unwrap();
    file.set_len(5000).unwrap();
    file.allocate(0..6000).unwrap();
    file.sync().unwrap();
    sim.power_loss_keeping_nothing();
    let bytes = sim.read_file(at("/f"));
    assert_eq!((bytes.len(), bytes[0], bytes[4999], bytes[5000]), (6000, 1, 2, 0));
    assert_eq!(sim.used(), 8192);
}

#[test]
fn a_power_loss_keeps_any_of_the_pages_written() {
    let run = |sim: &SimDisk| {
        sim.write_file(at("/f"), &pages(&[1, 1, 1]));
        let file = sim.open(at("/f"), Open::WRITE).unwrap();
        file.write_at(&pages(&[2, 2]), 4096, false).unwrap();
    };
    assert_eq!(outcomes(run, shape), set([vec![1, 1, 1], vec![1, 2, 1], vec![1, 1, 2], vec![1, 2, 2]]));
}

#[test]
fn a_power_loss_keeps_one_of_the_lengths_since_the_sync() {
    let run = |sim: &SimDisk| {
        sim.write_file(at("/f"), &pages(&[1]));
        let file = sim.open(at("/f"), Open::WRITE).unwrap();
        file.write_at(&pages(&[2]), 4096, false).unwrap();
        file.write_at(&pages(&[3]), 2 * 4096, false).unwrap();
    };
    let all = [vec![1], vec![1, 2], vec![1, 0], vec![1, 2, 3], vec![1, 0, 3], vec![1, 2, 0], vec![1, 0, 0]];
    assert_eq!(outcomes(run, shape), set(all));
}

#[test]
fn a_truncation_survives_or_not_and_old_bytes_never_come_back_behind_it() {
    let cut = |sim: &SimDisk| {
        sim.write_file(at("/f"), &pages(&[1, 1]));
        sim.open(at("/f"), Open::WRITE).unwrap().set_len(4096).unwrap();
    };
    assert_eq!(outcomes(cut, shape), set([vec![1, 1], vec![1]]));
    let written_and_cut = |sim: &SimDisk| {
        sim.write_file(at("/f"), &pages(&[1, 1]));
        let file = sim.open(at("/f"), Open::WRITE).unwrap();
        file.write_at(&pages(&[2]), 4096, false).unwrap();
        file.set_len(4096).unwrap();
    };
    assert_eq!(outcomes(written_and_cut, shape), set([vec![1, 1], vec![1]]), "no zeros where the old length survives");
    let cut_and_extended = |sim: &SimDisk| {
        cut(sim);
        let file = sim.open(at("/f"), Open::WRITE).unwrap();
        file.set_len(3 * 4096).unwrap();
        file.write_at(&pages(&[2]), 4096, false).unwrap();
    };
    // The device knows none, one or both changes of length. Only in the last case has it the new page's space.
    let all = [vec![1, 1], vec![1], vec![1, 0, 0], vec![1, 2, 0]];
    assert_eq!(outcomes(cut_and_extended, shape), set(all));
}

#[test]
fn emptying_on_opening_is_a_truncation() {
    let run = |sim: &SimDisk| {
        sim.write_file(at("/f"), &pages(&[1, 1]));
        sim.open(at("/f"), Open::EMPTY).unwrap();
        assert_eq!(sim.read_file(at("/f")), b"");
    };
    assert_eq!(outcomes(run, shape), set([vec![1, 1], vec![]]));
}

#[test]
fn pages_tear_only_where_asked_and_in_sectors() {
    let torn = |tear: bool| {
        let run = |sim: &SimDisk| {
            sim.tear_pages(tear);
            sim.write_file(at("/f"), &pages(&[1]));
            sim.open(at("/f"), Open::WRITE).unwrap().write_at(&pages(&[2]), 0, false).unwrap();
        };
        let whole_sectors = |sim: &SimDisk| {
            let bytes = sim.read_file(at("/f"));
            assert!(bytes.chunks(512).all(|sector| sector.iter().all(|byte| *byte == sector[0])));
            bytes.iter().any(|byte| *byte != bytes[0])
        };
        outcomes(run, whole_sectors)
    };
    assert_eq!(torn(false), set([false]));
    assert_eq!(torn(true), set([false, true]));
}

#[test]
fn a_failed_sync_is_not_repaired_by_the_next() {
    let (sim, file) = with_file(1, &pages(&[1, 1]));
    file.write_at(&pages(&[2, 2]), 0, false).unwrap();
    sim.fail(Fault::next(OpKind::Sync, Effect::Error(EIO)));
    assert_eq!(errno(file.sync()), EIO);
    file.write_at(&pages(&[3]), 4096, false).unwrap();
    file.sync().unwrap();
    assert_eq!(shape(&sim), [2, 3], "reads see the cache");
    let fork = sim.fork(9);
    fork.power_loss_keeping_nothing();
    assert_eq!(shape(&fork), [1, 3], "only what was written anew");
    let kept: BTreeSet<_> = (0..SEEDS)
        .map(|seed| {
            let fork = sim.fork(seed);
            fork.power_loss();
            shape(&fork)
        })
        .collect();
    assert_eq!(kept, set([vec![1, 3], vec![2, 3]]));
}

#[test]
fn a_ring_passes_durability_on() {
    let (sim, file) = with_file(1, b"");
    let mut ring =
        sim.ring(&RingConfig { depth: 2, files: 1, register_files: true, buffers: 0, buffer_bytes: 4096, one_thread: true }).unwrap();
    let slot = ring.attach(file).unwrap();
    for (durable, position) in [(false, 0), (true, 2)] {
        let mut buffer = Buffer::new(2).unwrap();
        buffer[..2].copy_from_slice(b"ab");
        ring.submit(Token(position), Op { action: Action::Write { durable }, slot, position, buffer, range: 0..2 }).unwrap();
        assert_eq!(ring.reap().unwrap().unwrap().result.unwrap(), 2);
    }
    assert_eq!(sim.ops().iter().filter(|op| op.kind == OpKind::Write).map(|op| op.durable).collect::<Vec<_>>(), [false, true]);
    sim.power_loss_keeping_nothing();
    assert_eq!(sim.read_file(at("/f")), b"\0\0ab");
}

// ---- names ----

#[test]
fn a_name_is_durable_after_the_sync_of_its_directory() {
    let run = |sim: &SimDisk| {
        let file = sim.open(at("/new"), Open::NEW).unwrap();
        file.write_at(b"synced", 0, false).unwrap();
        file.sync().unwrap();
    };
    assert_eq!(outcomes(run, |sim| names(sim, "/")), set([String::new(), "new".into()]), "synced or not, the name decides");
    let sim = SimDisk::new(1);
    run(&sim);
    let lost = sim.fork(1);
    lost.power_loss_keeping_nothing();
    assert_eq!((names(&lost, "/"), lost.durable_file(at("/new"))), (String::new(), None));
    sim.sync_dir(at("/")).unwrap();
    sim.power_loss_keeping_nothing();
    assert_eq!(sim.read_file(at("/new")), b"synced");
}

#[test]
fn names_in_a_lost_directory_are_lost() {
    let sim = SimDisk::new(1);
    sim.create_dir(at("/d")).unwrap();
    sim.open(at("/d/x"), Open::NEW).unwrap().sync().unwrap();
    sim.sync_dir(at("/d")).unwrap();
    sim.power_loss_keeping_nothing();
    assert_eq!(names(&sim, "/"), "");
}

#[test]
fn changes_of_one_name_survive_in_order() {
    let run = |sim: &SimDisk| {
        sim.write_file(at("/old"), b"");
        sim.open(at("/tmp"), Open::NEW).unwrap();
        sim.rename(at("/tmp"), at("/new")).unwrap();
        sim.remove_file(at("/old")).unwrap();
    };
    let all = ["", "new", "new old", "old", "old tmp", "tmp"].map(String::from);
    assert_eq!(outcomes(run, |sim| names(sim, "/")), set(all));
    let run = |sim: &SimDisk| {
        sim.open(at("/a"), Open::NEW).unwrap();
        sim.rename(at("/a"), at("/b")).unwrap();
        sim.rename(at("/b"), at("/c")).unwrap();
    };
    assert_eq!(outcomes(run, |sim| names(sim, "/")), set(["", "a", "b", "c"].map(String::from)), "never under two names");
}

#[test]
fn a_rename_across_directories_needs_both_synced() {
    let renamed = |sim: &SimDisk| {
        sim.write_file(at("/a/x"), b"");
        sim.make_dirs(at("/b"));
        sim.rename(at("/a/x"), at("/b/x")).unwrap();
    };
    let both = |sim: &SimDisk| (names(sim, "/a"), names(sim, "/b"));
    let x = || "x".to_string();
    let none = String::new;
    assert_eq!(outcomes(renamed, both), set([(x(), none()), (none(), x())]));
    let new_synced = |sim: &SimDisk| {
        renamed(sim);
        sim.sync_dir(at("/b")).unwrap();
    };
    assert_eq!(outcomes(new_synced, both), set([(x(), x()), (none(), x())]));
    let old_synced = |sim: &SimDisk| {
        renamed(sim);
        sim.sync_dir(at("/a")).unwrap();
    };
    assert_eq!(outcomes(old_synced, both), set([(none(), none()), (none(), x())]));
    let both_synced = |sim: &SimDisk| {
        new_synced(sim);
        sim.sync_dir(at("/a")).unwrap();
    };
    assert_eq!(outcomes(both_synced, both), set([(none(), x())]));
}

#[test]
fn a_removed_file_comes_back_with_its_bytes_or_not() {
    let run = |sim: &SimDisk| {
        sim.write_file(at("/d/f"), b"bytes");
        sim.remove_file(at("/d/f")).unwrap();
        sim.remove_dir(at("/d")).unwrap();
    };
    let there = |sim: &SimDisk| sim.exists(at("/d")).then(|| sim.exists(at("/d/f")).then(|| sim.read_file(at("/d/f"))));
    assert_eq!(outcomes(run, there), set([None, Some(None), Some(Some(b"bytes".to_vec()))]));
    let sim = SimDisk::new(1);
    run(&sim);
    sim.sync_dir(at("/")).unwrap();
    sim.power_loss();
    assert_eq!(names(&sim, "/"), "");
}

#[test]
fn a_removed_file_that_is_open_stays_readable_and_takes_room_until_closed() {
    let (sim, file) = with_file(1, &pages(&[1, 2]));
    sim.remove_file(at("/f")).unwrap();
    sim.sync_dir(at("/")).unwrap();
    sim.open(at("/f"), Open::NEW).unwrap().write_at(b"another", 0, false).unwrap();
    let mut bytes = [0; 8192];
    assert_eq!(file.read_at(&mut bytes, 0).unwrap(), 8192);
    assert_eq!((bytes[0], bytes[8191]), (1, 2));
    assert_eq!(sim.used(), 3 * 4096);
    drop(file);
    assert_eq!(sim.used(), 4096);
    assert_eq!(sim.read_file(at("/f")), b"another");
}

// ---- writes in flight ----

#[test]
fn a_held_write_may_arrive_in_part() {
    let after = |seed: u64, crash: fn(&SimDisk)| {
        let (sim, file) = with_file(seed, &pages(&[1, 1]));
        let hold = sim.hold(OpKind::Write, Some("/f"));
        let writer = thread::spawn(move || file.write_at(&pages(&[2, 2]), 0, true));
        hold.wait_until_held();
        assert_eq!((hold.held(), shape(&sim)), (1, vec![1, 1]));
        crash(&sim);
        assert!(writer.join().unwrap().is_err(), "the writer of the old life is told nothing else");
        assert_eq!(hold.held(), 0);
        sim.read_file(at("/f"))
    };
    let power: BTreeSet<_> = (0..80).map(|seed| after(seed, SimDisk::power_loss)).collect();
    assert_eq!(power, set([pages(&[1, 1]), pages(&[2, 1]), pages(&[1, 2]), pages(&[2, 2])]));
    let strict: BTreeSet<_> = (0..20).map(|seed| after(seed, SimDisk::power_loss_keeping_nothing)).collect();
    assert_eq!(strict, set([pages(&[1, 1])]));
    let process: BTreeSet<_> = (0..80).map(|seed| after(seed, SimDisk::crash_process)).collect();
    let arrived: BTreeSet<usize> = process.iter().map(|bytes| bytes.iter().take_while(|byte| **byte == 2).count()).collect();
    assert!(process.iter().all(|bytes| bytes.iter().rev().take_while(|byte| **byte == 1).count() % 512 == 0));
    assert!(arrived.contains(&0) && arrived.contains(&8192) && arrived.len() > 4, "{arrived:?}");
}

#[test]
fn a_hold_lets_go_and_holds_its_own_only() {
    let (sim, file) = with_file(1, b"");
    sim.write_file(at("/g"), b"");
    let hold = sim.hold(OpKind::Write, Some("/f"));
    sim.open(at("/g"), Open::WRITE).unwrap().write_at(b"g", 0, false).unwrap();
    file.sync().unwrap();
    let writers: Vec<_> = (0..3_u8)
        .map(|value| {
            let file = Arc::clone(&file);
            thread::spawn(move || file.write_at(&[value], u64::from(value), true))
        })
        .collect();
    hold.wait_until_held();
    assert_eq!(sim.read_file(at("/f")), b"");
    hold.release();
    assert!(writers.into_iter().all(|writer| writer.join().unwrap().unwrap() == 1));
    assert_eq!(sim.durable_file(at("/f")), Some(vec![0, 1, 2]));
    file.write_at(&[9, 9, 9], 0, true).unwrap();
    for seed in 0..20 {
        let fork = sim.fork(seed);
        fork.power_loss();
        assert_eq!(fork.read_file(at("/f")), [9, 9, 9], "nothing stays in flight");
    }
}

#[test]
fn a_fork_has_the_write_in_flight_as_well() {
    let (sim, file) = with_file(1, &pages(&[1]));
    let hold = sim.hold(OpKind::Write, None);
    let writer = thread::spawn(move || file.write_at(&pages(&[2]), 0, true));
    hold.wait_until_held();
    let outcome = |seed| {
        let fork = sim.fork(seed);
        fork.power_loss();
        shape(&fork)
    };
    assert_eq!((0..SEEDS).map(outcome).collect::<BTreeSet<_>>(), set([vec![1], vec![2]]));
    drop(hold);
    writer.join().unwrap().unwrap();
    assert_eq!(shape(&sim), [2]);
}

// ---- faults ----

#[test]
fn an_error_does_nothing_once() {
    let (sim, file) = with_file(1, b"old");
    let all = [OpKind::Write, OpKind::Read, OpKind::SetLen, OpKind::Allocate, OpKind::Sync, OpKind::Len];
    let disk_wide = [OpKind::Open, OpKind::Create, OpKind::CreateDir, OpKind::List, OpKind::Rename, OpKind::RemoveFile];
    let rest = [OpKind::RemoveDir, OpKind::SyncDir, OpKind::Lock, OpKind::Ring];
    sim.make_dirs(at("/empty"));
    for (count, kind) in (0..).zip(all.into_iter().chain(disk_wide).chain(rest)) {
        sim.fail(Fault::next(kind, Effect::Error(1000 + count)));
    }
    let mut byte = [0];
    let file_errors = [
        errno(file.write_at(b"new", 0, true)),
        errno(file.read_at(&mut byte, 0)),
        errno(file.set_len(1)),
        errno(file.allocate(0..9000)),
        errno(file.sync()),
        errno(file.len()),
    ];
    let disk_errors = [
        errno(sim.open(at("/f"), Open::READ)),
        errno(sim.open(at("/g"), Open::NEW)),
        errno(sim.create_dir(at("/d"))),
        errno(sim.list(at("/"))),
        errno(sim.rename(at("/f"), at("/h"))),
        errno(sim.remove_file(at("/f"))),
        errno(sim.remove_dir(at("/empty"))),
        errno(sim.sync_dir(at("/"))),
        errno(sim.lock(at("/lock"))),
        errno(sim.ring(&RingConfig { depth: 1, files: 1, register_files: true, buffers: 0, buffer_bytes: 4096, one_thread: true })),
    ];
    assert_eq!(file_errors.into_iter().chain(disk_errors).collect::<Vec<_>>(), (1000..1016).collect::<Vec<_>>());
    assert_eq!((names(&sim, "/"), sim.read_file(at("/f"))), ("empty f".into(), b"old".to_vec()));
    file.write_at(b"new", 0, true).unwrap();
    file.sync().unwrap();
    sim.rename(at("/f"), at("/h")).unwrap();
}

#[test]
fn a_fault_waits_for_the_nth_of_its_path() {
    let (sim, file) = with_file(1, b"");
    sim.write_file(at("/other"), b"");
    let other = sim.open(at("/other"), Open::WRITE).unwrap();
    sim.fail(Fault::next(OpKind::Write, Effect::Error(EIO)).path("/f").nth(2));
    sim.fail(Fault::next(OpKind::Rename, Effect::Error(ENOSPC)).path("/target"));
    other.write_at(b"x", 0, false).unwrap();
    file.write_at(b"1", 0, false).unwrap();
    other.write_at(b"x", 0, false).unwrap();
    assert_eq!(errno(file.write_at(b"2", 1, false)), EIO);
    file.write_at(b"3", 2, false).unwrap();
    assert_eq!(sim.read_file(at("/f")), b"1\x003");
    assert_eq!(errno(sim.rename(at("/f"), at("/target"))), ENOSPC, "a rename's new name counts too");
    sim.fail(Fault::next(OpKind::Write, Effect::Error(EIO)));
    sim.clear_faults();
    file.write_at(b"4", 3, false).unwrap();
}

#[test]
fn short_transfers_move_what_they_say() {
    let (sim, file) = with_file(1, b"0123456789");
    sim.fail(Fault::next(OpKind::Write, Effect::Short(3)));
    assert_eq!(file.write_at(b"abcdef", 0, true).unwrap(), 3);
    assert_eq!(sim.durable_file(at("/f")).unwrap(), b"abc3456789");
    sim.fail(Fault::next(OpKind::Read, Effect::Short(4)));
    let mut bytes = [b'.'; 8];
    assert_eq!(file.read_at(&mut bytes, 1).unwrap(), 4);
    assert_eq!(&bytes, b"bc34....");
    sim.fail_by_chance(RandomFault { on: OpKind::Write, path_suffix: None, per_million: 1_000_000, effect: Effect::ShortBySeed });
    let counts: BTreeSet<_> = (0..SEEDS).map(|_| file.write_at(b"abcd", 0, false).unwrap()).collect();
    assert_eq!(counts, set([1, 2, 3]));
    assert_eq!(file.write_at(b"a", 0, false).unwrap(), 1, "never nothing at all");
    let direct = sim.open(at("/f"), DIRECT).unwrap();
    let buffer = Buffer::new(4096).unwrap();
    let counts: BTreeSet<_> = (0..SEEDS).map(|_| direct.write_at(&buffer, 0, false).unwrap()).collect();
    assert_eq!(counts, (1..8).map(|sectors| sectors * 512).collect());
}

#[test]
fn an_error_after_a_part_leaves_that_part_seen_and_not_durable() {
    let (sim, file) = with_file(1, b"......");
    sim.fail(Fault::next(OpKind::Write, Effect::ErrorAfterPartial { bytes: 2, errno: EIO }));
    assert_eq!(errno(file.write_at(b"abcdef", 0, true)), EIO);
    assert_eq!(sim.read_file(at("/f")), b"ab....");
    sim.power_loss_keeping_nothing();
    assert_eq!(sim.read_file(at("/f")), b"......");
}

#[test]
fn after_a_crash_everything_fails_until_the_next_life() {
    let crash = |seed| {
        let (sim, file) = with_file(seed, &pages(&[1]));
        sim.fail(Fault::next(OpKind::Write, Effect::Crash));
        assert!(!sim.crashed());
        assert!(file.write_at(&pages(&[2]), 0, true).is_err());
        assert!(sim.crashed());
        assert!(file.len().is_err() && file.sync().is_err() && sim.list(at("/")).is_err() && sim.clone().create_dir(at("/d")).is_err());
        sim
    };
    let after = |seed, next_life: fn(&SimDisk)| {
        let sim = crash(seed);
        next_life(&sim);
        assert!(!sim.crashed() && sim.list(at("/")).is_ok());
        sim.read_file(at("/f"))
    };
    let all = |next_life| (0..80).map(|seed| after(seed, next_life)).collect::<BTreeSet<_>>();
    assert_eq!(all(SimDisk::power_loss), set([pages(&[1]), pages(&[2])]), "it was on its way");
    assert_eq!(all(SimDisk::power_loss_keeping_nothing), set([pages(&[1])]));
    assert!(all(SimDisk::crash_process).is_superset(&set([pages(&[1]), pages(&[2])])));
}

#[test]
fn a_scripted_panic_unwinds_and_the_disk_goes_on() {
    let (sim, file) = with_file(1, b"old");
    sim.fail(Fault::next(OpKind::Write, Effect::Panic));
    let panic = catch_unwind(AssertUnwindSafe(|| file.write_at(b"new", 0, false))).unwrap_err();
    assert!(panic.downcast_ref::<String>().unwrap().contains("Write of /f"));
    assert_eq!(sim.read_file(at("/f")), b"old");
    file.write_at(b"new", 0, false).unwrap();
}

#[test]
fn crash_points_are_the_state_changing_operations() {
    // What each run of the same steps leaves, if it crashes instead of its kth step.
    let steps = |sim: &SimDisk| -> io::Result<()> {
        let file = sim.open(at("/a"), Open::NEW)?;
        file.len()?;
        file.write_at(b"x", 0, false)?;
        file.read_at(&mut [0], 0)?;
        file.sync()?;
        sim.list(at("/"))?;
        sim.rename(at("/a"), at("/b"))?;
        sim.sync_dir(at("/"))?;
        file.allocate(0..4096)?;
        file.set_len(2)?;
        sim.create_dir(at("/d"))?;
        sim.remove_dir(at("/d"))?;
        sim.remove_file(at("/b"))
    };
    let sim = SimDisk::new(1);
    steps(&sim).unwrap();
    assert_eq!(sim.state_changes(), 10);
    let left: Vec<String> = (1..=11)
        .map(|k| {
            let sim = SimDisk::new(1);
            sim.crash_at_op(k);
            assert_eq!(steps(&sim).is_err(), k <= 10, "crash point {k}");
            assert_eq!((sim.crashed(), sim.state_changes()), (k <= 10, k.min(10)));
            sim.power_loss_keeping_nothing();
            names(&sim, "/")
        })
        .collect();
    assert_eq!(left, ["", "", "", "", "", "b", "b", "b", "b", "b", "b"]);
    // Taken back by a crash that came earlier.
    sim.crash_at_op(1);
    sim.crash_process();
    sim.create_dir(at("/d")).unwrap();
}

#[test]
fn chance_follows_the_seed() {
    let run = |seed: u64| {
        let (sim, file) = with_file(seed, b"");
        sim.fail_by_chance(RandomFault { on: OpKind::Write, path_suffix: None, per_million: 250_000, effect: Effect::Error(EIO) });
        sim.fail_by_chance(RandomFault { on: OpKind::Sync, path_suffix: None, per_million: 0, effect: Effect::Error(EIO) });
        let failed: Vec<bool> = (0..400).map(|_| file.write_at(b"x", 0, false).is_err()).collect();
        assert!((0..400).all(|_| file.sync().is_ok()));
        failed
    };
    assert_eq!(run(3), run(3));
    assert_ne!(run(3), run(4));
    assert!((50..150).contains(&run(3).iter().filter(|failed| **failed).count()));
}

// ---- room, direct I/O, refusals ----

#[test]
fn a_full_disk_refuses_and_takes_again_what_was_freed() {
    let (sim, file) = with_file(1, &pages(&[1]));
    sim.set_capacity(Some(4 * 4096));
    assert_eq!(file.allocate(0..5 * 4096).unwrap_err().kind(), io::ErrorKind::StorageFull);
    assert_eq!((sim.used(), file.len().unwrap()), (4096, 4096), "nothing of a refused allocation");
    file.allocate(0..3 * 4096).unwrap();
    assert_eq!(sim.used(), 3 * 4096);
    file.write_at(&pages(&[2, 2, 2]), 0, false).unwrap();
    assert_eq!(file.write_at(&pages(&[3, 3]), 3 * 4096 - 10, false).unwrap(), 4096 + 10, "what fits");
    assert_eq!(errno(file.write_at(b"x", 4 * 4096, true)), ENOSPC);
    assert_eq!(file.len().unwrap(), 4 * 4096);
    file.write_at(b"in place", 0, true).unwrap();
    file.set_len(4096).unwrap();
    let other = sim.open(at("/g"), Open::NEW).unwrap();
    other.write_at(&pages(&[4, 4, 4]), 0, false).unwrap();
    assert_eq!(errno(file.write_at(b"x", 4096, false)), ENOSPC);
    drop(other);
    sim.remove_file(at("/g")).unwrap();
    file.write_at(b"x", 4096, false).unwrap();
    // A hole takes no room until it is written.
    file.set_len(100 * 4096).unwrap();
    assert_eq!(sim.used(), 2 * 4096);
    sim.set_capacity(None);
    file.write_at(&pages(&[5; 50]), 0, false).unwrap();
}

#[test]
fn direct_files_take_whole_aligned_blocks_only() {
    let (sim, _) = with_file(1, &pages(&[1, 2]));
    let file = sim.open(at("/f"), DIRECT).unwrap();
    let mut buffer = Buffer::new(3 * 4096).unwrap();
    for (range, position) in [(0..4096, 512), (0..4095, 0), (0..512, 0), (512..4608, 0), (1..4097, 4096)] {
        assert_eq!(errno(file.read_at(&mut buffer[range.clone()], position)), EINVAL, "{range:?} at {position}");
        assert_eq!(errno(file.write_at(&buffer[range.clone()], position, true)), EINVAL, "{range:?} at {position}");
    }
    assert_eq!(shape(&sim), [1, 2]);
    assert_eq!(file.read_at(&mut buffer[4096..8192], 4096).unwrap(), 4096);
    assert_eq!(buffer[4096], 2);
    assert_eq!(file.write_at(&buffer[4096..8192], 0, true).unwrap(), 4096);
    assert_eq!(shape(&sim), [2, 2]);
}

#[test]
fn refusals() {
    let (sim, file) = with_file(1, b"");
    sim.refuse_direct(true);
    assert_eq!(errno(sim.open(at("/f"), DIRECT)), EINVAL);
    assert_eq!(errno(sim.open(at("/g"), Open { direct: true, ..Open::NEW })), EINVAL);
    assert!(sim.exists(at("/g")), "Linux makes the file first");
    sim.refuse_direct(false);
    sim.open(at("/f"), DIRECT).unwrap();
    sim.refuse_allocate(true);
    assert_eq!(file.allocate(0..1).unwrap_err().kind(), io::ErrorKind::Unsupported);
    sim.refuse_allocate(false);
    file.allocate(0..1).unwrap();
    let read_only = sim.open(at("/f"), Open::READ).unwrap();
    assert!(read_only.write_at(b"x", 0, false).is_err() && read_only.set_len(0).is_err() && read_only.allocate(0..9).is_err());
    assert!(file.write_at(b"x", u64::MAX, false).is_err() && file.set_len(u64::MAX).is_err());
    assert!(file.allocate(u64::MAX - 1..u64::MAX).is_err());
    assert_eq!(sim.read_file(at("/f")), [0]);
}

// ---- record, content ----

#[test]
fn operations_are_recorded_in_order() {
    let (sim, file) = with_file(1, b"");
    sim.clear_ops();
    file.write_at(b"abc", 5, true).unwrap();
    assert!(sim.create_dir(at("/f")).is_err());
    file.set_len(9).unwrap();
    sim.rename(at("/f"), at("/g")).unwrap();
    let ops = sim.ops();
    let record = |seq, kind, path: &str| {
        let base = ops[0].seq;
        OpRecord { seq: base + seq, kind, path: path.into(), to: None, position: 0, len: 0, durable: false, ok: true }
    };
    let expected = [
        OpRecord { position: 5, len: 3, durable: true, ..record(0, OpKind::Write, "/f") },
        OpRecord { ok: false, ..record(1, OpKind::CreateDir, "/f") },
        OpRecord { position: 9, ..record(2, OpKind::SetLen, "/f") },
        OpRecord { to: Some("/g".into()), ..record(3, OpKind::Rename, "/f") },
    ];
    assert_eq!(ops, expected);
    sim.clear_ops();
    assert_eq!(sim.ops(), []);
}

#[test]
fn trees_go_out_and_come_in() {
    let (sim, file) = with_file(1, b"seen");
    file.write_at(b"later", 10_000, false).unwrap();
    sim.write_file(at("/d/e/g"), &pages(&[7]));
    sim.make_dirs(at("/d/empty"));
    let real = crate::io::conformance::scratch();
    let out = real.path().join("out");
    sim.export(at("/"), &out).unwrap();
    assert_eq!(std::fs::read(out.join("f")).unwrap(), sim.read_file(at("/f")));
    assert!(out.join("d/empty").is_dir());
    let other = SimDisk::new(2);
    other.import(&out, at("/in")).unwrap();
    other.power_loss_keeping_nothing();
    assert_eq!((names(&other, "/in"), names(&other, "/in/d")), ("d f".into(), "e empty".into()));
    assert_eq!(other.read_file(at("/in/f")), sim.read_file(at("/f")));
    assert_eq!(other.read_file(at("/in/d/e/g")), pages(&[7]));
}

#[test]
fn content_put_past_the_seam_is_durable() {
    let (sim, file) = with_file(1, b"0123456789");
    file.write_at(b"longer than it was", 0, false).unwrap();
    sim.overwrite(at("/f"), 2, b"XX");
    assert_eq!(sim.durable_file(at("/f")).unwrap(), b"01XX456789");
    sim.write_file(at("/f"), b"short");
    sim.remove_file(at("/f")).unwrap();
    sim.write_file(at("/f"), b"another");
    sim.power_loss();
    assert_eq!(sim.read_file(at("/f")), b"another");
}

#[test]
fn a_fork_is_a_disk_of_its_own() {
    let (sim, file) = with_file(1, b"old");
    file.write_at(b"new", 0, false).unwrap();
    let _lock = sim.lock(at("/lock")).unwrap();
    sim.fail(Fault::next(OpKind::Lock, Effect::Error(EIO)));
    let fork = sim.fork(2);
    fork.lock(at("/lock")).unwrap();
    fork.open(at("/f"), Open::WRITE).unwrap().write_at(b"!", 0, true).unwrap();
    assert_eq!((sim.read_file(at("/f")), fork.read_file(at("/f"))), (b"new".to_vec(), b"!ew".to_vec()));
    fork.power_loss_keeping_nothing();
    assert_eq!((fork.read_file(at("/f")), sim.read_file(at("/f"))), (b"!ld".to_vec(), b"new".to_vec()));
    assert!(file.len().is_ok(), "the original lives on");
    sim.remove_file(at("/f")).unwrap();
    assert_eq!((sim.used(), sim.fork(3).used()), (4096, 0), "in a fork nothing is open");
}
