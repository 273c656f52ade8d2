//! The index files: any bytes in their places, beside logs that are sound. Every record must be served, and be right.

use super::format::{Log, name};
use super::{Input, assert_is_written, dir, disk_with, files, open, read_all, store_settings, tiny};
use crate::{OnDamage, Recovery};

/// The first byte says which files are replaced and what else is so; the rest is their content.
pub fn index(data: &[u8]) {
    let mut input = Input(data);
    let choice = input.byte();
    let is = |bit: u8| choice >> bit & 1 == 1;
    let interval = [1, 2][usize::from(is(4))];
    let base = if is(5) { 1_000_000_000_000 } else { 0 };
    let log = Log::sample(base, [17; 15], 270);
    let mut all = log.files(interval);
    match choice >> 6 {
        0 => {}
        1 => drop(all.insert("checkpoint".into(), log.checkpoint(interval, None).file())),
        after => drop(all.insert("checkpoint".into(), log.checkpoint(interval, Some(u64::from(after))).file())),
    }
    let bytes = input.0;
    let bases: Vec<u64> = log.segments.keys().copied().collect();
    let [sealed, .., active] = bases[..] else { unreachable!("three segments") };
    let places = [(sealed, "index"), (sealed, "timeindex"), (active, "index"), (active, "timeindex")];
    for (_, (base, extension)) in (0..).zip(places).filter(|(bit, _)| is(*bit)) {
        all.insert(name(base, extension), bytes.to_vec());
    }
    let sim = disk_with(&all);
    let config = tiny(interval, Recovery::FromCheckpoint, OnDamage::Refuse);
    // Without, the interval is guessed from what stands in the files.
    store_settings(&sim, &config);
    let (broker, partition) = open(&sim, &config).expect("index files hold nothing that the log does not");
    let serves_all = || {
        let found = read_all(&partition, &log);
        assert_eq!(found.len(), 15);
        found.values().for_each(|record| assert_is_written(record.as_ref().unwrap(), log.get(record.as_ref().unwrap().offset)));
    };
    serves_all();
    if !all.contains_key("checkpoint") {
        // Nothing vouched for any entry, so those of the active segment were compared with the log.
        let (now, wanted) = (files(&sim), log.files(interval));
        for extension in ["index", "timeindex"] {
            assert_eq!(now[&name(active, extension)], wanted[&name(active, extension)]);
        }
    }
    // Look-ups open the file anew: bytes that change under an open partition are as harmless.
    bases.iter().for_each(|&base| sim.write_file(&dir().join(name(base, "index")), bytes));
    serves_all();
    broker.close().unwrap();
}
