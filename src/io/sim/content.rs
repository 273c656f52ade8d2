//! One simulated file: what reads see, what is on the device, and what lies between the two.
//!
//! Pure state. Knows neither names nor faults nor threads.
//!
//! Invariants:
//! - `lens[0]` is the durable length, the last of `lens` the length seen; between them stand those that
//!   a power loss may leave, oldest first. Like a journal, it keeps a change of length only with all those before it.
//! - A page that is not in `dirty` is the same in `durable` and in `seen`, once the pending truncations are applied.
//! - Pages of zeros alone are absent, so equal content has equal maps.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::super::BLOCK;
use super::rng::Rng;
use super::{to_u64, to_usize};

/// What survives or is lost as a whole, and what room is counted in.
pub(super) const PAGE: u64 = BLOCK;
const PAGE_BYTES: usize = 4096;
const _: () = assert!(PAGE == 4096, "a page is a block");
/// What a device writes as a whole, if it promises no more.
pub(super) const SECTOR: usize = 512;

type Page = Arc<[u8; PAGE_BYTES]>;

static ZEROS: [u8; PAGE_BYTES] = [0; PAGE_BYTES];

/// What a power loss leaves of what was not synced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Keep {
    /// Nothing of it.
    Nothing,
    /// Any part, by the seed; with `torn`, also parts of pages, in whole sectors.
    Some { torn: bool },
}

/// Sparse bytes.
#[derive(Debug, Clone, Default)]
struct Pages(BTreeMap<u64, Page>);

impl Pages {
    fn get(&self, number: u64) -> &[u8; PAGE_BYTES] {
        self.0.get(&number).map_or(&ZEROS, |page| &**page)
    }

    fn set(&mut self, number: u64, page: Option<Page>) {
        match page.filter(|page| **page != ZEROS) {
            Some(page) => self.0.insert(number, page),
            None => self.0.remove(&number),
        };
    }

    fn read(&self, into: &mut [u8], position: u64) {
        for (number, within, at) in pieces(position, into.len()) {
            into[at.clone()].copy_from_slice(&self.get(number)[within]);
        }
    }

    fn write(&mut self, from: &[u8], position: u64) {
        for (number, within, at) in pieces(position, from.len()) {
            let mut page = *self.get(number);
            page[within].copy_from_slice(&from[at]);
            self.set(number, Some(Arc::new(page)));
        }
    }

    /// Makes `len` bytes at `position` those of `other`.
    fn copy(&mut self, other: &Self, position: u64, len: usize) {
        for (number, within, _) in pieces(position, len) {
            if within.len() == PAGE_BYTES {
                self.set(number, other.0.get(&number).cloned());
            } else {
                let mut page = *self.get(number);
                page[within.clone()].copy_from_slice(&other.get(number)[within]);
                self.set(number, Some(Arc::new(page)));
            }
        }
    }

    /// Zeros from `len` on.
    fn cut(&mut self, len: u64) {
        self.0.split_off(&len.div_ceil(PAGE));
        let within = to_usize(len % PAGE);
        if within > 0 && self.0.contains_key(&(len / PAGE)) {
            let mut page = *self.get(len / PAGE);
            page[within..].fill(0);
            self.set(len / PAGE, Some(Arc::new(page)));
        }
    }
}

/// `len` bytes from `position` on, by pages: each page's number, the bytes in it, and where these are among the `len`.
fn pieces(position: u64, len: usize) -> impl Iterator<Item = (u64, Range<usize>, Range<usize>)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let here = position + to_u64(at);
        let start = to_usize(here % PAGE);
        let count = (PAGE_BYTES - start).min(len - at);
        let piece = (here / PAGE, start..start + count, at..at + count);
        at += count;
        (count > 0).then_some(piece)
    })
}

/// The numbers of the pages that hold any byte of `range`.
fn pages_of(range: &Range<u64>) -> Range<u64> {
    if range.is_empty() { 0..0 } else { range.start / PAGE..range.end.div_ceil(PAGE) }
}

/// The pages that have room on the device: disjoint ranges that do not touch.
#[derive(Debug, Clone, Default)]
struct Room(BTreeMap<u64, u64>);

impl Room {
    fn add(&mut self, pages: Range<u64>) {
        if pages.is_empty() {
            return;
        }
        let mut joined = pages;
        // From the last range that starts no later than the new one ends, backwards, as long as they touch.
        while let Some((&start, &end)) = self.0.range(..=joined.end).next_back() {
            if end < joined.start {
                break;
            }
            self.0.remove(&start);
            joined = joined.start.min(start)..joined.end.max(end);
        }
        self.0.insert(joined.start, joined.end);
    }

