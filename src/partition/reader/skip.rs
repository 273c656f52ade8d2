//! Going on behind damage.

use std::ops::Range;
use std::sync::Arc;

use super::{Cursor, LOOK_BYTES, Reader};
use crate::error::Result;
use crate::partition::Shared;
use crate::segment::{Anchors, NextWhole};

/// What a reader passed over: see [`Reader::skip_damaged`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Skipped {
    /// The records that cannot be had; at the end of the range is the next one that can, or the end of the log.
    pub records: Range<u64>,
    /// Bytes of the logs where they should be; 0 if these are not there either.
    pub bytes: u64,
}

impl Reader {
    /// Where a read failed with [`Error::Damaged`](crate::Error::Damaged) or [`Error::RecordsMissing`](crate::Error::RecordsMissing): goes to the next whole
    /// record from `offset` on, and tells what was passed over. The next read from there takes no look-up. Where nothing is damaged, nothing is passed over.
    ///
    /// The next record is found by the lengths in the records' headers, where they lead from the damage to the next record that the index has; else
    /// that one is it, or the beginning of the next segment. Whole records that neither leads to are passed over, too: bytes are
    /// not searched for what looks like a record, for a value may contain one. Checksums are verified here also by a reader that does without.
    ///
    /// ```
    /// # fn main() -> sapwood::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let broker = sapwood::Broker::open(dir.path(), Default::default())?;
    /// # broker.create_topic("orders", Default::default())?;
    /// # let mut reader = broker.topic("orders")?.partition(0)?.reader()?;
    /// let (mut next, mut lost) = (0, 0);
    /// loop {
    ///     match reader.read(next, 1 << 20) {
    ///         Ok(records) if records.is_empty() => break,
    ///         Ok(records) => next = records.next_offset(),
    ///         Err(error) if error.is_damage() => {
    ///             let skipped = reader.skip_damaged(next)?;
    ///             println!("{error}; {} records in {} bytes", skipped.records.end - skipped.records.start, skipped.bytes);
    ///             (next, lost) = (skipped.records.end, lost + skipped.records.end - skipped.records.start);
    ///         }
    ///         Err(error) => return Err(error),
    ///     }
    /// }
    /// # assert_eq!(lost, 0);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Blocking
    /// For the device. It may take as long as to read a segment, where that has no index.
    ///
    /// # Errors
    /// [`Error::OffsetOutOfRange`](crate::Error::OffsetOutOfRange), [`Error::Closed`](crate::Error::Closed), and [`Error::Io`](crate::Error::Io) where a log cannot be read at all.
    pub fn skip_damaged(&mut self, offset: u64) -> Result<Skipped> {
        let shared = Arc::clone(&self.partition.0.shared);
        shared.check_open()?;
        loop {
            self.see_cuts(&shared, offset)?;
            let end = self.config.visibility.check(&shared, offset)?.end;
            self.forget();
            if offset == end {
                return Ok(Skipped { records: offset..end, bytes: 0 });
            }
            let found = self.next_whole(&shared, offset, end);
            if let Some(found) = self.settle(&shared, offset, found) {
                return found;
            }
        }
    }

    fn next_whole(&mut self, shared: &Shared, offset: u64, end: u64) -> Result<Skipped> {
        let mut bytes = 0;
        let mut segment = shared.segment_of(offset);
        while let Some(here) = segment.take_if(|segment| segment.base() < end) {
            let base = here.base();
            let next = shared.segment_after(base);
            let visible = self.config.visibility.end_of(&here);
            self.open(shared, Arc::clone(&here))?;
            let Some(log) = &self.log else { unreachable!("opened above") };
            let anchors = Anchors::new(&*shared.disk, &here, &*log.file, visible);
            let NextWhole { place, damaged_from } = anchors.next_whole(offset.max(base), next.as_ref().map_or(end, |next| next.base()))?;
            // What lies behind the beginning of the next segment is not this one's.
            let place = place.filter(|place| place.offset < end && next.as_ref().is_none_or(|next| place.offset < next.base()));
            let until = place.map_or(anchors.end(), |place| place.position);
            bytes += damaged_from.map_or(0, |from| until - from);
            if let Some(place) = place {
                self.cursor = Some(Cursor { offset: place.offset, base, position: place.position, is_hint: false });
                self.first_bytes = Some(LOOK_BYTES);
                return Ok(Skipped { records: offset..place.offset, bytes });
            }
            segment = next;
        }
        Ok(Skipped { records: offset..end, bytes })
    }
}
