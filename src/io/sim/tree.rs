//! The simulated names: directories as they are seen and as they are on the device, and the changes between the two.
//!
//! Pure state, one file system, one root. Errors are those that Linux answers with.
//!
//! Changes of entries that share no name are independent: a power loss may keep either. Those that do share one are kept
//! in order (a rename only with the creation of what it renames), and a rename's two entries together, unless one of two
//! directories was synced in between.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::path::{Component, Path};

use rustix::io::Errno;

use super::content::{Content, Keep};
use super::rng::Rng;
use super::{to_u64, to_usize};

/// Names a file or a directory for as long as it exists; never used twice.
pub(super) type Ino = u64;

pub(super) const ROOT: Ino = 0;

type Entries = BTreeMap<OsString, Ino>;

#[derive(Debug, Clone)]
pub(super) enum Node {
    File {
        content: Content,
        /// Handles that keep it alive without a name.
        opens: u32,
    },
    Directory {
        seen: Entries,
        durable: Entries,
    },
}

/// One change of names that is not durable.
#[derive(Debug, Clone)]
struct Change(Vec<Edit>);

#[derive(Debug, Clone)]
struct Edit {
    dir: Ino,
    name: OsString,
    now: Option<Ino>,
}

/// All files and directories.
#[derive(Debug, Clone)]
pub(super) struct Tree {
    nodes: BTreeMap<Ino, Node>,
    next: Ino,
    /// Oldest first.
    pending: Vec<Change>,
}

impl Tree {
    pub(super) fn new() -> Self {
        Self { nodes: BTreeMap::from([(ROOT, Node::directory())]), next: ROOT + 1, pending: Vec::new() }
    }

    pub(super) fn node(&self, ino: Ino) -> Option<&Node> {
        self.nodes.get(&ino)
    }

    pub(super) fn content(&mut self, ino: Ino) -> Result<&mut Content, Errno> {
        match self.nodes.get_mut(&ino) {
            Some(Node::File { content, .. }) => Ok(content),
            Some(Node::Directory { .. }) => Err(Errno::ISDIR),
            None => Err(Errno::STALE),
        }
    }

    /// What has this name now.
    pub(super) fn lookup(&self, path: &Path) -> Result<Ino, Errno> {
        names(path)?.into_iter().try_fold(ROOT, |dir, name| self.entries(dir)?.get(name).copied().ok_or(Errno::NOENT))
    }

    /// What has this name on the device.
    pub(super) fn lookup_durable(&self, path: &Path) -> Result<&Node, Errno> {
        let step = |dir, name| match self.nodes.get(&dir) {
            Some(Node::Directory { durable, .. }) => durable.get(name).copied().ok_or(Errno::NOENT),
            _ => Err(Errno::NOTDIR),
        };
        let ino = names(path)?.into_iter().try_fold(ROOT, step)?;
        self.nodes.get(&ino).ok_or(Errno::NOENT)
    }

    /// The directory that holds the last name of `path`, and that name.
    fn parent(&self, path: &Path) -> Result<(Ino, OsString), Errno> {
        let mut dirs = names(path)?;
        let name = dirs.pop().ok_or(Errno::EXIST)?;
        let dir = dirs.into_iter().try_fold(ROOT, |dir, name| self.entries(dir)?.get(name).copied().ok_or(Errno::NOENT))?;
        self.entries(dir)?;
        Ok((dir, name.to_owned()))
    }

    pub(super) fn entries(&self, dir: Ino) -> Result<&Entries, Errno> {
        match self.nodes.get(&dir) {
            Some(Node::Directory { seen, .. }) => Ok(seen),
            Some(Node::File { .. }) => Err(Errno::NOTDIR),
            None => Err(Errno::NOENT),
        }
    }

    /// Applies edits at once to what is seen, and keeps them until they are durable.
    fn change(&mut self, edits: Vec<Edit>) {
        for edit in &edits {
            let Some(Node::Directory { seen, .. }) = self.nodes.get_mut(&edit.dir) else {
                unreachable!("edits name directories that exist")
            };
            edit.apply(seen);
        }
        self.pending.push(Change(edits));
    }

    fn add(&mut self, path: &Path, node: Node) -> Result<Ino, Errno> {
        let (dir, name) = self.parent(path)?;
        if self.entries(dir)?.contains_key(&name) {
            return Err(Errno::EXIST);
        }
        let ino = self.next;
        self.next += 1;
        self.nodes.insert(ino, node);
        self.change(vec![Edit { dir, name, now: Some(ino) }]);
        Ok(ino)
    }

    pub(super) fn create_file(&mut self, path: &Path) -> Result<Ino, Errno> {
        self.add(path, Node::File { content: Content::default(), opens: 0 })
    }

    pub(super) fn create_dir(&mut self, path: &Path) -> Result<(), Errno> {
        self.add(path, Node::directory()).map(|_| ())
    }

