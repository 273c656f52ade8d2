//! The guards that keep what was acknowledged, by name, so that tests can take one out and see that its absence is noticed.
//!
//! In production all of them stand, and asking costs nothing: `stands` is a constant. With the feature `sim`, `without` runs a closure
//! without one, on the calling thread alone; a simulation has no other. docs/testing.md lists what noticed each absence.

/// Something that is done, or not done, so that no crash takes what was promised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Guard {
    /// A record whose checksum does not match is none.
    RecordChecksum,
    /// A record whose offset is not the next one is none.
    RecordOffset,
    /// Where an index leads, a record with the entry's offset must be; else the log is scanned.
    IndexesAreHints,
    /// A commit's write asks the device to keep it.
    DurableWrites,
    /// An append is answered after its commit was written.
    AnswersAfterWrites,
    /// A write that failed stops the partition.
    FailedWritesStop,
    /// A sync that failed stops the partition.
    FailedSyncsStop,
    /// No checkpoint is written after a sync that failed.
    NoCheckpointAfterFailure,
    /// The bytes before the first record in its block are written again as they were.
    LastBlockKept,
    /// The first appends to a segment are answered after its name is durable: one that was made ahead.
    RenamesBeforeAnswers,
    /// The same, for a segment that is made when it is needed.
    NamesBeforeAnswers,
    /// What was appended before a roll is durable before what comes after it.
    SyncsBeforeRolls,
    /// Readers are given durable records only, unless they ask for others.
    ReadsAreDurable,
    /// A checkpoint vouches for nothing that is not durable.
    CheckpointsAreDurable,
    /// Nor for index entries that are not.
    CheckpointsSyncIndexes,
    /// A sealed segment's indexes are durable.
    SealsSyncIndexes,
    /// What an opening accepts is made durable before it is served.
    OpeningSyncsLog,
    /// So are the names of its files.
    OpeningSyncsNames,
    /// What only the page cache has after a sync that failed is not accepted.
    OpeningEvicts,
    /// A torn tail is cut before the first append.
    OpeningCutsTail,
    /// Whole records in a torn tail are copied aside before it is cut.
    OpeningCopiesAside,
    /// Indexes are made what the log says.
    OpeningMendsIndexes,
    /// The cut of the last sealed log is made durable.
    OpeningSyncsSealed,
    /// What a checkpoint vouched for is not cut unasked.
    OpeningRefusesDamage,
    /// A topic is acknowledged after its name is durable.
    TopicNamesSynced,
    /// A deleted topic's new name is durable before anything of it is removed.
    DeletionsSynced,
    /// Of segments that go from the front of the log, each is gone durably before the next goes.
    RemovalsInOrder,
    /// The names of the segments that stay are durable before others go.
    SuccessorsBeforeRemovals,
    /// A note of an offset is durable before it takes the old one's place.
    NotesSynced,
    /// So is its name before it is acknowledged.
    NoteNamesSynced,
    /// No checkpoint vouches for records that are about to be cut.
    CutsAnnounced,
    /// Of segments that are cut from the end of the log, each is gone durably before the next goes.
    CutsFromTheEnd,
    /// The cut of a log is durable before it is acknowledged.
    CutsSynced,
    /// A file that has another name besides is not cut.
    LinksKept,
    /// That a partition moved is noted before it is acknowledged.
    MovesNoted,
    /// A topic's new settings are durable before they take the place of the old ones.
    SettingsSynced,
    /// Altering a topic is acknowledged after it is durable which settings are its.
    AlterationsSynced,
    /// A deleted topic's file is emptied only if it has no other name.
    OtherNamesKept,
}

#[cfg(feature = "sim")]
impl Guard {
    /// All of them.
    pub const ALL: &[Self] = &[
        Self::RecordChecksum,
        Self::RecordOffset,
        Self::IndexesAreHints,
        Self::DurableWrites,
        Self::AnswersAfterWrites,
        Self::FailedWritesStop,
        Self::FailedSyncsStop,
        Self::NoCheckpointAfterFailure,
        Self::LastBlockKept,
        Self::RenamesBeforeAnswers,
        Self::NamesBeforeAnswers,
        Self::SyncsBeforeRolls,
        Self::ReadsAreDurable,
        Self::CheckpointsAreDurable,
        Self::CheckpointsSyncIndexes,
        Self::SealsSyncIndexes,
        Self::OpeningSyncsLog,
        Self::OpeningSyncsNames,
        Self::OpeningEvicts,
        Self::OpeningCutsTail,
        Self::OpeningCopiesAside,
        Self::OpeningMendsIndexes,
        Self::OpeningSyncsSealed,
        Self::OpeningRefusesDamage,
        Self::TopicNamesSynced,
        Self::DeletionsSynced,
        Self::RemovalsInOrder,
        Self::SuccessorsBeforeRemovals,
        Self::NotesSynced,
        Self::NoteNamesSynced,
        Self::CutsAnnounced,
        Self::CutsFromTheEnd,
        Self::CutsSynced,
        Self::LinksKept,
        Self::MovesNoted,
        Self::SettingsSynced,
        Self::AlterationsSynced,
        Self::OtherNamesKept,
    ];
}

/// Whether a guard stands: always, but within `without`.
#[cfg(not(feature = "sim"))]
pub(crate) const fn stands(_: Guard) -> bool {
    true
}

#[cfg(feature = "sim")]
pub(crate) use taken_out::stands;
#[cfg(feature = "sim")]
pub use taken_out::without;

#[cfg(feature = "sim")]
mod taken_out {
    use std::cell::Cell;

    use super::Guard;

    thread_local! {
        static OUT: Cell<Option<Guard>> = const { Cell::new(None) };
    }

    pub(crate) fn stands(guard: Guard) -> bool {
        OUT.get() != Some(guard)
    }

    /// Runs something without a guard, on this thread.
    pub fn without<T>(guard: Guard, run: impl FnOnce() -> T) -> T {
        struct PutBack;
        impl Drop for PutBack {
            fn drop(&mut self) {
                OUT.set(None);
            }
        }
        OUT.set(Some(guard));
        let _put_back = PutBack;
        run()
    }
}
