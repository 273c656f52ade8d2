//! Repairs: of every damage, with every choice, and interrupted at every step. What is cut lies beside the log afterwards, and what the
//! plan promised is what the engine serves.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use sapwood::inspect::{Code, Inspector, RepairChoices, SealedDamage, Severity};
use sapwood::io::Disk;
use sapwood::io::sim::SimDisk;
use sapwood::{Backend, BrokerConfig, Error};

use crate::damage::{self, Target};
use crate::format::{Slot, segment_path};
use crate::oracle::{check, data_end};
use crate::sim::{CRASHES, dir, exported, tiny, try_open, with_partition};
use crate::support::{
    Row, append, bytes_in, config, copy_dir, data_with, fixture, open, partition_of, read_all, report_of, rows, scratch, seed, segments_of,
    small,
};
use crate::verify::{each_damage, look};

const DEMO: &str = "demo-36-segment-270";

const CHOICES: [SealedDamage; 3] = [SealedDamage::Leave, SealedDamage::KeepBefore, SealedDamage::KeepBehind];

fn choose(sealed: SealedDamage) -> RepairChoices {
    RepairChoices { sealed, ..RepairChoices::default() }
}

pub fn inspector() -> Inspector {
    Inspector::new().patience(Duration::ZERO)
}

/// Logs by name, and what was set aside, without the zeros behind them.
type Logs = (BTreeMap<String, Vec<u8>>, Vec<Vec<u8>>);

fn logs_of(files: impl IntoIterator<Item = (String, Vec<u8>)>) -> Logs {
    let (mut logs, mut aside) = (BTreeMap::new(), Vec::new());
    for (name, mut bytes) in files {
        bytes.truncate(data_end(&bytes));
        match name.rsplit_once('.') {
            Some((_, "torn")) => aside.push(bytes),
            Some((base, "log")) if base.parse::<u64>().is_ok() => drop(logs.insert(name, bytes)),
            _ => {}
        }
    }
    (logs, aside)
}

fn logs(dir: &Path) -> Logs {
    let name = |path: PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
    logs_of(bytes_in(dir).into_iter().filter_map(|(path, bytes)| Some((name(path), bytes?))))
}

fn logs_on(sim: &SimDisk) -> Logs {
    let names = crate::sim::names(sim);
    logs_of(names.into_iter().map(|name| (name.clone(), sim.read_file(&dir().join(name)))))
}

/// Every byte of a log that is in none any more lies aside.
#[track_caller]
fn assert_nothing_is_lost((before, _): &Logs, (after, aside): &Logs, what: &str) {
    for (name, bytes) in before {
        let kept = after.get(name).map_or(&[][..], |kept| &kept[..]);
        let common = kept.iter().zip(bytes).take_while(|(kept, bytes)| kept == bytes).count();
        assert_eq!(common, kept.len(), "{what}: {name} holds other bytes than before");
        // A record may end in zeros, which do not show in what is compared.
        let lost = &bytes[common..];
        let is_aside =
            |copy: &Vec<u8>| copy.ends_with(lost) || lost.ends_with(copy) && lost[..lost.len() - copy.len()].iter().all(|&byte| byte == 0);
        assert!(lost.is_empty() || aside.iter().any(is_aside), "{what}: {} bytes of {name} are nowhere", lost.len());
    }
}

/// Repairs a copy on a disk in memory, and holds the plan to what it promised.
fn assert_repairs(from: &Path, sealed: SealedDamage, what: &str) {
    let what = format!("{what}, {sealed:?}");
    let sim = SimDisk::new(0);
    sim.import(from, &dir()).unwrap();
    let plan = on(&sim).plan_repair(dir(), choose(sealed)).unwrap();
    on(&sim).apply(&plan).unwrap_or_else(|error| panic!("{what}: {error}\n{plan}"));
    let report = on(&sim).verify(dir()).unwrap();
    assert_eq!(report.is_clean(), plan.left().is_empty(), "{what}:\n{plan}\n{:#?}", report.findings);
    let is_harmless = |code| matches!(code, Code::NotARegularFile | Code::TimestampBackwards);
    let is_sound = plan.left().iter().all(|finding| is_harmless(finding.code));
    assert!(sealed == SealedDamage::Leave || is_sound, "{what}: {plan}");
    assert_eq!(report.first_offset..report.next_offset, plan.keeps(), "{what}:\n{plan}");
    let again = on(&sim).plan_repair(dir(), choose(sealed)).unwrap();
    assert!(again.is_empty() && again.keeps() == plan.keeps() && again.left().len() == plan.left().len(), "{what}: again\n{again}");

    // What is kept was there before; nothing is made up.
    let kept = exported(&sim, |dir| {
        assert_nothing_is_lost(&logs(from), &logs(dir), &what);
        rows(check(dir).readable_records())
    });
    let before = rows(&check(from).records);
    assert!(kept.iter().all(|row| before.contains(row)), "{what}");
    if is_sound {
        assert_engine_serves(&sim, &kept, plan.keeps(), &what);
    }
}

