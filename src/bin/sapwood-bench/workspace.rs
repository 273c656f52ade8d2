//! The data directory: made where it is not there, and afterwards left without a trace of this run, and with every trace of others.

use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use rustix::fs::FlockOperation;

use crate::Stop;

/// Where the default directory is made, with a number if that is taken.
const FRESH: &str = "sapwood-bench-data";
/// How many numbers are tried.
const FRESH_TRIES: u32 = 1000;
/// The broker's lock file in its data directory.
const LOCK: &str = ".lock";

/// A data directory for one run.
#[derive(Debug)]
pub struct Workspace {
    dir: PathBuf,
    /// Directories that this run made, the outermost first.
    made: Vec<PathBuf>,
}

impl Workspace {
    /// The directory asked for, or a new one below the current one.
    pub fn prepare(asked: Option<&Path>) -> Result<Self, Stop> {
        match asked {
            Some(dir) => Self::at(dir),
            None => Self::fresh(Path::new(FRESH)),
        }
    }

    fn fresh(name: &Path) -> Result<Self, Stop> {
        for number in 1..=FRESH_TRIES {
            let dir = if number == 1 { name.to_owned() } else { PathBuf::from(format!("{}-{number}", name.display())) };
            match fs::create_dir(&dir) {
                Ok(()) => return Ok(Self { made: vec![dir.clone()], dir }),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(Stop::Usage(format!("could not create {dir:?}: {error}; --data-dir names another place"))),
            }
        }
        Err(Stop::Usage(format!("{name:?} and {FRESH_TRIES} numbered ones exist already; remove some, or name a place with --data-dir")))
    }

    fn at(dir: &Path) -> Result<Self, Stop> {
        let missing = dir.ancestors().take_while(|path| !path.as_os_str().is_empty() && fs::symlink_metadata(path).is_err());
        let mut workspace = Self { dir: dir.to_owned(), made: Vec::new() };
        for path in missing.collect::<Vec<_>>().into_iter().rev() {
            match fs::create_dir(path) {
                Ok(()) => workspace.made.push(path.to_owned()),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => {
                    workspace.remove();
                    return Err(Stop::Usage(format!("could not create {path:?}: {error}")));
                }
            }
        }
        if !dir.is_dir() {
            return Err(Stop::Usage(format!("{dir:?} is not a directory")));
        }
        Ok(workspace)
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Fails if something of the topic's name is there, before a broker so much as opens the directory.
    pub fn check_free(&self, topic: &str) -> Result<(), Stop> {
        let name = Path::new(topic);
        let plain = matches!(name.components().collect::<Vec<_>>()[..], [Component::Normal(part)] if part == name.as_os_str());
        // A name with more than one part is none of a topic; the library says so.
        if !plain || fs::symlink_metadata(self.dir.join(name)).is_err() {
            return Ok(());
        }
        let dir = &self.dir;
        if matches!(try_lock(dir), Lock::Held) {
            return Err(Stop::Usage(format!("the data directory {dir:?} is in use by another broker, and has a topic {topic:?}")));
        }
        Err(Stop::Usage(format!(
            "the topic {topic:?} exists already in {dir:?}; name another one with --topic, or another place with --data-dir"
        )))
    }

    /// Removes what this run made, as long as nothing else is in it. The broker must be closed before.
    pub fn remove(&self) {
        if self.made.last() == Some(&self.dir) {
            // Held until it is removed: nobody who opens the directory meanwhile loses the lock.
            if let Lock::Taken(_held) = try_lock(&self.dir)
                && only_entry(&self.dir, LOCK)
            {
                remove(&self.dir.join(LOCK), |path| fs::remove_file(path));
            }
        }
        for dir in self.made.iter().rev() {
            // One that is not empty stays, and so do those around it.
            if fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_none()) {
                remove(dir, |path| fs::remove_dir(path));
            }
        }
    }
}

