//! Bytes to records and back. Pure: no file, no clock, no thread.
//!
//! Layout, checks and their order are those of docs/format.md.

mod batch;
mod codec;

pub use batch::{Batch, RecordTooLarge};
pub use codec::{Flaw, HEADER_BYTES, Header, Record};
pub(crate) use codec::{to_u64, to_usize};
