//! What a durable write costs on a device: the two tables of ARCHITECTURE.md, "What was measured for it" and "Threads and CPUs".
//!
//! `cargo bench --bench device` prints them; `cargo bench --bench device -- --save FILE` also writes them there, with what they
//! depend on: date, command, kernel, CPUs, file system. `SAPWOOD_BENCH_DIR` chooses the directory, and so the device; by default
//! the one of the target directory. About 600 MiB are needed there for a while.
//!
//! The rows of a table take turns, a few calls each, so that a machine that slows down slows all of them down; what to look at is
//! the ratios. What is refused here (`O_DIRECT`, io_uring, huge pages) is said in the row. One caller, one write at a time: what a
//! load costs is the load generator's to say.
#![allow(clippy::print_stdout, reason = "a benchmark's result")]

#[path = "../src/bin/sapwood-bench/host.rs"]
#[allow(dead_code, unused_imports, reason = "its own tests are compiled with the load generator")]
mod host;

use std::env;
use std::error::Error;
use std::fmt::Display;
use std::fs;
use std::io::{ErrorKind, IoSlice};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::ReadWriteFlags;
use sapwood::io::transfer::write_all_at;
use sapwood::io::{Action, Backend, Buffer, Create, Disk, File, Op, Open, OsDisk, RingConfig, Token};
use sapwood::{Batch, Broker, BrokerConfig, Pinning, TopicConfig};

use host::Host;

/// Name, bytes of a write, and rounds of [`SIZE_TURN`] writes per row.
const SIZES: [(&str, usize, usize); 3] = [("4 KiB", 4 << 10, 200), ("100 KiB", 100 << 10, 80), ("1 MiB", 1 << 20, 20)];
const SIZE_TURN: usize = 10;

/// The second table: bytes of a bare write, of the file that it goes through again and again, and of an appended value.
const WRITE_BYTES: usize = 4 << 10;
const FILE_BYTES: usize = 16 << 20;
const VALUE_BYTES: usize = 1_000;
const APPEND_ROUNDS: usize = 80;
const APPEND_TURN: usize = 50;

/// Memory of at least this size asks for huge pages.
const HUGE_PAGE: usize = 2 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse(env::args().skip(1))?;
    if args.skip {
        return Ok(());
    }
    let parent = env::var_os("SAPWOOD_BENCH_DIR").map_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")), PathBuf::from);
    let mut report = String::new();
    let mut tell = |section: String| {
        println!("{section}");
        report.extend([section.as_str(), "\n"]);
    };
    tell(heading(&Host::of(&parent), &args));
    tell("One pwritev2 at a time, O_DIRECT + RWF_DSYNC, from the start of a file to its end.\n".to_owned());
    for (name, bytes, rounds) in SIZES {
        tell(by_space_and_memory(&parent, name, bytes, args.rounds(rounds))?);
    }
    tell(format!(
        "One append of {VALUE_BYTES} bytes at a time, beside one bare write of {WRITE_BYTES} bytes at a time into written space.\n"
    ));
    tell(by_thread_and_cpu(&parent, args.rounds(APPEND_ROUNDS))?);
    if let Some(file) = args.save {
        fs::write(&file, report).map_err(named(&format!("write {}", file.display())))?;
    }
    Ok(())
}

/// What cargo and the user ask for.
struct Args {
    save: Option<PathBuf>,
    /// `cargo bench`, rather than `cargo test --benches`, which only wants to see it run.
    bench: bool,
    /// Another benchmark's name was asked for.
    skip: bool,
    /// What the user wrote.
    words: Vec<String>,
}

