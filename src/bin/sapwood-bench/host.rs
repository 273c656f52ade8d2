//! The machine that a run was on, as far as its figures depend on it.

use std::fs;
use std::io;
use std::path::Path;

use serde::Serialize;

/// What goes into the report.
#[derive(Debug, Clone, Serialize)]
pub struct Host {
    /// Version of the running kernel.
    pub kernel: String,
    /// CPUs that this process may use.
    pub cpus: usize,
    /// Type of the file system of the data directory.
    pub filesystem: String,
    /// Whether that file system is in memory, so that nothing on it is durable.
    pub in_memory: bool,
}

impl Host {
    /// Asks the system. What it does not tell is "unknown".
    pub fn of(dir: &Path) -> Self {
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned());
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let magic = magic(dir);
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let filesystem = dir.canonicalize().ok().and_then(|dir| mounted(&mounts, &dir));
        Self {
            kernel,
            cpus,
            filesystem: filesystem.unwrap_or_else(|| magic.as_ref().map_or_else(|_| "unknown".to_owned(), |magic| format!("{magic:#x}"))),
            in_memory: magic.is_ok_and(|magic| IN_MEMORY.contains(&magic)),
        }
    }
}

/// TMPFS_MAGIC and RAMFS_MAGIC of statfs(2).
const IN_MEMORY: [u64; 2] = [0x0102_1994, 0x8584_58f6];

/// The file system's number. Signed or not, the numbers have 32 bits.
fn magic(dir: &Path) -> io::Result<u64> {
    let number = rustix::fs::statfs(dir)?.f_type;
    Ok(u64::from_ne_bytes(number.to_ne_bytes()) & 0xffff_ffff)
}

/// The type of the file system that is mounted nearest above a path; of several at one place the last hides the others.
fn mounted(mountinfo: &str, path: &Path) -> Option<String> {
    let mut nearest: Option<(usize, &str)> = None;
    for line in mountinfo.lines() {
        // See proc_pid_mountinfo(5): id, parent, device, root, mount point, options, optional fields, "-", type, ….
        let (Some(point), Some(kind)) = (line.split(' ').nth(4), line.split(" - ").nth(1).and_then(|tail| tail.split(' ').next())) else {
            continue;
        };
        let point = point.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\");
        if path.starts_with(&point) && nearest.is_none_or(|(length, _)| point.len() >= length) {
            nearest = Some((point.len(), kind));
        }
    }
    nearest.map(|(_, kind)| kind.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
25 24 0:23 / /dev/shm rw,relatime shared:2 master:3 - tmpfs tmpfs rw,size=24683656k
30 27 0:40 / /mnt/two\\040words rw - xfs /dev/vdb rw
31 27 0:41 / /mnt/over rw - btrfs /dev/vdc rw
32 27 0:42 / /mnt/over rw - f2fs /dev/vdd rw
";

    #[test]
    fn the_nearest_mount_counts() {
        let of = |path: &str| mounted(MOUNTS, Path::new(path));
        for (path, kind) in [
            ("/", "ext4"),
            ("/data/x", "ext4"),
            ("/dev/shm/x", "tmpfs"),
            ("/dev/shmx", "ext4"),
            ("/mnt/two words/x", "xfs"),
            ("/mnt/over", "f2fs"),
        ] {
            assert_eq!(of(path).as_deref(), Some(kind), "{path}");
        }
        assert_eq!(mounted("", Path::new("/")), None);
        assert_eq!(mounted("nonsense\n\n1 2 3 4 /", Path::new("/")), None);
    }

    #[test]
    fn this_machine_tells_what_it_is() {
        let host = Host::of(Path::new("/proc"));
        assert!(host.cpus > 0 && !host.kernel.is_empty() && !host.in_memory);
    }
}
