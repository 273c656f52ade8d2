//! One suite for every backend: what the traits promise, checked on io_uring, on `pwritev2`/`pread` and on the simulated disk.
//!
//! A check is a function of a disk and an empty directory on it; those of files and rings also of [`Mode`]. A macro makes a
//! test of each on each backend, named by it. Checks know nothing about the backend that the traits do not promise.
//!
//! Where the kernel denies io_uring, or the file system direct I/O, a line on stdout says that the check was skipped.

use std::any::Any;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use super::{Backend, Buffer, Create, Disk, File, Open, OsDisk, RingConfig};

mod files;
mod names;
mod rings;
mod transfers;

/// A check that takes longer hangs; then it fails, and its thread is left behind.
const HANG_LIMIT: Duration = Duration::from_secs(120);

const BLOCK: usize = 4096;

/// What a check runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum On {
    Uring,
    Posix,
    #[cfg(feature = "sim")]
    Sim,
    /// With rings whose operations take their time.
    #[cfg(feature = "sim")]
    SlowSim,
}

/// How a check opens its files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Buffered,
    Direct,
}

impl Mode {
    fn open(self, disk: &dyn Disk, path: &Path, create: Create) -> Arc<dyn File> {
        disk.open(path, Open { write: true, create, direct: self == Self::Direct }).unwrap()
    }
}

