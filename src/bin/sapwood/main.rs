//! `sapwood`, the operators' tool: verifies, prints, repairs and describes partitions from outside.
//!
//! Each command has a file of its own, and none of them knows the format: the library's `inspect` does.

#![allow(clippy::print_stderr, reason = "a program says on stderr what went wrong")]
#![allow(unreachable_pub, reason = "nothing of a program can be reached from outside")]

mod args;
mod dump;
mod output;
mod repair;
mod topics;
mod verify;

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use sapwood::inspect::Inspector;

use crate::args::{Cli, Command};

/// Why a command came to no answer.
#[derive(Debug)]
pub enum Stop {
    /// It could not be done.
    Failed(String),
    /// Whoever reads the output went away, as `head` does. That is no failure.
    NobodyReads,
}

impl From<sapwood::Error> for Stop {
    fn from(error: sapwood::Error) -> Self {
        Self::Failed(error.to_string())
    }
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe {
            Self::NobodyReads
        } else {
            Self::Failed(format!("could not write to stdout: {error}"))
        }
    }
}

/// Whether everything is well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// Nothing is wrong.
    Clean,
    /// Something is, and was told.
    Findings,
}

impl Answer {
    /// Clean if `clean`.
    pub fn clean_if(clean: bool) -> Self {
        if clean { Self::Clean } else { Self::Findings }
    }

    /// Clean if both are.
    pub fn and(self, other: Self) -> Self {
        Self::clean_if(self == Self::Clean && other == Self::Clean)
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .with_writer(io::stderr)
        .without_time()
        .with_target(false)
        .init();
    let answer = match &cli.command {
        Command::Verify(args) => verify::run(args),
        Command::Dump(args) => dump::run(args),
        Command::Repair(args) => repair::run(args),
        Command::Topics(args) => topics::list(args),
        Command::Describe(args) => topics::describe(args),
    };
    match answer {
        Ok(Answer::Clean) | Err(Stop::NobodyReads) => ExitCode::SUCCESS,
        Ok(Answer::Findings) => ExitCode::from(1),
        Err(Stop::Failed(message)) => {
            eprintln!("sapwood: {message}");
            ExitCode::from(2)
        }
    }
}

/// The partitions in a directory: at least one, but in a data directory that has no topic.
pub fn partitions(inspector: &Inspector, dir: &Path) -> Result<Vec<PathBuf>, Stop> {
    let partitions = inspector.partitions(dir)?;
    if partitions.is_empty() && inspector.is_data_dir(dir)? {
        eprintln!("sapwood: {} is a data directory without a topic in it", dir.display());
    } else if partitions.is_empty() {
        let message = format!("{} is no partition's directory, no topic's, and no data directory with a topic in it", dir.display());
        return Err(Stop::Failed(message));
    }
    Ok(partitions)
}
