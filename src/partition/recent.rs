//! The most recent commits, readable from the memory that they were written from: a consumer at the end of the log costs
//! no read of the disk.
//!
//! The writer carves each commit's buffer out of [`Memory`], of which the kernel knows every page already; when the commit is
//! on the device, its buffer joins [`Recent`], and leaves it, oldest first, when the writer needs the room. Readers copy out
//! of it; a buffer that one of them holds just then is passed over, so neither ever waits for the other.
//!
//! A partition holds its regions while it is busy: from its second commit on, if the broker's [`BufferBudget`] grants them, until it
//! rests. A commit without them has memory of its own, which goes with it, and readers find its records on the disk.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, PoisonError};

use super::budget::{BufferBudget, Grant};
use crate::io::Buffer;
use crate::record::{to_u64, to_usize};
use crate::sync::{Mutex, MutexGuard};

/// Commits in memory, oldest first.
#[derive(Debug, Default)]
pub(super) struct Recent {
    commits: Mutex<VecDeque<Written>>,
}

/// A commit whose write ended: its records lie in bytes `start..end` of the log of the segment `base`.
#[derive(Debug, Clone)]
struct Written {
    base: u64,
    start: u64,
    end: u64,
    /// Its first byte is byte `at` of the log.
    buffer: Arc<Buffer>,
    at: u64,
}

impl Recent {
    fn commits(&self) -> MutexGuard<'_, VecDeque<Written>> {
        // Entries are added and removed whole.
        self.commits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies bytes of the segment `base` from `position` on, and tells how many: all of `into`, or as far as they are
    /// here without a gap; 0 if the first is not.
    pub(super) fn read(&self, base: u64, position: u64, into: &mut [u8]) -> usize {
        let mut copied = 0;
        while copied < into.len() {
            let wanted = position + to_u64(copied);
            let found = {
                let commits = self.commits();
                let index = commits.partition_point(|commit| (commit.base, commit.end) <= (base, wanted));
                commits.get(index).filter(|commit| commit.base == base && commit.start <= wanted).cloned()
            };
            // Copied without the lock: the writer publishes meanwhile.
            let Some(Written { end, buffer, at, .. }) = found else { break };
            let len = to_usize(end - wanted).min(into.len() - copied);
            let from = to_usize(wanted - at);
            into[copied..copied + len].copy_from_slice(&buffer[from..from + len]);
            copied += len;
        }
        copied
    }
}

/// The writer's memory: a few regions, carved into commits and put together again.
#[derive(Debug)]
pub(super) struct Memory {
    budget: Arc<BufferBudget>,
    /// How many regions of how many bytes are held while the partition is busy.
    regions: usize,
    region_bytes: usize,
    /// There while they are held.
    grant: Option<Grant>,
    /// Whether there was a commit since the last rest.
    was_used: bool,
    /// What no commit uses, no two of them neighbours.
    free: Vec<Buffer>,
    /// Left [`Recent`], but a reader was just copying.
    lent: Vec<Arc<Buffer>>,
    /// Empty ones, for their counters' memory.
    shells: Vec<Arc<Buffer>>,
    /// Nothing of the regions' memory: tells buffers that were cut from it from others.
    relative: Option<Buffer>,
}

impl Memory {
    /// Carves from so many regions of so many bytes, once it is busy. With two or fewer, which the commits need themselves, nothing is kept
    /// for readers.
    pub(super) fn new(budget: Arc<BufferBudget>, regions: usize, region_bytes: usize) -> Self {
        let (free, lent, shells) = (Vec::new(), Vec::new(), Vec::new());
        Self { budget, regions, region_bytes, grant: None, was_used: false, free, lent, shells, relative: None }
    }

