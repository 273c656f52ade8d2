//! What lies in a partition's directory, by name.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path;

use super::finding::{Code, Find, Finding};
use crate::error::{Error, Result};
use crate::io::{Disk, EntryKind};
use crate::partition::{self, CHECKPOINT};
use crate::segment::{self, Kind, Name};

/// The names in a partition's directory, each in the place where it counts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Listing {
    /// The bases of the logs, and which files stand beside each.
    pub(super) segments: BTreeMap<u64, Vec<Kind>>,
    /// Files of logs that are not there.
    pub(super) orphans: Vec<Name>,
    /// What was not finished: by an interrupted opening, a repair, or a writer.
    pub(super) unfinished: Vec<String>,
    /// What was set aside.
    pub(super) aside: Vec<String>,
    pub(super) checkpoint: bool,
    /// What has a name of the engine's files, and is no regular file.
    pub(super) irregular: Vec<String>,
    /// What is none of a partition's.
    strays: Vec<(String, EntryKind)>,
}

impl Listing {
    pub(super) fn of(disk: &dyn Disk, dir: &Path) -> Result<Self> {
        let mut entries = disk.list(dir).map_err(Error::io("list", dir))?;
        entries.sort();
        let mut listing = Self::default();
        let mut beside = Vec::new();
        for entry in entries {
            let text = || entry.name.to_string_lossy().into_owned();
            match Name::parse(&entry.name) {
                None if segment::is_copy(&entry.name) && !segment::is_unfinished(&entry.name) => listing.aside.push(text()),
                _ if entry.kind != EntryKind::File && is_ours(&entry.name) => listing.irregular.push(text()),
                _ if entry.kind != EntryKind::File => listing.strays.push((text(), entry.kind)),
                Some(Name { base, kind: Kind::Log }) => drop(listing.segments.insert(base, Vec::new())),
                Some(name) => beside.push(name),
                None if is_unfinished(&entry.name) => listing.unfinished.push(text()),
                None if entry.name == CHECKPOINT => listing.checkpoint = true,
                None if partition::is_note(&entry.name) => {}
                None => listing.strays.push((text(), entry.kind)),
            }
        }
        for name in beside {
            match listing.segments.get_mut(&name.base) {
                Some(kinds) => kinds.push(name.kind),
                None => listing.orphans.push(name),
            }
        }
        Ok(listing)
    }

    /// The bases, in order.
    pub(super) fn bases(&self) -> Vec<u64> {
        self.segments.keys().copied().collect()
    }

    /// The index files, also those of logs that are not there, in the order of their segments.
    pub(super) fn index_files(&self) -> impl Iterator<Item = Name> {
        let beside = self.segments.iter().flat_map(|(&base, kinds)| kinds.iter().map(move |&kind| Name { base, kind }));
        let mut names: Vec<Name> = beside.chain(self.orphans.iter().copied()).filter(|name| name.kind != Kind::Sum).collect();
        names.sort_by_key(|name| (name.base, name.kind));
        names.into_iter()
    }

    /// What there is to say of the names alone.
    pub(super) fn findings(&self, dir: &Path) -> Vec<Finding> {
        let mut findings = Vec::new();
        for (name, kind) in &self.strays {
            let find = match kind {
                EntryKind::File => Find::info(Code::StrayFile, 0, "the name is none of a partition's; it is left alone"),
                _ => Find::warning(Code::NotARegularFile, 0, "a directory, a link or a special file; it is left alone"),
            };
            findings.push(find.of(dir.join(name)));
        }
        for name in &self.irregular {
            let told = "a directory, a link or a special file, where the engine has a file of its own; it is passed over";
            findings.push(Find::warning(Code::NotARegularFile, 0, told).of(dir.join(name)));
        }
        for name in &self.orphans {
            findings.push(Find::warning(Code::OrphanIndex, 0, "there is no log of that name").of(dir.join(name.to_string())));
        }
        for name in &self.unfinished {
            let told = "was not finished: made ahead by a writer, or left by an interruption; the next opening removes it";
            findings.push(Find::info(Code::Unfinished, 0, told).of(dir.join(name)));
        }
        for name in &self.aside {
            findings
                .push(Find::info(Code::SetAside, 0, "what was cut from a log or was in its way, set aside; never read").of(dir.join(name)));
        }
        findings
    }
}

/// Whether the engine makes files of that name.
fn is_ours(name: &OsStr) -> bool {
    Name::parse(name).is_some() || is_unfinished(name) || partition::is_note(name)
}

/// Whether opening removes what is called so.
fn is_unfinished(name: &OsStr) -> bool {
    segment::is_unfinished(name) || segment::is_prepared(name) || partition::is_unfinished_note(name)
}
