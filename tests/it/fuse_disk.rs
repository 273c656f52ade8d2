//! A file system of the tests' own under the real kernel: it fails on command, and loses on command what was not synced.
//!
//! Every file and directory has two images: what was done to it, and what of that was synced. A power cut leaves the second. A file's sync
//! makes its bytes and length durable, a directory's its names, and neither more than that: stricter than any file system that
//! the engine will meet. A file's sync that fails loses what was to be synced, for good: the kernel's page cache may show it still, as it does
//! on a real disk, and a later sync that succeeds is of no use.
//!
//! The server has threads of its own and calls nothing that waits for the file system. Dropping a [`FuseDisk`] unmounts it, lazily,
//! so that nobody waits for a server that is gone.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, LockOwner, OpenFlags,
    RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request, WriteFlags,
};
use tempfile::TempDir;

use crate::oracle::HANG_LIMIT;
use crate::support::scratch;

const ROOT: u64 = 1;
/// The kernel need not ask again: nobody else changes anything.
const ALWAYS: Duration = Duration::from_secs(86_400);

/// What is asked of the file system, as far as it can be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Write,
    /// Of a file, by fsync, fdatasync, or a write with RWF_DSYNC after it was taken.
    Sync,
    SyncDir,
    Allocate,
    Create,
    /// By the new name.
    Rename,
    SetLen,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    Error(i32),
    /// Only so many bytes are written. The kernel writes the rest in another call where the file was opened for direct I/O, and else takes
    /// it for EIO.
    Short(usize),
}

/// What happens to operations of a kind on paths with that end.
#[derive(Clone, Debug)]
pub struct Fault {
    pub on: Op,
    pub suffix: &'static str,
    /// To how many of them it does not happen before.
    pub after: u64,
    /// And to how many it does then.
    pub times: u64,
    pub effect: Effect,
}

impl Fault {
    pub fn once(on: Op, suffix: &'static str, errno: i32) -> Self {
        Self { on, suffix, after: 0, times: 1, effect: Effect::Error(errno) }
    }

    pub fn always(on: Op, suffix: &'static str, errno: i32) -> Self {
        Self { times: u64::MAX, ..Self::once(on, suffix, errno) }
    }
}

#[derive(Clone, Debug)]
enum Node {
    File { seen: Vec<u8>, durable: Vec<u8> },
    Directory { seen: BTreeMap<OsString, u64>, durable: BTreeMap<OsString, u64> },
}

impl Node {
    fn file() -> Self {
        Self::File { seen: Vec::new(), durable: Vec::new() }
    }

    fn directory() -> Self {
        Self::Directory { seen: BTreeMap::new(), durable: BTreeMap::new() }
    }
}

/// What a disk holds. Removed files stay, for those who have them open.
#[derive(Clone, Debug)]
pub struct Tree(BTreeMap<u64, Node>);

impl Tree {
    fn names(&mut self, directory: u64) -> Result<&mut BTreeMap<OsString, u64>, Errno> {
        match self.0.get_mut(&directory) {
            Some(Node::Directory { seen, .. }) => Ok(seen),
            _ => Err(Errno::ENOTDIR),
        }
    }

    fn bytes(&mut self, file: u64) -> Result<&mut Vec<u8>, Errno> {
        match self.0.get_mut(&file) {
            Some(Node::File { seen, .. }) => Ok(seen),
            _ => Err(Errno::EISDIR),
        }
    }

    fn find(&mut self, directory: u64, name: &OsStr) -> Result<u64, Errno> {
        self.names(directory)?.get(name).copied().ok_or(Errno::ENOENT)
    }

    /// Where a node is, from the root.
    fn path(&self, of: u64) -> PathBuf {
        let parent = self.0.iter().find_map(|(number, node)| match node {
            Node::Directory { seen, .. } => seen.iter().find(|(_, node)| **node == of).map(|(name, _)| (*number, name)),
            Node::File { .. } => None,
        });
        parent.map_or_else(PathBuf::new, |(parent, name)| self.path(parent).join(name))
    }

    /// What a power cut leaves of it.
    fn after_a_power_cut(&self) -> Self {
        let mut left = self.clone();
        for node in left.0.values_mut() {
            match node {
                Node::File { seen, durable } => seen.clone_from(durable),
                Node::Directory { seen, durable } => seen.clone_from(durable),
            }
        }
        left
    }

