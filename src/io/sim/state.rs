//! What all handles of one simulated disk share, and the one gate that every operation passes.
//!
//! One mutex guards everything, so operations take effect one after the other, in the order of their records.
//! An operation that is held waits outside of it.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

use super::content::{Keep, PAGE, SECTOR};
use super::faults::{Call, Effect, OpKind, OpRecord, Script};
use super::rng::Rng;
use super::tree::{Ino, Tree};
use super::{to_u64, to_usize};

/// Records kept at most; the oldest go first.
const MAX_RECORDS: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct Shared {
    state: Mutex<State>,
    /// An operation is held, a hold is released, or the process crashed.
    pub(super) changed: Condvar,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) tree: Tree,
    pub(super) rng: Rng,
    pub(super) script: Script,
    pub(super) options: Options,
    /// Who holds which file's lock.
    pub(super) locks: BTreeMap<Ino, u64>,
    pub(super) holds: Vec<Held>,
    pub(super) records: VecDeque<OpRecord>,
    pub(super) state_changes: u64,
    /// The process's life: handles of another one are dead.
    pub(super) epoch: u64,
    /// Crashed in the middle of an operation; nothing works until the next life.
    pub(super) crashed: bool,
    in_flight: Vec<InFlight>,
    operations: u64,
    last_id: u64,
}

/// How the disk behaves.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Options {
    pub(super) capacity: Option<u64>,
    pub(super) refuse_direct: bool,
    pub(super) refuse_allocate: bool,
    pub(super) refuse_links: bool,
    pub(super) torn_sectors: bool,
    pub(super) overlapping_rings: bool,
}

/// Operations of this kind wait.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) id: u64,
    pub(super) on: OpKind,
    pub(super) path_suffix: Option<String>,
    /// How many do now.
    pub(super) waiting: usize,
}

/// A write that was started and did not end.
#[derive(Debug, Clone)]
struct InFlight {
    id: u64,
    file: Ino,
    position: u64,
    bytes: Vec<u8>,
}

/// How far an operation may go.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grant {
    /// Bytes moved at most.
    pub(super) most: usize,
    /// It will be told that it failed, so nothing it does is durable.
    pub(super) failing: bool,
}

impl State {
    pub(super) fn new(seed: u64) -> Self {
        Self::with(Tree::new(), Rng::new(seed), Options::default())
    }

    fn with(tree: Tree, rng: Rng, options: Options) -> Self {
        Self {
            tree,
            rng,
            script: Script::default(),
            options,
            locks: BTreeMap::new(),
            holds: Vec::new(),
            records: VecDeque::new(),
            state_changes: 0,
            epoch: 0,
            crashed: false,
            in_flight: Vec::new(),
            operations: 0,
            last_id: 0,
        }
    }

    /// The same content and the same writes in flight, in a life of its own: no handle, lock, fault, hold or record.
    pub(super) fn fork(&self, seed: u64) -> Self {
        let mut tree = self.tree.clone();
        tree.close_all();
        Self { in_flight: self.in_flight.clone(), ..Self::with(tree, Rng::new(seed), self.options) }
    }

    pub(super) fn new_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    pub(super) fn alive(&self, epoch: u64) -> io::Result<()> {
        if epoch != self.epoch {
            return Err(io::Error::other("simulated disk: this handle is from before a crash of its process"));
        }
        if self.crashed {
            return Err(io::Error::other("simulated disk: the process crashed in the middle of an operation"));
        }
        Ok(())
    }

    /// The next life of the process, after a loss of power or without one.
    pub(super) fn restart(&mut self, loss: Option<Keep>) {
        self.epoch += 1;
        self.crashed = false;
        self.locks.clear();
        self.script.crash_in(None);
        for InFlight { file, position, bytes, .. } in std::mem::take(&mut self.in_flight) {
            // The kernel may have taken any part in order, up to all of it; a power loss then chooses among its pages.
            let arrived = match loss {
                None => to_usize(self.rng.prefix(to_u64(bytes.len() / SECTOR)) * to_u64(SECTOR)).min(bytes.len()),
                Some(Keep::Some { .. }) => bytes.len(),
                Some(Keep::Nothing) => 0,
            };
            // The file may be gone: nobody can tell what became of the write then.
            if let Ok(content) = self.tree.content(file) {
                content.write(&bytes[..arrived], position, false);
            }
        }
        self.tree.close_all();
        if let Some(keep) = loss {
            self.tree.lose_power(keep, &mut self.rng);
        }
    }

