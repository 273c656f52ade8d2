//! Small files of the engine's own in a partition's directory, each with one offset. Never needed to read the partition.
//!
//! A note is replaced as a whole, so that it always says the one or the other. What another put under its name is left alone.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::guard::{self, Guard};
use crate::io::transfer::{read_up_to_at, write_all_at};
use crate::io::{Disk, Entry, EntryKind, Open};
use crate::segment::remove_if_there;

/// Which note.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Note {
    /// The first offset that is given out, where that is not the first segment's base.
    Start,
    /// That the partition takes no more appends here, because it moves elsewhere, and where it ended.
    Moved,
}

const ALL: [Note; 2] = [Note::Start, Note::Moved];

const VERSION: u32 = 1;

/// Magic, version, offset; and then their checksum.
const CHECKED_BYTES: usize = 20;
const BYTES: usize = CHECKED_BYTES + 4;

/// Whether a file is called as one of them, or as one that is not whole yet.
pub(super) fn is_name(name: &OsStr) -> bool {
    ALL.iter().any(|note| name == note.name()) || is_unfinished(name)
}

/// Whether a file is called as one that was being replaced when something interrupted that.
pub(crate) fn is_unfinished(name: &OsStr) -> bool {
    ALL.iter().any(|note| name == note.unfinished().as_str())
}

/// Makes durable which notes there are, where one was found that is served by: whoever wrote it may have crashed before its name was.
pub(super) fn sync_names(disk: &dyn Disk, dir: &Path) -> Result<()> {
    if guard::stands(Guard::OpeningSyncsNames) { disk.sync_dir(dir).map_err(Error::io("sync the directory", dir)) } else { Ok(()) }
}

/// Whether the partition in the directory moved. A note that is the engine's tells that also where it is damaged.
///
/// # Errors
/// What the system says to it: two places that take appends would be worse than none.
pub(crate) fn has_moved(disk: &dyn Disk, dir: &Path) -> Result<bool> {
    Note::Moved.look(disk, dir)?.map(|end| end.is_some()).or_else(|error| {
        let (path, moved) = (Note::Moved.path(dir), Note::Moved.is_ours(disk, dir));
        if moved {
            tracing::warn!(%error, path = %path.display(), "the note that the partition moved is damaged; it takes no appends until it is unsealed");
        } else {
            tracing::warn!(%error, path = %path.display(), "what is called as the note that the partition moved is another's; it takes appends");
        }
        Ok(moved)
    })
}

/// The first offset that is given out by the partition in the directory, where that is noted.
pub(crate) fn noted_start(disk: &dyn Disk, dir: &Path) -> Option<u64> {
    Note::Start.read(disk, dir).ok().flatten()
}

/// What has the name of a note, and says nothing.
pub(crate) fn find_unsound(disk: &dyn Disk, dir: &Path) -> Vec<PathBuf> {
    let is_unsound = |note: &Note| note.read(disk, dir).is_err_and(|error| error.kind() == io::ErrorKind::InvalidData);
    ALL.into_iter().filter(is_unsound).map(|note| note.path(dir)).collect()
}

