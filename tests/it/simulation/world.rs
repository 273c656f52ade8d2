//! A machine with a broker on it, run step by step beside a model of what it must hold.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use sapwood::inspect::{Inspector, Severity};
use sapwood::io::sim::{OpKind, SimDisk};
use sapwood::{Backend, Broker, Error, Partition, ReadMode, ReaderConfig, Stepper, Ticket, TopicConfig, Visibility};

use super::model::{Crash, Log, Model, Presence, Sent, TopicModel, Verdict, batch_of, ensure};
use super::script::{Action, Machine};
use crate::format::HEADER;
use crate::oracle::{self, Report, u32_at, u64_at};
use crate::sim;
use crate::support::{Rng, config};

const DATA: &str = "/made/data";

/// Longer than anything is put off.
const REST: Duration = Duration::from_secs(20);

/// An append that was not answered yet.
struct Waiting {
    ticket: Ticket,
    topic: String,
    partition: u32,
    offsets: Range<u64>,
}

pub struct World {
    pub sim: SimDisk,
    pub model: Model,
    stepper: Stepper,
    broker: Option<Broker>,
    waiting: Vec<Waiting>,
    /// What each partition last said of its two ends.
    ends: BTreeMap<(String, u32), (u64, u64)>,
    /// The directories of logs of which a sync failed in this life.
    failed: BTreeSet<PathBuf>,
    rng: Rng,
    /// Faults were to come in this life; and are.
    faulty: bool,
    faults_to_come: bool,
    /// The disk had a limit in this life; and has.
    full: bool,
    limited: bool,
}

fn partition_dir(topic: &str, partition: u32) -> PathBuf {
    Path::new(DATA).join(topic).join(partition.to_string())
}

/// Settings for topics whose own are lost: the same as they had, so that the model need not know.
fn open_on(sim: &SimDisk, stepper: &Stepper) -> Result<Broker, Error> {
    Broker::open_stepped(Arc::new(sim.clone()), stepper, DATA, config(Backend::Auto, TopicConfig::default()))
}

impl World {
    pub fn new(seed: u64, machine: &Machine) -> Self {
        let sim = SimDisk::new(seed);
        sim.overlap_rings(machine.slow_rings);
        sim.refuse_direct(machine.refuse_direct);
        sim.refuse_allocate(machine.refuse_allocate);
        Self::of(sim, Model::default(), seed)
    }

    /// A machine that is down.
    pub fn of(sim: SimDisk, model: Model, seed: u64) -> Self {
        Self {
            sim,
            model,
            stepper: Stepper::new(seed),
            broker: None,
            waiting: Vec::new(),
            ends: BTreeMap::new(),
            failed: BTreeSet::new(),
            rng: Rng::new(!seed),
            faulty: false,
            faults_to_come: false,
            full: false,
            limited: false,
        }
    }

    /// Starts the broker for the first time.
    pub fn start(&mut self) -> Verdict {
        match open_on(&self.sim, &self.stepper) {
            Ok(broker) => self.broker = Some(broker),
            Err(error) => ensure!(self.sim.crashed(), "the first opening failed: {error}"),
        }
        Ok(())
    }

    /// Does one thing, and checks what can be checked after it. Nothing more happens once the machine crashed by itself.
    pub fn act(&mut self, action: &Action) -> Verdict {
        match action {
            Action::Create { topic, config } => self.create(topic, config)?,
            Action::Delete { topic } => self.delete(topic)?,
            Action::Alter { topic, segment_bytes, linger_us } => self.alter(topic, *segment_bytes, *linger_us)?,
            Action::Append { topic, sizes } => self.append(topic, sizes)?,
            Action::AppendAndWait { topic, sizes } => self.append_and_wait(topic, sizes)?,
            Action::Step(count) => {
                for _ in 0..*count {
                    if !self.stepper.step() {
                        break;
                    }
                    self.look()?;
                }
            }
            Action::Settle => {
                self.stepper.settle(REST);
                self.look()?;
                let stuck = self.waiting.first().map(|waiting| waiting.offsets.clone());
                ensure!(stuck.is_none(), "nothing is left to do, and nobody answered the append of {stuck:?}");
            }
            Action::Pass(time) => self.stepper.pass(*time),
            Action::Sync { topic } => self.sync(topic)?,
            Action::Read { topic, from, appended } => self.read(topic, *from, *appended)?,
            Action::Roll { topic } => self.roll(topic)?,
            Action::Retain => self.retain()?,
            Action::TruncateBefore { topic, at } => self.truncate_before(topic, *at)?,
            Action::TruncateAfter { topic, at } => self.truncate_after(topic, *at)?,
            Action::Seal { topic } => self.seal(topic)?,
            Action::Unseal { topic } => self.unseal(topic)?,
            Action::Move { from, to } => self.move_to(from, to)?,
            Action::Reopen => self.reopen()?,
            Action::Crash(crash) => self.crash_and_recover(*crash)?,
            Action::Fault(fault) => {
                (self.faulty, self.faults_to_come) = (true, true);
                self.sim.fail(fault.clone());
            }
            Action::ClearFaults => self.clear_faults(),
            Action::Capacity(pages) => {
                self.limited = pages.is_some();
                self.full |= self.limited;
                // What is there has its room.
                self.sim.set_capacity(pages.map(|more| self.sim.used() + more));
            }
            Action::WallClock(ns) => self.stepper.set_wall_clock(*ns),
        }
        self.look()
    }

    fn partition(&self, topic: &str, partition: u32) -> Option<Partition> {
        self.broker.as_ref()?.topic(topic).ok()?.partition(partition).ok()
    }

