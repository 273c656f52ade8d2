//! What a run does: written down for the enumeration, or made up by a seed.

use std::time::Duration;

use sapwood::io::sim::{Effect, Fault, OpKind};
use sapwood::{Durability, TopicConfig};

use super::model::Crash;
use crate::sim::{EAGAIN, EINTR, EIO, ENOSPC};
use crate::support::Rng;

#[derive(Clone, Debug)]
pub enum Action {
    Create {
        topic: &'static str,
        config: TopicConfig,
    },
    Delete {
        topic: &'static str,
    },
    Alter {
        topic: &'static str,
        segment_bytes: u64,
        linger_us: u64,
    },
    /// Queues a batch of records with keys and values of so many bytes.
    Append {
        topic: &'static str,
        sizes: Vec<(usize, usize)>,
    },
    /// Appends one in the way of a lone producer, and waits.
    AppendAndWait {
        topic: &'static str,
        sizes: Vec<(usize, usize)>,
    },
    /// Lets writers and upkeep take so many steps.
    Step(u64),
    /// Lets them come to rest.
    Settle,
    Pass(Duration),
    Sync {
        topic: &'static str,
    },
    /// Reads to the end, from so far (per mille) into the log.
    Read {
        topic: &'static str,
        from: u64,
        appended: bool,
    },
    Roll {
        topic: &'static str,
    },
    /// Removes what the settings no longer keep.
    Retain,
    /// Removes the records before so far (per mille) into the log, and those from there on.
    TruncateBefore {
        topic: &'static str,
        at: u64,
    },
    TruncateAfter {
        topic: &'static str,
        at: u64,
    },
    Seal {
        topic: &'static str,
    },
    Unseal {
        topic: &'static str,
    },
    /// Exports a partition and has it taken in by another topic, which is made for it if it is not there.
    Move {
        from: &'static str,
        to: &'static str,
    },
    Reopen,
    Crash(Crash),
    Fault(Fault),
    ClearFaults,
    Capacity(Option<u64>),
    /// The wall clock jumps.
    WallClock(u64),
}

/// How a disk behaves during a run.
#[derive(Clone, Debug, Default)]
pub struct Machine {
    pub slow_rings: bool,
    pub refuse_direct: bool,
    pub refuse_allocate: bool,
}

#[derive(Clone, Debug)]
pub struct Script {
    pub machine: Machine,
    pub actions: Vec<Action>,
}

const T: &str = "t";
const U: &str = "u";
const V: &str = "v";

fn append(sizes: &[(usize, usize)]) -> Action {
    Action::Append { topic: T, sizes: sizes.to_vec() }
}

fn alone(value: usize) -> Action {
    Action::AppendAndWait { topic: T, sizes: vec![(3, value)] }
}

/// The workloads whose every operation is a crash point. Small segments: each roll makes the next one on the spot.
pub fn small_segments(durability: Durability) -> Script {
    let config = TopicConfig {
        durability,
        segment_bytes: 600,
        preallocate_bytes: 4096,
        commit_bytes: 4096,
        index_interval: 2,
        tail_bytes: 8192,
        ..TopicConfig::default()
    };
    let other = TopicConfig { segment_bytes: 10_000, partitions: 2, ..config.clone() };
    let actions = vec![
        Action::Create { topic: T, config: config.clone() },
        alone(10),
        append(&[(0, 0), (6, 11), (0, 100)]),
        append(&[(5, 300)]),
        Action::Step(5),
        append(&[(1, 1); 4]),
        Action::Settle,
        // Larger than a segment, and larger than a block.
        append(&[(6, 5000), (2, 20)]),
        Action::Step(7),
        append(&[(6, 200); 6]),
        Action::Settle,
        Action::Sync { topic: T },
        Action::Create { topic: U, config: other },
        Action::AppendAndWait { topic: U, sizes: vec![(4, 50)] },
        Action::Append { topic: U, sizes: vec![(4, 4000), (4, 3000)] },
        Action::Settle,
        Action::Reopen,
        alone(30),
        append(&[(3, 80); 3]),
        Action::Step(4),
        // The checkpoint is written by age.
        Action::Pass(Duration::from_secs(6)),
        append(&[(3, 80)]),
        Action::Settle,
        append(&[(3, 150); 5]),
        Action::Settle,
        Action::Delete { topic: U },
        alone(60),
        Action::Reopen,
        alone(70),
    ];
    Script { machine: Machine::default(), actions }
}

