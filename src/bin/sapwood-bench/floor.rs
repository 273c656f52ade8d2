//! The disk's own limit: what durable writes of one size cost without an engine around them.
//!
//! `O_DIRECT` and `RWF_DSYNC` into space that was written before, through a file of several MiB from its start to its end and again;
//! `pwrite` and `fdatasync` into the same space where the file system refuses that.

use std::fs::File;
use std::io::{self, IoSlice};
use std::ops::Deref;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::ReadWriteFlags;

use crate::units::{nanos, to_u64, to_usize};

/// Direct writes are made of whole blocks.
const BLOCK: u64 = 4096;
/// Memory that begins here can be one huge page.
const HUGE_PAGE: usize = 2 << 20;
/// How long to measure.
const TIME: Duration = Duration::from_secs(1);
/// How many writes at least, however long they take.
const LEAST_WRITES: u64 = 5;
/// Bytes of the file: at least so many, or two writes.
const FILE_BYTES: u64 = 16 << 20;
/// Bytes of a write that prepares it.
const PREPARE_BYTES: u64 = 1 << 20;

/// What was measured.
#[derive(Debug)]
pub struct Floor {
    /// How it was written.
    pub method: &'static str,
    /// Nanoseconds.
    pub latency: Histogram<u64>,
}

/// How a write is made durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// Past the page cache, data and sync in one call.
    Direct,
    /// Through the page cache, then a call that syncs.
    Fdatasync,
}

impl Method {
    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Direct => "O_DIRECT + RWF_DSYNC",
            Self::Fdatasync => "pwrite + fdatasync",
        }
    }
}

/// Measures appends of so many bytes in a file of its own in the directory, which is gone afterwards. `stop` ends it early.
///
/// # Errors
/// Those of the system; a full disk among them.
pub fn measure(dir: &Path, append_bytes: u64, stop: &dyn Fn() -> bool) -> io::Result<Floor> {
    let write_bytes = write_bytes(append_bytes);
    let mut area = Area::prepare_best(dir, write_bytes)?;
    let latency = area.measure(&Memory::new(write_bytes), TIME, stop)?;
    Ok(Floor { method: area.method().name(), latency })
}

/// Whole blocks, one at least.
pub fn write_bytes(append_bytes: u64) -> u64 {
    append_bytes.max(1).next_multiple_of(BLOCK)
}

/// Whether the file system does not do direct or synchronous writes, rather than failing at one.
pub fn refused(error: &io::Error) -> bool {
    let refusals = [rustix::io::Errno::INVAL, rustix::io::Errno::OPNOTSUPP, rustix::io::Errno::NOSYS];
    rustix::io::Errno::from_io_error(error).is_some_and(|errno| refusals.contains(&errno))
}

/// What is written: aligned, and no zeros, which some devices need not store.
///
/// Its alignment lets it be one huge page; whether it is, is up to the kernel and the allocator.
#[derive(Debug)]
pub struct Memory {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Memory {
    /// So many bytes.
    pub fn new(len: u64) -> Self {
        // Zeroed, so that the allocator gives pages that nobody touched: what of them is one huge page is decided at the first touch.
        let len = to_usize(len);
        let mut bytes = vec![0; len.next_multiple_of(HUGE_PAGE) + HUGE_PAGE];
        let start = bytes.as_ptr().align_offset(HUGE_PAGE);
        fill(&mut bytes[start..start + len]);
        Self { bytes, start, len }
    }
}

impl Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }
}

/// Bytes that are no zeros.
pub fn fill(bytes: &mut [u8]) {
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = (at % 251).to_le_bytes()[0];
    }
}

/// A file of written space, gone through from its start to its end and again; it is removed when this goes out of scope.
#[derive(Debug)]
pub struct Area {
    file: File,
    path: PathBuf,
    method: Method,
    write_bytes: u64,
    writes: u64,
    /// Number of the next write; the place follows from it.
    next: u64,
}

impl Area {
    /// By the direct method, or by the other one where it is refused.
    ///
    /// # Errors
    /// Those of the system; a full disk among them.
    pub fn prepare_best(dir: &Path, write_bytes: u64) -> io::Result<Self> {
        match Self::prepare(dir, 0, Method::Direct, write_bytes) {
            Err(error) if refused(&error) => Self::prepare(dir, 0, Method::Fdatasync, write_bytes),
            prepared => prepared,
        }
    }

