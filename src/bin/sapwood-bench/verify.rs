//! Reads everything back and has it compared, several partitions at a time.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use sapwood::{Durability, Partition, ReaderConfig, Topic, Visibility};

use crate::acks::{Ack, AckLog, merge};
use crate::check::{Checker, Findings, Kind, Source};
use crate::interrupts::Interrupts;
use crate::payload::Payload;
use crate::progress::Progress;
use crate::units::to_u64;

/// Bytes of one read.
const READ_BYTES: usize = 1 << 20;

/// What is to be read, and what should be there.
pub struct Task<'a> {
    /// The topic, for its routing.
    pub topic: &'a Topic,
    /// All its partitions, in order.
    pub partitions: &'a [Partition],
    /// What the records hold.
    pub payload: &'a Payload,
    /// How many producers there were.
    pub producers: u32,
    /// The answers by partition, and there by producer.
    pub acks: &'a [Vec<(u32, AckLog)>],
    /// Records that were answered, for the progress line.
    pub acknowledged: u64,
    /// Appends failed, so that records may be there which no answer tells of.
    pub unanswered: bool,
    /// Ctrl-C.
    pub interrupts: &'a Interrupts,
}

/// What came of it.
pub struct Verification {
    /// Of all partitions.
    pub findings: Findings,
    /// How long it took.
    pub elapsed: Duration,
    /// Everything was read; if not, Ctrl-C was pressed meanwhile.
    pub complete: bool,
}

impl Verification {
    /// Whether every acknowledged record is there as it was written.
    pub fn passed(&self) -> bool {
        self.complete && self.findings.differences == 0
    }
}

/// Reads all partitions from their first record to their durable end, and compares.
pub fn run(task: &Task<'_>, progress: &Progress) -> Verification {
    let start = Instant::now();
    progress.step("reading every record back");
    let threads = thread::available_parallelism().map_or(1, usize::from).min(task.partitions.len());
    let shared = Shared {
        task,
        progress,
        // A Ctrl-C that ended the load lets the verification run; another one ends the program.
        stoppable: !task.interrupts.any(),
        stopped: AtomicBool::new(false),
        next: AtomicUsize::new(0),
        read: AtomicU64::new(0),
        findings: Mutex::new(Findings::default()),
    };
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| shared.work());
        }
    });
    Verification {
        elapsed: start.elapsed(),
        complete: !shared.stopped.into_inner(),
        findings: shared.findings.into_inner().unwrap_or_else(PoisonError::into_inner),
    }
}

struct Shared<'a> {
    task: &'a Task<'a>,
    progress: &'a Progress,
    stoppable: bool,
    stopped: AtomicBool,
    /// The next partition that nobody reads yet.
    next: AtomicUsize,
    /// Records read, for the progress line.
    read: AtomicU64,
    findings: Mutex<Findings>,
}

impl Shared<'_> {
    fn work(&self) {
        loop {
            // Only gives out numbers: relaxed is enough.
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(partition) = self.task.partitions.get(index) else { return };
            let findings = self.partition(index, partition);
            self.findings.lock().unwrap_or_else(PoisonError::into_inner).absorb(findings);
        }
    }

    fn partition(&self, index: usize, partition: &Partition) -> Findings {
        let task = self.task;
        let route = |key: &[u8]| task.topic.partition_for(Some(key));
        let number = u32::try_from(index).expect("partitions are numbered by u32");
        let source =
            Source { payload: task.payload, producers: task.producers, partition: number, route: &route, unanswered: task.unanswered };
        let mut checker = Checker::new(source, merge(&task.acks[index]));
        match self.read(partition, &mut checker) {
            Ok(()) if self.stopped.load(Ordering::Relaxed) => checker.abandon(None),
            Ok(()) => checker.finish(),
            Err((offset, error)) => checker.abandon(Some(Kind::Unreadable { offset, error })),
        }
    }

    fn read(&self, partition: &Partition, checker: &mut Checker<'_, impl Iterator<Item = Ack>>) -> Result<(), (u64, String)> {
        let mut offset = partition.first_offset();
        let at = |offset: u64| move |error: sapwood::Error| (offset, error.to_string());
        let up_to = settle(partition).map_err(at(offset))?;
        let mut reader =
            partition.reader_with(ReaderConfig { piece_bytes: READ_BYTES, ..ReaderConfig::up_to(up_to) }).map_err(at(offset))?;
        loop {
            if self.stoppable && self.task.interrupts.any() {
                self.stopped.store(true, Ordering::Relaxed);
                return Ok(());
            }
            let records = reader.read(offset, READ_BYTES).map_err(at(offset))?;
            if records.is_empty() {
                return Ok(()); // the end; what is missing before it, the checker knows
            }
            records.iter().for_each(|record| checker.record(&record));
            let next = records.next_offset();
            if next <= offset {
                return Err((offset, format!("a read of {} records ended at offset {next}", records.len())));
            }
            offset = next;
            let read = to_u64(records.len());
            let read = self.read.fetch_add(read, Ordering::Relaxed) + read;
            self.progress.part(read, self.task.acknowledged);
        }
    }
}

/// Makes durable what was answered before it was. A partition that stopped at a failed write cannot; what the kernel has of it is read.
pub fn settle(partition: &Partition) -> sapwood::Result<Visibility> {
    match partition.sync() {
        Ok(()) => Ok(Visibility::Durable),
        Err(error) if error.is_failed() => {
            Ok(if partition.config().durability == Durability::Durable { Visibility::Durable } else { Visibility::Appended })
        }
        Err(error) => Err(error),
    }
}
