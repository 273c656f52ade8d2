//! Settings beside the data: altering them while the topic is at work, and what an interruption, a failure or another's hand leaves.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use sapwood::io::sim::{Effect, Fault, OpKind, SimDisk};
use sapwood::{Backend, Batch, Broker, Durability, Error, Stepper, TopicConfig};

use crate::oracle::assert_closed;
use crate::sim::{self, CRASHES, DATA, EIO, ENOSPC, crash, tiny, try_open};
use crate::support::{TOPIC, append, bytes_in, create, each_backend, open, partition_dir, partition_of, scratch, seed, segments_of, small};

const SETTINGS: &str = "topic.json";
const UNFINISHED: &str = "topic.json.tmp";

/// Everything that may change, changed.
fn altered(config: &mut TopicConfig) {
    config.segment_bytes = 270;
    config.segment_age = Some(Duration::from_secs(3600));
    config.retention_age = Some(Duration::from_secs(86_400 * 365));
    config.retention_bytes = Some(1 << 50);
    config.linger_us = 77;
    config.max_batch_bytes = 4000;
}

#[test]
fn what_is_altered_takes_effect_at_once_and_stays() {
    each_backend(|backend| {
        let data = scratch();
        let config = TopicConfig { partitions: 2, ..small() };
        let broker = open(data.path(), backend, &small());
        let topic = broker.create_topic(TOPIC, config.clone()).unwrap();
        let partition = topic.partition(0).unwrap();
        for number in 0..20u8 {
            append(&partition, b"key", &[number; 59]);
        }
        assert_eq!(partition.stats().rolls, 0);
        let mut expected = config.clone();
        altered(&mut expected);
        assert_eq!(broker.alter_topic(TOPIC, altered).unwrap(), expected);
        assert_eq!((topic.config(), partition.config()), (expected.clone(), expected.clone()), "handles from before see it");

        let error = partition.append(Batch::of(None, &[0; 4000]).unwrap()).map(drop).unwrap_err();
        assert!(matches!(error, Error::BatchTooLarge { limit: 4000, .. }), "{error}");
        // Records of 90 bytes, three to a segment from now on; those of before stay where they are.
        for number in 0..7u8 {
            append(&partition, b"key", &[number; 59]);
        }
        assert_eq!(partition.stats().rolls, 3);
        let grown = broker.alter_topic(TOPIC, |config| config.segment_bytes = 1 << 20).unwrap();
        for number in 0..20u8 {
            append(&partition, b"key", &[number; 59]);
        }
        assert_eq!(partition.stats().rolls, 3, "the last segment grows on");
        drop((topic, partition));
        broker.close().unwrap();
        let report = assert_closed(&partition_dir(data.path()), 1);
        assert_eq!(report.segments.iter().map(|segment| segment.base).collect::<Vec<_>>(), [0, 20, 23, 26]);
        assert_eq!(report.next_offset, 47);

        let broker = open(data.path(), backend, &small());
        assert_eq!(broker.topic(TOPIC).unwrap().config(), grown);
        assert!(broker.report().unsound_settings.is_empty());
    });
}

type Change = fn(&mut TopicConfig);

/// Settings that each differ in one that is settled, by its name.
fn settled() -> Vec<(&'static str, Change)> {
    vec![
        ("partitions", |config| config.partitions += 1),
        ("preallocate_bytes", |config| config.preallocate_bytes += 4096),
        ("index_interval", |config| config.index_interval += 1),
        ("durability", |config| config.durability = Durability::Os),
        ("commit_bytes", |config| config.commit_bytes += 1),
        ("commit_records", |config| config.commit_records -= 1),
        ("tail_bytes", |config| config.tail_bytes += 1),
        ("queue_bytes", |config| config.queue_bytes += 1),
        ("queue_batches", |config| config.queue_batches += 1),
    ]
}

