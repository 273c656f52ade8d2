//! [`Disk`]: names and locks.

use std::ffi::OsStr;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::super::{Create, Disk, Entry, EntryKind, Open};
use super::{kind, on_every_backend, read_all, write_new};

on_every_backend! {
    new_makes_a_file_that_was_not_there
    empty_makes_a_file_or_empties_it
    never_makes_no_file
    what_was_not_asked_for_is_refused
    only_regular_files_are_opened
    list_tells_names_and_kinds
    create_dir_takes_free_names_only
    rename_moves_files_and_directories
    rename_never_replaces
    rename_needs_both_ends
    replace_takes_the_place_of_a_file
    link_gives_a_file_one_more_name
    remove_file_takes_the_name_only
    remove_dir_takes_empty_directories_only
    sync_dir_needs_a_directory
    an_open_directory_is_synced_as_by_its_path
    a_lock_is_exclusive_until_dropped
    a_lock_changes_no_byte
}

fn new_makes_a_file_that_was_not_there(disk: &dyn Disk, dir: &Path) {
    let file = disk.open(&dir.join("a"), Open::NEW).unwrap();
    assert_eq!(file.len().unwrap(), 0);
    file.write_at(b"kept", 0, false).unwrap();
    assert_eq!(kind(disk.open(&dir.join("a"), Open::NEW)), ErrorKind::AlreadyExists);
    disk.create_dir(&dir.join("d")).unwrap();
    assert_eq!(kind(disk.open(&dir.join("d"), Open::NEW)), ErrorKind::AlreadyExists);
    assert_eq!(kind(disk.open(&dir.join("missing/a"), Open::NEW)), ErrorKind::NotFound);
    assert_eq!(kind(disk.open(&dir.join("a/a"), Open::NEW)), ErrorKind::NotADirectory);
    assert_eq!(read_all(disk, &dir.join("a")), b"kept");
}

fn empty_makes_a_file_or_empties_it(disk: &dyn Disk, dir: &Path) {
    let path = dir.join("a");
    let first = disk.open(&path, Open::EMPTY).unwrap();
    first.write_at(b"gone", 0, false).unwrap();
    let second = disk.open(&path, Open::EMPTY).unwrap();
    assert_eq!((first.len().unwrap(), second.len().unwrap()), (0, 0), "it is the same file");
    second.write_at(b"new", 0, false).unwrap();
    assert_eq!(read_all(disk, &path), b"new");
    disk.create_dir(&dir.join("d")).unwrap();
    assert_eq!(kind(disk.open(&dir.join("d"), Open::EMPTY)), ErrorKind::IsADirectory);
    assert_eq!(kind(disk.open(&dir.join("missing/a"), Open::EMPTY)), ErrorKind::NotFound);
}

fn never_makes_no_file(disk: &dyn Disk, dir: &Path) {
    assert_eq!(kind(disk.open(&dir.join("a"), Open::READ)), ErrorKind::NotFound);
    assert_eq!(kind(disk.open(&dir.join("a"), Open::WRITE)), ErrorKind::NotFound);
    assert_eq!(disk.list(dir).unwrap(), []);
    write_new(disk, &dir.join("a"), b"kept");
    disk.open(&dir.join("a"), Open::WRITE).unwrap().write_at(b"K", 0, false).unwrap();
    assert_eq!(read_all(disk, &dir.join("a")), b"Kept");
    assert_eq!(kind(disk.open(&dir.join("a/b"), Open::READ)), ErrorKind::NotADirectory);
}

fn what_was_not_asked_for_is_refused(disk: &dyn Disk, dir: &Path) {
    write_new(disk, &dir.join("a"), b"kept");
    let file = disk.open(&dir.join("a"), Open::READ).unwrap();
    assert!(file.write_at(b"x", 0, false).is_err());
    assert!(file.write_at(b"x", 0, true).is_err());
    assert!(file.set_len(0).is_err());
    assert!(file.allocate(0..100).is_err());
    for create in [Create::New, Create::Empty] {
        assert_eq!(kind(disk.open(&dir.join("b"), Open { create, ..Open::READ })), ErrorKind::InvalidInput);
    }
    assert_eq!(read_all(disk, &dir.join("a")), b"kept");
    assert_eq!(disk.list(dir).unwrap().len(), 1);
}

