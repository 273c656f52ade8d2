//! `sapwood`, the operators' tool: what it prints, and how it exits.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use sapwood::Backend;
use serde_json::Value;

use crate::damage;
use crate::format::segment_path;
use crate::oracle::check;
use crate::support::{Row, bytes_in, copy_dir, create, data_with, fixture, open, partition_dir, rows, scratch, small, snapshot};

const TOOL: &str = env!("CARGO_BIN_EXE_sapwood");
const DEMO: &str = "demo-36-segment-270";

fn tool(arguments: &[&str], path: &Path) -> Output {
    Command::new(TOOL).args(arguments).arg(path).stdin(Stdio::null()).output().unwrap()
}

#[track_caller]
fn assert_exits(output: &Output, code: i32) -> String {
    let out = String::from_utf8(output.stdout.clone()).unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{out}\n{err}");
    out
}

#[track_caller]
fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn bytes_of(object: &Value, name: &str) -> Vec<u8> {
    match (object.get(name), object.get(format!("{name}_hex"))) {
        (Some(text), None) => text.as_str().unwrap().as_bytes().to_vec(),
        (None, Some(hex)) => {
            let digits: Vec<u8> = hex.as_str().unwrap().chars().map(|digit| digit.to_digit(16).unwrap() as u8).collect();
            digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
        }
        both => panic!("{both:?}"),
    }
}

fn row_of(object: &Value) -> Row {
    let number = |name: &str| object[name].as_u64().unwrap();
    Row { offset: number("offset"), timestamp: number("timestamp"), key: bytes_of(object, "key"), value: bytes_of(object, "value") }
}

#[test]
fn dump_gives_every_byte_of_every_record_back() {
    for name in ["edge-segment-270", DEMO, "interval-7-segment-270-base-1e12-prealloc", "no-records"] {
        let judged = check(&fixture(name));
        let objects = lines(&assert_exits(&tool(&["dump", "--json"], &fixture(name)), 0));
        let (end, records) = objects.split_last().unwrap();
        assert_eq!(records.iter().map(row_of).collect::<Vec<_>>(), rows(&judged.records), "{name}");
        for (object, record) in records.iter().zip(&judged.records) {
            assert_eq!((object["base"].as_u64(), object["position"].as_u64()), (Some(record.base), Some(record.position)));
        }
        let said = (end["kind"].as_str(), end["next_offset"].as_u64(), end["position"].as_u64(), end["error"].is_null());
        assert_eq!(said, (Some("end"), Some(judged.next_offset), Some(judged.next_position), true), "{name}");
        let text = assert_exits(&tool(&["dump"], &fixture(name)), 0);
        assert_eq!(text.lines().count(), judged.records.len(), "{name}: each record on a line of its own");
    }
}

#[test]
fn dump_begins_and_ends_where_it_is_told_to() {
    for (arguments, expected) in [
        (&["--from", "7"][..], 7..36),
        (&["--to", "9"], 0..9),
        (&["--max", "3"], 0..3),
        (&["--from", "10", "--to", "20", "--max", "4"], 10..14),
        (&["--from", "10", "--to", "12", "--max", "4"], 10..12),
        (&["--from", "36"], 36..36),
        (&["--max", "0"], 0..0),
    ] {
        let output = tool(&[&["dump", "--json"], arguments].concat(), &fixture(DEMO));
        let objects = lines(&assert_exits(&output, 0));
        let offsets: Vec<u64> = objects[..objects.len() - 1].iter().map(|object| object["offset"].as_u64().unwrap()).collect();
        assert_eq!(offsets, expected.collect::<Vec<_>>(), "{arguments:?}");
    }
    let one = assert_exits(&tool(&["dump", "--from", "14"], &segment_path(&fixture(DEMO), 12, "log")), 0);
    assert_eq!(one.lines().count(), 4);
    assert!(one.starts_with("14 @00000000000000000012:90 t=1700000000014000000 key=\"user-0\" value=\"value-00014\"\n"), "{one}");
}

