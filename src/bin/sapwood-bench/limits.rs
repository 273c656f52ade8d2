//! The disk's own limit at several sizes, by two methods, one write at a time and eight at a time. The engine has no part in it.
//!
//! Eight at a time are eight threads, each with a file of its own, so that neither a lock of a file nor a ring stands between them.

use std::fmt::Write;
use std::path::Path;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::args::LimitsArgs;
use crate::floor::{Area, Memory, Method, refused};
use crate::host::Host;
use crate::interrupts::Interrupts;
use crate::plan::check_json;
use crate::progress::Progress;
use crate::report::Latency;
use crate::units::{float, plural, rate, size, time, to_u64, to_usize};
use crate::workspace::Workspace;
use crate::{Stop, say};

const SIZES: [u64; 4] = [4 << 10, 64 << 10, 256 << 10, 1 << 20];
const METHODS: [Method; 2] = [Method::Fdatasync, Method::Direct];
const DEPTHS: [usize; 2] = [1, 8];
/// That of x86, and the most common one elsewhere.
const HUGE_PAGE_KIB: u64 = 2 << 10;
/// What a depth above 1 means.
const DEPTH: &str = "so many threads, each with a file of its own and one write at a time";

/// Measures each combination for the time asked for, and says so on stdout.
pub fn run(args: &LimitsArgs, interrupts: &Interrupts, progress: &Progress) -> Result<bool, Stop> {
    check_json(args.json.as_deref())?;
    let workspace = Workspace::prepare(args.data_dir.as_deref())?;
    progress.step("measuring what this disk can do");
    let pages = Pages::new();
    let cells = measure(workspace.dir(), args.duration, &pages, interrupts);
    progress.clear();
    let limits = cells.map(|cells| Limits::new(workspace.dir(), args.duration, &pages, cells));
    workspace.remove();
    let limits = limits?;
    say(&limits.table());
    if let Some(path) = &args.json {
        std::fs::write(path, limits.json()).map_err(|error| Stop::Failed(format!("could not write the figures to {path:?}: {error}")))?;
    }
    Ok(true)
}

/// Everything that is told. Fields are added without a new schema number.
#[derive(Debug, Serialize)]
struct Limits {
    schema: u32,
    version: &'static str,
    host: Host,
    seconds_per_cell: f64,
    depth: &'static str,
    /// Whether what was written lay in huge pages, which devices take in fewer pieces.
    huge_pages: bool,
    cells: Vec<Cell>,
    #[serde(skip)]
    data_dir: String,
}

/// One size, method and depth.
#[derive(Debug, Serialize)]
struct Cell {
    write_bytes: u64,
    method: &'static str,
    depth: usize,
    /// Null where it was refused.
    figures: Option<Figures>,
    refused: Option<String>,
}

#[derive(Debug, Serialize)]
struct Figures {
    writes_per_second: f64,
    mib_per_second: f64,
    latency_us: Latency,
}

fn measure(dir: &Path, duration: Duration, pages: &Pages, interrupts: &Interrupts) -> Result<Vec<Cell>, Stop> {
    let mut cells = Vec::new();
    for write_bytes in SIZES {
        for depth in DEPTHS {
            let memories: Vec<&[u8]> = pages.memories[..depth].iter().map(|memory| &memory[..to_usize(write_bytes)]).collect();
            for method in METHODS {
                let figures = cell(dir, duration, method, &memories, interrupts);
                if interrupts.any() {
                    return Err(Stop::Failed("interrupted before everything was measured".to_owned()));
                }
                let (figures, refused) = match figures {
                    Ok(figures) => (Some(figures), None),
                    Err(error) if refused(&error) => (None, Some(error.to_string())),
                    Err(error) => return Err(Stop::Failed(format!("could not measure writes of {}: {error}", size(write_bytes)))),
                };
                cells.push(Cell { write_bytes, method: method.name(), depth, figures, refused });
            }
        }
    }
    Ok(cells)
}

/// What one thread saw, from its first write to the end of its last one.
struct Share {
    latency: Histogram<u64>,
    begun: Instant,
    ended: Instant,
}

