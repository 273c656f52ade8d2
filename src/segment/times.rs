//! From a time to the records around it: by the time index, a block of it at a time.
//!
//! A guess by the times at both ends hits the block at once where records come evenly; every second guess is the middle, so it never takes more than
//! twice as long as a binary search. What is found is a hint, which the log must confirm.

use std::io;
use std::sync::Arc;

use super::index::ENTRY_BYTES;
use super::{Kind, Segment};
use crate::io::transfer::read_exact_at;
use crate::io::{Disk, File, Open, is_no_file};
use crate::record::{to_u64, to_usize};

/// Entries that are read at once: a page.
const BLOCK_ENTRIES: u64 = 256;

/// Neighbours in the time index, one before a time and one not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Around {
    /// The last indexed record before the time.
    pub(crate) before: Option<u64>,
    /// The first indexed record that is not.
    pub(crate) behind: Option<u64>,
}

/// A segment's time index, open from the first look-up on.
#[derive(Debug, Default)]
pub(crate) struct Times {
    file: Option<Arc<dyn File>>,
}

impl Times {
    /// The indexed records around `time`, in a segment whose records begin at `first` and end before `next`, as far as these are known.
    pub(crate) fn around(&mut self, disk: &dyn Disk, segment: &Segment, time: u64, first: Option<u64>, next: Option<u64>) -> Around {
        let behind = {
            let pending = segment.pending();
            let number = pending.partition_point(|entry| entry.timestamp < time);
            let behind = pending.get(number).map(|entry| entry.offset);
            if let Some(before) = number.checked_sub(1) {
                return Around { before: Some(pending[before].offset), behind };
            }
            behind
        };
        let found = self.open(disk, segment).and_then(|file| search(&*file, time, first, next));
        match found {
            Ok(found) => Around { behind: found.behind.or(behind), ..found },
            Err(error) => {
                if !is_no_file(&error) {
                    tracing::warn!(%error, path = %segment.path(Kind::TimeIndex).display(), "the time index cannot be read; searching the log instead");
                }
                Around::default()
            }
        }
    }

    fn open(&mut self, disk: &dyn Disk, segment: &Segment) -> io::Result<Arc<dyn File>> {
        if let Some(file) = &self.file {
            return Ok(Arc::clone(file));
        }
        let file = disk.open(&segment.path(Kind::TimeIndex), Open::READ)?;
        self.file = Some(Arc::clone(&file));
        Ok(file)
    }
}

/// The search in the file's entries; some answer also where they are not in order.
fn search(file: &dyn File, time: u64, first: Option<u64>, next: Option<u64>) -> io::Result<Around> {
    let (mut low, mut high) = (0, file.len()? / ENTRY_BYTES);
    let (mut low_time, mut high_time) = (first, next);
    let mut found = Around::default();
    let mut guesses = true;
    while low < high {
        let middle = low + (high - low) / 2;
        let guess = match (low_time, high_time) {
            (Some(from), Some(to)) => share(high - low, time, from, to),
            // Its last entries tell the other time.
            (Some(_), None) => Some(high - low - 1),
            _ => None,
        };
        let guess = guess.filter(|_| guesses);
        guesses = !guesses;
        let start = guess.map_or(middle, |guess| low + guess).saturating_sub(BLOCK_ENTRIES / 2).max(low);
        let block = read_block(file, start, high.min(start + BLOCK_ENTRIES))?;
        // An entry of zeros past the first is room, which lies behind every record.
        let is_before = |(number, entry): (u64, &(u64, u64))| entry.1 < time && (number == 0 || *entry != (0, 0));
        let before = (start..).zip(&block).take_while(|&entry| is_before(entry)).count();
        if let Some(entry) = before.checked_sub(1).map(|last| block[last]) {
            (found.before, low_time) = (Some(entry.0), Some(entry.1));
            low = start + to_u64(before);
        }
        if let Some(entry) = block.get(before) {
            (found.behind, high_time) = (Some(entry.0), Some(entry.1));
            high = start + to_u64(before);
        }
    }
    Ok(found)
}

/// The share of `count` that `time` has of the way between two others.
fn share(count: u64, time: u64, from: u64, to: u64) -> Option<u64> {
    let (way, whole) = (time.checked_sub(from)?, to.checked_sub(from)?);
    let share = (u128::from(count) * u128::from(way.min(whole))).checked_div(u128::from(whole))?;
    u64::try_from(share).ok().map(|share| share.min(count - 1))
}

fn read_block(file: &dyn File, start: u64, end: u64) -> io::Result<Vec<(u64, u64)>> {
    let mut bytes = vec![0; to_usize((end - start) * ENTRY_BYTES)];
    read_exact_at(file, &mut bytes, start * ENTRY_BYTES)?;
    let word = |bytes: &[u8]| u64::from_be_bytes(bytes.try_into().expect("8 of 16 bytes"));
    Ok(bytes.chunks_exact(to_usize(ENTRY_BYTES)).map(|entry| (word(&entry[..8]), word(&entry[8..]))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::Backend;
    use crate::io::OsDisk;
    use crate::io::transfer::write_all_at;

    /// The entries at the places that count, and how they are found with any knowledge of the ends.
    fn assert_found(times: &[u64]) {
        let dir = tempfile::tempdir().unwrap();
        let disk = OsDisk::new(Backend::Posix).unwrap();
        let file = disk.open(&dir.path().join("times"), Open::NEW).unwrap();
        let entries = (100_u64..).zip(times).flat_map(|(offset, time)| [offset.to_be_bytes(), time.to_be_bytes()]).flatten();
        write_all_at(&*file, &entries.collect::<Vec<_>>(), 0, false).unwrap();
        let ends = [None, times.first().copied()];
        let asked = times.iter().flat_map(|&time| [time.saturating_sub(1), time, time.saturating_add(1)]);
        for time in [0, u64::MAX].into_iter().chain(asked.step_by(7)) {
            let number = times.partition_point(|&there| there < time);
            let offset = |number: usize| (number < times.len()).then_some(100 + to_u64(number));
            let expected = Around { before: number.checked_sub(1).and_then(offset), behind: offset(number) };
            for first in ends {
                for next in [None, times.last().copied(), Some(u64::MAX)] {
                    assert_eq!(search(&*file, time, first, next).unwrap(), expected, "{time} among {}", times.len());
                }
            }
        }
    }

    #[test]
    fn every_time_is_found_whatever_the_spacing() {
        assert_found(&[]);
        assert_found(&[7]);
        assert_found(&[7; 1000]);
        assert_found(&(0..3000).map(|number| 50 + number * 10).collect::<Vec<_>>());
        assert_found(&(0..3000).map(|number| number * number * number).collect::<Vec<_>>());
        assert_found(&(0..600).map(|number| if number < 599 { number / 100 } else { u64::MAX }).collect::<Vec<_>>());
    }
}
