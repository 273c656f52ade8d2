//! The order of a run: check, make room, measure the disk, load (with consumers beside it, or after it), read back, report, clean up.

use std::sync::atomic::AtomicBool;

use sapwood::{Broker, Error, Partition, Topic};

use crate::args::{ReadArg, RunArgs, writers_name};
use crate::check::Findings;
use crate::floor::{self, Floor};
use crate::host::Host;
use crate::interrupts::Interrupts;
use crate::load::{self, Load, Outcome};
use crate::plan::Plan;
use crate::progress::Progress;
use crate::read::{self, Figures, Reading};
use crate::report::{FloorShape, Latency, LoadShape, Loop, ReadShape, Report, VerificationShape};
use crate::units::{count, float};
use crate::verify::{self, Task, Verification};
use crate::workspace::Workspace;
use crate::{Stop, say};

/// Whether everything went well: no append failed, no record differed.
pub fn run(args: &RunArgs, interrupts: &Interrupts, progress: &Progress) -> Result<bool, Stop> {
    let plan = Plan::new(args)?;
    let workspace = Workspace::prepare(args.data_dir.as_deref())?;
    let run = Run { args, plan: &plan, workspace: &workspace, interrupts, progress };
    let report = workspace.check_free(&args.topic).and_then(|()| run.in_workspace());
    progress.clear();
    if !report.as_ref().is_ok_and(|report| report.kept.is_some()) {
        workspace.remove();
    }
    let report = report?;
    if let Some(path) = &args.json {
        std::fs::write(path, report.json()).map_err(|error| Stop::Failed(format!("could not write the figures to {path:?}: {error}")))?;
    }
    Ok(report.passed())
}

struct Run<'a> {
    args: &'a RunArgs,
    plan: &'a Plan,
    workspace: &'a Workspace,
    interrupts: &'a Interrupts,
    progress: &'a Progress,
}

/// The disk's own limit, or why it is not known.
type Measured = Result<Floor, std::io::Error>;

