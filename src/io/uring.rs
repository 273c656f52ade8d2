//! A ring on io_uring: one instance per thread that does I/O.
//!
//! Buffers and files are registered, so that the kernel neither pins pages nor looks a descriptor up for each operation.
//! A ring used by one thread asks for `SINGLE_ISSUER` and `DEFER_TASKRUN` (Linux 6.1): completions are processed when
//! that thread asks for them, never in the middle of its work.
//!
//! `unsafe` here: submission, which hands the kernel addresses that must stay valid until the completion. The ring
//! keeps each operation's buffer and file in `in_flight` until then, and its `Drop` waits, or leaks them.
#![allow(unsafe_code, reason = "submission hands addresses to the kernel")]

#[cfg(test)]
mod tests;

use std::fmt;
use std::io;
use std::mem::{self, ManuallyDrop};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::{IoUring, Probe, cqueue, opcode, squeue, types};

use super::blocking::{attach, slot_index};
use super::buffer::RingId;
use super::needs::{self, Offer};
use super::os::Told;
use super::{Action, Buffer, Completion, File, MAX_TRANSFER, Op, Process, Rejected, Ring, RingConfig, Slot, Token, Waker};

/// The user data of the read that waits for the waker; operations use their place in `in_flight`.
const WAKE: u64 = u64::MAX;

/// How long a dropped ring waits for the reads in flight before it leaks their memory. Writes it waits for without limit: whoever lets go of the
/// ring lets go of the file, too, and another must not have it while the kernel may write there.
const DROP_PATIENCE: Duration = Duration::from_secs(30);

/// Finds out whether the kernel grants a ring, by making one, and whether it can do what the engine has it do.
pub(super) fn probe() -> io::Result<()> {
    let ring = IoUring::new(2)?;
    let mut probe = Probe::new();
    let operations = match ring.submitter().register_probe(&mut probe) {
        Ok(()) => Some(|code| probe.is_supported(code)),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => None,
        Err(error) => return Err(error),
    };
    needs::judge(&Offer { operations, timed_wait: ring.params().is_feature_ext_arg() })
}

pub(super) struct UringRing {
    // Dropped by hand, before the memory that the kernel is to let go of first; in a child of its process never: the kernel's queues
    // are not mapped there.
    ring: ManuallyDrop<IoUring>,
    /// A child of it touches nothing of the ring.
    process: Process,
    id: Arc<RingId>,
    files: Vec<Option<Arc<dyn File>>>,
    files_registered: bool,
    buffers: Vec<Buffer>,
    in_flight: Vec<Option<InFlight>>,
    waker: Waker,
    /// What the wake's read reads into; on the heap, where it stays when the ring moves.
    wake_counter: Box<[u8; 8]>,
    wake: Wake,
    patience: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wake {
    /// Nobody asked for a waker.
    Unused,
    /// The next wait submits the read.
    Idle,
    /// The read is in flight.
    Armed,
}

/// What the kernel uses until the completion.
struct InFlight {
    token: Token,
    writes: bool,
    buffer: Buffer,
    _file: Arc<dyn File>,
}

impl UringRing {
    pub(super) fn new(config: &RingConfig, told: &Told) -> io::Result<Self> {
        let ring = build(config)?;
        let id = Arc::new(RingId);
        let mut buffers = Buffer::carve(config.buffers, config.buffer_bytes)?;
        register_buffers(&ring, &id, &mut buffers, told)?;
        let files_registered = config.register_files
            && match ring.submitter().register_files_sparse(config.files) {
                Ok(()) => true,
                Err(error) => {
                    if Told::first(&told.files) {
                        tracing::warn!(%error, "files cannot be registered with io_uring; each operation looks its file up");
                    }
                    false
                }
            };
        let depth = usize::try_from(config.depth).expect("usize is 64 bits wide");
        Ok(Self {
            ring: ManuallyDrop::new(ring),
            process: Process::current()?,
            id,
            files: vec![None; usize::try_from(config.files).expect("usize is 64 bits wide")],
            files_registered,
            buffers,
            in_flight: (0..depth).map(|_| None).collect(),
            waker: Waker::new()?,
            wake_counter: Box::new([0; 8]),
            wake: Wake::Unused,
            patience: DROP_PATIENCE,
        })
    }

