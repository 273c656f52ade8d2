//! Aligned memory for transfers.
//!
//! A [`Buffer`] is a piece of a mapping of its own, page aligned, zeroed at first, always initialised.
//! Mappings of 2 MiB and more are aligned to 2 MiB and ask for huge pages: a direct write of 1 MiB from
//! scattered 4 KiB pages needs 256 scatter-gather entries, more than common virtual disks take in one
//! request, and takes twice as long (ARCHITECTURE.md has the figures).
//!
//! `unsafe` here: the mapping and the slices over it. Whoever holds a `Buffer` is the only one to touch its bytes;
//! the kernel does only while a ring owns the `Buffer`.
#![allow(unsafe_code, reason = "owns mapped memory and hands out slices over it")]

use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use super::BLOCK;

const HUGE_PAGE: usize = 2 << 20;

/// An anonymous private mapping, unmapped when its last buffer goes.
struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is plain memory owned by this value; `Mapping` itself gives no access to it, and the
// buffers cut from it are disjoint (`Buffer::carve`), so moving or sharing the owner between threads races on nothing.
unsafe impl Send for Mapping {}
// SAFETY: as above: a shared `Mapping` can only be dropped or measured.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(len: usize) -> io::Result<Self> {
        // A larger mapping is cut to alignment: map one huge page more than asked, unmap both ends.
        // Miri knows neither mappings that are cut nor huge pages.
        let huge = len >= HUGE_PAGE && !cfg!(miri);
        let slack = if huge { HUGE_PAGE } else { 0 };
        let asked = len.checked_add(slack).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: a null address with a private anonymous mapping lets the kernel choose unused address space, so
        // nothing that exists is affected.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), asked, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) }?;
        let base = base.cast::<u8>();
        let skip = if huge { base.align_offset(HUGE_PAGE) } else { 0 };
        assert!(skip <= slack, "an aligned start lies within the slack");
        // SAFETY: `skip <= slack`, so the result lies inside the mapping just made.
        let start = unsafe { base.add(skip) };
        if skip > 0 {
            // SAFETY: these are the first `skip` bytes of the mapping just made; no reference to them exists.
            unsafe { munmap(base.cast(), skip) }?;
        }
        let behind = slack - skip;
        if behind > 0 {
            // SAFETY: the last `behind` bytes of the mapping just made, past `start + len`; no reference to them exists.
            unsafe { munmap(start.add(len).cast(), behind) }?;
        }
        let mapping = Self { start: NonNull::new(start).expect("mmap gives no null mapping"), len };
        if huge {
            // SAFETY: exactly the mapping owned above. The advice changes page size, never content; where it is
            // refused, small pages serve.
            let _ = unsafe { madvise(start.cast(), len, Advice::LinuxHugepage) };
        }
        Ok(mapping)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `start` and `len` are what `new` mapped and kept, unmapped nowhere else; this runs when the last
        // `Buffer` over it is gone, so no slice is left. Failure would leak, which is harmless.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Tells rings apart, by its address: a buffer's number means nothing to a ring that did not give it.
#[derive(Debug)]
pub(super) struct RingId;

/// Page-aligned memory that an operation can own.
pub struct Buffer {
    mapping: Arc<Mapping>,
    start: NonNull<u8>,
    len: usize,
    /// The ring that registered it, and its number there.
    registered: Option<(Arc<RingId>, u16)>,
}