#[test]
fn dump_says_where_and_why_it_stops_at_damage() {
    let (_data, dir) = data_with(DEMO);
    damage::apply_to(&dir, "flip-value-byte", 2);
    let before = snapshot(&dir);
    let output = tool(&["dump", "--json"], &dir);
    let objects = lines(&assert_exits(&output, 1));
    let end = objects.last().unwrap();
    assert_eq!((objects.len(), end["position"].as_u64(), end["next_offset"].as_u64()), (16, Some(135), Some(15)));
    assert!(end["error"].as_str().unwrap().contains("bad checksum"), "{end}");
    let output = tool(&["dump"], &dir);
    assert_exits(&output, 1);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("position 135") && said.contains("record 15"), "{said}");
    // What ends before the damage does not meet it.
    assert_exits(&tool(&["dump", "--to", "15"], &dir), 0);
    assert!(snapshot(&dir) == before);
    damage::apply(&dir, "missing-middle-segment");
    let output = tool(&["dump"], &dir);
    assert_exits(&output, 1);
    assert!(String::from_utf8_lossy(&output.stderr).contains("6 up to, not including, 12 are missing"));
}

#[test]
fn dump_shows_index_entries_as_they_stand() {
    let entries = |arguments: &[&str], path: &Path, code| {
        let objects = lines(&assert_exits(&tool(&[&["dump", "--json"], arguments].concat(), path), code));
        let entries = objects.into_iter().filter(|object| object["kind"] == "entry");
        entries
            .map(|entry| (entry["offset"].as_u64().unwrap(), entry.get("position").or(entry.get("timestamp")).unwrap().as_u64().unwrap()))
            .collect::<Vec<_>>()
    };
    let judged = check(&fixture(DEMO)).records;
    let positions: Vec<_> = judged.iter().map(|record| (record.offset, record.position)).collect();
    let times: Vec<_> = judged.iter().map(|record| (record.offset, record.timestamp)).collect();
    assert_eq!(entries(&["--what", "index"], &fixture(DEMO), 0), positions);
    assert_eq!(entries(&["--what", "timeindex", "--from", "4", "--to", "8"], &fixture(DEMO), 0), times[4..8]);
    assert_eq!(entries(&["--max", "2"], &segment_path(&fixture(DEMO), 6, "index"), 0), positions[6..8]);
    let (_data, dir) = data_with(DEMO);
    damage::apply(&dir, "index-partial-entry");
    assert_eq!(entries(&[], &segment_path(&dir, 30, "index"), 1), positions[30..]);
    damage::apply_to(&dir, "index-zero-fill", 4);
    assert_eq!(entries(&[], &segment_path(&dir, 24, "index"), 0), positions[24..30]);
}

/// A data directory with a sound topic of two partitions and a damaged one.
fn two_topics() -> tempfile::TempDir {
    let data = scratch();
    let (broker, _) = create(data.path(), Backend::Posix, &sapwood::TopicConfig { partitions: 2, ..small() });
    broker.produce(crate::support::TOPIC, None, b"value").unwrap();
    broker.close().unwrap();
    copy_dir(&fixture(DEMO), &data.path().join("damaged/0"));
    damage::apply_to(&data.path().join("damaged/0"), "flip-crc", 1);
    data
}

#[test]
fn verify_goes_over_all_partitions_and_its_exit_code_tells() {
    let data = two_topics();
    let out = assert_exits(&tool(&["verify", "--json"], data.path()), 1);
    let objects = lines(&out);
    let summaries: Vec<_> = objects.iter().filter(|object| object["kind"] == "summary").collect();
    let clean: Vec<_> = summaries.iter().map(|summary| summary["clean"].as_bool().unwrap()).collect();
    assert_eq!(clean, [false, true, true], "{out}");
    assert!(objects.iter().any(|object| object["code"] == "CRC_MISMATCH" && object["position"] == 135 && object["severity"] == "error"));
    let quiet = assert_exits(&tool(&["verify", "--quiet"], &data.path().join("damaged")), 1);
    assert!(quiet.contains("error: CRC_MISMATCH at 135 of ") && !quiet.contains("SUM_MISSING"), "{quiet}");
    assert_eq!(assert_exits(&tool(&["verify", "--quiet"], &partition_dir(data.path())), 0), "");
    assert!(assert_exits(&tool(&["verify"], &data.path().join("t")), 0).contains(": clean: "));
}

