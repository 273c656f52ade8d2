//! The checksum of a whole sealed log, in a file beside it. Never needed to read the log.
//!
//! It sees what the records' own checksums cannot: a changed length of a key. A sum that is missing or unsound says nothing; one
//! that does not fit says that the log is not the one that was sealed.

use std::io;
use std::path::Path;

use crc32fast::Hasher;

use super::{Kind, Name, Scanner, Segment, Step, WINDOW};
use crate::error::{Error, Result};
use crate::io::transfer::{read_exact_at, read_up_to_at, write_all_at};
use crate::io::{Disk, File, Open, is_no_file};
use crate::record::{Flaw, to_u64, to_usize};

const MAGIC: [u8; 8] = *b"sapwsum1";

/// Bytes of the file: 36 and a checksum over them.
const BYTES: usize = 40;
const CHECKED_BYTES: usize = 36;

/// What a sealed log was when it was sealed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sum {
    pub(crate) base: u64,
    /// Bytes of the log.
    pub(crate) bytes: u64,
    /// One past the offset of its last record.
    pub(crate) next_offset: u64,
    /// CRC-32 over all its bytes.
    pub(crate) crc: u32,
}

/// What stands beside a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HeldSum {
    /// There is no such file.
    Nothing,
    /// A file that says nothing: of another length or form, or of another segment.
    Unsound,
    Sound(Sum),
}

/// The sum of a log that grows: of what was appended since it was opened, taken from the memory that it was appended from.
#[derive(Debug, Clone)]
pub(crate) struct SumSoFar {
    /// What lies before was there, and is read when the sum is asked for.
    from: u64,
    hasher: Hasher,
}

impl SumSoFar {
    /// Nothing was appended to the log's first `from` bytes yet.
    pub(crate) fn from(from: u64) -> Self {
        Self { from, hasher: Hasher::new() }
    }

    /// Takes in what is appended.
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.hasher.update(bytes);
    }

    /// The sum of a log that ends now, at byte `bytes`.
    pub(crate) fn finish(self, log: &dyn File, base: u64, bytes: u64, next_offset: u64) -> io::Result<Sum> {
        let mut before = Hasher::new_with_initial_len(Sum::compute(log, base, self.from, base)?.crc, self.from);
        before.combine(&self.hasher);
        Ok(Sum { base, bytes, next_offset, crc: before.finalize() })
    }
}

impl Sum {
    /// Reads the first `bytes` bytes of a log, in constant memory.
    pub(crate) fn compute(log: &dyn File, base: u64, bytes: u64, next_offset: u64) -> io::Result<Self> {
        let (mut hasher, mut window, mut at) = (Hasher::new(), Vec::new(), 0);
        while at < bytes {
            window.resize(to_usize((bytes - at).min(to_u64(WINDOW))), 0);
            read_exact_at(log, &mut window, at)?;
            hasher.update(&window);
            at += to_u64(window.len());
        }
        Ok(Self { base, bytes, next_offset, crc: hasher.finalize() })
    }

    /// Reads the file beside the log of that base.
    pub(crate) fn look(disk: &dyn Disk, dir: &Path, base: u64) -> io::Result<HeldSum> {
        let file = match disk.open(&dir.join(Self::name(base).to_string()), Open::READ) {
            Err(error) if is_no_file(&error) => return Ok(HeldSum::Nothing),
            file => file?,
        };
        // One byte more than there should be, to see that there are no more.
        let mut bytes = [0; BYTES + 1];
        let read = read_up_to_at(&*file, &mut bytes, 0)?;
        let sum = bytes.first_chunk().filter(|_| read == BYTES).and_then(Self::decode).filter(|sum| sum.base == base);
        Ok(sum.map_or(HeldSum::Unsound, HeldSum::Sound))
    }

    /// Puts the file beside the log, in the place of one that is there: durable, and whole or not there.
    pub(crate) fn write(&self, disk: &dyn Disk, dir: &Path) -> io::Result<()> {
        put_derived(disk, dir, Self::name(self.base), |file| write_all_at(file, &self.encode(), 0, false))
    }

    fn name(base: u64) -> Name {
        Name { base, kind: Kind::Sum }
    }

    fn encode(&self) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        for (place, word) in bytes[8..32].chunks_exact_mut(8).zip([self.base, self.bytes, self.next_offset]) {
            place.copy_from_slice(&word.to_be_bytes());
        }
        bytes[32..CHECKED_BYTES].copy_from_slice(&self.crc.to_be_bytes());
        let crc = crc32fast::hash(&bytes[..CHECKED_BYTES]);
        bytes[CHECKED_BYTES..].copy_from_slice(&crc.to_be_bytes());
        bytes
    }

    fn decode(bytes: &[u8; BYTES]) -> Option<Self> {
        let half = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().expect("4 bytes within the file"));
        let word = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().expect("8 bytes within the file"));
        let sound = bytes[..8] == MAGIC && half(CHECKED_BYTES) == crc32fast::hash(&bytes[..CHECKED_BYTES]);
        sound.then(|| Self { base: word(8), bytes: word(16), next_offset: word(24), crc: half(32) })
    }
}

