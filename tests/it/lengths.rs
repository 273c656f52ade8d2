//! Records whose header or body lies: lengths that wrap or claim too much, keys longer than their record, flipped bits; in the newest
//! segment, where they end the log, and in sealed ones, where they are damage. Case numbers are those of the project's list of failures
//! met by others.

use std::fs;
use std::path::Path;

use sapwood::{Backend, Error, Flaw};
use serde_json::json;

use crate::child::{self, Child, backend_name, say};
use crate::damage::{self, Target};
use crate::format::{self, HEADER, Layout, segment_path};
use crate::recovery::{DEMO, assert_goes_on, assert_recovers, demo_damaged};
use crate::support::{
    BACKENDS, Row, append, data_with, data_with_demo, each_backend, open, partition_of, read_all, report_of, rows_of, segments_of, small,
};

/// The lengths that wrap, overflow or change sign somewhere.
const LENGTHS: [u32; 9] =
    [0x7fff_ffff, 0x8000_0000, 0x8000_001c, 0xffff_ffe3, 0xffff_ffe4, 0xffff_ffe5, 0xffff_fffe, u32::MAX, 0xffff_f000];

#[test]
fn b025_a_size_that_wraps_ends_the_log_there() {
    each_backend(|backend| {
        for (number, size) in LENGTHS.into_iter().enumerate() {
            for record in [0, 3, 5] {
                let (data, dir) = data_with(DEMO);
                let target = Target::newest(&dir);
                let at = target.records[record].position as usize;
                let mut bytes = target.bytes.clone();
                bytes[at + 8..at + 12].copy_from_slice(&size.to_be_bytes());
                fs::write(&target.log, bytes).unwrap();
                let (broker, report, kept) = assert_recovers(data.path(), backend, &small());
                assert_eq!(kept.len(), 30 + record);
                let flaw = report.torn_tail.unwrap().flaw;
                assert!(matches!(flaw, Flaw::BadLength { size: told, .. } if told == size), "{flaw}");
                assert_goes_on(data.path(), backend, &small(), broker, &kept, number % 2 == 0);
            }
        }
    });
}

/// Damages a record of a sealed segment, and holds the engine to: opening and appending go on, every byte stays, records before the
/// damage and in other segments are served, and a read that meets it gets an error that names it.
fn assert_sealed_damage_is_named(backend: Backend, segment: usize, record: usize, harm: impl Fn(&Target)) -> Flaw {
    let (data, dir) = data_with(DEMO);
    let target = Target::number(&dir, segment);
    harm(&target);
    let damaged = fs::read(&target.log).unwrap();
    assert!(damaged != target.bytes);
    let offset = target.base + record as u64;
    let original = rows_of(&format::demo(36), 0);

    let broker = open(data.path(), backend, &segments_of(270));
    let report = report_of(&broker);
    assert_eq!((report.first_offset, report.next_offset, report.segments), (0, 36, 6), "{report:?}");
    assert!(report.torn_tail.is_none(), "{report:?}");
    let partition = partition_of(&broker);
    let mut reader = partition.reader().unwrap();
    let mut flaw = None;
    let mut assert_named = |error: Error| match error {
        Error::Damaged { path, position, offset: named, flaw: found } => {
            assert_eq!((path, position, named), (target.log.clone(), 45 * record as u64, offset));
            flaw = Some(found);
        }
        other => panic!("the damage of {offset} is told as {other}"),
    };
    for start in 0..=offset {
        // From before the damage its predecessors come first, then the error.
        let mut at = start;
        let error = loop {
            match reader.read(at, 100) {
                Ok(records) => {
                    assert!(!records.is_empty(), "the log ends at {at} for a reader");
                    for row in records.iter().map(Row::from) {
                        assert_eq!(row, original[row.offset as usize]);
                        assert!(row.offset < offset);
                    }
                    at = records.next_offset();
                }
                Err(error) => break error,
            }
        };
        assert_eq!(at, offset);
        assert_named(error);
    }
    assert_named(partition.read_one(offset).unwrap_err());
    // Behind it in its own segment: the right record or an error that names the damage; never another record.
    for behind in offset + 1..target.base + 6 {
        match partition.read_one(behind) {
            Ok(found) => assert_eq!(Row::from(found), original[behind as usize]),
            Err(error) => assert!(matches!(error, Error::Damaged { .. }), "{error}"),
        }
    }
    for row in &original[(target.base + 6) as usize..] {
        assert_eq!(Row::from(partition.read_one(row.offset).unwrap()), *row);
    }
    assert_eq!(append(&partition, b"k", b"goes on"), 36);
    assert_eq!(partition.read_one(36).unwrap().value, &b"goes on"[..]);
    drop((reader, partition));
    broker.close().unwrap();
    assert!(fs::read(&target.log).unwrap() == damaged, "every byte stays");
    assert_eq!(damage::bases(&dir), [0, 6, 12, 18, 24, 30, 36]);
    flaw.unwrap()
}

