//! What the engine warns of, in a process of its own: a child's.

use std::fmt::{Debug, Write};
use std::sync::{Arc, Mutex};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// All warnings and errors since it was made, of every thread.
#[derive(Clone, Default)]
pub struct Warnings(Arc<Mutex<Vec<String>>>);

impl Warnings {
    /// Collects those of this process from now on. Once for each process.
    pub fn collect() -> Self {
        let warnings = Self::default();
        tracing::subscriber::set_global_default(warnings.clone()).unwrap();
        warnings
    }

    /// Without what the engine says of the file system that the tests run on, for each log: some of those have to do without.
    pub fn all(&self) -> Vec<String> {
        let of_file_system = |text: &String| text.contains("message=the file system ");
        self.0.lock().unwrap().iter().filter(|text| !of_file_system(text)).cloned().collect()
    }
}

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, "{}={value:?} ", field.name()).unwrap();
    }
}

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().unwrap().push(text.0);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}
