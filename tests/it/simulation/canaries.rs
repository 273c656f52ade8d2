//! Each guard of the engine, taken out, must be missed: by a random run, by a crash in one of the workloads, or by a probe.
//!
//! The table says where each absence was first noticed; as the engine changes that moves, so the search begins there and goes on.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use sapwood::guard::{Guard, without};
use sapwood::io::Disk;
use sapwood::io::sim::SimDisk;
use sapwood::{Backend, Broker, Durability, Error, Stepper};

use super::model::{Verdict, ensure};
use super::script::{self, Script};
use super::world::World;
use super::{Enumeration, guarded, random_run, run};
use crate::damage;
use crate::sim::{DATA, create, dir, open, tiny, try_open, with_partition};
use crate::support::{TOPIC, append, config, fixture, partition_of};

const DEMO: &str = "demo-36-segment-270";

/// How a guard that is missing is noticed.
#[derive(Clone, Copy)]
enum Way {
    /// By random runs, from this seed on.
    Random(u64),
    /// By crashes in a workload, from this operation on.
    Crash(&'static str, fn(Durability) -> Script, Durability, u64),
    /// By a script with faults, from this variant on.
    Script(&'static str, fn(u64) -> Script, u64),
    /// By damage that was done to a partition.
    Probe(&'static str, fn() -> Verdict),
}

/// Random runs, and variants of a script, that are tried at most.
const MOST_RUNS: u64 = 3000;
const MOST_VARIANTS: u64 = 60;
/// More than any workload has.
const MOST_OPERATIONS: u64 = 400;

const CANARIES: &[(Guard, Way)] = &[
    (Guard::RecordChecksum, Way::Random(143)),
    (Guard::RecordOffset, Way::Probe("stale records", stale_records_stay_gone)),
    (Guard::IndexesAreHints, Way::Probe("an index that lies", an_index_that_lies_is_not_believed)),
    (Guard::DurableWrites, Way::Random(0)),
    (Guard::AnswersAfterWrites, Way::Random(5)),
    (Guard::FailedWritesStop, Way::Random(5)),
    (Guard::FailedSyncsStop, Way::Random(846)),
    (Guard::NoCheckpointAfterFailure, Way::Script("failed_seal", script::failed_seal, 1)),
    (Guard::LastBlockKept, Way::Random(0)),
    (Guard::RenamesBeforeAnswers, Way::Crash("one_roll", script::one_roll, Durability::Durable, 1)),
    (Guard::NamesBeforeAnswers, Way::Random(1)),
    (Guard::SyncsBeforeRolls, Way::Random(0)),
    (Guard::ReadsAreDurable, Way::Random(39)),
    (Guard::CheckpointsAreDurable, Way::Random(6)),
    (Guard::CheckpointsSyncIndexes, Way::Crash("many_entries", script::many_entries, Durability::Durable, 31)),
    (Guard::SealsSyncIndexes, Way::Random(19)),
    (Guard::OpeningSyncsLog, Way::Random(202)),
    (Guard::OpeningSyncsNames, Way::Crash("small_segments", script::small_segments, Durability::Durable, 14)),
    (Guard::OpeningEvicts, Way::Script("failed_sync", script::failed_sync, 1)),
    (Guard::OpeningCutsTail, Way::Random(161)),
    (Guard::OpeningCopiesAside, Way::Probe("whole records in a torn tail", whole_records_are_copied_aside)),
    (Guard::OpeningMendsIndexes, Way::Random(2)),
    (Guard::OpeningSyncsSealed, Way::Crash("one_roll", script::one_roll, Durability::Durable, 56)),
    (Guard::OpeningRefusesDamage, Way::Probe("damage before the checkpoint", damage_is_refused)),
    (Guard::TopicNamesSynced, Way::Random(0)),
    (Guard::DeletionsSynced, Way::Crash("deleted_topic", script::deleted_topic, Durability::Durable, 92)),
    (Guard::RemovalsInOrder, Way::Crash("shortened", script::shortened, Durability::Durable, 170)),
    (Guard::SuccessorsBeforeRemovals, Way::Crash("emptied", script::emptied, Durability::Durable, 61)),
    (Guard::NotesSynced, Way::Crash("shortened", script::shortened, Durability::Durable, 338)),
    (Guard::NoteNamesSynced, Way::Crash("moved", script::moved, Durability::Durable, 280)),
    (Guard::CutsAnnounced, Way::Crash("shortened", script::shortened, Durability::Durable, 259)),
    (Guard::CutsFromTheEnd, Way::Crash("shortened", script::shortened, Durability::Durable, 262)),
    (Guard::CutsSynced, Way::Crash("shortened", script::shortened, Durability::Durable, 271)),
    (Guard::LinksKept, Way::Probe("a link to a log that is cut", a_link_to_a_log_that_is_cut_stays_whole)),
    (Guard::MovesNoted, Way::Crash("moved", script::moved, Durability::Durable, 1)),
    (Guard::SettingsSynced, Way::Crash("altered_topic", script::altered_topic, Durability::Durable, 23)),
    (Guard::AlterationsSynced, Way::Crash("altered_topic", script::altered_topic, Durability::Durable, 24)),
    (Guard::OtherNamesKept, Way::Probe("a link to a deleted log", a_link_to_a_deleted_log_stays_whole)),
];

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Random(seed) => write!(f, "random run {seed}"),
            Self::Crash(name, _, durability, operation) => write!(f, "{name}, {durability:?}, crash {operation}"),
            Self::Script(name, _, variant) => write!(f, "{name} {variant}"),
            Self::Probe(name, _) => write!(f, "{name}"),
        }
    }
}

