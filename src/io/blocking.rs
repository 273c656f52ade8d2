//! A ring by blocking calls: an operation is done when it is submitted, its completion waits to be taken.
//!
//! Serves the `posix` backend, the simulated disk, and buffered writes on every backend: through a ring those
//! are handed to kernel workers, which costs more than the call itself.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Action, Buffer, Completion, File, Op, Rejected, Ring, RingConfig, Slot, Token, Waker};

/// Performs each operation in `submit`, by the file's own blocking calls.
#[derive(Debug)]
pub struct BlockingRing {
    files: Vec<Option<Arc<dyn File>>>,
    buffers: Vec<Buffer>,
    depth: usize,
    done: VecDeque<Completion>,
    waker: Waker,
}

impl BlockingRing {
    /// A ring with `config.buffers` aligned buffers, registered nowhere.
    pub fn new(config: &RingConfig) -> io::Result<Self> {
        Ok(Self {
            files: vec![None; usize::try_from(config.files).expect("usize is 64 bits wide")],
            buffers: Buffer::carve(config.buffers, config.buffer_bytes)?,
            depth: usize::try_from(config.depth).expect("usize is 64 bits wide"),
            done: VecDeque::new(),
            waker: Waker::new()?,
        })
    }

    /// Operations in flight at most.
    #[cfg(feature = "sim")]
    pub(super) fn depth(&self) -> usize {
        self.depth
    }
}

impl Ring for BlockingRing {
    fn take_buffers(&mut self) -> Vec<Buffer> {
        std::mem::take(&mut self.buffers)
    }

    fn attach(&mut self, file: Arc<dyn File>) -> io::Result<Slot> {
        attach(&mut self.files, file)
    }

    fn detach(&mut self, slot: Slot) {
        self.files[slot_index(slot)] = None;
    }

    fn submit(&mut self, token: Token, op: Op) -> Result<(), Rejected> {
        let Op { action, slot, position, mut buffer, range } = op;
        if self.done.len() >= self.depth {
            return Err(Rejected { error: io::Error::other("more operations than the ring's depth"), buffer });
        }
        let file = self.files[slot_index(slot)].as_ref().expect("operations name an attached file");
        let result = match action {
            Action::Read => file.read_at(&mut buffer[range], position),
            Action::Write { durable } => file.write_at(&buffer[range], position, durable),
        };
        self.done.push_back(Completion { token, result, buffer });
        Ok(())
    }

    fn reap(&mut self) -> io::Result<Option<Completion>> {
        Ok(self.done.pop_front())
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        if !self.done.is_empty() {
            return Ok(());
        }
        let timeout = timeout.map(|time| Timespec::try_from(time).unwrap_or(Timespec { tv_sec: i64::MAX, tv_nsec: 0 }));
        let mut fds = [PollFd::new(&self.waker, PollFlags::IN)];
        match poll(&mut fds, timeout.as_ref()) {
            Ok(0) | Err(rustix::io::Errno::INTR) => Ok(()),
            Ok(_) => {
                self.waker.clear();
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }

    fn waker(&mut self) -> Waker {
        self.waker.clone()
    }
}

/// Puts `file` in the first free place.
pub(super) fn attach(files: &mut [Option<Arc<dyn File>>], file: Arc<dyn File>) -> io::Result<Slot> {
    let free = files.iter().position(Option::is_none).ok_or_else(|| io::Error::other("every file slot of the ring is taken"))?;
    files[free] = Some(file);
    Ok(Slot(u32::try_from(free).expect("a ring's file count is a u32")))
}

pub(super) fn slot_index(slot: Slot) -> usize {
    usize::try_from(slot.0).expect("usize is 64 bits wide")
}
