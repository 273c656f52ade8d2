//! The topics by name, and who is at work on which name.
//!
//! Making, altering and deleting a topic takes as long as the disk does. Whoever does it claims the name, and the map is locked for moments
//! only: nobody waits but for the name that he asks to make, alter or delete himself. A topic stands in the map from when it is whole until its
//! deletion begins.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::io::Process;
use crate::topic::{Surroundings, Topic};

/// All topics of an open broker.
#[derive(Debug)]
pub(super) struct Topics {
    dir: PathBuf,
    process: Process,
    state: Mutex<State>,
    /// Told when a claim ends.
    released: Condvar,
}

#[derive(Debug)]
struct State {
    /// There until the broker is closed.
    around: Option<Arc<Surroundings>>,
    slots: BTreeMap<String, Slot>,
}

/// A name. It has a topic, or somebody is at work on it, or both.
#[derive(Debug)]
struct Slot {
    topic: Option<Topic>,
    claimed: bool,
}

/// The right to work on a name, alone. Dropping it lets the next one have it.
#[derive(Debug)]
pub(super) struct Claim<'a> {
    topics: &'a Topics,
    name: &'a str,
    around: Option<Arc<Surroundings>>,
}

impl Topics {
    pub(super) fn new(dir: PathBuf, process: Process, around: Surroundings, topics: BTreeMap<String, Topic>) -> Self {
        let slots = topics.into_iter().map(|(name, topic)| (name, Slot { topic: Some(topic), claimed: false })).collect();
        Self { dir, process, state: Mutex::new(State { around: Some(Arc::new(around)), slots }), released: Condvar::new() }
    }

    pub(super) fn get(&self, name: &str) -> Result<Topic> {
        let state = self.state()?;
        self.check_open(&state)?;
        state.slots.get(name).and_then(|slot| slot.topic.clone()).ok_or_else(|| not_found(name))
    }

    /// All of them, and the clock that they go by.
    pub(super) fn all(&self) -> Result<(Arc<dyn Clock>, Vec<Topic>)> {
        let state = self.state()?;
        let around = self.check_open(&state)?;
        Ok((Arc::clone(&around.clock), state.slots.values().filter_map(|slot| slot.topic.clone()).collect()))
    }

    pub(super) fn names(&self) -> Vec<String> {
        let Ok(state) = self.state() else { return Vec::new() };
        state.slots.iter().filter(|(_, slot)| slot.topic.is_some()).map(|(name, _)| name.clone()).collect()
    }

    /// Claims a name that no topic has. Waits for who makes or deletes one of that name.
    pub(super) fn claim_free<'a>(&'a self, name: &'a str) -> Result<Claim<'a>> {
        let mut state = self.state()?;
        loop {
            let around = self.check_open(&state)?;
            match state.slots.get(name) {
                None => {
                    state.slots.insert(name.to_owned(), Slot { topic: None, claimed: true });
                    return Ok(Claim { topics: self, name, around: Some(around) });
                }
                Some(Slot { topic: Some(_), .. }) => return Err(Error::TopicExists { topic: name.to_owned() }),
                Some(_) => state = self.wait(state),
            }
        }
    }

    /// Claims the name of a topic, which stays where it is. Waits for who is at work on it.
    pub(super) fn claim<'a>(&'a self, name: &'a str) -> Result<(Claim<'a>, Topic)> {
        let mut state = self.state()?;
        loop {
            let around = self.check_open(&state)?;
            match state.slots.get_mut(name) {
                Some(slot) if slot.claimed => state = self.wait(state),
                Some(Slot { topic: Some(topic), claimed }) => {
                    *claimed = true;
                    return Ok((Claim { topics: self, name, around: Some(around) }, topic.clone()));
                }
                _ => return Err(not_found(name)),
            }
        }
    }

    /// Lets nobody claim anything from now on, or have a topic. Tells which there are.
    pub(super) fn end(&self) -> Result<Vec<Topic>> {
        let mut state = self.state()?;
        self.check_open(&state)?;
        state.around = None;
        Ok(state.slots.values().filter_map(|slot| slot.topic.clone()).collect())
    }

    /// Waits until all claims ended, and gives the topics away. To be called by who ended it.
    pub(super) fn take(&self) -> Result<Vec<Topic>> {
        let mut state = self.state()?;
        while state.slots.values().any(|slot| slot.claimed) {
            state = self.wait(state);
        }
        Ok(std::mem::take(&mut state.slots).into_values().filter_map(|slot| slot.topic).collect())
    }

    fn check_open(&self, state: &State) -> Result<Arc<Surroundings>> {
        state.around.clone().ok_or_else(|| Error::Closed { path: self.dir.clone() })
    }

    /// # Errors
    /// [`Error::Forked`]: in a child of the process the lock may be held by a thread that is not there.
    fn state(&self) -> Result<MutexGuard<'_, State>> {
        if self.process.is_current() { Ok(self.lock()) } else { Err(Error::Forked { path: self.dir.clone() }) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The map is changed by single insertions and removals: whole at every moment that a panic could leave it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.released.wait(state).unwrap_or_else(PoisonError::into_inner)
    }
}

impl Claim<'_> {
    /// What opening a topic needs.
    pub(super) fn around(&self) -> &Surroundings {
        self.around.as_deref().expect("there until the claim is dropped")
    }

    /// Lets everybody have this topic by its name.
    pub(super) fn show(&self, topic: Topic) {
        self.set(Some(topic));
    }

    /// Lets nobody have a topic by this name any more.
    pub(super) fn hide(&self) {
        self.set(None);
    }

    fn set(&self, topic: Option<Topic>) {
        let before = self.topics.lock().slots.get_mut(self.name).map(|slot| std::mem::replace(&mut slot.topic, topic));
        // The last handle to a topic closes it, which takes its time.
        drop(before);
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        // Whoever waits to have everything closed must find the data directory let go of.
        self.around = None;
        let mut state = self.topics.lock();
        match state.slots.get_mut(self.name) {
            Some(slot) if slot.topic.is_some() => slot.claimed = false,
            _ => drop(state.slots.remove(self.name)),
        }
        self.topics.released.notify_all();
    }
}

fn not_found(name: &str) -> Error {
    Error::TopicNotFound { topic: name.to_owned() }
}
