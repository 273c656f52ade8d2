//! One log: one writer, watermarks, and readers beside it.
//!
//! [`Partition`] is the handle. Its threads share [`Shared`]: the segments and the two watermarks, which only the writer
//! moves and which only grow, but for a truncation ([`cut`]). `durable_end` never passes `appended_end`.

mod active;
mod bench;
mod budget;
mod checkpoint;
mod commit;
mod cut;
mod describe;
mod ends;
mod fetch;
mod hands;
mod helm;
mod index_files;
mod live;
mod mend;
mod moving;
mod note;
mod open;
mod queue;
mod reader;
mod recent;
mod records;
mod reply;
mod retention;
mod sealed;
mod shared;
mod start;
#[cfg(feature = "sim")]
mod stepper;
mod tail;
mod ticket;
mod upkeep;
mod walk;
mod watch;
mod workers;
mod writer;
mod zeroing;

use std::any::Any;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::thread::{self, JoinHandle};

use crate::clock::Clock;
use crate::config::{Opening, TopicConfig, WaitStrategy};
use crate::error::{Error, Result};
use crate::io::{Disk, Lock, Process};
use crate::metrics::{Metrics, Stats};
use crate::record::{Batch, to_usize};

use active::Active;
use cut::Cuts;
use ends::Ends;
use helm::Helm;
use queue::{Bell, Message, Queue, Refused};
use recent::Recent;
use reply::{Answerer, Reply};
use shared::{Shared, Watches};
use start::Start;
use ticket::Answer;
use watch::Watch;
use writer::Writer;

pub(crate) use budget::BufferBudget;
pub(crate) use checkpoint::{Checkpoint, Checkpoints, Held as HeldCheckpoint, NAME as CHECKPOINT};
pub use describe::PartitionDescription;
pub use moving::Exported;
pub(crate) use moving::{remove_dir, take_in};
pub(crate) use note::{find_unsound as unsound_notes, has_moved, is_unfinished as is_unfinished_note, noted_start};
pub use open::{PartitionReport, TornTail};
pub(crate) use open::{find_foreign, is_note};
pub use reader::{Checksums, ReadMode, Reader, ReaderConfig, Skipped, TimeRange, Visibility};
pub(crate) use reader::{Span, TimeBounds};
pub use records::{OwnedRecord, Records, RecordsIter};
pub use retention::Removed;
#[cfg(feature = "sim")]
pub use stepper::Stepper;
#[cfg(feature = "async")]
pub use tail::TailStream;
pub use tail::{Tail, TailEvent, TailRecords};
pub use ticket::{Ticket, TryAppendError};
pub(crate) use workers::Workers;

/// Where the writer goes on.
#[derive(Debug)]
struct Appender {
    active: Active,
    next_offset: u64,
    last_timestamp: u64,
}

/// What a partition needs to know of where it is.
#[derive(Debug, Clone)]
pub(crate) struct Placement {
    pub(crate) topic: String,
    pub(crate) number: u32,
    /// Which CPU its writer is pinned to.
    pub(crate) core: Option<core_affinity::CoreId>,
    pub(crate) wait: WaitStrategy,
    /// The data directory's, held until the last partition is closed.
    pub(crate) lock: Arc<dyn Lock>,
    pub(crate) workers: Workers,
    pub(crate) buffers: Arc<BufferBudget>,
}

/// A handle to one partition. Clones are handles to the same one; when the last is dropped, it closes.
///
/// # Blocking
/// Dropping the last handle waits until all that is queued is written.
#[derive(Debug, Clone)]
pub struct Partition(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    shared: Arc<Shared>,
    topic: String,
    number: u32,
    queue: Queue,
    helm: Arc<Helm>,
    /// Until it is closed.
    writer: Mutex<Option<RunsOn>>,
    /// Until the files are closed.
    lock: Mutex<Option<Arc<dyn Lock>>>,
}

/// What the writer runs on.
#[derive(Debug)]
enum RunsOn {
    OwnThread(JoinHandle<()>),
    /// Over when the thread that it shares is through with it.
    SharedThread(Reply<()>),
    #[cfg(feature = "sim")]
    Steps,
}

