//! A soak: a log that is used in every way, for as long as it is told, and killed at random moments.
//!
//! A process appends, reads, waits at the ends of logs, and shortens them, each on threads of their own, and makes and deletes a topic
//! over and over. It says what was acknowledged to it, and is killed by SIGKILL at a random moment, or told to close. Then an oracle that knows the
//! format page and nothing of the engine reads what is on the disk and compares it with what was said: every record that was acknowledged and
//! not removed since is there, byte for byte, at its offset; nothing that was removed is back; no log has a gap; its first offset never goes
//! back. Every so often this process opens the directory, too, and reads all of it by the engine. Then the next life begins with what is there.
//!
//! All choices of a life follow from the seed and the life's number, but for what the threads' timing decides.
//!
//! What it cannot show: what a power loss does (see `examples/powercut`), for a kernel that goes on keeps what the process gave it.
//!
//! A new kind of operation goes into `operations.rs`, with a line for what it acknowledges; what that promises, into `history.rs`.
#![allow(clippy::unwrap_used, reason = "a test: a failure is a panic with its place")]
#![allow(clippy::cast_possible_truncation, reason = "a test: the numbers are small and chosen here")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program")]
#![allow(unreachable_pub, missing_docs, reason = "one binary: everything is reachable from here alone")]

mod history;
mod load;
mod operations;
mod record;

// The judge that the integration tests have, and what it needs to know of the format.
#[allow(dead_code)]
#[path = "../../tests/it/format.rs"]
mod format;
#[allow(dead_code)]
#[path = "../../tests/it/oracle.rs"]
mod oracle;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use history::History;
use record::Rng;

/// How a life ends.
#[derive(Clone, Copy, Debug)]
enum End {
    /// It is killed after so long.
    Killed(Duration),
    /// It is told to close after so long.
    Closed(Duration),
}

impl End {
    fn choose(rng: &mut Rng) -> Self {
        let long = Duration::from_micros(rng.below(3_000_000));
        match rng.below(8) {
            // While it opens, most likely.
            0 => Self::Killed(Duration::from_micros(rng.below(40_000))),
            1 => Self::Closed(long),
            // While it closes, if it has come so far.
            _ => Self::Killed(long),
        }
    }
}

/// The process that is killed in the end, whatever happens here.
struct Life(Child);

impl Drop for Life {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Lets one life be lived, and gives what it said.
fn live(data: &Path, seed: u64, life: u32, end: End) -> Vec<String> {
    // This program, also where it was built anew meanwhile.
    let process = Command::new("/proc/self/exe")
        .args(["load", data.to_str().unwrap(), &seed.to_string(), &life.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let mut life = Life(process.unwrap());
    let lines = BufReader::new(life.0.stdout.take().unwrap());
    let said = std::thread::spawn(move || {
        let mut said = Vec::new();
        let mut lines = lines;
        loop {
            let mut line = Vec::new();
            // A line that the kill cut off was not said.
            if lines.read_until(b'\n', &mut line).unwrap() == 0 || line.pop() != Some(b'\n') {
                return said;
            }
            said.push(String::from_utf8(line).unwrap());
        }
    });
    let (End::Killed(time) | End::Closed(time)) = end;
    std::thread::sleep(time);
    assert!(life.0.try_wait().unwrap().is_none(), "the load ended by itself; what it printed tells why");
    match end {
        End::Killed(_) => life.0.kill().unwrap(),
        End::Closed(_) => drop(life.0.stdin.take()),
    }
    let status = life.0.wait().unwrap();
    let said = said.join().unwrap();
    if let End::Closed(_) = end {
        assert!(
            status.success() && said.last().is_some_and(|line| line == "closed"),
            "the load did not close: {status}, {:?}",
            said.last()
        );
    }
    said
}

fn soak(data: &Path, seconds: u64, seed: u64) {
    let start = Instant::now();
    let mut history = History::new(seed);
    let mut life = 0;
    while start.elapsed() < Duration::from_secs(seconds) {
        let mut rng = Rng::of(seed, u64::from(life));
        let end = End::choose(&mut rng);
        let said = live(data, seed, life, end);
        let context = format!("seed {seed}, life {life}, {end:?}");
        history.hear(&said, matches!(end, End::Killed(_)), &context);
        history.check(data, &context);
        if rng.below(3) == 0 {
            history.check_by_the_engine(data, &mut rng, &context);
        }
        life += 1;
        if life.is_multiple_of(20) {
            println!("{life} lives in {} s", start.elapsed().as_secs());
        }
    }
    history.check_by_the_engine(data, &mut Rng::new(seed), "at the end");
    println!("{}", history.summary(life, start.elapsed()));
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["load", data, seed, life] => load::run(Path::new(data), seed.parse().unwrap(), life.parse().unwrap()),
        ["soak", data, seconds, seed] => soak(Path::new(data), seconds.parse().unwrap(), seed.parse().unwrap()),
        _ => panic!("run scripts/soak"),
    }
}