fn assert_engine_serves(sim: &SimDisk, kept: &[Row], keeps: std::ops::Range<u64>, what: &str) {
    let broker = crate::sim::try_open(sim, &small()).unwrap_or_else(|error| panic!("{what}: {error}"));
    let report = report_of(&broker);
    assert!(report.damage.is_empty() && report.torn_tail.is_none(), "{what}: {report:?}");
    let partition = partition_of(&broker);
    assert_eq!(partition.first_offset()..partition.next_offset(), keeps, "{what}");
    assert!(read_all(&partition) == kept, "{what}");
    broker.close().unwrap();
}

#[test]
fn every_damage_is_repaired_as_the_plan_says() {
    let fixtures = [DEMO, "edge-segment-270", "interval-7-segment-270-base-1e12-prealloc"];
    each_damage(&fixtures, |dir, what| CHOICES.into_iter().for_each(|sealed| assert_repairs(dir, sealed, what)));
}

#[test]
fn what_is_sound_is_left_alone() {
    for name in crate::verify::FIXTURES {
        let copy = scratch();
        copy_dir(&fixture(name), copy.path());
        let before = crate::support::snapshot(copy.path());
        for sealed in CHOICES {
            let plan = inspector().plan_repair(copy.path(), choose(sealed)).unwrap();
            assert!(plan.is_empty() && plan.left().is_empty(), "{name}: {plan}");
            inspector().apply(&plan).unwrap();
        }
        assert!(crate::support::snapshot(copy.path()) == before, "{name}");
    }
}

/// Damages the demo partition, repairs it with that choice, and gives the offsets that are kept.
fn kept(harm: impl Fn(&Path), sealed: SealedDamage) -> (std::ops::Range<u64>, bool) {
    let (_data, dir) = data_with(DEMO);
    harm(&dir);
    let plan = inspector().plan_repair(&dir, choose(sealed)).unwrap();
    inspector().apply(&plan).unwrap();
    (plan.keeps(), plan.left().is_empty())
}

#[test]
fn b038_b039_damage_between_segments_is_left_or_one_side_of_it_is_kept() {
    let missing = |dir: &Path| damage::apply(dir, "missing-middle-segment");
    assert_eq!(kept(missing, SealedDamage::Leave), (0..6, false));
    assert_eq!(kept(missing, SealedDamage::KeepBefore), (0..6, true));
    assert_eq!(kept(missing, SealedDamage::KeepBehind), (12..36, true));
    let overlap = |dir: &Path| damage::apply_to(dir, "segment-overlap", 3);
    assert_eq!(kept(overlap, SealedDamage::Leave), (0..24, false));
    assert_eq!(kept(overlap, SealedDamage::KeepBefore), (0..24, true));
    assert_eq!(kept(overlap, SealedDamage::KeepBehind), (23..36, true));
    let flipped = |dir: &Path| damage::apply_to(dir, "flip-value-byte", 1);
    assert_eq!(kept(flipped, SealedDamage::Leave), (0..9, false));
    assert_eq!(kept(flipped, SealedDamage::KeepBefore), (0..9, true));
    assert_eq!(kept(flipped, SealedDamage::KeepBehind), (12..36, true));
    let twice = |dir: &Path| {
        missing(dir);
        damage::apply_to(dir, "flip-crc", 2);
    };
    assert_eq!(kept(twice, SealedDamage::KeepBefore), (0..6, true));
    assert_eq!(kept(twice, SealedDamage::KeepBehind), (24..36, true));
}