    /// Renames a file, also where another file has the new name.
    pub(super) fn replace(&mut self, from: &Path, to: &Path) -> Result<(), Errno> {
        let (from_dir, from_name) = self.parent(from)?;
        let ino = *self.entries(from_dir)?.get(&from_name).ok_or(Errno::NOENT)?;
        let (to_dir, to_name) = self.parent(to)?;
        match self.entries(to_dir)?.get(&to_name) {
            // Two names of one file: as on Linux, nothing is done.
            Some(there) if *there == ino => return Ok(()),
            Some(there) => self.content(*there).map(drop)?,
            None => {}
        }
        self.content(ino)?;
        self.change(vec![Edit { dir: from_dir, name: from_name, now: None }, Edit { dir: to_dir, name: to_name, now: Some(ino) }]);
        self.collect();
        Ok(())
    }

    /// Gives a file one more name.
    pub(super) fn link(&mut self, file: &Path, name: &Path) -> Result<(), Errno> {
        let ino = self.lookup(file)?;
        self.content(ino).map_err(|error| if error == Errno::ISDIR { Errno::INVAL } else { error })?;
        let (dir, name) = self.parent(name)?;
        if self.entries(dir)?.contains_key(&name) {
            return Err(Errno::EXIST);
        }
        self.change(vec![Edit { dir, name, now: Some(ino) }]);
        Ok(())
    }

    /// How many names a file has, as they are seen.
    pub(super) fn links(&self, ino: Ino) -> u64 {
        let named = |node: &Node| match node {
            Node::Directory { seen, .. } => seen.values().filter(|named| **named == ino).count(),
            Node::File { .. } => 0,
        };
        to_u64(self.nodes.values().map(named).sum())
    }

    pub(super) fn rename(&mut self, from: &Path, to: &Path) -> Result<(), Errno> {
        let (from_dir, from_name) = self.parent(from)?;
        let ino = *self.entries(from_dir)?.get(&from_name).ok_or(Errno::NOENT)?;
        let (to_dir, to_name) = self.parent(to)?;
        if self.entries(to_dir)?.contains_key(&to_name) {
            return Err(Errno::EXIST);
        }
        let (from_names, to_names) = (names(from)?, names(to)?);
        if to_names.starts_with(&from_names) {
            return Err(Errno::INVAL);
        }
        self.change(vec![Edit { dir: from_dir, name: from_name, now: None }, Edit { dir: to_dir, name: to_name, now: Some(ino) }]);
        Ok(())
    }

    pub(super) fn remove(&mut self, path: &Path, directory: bool) -> Result<(), Errno> {
        let (dir, name) = self.parent(path).map_err(|error| if error == Errno::EXIST { Errno::BUSY } else { error })?;
        let ino = *self.entries(dir)?.get(&name).ok_or(Errno::NOENT)?;
        match self.nodes.get(&ino) {
            Some(Node::Directory { .. }) if !directory => return Err(Errno::ISDIR),
            Some(Node::Directory { seen, .. }) if !seen.is_empty() => return Err(Errno::NOTEMPTY),
            Some(Node::File { .. }) if directory => return Err(Errno::NOTDIR),
            _ => {}
        }
        self.change(vec![Edit { dir, name, now: None }]);
        Ok(())
    }

    pub(super) fn sync_dir(&mut self, path: &Path) -> Result<(), Errno> {
        let ino = self.lookup(path)?;
        match self.nodes.get_mut(&ino) {
            Some(Node::Directory { seen, durable }) => *durable = seen.clone(),
            _ => return Err(Errno::NOTDIR),
        }
        self.pending.iter_mut().for_each(|Change(edits)| edits.retain(|edit| edit.dir != ino));
        self.pending.retain(|Change(edits)| !edits.is_empty());
        self.collect();
        Ok(())
    }

    pub(super) fn opened(&mut self, ino: Ino) {
        if let Some(Node::File { opens, .. }) = self.nodes.get_mut(&ino) {
            *opens += 1;
        }
    }

    pub(super) fn closed(&mut self, ino: Ino) {
        if let Some(Node::File { opens, .. }) = self.nodes.get_mut(&ino) {
            *opens = opens.saturating_sub(1);
        }
    }

    /// No handle is left.
    pub(super) fn close_all(&mut self) {
        for node in self.nodes.values_mut() {
            if let Node::File { opens, .. } = node {
                *opens = 0;
            }
        }
        self.collect();
    }

    /// Bytes on the device that files take, those without a name included as long as they are open.
    pub(super) fn used(&self) -> u64 {
        let mut named: BTreeSet<Ino> = BTreeSet::new();
        for node in self.nodes.values() {
            if let Node::Directory { seen, .. } = node {
                named.extend(seen.values());
            }
        }
        let used = |(ino, node): (&Ino, &Node)| match node {
            Node::File { content, opens } if *opens > 0 || named.contains(ino) => content.used(),
            _ => 0,
        };
        self.nodes.iter().map(used).sum()
    }

