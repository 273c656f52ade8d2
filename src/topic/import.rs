//! A partition that comes from elsewhere takes the place of an empty one.
//!
//! It is copied and checked under a hidden name, while the topic goes on. Then names alone change: the empty one's, which holds no record that could
//! be missed, and its own. An opening after a crash in between finds out by the names how far that was, and ends it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use super::{Listed, Surroundings, Topic, open_partition};
use crate::error::{Error, Result};
use crate::io::{Disk, Entry, EntryKind};
use crate::partition::{self, Partition, PartitionReport};
use crate::record::to_usize;

/// In front of the number of a partition that is being taken in, and of one whose place it takes.
const NEW: &str = ".new-";
const OLD: &str = ".old-";

/// A partition's directory by another name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hidden {
    number: u32,
    is_new: bool,
}

impl Hidden {
    pub(super) fn parse(entry: &Entry) -> Option<Self> {
        let name = entry.name.to_str().filter(|_| entry.kind == EntryKind::Directory)?;
        let (number, is_new) = match name.strip_prefix(NEW) {
            Some(number) => (number, true),
            None => (name.strip_prefix(OLD)?, false),
        };
        Some(Self { number: super::partition_number(number.as_ref())?, is_new })
    }

    pub(super) fn is_new(self) -> bool {
        self.is_new
    }

    pub(super) fn path(self, dir: &Path) -> PathBuf {
        dir.join(format!("{}{}", if self.is_new { NEW } else { OLD }, self.number))
    }

    /// Whether nothing in it is another's.
    fn is_ours(self, disk: &dyn Disk, dir: &Path) -> io::Result<bool> {
        Ok(partition::find_foreign(disk, &self.path(dir))?.is_none())
    }
}

/// Ends what a crash interrupted, and gives the numbers of the partitions that are there then.
pub(super) fn finish(disk: &dyn Disk, dir: &Path, listed: &mut Listed) -> Result<()> {
    for hidden in std::mem::take(&mut listed.hidden) {
        let (path, place) = (hidden.path(dir), dir.join(hidden.number.to_string()));
        if !hidden.is_ours(disk, dir).map_err(Error::io("list", &path))? {
            listed.others.push(path);
        } else if listed.numbers.contains(&hidden.number) {
            tracing::warn!(path = %path.display(), "removing a partition that was not taken in, or that another took the place of");
            partition::remove_dir(disk, &path).map_err(Error::io("remove", &path))?;
        } else {
            // Those to come sort first: it is whole, or the old one would be in its place.
            disk.rename(&path, &place).map_err(Error::io("rename", &path))?;
            listed.numbers.push(hidden.number);
        }
    }
    listed.numbers.sort_unstable();
    Ok(())
}

impl Topic {
    /// Takes in the partition in `from` as that number. Whoever calls sees to it that nobody else alters or deletes the topic meanwhile. It may be
    /// closed meanwhile: then the partition is not taken in, or if it has its place by then, it is closed.
    pub(crate) fn import(&self, around: &Surroundings, number: u32, from: &Path) -> Result<PartitionReport> {
        let _importing = self.0.importing.lock().unwrap_or_else(PoisonError::into_inner);
        let empty = self.partition(number)?;
        let not_empty = || Error::PartitionNotEmpty { topic: self.name().to_owned(), partition: number };
        empty.check_open()?;
        if empty.next_offset() > 0 {
            return Err(not_empty());
        }
        let (disk, dir) = (&*around.disk, &self.0.dir);
        let new = Hidden { number, is_new: true };
        let new_path = new.path(dir);
        if new.is_ours(disk, dir).unwrap_or(false) {
            // An attempt before this one could not remove it.
            partition::remove_dir(disk, &new_path).map_err(Error::io("remove", &new_path))?;
        }
        partition::take_in(disk, from, &new_path, self.config().index_interval)?;
        // From here on only names change.
        let closed = empty.close();
        let is_empty = empty.next_offset() == 0;
        let taken = match closed {
            _ if self.is_closed() => Err(Error::Closed { path: dir.join(number.to_string()) }),
            Ok(()) if is_empty => self.take_place(disk, number)?,
            // Somebody appended meanwhile.
            Ok(()) => Err(not_empty()),
            Err(error) => Err(error),
        };
        if taken.is_err()
            && let Err(error) = partition::remove_dir(disk, &new_path)
        {
            tracing::warn!(%error, path = %new_path.display(), "a partition that was not taken in is left until the next opening");
        }
        if let Err(error) = &taken
            && self.is_closed()
        {
            // The empty one is closed already.
            return Err(error.clone());
        }
        let (partition, report) = open_partition(around, dir, self.name(), number, &self.config())?;
        self.set_partition(number, partition);
        taken.map(|()| report)
    }

    /// Puts a partition into its place in the list. Nobody finds it open there who may know that the topic is closed.
    fn set_partition(&self, number: u32, partition: Partition) {
        let mut partitions = self.0.partitions.write().unwrap_or_else(PoisonError::into_inner);
        // Whoever closes sets this before he looks at the list: he closes it, or it is done here.
        let closed = self.is_closed();
        if closed {
            partition.leave_to_close();
        }
        partitions[to_usize(number.into())] = partition.clone();
        drop(partitions);
        if closed && let Err(error) = partition.close() {
            tracing::warn!(%error, "a partition that was taken into a topic that was closed meanwhile could not be closed cleanly");
        }
    }

    fn is_closed(&self) -> bool {
        self.0.closed.load(Ordering::SeqCst)
    }

    /// The inner error left the empty partition in its place. After the outer one it is not known which of them a power loss leaves there: neither
    /// may be served.
    fn take_place(&self, disk: &dyn Disk, number: u32) -> Result<Result<()>> {
        let dir = &self.0.dir;
        let [new, old] = [true, false].map(|is_new| Hidden { number, is_new }.path(dir));
        let place = dir.join(number.to_string());
        // The new one is whole on the device before the old one has no name.
        if let Err(error) = disk.sync_dir(dir) {
            return Ok(Err(Error::io("sync the directory", dir)(error)));
        }
        if let Err(error) = disk.rename(&place, &old) {
            return Ok(Err(Error::io("rename", &place)(error)));
        }
        if let Err(error) = disk.rename(&new, &place) {
            disk.rename(&old, &place).map_err(Error::io("rename", &old))?;
            // It takes appends again: a power loss that kept the first rename alone would have the other take its place.
            disk.sync_dir(dir).map_err(Error::io("sync the directory", dir))?;
            return Ok(Err(Error::io("rename", &new)(error)));
        }
        disk.sync_dir(dir).map_err(Error::io("sync the directory", dir))?;
        if let Err(error) = partition::remove_dir(disk, &old) {
            tracing::warn!(%error, path = %old.display(), "an empty partition is left until the next opening");
        }
        Ok(Ok(()))
    }
}