#[test]
fn an_open_partition_is_not_repaired_and_a_plan_that_is_not_true_any_more_neither() {
    let (data, dir) = data_with(DEMO);
    damage::apply_to(&dir, "flip-crc", 1);
    let plan = inspector().plan_repair(&dir, choose(SealedDamage::KeepBefore)).unwrap();
    let broker = open(data.path(), Backend::Posix, &small());
    let plan_while_open = inspector().plan_repair(&dir, choose(SealedDamage::KeepBefore)).unwrap();
    let refused = inspector().apply(&plan_while_open).unwrap_err();
    assert!(matches!(refused, Error::Locked { .. }), "{refused}");
    assert!(segment_path(&dir, 30, "log").exists());
    append(&partition_of(&broker), b"k", b"one more");
    broker.close().unwrap();
    // The same damage, and more records behind it: they would be set aside without having been shown.
    let before = bytes_in(data.path());
    assert!(matches!(inspector().apply(&plan).unwrap_err(), Error::PlanOutdated { .. }));
    assert!(bytes_in(data.path()) == before);
    // By way of a link, it is the same data directory.
    let broker = open(data.path(), Backend::Posix, &small());
    let elsewhere = scratch();
    let link = elsewhere.path().join("link");
    std::os::unix::fs::symlink(&dir, &link).unwrap();
    let plan = inspector().plan_repair(&link, choose(SealedDamage::KeepBefore)).unwrap();
    assert!(matches!(inspector().apply(&plan).unwrap_err(), Error::Locked { .. }));
    broker.close().unwrap();
}

#[test]
fn a_checkpoint_that_does_not_fit_goes_and_what_does_not_open_opens() {
    let (data, dir) = data_with(DEMO);
    let slot = Slot { sequence: 0, base: 30, position: 270, next_offset: 36, last_timestamp: u64::MAX, entries: 0, clean: false };
    fs::write(dir.join("checkpoint"), slot.file(None)).unwrap();
    damage::apply(&dir, "flip-value-byte");
    let refused = sapwood::Broker::open(data.path(), config(Backend::Posix, small())).unwrap_err();
    assert!(matches!(refused, Error::Damaged { .. }), "{refused}");
    let plan = inspector().plan_repair(&dir, RepairChoices::default()).unwrap();
    assert_eq!((plan.keeps(), plan.left().len()), (0..33, 0), "{plan}");
    let repaired = inspector().apply(&plan).unwrap();
    assert_eq!(repaired.set_aside, [dir.join("00000000000000000030.135.torn")]);
    let broker = open(data.path(), Backend::Posix, &small());
    assert_eq!(partition_of(&broker).next_offset(), 33);
    broker.close().unwrap();
}

#[test]
fn b030_a_flipped_length_of_a_key_is_seen_by_the_sum_of_the_whole_log() {
    let (data, dir) = data_with(DEMO);
    let sums = RepairChoices { write_sums: true, ..RepairChoices::default() };
    let plan = inspector().plan_repair(&dir, sums).unwrap();
    assert_eq!(plan.steps().count(), 5, "{plan}");
    inspector().apply(&plan).unwrap();
    let report = look(&dir);
    assert!(report.findings.is_empty(), "{:#?}", report.findings);
    let sum = fs::read(segment_path(&dir, 6, "sum")).unwrap();
    let log = fs::read(segment_path(&dir, 6, "log")).unwrap();
    let mut expected = b"sapwsum1".to_vec();
    [6u64, 270, 12].iter().for_each(|word| expected.extend(word.to_be_bytes()));
    expected.extend(crc32fast::hash(&log).to_be_bytes());
    expected.extend(crc32fast::hash(&expected).to_be_bytes());
    assert_eq!(sum, expected);

    // The loader takes it for the engine's own.
    let check_sealed = || BrokerConfig { check_sealed: true, ..config(Backend::Posix, small()) };
    let broker = sapwood::Broker::open(data.path(), check_sealed()).unwrap();
    let report = report_of(&broker);
    assert!(report.ignored.is_empty() && report.damage.is_empty(), "{report:?}");
    broker.close().unwrap();

    damage::apply_to(&dir, "flip-keylen", 1);
    let report = look(&dir);
    let wrong: Vec<_> = report.findings.iter().filter(|finding| finding.severity > Severity::Info).collect();
    assert!(wrong.len() == 1 && wrong[0].code == Code::SumMismatch && wrong[0].path == segment_path(&dir, 6, "sum"), "{wrong:#?}");
    let broker = open(data.path(), Backend::Posix, &small());
    assert!(report_of(&broker).damage.is_empty(), "not looked for unasked");
    broker.close().unwrap();
    let broker = sapwood::Broker::open(data.path(), check_sealed()).unwrap();
    let damage = report_of(&broker).damage;
    assert!(damage.len() == 1 && matches!(damage[0], Error::SumMismatch { .. }) && damage[0].is_damage(), "{damage:?}");
    broker.close().unwrap();

    let plan = inspector().plan_repair(&dir, sums).unwrap();
    assert!(plan.is_empty() && plan.left().len() == 1, "{plan}");
    let accept = RepairChoices { accept_sums: true, ..sums };
    inspector().apply(&inspector().plan_repair(&dir, accept).unwrap()).unwrap();
    assert!(look(&dir).findings.iter().all(|finding| finding.code == Code::Unfinished), "the sum is written anew");

    // And it goes with its topic.
    let broker = open(data.path(), Backend::Posix, &small());
    broker.delete_topic(crate::support::TOPIC).unwrap();
    assert!(!dir.exists());
    broker.close().unwrap();
}

