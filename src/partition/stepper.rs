//! Partitions without threads: writers and upkeep take one step at a time, in an order that a seed decides.
//!
//! A [`Stepper`] stands where the scheduler and the clock stand in production. Everything above the seam to the operating system
//! is the code that runs there, too; what blocks in production ([`Ticket::wait`](crate::Ticket::wait), closing, a full queue) has the
//! others work here until it need not wait, and if none of them could ever end the wait, that is a panic instead of a hang.
//!
//! A step of a writer is one of its state machine; a step of upkeep is one job. A writer that waits takes no step unless its bell
//! was rung, its time has come, or, seldom, for nothing, as threads wake. Time stands still but when nothing else can happen.
//!
//! One thread at a time uses a stepper and what was opened with it.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::bench::Chores;
use super::helm::Helm;
use super::queue::Where;
use super::upkeep::Worker;
use super::writer::Pause;
use crate::clock::Clock;
use crate::io::sim::Rng;
use crate::record::{to_u64, to_usize};

/// Steps partitions; see [`Broker::open_stepped`](crate::Broker::open_stepped). Clones are handles to the same one.
#[derive(Clone)]
pub struct Stepper(Arc<Mutex<Tasks>>);

/// Which task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TaskId(u64);

struct Tasks {
    tasks: Vec<Task>,
    last_id: u64,
    chance: Rng,
    now: Duration,
    /// What the wall clock shows beyond `now`, nanoseconds since 1970.
    wall_ns: u64,
    steps: u64,
}

struct Task {
    id: TaskId,
    work: Work,
    waits: Waits,
}

enum Work {
    Writer(Arc<Helm>),
    Upkeep(Worker),
}

/// What a writer waits for.
#[derive(Clone, Copy)]
enum Waits {
    ForNothing,
    ForTheBell { place: Where, until: Option<Duration> },
}

/// A waiting thread wakes for nothing once in so many steps.
const SPURIOUS: u64 = 64;

impl Stepper {
    /// A stepper whose every choice follows from the seed. Its clock begins at 2020-09-13 12:26:40 UTC.
    pub fn new(seed: u64) -> Self {
        let wall_ns = 1_600_000_000_000_000_000;
        Self(Arc::new(Mutex::new(Tasks { tasks: Vec::new(), last_id: 0, chance: Rng::new(seed), now: Duration::ZERO, wall_ns, steps: 0 })))
    }

    /// Its clock.
    pub fn clock(&self) -> Arc<dyn Clock> {
        Arc::new(self.clone())
    }

    /// Lets one that can take a step take it. False if nothing can happen before time goes on.
    pub fn step(&self) -> bool {
        let Some(mut task) = self.tasks().choose() else { return false };
        // Without the lock: a step may add tasks and end others.
        let goes_on = task.step(self);
        let mut tasks = self.tasks();
        tasks.steps += 1;
        if goes_on {
            tasks.tasks.push(task);
        }
        true
    }

    /// Steps until all wait for nothing but messages, and at most until so much time has passed: what fails may be tried again for ever.
    pub fn settle(&self, most: Duration) {
        let end = self.tasks().now.saturating_add(most);
        while self.step() || (self.tasks().skip_to_next_deadline() && self.tasks().now <= end) {}
    }

    /// Lets the clocks go on by so much.
    pub fn pass(&self, time: Duration) {
        self.tasks().now += time;
    }

    /// Sets the wall clock, nanoseconds since 1970-01-01 UTC: it jumps.
    pub fn set_wall_clock(&self, ns: u64) {
        let mut tasks = self.tasks();
        tasks.wall_ns = ns.saturating_sub(nanos(tasks.now));
    }

    /// Steps taken so far.
    pub fn steps(&self) -> u64 {
        self.tasks().steps
    }

    /// Steps until `ready`.
    ///
    /// # Panics
    /// If that never comes: nobody has anything to do, now or later.
    pub(super) fn work_until(&self, ready: impl Fn() -> bool) {
        while !ready() {
            let goes_on = self.step() || self.tasks().skip_to_next_deadline();
            assert!(goes_on || ready(), "nobody is left who could end this wait: {self:?}");
        }
    }

    /// Steps until `ready`, or until so much time has passed. True if it is ready.
    ///
    /// # Panics
    /// As for [`Self::work_until`], without a timeout.
    pub(super) fn work_for(&self, timeout: Option<Duration>, ready: impl Fn() -> bool) -> bool {
        let Some(timeout) = timeout else {
            self.work_until(ready);
            return true;
        };
        let end = self.tasks().now.saturating_add(timeout);
        while !ready() {
            if self.tasks().now >= end {
                return false;
            }
            if !self.step() {
                self.tasks().skip_to_next_deadline_before(end);
            }
        }
        true
    }

