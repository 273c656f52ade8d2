//! A topic's settings, kept beside its partitions as `topic.json`. The partitions open without them.
//!
//! New settings are written to a file of their own, which then takes the place of the old one: whenever that is interrupted, the name stands for
//! the old ones or for the new ones, whole.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::config::TopicConfig;
use crate::error::{Error, Result};
use crate::guard::{self, Guard};
use crate::io::transfer::{read_exact_at, write_all_at};
use crate::io::{Disk, Entry, EntryKind, File, Open};
use crate::record::to_usize;
use crate::segment;

const NAME: &str = "topic.json";
/// New ones, until they take its place.
const UNFINISHED: &str = "topic.json.tmp";

/// More than any settings take; a larger file is none.
const MAX_BYTES: u64 = 1 << 20;

pub(super) fn is_name(name: &OsStr) -> bool {
    name == NAME
}

/// Whether it is what an interrupted writing left.
pub(super) fn is_unfinished(entry: &Entry) -> bool {
    entry.kind == EntryKind::File && entry.name == UNFINISHED
}

/// Removes that. Not durable yet.
pub(super) fn remove_unfinished(disk: &dyn Disk, dir: &Path) -> Result<()> {
    let path = dir.join(UNFINISHED);
    disk.remove_file(&path).map_err(Error::io("remove", &path))
}

/// Where they stand.
pub(super) fn path(dir: &Path) -> PathBuf {
    dir.join(NAME)
}

/// Whether there are any.
pub(super) fn exist(disk: &dyn Disk, dir: &Path) -> io::Result<bool> {
    Ok(disk.list(dir)?.iter().any(|entry| is_name(&entry.name)))
}

/// Writes the settings of a new topic, durable but for the file's name.
pub(super) fn write(disk: &dyn Disk, dir: &Path, config: &TopicConfig) -> Result<()> {
    let path = path(dir);
    write_to(disk, &path, Open::NEW, config)?.sync().map_err(Error::io("sync", &path))
}

/// Puts new settings in the place of the old ones. They are durable when this returns.
///
/// # Errors
/// What the system says. The old ones stand then, unless it also refuses to have them put back, which is told in the log: then a later
/// opening finds the one or the other.
pub(super) fn replace(disk: &dyn Disk, dir: &Path, old: &TopicConfig, new: &TopicConfig) -> Result<()> {
    put(disk, dir, new)?;
    if let Err(error) = sync_names(disk, dir) {
        // They can be seen already, and an opening would take them for the topic's.
        put(disk, dir, old).and_then(|()| sync_names(disk, dir)).unwrap_or_else(
            |error| tracing::warn!(%error, dir = %dir.display(), "settings that were not altered may have been all the same"),
        );
        return Err(error);
    }
    Ok(())
}

/// Lets the name stand for these settings. Not durable yet, which of them it is; both are.
fn put(disk: &dyn Disk, dir: &Path, config: &TopicConfig) -> Result<()> {
    let (path, unfinished) = (path(dir), dir.join(UNFINISHED));
    let written = write_to(disk, &unfinished, Open::EMPTY, config);
    let synced = written.and_then(|file| match guard::stands(Guard::SettingsSynced) {
        true => file.sync().map_err(Error::io("sync", &unfinished)),
        false => Ok(()),
    });
    synced.and_then(|()| disk.replace(&unfinished, &path).map_err(Error::io("replace", &path))).inspect_err(|_| {
        // If it stays, the next attempt begins it anew, and an opening removes it.
        let _ = disk.remove_file(&unfinished);
    })
}

fn sync_names(disk: &dyn Disk, dir: &Path) -> Result<()> {
    if guard::stands(Guard::AlterationsSynced) { disk.sync_dir(dir).map_err(Error::io("sync the directory", dir)) } else { Ok(()) }
}

fn write_to(disk: &dyn Disk, path: &Path, how: Open, config: &TopicConfig) -> Result<Arc<dyn File>> {
    let text = serde_json::to_vec_pretty(config).map_err(io::Error::from).map_err(Error::io("write", path))?;
    let file = disk.open(path, how).map_err(Error::io("create", path))?;
    write_all_at(&*file, &text, 0, false).map_err(Error::io("write", path))?;
    Ok(file)
}

/// The settings, if there are any and they are sound.
pub(super) fn stored(disk: &dyn Disk, dir: &Path) -> Option<TopicConfig> {
    look(disk, dir).ok().flatten()
}

/// The settings, if there are any.
///
/// # Errors
/// They cannot be used: they cannot be read, say nothing, or one is out of range.
pub(super) fn look(disk: &dyn Disk, dir: &Path) -> Result<Option<TopicConfig>> {
    let path = path(dir);
    match try_read(disk, &path) {
        Ok(config) => config.validate().map(|()| Some(config)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io("read", &path)(error)),
    }
}

/// Reads the settings. Where there are none, or none that can be used, `fallback` serves, with as many partitions as were counted and an
/// index interval that suits the indexes that are there. The second is why those that are there cannot be used.
pub(super) fn read(disk: &dyn Disk, dir: &Path, fallback: &TopicConfig, counted: u32) -> Result<(TopicConfig, Option<Error>)> {
    let unsound = match look(disk, dir) {
        Ok(Some(config)) => return Ok((config, None)),
        Ok(None) => None,
        Err(error) => Some(error),
    };
    if let Some(error) = &unsound {
        tracing::warn!(%error, path = %path(dir).display(), "settings cannot be used; the broker's fallback serves");
    }
    let index_interval = guess_interval(disk, dir)?.unwrap_or(fallback.index_interval);
    Ok((TopicConfig { partitions: counted, index_interval, ..fallback.clone() }, unsound))
}

fn try_read(disk: &dyn Disk, path: &Path) -> io::Result<TopicConfig> {
    let file = disk.open(path, Open::READ)?;
    let len = file.len()?;
    if len > MAX_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "far larger than any settings"));
    }
    let mut text = vec![0; to_usize(len)];
    read_exact_at(&*file, &mut text, 0)?;
    Ok(serde_json::from_slice(&text)?)
}

/// The interval of the first index found that tells one.
fn guess_interval(disk: &dyn Disk, dir: &Path) -> Result<Option<u32>> {
    for number in super::Listed::of(disk, dir).map_err(Error::io("list", dir))?.numbers {
        let dir = dir.join(number.to_string());
        if let Some(interval) = segment::guess_interval(disk, &dir).map_err(Error::io("look at the indexes in", &dir))? {
            return Ok(Some(interval));
        }
    }
    Ok(None)
}