/// Reads a whole sealed log, record by record and then as one, and tells what does not hold and how many bytes were read.
pub(crate) fn check_whole(disk: &dyn Disk, segment: &Segment) -> Result<(Option<Error>, u64)> {
    let path = segment.path(Kind::Log);
    let log = segment.open_log(disk)?;
    let mut scanner = Scanner::new(&*log, &path, 0, segment.base(), segment.durable());
    if let Some(flaw) = walk(&mut scanner)? {
        return Ok((Some(scanner.damaged(flaw)), scanner.bytes_read()));
    }
    let sum_path = segment.path(Kind::Sum);
    let HeldSum::Sound(stored) = Sum::look(disk, &segment.dir, segment.base()).map_err(Error::io("read", &sum_path))? else {
        return Ok((None, scanner.bytes_read()));
    };
    let (bytes, next_offset) = (scanner.position(), scanner.offset());
    let computed = Sum::compute(&*log, segment.base(), bytes, next_offset).map_err(Error::io("read", &path))?;
    let mismatch = (computed != stored).then(|| Error::SumMismatch { path: path.clone(), stored: stored.crc, computed: computed.crc });
    Ok((mismatch, scanner.bytes_read() + bytes))
}

/// Puts a sum beside a sealed log that has none, as a crash just after sealing leaves it, if all its records hold.
pub(crate) fn make_up_for_sum(disk: &dyn Disk, segment: &Segment) -> Result<()> {
    let (path, sum_path, base) = (segment.path(Kind::Log), segment.path(Kind::Sum), segment.base());
    if Sum::look(disk, &segment.dir, base).map_err(Error::io("read", &sum_path))? != HeldSum::Nothing {
        return Ok(());
    }
    let log = segment.open_log(disk)?;
    let mut scanner = Scanner::new(&*log, &path, 0, base, segment.durable());
    if let Some(flaw) = walk(&mut scanner)? {
        return Err(scanner.damaged(flaw));
    }
    let sum = Sum::compute(&*log, base, scanner.position(), scanner.offset()).map_err(Error::io("read", &path))?;
    sum.write(disk, &segment.dir).map_err(Error::io("write", &sum_path))
}

/// Steps past all records, and gives what is wrong where they end, if anything is.
fn walk(scanner: &mut Scanner<'_>) -> Result<Option<Flaw>> {
    loop {
        match scanner.next()? {
            Step::Record(_) => {}
            Step::End => return Ok(None),
            Step::Flawed(flaw) => return Ok(Some(flaw)),
        }
    }
}

/// Makes a file that is derived from a log under a name of its own, and puts it in its place when it is whole and durable. An
/// interruption leaves the old one, or none, or the new one.
pub(crate) fn put_derived(disk: &dyn Disk, dir: &Path, name: Name, fill: impl FnOnce(&dyn File) -> io::Result<()>) -> io::Result<()> {
    let (path, unfinished) = (dir.join(name.to_string()), dir.join(name.unfinished()));
    let file = disk.open(&unfinished, Open::EMPTY)?;
    fill(&*file)?;
    file.sync()?;
    if let Err(error) = disk.rename(&unfinished, &path) {
        if error.kind() != io::ErrorKind::AlreadyExists {
            return Err(error);
        }
        disk.remove_file(&path)?;
        disk.rename(&unfinished, &path)?;
    }
    disk.sync_dir(dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUM: Sum = Sum { base: 30, bytes: 270, next_offset: 36, crc: 0x0102_0304 };

    #[test]
    fn the_file_is_laid_out_as_the_format_says() {
        let mut expected = b"sapwsum1".to_vec();
        for word in [30u64, 270, 36] {
            expected.extend(word.to_be_bytes());
        }
        expected.extend([1, 2, 3, 4]);
        expected.extend(crc32fast::hash(&expected).to_be_bytes());
        assert_eq!(SUM.encode()[..], expected[..]);
        assert_eq!(Sum::decode(&SUM.encode()), Some(SUM));
    }

    #[test]
    fn any_flipped_bit_makes_it_unsound() {
        for bit in 0..BYTES * 8 {
            let mut bytes = SUM.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Sum::decode(&bytes), None, "bit {bit}");
        }
    }
}
