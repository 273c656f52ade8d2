//! The engine on a simulated machine, without threads: every crash point of a workload, and random runs, each from its seed.
//!
//! What is checked after every step and every crash stands in `world`; what a log must hold, in `model`. docs/testing.md tells which
//! guards of the engine this was seen to miss when they were taken out.

mod canaries;
mod model;
mod script;
mod world;

use std::panic::{self, AssertUnwindSafe};

use sapwood::Durability;
use sapwood::io::sim::SimDisk;

use crate::support::{Rng, seed};
use model::{Crash, Model, Verdict};
use script::Script;
use world::World;

/// Random runs in each run of the tests, each with a seed that nobody had before. SAPWOOD_RUNS asks for others.
const RUNS: u64 = 200;

/// What is left after each crash: every kind of crash, and as many seeds of those that leave it to chance.
const SURVIVALS: [Crash; 10] = [
    Crash::Process,
    Crash::StrictPower,
    Crash::Power,
    Crash::Power,
    Crash::Power,
    Crash::Power,
    Crash::TornPower,
    Crash::TornPower,
    Crash::TornPower,
    Crash::TornPower,
];

/// A number from the environment.
fn asked(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is a number")))
}

/// A panic is a verdict, too.
fn guarded<T>(run: impl FnOnce() -> Verdict<T>) -> Verdict<T> {
    panic::catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let message = panic.downcast_ref::<String>().cloned().or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(format!("it panicked: {}", message.unwrap_or_default()))
    })
}

/// Runs a script to its end, or up to the crash that it was told to have.
fn run(world: &mut World, script: &Script) -> Verdict {
    world.start()?;
    for (number, action) in script.actions.iter().enumerate() {
        world.act(action).map_err(|what| format!("action {number}, {action:?}: {what}"))?;
        if world.sim.crashed() {
            break;
        }
    }
    Ok(())
}

/// One random run.
fn random_run(seed: u64) -> Verdict {
    let script = script::random(seed);
    guarded(|| run(&mut World::new(seed, &script.machine), &script))
}

#[test]
fn random_runs_keep_every_promise() {
    keep_every_promise(seed(), asked("SAPWOOD_RUNS").unwrap_or(RUNS));
}

/// The same in each run of the tests.
#[test]
fn known_runs_keep_every_promise() {
    keep_every_promise(0, RUNS);
}

/// Miri runs this one: minutes there, milliseconds here.
#[test]
fn a_short_run_keeps_every_promise() {
    let script = script::short();
    assert_eq!(guarded(|| run(&mut World::new(1, &script.machine), &script)), Ok(()));
}

#[track_caller]
fn keep_every_promise(first: u64, runs: u64) {
    for run in 0..runs {
        let seed = first.wrapping_add(run);
        if let Err(what) = random_run(seed) {
            for (number, action) in script::random(seed).actions.iter().enumerate() {
                eprintln!("{number}: {action:?}");
            }
            panic!("seed {seed}: {what}\nagain: SAPWOOD_SEED={seed} SAPWOOD_RUNS=1 cargo test --test it -- simulation::random_runs");
        }
    }
}

/// Where in an enumeration: the operation that the machine crashes at, what survives, and, in the opening after that, the
/// operation that it crashes at again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Point {
    operation: u64,
    survival: usize,
    in_recovery: Option<u64>,
}

impl Point {
    /// `SAPWOOD_POINT=operation.survival.in_recovery`, the last 0 for none.
    fn asked() -> Option<Self> {
        let text = std::env::var("SAPWOOD_POINT").ok()?;
        let mut numbers = text.split('.').map(|number| number.parse().expect("SAPWOOD_POINT is three numbers"));
        let mut next = || numbers.next().expect("SAPWOOD_POINT is three numbers");
        let (operation, survival, in_recovery) = (next(), next(), next());
        Some(Self { operation, survival: survival as usize, in_recovery: (in_recovery > 0).then_some(in_recovery) })
    }
}

impl std::fmt::Display for Point {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.operation, self.survival, self.in_recovery.unwrap_or(0))
    }
}

/// A workload whose every operation is a crash point.
struct Enumeration {
    script: Script,
    seed: u64,
}

/// A machine that is down, before anything was decided of what survives.
struct Wreck {
    disk: SimDisk,
    model: Model,
}

impl Enumeration {
    /// How many operations the workload has.
    fn operations(&self) -> Verdict<u64> {
        let mut world = World::new(self.seed, &self.script.machine);
        run(&mut world, &self.script)?;
        Ok(world.sim.state_changes())
    }

    /// Runs the workload until it crashes at that operation.
    fn crash_at(&self, operation: u64) -> Verdict<Wreck> {
        let mut world = World::new(self.seed, &self.script.machine);
        world.sim.crash_at_op(operation);
        run(&mut world, &self.script)?;
        model::ensure!(world.sim.crashed(), "the operation was not reached");
        // What the disk was left with, before those who wait are told.
        let disk = world.sim.fork(self.seed ^ operation);
        world.go_down(Crash::Process)?;
        Ok(Wreck { disk, model: world.model.clone() })
    }