#[test]
fn what_cannot_be_done_exits_with_two() {
    let data = scratch();
    fs::create_dir_all(data.path().join("somebody/else")).unwrap();
    fs::write(data.path().join("README"), b"hello").unwrap();
    for command in ["verify", "dump", "repair", "topics", "describe"] {
        assert_exits(&tool(&[command], &data.path().join("nothing")), 2);
        assert_exits(&tool(&[command], data.path()), 2);
        assert_exits(&tool(&[command, "--no-such-flag"], data.path()), 2);
    }
    assert_exits(&Command::new(TOOL).output().unwrap(), 2);
    let data = two_topics();
    assert_exits(&tool(&["dump"], data.path()), 2);
    for command in ["verify", "dump", "repair", "topics", "describe"] {
        let help = assert_exits(&Command::new(TOOL).args([command, "--help"]).output().unwrap(), 0);
        assert!(help.contains("Examples:") && help.contains("Exit codes:"), "{help}");
    }
}

#[test]
fn repair_shows_what_it_will_do_and_does_it_only_if_told_to() {
    let data = two_topics();
    let dir = data.path().join("damaged/0");
    damage::apply(&dir, "truncate-mid-body");
    let before = snapshot(data.path());
    let shown = assert_exits(&tool(&["repair", "--dry-run"], data.path()), 1);
    assert!(
        shown.contains("1. copy what is in 00000000000000000030.log from byte 225 on") && shown.contains("left as it is: error"),
        "{shown}"
    );
    // Nobody is there to be asked.
    assert_exits(&tool(&["repair"], data.path()), 2);
    assert!(snapshot(data.path()) == before);

    let broker = open(&data.path().join("other"), Backend::Posix, &small());
    broker.close().unwrap();
    let done = assert_exits(&tool(&["repair", "--yes"], data.path()), 1);
    assert!(done.contains("set aside: ") && done.contains("left as it is: error"), "the sealed damage is left: {done}");
    let done = assert_exits(&tool(&["repair", "--yes", "--sealed", "keep-behind", "--write-sums"], data.path()), 0);
    assert!(done.contains("the records 12 up to, not including, 35 can be read"), "{done}");
    assert_exits(&tool(&["verify"], data.path()), 0);
    let before = bytes_in(data.path());
    assert_exits(&tool(&["repair", "--yes"], data.path()), 0);
    assert!(bytes_in(data.path()) == before, "there was nothing to do");

    let broker = open(data.path(), Backend::Posix, &small());
    damage::apply(&dir, "garbage-tail");
    let refused = tool(&["repair", "--yes"], &dir);
    assert_exits(&refused, 2);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("in use by another broker"));
    broker.close().unwrap();
}

#[test]
fn what_is_to_be_done_is_done_though_nobody_reads_it() {
    let (data, partition) = data_with(DEMO);
    damage::apply(&partition, "truncate-mid-body");
    let unread = |arguments: &[&str]| {
        let mut child = Command::new(TOOL).args(arguments).arg(data.path()).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        child.wait().unwrap().code()
    };
    assert_eq!(unread(&["verify"]), Some(1));
    assert_eq!(unread(&["repair", "--yes"]), Some(0));
    assert_eq!(unread(&["verify"]), Some(0));
}