    /// A failure is excused by faults, a crash, or a full disk, of which it then must speak.
    fn excuse(&self, what: &str, error: &Error) -> Verdict {
        let full = self.full && error.is_disk_full();
        ensure!(self.sim.crashed() || self.faulty || full, "{what}: {error}");
        Ok(())
    }

    // ---------------------------------------------------------------- actions

    fn create(&mut self, topic: &str, config: &TopicConfig) -> Verdict {
        let Some(broker) = self.broker.clone() else { return Ok(()) };
        if broker.topics().iter().any(|name| name == topic) {
            let refused = broker.create_topic(topic, config.clone());
            ensure!(matches!(refused, Err(Error::TopicExists { .. })), "a topic was made twice: {refused:?}");
            return Ok(());
        }
        let before = self.model.topics.insert(topic.to_owned(), TopicModel::new(config));
        match broker.create_topic(topic, config.clone()) {
            Ok(_) => {
                self.model.topics.get_mut(topic).expect("put there above").presence = Presence::There;
                self.ends.retain(|(name, _), _| name != topic);
                self.failed.retain(|dir| !dir.starts_with(Path::new(DATA).join(topic)));
            }
            Err(Error::TopicExists { .. }) if before.as_ref().is_some_and(|before| before.presence == Presence::Unknown) => {
                self.model.topics.insert(topic.to_owned(), before.expect("it was there"));
            }
            Err(error) => self.excuse("a topic could not be made", &error)?,
        }
        Ok(())
    }

    fn delete(&mut self, topic: &str) -> Verdict {
        let Some(broker) = self.broker.clone() else { return Ok(()) };
        if !broker.topics().iter().any(|name| name == topic) {
            return Ok(());
        }
        // What was promised before holds if it comes back.
        self.look()?;
        let model = self.model.topics.get_mut(topic).expect("the broker has no topic that nobody made");
        model.presence = Presence::Unknown;
        let result = broker.delete_topic(topic);
        self.look()?;
        match result {
            Ok(()) => self.model.topics.get_mut(topic).expect("there above").presence = Presence::Gone,
            Err(error) => self.excuse("a topic could not be deleted", &error)?,
        }
        self.ends.retain(|(name, _), _| name != topic);
        Ok(())
    }

    fn alter(&mut self, topic: &str, segment_bytes: u64, linger_us: u64) -> Verdict {
        let Some(broker) = self.broker.clone() else { return Ok(()) };
        let Ok(handle) = broker.topic(topic) else { return Ok(()) };
        let before = handle.config();
        let new = TopicConfig { segment_bytes, linger_us, ..before.clone() };
        self.model.topics.get_mut(topic).expect("the broker has no topic that nobody made").unanswered.push(new.clone());
        let result = broker.alter_topic(topic, |config| *config = new.clone());
        self.look()?;
        match result {
            Ok(told) => {
                ensure!(told == new && handle.config() == new, "{topic} was altered to {told:?}");
                let model = self.model.topics.get_mut(topic).expect("there above");
                (model.config, model.unanswered) = (new, Vec::new());
                Ok(())
            }
            Err(error) => {
                ensure!(handle.config() == before, "{topic} was not altered, and is {:?}", handle.config());
                self.excuse("a topic could not be altered", &error)
            }
        }
    }

    /// The settings of a topic that was found are those that it had, or was to get. No crash may take them any more.
    fn check_settings(&mut self, name: &str) -> Verdict {
        let Some(topic) = self.broker.as_ref().and_then(|broker| broker.topic(name).ok()) else { return Ok(()) };
        let report = self.broker.as_ref().expect("it has the topic").report();
        let unsound = report.unsound_settings.iter().find(|unsound| unsound.path.starts_with(Path::new(DATA).join(name)));
        if let Some(unsound) = unsound {
            // They could not be read just now.
            ensure!(self.faulty, "the settings of {name} are lost: {unsound:?}");
            return Ok(());
        }
        let (found, model) = (topic.config(), self.model.topics.get_mut(name).expect("checked by the caller"));
        let known = found == model.config || model.unanswered.contains(&found);
        ensure!(known, "{name} has the settings {found:?}, had {:?}, and was to get {:?}", model.config, model.unanswered);
        (model.config, model.unanswered) = (found, Vec::new());
        Ok(())
    }

    /// Enters records in the model as submitted, and chooses where they go.
    fn submit(&mut self, topic: &str, sizes: &[(usize, usize)]) -> Option<(Partition, u32, Vec<Sent>, Range<u64>)> {
        let partitions = self.broker.as_ref()?.num_partitions(topic).ok()?;
        let number = self.rng.below(u64::from(partitions)) as u32;
        let partition = self.partition(topic, number)?;
        let mut records = Vec::new();
        for &(key, value) in sizes {
            self.model.sent += 1;
            records.push(Sent { number: self.model.sent, key, value });
        }
        let log = self.model.log(topic, number);
        let first = log.records.len() as u64;
        log.records.extend(&records);
        Some((partition, number, records, first..first + sizes.len() as u64))
    }

    fn append(&mut self, topic: &str, sizes: &[(usize, usize)]) -> Verdict {
        let Some((partition, number, records, offsets)) = self.submit(topic, sizes) else { return Ok(()) };
        match partition.append(batch_of(&records)) {
            Ok(ticket) => {
                // While it waited for room in the queue, others may have been refused.
                self.waiting.push(Waiting { ticket, topic: topic.to_owned(), partition: number, offsets });
                Ok(())
            }
            Err(error) if self.is_refused(topic, number, &error) => {
                self.take_back(topic, number, offsets);
                Ok(())
            }
            Err(error) => self.excuse("an append was not queued", &error),
        }
    }

