//! The checkpoint's slots: any bytes in them, also with checksums that are right.

use std::path::Path;
use std::sync::Arc;

use super::format::{Log, MAGIC, SLOT_BYTES, SLOT_CHECKED, SLOT_USED, Slot, crc};
use super::{Input, assert_named, disk_with, files, open, read_all, tiny};
use crate::io::sim::SimDisk;
use crate::io::{Disk, EntryKind};
use crate::partition::{Checkpoint, Checkpoints};
use crate::{OnDamage, Recovery};

/// A byte of choices, the file's length in a word, then what the two slots begin with.
pub fn checkpoint(data: &[u8]) {
    let mut input = Input(data);
    let (choice, len) = (input.byte(), usize::from(input.word()) % (2 * SLOT_BYTES + 200));
    let mut file = vec![0; 2 * SLOT_BYTES + 200];
    for place in [0, SLOT_BYTES] {
        let bytes = input.bytes(SLOT_USED);
        file[place..place + bytes.len()].copy_from_slice(bytes);
        if choice >> (place / SLOT_BYTES) & 1 == 1 {
            let sum = crc(&[&file[place..place + SLOT_CHECKED]]).to_be_bytes();
            file[place + SLOT_CHECKED..place + SLOT_USED].copy_from_slice(&sum);
        }
    }
    if choice & 4 != 0 {
        file.truncate(len);
    }
    slots(&file);
    opened(&file, choice);
}

/// What is read is what the format says, and what is written next is read.
fn slots(file: &[u8]) {
    let (sim, dir): (_, Arc<Path>) = (SimDisk::new(0), Arc::from(Path::new("/")));
    let path = dir.join("checkpoint");
    sim.write_file(&path, file);
    let disk: Arc<dyn Disk> = Arc::new(sim.clone());
    let look = || Checkpoints::open(&disk, &dir, Some(EntryKind::File));
    let mut engine = look();
    let newest = Slot::newest(file);
    assert_eq!(engine.newest().map(as_slot), newest.map(|(_, slot)| slot));
    let used = |place: usize| file.iter().skip(place * SLOT_BYTES).take(SLOT_USED);
    let begins = |place: usize| used(place).take(MAGIC.len()).eq(MAGIC);
    let foreign = !begins(0) && !begins(1) && used(0).chain(used(1)).any(|&byte| byte != 0);
    assert_eq!((engine.is_foreign(), engine.is_usable()), (foreign, !foreign));
    let next = Checkpoint { base: 1, position: 2, next_offset: 3, last_timestamp: 4, entries: 5, clean: false };
    engine.write(&next).unwrap();
    let now = sim.read_file(&path);
    if foreign {
        assert_eq!(now, file, "another's file");
        return;
    }
    assert_eq!(look().newest(), Some(next));
    if let Some((sequence, slot)) = newest.filter(|(_, slot)| *slot != as_slot(next)) {
        let place = (sequence % 2) as usize * SLOT_BYTES;
        // At the end of the numbers the same slot is written again.
        assert!(sequence >= u64::MAX - 2 || now[place..place + SLOT_USED] == slot.encode(sequence)[..SLOT_USED], "the older slot stays");
    }
}

fn as_slot(checkpoint: Checkpoint) -> Slot {
    let Checkpoint { base, position, next_offset, last_timestamp, entries, clean } = checkpoint;
    Slot { base, position, next_offset, last_timestamp, entries, clean }
}

/// Beside sound logs, whatever it claims, no record that is served is wrong.
fn opened(file: &[u8], choice: u8) {
    let log = Log::sample(0, [17; 15], 270);
    let mut all = log.files(1);
    all.insert("checkpoint".into(), file.to_vec());
    let sim = disk_with(&all);
    let on_damage = if choice & 8 == 0 { OnDamage::Refuse } else { OnDamage::CutAside };
    let recovery = if choice & 16 == 0 { Recovery::FromCheckpoint } else { Recovery::FullScan };
    match open(&sim, &tiny(1, recovery, on_damage)) {
        Ok((broker, partition)) => {
            let served = read_all(&partition, &log);
            if recovery == Recovery::FullScan {
                assert!(served.len() == 15 && served.values().all(Result::is_ok), "a scan finds all that is there");
            }
            broker.close().unwrap();
        }
        Err(error) => {
            assert_named(&error);
            assert_eq!(files(&sim), all, "a refusal changes nothing");
        }
    }
}
