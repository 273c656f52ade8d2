//! Where writers run: within the mask that the process was given, as the kernel tells of each thread. Case B146.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use core_affinity::CoreId;
use sapwood::{Backend, Broker, BrokerConfig, Pinning, TopicConfig, Writers};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::child::{self, Child, argument, say};
use crate::environment::refuse_call;
use crate::support::{TOPIC, append, config, scratch, small};
use crate::warnings::Warnings;

const PARTITIONS: u32 = 4;

/// No machine that tests run on has it, and it is the last one that a mask of the usual size can name.
const FAR: usize = 1023;

/// The name of a thread, and the CPUs that it may use.
fn thread(status: &str) -> (String, Vec<usize>) {
    let field = |name| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim();
    let range = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        first.parse().unwrap()..=last.parse::<usize>().unwrap()
    };
    (field("Name:").to_owned(), field("Cpus_allowed_list:").split(',').flat_map(range).collect())
}

/// The CPUs that the calling thread may use.
fn allowed() -> Vec<usize> {
    thread(&fs::read_to_string("/proc/thread-self/status").unwrap()).1
}

/// What the child saw.
#[derive(Debug, Serialize, Deserialize)]
struct Seen {
    /// The CPUs of the thread that opened the broker, before and after.
    opener: (Vec<usize>, Vec<usize>),
    /// Of each writer, by the number of its partition.
    writers: BTreeMap<u32, Vec<usize>>,
    upkeep: Vec<Vec<usize>>,
    warnings: Vec<String>,
}

pub fn pinning_role() {
    const EPERM: u32 = 1;
    if let Some(only) = argument("only").as_u64() {
        assert!(core_affinity::set_for_current(CoreId { id: only as usize }));
    }
    if argument("refuse").as_bool().unwrap() {
        let call = u32::try_from(libc::SYS_sched_setaffinity).unwrap();
        refuse_call(call..=call, EPERM);
    }
    let pinning = match serde_json::from_value(argument("cores")).unwrap() {
        Some(cores) => Pinning::Cores(cores),
        None => Pinning::Auto,
    };
    let warnings = Warnings::collect();
    let before = allowed();
    // It is asked where the writer of each partition runs, and what its upkeep has of that.
    let config = BrokerConfig { pinning, writers: Writers::PerPartition, ..config(Backend::Posix, small()) };
    let broker = Broker::open(Path::new(&child::text("data")), config).unwrap();
    let topic = broker.create_topic(TOPIC, TopicConfig { partitions: PARTITIONS, ..small() }).unwrap();
    for number in 0..PARTITIONS {
        assert_eq!(append(&topic.partition(number).unwrap(), b"k", b"v"), 0);
    }
    let (mut writers, mut upkeep) = (BTreeMap::new(), Vec::new());
    for task in fs::read_dir("/proc/self/task").unwrap() {
        // One that ended meanwhile was none of those.
        let Ok(status) = fs::read_to_string(task.unwrap().path().join("status")) else { continue };
        let (name, cpus) = thread(&status);
        if let Some(number) = name.strip_prefix(&format!("log {TOPIC}/")) {
            writers.insert(number.parse().unwrap(), cpus);
        } else if name == "log upkeep" {
            upkeep.push(cpus);
        }
    }
    let seen = Seen { opener: (before, allowed()), writers, upkeep, warnings: warnings.all() };
    say(&serde_json::to_string(&seen).unwrap());
    broker.close().unwrap();
}

/// What a child sees that may use the CPU `only`, if any is named, and asks for those `cores`, if any are.
fn see(only: Option<usize>, cores: Option<&[usize]>, refuse: bool) -> Seen {
    let data = scratch();
    let mut child = Child::start("pinning", &json!({ "data": data.path(), "only": only, "cores": cores, "refuse": refuse }));
    let seen: Seen = serde_json::from_str(&child.expect_line()).unwrap();
    assert!(child.finish().success());
    let inherited = only.map_or_else(allowed, |only| vec![only]);
    assert_eq!(seen.opener, (inherited.clone(), inherited), "the mask of the thread that opens the broker is its own");
    assert_eq!(seen.writers.len() as u32, PARTITIONS, "{seen:?}");
    assert!(!seen.upkeep.is_empty(), "{seen:?}");
    // They take after the writers that started them.
    assert!(seen.upkeep.iter().all(|cpus| seen.writers.values().any(|writer| writer == cpus)), "{seen:?}");
    seen
}

/// The writers, in the order of their partitions, run on these CPUs in turn.
#[track_caller]
fn assert_in_turn(seen: &Seen, cpus: impl Iterator<Item = usize> + Clone) {
    for (cpu, (number, mask)) in cpus.cycle().zip(&seen.writers) {
        assert_eq!(*mask, [cpu], "partition {number}: {seen:?}");
    }
}

/// The writers run wherever the thread may that opened the broker.
#[track_caller]
fn assert_not_pinned(seen: &Seen) {
    assert!(seen.writers.values().all(|mask| *mask == seen.opener.0), "{seen:?}");
}

#[test]
fn b146_writers_are_pinned_in_turn_within_the_mask_that_was_inherited() {
    let all = allowed();
    let seen = see(None, None, false);
    assert_in_turn(&seen, all.iter().rev().copied());
    assert!(seen.warnings.is_empty(), "{seen:?}");
    for &only in [all.first(), all.last()].into_iter().flatten() {
        let seen = see(Some(only), None, false);
        assert_in_turn(&seen, [only].into_iter());
        assert!(seen.warnings.is_empty(), "{seen:?}");
    }
    let seen = see(None, Some(&all), false);
    assert_in_turn(&seen, all.iter().copied());
    assert!(seen.warnings.is_empty(), "{seen:?}");
}

#[test]
fn b146_a_cpu_outside_of_the_mask_is_warned_of_and_left_out() {
    let all = allowed();
    assert!(!all.contains(&FAR));
    let assert_one_warning_of = |seen: &Seen, cpu: usize| {
        let [warning] = &seen.warnings[..] else { panic!("{seen:?}") };
        assert!(warning.contains("CPU mask") && warning.contains(&cpu.to_string()), "{warning}");
    };
    for far in [FAR, FAR + 1, usize::MAX] {
        let seen = see(None, Some(&[far]), false);
        assert_not_pinned(&seen);
        assert_one_warning_of(&seen, far);
        let seen = see(None, Some(&[far, all[0]]), false);
        assert_in_turn(&seen, [all[0]].into_iter());
        assert_one_warning_of(&seen, far);
    }
    // One that the machine has, and this process was not given.
    let (Some(&only), Some(&other)) = (all.first(), all.get(1)) else {
        eprintln!("skipped: there is one CPU");
        return;
    };
    let seen = see(Some(only), Some(&[other]), false);
    assert_not_pinned(&seen);
    assert_one_warning_of(&seen, other);
    let seen = see(Some(only), Some(&[other, only]), false);
    assert_in_turn(&seen, [only].into_iter());
    assert_one_warning_of(&seen, other);
}

#[test]
fn b146_where_the_kernel_refuses_writers_run_unpinned_and_each_says_so() {
    let seen = see(None, None, true);
    assert_not_pinned(&seen);
    assert_eq!(seen.warnings.len() as u32, PARTITIONS, "{seen:?}");
    assert!(seen.warnings.iter().all(|warning| warning.contains("could not be pinned")), "{seen:?}");
}