    fn append_and_wait(&mut self, topic: &str, sizes: &[(usize, usize)]) -> Verdict {
        let Some((partition, number, records, offsets)) = self.submit(topic, sizes) else { return Ok(()) };
        let failed_before = self.failed_in(topic, number);
        let answer = partition.append_and_wait(batch_of(&records));
        // Those queued before are answered before.
        let shift = self.refused_before(topic, number, &offsets)?;
        let offsets = offsets.start - shift..offsets.end - shift;
        ensure!(!(answer.is_ok() && failed_before), "an append was acknowledged after a sync that failed");
        self.answered(topic, number, &offsets, answer)
    }

    /// How many records were refused since one that was not queued was submitted, that came before it.
    fn refused_before(&mut self, topic: &str, number: u32, offsets: &Range<u64>) -> Verdict<u64> {
        let records = self.model.log(topic, number).records.len() as u64;
        self.look()?;
        ensure!(offsets.end == records, "an append that waited was overtaken");
        Ok(records - self.model.log(topic, number).records.len() as u64)
    }

    fn sync(&mut self, topic: &str) -> Verdict {
        let Some(partition) = self.partition(topic, 0) else { return Ok(()) };
        let failed_before = self.failed_in(topic, 0);
        let result = partition.sync();
        self.look()?;
        match result {
            Ok(()) => {
                ensure!(!failed_before, "a sync succeeded after one that failed");
                let log = self.model.log(topic, 0);
                log.promise(log.records.len() as u64);
                Ok(())
            }
            Err(error) if self.is_refused(topic, 0, &error) => Ok(()),
            Err(error) => self.excuse("a sync failed", &error),
        }
    }

    /// Any partition of the topic.
    fn some_partition(&mut self, topic: &str) -> Option<(Partition, u32)> {
        let partitions = self.broker.as_ref()?.num_partitions(topic).ok()?;
        let number = self.rng.below(u64::from(partitions)) as u32;
        Some((self.partition(topic, number)?, number))
    }

    fn roll(&mut self, topic: &str) -> Verdict {
        let Some((partition, number)) = self.some_partition(topic) else { return Ok(()) };
        let rolls = partition.stats().rolls;
        match partition.roll() {
            Ok(()) => {
                ensure!(partition.stats().rolls <= rolls + 1 + self.waiting.len() as u64 * 8, "it rolled again and again");
                Ok(())
            }
            Err(error) if self.is_refused(topic, number, &error) => Ok(()),
            Err(error) => self.excuse("a roll failed", &error),
        }
    }

    fn retain(&mut self) -> Verdict {
        let Some(broker) = self.broker.clone() else { return Ok(()) };
        self.look()?;
        let mut before = BTreeMap::new();
        for topic in broker.topics() {
            for number in 0..broker.num_partitions(&topic).unwrap_or(0) {
                let began = self.partition(&topic, number).map(|partition| partition.first_offset());
                let log = self.model.log(&topic, number);
                before.insert((topic.clone(), number), (began, log.first));
                log.first.1 = log.records.len() as u64;
            }
        }
        let report = broker.enforce_retention().map_err(|error| format!("retention was refused: {error}"))?;
        self.look()?;
        for error in &report.failed {
            self.excuse("retention failed", error)?;
        }
        if self.sim.crashed() || !report.failed.is_empty() {
            return Ok(());
        }
        for topic in broker.topics() {
            for number in 0..broker.num_partitions(&topic).unwrap_or(0) {
                let Some(partition) = self.partition(&topic, number) else { continue };
                let first = partition.first_offset();
                let removed = report.removed.iter().find(|removed| removed.topic == topic && removed.partition == number);
                ensure!(removed.is_none_or(|removed| removed.records.end == first), "{removed:?} is told, and {first} is the first");
                let (began, might_begin) = before[&(topic.clone(), number)];
                ensure!(removed.is_some() || began == Some(first), "{topic}/{number}: what went up to {first} is not told");
                // What a truncation before removed and could not make durable may come back all the same.
                self.model.log(&topic, number).first = if removed.is_some() { (first, first) } else { might_begin };
            }
        }
        Ok(())
    }

    fn seal(&mut self, topic: &str) -> Verdict {
        let Some((partition, number)) = self.some_partition(topic) else { return Ok(()) };
        let log = self.model.log(topic, number);
        if log.sealed == Presence::Gone {
            log.sealed = Presence::Unknown;
        }
        let sealed = partition.seal();
        self.look()?;
        let log = self.model.log(topic, number);
        match sealed {
            Ok(records) => {
                ensure!(records == (partition.first_offset()..log.records.len() as u64), "{records:?} are sealed");
                log.sealed = Presence::There;
                log.promise(records.end);
                Ok(())
            }
            Err(error) => self.excuse("a partition could not be sealed", &error),
        }
    }

    /// Takes effect when it is opened again.
    fn unseal(&mut self, topic: &str) -> Verdict {
        let Some((partition, number)) = self.some_partition(topic) else { return Ok(()) };
        let before = std::mem::replace(&mut self.model.log(topic, number).sealed, Presence::Unknown);
        match partition.unseal() {
            // It is what it is until then.
            Ok(()) if !partition.is_sealed() => {
                self.model.log(topic, number).sealed = before;
                Ok(())
            }
            Ok(()) => Ok(()),
            Err(error) => self.excuse("a partition could not be unsealed", &error),
        }
    }

    /// Whether an append that was refused had to be.
    fn is_refused(&self, topic: &str, number: u32, error: &Error) -> bool {
        error.is_moved() && self.model.topics[topic].logs[number as usize].sealed != Presence::Gone
    }

