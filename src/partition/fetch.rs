//! Pieces of a log in memory: read when they are needed, or asked for ahead.
//!
//! Each piece leaves room before its first byte, into which the beginning of a record is copied that the piece before it ended in. So
//! every record lies in one stretch of memory, and nothing else is ever copied.
//!
//! Invariants:
//! - A piece holds no byte behind the end that was visible when it was asked for.
//! - What was asked for ahead is of the log in order, without a gap; where the reader goes elsewhere, it is waited for and dropped.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use super::recent::Recent;
use crate::error::{Error, Result};
use crate::io::transfer::{Done, Place, Transfers, read_blocks_up_to_at, read_up_to_at};
use crate::io::{Action, BLOCK, Buffer, Disk, File, Open, RingConfig, Slot, Token};
use crate::record::{to_u64, to_usize};
use crate::segment::{Kind, Lookup, Segment, Times};

/// Logs attached to the ring at most: the one that is read, and the next.
const LOGS: u32 = 2;

/// A log that is read.
#[derive(Debug)]
pub(super) struct Log {
    pub(super) segment: Arc<Segment>,
    /// Through the page cache.
    pub(super) file: Arc<dyn File>,
    /// Past it, where that is wanted and possible.
    direct: Option<Arc<dyn File>>,
    /// The place of `direct` in the ring.
    slot: Option<Slot>,
    pub(super) lookup: Lookup,
    pub(super) times: Times,
    /// Where the segment behind it began when this one was opened. What stands from that offset on is not the log's: a sealed segment's end
    /// may be believed by its length alone. What a writer seals later ends where its records do.
    pub(super) next_base: Option<u64>,
}

/// Bytes of a log.
#[derive(Debug)]
pub(super) struct Piece {
    base: u64,
    /// Bytes `start..end` of the log are here.
    start: u64,
    end: u64,
    /// Where in the buffer the first one is.
    at: usize,
    buffer: Buffer,
}

impl Piece {
    /// One past the last byte of the log that is here.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// What is here of the log of that base, from byte `position` on.
    pub(super) fn bytes(&self, base: u64, position: u64) -> &[u8] {
        if self.base != base || position < self.start || position > self.end {
            return &[];
        }
        &self.buffer[self.at + to_usize(position - self.start)..self.at + to_usize(self.end - self.start)]
    }
}

#[derive(Debug)]
struct Asked {
    token: Token,
    base: u64,
    start: u64,
    /// One past the last byte wanted.
    end: u64,
    done: Option<Done>,
}

/// Reads pieces.
#[derive(Debug)]
pub(super) struct Fetcher {
    /// None where nothing is asked for ahead: a plain call is the fastest way to read what is needed now.
    ring: Option<Transfers>,
    free: Vec<Buffer>,
    asked: VecDeque<Asked>,
    last_token: u64,
    piece_bytes: usize,
    ahead: usize,
}

impl Fetcher {
    /// With `ahead` above 0, so many pieces are under way by a ring. Only direct reads go by it.
    pub(super) fn new(disk: &dyn Disk, piece_bytes: usize, ahead: usize) -> io::Result<Self> {
        let piece_bytes = to_usize(to_u64(piece_bytes.max(1)).next_multiple_of(BLOCK));
        // One is read from, one is made.
        let (count, buffer_bytes) = (ahead + 2, 2 * piece_bytes);
        let (ring, free) = if ahead == 0 {
            (None, Buffer::several(count, buffer_bytes)?)
        } else {
            let depth = u32::try_from(ahead).unwrap_or(u32::MAX);
            // A reader may move between threads, so the ring may not insist on one.
            let config = RingConfig { depth, files: LOGS, register_files: true, buffers: count, buffer_bytes, one_thread: false };
            let mut ring = Transfers::new(disk.ring(&config)?);
            let buffers = ring.take_buffers();
            (Some(ring), buffers)
        };
        Ok(Self { ring, free, asked: VecDeque::new(), last_token: 0, piece_bytes, ahead })
    }

    /// The most that a piece is asked to hold.
    pub(super) fn piece_bytes(&self) -> u64 {
        to_u64(self.piece_bytes)
    }

    /// Opens a log to be read.
    pub(super) fn open(
        &mut self,
        disk: &dyn Disk,
        segment: Arc<Segment>,
        interval: u32,
        next_base: Option<u64>,
        direct: bool,
    ) -> Result<Log> {
        let path = segment.path(Kind::Log);
        let file = segment.open_log(disk)?;
        let direct = direct.then(|| disk.open(&path, Open { direct: true, ..Open::READ })).and_then(|opened| {
            opened
                .inspect_err(
                    |error| tracing::debug!(%error, path = %path.display(), "no direct reads here; reading through the page cache"),
                )
                .ok()
        });
        let slot = match (&mut self.ring, &direct) {
            (Some(ring), Some(file)) => Some(ring.attach(Arc::clone(file)).map_err(Error::io("attach to the ring", &path))?),
            _ => None,
        };
        Ok(Log { segment, file, direct, slot, lookup: Lookup::new(interval), times: Times::default(), next_base })
    }

