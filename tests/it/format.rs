//! A second writer of the on-disk format, made from docs/format.md alone. It shares no line with the engine.

use std::fs;
use std::path::{Path, PathBuf};

/// Bytes of a record's header.
pub const HEADER: usize = 28;
/// Bytes of an index entry.
pub const ENTRY: usize = 16;
/// Where the timestamps of [`demo`] begin.
pub const BASE_TIME: u64 = 1_700_000_000_000_000_000;

/// What a record holds, offsets aside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Content {
    pub key: Vec<u8>,
    pub value: Vec<u8>,
    pub timestamp: u64,
}

impl Content {
    pub fn new(key: &[u8], value: &[u8], timestamp: u64) -> Self {
        Self { key: key.to_vec(), value: value.to_vec(), timestamp }
    }
}

/// How a partition is laid out.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    pub segment_bytes: u64,
    pub index_interval: u64,
    pub base: u64,
    /// The length that the last .log is filled up to with zeros.
    pub prealloc: usize,
}

impl Default for Layout {
    fn default() -> Self {
        Self { segment_bytes: 1 << 30, index_interval: 1, base: 0, prealloc: 0 }
    }
}

/// CRC-32 (IEEE) over timestamp, key and value as stored.
pub fn crc(timestamp: u64, key: &[u8], value: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&timestamp.to_be_bytes());
    hasher.update(key);
    hasher.update(value);
    hasher.finalize()
}

/// One record as it lies in a .log.
pub fn encode(offset: u64, timestamp: u64, key: &[u8], value: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER + key.len() + value.len());
    out.extend(offset.to_be_bytes());
    out.extend(u32::try_from(key.len() + value.len()).unwrap().to_be_bytes());
    out.extend(crc(timestamp, key, value).to_be_bytes());
    out.extend(timestamp.to_be_bytes());
    out.extend(u32::try_from(key.len()).unwrap().to_be_bytes());
    out.extend_from_slice(key);
    out.extend_from_slice(value);
    out
}

/// One index entry.
pub fn entry(offset: u64, second: u64) -> [u8; ENTRY] {
    let mut out = [0; ENTRY];
    out[..8].copy_from_slice(&offset.to_be_bytes());
    out[8..].copy_from_slice(&second.to_be_bytes());
    out
}

/// What a slot of the checkpoint file says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    pub sequence: u64,
    pub base: u64,
    pub position: u64,
    pub next_offset: u64,
    pub last_timestamp: u64,
    pub entries: u64,
    pub clean: bool,
}

/// Bytes of a slot.
pub const SLOT: usize = 4096;

impl Slot {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = b"sapwckpt".to_vec();
        out.extend(1u32.to_be_bytes());
        out.extend(u32::from(self.clean).to_be_bytes());
        for word in [self.sequence, self.base, self.position, self.next_offset, self.last_timestamp, self.entries] {
            out.extend(word.to_be_bytes());
        }
        out.extend(crc32fast::hash(&out).to_be_bytes());
        out.resize(SLOT, 0);
        out
    }

    /// A whole file in which this is the newest slot, and `older` the one before it.
    pub fn file(&self, older: Option<&Self>) -> Vec<u8> {
        let older = older.map_or(vec![0; SLOT], Self::encode);
        if self.sequence.is_multiple_of(2) { [self.encode(), older].concat() } else { [older, self.encode()].concat() }
    }

    fn decode(slot: &[u8]) -> Option<Self> {
        let word = |at: usize| u64::from_be_bytes(slot[at..at + 8].try_into().unwrap());
        let found = Self {
            sequence: word(16),
            base: word(24),
            position: word(32),
            next_offset: word(40),
            last_timestamp: word(48),
            entries: word(56),
            clean: slot[15] == 1,
        };
        (found.encode() == slot).then_some(found)
    }

    /// The newest sound slot of a checkpoint file.
    pub fn newest(file: &[u8]) -> Option<Self> {
        file.chunks_exact(SLOT).filter_map(Self::decode).max_by_key(|slot| slot.sequence)
    }
}

/// The path of one of a segment's three files.
pub fn segment_path(dir: &Path, base: u64, extension: &str) -> PathBuf {
    dir.join(format!("{base:020}.{extension}"))
}