    fn move_to(&mut self, from: &str, to: &str) -> Verdict {
        let Some(broker) = self.broker.clone() else { return Ok(()) };
        self.stepper.settle(REST);
        self.look()?;
        let Some((partition, number)) = self.some_partition(from) else { return Ok(()) };
        if let Err(error) = partition.roll()
            && !self.is_refused(from, number, &error)
        {
            self.excuse("a roll failed", &error)?;
        }
        let config = self.model.topics[from].config.clone();
        if !broker.topics().iter().any(|name| name == to) {
            self.create(to, &config)?;
        }
        self.model.begun_exports += 1;
        let place = PathBuf::from(format!("/made/export-{}", self.model.begun_exports));
        let exported = match partition.export(&place) {
            Ok(exported) => exported,
            Err(error) => return self.excuse("an export failed", &error),
        };
        self.model.exports.push((place.clone(), self.sim.files(&place)));
        let Some((there, place_number)) = self.some_partition(to) else { return Ok(()) };
        let records = self.model.log(from, number).records[..exported.records.end as usize].to_vec();
        let was_empty = there.next_offset() == 0 && self.model.log(to, place_number).records.is_empty();
        if was_empty {
            let log = self.model.log(to, place_number);
            (log.records, log.all_or_nothing) = (records.clone(), Some(exported.records.end));
            log.first.1 = exported.records.start;
        }
        let imported = broker.import_partition(to, place_number, &place);
        self.ends.remove(&(to.to_owned(), place_number));
        match imported {
            Ok(report) => {
                ensure!(was_empty, "a partition with records was replaced");
                ensure!((report.first_offset..report.next_offset) == exported.records, "{report:?} is {exported:?}");
                let log = self.model.log(to, place_number);
                (log.all_or_nothing, log.sealed) = (None, Presence::Gone);
                log.first = (exported.records.start, exported.records.start);
                log.promise(exported.records.end);
                Ok(())
            }
            Err(Error::PartitionNotEmpty { .. }) if !was_empty => Ok(()),
            // There was nothing to be exported.
            Err(Error::Io { .. }) if exported.segments == 0 => {
                self.undo_import(to, place_number, was_empty);
                Ok(())
            }
            Err(error) => {
                // Where it is closed, it is not known which of the two is there.
                let goes_on = self.partition(to, place_number).is_some_and(|partition| partition.reader().is_ok());
                if !self.sim.crashed() && goes_on {
                    self.undo_import(to, place_number, was_empty);
                }
                self.excuse("an import failed", &error)
            }
        }
    }

    fn undo_import(&mut self, topic: &str, number: u32, was_empty: bool) {
        if was_empty {
            let log = self.model.log(topic, number);
            (log.all_or_nothing, log.first) = (None, (0, 0));
            log.records.clear();
        }
    }

    /// An offset so far into the log.
    fn offset_in(partition: &Partition, per_mille: u64) -> u64 {
        let first = partition.first_offset();
        first + (partition.next_offset() - first) * per_mille / 1000
    }

    fn truncate_before(&mut self, topic: &str, at: u64) -> Verdict {
        self.stepper.settle(REST);
        self.look()?;
        let Some((partition, number)) = self.some_partition(topic) else { return Ok(()) };
        let offset = Self::offset_in(&partition, at);
        let log = self.model.log(topic, number);
        log.first.1 = log.first.1.max(offset);
        let result = partition.truncate_before(offset);
        self.look()?;
        match result {
            Ok(removed) => {
                let log = self.model.log(topic, number);
                ensure!(removed.records.end == offset && partition.first_offset() == offset, "{removed:?} for {offset}");
                // Nothing before it is given out.
                log.first = (offset, offset);
                log.promise(offset);
                Ok(())
            }
            Err(error) if self.is_refused(topic, number, &error) => Ok(()),
            Err(error) => self.excuse("records could not be removed", &error),
        }
    }

    fn truncate_after(&mut self, topic: &str, at: u64) -> Verdict {
        // What is queued before is written before; here its answers come before, too.
        self.stepper.settle(REST);
        self.look()?;
        let Some((partition, number)) = self.some_partition(topic) else { return Ok(()) };
        let offset = Self::offset_in(&partition, at);
        let (dir, log) = (partition_dir(topic, number), self.model.log(topic, number));
        let promised = (log.kept_end, log.durable_end);
        log.may_be_cut(offset);
        self.ends.remove(&(topic.to_owned(), number));
        let result = partition.truncate_after(offset);
        let crashed = self.sim.crashed();
        self.notice_failures();
        let log = self.model.log(topic, number);
        match result {
            Ok(()) => {
                let ends = (partition.durable_end(), partition.next_offset());
                if log.records.len() as u64 == offset {
                    // Nothing was there to be cut.
                    (log.kept_end, log.durable_end) = promised;
                    return Ok(());
                }
                ensure!(ends == (offset, offset), "cut at {offset}, it ends at {ends:?}");
                ensure!(!self.failed.contains(&dir), "it was cut after a sync that failed");
                log.records.truncate(offset as usize);
                log.promise(offset);
                Ok(())
            }
            Err(error) => {
                if !error.is_failed() && !crashed {
                    // It was refused.
                    (log.kept_end, log.durable_end) = promised;
                }
                if self.is_refused(topic, number, &error) { Ok(()) } else { self.excuse("a log could not be cut", &error) }
            }
        }
    }

