//! [`File`]: blocking reads, writes, lengths and allocation, in whole aligned blocks, so that every check holds in both modes.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use super::super::{Create, Disk, File};
use super::{BLOCK, Mode, blocks, in_every_mode, read_all, values};

in_every_mode! {
    what_was_written_is_read
    a_write_changes_its_range_only
    reads_end_at_the_end
    a_file_may_end_inside_a_block
    holes_are_zeros
    data_is_never_passed_over
    zeroes_are_written_in_their_range_only
    set_len_cuts_and_extends
    what_was_cut_off_never_comes_back
    allocation_extends_with_zeros
    allocation_changes_no_byte
    handles_share_the_file
    transfers_of_nothing
    threads_share_a_file
    positions_past_32_bits_are_no_others
    positions_that_no_file_has_are_refused
}

const B: u64 = 4096;

fn new(disk: &dyn Disk, dir: &Path, mode: Mode) -> Arc<dyn File> {
    mode.open(disk, &dir.join("f"), Create::New)
}

/// The values of the first `count` blocks, as `file` reads them.
fn read(file: &dyn File, count: usize) -> Vec<u8> {
    let mut buffer = blocks(&vec![0xEE; count]);
    assert_eq!(file.read_at(&mut buffer, 0).unwrap(), count * BLOCK);
    values(&buffer)
}

/// Whether the file system allocates at all; else a line says so.
fn allocates(file: &dyn File) -> bool {
    match file.allocate(0..1) {
        Ok(()) => true,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            println!("skipped: the file system does not allocate");
            false
        }
    }
}

fn zeroes_are_written_in_their_range_only(disk: &dyn Disk, dir: &Path, mode: Mode) {
    let file = new(disk, dir, mode);
    file.write_at(&blocks(&[1, 2, 3, 4]), 0, true).unwrap();
    let expected = match file.write_zeroes(B..3 * B) {
        Ok(()) => [1, 0, 0, 4],
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            [1, 2, 3, 4]
        }
    };
    assert_eq!((read(&*file, 4), file.len().unwrap()), (expected.to_vec(), 4 * B));
    assert_eq!(values(&read_all(disk, &dir.join("f"))), expected);
}

fn data_is_never_passed_over(disk: &dyn Disk, dir: &Path, mode: Mode) {
    let file = new(disk, dir, mode);
    let _ = allocates(&*file) && file.allocate(0..40 * B).is_ok();
    file.set_len(40 * B).unwrap();
    for (at, durable) in [(7, false), (20, true), (39, false)] {
        file.write_at(&blocks(&[1]), at * B, durable).unwrap();
    }
    for sync in [false, true] {
        if sync {
            file.sync().unwrap();
        }
        for from in 0..40 {
            let next = [7, 20, 39].into_iter().find(|&at| at >= from).unwrap();
            let found = file.next_data(from * B).unwrap().expect("there is data behind");
            assert!(found >= from * B && found <= next * B, "from block {from}: {found}");
        }
    }
    assert!(file.next_data(40 * B).unwrap().is_none_or(|at| at >= 40 * B));
}

fn positions_past_32_bits_are_no_others(disk: &dyn Disk, dir: &Path, mode: Mode) {
    let file = new(disk, dir, mode);
    file.write_at(&blocks(&[1]), 0, true).unwrap();
    for (edge, value) in [(1 << 31, 10), (1 << 32, 20), (1 << 33, 30), (5 << 30, 40), (1 << 40, 50)] {
        file.write_at(&blocks(&[value, value + 1]), edge - B, value % 20 == 0).unwrap();
        let mut into = blocks(&[0xEE, 0xEE, 0xEE]);
        file.set_len((edge + 2 * B).max(file.len().unwrap())).unwrap();
        assert_eq!(file.read_at(&mut into, edge - B).unwrap(), 3 * BLOCK);
        assert_eq!(values(&into), [value, value + 1, 0]);
        assert!(file.next_data(edge - B).unwrap().is_some_and(|at| at == edge - B));
        assert_eq!(read(&*file, 2), [1, 0], "what was written to {edge} went to the beginning");
        if allocates(&*file) {
            file.allocate(edge + 2 * B..edge + 4 * B).unwrap();
        }
        file.sync().unwrap();
        file.evict(edge).unwrap();
    }
    assert!(file.len().unwrap() >= (1 << 40) + 2 * B);
    file.set_len(1 << 32).unwrap();
    assert_eq!(file.len().unwrap(), 1 << 32);
    assert!(file.next_data(1 << 32).unwrap().is_none_or(|at| at >= 1 << 32));
    let mut into = blocks(&[0xEE, 0xEE]);
    assert_eq!(file.read_at(&mut into, (1 << 32) - B).unwrap(), BLOCK);
    assert_eq!(values(&into[..BLOCK]), [20]);
}