    /// How many bytes of `range` find room: all, or those before the first page for which there is none.
    pub(super) fn fits(&mut self, file: Ino, range: Range<u64>) -> Result<u64, Errno> {
        let free = self.options.capacity.map_or(u64::MAX, |capacity| capacity.saturating_sub(self.tree.used()) / PAGE);
        let too_much = match usize::try_from(free) {
            Ok(free) if self.options.capacity.is_some() => self.tree.content(file)?.lacking(&range).nth(free),
            _ => None,
        };
        Ok(too_much.map_or(range.end - range.start, |page| (page * PAGE).saturating_sub(range.start)))
    }

    fn hold_on(&self, call: &Call<'_>) -> Option<u64> {
        self.holds.iter().find(|hold| call.is(hold.on, hold.path_suffix.as_deref())).map(|hold| hold.id)
    }

    fn count_waiting(&mut self, hold: u64, arrives: bool) {
        if let Some(hold) = self.holds.iter_mut().find(|held| held.id == hold) {
            hold.waiting = if arrives { hold.waiting + 1 } else { hold.waiting - 1 };
        }
    }

    fn fly(&mut self, call: &Call<'_>) -> Option<u64> {
        let file = call.file.filter(|_| call.kind == OpKind::Write)?;
        let id = self.new_id();
        self.in_flight.push(InFlight { id, file, position: call.position, bytes: call.bytes.to_vec() });
        Some(id)
    }

    fn record(&mut self, call: &Call<'_>, ok: bool) {
        self.operations += 1;
        if self.records.len() == MAX_RECORDS {
            self.records.pop_front();
        }
        self.records.push_back(call.record(self.operations, ok));
    }
}

impl Shared {
    pub(super) fn new(state: State) -> Self {
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// A panic never leaves the state half changed (scripted ones happen outside of the lock), so poison means nothing.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits as long as the operation is held.
    fn admit(&self, epoch: u64, call: &Call<'_>) -> io::Result<MutexGuard<'_, State>> {
        let mut state = self.lock();
        let mut held_by = None;
        let mut flying = None;
        loop {
            let hold = state.alive(epoch).map(|()| state.hold_on(call));
            let hold = match hold {
                Ok(Some(hold)) => hold,
                ended => {
                    if let Some(hold) = held_by {
                        state.count_waiting(hold, false);
                    }
                    // After a crash the write stays in flight, for what comes next to decide about; after a release it goes on.
                    ended?;
                    state.in_flight.retain(|write| Some(write.id) != flying);
                    return Ok(state);
                }
            };
            if held_by != Some(hold) {
                // The earlier hold, if any, is gone and its count with it.
                state.count_waiting(hold, true);
                held_by = Some(hold);
                flying = flying.or_else(|| state.fly(call));
                self.changed.notify_all();
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Performs one operation of the life `epoch`, or lets it fail as the script says.
    pub(super) fn perform<T>(&self, epoch: u64, call: &Call<'_>, act: impl FnOnce(&mut State, Grant) -> io::Result<T>) -> io::Result<T> {
        let mut guard = self.admit(epoch, call)?;
        let state = &mut *guard;
        if call.kind.changes_state() {
            state.state_changes += 1;
        }
        let mut grant = Grant { most: usize::MAX, failing: false };
        let mut then = None;
        match state.script.decide(call, &mut state.rng) {
            None => {}
            Some(Effect::Short(most)) => grant.most = most,
            Some(Effect::ShortBySeed) => grant.most = short(call, &mut state.rng),
            Some(Effect::ErrorAfterPartial { bytes, errno }) => {
                grant = Grant { most: bytes, failing: true };
                then = Some(io::Error::from_raw_os_error(errno));
            }
            Some(Effect::Error(errno)) => {
                if let (OpKind::Sync, Some(file)) = (call.kind, call.file) {
                    state.tree.content(file)?.forsake();
                }
                state.record(call, false);
                return Err(io::Error::from_raw_os_error(errno));
            }
            Some(Effect::Crash) => {
                state.fly(call);
                state.crashed = true;
                state.record(call, false);
                self.changed.notify_all();
                return state.alive(epoch).map(|()| unreachable!("crashed just now"));
            }
            Some(Effect::Panic) => {
                state.record(call, false);
                drop(guard);
                panic!("simulated disk: a scripted panic in {:?} of {}", call.kind, call.path.display());
            }
        }
        let result = act(state, grant).and_then(|done| then.map_or(Ok(done), Err));
        state.record(call, result.is_ok());
        result
    }
}

/// Fewer bytes than asked for, at least one; of a direct transfer, whole sectors.
fn short(call: &Call<'_>, rng: &mut Rng) -> usize {
    let unit = if call.direct { to_u64(SECTOR) } else { 1 };
    let units = call.len / unit;
    if units < 2 { to_usize(call.len) } else { to_usize(unit * (1 + rng.below(units - 1))) }
}