    fn read(&mut self, topic: &str, from: u64, appended: bool) -> Verdict {
        let Some(partitions) = self.broker.as_ref().and_then(|broker| broker.num_partitions(topic).ok()) else { return Ok(()) };
        for number in 0..partitions {
            let Some(partition) = self.partition(topic, number) else { continue };
            let up_to = if appended { Visibility::Appended } else { Visibility::Durable };
            let first = partition.first_offset();
            let start = first + partition.durable_end().saturating_sub(first) * from / 1000;
            match self.read_to_end(&partition, topic, number, start, up_to) {
                Ok(end) if appended => self.model.log(topic, number).kept_end = self.model.log(topic, number).kept_end.max(end),
                Ok(end) => self.model.log(topic, number).promise(end),
                Err(Unread::Wrong(what)) => return Err(what),
                Err(Unread::Failed(error)) => self.excuse("a read failed", &error)?,
            }
        }
        Ok(())
    }

    /// Any way to read that finds out damage.
    fn some_way(&mut self, visibility: Visibility) -> ReaderConfig {
        ReaderConfig {
            visibility,
            mode: self.rng.one_of(&[ReadMode::Buffered, ReadMode::Direct]),
            piece_bytes: self.rng.one_of(&[1, 16 << 10]),
            read_ahead: self.rng.one_of(&[0, 2]),
            ..ReaderConfig::default()
        }
    }

    /// Reads and compares; gives the offset behind the last record.
    fn read_to_end(&mut self, partition: &Partition, topic: &str, number: u32, from: u64, up_to: Visibility) -> Result<u64, Unread> {
        let max_bytes = self.rng.one_of(&[1, 300, 20_000]);
        let mut reader = partition.reader_with(self.some_way(up_to)).map_err(Unread::Failed)?;
        let log = self.model.log(topic, number);
        let (mut at, mut timestamp) = (from, 0);
        loop {
            let records = reader.read(at, max_bytes).map_err(Unread::Failed)?;
            if records.is_empty() {
                return Ok(at);
            }
            for record in &records {
                check_record(log, at, record.offset, record.key, record.value).map_err(Unread::Wrong)?;
                if record.timestamp < timestamp {
                    return Err(Unread::Wrong(format!("the timestamp goes back at {at}")));
                }
                timestamp = record.timestamp;
                at += 1;
            }
        }
    }

    fn reopen(&mut self) -> Verdict {
        let Some(broker) = self.broker.take() else { return Ok(()) };
        let result = broker.close();
        self.look()?;
        ensure!(self.waiting.is_empty(), "a closed broker left {} appends without an answer", self.waiting.len());
        match result {
            Ok(()) if !self.sim.crashed() => {
                for topic in self.model.topics.values_mut().filter(|topic| topic.presence == Presence::There) {
                    topic.logs.iter_mut().for_each(|log| log.promise(log.records.len() as u64));
                }
                if !self.faulty {
                    self.check_closed()?;
                }
            }
            Ok(()) => {}
            // A partition that stopped tells why, also because it was full when a sync was to be made.
            Err(error) => self.excuse("closing failed", &error)?,
        }
        if self.sim.crashed() {
            return Ok(());
        }
        self.forgo();
        self.begin_life();
        self.recover(Crash::Process, false)
    }

    // ---------------------------------------------------------------- what holds at every moment

    /// Takes the answers that came, and checks that the watermarks are in order.
    pub fn look(&mut self) -> Verdict {
        self.take_answers()?;
        self.notice_failures();
        if self.sim.crashed() {
            return Ok(());
        }
        let Some(broker) = &self.broker else { return Ok(()) };
        for name in broker.topics() {
            for number in 0..broker.num_partitions(&name).map_err(|error| error.to_string())? {
                let Some(partition) = self.partition(&name, number) else { continue };
                let (durable, next) = (partition.durable_end(), partition.next_offset());
                let log = self.model.log(&name, number);
                let submitted = log.records.len() as u64;
                ensure!(durable <= next && next <= submitted, "{name}/{number}: durable {durable}, appended {next}, submitted {submitted}");
                let first = partition.first_offset();
                ensure!(
                    (log.first.0..=log.first.1).contains(&first) && first <= next,
                    "{name}/{number}: {first} is first, not {:?}",
                    log.first
                );
                log.promise(durable);
                let before = self.ends.insert((name.clone(), number), (durable, next)).unwrap_or_default();
                ensure!(before.0 <= durable && before.1 <= next, "{name}/{number}: a watermark went back from {before:?}");
            }
        }
        Ok(())
    }

    fn take_answers(&mut self) -> Verdict {
        let mut at = 0;
        while at < self.waiting.len() {
            let Waiting { ticket, topic, partition, offsets } = self.waiting.remove(at);
            match ticket.try_wait() {
                Err(ticket) => {
                    self.waiting.insert(at, Waiting { ticket, topic, partition, offsets });
                    at += 1;
                }
                Ok(answer) => {
                    ensure!(
                        !(answer.is_ok() && self.failed_in(&topic, partition)),
                        "{offsets:?} were acknowledged after a sync or a write that failed"
                    );
                    self.answered(&topic, partition, &offsets, answer)?;
                }
            }
        }
        Ok(())
    }

