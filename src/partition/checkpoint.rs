//! The partition's checkpoint: how far the active log was durable when this was last written, and whether it was closed.
//!
//! Never needed to read a partition. It spares opening the scan of what was durable, and tells a torn tail from damage: a bad
//! record past the checkpointed position was never shown to be acknowledged, one before it was acknowledged once.
//!
//! Two slots are written in turn, each with a checksum of its own, so that one stays sound whatever happens to the write of
//! the other. No failure to read or write them is one of the partition: a checkpoint that is missing or unsound is unknown,
//! and one that is old only leaves more to scan. What [`Checkpoints`] does blocks, on whichever thread owns it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::Error;
use crate::io::transfer::{read_up_to_at, write_all_at};
use crate::io::{Disk, EntryKind, File, Open};
use crate::record::to_usize;

/// The file's name in the partition's directory.
pub(crate) const NAME: &str = "checkpoint";

/// The slots lie this far apart: no write of one touches a block of the other.
const SLOT_BYTES: u64 = 4096;

const MAGIC: [u8; 8] = *b"sapwckpt";
const VERSION: u32 = 1;
const CLEAN: u32 = 1;

/// The fields before the checksum, and with it. All of a slot that says anything lies in its first sector.
const CHECKED_BYTES: usize = 64;
const USED_BYTES: usize = CHECKED_BYTES + 4;

/// What was durable at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Checkpoint {
    /// The active segment.
    pub(crate) base: u64,
    /// Every byte of its log before this one is a record's, and on the device.
    pub(crate) position: u64,
    /// The offset of the record that begins there.
    pub(crate) next_offset: u64,
    /// No record of the partition before it has a later timestamp.
    pub(crate) last_timestamp: u64,
    /// Entries that both of the segment's index files hold durably; 0 if that is not known. All are of records before the position.
    pub(crate) entries: u64,
    /// The partition was closed: the log ends at the position, the index files with these entries, and all are entered.
    pub(crate) clean: bool,
}

impl Checkpoint {
    /// Whether both say the same of what is durable.
    pub(super) fn says_the_same(&self, other: &Self) -> bool {
        Self { clean: other.clean, ..*self } == *other
    }

    /// The records that were durable and are not there, if the log of the partition in `dir` ends before `next_offset`.
    pub(crate) fn missing(&self, dir: &Path, next_offset: u64) -> Option<Error> {
        let to = self.next_offset;
        (next_offset < to).then(|| Error::RecordsMissing { path: dir.to_owned(), from: next_offset, to })
    }

    fn encode(&self, sequence: u64) -> [u8; to_usize(SLOT_BYTES)] {
        let mut slot = [0; to_usize(SLOT_BYTES)];
        slot[..8].copy_from_slice(&MAGIC);
        slot[8..12].copy_from_slice(&VERSION.to_be_bytes());
        slot[12..16].copy_from_slice(&if self.clean { CLEAN } else { 0 }.to_be_bytes());
        let words = [sequence, self.base, self.position, self.next_offset, self.last_timestamp, self.entries];
        for (place, word) in slot[16..CHECKED_BYTES].chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_be_bytes());
        }
        let crc = crc32fast::hash(&slot[..CHECKED_BYTES]);
        slot[CHECKED_BYTES..USED_BYTES].copy_from_slice(&crc.to_be_bytes());
        slot
    }

    /// The slot's sequence number and what it says; none if it is unsound or of another version.
    fn decode(slot: &[u8; USED_BYTES]) -> Option<(u64, Self)> {
        let half = |at: usize| u32::from_be_bytes(slot[at..at + 4].try_into().expect("4 bytes within the slot"));
        let word = |at: usize| u64::from_be_bytes(slot[at..at + 8].try_into().expect("8 bytes within the slot"));
        let flags = half(12);
        let sound = slot[..8] == MAGIC && half(8) == VERSION && flags & !CLEAN == 0;
        if !sound || crc32fast::hash(&slot[..CHECKED_BYTES]) != half(CHECKED_BYTES) {
            return None;
        }
        let checkpoint = Self {
            base: word(24),
            position: word(32),
            next_offset: word(40),
            last_timestamp: word(48),
            entries: word(56),
            clean: flags & CLEAN != 0,
        };
        Some((word(16), checkpoint))
    }
}

/// What a file of that name holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Held {
    /// There is no such file.
    Nothing,
    /// The newest sound slot, if there is one.
    Ours(Option<(u64, Checkpoint)>),
    /// Something that this engine did not write.
    Foreign,
}

