//! Removing a topic: from the moment that it has a hidden name it is gone, and what is left of it, the next opening removes.

use std::io;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::guard::{self, Guard};
use crate::io::{Disk, EntryKind, parent_of};
use crate::segment;
use crate::topic::Topic;

/// With this in front, a name of 249 bytes still is one of at most 255.
pub(super) const DELETED: &str = ".del-";

/// How deep a left-over is removed: a topic, its partitions, their files.
const DEPTH: u32 = 4;

/// Refuses to remove a topic whose directory holds what is another's: the engine deletes nothing that it did not make.
pub(super) fn check_all_ours(disk: &dyn Disk, dir: &Path) -> Result<()> {
    let refused =
        || io::Error::new(io::ErrorKind::InvalidInput, "no file of the engine's, in the directory of a topic that is to be deleted");
    Topic::find_foreign(disk, dir)?.map_or(Ok(()), |foreign| Err(Error::io("delete", &foreign)(refused())))
}

/// Gives a topic that is closed a hidden name. Not durable yet.
pub(super) fn hide(disk: &dyn Disk, dir: &Path, name: &str) -> Result<PathBuf> {
    let (path, hidden) = (dir.join(name), dir.join(format!("{DELETED}{name}")));
    make_way(disk, &hidden)?;
    disk.rename(&path, &hidden).map_err(Error::io("rename", &path))?;
    Ok(hidden)
}

/// Makes the hidden name durable, and then removes what has it, durably.
pub(super) fn finish(disk: &dyn Disk, hidden: &Path) -> Result<()> {
    remove_hidden(disk, hidden)?;
    let dir = parent_of(hidden);
    disk.sync_dir(dir).map_err(Error::io("sync the directory", dir))
}

/// Removes what an earlier attempt left under a hidden name. What another put there stays, and what comes next tells of it.
pub(super) fn make_way(disk: &dyn Disk, hidden: &Path) -> Result<()> {
    let is_ours = match disk.list(hidden) {
        Ok(_) => Topic::find_foreign(disk, hidden)?.is_none(),
        Err(_) => false,
    };
    if is_ours { remove_hidden(disk, hidden) } else { Ok(()) }
}

/// Removes a topic that has a hidden name. Whoever gave it that name may have crashed before it was durable: a power loss in the
/// middle of the removal must not bring back the topic's own name, and half of what was under it.
pub(super) fn remove_hidden(disk: &dyn Disk, hidden: &Path) -> Result<()> {
    let dir = parent_of(hidden);
    if guard::stands(Guard::DeletionsSynced) {
        disk.sync_dir(dir).map_err(Error::io("sync the directory", dir))?;
    }
    remove_tree(disk, hidden)
}

/// Removes a topic that never had another name than a hidden one, and what is in it.
pub(super) fn remove_tree(disk: &dyn Disk, hidden: &Path) -> Result<()> {
    remove_to(DEPTH, disk, hidden)
}

/// Links are not followed, nor removed.
fn remove_to(depth: u32, disk: &dyn Disk, dir: &Path) -> Result<()> {
    let entries = match disk.list(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        result => result.map_err(Error::io("list", dir))?,
    };
    for entry in entries {
        let path = dir.join(&entry.name);
        if entry.kind == EntryKind::Directory && depth > 0 {
            remove_to(depth - 1, disk, &path)?;
        } else if segment::is_of_one(&entry.name) {
            segment::remove_with_space(disk, &path).map_err(Error::io("remove", &path))?;
        } else {
            disk.remove_file(&path).map_err(Error::io("remove", &path))?;
        }
    }
    disk.remove_dir(dir).map_err(Error::io("remove", dir))
}
