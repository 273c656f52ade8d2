//! Bytes to records and back. Pure: no file, no clock, no thread.
//!
//! Layout, checks and their order are those of docs/format.md.

mod batch;
mod codec;
mod run;

pub use batch::{Batch, RecordTooLarge};
pub(crate) use codec::{Checker, to_u64, to_usize};
pub use codec::{Flaw, HEADER_BYTES, Header, Record};
pub(crate) use run::{Run, RunEnd};