impl Held {
    /// Reads the file at `path`.
    pub(crate) fn look(disk: &dyn Disk, path: &Path) -> io::Result<Self> {
        let file = match disk.open(path, Open::READ) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::Nothing),
            Err(error) => return Err(error),
        };
        let mut slots = [[0; USED_BYTES]; 2];
        for (slot, at) in slots.iter_mut().zip([0, SLOT_BYTES]) {
            read_up_to_at(&*file, slot, at)?;
        }
        Ok(Self::of(&slots))
    }

    fn of(slots: &[[u8; USED_BYTES]; 2]) -> Self {
        // A first write that power loss undid leaves zeros.
        let is_ours = |slot: &[u8; USED_BYTES]| slot[..8] == MAGIC;
        if !slots.iter().any(is_ours) && slots.iter().flatten().any(|&byte| byte != 0) {
            return Self::Foreign;
        }
        let sound = slots.iter().zip(0..).filter_map(|(slot, number)| {
            // The last number has no successor, and a slot in the other's place was not written there by this engine.
            Checkpoint::decode(slot).filter(|(sequence, _)| sequence % 2 == number && *sequence < u64::MAX)
        });
        Self::Ours(sound.max_by_key(|(sequence, _)| *sequence))
    }
}

/// The checkpoint file of one partition.
#[derive(Debug)]
pub(crate) struct Checkpoints {
    disk: Arc<dyn Disk>,
    dir: Arc<Path>,
    /// Whether the file's name is durable.
    named: bool,
    /// The number of the next slot to be written.
    sequence: u64,
    /// What the newest slot says, if that is known.
    newest: Option<Checkpoint>,
    /// Whether the file may be written: it is not another's, and what it holds is known.
    usable: bool,
    /// Whether what has the name is another's.
    foreign: bool,
    /// Whether a failed write was told.
    told: bool,
}

impl Checkpoints {
    /// Reads what there is: under the name stands `kind`, if anything. The file is made by the first write.
    pub(crate) fn open(disk: &Arc<dyn Disk>, dir: &Arc<Path>, kind: Option<EntryKind>) -> Self {
        let path = dir.join(NAME);
        let held = match kind {
            None => Ok(Held::Nothing),
            Some(EntryKind::File) => Held::look(&**disk, &path),
            Some(EntryKind::Directory | EntryKind::Other) => Ok(Held::Foreign),
        };
        let (found, usable) = match &held {
            Ok(Held::Nothing) => (None, true),
            Ok(Held::Ours(found)) => (*found, true),
            Ok(Held::Foreign) => (None, false),
            Err(error) => {
                // What it says may be newer than what would be written.
                tracing::warn!(%error, path = %path.display(), "the checkpoint cannot be read; going on without");
                (None, false)
            }
        };
        Self {
            disk: Arc::clone(disk),
            dir: Arc::clone(dir),
            named: kind.is_some(),
            sequence: found.map_or(0, |(sequence, _)| following(sequence)),
            newest: found.map(|(_, checkpoint)| checkpoint),
            usable,
            foreign: matches!(held, Ok(Held::Foreign)),
            told: false,
        }
    }

    /// Whether what has the name was not written by this engine. It is left alone.
    pub(crate) fn is_foreign(&self) -> bool {
        self.foreign
    }

    /// Whether checkpoints are written.
    pub(crate) fn is_usable(&self) -> bool {
        self.usable
    }

    /// Whether there is a file, whatever it says.
    pub(super) fn are_there(&self) -> bool {
        self.named
    }

    /// What the file says.
    pub(crate) fn newest(&self) -> Option<Checkpoint> {
        self.newest
    }

    /// Writes a checkpoint that follows from the one before: the log grew, or nothing happened. Durable on return. Nothing is
    /// written if the file says that already, or is not to be written.
    ///
    /// # Errors
    /// What the system says. The slot before is sound then, and the next write takes the same place again.
    pub(crate) fn write(&mut self, checkpoint: &Checkpoint) -> io::Result<()> {
        if !self.usable || self.newest.as_ref() == Some(checkpoint) {
            return Ok(());
        }
        // A new file gets both slots, so that there is an older one from the start.
        let both = !self.named;
        self.put(checkpoint)?;
        if both { self.put(checkpoint) } else { Ok(()) }
    }

    /// Writes a checkpoint in the place of whatever the file said: none of it holds any more.
    ///
    /// # Errors
    /// What the system says; the file is gone then, if that was possible.
    pub(super) fn replace(&mut self, checkpoint: &Checkpoint) -> io::Result<()> {
        if !self.usable {
            return Ok(());
        }
        let replaced = self.put(checkpoint).and_then(|()| self.put(checkpoint));
        if replaced.is_err() && self.disk.remove_file(&self.path()).and_then(|()| self.disk.sync_dir(&self.dir)).is_ok() {
            (self.named, self.sequence, self.newest) = (false, 0, None);
        }
        replaced
    }

