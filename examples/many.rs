//! What partitions cost while they rest: memory, threads, files, CPU, and the time to open them.
//!
//! cargo run --release --example many -- [--json FILE] [--data-dir DIR] [PARTITIONS...]
//!
//! For each number of partitions (1, 100 and 2,000 unless told otherwise) and for `PerPartition` and `Shared(2)`, in a process of
//! its own: a topic of so many partitions is made and filled with two records each, closed, and opened again; each partition takes three
//! more, one after another; once all of them rest, the process is looked at for ten seconds, and killed. Another one opens what it left.
#![allow(clippy::print_stdout, reason = "it prints its table")]

use std::error::Error;
use std::fs;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use sapwood::{Batch, Broker, BrokerConfig, TopicConfig, Writers};
use serde::{Deserialize, Serialize};

/// Partitions rest 5 s after their last record.
const UNTIL_REST: Duration = Duration::from_secs(8);
const LOOK: Duration = Duration::from_secs(10);
const SHARED: u32 = 2;
const ONE: &str = "--one";
const REOPEN: &str = "--reopen";

#[derive(Debug, Serialize, Deserialize)]
struct Figures {
    partitions: u32,
    writers: String,
    /// Making the topic; opening the broker with it, closed cleanly before.
    create_seconds: f64,
    open_seconds: f64,
    /// Opening it after the process was killed.
    reopen_seconds: f64,
    /// Against the same process before it opened the broker.
    rss_kib_busy: u64,
    rss_kib_at_rest: u64,
    threads_at_rest: u64,
    files_at_rest: u64,
    /// In [`LOOK`].
    cpu_ms_at_rest: u64,
    context_switches_at_rest: u64,
}

fn status(name: &str) -> Result<u64, Box<dyn Error>> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix(name)).ok_or("no such line in /proc/self/status")?;
    Ok(line.trim_start_matches(':').split_whitespace().next().ok_or("an empty line")?.parse()?)
}

fn files() -> Result<u64, Box<dyn Error>> {
    Ok(u64::try_from(fs::read_dir("/proc/self/fd")?.count())?)
}

/// Nanoseconds on a CPU and times off it, of all threads of this process but the one that asks.
fn scheduled() -> Result<(u64, u64), Box<dyn Error>> {
    let own = fs::read_link("/proc/thread-self")?;
    let (mut ran, mut switches) = (0, 0);
    for task in fs::read_dir("/proc/self/task")? {
        let task = task?;
        if Some(task.file_name().as_os_str()) == own.file_name() {
            continue;
        }
        let text = fs::read_to_string(task.path().join("schedstat"))?;
        let mut numbers = text.split_whitespace().map(str::parse::<u64>);
        ran += numbers.next().ok_or("an empty schedstat")??;
        switches += numbers.nth(1).ok_or("a short schedstat")??;
    }
    Ok((ran, switches))
}

/// Says its figures, and holds the broker until it is killed.
fn one(dir: &Path, partitions: u32, shared: u32) -> Result<(), Box<dyn Error>> {
    let writers = if shared == 0 { Writers::PerPartition } else { Writers::Shared(shared) };
    let config = || BrokerConfig { writers, ..BrokerConfig::default() };
    let start = Instant::now();
    let broker = Broker::open(dir, config())?;
    let topic = broker.create_topic("many", TopicConfig { partitions, preallocate_bytes: 64 << 10, ..TopicConfig::default() })?;
    let create_seconds = start.elapsed().as_secs_f64();
    for partition in &topic.partitions() {
        partition.append_and_wait(Batch::of(None, b"one")?)?;
        partition.append_and_wait(Batch::of(None, b"two")?)?;
    }
    drop(topic);
    broker.close()?;

    let (rss, threads, open_files) = (status("VmRSS")?, status("Threads")?, files()?);
    let start = Instant::now();
    let broker = Broker::open(dir, config())?;
    let open_seconds = start.elapsed().as_secs_f64();
    for round in [b"three", b"four.", b"five."] {
        for partition in &broker.topic("many")?.partitions() {
            partition.append_and_wait(Batch::of(None, round)?)?;
        }
    }
    let rss_kib_busy = status("VmRSS")?.saturating_sub(rss);
    thread::sleep(UNTIL_REST);
    let (rss_kib_at_rest, threads_at_rest, files_at_rest) =
        (status("VmRSS")?.saturating_sub(rss), status("Threads")? - threads, files()? - open_files);
    let (ran, switches) = scheduled()?;
    thread::sleep(LOOK);
    let (ran_then, switches_then) = scheduled()?;
    let figures = Figures {
        partitions,
        writers: format!("{writers:?}"),
        create_seconds,
        open_seconds,
        reopen_seconds: 0.0,
        rss_kib_busy,
        rss_kib_at_rest,
        threads_at_rest,
        files_at_rest,
        cpu_ms_at_rest: ran_then.saturating_sub(ran) / 1_000_000,
        context_switches_at_rest: switches_then.saturating_sub(switches),
    };
    println!("{}", serde_json::to_string(&figures)?);
    io::stdin().read_line(&mut String::new())?;
    Err("nobody killed it".into())
}

