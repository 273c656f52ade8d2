//! What written space ahead of durable writes is worth, by the size of the writes: the engine's policy on trial, without the engine.
//!
//! One thread writes durably, one write after another, into a file that is only allocated; into one that was written with zeros before,
//! outside the time; into one where each write that comes to the end of the written space takes a piece of zeros along, as the
//! engine's commits do; and into one that a second thread writes zeros into just ahead of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use sapwood::io::transfer::write_blocks_at;
use sapwood::io::{Backend, Buffer, Create, Disk, File, Open, OsDisk};

use crate::report::Pair;
use crate::units::{float, to_u64};
use crate::{Context, Outcome, named};

/// Bytes of one write of zeros, and how far the second thread keeps ahead.
const PIECE: usize = 256 << 10;
const AHEAD: u64 = 2 << 20;

/// MiB/s with zeros taken along, with zeros by another thread, and into space that was written before, each to MiB/s into space that is
/// only allocated.
pub fn round(context: &Context, bytes: usize) -> Outcome<Vec<Pair>> {
    let total = to_u64(bytes) * if context.trial { 4 } else { (64_u64 << 20).div_ceil(to_u64(bytes)).clamp(128, 2048) };
    let allocated = write(context, bytes, total, Space::Allocated)?;
    let along = write(context, bytes, total, Space::ZerosAlong)?;
    let beside = write(context, bytes, total, Space::ZerosBeside)?;
    let written = write(context, bytes, total, Space::Written)?;
    let pair = |engine| Pair { engine, limit: Some(allocated) };
    Ok(vec![pair(along), pair(beside), pair(written)])
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Space {
    Allocated,
    ZerosAlong,
    ZerosBeside,
    Written,
}

/// MiB/s of durable writes through a new file of `total` bytes.
fn write(context: &Context, bytes: usize, total: u64, space: Space) -> Outcome<f64> {
    let path = context.dir.join("ahead");
    let disk = OsDisk::new(Backend::Posix).map_err(named("the system"))?;
    let file = disk.open(&path, Open { write: true, create: Create::Empty, direct: true }).map_err(named("a file with O_DIRECT"))?;
    file.allocate(0..total).map_err(named("allocate"))?;
    let mut data = Buffer::new((bytes + PIECE).max(2 << 20)).map_err(named("memory"))?;
    data.fill(7);
    let zeros = Buffer::new(PIECE).map_err(named("memory"))?;
    let first = match space {
        Space::Allocated | Space::ZerosAlong => 0,
        Space::ZerosBeside => AHEAD.min(total),
        Space::Written => total,
    };
    let mut zeroed = 0;
    while zeroed < first {
        zeroed += zero(&*file, &zeros, zeroed, total)?;
    }
    file.sync().map_err(named("sync"))?;
    let (position, over) = (AtomicU64::new(0), AtomicBool::new(false));
    let seconds = thread::scope(|scope| {
        let helper = (space == Space::ZerosBeside).then(|| {
            let (file, position, over, zeros) = (Arc::clone(&file), &position, &over, &zeros);
            scope.spawn(move || keep_ahead(&*file, zeros, zeroed, total, (position, over)))
        });
        let begun = Instant::now();
        let mut written_to = 0;
        let written = (0..total).step_by(bytes).try_for_each(|at| {
            let end = at + to_u64(bytes);
            let takes_zeros = space == Space::ZerosAlong && end > written_to;
            let zeros = if takes_zeros { PIECE.min(usize::try_from(total - end).unwrap_or(PIECE)) } else { 0 };
            written_to = written_to.max(end + to_u64(zeros));
            // What they are does not matter to the device.
            write_blocks_at(&*file, &data[..bytes + zeros], at, true).map_err(named("a durable write"))?;
            position.store(at + to_u64(bytes), Ordering::Relaxed);
            Ok::<_, String>(())
        });
        let seconds = begun.elapsed().as_secs_f64();
        over.store(true, Ordering::Relaxed);
        helper.map_or(Ok(()), |helper| helper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))?;
        written.map(|()| seconds)
    })?;
    drop(file);
    std::fs::remove_file(&path).map_err(named("remove the file"))?;
    Ok(float(total) / float(1 << 20) / seconds)
}

/// Writes zeros until the other thread is through.
fn keep_ahead(file: &dyn File, zeros: &[u8], from: u64, total: u64, (position, over): (&AtomicU64, &AtomicBool)) -> Outcome<()> {
    let mut zeroed = from;
    while !over.load(Ordering::Relaxed) && zeroed < total {
        let written = position.load(Ordering::Relaxed);
        // What it has passed by is written.
        zeroed = zeroed.max(written.next_multiple_of(4096));
        if zeroed < written + AHEAD && zeroed < total {
            zeroed += zero(file, zeros, zeroed, total)?;
        } else {
            // Far enough ahead. Asking to be woken would cost the thread that is measured.
            thread::sleep(Duration::from_micros(50));
        }
    }
    Ok(())
}

/// One piece of zeros; how many bytes it was.
fn zero(file: &dyn File, zeros: &[u8], at: u64, total: u64) -> Outcome<u64> {
    let left = usize::try_from(total - at).unwrap_or(usize::MAX);
    let piece = &zeros[..zeros.len().min(left)];
    write_blocks_at(file, piece, at, false).map_err(named("zeros"))?;
    Ok(to_u64(piece.len()))
}