// SAFETY: a `Buffer` is the only owner of its `len` bytes (`carve` gives disjoint ranges and nothing else makes one),
// like a `Box<[u8]>`; bytes may move and be shared between threads.
unsafe impl Send for Buffer {}
// SAFETY: as above: `&Buffer` only gives `&[u8]`.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// A buffer of at least `len` bytes, rounded up to whole blocks.
    pub fn new(len: usize) -> io::Result<Self> {
        let len = len.max(1).checked_next_multiple_of(block()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self::carve(1, len)?.remove(0))
    }

    /// `count` buffers of `len` bytes each, a multiple of the block, out of one mapping.
    pub(super) fn carve(count: usize, len: usize) -> io::Result<Vec<Self>> {
        let total = count.checked_mul(len).ok_or(io::ErrorKind::OutOfMemory)?;
        if total == 0 {
            return Ok(Vec::new());
        }
        assert!(len.is_multiple_of(block()), "buffers are whole blocks");
        let mapping = Arc::new(Mapping::new(total)?);
        let piece = |index: usize| {
            // SAFETY: `index < count`, so `index * len + len <= total`, the length of the mapping.
            let start = unsafe { mapping.start.add(index * len) };
            Self { mapping: Arc::clone(&mapping), start, len, registered: None }
        };
        Ok((0..count).map(piece).collect())
    }

    /// `count` buffers of at least `len` bytes each, rounded up to whole blocks, out of one mapping.
    pub fn several(count: usize, len: usize) -> io::Result<Vec<Self>> {
        let len = len.max(1).checked_next_multiple_of(block()).ok_or(io::ErrorKind::OutOfMemory)?;
        Self::carve(count, len)
    }

    /// Keeps the first `at` bytes, whole blocks, and gives the rest as a buffer of its own: a ring that registered the one
    /// takes both.
    pub fn split_off(&mut self, at: usize) -> Self {
        assert!(at <= self.len && at.is_multiple_of(block()), "buffers are cut between blocks");
        // SAFETY: `at <= len`, so the result lies in this buffer's part of the mapping, or one past its end.
        let start = unsafe { self.start.add(at) };
        let rest = Self { mapping: Arc::clone(&self.mapping), start, len: self.len - at, registered: self.registered.clone() };
        self.len = at;
        rest
    }

    /// Whether both were cut from the same memory.
    pub fn is_relative_of(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.mapping, &other.mapping)
    }

    /// Takes back what [`Self::split_off`] gave, or gives it back if it does not follow directly in the same memory.
    pub fn join(&mut self, next: Self) -> Result<(), Self> {
        let follows = Arc::ptr_eq(&self.mapping, &next.mapping) && self.start.as_ptr().wrapping_add(self.len) == next.start.as_ptr();
        let number = |buffer: &Self| buffer.registered.as_ref().map(|(ring, index)| (Arc::as_ptr(ring), *index));
        if !follows || number(self) != number(&next) {
            return Err(next);
        }
        // The two ranges are owned by the two values, and touch: together they are one range, owned by one value.
        self.len += next.len;
        Ok(())
    }

    /// Whether `ring` registered it, and under which number.
    pub(super) fn registered_with(&self, ring: &Arc<RingId>) -> Option<u16> {
        self.registered.as_ref().and_then(|(owner, index)| Arc::ptr_eq(owner, ring).then_some(*index))
    }

    pub(super) fn set_registered(&mut self, ring: &Arc<RingId>, index: u16) {
        self.registered = Some((Arc::clone(ring), index));
    }

    /// Whether a ring registered it with the kernel.
    pub fn is_registered(&self) -> bool {
        self.registered.is_some()
    }
}

fn block() -> usize {
    usize::try_from(BLOCK).expect("a block is far below the address space")
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `start..start + len` lies in the mapping kept alive by `self.mapping`, is initialised (the kernel
        // zeroes anonymous memory), and only this `Buffer` covers it; the kernel writes to it only while a ring owns
        // the `Buffer`, when no `&self` can exist.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes this the only slice.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len).field("of", &self.mapping.len).field("registered", &self.is_registered()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_zeroed_and_disjoint() {
        let all = |buffer: &Buffer, byte: usize| **buffer == vec![u8::try_from(byte).unwrap(); buffer.len()];
        for (count, len) in [(1, 4096), (3, 4096), (2, 1 << 18), (2, 1 << 20), (1, 3 << 20), (2, 4 << 20)] {
            let mut buffers = Buffer::carve(count, len).unwrap();
            for (index, buffer) in buffers.iter_mut().enumerate() {
                assert_eq!(buffer.as_ptr().align_offset(block()), 0);
                assert!(all(buffer, 0));
                buffer.fill(u8::try_from(index + 1).unwrap());
            }
            assert!(buffers.iter().enumerate().all(|(index, buffer)| all(buffer, index + 1)));
            drop(buffers.remove(0));
            assert!(buffers.iter().enumerate().all(|(index, buffer)| usize::from(buffer[len - 1]) == index + 2));
        }
        let several = Buffer::several(3, 4097).unwrap();
        assert_eq!(several.iter().map(|buffer| buffer.len()).collect::<Vec<_>>(), [8192; 3]);
        assert_eq!(Buffer::new(0).unwrap().len(), 4096);
        assert_eq!(Buffer::new(4097).unwrap().len(), 8192);
        assert!(Buffer::new(usize::MAX).is_err());
    }

    #[test]
    fn pieces_are_disjoint_and_only_neighbours_are_joined() {
        let mut pair = Buffer::carve(2, 4 << 12).unwrap();
        let (mut first, other) = (pair.remove(0), pair.remove(0));
        let mut second = first.split_off(4096);
        let third = second.split_off(4096);
        first.fill(1);
        second.fill(2);
        assert_eq!((first.len(), second.len(), third.len()), (4096, 4096, 2 << 12));
        let third = first.join(third).expect_err("the second lies between them");
        let first_again = second.join(first).expect_err("the order is the memory's");
        first = first_again;
        first.join(second).unwrap();
        first.join(third).unwrap();
        assert_eq!(first.len(), 4 << 12);
        assert!(first[..4096].iter().all(|&byte| byte == 1) && first[4096..8192].iter().all(|&byte| byte == 2));
        assert!(first[8192..].iter().all(|&byte| byte == 0));
        // Neighbours in one mapping that were registered under different numbers are two buffers to the kernel.
        let ring = Arc::new(RingId);
        first.set_registered(&ring, 0);
        let mut other = other;
        other.set_registered(&ring, 1);
        let other = first.join(other).expect_err("another number");
        assert_eq!(other.registered_with(&ring), Some(1));
        let empty = first.split_off(4 << 12);
        assert_eq!((first.len(), empty.len()), (4 << 12, 0));
        first.join(empty).unwrap();
    }
}
