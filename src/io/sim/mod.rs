//! A disk in memory that can crash, for tests: everything it decides follows from its seed.
//!
//! [`SimDisk`] implements [`Disk`](super::Disk). Per file it keeps the bytes that reads see and those that are durable, per
//! directory the names seen and the names durable. A test lets the process crash ([`SimDisk::crash_process`]: the kernel and
//! its caches survive) or the power fail ([`SimDisk::power_loss`]: what is durable survives, and an arbitrary part of the
//! rest), opens again, and asserts that nothing acknowledged is gone.
//!
//! What is durable when:
//! - `write_at` without `durable`, `set_len`, `allocate`: after `sync` of the file. Before that, a power loss keeps any of
//!   the 4 KiB pages written, and one of the lengths that the file had since; a page beyond it is gone, one that it reaches
//!   over and that was not kept reads as it did before, or as zeros.
//! - `write_at` with `durable`: those bytes and the length that reading them back needs, on return; nothing else.
//! - names (create, rename, link, remove): after `sync_dir` of their directory, of both for a rename between two. Before that, a
//!   power loss keeps any of the changes; those of one name in order, and a same-directory rename as a whole. A file whose
//!   name does not survive is gone, synced or not.
//! - a sync that failed: nothing, and a later one that succeeds does not repair that.
//! - a write in flight (held, or hit by [`Effect::Crash`]): any part of it, after either kind of crash.
//!
//! Not modelled: time, permissions, symbolic links, directories' own size, bytes that rot by themselves ([`SimDisk::overwrite`] lets
//! them), and pages as they were before the latest unsynced write or truncation: a page kept is the one seen last.
//!
//! Lives: a crash ends the life of every file, lock and attached ring file made before, and of every clone of the [`SimDisk`]
//! except the one that it was called on; they answer with errors from then on, so that threads of the old life can do
//! nothing to the new one. Clone again to open again:
//!
//! ```
//! use sapwood::io::sim::SimDisk;
//! use sapwood::io::{Disk, Open};
//! use std::path::Path;
//!
//! let sim = SimDisk::new(7);
//! let disk = sim.clone();
//! let file = disk.open(Path::new("/a"), Open::NEW)?;
//! file.write_at(b"kept", 0, true)?;
//! file.write_at(b"lost", 4, false)?;
//! disk.sync_dir(Path::new("/"))?;
//! sim.power_loss_keeping_nothing();
//! assert!(file.len().is_err() && disk.list(Path::new("/")).is_err(), "from the old life");
//! assert_eq!(sim.clone().open(Path::new("/a"), Open::READ)?.len()?, 4);
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! Threads: any may call anything; one lock makes operations take effect one after the other. A run is repeatable as far as
//! the order of its operations is.

mod content;
mod disk;
mod faults;
mod ring;
mod rng;
mod state;
#[cfg(test)]
mod tests;
mod tree;

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

pub use faults::{Effect, Fault, OpKind, OpRecord, RandomFault};

pub(crate) use rng::Rng;

use content::{Content, Keep};
use state::{Held, Shared, State};
use tree::{Ino, Node, Tree};

/// How long [`Hold::wait_until_held`] waits before it takes the test for stuck.
const HANG_LIMIT: Duration = Duration::from_secs(120);

/// A simulated disk. Clones are handles of the same disk, in the life of the process in which they were cloned.
pub struct SimDisk {
    shared: Arc<Shared>,
    /// The life it belongs to. It only ever changes by calls on this handle, which order themselves.
    life: AtomicU64,
}

impl SimDisk {
    /// An empty disk: the root directory, room without end, no faults.
    pub fn new(seed: u64) -> Self {
        Self::of(State::new(seed))
    }

    fn of(state: State) -> Self {
        Self { shared: Arc::new(Shared::new(state)), life: AtomicU64::new(0) }
    }

    fn life(&self) -> u64 {
        self.life.load(Ordering::SeqCst)
    }

    /// A disk of its own with the same content, durable and not, the same writes in flight and the same options; nothing
    /// is open, locked, held, scripted or recorded. Later choices follow from `seed`.
    pub fn fork(&self, seed: u64) -> Self {
        Self::of(self.shared.lock().fork(seed))
    }
}

/// Crashes.
impl SimDisk {
    /// The process dies, the kernel lives: reads see what they saw before. All handles are dead, all locks free. Of writes
    /// in flight any part may have arrived. Also ends the state after [`Effect::Crash`].
    pub fn crash_process(&self) {
        self.restart(None);
    }

    /// Everything dies; what is durable survives, and of the rest a part that the seed chooses.
    pub fn power_loss(&self) {
        let torn = self.shared.lock().options.torn_sectors;
        self.restart(Some(Keep::Some { torn }));
    }

    /// Everything dies; only what is durable survives.
    pub fn power_loss_keeping_nothing(&self) {
        self.restart(Some(Keep::Nothing));
    }