    /// Gives back all pages from `first` on.
    fn cut(&mut self, first: u64) {
        self.0.split_off(&first);
        if let Some((_, end)) = self.0.iter_mut().next_back() {
            *end = (*end).min(first);
        }
    }

    fn has(&self, page: u64) -> bool {
        self.0.range(..=page).next_back().is_some_and(|(_, &end)| page < end)
    }

    fn pages(&self) -> u64 {
        self.0.iter().map(|(start, end)| end - start).sum()
    }
}

/// A page that differs from what is on the device.
#[derive(Debug, Clone, Copy)]
struct Dirty {
    /// The number of the latest change of length when it was written.
    written: u64,
    /// A sync failed over it: the kernel took it for clean, so that no later sync writes it.
    forsaken: bool,
}

/// A file's bytes.
#[derive(Debug, Clone)]
pub(super) struct Content {
    seen: Pages,
    durable: Pages,
    dirty: BTreeMap<u64, Dirty>,
    lens: Vec<u64>,
    /// The number of `lens[0]` among all lengths that this file ever had.
    first: u64,
    room: Room,
    durable_room: Room,
}

impl Default for Content {
    fn default() -> Self {
        Self {
            seen: Pages::default(),
            durable: Pages::default(),
            dirty: BTreeMap::new(),
            lens: vec![0],
            first: 0,
            room: Room::default(),
            durable_room: Room::default(),
        }
    }
}

impl Content {
    pub(super) fn len(&self) -> u64 {
        *self.lens.last().expect("a file has a length")
    }

    /// Bytes on the device that this file takes, as reads see it.
    pub(super) fn used(&self) -> u64 {
        self.room.pages() * PAGE
    }

    /// Whole pages of `range` that would have to be taken from the device.
    pub(super) fn lacking(&self, range: &Range<u64>) -> impl Iterator<Item = u64> {
        pages_of(range).filter(|page| !self.room.has(*page))
    }