/// A process of its own for [`one`], killed at its end, and one for [`reopen`].
fn measure(dir: &Path, partitions: u32, shared: u32) -> Result<Figures, Box<dyn Error>> {
    let mut child = Command::new(std::env::current_exe()?)
        .arg(ONE)
        .arg(dir)
        .args([partitions.to_string(), shared.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().ok_or("no output")?).read_line(&mut line)?;
    child.kill()?;
    child.wait()?;
    let mut figures: Figures = serde_json::from_str(&line)?;
    let reopened = Command::new(std::env::current_exe()?).arg(REOPEN).arg(dir).stderr(Stdio::inherit()).output()?;
    figures.reopen_seconds = String::from_utf8(reopened.stdout)?.trim().parse()?;
    Ok(figures)
}

/// Opens what the killed process left, and gives the seconds that it took.
fn reopen(dir: &Path) -> Result<f64, Box<dyn Error>> {
    let start = Instant::now();
    let broker = Broker::open(dir, BrokerConfig::default())?;
    let seconds = start.elapsed().as_secs_f64();
    let topic = broker.topic("many")?;
    let short = topic.partitions().iter().filter(|partition| partition.next_offset() != 5).count();
    drop(topic);
    broker.close()?;
    if short == 0 { Ok(seconds) } else { Err(format!("{short} partitions do not have their five records").into()) }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (mut json, mut data, mut counts) = (None, PathBuf::from("."), Vec::new());
    while let Some(arg) = args.next() {
        match arg.as_str() {
            ONE => {
                let dir = args.next().ok_or("a directory is missing")?;
                let mut number = || args.next().ok_or("a number is missing")?.parse::<u32>().map_err(Box::<dyn Error>::from);
                return one(Path::new(&dir), number()?, number()?);
            }
            REOPEN => {
                println!("{}", reopen(Path::new(&args.next().ok_or("a directory is missing")?))?);
                return Ok(());
            }
            "--json" => json = Some(args.next().ok_or("--json wants a file")?),
            "--data-dir" => data = PathBuf::from(args.next().ok_or("--data-dir wants a directory")?),
            count => counts.push(count.parse::<u32>()?),
        }
    }
    if counts.is_empty() {
        counts = vec![1, 100, 2000];
    }
    println!("partitions  writers       create s   open s  reopen s   busy KiB   rest KiB  threads  files   CPU ms  switches");
    let mut all = Vec::new();
    for count in counts {
        for shared in [0, SHARED] {
            let dir = data.join(format!("sapwood-many-{}", std::process::id()));
            let figures = measure(&dir, count, shared);
            let removed = fs::remove_dir_all(&dir);
            let figures = figures?;
            removed?;
            println!(
                "{:>10}  {:12} {:>9.2} {:>8.2} {:>9.2} {:>10} {:>10} {:>8} {:>6} {:>8} {:>9}",
                figures.partitions,
                figures.writers,
                figures.create_seconds,
                figures.open_seconds,
                figures.reopen_seconds,
                figures.rss_kib_busy,
                figures.rss_kib_at_rest,
                figures.threads_at_rest,
                figures.files_at_rest,
                figures.cpu_ms_at_rest,
                figures.context_switches_at_rest
            );
            all.push(figures);
        }
    }
    if let Some(path) = json {
        fs::write(path, serde_json::to_string_pretty(&all)?)?;
    }
    Ok(())
}
