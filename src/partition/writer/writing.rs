//! One commit on its way to the device, and what it is worth once it is there: readers see its records, waiters are answered.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::super::commit::{self, Commit, Lists, Waiter};
use super::super::queue::WORTH_WAKING;
use super::super::zeroing::Space;
use super::{COMMIT, InRing, Outgoing, Shares, Writer};
use crate::config::Durability;
use crate::error::{Error, Result};
use crate::guard::{self, Guard};
use crate::io::transfer::{self, Place, write_all_at, write_blocks_at};
use crate::io::{Action, BLOCK, Buffer};
use crate::record::{to_u64, to_usize};
use crate::segment::Kind;

impl Writer {
    /// Whether the open commit waits for nothing but the device.
    pub(super) fn open_is_due(&self) -> bool {
        let hurried = self.carried.is_some() || self.pending.is_some() || !self.syncs.is_empty();
        self.open.as_ref().is_some_and(|open| {
            hurried || open.bytes() >= self.shared.config.commit_bytes || self.clock.monotonic() >= open.since + self.linger()
        })
    }

    /// Whether there is enough to do during the next write to leave it to the ring: as much as came during the last one. A plain
    /// call is done sooner.
    fn has_something_to_do_meanwhile(&self) -> bool {
        self.came_meanwhile >= WORTH_WAKING
    }

    /// Whether the next write is left to a ring. A shared thread has more to do meanwhile than this writer knows.
    fn writes_by_ring(&mut self) -> bool {
        match &self.shares {
            None => self.has_something_to_do_meanwhile() && self.has_ring(),
            Some(Shares { company, .. }) => company.has_place && (company.is_there || self.has_something_to_do_meanwhile()),
        }
    }

    /// Whether there is a ring; one that is missing is made. What a ring does a plain call does as well: one that cannot be had is no
    /// error.
    fn has_ring(&mut self) -> bool {
        if self.ring.is_none() && self.may_use_ring {
            match InRing::make(&*self.shared.disk, self.memory.held(), &self.active.log) {
                Ok((mut ring, regions)) => {
                    if self.memory.holds_regions() {
                        self.memory.replace(&self.shared.recent, regions);
                    }
                    self.bell.set_ring(Some(ring.transfers.waker()));
                    self.ring = Some(ring);
                }
                Err(error) => {
                    tracing::warn!(%error, path = %self.shared.dir.display(), "no ring is to be had; writing by plain calls");
                    self.may_use_ring = false;
                }
            }
        }
        self.ring.is_some()
    }

    /// Starts the open commit's write if it is due and nothing is in its way.
    pub(super) fn launch(&mut self) -> Result<()> {
        if self.flight.is_some() || !self.open_is_due() {
            return Ok(());
        }
        let direct = self.active.direct;
        // Buffered writes through a ring go to kernel workers, at a multiple of the call's own cost.
        let by_ring = direct && self.writes_by_ring();
        if !by_ring {
            // They need not wait for the call.
            self.answer();
        }
        let Some(mut commit) = self.open.take() else { return Ok(()) };
        let zeros = self.zeros_behind(&commit);
        let space = match zeros {
            0 if commit.written_end(direct) <= self.active.zeroed => Space::Written,
            0 => Space::Unwritten,
            zeros => Space::WithZeros(zeros),
        };
        commit.launched = (self.clock.monotonic(), space);
        let (mut memory, range, position) = commit.launch(direct, to_usize(zeros), &mut self.last_block);
        if let commit::Memory::Buffer(buffer) = &mut memory {
            let unused = buffer.split_off(to_usize(to_u64(range.end).next_multiple_of(BLOCK)));
            self.memory.give_back(unused);
        }
        let durable = self.writes_durably();
        if !guard::stands(Guard::AnswersAfterWrites) {
            commit.lists.waiters.drain(..).for_each(|Waiter { answer, offsets }| answer.send(Ok(offsets)));
        }
        match memory {
            commit::Memory::Buffer(buffer) if by_ring => {
                self.flight = Some(commit);
                self.start(durable, position, buffer, range);
                Ok(())
            }
            memory => {
                let write = if direct { write_blocks_at } else { write_all_at };
                let result = write(&*self.active.log, &memory[range], position, durable);
                self.complete(commit, memory, result)
            }
        }
    }

    /// Has the ring write, the writer's own or its thread's.
    fn start(&mut self, durable: bool, position: u64, buffer: Buffer, range: Range<usize>) {
        if let Some(shares) = &mut self.shares {
            shares.outgoing = Some(Outgoing { log: Arc::clone(&self.active.log), durable, position, buffer, range });
        } else {
            let ring = self.ring.as_mut().expect("what is left to a ring has one");
            let place = Place { slot: ring.slot, position, direct: true };
            ring.transfers.start(COMMIT, Action::Write { durable }, place, buffer, range);
        }
    }

    fn writes_durably(&self) -> bool {
        self.shared.config.durability == Durability::Durable && guard::stands(Guard::DurableWrites)
    }

    /// Bytes of zeros that the commit takes along.
    fn zeros_behind(&self, commit: &Commit) -> u64 {
        if !self.active.takes_zeros() {
            return 0;
        }
        let zeros = self.zero_ahead.behind(commit.written_end(true), self.active.zeroed, self.active.allocated);
        let spare = to_u64(commit.spare());
        zeros.min(spare - spare % BLOCK)
    }