#[test]
fn an_opening_that_checks_sealed_segments_tells_of_every_damage_in_them_once() {
    let (data, dir) = data_with(DEMO);
    // The last entry of the index leads to the end, so an opening that does not look sees nothing.
    damage::apply_to(&dir, "flip-value-byte", 1);
    damage::apply_to(&dir, "flip-key-byte", 3);
    damage::apply_to(&dir, "truncate-mid-body", 2);
    let config = BrokerConfig { check_sealed: true, ..config(Backend::Posix, small()) };
    let broker = sapwood::Broker::open(data.path(), config).unwrap();
    let told = report_of(&broker).damage;
    let place = |error: &Error| match error {
        Error::Damaged { path, position, .. } => (path.clone(), *position),
        other => panic!("{other}"),
    };
    let log = |base| segment_path(&dir, base, "log");
    assert_eq!(told.iter().map(place).collect::<Vec<_>>(), [(log(6), 135), (log(12), 225), (log(18), 135)]);
    broker.close().unwrap();
}

#[test]
fn sums_that_say_nothing_or_are_of_no_sealed_log_go() {
    let (_data, dir) = data_with(DEMO);
    inspector().apply(&inspector().plan_repair(&dir, RepairChoices { write_sums: true, ..choose(SealedDamage::Leave) }).unwrap()).unwrap();
    let sum = |base| segment_path(&dir, base, "sum");
    fs::copy(sum(0), sum(30)).unwrap();
    fs::copy(sum(0), sum(40)).unwrap();
    fs::write(sum(12), &fs::read(sum(12)).unwrap()[..39]).unwrap();
    fs::copy(sum(0), sum(18)).unwrap();
    let report = look(&dir);
    let code = |base| report.findings.iter().find(|finding| finding.path == sum(base)).map(|finding| (finding.code, finding.severity));
    assert_eq!(code(30), Some((Code::SumOfActive, Severity::Warning)));
    assert_eq!(code(40), Some((Code::OrphanIndex, Severity::Warning)));
    assert_eq!([code(12), code(18)], [Some((Code::SumUnsound, Severity::Warning)); 2]);
    inspector().apply(&inspector().plan_repair(&dir, RepairChoices::default()).unwrap()).unwrap();
    assert!(!sum(30).exists() && !sum(40).exists() && !sum(12).exists() && !sum(18).exists() && sum(0).exists());
    assert!(look(&dir).is_clean());
}

/// The files of the segments and the copies of what was cut.
fn files(sim: &SimDisk) -> (BTreeMap<String, Vec<u8>>, Vec<Vec<u8>>) {
    let (mut ours, mut torn) = (BTreeMap::new(), Vec::new());
    for entry in sim.clone().list(&dir()).unwrap() {
        let name = entry.name.into_string().unwrap();
        let bytes = sim.read_file(&dir().join(&name));
        if name.ends_with(".torn") { torn.push(bytes) } else { drop(ours.insert(name, bytes)) }
    }
    (ours, torn)
}

