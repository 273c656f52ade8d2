//! Each guard of the engine, taken out, must be missed: by a random run, by a crash in one of the workloads, or by a probe.
//!
//! The table says where each absence was first noticed; as the engine changes that moves, so the search begins there and goes on.

use std::fmt;
use std::path::Path;

use sapwood::guard::{Guard, without};
use sapwood::io::sim::SimDisk;
use sapwood::{Durability, Error};

use super::model::{Verdict, ensure};
use super::script::{self, Script};
use super::world::World;
use super::{Enumeration, guarded, random_run, run};
use crate::damage;
use crate::sim::{create, dir, open, tiny, try_open, with_partition};
use crate::support::{append, fixture, partition_of};

const DEMO: &str = "demo-36-segment-270";

/// How a guard that is missing is noticed.
#[derive(Clone, Copy)]
enum Way {
    /// By random runs, from this seed on.
    Random(u64),
    /// By crashes in a workload, from this operation on.
    Crash(&'static str, fn(Durability) -> Script, Durability, u64),
    /// By a script with faults, whose last crash is the one that matters, with one of so many variants.
    Script(&'static str, fn(u64) -> Script, u64),
    /// By damage that was done to a partition.
    Probe(&'static str, fn() -> Verdict),
}

/// Random runs that are tried at most.
const MOST_RUNS: u64 = 3000;

const CANARIES: &[(Guard, Way)] = &[
    (Guard::RecordChecksum, Way::Random(19)),
    (Guard::RecordOffset, Way::Probe("stale records", stale_records_stay_gone)),
    (Guard::DurableWrites, Way::Random(0)),
    (Guard::AnswersAfterWrites, Way::Random(1)),
    (Guard::FailedWritesStop, Way::Random(1)),
    (Guard::FailedSyncsStop, Way::Random(224)),
    (Guard::NoCheckpointAfterFailure, Way::Script("failed_seal", script::failed_seal, 40)),
    (Guard::LastBlockKept, Way::Random(0)),
    (Guard::RenamesBeforeAnswers, Way::Crash("prepared_segments", script::prepared_segments, Durability::Durable, 1)),
    (Guard::NamesBeforeAnswers, Way::Random(0)),
    (Guard::SyncsBeforeRolls, Way::Random(0)),
    (Guard::ReadsAreDurable, Way::Random(6)),
    (Guard::CheckpointsAreDurable, Way::Random(4)),
    (Guard::CheckpointsSyncIndexes, Way::Crash("many_entries", script::many_entries, Durability::Durable, 1)),
    (Guard::SealsSyncIndexes, Way::Random(4)),
    (Guard::OpeningSyncsLog, Way::Random(4)),
    (Guard::OpeningSyncsNames, Way::Crash("small_segments", script::small_segments, Durability::Durable, 1)),
    (Guard::OpeningEvicts, Way::Script("failed_sync", |_| script::failed_sync(), 1)),
    (Guard::OpeningCutsTail, Way::Random(51)),
    (Guard::OpeningCopiesAside, Way::Probe("whole records in a torn tail", whole_records_are_copied_aside)),
    (Guard::OpeningMendsIndexes, Way::Random(1)),
    (Guard::OpeningSyncsSealed, Way::Crash("prepared_segments", script::prepared_segments, Durability::Durable, 1)),
    (Guard::OpeningRefusesDamage, Way::Probe("damage before the checkpoint", damage_is_refused)),
    (Guard::TopicNamesSynced, Way::Random(0)),
    (Guard::DeletionsSynced, Way::Crash("small_segments", script::small_segments, Durability::Durable, 1)),
];

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Random(seed) => write!(f, "random run {seed}"),
            Self::Crash(name, _, durability, operation) => write!(f, "{name}, {durability:?}, crash {operation}"),
            Self::Script(name, ..) => write!(f, "{name}"),
            Self::Probe(name, _) => write!(f, "{name}"),
        }
    }
}

impl Way {
    /// Where it is noticed, if it is, and by what.
    fn search(self) -> Option<(String, String)> {
        match self {
            Self::Random(first) => {
                (first..first + MOST_RUNS).find_map(|seed| random_run(seed).err().map(|what| (Self::Random(seed).to_string(), what)))
            }
            Self::Crash(name, script, durability, first) => {
                let enumeration = Enumeration { script: script(durability), seed: 1 };
                let operations = guarded(|| enumeration.operations());
                let operations = match operations {
                    Ok(operations) => operations,
                    Err(what) => return Some((format!("{name}, {durability:?}, before any crash"), what)),
                };
                let found = |operation: u64| enumeration.all_of(operation).err().map(|what| (operation, what));
                let (operation, what) = (first..=operations).chain(1..first).find_map(found)?;
                Some((Self::Crash(name, script, durability, operation).to_string(), what))
            }
            Self::Script(name, script, variants) => (1..=variants).find_map(|variant| {
                let script = script(variant);
                let verdict = guarded(|| run(&mut World::new(variant, &script.machine), &script));
                verdict.err().map(|what| (name.to_owned(), what))
            }),
            Self::Probe(name, probe) => guarded(probe).err().map(|what| (name.to_owned(), what)),
        }
    }
}

/// What the probes find with all guards in place, no test without them may take for the guard's absence.
#[test]
fn with_every_guard_the_probes_find_nothing() {
    for (guard, way) in CANARIES {
        if matches!(way, Way::Probe(..) | Way::Script(..)) {
            let found = way.search();
            assert!(found.is_none(), "{guard:?}: {found:?}");
        }
    }
}

#[test]
fn every_guard_that_is_taken_out_is_missed() {
    let documented = include_str!("../../../docs/testing.md");
    for guard in Guard::ALL {
        let row = format!("| `{guard:?}` |");
        assert!(documented.contains(&row), "docs/testing.md has no row {row}");
    }
    let listed: Vec<Guard> = CANARIES.iter().map(|(guard, _)| *guard).collect();
    assert_eq!(listed, Guard::ALL, "each guard has a canary");
    let missed: Vec<_> = CANARIES.iter().map(|(guard, way)| (guard, without(*guard, || way.search()))).collect();
    for (guard, found) in &missed {
        let (place, what) = found.as_ref().map_or(("-", "-"), |(place, what)| (place.as_str(), what.as_str()));
        eprintln!("{guard:?}: {place}: {}", what.chars().take(160).collect::<String>());
    }
    let unnoticed: Vec<_> = missed.iter().filter(|(_, found)| found.is_none()).map(|(guard, _)| guard).collect();
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

/// What was on the device once is not cut unasked.
fn damage_is_refused() -> Verdict {
    let (sim, broker, partition) = create(1, &tiny(4000));
    for number in 0..10 {
        append(&partition, b"key", &[number; 20]);
    }
    drop(partition);
    broker.close().map_err(|error| error.to_string())?;
    let log = dir().join("00000000000000000000.log");
    sim.overwrite(&log, 60, &[1]);
    // The length tells that it was not closed as it is.
    let mut bytes = sim.read_file(&log);
    bytes.push(0);
    sim.write_file(&log, &bytes);
    match try_open(&SimDisk::fork(&sim, 2), &tiny(4000)) {
        Err(Error::Damaged { .. }) => Ok(()),
        other => Err(format!("opening damage gave {:?}", other.map(|broker| broker.report().clone()))),
    }
}