    fn answered(&mut self, topic: &str, partition: u32, offsets: &Range<u64>, answer: Result<Range<u64>, Error>) -> Verdict {
        match answer {
            Ok(got) => {
                ensure!(got == *offsets, "{topic}/{partition}: offsets {got:?} were given to the records {offsets:?}");
                self.model.log(topic, partition).acknowledge(offsets.end);
                if self.model.log(topic, partition).durability == sapwood::Durability::Durable {
                    self.check_on_device(topic, partition, offsets)?;
                }
            }
            // Nothing but what it says was written; the offsets of the rest go to whoever comes next.
            Err(Error::DiskFull { appended, .. }) if !self.sim.crashed() => {
                ensure!(self.full || self.faulty, "the disk is not full");
                self.take_back(topic, partition, offsets.start + appended..offsets.end);
            }
            Err(error) if self.is_refused(topic, partition, &error) && !self.sim.crashed() => {
                self.take_back(topic, partition, offsets.clone())
            }
            Err(error) => {
                self.excuse("an append failed", &error)?;
                let stopped = error.is_failed() || error.is_closed();
                if !stopped && !self.sim.crashed() {
                    self.take_back(topic, partition, offsets.clone());
                }
            }
        }
        Ok(())
    }

    /// These records will not be in the log.
    fn take_back(&mut self, topic: &str, partition: u32, offsets: Range<u64>) {
        let count = offsets.end - offsets.start;
        self.model.log(topic, partition).records.drain(offsets.start as usize..offsets.end as usize);
        for waiting in &mut self.waiting {
            if waiting.topic == topic && waiting.partition == partition && waiting.offsets.start >= offsets.end {
                waiting.offsets = waiting.offsets.start - count..waiting.offsets.end - count;
            }
        }
    }

    /// Acknowledged records must be in what a power loss surely leaves, now.
    fn check_on_device(&self, topic: &str, partition: u32, offsets: &Range<u64>) -> Verdict {
        let dir = partition_dir(topic, partition);
        if self.sim.crashed() || !self.sim.exists(&dir) {
            return Ok(());
        }
        let files = self.sim.files(&dir);
        let bases = files.iter().filter_map(|(name, _)| name.to_str()?.strip_suffix(".log")?.parse::<u64>().ok());
        let last = offsets.end - 1;
        if last < self.model.topics[topic].logs[partition as usize].first.1 {
            // It may have been removed before anybody looked.
            return Ok(());
        }
        let base = bases.filter(|base| *base <= last).max();
        let durable = base.and_then(|base| self.sim.durable_file(&dir.join(format!("{base:020}.log"))));
        let Some((base, bytes)) = base.zip(durable) else {
            return Err(format!("{topic}/{partition}: the segment of the acknowledged record {last} has no durable name"));
        };
        let (mut at, mut offset) = (0, base);
        while at + HEADER <= bytes.len() && u64_at(&bytes, at) == offset && offset < last {
            at += HEADER + u32_at(&bytes, at + 8);
            offset += 1;
        }
        let sent = self.model.topics[topic].logs[partition as usize].records[last as usize];
        let whole = [sent.key(), sent.value()].concat();
        let there = offset == last && bytes.get(at + HEADER..at + HEADER + whole.len()) == Some(&whole[..]) && u64_at(&bytes, at) == last;
        ensure!(there, "{topic}/{partition}: the record {last} was acknowledged and is not on the device");
        Ok(())
    }

    /// Takes note of syncs of logs that failed: nothing may be acknowledged there any more.
    fn notice_failures(&mut self) {
        for op in self.sim.ops() {
            let is_log = op.path.extension().is_some_and(|extension| extension == "log") && !op.path.ends_with("prepared.log");
            if !op.ok && is_log && op.kind == OpKind::Sync {
                let dir = op.path.parent().expect("a log lies in a directory");
                self.failed.insert(dir.to_owned());
            }
        }
        self.sim.clear_ops();
    }

    fn failed_in(&self, topic: &str, partition: u32) -> bool {
        self.failed.contains(&partition_dir(topic, partition))
    }

    /// A log that was closed cleanly ends with its last record, and so do its indexes.
    fn check_closed(&self) -> Verdict {
        for (name, topic) in self.model.topics.iter().filter(|(_, topic)| topic.presence == Presence::There) {
            for number in 0..topic.config.partitions {
                let report = self.judge(name, number)?;
                for segment in &report.segments {
                    ensure!(segment.log_len == segment.valid_end, "{name}/{number}: a closed log has room behind its records: {segment:?}");
                }
            }
        }
        Ok(())
    }

    /// The oracle's word on a partition.
    fn judge(&self, topic: &str, partition: u32) -> Verdict<Report> {
        let dir = partition_dir(topic, partition);
        let report = oracle::check_files(&sim::files_in(&self.sim, &dir));
        // On a full disk an index waits in memory.
        let excused = |code: &str| self.full && code == "EMPTY_INDEX";
        let wrong: Vec<_> = report.wrong().into_iter().filter(|finding| !excused(finding.code)).collect();
        ensure!(wrong.is_empty(), "{topic}/{partition}: {wrong:?}");
        Ok(report)
    }

    // ---------------------------------------------------------------- crashes

    /// Takes the machine down, in that way, with everything that runs on it. All who wait are answered.
    pub fn go_down(&mut self, crash: Crash) -> Verdict {
        self.look()?;
        match crash {
            Crash::Process => self.sim.crash_process(),
            Crash::Power | Crash::TornPower => {
                self.sim.tear_pages(crash == Crash::TornPower);
                self.sim.power_loss();
            }
            Crash::StrictPower => self.sim.power_loss_keeping_nothing(),
        }
        self.drop_broker()
    }

    /// Ends what runs on a machine that crashed. What is acknowledged by now was done before.
    pub fn drop_broker(&mut self) -> Verdict {
        self.broker = None;
        self.forgo();
        self.stepper.settle(REST);
        let excused = std::mem::replace(&mut self.faulty, true);
        for Waiting { ticket, .. } in std::mem::take(&mut self.waiting) {
            ensure!(
                ticket.try_wait().is_ok_and(|answer| answer.is_err()),
                "an append to a machine that is down got no answer, or a good one"
            );
        }
        self.faulty = excused;
        self.begin_life();
        Ok(())
    }