fn on(sim: &SimDisk) -> Inspector {
    Inspector::on(Arc::new(sim.clone())).patience(Duration::ZERO)
}

/// A damage of the demo partition, and what is chosen.
type Harm = (&'static str, fn(&Path), RepairChoices);

fn harms() -> Vec<Harm> {
    let leave = choose(SealedDamage::Leave);
    let before = RepairChoices { write_sums: true, ..choose(SealedDamage::KeepBefore) };
    let behind = RepairChoices { write_sums: true, ..choose(SealedDamage::KeepBehind) };
    let checkpoint = |dir: &Path| {
        let slot = Slot { sequence: 0, base: 30, position: 270, next_offset: 36, last_timestamp: u64::MAX, entries: 6, clean: false };
        fs::write(dir.join("checkpoint"), slot.file(None)).unwrap();
        damage::apply(dir, "hole-in-the-middle");
    };
    vec![
        ("torn tail", |dir| damage::apply(dir, "truncate-mid-body"), leave),
        ("garbage", |dir| damage::apply(dir, "garbage-tail"), leave),
        ("damage before the checkpoint", checkpoint, leave),
        (
            "the last record before the checkpoint",
            |dir| {
                let slot =
                    Slot { sequence: 0, base: 30, position: 270, next_offset: 36, last_timestamp: u64::MAX, entries: 6, clean: false };
                fs::write(dir.join("checkpoint"), slot.file(None)).unwrap();
                damage::apply(dir, "truncate-mid-body");
            },
            leave,
        ),
        ("both indexes missing", |dir| damage::apply_to(dir, "missing-both-indexes", 2), leave),
        ("index out of order", |dir| damage::apply_to(dir, "index-out-of-order", 5), leave),
        ("zeros behind a sealed log", |dir| damage::apply_to(dir, "zero-tail", 1), leave),
        ("orphans", |dir| damage::apply(dir, "orphan-index"), leave),
        ("sealed damage, before", |dir| damage::apply_to(dir, "flip-value-byte", 3), before),
        ("sealed damage, behind", |dir| damage::apply_to(dir, "flip-value-byte", 3), behind),
        ("gap, before", |dir| damage::apply(dir, "missing-middle-segment"), before),
        ("gap, behind", |dir| damage::apply(dir, "missing-middle-segment"), behind),
        ("overlap, before", |dir| damage::apply_to(dir, "segment-overlap", 3), before),
        ("overlap, behind", |dir| damage::apply_to(dir, "segment-overlap", 3), behind),
        (
            "leftovers",
            |dir| {
                let names = ["prepared.log", "prepared.index", "00000000000000000030.torn.tmp", "00000000000000000030.index.tmp"];
                names.iter().for_each(|name| fs::write(dir.join(name), b"unfinished").unwrap());
                fs::write(segment_path(dir, 30, "sum"), b"no sum").unwrap();
            },
            RepairChoices { write_sums: true, ..leave },
        ),
    ]
}

#[test]
fn a_repair_that_is_interrupted_anywhere_and_made_again_ends_the_same() {
    let seed = seed();
    let (mut done, mut refused) = (0, 0);
    for (harm, apply, choices) in harms() {
        let damaged = with_partition(seed, &fixture(DEMO), apply);
        let straight = damaged.fork(seed);
        let plan = on(&straight).plan_repair(dir(), choices).unwrap();
        assert!(plan.left().is_empty(), "{harm}: {plan}");
        let before = straight.state_changes();
        on(&straight).apply(&plan).unwrap();
        let points = straight.state_changes() - before;
        assert!(points > 0, "{harm}: nothing is changed");
        let (expected, aside) = files(&straight);
        let logs_before = logs_on(&damaged);
        let is_refused = try_open(&damaged.fork(seed), &tiny(270)).is_err();
        refused += u32::from(is_refused);
        assert_nothing_is_lost(&logs_before, &logs_on(&straight), harm);
        // What it did is durable once it is done.
        straight.power_loss_keeping_nothing();
        assert!(files(&straight) == (expected.clone(), aside.clone()), "{harm}: not durable");
        assert_eq!(on(&straight).verify(dir()).unwrap().worst().filter(|worst| *worst > Severity::Info), None, "{harm}");

        for point in 1..=points {
            for crash in CRASHES {
                let what = format!("{harm}: {crash} crash at operation {point} of {points}");
                let sim = damaged.fork(seed ^ point);
                sim.crash_at_op(point);
                let interrupted = on(&sim).apply(&plan);
                assert!(sim.crashed() && interrupted.is_err(), "{what}: not reached");
                crate::sim::crash(&sim, crash);
                assert_nothing_is_lost(&logs_before, &logs_on(&sim), &what);
                if is_refused {
                    // Nor if nobody repairs any further, and a broker opens what is there.
                    let opened = sim.fork(seed);
                    let _ = try_open(&opened, &tiny(270)).map(sapwood::Broker::close);
                    assert_nothing_is_lost(&logs_before, &logs_on(&opened), &format!("{what}, and opened then"));
                }
                let again = on(&sim).plan_repair(dir(), choices).unwrap_or_else(|error| panic!("{what}: {error}"));
                assert_eq!((again.keeps(), again.left()), (plan.keeps(), plan.left()), "{what}: {again}");
                on(&sim).apply(&again).unwrap_or_else(|error| panic!("{what}: {error}"));
                let (files, torn) = files(&sim);
                assert!(files == expected, "{what}: the files differ\n{again}");
                assert!(aside.iter().all(|copy| torn.contains(copy)), "{what}: what was cut is nowhere");
                done += 1;
            }
        }
    }
    assert!(done > 400 && refused >= 2, "{done} interruptions, {refused} damages that opening refuses");
}

/// What is harmless to have forgotten: whose names no reader takes for a segment's.
#[test]
fn what_was_set_aside_can_still_be_read() {
    let (_data, dir) = data_with(DEMO);
    let target = Target::number(&dir, 2);
    target.damage("flip-value-byte", &target.records[3]);
    let plan = inspector().plan_repair(&dir, choose(SealedDamage::KeepBefore)).unwrap();
    let repaired = inspector().apply(&plan).unwrap();
    let whole: Vec<&PathBuf> = repaired.set_aside.iter().filter(|path| path.to_str().unwrap().ends_with(".0.torn")).collect();
    assert_eq!(whole.len(), 3);
    for path in whole {
        let records: Vec<_> = inspector().read_log(path, 0).unwrap().map(|stored| stored.unwrap().record.offset).collect();
        assert_eq!(records.len(), 6, "{path:?}");
        assert!(path.to_str().unwrap().contains(&format!("{:020}", records[0])));
    }
}

#[test]
fn a_sum_that_a_crash_prevented_is_made_up_for_at_the_next_roll_unless_records_are_damaged() {
    for damaged in [false, true] {
        let (data, dir) = data_with(DEMO);
        if damaged {
            damage::apply_to(&dir, "flip-value-byte", 4);
        }
        // The two newest sealed segments have none, as none of this fixture has; the last one goes on, and is sealed by a roll.
        let broker = open(data.path(), Backend::Posix, &segments_of(270));
        let partition = partition_of(&broker);
        assert_eq!(append(&partition, b"", &[7; 200]), 36);
        drop(partition);
        broker.close().unwrap();
        let made: Vec<_> = damage::bases(&dir).into_iter().filter(|&base| segment_path(&dir, base, "sum").exists()).collect();
        assert_eq!(made, if damaged { vec![30] } else { vec![24, 30] });
        let report = look(&dir);
        assert!(!report.findings.iter().any(|finding| finding.code == Code::SumMismatch), "{:#?}", report.findings);
    }
}

#[test]
fn a_copy_that_finds_no_room_leaves_what_room_there_was() {
    let sim = with_partition(seed(), &fixture(DEMO), |dir| damage::apply(dir, "garbage-tail"));
    let (used, names) = (sim.used(), crate::sim::names(&sim));
    let plan = on(&sim).plan_repair(dir(), RepairChoices::default()).unwrap();
    sim.set_capacity(Some(used));
    let error = on(&sim).apply(&plan).unwrap_err();
    assert!(error.is_disk_full(), "{error}");
    assert_eq!((sim.used(), crate::sim::names(&sim)), (used, names));
    sim.set_capacity(None);
    on(&sim).apply(&plan).unwrap();
}