    fn queue(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        // SAFETY: every entry queued was made by `entry_of` or `arm_wake`, which name the memory it uses and
        // why that stays valid: in `in_flight` or `wake_counter` until the completion was reaped.
        unsafe { self.ring.submission().push(entry) }.map_err(|_| io::Error::other("more operations than the ring's depth"))
    }

    /// Queues one entry and tells the kernel.
    fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        self.queue(entry)?;
        loop {
            match self.ring.submit() {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The kernel is short of memory or completions must be taken first. The entry stays queued, and
                // the next call into the kernel submits it: `wait` is always next for who has nothing else to do.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY)) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    fn entry_of(&self, action: Action, slot: Slot, position: u64, buffer: &mut Buffer, range: std::ops::Range<usize>) -> squeue::Entry {
        let registered = buffer.registered_with(&self.id);
        // Bounds-checked: the entry never names memory outside the buffer.
        let bytes = &mut buffer[range];
        let length =
            u32::try_from(bytes.len()).ok().filter(|_| bytes.len() <= MAX_TRANSFER).expect("one operation moves at most MAX_TRANSFER");
        let address = bytes.as_mut_ptr();
        let flags = match action {
            Action::Write { durable: true } => libc::RWF_DSYNC,
            _ => 0,
        };
        macro_rules! build {
            ($target:expr) => {
                match (action, registered) {
                    (Action::Read, Some(index)) => opcode::ReadFixed::new($target, address, length, index).offset(position).build(),
                    (Action::Read, None) => opcode::Read::new($target, address, length).offset(position).build(),
                    (Action::Write { .. }, Some(index)) => {
                        opcode::WriteFixed::new($target, address, length, index).offset(position).rw_flags(flags).build()
                    }
                    (Action::Write { .. }, None) => opcode::Write::new($target, address, length).offset(position).rw_flags(flags).build(),
                }
            };
        }
        if self.files_registered {
            build!(types::Fixed(slot.0))
        } else {
            let file = self.files[slot_index(slot)].as_ref().expect("operations name an attached file");
            build!(types::Fd(file.fd().expect("attached files have a descriptor").as_raw_fd()))
        }
    }

    /// Queues the read that completes when the waker is used; the call that waits submits it.
    fn arm_wake(&mut self) -> io::Result<()> {
        let fd = types::Fd(self.waker.as_fd().as_raw_fd());
        let entry = opcode::Read::new(fd, self.wake_counter.as_mut_ptr(), 8).build().user_data(WAKE);
        self.queue(&entry)?;
        self.wake = Wake::Armed;
        Ok(())
    }

    fn take(&mut self, entry: &cqueue::Entry) -> Option<Completion> {
        if entry.user_data() == WAKE {
            self.wake = Wake::Idle;
            return None;
        }
        let index = usize::try_from(entry.user_data()).expect("usize is 64 bits wide");
        let InFlight { token, buffer, .. } = self.in_flight[index].take().expect("an operation completes once");
        let result = usize::try_from(entry.result()).map_err(|_| io::Error::from_raw_os_error(-entry.result()));
        Some(Completion { token, result, buffer })
    }

    /// Whether completions, or submissions that were put off, wait for a call into the kernel.
    fn needs_kernel(&mut self) -> bool {
        let queue = self.ring.submission();
        queue.taskrun() || queue.cq_overflow() || !queue.is_empty()
    }

    fn enter_and_wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        // The kernel takes signed seconds; what does not fit is no limit.
        let result = match timeout.filter(|time| i64::try_from(time.as_secs()).is_ok()) {
            None => self.ring.submit_and_wait(1),
            Some(time) => {
                let time = types::Timespec::from(time);
                self.ring.submitter().submit_with_args(1, &types::SubmitArgs::new().timespec(&time))
            }
        };
        match result {
            Ok(_) => Ok(()),
            Err(error) if matches!(error.raw_os_error(), Some(libc::ETIME | libc::EINTR | libc::EAGAIN | libc::EBUSY)) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

impl Ring for UringRing {
    fn take_buffers(&mut self) -> Vec<Buffer> {
        mem::take(&mut self.buffers)
    }

    fn attach(&mut self, file: Arc<dyn File>) -> io::Result<Slot> {
        self.process.check()?;
        let Some(fd) = file.fd().map(|fd| fd.as_raw_fd()) else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a file without a descriptor on io_uring"));
        };
        let slot = attach(&mut self.files, file)?;
        if self.files_registered
            && let Err(error) = self.ring.submitter().register_files_update(slot.0, &[fd])
        {
            self.files[slot_index(slot)] = None;
            return Err(error);
        }
        Ok(slot)
    }

    fn detach(&mut self, slot: Slot) {
        if self.files_registered && self.process.is_current() {
            // A place that stays taken would be overwritten by the next `attach`; the file itself is closed below.
            if let Err(error) = self.ring.submitter().register_files_update(slot.0, &[-1]) {
                tracing::warn!(%error, "a file stays registered with io_uring until its place is used again");
            }
        }
        self.files[slot_index(slot)] = None;
    }

    fn submit(&mut self, token: Token, op: Op) -> Result<(), Rejected> {
        let Op { action, slot, position, mut buffer, range } = op;
        if let Err(error) = self.process.check() {
            return Err(Rejected { error, buffer });
        }
        let Some(index) = self.in_flight.iter().position(Option::is_none) else {
            return Err(Rejected { error: io::Error::other("more operations than the ring's depth"), buffer });
        };
        let user_data = u64::try_from(index).expect("usize is 64 bits wide");
        let entry = self.entry_of(action, slot, position, &mut buffer, range).user_data(user_data);
        let file = self.files[slot_index(slot)].as_ref().expect("operations name an attached file");
        self.in_flight[index] = Some(InFlight { token, writes: action != Action::Read, buffer, _file: Arc::clone(file) });
        // An error after the entry was queued leaves it in `in_flight`, where it is safe; the ring is of no more use then.
        match self.push(&entry) {
            Ok(()) => Ok(()),
            Err(error) => Err(Rejected { error, buffer: Buffer::new(0).expect("one page of memory") }),
        }
    }

    fn reap(&mut self) -> io::Result<Option<Completion>> {
        self.process.check()?;
        let mut entered = false;
        loop {
            let next = self.ring.completion().next();
            match next {
                Some(entry) => {
                    if let Some(completion) = self.take(&entry) {
                        return Ok(Some(completion));
                    }
                }
                None if entered || !self.needs_kernel() => return Ok(None),
                None => {
                    entered = true;
                    match self.ring.submit() {
                        Ok(_) => {}
                        Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => {}
                        Err(error) => return Err(error),
                    }
                }
            }
        }
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.process.check()?;
        if self.wake == Wake::Idle {
            self.arm_wake()?;
        }
        if self.ring.completion().is_empty() { self.enter_and_wait(timeout) } else { Ok(()) }
    }

    fn waker(&mut self) -> Waker {
        if self.wake == Wake::Unused {
            self.wake = Wake::Idle;
        }
        self.waker.clone()
    }
}

impl UringRing {
    /// Waits for what is in flight. False if reads, and nothing else, did not complete in time.
    fn drain(&mut self) -> bool {
        let deadline = Instant::now() + self.patience;
        let mut told = false;
        if self.wake == Wake::Armed {
            self.waker.wake();
        }
        loop {
            while let Ok(Some(_)) = self.reap() {}
            if self.wake != Wake::Armed && self.in_flight.iter().all(Option::is_none) {
                return true;
            }
            let left = Some(deadline.saturating_duration_since(Instant::now())).filter(|left| !left.is_zero());
            if left.is_none() && !self.in_flight.iter().flatten().any(|operation| operation.writes) {
                return false;
            }
            if left.is_none() && !mem::replace(&mut told, true) {
                tracing::error!("a write did not complete in {:?}; it is waited for", self.patience);
            }
            if self.enter_and_wait(left).is_err() {
                return false;
            }
        }
    }
}

impl Drop for UringRing {
    fn drop(&mut self) {
        let leaks = if !self.process.is_current() {
            // What is in flight is the parent's, and so is the wake that would end its wait.
            true
        } else if self.drain() {
            if self.files_registered {
                // The kernel takes a closed ring apart later: until then deleted files would keep their space.
                let _ = self.ring.submitter().unregister_files();
            }
            false
        } else {
            tracing::error!("operations did not complete in {:?}; their memory is leaked", self.patience);
            true
        };
        if leaks {
            mem::forget(mem::take(&mut self.in_flight));
            mem::forget(mem::take(&mut self.wake_counter));
        }
        if self.process.is_current() {
            // SAFETY: it is not used again: this is the end of its owner's drop.
            unsafe { ManuallyDrop::drop(&mut self.ring) };
        }
    }
}

impl fmt::Debug for UringRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let in_flight = self.in_flight.iter().flatten().count();
        f.debug_struct("UringRing").field("depth", &self.in_flight.len()).field("in_flight", &in_flight).finish_non_exhaustive()
    }
}

/// The best ring that the kernel grants: newer set-up flags answer `EINVAL` on older kernels.
fn build(config: &RingConfig) -> io::Result<IoUring> {
    // One place more than the operations: the wake's read.
    let entries = config.depth.checked_add(1).ok_or(io::ErrorKind::InvalidInput)?;
    let attempts: [fn(&mut io_uring::Builder); 3] = [
        |builder| {
            builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
        },
        |builder| {
            builder.setup_coop_taskrun();
        },
        |_| {},
    ];
    let attempts = if config.one_thread { &attempts[..] } else { &attempts[1..] };
    let mut last = io::Error::from(io::ErrorKind::Unsupported);
    for set_flags in attempts {
        let mut builder = IoUring::builder();
        builder.dontfork();
        set_flags(&mut builder);
        match builder.build(entries) {
            Ok(ring) => return Ok(ring),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

/// Pins the buffers for the ring's life; leaves them unregistered where the limit of locked memory is too small.
fn register_buffers(ring: &IoUring, id: &Arc<RingId>, buffers: &mut [Buffer], told: &Told) -> io::Result<()> {
    if buffers.is_empty() {
        return Ok(());
    }
    let vectors: Vec<_> =
        buffers.iter_mut().map(|buffer| libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() }).collect();
    // SAFETY: each vector is a whole live `Buffer`. The kernel pins the pages, so an operation that names them touches
    // those pages also if the buffer were unmapped; and only `submit`, which owns the buffer meanwhile, names them.
    match unsafe { ring.submitter().register_buffers(&vectors) } {
        Ok(()) => {
            for (index, buffer) in buffers.iter_mut().enumerate() {
                buffer.set_registered(id, u16::try_from(index).expect("a ring has few buffers"));
            }
            Ok(())
        }
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EPERM)) => {
            if Told::first(&told.memlock) {
                let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
                let needed: usize = buffers.iter().map(|buffer| buffer.len()).sum();
                tracing::warn!(%error, limit, needed, "buffers cannot be registered with io_uring: RLIMIT_MEMLOCK (`ulimit -l`) is \
                    too small for this ring's buffers and those before it; using unregistered ones, which is slower");
            }
            Ok(())
        }
        Err(error) => Err(error),
    }
}