/// Segments that are worth preparing: the next one is made ahead, and a roll is a rename.
pub fn prepared_segments(durability: Durability) -> Script {
    let config = TopicConfig {
        durability,
        segment_bytes: 1 << 20,
        preallocate_bytes: 1 << 20,
        commit_bytes: 256 << 10,
        index_interval: 3,
        tail_bytes: 0,
        ..TopicConfig::default()
    };
    let chunk = (4, 150_000);
    let actions = vec![
        Action::Create { topic: T, config },
        alone(100),
        append(&[chunk, (3, 10)]),
        append(&[chunk, (3, 10)]),
        Action::Settle,
        append(&[chunk, (3, 10)]),
        append(&[chunk, (3, 10), chunk]),
        Action::Settle,
        append(&[(3, 1000); 3]),
        append(&[chunk; 3]),
        Action::Step(9),
        append(&[(2, 200); 3]),
        Action::Settle,
        alone(500),
        Action::Sync { topic: T },
        append(&[chunk; 4]),
        Action::Settle,
        append(&[chunk; 3]),
        Action::Settle,
        alone(10),
        Action::Pass(Duration::from_secs(6)),
        alone(10),
        Action::Settle,
        Action::Reopen,
        alone(11),
    ];
    Script { machine: Machine { slow_rings: true, ..Machine::default() }, actions }
}

/// Appends in both ways, as many at once as go into the ring, rolls, reads from memory and from the disk, a torn tail.
pub fn short() -> Script {
    let config = TopicConfig {
        segment_bytes: 200_000,
        preallocate_bytes: 65_536,
        commit_bytes: 96 << 10,
        index_interval: 2,
        tail_bytes: 256 << 10,
        ..TopicConfig::default()
    };
    let large = (6, 50_000);
    let actions = vec![
        Action::Create { topic: T, config },
        alone(10),
        append(&[(0, 0), large]),
        append(&[large]),
        append(&[large, (2, 20)]),
        append(&[large]),
        Action::Settle,
        Action::Read { topic: T, from: 0, appended: false },
        append(&[large]),
        append(&[large, large]),
        Action::Step(5),
        Action::Crash(Crash::TornPower),
        alone(70),
    ];
    Script { machine: Machine { slow_rings: true, ..Machine::default() }, actions }
}

/// A topic with records is deleted.
pub fn deleted_topic(durability: Durability) -> Script {
    let config = TopicConfig {
        durability,
        segment_bytes: 300,
        preallocate_bytes: 4096,
        commit_bytes: 4096,
        tail_bytes: 0,
        ..TopicConfig::default()
    };
    let actions = vec![Action::Create { topic: T, config }, append(&[(3, 100); 5]), Action::Settle, Action::Delete { topic: T }];
    Script { machine: Machine::default(), actions }
}

/// A topic is altered, and its segments with it, between appends and rolls.
pub fn altered_topic(durability: Durability) -> Script {
    let config = TopicConfig {
        durability,
        segment_bytes: 600,
        preallocate_bytes: 4096,
        commit_bytes: 4096,
        tail_bytes: 0,
        ..TopicConfig::default()
    };
    let alter = |segment_bytes, linger_us| Action::Alter { topic: T, segment_bytes, linger_us };
    let actions = vec![
        Action::Create { topic: T, config },
        alter(300, 0),
        append(&[(3, 100); 5]),
        Action::Settle,
        alter(5000, 200),
        append(&[(3, 100); 3]),
        Action::Step(3),
        alter(5000, 0),
        alone(10),
        Action::Reopen,
        alter(1, 0),
        append(&[(3, 100); 2]),
        Action::Settle,
        alter(700, 0),
    ];
    Script { machine: Machine::default(), actions }
}

