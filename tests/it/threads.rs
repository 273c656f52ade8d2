//! Producers, a partition's own threads and readers at work together on a disk in memory, so that Miri and the thread sanitizer can
//! follow every access to the memory that commits, rings and the recent end of the log hand to each other.

use std::thread;

use sapwood::io::sim::SimDisk;
use sapwood::{Durability, Partition, ReaderConfig, TopicConfig, Visibility};

use crate::sim::{open, tiny};
use crate::support::{Row, TOPIC, assert_in_order, batch, partition_of, read_all};

const PRODUCERS: u64 = 2;
const BATCHES: u64 = if cfg!(miri) { 6 } else { 100 };
const RECORDS: u64 = PRODUCERS * BATCHES * 2;

/// A record of a producer. Two that wait are more than the writer encodes beside a write in the ring.
fn value(producer: u64, number: u64) -> Vec<u8> {
    let len = [8, 50_000, 60, 35_000][(number % 4) as usize];
    [&number.to_be_bytes()[..], &vec![(producer * 100 + number) as u8; len]].concat()
}

/// Appends by both calls, in turn.
fn produce(partition: &Partition, producer: u64) {
    let mut tickets = Vec::new();
    for number in (0..2 * BATCHES).step_by(2) {
        let key = producer.to_be_bytes();
        let two = batch(&[(key, value(producer, number)), (key, value(producer, number + 1))]);
        if number % 6 == 0 {
            partition.append_and_wait(two).unwrap();
        } else {
            tickets.push(partition.append(two).unwrap());
        }
    }
    tickets.into_iter().for_each(|ticket| assert_eq!(ticket.wait().map(|offsets| offsets.count()).unwrap(), 2));
}

/// Reads each record as soon as it is there.
fn follow(partition: &Partition, visibility: Visibility) -> Vec<Row> {
    let mut reader = partition.reader_with(ReaderConfig { piece_bytes: 64 << 10, ..ReaderConfig::up_to(visibility) }).unwrap();
    let mut rows: Vec<Row> = Vec::new();
    while (rows.len() as u64) < RECORDS {
        let records = reader.read(rows.len() as u64, 60_000).unwrap();
        rows.extend(records.iter().map(Row::from));
        if records.is_empty() {
            thread::yield_now();
        }
    }
    rows
}

#[test]
fn readers_at_the_end_follow_producers_through_memory_that_is_used_again() {
    for (slow_rings, durability, visibility) in
        [(true, Durability::Durable, Visibility::Durable), (false, Durability::Os, Visibility::Appended)]
    {
        let sim = SimDisk::new(1);
        sim.overlap_rings(slow_rings);
        let broker = open(&sim);
        let topic = TopicConfig { durability, commit_bytes: 128 << 10, tail_bytes: 256 << 10, queue_batches: 4, ..tiny(200_000) };
        broker.create_topic(TOPIC, topic).unwrap();
        let partition = partition_of(&broker);
        let rows = thread::scope(|scope| {
            let partition = &partition;
            let reader = scope.spawn(move || follow(partition, visibility));
            let producers: Vec<_> = (0..PRODUCERS).map(|producer| scope.spawn(move || produce(partition, producer))).collect();
            producers.into_iter().for_each(|producer| producer.join().unwrap());
            // At the levels that do not wait for the device, the last records are durable after this.
            partition.sync().unwrap();
            reader.join().unwrap()
        });
        assert_in_order(&rows, 0);
        for producer in 0..PRODUCERS {
            let own = rows.iter().filter(|row| row.key == producer.to_be_bytes()).map(|row| row.value.clone());
            assert!(own.eq((0..2 * BATCHES).map(|number| value(producer, number))), "producer {producer}");
        }
        assert!(partition.stats().rolls > 0);
        drop(partition);
        broker.close().unwrap();
        assert!(read_all(&partition_of(&open(&sim))) == rows, "they are on the disk");
    }
}