    fn attributes(&self, number: u64) -> Result<FileAttr, Errno> {
        let (size, kind, perm) = match self.0.get(&number).ok_or(Errno::ENOENT)? {
            Node::File { seen, .. } => (seen.len() as u64, FileType::RegularFile, 0o600),
            Node::Directory { .. } => (0, FileType::Directory, 0o700),
        };
        let time = SystemTime::UNIX_EPOCH;
        Ok(FileAttr {
            ino: INodeNo(number),
            size,
            blocks: size.div_ceil(512),
            atime: time,
            mtime: time,
            ctime: time,
            crtime: time,
            kind,
            perm,
            nlink: 1,
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }
}

struct State {
    tree: Tree,
    faults: Vec<Fault>,
    /// How often one had its effect.
    failures: u64,
    /// Operations that wait for [`Hold`] to be dropped.
    hold: Option<(Op, &'static str)>,
    is_held: bool,
    refuses_direct: bool,
}

impl State {
    /// Whether a file may be opened like that.
    fn admit(&self, flags: i32) -> Result<(), Errno> {
        let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
        if self.refuses_direct && flags & direct != 0 { Err(Errno::EINVAL) } else { Ok(()) }
    }
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // A panic of one of the threads must not take the unmounting along.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the lock for an operation, after it was held as long as it is to be, and tells what is to happen to it.
    fn begin(&self, on: Op, path: impl FnOnce(&Tree) -> PathBuf) -> (MutexGuard<'_, State>, Option<Effect>) {
        let mut state = self.state();
        let path = path(&state.tree);
        let path = path.to_str().unwrap();
        while state.hold.is_some_and(|(held, suffix)| held == on && path.ends_with(suffix)) {
            state.is_held = true;
            self.changed.notify_all();
            state = self.changed.wait(state).unwrap();
        }
        let mut effect = None;
        for fault in state.faults.iter_mut().filter(|fault| fault.on == on && path.ends_with(fault.suffix)) {
            if fault.after > 0 {
                fault.after -= 1;
            } else if fault.times > 0 && effect.is_none() {
                fault.times -= 1;
                effect = Some(fault.effect);
            }
        }
        state.failures += u64::from(effect.is_some());
        (state, effect)
    }

    /// The same for one that is done or fails.
    fn begin_whole(&self, on: Op, path: impl FnOnce(&Tree) -> PathBuf) -> Result<MutexGuard<'_, State>, Errno> {
        match self.begin(on, path) {
            (_, Some(Effect::Error(errno))) => Err(Errno::from_i32(errno)),
            (state, _) => Ok(state),
        }
    }

    fn write(&self, file: u64, position: u64, from: &[u8]) -> Result<u32, Errno> {
        let (mut state, effect) = self.begin(Op::Write, |tree| tree.path(file));
        let taken = match effect {
            Some(Effect::Error(errno)) => return Err(Errno::from_i32(errno)),
            Some(Effect::Short(bytes)) => bytes.min(from.len()),
            None => from.len(),
        };
        let bytes = state.tree.bytes(file)?;
        let start = position as usize;
        bytes.resize(bytes.len().max(start + taken), 0);
        bytes[start..start + taken].copy_from_slice(&from[..taken]);
        Ok(taken as u32)
    }

    fn sync(&self, number: u64, on: Op) -> Result<(), Errno> {
        let (mut state, effect) = self.begin(on, |tree| tree.path(number));
        match (state.tree.0.get_mut(&number).ok_or(Errno::ENOENT)?, effect) {
            (Node::File { seen, durable }, None) => durable.clone_from(seen),
            (Node::Directory { seen, durable }, None) => durable.clone_from(seen),
            (Node::File { seen, durable }, Some(_)) => {
                let len = seen.len();
                seen.clone_from(durable);
                seen.resize(len, 0);
            }
            (Node::Directory { .. }, Some(_)) => {}
        }
        match effect {
            Some(Effect::Error(errno)) => Err(Errno::from_i32(errno)),
            _ => Ok(()),
        }
    }

    fn make(&self, directory: u64, name: &OsStr, node: Node) -> Result<FileAttr, Errno> {
        let mut state = self.begin_whole(Op::Create, |tree| tree.path(directory).join(name))?;
        let number = state.tree.0.keys().max().unwrap() + 1;
        let names = state.tree.names(directory)?;
        if names.contains_key(name) {
            return Err(Errno::EEXIST);
        }
        names.insert(name.to_owned(), number);
        state.tree.0.insert(number, node);
        state.tree.attributes(number)
    }

    fn rename(&self, (from, name): (u64, &OsStr), (to, new_name): (u64, &OsStr), flags: RenameFlags) -> Result<(), Errno> {
        let mut state = self.begin_whole(Op::Rename, |tree| tree.path(to).join(new_name))?;
        let number = state.tree.find(from, name)?;
        if flags.contains(RenameFlags::RENAME_NOREPLACE) && state.tree.find(to, new_name).is_ok() {
            return Err(Errno::EEXIST);
        }
        state.tree.names(from)?.remove(name);
        state.tree.names(to)?.insert(new_name.to_owned(), number);
        Ok(())
    }

    fn remove(&self, directory: u64, name: &OsStr) -> Result<(), Errno> {
        let mut state = self.state();
        let number = state.tree.find(directory, name)?;
        if state.tree.names(number).is_ok_and(|names| !names.is_empty()) {
            return Err(Errno::ENOTEMPTY);
        }
        state.tree.names(directory)?.remove(name);
        Ok(())
    }

    fn list(&self, directory: u64) -> Result<Vec<(u64, FileType, OsString)>, Errno> {
        let mut state = self.state();
        let names = state.tree.names(directory)?.clone();
        let kind = |number: u64| state.tree.attributes(number).map(|attributes| attributes.kind);
        let here = [(directory, FileType::Directory, ".".into()), (directory, FileType::Directory, "..".into())];
        let others = names.into_iter().map(|(name, number)| Ok((number, kind(number)?, name)));
        here.into_iter().map(Ok).chain(others).collect()
    }
}

/// What the kernel talks to.
struct Server(Arc<Shared>);

fn end(reply: ReplyEmpty, result: Result<(), Errno>) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(error),
    }
}

