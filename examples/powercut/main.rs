//! Power cuts on a block device with a real kernel file system, as real as they get without pulling a plug.
//!
//! A FUSE file system of our own serves one file, the disk; a loop device makes a block device of it; ext4, xfs or btrfs is made on that
//! and mounted, and a process appends to logs there. Before a write or flush drawn at random the power is cut: what the disk held
//! then, as far as flushes had been answered, and a part of the rest, torn at sectors, is put on a plain loop device, mounted, and opened.
//! What had been acknowledged before must be there. The next life of the disk begins with what one of these cuts left, not yet opened, so
//! that the next cut may hit the opening.
//!
//! Sectors are 512 bytes on ext4 and xfs. btrfs does not mount where its super block was torn, so it gets a disk that writes 4 KiB in one.
//!
//! What it cannot show: a device that lies about its flushes, tears a sector, or spoils sectors near those it wrote; the controller's and
//! the drive's own ways; memory that goes wrong while the voltage falls. Reads see what was written, in order, by one kernel. What the kernel
//! takes for written but does not flush is the file systems' business, and is under test here with them.
//!
//! `scripts/powercut` runs this and cleans up after it, whatever happens to it.
#![allow(clippy::unwrap_used, reason = "a test: a failure is a panic with its place")]
#![allow(clippy::cast_possible_truncation, reason = "a test: the numbers are small and chosen here")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program")]
#![allow(unreachable_pub, missing_docs, reason = "one binary: everything is reachable from here alone")]

mod check;
mod disk;
mod load;
mod system;

// The judge that the integration tests have, and what it needs to know of the format.
#[allow(dead_code)]
#[path = "../../tests/it/format.rs"]
mod format;
#[allow(dead_code)]
#[path = "../../tests/it/oracle.rs"]
mod oracle;

use std::io::{BufRead, BufReader};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use check::{Ack, History, check};
use disk::{Cut, Disk, Image, Survival};
use system::{Loop, Mounted, Served, run};

/// When a load that comes to no cut is cut all the same.
const LIFE: Duration = Duration::from_secs(20);

/// Random numbers, reproducible (SplitMix64).
struct Rng(u64);

impl Rng {
    fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn one_of<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize].clone()
    }
}

/// What a file system needs of the disk.
struct Needs {
    mkfs: &'static [&'static str],
    mib: u64,
    /// What the disk writes wholly or not at all.
    sector_bytes: usize,
}

impl Needs {
    fn of(file_system: &str) -> Self {
        // No discards: they would only be refused.
        match file_system {
            "ext4" => Self { mkfs: &["-q", "-E", "nodiscard"], mib: 128, sector_bytes: 512 },
            "xfs" => Self { mkfs: &["-q", "-K"], mib: 512, sector_bytes: 512 },
            // Its super block takes 4 KiB, and it does not mount where that was torn: it expects disks that write as much in one.
            "btrfs" => Self { mkfs: &["-q", "-K"], mib: 512, sector_bytes: 4096 },
            other => panic!("no file system is called {other}"),
        }
    }
}

/// The load's process, and what it has said.
struct Load {
    process: Child,
    acks: Arc<Mutex<Vec<Ack>>>,
    has_ended: Arc<AtomicBool>,
    reader: Option<JoinHandle<Vec<String>>>,
}

impl Load {
    fn start(data: &Path, seed: u64, life: u32, acks: &Arc<Mutex<Vec<Ack>>>) -> Self {
        // This program, also where it was built anew meanwhile.
        let mut process = Command::new("/proc/self/exe")
            .args(["load", data.to_str().unwrap(), &seed.to_string(), &life.to_string()])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let (acks, has_ended) = (Arc::clone(acks), Arc::new(AtomicBool::new(false)));
        let reader = std::thread::spawn({
            let (acks, has_ended) = (Arc::clone(&acks), Arc::clone(&has_ended));
            move || {
                let mut errors = Vec::new();
                // A line that the kill cut off was not said; `end` may be the last of an orderly one.
                for line in lines.map_while(Result::ok) {
                    match Ack::of(&line, life) {
                        Some(ack) => acks.lock().unwrap().push(ack),
                        None if line == "end" => break,
                        None => errors.push(line),
                    }
                }
                has_ended.store(true, Ordering::SeqCst);
                errors
            }
        });
        Self { process, acks, has_ended, reader: Some(reader) }
    }

