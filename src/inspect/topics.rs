//! What topics there are, and what there is in each, by reading only.

use std::path::{Path, PathBuf};

use super::Inspector;
use super::listing::Listing;
use crate::config::TopicConfig;
use crate::error::{Error, Result};
use crate::io::{Disk, EntryKind, Open};
use crate::partition;
use crate::topic::{Topic, check_name};

/// A topic, as its directory tells.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct StoredTopic {
    /// Its directory, which has its name.
    pub path: PathBuf,
    /// Its settings. None if it has none, or if they cannot be used: then a broker's fallback serves.
    pub settings: Option<TopicConfig>,
    /// Why its settings cannot be used.
    pub unsound: Option<Error>,
    /// Its partitions, in the order of their numbers.
    pub partitions: Vec<StoredPartition>,
}

/// A partition, as its directory tells.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct StoredPartition {
    /// Its directory.
    pub path: PathBuf,
    /// How many segments it has.
    pub segments: usize,
    /// The offset of the first record that is given out; that of the next one if there is none.
    pub first_offset: u64,
    /// One past the last record: up to the first damage in the last segment, if there is any.
    pub next_offset: u64,
    /// The lengths of all files in its directory together, room that is allocated ahead among them.
    pub bytes_on_disk: u64,
    /// Whether it takes no more appends, because it moved: see [`Partition::seal`](crate::Partition::seal).
    pub is_sealed: bool,
    /// What ends its last segment too early; or that its directory is not there, though its topic tells of it. What lies in sealed segments is not
    /// looked at: [`Inspector::verify`] does that.
    pub damage: Option<Error>,
}

impl Inspector {
    /// The directories of the topics in a data directory, in the order of their names. A topic's own is its only one.
    ///
    /// # Errors
    /// What the system says.
    pub fn topics(&self, dir: impl AsRef<Path>) -> Result<Vec<PathBuf>> {
        let (disk, dir) = (&*self.disk, dir.as_ref());
        if Topic::is_laid_out(disk, dir)? {
            return Ok(vec![dir.to_owned()]);
        }
        let mut topics = Vec::new();
        for entry in disk.list(dir).map_err(Error::io("list", dir))? {
            let path = dir.join(&entry.name);
            let has_name = entry.kind == EntryKind::Directory && entry.name.to_str().is_some_and(|name| check_name(name).is_ok());
            if has_name && Topic::is_laid_out(disk, &path)? {
                topics.push(path);
            }
        }
        topics.sort();
        Ok(topics)
    }

    /// What there is in a topic's directory. No lock is taken and nothing is changed; what a broker at work does meanwhile may or may not be seen.
    ///
    /// # Blocking
    /// Until the last segment of each partition is read.
    ///
    /// # Errors
    /// What the system says. What is wrong with the topic is no error, but in the description.
    pub fn describe(&self, topic: impl AsRef<Path>) -> Result<StoredTopic> {
        let (disk, path) = (&*self.disk, topic.as_ref().to_owned());
        let (settings, unsound) = match Topic::stored_settings(disk, &path) {
            Ok(settings) => (settings, None),
            Err(error) => (None, Some(error)),
        };
        let partitions = Topic::partition_dirs(disk, &path)?.into_iter().map(|dir| self.describe_partition(dir)).collect::<Result<_>>()?;
        Ok(StoredTopic { path, settings, unsound, partitions })
    }

    fn describe_partition(&self, path: PathBuf) -> Result<StoredPartition> {
        let disk = &*self.disk;
        let mut described =
            StoredPartition { path, segments: 0, first_offset: 0, next_offset: 0, bytes_on_disk: 0, is_sealed: false, damage: None };
        let path = described.path.as_path();
        let bases = match Listing::of(disk, path) {
            Ok(listing) => listing.bases(),
            Err(error) if Topic::lacks(disk, path) => {
                described.damage = Some(error);
                return Ok(described);
            }
            Err(error) => return Err(error),
        };
        let first_offset = bases.first().copied().unwrap_or(0);
        // No record has the last offset, so none is kept; only the last segment is gone through.
        let mut records = self.read(path, u64::MAX)?;
        let damage = match records.by_ref().find_map(Result::err) {
            Some(error) if !error.is_damage() => return Err(error),
            damage => damage,
        };
        let next_offset = records.place().map_or(first_offset, |place| place.offset);
        let first_offset = partition::noted_start(disk, path).map_or(first_offset, |start| start.min(next_offset).max(first_offset));
        let bytes_on_disk = bytes_in(disk, path)?;
        let is_sealed = partition::has_moved(disk, path)?;
        Ok(StoredPartition { segments: bases.len(), first_offset, next_offset, bytes_on_disk, is_sealed, damage, ..described })
    }
}

/// The lengths of all files in a directory together. What is renamed or removed meanwhile may or may not be counted.
fn bytes_in(disk: &dyn Disk, dir: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in disk.list(dir).map_err(Error::io("list", dir))? {
        let path = dir.join(&entry.name);
        match disk.open(&path, Open::READ).and_then(|file| file.len()) {
            Ok(len) => bytes += len,
            Err(error) if crate::io::is_no_file(&error) => {}
            Err(error) => return Err(Error::io("measure", &path)(error)),
        }
    }
    Ok(bytes)
}
