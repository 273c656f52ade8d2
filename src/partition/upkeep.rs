//! What a partition's writer does not wait for: syncs, index entries, room ahead, the next segment, checkpoints.
//!
//! Jobs are done in the order in which they were begun, one at a time, on a thread of the partition's own or on one of few that all share
//! ([`workers`](super::workers)). One of its own starts with the first
//! commit and ends when the partition rests: one that takes no appends has none. Where the system grants none, the writer does each job as it begins
//! it, and asks again for a thread after a while: slower, but nothing depends on how many threads there are. Each job is a plain function over the seam to the operating system, and
//! its result is taken by the writer, whose wait it ends. The state that the writer decides by stays with the writer.

use std::fmt;
use std::io;
use std::ops::Range;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender};

use super::active::{self, Prepared};
use super::bench::Chores;
use super::checkpoint::Checkpoint;
use super::index_files::IndexFiles;
use super::queue::Bell;
use super::workers::AtWork;
use super::{Shared, panic_message};
use crate::error::{Error, Result};
use crate::guard::{self, Guard};
use crate::io::{Directory, File, Open};
use crate::segment::{self, Kind, Segment, SumSoFar};

/// Jobs begun and not taken back at most.
const MOST: usize = 16;

/// How long a partition that was refused a thread does without before it asks again.
const THREAD_PATIENCE: Duration = Duration::from_secs(10);

/// Something to do beside the commits.
pub(super) enum Job {
    /// What the kernel has of the log is put on the device.
    Sync { log: Arc<dyn File> },
    /// The names in the partition's directory are made durable.
    SyncNames { names: Box<dyn Directory> },
    /// Index entries of records below `up_to` are written.
    Index { index: Arc<IndexFiles>, up_to: u64 },
    /// Room is made behind the log's end, as far as byte `range.end`.
    Extend { log: Arc<dyn File>, range: Range<u64>, durable: bool },
    /// The next segment is made, under a name of its own, with room and zeros.
    Prepare { room: u64, zeros: u64 },
    /// A segment that takes no more records is ended: what a crash must find is synced.
    Seal { log: Arc<dyn File>, index: Arc<IndexFiles>, segment: Arc<Segment> },
    /// The checksum of a log that was sealed is put beside it, and beside the one before, if that has none.
    Sum { segment: Arc<Segment>, sum: SumSoFar, next_offset: u64 },
    /// It is noted how far the log is durable; the index entries up to there are made durable first.
    Checkpoint { index: Arc<IndexFiles>, checkpoint: Checkpoint },
}

/// How a job ended.
pub(super) enum Done {
    Sync(io::Result<()>),
    SyncNames(io::Result<()>),
    Index,
    /// Whether it was a sync that failed, which says more than that there is no room.
    Extend(Result<Extended, Unextended>),
    Prepare(Result<Prepared>),
    Seal(Result<()>),
    Sum,
    Checkpoint,
    /// By a bug.
    Panicked(String),
}

impl Done {
    /// Whether something that was to be durable is not.
    fn is_failure(&self) -> bool {
        matches!(
            self,
            Self::Sync(Err(_))
                | Self::SyncNames(Err(_))
                | Self::Extend(Err(Unextended::Failed(_)))
                | Self::Seal(Err(_))
                | Self::Panicked(_)
        )
    }
}

/// A log that has more room.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extended {
    /// Its length now.
    pub(super) len: u64,
    /// The device wrote zeros into the new room.
    pub(super) written: bool,
}

/// Why a log has no more room than before.
#[derive(Debug)]
pub(super) enum Unextended {
    /// None is to be had.
    Refused(io::Error),
    /// What the device holds is not known.
    Failed(io::Error),
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sync { .. } => "Sync",
            Self::SyncNames { .. } => "SyncNames",
            Self::Index { .. } => "Index",
            Self::Extend { .. } => "Extend",
            Self::Prepare { .. } => "Prepare",
            Self::Seal { .. } => "Seal",
            Self::Sum { .. } => "Sum",
            Self::Checkpoint { .. } => "Checkpoint",
        })
    }
}

impl Job {
    /// How it ends, if it says of what was done before that it is durable.
    fn vouches(&self) -> Option<Done> {
        match self {
            Self::Checkpoint { .. } => Some(Done::Checkpoint),
            Self::Sum { .. } => Some(Done::Sum),
            _ => None,
        }
    }