impl Note {
    fn name(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Moved => "moved",
        }
    }

    fn unfinished(self) -> String {
        format!("{}.tmp", self.name())
    }

    fn magic(self) -> [u8; 8] {
        match self {
            Self::Start => *b"sapwstrt",
            Self::Moved => *b"sapwmovd",
        }
    }

    pub(super) fn path(self, dir: &Path) -> PathBuf {
        dir.join(self.name())
    }

    /// What it says; none if there is none.
    ///
    /// # Errors
    /// What the system says; `InvalidData` to something that this engine does not write.
    pub(super) fn read(self, disk: &dyn Disk, dir: &Path) -> io::Result<Option<u64>> {
        let file = match disk.open(&self.path(dir), Open::READ) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        // One byte more than there may be.
        let mut bytes = [0; BYTES + 1];
        let len = read_up_to_at(&*file, &mut bytes, 0)?;
        let offset = u64::from_be_bytes(bytes[12..CHECKED_BYTES].try_into().expect("8 bytes within"));
        if len == BYTES && bytes[..BYTES] == self.encode(offset) {
            Ok(Some(offset))
        } else {
            Err(io::Error::new(io::ErrorKind::InvalidData, "not what this engine writes"))
        }
    }

    /// What it says, for an opening. The inner error says that what has its name is another's.
    ///
    /// # Errors
    /// What the system says to a file: it may say what must not be passed over.
    pub(super) fn look(self, disk: &dyn Disk, dir: &Path) -> Result<io::Result<Option<u64>>> {
        let is_file = || {
            let is_this = |entry: &Entry| entry.name == self.name() && entry.kind == EntryKind::File;
            disk.list(dir).map_or(true, |entries| entries.iter().any(is_this))
        };
        match self.read(disk, dir) {
            Err(error) if error.kind() != io::ErrorKind::InvalidData && is_file() => Err(Error::io("read", &self.path(dir))(error)),
            found => Ok(found),
        }
    }

    /// Whether the engine wrote what has its name, be it damaged since.
    fn is_ours(self, disk: &dyn Disk, dir: &Path) -> bool {
        let mut magic = [0; 8];
        let read = disk.open(&self.path(dir), Open::READ).and_then(|file| read_up_to_at(&*file, &mut magic, 0));
        read.is_ok() && magic == self.magic()
    }

    /// Whether it is there. What is another's is refused, for it is left alone.
    fn is_there(self, disk: &dyn Disk, dir: &Path) -> io::Result<bool> {
        match self.read(disk, dir) {
            Err(error) if error.kind() == io::ErrorKind::InvalidData && self.is_ours(disk, dir) => Ok(true),
            read => read.map(|offset| offset.is_some()),
        }
    }

    /// Writes it, durably.
    ///
    /// # Errors
    /// What the system says; it says what it said before, or this, and a power loss may change which.
    pub(super) fn write(self, disk: &dyn Disk, dir: &Path, offset: u64) -> Result<()> {
        let (path, unfinished) = (self.path(dir), dir.join(self.unfinished()));
        self.is_there(disk, dir).map_err(Error::io("replace", &path))?;
        let written = || {
            let file = disk.open(&unfinished, Open::EMPTY)?;
            write_all_at(&*file, &self.encode(offset), 0, false)?;
            if guard::stands(Guard::NotesSynced) { file.sync() } else { Ok(()) }
        };
        written().map_err(Error::io("write", &unfinished))?;
        disk.replace(&unfinished, &path).map_err(Error::io("replace", &path))?;
        if guard::stands(Guard::NoteNamesSynced) { disk.sync_dir(dir).map_err(Error::io("sync the directory", dir)) } else { Ok(()) }
    }

    /// Removes it, durably, if there is one.
    pub(super) fn remove(self, disk: &dyn Disk, dir: &Path) -> Result<()> {
        let path = self.path(dir);
        if self.is_there(disk, dir).map_err(Error::io("remove", &path))? {
            disk.remove_file(&path).map_err(Error::io("remove", &path))?;
        }
        // Also where there is none: an attempt before this one may have failed here.
        disk.sync_dir(dir).map_err(Error::io("sync the directory", dir))
    }

    /// Removes what an interrupted write may have left, too.
    pub(super) fn remove_files(self, disk: &dyn Disk, dir: &Path) -> io::Result<()> {
        remove_if_there(disk, &dir.join(self.unfinished()))?;
        remove_if_there(disk, &self.path(dir))
    }

    fn encode(self, offset: u64) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        bytes[..8].copy_from_slice(&self.magic());
        bytes[8..12].copy_from_slice(&VERSION.to_be_bytes());
        bytes[12..CHECKED_BYTES].copy_from_slice(&offset.to_be_bytes());
        let crc = crc32fast::hash(&bytes[..CHECKED_BYTES]);
        bytes[CHECKED_BYTES..].copy_from_slice(&crc.to_be_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::{Backend, OsDisk};

    /// A directory with a note that says so, and what it holds.
    fn noted(note: Note, offset: u64) -> (tempfile::TempDir, OsDisk, Vec<u8>) {
        let (dir, disk) = (tempfile::tempdir().unwrap(), OsDisk::new(Backend::Posix).unwrap());
        note.write(&disk, dir.path(), offset).unwrap();
        let bytes = std::fs::read(note.path(dir.path())).unwrap();
        (dir, disk, bytes)
    }

    fn flipped(good: &[u8], bit: usize) -> Vec<u8> {
        let mut bytes = good.to_vec();
        bytes[bit / 8] ^= 1 << (bit % 8);
        bytes
    }

    #[test]
    fn it_says_what_was_written_last() {
        let (dir, disk, _) = noted(Note::Start, 3);
        let dir = dir.path();
        for offset in [1, u64::MAX, 0x1234_5678_9abc_def0] {
            Note::Start.write(&disk, dir, offset).unwrap();
            assert_eq!(Note::Start.read(&disk, dir).unwrap(), Some(offset));
        }
        assert_eq!(Note::Moved.read(&disk, dir).unwrap(), None);
        Note::Start.remove(&disk, dir).unwrap();
        assert!(!Note::Start.path(dir).exists() && Note::Start.remove(&disk, dir).is_ok());
    }

    #[test]
    fn a_damaged_one_says_nothing_but_that_it_is_ours() {
        for note in ALL {
            let (dir, disk, good) = noted(note, 7);
            let (dir, path) = (dir.path(), note.path(dir.path()));
            let bits = (64..good.len() * 8).map(|bit| flipped(&good, bit));
            let lengths = (8..good.len()).chain([good.len() + 1]).map(|len| {
                let mut bytes = good.clone();
                bytes.resize(len, 0);
                bytes
            });
            for bytes in bits.chain(lengths) {
                std::fs::write(&path, &bytes).unwrap();
                assert_eq!(note.read(&disk, dir).unwrap_err().kind(), io::ErrorKind::InvalidData);
                assert_eq!(find_unsound(&disk, dir), [&*path]);
                assert_eq!(has_moved(&disk, dir).unwrap(), note == Note::Moved);
                note.write(&disk, dir, 9).unwrap();
                assert_eq!(note.read(&disk, dir).unwrap(), Some(9));
                std::fs::write(&path, &bytes).unwrap();
                note.remove(&disk, dir).unwrap();
                assert!(!path.exists());
            }
        }
    }

    #[test]
    fn what_another_put_there_is_left_alone() {
        for note in ALL {
            let (dir, disk, good) = noted(note, 7);
            let (dir, path) = (dir.path(), note.path(dir.path()));
            let bits = (0..64).map(|bit| flipped(&good, bit));
            let other = if note == Note::Start { Note::Moved } else { Note::Start };
            for bytes in bits.chain((0..8).map(|len| good[..len].to_vec())).chain([other.encode(7).to_vec()]) {
                std::fs::write(&path, &bytes).unwrap();
                assert_eq!(note.read(&disk, dir).unwrap_err().kind(), io::ErrorKind::InvalidData);
                assert!(note.write(&disk, dir, 7).is_err() && note.remove(&disk, dir).is_err());
                assert!(!has_moved(&disk, dir).unwrap());
                assert_eq!(std::fs::read(&path).unwrap(), bytes);
            }
        }
    }
}