    /// The machine after the crash, powered off in the way of that survival.
    fn survivor(&self, wreck: &Wreck, point: Point) -> Verdict<World> {
        let seed = Rng::new(self.seed ^ point.operation << 20 ^ point.survival as u64).next();
        let mut world = World::of(wreck.disk.fork(seed), wreck.model.clone(), seed);
        world.go_down(SURVIVALS[point.survival])?;
        Ok(world)
    }

    /// Recovers after one crash, or after another one in the middle of recovering. How many operations that took.
    fn recover(&self, wreck: &Wreck, point: Point) -> Verdict<u64> {
        let mut world = self.survivor(wreck, point)?;
        let mut worst = SURVIVALS[point.survival];
        if let Some(operation) = point.in_recovery {
            world.sim.crash_at_op(operation);
            world.open_and_crash()?;
            // Every other kind of crash, in turn.
            let second = Crash::ALL[((operation + point.operation) % 4) as usize];
            world.go_down(second)?;
            worst = if worst == Crash::Process { second } else { worst };
        }
        let before = world.sim.state_changes();
        world.recover(worst, true)?;
        let operations = world.sim.state_changes() - before;
        world.go_on().map_err(|what| format!("and later, {what}"))?;
        Ok(operations)
    }

    fn check(&self, wreck: &Wreck, point: Point) -> Verdict<u64> {
        guarded(|| self.recover(wreck, point)).map_err(|what| format!("crash point {point}: {what}"))
    }

    /// All that follows from a crash at that operation: each survival, and each operation of each recovery.
    fn all_of(&self, operation: u64) -> Verdict<u64> {
        let wreck = guarded(|| self.crash_at(operation)).map_err(|what| format!("crash at {operation}: {what}"))?;
        let mut points = 0;
        for survival in 0..SURVIVALS.len() {
            let point = Point { operation, survival, in_recovery: None };
            let operations = self.check(&wreck, point)?;
            points += 1 + operations;
            for again in 1..=operations {
                self.check(&wreck, Point { in_recovery: Some(again), ..point })?;
            }
        }
        Ok(points)
    }

    /// A share of the operations: every `step`th from `first` on.
    fn share(&self, name: &str, first: u64, step: u64) -> Verdict<u64> {
        let operations = guarded(|| self.operations())?;
        let mut points = 0;
        for operation in (1 + first % step..=operations).step_by(step as usize) {
            points += self.all_of(operation)?;
        }
        eprintln!("{name}: {operations} operations, every {step}th of them, {points} crashes");
        Ok(points)
    }
}

/// Every `every`th operation is a crash point in each run of the tests; which ones is new each time. SAPWOOD_EVERY asks for others.
#[track_caller]
fn enumerate(name: &str, every: u64, script: impl Fn(Durability) -> Script) {
    let seed = seed();
    let interval = Durability::Interval { bytes: 500, time: std::time::Duration::from_millis(3) };
    for durability in [Durability::Durable, interval, Durability::Os] {
        let enumeration = Enumeration { script: script(durability), seed };
        let verdict = match Point::asked() {
            Some(point) => enumeration.crash_at(point.operation).and_then(|wreck| enumeration.check(&wreck, point)),
            None => enumeration.share(&format!("{name}, {durability:?}"), seed, asked("SAPWOOD_EVERY").unwrap_or(every)),
        };
        if let Err(what) = verdict {
            let point = what.split_whitespace().find(|word| word.split('.').count() == 3).unwrap_or("").trim_end_matches(':');
            panic!("{durability:?}: {what}\nagain: SAPWOOD_SEED={seed} SAPWOOD_POINT={point} cargo test --test it -- simulation::{name}");
        }
    }
}

#[test]
fn every_crash_in_small_segments() {
    enumerate("every_crash_in_small_segments", 16, script::small_segments);
}

#[test]
fn every_crash_in_prepared_segments() {
    // Segments of a megabyte: each recovery takes ten times as long.
    enumerate("every_crash_in_prepared_segments", 48, script::prepared_segments);
}

#[test]
fn every_crash_while_a_topic_is_altered() {
    enumerate("every_crash_while_a_topic_is_altered", 16, script::altered_topic);
}

#[test]
fn every_crash_while_a_topic_is_deleted() {
    enumerate("every_crash_while_a_topic_is_deleted", 16, script::deleted_topic);
}

#[test]
fn every_crash_while_a_log_is_shortened() {
    enumerate("every_crash_while_a_log_is_shortened", 16, script::shortened);
}

#[test]
fn every_crash_while_a_log_of_prepared_segments_is_shortened() {
    enumerate("every_crash_while_a_log_of_prepared_segments_is_shortened", 48, script::shortened_ahead);
}

#[test]
fn every_crash_while_a_partition_moves() {
    enumerate("every_crash_while_a_partition_moves", 16, script::moved);
}
