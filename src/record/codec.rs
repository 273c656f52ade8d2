//! One record: header, checksum, and the checks that a reader makes.

use std::fmt;

use crc32fast::Hasher;

use crate::guard::{self, Guard};

/// Bytes of a record's header.
pub const HEADER_BYTES: usize = 28;

const OFFSET: usize = 0;
const SIZE: usize = 8;
const CRC: usize = 12;
const TIMESTAMP: usize = 16;
const KEYLEN: usize = 24;
const _: () = assert!(KEYLEN + size_of::<u32>() == HEADER_BYTES, "docs/format.md: 8 + 4 + 4 + 8 + 4 bytes");

/// A record's header as stored: big-endian, 28 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The record's number in its partition.
    pub offset: u64,
    /// Bytes of key and value together.
    pub size: u32,
    /// CRC-32 over timestamp, key and value.
    pub crc: u32,
    /// Nanoseconds since 1970-01-01 UTC.
    pub timestamp: u64,
    /// Bytes of the key; 0 for no key, which is the same as an empty one.
    pub keylen: u32,
}

impl Header {
    /// Reads the five fields, and checks none.
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Self {
        Self {
            offset: u64::from_be_bytes(field(bytes, OFFSET)),
            size: u32::from_be_bytes(field(bytes, SIZE)),
            crc: u32::from_be_bytes(field(bytes, CRC)),
            timestamp: u64::from_be_bytes(field(bytes, TIMESTAMP)),
            keylen: u32::from_be_bytes(field(bytes, KEYLEN)),
        }
    }

    /// The stored form.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[OFFSET..SIZE].copy_from_slice(&self.offset.to_be_bytes());
        bytes[SIZE..CRC].copy_from_slice(&self.size.to_be_bytes());
        bytes[CRC..TIMESTAMP].copy_from_slice(&self.crc.to_be_bytes());
        bytes[TIMESTAMP..KEYLEN].copy_from_slice(&self.timestamp.to_be_bytes());
        bytes[KEYLEN..].copy_from_slice(&self.keylen.to_be_bytes());
        bytes
    }

    /// Bytes of the whole record.
    pub fn record_bytes(&self) -> u64 {
        to_u64(HEADER_BYTES) + u64::from(self.size)
    }

    /// Checks 1 to 3 of the format: 28 bytes are there, the offset is the expected one, the lengths fit in what is left.
    ///
    /// `bytes` starts at the record and may hold less than `left`, the bytes up to the end of the log.
    ///
    /// # Errors
    /// [`Flaw::TornHeader`], [`Flaw::OffsetGap`] or [`Flaw::BadLength`], the first that applies.
    pub fn check(bytes: &[u8], left: u64, expected: u64) -> Result<Self, Flaw> {
        let Some(bytes) = bytes.first_chunk().filter(|_| left >= to_u64(HEADER_BYTES)) else {
            return Err(Flaw::TornHeader { left });
        };
        let header = Self::parse(bytes);
        if header.offset != expected && guard::stands(Guard::RecordOffset) {
            return Err(Flaw::OffsetGap { found: header.offset, expected });
        }
        if header.record_bytes() > left || header.keylen > header.size {
            return Err(Flaw::BadLength { size: header.size, keylen: header.keylen, left });
        }
        Ok(header)
    }

    fn check_checksum(&self, computed: u32) -> Result<(), Flaw> {
        if computed != self.crc && guard::stands(Guard::RecordChecksum) {
            return Err(Flaw::BadChecksum { stored: self.crc, computed });
        }
        Ok(())
    }
}

/// A record where it lies: nothing is copied.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Record<'a> {
    /// Its number in the partition, without gaps.
    pub offset: u64,
    /// When it was appended: nanoseconds since 1970-01-01 UTC, never less than the record's before it.
    pub timestamp: u64,
    /// Its key; empty if it has none.
    pub key: &'a [u8],
    /// Its value.
    pub value: &'a [u8],
}

impl<'a> Record<'a> {
    /// Reads the record at the start of `bytes`, all four checks made, and tells how many bytes it occupies.
    ///
    /// # Errors
    /// The first check that fails. A keylen that is wrong but at most `size` passes: the format cannot see it.
    pub fn decode(bytes: &'a [u8], expected: u64) -> Result<(Self, usize), Flaw> {
        let header = Header::check(bytes, to_u64(bytes.len()), expected)?;
        let len = to_usize(header.record_bytes());
        let body = &bytes[HEADER_BYTES..len];
        header.check_checksum(checksum(header.timestamp, body))?;
        Ok((Self::from_checked(&header, body), len))
    }

