//! What is refused at a roll, or when room is made, before anything was written: the append that needs it gets a clear error, nothing half
//! made is left, and the same append succeeds once the cause is gone. On the simulated disk; with real limits in `limits`.

use sapwood::io::sim::{Effect, Fault, OpKind, RandomFault, SimDisk};
use sapwood::{Batch, Durability, Error, Partition, TopicConfig};

use crate::sim::{self, EIO, assert_closed, create, names, prepared_is_ready, tiny, until};
use crate::space::{record, try_append};
use crate::support::{TOPIC, contents, partition_of, read_all, seed};

const ENFILE: i32 = 23;
const EMFILE: i32 = 24;

/// From now on nothing can be opened on the disk that ends like this.
fn open_nothing(sim: &SimDisk, suffix: &str, errno: i32) {
    for on in [OpKind::Open, OpKind::Create] {
        sim.fail_by_chance(RandomFault { on, path_suffix: Some(suffix.into()), per_million: 1_000_000, effect: Effect::Error(errno) });
    }
}

#[track_caller]
fn assert_too_many(error: &Error, errno: i32, placed: u64) {
    let Error::TooManyOpenFiles { path, limit, appended } = error else { panic!("{error}") };
    assert!(path.starts_with(sim::dir()), "{error}");
    assert_eq!(limit.is_some(), errno == EMFILE, "{error}");
    assert_eq!(*appended, placed, "{error}");
    assert!(error.is_too_many_open_files() && !error.is_failed());
}

/// Rolls while nothing can be opened are refused as often as they are tried; then everything goes on as if nothing had been.
fn refused_rolls_pass(topic: &TopicConfig, size: usize, suffix: &str, errno: i32, is_ready: fn(&SimDisk) -> bool) {
    let what = format!("{topic:?}, {suffix:?}, error {errno}");
    let (sim, broker, partition) = create(seed(), topic);
    let fits = topic.segment_bytes / size as u64;
    let mut model: Vec<_> = (0..fits).map(|number| record(number, size)).collect();
    for record in &model {
        try_append(&partition, std::slice::from_ref(record)).unwrap();
    }
    until("the next segment is ready", || is_ready(&sim));
    let logs = |sim: &SimDisk| names(sim).into_iter().filter(|name| name.ends_with(".log") && !name.starts_with("prepared")).count();
    open_nothing(&sim, suffix, errno);
    for _ in 0..3 {
        let refused = try_append(&partition, &[record(fits, size)]).expect_err(&what);
        assert_too_many(&refused, errno, 0);
        assert_eq!(logs(&sim), 1, "{what}: a half-made segment is left: {:?}", names(&sim));
        assert_eq!(partition.next_offset(), fits, "{what}");
    }
    sim.clear_faults();
    for number in fits..3 * fits {
        assert_eq!(try_append(&partition, &[record(number, size)]).expect(&what).start, number);
        model.push(record(number, size));
    }
    partition.sync().unwrap();
    assert!(contents(&read_all(&partition)) == model, "{what}");
    drop(partition);
    broker.close().unwrap();
    assert_closed(&sim, 1);
}

#[test]
fn b150_a_roll_for_which_nothing_can_be_opened_is_refused_and_passes() {
    for errno in [EMFILE, ENFILE] {
        for durability in [Durability::Durable, Durability::Os] {
            // Made when it is needed: the directory, or the log, cannot be opened.
            for suffix in ["", "/0", "001.log", "002.log", ".log"] {
                let (size, fits) = if suffix == "001.log" { (270, 1) } else { (135, 2) };
                if suffix.starts_with("00") && suffix != format!("00{fits}.log") {
                    continue;
                }
                refused_rolls_pass(&TopicConfig { durability, ..tiny(270) }, size, suffix, errno, |_| true);
            }
            // Made ahead: all that is left to open is the directory, which must be synced for the new name.
            let ahead = TopicConfig { durability, segment_bytes: 1 << 20, preallocate_bytes: 1 << 20, ..TopicConfig::default() };
            refused_rolls_pass(&ahead, 1 << 18, "/0", errno, prepared_is_ready);
        }
    }
}