impl Args {
    fn parse(args: impl Iterator<Item = String>) -> Result<Self, String> {
        let (bench, words): (Vec<_>, Vec<_>) = args.partition(|word| word == "--bench");
        let mut parsed = Self { save: None, bench: !bench.is_empty(), skip: false, words };
        let mut words = parsed.words.iter();
        while let Some(word) = words.next() {
            match word.as_str() {
                "--save" => parsed.save = Some(words.next().ok_or("--save wants a file")?.into()),
                flag if flag.starts_with('-') => return Err(format!("unknown argument {flag}; there is only --save FILE")),
                filter => parsed.skip |= !"device".contains(filter),
            }
        }
        Ok(parsed)
    }

    fn rounds(&self, full: usize) -> usize {
        if self.bench { full } else { 1 }
    }
}

/// What the figures depend on, and how to get them again.
fn heading(host: &Host, args: &Args) -> String {
    let date = Command::new("date").args(["--utc", "+%F %R UTC"]).output().ok();
    let date = date.and_then(|output| String::from_utf8(output.stdout).ok()).unwrap_or_else(|| "unknown".to_owned());
    let dir = env::var("SAPWOOD_BENCH_DIR").map_or_else(|_| String::new(), |dir| format!("SAPWOOD_BENCH_DIR={dir} "));
    let words = if args.words.is_empty() { String::new() } else { format!(" -- {}", args.words.join(" ")) };
    let command =
        if args.bench { format!("{dir}cargo bench --bench device{words}") } else { "a trial of one round, no figures".to_owned() };
    let huge = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_else(|_| "unknown".to_owned());
    let memory = if host.in_memory { ", in memory: nothing on it is durable" } else { "" };
    format!(
        "sapwood:      {}\ndate:         {}\ncommand:      {command}\nkernel:       {}\nCPUs:         {}\n\
         file system:  {}{memory}\nhuge pages:   {}\n",
        env!("CARGO_PKG_VERSION"),
        date.trim(),
        host.kernel,
        host.cpus,
        host.filesystem,
        huge.trim(),
    )
}

/// The first table, for one size: what is gained by writing space before, and by memory that is one piece.
fn by_space_and_memory(parent: &Path, size: &str, bytes: usize, rounds: usize) -> Result<String, Box<dyn Error>> {
    let dir = tempfile::tempdir_in(parent)?;
    let area = |name: &str, written| Area::create(&dir.path().join(name), rounds * SIZE_TURN * bytes, written);
    let write = |area: Outcome<Area>, memory: Outcome<Arc<Buffer>>| -> Outcome<Call> {
        let (mut area, memory) = (area?, memory?);
        Ok(Box::new(move || area.write(&memory[..bytes])))
    };
    // Both rows from the same memory: how scattered its pages are differs from one piece to the next.
    let small = memory(bytes, false);
    let mut rows = [
        Row::new("space only allocated, buffer of 4 KiB pages", write(area("allocated", false), small.clone())),
        Row::new("space written with zeros before, buffer of 4 KiB pages", write(area("written", true), small)),
        Row::new("the same from a 2 MiB huge page", write(area("huge", true), memory(HUGE_PAGE, true))),
    ];
    take_turns(&mut rows, rounds, SIZE_TURN);
    Ok(table(&format!("{size}, {} writes per row", rounds * SIZE_TURN), &rows))
}

/// The second table: what an append costs beyond the write that it cannot do without.
fn by_thread_and_cpu(parent: &Path, rounds: usize) -> Result<String, Box<dyn Error>> {
    let dir = tempfile::tempdir_in(parent)?;
    let area = |name: &str| Area::create(&dir.path().join(name), FILE_BYTES, true);
    let mut rows = vec![
        Row::new("pwritev2, O_DIRECT + RWF_DSYNC, on the calling thread", area("raw").and_then(on_this_thread)),
        Row::new("the same through io_uring", area("raw-uring").and_then(through_io_uring)),
        Row::new("the same by another thread, asked through a channel", area("raw-thread").and_then(by_another_thread)),
    ];
    // The engine falls back by itself.
    let cached = if open_direct(&dir.path().join("probe")).is_ok() { "" } else { ", through the page cache (O_DIRECT is refused)" };
    for (index, (backend, name, cpu)) in appends().into_iter().enumerate() {
        let pinning = cpu.map_or(Pinning::None, |cpu| Pinning::Cores(vec![cpu]));
        let writer = cpu.map_or_else(|| "not pinned".to_owned(), |cpu| format!("pinned to CPU {cpu}"));
        let call = append(&dir.path().join(format!("data-{index}")), BrokerConfig { backend, pinning, ..BrokerConfig::default() });
        rows.push(Row::new(format!("an append on {name}, the writer {writer}{cached}"), call));
    }
    let before = interrupts();
    take_turns(&mut rows, rounds, APPEND_TURN);
    let calls = rounds * APPEND_TURN;
    Ok(table(&format!("{calls} calls per row"), &rows) + &interrupts_since(&before, to_u64(calls)))
}