fn enter(reply: ReplyEntry, result: Result<FileAttr, Errno>) {
    match result {
        Ok(attributes) => reply.entry(&ALWAYS, &attributes, Generation(0)),
        Err(error) => reply.error(error),
    }
}

impl Filesystem for Server {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let mut state = self.0.state();
        let found = state.tree.find(parent.0, name);
        enter(reply, found.and_then(|number| state.tree.attributes(number)));
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.0.state().tree.attributes(inode.0) {
            Ok(attributes) => reply.attr(&ALWAYS, &attributes),
            Err(error) => reply.error(error),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        inode: INodeNo,
        _: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        size: Option<u64>,
        _: Option<fuser::TimeOrNow>,
        _: Option<fuser::TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let done = || {
            let Some(size) = size else { return self.0.state().tree.attributes(inode.0) };
            let mut state = self.0.begin_whole(Op::SetLen, |tree| tree.path(inode.0))?;
            state.tree.bytes(inode.0)?.resize(size as usize, 0);
            state.tree.attributes(inode.0)
        };
        match done() {
            Ok(attributes) => reply.attr(&ALWAYS, &attributes),
            Err(error) => reply.error(error),
        }
    }

    fn mkdir(&self, _: &Request, parent: INodeNo, name: &OsStr, _: u32, _: u32, reply: ReplyEntry) {
        enter(reply, self.0.make(parent.0, name, Node::directory()));
    }

    fn create(&self, _: &Request, parent: INodeNo, name: &OsStr, _: u32, _: u32, flags: i32, reply: ReplyCreate) {
        let admitted = self.0.state().admit(flags);
        match admitted.and_then(|()| self.0.make(parent.0, name, Node::file())) {
            Ok(attributes) => reply.created(&ALWAYS, &attributes, Generation(0), FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE),
            Err(error) => reply.error(error),
        }
    }

    fn open(&self, _: &Request, _: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        match self.0.state().admit(flags.0) {
            // The page cache outlives those who have the file open, as it does on a disk.
            Ok(()) => reply.opened(FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE),
            Err(error) => reply.error(error),
        }
    }

    fn read(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        position: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.0.state().tree.bytes(inode.0) {
            Ok(bytes) => {
                let start = bytes.len().min(position as usize);
                reply.data(&bytes[start..bytes.len().min(start + size as usize)]);
            }
            Err(error) => reply.error(error),
        }
    }

    fn write(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        position: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        match self.0.write(inode.0, position, data) {
            Ok(written) => reply.written(written),
            Err(error) => reply.error(error),
        }
    }

    fn fsync(&self, _: &Request, inode: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        end(reply, self.0.sync(inode.0, Op::Sync));
    }

