//! Reading at the end of the log, and waiting there for what comes.
//!
//! A [`Tail`] is a [`Reader`] with a place of its own, which goes on from batch to batch, and which waits for the watermark
//! that bounds what it sees. It reads nothing and takes no time while nothing comes. What it does when there is nothing to read differs by who
//! asks: a thread sleeps, a task is woken by its waker, a poll loop gets a descriptor; all by the one [`Watch`].

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use super::reader::{Reader, ReaderConfig, Skipped, Visibility};
use super::records::{AHEAD_BYTES, OwnedRecord, Records};
use super::watch::{Place, Watch};
use super::{Partition, Shared};
use crate::error::{Error, Result};
use crate::io::Signal;

#[cfg(feature = "async")]
mod stream;
#[cfg(feature = "async")]
pub use stream::TailStream;

/// Reads on from an offset as the log grows. Belongs to one thread at a time, and keeps its partition open. Made by
/// [`Partition::tail`].
///
/// Once the broker was closed or the topic deleted, or the partition failed, no more records come: each way to read ends with that
/// error. After [`Error::Failed`] nothing that was readable is missing, for it is told once all of that was read; [`Error::Closed`] cuts off what
/// was not read yet. Where records are gone, as [`Error::OffsetOutOfRange`] tells with the first that is there, or damaged, the tail stays
/// where it is, and goes on from another place by [`Self::seek`] or [`Self::skip_damaged`].
///
/// ```
/// # fn main() -> sapwood::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let broker = sapwood::Broker::open(dir.path(), Default::default())?;
/// # broker.create_topic("orders", Default::default())?;
/// # broker.produce("orders", None, b"hello")?;
/// use std::time::Duration;
///
/// let partition = broker.topic("orders")?.partition(0)?;
/// let mut tail = partition.tail(partition.first_offset())?;
/// while let Some(records) = tail.next_batch(1 << 20, Some(Duration::from_millis(10)))? {
///     for record in &records {
///         println!("{} {:?}", record.offset, record.value);
///     }
/// }
/// println!("nothing came for a while; up to {} all was read", tail.position());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Tail {
    reader: Reader,
    shared: Arc<Shared>,
    visibility: Visibility,
    /// What comes next.
    position: u64,
    /// Records from there on that were read already.
    ahead: VecDeque<OwnedRecord>,
    /// The log's cuts when it came to its place.
    cuts: u64,
    event: Option<Event>,
}

/// The tail's own hand on a descriptor that it gave out.
#[derive(Debug)]
struct Event {
    shown: TailEvent,
    place: Place,
}

impl Partition {
    /// Reads durable records from `from` on, and waits for more at the end. With [`Self::durable_end`] it begins with the next record.
    ///
    /// # Errors
    /// [`Error::OffsetOutOfRange`] if `from` is before the first record or past the end; else as for [`Self::reader`].
    pub fn tail(&self, from: u64) -> Result<Tail> {
        self.tail_with(from, Visibility::default())
    }

    /// The same up to the watermark asked for. With [`Visibility::Appended`] and [`Self::next_offset`] it begins with the next record.
    ///
    /// # Errors
    /// As for [`Self::tail`].
    pub fn tail_with(&self, from: u64, visibility: Visibility) -> Result<Tail> {
        self.tail_by(from, ReaderConfig::up_to(visibility))
    }

    /// The same by a reader as it is asked for.
    pub(crate) fn tail_by(&self, from: u64, config: ReaderConfig) -> Result<Tail> {
        let visibility = config.visibility;
        let reader = self.reader_with(config)?;
        let shared = Arc::clone(&self.0.shared);
        let cuts = shared.cuts.count();
        let mut tail = Tail { reader, shared, visibility, position: from, ahead: VecDeque::new(), cuts, event: None };
        tail.seek(from)?;
        Ok(tail)
    }
}