#[test]
fn b026_a_length_with_its_top_bit_set_stops_recovery_and_reading_cleanly() {
    each_backend(|backend| {
        let (data, dir) = demo_damaged("size-top-bit");
        let (broker, report, kept) = assert_recovers(data.path(), backend, &small());
        assert!(matches!(report.torn_tail.unwrap().flaw, Flaw::BadLength { size: 0x8000_0000, .. }));
        assert_goes_on(data.path(), backend, &small(), broker, &kept, true);
        assert_eq!(damage::bases(&dir).len(), 6);
        for segment in [0, 2, 4] {
            for record in [0, 3, 5] {
                for size in [0x8000_0000u32, 0x8000_0011, u32::MAX, 0xffff_ffe4, 18] {
                    let flaw = assert_sealed_damage_is_named(backend, segment, record, |target| {
                        let mut bytes = target.bytes.clone();
                        bytes[record * 45 + 8..record * 45 + 12].copy_from_slice(&size.to_be_bytes());
                        fs::write(&target.log, bytes).unwrap();
                    });
                    if size > 18 {
                        assert!(matches!(flaw, Flaw::BadLength { size: told, .. } if told == size), "{flaw}");
                    }
                }
            }
        }
    });
}

/// The address space that recovery must do with.
const ADDRESS_SPACE: u64 = 1_000_000 << 10;

/// Opens and reads everything under a limit, and tells the peak of its memory.
pub fn recover_role() {
    use rustix::process::{Resource, Rlimit, setrlimit};
    setrlimit(Resource::As, Rlimit { current: Some(ADDRESS_SPACE), maximum: Some(ADDRESS_SPACE) }).unwrap();
    let too_much = vec![0u8; 0].try_reserve_exact(0xffff_ffff);
    assert!(too_much.is_err(), "the limit does not bite");
    let broker = open(Path::new(&child::text("data")), child::backend(), &small());
    let partition = partition_of(&broker);
    let mut reader = partition.reader().unwrap();
    let (mut offset, mut damaged) = (partition.first_offset(), 0);
    while offset < partition.next_offset() {
        match reader.read(offset, 1000) {
            Ok(records) => offset = records.next_offset(),
            Err(error) => {
                assert!(matches!(error, Error::Damaged { .. }), "{error}");
                damaged += 1;
                offset += 1;
            }
        }
    }
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap().trim().trim_end_matches(" kB");
    say(&format!("{} {damaged} {peak}", partition.next_offset()));
}

#[test]
fn b027_no_length_is_believed_before_it_is_checked() {
    let recover = |data: &Path, backend: Backend| -> [u64; 3] {
        let mut child = Child::start("recover", &json!({ "data": data, "backend": backend_name(backend) }));
        let line = child.expect_line();
        assert!(child.finish().success());
        let numbers: Vec<_> = line.split(' ').map(|number| number.parse().unwrap()).collect();
        numbers.try_into().unwrap()
    };
    each_backend(|backend| {
        let (data, _) = data_with(DEMO);
        let [next, damaged, clean_peak] = recover(data.path(), backend);
        assert_eq!((next, damaged), (36, 0));
        for name in ["size-huge", "keylen-max", "size-top-bit", "size-wraps"] {
            // In the newest segment, and in a sealed one.
            let (data, dir) = data_with(DEMO);
            damage::apply(&dir, name);
            damage::apply_to(&dir, name, 2);
            let [next, damaged, peak] = recover(data.path(), backend);
            assert_eq!(next, 33, "{name}");
            assert!((1..=3).contains(&damaged), "{name}: {damaged}");
            assert!(peak < clean_peak + (8 << 10), "{name}: {peak} KiB at the peak, {clean_peak} KiB without damage");
        }
    });
}

#[test]
fn b029_a_key_longer_than_its_record_is_refused() {
    each_backend(|backend| {
        for keylen in [18u32, 19, 17 + HEADER as u32, 0x7fff_ffff, 0x8000_0000, u32::MAX] {
            for record in [0, 3, 5] {
                let harm = |target: &Target| {
                    let mut bytes = target.bytes.clone();
                    bytes[record * 45 + 24..record * 45 + 28].copy_from_slice(&keylen.to_be_bytes());
                    fs::write(&target.log, bytes).unwrap();
                };
                let (data, dir) = data_with(DEMO);
                harm(&Target::newest(&dir));
                let (broker, report, kept) = assert_recovers(data.path(), backend, &small());
                assert_eq!(kept.len(), 30 + record);
                let flaw = report.torn_tail.unwrap().flaw;
                assert!(matches!(flaw, Flaw::BadLength { size: 17, keylen: told, .. } if told == keylen), "{flaw}");
                assert_goes_on(data.path(), backend, &small(), broker, &kept, record == 0);
                let flaw = assert_sealed_damage_is_named(backend, 1, record, harm);
                assert!(matches!(flaw, Flaw::BadLength { size: 17, keylen: told, .. } if told == keylen), "{flaw}");
            }
        }
    });
}

