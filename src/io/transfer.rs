//! Transfers that are whole or failed: the one place where short counts, `EINTR` and `EAGAIN` are resumed.
//!
//! [`read_exact_at`], [`read_up_to_at`] and [`write_all_at`] do it for a [`File`]'s blocking calls, [`Transfers`] for a [`Ring`].

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::{Action, BLOCK, Buffer, Completion, File, MAX_TRANSFER, Op, Ring, Slot, Token, Waker};

/// How often in a row one transfer may be resumed without having come further before that is an error.
const MAX_STALLS: u32 = 10_000;

/// Reads until `into` is full; `UnexpectedEof` if the file ends first.
pub fn read_exact_at(file: &dyn File, into: &mut [u8], position: u64) -> io::Result<()> {
    if read_up_to_at(file, into, position)? == into.len() { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// Reads until `into` is full or the file ends, and tells how much that was. Not for files opened for direct I/O, whose end
/// need not be a block's.
pub fn read_up_to_at(file: &dyn File, into: &mut [u8], position: u64) -> io::Result<usize> {
    read_pieces_at(file, into, position, 1)
}

fn read_pieces_at(file: &dyn File, into: &mut [u8], position: u64, align: usize) -> io::Result<usize> {
    let mut progress = Progress::new(Action::Read, into.len(), align);
    while !progress.piece().is_empty() {
        let result = file.read_at(&mut into[progress.piece()], position + to_u64(progress.done));
        if let Next::End = progress.advance(result)? {
            break;
        }
    }
    progress.outcome(Action::Read)
}

/// [`read_up_to_at`] for files opened for direct I/O: whole blocks, in aligned memory.
pub fn read_blocks_up_to_at(file: &dyn File, into: &mut [u8], position: u64) -> io::Result<usize> {
    read_pieces_at(file, into, position, usize::try_from(BLOCK).expect("usize is 64 bits wide"))
}

/// Writes all of `from`, each piece durable where asked. Not for files opened for direct I/O: see [`write_blocks_at`].
pub fn write_all_at(file: &dyn File, from: &[u8], position: u64, durable: bool) -> io::Result<()> {
    write_pieces_at(file, from, position, durable, 1)
}

/// Writes all of `from`, whole blocks, each piece durable where asked: what a short direct write leaves of a block is repeated.
pub fn write_blocks_at(file: &dyn File, from: &[u8], position: u64, durable: bool) -> io::Result<()> {
    write_pieces_at(file, from, position, durable, usize::try_from(BLOCK).expect("usize is 64 bits wide"))
}

fn write_pieces_at(file: &dyn File, from: &[u8], position: u64, durable: bool, align: usize) -> io::Result<()> {
    let mut progress = Progress::new(Action::Write { durable }, from.len(), align);
    while !progress.piece().is_empty() {
        let result = file.write_at(&from[progress.piece()], position + to_u64(progress.done), durable);
        if let Next::End = progress.advance(result)? {
            break;
        }
    }
    progress.outcome(Action::Write { durable }).map(|_| ())
}

/// How far one transfer came.
#[derive(Debug)]
struct Progress {
    done: usize,
    /// Bytes needed.
    len: usize,
    /// Resumed only at multiples of this, for direct transfers.
    align: usize,
    /// Where a read ended inside a block the last time. Ending there twice, it is at the end of the file.
    broken_at: Option<usize>,
    reads: bool,
    stalls: u32,
}

/// What a call's result means for its transfer.
enum Next {
    Resume,
    /// Complete, or at the end of the file.
    End,
}

impl Progress {
    fn new(action: Action, len: usize, align: usize) -> Self {
        Self { done: 0, len, align, broken_at: None, reads: action == Action::Read, stalls: 0 }
    }

    /// Takes one call's result in.
    fn advance(&mut self, result: io::Result<usize>) -> io::Result<Next> {
        let before = self.done;
        match result {
            Ok(0) => return Ok(Next::End),
            Ok(moved) => self.done += moved,
            Err(error) if is_interruption(&error) && self.stalls < MAX_STALLS => {}
            Err(error) => return Err(error),
        }
        if self.done >= self.len {
            return Ok(Next::End);
        }
        // A short direct transfer that ended inside a block repeats that block.
        let inside = self.done % self.align;
        if inside > 0 {
            if self.reads && self.broken_at.replace(self.done) == Some(self.done) {
                return Ok(Next::End);
            }
            self.done -= inside;
        }
        self.stalls = if self.done > before { 0 } else { self.stalls + 1 };
        if self.stalls > MAX_STALLS { Err(io::ErrorKind::TimedOut.into()) } else { Ok(Next::Resume) }
    }

    /// The bytes that the next call moves at most.
    fn piece(&self) -> Range<usize> {
        self.done..self.len.min(self.done + MAX_TRANSFER)
    }

    /// The outcome once no call is to follow. Only a read may end early.
    fn outcome(&self, action: Action) -> io::Result<usize> {
        match action {
            Action::Write { .. } if self.done < self.len => Err(io::ErrorKind::WriteZero.into()),
            _ => Ok(self.done),
        }
    }
}

fn is_interruption(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
}

/// A transfer that ended.
#[derive(Debug)]
pub struct Done {
    /// As started.
    pub token: Token,
    /// Bytes moved: all of them, except for a read that met the end of the file.
    pub result: io::Result<usize>,
    /// Given back.
    pub buffer: Buffer,
}

/// A [`Ring`] whose operations are whole or failed.
#[derive(Debug)]
pub struct Transfers {
    ring: Box<dyn Ring>,
    under_way: Vec<UnderWay>,
    /// Ended without having been started.
    rejected: Vec<Done>,
}

#[derive(Debug)]
struct UnderWay {
    token: Token,
    action: Action,
    slot: Slot,
    position: u64,
    /// Where in the buffer.
    start: usize,
    progress: Progress,
}

impl Transfers {
    /// Takes the ring over.
    pub fn new(ring: Box<dyn Ring>) -> Self {
        Self { ring, under_way: Vec::new(), rejected: Vec::new() }
    }

    /// See [`Ring::take_buffers`].
    pub fn take_buffers(&mut self) -> Vec<Buffer> {
        self.ring.take_buffers()
    }

    /// See [`Ring::attach`].
    pub fn attach(&mut self, file: Arc<dyn File>) -> io::Result<Slot> {
        self.ring.attach(file)
    }

    /// See [`Ring::detach`].
    pub fn detach(&mut self, slot: Slot) {
        self.ring.detach(slot);
    }

    /// See [`Ring::wait`].
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        if self.rejected.is_empty() { self.ring.wait(timeout) } else { Ok(()) }
    }

    /// See [`Ring::waker`].
    pub fn waker(&mut self) -> Waker {
        self.ring.waker()
    }

    /// Starts a transfer of `buffer[range]`. With `direct`, position and range are whole blocks.
    ///
    /// It always ends in [`Self::next`], also where it could not be started.
    pub fn start(&mut self, token: Token, action: Action, at: Place, buffer: Buffer, range: Range<usize>) {
        let align = if at.direct { usize::try_from(BLOCK).expect("usize is 64 bits wide") } else { 1 };
        let progress = Progress::new(action, range.len(), align);
        self.submit(UnderWay { token, action, slot: at.slot, position: at.position, start: range.start, progress }, buffer);
    }

    fn submit(&mut self, transfer: UnderWay, buffer: Buffer) {
        let Range { start, end } = transfer.progress.piece();
        let range = transfer.start + start..transfer.start + end;
        let position = transfer.position + to_u64(start);
        let token = transfer.token;
        match self.ring.submit(token, Op { action: transfer.action, slot: transfer.slot, position, buffer, range }) {
            Ok(()) => self.under_way.push(transfer),
            Err(rejected) => self.rejected.push(Done { token, result: Err(rejected.error), buffer: rejected.buffer }),
        }
    }

    /// The next transfer that ended, if one did. Never blocks.
    #[allow(clippy::should_implement_trait, reason = "it can fail, and an end is not for ever: no iterator")]
    pub fn next(&mut self) -> io::Result<Option<Done>> {
        loop {
            if let Some(done) = self.rejected.pop() {
                return Ok(Some(done));
            }
            let Some(completion) = self.ring.reap()? else { return Ok(None) };
            if let Some(done) = self.complete(completion) {
                return Ok(Some(done));
            }
        }
    }

    /// Waits for the transfer `token`. No other may be in flight.
    #[cfg(any(test, feature = "sim"))]
    pub fn finish(&mut self, token: Token) -> io::Result<Done> {
        loop {
            if let Some(done) = self.next()? {
                assert_eq!(done.token, token, "only one transfer is in flight");
                return Ok(done);
            }
            self.ring.wait(None)?;
        }
    }

    /// Ends the transfer, or resumes it.
    fn complete(&mut self, completion: Completion) -> Option<Done> {
        let Completion { token, result, buffer } = completion;
        // One whose submission was reported to have failed, and took place all the same.
        let index = self.under_way.iter().position(|transfer| transfer.token == token)?;
        let mut transfer = self.under_way.swap_remove(index);
        let result = match transfer.progress.advance(result) {
            Ok(Next::Resume) => {
                self.submit(transfer, buffer);
                return None;
            }
            Ok(Next::End) => transfer.progress.outcome(transfer.action),
            Err(error) => Err(error),
        };
        Some(Done { token, result, buffer })
    }
}

/// Where in which file a transfer goes.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// The attached file.
    pub slot: Slot,
    /// Where in it.
    pub position: u64,
    /// Opened for direct I/O: whole blocks only.
    pub direct: bool,
}

