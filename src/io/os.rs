//! The running system's disk: files by descriptor, names by path.
//!
//! Everything here blocks. Any thread may call it.

use std::fs;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FallocateFlags, FlockOperation, OFlags, RenameFlags};
use rustix::io::{Errno, ReadWriteFlags};

use super::blocking::BlockingRing;
use super::uring::{self, UringRing};
use super::{Backend, Create, Details, Directory, Disk, Entry, EntryKind, File, Lock, Open, Process, Ring, RingConfig};

/// The file systems that this process sees.
#[derive(Debug)]
pub struct OsDisk {
    uring: bool,
    /// Whether one ring may be done without io_uring where the kernel grants no more of them.
    may_fall_back: bool,
    /// A child of it changes no name.
    process: Process,
    /// Each cause of working worse than hoped is told once.
    told: Told,
}

/// What was warned of already.
#[derive(Debug, Default)]
pub(super) struct Told {
    pub(super) memlock: AtomicBool,
    pub(super) files: AtomicBool,
    pub(super) rings: AtomicBool,
}

impl Told {
    /// Whether this is the first time.
    pub(super) fn first(flag: &AtomicBool) -> bool {
        !flag.swap(true, Ordering::Relaxed)
    }
}

impl OsDisk {
    /// Finds out which system interface serves here.
    ///
    /// # Errors
    /// The kernel's refusal (`EPERM` in many containers, `ENOSYS`, …) if `backend` is [`Backend::Uring`]; `Unsupported`, with the name of what
    /// is missing, if its rings cannot do all that is asked of them.
    pub fn new(backend: Backend) -> io::Result<Self> {
        Self::by(backend, uring::probe)
    }

    /// [`Self::new`], by this word on whether rings serve here.
    fn by(backend: Backend, probe: impl FnOnce() -> io::Result<()>) -> io::Result<Self> {
        let uring = match backend {
            Backend::Posix => false,
            Backend::Uring => probe().map(|()| true)?,
            Backend::Auto => match probe() {
                Ok(()) => true,
                // That says nothing of io_uring, and passes.
                Err(error) if is_out_of_files(&error) => return Err(error),
                Err(error) => {
                    tracing::warn!(%error, "io_uring is not available here (denied by a container's seccomp profile or by \
                        kernel.io_uring_disabled, no locked memory allowed by RLIMIT_MEMLOCK, or an old kernel); using pwritev2 and \
                        pread instead");
                    false
                }
            },
        };
        Ok(Self { uring, may_fall_back: backend == Backend::Auto, process: Process::current()?, told: Told::default() })
    }
}

