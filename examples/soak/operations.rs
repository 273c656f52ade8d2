//! What is done to logs beside appending and reading: one function each. It says what the history must know before it begins, and what was
//! acknowledged after it.

use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use sapwood::{Broker, BrokerConfig, Partition, TopicConfig};

use crate::load::{CUT, KEPT, Producer, Shared, say};
use crate::oracle;
use crate::record::{Order, Place, Rng, Tag};

type Operation = fn(&Shared, &Place, &Partition, &mut Rng);

/// Those that may come at any time, beside producers.
const OPERATIONS: [(&str, Operation); 6] = [
    ("sync", |_, _, partition, _| partition.sync().unwrap()),
    ("roll", |_, _, partition, _| partition.roll().unwrap()),
    ("truncate_before", truncate_before),
    ("enforce_retention", enforce_retention),
    ("offset_for_time", offset_for_time),
    ("export", export),
];

/// Does one after the other, each to some partition.
pub fn run(shared: &Shared, mut rng: Rng) {
    while shared.goes_on() {
        let (place, partition) = &shared.partitions[rng.below(shared.partitions.len() as u64) as usize];
        // Logs that grow are shortened more often than they would be otherwise.
        let is_long = partition.next_offset() - partition.first_offset() > 3000;
        let (name, operation) = if is_long && place.topic != KEPT { OPERATIONS[2] } else { rng.one_of(&OPERATIONS) };
        operation(shared, place, partition, &mut rng);
        say(&format!("O {name}"));
        std::thread::sleep(Duration::from_micros(rng.below(20_000)));
    }
}

fn truncate_before(_: &Shared, place: &Place, partition: &Partition, rng: &mut Rng) {
    let Place { topic, partition: number, .. } = place;
    // The one has a length of its own; of the other the end moves both ways, and is its own thread's.
    if topic == KEPT || topic == CUT {
        return;
    }
    let (first, end) = (partition.first_offset(), partition.durable_end());
    let offset = if rng.below(8) == 0 { end } else { first + rng.below(end - first + 1) };
    say(&format!("B {topic} {number} {offset}"));
    let removed = partition.truncate_before(offset).unwrap();
    assert!(partition.first_offset() >= offset && removed.records.end >= offset);
    say(&format!("b {topic} {number} {offset}"));
}

fn enforce_retention(shared: &Shared, _: &Place, _: &Partition, _: &mut Rng) {
    let report = shared.broker.enforce_retention().unwrap();
    assert!(report.failed.is_empty(), "{:?}", report.failed);
    for removed in report.removed {
        assert_eq!(removed.topic, KEPT);
        say(&format!("b {} {} {}", removed.topic, removed.partition, removed.records.end));
    }
}

/// The time of any record leads to it, or to one before it of the same time.
fn offset_for_time(_: &Shared, place: &Place, partition: &Partition, rng: &mut Rng) {
    let (first, end) = (partition.first_offset(), partition.durable_end());
    if first == end || place.topic == CUT {
        return;
    }
    let offset = first + rng.below(end - first);
    match partition.read_one(offset) {
        Ok(record) => {
            let found = partition.offset_for_time(record.timestamp).unwrap();
            // What was removed meanwhile is not found any more.
            assert!(found <= offset || partition.first_offset() >= found, "{place:?}: {found} for the time of {offset}");
        }
        Err(error) => assert!(error.is_out_of_range(), "{place:?}: {error}"),
    }
}

/// A snapshot is whole, and stays so whatever becomes of the log.
fn export(shared: &Shared, place: &Place, partition: &Partition, _: &mut Rng) {
    // Beside the data, where links are possible; a kill leaves it.
    let to = shared.data.with_extension("export");
    let _ = std::fs::remove_dir_all(&to);
    let exported = partition.export(&to).unwrap();
    let report = oracle::assert_sound(&to);
    assert_eq!(report.records.len() as u64, report.next_offset - report.first_offset, "{place:?}");
    assert!(exported.records.is_empty() || exported.records.end == report.next_offset, "{place:?}: {exported:?}");
    let mut order = Order::default();
    for (offset, record) in (report.first_offset..).zip(&report.records) {
        assert_eq!(record.offset, offset, "{place:?}");
        order.follow(place, offset, Tag::check(place, shared.seed, (offset, &record.key, &record.value)));
    }
    if !report.records.is_empty() {
        move_to_another(shared, place, &to, exported.records);
    }
    std::fs::remove_dir_all(&to).unwrap();
}

/// Another broker takes the snapshot in, goes on with it, seals it, and is opened again.
fn move_to_another(shared: &Shared, place: &Place, from: &Path, records: Range<u64>) {
    let data = shared.data.with_extension("import");
    let _ = std::fs::remove_dir_all(&data);
    let settings = TopicConfig { preallocate_bytes: 64 << 10, ..TopicConfig::default() };
    let another = Broker::open(&data, BrokerConfig::default()).unwrap();
    another.create_topic("moved", settings).unwrap();
    let report = another.import_partition("moved", 0, from).unwrap();
    assert_eq!(report.first_offset..report.next_offset, records, "{place:?}");
    another.produce("moved", Some(b"k"), b"one more").unwrap();
    let moved = another.topic("moved").unwrap().partition(0).unwrap();
    assert_eq!(moved.seal().unwrap(), records.start..records.end + 1, "{place:?}");
    drop(moved);
    another.close().unwrap();
    let another = Broker::open(&data, BrokerConfig::default()).unwrap();
    assert!(another.produce("moved", Some(b"k"), b"too late").unwrap_err().is_moved(), "{place:?}");
    let moved = another.topic("moved").unwrap().partition(0).unwrap();
    let (mut reader, mut next) = (moved.reader().unwrap(), records.start);
    while next < records.end {
        let there = reader.read(next, 100_000).unwrap();
        for record in there.iter().filter(|record| record.offset < records.end) {
            Tag::check(place, shared.seed, (record.offset, record.key, record.value));
        }
        next = there.next_offset();
    }
    drop((reader, moved));
    another.close().unwrap();
    std::fs::remove_dir_all(&data).unwrap();
    say("O import");
    say("O seal");
}

/// Cuts the end of the log of which `producer` is the only one.
pub fn truncate_after(place: &Place, partition: &Partition, producer: &mut Producer<'_>) {
    let Place { topic, partition: number, .. } = place;
    let (first, end) = (partition.first_offset(), partition.next_offset());
    // Mostly a little, now and then all.
    let back = if producer.rng.below(12) == 0 { end - first } else { producer.rng.below((end - first).min(60) + 1) };
    let offset = end - back;
    say(&format!("X {topic} {number} {offset}"));
    partition.truncate_after(offset).unwrap();
    say(&format!("x {topic} {number} {offset} {}", producer.tag.sequence));
    say("O truncate_after");
    // It need not grow for ever either; nobody else shortens this one.
    if end - first > 3000 {
        let keep = first + producer.rng.below(offset - first + 1);
        say(&format!("B {topic} {number} {keep}"));
        partition.truncate_before(keep).unwrap();
        say(&format!("b {topic} {number} {keep}"));
        say("O truncate_before");
    }
}