/// The engine's rows: backend, its name, and the CPU that the writer is pinned to.
fn appends() -> Vec<(Backend, &'static str, Option<usize>)> {
    let mask = core_affinity::get_core_ids().unwrap_or_default();
    let mut cpus = vec![mask.first(), mask.last()];
    cpus.dedup();
    let pinned = cpus.into_iter().flatten().map(|cpu| (Backend::Uring, "io_uring", Some(cpu.id)));
    pinned.chain([(Backend::Uring, "io_uring", None), (Backend::Posix, "plain calls", None)]).collect()
}

/// What is measured.
type Call = Box<dyn FnMut() -> Outcome<()>>;

/// A success, or the words for the row.
type Outcome<T> = Result<T, String>;

fn on_this_thread(mut area: Area) -> Outcome<Call> {
    let memory = memory(WRITE_BYTES, false)?;
    Ok(Box::new(move || area.write(&memory)))
}

/// Through the ring of the backend, with its registered file and buffer.
fn through_io_uring(mut area: Area) -> Outcome<Call> {
    let disk = OsDisk::new(Backend::Uring).map_err(named("io_uring"))?;
    let config = RingConfig { depth: 1, files: 1, register_files: true, buffers: 1, buffer_bytes: WRITE_BYTES, one_thread: true };
    let mut ring = disk.ring(&config).map_err(named("io_uring"))?;
    let slot = ring.attach(Arc::clone(&area.file)).map_err(named("attach to a ring"))?;
    let mut buffer = ring.take_buffers().pop();
    buffer.as_deref_mut().expect("the ring was made with one").fill(7);
    Ok(Box::new(move || {
        let buffer_in = buffer.take().expect("a completion gives it back");
        let action = Action::Write { durable: true };
        let op = Op { action, slot, position: area.advance(WRITE_BYTES), buffer: buffer_in, range: 0..WRITE_BYTES };
        ring.submit(Token(0), op).map_err(|rejected| named("submit")(rejected.error))?;
        let completion = loop {
            match ring.reap().map_err(named("reap"))? {
                Some(completion) => break completion,
                None => ring.wait(None).map_err(named("wait"))?,
            }
        };
        buffer = Some(completion.buffer);
        whole(completion.result.map_err(named("a write with RWF_DSYNC through io_uring"))?, WRITE_BYTES)
    }))
}

/// The thread ends when the call, and with it the channel, goes.
fn by_another_thread(mut area: Area) -> Outcome<Call> {
    let memory = memory(WRITE_BYTES, false)?;
    let (requests, asked) = crossbeam_channel::bounded::<oneshot::Sender<Outcome<()>>>(8);
    thread::spawn(move || {
        for answer in asked {
            let _ = answer.send(area.write(&memory)); // whoever asked waits
        }
    });
    Ok(Box::new(move || {
        let (answer, answered) = oneshot::channel();
        requests.send(answer).expect("the thread takes requests as long as there is a sender");
        answered.recv().map_err(named("the other thread"))?
    }))
}

