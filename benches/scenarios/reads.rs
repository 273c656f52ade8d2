//! What stands beside reading: the same file, the same checksums over as many bytes, and nothing but a loop of system calls.
//!
//! Of its own, so that other benchmarks can have it, too.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sapwood::io::{Action, BLOCK, Backend, Buffer, Disk, File, Op, Open, OsDisk, Ring, RingConfig, Token};

/// Bytes of one read that the best is sought among, for scans through the page cache.
const PIECES: [usize; 6] = [64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20];
/// Bytes of one read, and reads at once, that the best are sought among, for scans past it.
const DIRECT_PIECES: [usize; 3] = [128 << 10, 256 << 10, 1 << 20];
const DEPTHS: [u32; 5] = [1, 2, 4, 8, 16];
/// So much of a file is read to find them.
const SAMPLE: u64 = 256 << 20;

type Outcome<T> = Result<T, String>;

fn named<E: std::fmt::Display>(what: &str) -> impl FnOnce(E) -> String {
    move |error| format!("{what}: {error}")
}

fn open(path: &Path, direct: bool) -> Outcome<Arc<dyn File>> {
    let disk = OsDisk::new(Backend::Posix).map_err(named("the system"))?;
    disk.open(path, Open { direct, ..Open::READ }).map_err(named(if direct { "open the log past the page cache" } else { "open the log" }))
}

/// One core's `pread` of a file from its start into one reused buffer, and CRC-32 over the bytes.
pub struct Scan {
    file: Arc<dyn File>,
    memory: Buffer,
    /// How much of the file is read.
    bytes: u64,
    /// How many bytes each checksum is over; 0 for one over all of a read.
    checksum: usize,
    piece: usize,
}

impl Scan {
    /// Finds the best size of one read; afterwards all of these bytes are in the page cache.
    pub fn prepare(path: &Path, bytes: u64, checksum: usize) -> Outcome<Self> {
        let memory = Buffer::new(PIECES[PIECES.len() - 1]).map_err(named("memory"))?;
        let mut scan = Self { file: open(path, false)?, memory, bytes, checksum, piece: PIECES[PIECES.len() - 1] };
        scan.pass()?;
        let mut best = Duration::MAX;
        let mut piece = scan.piece;
        for candidate in PIECES {
            scan.piece = candidate;
            for _ in 0..3 {
                let begun = Instant::now();
                scan.read(bytes.min(SAMPLE))?;
                let took = begun.elapsed();
                if took < best {
                    (best, piece) = (took, candidate);
                }
            }
        }
        Ok(Self { piece, ..scan })
    }

    /// The best size of one read.
    pub fn piece(&self) -> usize {
        self.piece
    }

    /// Reads all of it.
    pub fn pass(&mut self) -> Outcome<()> {
        self.read(self.bytes)
    }

    fn read(&mut self, bytes: u64) -> Outcome<()> {
        let (mut position, mut sum) = (0, 0);
        while position < bytes {
            let wanted = self.piece.min(usize::try_from(bytes - position).unwrap_or(usize::MAX));
            let read = match self.file.read_at(&mut self.memory[..wanted], position).map_err(named("a bare read"))? {
                0 => return Err("the log is shorter than it was".to_owned()),
                read => &self.memory[..read],
            };
            let checksum = if self.checksum == 0 { read.len() } else { self.checksum };
            sum = read.chunks(checksum).fold(sum, |sum, chunk| sum ^ crc32fast::hash(chunk));
            position += u64::try_from(read.len()).unwrap_or(0);
        }
        // Or else the checksums might be left out.
        std::hint::black_box(sum);
        Ok(())
    }
}

/// Single blocks of a file, here and there, on this thread.
pub struct Blocks {
    file: Arc<dyn File>,
    memory: Buffer,
    blocks: u64,
    random: Random,
}