    /// The file of this number, for writes of so many bytes, a multiple of a block.
    ///
    /// # Errors
    /// Those of the system; see [`refused`].
    pub fn prepare(dir: &Path, number: u64, method: Method, write_bytes: u64) -> io::Result<Self> {
        let writes = (FILE_BYTES / write_bytes).max(2);
        let mut area = Self::create(dir, number, method, write_bytes, writes)?;
        // Space that is allocated only costs a journal commit at each first write into it; so does the engine's, which is written before.
        let allocated = rustix::fs::fallocate(&area.file, FallocateFlags::empty(), 0, write_bytes * writes);
        if let Err(error) = allocated.map_err(io::Error::from)
            && !refused(&error)
        {
            return Err(error);
        }
        let memory = Memory::new(write_bytes.max(PREPARE_BYTES));
        let mut position = 0;
        while position < write_bytes * writes {
            let piece = &memory[..memory.len().min(to_usize(write_bytes * writes - position))];
            area.write_at(piece, position, ReadWriteFlags::empty())?;
            position += to_u64(piece.len());
        }
        area.file.sync_all()?;
        // Whether a durable write is refused is known before anything is measured.
        area.write(&memory[..to_usize(write_bytes)])?;
        Ok(area)
    }

    fn create(dir: &Path, number: u64, method: Method, write_bytes: u64, writes: u64) -> io::Result<Self> {
        let path = dir.join(format!(".sapwood-bench-floor-{}-{number}", std::process::id()));
        let direct = if method == Method::Direct { OFlags::DIRECT } else { OFlags::empty() };
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
        match rustix::fs::open(&path, flags | direct, Mode::RUSR | Mode::WUSR) {
            Ok(file) => Ok(Self { file: file.into(), path, method, write_bytes, writes, next: 0 }),
            Err(errno) => {
                // A file system that refuses O_DIRECT may have made the file before it did.
                if errno == rustix::io::Errno::INVAL {
                    let _ = std::fs::remove_file(&path);
                }
                Err(errno.into())
            }
        }
    }

    /// How it writes.
    pub fn method(&self) -> Method {
        self.method
    }

    /// One durable write after another for so long; each one's nanoseconds.
    ///
    /// # Errors
    /// The first write that fails ends it.
    pub fn measure(&mut self, memory: &[u8], time: Duration, stop: &dyn Fn() -> bool) -> io::Result<Histogram<u64>> {
        let mut latency = Histogram::new(3).expect("3 significant digits are allowed");
        let start = Instant::now();
        for write in 0.. {
            if (start.elapsed() >= time && write >= LEAST_WRITES) || stop() {
                break;
            }
            let begun = Instant::now();
            self.write(memory)?;
            latency.record(nanos(begun.elapsed())).expect("a histogram that grows takes every number");
        }
        Ok(latency)
    }

    /// The next durable write, of as many bytes as it was prepared for.
    ///
    /// # Errors
    /// Those of the system.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let position = (self.next % self.writes) * self.write_bytes;
        self.next += 1;
        match self.method {
            Method::Direct => self.write_at(bytes, position, ReadWriteFlags::DSYNC),
            Method::Fdatasync => {
                self.file.write_all_at(bytes, position)?;
                Ok(rustix::fs::fdatasync(&self.file)?)
            }
        }
    }

    fn write_at(&self, mut bytes: &[u8], mut position: u64, flags: ReadWriteFlags) -> io::Result<()> {
        while !bytes.is_empty() {
            match rustix::io::pwritev2(&self.file, &[IoSlice::new(bytes)], position, flags) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => {
                    bytes = &bytes[written..];
                    position += to_u64(written);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            eprintln!("sapwood-bench: could not remove {:?}: {error}", self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_methods_measure_and_leave_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let memory = Memory::new(4096);
        for method in [Method::Direct, Method::Fdatasync] {
            let area = Area::prepare(dir.path(), 0, method, 4096);
            match area.and_then(|mut area| area.measure(&memory, Duration::ZERO, &|| false)) {
                Ok(latency) => assert!(latency.len() == LEAST_WRITES && latency.max() > 0),
                Err(error) => assert!(method == Method::Direct && refused(&error), "{error}"),
            }
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn whoever_stops_it_gets_what_there_is() {
        let dir = tempfile::tempdir().unwrap();
        let floor = measure(dir.path(), 1, &|| true).unwrap();
        assert_eq!(floor.latency.len(), 0);
    }

    #[test]
    fn sizes_are_rounded_up_to_blocks() {
        assert_eq!([0, 28, 4096, 4097].map(write_bytes), [4096, 4096, 4096, 8192]);
    }

    #[test]
    fn memory_is_aligned_and_holds_no_zeros_only() {
        let memory = Memory::new(8192);
        assert_eq!((memory.len(), memory.as_ptr().align_offset(HUGE_PAGE)), (8192, 0));
        assert!(memory.iter().any(|&byte| byte != 0));
    }

    #[test]
    fn a_directory_that_is_not_there_is_an_error() {
        assert!(measure(Path::new("/nonexistent"), 1, &|| false).is_err());
    }
}