#[test]
fn whoever_stops_reading_is_no_failure() {
    let data = scratch();
    let dir = data.path().join("0");
    crate::format::write_partition(&dir, &crate::format::demo(20_000), crate::format::Layout::default());
    let mut child = Command::new(TOOL).arg("dump").arg(&dir).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut first = String::new();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    out.read_line(&mut first).unwrap();
    drop(out);
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!((child.wait().unwrap().code(), said.as_str()), (Some(0), ""));
    assert!(first.starts_with("0 @"), "{first}");
}

#[test]
fn b027_memory_is_bounded_whatever_the_sizes_say() {
    let limited = |command: &str, path: &Path| {
        let script = format!("ulimit -v 150000; exec \"$0\" {command} \"$1\"");
        Command::new("sh").args(["-c", &script, TOOL]).arg(path).output().unwrap()
    };
    for (harm, segment) in [("size-huge", 5), ("keylen-max", 5), ("size-huge", 2), ("size-top-bit", 2)] {
        let (_data, dir) = data_with(DEMO);
        damage::apply_to(&dir, harm, segment);
        assert_exits(&limited("verify --patience 0", &dir), 1);
        assert_exits(&limited("dump", &dir), 1);
        assert_exits(&limited("repair --yes --sealed keep-before", &dir), 0);
    }
    // A size that the file has room for, and that is more than the memory there is.
    let (_data, dir) = data_with(DEMO);
    let target = damage::Target::newest(&dir);
    let mut log = target.bytes.clone();
    let at = target.records[3].position as usize + 8;
    log[at..at + 4].copy_from_slice(&(400u32 << 20).to_be_bytes());
    fs::write(&target.log, log).unwrap();
    fs::File::options().write(true).open(&target.log).unwrap().set_len(512 << 20).unwrap();
    assert!(assert_exits(&limited("verify --patience 0", &dir), 1).contains("CRC_MISMATCH"));
    assert_eq!(assert_exits(&limited("dump", &dir), 1).lines().count(), 33);
}

#[test]
fn a_partition_without_a_directory_is_told_by_verifying_and_by_a_repair() {
    let data = scratch();
    let topic = sapwood::TopicConfig { partitions: 3, ..small() };
    let (broker, partition) = create(data.path(), Backend::Posix, &topic);
    drop(partition);
    broker.close().unwrap();
    let dir = partition_dir(data.path());
    let topic = dir.parent().unwrap();
    for settings in [true, false] {
        if !settings {
            fs::remove_file(topic.join("topic.json")).unwrap();
        }
        for gone in [0, 1, 2] {
            let (there, away) = (topic.join(gone.to_string()), topic.join("away"));
            fs::rename(&there, &away).unwrap();
            // Without settings nothing tells of a last one.
            let is_told = settings || gone < 2;
            for path in [topic, data.path()] {
                let objects = lines(&assert_exits(&tool(&["verify", "--json"], path), i32::from(is_told)));
                let told = |object: &&Value| object["code"] == "PARTITION_MISSING" && object["path"] == there.to_str().unwrap();
                assert_eq!(objects.iter().filter(told).count(), usize::from(is_told), "{objects:?}");
            }
            assert_exits(&tool(&["repair", "--yes"], topic), i32::from(is_told));
            assert_exits(&tool(&["verify"], &there), if is_told { 1 } else { 2 });
            fs::rename(&away, &there).unwrap();
        }
    }
}

#[test]
fn what_is_no_partition_is_not_called_clean() {
    let data = scratch();
    let empty = data.path().join("empty");
    fs::create_dir(&empty).unwrap();
    assert_exits(&tool(&["verify"], &empty), 2);
    assert_exits(&tool(&["repair", "--yes"], &empty), 2);
    // Where a broker was and made nothing yet, nothing is wrong; nor in a partition without a record.
    open(&data.path().join("data"), Backend::Posix, &small()).close().unwrap();
    assert_exits(&tool(&["verify"], &data.path().join("data")), 0);
    let (broker, _) = create(&data.path().join("data"), Backend::Posix, &small());
    broker.close().unwrap();
    let dir = partition_dir(&data.path().join("data"));
    for entry in fs::read_dir(&dir).unwrap() {
        fs::remove_file(entry.unwrap().path()).unwrap();
    }
    assert_exits(&tool(&["verify"], &dir), 0);
}

