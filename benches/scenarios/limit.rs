//! What stands beside the engine: the same device, file system and process, and nothing but a loop of system calls.

use std::fs::File;
use std::io::IoSlice;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rustix::io::ReadWriteFlags;
use sapwood::io::{Backend, Buffer, Create, Disk, Open, OsDisk};

use crate::floor::{Area, fill};
use crate::load::{WATCH, alone};
use crate::units::{float, nanos, size, to_u64, to_usize};
use crate::{Outcome, named};

/// Memory of this size is asked for in huge pages, as the engine's is.
const HUGE_PAGE: usize = 2 << 20;
/// Bytes of one read of the reading loop.
const READ_BYTES: usize = 1 << 20;

/// Durable writes of one size into written space, one after another on this thread.
pub struct Bare {
    area: Area,
    memory: Buffer,
    bytes: usize,
}

impl Bare {
    /// Writes the space that is to be overwritten.
    pub fn prepare(dir: &Path, bytes: usize) -> Outcome<Self> {
        let area = Area::prepare_best(dir, to_u64(bytes)).map_err(named("the bare loop's file"))?;
        Ok(Self { area, memory: memory()?, bytes })
    }

    /// For people.
    pub fn describe(&self) -> String {
        format!("one write of {} after another, {}", size(to_u64(self.bytes)), self.area.method().name())
    }

    /// The loop.
    pub fn run(&mut self, time: Duration) -> Outcome<Writes> {
        let begun = Instant::now();
        let memory = &self.memory[..self.bytes];
        let latency = alone(|| self.area.measure(memory, time, &|| false)).map_err(named("a bare write"))?;
        Ok(Writes { seconds: begun.elapsed().as_secs_f64(), latency, bytes: self.bytes })
    }

    /// The same writes by a timetable of so many per second; latency counts from the moment on it. Histogram of those after the warm-up.
    pub fn timetable(&mut self, per_second: f64, warmup: Duration, time: Duration) -> Outcome<Histogram<u64>> {
        alone(|| self.write_by_timetable(per_second, warmup, time))
    }

    fn write_by_timetable(&mut self, per_second: f64, warmup: Duration, time: Duration) -> Outcome<Histogram<u64>> {
        let step = Duration::from_secs_f64(1.0 / per_second.max(1.0));
        let start = Instant::now();
        let mut latency = Histogram::new(3).expect("3 significant digits are allowed");
        let mut due = start;
        while due < start + warmup + time {
            let left = due.saturating_duration_since(Instant::now());
            // The timetable is what is measured against; a sleep may last too long, so the end is watched for.
            std::thread::sleep(left.saturating_sub(WATCH));
            while Instant::now() < due {
                std::hint::spin_loop();
            }
            self.area.write(&self.memory[..self.bytes]).map_err(named("a bare write"))?;
            if due >= start + warmup {
                latency.record(nanos(due.elapsed())).expect("a histogram that grows takes every number");
            }
            due += step;
        }
        Ok(latency)
    }
}

/// What the loop did.
pub struct Writes {
    /// Of each write, in nanoseconds.
    pub latency: Histogram<u64>,
    seconds: f64,
    bytes: usize,
}

impl Writes {
    /// Writes per second.
    pub fn per_second(&self) -> f64 {
        float(self.latency.len()) / self.seconds
    }

    /// MiB per second.
    pub fn mib_per_second(&self) -> f64 {
        self.per_second() * float(to_u64(self.bytes)) / float(1 << 20)
    }
}

/// Writes through the page cache to the end of a new file, never synced: MiB per second.
pub fn growing(dir: &Path, write_bytes: usize, total: u64) -> Outcome<f64> {
    let path = dir.join("growing");
    let file = File::create(&path).map_err(named("the growing file"))?;
    let memory = memory()?;
    let begun = Instant::now();
    let mut position = 0;
    while position < total {
        let written = rustix::io::pwritev2(&file, &[IoSlice::new(&memory[..write_bytes])], position, ReadWriteFlags::empty());
        position += to_u64(written.map_err(named("a bare write"))?);
    }
    let seconds = begun.elapsed().as_secs_f64();
    // Its pages go with it: the kernel does not write them while the engine is measured.
    std::fs::remove_file(&path).map_err(named("remove the growing file"))?;
    Ok(float(position) / float(1 << 20) / seconds)
}

/// How [`read`] reads in this directory.
pub fn describe_reads(dir: &Path) -> Outcome<&'static str> {
    let probe = tempfile::NamedTempFile::new_in(dir).map_err(named("a file to try"))?;
    let (_, direct) = open_to_read(probe.path())?;
    Ok(if direct { "O_DIRECT" } else { "through the page cache, evicted before (O_DIRECT is refused)" })
}

/// Reads this part of a file on this thread, past the page cache where that is possible.
pub fn read(path: &Path, range: &Range<u64>) -> Outcome<Duration> {
    let (file, _) = open_to_read(path)?;
    let mut memory = memory()?;
    let begun = Instant::now();
    let mut position = range.start;
    while position < range.end {
        let bytes = READ_BYTES.min(to_usize(range.end - position).next_multiple_of(4096));
        match file.read_at(&mut memory[..bytes], position).map_err(named("a bare read"))? {
            0 => break,
            read => position += to_u64(read),
        }
    }
    Ok(begun.elapsed())
}

/// The file, and whether reads of it go past the page cache.
fn open_to_read(path: &Path) -> Outcome<(Arc<dyn sapwood::io::File>, bool)> {
    let disk = OsDisk::new(Backend::Posix).map_err(named("the system"))?;
    if let Ok(file) = disk.open(path, Open { write: false, create: Create::Never, direct: true }) {
        return Ok((file, true));
    }
    let file = disk.open(path, Open::READ).map_err(named("open the log"))?;
    file.evict(0).map_err(named("evict the log"))?;
    Ok((file, false))
}

/// Not zeros, and touched, so that its pages are there.
fn memory() -> Outcome<Buffer> {
    let mut memory = Buffer::new(HUGE_PAGE).map_err(named("memory"))?;
    fill(&mut memory);
    Ok(memory)
}
