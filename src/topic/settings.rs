//! A topic's settings, kept beside its partitions as `topic.json`. The partitions open without them.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

use crate::config::TopicConfig;
use crate::error::{Error, Result};
use crate::io::transfer::{read_exact_at, write_all_at};
use crate::io::{Disk, Open};
use crate::record::to_usize;
use crate::segment;

const NAME: &str = "topic.json";

/// More than any settings take; a larger file is none.
const MAX_BYTES: u64 = 1 << 20;

pub(super) fn is_name(name: &OsStr) -> bool {
    name == NAME
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
    let text = serde_json::to_vec_pretty(config).map_err(io::Error::from).map_err(Error::io("write", &path))?;
    let file = disk.open(&path, Open::NEW).map_err(Error::io("create", &path))?;
    write_all_at(&*file, &text, 0, false).and_then(|()| file.sync()).map_err(Error::io("write", &path))
}

/// The settings, if there are any and they are sound.
pub(super) fn stored(disk: &dyn Disk, dir: &Path) -> Option<TopicConfig> {
    try_read(disk, &path(dir)).ok().filter(|config| config.validate().is_ok())
}

/// Reads the settings. What cannot be read is replaced by `fallback` with as many partitions as were counted, and an index
/// interval that suits the indexes that are there.
pub(super) fn read(disk: &dyn Disk, dir: &Path, fallback: &TopicConfig, counted: u32) -> Result<TopicConfig> {
    let path = path(dir);
    match try_read(disk, &path) {
        Ok(config) => match config.validate() {
            Ok(()) => return Ok(config),
            Err(error) => tracing::warn!(%error, path = %path.display(), "settings out of range; using the broker's fallback"),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => tracing::warn!(%error, path = %path.display(), "settings cannot be read; using the broker's fallback"),
    }
    let index_interval = guess_interval(disk, dir)?.unwrap_or(fallback.index_interval);
    Ok(TopicConfig { partitions: counted, index_interval, ..fallback.clone() })
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
    for number in super::partition_numbers(disk, dir).map_err(Error::io("list", dir))?.0 {
        let dir = dir.join(number.to_string());
        if let Some(interval) = segment::guess_interval(disk, &dir).map_err(Error::io("look at the indexes in", &dir))? {
            return Ok(Some(interval));
        }
    }
    Ok(None)
}
