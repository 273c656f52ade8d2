//! Records that lie one behind the other: all four checks of each, in one pass over the bytes.

use std::ops::Range;

use super::codec::{Checker, Flaw, HEADER_BYTES, Header, to_u64, to_usize};

/// Whole records at the start of some bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    /// How many there are.
    pub(crate) count: u64,
    /// Bytes that they occupy.
    pub(crate) bytes: usize,
    /// Why there are no more.
    pub(crate) end: RunEnd,
}

/// What ends a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RunEnd {
    /// No more are wanted.
    Enough,
    /// So many bytes of the next record are needed.
    Short(u64),
    /// What comes next is not the record that is expected.
    Flawed(Flaw),
}

impl Run {
    /// Looks at the records `offsets`, which begin with the first byte, as far as they are here and fit in `max_bytes`; the first of them may be
    /// larger. `bytes` may be less than `left`, the bytes up to the end of the log. Without a checker, checksums are not verified.
    pub(crate) fn of(bytes: &[u8], left: u64, offsets: Range<u64>, max_bytes: u64, mut checker: Option<&mut Checker>) -> Self {
        let (mut at, mut next) = (0, offsets.start);
        let end = loop {
            if next == offsets.end {
                break RunEnd::Enough;
            }
            let (rest, left) = (&bytes[at..], left - to_u64(at));
            if rest.len() < HEADER_BYTES && left >= to_u64(HEADER_BYTES) {
                break RunEnd::Short(to_u64(HEADER_BYTES));
            }
            let header = match Header::check(rest, left, next) {
                Ok(header) => header,
                Err(flaw) => break RunEnd::Flawed(flaw),
            };
            let whole = to_usize(header.record_bytes());
            if at > 0 && to_u64(at + whole) > max_bytes {
                break RunEnd::Enough;
            }
            let Some(record) = rest.get(..whole) else { break RunEnd::Short(to_u64(whole)) };
            if let Some(checker) = &mut checker
                && let Err(flaw) = checker.check(&header, &record[HEADER_BYTES..])
            {
                break RunEnd::Flawed(flaw);
            }
            at += whole;
            next += 1;
        };
        Self { count: next - offsets.start, bytes: at, end }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Batch;

    /// Three records from offset 5 on, of 33, 28 and 128 bytes.
    fn three() -> Vec<u8> {
        let mut batch = Batch::new();
        for value in [&b"value"[..], b"", &[7; 100]] {
            batch.push(None, value).unwrap();
        }
        for (at, offset) in [(0, 5), (33, 6), (61, 7)] {
            batch.complete_record(at, offset, 1_000 + offset);
        }
        batch.stored().to_vec()
    }

    fn run(bytes: &[u8], left: usize, offsets: Range<u64>, max_bytes: u64) -> (u64, usize, RunEnd) {
        let Run { count, bytes, end } = Run::of(bytes, to_u64(left), offsets, max_bytes, Some(&mut Checker::new()));
        (count, bytes, end)
    }

    #[test]
    fn as_many_as_are_wanted_and_fit() {
        let bytes = three();
        assert_eq!(run(&bytes, 189, 5..8, 189), (3, 189, RunEnd::Enough));
        assert_eq!(run(&bytes, 189, 5..7, 189), (2, 61, RunEnd::Enough));
        assert_eq!(run(&bytes, 189, 5..8, 188), (2, 61, RunEnd::Enough));
        assert_eq!(run(&bytes, 189, 5..8, 61), (2, 61, RunEnd::Enough));
        assert_eq!(run(&bytes, 189, 5..8, 60), (1, 33, RunEnd::Enough));
        // The first comes alone where it is larger.
        assert_eq!(run(&bytes, 189, 5..8, 0), (1, 33, RunEnd::Enough));
    }

    #[test]
    fn at_every_length_what_is_here_and_what_is_missing() {
        let bytes = three();
        for len in 0..=bytes.len() {
            let (count, end, size) = match len {
                ..33 => (0, 0, 33),
                33..61 => (1, 33, 28),
                61..189 => (2, 61, 128),
                _ => (3, 189, 28),
            };
            // More of the log is elsewhere.
            let short = RunEnd::Short(if len - end < HEADER_BYTES { 28 } else { size });
            assert_eq!(run(&bytes[..len], 1_000, 5..9, 1_000), (count, end, short));
            // The log ends there.
            let left = to_u64(len - end);
            let flaw = match len - end {
                ..HEADER_BYTES => Flaw::TornHeader { left },
                _ => Flaw::BadLength { size: u32::try_from(size).unwrap() - 28, keylen: 0, left },
            };
            assert_eq!(run(&bytes[..len], len, 5..9, 1_000), (count, end, RunEnd::Flawed(flaw)));
        }
    }

    #[test]
    fn a_flaw_ends_it_where_it_is() {
        let good = three();
        for (at, count, bytes) in [(7, 0, 0), (30, 0, 0), (33 + 7, 1, 33), (33 + 20, 1, 33), (188, 2, 61)] {
            let mut bad = good.clone();
            bad[at] ^= 1;
            let run = run(&bad, 189, 5..8, 1_000);
            assert!(run.0 == count && run.1 == bytes && matches!(run.2, RunEnd::Flawed(_)), "{at}: {run:?}");
        }
        let mut bad = good;
        bad[188] ^= 1;
        assert_eq!(Run::of(&bad, 189, 5..8, 1_000, None).count, 3);
    }
}