#[test]
fn what_cannot_be_altered_is_refused_by_name_and_changes_nothing() {
    let data = scratch();
    let (broker, partition) = create(data.path(), Backend::Auto, &small());
    append(&partition, b"k", b"v");
    let before = bytes_in(data.path());
    for (setting, change) in settled() {
        let both = |config: &mut TopicConfig| {
            altered(config);
            change(config);
        };
        let error = broker.alter_topic(TOPIC, both).unwrap_err();
        assert!(matches!(error, Error::SettingFixed { name } if name == setting), "{setting}: {error}");
        assert!(error.to_string().contains(setting), "{error}");
    }
    let out_of_range: [(&str, Change); 6] = [
        ("segment_bytes", |config| config.segment_bytes = 0),
        ("segment_age", |config| config.segment_age = Some(Duration::ZERO)),
        ("retention_age", |config| config.retention_age = Some(Duration::MAX)),
        ("retention_bytes", |config| config.retention_bytes = Some(u64::MAX)),
        ("linger_us", |config| config.linger_us = u64::MAX),
        ("max_batch_bytes", |config| config.max_batch_bytes = 1),
    ];
    for (setting, change) in out_of_range {
        let error = broker.alter_topic(TOPIC, change).unwrap_err();
        assert!(matches!(error, Error::InvalidConfig { name, .. } if name == setting), "{setting}: {error}");
    }
    assert!(matches!(broker.alter_topic("other", altered).unwrap_err(), Error::TopicNotFound { .. }));
    assert!(matches!(broker.alter_topic("../t", altered).unwrap_err(), Error::InvalidTopicName { .. }));
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| broker.alter_topic(TOPIC, |_| panic!("in the change"))));
    assert!(panicked.is_err());
    broker.alter_topic(TOPIC, |_| {}).unwrap();
    assert_eq!(partition.config(), small());
    assert!(bytes_in(data.path()) == before, "nothing is written where nothing changes");
    broker.alter_topic(TOPIC, altered).expect("a change that panicked is in nobody's way");
    broker.topic(TOPIC).unwrap().close().unwrap();
    assert!(broker.alter_topic(TOPIC, |config| config.linger_us = 0).unwrap_err().is_closed());
}

/// The writer waits for a minute, and is told that it need not: no time passes.
#[test]
fn a_linger_that_is_taken_back_ends_at_once() {
    let first = seed();
    for seed in (0..50).map(|number| first.wrapping_add(number)) {
        let (sim, stepper) = (SimDisk::new(seed), Stepper::new(seed));
        let fallback = crate::support::config(Backend::Auto, TopicConfig::default());
        let broker = Broker::open_stepped(Arc::new(sim), &stepper, DATA, fallback).unwrap();
        let topic = broker.create_topic(TOPIC, TopicConfig { linger_us: 60_000_000, ..tiny(1 << 20) }).unwrap();
        let ticket = topic.partition(0).unwrap().append(Batch::of(None, b"v").unwrap()).unwrap();
        // At any point of its way.
        for _ in 0..seed % 8 {
            stepper.step();
        }
        if seed % 2 == 0 {
            while stepper.step() {}
        }
        let ticket = ticket.try_wait().expect_err("it lingers");
        broker.alter_topic(TOPIC, |config| config.linger_us = 0).unwrap();
        while stepper.step() {}
        assert_eq!(ticket.try_wait().expect("it lingers no more").unwrap(), 0..1, "seed {seed}");
        assert!(stepper.clock().monotonic() < Duration::from_secs(60));
    }
}

#[test]
fn retention_that_is_altered_is_enforced() {
    each_backend(|backend| {
        let data = scratch();
        let (broker, partition) = create(data.path(), backend, &segments_of(270));
        let fill = || {
            for number in 0..30u8 {
                append(&partition, b"key", &[number; 59]);
            }
        };
        fill();
        assert!(broker.enforce_retention().unwrap().removed.is_empty());
        broker.alter_topic(TOPIC, |config| config.retention_bytes = Some(1000)).unwrap();
        let [removed] = &broker.enforce_retention().unwrap().removed[..] else { panic!("nothing went") };
        assert_eq!((removed.records.clone(), partition.first_offset()), (0..21, 21));
        broker.alter_topic(TOPIC, |config| config.retention_bytes = None).unwrap();
        fill();
        assert!(broker.enforce_retention().unwrap().removed.is_empty());
        broker.close().unwrap();
    });
}