    /// The view over a body whose checks were made before.
    pub(crate) fn from_checked(header: &Header, body: &'a [u8]) -> Self {
        let (key, value) = body.split_at(to_usize(header.keylen.into()));
        Self { offset: header.offset, timestamp: header.timestamp, key, value }
    }
}

impl fmt::Debug for Record<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Record")
            .field("offset", &self.offset)
            .field("timestamp", &self.timestamp)
            .field("key", &self.key.escape_ascii().to_string())
            .field("value", &self.value.escape_ascii().to_string())
            .finish()
    }
}

/// Why bytes are not the record that was expected there; the checks in the format's order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Flaw {
    /// Fewer than 28 bytes are left.
    TornHeader {
        /// Bytes left.
        left: u64,
    },
    /// The record is not the next one.
    OffsetGap {
        /// The stored offset.
        found: u64,
        /// The one after the record before.
        expected: u64,
    },
    /// Key and value do not fit in what is left, or the key not in both.
    BadLength {
        /// The stored bytes of key and value.
        size: u32,
        /// The stored bytes of the key.
        keylen: u32,
        /// Bytes left, header included.
        left: u64,
    },
    /// Timestamp, key or value is not what was written.
    BadChecksum {
        /// The checksum in the header.
        stored: u32,
        /// The checksum of the bytes.
        computed: u32,
    },
}

impl fmt::Display for Flaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::TornHeader { left } => write!(f, "torn header: {left} bytes left, a header needs {HEADER_BYTES}"),
            Self::OffsetGap { found, expected } => write!(f, "offset gap: found offset {found}, expected {expected}"),
            Self::BadLength { size, keylen, left } => write!(f, "bad length: size {size} and keylen {keylen} with {left} bytes left"),
            Self::BadChecksum { stored, computed } => write!(f, "bad checksum: stored {stored:08x}, computed {computed:08x}"),
        }
    }
}

impl std::error::Error for Flaw {}

/// CRC-32 over the timestamp as stored, then the body.
pub(crate) fn checksum(timestamp: u64, body: &[u8]) -> u32 {
    let mut hasher = Hasher::new();
    hasher.update(&timestamp.to_be_bytes());
    hasher.update(body);
    hasher.finalize()
}

/// Computes the checksums of one record after another. Those of a batch share their timestamp, whose part is computed once.
#[derive(Debug, Clone)]
pub(crate) struct Checker {
    timestamp: u64,
    /// After the timestamp.
    begun: Hasher,
}

impl Checker {
    pub(crate) fn new() -> Self {
        let mut begun = Hasher::new();
        begun.update(&0_u64.to_be_bytes());
        Self { timestamp: 0, begun }
    }

    /// Check 4 of the format: the checksum is that of timestamp, key and value.
    ///
    /// # Errors
    /// [`Flaw::BadChecksum`].
    pub(crate) fn check(&mut self, header: &Header, body: &[u8]) -> Result<(), Flaw> {
        if header.timestamp != self.timestamp {
            self.begun.reset();
            self.begun.update(&header.timestamp.to_be_bytes());
            self.timestamp = header.timestamp;
        }
        let mut hasher = self.begun.clone();
        hasher.update(body);
        header.check_checksum(hasher.finalize())
    }
}

fn field<const N: usize>(bytes: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("the field's place and length are constants within the header")
}

/// Lossless: the crate builds for 64-bit targets only.
pub(crate) const fn to_u64(n: usize) -> u64 {
    n as u64
}