fn to_u64(bytes: usize) -> u64 {
    u64::try_from(bytes).expect("usize is 64 bits wide")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Linux moves no more by one call.
    const MOST: usize = 0x7fff_f000;

    #[test]
    fn b135_lengths_past_32_bits_are_moved_in_pieces_that_a_call_can_move() {
        for len in [1, MOST, MOST + 1, 0x8000_0000, 0xffff_ffff, 0x1_0000_0000, 0x1_0000_0001, 5 << 30, usize::MAX] {
            for action in [Action::Read, Action::Write { durable: true }] {
                // All that was asked for is moved each time, or a little less, or next to nothing at first.
                for (short, firsts) in [(0, 0), (4096, 0), (0, 3)] {
                    if len == usize::MAX && short > 0 {
                        continue;
                    }
                    let (mut progress, mut moved, mut calls) = (Progress::new(action, len, 1), 0_usize, 0);
                    while !progress.piece().is_empty() && calls < 20 {
                        let piece = progress.piece();
                        assert_eq!(piece.start, moved, "a gap, or bytes moved twice");
                        assert!(piece.len() <= MOST && piece.end <= len);
                        let count = if calls < firsts { 1 } else { piece.len().saturating_sub(short).max(1) };
                        moved += count;
                        calls += 1;
                        if let Next::End = progress.advance(Ok(count)).unwrap() {
                            break;
                        }
                    }
                    let whole = moved == len;
                    assert_eq!(progress.outcome(action).is_ok(), whole || action == Action::Read, "{len} bytes, {moved} moved");
                    assert!(whole || calls == 20, "{len} bytes ended after {moved}");
                }
            }
        }
    }
}