    /// Kills it, and gives the acknowledgements up to the cut.
    fn end(mut self, cut: &Cut) -> Vec<Ack> {
        self.process.kill().unwrap();
        let errors = self.reader.take().unwrap().join().unwrap();
        assert!(errors.iter().all(|line| !line.starts_with('E')), "the load met errors: {errors:?}");
        let acks = self.acks.lock().unwrap();
        acks[..cut.acknowledged].to_vec()
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// What all rounds on one file system came to.
#[derive(Default)]
struct Sums {
    rounds: u64,
    cuts: u64,
    images: u64,
    acknowledged: u64,
    records: u64,
    torn_tails: u64,
    writes: u64,
    flushes: u64,
    unflushed: u64,
}

impl std::fmt::Display for Sums {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { rounds, cuts, images, acknowledged, records, torn_tails, writes, flushes, unflushed } = self;
        write!(
            f,
            "{rounds} rounds, {cuts} power cuts, {images} images opened twice; {acknowledged} acknowledged records checked, {records} read \
             in all, {torn_tails} torn tails cut; before the cuts {writes} writes and {flushes} flushes, {unflushed} writes not flushed"
        )
    }
}

/// One disk, from mkfs through several lives.
struct Round<'a> {
    seed: u64,
    file_system: &'a str,
    work: &'a Path,
    lies: bool,
}

