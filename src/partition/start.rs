//! The first offset that is given out, where that is not the first segment's base: what [`Partition::truncate_before`](super::Partition::truncate_before)
//! remembers of a truncation in the middle of a segment.
//!
//! A small file of the engine's own, never needed to read a partition: without it the segment's earlier records can be read again. It is
//! replaced as a whole, so that it always says the one or the other.

use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use super::PartitionReport;
use crate::error::{Error, Result};
use crate::guard::{self, Guard};
use crate::io::transfer::{read_up_to_at, write_all_at};
use crate::io::{Disk, Open};

/// The file's name in the partition's directory, and until it is whole.
pub(crate) const NAME: &str = "start";
const UNFINISHED: &str = "start.tmp";

const MAGIC: [u8; 8] = *b"sapwstrt";
const VERSION: u32 = 1;

/// Magic, version, offset; and then their checksum.
const CHECKED_BYTES: usize = 20;
const BYTES: usize = CHECKED_BYTES + 4;

/// Whether a file is called as one that was being replaced when something interrupted that.
pub(crate) fn is_unfinished(name: &OsStr) -> bool {
    name == UNFINISHED
}

/// The offset, or 0.
#[derive(Debug)]
pub(super) struct Start(AtomicU64);

impl Start {
    /// Reads the file, if there is one. What is not the engine's is told, and left alone.
    pub(super) fn open(disk: &dyn Disk, dir: &Path, next_offset: u64, report: &mut PartitionReport) -> Result<Self> {
        let path = dir.join(NAME);
        let offset = match look(disk, &path) {
            Ok(offset) => offset,
            Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
            Err(error) => {
                tracing::warn!(%error, path = %path.display(), "the first offset cannot be read; records before it can be read again");
                report.ignored.push(path);
                0
            }
        };
        let start = Self(AtomicU64::new(offset));
        if offset > next_offset {
            // The records up to there are gone, and their offsets are given again.
            start.set(disk, dir, next_offset)?;
        }
        Ok(start)
    }

    pub(super) fn offset(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Remembers another offset, durably.
    ///
    /// # Errors
    /// What the system says; the offset is as it was, or, after a power loss, the new one.
    pub(super) fn set(&self, disk: &dyn Disk, dir: &Path, offset: u64) -> Result<()> {
        let (path, unfinished) = (dir.join(NAME), dir.join(UNFINISHED));
        if disk.open(&path, Open::READ).is_ok() {
            // What another put there is not replaced.
            look(disk, &path).map_err(Error::io("replace", &path))?;
        }
        let written = || {
            let file = disk.open(&unfinished, Open::EMPTY)?;
            write_all_at(&*file, &encode(offset), 0, false)?;
            if guard::stands(Guard::StartSynced) { file.sync() } else { Ok(()) }
        };
        written().map_err(Error::io("write", &unfinished))?;
        disk.replace(&unfinished, &path).map_err(Error::io("replace", &path))?;
        if guard::stands(Guard::StartNameSynced) {
            disk.sync_dir(dir).map_err(Error::io("sync the directory", dir))?;
        }
        self.0.store(offset, Ordering::Release);
        Ok(())
    }
}

fn encode(offset: u64) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_be_bytes());
    bytes[12..CHECKED_BYTES].copy_from_slice(&offset.to_be_bytes());
    let crc = crc32fast::hash(&bytes[..CHECKED_BYTES]);
    bytes[CHECKED_BYTES..].copy_from_slice(&crc.to_be_bytes());
    bytes
}

/// What the file says.
fn look(disk: &dyn Disk, path: &Path) -> io::Result<u64> {
    let file = disk.open(path, Open::READ)?;
    // One more than there may be.
    let mut bytes = [0; BYTES + 1];
    let len = read_up_to_at(&*file, &mut bytes, 0)?;
    let offset = u64::from_be_bytes(bytes[12..CHECKED_BYTES].try_into().expect("8 bytes within"));
    if len == BYTES && bytes[..BYTES] == encode(offset) {
        Ok(offset)
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidData, "not what this engine writes"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::{Backend, OsDisk};

    #[test]
    fn what_is_damaged_says_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let disk = OsDisk::new(Backend::Posix).unwrap();
        let path = dir.path().join(NAME);
        let start = Start(AtomicU64::new(0));
        for offset in [1, u64::MAX, 0x1234_5678_9abc_def0] {
            start.set(&disk, dir.path(), offset).unwrap();
            assert_eq!((look(&disk, &path).unwrap(), start.offset()), (offset, offset));
        }
        let good = std::fs::read(&path).unwrap();
        for bit in 0..good.len() * 8 {
            let mut bytes = good.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            std::fs::write(&path, &bytes).unwrap();
            assert_eq!(look(&disk, &path).unwrap_err().kind(), io::ErrorKind::InvalidData, "bit {bit}");
            assert!(start.set(&disk, dir.path(), 7).is_err(), "another's file was replaced");
            assert_eq!((std::fs::read(&path).unwrap(), start.offset()), (bytes, 0x1234_5678_9abc_def0));
        }
        for len in (0..good.len()).chain([good.len() + 1]) {
            let mut bytes = good.clone();
            bytes.resize(len, 0);
            std::fs::write(&path, bytes).unwrap();
            assert!(look(&disk, &path).is_err(), "{len} bytes");
        }
    }
}
