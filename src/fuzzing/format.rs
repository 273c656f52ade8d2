//! docs/format.md once more, written to be obvious: the judge of the engine's own code, of which it uses nothing.

use std::collections::BTreeMap;

use crate::Flaw;

pub(super) const HEADER: usize = 28;

/// A record as it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stored {
    pub(super) offset: u64,
    pub(super) timestamp: u64,
    pub(super) keylen: u32,
    /// Key and value.
    pub(super) body: Vec<u8>,
}

impl Stored {
    /// The `number`th of records that differ in everything.
    pub(super) fn sample(offset: u64, size: usize) -> Self {
        let body = (0..size).map(|at| b'a' + (offset.wrapping_mul(7).wrapping_add(at as u64) % 26) as u8).collect();
        Self { offset, timestamp: 1_000 + offset % 1_000_000 * 10, keylen: (size / 3) as u32, body }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let timestamp = self.timestamp.to_be_bytes();
        let mut bytes = self.offset.to_be_bytes().to_vec();
        bytes.extend((self.body.len() as u32).to_be_bytes());
        bytes.extend(crc(&[&timestamp, &self.body]).to_be_bytes());
        bytes.extend(timestamp);
        bytes.extend(self.keylen.to_be_bytes());
        bytes.extend(&self.body);
        bytes
    }

    /// The four checks, in the format's order.
    pub(super) fn decode(bytes: &[u8], expected: u64) -> Result<Self, Fault> {
        if bytes.len() < HEADER {
            return Err(Fault::TornHeader);
        }
        let (offset, size, timestamp, keylen) = (u64_at(bytes, 0), u32_at(bytes, 8), u64_at(bytes, 16), u32_at(bytes, 24));
        if offset != expected {
            return Err(Fault::OffsetGap);
        }
        if size as usize > bytes.len() - HEADER || keylen > size {
            return Err(Fault::BadLength);
        }
        let body = &bytes[HEADER..HEADER + size as usize];
        if crc(&[&timestamp.to_be_bytes(), body]) != u32_at(bytes, 12) {
            return Err(Fault::BadChecksum);
        }
        Ok(Self { offset, timestamp, keylen, body: body.to_vec() })
    }

    pub(super) fn bytes(&self) -> usize {
        HEADER + self.body.len()
    }
}

/// Which check failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    TornHeader,
    OffsetGap,
    BadLength,
    BadChecksum,
}

impl From<Flaw> for Fault {
    fn from(flaw: Flaw) -> Self {
        match flaw {
            Flaw::TornHeader { .. } => Self::TornHeader,
            Flaw::OffsetGap { .. } => Self::OffsetGap,
            Flaw::BadLength { .. } => Self::BadLength,
            Flaw::BadChecksum { .. } => Self::BadChecksum,
        }
    }
}

/// What the bytes of a .log hold.
pub(super) struct Scan {
    /// With their positions.
    pub(super) records: Vec<(usize, Stored)>,
    /// Where the last one ends.
    pub(super) end: usize,
    /// What is there, if not zeros to the end.
    pub(super) fault: Option<Fault>,
}

/// Walks a .log from its start.
pub(super) fn scan(bytes: &[u8], base: u64) -> Scan {
    let (mut records, mut end) = (Vec::new(), 0);
    for expected in base..=u64::MAX {
        let fault = match Stored::decode(&bytes[end..], expected) {
            // No record has the last offset that 64 bits hold: none could follow.
            Ok(_) | Err(Fault::BadChecksum) if expected == u64::MAX => Fault::OffsetGap,
            Ok(record) => {
                let position = end;
                end += record.bytes();
                records.push((position, record));
                continue;
            }
            Err(fault) => fault,
        };
        let fault = bytes[end..].iter().any(|&byte| byte != 0).then_some(fault);
        return Scan { records, end, fault };
    }
    unreachable!("the last offset is no record's")
}

/// A partition's records, by offset, and how they are laid out in segments.
#[derive(Clone, Debug, Default)]
pub(super) struct Log {
    records: BTreeMap<u64, Stored>,
    /// By base: how many records each segment has.
    pub(super) segments: BTreeMap<u64, u64>,
}

impl Log {
    /// Records of these sizes, header not counted.
    pub(super) fn sample(base: u64, sizes: impl IntoIterator<Item = usize>, segment_bytes: usize) -> Self {
        let mut log = Self::default();
        let (mut segment, mut used) = (base, 0);
        log.segments.insert(base, 0);
        for (offset, size) in (base..).zip(sizes) {
            let record = Stored::sample(offset, size);
            if used > 0 && used + record.bytes() > segment_bytes {
                (segment, used) = (offset, 0);
            }
            used += record.bytes();
            *log.segments.entry(segment).or_default() += 1;
            log.records.insert(offset, record);
        }
        log
    }

    pub(super) fn get(&self, offset: u64) -> Option<&Stored> {
        self.records.get(&offset)
    }

    /// The first offset.
    pub(super) fn first(&self) -> u64 {
        self.segments.first_key_value().map_or(0, |(&base, _)| base)
    }

