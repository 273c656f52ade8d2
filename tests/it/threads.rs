//! Producers, a partition's own threads and readers at work together, on a disk in memory and with few records: Miri runs this
//! (`scripts/miri`), and follows every access to the memory that commits, rings and the recent end of the log hand to each other.

use std::thread;

use sapwood::io::sim::SimDisk;
use sapwood::{Durability, Partition, ReadUpTo, TopicConfig};

use crate::sim::{open, tiny};
use crate::support::{Row, TOPIC, assert_in_order, batch, partition_of, read_all};

const PRODUCERS: u64 = 2;
const BATCHES: u64 = 8;
const RECORDS: u64 = PRODUCERS * BATCHES * 2;

/// The record of a producer; the longest is more than half of a commit.
fn value(producer: u64, number: u64) -> Vec<u8> {
    let len = [8, 900, 60, 2500][(number % 4) as usize];
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
fn follow(partition: &Partition, up_to: ReadUpTo) -> Vec<Row> {
    let mut reader = partition.reader_with(up_to, 8192).unwrap();
    let mut rows: Vec<Row> = Vec::new();
    while (rows.len() as u64) < RECORDS {
        let records = reader.read(rows.len() as u64, 4096).unwrap();
        rows.extend(records.iter().map(Row::from));
        if records.is_empty() {
            thread::yield_now();
        }
    }
    rows
}

#[test]
fn readers_at_the_end_follow_producers_through_memory_that_is_used_again() {
    for (slow_rings, durability) in [(false, Durability::Durable), (true, Durability::Durable), (true, Durability::Os)] {
        let sim = SimDisk::new(1);
        sim.overlap_rings(slow_rings);
        let broker = open(&sim);
        let topic = TopicConfig { durability, tail_bytes: 8192, queue_batches: 4, ..tiny(15_000) };
        broker.create_topic(TOPIC, topic).unwrap();
        let partition = partition_of(&broker);
        let (appended, durable) = thread::scope(|scope| {
            let partition = &partition;
            let readers = [ReadUpTo::Appended, ReadUpTo::Durable].map(|up_to| scope.spawn(move || follow(partition, up_to)));
            (0..PRODUCERS).for_each(|producer| drop(scope.spawn(move || produce(partition, producer))));
            // What was appended at a level that does not wait for the device is read as durable after this.
            readers.map(|reader| reader.join().unwrap()).into()
        });
        assert_in_order(&appended, 0);
        assert!(appended == durable);
        for producer in 0..PRODUCERS {
            let own = appended.iter().filter(|row| row.key == producer.to_be_bytes()).map(|row| row.value.clone());
            assert!(own.eq((0..2 * BATCHES).map(|number| value(producer, number))), "producer {producer}");
        }
        assert!(partition.stats().rolls > 0);
        drop(partition);
        broker.close().unwrap();
        assert!(read_all(&partition_of(&open(&sim))) == appended, "they are on the disk");
    }
}