#[test]
fn b030_a_shorter_key_length_cannot_be_seen_and_nothing_else_passes() {
    each_backend(|backend| {
        // The known limit, pinned: one byte of the key becomes the value's first.
        for segment in [1, 5] {
            let (data, dir) = data_with(DEMO);
            damage::apply_to(&dir, "flip-keylen", segment);
            let broker = open(data.path(), backend, &small());
            assert!(report_of(&broker).torn_tail.is_none() && report_of(&broker).damage.is_empty());
            let rows = read_all(&partition_of(&broker));
            let moved = segment * 6 + 3;
            let original = rows_of(&format::demo(36), 0);
            let expected = [&original[moved].key[5..], &original[moved].value].concat();
            assert_eq!((&rows[moved].key[..], &rows[moved].value), (&b"user-"[..], &expected));
            assert_eq!((&rows[..moved], &rows[moved + 1..]), (&original[..moved], &original[moved + 1..]));
        }

        // Every bit of a record, each flipped in a sealed segment of its own.
        let bits = 45 * 8;
        let (data, dir) = data_with_demo(bits + 1, Layout { segment_bytes: 1, ..Layout::default() });
        let original = rows_of(&format::demo(bits + 1), 0);
        for bit in 0..bits as usize {
            let path = segment_path(&dir, bit as u64, "log");
            let mut bytes = fs::read(&path).unwrap();
            bytes[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, bytes).unwrap();
        }
        let broker = open(data.path(), backend, &segments_of(1));
        let partition = partition_of(&broker);
        assert_eq!(partition.next_offset(), bits + 1);
        let mut silent = 0;
        for bit in 0..bits {
            match partition.read_one(bit) {
                Ok(record) => {
                    assert!((24..28).contains(&(bit / 8)), "bit {bit} passed");
                    let body = [record.key.clone(), record.value.clone()].concat();
                    let row = &original[bit as usize];
                    assert_eq!((body, record.timestamp), ([&row.key[..], &row.value].concat(), row.timestamp));
                    silent += 1;
                }
                Err(error) => assert!(matches!(error, Error::Damaged { offset, position: 0, .. } if offset == bit), "{error}"),
            }
        }
        assert!((1..32).contains(&silent), "{silent} bits of keylen pass: those that stay within the record");
        assert_eq!(append(&partition, b"k", b"goes on"), bits + 1);
    });
}

#[test]
fn b030_no_flipped_bit_of_the_newest_record_passes_but_in_keylen() {
    for (backend, step) in [(BACKENDS[0], 11), (BACKENDS[1], 1)] {
        for bit in (0..45 * 8).step_by(step) {
            let (data, dir) = data_with(DEMO);
            let target = Target::newest(&dir);
            let mut bytes = target.bytes.clone();
            bytes[225 + bit / 8] ^= 1 << (bit % 8);
            fs::write(&target.log, bytes).unwrap();
            let (_broker, report, kept) = assert_recovers(data.path(), backend, &small());
            let passed = kept.len() == 36;
            assert!(!passed || (24..28).contains(&(bit / 8)), "bit {bit} passed");
            assert_eq!(passed, report.torn_tail.is_none());
        }
    }
}

#[test]
fn b031_a_size_off_by_one_shifts_nothing() {
    each_backend(|backend| {
        for delta in [-1i32, 1, -17, 45, 28] {
            for record in [0usize, 2, 4] {
                let harm = |target: &Target| {
                    let mut bytes = target.bytes.clone();
                    let size = (17 + delta).cast_unsigned();
                    bytes[record * 45 + 8..record * 45 + 12].copy_from_slice(&size.to_be_bytes());
                    fs::write(&target.log, bytes).unwrap();
                };
                let (data, dir) = data_with(DEMO);
                harm(&Target::newest(&dir));
                let (broker, report, kept) = assert_recovers(data.path(), backend, &small());
                assert_eq!(kept, rows_of(&format::demo(30 + record as u64), 0));
                let flaw = report.torn_tail.unwrap().flaw;
                let named = match 17 + delta {
                    // Shorter than the key, or past the end of the log.
                    0 => matches!(flaw, Flaw::BadLength { .. }),
                    size if record * 45 + HEADER + size as usize > 270 => matches!(flaw, Flaw::BadLength { .. }),
                    _ => matches!(flaw, Flaw::BadChecksum { .. }),
                };
                assert!(named, "{delta}: {flaw}");
                assert_goes_on(data.path(), backend, &small(), broker, &kept, delta > 0);
                assert_sealed_damage_is_named(backend, 3, record, harm);
            }
        }
    });
}

#[test]
fn sealed_damage_of_every_kind_stops_neither_opening_nor_appending() {
    each_backend(|backend| {
        let kinds =
            ["flip-value-byte", "flip-key-byte", "flip-timestamp", "flip-crc", "flip-offset", "keylen-gt-size", "keylen-max", "size-huge"];
        for name in kinds.into_iter().chain(["size-wraps", "size-plus-one", "size-minus-one", "hole-in-the-middle"]) {
            for segment in [0, 4] {
                eprintln!("{name} in segment {segment}");
                assert_sealed_damage_is_named(backend, segment, 3, |target| target.damage(name, target.middle()));
            }
        }
    });
}
