//! What there is to say of a partition, for people and dashboards.

use std::io;

use super::Partition;
use crate::error::{Error, Result};
use crate::io::{EntryKind, Open};

/// A partition, described.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PartitionDescription {
    /// Its number.
    pub number: u32,
    /// The offset of the first record that there is; that of the next one if there is none.
    pub first_offset: u64,
    /// One past the last record that was written.
    pub next_offset: u64,
    /// One past the last record that is on the device.
    pub durable_end: u64,
    /// How many segments it has, the one that takes the appends among them.
    pub segments: usize,
    /// The lengths of all files in its directory together, room that is allocated ahead among them.
    pub bytes_on_disk: u64,
    /// Why it takes no more appends, if it stopped at a failure; see [`Error::Failed`].
    pub failure: Option<Error>,
}

impl Partition {
    /// Its offsets, its segments, and what it takes on the disk.
    ///
    /// # Blocking
    /// While the length of each of its files is asked for.
    ///
    /// # Errors
    /// [`Error::Closed`], and what the system says.
    pub fn describe(&self) -> Result<PartitionDescription> {
        let shared = &self.0.shared;
        shared.check_open()?;
        // The ends in an order that keeps them in order: they only grow.
        let (first_offset, durable_end) = (shared.first_offset(), shared.durable_end());
        let description = PartitionDescription {
            number: self.0.number,
            first_offset,
            next_offset: shared.appended_end(),
            durable_end,
            segments: shared.with_segments(<[_]>::len),
            bytes_on_disk: shared.if_still_open(self.bytes_on_disk())?,
            failure: shared.has_failed().then(|| shared.why_stopped()),
        };
        Ok(description)
    }

    fn bytes_on_disk(&self) -> Result<u64> {
        let (disk, dir) = (&self.0.shared.disk, &self.0.shared.dir);
        let mut bytes = 0;
        for entry in disk.list(dir).map_err(Error::io("list", dir))? {
            if entry.kind != EntryKind::File {
                continue;
            }
            let path = dir.join(&entry.name);
            match disk.open(&path, Open::READ).and_then(|file| file.len()) {
                Ok(len) => bytes += len,
                // Renamed or removed meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(Error::io("measure", &path)(error)),
            }
        }
        Ok(bytes)
    }
}