fn positions_that_no_file_has_are_refused(disk: &dyn Disk, dir: &Path, mode: Mode) {
    let file = new(disk, dir, mode);
    file.write_at(&blocks(&[1]), 0, true).unwrap();
    for position in [1 << 63, u64::MAX - B + 1] {
        assert!(file.write_at(&blocks(&[2, 3]), position, false).is_err(), "{position}");
        assert!(file.allocate(position - B..position + (B - 1)).is_err(), "{position}");
        assert!(file.read_at(&mut blocks(&[0, 0]), position).is_err(), "{position}");
    }
    assert!(file.set_len(1 << 63).is_err() && file.set_len(u64::MAX).is_err());
    assert_eq!((read(&*file, 1), file.len().unwrap()), (vec![1], B));
}

fn what_was_written_is_read(disk: &dyn Disk, dir: &Path, mode: Mode) {
    let file = new(disk, dir, mode);
    assert_eq!(file.write_at(&blocks(&[1, 2, 3]), 0, false).unwrap(), 3 * BLOCK);
    assert_eq!(file.write_at(&blocks(&[4, 5]), 3 * B, true).unwrap(), 2 * BLOCK);
    file.sync().unwrap();
    assert_eq!(file.len().unwrap(), 5 * B);
    assert_eq!(read(&*file, 5), [1, 2, 3, 4, 5]);
    assert_eq!(values(&read_all(disk, &dir.join("f"))), [1, 2, 3, 4, 5]);
}

fn a_write_changes_its_range_only(disk: &dyn Disk, dir: &Path, mode: Mode) {
    let file = new(disk, dir, mode);
    file.write_at(&blocks(&[1, 1, 1, 1]), 0, false).unwrap();
    let from = blocks(&[7, 8, 9]);
    file.write_at(&from[BLOCK..2 * BLOCK], B, true).unwrap();
    file.write_at(&from[..BLOCK], 3 * B, false).unwrap();
    assert_eq!(read(&*file, 4), [1, 8, 1, 7]);
    let mut into = blocks(&[0xA, 0xB, 0xC]);
    assert_eq!(file.read_at(&mut into[BLOCK..2 * BLOCK], 3 * B).unwrap(), BLOCK);
    assert_eq!(values(&into), [0xA, 7, 0xC]);
}

fn reads_end_at_the_end(disk: &dyn Disk, dir: &Path, mode: Mode) {
    let file = new(disk, dir, mode);
    let mut into = blocks(&[9, 9, 9]);
    assert_eq!(file.read_at(&mut into, 0).unwrap(), 0, "an empty file");
    file.write_at(&blocks(&[1, 2]), 0, false).unwrap();
    assert_eq!(file.read_at(&mut into, B).unwrap(), BLOCK);
    // The memory behind it may have changed: Linux zeroes it in direct reads.
    assert_eq!(values(&into[..BLOCK]), [2]);
    for beyond in [2 * B, 3 * B, 1 << 40] {
        assert_eq!(file.read_at(&mut into, beyond).unwrap(), 0, "at {beyond}");
    }
}

fn a_file_may_end_inside_a_block(disk: &dyn Disk, dir: &Path, mode: Mode) {
    let file = new(disk, dir, mode);
    file.write_at(&blocks(&[1, 2]), 0, false).unwrap();
    file.set_len(5000).unwrap();
    let mut into = blocks(&[9, 9, 9]);
    assert_eq!(file.read_at(&mut into, 0).unwrap(), 5000);
    assert!(into[..4096].iter().all(|byte| *byte == 1) && into[4096..5000].iter().all(|byte| *byte == 2));
    assert_eq!(file.read_at(&mut into, B).unwrap(), 904);
    assert_eq!(file.read_at(&mut into, 2 * B).unwrap(), 0);
    assert_eq!(read_all(disk, &dir.join("f")).len(), 5000);
}

fn holes_are_zeros(disk: &dyn Disk, dir: &Path, mode: Mode) {
    let file = new(disk, dir, mode);
    file.write_at(&blocks(&[3]), 3 * B, false).unwrap();
    file.write_at(&blocks(&[1]), B, true).unwrap();
    assert_eq!(file.len().unwrap(), 4 * B);
    assert_eq!(read(&*file, 4), [0, 1, 0, 3]);
}

fn set_len_cuts_and_extends(disk: &dyn Disk, dir: &Path, mode: Mode) {
    let file = new(disk, dir, mode);
    file.write_at(&blocks(&[1, 2, 3]), 0, false).unwrap();
    file.set_len(B).unwrap();
    assert_eq!(file.len().unwrap(), B);
    assert_eq!(file.read_at(&mut blocks(&[0]), B).unwrap(), 0);
    file.set_len(3 * B).unwrap();
    assert_eq!(read(&*file, 3), [1, 0, 0]);
    file.set_len(0).unwrap();
    assert_eq!(file.len().unwrap(), 0);
}

