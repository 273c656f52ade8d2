//! `sapwood-bench`, the load generator: durable appends on this disk, then every record read back and checked.
//!
//! The order of things is in `run.rs`, that of the command `limits` in `limits.rs`; every other file has one subject. Nothing here
//! is part of the library.

#![allow(clippy::print_stderr, reason = "a program says on stderr what went wrong")]
#![allow(unreachable_pub, reason = "nothing of a program can be reached from outside")]

mod acks;
mod args;
mod check;
mod floor;
mod host;
mod interrupts;
mod limits;
mod load;
mod packed;
mod payload;
mod plan;
mod progress;
mod read;
mod report;
mod run;
mod schedule;
mod units;
mod verify;
mod workspace;

use std::fmt;
use std::io::Write;
use std::process::ExitCode;

use clap::Parser;

use crate::args::{Cli, Command};
use crate::interrupts::Interrupts;
use crate::progress::Progress;

/// Why a run ended without a report.
#[derive(Debug)]
pub enum Stop {
    /// What was asked for cannot be done; nothing of the user's was touched. Exit code 2.
    Usage(String),
    /// It could be asked for, and did not work. Exit code 1.
    Failed(String),
}

impl Stop {
    /// A failure of the library, with what it kept from happening.
    pub fn failed(what: &str) -> impl FnOnce(sapwood::Error) -> Self + '_ {
        move |error| Self::Failed(format!("{what}: {error}"))
    }
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Usage(message) | Self::Failed(message)) = self;
        f.write_str(message)
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let progress = Progress::new();
    let above = progress.clone();
    tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .with_writer(move || above.stderr())
        .without_time()
        .with_target(false)
        .init();
    let interrupts = Interrupts::listen(progress.clone());
    let outcome = match cli.into_command() {
        Command::Run(args) => run::run(&args, &interrupts, &progress),
        Command::Limits(args) => limits::run(&args, &interrupts, &progress),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(stop) => {
            eprintln!("sapwood-bench: {stop}");
            ExitCode::from(if matches!(stop, Stop::Usage(_)) { 2 } else { 1 })
        }
    }
}

/// Writes to stdout. A reader that went away, as `head` does, is no failure of the run.
pub fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    if let Err(error) = out.write_all(text.as_bytes()).and_then(|()| out.flush())
        && error.kind() != std::io::ErrorKind::BrokenPipe
    {
        eprintln!("sapwood-bench: could not write to stdout: {error}");
    }
}
