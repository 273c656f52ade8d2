//! The disk: one file in a FUSE file system of our own, under a loop device under a real file system.
//!
//! It remembers what a power cut may take: everything that was written and not followed by a flush that was answered. Before the
//! n-th write or flush it cuts the power: what was durable then, what was not, and what had been acknowledged are put by as a [`Cut`].
//! It goes on serving after that, so that the file system above can be unmounted; nobody looks at what is written then.
//!
//! It is no medium: a write that was flushed is kept, a sector is never half written, and a bit never turns.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, LockOwner, OpenFlags, ReplyAttr, ReplyData,
    ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request, WriteFlags,
};

use crate::Rng;

const BLOCK: usize = 4096;
/// The file's name.
pub const NAME: &str = "disk";
const FILE: INodeNo = INodeNo(2);

/// Bytes of a disk, zeros where there is no block. Copies share their blocks.
#[derive(Clone, Default)]
pub struct Image(BTreeMap<u64, Arc<[u8; BLOCK]>>);

impl Image {
    fn read(&self, position: u64, into: &mut [u8]) {
        for (block, within, range) in pieces(position, into.len()) {
            match self.0.get(&block) {
                Some(bytes) => into[range.clone()].copy_from_slice(&bytes[within..within + range.len()]),
                None => into[range].fill(0),
            }
        }
    }

    fn write(&mut self, position: u64, from: &[u8]) {
        for (block, within, range) in pieces(position, from.len()) {
            let bytes = &from[range];
            if bytes.len() == BLOCK && bytes.iter().all(|&byte| byte == 0) {
                self.0.remove(&block);
            } else {
                Arc::make_mut(self.0.entry(block).or_insert_with(|| Arc::new([0; BLOCK])))[within..within + bytes.len()]
                    .copy_from_slice(bytes);
            }
        }
    }

    /// Makes a file of it, with holes for zeros.
    pub fn save(&self, path: &Path, len: u64) -> io::Result<()> {
        let file = File::create(path)?;
        file.set_len(len)?;
        self.0.iter().try_for_each(|(block, bytes)| file.write_all_at(&bytes[..], block * BLOCK as u64))
    }
}

/// The blocks that a range of the disk touches: which one, where in it, and where in the range.
fn pieces(position: u64, len: usize) -> impl Iterator<Item = (u64, usize, std::ops::Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let at = position + done as u64;
        let within = (at % BLOCK as u64) as usize;
        let range = done..len.min(done + BLOCK - within);
        done = range.end;
        (!range.is_empty()).then_some((at / BLOCK as u64, within, range))
    })
}

/// A write that no flush has followed.
#[derive(Clone)]
struct Write {
    position: u64,
    bytes: Arc<[u8]>,
}

/// What a power cut leaves of the writes that no flush had followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Survival {
    Nothing,
    Everything,
    /// The first so many, the last of them in part.
    Prefix,
    /// Each wholly or not at all.
    Writes,
    /// Each sector of each, or not.
    Sectors,
}

impl Survival {
    pub const ALL: [Self; 5] = [Self::Nothing, Self::Everything, Self::Prefix, Self::Writes, Self::Sectors];
}

/// The moment of the power cut.
pub struct Cut {
    durable: Image,
    unflushed: Vec<Write>,
    /// How many acknowledgements had arrived.
    pub acknowledged: usize,
}

impl Cut {
    pub fn unflushed(&self) -> usize {
        self.unflushed.len()
    }

    /// What the disk holds when the power is back. It writes so many bytes wholly or not at all.
    pub fn survivor(&self, how: Survival, sector_bytes: usize, rng: &mut Rng) -> Image {
        let mut image = self.durable.clone();
        // How likely each survives, from never to always.
        let percent = rng.below(101);
        let first = rng.below(self.unflushed.len() as u64 + 1) as usize;
        for (number, write) in self.unflushed.iter().enumerate() {
            let sectors = write.bytes.len().div_ceil(sector_bytes);
            let torn = rng.below(sectors as u64 + 1) as usize;
            let is_kept = rng.below(100) < percent;
            for (sector, bytes) in write.bytes.chunks(sector_bytes).enumerate() {
                let survives = match how {
                    Survival::Nothing => false,
                    Survival::Everything => true,
                    Survival::Prefix => number < first || (number == first && sector < torn),
                    Survival::Writes => is_kept,
                    Survival::Sectors => rng.below(100) < percent,
                };
                if survives {
                    image.write(write.position + (sector * sector_bytes) as u64, bytes);
                }
            }
        }
        image
    }
}

struct State {
    /// As the kernel sees it.
    seen: Image,
    durable: Image,
    unflushed: Vec<Write>,
    writes: u64,
    flushes: u64,
    /// Writes and flushes left until the cut.
    left: Option<u64>,
    /// Answers a flush and does nothing.
    lies: bool,
    cut: Option<Cut>,
}