fn what_was_cut_off_never_comes_back(disk: &dyn Disk, dir: &Path, mode: Mode) {
    let file = new(disk, dir, mode);
    file.write_at(&blocks(&[7, 7, 7]), 0, true).unwrap();
    // Inside of a block: the rest of that block must be zeros too, however the file grows again.
    let grow: [fn(&dyn File); 3] = [
        |file| file.set_len(3 * B).unwrap(),
        |file| assert_eq!(file.write_at(&blocks(&[9]), 2 * B, true).unwrap(), BLOCK),
        |file| file.allocate(0..3 * B).or_else(|_| file.set_len(3 * B)).unwrap(),
    ];
    for grow in grow {
        file.write_at(&blocks(&[7, 7]), 0, true).unwrap();
        file.set_len(B + 100).unwrap();
        grow(&*file);
        let bytes = read_all(disk, &dir.join("f"));
        assert!(bytes[..BLOCK + 100].iter().all(|byte| *byte == 7));
        assert!(bytes[BLOCK + 100..2 * BLOCK].iter().all(|byte| *byte == 0));
        file.set_len(0).unwrap();
    }
}

fn allocation_extends_with_zeros(disk: &dyn Disk, dir: &Path, mode: Mode) {
    let file = new(disk, dir, mode);
    if !allocates(&*file) {
        return;
    }
    file.set_len(0).unwrap();
    file.write_at(&blocks(&[1]), 0, false).unwrap();
    file.allocate(2 * B..4 * B).unwrap();
    assert_eq!(file.len().unwrap(), 4 * B);
    assert_eq!(read(&*file, 4), [1, 0, 0, 0]);
    file.allocate(B + 7..4 * B + 9).unwrap();
    assert_eq!(file.len().unwrap(), 4 * B + 9, "to the byte");
    file.write_at(&blocks(&[5]), 2 * B, true).unwrap();
    assert_eq!(read(&*file, 4), [1, 0, 5, 0]);
}

fn allocation_changes_no_byte(disk: &dyn Disk, dir: &Path, mode: Mode) {
    let file = new(disk, dir, mode);
    if !allocates(&*file) {
        return;
    }
    file.write_at(&blocks(&[1, 2, 3, 4]), 0, false).unwrap();
    for range in [0..B, 2 * B..3 * B, B + 5..B + 6, 0..4 * B, 7..7] {
        file.allocate(range.clone()).unwrap();
        assert_eq!(file.len().unwrap(), 4 * B, "{range:?} shortens or extends");
    }
    assert_eq!(read(&*file, 4), [1, 2, 3, 4]);
}

fn handles_share_the_file(disk: &dyn Disk, dir: &Path, mode: Mode) {
    let file = new(disk, dir, mode);
    let buffered = Mode::Buffered.open(disk, &dir.join("f"), Create::Never);
    for round in 1..20 {
        file.write_at(&blocks(&[round, round]), 0, false).unwrap();
        assert_eq!(read(&*buffered, 2), [round, round]);
        buffered.write_at(&blocks(&[round + 100]), B, false).unwrap();
        assert_eq!(read(&*file, 2), [round, round + 100]);
    }
    buffered.set_len(B).unwrap();
    assert_eq!(file.len().unwrap(), B);
}

fn transfers_of_nothing(disk: &dyn Disk, dir: &Path, mode: Mode) {
    let file = new(disk, dir, mode);
    assert_eq!(file.write_at(&[], 0, false).unwrap(), 0);
    assert_eq!(file.write_at(&[], 5 * B, true).unwrap(), 0);
    assert_eq!(file.len().unwrap(), 0, "nothing extends nothing");
    file.write_at(&blocks(&[1]), 0, false).unwrap();
    assert_eq!(file.read_at(&mut [], 0).unwrap(), 0);
}

fn threads_share_a_file(disk: &dyn Disk, dir: &Path, mode: Mode) {
    let file = new(disk, dir, mode);
    std::thread::scope(|scope| {
        for thread in 0..4_u8 {
            let file = &file;
            scope.spawn(move || {
                for round in 0..8_u8 {
                    let position = B * u64::from(round * 4 + thread);
                    file.write_at(&blocks(&[thread + 1]), position, round % 2 == 0).unwrap();
                    let mut into = blocks(&[0]);
                    file.read_at(&mut into, position).unwrap();
                    assert_eq!(values(&into), [thread + 1]);
                }
            });
        }
    });
    assert_eq!(read(&*file, 32), [1, 2, 3, 4].repeat(8));
}
