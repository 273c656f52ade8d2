//! Opening a directory: a sound partition with arbitrary edits. It opens, or says what is wrong; it never serves a record that was not
//! written; it takes appends; and opening it again changes nothing.

use std::collections::{BTreeMap, BTreeSet};

use super::format::{Log, Slot, name};
use super::{Input, append, assert_named, disk_with, files, open, read_all, store_settings, tiny};
use crate::{BrokerConfig, Error, OnDamage, OwnedRecord, Recovery, Result};

type Files = BTreeMap<String, Vec<u8>>;

/// Names of files that edits make: of segments beside the right ones, of the engine's own, and of others.
const NAMES: [&str; 12] = [
    "checkpoint",
    "prepared.log",
    "prepared.index",
    "00000000000000000000.torn.tmp",
    "00000000000000000000.0.torn",
    "99999999999999999999.log",
    "18446744073709551615.log",
    "18446744073709551614.index",
    "0000000000000000000.log",
    "README",
    "00000000000000000000.LOG",
    "topic.json",
];

/// A header of choices, then the edits, each of fixed length but for what it inserts.
pub fn directory(data: &[u8]) {
    let mut input = Input(data);
    let (choice, shape, settings) = (input.byte(), input.byte(), input.byte());
    let is = |bit: u8| choice >> bit & 1 == 1;
    let interval = [1, 2, 7, 4096][usize::from(choice & 3)];
    let base = [0, 5, 1_000_000_000_000, u64::MAX - 40][usize::from(choice >> 2 & 3)];
    let recovery = if is(4) { Recovery::FullScan } else { Recovery::FromCheckpoint };
    let on_damage = if is(5) { OnDamage::CutAside } else { OnDamage::Refuse };
    let sizes = (0..usize::from(shape & 31)).map(|number| [17, 0, 40, 300][number * usize::from(shape >> 5) % 4]);
    let log = Log::sample(base, sizes, 270);
    let mut all = log.files(interval);
    let last = *log.segments.last_key_value().unwrap().0;
    match choice >> 6 {
        0 => {}
        1 => drop(all.insert("checkpoint".into(), log.checkpoint(interval, None).file())),
        2 => drop(all.insert("checkpoint".into(), log.checkpoint(interval, Some(2)).file())),
        _ => {
            // As a crash leaves it: with room ahead.
            all.get_mut(&name(last, "log")).unwrap().resize(8192, 0);
            all.insert("checkpoint".into(), log.checkpoint(interval, Some(1)).file());
        }
    }
    let sound = all.clone();
    for _ in 0..16 {
        if input.is_empty() {
            break;
        }
        edit(&mut all, &log, &mut input);
    }
    let config = tiny(interval, recovery, on_damage);
    judge(&sound, &all, &log, &config, settings & 1 == 1);
}

/// One change of one file.
fn edit(all: &mut Files, log: &Log, input: &mut Input<'_>) {
    let (op, file, at) = (input.byte(), usize::from(input.byte()), usize::from(input.word()));
    let Some(name) = all.keys().nth(file % all.len().max(1)).cloned() else { return };
    let other = other_name(log, input.byte());
    let bytes = all.get_mut(&name).unwrap();
    let at = at % (bytes.len() + 1);
    match op % 9 {
        0 => {
            let mask = 1 << (input.byte() % 8);
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= mask;
            }
        }
        1 => bytes.truncate(at),
        2 => {
            let count = usize::from(input.byte()) % 64;
            drop(bytes.splice(at..at, input.bytes(count).iter().copied()));
        }
        3 => {
            let count = usize::from(input.byte()).min(bytes.len() - at);
            bytes[at..at + count].fill(0);
        }
        4 => {
            let count = usize::from(input.byte()) % 64;
            let new = input.bytes(count.min(bytes.len() - at));
            bytes[at..at + new.len()].copy_from_slice(new);
        }
        5 => drop(all.remove(&name)),
        6 => {
            let bytes = all.remove(&name).unwrap();
            all.insert(other, bytes);
        }
        7 => {
            let bytes = bytes.clone();
            all.insert(other, bytes);
        }
        // Room ahead, or what is left of it.
        _ => bytes.resize(bytes.len() + usize::from(input.byte()) * 32, 0),
    }
}

/// A segment's name near the right ones, or one of [`NAMES`].
fn other_name(log: &Log, choice: u8) -> String {
    let choice = usize::from(choice);
    if choice < 2 * NAMES.len() {
        return NAMES[choice / 2].into();
    }
    name(log.first().saturating_add((choice / 3) as u64 - 8), ["log", "index", "timeindex"][choice % 3])
}

