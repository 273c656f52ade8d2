//! The scan of a segment: any bytes as a .log, whose base is the offset that they begin with.

use std::path::Path;

use super::format::{self, Fault, Scan, Stored, u64_at};
use crate::io::sim::SimDisk;
use crate::io::{Disk, File, Open};
use crate::segment::{Found, Scanner, Step, Tail};

/// Scans the bytes, whole, from the middle, and up to a watermark.
pub fn segment(data: &[u8]) {
    let base = if data.len() < 8 { 0 } else { u64_at(data, 0) };
    let wanted = format::scan(data, base);
    let (sim, path) = (SimDisk::new(0), Path::new("/log"));
    sim.write_file(path, data);
    let log = sim.open(path, Open::READ).unwrap();
    let direct = sim.open(path, Open { direct: true, ..Open::READ }).unwrap();
    let len = data.len() as u64;
    compare(Scanner::new(&*log, path, 0, base, len), &wanted, 0);
    compare(Scanner::new(&*direct, path, 0, base, len).in_blocks(), &wanted, 0);
    if let Some((position, record)) = wanted.records.get(wanted.records.len() / 2) {
        let number = wanted.records.len() / 2;
        compare(Scanner::new(&*log, path, *position as u64, record.offset, len), &wanted, number);
        // Whatever is behind the watermark is not there.
        let before = Scan { records: wanted.records[..number].to_vec(), end: *position, fault: None };
        compare(Scanner::new(&*direct, path, 0, base, *position as u64).in_blocks(), &before, 0);
    }
    tail(&*log, data, &wanted, base + wanted.records.len() as u64);
}

/// The scanner must find the records from number `from` on, and end as the format says.
fn compare(mut scanner: Scanner<'_>, wanted: &Scan, from: usize) {
    for (position, record) in &wanted.records[from..] {
        let found = Found { offset: record.offset, position: *position as u64, timestamp: record.timestamp };
        assert_eq!(scanner.next().unwrap(), Step::Record(found));
    }
    match (scanner.next().unwrap(), wanted.fault) {
        (Step::End, None) => {}
        (Step::Flawed(flaw), Some(fault)) => assert_eq!(Fault::from(flaw), fault),
        (step, fault) => panic!("{step:?}, but the format says {fault:?}"),
    }
    assert_eq!(scanner.position(), wanted.end as u64);
}

/// What is behind the last record, and the whole records in it.
fn tail(log: &dyn File, data: &[u8], wanted: &Scan, expected: u64) {
    let tail = Tail::examine(log, wanted.end as u64, data.len() as u64, expected).unwrap();
    let last = data.iter().rposition(|&byte| byte != 0).filter(|&last| last >= wanted.end);
    assert_eq!(tail.as_ref().map(|tail| tail.span.clone()), last.map(|last| wanted.end as u64..last as u64 + 1));
    if let Some(tail) = tail.filter(|tail| tail.searched) {
        let (mut at, mut records) = (wanted.end, 0);
        while at + format::HEADER <= data.len() {
            let offset = u64_at(data, at);
            let ahead = offset.checked_sub(expected);
            match Stored::decode(&data[at..], offset) {
                // One with an earlier offset is stepped over like a later one: what lies across its end is none.
                Ok(record) if ahead.is_none_or(|ahead| ahead < 1 << 32) => {
                    records += u64::from(ahead.is_some());
                    at += record.bytes();
                }
                _ => at += 1,
            }
        }
        assert_eq!(tail.records, records);
    }
}