/// One durable append and the wait for its answer.
fn append(dir: &Path, config: BrokerConfig) -> Outcome<Call> {
    let broker = Broker::open(dir, config).map_err(named("open"))?;
    let topic = broker.create_topic("bench", TopicConfig::default()).map_err(named("create a topic"))?;
    let partition = topic.partition(0).map_err(named("partition 0"))?;
    let value = vec![7; VALUE_BYTES];
    Ok(Box::new(move || {
        let _open = &broker;
        let batch = Batch::of(None, &value).map_err(named("a batch"))?;
        partition.append(batch).and_then(|ticket| ticket.wait()).map(|_| ()).map_err(named("append"))
    }))
}

/// A file that is written from its start to its end, and again, past the page cache.
struct Area {
    file: Arc<dyn File>,
    len: u64,
    position: u64,
}

impl Area {
    /// With room for so many bytes, which were `written` before or only allocated.
    fn create(path: &Path, bytes: usize, written: bool) -> Outcome<Self> {
        let area = Self { file: open_direct(path)?, len: to_u64(bytes), position: 0 };
        match area.file.allocate(0..area.len) {
            Err(error) if written && error.kind() == ErrorKind::Unsupported => {} // the zeros take the space
            allocated => allocated.map_err(named("fallocate"))?,
        }
        let zeros = Buffer::new(1 << 20).map_err(named("memory"))?;
        let mut position = 0;
        while written && position < bytes {
            let piece = &zeros[..zeros.len().min(bytes - position)];
            write_all_at(&*area.file, piece, to_u64(position), false).map_err(named("write zeros"))?;
            position += piece.len();
        }
        area.file.sync().map_err(named("fdatasync"))?;
        Ok(area)
    }

    /// Where the next write goes.
    fn advance(&mut self, bytes: usize) -> u64 {
        let position = self.position;
        self.position = (position + to_u64(bytes)) % self.len;
        position
    }

    /// The bare system call, without the fallbacks of the seam.
    fn write(&mut self, bytes: &[u8]) -> Outcome<()> {
        let position = self.advance(bytes.len());
        let fd = self.file.fd().expect("files of the system have a descriptor");
        let written = rustix::io::pwritev2(fd, &[IoSlice::new(bytes)], position, ReadWriteFlags::DSYNC);
        whole(written.map_err(named("pwritev2 with RWF_DSYNC"))?, bytes.len())
    }
}

fn open_direct(path: &Path) -> Outcome<Arc<dyn File>> {
    let disk = OsDisk::new(Backend::Posix).map_err(named("the system"))?;
    disk.open(path, Open { write: true, create: Create::Empty, direct: true }).map_err(named("open with O_DIRECT"))
}

fn whole(written: usize, asked: usize) -> Outcome<()> {
    if written == asked { Ok(()) } else { Err(format!("a write of {asked} bytes ended after {written}")) }
}

/// Memory that is in use, holds no zeros, which some devices need not store, and has pages of the size that its row names.
fn memory(bytes: usize, huge: bool) -> Outcome<Arc<Buffer>> {
    let before = huge_page_kib();
    let mut buffer = Buffer::new(bytes).map_err(named("memory"))?;
    buffer.fill(7);
    match (huge, huge_page_kib() > before) {
        (true, false) => Err("the kernel gave no huge page, as far as /proc/self/smaps_rollup tells".to_owned()),
        (false, true) => Err("the kernel gave a huge page unasked".to_owned()),
        _ => Ok(Arc::new(buffer)),
    }
}

/// How much of this process's memory lies in huge pages.
fn huge_page_kib() -> u64 {
    let text = fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let kib = |line: &str| line.strip_prefix("AnonHugePages:")?.trim().strip_suffix("kB")?.trim().parse().ok();
    text.lines().find_map(kib).unwrap_or(0)
}

/// One line of a table.
struct Row {
    name: String,
    /// Or why there is none, or no more.
    call: Outcome<Call>,
    times: Vec<Duration>,
}