#[test]
fn dump_takes_no_other_file_for_a_log_and_does_not_blame_an_index_for_the_end() {
    let (data, dir) = data_with(DEMO);
    open(data.path(), Backend::Posix, &small()).close().unwrap();
    fs::write(segment_path(&dir, 0, "sum"), [0; 40]).unwrap();
    for path in [segment_path(&dir, 0, "sum"), dir.join("checkpoint"), data.path().join(".lock")] {
        assert!(assert_exits(&tool(&["dump"], &path), 2).is_empty(), "{}", path.display());
    }
    for from in ["36", "37", "18446744073709551615"] {
        let output = tool(&["dump", "--from", from], &dir);
        assert!(assert_exits(&output, 0).is_empty());
        assert!(!String::from_utf8_lossy(&output.stderr).contains("WARN"), "{output:?}");
    }
}

#[test]
fn settings_that_say_nothing_are_told() {
    let data = scratch();
    let (broker, partition) = create(data.path(), Backend::Posix, &small());
    drop(partition);
    broker.close().unwrap();
    let settings = partition_dir(data.path()).with_file_name("topic.json");
    assert_exits(&tool(&["verify"], data.path()), 0);
    for text in ["", "{", r#"{"partitions":0}"#, r#"{"partitions":70000}"#] {
        fs::write(&settings, text).unwrap();
        let objects = lines(&assert_exits(&tool(&["verify", "--json"], data.path()), 1));
        assert!(objects.iter().any(|object| object["code"] == "SETTINGS_UNSOUND"), "{text}: {objects:?}");
        assert_exits(&tool(&["repair", "--yes"], data.path()), 1);
    }
    fs::remove_file(&settings).unwrap();
    assert_exits(&tool(&["verify"], data.path()), 0);
}

#[test]
fn notes_that_say_nothing_are_told() {
    let data = scratch();
    let (broker, partition) = create(data.path(), Backend::Posix, &small());
    for _ in 0..3 {
        crate::support::append(&partition, b"k", b"v");
    }
    partition.truncate_before(2).unwrap();
    let described = || lines(&assert_exits(&tool(&["describe", "--json"], data.path()), 0))[0]["partitions"][0].clone();
    assert_eq!((described()["sealed"].clone(), described()["first_offset"].clone()), (false.into(), 2.into()));
    partition.seal().unwrap();
    assert_eq!(described()["sealed"], true);
    assert!(assert_exits(&tool(&["describe"], data.path()), 0).contains("; sealed"));
    drop(partition);
    broker.close().unwrap();
    assert_exits(&tool(&["verify"], data.path()), 0);
    for name in ["start", "moved"] {
        let note = partition_dir(data.path()).join(name);
        let sound = fs::read(&note).unwrap();
        for at in 0..sound.len() {
            let mut bytes = sound.clone();
            bytes[at] ^= 0x10;
            fs::write(&note, &bytes).unwrap();
            let objects = lines(&assert_exits(&tool(&["verify", "--json"], data.path()), 1));
            let found = objects.iter().find(|object| object["code"] == "NOTE_UNSOUND").unwrap();
            assert_eq!(found["path"], note.to_str().unwrap(), "{found}");
            // What it told is nowhere else.
            assert_exits(&tool(&["repair", "--yes"], data.path()), 1);
            assert_eq!(fs::read(&note).unwrap(), bytes);
        }
        fs::write(&note, sound).unwrap();
    }
    assert_exits(&tool(&["verify"], data.path()), 0);
}