/// The bases of the segments that records of these sizes (28 header bytes included) lie in: a record that does not fit in what
/// is left of a segment opens a new one, a larger one gets a segment of its own.
pub fn segment_bases(sizes: impl IntoIterator<Item = u64>, segment_bytes: u64, base: u64) -> Vec<u64> {
    let (mut bases, mut used) = (vec![base], 0);
    for (offset, size) in (base..).zip(sizes) {
        if used > 0 && used + size > segment_bytes {
            bases.push(offset);
            used = 0;
        }
        used += size;
    }
    bases
}

/// Writes a whole partition, and tells each record's offset, segment and position.
pub fn write_partition(dir: &Path, contents: &[Content], layout: Layout) -> Vec<(u64, u64, u64)> {
    fs::create_dir_all(dir).unwrap();
    let mut places = Vec::new();
    let (mut log, mut index, mut timeindex) = (Vec::new(), Vec::new(), Vec::new());
    let (mut base, mut count) = (layout.base, 0);
    let put = |base, log: &[u8], index: &[u8], timeindex: &[u8]| {
        fs::write(segment_path(dir, base, "log"), log).unwrap();
        fs::write(segment_path(dir, base, "index"), index).unwrap();
        fs::write(segment_path(dir, base, "timeindex"), timeindex).unwrap();
    };
    for (offset, content) in (layout.base..).zip(contents) {
        let record = encode(offset, content.timestamp, &content.key, &content.value);
        if !log.is_empty() && (log.len() + record.len()) as u64 > layout.segment_bytes {
            put(base, &log, &index, &timeindex);
            (log, index, timeindex) = (Vec::new(), Vec::new(), Vec::new());
            (base, count) = (offset, 0);
        }
        let position = log.len() as u64;
        if count % layout.index_interval == 0 {
            index.extend(entry(offset, position));
            timeindex.extend(entry(offset, content.timestamp));
        }
        places.push((offset, base, position));
        log.extend(record);
        count += 1;
    }
    if log.len() < layout.prealloc {
        log.resize(layout.prealloc, 0);
    }
    put(base, &log, &index, &timeindex);
    places
}

/// Records `user-<i mod 7>` / `value-<i, 5 digits>`, a millisecond apart: 45 bytes each.
pub fn demo(count: u64) -> Vec<Content> {
    (0..count)
        .map(|i| Content::new(format!("user-{}", i % 7).as_bytes(), format!("value-{i:05}").as_bytes(), BASE_TIME + i * 1_000_000))
        .collect()
}

/// The four bytes that, put behind `value`, make the record's checksum zero: the register is run backwards from where it has to end.
pub fn bytes_to_zero_crc(timestamp: u64, key: &[u8], value: &[u8]) -> [u8; 4] {
    let now = !crc(timestamp, key, value);
    let mut register = u32::MAX;
    for _ in 0..32 {
        register = if register & 0x8000_0000 == 0 { register << 1 } else { ((register ^ 0xEDB8_8320) << 1) | 1 };
    }
    (register ^ now).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checksum_can_be_made_zero() {
        for (timestamp, key, value) in [(0, &b""[..], &b""[..]), (BASE_TIME, b"user-1", b"value"), (u64::MAX, b"k", &[0xff; 1000])] {
            let value = [value, &bytes_to_zero_crc(timestamp, key, value)].concat();
            assert_eq!(crc(timestamp, key, &value), 0);
            assert_eq!(&encode(0, timestamp, key, &value)[12..16], &[0; 4]);
        }
        assert_eq!(crc(0, b"", b""), 0x6522_df69, "28 zero bytes are no record");
    }

    #[test]
    fn segments_roll_where_the_format_says() {
        assert_eq!(segment_bases([45; 36], 270, 0), [0, 6, 12, 18, 24, 30]);
        assert_eq!(segment_bases([45; 3], 1, 7), [7, 8, 9]);
        assert_eq!(segment_bases([28, 1000, 28], 100, 0), [0, 1, 2]);
        assert_eq!(segment_bases([50, 50, 1], 100, 0), [0, 2]);
        assert_eq!(segment_bases([], 100, 5), [5]);
    }
}
