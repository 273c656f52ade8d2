//! Topics: routing, names, settings that stay, and what else may lie in the data directory.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;

use sapwood::{Backend, Broker, Durability, Error, TopicConfig};

use crate::damage;
use crate::format::{self, Layout};
use crate::oracle::{assert_closed, assert_sound_while_open};
use crate::support::{
    TOPIC, append, bytes_in, config, contents, copy_dir, create, data_with, each_backend, fixture, open, partition_dir, partition_of,
    read_all, report_of, rows_of, scratch, segments_of, small, snapshot,
};

/// FNV-1a, 64 bits, as its authors publish it.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

#[test]
fn keys_are_routed_by_fnv_1a() {
    // From the authors' test vectors.
    for (key, hash) in
        [("", 0xcbf2_9ce4_8422_2325), ("a", 0xaf63_dc4c_8601_ec8c), ("foobar", 0x8594_4171_f739_67e8), ("b", 0xaf63_df4c_8601_f1a5)]
    {
        assert_eq!(fnv1a(key.as_bytes()), hash);
    }
    let data = scratch();
    let broker = open(data.path(), Backend::Auto, &small());
    let mut keys: Vec<Vec<u8>> = (0..200).map(|number| format!("user-{number}").into_bytes()).collect();
    keys.extend((0..=255).map(|byte| vec![byte]));
    keys.extend([vec![0; 3], vec![0xff; 9], "ключ".into(), vec![b'x'; 10_000]]);
    for partitions in [1, 2, 3, 7, 16] {
        let topic = broker.create_topic(&format!("p{partitions}"), TopicConfig { partitions, ..small() }).unwrap();
        for key in &keys {
            assert_eq!(u64::from(topic.partition_for(Some(key))), fnv1a(key) % u64::from(partitions), "{}", key.escape_ascii());
        }
        for key in keys.iter().step_by(40) {
            assert_eq!(u64::from(topic.produce(Some(key), b"v").unwrap().partition), fnv1a(key) % u64::from(partitions));
        }
    }
    // Pinned by number: these must never change.
    let topic = broker.topic("p7").unwrap();
    let places = ["a", "foobar", "user-1", "user-2"].map(|key| u64::from(topic.partition_for(Some(key.as_bytes()))));
    assert_eq!(places, [0xaf63_dc4c_8601_ec8c % 7, 0x8594_4171_f739_67e8 % 7, fnv1a(b"user-1") % 7, fnv1a(b"user-2") % 7]);
}

#[test]
fn records_without_a_key_go_round() {
    each_backend(|backend| {
        let data = scratch();
        let broker = open(data.path(), backend, &small());
        let topic = broker.create_topic(TOPIC, TopicConfig { partitions: 3, ..small() }).unwrap();
        let mut counts = [0; 3];
        for number in 0..60 {
            // No key and an empty key are the same.
            let key: Option<&[u8]> = if number % 2 == 0 { None } else { Some(b"") };
            let at = if number % 3 == 0 { broker.produce(TOPIC, key, b"v").unwrap() } else { topic.produce(key, b"v").unwrap() };
            counts[at.partition as usize] += 1;
        }
        assert_eq!(counts, [20; 3]);
        let next: Vec<_> = (0..3).map(|partition| broker.next_offset(TOPIC, partition).unwrap()).collect();
        assert_eq!(next, [20; 3]);
        let asked: Vec<_> = (0..6).map(|_| topic.partition_for(None)).collect();
        for partition in 0..3 {
            assert_eq!(asked.iter().filter(|&&at| at == partition).count(), 2, "{asked:?}");
        }
    });
}