/// A segment's age that is altered counts from when its first record came, whenever that was; the writer, which waits, is told.
#[test]
fn an_age_that_is_altered_has_segments_roll_in_time() {
    let first = seed();
    for seed in (0..20).map(|number| first.wrapping_add(number)) {
        let stepper = Stepper::new(seed);
        let fallback = crate::support::config(Backend::Auto, TopicConfig::default());
        let broker = Broker::open_stepped(Arc::new(SimDisk::new(seed)), &stepper, DATA, fallback).unwrap();
        let day = Some(Duration::from_secs(86_400));
        let topic = broker.create_topic(TOPIC, TopicConfig { segment_age: day, ..tiny(1000) }).unwrap();
        let partition = topic.partition(0).unwrap();
        partition.append_and_wait(Batch::of(None, b"v").unwrap()).unwrap();
        let wait = |seconds| {
            stepper.settle(Duration::from_secs(1));
            stepper.pass(Duration::from_secs(seconds));
            while stepper.step() {}
        };
        wait(3000);
        assert_eq!(partition.stats().rolls, 0, "seed {seed}");
        broker.alter_topic(TOPIC, |config| config.segment_age = Some(Duration::from_secs(3600))).unwrap();
        while stepper.step() {}
        assert_eq!(partition.stats().rolls, 0, "seed {seed}: it is not so old yet");
        wait(700);
        assert_eq!(partition.stats().rolls, 1, "seed {seed}");
        partition.append_and_wait(Batch::of(None, b"v").unwrap()).unwrap();
        broker.alter_topic(TOPIC, |config| config.segment_age = None).unwrap();
        wait(10_000);
        assert_eq!(partition.stats().rolls, 1, "seed {seed}");
    }
}

/// Producers of batches that span segments, beside changes of the segments' size and the linger: every record is there once.
#[test]
fn altering_beside_appends_loses_nothing() {
    let seed = seed();
    each_backend(|backend| {
        let data = scratch();
        let (broker, partition) = create(data.path(), backend, &segments_of(1 << 20));
        std::thread::scope(|scope| {
            let producers: Vec<_> = (0..3u8)
                .map(|producer| {
                    let partition = &partition;
                    scope.spawn(move || {
                        for round in 0..150u32 {
                            let mut batch = partition.batch();
                            for number in 0..5u32 {
                                batch
                                    .push(Some(&[producer]), &[&round.to_be_bytes()[..], &number.to_be_bytes(), &[7; 500]].concat())
                                    .unwrap();
                            }
                            let offsets = if round % 2 == 0 {
                                partition.append_and_wait(batch)
                            } else {
                                partition.append(batch).and_then(|t| t.wait())
                            };
                            assert_eq!(offsets.map(|offsets| offsets.end - offsets.start).unwrap(), 5);
                        }
                    })
                })
                .collect();
            let mut rng = crate::support::Rng::new(seed);
            while !producers.iter().all(std::thread::ScopedJoinHandle::is_finished) {
                let change = |config: &mut TopicConfig| {
                    config.segment_bytes = rng.one_of(&[1, 700, 1200, 20_000, 1 << 20, 4 << 20]);
                    config.linger_us = rng.one_of(&[0, 0, 50]);
                };
                broker.alter_topic(TOPIC, change).unwrap();
            }
        });
        assert_eq!(partition.next_offset(), 3 * 150 * 5);
        drop(partition);
        broker.close().unwrap();
        let report = assert_closed(&partition_dir(data.path()), 1);
        assert_eq!(report.next_offset, 3 * 150 * 5);
        let mut rows: Vec<_> = report.records.iter().map(|found| (found.key.clone(), found.value.clone())).collect();
        for producer in 0..3u8 {
            assert!(rows.iter().filter(|(key, _)| key[..] == [producer]).is_sorted(), "in the order of its producer");
        }
        rows.sort();
        rows.dedup();
        assert_eq!(rows.len(), 3 * 150 * 5);
    });
}

#[test]
fn two_threads_that_alter_one_topic_lose_no_change() {
    let data = scratch();
    let (broker, partition) = create(data.path(), Backend::Auto, &small());
    broker.alter_topic(TOPIC, |config| config.linger_us = 0).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..20 {
                    broker.alter_topic(TOPIC, |config| config.linger_us += 1).unwrap();
                }
            });
        }
    });
    assert_eq!(partition.config().linger_us, 40);
}

/// Opens and alters, on a disk that may crash meanwhile.
fn alter(sim: &SimDisk) -> sapwood::Result<TopicConfig> {
    try_open(sim, &tiny(270))?.alter_topic(TOPIC, altered)
}