#[test]
fn b150_one_open_that_is_refused_at_any_step_of_a_roll_stops_nothing() {
    for (topic, size, is_ready) in [
        (tiny(270), 90, (|_| true) as fn(&SimDisk) -> bool),
        (TopicConfig { segment_bytes: 1 << 20, preallocate_bytes: 1 << 20, ..TopicConfig::default() }, 1 << 18, prepared_is_ready),
    ] {
        for on in [OpKind::Open, OpKind::Create] {
            for nth in 1..6 {
                let (sim, broker, partition) = create(seed(), &topic);
                let mut model = Vec::new();
                for number in 0..2 {
                    try_append(&partition, &[record(number, size)]).unwrap();
                    model.push(record(number, size));
                }
                until("the next segment is ready", || is_ready(&sim));
                sim.fail(Fault::next(on, Effect::Error(EMFILE)).path("").nth(nth));
                for _ in 0..12 {
                    let next = record(model.len() as u64, size);
                    match try_append(&partition, std::slice::from_ref(&next)) {
                        Ok(offsets) => {
                            assert_eq!(offsets.start, model.len() as u64);
                            model.push(next);
                        }
                        Err(error) => assert_too_many(&error, EMFILE, 0),
                    }
                }
                assert!(model.len() >= 13, "one refused open refused more than one append");
                sim.clear_faults();
                assert!(contents(&read_all(&partition)) == model);
                drop(partition);
                broker.close().unwrap();
                // Index files that could not be opened when their segment was sealed are gone, and made anew by the next opening.
                let broker = sim::try_open(&sim, &topic).unwrap();
                assert!(contents(&read_all(&partition_of(&broker))) == model);
                broker.close().unwrap();
                let report = assert_closed(&sim, 1);
                assert_eq!(report.next_offset, model.len() as u64);
            }
        }
    }
}

#[test]
fn b150_a_batch_that_spans_segments_says_how_much_of_it_is_there() {
    let (sim, broker, partition) = create(seed(), &tiny(270));
    // Two to a segment: the second roll is refused.
    let records: Vec<_> = (0..6).map(|number| record(number, 135)).collect();
    sim.fail(Fault::next(OpKind::Create, Effect::Error(EMFILE)).path("004.log"));
    assert_too_many(&try_append(&partition, &records).unwrap_err(), EMFILE, 4);
    assert_eq!(try_append(&partition, &records[4..]).unwrap(), 4..6);
    assert!(contents(&read_all(&partition)) == records);
    drop(partition);
    broker.close().unwrap();
    assert_closed(&sim, 1);
}

#[test]
fn the_first_append_after_opening_is_refused_where_the_end_of_the_log_cannot_be_looked_at_and_passes() {
    for errno in [EMFILE, EIO] {
        let (sim, broker, partition) = create(seed(), &tiny(1 << 20));
        try_append(&partition, &[record(0, 100)]).unwrap();
        drop(partition);
        broker.close().unwrap();
        let broker = sim::try_open(&sim, &tiny(1 << 20)).unwrap();
        let partition = partition_of(&broker);
        open_nothing(&sim, ".log", errno);
        for _ in 0..2 {
            let error = try_append(&partition, &[record(1, 100)]).unwrap_err();
            assert!(!error.is_failed() && error.is_too_many_open_files() == (errno == EMFILE), "{error}");
        }
        sim.clear_faults();
        assert_eq!(try_append(&partition, &[record(1, 100)]).unwrap(), 1..2);
        assert!(contents(&read_all(&partition)) == [record(0, 100), record(1, 100)]);
        drop(partition);
        broker.close().unwrap();
        assert_closed(&sim, 1);
    }
}

#[test]
fn room_that_the_device_refuses_for_whatever_cause_costs_the_append_that_needs_it_and_no_other() {
    for (durability, direct) in [(Durability::Durable, true), (Durability::Durable, false), (Durability::Os, false)] {
        for errno in [EIO, sim::ENOSPC] {
            let sim = SimDisk::new(seed());
            sim.refuse_direct(!direct);
            let broker = sim::open(&sim);
            let topic = TopicConfig { durability, ..tiny(1 << 20) };
            let partition: Partition = broker.create_topic(TOPIC, topic).unwrap().partition(0).unwrap();
            let mut model = Vec::new();
            for number in 0..60u64 {
                // Each needs a chunk of its own; some are large enough to be commits of their own.
                let next = record(number, if number % 3 == 0 { 70_000 } else { 5000 });
                sim.fail(Fault::next(OpKind::Allocate, Effect::Error(errno)).path(".log"));
                sim.fail(Fault::next(OpKind::Allocate, Effect::Error(errno)).path(".log").nth(2));
                let first = partition.append(Batch::of(None, &next.1).unwrap()).unwrap().wait();
                sim.clear_faults();
                let error = match first {
                    Ok(_) => {
                        model.push(next);
                        continue;
                    }
                    Err(error) => error,
                };
                assert!(!error.is_failed() && error.is_disk_full() == (errno == sim::ENOSPC), "{error}");
                assert_eq!(try_append(&partition, std::slice::from_ref(&next)).unwrap().start, model.len() as u64);
                model.push(next);
                assert!(contents(&read_all(&partition)).len() <= model.len());
            }
            partition.sync().unwrap();
            assert!(contents(&read_all(&partition)) == model);
            drop(partition);
            broker.close().unwrap();
            assert_closed(&sim, 1);
        }
    }
}