impl Partition {
    /// Opens, and where needed mends, the partition in `dir`, an existing directory; begins it if it holds no segment.
    pub(crate) fn open(
        disk: Arc<dyn Disk>,
        clock: Arc<dyn Clock>,
        dir: &Path,
        config: TopicConfig,
        opening: Opening,
        placement: Placement,
    ) -> Result<(Self, PartitionReport)> {
        let dir: Arc<Path> = Arc::from(dir);
        let process = Process::current().map_err(Error::io("look out for forks of", &dir))?;
        let Placement { topic, number, core, wait, lock, workers, buffers } = placement;
        let recovered = open::recover(&disk, &dir, &config, opening, &topic, number)?;
        let open::Recovered { segments, indexed, next_offset, last_timestamp, mut checkpoints, mut report } = recovered;
        if segments.is_empty() && checkpoints.newest().is_some() {
            // It speaks of files that are gone; of those to come it would tell lies.
            let anew = Checkpoint { base: next_offset, position: 0, next_offset, last_timestamp, entries: 0, clean: false };
            let replaced = checkpoints.replace(&anew);
            checkpoints.tell(replaced);
        }
        let start = Start::open(&*disk, &dir, next_offset, &mut report)?;
        report.first_offset = report.first_offset.max(start.offset());
        let (config, live) = live::split(&config);
        let shared = Arc::new(Shared {
            dir,
            config,
            live,
            disk,
            segments: RwLock::new(segments),
            ends: Ends::new(next_offset),
            watches: Watches { appended: Watch::new(), durable: Watch::new() },
            stopped: OnceLock::new(),
            closed: AtomicBool::new(false),
            moved: AtomicBool::new(false),
            process,
            metrics: Metrics::default(),
            recent: Recent::default(),
            buffers,
            checkpoints: Mutex::new(checkpoints),
            cuts: Cuts::default(),
            start,
            removing: Mutex::default(),
            files: Mutex::default(),
            workers,
        });
        let has_moved = note::has_moved(&*shared.disk, &shared.dir)?;
        let last = shared.with_segments(|segments| segments.last().map(Arc::clone));
        let last = last.map(|segment| Active::open(&shared, segment, indexed)).transpose()?;
        let active = match last {
            Some(mut last) if !has_moved && last.is_shared()? => {
                // An export has it, made before a power loss or an interrupted cut took the segments behind it.
                last.seal(&shared)?;
                None
            }
            last => last,
        };
        let active = match active {
            Some(active) => active,
            None => {
                let is_first = shared.with_segments(<[_]>::is_empty);
                let names = shared.disk.open_dir(&shared.dir).map_err(Error::io("open", &shared.dir))?;
                let active = Active::create(&shared, &*names, next_offset)?;
                shared.push_segment(Arc::clone(&active.segment));
                report.segments += 1;
                if !is_first {
                    // An opening after this one then changes nothing.
                    shared.write_checkpoint(&Checkpoint {
                        base: next_offset,
                        position: 0,
                        next_offset,
                        last_timestamp,
                        entries: 0,
                        clean: false,
                    });
                }
                active
            }
        };
        active.segment.note_last_time(last_timestamp);
        let start = Appender { active, next_offset, last_timestamp };
        let (queue, helm, writer) = start_writer(&shared, clock, wait, start, format!("{topic}/{number}"), core)?;
        let inner = Inner { shared, topic, number, queue, helm, writer: Mutex::new(Some(writer)), lock: Mutex::new(Some(lock)) };
        if has_moved {
            note::sync_names(&*inner.shared.disk, &inner.shared.dir)?;
            inner.end_writer(true)?;
        }
        Ok((Self(Arc::new(inner)), report))
    }

    /// Queues a batch. Its records stay together and in order; a power loss or crash before the answer may leave the first
    /// of them and not the others, for the log knows records, not batches.
    ///
    /// # Blocking
    /// While the queue is full: see [`TopicConfig::queue_bytes`] and [`TopicConfig::queue_batches`].
    ///
    /// # Errors
    /// Nothing was queued: [`Error::EmptyBatch`], [`Error::BatchTooLarge`], [`Error::Failed`], [`Error::Closed`], [`Error::Forked`].
    pub fn append(&self, batch: Batch) -> Result<Ticket> {
        self.check(&batch)?;
        let (answer, receiver) = self.0.queue.answer();
        self.queue(batch, answer, receiver)
    }