    fn restart(&self, loss: Option<Keep>) {
        let mut state = self.shared.lock();
        state.restart(loss);
        self.life.store(state.epoch, Ordering::SeqCst);
        self.shared.changed.notify_all();
    }

    /// Crashes instead of performing the `count`th state-changing operation from now (1 = the next; failed ones count too).
    /// Any later call and any crash takes it back.
    pub fn crash_at_op(&self, count: u64) {
        self.shared.lock().script.crash_in(Some(count));
    }

    /// Whether [`Effect::Crash`] or [`Self::crash_at_op`] came true, and everything fails now.
    pub fn crashed(&self) -> bool {
        self.shared.lock().crashed
    }

    /// State-changing operations so far: how many crash points a run has.
    pub fn state_changes(&self) -> u64 {
        self.shared.lock().state_changes
    }
}

/// Faults and options. They belong to the disk: crashes leave them as they are.
impl SimDisk {
    /// Lets one operation to come fail.
    pub fn fail(&self, fault: Fault) {
        self.shared.lock().script.fail(fault);
    }

    /// Lets operations fail by chance from now on.
    pub fn fail_by_chance(&self, fault: RandomFault) {
        self.shared.lock().script.fail_by_chance(fault);
    }

    /// Takes back all faults to come, [`Self::crash_at_op`] included.
    pub fn clear_faults(&self) {
        self.shared.lock().script = faults::Script::default();
    }

    /// Holds all operations of a kind, on paths that end like this, before they are performed, until the result is dropped.
    ///
    /// # Blocking
    /// A held operation blocks its thread; for rings of this disk that is `submit`.
    #[must_use = "dropping it lets the operations go"]
    pub fn hold(&self, on: OpKind, path_suffix: Option<&str>) -> Hold {
        let mut state = self.shared.lock();
        let id = state.new_id();
        state.holds.push(Held { id, on, path_suffix: path_suffix.map(str::to_owned), waiting: 0 });
        Hold { shared: Arc::clone(&self.shared), id }
    }

    /// How many bytes files may take, in whole pages, written or allocated; `None` for no limit. Allocations and writes that
    /// need more get `ENOSPC`; a write of which some pages fit is short first.
    pub fn set_capacity(&self, bytes: Option<u64>) {
        self.shared.lock().options.capacity = bytes;
    }

    /// Bytes that files take now, in whole pages.
    pub fn used(&self) -> u64 {
        self.shared.lock().tree.used()
    }

    /// Lets opening with [`direct`](super::Open::direct) fail with `EINVAL`. As on Linux, the file is made nevertheless.
    pub fn refuse_direct(&self, refuse: bool) {
        self.shared.lock().options.refuse_direct = refuse;
    }

    /// Lets allocation fail as [`Unsupported`](io::ErrorKind::Unsupported).
    pub fn refuse_allocate(&self, refuse: bool) {
        self.shared.lock().options.refuse_allocate = refuse;
    }

    /// Lets a second name for a file fail as [`Unsupported`](io::ErrorKind::Unsupported).
    pub fn refuse_links(&self, refuse: bool) {
        self.shared.lock().options.refuse_links = refuse;
    }

    /// Lets rings made from now on work beside the thread that submits to them: an operation takes effect some time after it
    /// was submitted, in an order that the seed decides, and its completion may be slow to come. Else it is done when it is submitted.
    pub fn overlap_rings(&self, overlap: bool) {
        self.shared.lock().options.overlapping_rings = overlap;
    }

    /// Lets a power loss keep parts of pages, in sectors of 512 bytes, as devices without larger atomic writes do.
    pub fn tear_pages(&self, tear: bool) {
        self.shared.lock().options.torn_sectors = tear;
    }

    /// What was done so far, oldest first; of very many, the latest million.
    pub fn ops(&self) -> Vec<OpRecord> {
        self.shared.lock().records.iter().cloned().collect()
    }

    /// Forgets the records; their numbers go on.
    pub fn clear_ops(&self) {
        self.shared.lock().records.clear();
    }
}

/// Content, past the seam: no fault, hold, capacity or crash applies, and nothing is recorded.
impl SimDisk {
    /// Makes the directory and those above it, durable at once.
    ///
    /// # Panics
    /// If a file is in the way.
    pub fn make_dirs(&self, path: &Path) {
        expect(path, self.shared.lock().tree.place_dir(path));
    }

    /// Makes or replaces the file, and makes the directories above it, durable at once.
    ///
    /// # Panics
    /// If a directory is in the way, or a file above.
    pub fn write_file(&self, path: &Path, bytes: &[u8]) {
        let mut state = self.shared.lock();
        let content = expect(path, state.tree.place_file(path));
        content.set_len(0);
        content.write(bytes, 0, false);
        content.sync();
    }

    /// Changes these bytes of a file, durable at once: damage.
    ///
    /// # Panics
    /// If there is no such file.
    pub fn overwrite(&self, path: &Path, position: u64, bytes: &[u8]) {
        let mut state = self.shared.lock();
        let ino = expect(path, state.tree.lookup(path));
        expect(path, state.tree.content(ino)).write(bytes, position, true);
    }

