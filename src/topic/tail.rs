//! Reading the ends of all partitions of a topic, as records come.

use std::time::Duration;

use super::{PIECE_BYTES, Topic};
use crate::error::{Error, Result};
use crate::partition::{OwnedRecord, ReaderConfig, Records, Tail, Visibility};
use crate::record::{to_u64, to_usize};

/// Reads on in all partitions of a topic as they grow: made by [`Topic::tail`]. Partitions that have something to read take turns, batch by batch;
/// within each the order is that of its offsets. Belongs to one thread at a time.
///
/// Where a partition failed, or all are closed, that is told once no other has anything left to read, and again each time; where a record is
/// damaged, each time when it is that partition's turn. [`Self::tail_of`] leads on.
///
/// ```
/// # fn main() -> sapwood::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let broker = sapwood::Broker::open(dir.path(), Default::default())?;
/// # broker.create_topic("orders", sapwood::TopicConfig { partitions: 3, ..Default::default() })?;
/// # broker.produce("orders", None, b"hello")?;
/// use std::time::Duration;
///
/// let topic = broker.topic("orders")?;
/// let mut tail = topic.tail(topic.partitions().iter().map(|partition| partition.first_offset()))?;
/// while let Some((partition, records)) = tail.next_batch(1 << 20, Some(Duration::from_millis(10)))? {
///     println!("{} records of partition {partition}", records.len());
/// }
/// println!("nothing came for a while; all was read up to {:?}", tail.positions());
/// # assert_eq!(tail.positions().iter().sum::<u64>(), 1);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct TopicTail {
    topic: Topic,
    /// By partition.
    tails: Vec<Tail>,
    /// Whose turn it is.
    turn: usize,
}

impl Topic {
    /// Reads the durable records of all partitions, each from an offset of its own on, in the order of their numbers, and waits for more at their ends.
    ///
    /// Each partition takes a reader, with 256 KiB of memory.
    ///
    /// # Errors
    /// As for [`Partition::tail`](crate::Partition::tail), and [`Error::InvalidConfig`] unless there is one offset for each partition.
    pub fn tail(&self, from: impl IntoIterator<Item = u64>) -> Result<TopicTail> {
        self.tail_with(from, Visibility::default())
    }

    /// The same up to the watermark asked for.
    ///
    /// # Errors
    /// As for [`Self::tail`].
    pub fn tail_with(&self, from: impl IntoIterator<Item = u64>, visibility: Visibility) -> Result<TopicTail> {
        let from: Vec<u64> = from.into_iter().collect();
        let (value, partitions) = (to_u64(from.len()), self.num_partitions().into());
        if value != partitions {
            return Err(Error::InvalidConfig { name: "the number of offsets", value, minimum: partitions, maximum: partitions });
        }
        let config = ReaderConfig { piece_bytes: PIECE_BYTES, ..ReaderConfig::up_to(visibility) };
        let tails = self.partitions().into_iter().zip(from).map(|(partition, offset)| partition.tail_by(offset, config.clone()));
        Ok(TopicTail { topic: self.clone(), tails: tails.collect::<Result<_>>()?, turn: 0 })
    }
}

impl TopicTail {
    /// The next records of some partition, with its number, as many as fit in `max_bytes` and at least one, as soon as there are any; none if the
    /// time is over before. Without a timeout it waits as long as it takes; [`Duration::ZERO`] takes what is there.
    ///
    /// # Blocking
    /// While nothing comes, and for the device, where neither the engine's memory nor the page cache holds what is read.
    ///
    /// # Errors
    /// As for [`Tail::next_batch`]; see [`TopicTail`].
    pub fn next_batch(&mut self, max_bytes: usize, timeout: Option<Duration>) -> Result<Option<(u32, Records<'_>)>> {
        let Some(number) = self.next_turn(timeout)? else { return Ok(None) };
        let records = self.tails[to_usize(number.into())].next_batch(max_bytes, Some(Duration::ZERO))?;
        Ok(records.map(|records| (number, records)))
    }

    /// The next record of some partition, with its number, in memory of its own. As [`Self::next_batch`] in all else.
    ///
    /// # Errors
    /// As for that.
    pub fn next_record(&mut self, timeout: Option<Duration>) -> Result<Option<(u32, OwnedRecord)>> {
        let Some(number) = self.next_turn(timeout)? else { return Ok(None) };
        let record = self.tails[to_usize(number.into())].next_record(Some(Duration::ZERO))?;
        Ok(record.map(|record| (number, record)))
    }

    /// The offset of the record that comes next in each partition.
    pub fn positions(&self) -> Vec<u64> {
        self.tails.iter().map(Tail::position).collect()
    }

    /// The tail of one partition, to go on from elsewhere: [`Tail::seek`], [`Tail::skip_damaged`].
    ///
    /// # Errors
    /// [`Error::PartitionNotFound`].
    pub fn tail_of(&mut self, partition: u32) -> Result<&mut Tail> {
        self.topic.partition(partition)?;
        Ok(&mut self.tails[to_usize(partition.into())])
    }

    /// Waits for a partition that has something to read, and passes the turn on to the one behind it.
    fn next_turn(&mut self, timeout: Option<Duration>) -> Result<Option<u32>> {
        let Some(number) = Tail::wait_for_any(&self.tails, self.turn, timeout)? else { return Ok(None) };
        self.turn = number + 1;
        Ok(u32::try_from(number).ok())
    }
}