struct Shared {
    state: Mutex<State>,
    is_cut: Condvar,
    acknowledged: Box<dyn Fn() -> usize + Send + Sync>,
    len: u64,
}

/// A disk that is being served, or about to be. Clones are the same disk.
#[derive(Clone)]
pub struct Disk(Arc<Shared>);

impl Disk {
    /// `acknowledged` tells how many acknowledgements have arrived; it is called under the disk's lock, and must not wait for the disk.
    pub fn new(image: Image, len: u64, acknowledged: impl Fn() -> usize + Send + Sync + 'static) -> Self {
        let state =
            State { seen: image.clone(), durable: image, unflushed: Vec::new(), writes: 0, flushes: 0, left: None, lies: false, cut: None };
        Self(Arc::new(Shared { state: Mutex::new(state), is_cut: Condvar::new(), acknowledged: Box::new(acknowledged), len }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap()
    }

    /// Everything that was written is durable; the power will be cut before the n-th write or flush from now on. A disk that lies
    /// answers flushes from now on and does nothing.
    pub fn arm(&self, nth: u64, lies: bool) {
        let mut state = self.state();
        state.durable = state.seen.clone();
        state.unflushed.clear();
        (state.writes, state.flushes, state.left, state.lies) = (0, 0, Some(nth), lies);
    }

    /// Waits until the power was cut, or `or` says that there will be no more to wait for; then it is cut now.
    pub fn wait_for_the_cut(&self, or: impl Fn() -> bool) -> Cut {
        let mut state = self.state();
        while state.cut.is_none() && !or() {
            state = self.0.is_cut.wait_timeout(state, Duration::from_millis(20)).unwrap().0;
        }
        if state.cut.is_none() {
            self.freeze(&mut state);
        }
        state.cut.take().unwrap()
    }

    /// How many writes and flushes came since it was armed.
    pub fn counts(&self) -> (u64, u64) {
        let state = self.state();
        (state.writes, state.flushes)
    }

    /// Whoever was told of an acknowledgement before this moment finds its record in what is durable now: the flush that it waited
    /// for was answered before.
    fn freeze(&self, state: &mut State) {
        let acknowledged = (self.0.acknowledged)();
        state.cut = Some(Cut { durable: state.durable.clone(), unflushed: state.unflushed.clone(), acknowledged });
        self.0.is_cut.notify_all();
    }

    fn count(&self, state: &mut State) {
        state.left = state.left.and_then(|left| left.checked_sub(1));
        if state.left == Some(0) {
            state.left = None;
            self.freeze(state);
        }
    }

    fn attributes(&self, inode: INodeNo) -> FileAttr {
        let is_file = inode == FILE;
        let (size, kind) = if is_file { (self.0.len, FileType::RegularFile) } else { (0, FileType::Directory) };
        let time = SystemTime::UNIX_EPOCH;
        FileAttr {
            ino: inode,
            size,
            blocks: size / 512,
            atime: time,
            mtime: time,
            ctime: time,
            crtime: time,
            kind,
            perm: 0o700,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: BLOCK as u32,
            flags: 0,
        }
    }
}

const ALWAYS: Duration = Duration::from_secs(86_400);

impl Filesystem for Disk {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if name == NAME { reply.entry(&ALWAYS, &self.attributes(FILE), Generation(0)) } else { reply.error(Errno::ENOENT) }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&ALWAYS, &self.attributes(inode));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        // Nothing may be kept between the loop device and this disk.
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(&self, _: &Request, _: INodeNo, _: FileHandle, position: u64, size: u32, _: OpenFlags, _: Option<LockOwner>, reply: ReplyData) {
        let mut bytes = vec![0; u64::from(size).min(self.0.len.saturating_sub(position)) as usize];
        self.state().seen.read(position, &mut bytes);
        reply.data(&bytes);
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        position: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let mut state = self.state();
        self.count(&mut state);
        state.writes += 1;
        state.seen.write(position, data);
        state.unflushed.push(Write { position, bytes: data.into() });
        reply.written(data.len() as u32);
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        let mut state = self.state();
        self.count(&mut state);
        state.flushes += 1;
        if !state.lies {
            let state = &mut *state;
            state.unflushed.drain(..).for_each(|write| state.durable.write(write.position, &write.bytes));
        }
        reply.ok();
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        // A descriptor is closed, which means nothing for what is durable.
        reply.ok();
    }

    fn fallocate(&self, _: &Request, _: INodeNo, _: FileHandle, _: u64, _: u64, _: i32, reply: ReplyEmpty) {
        // The loop device's discards and zeroing; the kernel writes zeros instead where it needs them.
        reply.error(Errno::EOPNOTSUPP);
    }
}
