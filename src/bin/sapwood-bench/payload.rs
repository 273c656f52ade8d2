//! What the records hold: keys and values as a function of seed, producer and sequence, so that verification makes them again
//! instead of keeping them. Pure but for reading the input file once.
//!
//! A *sequence* numbers the records of a run over all producers, from 0, without gaps.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use crate::units::{to_u64, to_usize};

/// Every record of a run.
#[derive(Debug)]
pub struct Payload {
    values: Values,
    /// Distinct keys; 0 for none.
    keys: u64,
    seed: u64,
}

#[derive(Debug)]
enum Values {
    /// Noise of one length.
    Noise { bytes: usize },
    /// A file's lines, in turn.
    Lines(Lines),
}

impl Payload {
    /// Values of `bytes` each.
    pub fn noise(bytes: u64, keys: u64, seed: u64) -> Self {
        Self { values: Values::Noise { bytes: to_usize(bytes) }, keys, seed }
    }

    /// The lines of a file.
    pub fn lines(lines: Lines, keys: u64, seed: u64) -> Self {
        Self { values: Values::Lines(lines), keys, seed }
    }

    /// Whether records have keys.
    pub fn keyed(&self) -> bool {
        self.keys > 0
    }

    /// The key of a record, if there are keys.
    pub fn key<'a>(&self, sequence: u64, scratch: &'a mut Vec<u8>) -> Option<&'a [u8]> {
        let number = sequence.checked_rem(self.keys)?;
        scratch.clear();
        io::Write::write_fmt(scratch, format_args!("key-{number}")).expect("memory takes every write");
        Some(scratch)
    }

    /// The value of a record.
    pub fn value<'a>(&'a self, producer: u32, sequence: u64, scratch: &'a mut Vec<u8>) -> &'a [u8] {
        match &self.values {
            Values::Lines(lines) => lines.line(sequence % lines.count()),
            Values::Noise { bytes } => {
                scratch.resize(*bytes, 0);
                fill(scratch, self.seed, producer, sequence);
                scratch
            }
        }
    }

    /// Bytes of a record's value, without making it.
    pub fn value_bytes(&self, sequence: u64) -> u64 {
        match &self.values {
            Values::Lines(lines) => to_u64(lines.line(sequence % lines.count()).len()),
            Values::Noise { bytes } => to_u64(*bytes),
        }
    }

    /// The largest record's key and value.
    pub fn largest(&self) -> u64 {
        let value = match &self.values {
            Values::Lines(lines) => lines.longest(),
            Values::Noise { bytes } => to_u64(*bytes),
        };
        value.saturating_add(self.longest_key())
    }

    /// Key and value of the average record, rounded up.
    pub fn average(&self) -> u64 {
        let value = match &self.values {
            Values::Lines(lines) => lines.average(),
            Values::Noise { bytes } => to_u64(*bytes),
        };
        value.saturating_add(self.longest_key())
    }

    /// The largest append of so many records in its stored form, `header` bytes more than key and value for each.
    pub fn largest_batch(&self, records: u64, header: u64) -> u64 {
        let values = match &self.values {
            Values::Lines(lines) => lines.largest_run(records),
            Values::Noise { bytes } => to_u64(*bytes).saturating_mul(records),
        };
        values.saturating_add(records.saturating_mul(header.saturating_add(self.longest_key())))
    }

    fn longest_key(&self) -> u64 {
        self.keys.checked_sub(1).map_or(0, |last| to_u64(format!("key-{last}").len()))
    }

    /// Whose value it is, where the value says so: noise of 16 bytes and more.
    pub fn identify(&self, value: &[u8], producers: u32) -> Option<(u32, u64)> {
        let Values::Noise { .. } = self.values else { return None };
        let (first, rest) = value.split_first_chunk()?;
        let (first, second) = (u64::from_le_bytes(*first), u64::from_le_bytes(*rest.first_chunk()?));
        (0..producers).find_map(|producer| {
            let sequence = first ^ mix(self.seed, u64::from(producer));
            (noise_state(self.seed, producer, sequence) == second).then_some((producer, sequence))
        })
    }
}

/// The first word differs from record to record (also its first byte, from one record to the next) and with the second one tells whose it is;
/// the others are noise that no device compresses.
fn fill(value: &mut [u8], seed: u64, producer: u32, sequence: u64) {
    let mut state = noise_state(seed, producer, sequence);
    let mut word = sequence ^ mix(seed, u64::from(producer));
    let mut next = state;
    let mut chunks = value.chunks_exact_mut(8);
    for chunk in &mut chunks {
        chunk.copy_from_slice(&word.to_le_bytes());
        word = next;
        state = state.wrapping_add(GOLDEN);
        next = finish(state);
    }
    let rest = chunks.into_remainder();
    rest.copy_from_slice(&word.to_le_bytes()[..rest.len()]);
}