    /// What a sync that failed did not put on the device may be nowhere: the kernel takes it for written.
    fn forgo(&mut self) {
        for (name, topic) in &mut self.model.topics {
            for (number, log) in topic.logs.iter_mut().enumerate() {
                if self.failed.contains(&partition_dir(name, number as u32)) {
                    log.kept_end = log.durable_end;
                }
            }
        }
    }

    fn begin_life(&mut self) {
        self.stepper = Stepper::new(self.rng.next());
        self.ends.clear();
        self.failed.clear();
        (self.faulty, self.full) = (self.faults_to_come, self.limited);
    }

    fn clear_faults(&mut self) {
        self.faults_to_come = false;
        self.sim.clear_faults();
    }

    fn crash_and_recover(&mut self, crash: Crash) -> Verdict {
        self.go_down(crash)?;
        let mut worst = crash;
        // The opening after it may not get to its end either.
        while self.rng.below(3) == 0 {
            self.sim.crash_at_op(1 + self.rng.below(12));
            self.open_and_crash()?;
            let next = self.rng.one_of(&Crash::ALL);
            self.go_down(next)?;
            worst = if worst == Crash::Process { next } else { worst };
        }
        let again = self.rng.below(4) == 0;
        self.recover(worst, again)
    }

    /// Opens, where a crash is to come.
    pub fn open_and_crash(&mut self) -> Verdict {
        match open_on(&self.sim, &self.stepper) {
            Ok(broker) => self.broker = Some(broker),
            Err(error) => {
                let excused = self.sim.crashed() || self.faulty || self.full;
                ensure!(excused && !error.is_damage(), "opening after a crash failed: {error}");
            }
        }
        Ok(())
    }

    /// Opens after a crash, and checks that everything promised is there, and nothing else. With `again`, also that opening once
    /// more changes nothing.
    pub fn recover(&mut self, crash: Crash, again: bool) -> Verdict {
        let broker = match open_on(&self.sim, &self.stepper) {
            Ok(broker) => broker,
            Err(_) if self.sim.crashed() => return Ok(()),
            Err(error) => {
                // With faults to come, or no room to set something aside. Without, it must do.
                ensure!(self.full || !error.is_damage(), "opening after a crash found damage: {error}");
                // A sync that failed in the opening itself took what only the kernel had.
                self.notice_failures();
                self.forgo();
                self.clear_faults();
                self.sim.set_capacity(None);
                self.limited = false;
                self.begin_life();
                open_on(&self.sim, &self.stepper).map_err(|error| format!("opening after a crash failed: {error}"))?
            }
        };
        let names = broker.topics();
        self.broker = Some(broker);
        // What failed while it opened failed no append.
        self.sim.clear_ops();
        for (name, topic) in &mut self.model.topics {
            let there = names.contains(name);
            let right = match topic.presence {
                Presence::There => there,
                Presence::Gone => !there,
                Presence::Unknown => true,
            };
            ensure!(right, "the topic {name} was {:?}, and after the crash it is {there} that it is there", topic.presence);
            topic.presence = if there { Presence::There } else { Presence::Gone };
        }
        for name in names {
            let topic = self.model.topics.get(&name).ok_or_else(|| format!("nobody made the topic {name}"))?;
            let partitions = self.broker.as_ref().expect("opened above").num_partitions(&name).unwrap_or_default();
            ensure!(partitions == topic.config.partitions, "the topic {name} has {partitions} partitions");
            self.check_settings(&name)?;
            for number in 0..partitions {
                self.check_recovered(&name, number, crash)?;
            }
        }
        self.check_exports()?;
        if again && !self.faulty && !self.full {
            self.check_second_opening()?;
        }
        self.look()
    }

    /// Exports are what they were, but that an index that was not complete then may be by now.
    fn check_exports(&self) -> Verdict {
        for (place, files) in &self.model.exports {
            let now = self.sim.files(place);
            ensure!(now.len() == files.len(), "{} holds other files", place.display());
            for ((name, then), (_, now)) in files.iter().zip(&now) {
                let path = place.join(name);
                let is_index = path.extension().is_some_and(|extension| extension == "index" || extension == "timeindex");
                let right =
                    if is_index { now.as_ref().zip(then.as_ref()).is_some_and(|(now, then)| now.starts_with(then)) } else { now == then };
                ensure!(right, "the exported {} changed", path.display());
            }
            let report = oracle::check_files(&sim::files_in(&self.sim, place));
            // One that could not be written, or made, need not come along.
            let excused = |code: &str| code == "EMPTY_INDEX" || code == "MISSING_INDEX";
            let wrong: Vec<_> = report.wrong().into_iter().filter(|finding| !excused(finding.code)).collect();
            ensure!(wrong.is_empty(), "{}: {wrong:?}", place.display());
        }
        Ok(())
    }

    /// Life after a crash: what was found then, and what is appended behind it, a second and harder crash must not take.
    pub fn go_on(&mut self) -> Verdict {
        for topic in self.broker.as_ref().map(Broker::topics).unwrap_or_default() {
            for sizes in [[(3, 40)], [(3, 90)]] {
                self.append_and_wait(&topic, &sizes)?;
            }
        }
        self.go_down(Crash::StrictPower)?;
        self.recover(Crash::StrictPower, false)
    }