impl Run<'_> {
    fn in_workspace(&self) -> Result<Report, Stop> {
        let dir = self.workspace.dir();
        let broker = Broker::open(dir, self.plan.broker.clone()).map_err(|error| match error {
            Error::Locked { .. } => Stop::Usage(error.to_string()),
            error => Stop::Failed(format!("could not open {dir:?}: {error}")),
        })?;
        let report = self.with_broker(&broker);
        let closed = broker.close().map_err(Stop::failed("could not close the log"));
        let report = report?;
        closed.map(|()| report)
    }

    fn with_broker(&self, broker: &Broker) -> Result<Report, Stop> {
        let name = &self.args.topic;
        match broker.topic(name) {
            Err(Error::TopicNotFound { .. }) => {}
            Err(error @ Error::InvalidTopicName { .. }) => return Err(Stop::Usage(error.to_string())),
            Err(error) => return Err(Stop::failed("could not look the topic up")(error)),
            Ok(_) => return Err(Stop::Usage(Error::TopicExists { topic: name.clone() }.to_string())),
        }
        self.progress.step("measuring what this disk can do");
        let floor = floor::measure(self.workspace.dir(), self.plan.append_bytes, &|| self.interrupts.any());
        if self.interrupts.any() {
            return Err(Stop::Failed("interrupted before the load began".to_owned()));
        }
        let topic = broker.create_topic(name, self.plan.topic.clone()).map_err(|error| match error {
            Error::TopicExists { .. } | Error::InvalidTopicName { .. } => Stop::Usage(error.to_string()),
            error => Stop::Failed(format!("could not create the topic {name:?}: {error}")),
        })?;
        let report = self.with_topic(broker, &topic, &floor);
        drop(topic);
        self.progress.clear();
        if let Ok(report) = &report {
            say(&report.table());
        }
        if !report.as_ref().is_ok_and(|report| report.kept.is_some()) {
            broker.delete_topic(name).map_err(Stop::failed("could not delete the topic again"))?;
        }
        report
    }

    fn with_topic(&self, broker: &Broker, topic: &Topic, floor: &Measured) -> Result<Report, Stop> {
        let partitions: Vec<Partition> = (0..topic.num_partitions())
            .map(|number| topic.partition(number))
            .collect::<Result<_, _>>()
            .map_err(Stop::failed("could not use the topic"))?;
        let (outcome, figures) = self.load(topic, &partitions)?;
        let interrupted = self.interrupts.any();
        let verification = self.args.verify().then(|| {
            let task = Task {
                topic,
                partitions: &partitions,
                payload: &self.plan.payload,
                producers: self.plan.shape.producers,
                acks: &outcome.acks,
                acknowledged: outcome.acknowledged,
                unanswered: outcome.failure.is_some(),
                interrupts: self.interrupts,
            };
            verify::run(&task, self.progress)
        });
        let read = figures.map(|figures| self.read_shape(&figures));
        Ok(self.report(broker.backend(), &outcome, read, floor, verification, interrupted))
    }

    /// The load, and the consumers, beside it or after it. No consumers' figures of a load that was interrupted before they began.
    fn load(&self, topic: &Topic, partitions: &[Partition]) -> Result<(Outcome, Option<Figures>), Stop> {
        let Plan { payload, shape, rate, .. } = self.plan;
        let (shape, interrupts, abort) = (*shape, self.interrupts, AtomicBool::new(false));
        let load = Load { topic, partitions, payload, shape, rate: *rate, since: None, abort: &abort, interrupts };
        let Some((what, consumers)) = self.args.consumers() else { return Ok((load::run(&load, self.progress), None)) };
        let mode = self.args.read_mode.into();
        let reading = Reading { what, consumers, mode, partitions, shape, seed: self.args.seed, interrupts };
        if what == ReadArg::Tail {
            let run = |since| load::run(&Load { since: Some(since), ..load }, self.progress);
            return read::beside(&reading, &abort, run).map(|(outcome, figures)| (outcome, Some(figures)));
        }
        let outcome = load::run(&load, self.progress);
        let figures = if interrupts.any() { None } else { Some(read::over(&reading, self.progress)?) };
        Ok((outcome, figures))
    }

    fn report(
        &self,
        backend: &'static str,
        outcome: &Outcome,
        read: Option<ReadShape>,
        floor: &Measured,
        verification: Option<Verification>,
        interrupted: bool,
    ) -> Report {
        let seconds = outcome.elapsed.as_secs_f64();
        let records_per_second = per_second(float(outcome.records), seconds);
        let latency_us = Latency::of(&outcome.latency);
        let floor_us = floor.as_ref().ok().and_then(|floor| Latency::of(&floor.latency));
        let unreadable = read.as_ref().is_some_and(|read| read.error.is_some());
        let differs = verification.as_ref().is_some_and(|verification| verification.findings.differences > 0);
        Report {
            schema: 1,
            version: env!("CARGO_PKG_VERSION"),
            records: outcome.records,
            bytes: outcome.bytes,
            seconds,
            records_per_second,
            mib_per_second: per_second(float(outcome.bytes), seconds) / float(1 << 20),
            latency_us,
            read,
            commits: outcome.stats.commits,
            records_per_commit: if outcome.stats.commits > 0 { float(outcome.stats.records) / float(outcome.stats.commits) } else { 0.0 },
            durability: self.args.durability.name(),
            backend,
            verified_records: verification.as_ref().map_or(0, |verification| verification.findings.verified),
            floor_us,
            ratio_to_floor: latency_us.zip(floor_us).map(|(append, floor)| append.p50 / floor.p50),
            host: Host::of(self.workspace.dir()),
            r#loop: match self.plan.rate {
                None => Loop::Closed,
                Some(target) => Loop::open(target, records_per_second, outcome.unsent, outcome.lag.as_ref().and_then(Latency::of)),
            },
            load: self.load_shape(),
            floor: FloorShape {
                write_bytes: floor::write_bytes(self.plan.append_bytes),
                method: floor.as_ref().ok().map(|floor| floor.method),
                error: floor.as_ref().err().map(ToString::to_string),
            },
            verification: verification_shape(verification),
            acknowledged_records: outcome.acknowledged,
            stored_bytes: outcome.stats.bytes,
            rolls: outcome.stats.rolls,
            syncs: outcome.stats.syncs,
            interrupted,
            error: failure(outcome),
            kept: self.kept(differs || unreadable),
            data_dir: self.workspace.dir().display().to_string(),
        }
    }

    fn load_shape(&self) -> LoadShape {
        let args = self.args;
        LoadShape {
            topic: args.topic.clone(),
            partitions: args.partitions,
            writers: writers_name(args.writers),
            producers: args.producers,
            record_bytes: args.input.is_none().then_some(args.record_bytes),
            input: args.input.as_ref().map(|path| path.display().to_string()),
            keys: args.keys,
            batch_records: args.batch_records,
            linger_us: args.linger_us,
            segment_bytes: args.segment_bytes,
            index_interval: args.index_interval,
            warmup_seconds: args.warmup().as_secs_f64(),
            seed: args.seed,
        }
    }

    fn read_shape(&self, figures: &Figures) -> ReadShape {
        let (what, consumers) = self.args.consumers().expect("only consumers have figures");
        let seconds = figures.elapsed.as_secs_f64();
        ReadShape {
            mode: what.name(),
            consumers,
            read_mode: self.args.read_mode.name(),
            records: figures.records,
            bytes: figures.bytes,
            seconds,
            records_per_second: per_second(float(figures.records), seconds),
            mib_per_second: per_second(float(figures.bytes), seconds) / float(1 << 20),
            latency_us: Latency::of(&figures.latency),
            error: figures.failure.as_ref().map(ToString::to_string),
        }
    }

    /// A log that is not as it should be is evidence.
    fn kept(&self, suspect: bool) -> Option<String> {
        let place = self.workspace.dir().join(&self.args.topic).display().to_string();
        match (self.args.keep, suspect) {
            (true, _) => Some(place),
            (false, true) => Some(format!("{place}, to be looked into")),
            (false, false) => None,
        }
    }
}

fn per_second(n: f64, seconds: f64) -> f64 {
    if seconds > 0.0 { n / seconds } else { 0.0 }
}

fn failure(outcome: &Outcome) -> Option<String> {
    let failure = outcome.failure.as_ref()?;
    let full = if failure.error.is_disk_full() { "the disk is full: " } else { "" };
    let others = match outcome.failed_appends {
        0 | 1 => String::new(),
        failed => format!(" ({} appends failed)", count(failed)),
    };
    Some(format!(
        "{full}an append of producer {} to partition {} failed after {} acknowledged records: {}{others}",
        failure.producer,
        failure.partition,
        count(outcome.acknowledged),
        failure.error
    ))
}

fn verification_shape(verification: Option<Verification>) -> VerificationShape {
    let wanted = verification.is_some();
    let passed = verification.as_ref().map(Verification::passed);
    let complete = verification.as_ref().is_some_and(|verification| verification.complete);
    let seconds = verification.as_ref().map_or(0.0, |verification| verification.elapsed.as_secs_f64());
    let Findings { differences, shown, unanswered, .. } = verification.map(|verification| verification.findings).unwrap_or_default();
    let shown = shown.iter().map(ToString::to_string).collect();
    VerificationShape { wanted, passed, complete, seconds, differences, shown, unanswered_records: unanswered }
}