fn noise_state(seed: u64, producer: u32, sequence: u64) -> u64 {
    mix(mix(seed, u64::from(producer)), sequence)
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// A number that looks like no other pair's.
pub fn mix(a: u64, b: u64) -> u64 {
    finish(a.wrapping_add(GOLDEN).wrapping_add(finish(b.wrapping_add(GOLDEN))))
}

/// SplitMix64's output function.
fn finish(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A file's lines, in memory. Any bytes; only the newline itself belongs to no line.
#[derive(Debug)]
pub struct Lines {
    bytes: Vec<u8>,
    /// Where each line ends: the place of its newline, or the end of the file.
    ends: Vec<usize>,
}

impl Lines {
    /// Reads the whole file.
    ///
    /// # Errors
    /// A sentence for the user if it cannot be read, or is empty.
    pub fn read(path: &Path) -> Result<Self, String> {
        let cannot = |error: io::Error| format!("could not read the input file {path:?}: {error}");
        let mut file = File::open(path).map_err(cannot)?;
        let mut bytes = Vec::new();
        // The length is a hint (a pipe has none); without the room for it there is no use in starting.
        let length = file.metadata().map_err(cannot)?.len();
        bytes
            .try_reserve_exact(to_usize(length))
            .map_err(|_| format!("the input file {path:?} of {length} bytes does not fit in memory"))?;
        file.read_to_end(&mut bytes).map_err(cannot)?;
        Self::of(bytes).ok_or_else(|| format!("the input file {path:?} is empty; there is nothing to append"))
    }

    /// None if there is not a single line. A newline at the end begins no further line.
    pub fn of(bytes: Vec<u8>) -> Option<Self> {
        let mut ends: Vec<usize> = bytes.iter().enumerate().filter(|(_, byte)| **byte == b'\n').map(|(at, _)| at).collect();
        if bytes.last().is_some_and(|last| *last != b'\n') {
            ends.push(bytes.len());
        }
        (!ends.is_empty()).then_some(Self { bytes, ends })
    }

    /// At least 1.
    pub fn count(&self) -> u64 {
        to_u64(self.ends.len())
    }

    fn line(&self, number: u64) -> &[u8] {
        let number = to_usize(number);
        let start = number.checked_sub(1).map_or(0, |before| self.ends[before] + 1);
        &self.bytes[start..self.ends[number]]
    }

    fn longest(&self) -> u64 {
        (0..self.count()).map(|number| to_u64(self.line(number).len())).max().unwrap_or(0)
    }

    /// The most bytes that so many lines in turn have, wherever they begin.
    fn largest_run(&self, lines: u64) -> u64 {
        // Bytes of the first `n` lines without their newlines, the file being repeated without end.
        let one_round = self.before(self.count());
        let first = |n: u64| (n / self.count()).saturating_mul(one_round).saturating_add(self.before(n % self.count()));
        (0..self.count()).map(|start| first(start.saturating_add(lines)) - first(start)).max().unwrap_or(0)
    }

    /// Bytes of the lines before a line, newlines left out; of all lines for their number.
    fn before(&self, line: u64) -> u64 {
        line.checked_sub(1).map_or(0, |last| to_u64(self.ends[to_usize(last)]) - last)
    }

    fn average(&self) -> u64 {
        self.before(self.count()).div_ceil(self.count())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(payload: &Payload, producer: u32, sequence: u64) -> Vec<u8> {
        payload.value(producer, sequence, &mut Vec::new()).to_vec()
    }

    #[test]
    fn noise_is_a_function_of_seed_producer_and_sequence() {
        for bytes in [0, 1, 7, 8, 9, 15, 16, 17, 1000] {
            let payload = Payload::noise(bytes, 0, 42);
            let mut dirty = vec![0xaa; 3000];
            assert_eq!(payload.value(3, 17, &mut dirty), value(&payload, 3, 17));
            assert_eq!(to_u64(value(&payload, 3, 17).len()), bytes);
            if bytes > 0 {
                assert_ne!(value(&payload, 3, 17), value(&payload, 3, 18), "{bytes}");
            }
            if bytes >= 7 {
                assert_ne!(value(&payload, 3, 17), value(&payload, 4, 17), "{bytes}");
                assert_ne!(value(&payload, 3, 17), value(&Payload::noise(bytes, 0, 43), 3, 17), "{bytes}");
            }
        }
    }

    #[test]
    fn short_noise_is_a_prefix_of_long_noise_and_nothing_repeats_inside() {
        let long = value(&Payload::noise(4096, 0, 1), 0, 0);
        for bytes in 0..64 {
            assert_eq!(value(&Payload::noise(bytes, 0, 1), 0, 0), long[..to_usize(bytes)]);
        }
        let mut words: Vec<&[u8]> = long.chunks(8).collect();
        words.sort_unstable();
        words.dedup();
        assert_eq!(words.len(), 512);
    }

    #[test]
    fn a_value_tells_whose_it_is() {
        let payload = Payload::noise(16, 0, 9);
        assert_eq!(payload.identify(&value(&payload, 3, 1 << 40), 8), Some((3, 1 << 40)));
        assert_eq!(payload.identify(&value(&payload, 3, 5), 3), None, "producer 3 is none of 0 to 2");
        assert_eq!(payload.identify(&[0; 16], 8), None);
        assert_eq!(payload.identify(b"short", 8), None);
    }

    #[test]
    fn keys_come_in_turn() {
        let mut scratch = Vec::new();
        let payload = Payload::noise(1, 3, 0);
        let keys: Vec<_> = (0..4).map(|sequence| payload.key(sequence, &mut scratch).unwrap().to_vec()).collect();
        assert_eq!(keys, [&b"key-0"[..], b"key-1", b"key-2", b"key-0"]);
        assert_eq!(Payload::noise(1, 0, 0).key(0, &mut scratch), None);
        assert_eq!((Payload::noise(10, 11, 0).largest(), Payload::noise(10, 0, 0).largest()), (16, 10));
    }

    fn lines(bytes: &[u8]) -> Option<Vec<Vec<u8>>> {
        let lines = Lines::of(bytes.to_vec())?;
        Some((0..lines.count()).map(|number| lines.line(number).to_vec()).collect())
    }

    #[test]
    fn lines_are_any_bytes_between_newlines() {
        assert_eq!(lines(b""), None);
        assert_eq!(lines(b"\n").unwrap(), [b""]);
        assert_eq!(lines(b"a").unwrap(), [b"a"]);
        assert_eq!(lines(b"a\nb").unwrap(), [b"a", b"b"]);
        assert_eq!(lines(b"a\nb\n").unwrap(), [b"a", b"b"]);
        assert_eq!(lines(b"a\r\n\n\xff\0\xfe\n\n").unwrap(), [&b"a\r"[..], b"", b"\xff\0\xfe", b""]);
    }

    #[test]
    fn lines_are_taken_again_and_again() {
        let payload = Payload::lines(Lines::of(b"one\n\nthree".to_vec()).unwrap(), 0, 0);
        let taken: Vec<_> = (0..5).map(|sequence| value(&payload, 1, sequence)).collect();
        assert_eq!(taken, [&b"one"[..], b"", b"three", b"one", b""]);
        assert_eq!((payload.largest(), payload.average(), payload.value_bytes(2)), (5, 3, 5));
    }

    #[test]
    fn the_average_counts_no_newline() {
        for (text, average) in [("aaaa\nbb\n", 3), ("aaaa\nbb", 3), ("\n", 0), ("\n\n", 0), ("abc", 3)] {
            assert_eq!(Lines::of(text.into()).unwrap().average(), average, "{text:?}");
        }
    }

    #[test]
    fn the_largest_run_is_found_wherever_it_begins() {
        let of = |text: &str, lines| Lines::of(text.into()).unwrap().largest_run(lines);
        for (lines, bytes) in [(1, 4), (2, 6), (3, 7), (4, 11), (6, 14), (7, 18)] {
            assert_eq!(of("a\nbbbb\ncc\n", lines), bytes, "{lines}");
        }
        assert_eq!(of("aaa\n\nbbb", 2), 6, "around the end");
        let payload = Payload::lines(Lines::of(b"aaa\n\nbbb".to_vec()).unwrap(), 11, 0);
        assert_eq!(payload.largest_batch(2, 28), 6 + 2 * (28 + 6));
        assert_eq!(Payload::noise(1000, 0, 0).largest_batch(3, 28), 3 * 1028);
    }

    #[test]
    fn a_file_that_is_not_there_or_empty_is_named() {
        let missing = Lines::read(Path::new("/nonexistent/sapwood")).unwrap_err();
        assert!(missing.contains("/nonexistent/sapwood") && missing.contains("No such file"), "{missing}");
        assert!(Lines::read(Path::new("/dev/null")).unwrap_err().contains("empty"));
        assert!(Lines::read(Path::new("/")).unwrap_err().contains("directory"));
    }
}