    /// Lets go of a log.
    pub(super) fn close(&mut self, log: &Log) -> Result<()> {
        if self.asked.iter().any(|asked| asked.base == log.segment.base()) {
            self.drop_asked(log)?;
        }
        if let (Some(ring), Some(slot)) = (&mut self.ring, log.slot) {
            ring.detach(slot);
        }
        Ok(())
    }

    /// Gives a piece with bytes from `position` on: those that `before` has of them, and behind these at least one more, if there is one
    /// before `end`; as many as `wanted` where nothing was asked for ahead.
    pub(super) fn fetch(
        &mut self,
        log: &Log,
        recent: &Recent,
        before: Option<Piece>,
        position: u64,
        wanted: u64,
        end: u64,
    ) -> Result<Piece> {
        let base = log.segment.base();
        let carried = before.as_ref().map_or(0, |before| before.bytes(base, position).len());
        let from = position + to_u64(carried);
        let read = self.read(log, recent, from, wanted.clamp(1, self.piece_bytes()).min(end - from), end);
        let mut piece = match read {
            Ok(piece) => piece,
            Err(error) => {
                before.into_iter().for_each(|before| self.give_back(before));
                return Err(error);
            }
        };
        if let Some(before) = before {
            let at = piece.at + to_usize(from - piece.start) - carried;
            piece.buffer[at..at + carried].copy_from_slice(before.bytes(base, position));
            (piece.start, piece.at) = (position, at);
            self.give_back(before);
        } else {
            piece.at += to_usize(from - piece.start);
            piece.start = from;
        }
        Ok(piece)
    }

    /// A piece with the byte `from`, and with room before it.
    fn read(&mut self, log: &Log, recent: &Recent, from: u64, wanted: u64, end: u64) -> Result<Piece> {
        let base = log.segment.base();
        // The end of the log is in memory still, where a consumer that keeps up finds it.
        let mut buffer = self.take_buffer(log)?;
        let room = self.piece_bytes;
        // Bytes stand as far behind the start of a page here as in the page cache, or some processors copy at a quarter of their speed
        // (perf/README.md has the figures); and pieces that follow begin with a page.
        let within = from % BLOCK;
        let wanted = wanted.min(self.piece_bytes() - within);
        let at = room + to_usize(within);
        let into = &mut buffer[at..at + to_usize(wanted)];
        let copied = recent.read(base, from, into);
        if copied > 0 {
            return Ok(Piece { base, start: from, end: from + to_u64(copied), at, buffer });
        }
        if self.asked.front().is_some_and(|asked| asked.base == base && (asked.start..asked.end).contains(&from)) {
            self.take_back(buffer);
            let asked = self.wait_for_first(log)?;
            return self.piece_of(log, asked, from);
        }
        // What was asked for of elsewhere would stand before all that is asked for from here on.
        if let Err(error) = self.drop_asked(log) {
            self.take_back(buffer);
            return Err(error);
        }
        let (read, start, at) = match &log.direct {
            Some(file) => {
                let len = to_usize((within + wanted).next_multiple_of(BLOCK));
                (read_blocks_up_to_at(&**file, &mut buffer[room..room + len], from - within), from - within, room)
            }
            None => (read_up_to_at(&*log.file, &mut buffer[at..at + to_usize(wanted)], from), from, at),
        };
        let there = match read.and_then(|read| beyond(from, start + to_u64(read))) {
            Ok(there) => there,
            Err(error) => {
                self.take_back(buffer);
                return Err(Error::io("read", &log.segment.path(Kind::Log))(error));
            }
        };
        Ok(Piece { base, start, end: there.min(end), at, buffer })
    }

    fn piece_of(&mut self, log: &Log, asked: Asked, from: u64) -> Result<Piece> {
        let Done { result, buffer, .. } = asked.done.expect("it was waited for");
        match result.and_then(|read| beyond(from, asked.start + to_u64(read))) {
            Ok(there) => Ok(Piece { base: asked.base, start: asked.start, end: there.min(asked.end), at: self.piece_bytes, buffer }),
            Err(error) => {
                self.take_back(buffer);
                self.drop_asked(log)?;
                tracing::debug!(from, "a read ahead failed");
                Err(Error::io("read", &log.segment.path(Kind::Log))(error))
            }
        }
    }