impl Way {
    /// Looks exactly there.
    fn look(self) -> Verdict {
        match self {
            Self::Random(seed) => random_run(seed),
            Self::Crash(_, script, durability, operation) => {
                let enumeration = Enumeration { script: script(durability), seed: 1 };
                let operations = guarded(|| enumeration.operations())?;
                if operation <= operations { enumeration.all_of(operation).map(drop) } else { Ok(()) }
            }
            Self::Script(_, script, variant) => {
                let script = script(variant);
                guarded(|| run(&mut World::new(variant, &script.machine), &script))
            }
            Self::Probe(_, probe) => guarded(probe),
        }
    }

    /// The next place to look at; none after so many.
    fn next(self, looked: u64) -> Option<Self> {
        match self {
            Self::Random(seed) => (looked < MOST_RUNS).then_some(Self::Random(seed + 1)),
            Self::Crash(name, script, durability, operation) => {
                (looked < MOST_OPERATIONS).then_some(Self::Crash(name, script, durability, operation % MOST_OPERATIONS + 1))
            }
            Self::Script(name, script, variant) => (looked < MOST_VARIANTS).then_some(Self::Script(name, script, variant + 1)),
            Self::Probe(..) => None,
        }
    }

    /// Where the guard is missed, and what is said of it.
    fn search(self) -> Option<(Self, String)> {
        let mut way = self;
        for looked in 1.. {
            if let Err(what) = way.look() {
                return Some((way, what));
            }
            way = way.next(looked)?;
        }
        None
    }
}

#[test]
fn every_guard_that_is_taken_out_is_missed() {
    let listed: Vec<Guard> = CANARIES.iter().map(|(guard, _)| *guard).collect();
    assert_eq!(listed, Guard::ALL, "each guard has a canary");
    let documented = include_str!("../../../docs/testing.md");
    let mut unnoticed = Vec::new();
    let only = std::env::var("SAPWOOD_GUARD").ok();
    for &(guard, way) in CANARIES.iter().filter(|(guard, _)| only.as_ref().is_none_or(|only| format!("{guard:?}") == *only)) {
        let row = format!("| `{guard:?}` | {way} |");
        assert!(documented.contains(&row), "docs/testing.md has no row {row}");
        match without(guard, || way.search()) {
            None => unnoticed.push(guard),
            Some((place, what)) => {
                eprintln!("{guard:?}: {place}: {}", what.chars().take(160).collect::<String>());
                place.look().unwrap_or_else(|what| panic!("with {guard:?} in its place, too: {place}: {what}"));
            }
        }
    }
    assert!(unnoticed.is_empty(), "nobody misses {unnoticed:?}");
}