impl Disk for OsDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.process.check()?;
        fs::create_dir(path)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<Entry>> {
        let entry = |entry: io::Result<fs::DirEntry>| {
            let entry = entry?;
            let kind = entry.file_type()?;
            let kind = match (kind.is_file(), kind.is_dir()) {
                (true, _) => EntryKind::File,
                (_, true) => EntryKind::Directory,
                _ => EntryKind::Other,
            };
            Ok(Entry { name: entry.file_name(), kind })
        };
        fs::read_dir(dir)?.map(entry).collect()
    }

    fn canonical(&self, path: &Path) -> io::Result<PathBuf> {
        fs::canonicalize(path)
    }

    fn open(&self, path: &Path, how: Open) -> io::Result<Arc<dyn File>> {
        if how.write {
            self.process.check()?;
        }
        let mut flags = OFlags::empty();
        flags.set(OFlags::DIRECT, how.direct);
        // What a link leads to is not the engine's to write.
        flags.set(OFlags::NOFOLLOW, how.write);
        let file = fs::OpenOptions::new()
            .read(true)
            .write(how.write)
            .create_new(how.create == Create::New)
            .create(how.create == Create::Empty)
            .truncate(how.create == Create::Empty)
            // Opening a pipe would wait for its other end.
            .custom_flags((flags | OFlags::NONBLOCK).bits().cast_signed())
            .open(path)
            .map_err(|error| match Errno::from_io_error(&error) {
                Some(Errno::LOOP | Errno::NXIO) => not_regular(),
                _ => error,
            })?;
        let kind = file.metadata()?.file_type();
        if kind.is_dir() {
            return Err(io::ErrorKind::IsADirectory.into());
        } else if !kind.is_file() {
            return Err(not_regular());
        }
        // io_uring would take the flag for the wish to get EAGAIN where a transfer would have to wait.
        rustix::fs::fcntl_setfl(&file, flags)?;
        if how.direct && !takes_blocks(&file) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "direct I/O here needs larger alignment than a block"));
        }
        Ok(Arc::new(OsFile { file, process: self.process }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.process.check()?;
        match rustix::fs::renameat_with(rustix::fs::CWD, from, rustix::fs::CWD, to, RenameFlags::NOREPLACE) {
            // Some file systems know no flags; then a look and a plain rename must do.
            Err(Errno::INVAL | Errno::NOSYS) => match fs::symlink_metadata(to) {
                Ok(_) => Err(io::ErrorKind::AlreadyExists.into()),
                Err(error) if error.kind() == io::ErrorKind::NotFound => fs::rename(from, to),
                Err(error) => Err(error),
            },
            result => Ok(result?),
        }
    }

    fn replace(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.process.check()?;
        match fs::symlink_metadata(to) {
            Ok(there) if there.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
            Ok(there) if !there.is_file() => return Err(io::ErrorKind::AlreadyExists.into()),
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        fs::rename(from, to)
    }

    fn link(&self, file: &Path, name: &Path) -> io::Result<()> {
        self.process.check()?;
        if !fs::symlink_metadata(file)?.is_file() {
            return Err(not_regular());
        }
        match rustix::fs::link(file, name) {
            Err(Errno::XDEV | Errno::PERM | Errno::MLINK | Errno::OPNOTSUPP | Errno::NOSYS) => Err(io::ErrorKind::Unsupported.into()),
            result => Ok(result?),
        }
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.process.check()?;
        let kind = fs::symlink_metadata(path)?.file_type();
        if kind.is_file() || kind.is_dir() { fs::remove_file(path) } else { Err(not_regular()) }
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.process.check()?;
        fs::remove_dir(path)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.open_dir(dir)?.sync()
    }

    fn open_dir(&self, dir: &Path) -> io::Result<Box<dyn Directory>> {
        Ok(Box::new(OsDirectory(fs::File::open(dir)?)))
    }

    fn lock(&self, path: &Path) -> io::Result<Box<dyn Lock>> {
        self.process.check()?;
        // Neither truncated nor written: a file that another process holds stays as it is.
        let file = fs::OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        uninterrupted(|| rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive))?;
        Ok(Box::new(FileLock { file, process: self.process }))
    }

    fn ring(&self, config: &RingConfig) -> io::Result<Box<dyn Ring>> {
        if self.uring {
            match UringRing::new(config, &self.told) {
                Ok(ring) => return Ok(Box::new(ring)),
                // Rings count against the limit of locked memory, which all processes of a user share.
                Err(error) if self.may_fall_back && error.kind() == io::ErrorKind::OutOfMemory => {
                    if Told::first(&self.told.rings) {
                        tracing::warn!(%error, "no more io_uring rings are to be had: RLIMIT_MEMLOCK (`ulimit -l`) is used up; \
                            this and further ones use pwritev2 and pread");
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Box::new(BlockingRing::new(config)?))
    }

    fn rings_overlap(&self) -> bool {
        self.uring
    }

    fn backend(&self) -> &'static str {
        if self.uring { "uring" } else { "posix" }
    }
}

fn not_regular() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")
}

/// Whether direct transfers of whole blocks are accepted, as far as the kernel tells (6.1 and later).
fn takes_blocks(file: &fs::File) -> bool {
    use rustix::fs::{AtFlags, StatxFlags, statx};
    match statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) {
        Ok(stat) if stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0 => {
            let fits = |align: u32| align != 0 && super::BLOCK.is_multiple_of(u64::from(align));
            fits(stat.stx_dio_mem_align) && fits(stat.stx_dio_offset_align)
        }
        _ => true,
    }
}

/// An flock(2) lock: it belongs to the open file, so the kernel releases it with the last descriptor, however a process ends.
#[derive(Debug)]
struct FileLock {
    file: fs::File,
    process: Process,
}

impl Lock for FileLock {}

impl Drop for FileLock {
    fn drop(&mut self) {
        // Closing alone would leave the lock to a child that another thread is just starting, until that child's exec.
        // In a child of the process that took it, unlocking would take it from the parent, whose open file it is; closing does not.
        if self.process.is_current() {
            let _ = rustix::fs::flock(&self.file, FlockOperation::Unlock);
        }
    }
}

/// `FALLOC_FL_WRITE_ZEROES`, which is younger than the binding's list.
const WRITE_ZEROES: FallocateFlags = FallocateFlags::from_bits_retain(0x80);

#[derive(Debug)]
struct OsDirectory(fs::File);

impl Directory for OsDirectory {
    fn sync(&self) -> io::Result<()> {
        self.0.sync_all()
    }
}

/// Whether an open was refused because this process, or the system, has as many files open as it may.
pub fn is_out_of_files(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
}

/// How many files this process may have open, if that is what refused an open.
pub fn open_files_limit(error: &io::Error) -> Option<u64> {
    let is_own = Errno::from_io_error(error) == Some(Errno::MFILE);
    is_own.then(|| rustix::process::getrlimit(rustix::process::Resource::Nofile).current).flatten()
}