    /// Appends a batch and waits until it is as durable as the topic asks for: [`Self::append`] and [`Ticket::wait`] in one, and the
    /// fastest way where one producer at a time appends. While nobody else does, the commit is made on the calling thread, with no other thread to wake
    /// and to be woken by; with company it goes by the queue.
    ///
    /// # Durability, Blocking, Errors
    /// Those of both.
    pub fn append_and_wait(&self, batch: Batch) -> Result<Range<u64>> {
        self.check(&batch)?;
        let (answer, receiver) = self.0.queue.answer();
        match self.0.helm.try_commit(batch, answer) {
            Ok(()) => Ticket::new(receiver, Arc::clone(&self.0.shared)).wait(),
            Err((batch, answer)) => self.queue(batch, answer, receiver)?.wait(),
        }
    }

    fn queue(&self, batch: Batch, answer: Answerer<Answer>, receiver: Reply<Answer>) -> Result<Ticket> {
        match self.0.send(Message::Append { batch, answer }) {
            Ok(()) => Ok(Ticket::new(receiver, Arc::clone(&self.0.shared))),
            Err(Refused::Full(_) | Refused::Closed(_)) => Err(self.0.shared.why_stopped()),
        }
    }

    /// Queues a batch if there is room for it now. See [`Self::append`].
    ///
    /// # Errors
    /// With the batch, given back: none if the queue is full, else as for [`Self::append`].
    pub fn try_append(&self, batch: Batch) -> Result<Ticket, TryAppendError> {
        if let Err(error) = self.check(&batch) {
            return Err(TryAppendError { batch, error: Some(error) });
        }
        let (answer, receiver) = self.0.queue.answer();
        let (message, error) = match self.0.queue.try_send(Message::Append { batch, answer }) {
            Ok(()) => return Ok(Ticket::new(receiver, Arc::clone(&self.0.shared))),
            Err(Refused::Full(message)) => (message, None),
            Err(Refused::Closed(message)) => (message, Some(self.0.shared.why_stopped())),
        };
        let Message::Append { batch, .. } = message else { unreachable!("the message given back is the one sent") };
        Err(TryAppendError { batch, error })
    }

    /// An empty batch, in the memory of one whose records were written, if there is any: batches that are filled again and
    /// again cost neither allocations nor the page faults of fresh memory.
    ///
    /// Up to 64 batches of at most 1 MiB each are kept per partition.
    pub fn batch(&self) -> Batch {
        if self.0.shared.process.is_current() { self.0.queue.empty_batch() } else { Batch::new() }
    }

    fn check(&self, batch: &Batch) -> Result<()> {
        self.0.shared.check_answers()?;
        let limit = self.0.shared.live.max_batch_bytes();
        if batch.is_empty() {
            Err(Error::EmptyBatch)
        } else if batch.bytes() > limit {
            Err(Error::BatchTooLarge { bytes: batch.bytes(), limit })
        } else {
            Ok(())
        }
    }

    /// Waits until everything that was queued before is on the device.
    ///
    /// # Errors
    /// [`Error::Failed`] if a write or the sync failed, [`Error::Closed`].
    pub fn sync(&self) -> Result<()> {
        self.0.ask(|answer| Message::Sync { answer })
    }

    /// Ends the segment that takes the appends, if it holds records: what is queued before is in it, and what comes later in the next. Its name is
    /// durable before anything that it holds is acknowledged, or anything goes because it is there; a power loss before that may undo the roll, and no more.
    ///
    /// # Errors
    /// [`Error::DiskFull`] and what else the system says to one more segment: the present one goes on then. [`Error::Failed`], [`Error::Closed`].
    pub fn roll(&self) -> Result<()> {
        self.0.ask(|answer| Message::Roll { answer })
    }

    /// A reader of the durable records.
    ///
    /// # Errors
    /// [`Error::Closed`], or what the system says to so much memory.
    pub fn reader(&self) -> Result<Reader> {
        self.reader_with(ReaderConfig::default())
    }