/// Lossless: the crate builds for 64-bit targets only.
#[allow(clippy::cast_possible_truncation, reason = "usize is 64 bits wide, asserted in lib.rs")]
pub(crate) const fn to_usize(n: u64) -> usize {
    n as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encode(offset: u64, timestamp: u64, key: &[u8], value: &[u8]) -> Vec<u8> {
        let body = [key, value].concat();
        let size = u32::try_from(body.len()).unwrap();
        let header = Header { offset, size, crc: checksum(timestamp, &body), timestamp, keylen: u32::try_from(key.len()).unwrap() };
        [&header.encode()[..], &body].concat()
    }

    #[test]
    fn the_formats_worked_example_byte_for_byte() {
        let log = [
            encode(0, 1_700_000_000_000_000_000, b"user-1", b"hello"),
            encode(1, 1_700_000_000_000_000_001, b"user-2", b"world"),
            encode(2, 1_700_000_000_000_000_002, b"user-1", b"foo"),
        ];
        assert_eq!(log.concat(), include_bytes!("../../tests/fixtures/worked/00000000000000000000.log"));
        let mut position = 0;
        for (index, record) in log.iter().enumerate() {
            assert_eq!(position, [0, 39, 78][index]);
            position += record.len();
        }
        assert_eq!(position, 115);
    }

    #[test]
    fn zeros_are_never_a_record() {
        assert_eq!(checksum(0, b""), 0x6522_df69);
        assert!(matches!(Record::decode(&[0; 64], 0), Err(Flaw::BadChecksum { stored: 0, .. })));
    }

    #[test]
    fn each_check_has_its_name_and_its_place() {
        let good = encode(7, 1, b"key", b"value");
        assert_eq!(Record::decode(&good, 7).unwrap(), (Record { offset: 7, timestamp: 1, key: b"key", value: b"value" }, 36));
        let with = |at: usize, bytes: &[u8]| {
            let mut bad = good.clone();
            bad[at..at + bytes.len()].copy_from_slice(bytes);
            bad
        };
        for len in 0..HEADER_BYTES {
            assert_eq!(Record::decode(&good[..len], 7), Err(Flaw::TornHeader { left: to_u64(len) }));
        }
        for len in HEADER_BYTES..good.len() {
            assert!(matches!(Record::decode(&good[..len], 7), Err(Flaw::BadLength { size: 8, keylen: 3, .. })));
        }
        assert_eq!(Record::decode(&good, 8), Err(Flaw::OffsetGap { found: 7, expected: 8 }));
        for size in [9, 0x8000_0000, 0xffff_ffe4, u32::MAX] {
            assert!(matches!(Record::decode(&with(SIZE, &size.to_be_bytes()), 7), Err(Flaw::BadLength { .. })));
        }
        for keylen in [9, u32::MAX] {
            assert!(matches!(Record::decode(&with(KEYLEN, &keylen.to_be_bytes()), 7), Err(Flaw::BadLength { .. })));
        }
        // Wrong in everything: the first check in the format's order is named.
        let all = [&[0xff; 20][..], &good].concat();
        assert!(matches!(Record::decode(&all, 7), Err(Flaw::OffsetGap { .. })));
    }

    #[test]
    fn one_flipped_bit_is_seen_except_in_keylen() {
        for good in [encode(3, 9, b"user-1", b"hello"), encode(3, 9, b"", b""), encode(3, 9, b"k", b"")] {
            let original = Record::decode(&good, 3).unwrap();
            for bit in 0..good.len() * 8 {
                let mut bad = good.clone();
                bad[bit / 8] ^= 1 << (bit % 8);
                match Record::decode(&bad, 3) {
                    Ok(record) => {
                        assert!((KEYLEN..HEADER_BYTES).contains(&(bit / 8)), "bit {bit} passed");
                        assert_ne!(record, original);
                    }
                    Err(Flaw::TornHeader { .. }) => panic!("no header is missing"),
                    Err(_) => {}
                }
            }
        }
    }

    #[test]
    fn one_record_after_another_is_checked_as_it_is_alone() {
        let mut checker = Checker::new();
        // The first timestamp is the one that a checker begins with; equal ones follow each other, and come back.
        for (timestamp, value) in [(0, &b"a"[..]), (0, b""), (5, b"b"), (5, b"b"), (0, b"a"), (u64::MAX, &[7; 300])] {
            let record = encode(1, timestamp, b"k", value);
            let header = Header::check(&record, to_u64(record.len()), 1).unwrap();
            let mut body = record[HEADER_BYTES..].to_vec();
            assert_eq!(checker.check(&header, &body), Ok(()));
            body[0] ^= 1;
            assert!(matches!(checker.check(&header, &body), Err(Flaw::BadChecksum { stored, .. }) if stored == header.crc));
        }
    }

    #[test]
    fn empty_keys_and_values_are_records() {
        for (key, value) in [(&b""[..], &b""[..]), (b"", b"v"), (b"k", b"")] {
            let bytes = encode(0, 0, key, value);
            assert_eq!(
                Record::decode(&bytes, 0).unwrap(),
                (Record { offset: 0, timestamp: 0, key, value }, HEADER_BYTES + key.len() + value.len())
            );
        }
    }
}
