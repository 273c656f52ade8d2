//! The seam to the operating system, the only place that talks to it.
//!
//! Three small object-safe traits stand between the engine and the kernel:
//!
//! - [`Disk`]: names. Cold, blocking: open, list, rename, remove, sync a directory, lock.
//! - [`File`]: one open file. Blocking reads, writes, allocation, truncation, sync.
//! - [`Ring`]: the hot path. Operations that own their buffers go in, completions with tokens come out.
//!
//! Backends: `uring` (one io_uring per thread that does I/O), `posix` (the same contract by
//! `pwritev2`/`pread`), and, with the feature `sim`, a simulated disk in memory.
//!
//! Invariants:
//! - A buffer and a file belong to their operation until its completion was taken, also when the caller is gone.
//! - Short transfers and `EINTR`/`EAGAIN` come up through the seam unchanged; [`transfer`] alone resumes them.
//! - This module imports nothing of the crate; everything above it names no system call.

mod blocking;
mod buffer;
mod needs;
mod os;
mod process;
mod uring;
mod wake;

#[cfg(test)]
mod conformance;
#[cfg(feature = "sim")]
pub mod sim;
pub mod transfer;

use std::ffi::OsString;
use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

#[cfg(any(test, feature = "sim"))]
pub use blocking::BlockingRing;
pub use buffer::Buffer;
pub use os::{OsDisk, is_out_of_files, open_files_limit};
pub use process::{Process, is_forked};
pub use wake::{Signal, Waker};

/// Alignment of positions, lengths and memory for direct I/O. Every device's logical block
/// divides it; a file system that asks for more is served without direct I/O.
pub const BLOCK: u64 = 4096;

/// The most bytes that one operation moves; longer transfers are made of several.
/// Linux moves at most 0x7ffff000 bytes per call, whatever was asked.
pub const MAX_TRANSFER: usize = 1 << 30;

/// Which system interface carries the reads and the writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum Backend {
    /// io_uring where the kernel grants it, `posix` with one warning that names the cause where it does not.
    #[default]
    Auto,
    /// io_uring, or an error.
    Uring,
    /// `pwritev2` and `pread`.
    Posix,
}

/// The names of a file system: what is where, and whether the directory's entries are durable.
pub trait Disk: Debug + Send + Sync {
    /// Makes one directory. `AlreadyExists` if the name is taken.
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// The entries of a directory, in no particular order, without `.` and `..`.
    fn list(&self, dir: &Path) -> io::Result<Vec<Entry>>;
    /// The one path of what is at `path`: absolute, without links. On a disk that has neither it is the path itself.
    fn canonical(&self, path: &Path) -> io::Result<PathBuf> {
        Ok(path.to_owned())
    }
    /// Opens a regular file, and makes it where `how` says so. A directory is refused with `IsADirectory`, anything else (a pipe, a
    /// device, to write also a link) with `InvalidInput`, without waiting for its other end.
    fn open(&self, path: &Path, how: Open) -> io::Result<Arc<dyn File>>;
    /// Renames a file or a directory; `AlreadyExists` if the new name is taken.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Gives a file another name, in the place of whatever regular file has it: that name always stands for the one or for the other, also
    /// after a crash. `AlreadyExists` or `IsADirectory` if something else has it.
    fn replace(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Gives a regular file one more name. `AlreadyExists` if it is taken; `Unsupported` where a file cannot have both: on two file systems,
    /// or on one that has no such links, or with too many of them.
    fn link(&self, file: &Path, name: &Path) -> io::Result<()>;
    /// Removes one regular file; `InvalidInput` for what is none, which the engine did not make.
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// Removes one empty directory.
    fn remove_dir(&self, path: &Path) -> io::Result<()>;
    /// Makes the directory's entries durable: what was created, renamed and removed in it.
    fn sync_dir(&self, dir: &Path) -> io::Result<()>;
    /// Opens a directory, so that its entries can be made durable later, when there may be no descriptor left.
    fn open_dir(&self, dir: &Path) -> io::Result<Box<dyn Directory>>;
    /// Takes the exclusive lock of the file at `path`, making the file if there is none.
    /// `WouldBlock` at once if another holder has it, in this process or in another one;
    /// a holder that died has it no longer.
    fn lock(&self, path: &Path) -> io::Result<Box<dyn Lock>>;
    /// A ring of its own for one thread.
    fn ring(&self, config: &RingConfig) -> io::Result<Box<dyn Ring>>;
    /// Whether a ring of this disk works beside the thread that submits to it. Where it does not, a plain call does the same.
    fn rings_overlap(&self) -> bool;
    /// What carries the hot path here: `uring`, `posix` or `sim`.
    fn backend(&self) -> &'static str;
}

/// Whether opening to read failed because no regular file is there.
pub fn is_no_file(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::IsADirectory | io::ErrorKind::InvalidInput)
}