fn only_regular_files_are_opened(disk: &dyn Disk, dir: &Path) {
    let open = |name: &str, how| kind(disk.open(&dir.join(name), how));
    disk.create_dir(&dir.join("d")).unwrap();
    assert_eq!(open("d", Open::READ), ErrorKind::IsADirectory);
    assert_eq!(open("d", Open::WRITE), ErrorKind::IsADirectory);
    // The simulated disk knows nothing else.
    if disk.backend() == "sim" {
        return;
    }
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, dir.join("pipe"), rustix::fs::FileType::Fifo, mode, 0).unwrap();
    for how in [Open::READ, Open::WRITE, Open::EMPTY] {
        // Nobody opens the other end.
        assert_eq!(open("pipe", how), ErrorKind::InvalidInput, "{how:?}");
    }
    let link = |to: &Path, name: &str| std::os::unix::fs::symlink(to, dir.join(name)).unwrap();
    link(Path::new("/dev/null"), "device");
    assert_eq!(open("device", Open::READ), ErrorKind::InvalidInput);
    write_new(disk, &dir.join("a"), b"kept");
    link(&dir.join("a"), "link");
    link(&dir.join("nowhere"), "loose");
    for name in ["link", "loose"] {
        for how in [Open::WRITE, Open::EMPTY] {
            assert_eq!(open(name, how), ErrorKind::InvalidInput, "{name}, {how:?}");
        }
    }
    assert_eq!(read_all(disk, &dir.join("link")), b"kept");
    for name in ["pipe", "device", "link", "loose"] {
        assert_eq!(kind(disk.remove_file(&dir.join(name))), ErrorKind::InvalidInput, "{name}");
    }
    assert_eq!(disk.list(dir).unwrap().len(), 6);
}

fn list_tells_names_and_kinds(disk: &dyn Disk, dir: &Path) {
    assert_eq!(disk.list(dir).unwrap(), []);
    let odd = OsStr::from_bytes(b"\xff not UTF-8");
    write_new(disk, &dir.join(odd), b"");
    write_new(disk, &dir.join(".hidden"), b"");
    disk.create_dir(&dir.join("d")).unwrap();
    write_new(disk, &dir.join("d/inner"), b"");
    let entry = |name: &OsStr, kind| Entry { name: name.to_owned(), kind };
    let mut expected =
        vec![entry(OsStr::new(".hidden"), EntryKind::File), entry(OsStr::new("d"), EntryKind::Directory), entry(odd, EntryKind::File)];
    if disk.backend() != "sim" {
        std::os::unix::fs::symlink(dir.join("d"), dir.join("e")).unwrap();
        expected.insert(2, entry(OsStr::new("e"), EntryKind::Other));
    }
    let mut found = disk.list(dir).unwrap();
    found.sort();
    assert_eq!(found, expected);
    assert_eq!(disk.list(&dir.join("d")).unwrap(), [entry(OsStr::new("inner"), EntryKind::File)]);
    assert_eq!(kind(disk.list(&dir.join("missing"))), ErrorKind::NotFound);
    assert_eq!(kind(disk.list(&dir.join(odd))), ErrorKind::NotADirectory);
}

fn create_dir_takes_free_names_only(disk: &dyn Disk, dir: &Path) {
    write_new(disk, &dir.join("a"), b"");
    disk.create_dir(&dir.join("d")).unwrap();
    assert_eq!(kind(disk.create_dir(&dir.join("d"))), ErrorKind::AlreadyExists);
    assert_eq!(kind(disk.create_dir(&dir.join("a"))), ErrorKind::AlreadyExists);
    assert_eq!(kind(disk.create_dir(&dir.join("missing/d"))), ErrorKind::NotFound);
    assert_eq!(kind(disk.create_dir(&dir.join("a/d"))), ErrorKind::NotADirectory);
    disk.create_dir(&dir.join("d/e")).unwrap();
    assert_eq!(disk.list(&dir.join("d/e")).unwrap(), []);
}

fn rename_moves_files_and_directories(disk: &dyn Disk, dir: &Path) {
    disk.create_dir(&dir.join("d")).unwrap();
    let file = disk.open(&dir.join("a"), Open::NEW).unwrap();
    file.write_at(b"bytes", 0, false).unwrap();
    disk.rename(&dir.join("a"), &dir.join("b")).unwrap();
    assert_eq!(kind(disk.open(&dir.join("a"), Open::READ)), ErrorKind::NotFound);
    disk.rename(&dir.join("b"), &dir.join("d/c")).unwrap();
    disk.rename(&dir.join("d"), &dir.join("e")).unwrap();
    file.write_at(b"B", 0, false).unwrap();
    assert_eq!(read_all(disk, &dir.join("e/c")), b"Bytes", "an open file goes with its name");
    let names: Vec<_> = disk.list(dir).unwrap().into_iter().map(|entry| entry.name).collect();
    assert_eq!(names, ["e"]);
    write_new(disk, &dir.join("a"), b"the name is free again");
}

