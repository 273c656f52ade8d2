//! The disk's own limit: what one durable write of the same size costs without an engine around it, one after another.
//!
//! `O_DIRECT` and `RWF_DSYNC` into space that was written before, through a file of several MiB from its start to its end and again;
//! `pwrite` and `fdatasync` into the same space where the file system refuses that.

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::ReadWriteFlags;

use crate::interrupts::Interrupts;
use crate::units::{nanos, to_u64, to_usize};

/// Direct writes are made of whole blocks.
const BLOCK: u64 = 4096;
/// Memory that begins here can be one huge page.
const HUGE_PAGE: usize = 2 << 20;
/// How long to measure, and how many writes at least.
const TIME: Duration = Duration::from_secs(1);
const LEAST_WRITES: u64 = 5;
/// Bytes of the file: at least so many, or two writes.
const FILE_BYTES: u64 = 16 << 20;

/// What was measured.
#[derive(Debug)]
pub struct Floor {
    /// How it was written.
    pub method: &'static str,
    /// Nanoseconds.
    pub latency: Histogram<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Method {
    Direct,
    Fdatasync,
}

impl Method {
    fn name(self) -> &'static str {
        match self {
            Self::Direct => "O_DIRECT + RWF_DSYNC",
            Self::Fdatasync => "pwrite + fdatasync",
        }
    }
}

/// Measures appends of so many bytes in a file of its own in the directory, which is gone afterwards.
///
/// # Errors
/// Those of the system; a full disk among them.
pub fn measure(dir: &Path, append_bytes: u64, interrupts: &Interrupts) -> io::Result<Floor> {
    let write_bytes = write_bytes(append_bytes);
    let measured = measure_by(Method::Direct, dir, write_bytes, interrupts);
    match measured {
        Err(error) if refused(&error) => measure_by(Method::Fdatasync, dir, write_bytes, interrupts),
        measured => measured,
    }
}

/// Whole blocks, one at least.
pub fn write_bytes(append_bytes: u64) -> u64 {
    append_bytes.max(1).next_multiple_of(BLOCK)
}

/// Whether the file system does not do direct or synchronous writes, rather than failing at one.
fn refused(error: &io::Error) -> bool {
    let refusals = [rustix::io::Errno::INVAL, rustix::io::Errno::OPNOTSUPP, rustix::io::Errno::NOSYS];
    rustix::io::Errno::from_io_error(error).is_some_and(|errno| refusals.contains(&errno))
}

fn measure_by(method: Method, dir: &Path, write_bytes: u64, interrupts: &Interrupts) -> io::Result<Floor> {
    let scratch = Scratch::create(dir, method)?;
    let writes = (FILE_BYTES / write_bytes).max(2);
    let mut memory = vec![0; to_usize(write_bytes) + HUGE_PAGE];
    let start = memory.as_ptr().align_offset(HUGE_PAGE);
    let buffer = &mut memory[start..start + to_usize(write_bytes)];

    // Space that is allocated only costs a journal commit at each first write into it; so does the engine's, which is written before.
    let allocated = rustix::fs::fallocate(&scratch.file, FallocateFlags::empty(), 0, write_bytes * writes);
    if let Err(error) = allocated.map_err(io::Error::from)
        && !refused(&error)
    {
        return Err(error);
    }
    for write in 0..writes {
        scratch.write(buffer, write * write_bytes, ReadWriteFlags::empty())?;
    }
    scratch.file.sync_all()?;

    for (at, byte) in buffer.iter_mut().enumerate() {
        *byte = (at % 251).to_le_bytes()[0]; // not zeros, which some devices need not store
    }
    let mut latency = Histogram::new(3).expect("3 significant digits are allowed");
    let start = Instant::now();
    for write in 0.. {
        if (start.elapsed() >= TIME && write >= LEAST_WRITES) || interrupts.any() {
            break;
        }
        let begun = Instant::now();
        scratch.write_durably(buffer, (write % writes) * write_bytes)?;
        latency.record(nanos(begun.elapsed())).expect("a histogram that grows takes every number");
    }
    Ok(Floor { method: method.name(), latency })
}

/// A file that is removed when it goes out of scope.
struct Scratch {
    file: File,
    path: PathBuf,
    method: Method,
}

impl Scratch {
    fn create(dir: &Path, method: Method) -> io::Result<Self> {
        let path = dir.join(format!(".sapwood-bench-floor-{}", std::process::id()));
        let direct = if method == Method::Direct { OFlags::DIRECT } else { OFlags::empty() };
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
        match rustix::fs::open(&path, flags | direct, Mode::RUSR | Mode::WUSR) {
            Ok(file) => Ok(Self { file: file.into(), path, method }),
            Err(errno) => {
                // A file system that refuses O_DIRECT may have made the file before it did.
                if errno == rustix::io::Errno::INVAL {
                    let _ = std::fs::remove_file(&path);
                }
                Err(errno.into())
            }
        }
    }

    fn write_durably(&self, bytes: &[u8], position: u64) -> io::Result<()> {
        match self.method {
            Method::Direct => self.write(bytes, position, ReadWriteFlags::DSYNC),
            Method::Fdatasync => {
                self.file.write_all_at(bytes, position)?;
                Ok(rustix::fs::fdatasync(&self.file)?)
            }
        }
    }

    fn write(&self, mut bytes: &[u8], mut position: u64, flags: ReadWriteFlags) -> io::Result<()> {
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

impl Drop for Scratch {
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
        let stop = Interrupts::default();
        for method in [Method::Direct, Method::Fdatasync] {
            match measure_by(method, dir.path(), 4096, &stop) {
                Ok(floor) => assert!(floor.latency.len() >= LEAST_WRITES && floor.latency.max() > 0),
                Err(error) => assert!(method == Method::Direct && refused(&error), "{error}"),
            }
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn sizes_are_rounded_up_to_blocks() {
        assert_eq!([0, 28, 4096, 4097].map(write_bytes), [4096, 4096, 4096, 8192]);
    }

    #[test]
    fn a_directory_that_is_not_there_is_an_error() {
        assert!(measure(Path::new("/nonexistent"), 1, &Interrupts::default()).is_err());
    }
}