    fn run(self, shared: &Shared) -> Done {
        match self {
            Self::Sync { log } => Done::Sync(log.sync()),
            Self::SyncNames { names } => Done::SyncNames(names.sync()),
            Self::Index { index, up_to } => {
                with_files_of(&index, shared, || index.write(&*shared.disk, up_to));
                Done::Index
            }
            Self::Extend { log, range, durable } => Done::Extend(active::extend(&*log, range, durable)),
            Self::Prepare { room, zeros } => {
                let prepared = Prepared::make(shared, room).map(|mut prepared| {
                    if let Err(error) = prepared.write_zeros(zeros) {
                        tracing::debug!(%error, "zeros could not be written into the next segment");
                    }
                    prepared
                });
                // The file's map is durable before the first append relies on it, and waits for nobody then.
                Done::Prepare(prepared.and_then(|prepared| prepared.synced(shared)))
            }
            Self::Seal { log, index, segment } => {
                let synced = log.sync().map_err(Error::io("sync", &segment.path(Kind::Log)));
                shared.with_files(|| {
                    if shared.has_segment(segment.base()) {
                        index.write(&*shared.disk, u64::MAX);
                        index.seal(&*shared.disk);
                    }
                });
                Done::Seal(synced)
            }
            Self::Sum { segment, sum, next_offset } => {
                shared.with_files(|| put_sums(shared, &segment, sum, next_offset));
                Done::Sum
            }
            Self::Checkpoint { index, checkpoint } => {
                let synced = with_files_of(&index, shared, || {
                    index.write(&*shared.disk, checkpoint.next_offset);
                    index.sync(&*shared.disk, checkpoint.next_offset)
                });
                shared.write_checkpoint(&Checkpoint { entries: synced.unwrap_or(0), ..checkpoint });
                Done::Checkpoint
            }
        }
    }
}

/// Does something with the index files of a segment, unless it was removed from the front of the log: they are opened by name, and made where
/// there are none, but nothing may be left of it. The segment that takes the appends stays, and waits for nobody who removes.
fn with_files_of<T>(index: &IndexFiles, shared: &Shared, work: impl FnOnce() -> T) -> Option<T> {
    let base = index.base();
    let stays = || shared.segment_after(base).is_none();
    let work = || shared.has_segment(base).then(work);
    if index.has_entries() && stays() { work() } else { shared.with_files(work) }
}

/// Puts the sum of a sealed log beside it, unless it was removed from the front of the log, and that of the one before, which a crash, or a full
/// disk, may have left without.
fn put_sums(shared: &Shared, segment: &Segment, sum: SumSoFar, next_offset: u64) {
    if !shared.has_segment(segment.base()) {
        return;
    }
    if let Err(error) = write_sum(shared, segment, sum, next_offset) {
        tracing::warn!(%error, path = %segment.path(Kind::Sum).display(), "a sealed segment stays without a checksum of its own");
    }
    let before = shared.segment_before(segment.base());
    if let Some(error) = before.and_then(|before| segment::make_up_for_sum(&*shared.disk, &before).err()) {
        tracing::warn!(%error, "the sealed segment before stays without a checksum of its own");
    }
}

fn write_sum(shared: &Shared, segment: &Segment, sum: SumSoFar, next_offset: u64) -> io::Result<()> {
    let log = shared.disk.open(&segment.path(Kind::Log), Open::READ)?;
    sum.finish(&*log, segment.base(), segment.appended(), next_offset)?.write(&*shared.disk, &shared.dir)
}

/// The writer's end: what was asked for.
#[derive(Debug)]
pub(super) struct Upkeep {
    shared: Arc<Shared>,
    bell: Arc<Bell>,
    /// Begun and not taken back.
    under_way: usize,
    started: Option<Started>,
    /// When a thread is asked for again, after one was refused.
    ask_again: Option<Duration>,
}

#[derive(Debug)]
struct Started {
    /// Dropped to end the work.
    jobs: Option<Sender<Job>>,
    done: Receiver<Done>,
    at_work: AtWork,
}

/// The end that does the jobs.
#[derive(Debug)]
pub(super) struct Worker {
    shared: Arc<Shared>,
    bell: Arc<Bell>,
    jobs: Receiver<Job>,
    done: Sender<Done>,
    /// Something that was to be durable is not.
    failed: bool,
}

impl Upkeep {
    pub(super) fn new(shared: Arc<Shared>, bell: Arc<Bell>) -> Self {
        Self { shared, bell, under_way: 0, started: None, ask_again: None }
    }