/// One open directory.
pub trait Directory: Debug + Send + Sync {
    /// As [`Disk::sync_dir`], without opening anything.
    fn sync(&self) -> io::Result<()>;
}

/// The directory that holds the last name of a path.
pub(crate) fn parent_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Held exclusively until dropped.
pub trait Lock: Debug + Send + Sync {}

/// One entry of a directory.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    /// Its name, any bytes.
    pub name: OsString,
    /// What it is; symbolic links are not followed.
    pub kind: EntryKind,
}

/// What a directory's entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum EntryKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A link, socket, device or anything else.
    Other,
}

/// How to open a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Open {
    /// Writes wanted as well as reads.
    pub write: bool,
    /// What to do about a file that is there, or is not.
    pub create: Create,
    /// Past the page cache (`O_DIRECT`). `InvalidInput` where the file system refuses; a file to be made may be there then.
    pub direct: bool,
}

impl Open {
    /// An existing file, to be read.
    pub const READ: Self = Self { write: false, create: Create::Never, direct: false };
    /// An existing file, to be read and written.
    pub const WRITE: Self = Self { write: true, create: Create::Never, direct: false };
    /// A new file, to be read and written; `AlreadyExists` if there is one.
    pub const NEW: Self = Self { write: true, create: Create::New, direct: false };
    /// An empty file, to be read and written, whatever was there.
    pub const EMPTY: Self = Self { write: true, create: Create::Empty, direct: false };
}

/// Whether opening may make a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Create {
    /// `NotFound` if there is none.
    Never,
    /// `AlreadyExists` if there is one.
    New,
    /// Made if there is none, emptied if there is one.
    Empty,
}

/// One open file. All methods block; any thread may call them.
///
/// A file opened with `direct` takes only transfers whose position, length and memory are multiples of [`BLOCK`].
#[allow(clippy::len_without_is_empty, reason = "measuring can fail, and nobody asks only whether a file is empty")]
pub trait File: Debug + Send + Sync {
    /// Bytes in the file, preallocated ones included.
    fn len(&self) -> io::Result<u64>;
    /// How many names it has, and when it was changed last.
    fn details(&self) -> io::Result<Details>;
    /// Reads at most `into.len()` bytes; fewer only at the end of the file or by interruption, 0 at the end.
    /// The bytes of `into` behind those may be overwritten.
    fn read_at(&self, into: &mut [u8], position: u64) -> io::Result<usize>;
    /// Writes at most `from.len()` bytes. With `durable`, the bytes counted in the result are on the device.
    fn write_at(&self, from: &[u8], position: u64, durable: bool) -> io::Result<usize>;
    /// Cuts or extends to exactly `len` bytes, and gives what lies beyond back to the file system.
    fn set_len(&self, len: u64) -> io::Result<()>;
    /// Sees to it that the bytes of `range`, if there are any, have room on the device and that the file is at least
    /// `range.end` long.
    /// New bytes read as zeros. `StorageFull` if there is no room; `Unsupported` where the file system cannot promise.
    fn allocate(&self, range: Range<u64>) -> io::Result<()>;
    /// Turns the bytes of `range`, within the file, into zeros that count as written, by the device itself
    /// (`FALLOC_FL_WRITE_ZEROES`, Linux 6.17). `Unsupported` where file system or device cannot.
    fn write_zeroes(&self, range: Range<u64>) -> io::Result<()>;
    /// Data and length are on the device when this returns.
    fn sync(&self) -> io::Result<()>;
    /// Forgets what the page cache holds of the file from byte `from` on and need not write, so that the next read asks the device. After a
    /// sync that failed the cache may hold what the device does not.
    fn evict(&self, from: u64) -> io::Result<()>;
    /// Where the file system keeps data next, from `position` on, as far as it tells: every byte before that reads as a zero.
    /// None if there are only such bytes up to the end.
    fn next_data(&self, position: u64) -> io::Result<Option<u64>>;
    /// The descriptor, where there is one.
    fn fd(&self) -> Option<BorrowedFd<'_>>;
}