#[test]
fn names_outside_the_rule_are_refused_before_any_path_is_made() {
    let long = "x".repeat(250);
    let longer = "x".repeat(256);
    let wrong = [
        "",
        ".",
        "..",
        "...",
        "../x",
        "../../x",
        "a/b",
        "/abs",
        "a/",
        "/",
        "a\0b",
        "\0",
        "lost+found",
        "new\nline",
        "a b",
        " a",
        "a\\b",
        "ü",
        "日本",
        "a:b",
        "~",
        "$HOME",
        "*",
        ".hidden",
        ".lock",
        ".new-a",
        ".del-a",
        "a\u{7f}",
        "%2e%2e",
        &long,
        &longer,
    ];
    let outer = scratch();
    fs::create_dir(outer.path().join("x")).unwrap();
    fs::write(outer.path().join("x/file"), b"precious").unwrap();
    let data = outer.path().join("data");
    let broker = open(&data, Backend::Auto, &small());
    broker.create_topic("a", small()).unwrap();
    let before = bytes_in(outer.path());
    for name in wrong {
        let error = broker.create_topic(name, small()).map(drop).unwrap_err();
        assert!(matches!(&error, Error::InvalidTopicName { name: told } if told == name), "{name:?}: {error}");
        for error in [
            broker.topic(name).map(drop).unwrap_err(),
            broker.delete_topic(name).unwrap_err(),
            broker.num_partitions(name).map(drop).unwrap_err(),
            broker.produce(name, None, b"v").map(drop).unwrap_err(),
            broker.consume(name, 0, 0).map(drop).unwrap_err(),
        ] {
            assert!(matches!(error, Error::InvalidTopicName { .. } | Error::TopicNotFound { .. }), "{name:?}: {error}");
        }
        assert!(bytes_in(outer.path()) == before, "{name:?} touched the disk");
    }
    assert_eq!(broker.topics(), ["a"]);
}

#[test]
fn whatever_name_is_accepted_works_and_can_be_deleted() {
    each_backend(|backend| {
        let (long, many) = ("y".repeat(249), "z".repeat(200));
        let names = ["a", "0", "-x", "_", "a.b", "a..b", "A-Z_a-z.0-9", "topic.json", "00000000000000000000.log", "CON", &long, &many];
        let data = scratch();
        let broker = open(data.path(), backend, &small());
        for name in names {
            broker.create_topic(name, small()).unwrap();
            broker.produce(name, None, name.as_bytes()).unwrap();
            assert!(data.path().join(name).join("0").is_dir(), "{name}");
        }
        broker.close().unwrap();
        let broker = open(data.path(), backend, &small());
        let mut sorted = names.to_vec();
        sorted.sort_unstable();
        assert_eq!(broker.topics(), sorted);
        for name in names {
            assert_eq!(&broker.consume(name, 0, 0).unwrap().value[..], name.as_bytes());
            broker.delete_topic(name).unwrap();
            assert!(!data.path().join(name).exists());
        }
        assert!(broker.topics().is_empty());
        broker.close().unwrap();
        let left: Vec<_> = fs::read_dir(data.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, [".lock"], "nothing of the topics is left");
    });
}

#[test]
fn a_topic_is_created_once() {
    each_backend(|backend| {
        let data = scratch();
        let broker = open(data.path(), backend, &small());
        fs::write(data.path().join("file"), b"not a topic").unwrap();
        fs::create_dir(data.path().join("folder")).unwrap();
        fs::write(data.path().join("folder/notes.txt"), b"kept").unwrap();
        broker.create_topic(TOPIC, TopicConfig { partitions: 2, ..small() }).unwrap();
        broker.produce(TOPIC, Some(b"k"), b"v").unwrap();
        for name in [TOPIC, "file", "folder"] {
            let names = || bytes_in(data.path()).into_keys().collect::<Vec<_>>();
            let before = names();
            let error = broker.create_topic(name, TopicConfig { partitions: 5, ..small() }).map(drop).unwrap_err();
            assert!(matches!(&error, Error::TopicExists { topic } if topic == name), "{name}: {error}");
            assert_eq!(names(), before);
            assert_eq!(fs::read(data.path().join("file")).unwrap(), b"not a topic");
            assert_eq!(fs::read(data.path().join("folder/notes.txt")).unwrap(), b"kept");
        }
        assert_eq!(broker.num_partitions(TOPIC).unwrap(), 2);
        broker.close().unwrap();
        let broker = open(data.path(), backend, &small());
        let error = broker.create_topic(TOPIC, small()).map(drop).unwrap_err();
        assert!(matches!(error, Error::TopicExists { .. }), "{error}");
    });
}