    /// What reads see of the file.
    ///
    /// # Panics
    /// If there is no such file.
    pub fn read_file(&self, path: &Path) -> Vec<u8> {
        let mut state = self.shared.lock();
        let ino = expect(path, state.tree.lookup(path));
        expect(path, state.tree.content(ino)).bytes()
    }

    /// What is seen of a directory, by name: each file's bytes, none for a directory.
    ///
    /// # Panics
    /// If there is no such directory.
    pub fn files(&self, dir: &Path) -> Vec<(OsString, Option<Vec<u8>>)> {
        let state = self.shared.lock();
        let ino = expect(dir, state.tree.lookup(dir));
        let bytes = |ino| match state.tree.node(ino) {
            Some(Node::File { content, .. }) => Some(content.bytes()),
            _ => None,
        };
        expect(dir, state.tree.entries(ino)).iter().map(|(name, ino)| (name.clone(), bytes(*ino))).collect()
    }

    /// What a power loss surely leaves of the file; `None` if its name is not durable.
    pub fn durable_file(&self, path: &Path) -> Option<Vec<u8>> {
        match self.shared.lock().tree.lookup_durable(path) {
            Ok(Node::File { content, .. }) => Some(content.durable_bytes()),
            _ => None,
        }
    }

    /// Whether there is such a file or directory, as it is seen.
    pub fn exists(&self, path: &Path) -> bool {
        self.shared.lock().tree.lookup(path).is_ok()
    }

    /// Copies what is seen of the directory `from` into the real directory `to`, which is made if there is none.
    pub fn export(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut found = Vec::new();
        {
            let state = self.shared.lock();
            walk(&state.tree, state.tree.lookup(from)?, PathBuf::new(), &mut found)?;
        }
        for (path, content) in found {
            let path = to.join(path);
            match content {
                None => fs::create_dir_all(path)?,
                Some(content) => export_file(&content, &path)?,
            }
        }
        Ok(())
    }

    /// Copies the real directory `from` into the directory `to`, which is made if there is none, durable at once.
    pub fn import(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.make_dirs(to);
        for entry in fs::read_dir(from)? {
            let entry = entry?;
            let to = to.join(entry.file_name());
            if entry.file_type()?.is_dir() {
                self.import(&entry.path(), &to)?;
            } else {
                self.write_file(&to, &fs::read(entry.path())?);
            }
        }
        Ok(())
    }
}

impl Clone for SimDisk {
    /// A handle of the present life, also where this one is of an earlier life.
    fn clone(&self) -> Self {
        let life = self.shared.lock().epoch;
        Self { shared: Arc::clone(&self.shared), life: AtomicU64::new(life) }
    }
}

impl fmt::Debug for SimDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimDisk").field("life", &self.life()).finish_non_exhaustive()
    }
}

/// Holds operations until it is dropped.
#[derive(Debug)]
pub struct Hold {
    shared: Arc<Shared>,
    id: u64,
}

impl Hold {
    /// How many operations it holds now.
    pub fn held(&self) -> usize {
        self.shared.lock().holds.iter().find(|hold| hold.id == self.id).map_or(0, |hold| hold.waiting)
    }

    /// Waits until it holds at least one operation.
    ///
    /// # Panics
    /// After two minutes, instead of hanging.
    pub fn wait_until_held(&self) {
        let deadline = Instant::now() + HANG_LIMIT;
        let mut state = self.shared.lock();
        while !state.holds.iter().any(|hold| hold.id == self.id && hold.waiting > 0) {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "no operation came to be held in {HANG_LIMIT:?}");
            state = self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Lets the operations go.
    pub fn release(self) {}
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.shared.lock().holds.retain(|hold| hold.id != self.id);
        self.shared.changed.notify_all();
    }
}

/// All directories and files from `ino` on, each directory before what it holds.
fn walk(tree: &Tree, ino: Ino, path: PathBuf, found: &mut Vec<(PathBuf, Option<Content>)>) -> io::Result<()> {
    if let Some(Node::File { content, .. }) = tree.node(ino) {
        found.push((path, Some(content.clone())));
        return Ok(());
    }
    found.push((path.clone(), None));
    for (name, ino) in tree.entries(ino)? {
        walk(tree, *ino, path.join(name), found)?;
    }
    Ok(())
}

fn export_file(content: &Content, path: &Path) -> io::Result<()> {
    let file = fs::File::create(path)?;
    for (position, bytes) in content.written() {
        file.write_all_at(bytes, position)?;
    }
    file.set_len(content.len())
}

fn expect<T>(path: &Path, result: Result<T, rustix::io::Errno>) -> T {
    result.unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn to_u64(bytes: usize) -> u64 {
    u64::try_from(bytes).expect("usize is 64 bits wide")
}

fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).expect("usize is 64 bits wide")
}