    pub(super) fn reap(&mut self) -> Result<()> {
        if let Some(transfer::Done { result, buffer, .. }) = self.shares.as_mut().and_then(|shares| shares.landed.take()) {
            let commit = self.flight.take().expect("only a commit in flight lands");
            self.complete(commit, commit::Memory::Buffer(buffer), result.map(|_| ()))?;
        }
        while let Some(ring) = &mut self.ring
            && let Some(transfer::Done { result, buffer, .. }) =
                ring.transfers.next().map_err(Error::io("reap completions of", &self.shared.dir))?
        {
            let commit = self.flight.take().expect("only a commit in flight completes");
            self.complete(commit, commit::Memory::Buffer(buffer), result.map(|_| ()))?;
        }
        Ok(())
    }

    /// Takes the end of a commit's write.
    fn complete(&mut self, commit: Commit, memory: commit::Memory, result: io::Result<()>) -> Result<()> {
        self.came_meanwhile = self.inbox.queued_bytes() + self.open.as_ref().map_or(0, Commit::bytes);
        match result {
            Err(error) if self.active.direct && error.kind() == io::ErrorKind::InvalidInput => {
                self.write_through_the_page_cache(&commit, &memory)
            }
            Err(_) if !guard::stands(Guard::FailedWritesStop) => Ok(()),
            // The path is made only where it is told.
            result => result.map_err(|error| Error::io("write", &self.active.segment.path(Kind::Log))(error)),
        }?;
        let place = (commit.written_start(), commit.start(), commit.end());
        let (begun, space) = commit.launched;
        let mut written_end = commit.end().next_multiple_of(BLOCK);
        match memory {
            commit::Memory::Buffer(mut buffer) if self.active.direct => {
                if let Space::WithZeros(zeros) = space {
                    let unused = buffer.split_off(to_usize(written_end - commit.written_start()));
                    self.memory.give_back(unused);
                    written_end += zeros;
                }
                self.memory.keep(&self.shared.recent, self.active.segment.base(), place, buffer);
            }
            // The page cache holds it.
            commit::Memory::Buffer(buffer) => self.memory.give_back(buffer),
            commit::Memory::Batch(batch) => self.inbox.give_back(batch),
        }
        self.last_use = self.clock.monotonic();
        self.rests = false;
        self.zero_ahead.commit(commit.bytes(), self.last_use.saturating_sub(begun), space);
        if commit.start() == 0 {
            self.age = Some((self.last_use, Duration::ZERO));
        }
        self.active.zeroed = self.active.zeroed.max(written_end);
        if self.under_way.names {
            self.finished.push_back(commit);
        } else {
            self.publish(commit);
        }
        Ok(())
    }

    /// Does the write again where it turns out that direct writes are refused, and goes on in that way.
    fn write_through_the_page_cache(&mut self, commit: &Commit, memory: &commit::Memory) -> Result<()> {
        self.active.go_through_the_page_cache(&self.shared)?;
        self.zero_ahead.stop();
        self.last_block.clear();
        let len = to_usize(commit.end() - commit.written_start());
        let written = write_all_at(&*self.active.log, &memory[..len], commit.written_start(), self.writes_durably());
        written.map_err(Error::io("write", &self.active.segment.path(Kind::Log)))
    }

    /// Lets readers see a commit, and owes its waiters their answers.
    pub(super) fn publish(&mut self, mut commit: Commit) {
        let segment = Arc::clone(&self.active.segment);
        let Lists { mut waiters, mut entries } = std::mem::take(&mut commit.lists);
        // Of what is in a later commit already none is older.
        segment.note_last_time(self.last_timestamp);
        segment.extend(commit.end(), &entries);
        self.shared.set_appended_end(commit.end_offset());
        if self.shared.config.durability == Durability::Durable {
            segment.set_durable(commit.end());
            self.shared.set_durable_end(commit.end_offset());
            self.note(commit.bytes());
        } else {
            let (bytes, since) = self.unsynced.unwrap_or_else(|| (0, self.clock.monotonic()));
            self.unsynced = Some((bytes + commit.bytes(), since));
        }
        self.shared.metrics.commit(commit.records(), commit.bytes());
        self.pending_entries += entries.len();
        if self.owes_first_entry && !entries.is_empty() {
            // A log with acknowledged records never stands beside an empty index.
            self.owes_first_entry = false;
            self.active.index.write(&*self.shared.disk, u64::MAX);
            self.pending_entries = segment.pending().len();
        }
        if self.pending_entries > 0 && self.index_since.is_none() {
            self.index_since = Some(self.clock.monotonic());
        }
        entries.clear();
        self.unanswered.append(&mut waiters);
        self.spare_lists.push(Lists { waiters, entries });
    }

    /// Answers who waits for records that were published, and then wakes who watches for them: producers wait for no consumer.
    pub(super) fn answer(&mut self) {
        match self.unanswered.len() {
            0 => {}
            // A dropped ticket is an append that nobody waits for.
            1 => self.unanswered.drain(..).for_each(|Waiter { answer, offsets }| answer.send(Ok(offsets))),
            _ => self.crowd.answer(self.unanswered.drain(..).map(|Waiter { answer, offsets }| (answer, Ok(offsets)))),
        }
        self.shared.tell_watchers();
    }
}