fn cell(dir: &Path, duration: Duration, method: Method, memories: &[&[u8]], interrupts: &Interrupts) -> std::io::Result<Figures> {
    let write_bytes = memories.first().map_or(0, |memory| to_u64(memory.len()));
    let areas: Vec<Area> =
        memories.iter().zip(0..).map(|(_, number)| Area::prepare(dir, number, method, write_bytes)).collect::<Result<_, _>>()?;
    let together = Barrier::new(areas.len());
    let shares = thread::scope(|scope| {
        let (together, interrupts) = (&together, interrupts);
        let threads: Vec<_> = areas
            .into_iter()
            .zip(memories)
            .map(|(mut area, memory)| {
                scope.spawn(move || {
                    together.wait();
                    let begun = Instant::now();
                    let latency = area.measure(memory, duration, &|| interrupts.any())?;
                    Ok(Share { latency, begun, ended: Instant::now() })
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    figures(shares, write_bytes)
}

fn figures(shares: Vec<std::io::Result<Share>>, write_bytes: u64) -> std::io::Result<Figures> {
    let shares: Vec<Share> = shares.into_iter().collect::<Result<_, _>>()?;
    let mut latency = Histogram::new(3).expect("3 significant digits are allowed");
    for share in &shares {
        latency.add(&share.latency).expect("a histogram that grows takes every number");
    }
    let span = shares.iter().map(|share| share.begun).min().zip(shares.iter().map(|share| share.ended).max());
    let seconds = span.map_or(0.0, |(begun, ended)| ended.duration_since(begun).as_secs_f64());
    let interrupted = || std::io::Error::from(std::io::ErrorKind::Interrupted);
    let latency_us = Latency::of(&latency).filter(|_| seconds > 0.0).ok_or_else(interrupted)?;
    let writes_per_second = float(latency.len()) / seconds;
    let mib_per_second = writes_per_second * float(write_bytes) / float(1 << 20);
    Ok(Figures { writes_per_second, mib_per_second, latency_us })
}

/// What is written, by each thread. Made once: whether memory that an allocator gives out again lies in huge pages is hard to tell.
struct Pages {
    memories: Vec<Memory>,
    huge: bool,
}

impl Pages {
    fn new() -> Self {
        let (threads, largest) = (DEPTHS.into_iter().max().unwrap_or(1), SIZES.into_iter().max().unwrap_or(1));
        let before = huge_page_kib();
        let memories: Vec<Memory> = (0..threads).map(|_| Memory::new(largest)).collect();
        Self { huge: huge_page_kib() >= before + HUGE_PAGE_KIB * to_u64(threads), memories }
    }
}

/// How much of this process's memory lies in huge pages.
fn huge_page_kib() -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let kib = |line: &str| line.strip_prefix("AnonHugePages:")?.trim().strip_suffix("kB")?.trim().parse().ok();
    text.lines().find_map(kib).unwrap_or(0)
}

impl Limits {
    fn new(dir: &Path, duration: Duration, pages: &Pages, cells: Vec<Cell>) -> Self {
        Self {
            schema: 1,
            version: env!("CARGO_PKG_VERSION"),
            host: Host::of(dir),
            seconds_per_cell: duration.as_secs_f64(),
            depth: DEPTH,
            huge_pages: pages.huge,
            cells,
            data_dir: dir.display().to_string(),
        }
    }

    fn json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("the figures are plain numbers and text");
        text.push('\n');
        text
    }

    fn table(&self) -> String {
        let memory = if self.huge_pages { "huge pages" } else { "small pages, which cost large direct writes dearly on some devices" };
        let mut text = format!(
            "data         {} ({})\nhost         Linux {}, {}\nmemory       {memory}\ndepth        {}\n",
            self.data_dir,
            self.host.filesystem,
            self.host.kernel,
            plural(self.host.cpus.try_into().unwrap_or(0), "CPU"),
            self.depth,
        );
        if self.host.in_memory {
            text.push_str("WARNING      this file system is in memory: durable means nothing there\n");
        }
        let _ = writeln!(
            text,
            "\n{:<8}  {:<20}  {:>5}  {:>9}  {:>7}  {:>8}  {:>8}  {:>8}  {:>8}",
            "size", "method", "depth", "writes/s", "MiB/s", "p50", "p99", "p99.9", "max"
        );
        for cell in &self.cells {
            let _ = write!(text, "{:<8}  {:<20}  {:>5}", size(cell.write_bytes), cell.method, cell.depth);
            let _ = match (&cell.figures, &cell.refused) {
                (Some(figures), _) => {
                    let [p50, _, p99, p999, max] = figures.latency_us.nanos().map(time);
                    writeln!(
                        text,
                        "  {:>9}  {:>7}  {p50:>8}  {p99:>8}  {p999:>8}  {max:>8}",
                        rate(figures.writes_per_second),
                        rate(figures.mib_per_second)
                    )
                }
                (None, why) => writeln!(text, "  refused: {}", why.as_deref().unwrap_or("unknown")),
            };
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_combination_has_a_row_and_no_file_stays() {
        let dir = tempfile::tempdir().unwrap();
        let pages = Pages::new();
        let cells = measure(dir.path(), Duration::from_nanos(1), &pages, &Interrupts::default()).unwrap();
        assert_eq!(cells.len(), SIZES.len() * METHODS.len() * DEPTHS.len());
        assert!(cells.iter().all(|cell| cell.figures.is_some() != cell.refused.is_some()));
        assert!(cells.iter().all(|cell| cell.figures.is_some() || cell.method == Method::Direct.name()));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        let limits = Limits::new(dir.path(), Duration::from_nanos(1), &pages, cells);
        let json: serde_json::Value = serde_json::from_str(&limits.json()).unwrap();
        assert_eq!((&json["schema"], &json["cells"][0]["write_bytes"]), (&1.into(), &4096.into()));
        assert!(json["cells"][0]["figures"]["latency_us"]["p999"].as_f64().unwrap() > 0.0);
        assert_eq!(limits.table().lines().filter(|line| line.contains("iB  ")).count(), limits.cells.len());
    }

    #[test]
    fn what_is_refused_is_said_in_its_row() {
        let cell = Cell { write_bytes: 4096, method: Method::Direct.name(), depth: 1, figures: None, refused: Some("not here".to_owned()) };
        let table = Limits::new(Path::new("/proc"), Duration::from_secs(1), &Pages { memories: vec![], huge: false }, vec![cell]).table();
        assert!(table.lines().any(|line| line.contains("O_DIRECT") && line.ends_with("refused: not here")), "{table}");
    }
}
