//! Timestamps: the clock's, but never less than the one before, whatever the clock does.

use std::path::Path;
use std::sync::Arc;

use sapwood::clock::Clock;
use sapwood::io::sim::SimDisk;
use sapwood::io::{Disk, OsDisk};
use sapwood::{Backend, Broker, Partition};

use crate::damage;
use crate::format::{self, Content, Layout};
use crate::oracle::assert_closed;
use crate::sim::{self, DATA, each_disk};
use crate::support::{
    BACKENDS, TOPIC, TestClock, append, batch, config, data_with, partition_dir, partition_of, read_all, scratch, segments_of, small,
};

fn open_at(disk: Arc<dyn Disk>, clock: &Arc<TestClock>, data: &Path) -> Broker {
    let clock: Arc<dyn Clock> = clock.clone();
    Broker::open_on(disk, clock, data, config(Backend::Auto, segments_of(270))).unwrap()
}

fn times(partition: &Partition) -> Vec<u64> {
    read_all(partition).iter().map(|row| row.timestamp).collect()
}

#[test]
fn a_record_bears_the_clocks_time_or_that_of_the_record_before() {
    each_disk(|disk, data| {
        let clock = Arc::new(TestClock::at(0));
        let broker = open_at(disk(), &clock, data);
        let partition = broker.create_topic(TOPIC, small()).unwrap().partition(0).unwrap();
        let mut expected = Vec::new();
        for (wall, stored) in
            [(0, 0), (0, 0), (100, 100), (200, 200), (150, 200), (199, 200), (201, 201), (u64::MAX, u64::MAX), (5, u64::MAX)]
        {
            clock.set(wall);
            append(&partition, b"k", b"v");
            expected.push(stored);
            assert_eq!(times(&partition), expected);
        }
    });
}

#[test]
fn time_never_goes_back_across_rolls_and_reopening() {
    each_disk(|disk, data| {
        let clock = Arc::new(TestClock::at(1000));
        let mut broker = open_at(disk(), &clock, data);
        broker.create_topic(TOPIC, segments_of(270)).unwrap();
        append(&partition_of(&broker), b"user-1", b"value-00000");
        clock.set(10);
        for round in 0..5 {
            let partition = partition_of(&broker);
            for _ in 0..10 {
                append(&partition, b"user-1", b"value-00000");
            }
            drop(partition);
            if round % 2 == 0 {
                broker.close().unwrap()
            } else {
                drop(broker)
            }
            broker = open_at(disk(), &clock, data);
        }
        let partition = partition_of(&broker);
        assert_eq!(times(&partition), [1000; 51]);
        // And exactly on a roll: the new segment's first record looks at the old one's last.
        assert!(partition.stats().rolls <= 1);
        clock.set(1001);
        append(&partition, b"user-1", b"value-00000");
        assert_eq!(*times(&partition).last().unwrap(), 1001);
    });
}

#[test]
fn equal_times_over_several_segments_are_fine() {
    each_disk(|disk, data| {
        let clock = Arc::new(TestClock::at(77));
        let broker = open_at(disk(), &clock, data);
        let partition = broker.create_topic(TOPIC, segments_of(270)).unwrap().partition(0).unwrap();
        let records = vec![("user-1", "value-00000"); 24];
        partition.append(batch(&records)).unwrap().wait().unwrap();
        assert_eq!(times(&partition), [77; 24]);
        assert_eq!(partition.stats().rolls, 3);
    });
}

#[test]
fn an_empty_active_segment_remembers_the_time_before_it() {
    for name in ["empty-log", "prealloc-only", "empty-log-no-index"] {
        for backend in BACKENDS {
            let (data, dir) = data_with("demo-36-segment-270");
            damage::apply(&dir, name);
            let clock = Arc::new(TestClock::at(10));
            let broker = open_at(Arc::new(OsDisk::new(backend).unwrap()), &clock, data.path());
            append(&partition_of(&broker), b"k", b"v");
            assert_eq!(*times(&partition_of(&broker)).last().unwrap(), format::BASE_TIME + 35 * 1_000_000, "{name}");
            broker.close().unwrap();
            assert_closed(&dir, 1);
        }
    }
}

#[test]
fn times_of_another_writer_are_kept_to_also_where_they_are_strange() {
    for backend in BACKENDS {
        // From the year 2554, in the last record.
        let (data, dir) = data_with("demo-36-segment-270");
        damage::apply(&dir, "future-timestamp");
        let clock = Arc::new(TestClock::at(format::BASE_TIME));
        let broker = open_at(Arc::new(OsDisk::new(backend).unwrap()), &clock, data.path());
        for _ in 0..8 {
            append(&partition_of(&broker), b"user-1", b"value-00000");
        }
        assert_eq!(times(&partition_of(&broker))[36..], [u64::MAX; 9]);
        broker.close().unwrap();

        // A record that went back itself is served as it is; what follows goes on from the clock or the last one.
        let (data, dir) = data_with("demo-36-segment-270");
        damage::apply(&dir, "clock-backwards");
        let broker = open_at(Arc::new(OsDisk::new(backend).unwrap()), &clock, data.path());
        let before = times(&partition_of(&broker));
        assert_eq!(before.len(), 37);
        assert!(before[36] < before[35]);
        clock.set(1);
        append(&partition_of(&broker), b"k", b"v");
        let after = times(&partition_of(&broker));
        assert!(after[37] >= before[36]);
        broker.close().unwrap();
    }
}

#[test]
fn each_records_time_is_in_the_time_index() {
    for backend in BACKENDS {
        let data = scratch();
        let clock = Arc::new(TestClock::at(5));
        clock.step_by(3);
        let broker = open_at(Arc::new(OsDisk::new(backend).unwrap()), &clock, data.path());
        let partition = broker.create_topic(TOPIC, segments_of(270)).unwrap().partition(0).unwrap();
        for number in 0..20 {
            append(&partition, b"user-1", format!("value-{number:05}").as_bytes());
        }
        let times = times(&partition);
        assert!(times.is_sorted() && times[0] < times[19], "{times:?}");
        drop(partition);
        broker.close().unwrap();
        assert_closed(&partition_dir(data.path()), 1);
    }
}

#[test]
fn the_machines_clock_is_the_default() {
    let now = || u64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos()).unwrap();
    let data = scratch();
    let before = now();
    let (broker, partition) = crate::support::create(data.path(), Backend::Auto, &small());
    append(&partition, b"k", b"v");
    let time = times(&partition)[0];
    // The machine's clock may be set while this runs, but hardly by a year.
    let year = 365 * 86_400 * 1_000_000_000;
    assert!(time > before - year && time < now() + year, "{time}");
    drop((broker, partition));
}

#[test]
fn a_fixture_written_with_one_time_keeps_it() {
    let same: Vec<_> = (0..10).map(|_| Content::new(b"k", b"v", 42)).collect();
    let sim = SimDisk::new(3);
    let scratch = scratch();
    format::write_partition(scratch.path(), &same, Layout { segment_bytes: 100, ..Layout::default() });
    sim.import(scratch.path(), &sim::dir()).unwrap();
    let clock = Arc::new(TestClock::at(41));
    let broker = open_at(Arc::new(sim.clone()), &clock, Path::new(DATA));
    append(&partition_of(&broker), b"k", b"v");
    assert_eq!(times(&partition_of(&broker)), [42; 11]);
}