/// A log is shortened from both ends, in all ways, and goes on.
pub fn shortened(durability: Durability) -> Script {
    let config = TopicConfig {
        durability,
        segment_bytes: 500,
        preallocate_bytes: 4096,
        commit_bytes: 4096,
        index_interval: 2,
        tail_bytes: 8192,
        retention_bytes: Some(2000),
        retention_age: Some(Duration::from_secs(3600)),
        segment_age: Some(Duration::from_secs(600)),
        ..TopicConfig::default()
    };
    let actions = vec![
        Action::Create { topic: T, config },
        append(&[(3, 90); 24]),
        Action::Settle,
        Action::Retain,
        append(&[(3, 90); 5]),
        Action::Settle,
        Action::TruncateAfter { topic: T, at: 700 },
        alone(40),
        append(&[(3, 90); 4]),
        Action::TruncateBefore { topic: T, at: 400 },
        append(&[(3, 60); 3]),
        Action::Settle,
        // To the start of a segment.
        Action::Roll { topic: T },
        append(&[(3, 60); 2]),
        Action::Settle,
        Action::TruncateAfter { topic: T, at: 800 },
        append(&[(3, 30); 9]),
        Action::Settle,
        Action::Reopen,
        Action::TruncateAfter { topic: T, at: 300 },
        alone(11),
        Action::TruncateBefore { topic: T, at: 1000 },
        alone(12),
        // By age, the active one first.
        Action::Pass(Duration::from_secs(601)),
        Action::Settle,
        alone(13),
        Action::Pass(Duration::from_secs(3601)),
        Action::Retain,
        alone(14),
    ];
    Script { machine: Machine::default(), actions }
}

/// A partition is exported, taken in elsewhere, and sealed; one that goes on is cut where the export has a link to.
pub fn moved(durability: Durability) -> Script {
    let config = TopicConfig {
        durability,
        segment_bytes: 500,
        preallocate_bytes: 4096,
        commit_bytes: 4096,
        tail_bytes: 0,
        ..TopicConfig::default()
    };
    let actions = vec![
        Action::Create { topic: T, config },
        append(&[(3, 90); 12]),
        Action::Settle,
        Action::Move { from: T, to: V },
        Action::TruncateAfter { topic: T, at: 500 },
        alone(12),
        Action::AppendAndWait { topic: V, sizes: vec![(3, 12)] },
        append(&[(3, 90)]),
        Action::Seal { topic: T },
        alone(13),
        Action::Reopen,
        alone(14),
        Action::Unseal { topic: T },
        Action::Reopen,
        alone(15),
        Action::Delete { topic: T },
        Action::AppendAndWait { topic: V, sizes: vec![(3, 16)] },
    ];
    Script { machine: Machine::default(), actions }
}

/// The same with segments that are made ahead.
pub fn shortened_ahead(durability: Durability) -> Script {
    let Script { machine, mut actions } = prepared_segments(durability);
    actions.truncate(9);
    actions.extend([
        Action::TruncateAfter { topic: T, at: 600 },
        append(&[(4, 150_000); 3]),
        Action::Settle,
        Action::Roll { topic: T },
        append(&[(4, 150_000), (2, 2)]),
        Action::TruncateBefore { topic: T, at: 500 },
        Action::TruncateAfter { topic: T, at: 900 },
        append(&[(4, 150_000); 3]),
        Action::Settle,
        Action::TruncateBefore { topic: T, at: 1000 },
        alone(10),
    ]);
    Script { machine, actions }
}

/// All of a log goes just after the next segment, which was made ahead, took its place.
pub fn emptied(durability: Durability) -> Script {
    let Script { machine, mut actions } = prepared_segments(durability);
    actions.truncate(8);
    actions.push(Action::TruncateBefore { topic: T, at: 1000 });
    Script { machine, actions }
}

/// One roll to a segment that was made ahead.
pub fn one_roll(durability: Durability) -> Script {
    let Script { machine, mut actions } = prepared_segments(durability);
    actions.truncate(13);
    actions.push(alone(10));
    Script { machine, actions }
}