fn rename_never_replaces(disk: &dyn Disk, dir: &Path) {
    write_new(disk, &dir.join("a"), b"a");
    write_new(disk, &dir.join("b"), b"b");
    for name in ["d", "empty", "full"] {
        disk.create_dir(&dir.join(name)).unwrap();
    }
    write_new(disk, &dir.join("full/x"), b"x");
    for (from, to) in [("a", "b"), ("a", "empty"), ("a", "full"), ("d", "a"), ("d", "empty"), ("d", "full"), ("a", "a"), ("d", "d")] {
        let result = disk.rename(&dir.join(from), &dir.join(to));
        assert_eq!(kind(result), ErrorKind::AlreadyExists, "{from} to {to}");
    }
    let mut names: Vec<_> = disk.list(dir).unwrap().into_iter().map(|entry| entry.name).collect();
    names.sort();
    assert_eq!(names, ["a", "b", "d", "empty", "full"]);
    assert_eq!((read_all(disk, &dir.join("a")), read_all(disk, &dir.join("b"))), (b"a".to_vec(), b"b".to_vec()));
    assert_eq!(read_all(disk, &dir.join("full/x")), b"x");
}

fn replace_takes_the_place_of_a_file(disk: &dyn Disk, dir: &Path) {
    write_new(disk, &dir.join("new"), b"new");
    disk.replace(&dir.join("new"), &dir.join("free")).unwrap();
    write_new(disk, &dir.join("old"), b"old");
    let old = disk.open(&dir.join("old"), Open::READ).unwrap();
    disk.replace(&dir.join("free"), &dir.join("old")).unwrap();
    assert_eq!(read_all(disk, &dir.join("old")), b"new");
    assert_eq!((old.len().unwrap(), old.details().unwrap().links), (3, 0), "who has it open keeps it");
    assert_eq!(disk.list(dir).unwrap().len(), 1);
    disk.create_dir(&dir.join("d")).unwrap();
    for (from, to, expected) in
        [("old", "d", ErrorKind::IsADirectory), ("missing", "old", ErrorKind::NotFound), ("old", "missing/a", ErrorKind::NotFound)]
    {
        assert_eq!(kind(disk.replace(&dir.join(from), &dir.join(to))), expected, "{from} to {to}");
    }
    assert_eq!(read_all(disk, &dir.join("old")), b"new");
    if disk.backend() != "sim" {
        std::os::unix::fs::symlink(dir.join("old"), dir.join("link")).unwrap();
        assert_eq!(kind(disk.replace(&dir.join("old"), &dir.join("link"))), ErrorKind::AlreadyExists);
    }
}

fn link_gives_a_file_one_more_name(disk: &dyn Disk, dir: &Path) {
    write_new(disk, &dir.join("a"), b"one");
    let file = disk.open(&dir.join("a"), Open::WRITE).unwrap();
    assert_eq!(file.details().unwrap().links, 1);
    disk.create_dir(&dir.join("d")).unwrap();
    disk.link(&dir.join("a"), &dir.join("d/b")).unwrap();
    assert_eq!(file.details().unwrap().links, 2);
    file.write_at(b"two", 0, false).unwrap();
    assert_eq!(read_all(disk, &dir.join("d/b")), b"two");
    disk.remove_file(&dir.join("a")).unwrap();
    assert_eq!((read_all(disk, &dir.join("d/b")), file.details().unwrap().links), (b"two".to_vec(), 1));
    disk.remove_file(&dir.join("d/b")).unwrap();
    assert_eq!(file.details().unwrap().links, 0);
    write_new(disk, &dir.join("a"), b"");
    for (of, name, expected) in [
        ("a", "d", ErrorKind::AlreadyExists),
        ("a", "a", ErrorKind::AlreadyExists),
        ("missing", "c", ErrorKind::NotFound),
        ("a", "missing/c", ErrorKind::NotFound),
        ("d", "c", ErrorKind::InvalidInput),
    ] {
        assert_eq!(kind(disk.link(&dir.join(of), &dir.join(name))), expected, "{of} as {name}");
    }
    assert_eq!(disk.list(dir).unwrap().len(), 2);
}

