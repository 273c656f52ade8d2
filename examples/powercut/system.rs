//! What has to be set up and taken down again around a disk: mounts and loop devices, by the system's own tools.

use std::path::{Path, PathBuf};
use std::process::Command;

use fuser::{BackgroundSession, Config};

use crate::disk::{Disk, NAME};

/// Runs a program to its end.
#[track_caller]
pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap_or_else(|error| panic!("{program}: {error}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {}: {said}", arguments.join(" "));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A mounted file system; unmounted when dropped.
pub struct Mounted {
    at: PathBuf,
}

impl Mounted {
    #[track_caller]
    pub fn new(kind: &str, device: &Path, at: &Path) -> Self {
        if kind == "btrfs" {
            // It remembers disks by an identity that all images of one file system share, and would take an older one for a mistake.
            let _ = Command::new("btrfs").args(["device", "scan", "--forget"]).output();
        }
        run("mount", &["-t", kind, text(device), text(at)]);
        Self { at: at.to_owned() }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        unmount(&self.at);
    }
}

fn unmount(at: &Path) {
    for _ in 0..50 {
        if Command::new("umount").arg(at).output().is_ok_and(|output| output.status.success()) {
            return;
        }
        // Something that scans new devices, or a process that was just killed, may hold it for a moment.
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let _ = Command::new("umount").arg("--lazy").arg(at).output();
}

/// A loop device over a file; given back when dropped.
pub struct Loop {
    pub device: PathBuf,
}

impl Loop {
    #[track_caller]
    pub fn new(file: &Path) -> Self {
        Self { device: run("losetup", &["--find", "--show", text(file)]).into() }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.device).output();
    }
}

/// A disk that is served through FUSE; its file is at [`Self::file`]. Unmounted when dropped.
pub struct Served {
    at: PathBuf,
    session: Option<BackgroundSession>,
}

impl Served {
    pub fn new(disk: Disk, at: &Path) -> std::io::Result<Self> {
        let mut config = Config::default();
        config.n_threads = Some(2);
        config.clone_fd = true;
        Ok(Self { at: at.to_owned(), session: Some(fuser::spawn_mount(disk, at, &config)?) })
    }

    pub fn file(&self) -> PathBuf {
        self.at.join(NAME)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        unmount(&self.at);
        // Not joined: if a loop device should still hold the file, the threads serve it until it lets go.
        drop(self.session.take());
    }
}
