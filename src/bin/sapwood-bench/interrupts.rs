//! Ctrl-C: the first one stops what is going on, the second one the program. Any thread may ask.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::progress::Progress;

/// How often Ctrl-C was pressed.
#[derive(Debug, Clone, Default)]
pub struct Interrupts {
    presses: Arc<AtomicU32>,
}

impl Interrupts {
    /// Counts from now on. Where no handler can be set, Ctrl-C ends the program as ever.
    pub fn listen(progress: Progress) -> Self {
        let interrupts = Self::default();
        let presses = Arc::clone(&interrupts.presses);
        let set = ctrlc::set_handler(move || {
            // One counter, nothing else is published by it: relaxed is enough.
            if presses.fetch_add(1, Ordering::Relaxed) > 0 {
                tell(&progress, "ended at once; the data directory is left as it is");
                std::process::exit(130);
            }
            tell(&progress, "stopping; Ctrl-C once more to end at once");
        });
        if let Err(error) = set {
            eprintln!("sapwood-bench: Ctrl-C will end the run without a report: {error}");
        }
        interrupts
    }

    /// Whether there was one.
    pub fn any(&self) -> bool {
        self.presses.load(Ordering::Relaxed) > 0
    }
}

/// Where stderr is gone, there is nobody to tell.
fn tell(progress: &Progress, what: &str) {
    let _ = progress.stderr().write_all(format!("sapwood-bench: {what}\n").as_bytes());
}