    /// Begins a job. Its end rings the bell. Without a thread it has ended when this returns.
    pub(super) fn begin(&mut self, job: Job) {
        assert!(self.under_way < MOST, "the writer begins a job of each kind at most");
        let started = self.started();
        let begun = started.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok());
        assert!(begun, "the worker takes jobs until it is dropped");
        started.at_work.call();
        self.under_way += 1;
    }

    /// Sees to it that the thread is there, which takes after the one that starts it: its CPUs, its scheduling.
    pub(super) fn start(&mut self) {
        self.started();
    }

    fn started(&mut self) -> &Started {
        let (shared, bell, refused_before) = (&self.shared, &self.bell, self.ask_again.is_some());
        let started = self.started.take().unwrap_or_else(|| match Started::new(shared, bell, |worker| shared.workers.start(worker)) {
            Ok(started) => started,
            Err(error) => {
                if !refused_before {
                    tracing::warn!(
                        %error,
                        path = %shared.dir.display(),
                        "no thread for upkeep, for which RLIMIT_NPROC or a limit of pids may be too low; the writer does it itself until there is one"
                    );
                }
                let by_caller = Started::new(shared, bell, |worker| Ok(AtWork::by_caller(worker)));
                by_caller.expect("it takes nothing from the system")
            }
        });
        if !started.at_work.is_by_caller() {
            self.ask_again = None;
        }
        self.started.insert(started)
    }

    /// Asks for a thread again if there is none and the last refusal is a while ago. To be called by the thread that its CPUs are to be taken from.
    pub(super) fn ask_again(&mut self, now: impl FnOnce() -> Duration) {
        if !self.is_by_caller() || !self.is_idle() {
            return;
        }
        let now = now();
        if self.ask_again.is_some_and(|at| at <= now) {
            // Every end was heard: nothing is lost with the channels.
            self.started = None;
            self.started();
        }
        if self.is_by_caller() && self.ask_again.is_none_or(|at| at <= now) {
            self.ask_again = Some(now.saturating_add(THREAD_PATIENCE));
        }
    }

    fn is_by_caller(&self) -> bool {
        self.started.as_ref().is_some_and(|started| started.at_work.is_by_caller())
    }

    /// Whether a job that is begun leaves whoever begins it free.
    pub(super) fn has_thread(&self) -> bool {
        self.is_started() && !self.is_by_caller()
    }

    /// Ends the thread, until the next job. Nothing is under way.
    pub(super) fn rest(&mut self) {
        assert!(self.is_idle(), "a job's end is waited for before the rest");
        self.started = None;
    }

    pub(super) fn is_started(&self) -> bool {
        self.started.is_some()
    }

    /// The end of the job that was begun first, if it has ended.
    pub(super) fn take(&mut self) -> Option<Done> {
        let done = self.started.as_ref()?.done.try_recv().ok()?;
        self.under_way -= 1;
        Some(done)
    }

    /// Whether a job ended.
    pub(super) fn has_news(&self) -> bool {
        self.started.as_ref().is_some_and(|started| !started.done.is_empty())
    }

    /// Whether nothing is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.under_way == 0
    }
}

impl Started {
    fn new(shared: &Arc<Shared>, bell: &Arc<Bell>, start: impl FnOnce(Worker) -> io::Result<AtWork>) -> io::Result<Self> {
        let (send_job, jobs) = crossbeam_channel::bounded::<Job>(MOST);
        let (send_done, done) = crossbeam_channel::bounded(MOST);
        let at_work = start(Worker { shared: Arc::clone(shared), bell: Arc::clone(bell), jobs, done: send_done, failed: false })?;
        Ok(Self { jobs: Some(send_job), done, at_work })
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        self.jobs = None;
        self.at_work.finish();
    }
}

impl Chores for Worker {
    fn work_once(&mut self) -> bool {
        self.jobs.try_recv().map(|job| self.work_at(job)).is_ok()
    }

    fn is_idle(&self) -> bool {
        self.jobs.is_empty()
    }
}

impl Worker {
    /// Does jobs until no more can come.
    pub(super) fn work(mut self) {
        while let Ok(job) = self.jobs.recv() {
            self.work_at(job);
        }
    }

    fn work_at(&mut self, job: Job) {
        // It would vouch for what was to be durable before it. The writer hears of the failure first, and ends.
        let skipped = job.vouches().filter(|_| self.failed && guard::stands(Guard::NoCheckpointAfterFailure));
        let ended = skipped.unwrap_or_else(|| {
            // A panic is an end like any other, so that the writer never waits for what does not come.
            let ended = panic::catch_unwind(AssertUnwindSafe(|| job.run(&self.shared)));
            ended.unwrap_or_else(|panic| Done::Panicked(panic_message(&*panic)))
        });
        self.failed |= ended.is_failure();
        // A writer that is gone hears nothing.
        if self.done.send(ended).is_ok() {
            self.bell.sound();
        }
    }
}