impl Row {
    fn new(name: impl Into<String>, call: Outcome<Call>) -> Self {
        Self { name: name.into(), call, times: Vec::new() }
    }

    /// Its first failure ends it.
    fn measure(&mut self) {
        if let Ok(call) = &mut self.call {
            let begun = Instant::now();
            let outcome = call();
            self.times.push(begun.elapsed());
            if let Err(error) = outcome {
                self.call = Err(error);
            }
        }
    }

    /// The time that so many of a hundred calls stayed within, if all went well.
    fn percentile(&self, percent: usize) -> Option<Duration> {
        let mut times = self.times.clone();
        times.sort_unstable();
        self.call.as_ref().ok().and_then(|_| times.get(times.len() * percent / 100).copied())
    }
}

fn take_turns(rows: &mut [Row], rounds: usize, turn: usize) {
    for _ in 0..rounds {
        for row in &mut *rows {
            (0..turn).for_each(|_| row.measure());
        }
    }
}

/// As text, with each median also as a multiple of the first row's.
fn table(title: &str, rows: &[Row]) -> String {
    let width = rows.iter().map(|row| row.name.len()).max().unwrap_or(0);
    let mut text = format!("{title:width$}    p50 µs    ratio    p99 µs\n");
    let base = rows.first().and_then(|row| row.percentile(50));
    for row in rows {
        let line = match (&row.call, row.percentile(50), row.percentile(99)) {
            (Err(why), ..) => format!("  not measured: {why}"),
            (_, Some(p50), Some(p99)) => {
                let ratio = base.map_or_else(|| "-".to_owned(), |base| format!("{:.2}", p50.div_duration_f64(base)));
                format!("{:10.1}{ratio:>9}{:10.1}", micros(p50), micros(p99))
            }
            _ => "  not measured".to_owned(),
        };
        text.extend([&format!("{:width$}", row.name), line.as_str(), "\n"]);
    }
    text
}

/// The interrupts of devices, which are the numbered ones: each line's name, and its counts under the names of the CPUs.
fn interrupts() -> Vec<(String, Vec<(String, u64)>)> {
    let text = fs::read_to_string("/proc/interrupts").unwrap_or_default();
    let mut lines = text.lines();
    let cpus: Vec<_> = lines.next().unwrap_or_default().split_whitespace().collect();
    let parse = |line: &str| {
        let (number, rest) = line.split_once(':')?;
        let number: u32 = number.trim().parse().ok()?;
        let mut words = rest.split_whitespace();
        let counts = cpus.iter().map(|&cpu| Some((cpu.to_owned(), words.next()?.parse().ok()?))).collect::<Option<_>>()?;
        Some((format!("{number} {}", words.collect::<Vec<_>>().join(" ")), counts))
    };
    lines.filter_map(parse).collect()
}

/// Those that came `least` times or more since: which CPU the device's interrupt goes to is what tells the pinned rows apart.
fn interrupts_since(before: &[(String, Vec<(String, u64)>)], least: u64) -> String {
    let mut text = String::new();
    for (name, now) in interrupts() {
        let Some((_, then)) = before.iter().find(|(other, _)| *other == name) else { continue };
        let came: Vec<_> = now.iter().zip(then).map(|((cpu, now), (_, then))| (cpu, now.saturating_sub(*then))).collect();
        if came.iter().map(|(_, count)| count).sum::<u64>() >= least {
            let by_cpu: Vec<_> = came.iter().filter(|(_, count)| *count > 0).map(|(cpu, count)| format!("{cpu} {count}")).collect();
            text.extend(["interrupts meanwhile, ", &name, ": ", &by_cpu.join(", "), "\n"]);
        }
    }
    text
}

fn named<E: Display>(what: &str) -> impl FnOnce(E) -> String {
    move |error| format!("{what}: {error}")
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn to_u64(bytes: usize) -> u64 {
    u64::try_from(bytes).expect("usize is 64 bits wide")
}