/// What the file system notes of a file beside its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Details {
    /// Its names. A file without one is gone with its last descriptor.
    pub links: u64,
    /// When its bytes or its length were changed last, by the kernel's wall clock, in nanoseconds since 1970-01-01 UTC; none if that is not
    /// told, or was before.
    pub modified_ns: Option<u64>,
}

/// The shape of a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingConfig {
    /// Operations in flight at most.
    pub depth: u32,
    /// Files attached at most.
    pub files: u32,
    /// Whether attached files are registered with the kernel: worth it for those that stay attached, not for one operation.
    pub register_files: bool,
    /// Buffers registered with the kernel.
    pub buffers: usize,
    /// Bytes of each, a multiple of [`BLOCK`].
    pub buffer_bytes: usize,
    /// All calls come from the thread that made the ring.
    pub one_thread: bool,
}

/// An attached file's place in its ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot(u32);

/// Names an operation until its completion; the caller chooses it, uniquely among those in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token(pub u64);

/// What an operation does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// From the file into the buffer.
    Read,
    /// From the buffer into the file.
    Write {
        /// Complete only once the bytes are on the device (`RWF_DSYNC`).
        durable: bool,
    },
}

/// One transfer between an attached file and a buffer, which it owns until its completion.
#[derive(Debug)]
pub struct Op {
    /// Read or write.
    pub action: Action,
    /// The file.
    pub slot: Slot,
    /// Where in the file.
    pub position: u64,
    /// The memory.
    pub buffer: Buffer,
    /// Which of its bytes, [`MAX_TRANSFER`] at most.
    pub range: Range<usize>,
}

/// An operation that ended.
#[derive(Debug)]
pub struct Completion {
    /// As submitted.
    pub token: Token,
    /// Bytes moved, possibly fewer than asked; 0 at the end of a file.
    pub result: io::Result<usize>,
    /// Given back.
    pub buffer: Buffer,
}

/// Completion-based I/O for one thread.
///
/// Dropping a ring waits for what is in flight: for writes without limit; where the completion of a read does not come in time, its buffer is
/// leaked, never freed.
pub trait Ring: Debug + Send {
    /// The buffers that the ring was made with, once; later calls give an empty list.
    fn take_buffers(&mut self) -> Vec<Buffer>;
    /// Prepares `file` for operations, and keeps it open until detached.
    fn attach(&mut self, file: Arc<dyn File>) -> io::Result<Slot>;
    /// Forgets a file. No operation on it may be in flight.
    fn detach(&mut self, slot: Slot);
    /// Starts an operation. With more than the ring's depth in flight, it is an error of the caller.
    fn submit(&mut self, token: Token, op: Op) -> Result<(), Rejected>;
    /// The next completion, if one is there. Never blocks.
    fn reap(&mut self) -> io::Result<Option<Completion>>;
    /// Blocks until a completion is there, the waker was used, or the time is over.
    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()>;
    /// Ends a `wait` from any thread; one that is not under way yet ends at once.
    fn waker(&mut self) -> Waker;
}

/// An operation that could not be started, with its buffer.
#[derive(Debug)]
pub struct Rejected {
    /// Why.
    pub error: io::Error,
    /// The buffer of the operation, given back.
    pub buffer: Buffer,
}