/// Bytes of an older record behind the end are not a record.
fn stale_records_stay_gone() -> Verdict {
    let sim = with_partition(1, &fixture(DEMO), |dir| damage::apply(dir, "stale-record-tail"));
    let broker = try_open(&sim, &tiny(270)).map_err(|error| error.to_string())?;
    let next = partition_of(&broker).next_offset();
    ensure!(next == 36, "36 records are there, and the next offset is {next}");
    Ok(())
}

/// What is cut of whole records lies beside the segment.
fn whole_records_are_copied_aside() -> Verdict {
    let sim = with_partition(1, &fixture(DEMO), |dir| damage::apply(dir, "hole-in-the-middle"));
    drop(open(&sim));
    let copies = crate::sim::names(&sim).into_iter().filter(|name| Path::new(name).extension().is_some_and(|end| end == "torn"));
    ensure!(copies.count() == 1, "the records behind the hole are nowhere");
    Ok(())
}

/// A record is found in spite of its index entry.
fn an_index_that_lies_is_not_believed() -> Verdict {
    let index = "00000000000000000006.index";
    let lie = |dir: &Path| {
        let mut bytes = std::fs::read(dir.join(index)).unwrap();
        // The second record's entry leads to the third one.
        let third = <[u8; 8]>::try_from(&bytes[40..48]).unwrap();
        bytes[24..32].copy_from_slice(&third);
        std::fs::write(dir.join(index), bytes).unwrap();
    };
    let sim = with_partition(1, &fixture(DEMO), lie);
    let broker = open(&sim);
    let found = partition_of(&broker).read_one(7).map(|record| record.offset);
    ensure!(matches!(found, Ok(7)), "the record 7 is {found:?}");
    Ok(())
}

/// What another name stands for is not emptied when the topic is deleted.
fn a_link_to_a_deleted_log_stays_whole() -> Verdict {
    let (sim, broker, partition) = create(1, &tiny(4000));
    append(&partition, b"key", &[7; 100]);
    broker.topic(TOPIC).and_then(|topic| topic.close()).map_err(|error| error.to_string())?;
    let (log, link) = (dir().join("00000000000000000000.log"), Path::new(DATA).join("export.log"));
    sim.clone().link(&log, &link).map_err(|error| error.to_string())?;
    let bytes = sim.read_file(&link);
    broker.delete_topic(TOPIC).map_err(|error| error.to_string())?;
    ensure!(!sim.exists(&log) && sim.read_file(&link) == bytes, "{} bytes of {} are left", sim.read_file(&link).len(), bytes.len());
    Ok(())
}

/// What was on the device once is not cut unasked.
fn damage_is_refused() -> Verdict {
    let (sim, broker, partition) = create(1, &tiny(4000));
    for number in 0..10 {
        append(&partition, b"key", &[number; 20]);
    }
    drop(partition);
    broker.close().map_err(|error| error.to_string())?;
    let log = dir().join("00000000000000000000.log");
    let mut bytes = sim.read_file(&log);
    // In the last record; and the length tells that the log is not what it was when it was closed.
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    bytes.push(0);
    sim.write_file(&log, &bytes);
    match try_open(&SimDisk::fork(&sim, 2), &tiny(4000)) {
        Err(Error::Damaged { .. }) => Ok(()),
        other => Err(format!("opening damage gave {:?}", other.map(|broker| broker.report().clone()))),
    }
}

/// What was exported is what it was, whatever becomes of the log.
fn a_link_to_a_log_that_is_cut_stays_whole() -> Verdict {
    let (sim, stepper) = (SimDisk::new(1), Stepper::new(1));
    let broker = Broker::open_stepped(Arc::new(sim.clone()), &stepper, DATA, config(Backend::Auto, tiny(270)));
    let broker = broker.map_err(|error| error.to_string())?;
    broker.create_topic(TOPIC, tiny(270)).map_err(|error| error.to_string())?;
    let partition = partition_of(&broker);
    for number in 0..20 {
        append(&partition, b"key", &[number; 20]);
    }
    let kept = Path::new("/made/kept");
    partition.export(kept).map_err(|error| error.to_string())?;
    let before = sim.files(kept);
    partition.truncate_after(3).map_err(|error| error.to_string())?;
    append(&partition, b"key", b"another");
    ensure!(sim.files(kept) == before, "the export changed with the log");
    Ok(())
}