    /// Asks for what follows byte `from` of a log, as far as `end`. What was asked for already is not asked for again.
    pub(super) fn ask_ahead(&mut self, log: &Log, from: u64, end: u64) {
        let (Some(ring), Some(slot)) = (&mut self.ring, log.slot) else { return };
        let base = log.segment.base();
        let mut start = asked_to(&self.asked, base, from);
        while self.asked.len() < self.ahead && start < end {
            let Some(buffer) = self.free.pop() else { return };
            self.last_token += 1;
            let token = Token(self.last_token);
            let aligned = start - start % BLOCK;
            let len = self.piece_bytes.min(to_usize((end - aligned).next_multiple_of(BLOCK)));
            ring.start(
                token,
                Action::Read,
                Place { slot, position: aligned, direct: true },
                buffer,
                self.piece_bytes..self.piece_bytes + len,
            );
            let asked = Asked { token, base, start: aligned, end: end.min(aligned + to_u64(len)), done: None };
            start = asked.end;
            self.asked.push_back(asked);
        }
    }

    /// Whether all of the log up to `end` was asked for, and more may be.
    pub(super) fn may_ask_beyond(&self, log: &Log, from: u64, end: u64) -> bool {
        log.slot.is_some() && asked_to(&self.asked, log.segment.base(), from) >= end && self.asked.len() < self.ahead
    }

    fn take_buffer(&mut self, log: &Log) -> Result<Buffer> {
        if self.free.is_empty() {
            self.drop_asked(log)?;
        }
        match self.free.pop() {
            Some(buffer) => Ok(buffer),
            None => Buffer::new(2 * self.piece_bytes).map_err(Error::io("find memory to read", &log.segment.path(Kind::Log))),
        }
    }

    /// The memory of a piece that is read no more.
    pub(super) fn give_back(&mut self, piece: Piece) {
        self.take_back(piece.buffer);
    }

    /// A record larger than the others' memory had its own, and a ring that fails may keep a buffer and give another one back.
    fn take_back(&mut self, buffer: Buffer) {
        if buffer.len() == 2 * self.piece_bytes {
            self.free.push(buffer);
        }
    }

    fn wait_for_first(&mut self, log: &Log) -> Result<Asked> {
        let ring = self.ring.as_mut().expect("something was asked for");
        let failed = |error| Error::io("wait for reads of", &log.segment.path(Kind::Log))(error);
        while self.asked.front().is_some_and(|asked| asked.done.is_none()) {
            match ring.next().map_err(failed)? {
                Some(done) => {
                    if let Some(asked) = self.asked.iter_mut().find(|asked| asked.token == done.token) {
                        asked.done = Some(done);
                    }
                }
                None => ring.wait(None).map_err(failed)?,
            }
        }
        Ok(self.asked.pop_front().expect("something was asked for"))
    }

    /// Waits for all that is under way, and forgets it.
    pub(super) fn drop_asked(&mut self, log: &Log) -> Result<()> {
        while !self.asked.is_empty() {
            let asked = self.wait_for_first(log)?;
            asked.done.into_iter().for_each(|done| self.take_back(done.buffer));
        }
        Ok(())
    }

    /// Reads a record of `bytes` bytes, which no piece could hold, into memory of its own.
    pub(super) fn fetch_large(&mut self, log: &Log, before: Option<Piece>, position: u64, bytes: u64, end: u64) -> Result<Piece> {
        let path = log.segment.path(Kind::Log);
        let start = position - position % BLOCK;
        let len = to_usize((position + bytes).next_multiple_of(BLOCK) - start);
        let reusable = |before: &Piece| before.buffer.len() >= len && before.buffer.len() != 2 * self.piece_bytes;
        let mut buffer = match before {
            Some(before) if reusable(&before) => before.buffer,
            before => {
                if let Some(before) = before {
                    self.give_back(before);
                }
                Buffer::new(len).map_err(Error::io("find memory to read", &path))?
            }
        };
        let read = match &log.direct {
            Some(file) => read_blocks_up_to_at(&**file, &mut buffer[..len], start),
            None => read_up_to_at(&*log.file, &mut buffer[..len], start),
        };
        let there = start + to_u64(read.map_err(Error::io("read", &path))?);
        if there < position + bytes {
            return Err(Error::io("read", &path)(io::ErrorKind::UnexpectedEof.into()));
        }
        Ok(Piece { base: log.segment.base(), start, end: there.min(end), at: 0, buffer })
    }
}

/// Records that were there are gone where somebody cut the file: what is left of them counts, if it is any.
fn beyond(from: u64, there: u64) -> io::Result<u64> {
    if there > from { Ok(there) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// How far the log of that base was asked for, which is wanted from byte `from` on.
fn asked_to(asked: &VecDeque<Asked>, base: u64, from: u64) -> u64 {
    asked.iter().rev().find(|asked| asked.base == base).map_or(from, |asked| asked.end)
}