    /// A reader as it is asked for.
    ///
    /// # Errors
    /// As for [`Self::reader`], what it says to one more ring, and [`Error::InvalidConfig`] past the largest settings.
    pub fn reader_with(&self, config: ReaderConfig) -> Result<Reader> {
        Reader::new(self.clone(), config)
    }

    /// Reads one durable record, by calls on this thread.
    ///
    /// # Errors
    /// [`Error::OffsetOutOfRange`] with what there is, [`Error::Damaged`], [`Error::Closed`].
    pub fn read_one(&self, offset: u64) -> Result<OwnedRecord> {
        let config = ReaderConfig { piece_bytes: to_usize(reader::LOOK_BYTES), ..ReaderConfig::default() };
        self.reader_with(config)?.read_one(offset).map(OwnedRecord::from)
    }

    /// The offset of the first record that there is; that of the next one if there is none.
    pub fn first_offset(&self) -> u64 {
        self.0.shared.first_offset()
    }

    /// One past the last record that was written: what the next one gets, but for those queued.
    pub fn next_offset(&self) -> u64 {
        self.0.shared.appended_end()
    }

    /// One past the last record that is on the device.
    pub fn durable_end(&self) -> u64 {
        self.0.shared.durable_end()
    }

    /// What it did since it was opened.
    pub fn stats(&self) -> Stats {
        self.0.shared.metrics.read()
    }

    /// Its topic's settings, as they are now.
    pub fn config(&self) -> TopicConfig {
        self.0.shared.live.with(&self.0.shared.config)
    }

    /// Goes on with these settings, as far as they may change.
    pub(crate) fn set_live(&self, config: &TopicConfig) {
        self.0.shared.live.set(config);
        self.0.helm.tell();
    }

    /// Its number within the topic.
    pub fn number(&self) -> u32 {
        self.0.number
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.0.shared.dir
    }

    /// Whether it can be used: [`Error::Closed`] if not.
    pub(crate) fn check_open(&self) -> Result<()> {
        self.0.shared.check_open()
    }

    /// Writes all that is queued, gives preallocated space back, and ends the writer. Later calls tell the same.
    pub(crate) fn close(&self) -> Result<()> {
        self.0.close()
    }

    /// All handles are told that it is closed, whether or not whoever closes it comes to an end.
    pub(crate) fn leave_to_close(&self) {
        self.0.shared.closed.store(true, Ordering::Release);
        self.0.shared.watches.tell_all();
    }
}

impl Inner {
    /// Queues a message, once there is room.
    fn send(&self, message: Message) -> Result<(), Refused> {
        self.shared.workers.work_until(|| self.queue.has_room(message.bytes()));
        self.queue.send(message)
    }

    /// Sends a message and waits for its answer.
    fn ask(&self, message: impl FnOnce(Answerer<Result<()>>) -> Message) -> Result<()> {
        self.shared.check_answers()?;
        self.ask_writer(message)
    }

    fn ask_writer(&self, message: impl FnOnce(Answerer<Result<()>>) -> Message) -> Result<()> {
        let (answer, reply) = reply::pair();
        if self.send(message(answer)).is_err() {
            return Err(self.shared.why_stopped());
        }
        self.shared.workers.work_until(|| reply.is_over());
        reply.wait().unwrap_or_else(|| Err(self.shared.why_stopped()))
    }

    /// Has the writer write all that is queued and end, if it did not yet; with `moves`, because the partition goes elsewhere.
    fn end_writer(&self, moves: bool) -> Result<()> {
        self.shared.check_process()?;
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(runs_on) = writer.take() else {
            let is_as_asked = !self.shared.has_failed() && (!moves || self.shared.moved.load(Ordering::Acquire));
            return if is_as_asked { Ok(()) } else { Err(self.shared.why_stopped()) };
        };
        if moves {
            self.shared.moved.store(true, Ordering::Release);
        }
        let result = self.ask_writer(|answer| Message::Close { answer });
        // A panic of the writer was caught, and is the latch's error.
        match runs_on {
            RunsOn::OwnThread(thread) => drop(thread.join()),
            RunsOn::SharedThread(is_over) => drop(is_over.wait()),
            #[cfg(feature = "sim")]
            RunsOn::Steps => self.shared.workers.work_until(|| self.helm.is_over()),
        }
        result
    }

