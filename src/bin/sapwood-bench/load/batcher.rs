//! Makes the batches of an append: one without keys, one per partition that the keys go to with them.

use std::ops::Range;

use sapwood::{Batch, HEADER_BYTES};

use super::Load;
use crate::units::{to_u64, to_usize};

/// One producer's. Its memory is used again and again; that of a batch belongs to the engine from the append on.
pub struct Batcher<'a> {
    load: &'a Load<'a>,
    producer: u32,
    key: Vec<u8>,
    value: Vec<u8>,
    /// With keys: the batch under way for each partition.
    split: Vec<Batch>,
}

impl<'a> Batcher<'a> {
    /// For one producer.
    pub fn new(load: &'a Load<'a>, producer: u32) -> Self {
        let partitions = if load.payload.keyed() { load.partitions.len() } else { 0 };
        Self { load, producer, key: Vec::new(), value: Vec::new(), split: vec![Batch::new(); partitions] }
    }

    /// The batches of these records, with the partition of each.
    pub fn make(&mut self, sequences: &Range<u64>, into: &mut Vec<(u32, Batch)>) {
        into.clear();
        if self.load.payload.keyed() {
            self.split_by_key(sequences, into);
        } else {
            into.push((self.turn(sequences.start), self.whole(sequences)));
        }
    }

    /// Without keys an append goes to the next partition.
    fn turn(&self, sequence: u64) -> u32 {
        let turn = sequence / self.load.shape.batch % to_u64(self.load.partitions.len());
        u32::try_from(turn).expect("less than the number of partitions, a u32")
    }

    fn whole(&mut self, sequences: &Range<u64>) -> Batch {
        let payload = self.load.payload;
        let bytes = sequences.clone().map(|sequence| to_u64(HEADER_BYTES) + payload.value_bytes(sequence)).sum();
        let mut batch = Batch::with_capacity(to_usize(bytes));
        for sequence in sequences.clone() {
            push(&mut batch, None, payload.value(self.producer, sequence, &mut self.value));
        }
        batch
    }

    fn split_by_key(&mut self, sequences: &Range<u64>, into: &mut Vec<(u32, Batch)>) {
        let payload = self.load.payload;
        for sequence in sequences.clone() {
            let key = payload.key(sequence, &mut self.key);
            let partition = self.load.topic.partition_for(key);
            let batch = &mut self.split[usize::try_from(partition).expect("a u32 fits in usize")];
            push(batch, key, payload.value(self.producer, sequence, &mut self.value));
        }
        for (partition, batch) in (0..).zip(&mut self.split) {
            if !batch.is_empty() {
                into.push((partition, std::mem::take(batch)));
            }
        }
    }
}

fn push(batch: &mut Batch, key: Option<&[u8]>, value: &[u8]) {
    batch.push(key, value).expect("the largest record was checked against the format's limit before the run");
}