    /// Reads what is there, and tells how much that is.
    pub(super) fn read(&self, into: &mut [u8], position: u64) -> usize {
        let there = to_usize(self.len().saturating_sub(position).min(to_u64(into.len())));
        self.seen.read(&mut into[..there], position);
        there
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; to_usize(self.len())];
        self.seen.read(&mut bytes, 0);
        bytes
    }

    pub(super) fn durable_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; to_usize(self.lens[0])];
        self.durable.read(&mut bytes, 0);
        bytes
    }

    /// The pages that are not only zeros, with their positions; the last may reach beyond the end of the file.
    pub(super) fn written(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.seen.0.iter().map(|(number, page)| (number * PAGE, &page[..]))
    }

    pub(super) fn write(&mut self, from: &[u8], position: u64, durable: bool) {
        if from.is_empty() {
            return;
        }
        let range = position..position + to_u64(from.len());
        self.seen.write(from, position);
        self.room.add(pages_of(&range));
        if range.end > self.len() {
            self.lens.push(range.end);
        }
        let written = self.first + to_u64(self.lens.len() - 1);
        self.dirty.extend(pages_of(&range).map(|page| (page, Dirty { written, forsaken: false })));
        if durable {
            self.make_durable(range);
        }
    }

    /// Makes exactly these bytes durable, and the length that reading them back needs.
    fn make_durable(&mut self, range: Range<u64>) {
        let last_too_short = self.lens.iter().rposition(|len| *len < range.end);
        self.commit_lens(last_too_short.map_or(0, |index| index + 1));
        self.durable.copy(&self.seen, range.start, to_usize(range.end - range.start));
        self.durable_room.add(pages_of(&range));
        for page in pages_of(&range) {
            if self.durable.get(page) == self.seen.get(page) {
                self.dirty.remove(&page);
            }
        }
    }

    /// Makes the first `count` pending changes of length durable.
    fn commit_lens(&mut self, count: usize) {
        if let Some(shortest) = self.lens[1..=count].iter().min() {
            self.durable.cut(*shortest);
            self.durable_room.cut(shortest.div_ceil(PAGE));
        }
        self.lens.drain(..count);
        self.first += to_u64(count);
    }

    pub(super) fn set_len(&mut self, len: u64) {
        if len == self.len() {
            return;
        }
        if len < self.len() {
            self.seen.cut(len);
            self.room.cut(len.div_ceil(PAGE));
            self.dirty.split_off(&len.div_ceil(PAGE));
        }
        self.lens.push(len);
    }

    pub(super) fn allocate(&mut self, range: Range<u64>) {
        self.room.add(pages_of(&range));
        if range.end > self.len() {
            self.lens.push(range.end);
        }
    }

    pub(super) fn sync(&mut self) {
        self.commit_lens(self.lens.len() - 1);
        for (number, dirty) in &self.dirty {
            if !dirty.forsaken {
                self.durable.set(*number, self.seen.0.get(number).cloned());
            }
        }
        self.dirty.retain(|_, dirty| dirty.forsaken);
        self.durable_room = self.room.clone();
    }

    /// A sync that failed: nothing of what is dirty will be written by a later one.
    pub(super) fn forsake(&mut self) {
        self.dirty.values_mut().for_each(|dirty| dirty.forsaken = true);
    }

    /// What a failed sync left in memory alone is gone from there too.
    pub(super) fn evict(&mut self, from: u64) {
        let first = from / to_u64(PAGE_BYTES);
        for (number, dirty) in self.dirty.range(first..) {
            if dirty.forsaken {
                self.seen.set(*number, self.durable.0.get(number).cloned());
            }
        }
        self.dirty.retain(|&number, dirty| number < first || !dirty.forsaken);
        self.seen.cut(self.len());
    }

    /// The power fails: `durable` and a part of the rest, by `keep` and `rng`, become all there is.
    pub(super) fn lose_power(&mut self, keep: Keep, rng: &mut Rng) {
        let last = self.lens.len() - 1;
        let chosen = if keep == Keep::Nothing { 0 } else { to_usize(rng.prefix(to_u64(last))) };
        let kept = self.pages_kept(chosen, keep, rng);
        let len = self.lens[chosen];
        let room = if chosen == last && keep != Keep::Nothing { Some(std::mem::take(&mut self.room)) } else { None };
        self.commit_lens(chosen);
        for (number, page) in &kept {
            self.durable.set(*number, Some(Arc::clone(page)));
        }
        self.durable.cut(len);
        let mut room = room.unwrap_or_else(|| std::mem::take(&mut self.durable_room));
        kept.iter().for_each(|(number, _)| room.add(*number..number + 1));
        room.cut(len.div_ceil(PAGE));
        let durable = std::mem::take(&mut self.durable);
        *self = Self { seen: durable.clone(), durable, lens: vec![len], room: room.clone(), durable_room: room, ..Self::default() };
    }

    /// Which dirty pages reached the device, where it knows the first `chosen` pending changes of length.
    fn pages_kept(&self, chosen: usize, keep: Keep, rng: &mut Rng) -> Vec<(u64, Page)> {
        let Keep::Some { torn } = keep else { return Vec::new() };
        let mode = rng.below(4);
        let mut kept = Vec::new();
        for (&number, dirty) in &self.dirty {
            // Written into the space of a truncation that the device does not know of: that space still holds the old bytes.
            let written = to_usize(dirty.written.saturating_sub(self.first));
            let space_is_new = self.lens.get(chosen + 1..=written).is_some_and(|lens| lens.iter().any(|len| *len <= number * PAGE));
            let lucky = match mode {
                0 => true,
                1 => false,
                _ => rng.coin(),
            };
            if !lucky || space_is_new {
                continue;
            }
            let mut page = *self.seen.get(number);
            if torn && rng.coin() {
                for sector in (0..PAGE_BYTES).step_by(SECTOR) {
                    if rng.coin() {
                        page[sector..sector + SECTOR].copy_from_slice(&self.durable.get(number)[sector..sector + SECTOR]);
                    }
                }
            }
            kept.push((number, Arc::new(page)));
        }
        kept
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// `Room` against a plain set of pages.
    #[test]
    fn room_is_a_set_of_pages() {
        let mut rng = Rng::new(7);
        for _ in 0..300 {
            let mut room = Room::default();
            let mut naive = BTreeSet::new();
            for _ in 0..12 {
                let start = rng.below(24);
                if rng.below(5) == 0 {
                    room.cut(start);
                    naive.retain(|page| *page < start);
                } else {
                    let end = start + rng.below(6);
                    room.add(start..end);
                    naive.extend(start..end);
                }
                assert!((0..40).all(|page| room.has(page) == naive.contains(&page)));
                assert_eq!(room.pages(), to_u64(naive.len()));
                assert!(room.0.iter().zip(room.0.keys().skip(1)).all(|((_, end), next)| end < next), "ranges touch: {room:?}");
            }
        }
    }

    /// Reads, writes and lengths against a plain vector.
    #[test]
    fn what_is_seen_is_a_plain_vector() {
        let mut rng = Rng::new(11);
        for _ in 0..60 {
            let mut content = Content::default();
            let mut naive: Vec<u8> = Vec::new();
            for step in 0..30_u8 {
                let at = to_usize(rng.below(4 * PAGE));
                match rng.below(5) {
                    0 => {
                        content.set_len(to_u64(at));
                        naive.resize(at, 0);
                    }
                    1 => {
                        content.allocate(to_u64(at)..to_u64(at) + 5000);
                        naive.resize(naive.len().max(at + 5000), 0);
                    }
                    2 => content.sync(),
                    _ => {
                        let bytes = vec![step; to_usize(rng.below(3 * PAGE))];
                        content.write(&bytes, to_u64(at), rng.coin());
                        if !bytes.is_empty() {
                            naive.resize(naive.len().max(at + bytes.len()), 0);
                            naive[at..at + bytes.len()].copy_from_slice(&bytes);
                        }
                    }
                }
                assert_eq!(content.bytes(), naive);
                let mut some = vec![0xEE; 3000];
                let read = content.read(&mut some, to_u64(at));
                assert_eq!(&some[..read], &naive[at.min(naive.len())..naive.len().min(at + 3000)]);
            }
            content.sync();
            assert_eq!(content.durable_bytes(), naive, "everything is durable after a sync");
            content.lose_power(Keep::Nothing, &mut rng);
            assert_eq!(content.bytes(), naive);
        }
    }

    /// What must survive any power loss, byte by byte, kept by plain rules.
    #[derive(Default)]
    struct Sure {
        bytes: Vec<Option<u8>>,
        /// The file is at least so long.
        len: usize,
    }

    impl Sure {
        fn wrote(&mut self, at: usize, bytes: &[u8], durable: bool) {
            let end = at + bytes.len();
            self.bytes.resize(self.bytes.len().max(end), None);
            for (sure, byte) in self.bytes[at..end].iter_mut().zip(bytes) {
                // Unsynced, either the old byte or the new one may survive.
                *sure = if durable || *sure == Some(*byte) { Some(*byte) } else { None };
            }
            if durable {
                self.len = self.len.max(end);
            }
        }

        fn cut(&mut self, len: usize) {
            self.len = self.len.min(len);
            self.bytes.iter_mut().skip(len).for_each(|sure| *sure = None);
        }

        fn synced(&mut self, seen: &[u8]) {
            self.bytes = seen.iter().copied().map(Some).collect();
            self.len = seen.len();
        }
    }

    /// Whatever the seed chooses: what is durable is there, the length is one that the file had, and no byte is invented.
    #[test]
    fn a_power_loss_keeps_what_is_durable_and_invents_nothing() {
        let mut steps = Rng::new(13);
        let mut partly_kept = 0;
        for seed in 0..600 {
            let mut content = Content::default();
            let mut sure = Sure::default();
            // All values that each byte had (a bit for each), and all lengths, since the beginning.
            let mut had = vec![1_u16; to_usize(8 * PAGE)];
            let mut lens = BTreeSet::from([0]);
            for step in 1..=10_u8 {
                let at = to_usize(steps.below(4 * PAGE));
                match steps.below(8) {
                    0 => {
                        content.set_len(to_u64(at));
                        sure.cut(at);
                    }
                    1 => content.allocate(to_u64(at)..to_u64(at) + 5000),
                    2 => {
                        content.sync();
                        sure.synced(&content.bytes());
                    }
                    kind => {
                        let bytes = vec![step; to_usize(1 + steps.below(3 * PAGE))];
                        content.write(&bytes, to_u64(at), kind == 3);
                        sure.wrote(at, &bytes, kind == 3);
                        had[at..at + bytes.len()].iter_mut().for_each(|had| *had |= 1 << step);
                    }
                }
                lens.insert(content.len());
            }
            let (seen, durable) = (content.bytes(), content.durable_bytes());
            let mut strict = content.clone();
            content.lose_power(Keep::Some { torn: seed % 2 == 0 }, &mut Rng::new(seed));
            strict.lose_power(Keep::Nothing, &mut Rng::new(seed));
            assert_eq!(strict.bytes(), durable);
            for after in [content, strict] {
                let bytes = after.bytes();
                assert!(lens.contains(&after.len()) && bytes.len() >= sure.len, "seed {seed}: length {}", after.len());
                for (at, byte) in bytes.iter().enumerate() {
                    assert!(had[at] & 1 << byte != 0, "seed {seed}: {byte} at {at} was never written");
                    let sure = sure.bytes.get(at).copied().flatten();
                    assert!(sure.is_none_or(|sure| sure == *byte), "seed {seed}: {byte} at {at} instead of {sure:?}");
                }
                partly_kept += usize::from(bytes != seen && bytes != durable);
                assert_eq!(after.durable_bytes(), bytes, "what survived is durable");
                let pages_with_data = to_u64(after.seen.0.len());
                assert!(after.room.pages() >= pages_with_data && after.room.pages() <= after.len().div_ceil(PAGE));
            }
        }
        assert!(partly_kept > 100, "the choices are hardly ever mixed: {partly_kept}");
    }
}
