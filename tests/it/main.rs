//! Public behaviour, one binary. What stands on the disk is judged by `oracle`, which knows the format page and nothing of the engine.
#![allow(clippy::unwrap_used, reason = "tests: a failure is a panic with its place")]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_possible_wrap,
    reason = "tests: the numbers are small and chosen here"
)]
#![allow(clippy::print_stderr, reason = "tests: a failure tells its seed and its backend")]
#![allow(unreachable_pub, reason = "one binary: everything is reachable from here alone")]

mod child;
mod damage;
mod format;
mod fuse_disk;
mod oracle;
mod sim;
mod simulation;
mod support;
mod warnings;

mod ahead;
mod alone;
mod altering;
mod api;
#[cfg(feature = "cli")]
mod bench;
mod cases;
mod chain;
mod checkpoint;
mod closing;
mod crash;
mod durability;
mod environment;
mod foreign;
mod fork;
mod full;
mod fuse;
mod fuzz_corpus;
mod giants;
mod indexes;
mod kill;
mod latch;
mod layers;
mod lengths;
mod limits;
mod locking;
mod many;
mod missing;
mod moving;
mod offsets;
mod oracle_checks;
mod pinning;
mod producers;
mod property;
mod reader_modes;
mod reading;
mod recovery;
mod refused;
mod repair;
mod retention;
mod review;
mod rolls;
mod skipping;
mod space;
mod special;
mod tail;
mod tail_tasks;
mod threads;
mod time;
mod time_lookup;
#[cfg(feature = "cli")]
mod tool;
mod topic_lives;
mod topic_readers;
mod topics;
mod truncation;
mod upkeep;
mod verify;