fn settings_on(broker: &Broker) -> TopicConfig {
    broker.topic(TOPIC).unwrap().config()
}

#[test]
fn a_crash_at_any_step_of_altering_leaves_the_old_settings_or_the_new_ones() {
    let seed = seed();
    let (prepared, broker, partition) = sim::create(seed, &tiny(1000));
    append(&partition, b"k", b"kept");
    let old = settings_on(&broker);
    let new = {
        let mut new = old.clone();
        altered(&mut new);
        new
    };
    drop(partition);
    broker.close().unwrap();
    let whole = prepared.fork(1);
    let before = whole.state_changes();
    assert_eq!(alter(&whole).unwrap(), new);
    let points = whole.state_changes() - before;
    let (mut were_old, mut were_new) = (0, 0);
    for point in 1..=points {
        for how in CRASHES {
            let sim = prepared.fork(seed ^ point);
            sim.crash_at_op(point);
            let acknowledged = alter(&sim).is_ok();
            crash(&sim, how);
            let what = format!("{how}, operation {point} of {points}, seed {seed}");
            let broker = try_open(&sim, &tiny(270)).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert!(broker.report().unsound_settings.is_empty(), "{what}: {:?}", broker.report().unsound_settings);
            let found = settings_on(&broker);
            assert!(found == old || found == new, "{what}: {found:?}");
            assert!(!acknowledged || found == new, "{what}: an alteration that was acknowledged is gone");
            assert!(!sim.exists(&Path::new(DATA).join(TOPIC).join(UNFINISHED)), "{what}: a left-over");
            assert!(broker.report().ignored.is_empty(), "{what}: {:?}", broker.report().ignored);
            *(if found == old { &mut were_old } else { &mut were_new }) += 1;
            // What is served now no crash may take.
            sim.power_loss_keeping_nothing();
            drop(broker);
            assert_eq!(settings_on(&try_open(&sim, &tiny(270)).unwrap()), found, "{what}: taken by a second crash");
        }
    }
    assert!(were_old > 0 && were_new > 0, "{were_old} old, {were_new} new");
}

#[test]
fn an_alteration_that_fails_changes_nothing() {
    let faults = [
        Fault::next(OpKind::Create, Effect::Error(ENOSPC)).path(UNFINISHED),
        Fault::next(OpKind::Write, Effect::Error(ENOSPC)).path(UNFINISHED),
        Fault::next(OpKind::Write, Effect::ErrorAfterPartial { bytes: 9, errno: EIO }).path(UNFINISHED),
        Fault::next(OpKind::Sync, Effect::Error(EIO)).path(UNFINISHED),
        Fault::next(OpKind::Rename, Effect::Error(EIO)).path(UNFINISHED),
        Fault::next(OpKind::SyncDir, Effect::Error(EIO)).path(TOPIC),
        Fault::next(OpKind::SyncDir, Effect::Error(ENOSPC)).path(TOPIC),
    ];
    for (number, fault) in faults.into_iter().enumerate() {
        for how in CRASHES {
            let (sim, broker, partition) = sim::create(seed(), &tiny(1000));
            let old = settings_on(&broker);
            sim.fail(fault.clone());
            let error = broker.alter_topic(TOPIC, altered).unwrap_err();
            let full = matches!(number, 0 | 1 | 6);
            assert!(
                if full { matches!(error, Error::DiskFull { .. }) } else { matches!(error, Error::Io { .. }) },
                "fault {number}: {error}"
            );
            assert_eq!((settings_on(&broker), partition.config()), (old.clone(), old.clone()), "fault {number}");
            append(&partition, b"k", &[7; 2000]);
            crash(&sim, how);
            drop((partition, broker));
            let broker = try_open(&sim, &tiny(270)).unwrap();
            assert_eq!(settings_on(&broker), old, "fault {number}, {how}");
            assert!(broker.report().unsound_settings.is_empty());
            broker.alter_topic(TOPIC, altered).expect("it can be tried again");
        }
    }
}