/// A sync fails, the process crashes, and what only the page cache has must not be taken for the log.
pub fn failed_sync(_variant: u64) -> Script {
    let config =
        TopicConfig { durability: Durability::Os, preallocate_bytes: 4096, commit_bytes: 4096, tail_bytes: 0, ..TopicConfig::default() };
    let actions = vec![
        Action::Create { topic: T, config },
        alone(100),
        Action::Sync { topic: T },
        append(&[(3, 100), (3, 5000)]),
        Action::Settle,
        Action::Fault(Fault::next(OpKind::Sync, Effect::Error(EIO)).path(".log")),
        Action::Sync { topic: T },
        Action::Crash(Crash::Process),
        Action::Read { topic: T, from: 0, appended: false },
        Action::Crash(Crash::StrictPower),
    ];
    Script { machine: Machine::default(), actions }
}

/// Index entries on several pages when a checkpoint is written.
pub fn many_entries(durability: Durability) -> Script {
    let config = TopicConfig { durability, preallocate_bytes: 65_536, commit_bytes: 65_536, tail_bytes: 0, ..TopicConfig::default() };
    let actions = vec![
        Action::Create { topic: T, config },
        append(&[(0, 1); 600]),
        Action::Settle,
        Action::Pass(Duration::from_secs(6)),
        append(&[(0, 1); 3]),
        Action::Settle,
        append(&[(0, 1); 3]),
        Action::Settle,
    ];
    Script { machine: Machine::default(), actions }
}

/// The sealing of a segment fails, just before a checkpoint of the next one is written: if that was begun before the writer heard of the
/// failure, which each variant's own order of steps decides. Which syncs of logs are of a sealing is not counted on.
pub fn failed_seal(variant: u64) -> Script {
    let nth = 1 + variant % 8;
    let Script { machine, mut actions } = prepared_segments(Durability::Durable);
    actions.insert(2, Action::Fault(Fault::next(OpKind::Sync, Effect::Error(EIO)).path(".log").nth(nth)));
    actions.extend([Action::ClearFaults, Action::Crash(Crash::StrictPower)]);
    Script { machine, actions }
}

fn config(rng: &mut Rng) -> TopicConfig {
    let durability = match rng.below(6) {
        0 => Durability::Os,
        1 => Durability::Interval { bytes: 1 + rng.below(3000), time: Duration::from_millis(1 + rng.below(20)) },
        _ => Durability::Durable,
    };
    let segment_bytes = rng.one_of(&[1, 270, 700, 5000, 20_000, 1 << 20]);
    TopicConfig {
        partitions: rng.one_of(&[1, 1, 1, 2]),
        segment_bytes,
        preallocate_bytes: if segment_bytes == 1 << 20 { 1 << 20 } else { rng.one_of(&[4096, 8192, 65_536]) },
        index_interval: rng.one_of(&[1, 1, 2, 7]),
        durability,
        linger_us: rng.one_of(&[0, 0, 0, 200]),
        commit_bytes: rng.one_of(&[4096, 8192, 200_000]),
        commit_records: rng.one_of(&[1, 3, 1 << 16]),
        tail_bytes: rng.one_of(&[0, 8192]),
        queue_batches: rng.one_of(&[1, 2, 64]),
        queue_bytes: rng.one_of(&[1, 1000, 1 << 20]),
        segment_age: rng.one_of(&[None, None, Some(Duration::from_millis(20)), Some(Duration::from_secs(5))]),
        retention_age: rng.one_of(&[None, Some(Duration::from_millis(100)), Some(Duration::from_secs(10))]),
        retention_bytes: rng.one_of(&[None, Some(0), Some(2 * segment_bytes)]),
        ..TopicConfig::default()
    }
}

fn sizes(rng: &mut Rng, large: bool) -> Vec<(usize, usize)> {
    let one = |rng: &mut Rng| {
        let value = match rng.below(12) {
            0 => 0,
            1 => 4050 + rng.below(60),
            2 => rng.below(9000),
            3 if large => 20_000 + rng.below(100_000),
            _ => rng.below(200),
        };
        (rng.below(12) as usize, value as usize)
    };
    (0..1 + rng.below(rng.clone().below(6) + 1)).map(|_| one(rng)).collect()
}

