//! The inputs kept in `fuzz/`, those that the fuzzers start from and those that they found, through the same functions.

use std::fs;
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;

use sapwood::fuzzing;

/// Runs what is kept for a target; there must be at least one to start from.
#[track_caller]
fn run(name: &str, target: fn(&[u8])) {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz");
    if !fuzz.exists() {
        // A package of the crate comes without.
        return;
    }
    let seeds = fs::read_dir(fuzz.join("seeds").join(name)).unwrap();
    let found = fs::read_dir(fuzz.join("regressions").join(name)).into_iter().flatten();
    let mut inputs: Vec<_> = seeds.chain(found).map(|entry| entry.unwrap().path()).collect();
    assert!(!inputs.is_empty());
    inputs.sort();
    for path in inputs {
        let input = fs::read(&path).unwrap();
        // Its own message was printed; this one tells the input.
        let result = panic::catch_unwind(AssertUnwindSafe(|| target(&input)));
        assert!(result.is_ok(), "{}", path.display());
    }
}

#[test]
fn records() {
    run("record", fuzzing::record);
}

#[test]
fn segments() {
    run("segment", fuzzing::segment);
}

#[test]
fn indexes() {
    run("index", fuzzing::index);
}

#[test]
fn checkpoints() {
    run("checkpoint", fuzzing::checkpoint);
}

#[test]
fn directories() {
    run("directory", fuzzing::directory);
}