    fn fsyncdir(&self, _: &Request, inode: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        end(reply, self.0.sync(inode.0, Op::SyncDir));
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fallocate(&self, _: &Request, inode: INodeNo, _: FileHandle, offset: u64, length: u64, mode: i32, reply: ReplyEmpty) {
        let done = || {
            let mut state = self.0.begin_whole(Op::Allocate, |tree| tree.path(inode.0))?;
            if mode != 0 {
                return Err(Errno::EOPNOTSUPP);
            }
            let bytes = state.tree.bytes(inode.0)?;
            bytes.resize(bytes.len().max((offset + length) as usize), 0);
            Ok(())
        };
        end(reply, done());
    }

    fn rename(&self, _: &Request, from: INodeNo, name: &OsStr, to: INodeNo, new_name: &OsStr, flags: RenameFlags, reply: ReplyEmpty) {
        end(reply, self.0.rename((from.0, name), (to.0, new_name), flags));
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        end(reply, self.0.remove(parent.0, name));
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        end(reply, self.0.remove(parent.0, name));
    }

    fn readdir(&self, _: &Request, inode: INodeNo, _: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        match self.0.list(inode.0) {
            Ok(entries) => {
                for (number, (inode, kind, name)) in (1..).zip(entries).skip(offset as usize) {
                    if reply.add(INodeNo(inode), number, kind, name) {
                        break;
                    }
                }
                reply.ok();
            }
            Err(error) => reply.error(error),
        }
    }
}

/// A mounted file system of this kind; unmounted when dropped. Whoever uses files on it is dropped before.
pub struct FuseDisk {
    shared: Arc<Shared>,
    session: Option<BackgroundSession>,
    home: TempDir,
}

impl FuseDisk {
    /// An empty one; none, and a word about it, where none can be mounted.
    pub fn new() -> Option<Self> {
        let tree = Tree([(ROOT, Node::directory())].into());
        let state = State { tree, faults: Vec::new(), failures: 0, hold: None, is_held: false, refuses_direct: false };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        let mut disk = Self { shared, session: None, home: scratch() };
        match disk.mount() {
            Ok(()) => Some(disk),
            Err(error) => {
                eprintln!("skipped: no FUSE file system can be mounted here: {error}");
                None
            }
        }
    }

    fn mount(&mut self) -> std::io::Result<()> {
        let mut config = Config::default();
        // One that is held must not keep the others waiting.
        config.n_threads = Some(3);
        self.session = Some(fuser::spawn_mount(Server(Arc::clone(&self.shared)), self.home.path(), &config)?);
        Ok(())
    }

    fn unmount(&mut self) {
        let Some(session) = self.session.take() else { return };
        if rustix::mount::unmount(self.home.path(), rustix::mount::UnmountFlags::DETACH).is_err() {
            // Without root it was not mounted by this process either.
            let _ = std::process::Command::new("fusermount3").args(["-u", "-z"]).arg(self.home.path()).status();
        }
        // Its threads end when the last user of the mount is gone.
        drop(session);
    }

    pub fn data(&self) -> PathBuf {
        self.home.path().join("data")
    }

    pub fn path(&self) -> &Path {
        self.home.path()
    }

    /// From now on every file goes through the page cache.
    pub fn refuse_direct(&self) {
        self.shared.state().refuses_direct = true;
    }

    pub fn fail(&self, fault: Fault) {
        self.shared.state().faults.push(fault);
    }

    pub fn clear_faults(&self) {
        self.shared.state().faults.clear();
    }

    /// How many operations failed, or fell short, as they were told to.
    pub fn failures(&self) -> u64 {
        self.shared.state().failures
    }

    /// From now on operations of that kind wait until the answer is dropped.
    #[must_use]
    pub fn hold(&self, on: Op, suffix: &'static str) -> Hold {
        let mut state = self.shared.state();
        (state.hold, state.is_held) = (Some((on, suffix)), false);
        Hold(Arc::clone(&self.shared))
    }

    /// What a power cut at this moment would leave.
    pub fn survivor(&self) -> Tree {
        self.shared.state().tree.after_a_power_cut()
    }

    /// The machine comes back after a power cut that left this. Nobody may have files open.
    pub fn restart_with(&mut self, survivor: Tree) {
        self.unmount();
        let mut state = self.shared.state();
        state.tree = survivor;
        state.faults.clear();
        drop(state);
        self.mount().unwrap();
    }
}

impl Drop for FuseDisk {
    fn drop(&mut self) {
        self.unmount();
    }
}

/// Operations wait while this is there.
pub struct Hold(Arc<Shared>);

impl Hold {
    pub fn wait_until_held(&self) {
        let state = self.0.state();
        let (_state, timeout) = self.0.changed.wait_timeout_while(state, HANG_LIMIT, |state| !state.is_held).unwrap();
        assert!(!timeout.timed_out(), "nothing came to be held");
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.0.state().hold = None;
        self.0.changed.notify_all();
    }
}