    /// A buffer of at least `needed` bytes, better `wanted`; what is not used of it comes back by [`Self::give_back`].
    ///
    /// # Errors
    /// What the system says to memory for a record that is larger than the regions, or for a commit while none are held.
    pub(super) fn take(&mut self, recent: &Recent, needed: usize, wanted: usize) -> io::Result<Buffer> {
        if std::mem::replace(&mut self.was_used, true) && !self.holds_regions() {
            self.hold();
        }
        let wanted = wanted.clamp(needed, self.region_bytes.max(needed));
        while self.holds_regions() && needed <= self.region_bytes {
            if let Some(index) = self.free.iter().position(|region| region.len() >= wanted) {
                return Ok(self.free.swap_remove(index));
            }
            let Some(oldest) = recent.commits().pop_front() else { break };
            self.lent.push(oldest.buffer);
            self.reclaim();
        }
        let largest = (0..self.free.len()).max_by_key(|&index| self.free[index].len());
        match largest.filter(|&index| self.free[index].len() >= needed) {
            Some(index) => Ok(self.free.swap_remove(index)),
            None => Buffer::new(wanted),
        }
    }

    pub(super) fn holds_regions(&self) -> bool {
        self.grant.is_some()
    }

    /// How many regions of how many bytes it holds.
    pub(super) fn held(&self) -> (usize, usize) {
        (if self.holds_regions() { self.regions } else { 0 }, self.region_bytes)
    }

    /// Takes regions, if there are any to be had.
    fn hold(&mut self) {
        let bytes = to_u64(self.regions).saturating_mul(to_u64(self.region_bytes));
        let Some(grant) = self.budget.take(bytes) else { return };
        match Buffer::several(self.regions, self.region_bytes) {
            Ok(regions) => {
                self.carve_from(regions);
                self.grant = Some(grant);
            }
            Err(error) => tracing::debug!(%error, bytes, "no memory for the commits to come and the end of the log"),
        }
    }

    fn carve_from(&mut self, mut regions: Vec<Buffer>) {
        self.relative = regions.last_mut().map(|region| region.split_off(region.len()));
        self.free = regions;
    }

    /// Goes on with other regions, as many and as large, in the place of those held. What commits still use of these goes with the commits.
    pub(super) fn replace(&mut self, recent: &Recent, regions: Vec<Buffer>) {
        self.let_go(recent);
        self.carve_from(regions);
    }

    /// Gives the regions back. Readers find on the disk what was in them.
    pub(super) fn rest(&mut self, recent: &Recent) {
        self.let_go(recent);
        self.grant = None;
        self.was_used = false;
    }

    fn let_go(&mut self, recent: &Recent) {
        // What a reader copies from just now it holds itself. Nothing is unmapped under the lock.
        let commits = std::mem::take(&mut *recent.commits());
        drop(commits);
        (self.free, self.lent, self.shells, self.relative) = (Vec::new(), Vec::new(), Vec::new(), None);
    }

    fn is_ours(&self, buffer: &Buffer) -> bool {
        self.relative.as_ref().is_some_and(|relative| relative.is_relative_of(buffer))
    }

    /// Takes a buffer, or a piece of one, that no commit needs.
    pub(super) fn give_back(&mut self, mut buffer: Buffer) {
        if buffer.is_empty() || !self.is_ours(&buffer) {
            return;
        }
        // It has at most two neighbours.
        let mut index = 0;
        while index < self.free.len() {
            let region = self.free.swap_remove(index);
            match join(buffer, region) {
                Ok(joined) => {
                    buffer = joined;
                    index = 0;
                }
                Err((unjoined, region)) => {
                    buffer = unjoined;
                    let last = self.free.len();
                    self.free.push(region);
                    self.free.swap(index, last);
                    index += 1;
                }
            }
        }
        self.free.push(buffer);
    }

    /// Makes a commit readable, whose records lie in bytes `start..end` of the log of the segment `base`, and whose buffer
    /// begins at byte `at`.
    pub(super) fn keep(&mut self, recent: &Recent, base: u64, (at, start, end): (u64, u64, u64), buffer: Buffer) {
        if self.regions > 2 && self.is_ours(&buffer) {
            let buffer = match self.shells.pop() {
                Some(mut shell) => {
                    *Arc::get_mut(&mut shell).expect("only the pool holds a shell") = buffer;
                    shell
                }
                None => Arc::new(buffer),
            };
            recent.commits().push_back(Written { base, start, end, buffer, at });
        } else {
            self.give_back(buffer);
        }
    }

