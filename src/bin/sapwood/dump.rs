//! `sapwood dump`: records or index entries, and where and why they end.

use std::io::Write;
use std::path::{Path, PathBuf};

use sapwood::inspect::{Inspector, StoredRecord, StoredRecords};
use serde_json::{Map, Value, json};

use crate::args::{DumpArgs, What};
use crate::output::{Out, line, put_bytes, stdout};
use crate::{Answer, Stop};

/// Prints what is asked for.
pub fn run(args: &DumpArgs) -> Result<Answer, Stop> {
    let inspector = Inspector::new();
    let mut dump = Dump { out: stdout(), args, printed: 0 };
    let answer = if args.path.is_dir() {
        // Whose directory it is not says so before anything is printed.
        if crate::partitions(&inspector, &args.path)? != [args.path.clone()] {
            return Err(Stop::Failed(format!("{} holds several partitions, or is not a partition's own; name one", args.path.display())));
        }
        match args.what {
            What::Records => dump.records(inspector.read(&args.path, args.from)?),
            What::Index => dump.entries_of_all(&inspector, "index"),
            What::Timeindex => dump.entries_of_all(&inspector, "timeindex"),
        }
    } else {
        match extension(&args.path) {
            "index" | "timeindex" => dump.entries(&inspector, &args.path),
            _ if holds_neither(&args.path) => {
                return Err(Stop::Failed(format!("{} holds neither records nor entries of an index", args.path.display())));
            }
            _ => dump.records(inspector.read_log(&args.path, args.from)?),
        }
    }?;
    dump.out.flush()?;
    Ok(answer)
}

/// Whether a file's name is that of another kind of the engine's files.
fn holds_neither(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    extension(path) == "sum" || matches!(name, "checkpoint" | "topic.json" | ".lock")
}

fn extension(path: &Path) -> &str {
    path.extension().and_then(|extension| extension.to_str()).unwrap_or_default()
}

struct Dump<'a> {
    out: Out,
    args: &'a DumpArgs,
    printed: u64,
}

impl Dump<'_> {
    fn is_full(&self) -> bool {
        self.args.max.is_some_and(|max| self.printed >= max)
    }

    fn records(&mut self, mut records: StoredRecords) -> Result<Answer, Stop> {
        let mut next = self.args.from;
        loop {
            // Before anything is read that is not asked for: it may be damaged.
            if self.is_full() {
                return self.ended(&records, "as many as --max says", None);
            }
            if self.args.to.is_some_and(|to| next >= to) {
                return self.ended(&records, "as far as --to says", None);
            }
            match records.next() {
                None => return self.ended(&records, "the end of the log", None),
                Some(Err(error)) if error.is_damage() => return self.ended(&records, "damage", Some(&error)),
                Some(Err(error)) => return Err(error.into()),
                // The log may begin behind what is asked for.
                Some(Ok(stored)) if self.args.to.is_some_and(|to| stored.record.offset >= to) => next = stored.record.offset,
                Some(Ok(stored)) => {
                    self.record(&stored)?;
                    next = stored.record.offset.saturating_add(1);
                }
            }
        }
    }

    fn record(&mut self, stored: &StoredRecord) -> Result<(), Stop> {
        let StoredRecord { record, base, position, .. } = stored;
        if self.args.json {
            let mut object = Map::new();
            object.insert("kind".to_owned(), "record".into());
            for (name, number) in [("offset", record.offset), ("base", *base), ("position", *position), ("timestamp", record.timestamp)] {
                object.insert(name.to_owned(), number.into());
            }
            put_bytes(&mut object, "key", &record.key);
            put_bytes(&mut object, "value", &record.value);
            line(&mut self.out, &Value::Object(object))?;
        } else {
            let (offset, timestamp) = (record.offset, record.timestamp);
            let (key, value) = (record.key.escape_ascii(), record.value.escape_ascii());
            writeln!(self.out, "{offset} @{base:020}:{position} t={timestamp} key=\"{key}\" value=\"{value}\"")?;
        }
        self.printed += 1;
        Ok(())
    }

    /// Says where and why it ended.
    fn ended(&mut self, records: &StoredRecords, why: &str, error: Option<&sapwood::Error>) -> Result<Answer, Stop> {
        let printed = self.printed;
        if self.args.json {
            let place = records.place();
            let told = json!({
                "kind": "end",
                "records": printed,
                "why": why,
                "error": error.map(ToString::to_string),
                "path": place.as_ref().map(|place| place.path.to_string_lossy()),
                "position": place.as_ref().map(|place| place.position),
                "next_offset": place.as_ref().map(|place| place.offset),
            });
            line(&mut self.out, &told)?;
        } else {
            let sentence = match (error, records.place()) {
                (Some(error), _) => error.to_string(),
                (None, Some(place)) if self.args.max.is_none() && self.args.to.is_none() => {
                    format!("{why} at {} of {:?}, where the record {} would begin", place.position, place.path, place.offset)
                }
                (None, _) => why.to_owned(),
            };
            // Apart from the records, which may be piped on.
            self.out.flush()?;
            eprintln!("sapwood: {printed} records, up to {sentence}");
        }
        Ok(Answer::clean_if(error.is_none()))
    }

    fn entries_of_all(&mut self, inspector: &Inspector, wanted: &str) -> Result<Answer, Stop> {
        let paths: Vec<PathBuf> = inspector.index_files(&self.args.path)?.into_iter().filter(|path| extension(path) == wanted).collect();
        let mut answer = Answer::Clean;
        for path in paths {
            answer = answer.and(self.entries(inspector, &path)?);
        }
        Ok(answer)
    }

    fn entries(&mut self, inspector: &Inspector, path: &Path) -> Result<Answer, Stop> {
        let second = if extension(path) == "index" { "position" } else { "timestamp" };
        let mut entries = inspector.read_index(path)?;
        let mut why = "the end of the entries";
        for entry in &mut entries {
            let entry = entry?;
            if entry.offset < self.args.from || self.args.to.is_some_and(|to| entry.offset >= to) {
                continue;
            }
            if self.is_full() {
                why = "as many as --max says";
                break;
            }
            if self.args.json {
                let told = json!({
                    "kind": "entry",
                    "file": path.file_name().unwrap_or_default().to_string_lossy(),
                    "at": entry.at,
                    "offset": entry.offset,
                    second: entry.second,
                });
                line(&mut self.out, &told)?;
            } else {
                writeln!(self.out, "{} +{} offset={} {second}={}", path.display(), entry.at, entry.offset, entry.second)?;
            }
            self.printed += 1;
        }
        let stray = entries.stray_bytes();
        let why = if stray > 0 { format!("{stray} bytes that are no entry") } else { why.to_owned() };
        if self.args.json {
            let path = path.to_string_lossy();
            line(&mut self.out, &json!({ "kind": "end", "path": path, "position": entries.end(), "entries": self.printed, "why": why }))?;
        } else {
            self.out.flush()?;
            eprintln!("sapwood: {} entries, up to {why} at {} of {path:?}", self.printed, entries.end());
        }
        Ok(Answer::clean_if(stray == 0))
    }
}