#[derive(Debug)]
struct OsFile {
    file: fs::File,
    process: Process,
}

impl File for OsFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn details(&self) -> io::Result<Details> {
        let found = self.file.metadata()?;
        let (seconds, ns) = (u64::try_from(found.mtime()).ok(), u64::try_from(found.mtime_nsec()).ok());
        let modified_ns = seconds.and_then(|seconds| seconds.checked_mul(1_000_000_000)?.checked_add(ns?));
        Ok(Details { links: found.nlink(), modified_ns })
    }

    fn read_at(&self, into: &mut [u8], position: u64) -> io::Result<usize> {
        // A tenth of a small read quicker than preadv2, whose lists and flags it has no use for.
        self.file.read_at(into, position)
    }

    fn write_at(&self, from: &[u8], position: u64, durable: bool) -> io::Result<usize> {
        self.process.check()?;
        let from = [IoSlice::new(from)];
        if durable {
            match rustix::io::pwritev2(&self.file, &from, position, ReadWriteFlags::DSYNC) {
                // The file system does not know the flag.
                Err(Errno::OPNOTSUPP) => {}
                result => return Ok(result?),
            }
        }
        let written = rustix::io::pwritev2(&self.file, &from, position, ReadWriteFlags::empty())?;
        if durable {
            self.sync()?;
        }
        Ok(written)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.process.check()?;
        self.file.set_len(len)
    }

    fn allocate(&self, range: Range<u64>) -> io::Result<()> {
        self.process.check()?;
        let len = range.end.saturating_sub(range.start);
        if len == 0 {
            return Ok(());
        }
        match uninterrupted(|| rustix::fs::fallocate(&self.file, FallocateFlags::empty(), range.start, len)) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => Err(io::ErrorKind::Unsupported.into()),
            result => Ok(result?),
        }
    }

    fn write_zeroes(&self, range: Range<u64>) -> io::Result<()> {
        self.process.check()?;
        let len = range.end.saturating_sub(range.start);
        if len == 0 {
            return Ok(());
        }
        match uninterrupted(|| rustix::fs::fallocate(&self.file, WRITE_ZEROES, range.start, len)) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => Err(io::ErrorKind::Unsupported.into()),
            result => Ok(result?),
        }
    }

    fn sync(&self) -> io::Result<()> {
        // fdatasync makes the length durable too where reading the data back needs it.
        self.file.sync_data()
    }

    fn evict(&self, from: u64) -> io::Result<()> {
        // The kernel keeps pages of which only a part is named.
        Ok(rustix::fs::fadvise(&self.file, from - from % super::BLOCK, None, rustix::fs::Advice::DontNeed)?)
    }

    fn next_data(&self, position: u64) -> io::Result<Option<u64>> {
        // Moves the descriptor's own position, which nothing here uses.
        match rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Data(position)) {
            Ok(at) => Ok(Some(at.max(position))),
            Err(Errno::NXIO) => Ok(None),
            // A file system that does not tell.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(Some(position)),
            Err(error) => Err(error.into()),
        }
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.file.as_fd())
    }
}

/// Repeats a call that a signal interrupted before it did anything.
fn uninterrupted<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::needs::NEEDS;
    use super::super::needs::tests::{assert_names, without};
    use super::super::{Action, Buffer, Op, Token};
    use super::*;

    #[test]
    fn b133_a_ring_that_lacks_anything_is_done_without_or_refused_before_anything_is_made() {
        for need in &NEEDS {
            let error = OsDisk::by(Backend::Uring, || without(need)).unwrap_err();
            assert_names(&error, &[*need]);
            // System calls never ask.
            assert_eq!(OsDisk::by(Backend::Posix, || panic!("asked for a ring")).unwrap().backend(), "posix");

            let disk = OsDisk::by(Backend::Auto, || without(need)).unwrap();
            assert_eq!(disk.backend(), "posix");
            let dir = tempfile::tempdir().unwrap();
            let file = disk.open(&dir.path().join("f"), Open::NEW).unwrap();
            let config = RingConfig { depth: 1, files: 1, register_files: true, buffers: 0, buffer_bytes: 4096, one_thread: true };
            let mut ring = disk.ring(&config).unwrap();
            let slot = ring.attach(Arc::clone(&file)).unwrap();
            for action in [Action::Write { durable: true }, Action::Read] {
                let buffer = Buffer::new(4096).unwrap();
                ring.submit(Token(1), Op { action, slot, position: 0, buffer, range: 0..4096 }).unwrap();
                ring.wait(None).unwrap();
                assert_eq!(ring.reap().unwrap().unwrap().result.unwrap(), 4096);
            }
        }
        assert_eq!(OsDisk::by(Backend::Uring, || Ok(())).unwrap().backend(), "uring");
    }
}
