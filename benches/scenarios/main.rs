//! What the engine costs beyond what the same disk, in the same minute, cannot do without: the table of perf/README.md.
//!
//! `cargo bench --bench scenarios` prints it; `-- --save BASENAME` also writes BASENAME.txt and BASENAME.json, with what the figures
//! depend on: date, command, kernel, CPUs, file system, commit. `SAPWOOD_BENCH_DIR` chooses the directory, and so the device; by
//! default the one of the target directory. About 4 GiB are needed there for a while.
//!
//! A round of a scenario is the bare limit for a short time and then the engine, in this process and in this directory. What is
//! published is the median over rounds of the ratio of one round, so that a machine that slows down slows both sides down. Without
//! `--bench` (`cargo test --benches`) it makes one tiny round of each, only to see that it runs.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a benchmark's result")]

mod ahead;
mod alloc;
mod filled;
#[path = "../../src/bin/sapwood-bench/floor.rs"]
#[allow(dead_code, unused_imports, reason = "its own tests are compiled with the load generator")]
mod floor;
#[path = "../../src/bin/sapwood-bench/host.rs"]
#[allow(dead_code, unused_imports, reason = "its own tests are compiled with the load generator")]
mod host;
mod limit;
mod load;
mod reading;
mod reads;
mod reopen;
mod report;
mod rolls;
mod scenarios;
mod tailing;
#[path = "../../src/bin/sapwood-bench/units.rs"]
#[allow(dead_code, unused_imports, reason = "its own tests are compiled with the load generator")]
mod units;

use std::env;
use std::error::Error;
use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use sapwood::Backend;
use serde::Serialize;

use host::Host;
use report::{Line, Pair};
use scenarios::{Prepared, Scenario};

/// A success, or the words for the row.
type Outcome<T> = Result<T, String>;

const USAGE: &str = "there are --save BASENAME, --rounds N, --only NAME and --backend uring|posix|auto";

fn main() -> Result<(), Box<dyn Error>> {
    let mut words = env::args().skip(1).peekable();
    if words.next_if(|word| word == reopen::FILL).is_some() {
        return Ok(reopen::fill(words)?);
    }
    let args = Args::parse(words)?;
    if args.skip {
        return Ok(());
    }
    let parent = env::var_os("SAPWOOD_BENCH_DIR").map_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")), PathBuf::from);
    let dir = tempfile::tempdir_in(&parent)?;
    let context = Context::new(dir.path(), &args);
    let environment = Environment::now(&parent, &args);
    println!("{}", environment.text());
    let mut lines = Vec::new();
    for scenario in all().into_iter().filter(|scenario| args.wants(scenario)) {
        eprintln!("{} ...", scenario.name);
        lines.extend(measure(&scenario, &context, args.rounds));
    }
    dir.close()?;
    let table = report::table(&lines);
    println!("{table}");
    let failed: Vec<_> = lines.iter().filter_map(|line| Some(format!("{}: {}", line.name, line.error.as_ref()?))).collect();
    if let Some(base) = &args.save {
        save(base, &environment, &table, lines)?;
    }
    if failed.is_empty() { Ok(()) } else { Err(failed.join("; ").into()) }
}

/// Writing, then reading.
fn all() -> Vec<Scenario> {
    let mut all = scenarios::all();
    all.extend(reading::all());
    all
}

/// Every round of one scenario. The first failure ends it, and is said in its lines.
fn measure(scenario: &Scenario, context: &Context, rounds: usize) -> Vec<Line> {
    let mut columns: Vec<Vec<Pair>> = scenario.measures.iter().map(|_| Vec::new()).collect();
    let (note, error) = match (scenario.prepare)(context) {
        Ok(Prepared { mut round, note }) => {
            let mut rounds = (0..rounds.min(scenario.rounds_at_most)).map(|_| {
                for (column, pair) in columns.iter_mut().zip(round()?) {
                    column.push(pair);
                }
                Ok(())
            });
            (note, rounds.find_map(Outcome::err))
        }
        Err(error) => (String::new(), Some(error)),
    };
    let lines = scenario.measures.iter().zip(columns);
    lines.map(|(measure, pairs)| Line::new(scenario.name, *measure, pairs, note.clone(), error.clone())).collect()
}

/// Where and how long to measure.
#[derive(Debug, Clone)]
struct Context {
    dir: PathBuf,
    backend: Backend,
    /// One tiny round, no figures.
    trial: bool,
    limit_time: Duration,
    engine_time: Duration,
    warmup: Duration,
}

impl Context {
    fn new(dir: &Path, args: &Args) -> Self {
        let millis = |full, trial| Duration::from_millis(if args.bench { full } else { trial });
        Self {
            dir: dir.to_owned(),
            backend: args.backend,
            trial: !args.bench,
            limit_time: millis(2_000, 10),
            engine_time: millis(2_000, 20),
            warmup: millis(300, 5),
        }
    }
}

/// What cargo and the user ask for.
struct Args {
    save: Option<PathBuf>,
    rounds: usize,
    only: Option<String>,
    backend: Backend,
    /// `cargo bench`, rather than `cargo test --benches`, which only wants to see it run.
    bench: bool,
    /// Another benchmark's name was asked for.
    skip: bool,
    /// What the user wrote.
    words: Vec<String>,
}