fn fault(rng: &mut Rng) -> Fault {
    let on = rng.one_of(&[
        OpKind::Write,
        OpKind::Write,
        OpKind::Sync,
        OpKind::Sync,
        OpKind::SyncDir,
        OpKind::Allocate,
        OpKind::Create,
        OpKind::Rename,
        OpKind::SetLen,
        OpKind::RemoveFile,
        OpKind::Read,
        OpKind::Open,
        OpKind::CreateDir,
    ]);
    let effect = match (on, rng.below(6)) {
        (OpKind::Write | OpKind::Read, 0) => Effect::ShortBySeed,
        (OpKind::Write | OpKind::Read, 1) => Effect::Error(rng.one_of(&[EINTR, EAGAIN])),
        (OpKind::Write, 2) => Effect::ErrorAfterPartial { bytes: rng.below(6000) as usize, errno: rng.one_of(&[EIO, ENOSPC]) },
        (OpKind::Write | OpKind::Allocate | OpKind::Create | OpKind::SyncDir | OpKind::Sync, 3) => Effect::Error(ENOSPC),
        _ => Effect::Error(EIO),
    };
    let fault = Fault::next(on, effect).nth(1 + rng.below(12));
    match rng.below(4) {
        0 => fault.path(".log"),
        1 => fault.path(rng.one_of(&[".index", ".timeindex", "checkpoint"])),
        _ => fault,
    }
}

/// A run that follows from its seed.
pub fn random(seed: u64) -> Script {
    let mut rng = Rng::new(seed);
    let machine = Machine { slow_rings: rng.below(2) == 0, refuse_direct: rng.below(8) == 0, refuse_allocate: rng.below(8) == 0 };
    let large = rng.below(4) == 0;
    let (faulty, full) = (rng.below(3) == 0, rng.below(8) == 0);
    let mut actions = vec![Action::Create { topic: T, config: config(&mut rng) }];
    for _ in 0..10 + rng.below(50) {
        let topic = if rng.below(5) == 0 { U } else { T };
        actions.push(match rng.below(52) {
            0..12 => Action::Append { topic, sizes: sizes(&mut rng, large) },
            12..17 => Action::AppendAndWait { topic, sizes: sizes(&mut rng, large) },
            17..26 => Action::Step(1 + rng.below(12)),
            26..29 => Action::Settle,
            29 => Action::Pass(Duration::from_millis(rng.one_of(&[1, 50, 200, 6000]))),
            30 => Action::Sync { topic },
            31..33 => Action::Read { topic, from: rng.below(1001), appended: rng.below(3) == 0 },
            33 => Action::Create { topic, config: config(&mut rng) },
            34 if rng.below(3) == 0 => Action::Delete { topic },
            34 => Action::Alter { topic, segment_bytes: rng.one_of(&[1, 270, 700, 20_000, 1 << 20]), linger_us: rng.one_of(&[0, 0, 200]) },
            35 => Action::Reopen,
            36..39 => Action::Crash(rng.one_of(&Crash::ALL)),
            39..41 if faulty => Action::Fault(fault(&mut rng)),
            41 if faulty => Action::ClearFaults,
            42 if full => Action::Capacity((rng.below(3) > 0).then(|| rng.below(60) * 4096)),
            44 => Action::Roll { topic },
            45 => Action::Retain,
            46 => Action::TruncateBefore { topic, at: rng.below(1001) },
            47..49 => Action::TruncateAfter { topic, at: rng.below(1001) },
            49 if rng.below(2) == 0 => Action::Seal { topic },
            50 => Action::Unseal { topic },
            51 => Action::Move { from: topic, to: rng.one_of(&[T, U, V]) },
            43 => Action::WallClock(rng.below(u64::MAX)),
            _ => Action::Step(1),
        });
    }
    actions.extend([Action::ClearFaults, Action::Capacity(None), Action::Crash(rng.one_of(&Crash::ALL)), Action::Reopen]);
    Script { machine, actions }
}