    fn close(&self) -> Result<()> {
        self.shared.check_process()?;
        let result = self.end_writer(false);
        self.shared.closed.store(true, Ordering::Release);
        // Segments that are being removed are the last thing done here.
        drop(self.shared.alone());
        self.shared.checkpoints.lock().unwrap_or_else(PoisonError::into_inner).let_go();
        *self.lock.lock().unwrap_or_else(PoisonError::into_inner) = None;
        result
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if !self.shared.process.is_current() {
            // The thread is not there to be joined or let go, and the queue's other end is in the memory of one that is not there either:
            // letting go of this end might wait for a lock that it held.
            std::mem::forget(self.queue.clone());
            std::mem::forget(self.writer.get_mut().unwrap_or_else(PoisonError::into_inner).take());
            return;
        }
        if let Err(error) = self.close() {
            tracing::warn!(%error, "a partition was dropped, and could not be closed cleanly");
        }
    }
}

/// Starts the writer, on a thread of its own or on a shared one.
fn start_writer(
    shared: &Arc<Shared>,
    clock: Arc<dyn Clock>,
    wait: WaitStrategy,
    start: Appender,
    name: String,
    core: Option<core_affinity::CoreId>,
) -> Result<(Queue, Arc<Helm>, RunsOn)> {
    #[cfg(feature = "sim")]
    if let Workers::Stepped(stepper) = &shared.workers {
        let (queue, helm) = prepare(shared, clock, wait, start, Bell::new());
        stepper.add_writer(Arc::clone(&helm));
        return Ok((queue, helm, RunsOn::Steps));
    }
    if let Workers::Shared(crew) = &shared.workers {
        let desk = crew.desk();
        let key = desk.next_key();
        let (queue, helm) = prepare(shared, clock, wait, start, Bell::at(Arc::clone(desk), key));
        let (over, is_over) = reply::pair();
        desk.join(key, Arc::<Helm>::clone(&helm), over);
        return Ok((queue, helm, RunsOn::SharedThread(is_over)));
    }
    let (ready, started) = reply::pair();
    let shared = Arc::clone(shared);
    let dir = Arc::clone(&shared.dir);
    let body = move || {
        pin(core);
        let (queue, helm) = prepare(&shared, clock, wait, start, Bell::new());
        ready.send((queue, Arc::clone(&helm)));
        helm.work();
    };
    // The kernel shows 15 bytes of it.
    let builder = thread::Builder::new().name(format!("log {name}"));
    let thread = builder.spawn(body).map_err(Error::io("start a writer thread for", &dir))?;
    match started.wait() {
        Some((queue, helm)) => Ok((queue, helm, RunsOn::OwnThread(thread))),
        None => Err(Error::WriterPanicked { path: dir.to_path_buf(), message: "it ended while it started".into() }),
    }
}

fn pin(core: Option<core_affinity::CoreId>) {
    if let Some(core) = core
        && !core_affinity::set_for_current(core)
    {
        tracing::warn!(cpu = core.id, "a writer thread could not be pinned; it runs where the scheduler puts it");
    }
}

/// Makes the writer that the bell calls.
fn prepare(shared: &Arc<Shared>, clock: Arc<dyn Clock>, wait: WaitStrategy, start: Appender, bell: Bell) -> (Queue, Arc<Helm>) {
    let bell = Arc::new(bell);
    let batches = usize::try_from(shared.config.queue_batches).expect("usize is 64 bits wide");
    let (queue, inbox) = queue::queue(batches, shared.config.queue_bytes, Arc::clone(&bell));
    let writer =
        Writer::new(Arc::clone(shared), clock, wait, (inbox, Arc::clone(&bell)), start, matches!(shared.workers, Workers::Shared(_)));
    (queue, Arc::new(Helm::new(writer, bell, Arc::clone(shared))))
}

/// What a panic said.
fn panic_message(panic: &(dyn Any + Send)) -> String {
    let message = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    message.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default()
}