    fn check_recovered(&mut self, topic: &str, number: u32, crash: Crash) -> Verdict {
        let partition = self.partition(topic, number).ok_or("a partition is not there")?;
        let next = partition.next_offset();
        let log = self.model.log(topic, number);
        let (floor, submitted) = (log.floor(crash), log.records.len() as u64);
        ensure!(next >= floor, "{topic}/{number}: {floor} records were promised, {next} are there after a {crash:?} crash");
        ensure!(next <= submitted, "{topic}/{number}: {next} records are there, {submitted} were submitted");
        ensure!(partition.durable_end() == next, "{topic}/{number}: not all of it is durable");
        let first = partition.first_offset();
        ensure!((log.first.0..=log.first.1).contains(&first), "{topic}/{number}: after the crash {first} is first, not {:?}", log.first);
        log.first = (first, first);
        let whole = log.all_or_nothing.take();
        ensure!(whole.is_none_or(|whole| next == 0 || next == whole), "{topic}/{number}: {next} of {whole:?} records were taken in");
        let right = match log.sealed {
            Presence::There => partition.is_sealed(),
            Presence::Gone => !partition.is_sealed(),
            Presence::Unknown => true,
        };
        ensure!(right, "{topic}/{number}: that it moved was {:?}, and after the crash it is {}", log.sealed, partition.is_sealed());
        log.sealed = if partition.is_sealed() { Presence::There } else { Presence::Gone };
        let (mut checked, faulty) = (first, self.faulty);
        while checked < next && !faulty {
            checked = self.read_to_end(&partition, topic, number, checked, Visibility::Durable).map_err(|unread| match unread {
                Unread::Wrong(what) => what,
                Unread::Failed(error) => format!("{topic}/{number}: reading after a crash: {error}"),
            })?;
            ensure!(checked == next, "{topic}/{number}: reading ended at {checked} of {next}");
        }
        // What is served now no crash may take.
        let log = self.model.log(topic, number);
        log.records.truncate(next as usize);
        (log.kept_end, log.durable_end) = (next, next);
        if faulty {
            // Not all that should be written could be.
            return Ok(());
        }
        let report = self.judge(topic, number)?;
        let held = report.first_offset..report.first_offset + report.readable;
        ensure!(report.next_offset == next && held.end == next && held.start <= first, "{topic}/{number}: the files hold {held:?}");
        // So says the engine's own look from outside, which also knows the checkpoint and the sums of sealed segments.
        let verified = Inspector::on(Arc::new(self.sim.clone())).patience(Duration::ZERO).verify(partition_dir(topic, number));
        let verified = verified.map_err(|error| format!("{topic}/{number}: verifying: {error}"))?;
        let clean = verified.worst().is_none_or(|worst| worst <= Severity::Info);
        ensure!(self.full || clean, "{topic}/{number}: {:?}", verified.findings);
        self.check_look_ups(&partition, topic, number, first..next)
    }

    /// Look-ups agree with the scan: of offsets in either way, and of a time.
    fn check_look_ups(&mut self, partition: &Partition, topic: &str, number: u32, held: Range<u64>) -> Verdict {
        let way = self.some_way(Visibility::Durable);
        let failed = |error: Error| format!("{topic}/{number}: looking up with {way:?}: {error}");
        let mut reader = partition.reader_with(way.clone()).map_err(failed)?;
        for _ in 0..(held.end - held.start).min(3) {
            let offset = held.start + self.rng.below(held.end - held.start);
            let record = partition.read_one(offset).map_err(failed)?;
            check_record(self.model.log(topic, number), offset, record.offset, &record.key, &record.value)?;
            let time = record.timestamp;
            let record = reader.read_one(offset).map_err(failed)?;
            check_record(self.model.log(topic, number), offset, record.offset, record.key, record.value)?;
            let first = reader.offset_for_time(time).map_err(failed)?;
            let before = first
                .checked_sub(1)
                .filter(|before| held.contains(before))
                .map(|before| partition.read_one(before))
                .transpose()
                .map_err(failed)?;
            ensure!(
                first <= offset && before.is_none_or(|before| before.timestamp < time),
                "{topic}/{number}: the time of {offset} leads to {first}"
            );
        }
        Ok(())
    }

    /// On a copy of the machine, whose process dies at once.
    fn check_second_opening(&mut self) -> Verdict {
        let copy = self.sim.fork(self.rng.next());
        let before = everything(&copy);
        let stepper = Stepper::new(self.rng.next());
        let broker = open_on(&copy, &stepper).map_err(|error| format!("opening twice failed: {error}"))?;
        let after = everything(&copy);
        copy.crash_process();
        drop(broker);
        let differs = before.keys().chain(after.keys()).find(|path| before.get(*path) != after.get(*path));
        ensure!(differs.is_none(), "opening a second time changed {differs:?}");
        Ok(())
    }
}

/// Why there is nothing more to compare.
enum Unread {
    Wrong(String),
    Failed(Error),
}

fn check_record(log: &Log, expected: u64, offset: u64, key: &[u8], value: &[u8]) -> Verdict {
    ensure!(offset == expected, "record {offset} was given for {expected}");
    let sent = log.records.get(expected as usize).ok_or_else(|| format!("record {expected} was never submitted"))?;
    ensure!(key == sent.key() && value == sent.value(), "record {expected} is not what was submitted");
    Ok(())
}

/// Every file of the data directory.
fn everything(sim: &SimDisk) -> BTreeMap<PathBuf, Option<Vec<u8>>> {
    let mut all = BTreeMap::new();
    let mut left = vec![PathBuf::from(DATA)];
    while let Some(dir) = left.pop() {
        for (name, bytes) in sim.files(&dir) {
            let path = dir.join(name);
            if bytes.is_none() {
                left.push(path.clone());
            }
            all.insert(path, bytes);
        }
    }
    all
}