    pub(super) fn add_writer(&self, helm: Arc<Helm>) {
        self.tasks().add(Work::Writer(helm));
    }

    pub(super) fn add_upkeep(&self, worker: Worker) -> TaskId {
        self.tasks().add(Work::Upkeep(worker))
    }

    /// Has a task do all that it has to do, and ends it.
    pub(super) fn finish(&self, id: TaskId) {
        let task = self.tasks().take(id);
        if let Some(Task { work: Work::Upkeep(mut worker), .. }) = task {
            while worker.work_once() {}
        }
    }

    fn tasks(&self) -> MutexGuard<'_, Tasks> {
        // A panic of a task is caught by the task; one of `work_until` is not within the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Stepper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tasks = self.tasks();
        f.debug_struct("Stepper").field("tasks", &tasks.tasks.len()).field("steps", &tasks.steps).field("now", &tasks.now).finish()
    }
}

impl Clock for Stepper {
    fn wall_ns(&self) -> u64 {
        let tasks = self.tasks();
        tasks.wall_ns.saturating_add(nanos(tasks.now))
    }

    fn monotonic(&self) -> Duration {
        self.tasks().now
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Tasks {
    fn add(&mut self, work: Work) -> TaskId {
        self.last_id += 1;
        let id = TaskId(self.last_id);
        self.tasks.push(Task { id, work, waits: Waits::ForNothing });
        id
    }

    fn take(&mut self, id: TaskId) -> Option<Task> {
        let at = self.tasks.iter().position(|task| task.id == id)?;
        Some(self.tasks.swap_remove(at))
    }

    /// Takes out one of those that can take a step.
    fn choose(&mut self) -> Option<Task> {
        let now = self.now;
        // By number, whatever order earlier choices left.
        self.tasks.sort_unstable_by_key(|task| task.id.0);
        for task in &mut self.tasks {
            task.wake(now);
        }
        let mut ready: Vec<TaskId> = self.tasks.iter().filter(|task| task.is_ready()).map(|task| task.id).collect();
        if self.chance.below(SPURIOUS) == 0 && ready.len() < self.tasks.len() {
            ready = self.tasks.iter().filter(|task| matches!(task.work, Work::Writer(_))).map(|task| task.id).collect();
        }
        if ready.is_empty() {
            return None;
        }
        let chosen = ready[to_usize(self.chance.below(to_u64(ready.len())))];
        self.take(chosen)
    }

    /// Lets time pass until somebody waits no longer. False if nobody waits for a time.
    fn skip_to_next_deadline(&mut self) -> bool {
        let next = self.next_deadline();
        if let Some(next) = next {
            self.now = self.now.max(next);
        }
        next.is_some()
    }

    /// The same, or until `end` if that comes first.
    fn skip_to_next_deadline_before(&mut self, end: Duration) {
        let next = self.next_deadline().map_or(end, |next| next.min(end));
        self.now = self.now.max(next);
    }

    fn next_deadline(&self) -> Option<Duration> {
        let deadline = |task: &Task| match task.waits {
            Waits::ForTheBell { until, .. } => until,
            Waits::ForNothing => None,
        };
        self.tasks.iter().filter_map(deadline).min()
    }
}

impl Task {
    /// Ends its wait if what it waits for has come.
    fn wake(&mut self, now: Duration) {
        if let (Work::Writer(helm), Waits::ForTheBell { place, until }) = (&self.work, self.waits)
            && (until.is_some_and(|until| until <= now) || helm.has_woken(place))
        {
            self.waits = Waits::ForNothing;
        }
    }

    fn is_ready(&self) -> bool {
        match &self.work {
            Work::Writer(_) => matches!(self.waits, Waits::ForNothing),
            Work::Upkeep(worker) => !worker.is_idle(),
        }
    }

    /// False if it has ended.
    fn step(&mut self, stepper: &Stepper) -> bool {
        match &mut self.work {
            Work::Upkeep(worker) => {
                worker.work_once();
                true
            }
            Work::Writer(helm) => {
                let pause = helm.step();
                self.waits = match pause {
                    None | Some(Pause::End) => return false,
                    // A completion comes when the disk decides so; whoever asks finds out.
                    Some(Pause::BetweenSteps | Pause::Wait(Where::InRing, _)) => Waits::ForNothing,
                    Some(Pause::Wait(place, timeout)) => {
                        Waits::ForTheBell { place, until: timeout.map(|timeout| stepper.tasks().now.saturating_add(timeout)) }
                    }
                };
                true
            }
        }
    }
}
