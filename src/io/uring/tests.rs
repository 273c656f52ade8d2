//! What a dropped ring does about operations that do not complete.

use std::io::{PipeReader, PipeWriter, Read, Write};
use std::iter;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::mpsc;
use std::thread;

use rustix::fs::OFlags;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use super::super::{Backend, Details, OsDisk};
use super::*;

/// An end of a pipe, where an operation completes when the other end lets it.
#[derive(Debug)]
enum End {
    Read(PipeReader),
    Write(PipeWriter),
}

impl File for End {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(match self {
            Self::Read(end) => end.as_fd(),
            Self::Write(end) => end.as_fd(),
        })
    }
    fn len(&self) -> io::Result<u64> {
        unimplemented!()
    }
    fn details(&self) -> io::Result<Details> {
        unimplemented!()
    }
    fn read_at(&self, _: &mut [u8], _: u64) -> io::Result<usize> {
        unimplemented!()
    }
    fn write_at(&self, _: &[u8], _: u64, _: bool) -> io::Result<usize> {
        unimplemented!()
    }
    fn set_len(&self, _: u64) -> io::Result<()> {
        unimplemented!()
    }
    fn allocate(&self, _: Range<u64>) -> io::Result<()> {
        unimplemented!()
    }
    fn write_zeroes(&self, _: Range<u64>) -> io::Result<()> {
        unimplemented!()
    }
    fn sync(&self) -> io::Result<()> {
        unimplemented!()
    }
    fn evict(&self, _: u64) -> io::Result<()> {
        unimplemented!()
    }
    fn next_data(&self, _: u64) -> io::Result<Option<u64>> {
        unimplemented!()
    }
}

/// A ring without patience that has one operation on a pipe in flight; none where the kernel grants no ring.
fn with_one_in_flight(end: End, action: Action) -> Option<(UringRing, Arc<dyn File>)> {
    if let Err(error) = OsDisk::new(Backend::Uring) {
        eprintln!("skipped: {error}");
        return None;
    }
    let config = RingConfig { depth: 2, files: 1, register_files: true, buffers: 0, buffer_bytes: 4096, one_thread: false };
    let mut ring = UringRing::new(&config, &Told::default()).unwrap();
    ring.patience = Duration::ZERO;
    let file: Arc<dyn File> = Arc::new(end);
    let slot = ring.attach(Arc::clone(&file)).unwrap();
    let buffer = Buffer::new(4096).unwrap();
    ring.submit(Token(1), Op { action, slot, position: 0, buffer, range: 0..4096 }).unwrap();
    assert!(ring.reap().unwrap().is_none());
    Some((ring, file))
}

#[test]
fn b141_a_read_that_never_completes_is_left_with_its_memory_and_its_file() {
    let (reader, _writer) = io::pipe().unwrap();
    let Some((mut ring, file)) = with_one_in_flight(End::Read(reader), Action::Read) else { return };
    assert!(!ring.drain());
    drop(ring);
    assert_eq!(Arc::strong_count(&file), 2, "the operation's own");
}

/// Tells of each event.
struct Teller(mpsc::Sender<()>);

impl Subscriber for Teller {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn event(&self, _: &Event<'_>) {
        // Who waited for the first one may be gone.
        let _ = self.0.send(());
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[test]
fn b141_a_write_is_waited_for_however_long_it_takes() {
    let (mut reader, mut writer) = io::pipe().unwrap();
    // Filled, so that the ring's write finds no room.
    rustix::fs::fcntl_setfl(&writer, OFlags::NONBLOCK).unwrap();
    let held: usize = iter::from_fn(|| writer.write(&[0; 4096]).ok()).sum();
    rustix::fs::fcntl_setfl(&writer, OFlags::empty()).unwrap();
    let Some((mut ring, file)) = with_one_in_flight(End::Write(writer), Action::Write { durable: false }) else { return };
    let (told, out_of_patience) = mpsc::channel();
    thread::scope(|scope| {
        // There is room only once it was said that the time is over; never, if that is not said.
        scope.spawn(move || out_of_patience.recv().map(|()| reader.read_exact(&mut vec![0; held + 4096]).unwrap()));
        let ended = tracing::subscriber::with_default(Teller(told), || ring.drain());
        assert!(ended, "it was not waited for");
    });
    drop(ring);
    assert_eq!(Arc::strong_count(&file), 1);
}