    /// The power fails: durable names and a part of the changes since become all there is; then each file loses its own.
    /// Nothing may be open.
    pub(super) fn lose_power(&mut self, keep: Keep, rng: &mut Rng) {
        for group in groups(std::mem::take(&mut self.pending)) {
            let count = if keep == Keep::Nothing { 0 } else { to_usize(rng.prefix(to_u64(group.len()))) };
            for edit in group.iter().take(count).flat_map(|Change(edits)| edits) {
                if let Some(Node::Directory { durable, .. }) = self.nodes.get_mut(&edit.dir) {
                    edit.apply(durable);
                }
            }
        }
        for node in self.nodes.values_mut() {
            match node {
                Node::Directory { seen, durable } => *seen = durable.clone(),
                Node::File { content, .. } => content.lose_power(keep, rng),
            }
        }
        self.collect();
    }

    /// Makes the directory and those above it, durable at once.
    pub(super) fn place_dir(&mut self, path: &Path) -> Result<Ino, Errno> {
        names(path)?.into_iter().try_fold(ROOT, |dir, name| self.place(dir, name, Node::directory()))
    }

    /// Makes the file and the directories above it, durable at once.
    pub(super) fn place_file(&mut self, path: &Path) -> Result<&mut Content, Errno> {
        let dir = self.place_dir(path.parent().unwrap_or(Path::new("")))?;
        let name = *names(path)?.last().ok_or(Errno::ISDIR)?;
        let ino = self.place(dir, name, Node::File { content: Content::default(), opens: 0 })?;
        self.content(ino)
    }

    /// What `dir` has under `name`, or else `node`; its entry is durable.
    fn place(&mut self, dir: Ino, name: &OsStr, node: Node) -> Result<Ino, Errno> {
        let ino = match self.entries(dir)?.get(name) {
            Some(ino) => *ino,
            None => {
                self.next += 1;
                self.nodes.insert(self.next - 1, node);
                self.next - 1
            }
        };
        if let Some(Node::Directory { seen, durable }) = self.nodes.get_mut(&dir) {
            seen.insert(name.to_owned(), ino);
            durable.insert(name.to_owned(), ino);
        }
        self.pending.iter_mut().for_each(|Change(edits)| edits.retain(|edit| edit.dir != dir || edit.name != name));
        self.pending.retain(|Change(edits)| !edits.is_empty());
        Ok(ino)
    }

    /// Forgets what nothing leads to: no name, no name on the device or on its way there, no handle.
    fn collect(&mut self) {
        let mut alive = BTreeSet::new();
        let open = |(ino, node): (&Ino, &Node)| matches!(node, Node::File { opens, .. } if *opens > 0).then_some(*ino);
        let mut found: Vec<Ino> = self.nodes.iter().filter_map(open).chain([ROOT]).collect();
        found.extend(self.pending.iter().flat_map(|Change(edits)| edits).filter_map(|edit| edit.now));
        while let Some(ino) = found.pop() {
            if alive.insert(ino)
                && let Some(Node::Directory { seen, durable }) = self.nodes.get(&ino)
            {
                found.extend(seen.values().chain(durable.values()));
            }
        }
        self.nodes.retain(|ino, _| alive.contains(ino));
        self.pending.iter_mut().for_each(|Change(edits)| edits.retain(|edit| alive.contains(&edit.dir)));
        self.pending.retain(|Change(edits)| !edits.is_empty());
    }
}

impl Node {
    fn directory() -> Self {
        Self::Directory { seen: Entries::new(), durable: Entries::new() }
    }
}

impl Edit {
    fn apply(&self, entries: &mut Entries) {
        match self.now {
            Some(ino) => entries.insert(self.name.clone(), ino),
            None => entries.remove(&self.name),
        };
    }
}

/// Changes that share a name, directly or through others, each group in its order.
fn groups(changes: Vec<Change>) -> Vec<Vec<Change>> {
    type Names = BTreeSet<(Ino, OsString)>;
    let mut groups: Vec<(Names, Vec<Change>)> = Vec::new();
    for change in changes {
        let names: Names = change.0.iter().map(|edit| (edit.dir, edit.name.clone())).collect();
        let (mut joined, others): (Vec<_>, Vec<_>) = groups.into_iter().partition(|(group, _)| !group.is_disjoint(&names));
        groups = others;
        let mut all = (names, Vec::new());
        for (names, changes) in &mut joined {
            all.0.append(names);
            all.1.append(changes);
        }
        all.1.push(change);
        groups.push(all);
    }
    groups.into_iter().map(|(_, changes)| changes).collect()
}

/// The names along a path. Everything starts at the root, also a path that does not say so.
fn names(path: &Path) -> Result<Vec<&OsStr>, Errno> {
    let name = |part| match part {
        Component::Normal(name) => Some(Ok(name)),
        Component::RootDir | Component::CurDir => None,
        Component::ParentDir | Component::Prefix(_) => Some(Err(Errno::INVAL)),
    };
    path.components().filter_map(name).collect()
}
