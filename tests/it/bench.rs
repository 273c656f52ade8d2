//! `sapwood-bench`, the load generator, as it is run: its figures, how it exits, and what it leaves behind. What it measures with is tested where it
//! stands.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::child::backend_name;
use crate::support::{BACKENDS, scratch};

const BENCH: &str = env!("CARGO_BIN_EXE_sapwood-bench");

/// Runs it in a directory that it has to make.
fn bench(dir: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(BENCH);
    command.arg("run").arg("--data-dir").arg(dir.join("data")).arg("--json").arg(dir.join("figures.json"));
    command.args(arguments).stdin(Stdio::null()).output().unwrap()
}

/// The figures of a run that went well, and its table. Nothing else is left of it.
#[track_caller]
fn figures(arguments: &[&str]) -> (Value, String) {
    let dir = scratch();
    let output = bench(dir.path(), arguments);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{arguments:?}\n{out}\n{err}");
    let json = std::fs::read(dir.path().join("figures.json")).unwrap();
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["figures.json"], "{arguments:?}");
    (serde_json::from_slice(&json).unwrap(), out.into_owned())
}

#[test]
fn consumers_have_figures_of_their_own() {
    let small = ["--records", "2000", "--record-bytes", "100", "--segment-bytes", "64KiB", "--partitions", "2", "--batch-records", "10"];
    let modes: [(&str, &[&str], u64); 6] = [
        ("tail", &["--consumers", "3"], 6000),
        ("tail", &["--consumers", "2", "--rate", "20000", "--keys", "3"], 4000),
        ("tail", &["--read", "tail", "--durability", "os"], 2000),
        ("catch-up", &["--read", "catch-up", "--read-mode", "direct", "--consumers", "2"], 4000),
        ("random", &["--read", "random", "--consumers", "2"], 2000),
        ("time", &["--read", "time", "--index-interval", "7"], 2000),
    ];
    // Each takes a second or two, most of it to measure the disk: the backends take turns.
    for (turn, (mode, arguments, records)) in modes.into_iter().enumerate() {
        let backend = ["--backend", backend_name(BACKENDS[turn % BACKENDS.len()])];
        let (json, table) = figures(&[&small[..], &backend, arguments].concat());
        let read = &json["read"];
        assert_eq!((read["mode"].as_str(), read["records"].as_u64()), (Some(mode), Some(records)), "{arguments:?}: {read}");
        assert_eq!(read["bytes"].as_u64().unwrap() / records, if mode == "tail" && arguments.contains(&"--keys") { 105 } else { 100 });
        for field in ["seconds", "records_per_second", "mib_per_second"] {
            assert!(read[field].as_f64().unwrap() > 0.0, "{arguments:?}: {read}");
        }
        let latency = &read["latency_us"];
        let quantiles: Vec<f64> = ["p50", "p90", "p99", "p999", "max"].map(|name| latency[name].as_f64().unwrap()).into();
        assert!(quantiles[0] > 0.0 && quantiles.is_sorted(), "{arguments:?}: {read}");
        let samples = latency["samples"].as_u64().unwrap();
        assert!(if mode == "catch-up" { (4..records).contains(&samples) } else { samples == records }, "{arguments:?}: {read}");
        assert_eq!(json["verified_records"].as_u64(), Some(2000), "{arguments:?}");
        assert!(table.contains("\nread ") && table.contains("each partition"), "{table}");
    }
}

#[test]
fn without_consumers_there_are_no_figures_of_any() {
    let (json, table) = figures(&["--records", "10"]);
    assert!(json["read"].is_null() && !table.contains("\nread "), "{table}");
}

#[test]
fn what_would_be_without_effect_is_refused_before_anything_is_made() {
    for arguments in [&["--read-mode", "direct"][..], &["--consumers", "2", "--read-mode", "direct"], &["--consumers", "0"]] {
        let dir = scratch();
        let output = bench(dir.path(), arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "{arguments:?}");
    }
}