/// With `settings`, the topic's are stored beside the partition.
fn judge(sound: &Files, all: &Files, log: &Log, config: &BrokerConfig, settings: bool) {
    let sim = disk_with(all);
    if settings {
        store_settings(&sim, config);
    }
    let (broker, partition) = match open(&sim, config) {
        Ok(opened) => opened,
        Err(Error::TopicNotFound { .. }) => {
            let has_log = all.keys().any(|name| name.ends_with(".log") && is_segment(name));
            assert!(!settings && !has_log, "a directory of a topic");
            assert_eq!(files(&sim), *all, "it is another's");
            return;
        }
        Err(error) => {
            assert_named(&error);
            if error.is_damage() && config.on_damage == OnDamage::Refuse {
                assert_eq!(files(&sim), *all, "a refusal changes nothing: {error}");
            }
            return;
        }
    };
    let checkpoint = all.get("checkpoint").and_then(|file| Slot::newest(file));
    if let Some((_, slot)) = checkpoint.filter(|_| config.on_damage == OnDamage::Refuse) {
        assert!(partition.durable_end() >= slot.next_offset, "records that were durable are given up unasked: {slot:?}");
    }
    let found = read_all(&partition, log);
    let served: BTreeMap<u64, OwnedRecord> = found.iter().filter_map(|(offset, record)| Some((*offset, record.clone().ok()?))).collect();
    let bases: BTreeSet<u64> =
        all.keys().filter(|name| is_segment(name)).filter_map(|name| name.strip_suffix(".log")?.parse().ok()).collect();
    for (&base, &count) in &log.segments {
        // Nobody else claims its records, and its log is as it was.
        let alone = bases.range(base + u64::from(count > 0)..base + count).next().is_none();
        let untouched = all.get(&name(base, "log")) == Some(&sound[&name(base, "log")]);
        if alone && untouched {
            assert!(
                (base..base + count).all(|offset| served.contains_key(&offset)),
                "records of the untouched segment {base} are not served: {found:#?}"
            );
        }
    }
    assert!(found.is_empty() || sound != all || served.len() == found.len());
    // The last offset of 64 bits is no record's.
    let new = (partition.next_offset() < u64::MAX).then(|| append(&partition, b"after"));
    // Behind a damaged record none is found up to the next index entry: nothing tells where it begins.
    let is_new = |read: Result<OwnedRecord>| match read {
        Ok(record) => (&record.key[..], &record.value[..]) == (b"new", b"after"),
        Err(error) => error.is_damage() && served.len() < found.len(),
    };
    assert!(new.is_none_or(|new| is_new(partition.read_one(new))));
    broker.close().expect("what was opened is closed");

    let closed = files(&sim);
    kept(all, &closed);
    let (broker, partition) = open(&sim, config).expect("what was closed cleanly is opened");
    for (offset, record) in &served {
        assert_eq!(partition.read_one(*offset).as_ref().ok(), Some(record), "it was served before");
    }
    assert!(new.is_none_or(|new| is_new(partition.read_one(new))));
    broker.close().expect("what was opened is closed");
    let again = files(&sim);
    if settings || indexes(&again) == indexes(&closed) {
        assert_eq!(again, closed, "opening again changes nothing");
    } else {
        assert_eq!(but_indexes(&again), but_indexes(&closed), "opening again changes nothing but indexes");
    }
}

/// Without stored settings an opening takes the interval of the indexes from the indexes, and may find another one than the last did.
fn indexes(files: &Files) -> Files {
    only(files, |name| name.ends_with("index"))
}

/// The checkpoint counts their entries.
fn but_indexes(files: &Files) -> Files {
    only(files, |name| !name.ends_with("index") && name != "checkpoint")
}

fn only(files: &Files, stays: impl Fn(&str) -> bool) -> Files {
    files.iter().filter(|(name, _)| stays(name)).map(|(name, bytes)| (name.clone(), bytes.clone())).collect()
}

/// Files that are not the engine's are as they were.
fn kept(before: &Files, after: &Files) {
    for (name, bytes) in before {
        let unfinished = name.starts_with("prepared.") || name.ends_with(".tmp");
        let ours = is_segment(name) || name.ends_with(".sum") || name == "checkpoint" || unfinished;
        assert!(ours || after.get(name) == Some(bytes), "{name} is another's");
    }
}

fn is_segment(name: &str) -> bool {
    let (stem, extension) = name.split_once('.').unwrap_or_default();
    stem.len() == 20 && stem.parse::<u64>().is_ok() && ["log", "index", "timeindex"].contains(&extension)
}