fn rename_needs_both_ends(disk: &dyn Disk, dir: &Path) {
    write_new(disk, &dir.join("a"), b"a");
    disk.create_dir(&dir.join("d")).unwrap();
    assert_eq!(kind(disk.rename(&dir.join("missing"), &dir.join("b"))), ErrorKind::NotFound);
    assert_eq!(kind(disk.rename(&dir.join("a"), &dir.join("missing/b"))), ErrorKind::NotFound);
    assert_eq!(kind(disk.rename(&dir.join("d"), &dir.join("d/e"))), ErrorKind::InvalidInput);
    assert_eq!(read_all(disk, &dir.join("a")), b"a");
    assert_eq!(disk.list(&dir.join("d")).unwrap(), []);
}

fn remove_file_takes_the_name_only(disk: &dyn Disk, dir: &Path) {
    let path = dir.join("a");
    let file = disk.open(&path, Open::NEW).unwrap();
    file.write_at(b"bytes", 0, false).unwrap();
    disk.remove_file(&path).unwrap();
    assert_eq!(kind(disk.remove_file(&path)), ErrorKind::NotFound);
    assert_eq!(disk.list(dir).unwrap(), []);
    write_new(disk, &path, b"another");
    file.write_at(b"B", 0, false).unwrap();
    let mut bytes = [0; 5];
    assert_eq!(file.read_at(&mut bytes, 0).unwrap(), 5);
    assert_eq!(&bytes, b"Bytes", "open files outlive their name");
    assert_eq!(read_all(disk, &path), b"another");
    disk.create_dir(&dir.join("d")).unwrap();
    assert_eq!(kind(disk.remove_file(&dir.join("d"))), ErrorKind::IsADirectory);
    assert_eq!(disk.list(dir).unwrap().len(), 2);
}

fn remove_dir_takes_empty_directories_only(disk: &dyn Disk, dir: &Path) {
    disk.create_dir(&dir.join("d")).unwrap();
    write_new(disk, &dir.join("d/a"), b"");
    assert_eq!(kind(disk.remove_dir(&dir.join("d"))), ErrorKind::DirectoryNotEmpty);
    assert_eq!(kind(disk.remove_dir(&dir.join("d/a"))), ErrorKind::NotADirectory);
    disk.remove_file(&dir.join("d/a")).unwrap();
    disk.remove_dir(&dir.join("d")).unwrap();
    assert_eq!(kind(disk.remove_dir(&dir.join("d"))), ErrorKind::NotFound);
    assert_eq!(disk.list(dir).unwrap(), []);
}

fn sync_dir_needs_a_directory(disk: &dyn Disk, dir: &Path) {
    write_new(disk, &dir.join("a"), b"");
    disk.sync_dir(dir).unwrap();
    assert_eq!(kind(disk.sync_dir(&dir.join("missing"))), ErrorKind::NotFound);
}

fn an_open_directory_is_synced_as_by_its_path(disk: &dyn Disk, dir: &Path) {
    let open = disk.open_dir(dir).unwrap();
    write_new(disk, &dir.join("a"), b"");
    open.sync().unwrap();
    disk.remove_file(&dir.join("a")).unwrap();
    open.sync().unwrap();
    assert_eq!(kind(disk.open_dir(&dir.join("missing"))), ErrorKind::NotFound);
}

fn a_lock_is_exclusive_until_dropped(disk: &dyn Disk, dir: &Path) {
    let path = dir.join("lock");
    let lock = disk.lock(&path).unwrap();
    assert_eq!(disk.list(dir).unwrap(), [Entry { name: "lock".into(), kind: EntryKind::File }]);
    assert_eq!(kind(disk.lock(&path)), ErrorKind::WouldBlock);
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(kind(disk.lock(&path)), ErrorKind::WouldBlock));
    });
    let other = disk.lock(&dir.join("other")).unwrap();
    drop(lock);
    let again = disk.lock(&path).unwrap();
    assert_eq!(kind(disk.lock(&path)), ErrorKind::WouldBlock);
    drop(other);
    assert_eq!(kind(disk.lock(&path)), ErrorKind::WouldBlock, "another lock's end is not this one's");
    drop(again);
    disk.lock(&path).unwrap();
    assert_eq!(kind(disk.lock(&dir.join("missing/lock"))), ErrorKind::NotFound);
}

fn a_lock_changes_no_byte(disk: &dyn Disk, dir: &Path) {
    let path = dir.join("lock");
    write_new(disk, &path, b"who holds it");
    let _lock = disk.lock(&path).unwrap();
    assert!(disk.lock(&path).is_err());
    assert_eq!(read_all(disk, &path), b"who holds it");
}
