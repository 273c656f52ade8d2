//! The two ends of the log that readers look at: of what the kernel has, and of what is on the device.
//!
//! The writer alone moves them, and only up, unless it cuts the log ([`super::cut`]). Each is stored with Release after the segment's own position, and loaded with Acquire:
//! (1) the writer stores the segment's end, then this; (2) a reader that sees this end therefore sees a segment that reaches it.

use crate::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug)]
pub(super) struct Ends {
    /// One past the last record that the kernel has.
    appended: AtomicU64,
    /// One past the last record that is on the device.
    durable: AtomicU64,
}

impl Ends {
    /// Of a log that is on the device whole.
    pub(super) fn new(end: u64) -> Self {
        Self { appended: AtomicU64::new(end), durable: AtomicU64::new(end) }
    }

    pub(super) fn appended(&self) -> u64 {
        self.appended.load(Ordering::Acquire)
    }

    pub(super) fn durable(&self) -> u64 {
        self.durable.load(Ordering::Acquire)
    }

    pub(super) fn set_appended(&self, end: u64) {
        self.appended.store(end, Ordering::Release);
    }

    pub(super) fn set_durable(&self, end: u64) {
        self.durable.store(end, Ordering::Release);
    }
}

#[cfg(all(test, loom))]
mod models {
    use std::path::Path;
    use std::sync::Arc;

    use super::*;
    use crate::segment::Segment;

    /// Three commits of a record of 10 bytes each, published as the writer does.
    fn publishing(durable: bool) -> (Arc<Ends>, Arc<Segment>, loom::thread::JoinHandle<()>) {
        let (ends, segment) = (Arc::new(Ends::new(0)), Arc::new(Segment::new(Arc::from(Path::new("/")), 0, 0)));
        let (there, its) = (Arc::clone(&ends), Arc::clone(&segment));
        let writer = loom::thread::spawn(move || {
            for number in 1..=2 {
                its.extend(number * 10, &[]);
                there.set_appended(number);
                if durable {
                    its.set_durable(number * 10);
                    there.set_durable(number);
                }
            }
        });
        (ends, segment, writer)
    }

    #[test]
    fn loom_whoever_sees_an_end_sees_a_segment_that_reaches_it() {
        loom::model(|| {
            let (ends, segment, writer) = publishing(true);
            let durable = ends.durable();
            assert!(segment.durable() >= durable * 10);
            let appended = ends.appended();
            assert!(segment.appended() >= appended * 10);
            writer.join().unwrap();
        });
    }

    #[test]
    fn loom_the_durable_end_never_passes_the_appended_one() {
        loom::model(|| {
            let (ends, segment, writer) = publishing(true);
            let durable = ends.durable();
            assert!(ends.appended() >= durable && ends.durable() >= durable, "ends only grow");
            let durable = segment.durable();
            assert!(segment.appended() >= durable);
            writer.join().unwrap();
        });
    }
}
