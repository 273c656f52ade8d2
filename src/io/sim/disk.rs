//! The simulated disk as the seam sees it: names, open files, locks.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

use rustix::io::Errno;

use super::super::{BLOCK, BlockingRing, Create, Details, Directory, Disk, Entry, EntryKind, File, Lock, Open, Ring, RingConfig};
use super::faults::{Call, OpKind};
use super::ring::SlowRing;
use super::state::{Grant, Shared, State};
use super::tree::{Ino, Node};
use super::{SimDisk, to_u64, to_usize};

/// Linux moves no more per call.
const MAX_CALL: usize = 0x7fff_f000;

impl SimDisk {
    fn perform<T>(&self, call: &Call<'_>, act: impl FnOnce(&mut State, Grant) -> io::Result<T>) -> io::Result<T> {
        self.shared.perform(self.life(), call, act)
    }
}

impl Disk for SimDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.perform(&Call::new(OpKind::CreateDir, path), |state, _| Ok(state.tree.create_dir(path)?))
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<Entry>> {
        self.perform(&Call::new(OpKind::List, dir), |state, _| {
            let dir = state.tree.lookup(dir)?;
            let kind = |ino| match state.tree.node(ino) {
                Some(Node::Directory { .. }) => EntryKind::Directory,
                _ => EntryKind::File,
            };
            Ok(state.tree.entries(dir)?.iter().map(|(name, ino)| Entry { name: name.clone(), kind: kind(*ino) }).collect())
        })
    }

    fn open(&self, path: &Path, how: Open) -> io::Result<Arc<dyn File>> {
        let kind = if how.create == Create::Never { OpKind::Open } else { OpKind::Create };
        self.perform(&Call::new(kind, path), |state, _| {
            let ino = open(state, path, how)?;
            let handle = Handle { shared: Arc::clone(&self.shared), epoch: state.epoch, ino, path: path.into() };
            state.tree.opened(ino);
            Ok(Arc::new(SimFile { handle, write: how.write, direct: how.direct }) as Arc<dyn File>)
        })
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let call = Call { to: Some(to), ..Call::new(OpKind::Rename, from) };
        self.perform(&call, |state, _| Ok(state.tree.rename(from, to)?))
    }

    fn replace(&self, from: &Path, to: &Path) -> io::Result<()> {
        let call = Call { to: Some(to), ..Call::new(OpKind::Rename, from) };
        self.perform(&call, |state, _| Ok(state.tree.replace(from, to)?))
    }

    fn link(&self, file: &Path, name: &Path) -> io::Result<()> {
        let call = Call { to: Some(name), ..Call::new(OpKind::Link, file) };
        self.perform(&call, |state, _| {
            if state.options.refuse_links {
                return Err(io::ErrorKind::Unsupported.into());
            }
            Ok(state.tree.link(file, name)?)
        })
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.perform(&Call::new(OpKind::RemoveFile, path), |state, _| Ok(state.tree.remove(path, false)?))
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.perform(&Call::new(OpKind::RemoveDir, path), |state, _| Ok(state.tree.remove(path, true)?))
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.perform(&Call::new(OpKind::SyncDir, dir), |state, _| Ok(state.tree.sync_dir(dir)?))
    }

    fn open_dir(&self, dir: &Path) -> io::Result<Box<dyn Directory>> {
        self.perform(&Call::new(OpKind::Open, dir), |state, _| {
            state.tree.entries(state.tree.lookup(dir)?)?;
            Ok(Box::new(SimDirectory { shared: Arc::clone(&self.shared), epoch: state.epoch, path: dir.into() }) as Box<dyn Directory>)
        })
    }

    fn lock(&self, path: &Path) -> io::Result<Box<dyn Lock>> {
        self.perform(&Call::new(OpKind::Lock, path), |state, _| {
            let ino = match state.tree.lookup(path) {
                Err(Errno::NOENT) => state.tree.create_file(path),
                found => found,
            }?;
            state.tree.content(ino)?;
            if state.locks.contains_key(&ino) {
                return Err(Errno::WOULDBLOCK.into());
            }
            let id = state.new_id();
            state.locks.insert(ino, id);
            state.tree.opened(ino);
            let handle = Handle { shared: Arc::clone(&self.shared), epoch: state.epoch, ino, path: path.into() };
            Ok(Box::new(SimLock { handle, id }) as Box<dyn Lock>)
        })
    }

    fn ring(&self, config: &RingConfig) -> io::Result<Box<dyn Ring>> {
        self.perform(&Call::new(OpKind::Ring, Path::new("")), |state, _| {
            let ring = BlockingRing::new(config)?;
            let overlapping = state.options.overlapping_rings;
            Ok(if overlapping { Box::new(SlowRing::new(ring, Arc::clone(&self.shared))) as Box<dyn Ring> } else { Box::new(ring) })
        })
    }

    fn rings_overlap(&self) -> bool {
        self.shared.lock().options.overlapping_rings
    }

    fn backend(&self) -> &'static str {
        "sim"
    }
}