    /// Sees to it that no slot says more than this one, which says less than they did.
    ///
    /// # Errors
    /// What the system says: a slot may say more, or it is not known what they say.
    pub(super) fn take_back(&mut self, checkpoint: &Checkpoint) -> io::Result<()> {
        match self.replace(checkpoint) {
            // What another wrote vouches for nothing.
            Ok(()) if self.usable || self.foreign => Ok(()),
            Ok(()) => Err(io::Error::other("what the checkpoint says is not known")),
            // It is gone.
            Err(_) if !self.named => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Tells of a failure to write, once: the next opening reads more, and that is all.
    pub(super) fn tell(&mut self, result: io::Result<()>) {
        match result {
            Ok(()) => self.told = false,
            Err(error) => {
                if !self.told {
                    tracing::warn!(%error, path = %self.path().display(), "the checkpoint could not be written; the next opening scans more");
                }
                self.told = true;
            }
        }
    }

    /// The partition is closed, and writes no more of them.
    pub(super) fn let_go(&mut self) {
        self.usable = false;
    }

    pub(super) fn path(&self) -> PathBuf {
        self.dir.join(NAME)
    }

    /// Writes the next slot.
    fn put(&mut self, checkpoint: &Checkpoint) -> io::Result<()> {
        self.newest = None;
        // A descriptor less for each partition, most of which write none for hours.
        let file = self.open_file()?;
        write_all_at(&*file, &checkpoint.encode(self.sequence), self.sequence % 2 * SLOT_BYTES, false)?;
        file.sync()?;
        if !self.named {
            self.disk.sync_dir(&self.dir)?;
            self.named = true;
        }
        self.newest = Some(*checkpoint);
        self.sequence = following(self.sequence);
        Ok(())
    }

    fn open_file(&self) -> io::Result<Arc<dyn File>> {
        match self.disk.open(&self.path(), Open::WRITE) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.disk.open(&self.path(), Open::NEW),
            result => result,
        }
    }
}

/// The number of the slot after that of `sequence`. One short of the last number, which none has, it stays: the same slot is written
/// again, and the older one left.
fn following(sequence: u64) -> u64 {
    sequence.saturating_add(1).min(u64::MAX - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Checkpoint = Checkpoint { base: 30, position: 270, next_offset: 36, last_timestamp: u64::MAX, entries: 6, clean: true };
    const TWO: Checkpoint = Checkpoint { position: 315, next_offset: 37, clean: false, ..ONE };

    fn used(slot: &[u8]) -> [u8; USED_BYTES] {
        *slot.first_chunk().unwrap()
    }

    #[test]
    fn a_slot_is_laid_out_as_the_format_says() {
        let slot = ONE.encode(7);
        let mut expected = b"sapwckpt".to_vec();
        expected.extend([0, 0, 0, 1, 0, 0, 0, 1]);
        for word in [7u64, 30, 270, 36, u64::MAX, 6] {
            expected.extend(word.to_be_bytes());
        }
        expected.extend(crc32fast::hash(&expected).to_be_bytes());
        expected.resize(4096, 0);
        assert_eq!(slot[..], expected[..]);
        assert_eq!(Checkpoint::decode(&used(&slot)), Some((7, ONE)));
        assert_eq!(Checkpoint::decode(&used(&TWO.encode(0))), Some((0, TWO)));
    }

    #[test]
    fn a_slot_with_any_bit_flipped_is_unsound_and_the_other_serves() {
        let (older, newer) = (used(&ONE.encode(8)), used(&TWO.encode(9)));
        assert_eq!(Held::of(&[older, newer]), Held::Ours(Some((9, TWO))));
        for bit in (0..USED_BYTES * 8).step_by(if cfg!(miri) { 11 } else { 1 }) {
            // Not by value: rustc 1.95 loses the change of an array that is given and taken so, from `opt-level = 1` on.
            let flip = |slot: &mut [u8; USED_BYTES]| slot[bit / 8] ^= 1 << (bit % 8);
            let mut slots = [older, newer];
            flip(&mut slots[1]);
            assert_eq!(Checkpoint::decode(&slots[1]), None, "bit {bit}");
            assert_eq!(Held::of(&slots), Held::Ours(Some((8, ONE))), "bit {bit}");
            slots = [older, newer];
            flip(&mut slots[0]);
            assert_eq!(Held::of(&slots), Held::Ours(Some((9, TWO))), "bit {bit}");
        }
    }

    #[test]
    fn the_last_numbers_are_never_passed() {
        assert_eq!([0, 7, u64::MAX - 2, u64::MAX - 1].map(following), [1, 8, u64::MAX - 1, u64::MAX - 1]);
        // What is written with the last one is sound: see above for the one behind it.
        assert_eq!(Held::of(&[used(&ONE.encode(u64::MAX - 1)), used(&TWO.encode(u64::MAX - 2))]), Held::Ours(Some((u64::MAX - 1, ONE))));
    }

    #[test]
    fn slots_that_were_not_written_in_their_place_say_nothing() {
        let none = [0; USED_BYTES];
        assert_eq!(Held::of(&[none, none]), Held::Ours(None));
        assert_eq!(Held::of(&[used(&ONE.encode(8)), none]), Held::Ours(Some((8, ONE))));
        assert_eq!(Held::of(&[none, used(&ONE.encode(8))]), Held::Ours(None), "in the other's place");
        assert_eq!(Held::of(&[none, used(&ONE.encode(u64::MAX))]), Held::Ours(None), "no number follows");
        assert_eq!(Held::of(&[[b'x'; USED_BYTES], none]), Held::Foreign);
        let mut later = ONE.encode(8);
        later[11] = 2;
        let crc = crc32fast::hash(&later[..CHECKED_BYTES]);
        later[CHECKED_BYTES..USED_BYTES].copy_from_slice(&crc.to_be_bytes());
        assert_eq!(Held::of(&[used(&later), none]), Held::Ours(None), "of a later version");
    }
}