#[test]
fn topics_are_listed_and_described_as_they_are() {
    let data = scratch();
    let config = sapwood::TopicConfig { partitions: 2, ..crate::support::segments_of(270) };
    let (broker, _) = create(data.path(), Backend::Posix, &config);
    let topic = broker.topic(crate::support::TOPIC).unwrap();
    broker.create_topic("a.b", small()).unwrap();
    for number in 0..10u8 {
        crate::support::append(&topic.partition(1).unwrap(), b"key", &[number; 59]);
    }
    let live = topic.describe().unwrap();
    drop(topic);
    fs::create_dir(data.path().join("no-topic")).unwrap();
    fs::create_dir(data.path().join(".new-half")).unwrap();
    // Beside the broker, and after it.
    for is_open in [true, false] {
        let before = snapshot(data.path());
        assert_eq!(assert_exits(&tool(&["topics"], data.path()), 0), "a.b\nt\n");
        let names: Vec<_> = lines(&assert_exits(&tool(&["topics", "--json"], data.path()), 0)).iter().map(|o| o["name"].clone()).collect();
        assert_eq!(names, ["a.b", "t"]);
        let topics = lines(&assert_exits(&tool(&["describe", "--json"], data.path()), 0));
        assert_eq!(topics.len(), 2);
        let one = lines(&assert_exits(&tool(&["describe", "--json"], &data.path().join("t")), 0));
        assert_eq!(one, topics[1..]);
        assert_eq!(serde_json::from_value::<sapwood::TopicConfig>(one[0]["settings"].clone()).unwrap(), config);
        let partitions = one[0]["partitions"].as_array().unwrap();
        assert_eq!(partitions.len(), 2);
        for (told, live) in partitions.iter().zip(&live.partitions) {
            let number = |name: &str| told[name].as_u64().unwrap();
            assert_eq!((number("first_offset"), number("next_offset")), (live.first_offset, live.next_offset), "{told}");
            assert_eq!(number("segments"), live.segments as u64, "{told}");
            let on_disk = fs::read_dir(told["path"].as_str().unwrap()).unwrap().map(|file| file.unwrap().metadata().unwrap().len());
            // A broker at work writes indexes and sums meanwhile.
            assert!(is_open || number("bytes_on_disk") == on_disk.sum::<u64>(), "{told}");
            assert!(told["damage"].is_null());
        }
        let text = assert_exits(&tool(&["describe"], data.path()), 0);
        assert!(text.contains("  1: 4 segments, 0 up to, not including, 10, "), "{text}");
        if is_open {
            broker.clone().close().unwrap();
        } else {
            assert!(snapshot(data.path()) == before, "nothing is changed");
        }
    }
    // What is wrong is told, and does not hide the rest.
    let dir = data.path().join("t/1");
    let log = segment_path(&dir, 9, "log");
    let mut bytes = fs::read(&log).unwrap();
    bytes[20] ^= 1;
    fs::write(&log, bytes).unwrap();
    let told = lines(&assert_exits(&tool(&["describe", "--json"], data.path()), 1));
    assert_eq!(told[1]["partitions"][1]["next_offset"], 9);
    assert!(told[1]["partitions"][1]["damage"].as_str().unwrap().contains("damaged"), "{told:?}");
    fs::remove_dir_all(&dir).unwrap();
    fs::write(data.path().join("a.b/topic.json"), b"{").unwrap();
    let told = lines(&assert_exits(&tool(&["describe", "--json"], data.path()), 1));
    assert!(told[0]["settings"].is_null() && told[0]["settings_unsound"].as_str().unwrap().contains("topic.json"), "{told:?}");
    assert!(told[1]["partitions"][1]["damage"].is_string() && told[1]["partitions"][0]["damage"].is_null(), "{told:?}");
    let text = assert_exits(&tool(&["describe"], data.path()), 1);
    assert!(text.contains("settings: none that can be used"), "{text}");
    fs::remove_file(data.path().join("a.b/topic.json")).unwrap();
    assert_exits(&tool(&["describe"], &data.path().join("no-topic")), 2);
    assert_exits(&tool(&["topics"], &data.path().join("nowhere")), 2);
}