impl Blocks {
    /// Of the first so many bytes; past the page cache or through it.
    pub fn open(path: &Path, bytes: u64, direct: bool) -> Outcome<Self> {
        let memory = Buffer::new(BLOCK_BYTES).map_err(named("memory"))?;
        Ok(Self { file: open(path, direct)?, memory, blocks: (bytes / BLOCK).max(1), random: Random(7) })
    }

    /// One of them.
    pub fn read(&mut self) -> Outcome<()> {
        let position = self.random.below(self.blocks) * BLOCK;
        match self.file.read_at(&mut self.memory[..BLOCK_BYTES], position).map_err(named("a bare read"))? {
            BLOCK_BYTES => Ok(()),
            read => Err(format!("a bare read of a block gave {read} bytes")),
        }
    }
}

const BLOCK_BYTES: usize = 4096;

/// Forgets what the page cache holds of a file.
pub fn evict(path: &Path) -> Outcome<()> {
    open(path, false)?.evict(0).map_err(named("evict a file"))
}

/// The disk's own limit of reading a file from its start to its end: no checksums, several reads at once past the page cache.
pub struct Sequential {
    file: Arc<dyn File>,
    bytes: u64,
    piece: usize,
    depth: u32,
}

impl Sequential {
    /// Finds the best size and depth.
    pub fn prepare(path: &Path, bytes: u64) -> Outcome<Self> {
        let mut limit = Self { file: open(path, true)?, bytes, piece: 0, depth: 0 };
        let mut best = (Duration::MAX, 0, 0);
        for piece in DIRECT_PIECES {
            for depth in DEPTHS {
                (limit.piece, limit.depth) = (piece, depth);
                best = best.min((limit.read(bytes.min(SAMPLE))?, piece, depth));
            }
        }
        (_, limit.piece, limit.depth) = best;
        Ok(limit)
    }

    /// For people.
    pub fn describe(&self) -> String {
        format!("{} reads of {} KiB at once, O_DIRECT", self.depth, self.piece >> 10)
    }

    /// How long all of it takes.
    pub fn pass(&self) -> Outcome<Duration> {
        self.read(self.bytes)
    }

    fn read(&self, bytes: u64) -> Outcome<Duration> {
        let disk = OsDisk::new(Backend::Auto).map_err(named("the system"))?;
        let buffers = usize::try_from(self.depth).map_err(named("the depth"))?;
        let config = RingConfig { depth: self.depth, files: 1, register_files: true, buffers, buffer_bytes: self.piece, one_thread: true };
        let mut ring = disk.ring(&config).map_err(named("a ring"))?;
        self.through(&mut *ring, bytes)
    }

    fn through(&self, ring: &mut dyn Ring, bytes: u64) -> Outcome<Duration> {
        let slot = ring.attach(Arc::clone(&self.file)).map_err(named("attach to a ring"))?;
        let mut free = ring.take_buffers();
        let begun = Instant::now();
        let (mut next, mut done) = (0, 0);
        while done < bytes {
            while next < bytes
                && let Some(buffer) = free.pop()
            {
                let op = Op { action: Action::Read, slot, position: next, buffer, range: 0..self.piece };
                ring.submit(Token(next), op).map_err(|rejected| named("submit a read")(rejected.error))?;
                next += u64::try_from(self.piece).unwrap_or(u64::MAX);
            }
            match ring.reap().map_err(named("reap a read"))? {
                Some(completion) => {
                    done += u64::try_from(completion.result.map_err(named("a direct read"))?).unwrap_or(0);
                    free.push(completion.buffer);
                }
                None if free.len() == usize::try_from(self.depth).unwrap_or(0) => return Err("the log is shorter than it was".to_owned()),
                None => ring.wait(None).map_err(named("wait for a read"))?,
            }
        }
        Ok(begun.elapsed())
    }
}

/// SplitMix64: which place is looked at next.
pub struct Random(pub u64);

impl Random {
    /// A number below `end`, which is not 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }
}