/// A directory is known by its path: nobody renames one that is open.
#[derive(Debug)]
struct SimDirectory {
    shared: Arc<Shared>,
    epoch: u64,
    path: Box<Path>,
}

impl Directory for SimDirectory {
    fn sync(&self) -> io::Result<()> {
        self.shared.perform(self.epoch, &Call::new(OpKind::SyncDir, &self.path), |state, _| Ok(state.tree.sync_dir(&self.path)?))
    }
}

/// Like Linux, it makes the file before it finds out that it cannot be opened directly.
fn open(state: &mut State, path: &Path, how: Open) -> io::Result<Ino> {
    if how.create != Create::Never && !how.write {
        return Err(Errno::INVAL.into());
    }
    let (ino, new) = match state.tree.lookup(path) {
        Ok(_) if how.create == Create::New => return Err(Errno::EXIST.into()),
        Ok(ino) => (ino, false),
        Err(Errno::NOENT) if how.create != Create::Never => (state.tree.create_file(path)?, true),
        Err(error) => return Err(error.into()),
    };
    let refused = how.direct && state.options.refuse_direct;
    let content = state.tree.content(ino)?;
    if refused {
        return Err(Errno::INVAL.into());
    }
    if how.create == Create::Empty && !new {
        content.set_len(0);
    }
    Ok(ino)
}

/// A file of one life of the process.
#[derive(Debug)]
struct Handle {
    shared: Arc<Shared>,
    epoch: u64,
    ino: Ino,
    path: Arc<Path>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        if state.epoch == self.epoch {
            state.tree.closed(self.ino);
        }
    }
}

#[derive(Debug)]
struct SimLock {
    handle: Handle,
    id: u64,
}

impl Lock for SimLock {}

impl Drop for SimLock {
    fn drop(&mut self) {
        let mut state = self.handle.shared.lock();
        // A later life may have locked the file anew.
        if state.locks.get(&self.handle.ino) == Some(&self.id) {
            state.locks.remove(&self.handle.ino);
        }
    }
}

#[derive(Debug)]
struct SimFile {
    handle: Handle,
    write: bool,
    direct: bool,
}

impl SimFile {
    fn call(&self, kind: OpKind) -> Call<'_> {
        Call { file: Some(self.handle.ino), direct: self.direct, ..Call::new(kind, &self.handle.path) }
    }

    fn perform<T>(&self, call: &Call<'_>, act: impl FnOnce(&mut State, Grant) -> io::Result<T>) -> io::Result<T> {
        self.handle.shared.perform(self.handle.epoch, call, act)
    }

    /// What the kernel refuses before it looks at the file.
    fn check(&self, memory: &[u8], position: u64) -> io::Result<()> {
        let blocks = |number: u64| number.is_multiple_of(BLOCK);
        let aligned = blocks(position) && blocks(to_u64(memory.len())) && blocks(to_u64(memory.as_ptr().addr()));
        if self.direct && !memory.is_empty() && !aligned {
            return Err(Errno::INVAL.into());
        }
        end_of(position, to_u64(memory.len())).map(|_| ())
    }
}