enum Lock {
    Taken(#[allow(dead_code, reason = "held, not read")] fs::File),
    Held,
    Absent,
}

/// The broker's own lock, as it takes it, but never making the file.
fn try_lock(dir: &Path) -> Lock {
    let Ok(file) = fs::OpenOptions::new().read(true).write(true).open(dir.join(LOCK)) else { return Lock::Absent };
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Lock::Taken(file),
        Err(_) => Lock::Held,
    }
}

fn only_entry(dir: &Path, name: &str) -> bool {
    fs::read_dir(dir).is_ok_and(|entries| entries.map_while(Result::ok).all(|entry| entry.file_name() == name))
}

fn remove(path: &Path, how: impl FnOnce(&Path) -> io::Result<()>) {
    if let Err(error) = how(path) {
        eprintln!("sapwood-bench: could not remove {path:?}: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    #[test]
    fn what_was_made_goes_and_what_was_there_stays() {
        let root = scratch();
        let there = root.path().join("there");
        fs::create_dir(&there).unwrap();
        let dir = there.join("a/b/c");
        let workspace = Workspace::prepare(Some(&dir)).unwrap();
        assert!(dir.is_dir());
        fs::write(dir.join(LOCK), "").unwrap();
        workspace.remove();
        assert!(there.is_dir() && !there.join("a").exists());
    }

    #[test]
    fn a_directory_of_others_is_left_alone() {
        let root = scratch();
        fs::write(root.path().join(LOCK), "").unwrap();
        let workspace = Workspace::prepare(Some(root.path())).unwrap();
        workspace.remove();
        assert!(root.path().join(LOCK).exists());
    }

    #[test]
    fn a_strangers_file_keeps_the_directory_and_the_lock() {
        let root = scratch();
        let dir = root.path().join("a/b");
        let workspace = Workspace::prepare(Some(&dir)).unwrap();
        for name in [LOCK, "mine.txt"] {
            fs::write(dir.join(name), "").unwrap();
        }
        workspace.remove();
        assert!(dir.join("mine.txt").exists() && dir.join(LOCK).exists());
    }

    #[test]
    fn a_lock_that_is_held_stays() {
        let root = scratch();
        let dir = root.path().join("a");
        let workspace = Workspace::prepare(Some(&dir)).unwrap();
        fs::write(dir.join(LOCK), "").unwrap();
        let Lock::Taken(held) = try_lock(&dir) else { panic!() };
        workspace.remove();
        assert!(dir.join(LOCK).exists());
        drop(held);
        workspace.remove();
        assert!(!dir.exists());
    }

    #[test]
    fn the_fresh_directory_is_numbered_where_one_is_there() {
        let root = scratch();
        let name = root.path().join("data");
        let dirs: Vec<_> = (0..3).map(|_| Workspace::fresh(&name).unwrap().dir).collect();
        assert_eq!(dirs, ["data", "data-2", "data-3"].map(|name| root.path().join(name)));
    }

    #[test]
    fn a_file_is_no_directory_and_a_topic_that_is_there_is_in_the_way() {
        let root = scratch();
        fs::write(root.path().join("file"), "").unwrap();
        for path in ["file", "file/below"] {
            assert!(matches!(Workspace::prepare(Some(&root.path().join(path))), Err(Stop::Usage(_))), "{path}");
        }
        let workspace = Workspace::prepare(Some(root.path())).unwrap();
        assert!(workspace.check_free("bench").is_ok());
        for name in ["../file", "..", "/", "", "file/x"] {
            assert!(workspace.check_free(name).is_ok(), "{name:?} is for the library to refuse");
        }
        assert!(workspace.check_free("file").unwrap_err().to_string().contains("exists already"));
        let lock = fs::File::create(root.path().join(LOCK)).unwrap();
        rustix::fs::flock(&lock, FlockOperation::LockExclusive).unwrap();
        assert!(workspace.check_free("file").unwrap_err().to_string().contains("in use"));
    }
}