impl Args {
    fn parse(args: impl Iterator<Item = String>) -> Outcome<Self> {
        let (bench, words): (Vec<_>, Vec<_>) = args.partition(|word| word == "--bench");
        let bench = !bench.is_empty();
        let mut parsed = Self { save: None, rounds: 7, only: None, backend: Backend::Auto, bench, skip: false, words: words.clone() };
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(format!("{word} wants a value; {USAGE}"));
            match word.as_str() {
                "--save" => parsed.save = Some(value()?.into()),
                "--rounds" => {
                    parsed.rounds = value()?.parse().ok().filter(|rounds| *rounds > 0).ok_or("--rounds wants a number from 1 on")?
                }
                "--only" => parsed.only = Some(value()?),
                "--backend" => parsed.backend = reopen::parse_backend(&value()?)?,
                flag if flag.starts_with('-') => return Err(format!("unknown argument {flag}; {USAGE}")),
                filter => parsed.skip |= !"scenarios".contains(filter),
            }
        }
        if !parsed.bench {
            parsed.rounds = 1;
        }
        if let Some(only) = &parsed.only
            && !all().iter().any(|scenario| parsed.wants(scenario))
        {
            let names: Vec<_> = all().iter().map(|scenario| scenario.name).collect();
            return Err(format!("no scenario has {only:?} in its name; there are {}", names.join(", ")));
        }
        Ok(parsed)
    }

    fn wants(&self, scenario: &Scenario) -> bool {
        self.only.as_ref().is_none_or(|only| scenario.name.contains(only))
    }
}

/// What the figures depend on, and how to get them again.
#[derive(Debug, Serialize)]
struct Environment {
    version: &'static str,
    commit: Option<String>,
    date: String,
    command: String,
    host: Host,
    huge_pages: String,
    /// Of the last minute, when it began: whether the machine was quiet.
    load_average: String,
    rounds: usize,
    backend: &'static str,
}

impl Environment {
    fn now(dir: &Path, args: &Args) -> Self {
        let sapwood_dir = env::var("SAPWOOD_BENCH_DIR").map_or_else(|_| String::new(), |dir| format!("SAPWOOD_BENCH_DIR={dir} "));
        let words = if args.words.is_empty() { String::new() } else { format!(" -- {}", args.words.join(" ")) };
        let bench = format!("{sapwood_dir}cargo bench --bench scenarios{words}");
        let first_word = |file: &str| fs::read_to_string(file).ok()?.split_whitespace().next().map(str::to_owned);
        let unknown = || "unknown".to_owned();
        Self {
            version: env!("CARGO_PKG_VERSION"),
            commit: commit(),
            date: said("date", &["--utc", "+%F %R UTC"]).unwrap_or_else(unknown),
            command: if args.bench { bench } else { "a trial of one round, no figures".to_owned() },
            host: Host::of(dir),
            huge_pages: fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled")
                .map_or_else(|_| unknown(), |text| text.trim().to_owned()),
            load_average: first_word("/proc/loadavg").unwrap_or_else(unknown),
            rounds: args.rounds,
            backend: reopen::backend_name(args.backend),
        }
    }

    fn text(&self) -> String {
        let memory = if self.host.in_memory { ", in memory: nothing on it is durable" } else { "" };
        format!(
            "sapwood:      {}, commit {}\ndate:         {}\ncommand:      {}\nkernel:       {}\nCPUs:         {}, load average {}\n\
             file system:  {}{memory}\nhuge pages:   {}\nbackend:      {}\nrounds:       {}, the limit and then the engine in each; ratios \
             are of one round\n",
            self.version,
            self.commit.as_deref().unwrap_or("unknown"),
            self.date,
            self.command,
            self.host.kernel,
            self.host.cpus,
            self.load_average,
            self.host.filesystem,
            self.huge_pages,
            self.backend,
            self.rounds,
        )
    }
}

/// Of the sources, marked where they differ from it.
fn commit() -> Option<String> {
    let git = |args: &[&str]| said("git", &[&["-C", env!("CARGO_MANIFEST_DIR")], args].concat());
    let commit = git(&["rev-parse", "--short=12", "HEAD"])?;
    let clean = git(&["status", "--porcelain", "--untracked-files=no"])?.is_empty();
    Some(if clean { commit } else { format!("{commit}, changed") })
}

/// What a program says, if it is there and succeeds.
fn said(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}

fn save(base: &Path, environment: &Environment, table: &str, lines: Vec<Line>) -> Result<(), Box<dyn Error>> {
    #[derive(Serialize)]
    struct Report<'a> {
        schema: u32,
        environment: &'a Environment,
        lines: Vec<Line>,
    }
    if let Some(parent) = base.parent() {
        fs::create_dir_all(parent)?;
    }
    let with = |extension: &str| PathBuf::from(format!("{}.{extension}", base.display()));
    fs::write(with("txt"), format!("{}\n{table}", environment.text()))?;
    let mut json = serde_json::to_string_pretty(&Report { schema: 1, environment, lines })?;
    json.push('\n');
    fs::write(with("json"), json)?;
    println!("saved as {} and .json", with("txt").display());
    Ok(())
}

fn named<E: Display>(what: &str) -> impl FnOnce(E) -> String {
    move |error| format!("{what}: {error}")
}