    /// Keeps nothing for readers any more: what is here is not the log's.
    pub(super) fn forget(&mut self, recent: &Recent) {
        let forgotten = std::mem::take(&mut *recent.commits());
        self.lent.extend(forgotten.into_iter().map(|written| written.buffer));
        self.reclaim();
    }

    /// Takes back what readers have let go of.
    fn reclaim(&mut self) {
        let mut index = 0;
        while index < self.lent.len() {
            match Arc::get_mut(&mut self.lent[index]) {
                Some(buffer) => {
                    let whole = buffer.split_off(0);
                    let shell = self.lent.swap_remove(index);
                    self.shells.push(shell);
                    self.give_back(whole);
                }
                None => index += 1,
            }
        }
    }
}

/// The two as one, if they are neighbours in either order.
fn join(mut a: Buffer, mut b: Buffer) -> Result<Buffer, (Buffer, Buffer)> {
    match a.join(b) {
        Ok(()) => return Ok(a),
        Err(back) => b = back,
    }
    match b.join(a) {
        Ok(()) => Ok(b),
        Err(a) => Err((a, b)),
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;

    const REGION: usize = 64 << 10;

    /// That of a partition that is busy.
    fn memory(regions: usize) -> Memory {
        let mut memory = Memory::new(BufferBudget::new(1 << 30), regions, REGION);
        memory.hold();
        memory
    }

    fn free(memory: &Memory) -> usize {
        memory.free.iter().map(|region| region.len()).sum()
    }

    /// Commits the bytes `start..end` of an endless pattern, with the block that they begin in.
    fn commit(memory: &mut Memory, recent: &Recent, base: u64, start: u64, end: u64) {
        let at = start - start % 4096;
        let len = to_usize((end - at).next_multiple_of(4096));
        let mut buffer = memory.take(recent, len, len).unwrap();
        let rest = buffer.split_off(len);
        memory.give_back(rest);
        buffer.copy_from_slice(&pattern(at..at + to_u64(len)));
        memory.keep(recent, base, (at, start, end), buffer);
    }

    fn pattern(positions: Range<u64>) -> Vec<u8> {
        let cycle: Vec<u8> = (0..251).collect();
        let (skip, len) = (to_usize(positions.start % 251), to_usize(positions.end - positions.start));
        cycle.repeat(len / 251 + 2)[skip..skip + len].to_vec()
    }

    #[test]
    fn the_newest_bytes_are_there_and_are_right() {
        let (mut memory, recent) = (memory(4), Recent::default());
        let mut end = 0;
        let commits: u64 = if cfg!(miri) { 100 } else { 4000 };
        for size in (0..commits).map(|number| 1 + number * 7919 % 9000) {
            commit(&mut memory, &recent, 5, end, end + size);
            end += size;
            let mut into = vec![0; to_usize(size)];
            assert_eq!(recent.read(5, end - size, &mut into), into.len());
            assert!(into == pattern(end - size..end));
        }
        let oldest = recent.commits().front().unwrap().start;
        assert!(end - oldest > to_u64(REGION), "{} bytes are kept", end - oldest);
        let mut all = vec![0; to_usize(end - oldest)];
        assert_eq!(recent.read(5, oldest, &mut all), all.len());
        assert!(all == pattern(oldest..end));
        assert_eq!((recent.read(5, end, &mut [0]), recent.read(5, oldest - 1, &mut [0]), recent.read(4, oldest, &mut [0])), (0, 0, 0));
        assert_eq!(recent.read(5, end - 10, &mut [0; 20]), 10);
        // Nothing was lost on the way: all memory comes together again.
        while let Some(oldest) = recent.commits().pop_front() {
            memory.lent.push(oldest.buffer);
        }
        memory.reclaim();
        assert_eq!(free(&memory), 4 * REGION);
    }

    #[test]
    fn what_is_forgotten_is_not_read_and_its_memory_is_there_again() {
        let (mut memory, recent) = (memory(3), Recent::default());
        commit(&mut memory, &recent, 0, 0, 100);
        commit(&mut memory, &recent, 0, 100, 200);
        let held = recent.commits().front().unwrap().clone();
        memory.forget(&recent);
        assert_eq!(recent.read(0, 0, &mut [0]), 0);
        assert!(free(&memory) < 3 * REGION, "a reader holds some of it");
        drop(held);
        memory.forget(&recent);
        assert_eq!(free(&memory), 3 * REGION);
    }

    #[test]
    fn segments_do_not_answer_for_each_other() {
        let (mut memory, recent) = (memory(3), Recent::default());
        commit(&mut memory, &recent, 0, 0, 100);
        commit(&mut memory, &recent, 0, 100, 200);
        commit(&mut memory, &recent, 7, 0, 50);
        let mut into = [0; 300];
        assert_eq!((recent.read(0, 150, &mut into), recent.read(7, 0, &mut into), recent.read(7, 60, &mut into)), (50, 50, 0));
    }

    #[test]
    fn a_reader_that_holds_a_buffer_stops_nobody() {
        let (mut memory, recent) = (memory(3), Recent::default());
        commit(&mut memory, &recent, 0, 0, 60_000);
        let held = recent.commits().front().unwrap().clone();
        for number in 1..100_u64 {
            commit(&mut memory, &recent, 0, number * 61_440, number * 61_440 + 60_000);
            assert!(held.buffer[..60_000] == pattern(0..60_000), "overwritten under a reader");
        }
        drop(held);
        memory.reclaim();
        assert!(memory.lent.is_empty());
    }

    #[test]
    fn what_is_larger_than_the_regions_gets_memory_of_its_own_and_is_not_kept() {
        let (mut memory, recent) = (memory(3), Recent::default());
        commit(&mut memory, &recent, 0, 0, 1 << 20);
        assert_eq!((recent.read(0, 0, &mut [0]), free(&memory)), (0, 3 * REGION));
    }

    #[test]
    fn regions_are_held_from_the_second_commit_until_the_rest_and_within_the_budget() {
        let budget = BufferBudget::new(3 * to_u64(REGION));
        let make = || Memory::new(Arc::clone(&budget), 3, REGION);
        let (mut memory, mut other, recent) = (make(), make(), Recent::default());
        commit(&mut memory, &recent, 0, 0, 100);
        assert_eq!((memory.held().0, recent.read(0, 0, &mut [0])), (0, 0));
        commit(&mut memory, &recent, 0, 100, 200);
        assert_eq!((memory.held().0, recent.read(0, 100, &mut [0; 200])), (3, 100));
        // Nothing is left for a second one, which works without.
        for number in 0..3 {
            commit(&mut other, &recent, 7, number, number + 1);
            assert_eq!((other.held().0, recent.read(7, number, &mut [0])), (0, 0));
        }
        let held = recent.commits().front().unwrap().clone();
        memory.rest(&recent);
        assert_eq!((memory.held().0, free(&memory), recent.read(0, 100, &mut [0])), (0, 0, 0));
        assert!(held.buffer[100..200] == pattern(100..200), "a reader keeps what it holds");
        commit(&mut other, &recent, 7, 3, 4);
        assert_eq!((other.held().0, recent.read(7, 3, &mut [0])), (3, 1));
        commit(&mut memory, &recent, 0, 200, 300);
        commit(&mut memory, &recent, 0, 300, 400);
        assert_eq!(memory.held().0, 0);
    }

    #[test]
    fn regions_that_are_replaced_take_what_comes_next() {
        let (mut memory, recent) = (memory(3), Recent::default());
        commit(&mut memory, &recent, 0, 0, 100);
        let in_use = memory.take(&recent, 100, 100).unwrap();
        memory.replace(&recent, Buffer::several(3, REGION).unwrap());
        memory.give_back(in_use);
        assert_eq!((free(&memory), recent.read(0, 0, &mut [0])), (3 * REGION, 0));
        commit(&mut memory, &recent, 0, 100, 200);
        assert_eq!(recent.read(0, 100, &mut [0; 200]), 100);
    }

    #[test]
    fn with_two_regions_nothing_is_kept() {
        let (mut memory, recent) = (memory(2), Recent::default());
        commit(&mut memory, &recent, 0, 0, 100);
        assert_eq!((recent.read(0, 0, &mut [0]), free(&memory)), (0, 2 * REGION));
    }
}