impl Tail {
    /// The next records, as many as fit in `max_bytes` and at least one, as soon as there are any; none if the time is over before. Without a
    /// timeout it waits as long as it takes; [`Duration::ZERO`] takes what is there.
    ///
    /// They count as read; [`Self::position`] is behind them. They are borrowed, nothing is copied: see [`Reader::read`].
    ///
    /// # Blocking
    /// While nothing comes, and for the device, where neither the engine's memory nor the page cache holds what is read.
    ///
    /// # Errors
    /// [`Error::Closed`] and [`Error::Failed`] if nothing can come any more, see [`Tail`]; else as for [`Reader::read`].
    pub fn next_batch(&mut self, max_bytes: usize, timeout: Option<Duration>) -> Result<Option<Records<'_>>> {
        self.ahead.clear();
        if !self.wait(timeout)? {
            return Ok(None);
        }
        let records = self.reader.read(self.position, max_bytes)?;
        self.position = records.next_offset();
        Ok(Some(records))
    }

    /// The next record, in memory of its own; none if the time is over before it comes. As [`Self::next_batch`] in all else.
    ///
    /// # Errors
    /// As for [`Self::next_batch`].
    pub fn next_record(&mut self, timeout: Option<Duration>) -> Result<Option<OwnedRecord>> {
        self.drop_cut();
        if self.ahead.is_empty() {
            if !self.wait(timeout)? {
                return Ok(None);
            }
            self.read_ahead()?;
        }
        Ok(self.take_ahead())
    }

    /// Iterates over the records as they come. It ends when none came for that long, never without a timeout, and after an error. What it did
    /// not give out stays for the tail.
    pub fn records(&mut self, timeout: Option<Duration>) -> TailRecords<'_> {
        TailRecords { tail: self, timeout, over: false }
    }

    /// The offset of the record that comes next.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Goes on from there.
    ///
    /// # Errors
    /// [`Error::OffsetOutOfRange`], as for [`Partition::tail`]; the tail stays where it was.
    pub fn seek(&mut self, offset: u64) -> Result<()> {
        self.visibility.check(&self.shared, offset)?;
        self.go_on_from(offset);
        Ok(())
    }

    /// Goes on at the next whole record, where the one that comes next is damaged, and tells what was passed over: see
    /// [`Reader::skip_damaged`].
    ///
    /// # Errors
    /// As for that.
    pub fn skip_damaged(&mut self) -> Result<Skipped> {
        let skipped = self.reader.skip_damaged(self.position)?;
        self.go_on_from(skipped.records.end);
        Ok(skipped)
    }

    fn go_on_from(&mut self, offset: u64) {
        self.cuts = self.shared.cuts.count();
        self.position = offset;
        self.ahead.clear();
        // Nothing was asked for from there on yet.
        if let Some(event) = &self.event {
            event.place.leave();
            event.shown.0.raise();
        }
    }

    /// The partition that is read.
    pub fn partition(&self) -> &Partition {
        self.reader.partition()
    }

    /// A descriptor for poll loops, readable unless the tail was asked last and had nothing: (1) read, with no time to wait, until there is
    /// nothing, which arms it; (2) poll until it is readable; and again. It is for polling only; the tail itself takes back what made it readable.
    /// All calls give the same one.
    ///
    /// ```
    /// # fn main() -> sapwood::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let broker = sapwood::Broker::open(dir.path(), Default::default())?;
    /// # broker.create_topic("orders", Default::default())?;
    /// # let partition = broker.topic("orders")?.partition(0)?;
    /// # fn poll(_: std::os::fd::BorrowedFd<'_>) {}
    /// # let mut rounds = 0;
    /// use std::os::fd::AsFd;
    /// use std::time::Duration;
    ///
    /// let mut tail = partition.tail(partition.durable_end())?;
    /// let event = tail.event()?;
    /// loop {
    ///     while let Some(records) = tail.next_batch(1 << 20, Some(Duration::ZERO))? {
    ///         println!("{} more", records.len());
    ///     }
    ///     poll(event.as_fd()); // with whatever else the loop waits for
    /// #   rounds += 1;
    /// #   if rounds == 2 { break Ok(()) }
    /// }
    /// # }
    /// ```
    ///
    /// # Errors
    /// What the system says to one more descriptor.
    pub fn event(&mut self) -> Result<TailEvent> {
        self.shared.check_process()?;
        if self.event.is_none() {
            let signal = Signal::new().map_err(Error::io("make an eventfd for", &self.shared.dir))?;
            // Nothing was read yet.
            signal.raise();
            self.event = Some(Event { shown: TailEvent(Arc::new(signal)), place: self.watch().place() });
        }
        Ok(self.event.as_ref().expect("made above").shown.clone())
    }

    fn end(&self) -> u64 {
        self.visibility.end_offset(&self.shared)
    }

    fn watch(&self) -> &Arc<Watch> {
        match self.visibility {
            Visibility::Durable => &self.shared.watches.durable,
            Visibility::Appended => &self.shared.watches.appended,
        }
    }

    /// Drops what was read ahead of records that were cut since.
    fn drop_cut(&mut self) {
        if self.cuts != self.shared.cuts.count() {
            let lowest = self.shared.cuts.lowest_since(self.cuts).unwrap_or(u64::MAX);
            self.ahead.retain(|record| record.offset < lowest);
        }
    }

    /// # Errors
    /// [`Error::OffsetOutOfRange`] if the log was cut before its place: what is there by now are others than those that it read. It stays where it is
    /// until it is told where to go on.
    fn check_place(&self) -> Result<()> {
        if self.cuts == self.shared.cuts.count() {
            return Ok(());
        }
        match self.shared.cuts.lowest_since(self.cuts).filter(|&lowest| self.position > lowest) {
            Some(next) => Err(Error::OffsetOutOfRange { offset: self.position, first: self.shared.first_offset(), next }),
            None => Ok(()),
        }
    }

    /// Whether there is something to read.
    ///
    /// # Errors
    /// If there is not, and never will be.
    fn has_more(&self) -> Result<bool> {
        self.shared.check_answers()?;
        self.check_place()?;
        // In this order: once the writer stopped, its ends are final.
        let stopped = self.shared.stopped.get().is_some();
        match self.end() > self.position {
            false if stopped => Err(self.shared.why_stopped()),
            more => Ok(more),
        }
    }

    /// Waits until there is something to read. False if the time is over before.
    fn wait(&mut self, timeout: Option<Duration>) -> Result<bool> {
        let more = self.has_more()? || (timeout != Some(Duration::ZERO) && self.sleep(timeout) && self.has_more()?);
        let Some(event) = &self.event else { return Ok(more) };
        if !more {
            event.shown.0.lower();
            event.place.ask(self.position, Waker::from(Arc::clone(&event.shown.0)));
            if !self.has_more()? {
                return Ok(false);
            }
        }
        // From here on it is readable until there is nothing again, whether or not the writer came to raise it.
        if event.place.leave() {
            event.shown.0.raise();
        }
        Ok(true)
    }

    /// Sleeps until there is something to do. False if the time is over before.
    fn sleep(&self, timeout: Option<Duration>) -> bool {
        // An error is something to tell.
        let ready = || self.has_more().unwrap_or(true);
        self.shared.workers.work_for(timeout, ready).unwrap_or_else(|| {
            // A time that no clock can show is no limit.
            let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
            self.watch().wait(self.position, deadline, ready)
        })
    }

    /// Waits until one of several has something to read, and tells which, the first from `turn` on; none if the time is over before. All of them wait
    /// at once, by one sleep of the thread.
    ///
    /// # Errors
    /// That of one in which nothing can come any more, once none of the others has anything to read.
    pub(crate) fn wait_for_any(tails: &[Self], turn: usize, timeout: Option<Duration>) -> Result<Option<usize>> {
        let found = Self::any_with_more(tails, turn)?;
        let Some(first) = tails.first().filter(|_| found.is_none() && timeout != Some(Duration::ZERO)) else { return Ok(found) };
        let ready = || !matches!(Self::any_with_more(tails, turn), Ok(None));
        first.shared.workers.work_for(timeout, ready).unwrap_or_else(|| {
            let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
            Watch::wait_for_any(tails.iter().map(|tail| (tail.watch(), tail.position)), deadline, ready)
        });
        Self::any_with_more(tails, turn)
    }

    fn any_with_more(tails: &[Self], turn: usize) -> Result<Option<usize>> {
        let mut ended = None;
        for number in (turn..tails.len()).chain(0..turn.min(tails.len())) {
            match tails[number].has_more() {
                Ok(true) => return Ok(Some(number)),
                Ok(false) => {}
                Err(error) => ended = ended.or(Some(error)),
            }
        }
        ended.map_or(Ok(None), Err)
    }

    fn read_ahead(&mut self) -> Result<()> {
        let records = self.reader.read(self.position, AHEAD_BYTES)?;
        self.ahead.extend(records.iter().map(OwnedRecord::from));
        Ok(())
    }

    fn take_ahead(&mut self) -> Option<OwnedRecord> {
        let record = self.ahead.pop_front()?;
        self.position = record.offset + 1;
        Some(record)
    }
}

/// Iterates over the records of a [`Tail`] as they come: see [`Tail::records`].
#[derive(Debug)]
pub struct TailRecords<'a> {
    tail: &'a mut Tail,
    timeout: Option<Duration>,
    over: bool,
}

impl Iterator for TailRecords<'_> {
    type Item = Result<OwnedRecord>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.over {
            return None;
        }
        let next = self.tail.next_record(self.timeout).transpose();
        self.over = !matches!(next, Some(Ok(_)));
        next
    }
}

impl std::iter::FusedIterator for TailRecords<'_> {}

/// A descriptor that is readable when its [`Tail`] may have something new: see [`Tail::event`]. Clones are the same one.
#[derive(Clone)]
pub struct TailEvent(Arc<Signal>);

impl AsFd for TailEvent {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl fmt::Debug for TailEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TailEvent").field(&self.as_fd()).finish()
    }
}

impl Wake for Signal {
    fn wake(self: Arc<Self>) {
        self.raise();
    }
}