    pub(super) fn records_of(&self, base: u64) -> impl Iterator<Item = &Stored> {
        self.records.range(base..base + self.segments[&base]).map(|(_, record)| record)
    }

    /// The files, by name.
    pub(super) fn files(&self, interval: u32) -> BTreeMap<String, Vec<u8>> {
        let mut files = BTreeMap::new();
        for &base in self.segments.keys() {
            let (mut log, mut index, mut timeindex) = (Vec::new(), Vec::new(), Vec::new());
            for record in self.records_of(base) {
                if (record.offset - base).is_multiple_of(interval.into()) {
                    index.extend(entry(record.offset, log.len() as u64));
                    timeindex.extend(entry(record.offset, record.timestamp));
                }
                log.extend(record.encode());
            }
            for (extension, bytes) in [("log", log), ("index", index), ("timeindex", timeindex)] {
                files.insert(name(base, extension), bytes);
            }
        }
        files
    }

    /// The checkpoint of a clean close, or of one moment in the last segment after so many of its records.
    pub(super) fn checkpoint(&self, interval: u32, after: Option<u64>) -> Slot {
        let (&base, &all) = self.segments.last_key_value().unwrap();
        let count = after.map_or(all, |after| after.min(all));
        let before: Vec<_> = self.records_of(base).take(count as usize).collect();
        let last = self.records.range(..base + count).next_back().map_or(0, |(_, record)| record.timestamp);
        Slot {
            base,
            position: before.iter().map(|record| record.bytes() as u64).sum(),
            next_offset: base + count,
            last_timestamp: last,
            entries: count.div_ceil(interval.into()),
            clean: after.is_none(),
        }
    }
}

pub(super) fn name(base: u64, extension: &str) -> String {
    format!("{base:020}.{extension}")
}

fn entry(offset: u64, second: u64) -> impl Iterator<Item = u8> {
    offset.to_be_bytes().into_iter().chain(second.to_be_bytes())
}

/// What a slot of the checkpoint says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    pub(super) base: u64,
    pub(super) position: u64,
    pub(super) next_offset: u64,
    pub(super) last_timestamp: u64,
    pub(super) entries: u64,
    pub(super) clean: bool,
}

pub(super) const SLOT_BYTES: usize = 4096;
/// Bytes of a slot before its checksum, and with it.
pub(super) const SLOT_CHECKED: usize = 64;
pub(super) const SLOT_USED: usize = 68;
pub(super) const MAGIC: &[u8] = b"sapwckpt";

impl Slot {
    pub(super) fn encode(&self, sequence: u64) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend([0, 0, 0, 1, 0, 0, 0, u8::from(self.clean)]);
        for word in [sequence, self.base, self.position, self.next_offset, self.last_timestamp, self.entries] {
            bytes.extend(word.to_be_bytes());
        }
        bytes.extend(crc(&[&bytes]).to_be_bytes());
        bytes.resize(SLOT_BYTES, 0);
        bytes
    }

    /// A file whose newest slot says this.
    pub(super) fn file(&self) -> Vec<u8> {
        [self.encode(6), self.encode(5)].concat()
    }

    /// The newest sound slot of a file, and its number.
    pub(super) fn newest(file: &[u8]) -> Option<(u64, Self)> {
        let used = |slot: usize| -> [u8; SLOT_USED] { std::array::from_fn(|at| file.get(slot * SLOT_BYTES + at).copied().unwrap_or(0)) };
        let sound = (0..2).filter_map(|place| {
            let bytes = used(place);
            let sequence = u64_at(&bytes, 16);
            let slot = Self {
                base: u64_at(&bytes, 24),
                position: u64_at(&bytes, 32),
                next_offset: u64_at(&bytes, 40),
                last_timestamp: u64_at(&bytes, 48),
                entries: u64_at(&bytes, 56),
                clean: bytes[15] == 1,
            };
            let in_place = sequence % 2 == place as u64 && sequence != u64::MAX;
            (in_place && slot.encode(sequence)[..SLOT_USED] == bytes).then_some((sequence, slot))
        });
        sound.max_by_key(|(sequence, _)| *sequence)
    }
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap())
}

/// CRC-32 (IEEE 802.3, reflected, polynomial 0xEDB88320), a byte at a time.
pub(super) fn crc(parts: &[&[u8]]) -> u32 {
    const TABLE: [u32; 256] = {
        let mut table = [0; 256];
        let mut byte = 0;
        while byte < 256 {
            let mut register = byte as u32;
            let mut bit = 0;
            while bit < 8 {
                register = if register & 1 == 1 { register >> 1 ^ 0xEDB8_8320 } else { register >> 1 };
                bit += 1;
            }
            table[byte] = register;
            byte += 1;
        }
        table
    };
    let step = |register: u32, byte: &u8| register >> 8 ^ TABLE[(register as u8 ^ byte) as usize];
    !parts.iter().copied().flatten().fold(u32::MAX, step)
}