#[test]
fn settings_that_cannot_be_used_are_told_with_what_serves_instead() {
    each_backend(|backend| {
        let out_of_range = br#"{"partitions": 2, "linger_us": 99999999999}"#;
        let texts: [&[u8]; 6] = [b"", b"{", b"null", b"\xff\xfe", br#"{"partitions": "many"}"#, out_of_range];
        for text in texts {
            let data = scratch();
            let (broker, _) = create(data.path(), backend, &TopicConfig { partitions: 2, index_interval: 3, ..small() });
            broker.create_topic("sound", small()).unwrap();
            for partition in broker.topic(TOPIC).unwrap().partitions() {
                for _ in 0..7 {
                    append(&partition, b"k", b"v");
                }
            }
            broker.close().unwrap();
            let settings = data.path().join(TOPIC).join(SETTINGS);
            fs::write(&settings, text).unwrap();
            let fallback = TopicConfig { partitions: 9, index_interval: 1, ..segments_of(5000) };
            let broker = open(data.path(), backend, &fallback);
            let [unsound] = &broker.report().unsound_settings[..] else { panic!("{:?}", broker.report()) };
            assert_eq!(unsound.path, settings);
            assert_eq!(unsound.used, TopicConfig { partitions: 2, index_interval: 3, ..fallback.clone() });
            assert_eq!(unsound.used, broker.topic(TOPIC).unwrap().config());
            let named = if text == out_of_range {
                matches!(unsound.cause, Error::InvalidConfig { name: "linger_us", .. })
            } else {
                matches!(&unsound.cause, Error::Io { path, .. } if *path == settings)
            };
            assert!(named, "{text:?}: {}", unsound.cause);
            assert_eq!(fs::read(&settings).unwrap(), text, "it stays as it is");
            // Until it is altered: then there are sound ones again.
            let used = broker.alter_topic(TOPIC, |config| config.linger_us = 1).unwrap();
            broker.close().unwrap();
            let broker = open(data.path(), backend, &small());
            assert!(broker.report().unsound_settings.is_empty());
            assert_eq!(broker.topic(TOPIC).unwrap().config(), used);
        }
    });
}

#[test]
fn a_topic_without_settings_is_told_of_nothing() {
    let (data, _) = crate::support::data_with("demo-36-segment-270");
    let broker = open(data.path(), Backend::Auto, &segments_of(270));
    assert!(broker.report().unsound_settings.is_empty());
    // Altering gives it some.
    let used = broker.alter_topic(TOPIC, |config| config.segment_bytes = 1 << 20).unwrap();
    broker.close().unwrap();
    let broker = open(data.path(), Backend::Auto, &small());
    assert_eq!((broker.topic(TOPIC).unwrap().config(), partition_of(&broker).next_offset()), (used, 36));
}

#[test]
fn what_an_interrupted_writing_left_is_removed_and_what_is_none_is_not() {
    each_backend(|backend| {
        let data = scratch();
        let (broker, _) = create(data.path(), backend, &small());
        broker.close().unwrap();
        let topic = data.path().join(TOPIC);
        for text in [&b""[..], b"{\"linger_us\": 5", b"{\"linger_us\": 5}"] {
            fs::write(topic.join(UNFINISHED), text).unwrap();
            let broker = open(data.path(), backend, &small());
            assert!(!topic.join(UNFINISHED).exists());
            assert!(broker.report().ignored.is_empty() && broker.report().unsound_settings.is_empty(), "{:?}", broker.report());
            assert_eq!(broker.topic(TOPIC).unwrap().config(), small(), "it never took the place of the settings");
        }
        // A topic that has nothing else is deleted with it, and half deleted ones are cleared away.
        fs::rename(&topic, data.path().join(".del-t")).unwrap();
        fs::write(data.path().join(".del-t").join(UNFINISHED), b"").unwrap();
        let broker = open(data.path(), backend, &small());
        assert_eq!(broker.report().removed, [data.path().join(".del-t")]);
        broker.create_topic(TOPIC, small()).unwrap();
        broker.close().unwrap();
        // The engine makes files of that name, and nothing else.
        fs::create_dir(topic.join(UNFINISHED)).unwrap();
        let broker = open(data.path(), backend, &small());
        assert_eq!(broker.report().ignored, [topic.join(UNFINISHED)]);
        assert!(broker.alter_topic(TOPIC, altered).is_err());
        assert_eq!(broker.topic(TOPIC).unwrap().config(), small());
        assert!(topic.join(UNFINISHED).is_dir());
    });
}