impl Round<'_> {
    /// Whether nothing was lost; where that is no surprise.
    fn run(&self, sums: &mut Sums) -> bool {
        let mut rng = Rng::new(self.seed);
        sums.rounds += 1;
        let mut image = None;
        let mut history = History::new();
        for life in 0..1 + rng.below(3) as u32 {
            let (cut, acks) = self.live(image.take(), life, &mut rng, sums);
            sums.cuts += 1;
            sums.unflushed += cut.unflushed() as u64;
            let patterns = if cut.unflushed() == 0 { &[Survival::Nothing][..] } else { &Survival::ALL };
            let next = rng.below(patterns.len() as u64) as usize;
            let mut found_next = None;
            for (number, pattern) in patterns.iter().enumerate() {
                let survivor = cut.survivor(*pattern, Needs::of(self.file_system).sector_bytes, &mut rng);
                let found = catch_unwind(AssertUnwindSafe(|| self.look(&survivor, &history, &acks, &mut rng)));
                let found = match found {
                    Ok(found) => found,
                    Err(_) if self.lies => return false,
                    Err(failed) => {
                        eprintln!("in life {life}, after the cut, surviving of {} writes: {pattern:?}", cut.unflushed());
                        resume_unwind(failed)
                    }
                };
                sums.images += 1;
                sums.acknowledged += found.acknowledged;
                sums.records += found.records;
                sums.torn_tails += found.torn_tails;
                if number == next {
                    image = Some(survivor);
                    found_next = Some(found.history);
                }
            }
            history = found_next.expect("one of the patterns is the next one");
        }
        true
    }

    /// The load runs on the disk until the power is cut.
    fn live(&self, image: Option<Image>, life: u32, rng: &mut Rng, sums: &mut Sums) -> (Cut, Vec<Ack>) {
        let Needs { mkfs, mib, .. } = Needs::of(self.file_system);
        let is_new = image.is_none();
        let acks = Arc::new(Mutex::new(Vec::new()));
        let disk = Disk::new(image.unwrap_or_default(), mib << 20, {
            let acks = Arc::clone(&acks);
            move || acks.lock().unwrap().len()
        });
        let served = Served::new(disk.clone(), &self.directory("fuse")).unwrap();
        let device = Loop::new(&served.file());
        if is_new {
            run(&format!("mkfs.{}", self.file_system), &[mkfs, &[device.device.to_str().unwrap()]].concat());
        }
        let at = self.directory("live");
        let mounted = Mounted::new(self.file_system, &device.device, &at);
        // Early cuts hit the making of topics, or an opening.
        let limit = 4 << rng.below(11);
        let nth = 1 + rng.below(limit);
        disk.arm(nth, self.lies);
        let load = Load::start(&at.join("data"), self.seed, life, &acks);
        let start = Instant::now();
        let cut = disk.wait_for_the_cut(|| load.has_ended.load(Ordering::SeqCst) || start.elapsed() > LIFE);
        let (writes, flushes) = disk.counts();
        let acks = load.end(&cut);
        // Were flushes not passed on, everything would be lost that the kernel had not written by itself.
        assert!(acks.is_empty() || flushes > 0, "{} acknowledgements without a flush", acks.len());
        sums.writes += writes;
        sums.flushes += flushes;
        drop(mounted);
        (cut, acks)
    }

    /// Mounts what a cut left, and checks it.
    fn look(&self, survivor: &Image, history: &History, acks: &[Ack], rng: &mut Rng) -> check::Found {
        let file = self.work.join("survivor");
        survivor.save(&file, Needs::of(self.file_system).mib << 20).unwrap();
        let device = Loop::new(&file);
        let at = self.directory("look");
        let mounted = Mounted::new(self.file_system, &device.device, &at);
        let found = check(&at.join("data"), self.seed, history, acks, load::config(rng));
        drop(mounted);
        found
    }

    fn directory(&self, name: &str) -> PathBuf {
        let path = self.work.join(name);
        std::fs::create_dir_all(&path).unwrap();
        path
    }
}

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    let number = |text: &str| text.parse::<u64>().unwrap_or_else(|_| panic!("{text} is no number"));
    match arguments[..] {
        ["load", data, seed, life] => {
            load::run(Path::new(data), number(seed), number(life) as u32);
            ExitCode::SUCCESS
        }
        ["rounds", work, rounds, seed, honest, ref file_systems @ ..] if !file_systems.is_empty() => {
            rounds_on(Path::new(work), number(rounds), number(seed), honest == "broken", file_systems)
        }
        // Whether a file system of our own can be mounted at all.
        ["probe", at] => match Served::new(Disk::new(Image::default(), 0, || 0), Path::new(at)) {
            Ok(_) => ExitCode::SUCCESS,
            Err(error) => {
                println!("{error}");
                ExitCode::FAILURE
            }
        },
        _ => {
            eprintln!("usage: scripts/powercut, which see");
            ExitCode::from(2)
        }
    }
}

/// Rounds on each file system in turn, each with a seed of its own. On a disk that lies, the first loss ends them, and none is the failure.
fn rounds_on(work: &Path, rounds: u64, seed: u64, lies: bool, file_systems: &[&str]) -> ExitCode {
    let mut sums: Vec<_> = file_systems.iter().map(|_| Sums::default()).collect();
    for number in 0..rounds {
        let at = (number % file_systems.len() as u64) as usize;
        let round = Round { seed: seed.wrapping_add(number), file_system: file_systems[at], work, lies };
        let start = Instant::now();
        let images = sums[at].images;
        let done = catch_unwind(AssertUnwindSafe(|| round.run(&mut sums[at])));
        let Round { seed, file_system, .. } = round;
        let what = format!("round {number}, {file_system}, seed {seed}");
        match done {
            Ok(true) => println!("{what}: {} images, {:.1} s", sums[at].images - images, start.elapsed().as_secs_f32()),
            Ok(false) => {
                println!("{what}: a loss was found, as it must be on a disk that does not flush");
                return ExitCode::SUCCESS;
            }
            Err(_) => {
                println!(
                    "FAILED: {what}; again (but for the threads' timing): scripts/powercut --rounds 1 --seed {seed} --fs {file_system}"
                );
                return ExitCode::FAILURE;
            }
        }
    }
    for (file_system, sums) in file_systems.iter().zip(&sums) {
        println!("{file_system}: {sums}");
    }
    if lies {
        println!("FAILED: a disk that does not flush, and no loss was found: this test sees nothing");
    }
    ExitCode::from(u8::from(lies))
}