/// Makes of each check, a function of a disk and a directory, a test on each backend.
macro_rules! on_every_backend {
    ($($check:ident)*) => {
        mod uring {
            $(#[test] fn $check() { crate::io::conformance::run(crate::io::conformance::On::Uring, super::$check); })*
        }
        mod posix {
            $(#[test] fn $check() { crate::io::conformance::run(crate::io::conformance::On::Posix, super::$check); })*
        }
        #[cfg(feature = "sim")]
        mod sim {
            $(#[test] fn $check() { crate::io::conformance::run(crate::io::conformance::On::Sim, super::$check); })*
        }
        #[cfg(feature = "sim")]
        mod slow_sim {
            $(#[test] fn $check() { crate::io::conformance::run(crate::io::conformance::On::SlowSim, super::$check); })*
        }
    };
}

/// The same for checks that take a [`Mode`] too: a test on each backend in each mode.
macro_rules! in_every_mode {
    ($($check:ident)*) => {
        mod buffered {
            $(fn $check(disk: &dyn crate::io::Disk, dir: &std::path::Path) {
                super::$check(disk, dir, crate::io::conformance::Mode::Buffered);
            })*
            crate::io::conformance::on_every_backend! { $($check)* }
        }
        mod direct {
            $(fn $check(disk: &dyn crate::io::Disk, dir: &std::path::Path) {
                if crate::io::conformance::takes_direct(disk, dir) {
                    super::$check(disk, dir, crate::io::conformance::Mode::Direct);
                }
            })*
            crate::io::conformance::on_every_backend! { $($check)* }
        }
    };
}
use {in_every_mode, on_every_backend};

/// Runs a check in a thread of its own, in an empty directory, and fails if it hangs.
fn run(on: On, check: fn(&dyn Disk, &Path)) {
    let Some((disk, dir, _temporary)) = disk(on) else { return };
    if let Err(panic) = unless_it_hangs(move || check(&*disk, &dir)) {
        std::panic::resume_unwind(panic);
    }
}

fn unless_it_hangs(work: impl FnOnce() + Send + 'static) -> Result<(), Box<dyn Any + Send>> {
    // Nothing is sent: the end of the thread closes the channel.
    let (ended, end) = mpsc::channel::<()>();
    let thread = thread::spawn(move || {
        let _ended = ended;
        work();
    });
    match end.recv_timeout(HANG_LIMIT) {
        Err(RecvTimeoutError::Timeout) => panic!("the check hangs"),
        _ => thread.join(),
    }
}

/// A directory of a check's own, in SAPWOOD_TEST_DIR, or else where temporary files are.
pub(super) fn scratch() -> tempfile::TempDir {
    let home = std::env::var_os("SAPWOOD_TEST_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
    tempfile::tempdir_in(home).unwrap()
}

fn disk(on: On) -> Option<(Box<dyn Disk>, PathBuf, Option<tempfile::TempDir>)> {
    let os = |backend| {
        let dir = scratch();
        Some((Box::new(OsDisk::new(backend).unwrap()) as Box<dyn Disk>, dir.path().to_owned(), Some(dir)))
    };
    match on {
        On::Uring => match OsDisk::new(Backend::Uring) {
            Err(error) if denies_uring(&error) => {
                println!("skipped: io_uring is not to be had here: {error}");
                None
            }
            _ => os(Backend::Uring),
        },
        On::Posix => os(Backend::Posix),
        #[cfg(feature = "sim")]
        On::Sim | On::SlowSim => {
            let sim = super::sim::SimDisk::new(1);
            sim.overlap_rings(on == On::SlowSim);
            sim.make_dirs(Path::new("/dir"));
            Some((Box::new(sim), PathBuf::from("/dir"), None))
        }
    }
}

fn denies_uring(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::Unsupported)
}

/// Whether files in `dir` can be opened past the page cache. Leaves nothing behind.
fn takes_direct(disk: &dyn Disk, dir: &Path) -> bool {
    let path = dir.join("takes-direct");
    let opened = disk.open(&path, Open { direct: true, ..Open::NEW });
    disk.remove_file(&path).unwrap();
    match opened {
        Ok(_) => true,
        Err(error) => {
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
            println!("skipped: the file system of {} takes no direct I/O: {error}", dir.display());
            false
        }
    }
}

#[test]
fn auto_takes_io_uring_where_it_is_granted() {
    let auto = OsDisk::new(Backend::Auto).unwrap();
    match OsDisk::new(Backend::Uring) {
        Ok(uring) => assert_eq!((auto.backend(), uring.backend()), ("uring", "uring")),
        Err(error) => {
            println!("io_uring is not to be had here: {error}");
            assert!(denies_uring(&error), "{error}");
            assert_eq!(auto.backend(), "posix");
        }
    }
    assert_eq!(OsDisk::new(Backend::Posix).unwrap().backend(), "posix");
}

// ---- what several checks need ----

/// Aligned memory with these blocks, each filled with its value.
fn blocks(values: &[u8]) -> Buffer {
    let mut buffer = Buffer::new(values.len() * BLOCK).unwrap();
    for (block, value) in buffer.chunks_mut(BLOCK).zip(values) {
        block.fill(*value);
    }
    buffer
}

/// The value that fills each block of `bytes`.
fn values(bytes: &[u8]) -> Vec<u8> {
    let value = |block: &[u8]| {
        assert!(*block == vec![block[0]; block.len()], "a block of more than one value");
        block[0]
    };
    bytes.chunks(BLOCK).map(value).collect()
}

/// All bytes of a file, as buffered reads see them.
fn read_all(disk: &dyn Disk, path: &Path) -> Vec<u8> {
    let file = disk.open(path, Open::READ).unwrap();
    let mut bytes = vec![0xEE; usize::try_from(file.len().unwrap()).unwrap()];
    super::transfer::read_exact_at(&*file, &mut bytes, 0).unwrap();
    bytes
}

fn write_new(disk: &dyn Disk, path: &Path, bytes: &[u8]) {
    let file = disk.open(path, Open::NEW).unwrap();
    super::transfer::write_all_at(&*file, bytes, 0, false).unwrap();
}

/// Bytes that differ at all positions near each other.
fn pattern(len: usize) -> Vec<u8> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut byte = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[3]
    };
    (0..len).map(|_| byte()).collect()
}

fn kind<T: std::fmt::Debug>(result: io::Result<T>) -> io::ErrorKind {
    result.unwrap_err().kind()
}

const RING: RingConfig = RingConfig { depth: 4, files: 4, register_files: true, buffers: 2, buffer_bytes: 8 * BLOCK, one_thread: true };