#[test]
fn many_threads_create_one_topic_and_one_of_them_does() {
    let data = scratch();
    let broker = open(data.path(), Backend::Auto, &small());
    let made: usize = std::thread::scope(|scope| {
        let create = || match broker.create_topic(TOPIC, small()) {
            Ok(_) => 1,
            Err(Error::TopicExists { .. }) => 0,
            Err(other) => panic!("{other}"),
        };
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(create)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!(made, 1);
    assert_eq!(broker.produce(TOPIC, None, b"v").unwrap().offset, 0);
}

#[test]
fn half_made_and_half_deleted_topics_are_cleared_away_on_opening() {
    each_backend(|backend| {
        let data = scratch();
        let (broker, partition) = create(data.path(), backend, &small());
        append(&partition, b"k", b"kept");
        drop(partition);
        broker.close().unwrap();
        // A topic that was being made, one that was being deleted, and the latter beside a new one of the same name.
        copy_dir(&data.path().join(TOPIC), &data.path().join(".new-half"));
        fs::create_dir_all(data.path().join(".new-bare")).unwrap();
        for name in [".del-old", ".del-t"] {
            for partition in ["0", "1", "2"] {
                copy_dir(&fixture("demo-36-segment-270"), &data.path().join(name).join(partition));
            }
        }
        fs::create_dir_all(data.path().join(".del-empty/0")).unwrap();
        let long = format!(".del-{}", "x".repeat(249));
        fs::create_dir_all(data.path().join(&long).join("0")).unwrap();

        let broker = open(data.path(), backend, &small());
        assert_eq!(broker.topics(), [TOPIC]);
        let mut removed = broker.report().removed.clone();
        removed.sort();
        let mut expected: Vec<_> =
            [".new-half", ".new-bare", ".del-old", ".del-t", ".del-empty", &long].map(|name| data.path().join(name)).into();
        expected.sort();
        assert_eq!(removed, expected);
        assert!(expected.iter().all(|path| !path.exists()));
        assert_eq!(contents(&read_all(&partition_of(&broker))), [(b"k".to_vec(), b"kept".to_vec())]);
        // The names are free, and nothing old comes back.
        for name in ["half", "old"] {
            broker.create_topic(name, small()).unwrap();
            assert_eq!(broker.next_offset(name, 0).unwrap(), 0);
        }
        broker.close().unwrap();
        let broker = open(data.path(), backend, &small());
        assert_eq!(broker.topics(), ["half", "old", TOPIC]);
        assert!(broker.report().removed.is_empty());
    });
}

#[test]
fn what_is_not_ours_is_ignored_never_deleted_and_told_of() {
    each_backend(|backend| {
        let (data, partition) = data_with("demo-36-segment-270");
        let topic = data.path().join(TOPIC);
        for dir in ["lost+found", ".hidden", "a topic"] {
            fs::create_dir(data.path().join(dir)).unwrap();
            fs::write(data.path().join(dir).join("inside"), b"kept").unwrap();
        }
        for file in ["README", "notes.txt", ".new-file", ".DS_Store"] {
            fs::write(data.path().join(file), b"kept").unwrap();
        }
        std::os::unix::fs::symlink("nowhere", data.path().join("link")).unwrap();
        let odd = data.path().join(OsStr::from_bytes(b"not \xff\xfe text"));
        fs::write(&odd, b"kept").unwrap();
        fs::write(partition.join(OsStr::from_bytes(b"\xff.log")), b"kept").unwrap();
        for dir in ["lost+found", "00", "01", "-1", "+1", "x", "99999999999999999999"] {
            fs::create_dir(topic.join(dir)).unwrap();
            fs::write(topic.join(dir).join("00000000000000000000.log"), b"kept").unwrap();
        }
        for file in ["notes.txt", "1"] {
            fs::write(topic.join(file), b"kept").unwrap();
        }
        for name in ["stray-file", "stray-dir", "wrong-name-file"] {
            damage::apply(&partition, name);
        }
        std::os::unix::fs::symlink("nowhere", partition.join("00000000000000000099.log")).unwrap();
        let ours = |path: &std::path::Path| {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            name == ".lock"
                || path == partition.join("checkpoint")
                || (path.parent() == Some(&partition) && !path.is_dir() && name.len() <= 30 && name.starts_with("000000000000000000"))
        };
        let strays = |data: &std::path::Path| {
            let all = snapshot(data).into_iter().filter(|(path, _)| !ours(path) && !path.is_dir());
            all.map(|(path, (bytes, time))| (path, bytes, time)).collect::<Vec<_>>()
        };
        let is_a_dir = |path: &std::path::Path| path.is_dir();
        let before = strays(data.path());
        assert!(before.len() > 15, "the strays are counted: {}", before.len());

        for round in 0..2u64 {
            let broker = open(data.path(), backend, &small());
            assert_eq!(broker.topics(), [TOPIC]);
            assert_eq!(broker.num_partitions(TOPIC).unwrap(), 1);
            let report = report_of(&broker);
            assert_eq!((report.segments, report.first_offset, report.next_offset), (6, 0, 36 + round));
            let mut told = broker.report().ignored.clone();
            told.extend(report.ignored.iter().cloned());
            for name in ["lost+found", ".hidden", "a topic", "README", "notes.txt", ".new-file", ".DS_Store", "link"] {
                assert!(told.contains(&data.path().join(name)), "{name} is not in {told:#?}");
            }
            let in_partition =
                ["README", "LOCK", "lost+found", "00000000000000000030.log.tmp", "00000000000000000036.log", "0000000000000000030.log"];
            for name in
                in_partition.into_iter().chain(["000000000000000000030.log", "99999999999999999999.log", "00000000000000000030.LOG"])
            {
                assert!(report.ignored.contains(&partition.join(name)), "{name} is not in {:#?}", report.ignored);
            }
            assert!(told.contains(&odd) && broker.report().removed.is_empty());
            let rows = read_all(&partition_of(&broker));
            assert_eq!(rows[..36], rows_of(&format::demo(36), 0));
            assert_eq!(append(&partition_of(&broker), b"k", b"v"), 36 + round);
            broker.close().unwrap();
            assert_eq!(strays(data.path()), before);
            for dir in ["lost+found", ".hidden", "a topic"] {
                assert!(is_a_dir(&data.path().join(dir)));
            }
            assert!(is_a_dir(&partition.join("00000000000000000036.log")) && is_a_dir(&partition.join("lost+found")));
        }
    });
}

#[test]
fn a_foreign_directory_where_the_next_segment_belongs_stops_the_append_not_the_host() {
    each_backend(|backend| {
        let (data, partition) = data_with("demo-36-segment-270");
        damage::apply(&partition, "stray-dir");
        let broker = open(data.path(), backend, &segments_of(270));
        let handle = partition_of(&broker);
        let error = handle.append(sapwood::Batch::of(Some(b"k"), b"v").unwrap()).and_then(sapwood::Ticket::wait).unwrap_err();
        eprintln!("{error}");
        assert_eq!(read_all(&handle), rows_of(&format::demo(36), 0));
        assert!(partition.join("00000000000000000036.log").is_dir());
        drop((handle, broker));
        fs::remove_dir(partition.join("00000000000000000036.log")).unwrap();
        fs::remove_dir(partition.join("lost+found")).unwrap();
        let broker = open(data.path(), backend, &segments_of(270));
        assert_eq!(append(&partition_of(&broker), b"k", b"v"), 36);
        broker.close().unwrap();
        assert_eq!(assert_closed(&partition, 1).segments.len(), 7);
    });
}

#[test]
fn settings_stay_with_the_topic() {
    each_backend(|backend| {
        let data = scratch();
        let odd = TopicConfig {
            partitions: 3,
            segment_bytes: 12_345,
            segment_age: Some(std::time::Duration::from_millis(7_654_321)),
            retention_age: Some(std::time::Duration::from_secs(86_400)),
            retention_bytes: Some(1 << 40),
            preallocate_bytes: 8192,
            index_interval: 7,
            durability: Durability::Interval { bytes: 777, time: std::time::Duration::from_micros(1_234_567) },
            linger_us: 11,
            commit_bytes: 5000,
            commit_records: 77,
            tail_bytes: 123_456,
            max_batch_bytes: 4321,
            queue_bytes: 99_999,
            queue_batches: 17,
        };
        let (broker, _) = create(data.path(), backend, &odd);
        broker.create_topic("os", TopicConfig { durability: Durability::Os, ..small() }).unwrap();
        broker.close().unwrap();
        let other = TopicConfig { partitions: 9, segment_bytes: 1, index_interval: 1, ..TopicConfig::default() };
        let broker = open(data.path(), backend, &other);
        assert_eq!(broker.topic(TOPIC).unwrap().config(), odd);
        assert_eq!(broker.topic("os").unwrap().config().durability, Durability::Os);
        assert_eq!(broker.num_partitions(TOPIC).unwrap(), 3);
        let partition = partition_of(&broker);
        for number in 0..100u32 {
            append(&partition, b"key", &number.to_be_bytes());
        }
        let error = partition.append(sapwood::Batch::of(None, &[0; 4321]).unwrap()).map(drop).unwrap_err();
        assert!(matches!(error, Error::BatchTooLarge { limit: 4321, .. }), "{error}");
        drop(partition);
        broker.close().unwrap();
        assert_eq!(assert_closed(&partition_dir(data.path()), 7).segments.len(), 1);
    });
}

#[test]
fn without_readable_settings_the_fallback_serves_and_partitions_are_counted() {
    each_backend(|backend| {
        for text in [None, Some(&b""[..]), Some(b"{"), Some(b"null"), Some(b"\xff\xfe"), Some(b"{\"partitions\": \"many\"}")] {
            let data = scratch();
            let (broker, partition) = create(data.path(), backend, &TopicConfig { partitions: 3, ..segments_of(500) });
            append(&partition, b"k", b"v");
            drop(partition);
            broker.close().unwrap();
            let settings = data.path().join(TOPIC).join("topic.json");
            match text {
                None => fs::remove_file(&settings).unwrap(),
                Some(text) => fs::write(&settings, text).unwrap(),
            }
            let fallback = TopicConfig { partitions: 1, ..segments_of(270) };
            let broker = Broker::open(data.path(), config(backend, fallback.clone())).unwrap();
            let topic = broker.topic(TOPIC).unwrap();
            assert_eq!((topic.num_partitions(), topic.config().segment_bytes), (3, 270), "{text:?}");
            for _ in 0..9 {
                append(&partition_of(&broker), b"user-1", b"value-00000");
            }
            assert_eq!(partition_of(&broker).next_offset(), 10);
            drop(topic);
            broker.close().unwrap();
            assert_eq!(assert_closed(&partition_dir(data.path()), 1).segments.len(), 2);
        }
    });
}

#[test]
fn a_partition_that_is_missing_is_named() {
    each_backend(|backend| {
        for (remove, settings) in [("1", true), ("1", false), ("2", true), ("0", false)] {
            let data = scratch();
            let (broker, _) = create(data.path(), backend, &TopicConfig { partitions: 3, ..small() });
            broker.close().unwrap();
            let topic = data.path().join(TOPIC);
            fs::rename(topic.join(remove), data.path().join("elsewhere")).unwrap();
            if !settings {
                fs::remove_file(topic.join("topic.json")).unwrap();
            }
            let error = Broker::open(data.path(), config(backend, small())).map(drop).unwrap_err();
            let missing: u32 = remove.parse().unwrap();
            let named = matches!(&error, Error::PartitionMissing { path, partitions: 3, missing: m } if *path == topic && *m == missing);
            assert!(named && error.is_damage(), "{remove}: {error}");
            assert!(!topic.join(remove).exists(), "nothing is made in its place");
            fs::rename(data.path().join("elsewhere"), topic.join(remove)).unwrap();
            let broker = open(data.path(), backend, &small());
            assert_eq!(broker.num_partitions(TOPIC).unwrap(), 3);
        }
    });
}

#[test]
fn old_bytes_under_a_new_name_never_mix_with_a_new_topic() {
    each_backend(|backend| {
        // A topic whose deletion lost all but one segment, as an engine without tombstones leaves it.
        let data = scratch();
        let old = data.path().join("old/0");
        format::write_partition(&old, &format::demo(5), Layout::default());
        let broker = open(data.path(), backend, &small());
        assert_eq!(broker.next_offset("old", 0).unwrap(), 5);
        let error = broker.create_topic("old", small()).map(drop).unwrap_err();
        assert!(matches!(error, Error::TopicExists { .. }), "{error}");
        broker.delete_topic("old").unwrap();
        broker.create_topic("old", small()).unwrap();
        assert_eq!(broker.produce("old", None, b"new").unwrap().offset, 0);
        assert_eq!(assert_sound_while_open(&old).records.len(), 1);
    });
}

#[test]
fn a_directory_that_is_none_is_an_error_of_its_own() {
    let data = scratch();
    fs::write(data.path().join("file"), b"").unwrap();
    for path in ["file", "file/below"] {
        let error = Broker::open(data.path().join(path), config(Backend::Auto, small())).map(drop).unwrap_err();
        assert!(matches!(error, Error::Io { .. }), "{error}");
    }
    assert_eq!(fs::read(data.path().join("file")).unwrap(), b"");
}