/// Positions are signed in the kernel.
fn end_of(position: u64, len: u64) -> io::Result<u64> {
    position.checked_add(len).filter(|end| i64::try_from(*end).is_ok()).ok_or_else(|| Errno::INVAL.into())
}

impl File for SimFile {
    fn len(&self) -> io::Result<u64> {
        self.perform(&self.call(OpKind::Len), |state, _| Ok(state.tree.content(self.handle.ino)?.len()))
    }

    fn details(&self) -> io::Result<Details> {
        let links = |state: &mut State, _| {
            state.tree.content(self.handle.ino)?;
            // It knows no time.
            Ok(Details { links: state.tree.links(self.handle.ino), modified_ns: None })
        };
        self.perform(&self.call(OpKind::Len), links)
    }

    fn read_at(&self, into: &mut [u8], position: u64) -> io::Result<usize> {
        let call = self.call(OpKind::Read).at(position, to_u64(into.len()));
        self.perform(&call, |state, grant| {
            self.check(into, position)?;
            let most = into.len().min(grant.most).min(MAX_CALL);
            let read = state.tree.content(self.handle.ino)?.read(&mut into[..most], position);
            if self.direct {
                // As on Linux, the memory behind the end of the file does not stay as it was.
                into[read..most].fill(0);
            }
            Ok(read)
        })
    }

    fn write_at(&self, from: &[u8], position: u64, durable: bool) -> io::Result<usize> {
        let call = self.call(OpKind::Write).writes(from, position, durable);
        self.perform(&call, |state, grant| {
            if !self.write {
                return Err(Errno::BADF.into());
            }
            self.check(from, position)?;
            let most = from.len().min(grant.most).min(MAX_CALL);
            let fits = to_usize(state.fits(self.handle.ino, position..position + to_u64(most))?);
            if fits == 0 && most > 0 {
                return Err(Errno::NOSPC.into());
            }
            state.tree.content(self.handle.ino)?.write(&from[..fits], position, durable && !grant.failing);
            Ok(fits)
        })
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.perform(&self.call(OpKind::SetLen).at(len, 0), |state, _| {
            if !self.write {
                return Err(Errno::INVAL.into());
            }
            state.tree.content(self.handle.ino)?.set_len(end_of(len, 0)?);
            Ok(())
        })
    }

    fn allocate(&self, range: Range<u64>) -> io::Result<()> {
        let len = range.end.saturating_sub(range.start);
        self.perform(&self.call(OpKind::Allocate).at(range.start, len), |state, _| {
            if len == 0 {
                return Ok(());
            }
            if !self.write {
                return Err(Errno::BADF.into());
            }
            if state.options.refuse_allocate {
                return Err(io::ErrorKind::Unsupported.into());
            }
            end_of(range.start, len)?;
            if state.fits(self.handle.ino, range.clone())? < len {
                return Err(Errno::NOSPC.into());
            }
            state.tree.content(self.handle.ino)?.allocate(range);
            Ok(())
        })
    }

    fn sync(&self) -> io::Result<()> {
        self.perform(&self.call(OpKind::Sync), |state, _| {
            state.tree.content(self.handle.ino)?.sync();
            Ok(())
        })
    }

    fn evict(&self, from: u64) -> io::Result<()> {
        self.perform(&self.call(OpKind::Len), |state, _| {
            state.tree.content(self.handle.ino)?.evict(from);
            Ok(())
        })
    }

    fn write_zeroes(&self, _range: Range<u64>) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn next_data(&self, position: u64) -> io::Result<Option<u64>> {
        // It tells nothing: everything may be data.
        Ok(Some(position))
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
