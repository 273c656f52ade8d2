//! `sapwood topics` and `sapwood describe`: what there is, without opening it.

use std::io::Write;

use sapwood::inspect::{Inspector, StoredPartition, StoredTopic};
use serde_json::json;

use crate::args::TopicsArgs;
use crate::output::{Out, line, stdout};
use crate::{Answer, Stop};

/// The topics' names, a line each.
pub fn list(args: &TopicsArgs) -> Result<Answer, Stop> {
    let inspector = Inspector::new();
    let mut out = stdout();
    for topic in topics(&inspector, args)? {
        let (name, path) = (topic.file_name().unwrap_or_default().to_string_lossy(), topic.to_string_lossy());
        if args.json {
            line(&mut out, &json!({ "kind": "topic", "name": name, "path": path }))?;
        } else {
            writeln!(out, "{name}")?;
        }
    }
    out.flush()?;
    Ok(Answer::Clean)
}

/// Each topic's settings and partitions.
pub fn describe(args: &TopicsArgs) -> Result<Answer, Stop> {
    let inspector = Inspector::new();
    let mut out = stdout();
    let mut answer = Answer::Clean;
    for topic in topics(&inspector, args)? {
        let topic = inspector.describe(&topic)?;
        if args.json {
            tell_programs(&mut out, &topic)?;
        } else {
            tell_people(&mut out, &topic)?;
        }
        out.flush()?;
        let is_clean = topic.unsound.is_none() && topic.partitions.iter().all(|partition| partition.damage.is_none());
        answer = answer.and(Answer::clean_if(is_clean));
    }
    Ok(answer)
}

fn topics(inspector: &Inspector, args: &TopicsArgs) -> Result<Vec<std::path::PathBuf>, Stop> {
    let topics = inspector.topics(&args.dir)?;
    if topics.is_empty() && !inspector.is_data_dir(&args.dir)? {
        return Err(Stop::Failed(format!("{} is no topic's directory, and no data directory", args.dir.display())));
    }
    Ok(topics)
}

fn tell_people(out: &mut Out, topic: &StoredTopic) -> Result<(), Stop> {
    writeln!(out, "{}: {} partitions", topic.path.display(), topic.partitions.len())?;
    match (&topic.settings, &topic.unsound) {
        (Some(settings), _) => writeln!(out, "  settings: {}", json!(settings))?,
        (None, Some(error)) => writeln!(out, "  settings: none that can be used: {error}")?,
        (None, None) => writeln!(out, "  settings: none; a broker's fallback serves")?,
    }
    for partition in &topic.partitions {
        let StoredPartition { path, segments, first_offset, next_offset, bytes_on_disk, .. } = partition;
        let number = path.file_name().unwrap_or_default().to_string_lossy();
        write!(out, "  {number}: {segments} segments, {first_offset} up to, not including, {next_offset}, {bytes_on_disk} bytes")?;
        if partition.is_sealed {
            write!(out, "; sealed")?;
        }
        match &partition.damage {
            Some(error) => writeln!(out, "; {error}")?,
            None => writeln!(out)?,
        }
    }
    Ok(())
}

fn tell_programs(out: &mut Out, topic: &StoredTopic) -> Result<(), Stop> {
    let partitions = topic.partitions.iter().map(|partition| {
        json!({
            "path": partition.path.to_string_lossy(),
            "segments": partition.segments,
            "first_offset": partition.first_offset,
            "next_offset": partition.next_offset,
            "bytes_on_disk": partition.bytes_on_disk,
            "sealed": partition.is_sealed,
            "damage": partition.damage.as_ref().map(ToString::to_string),
        })
    });
    let told = json!({
        "kind": "topic",
        "name": topic.path.file_name().unwrap_or_default().to_string_lossy(),
        "path": topic.path.to_string_lossy(),
        "settings": topic.settings,
        "settings_unsound": topic.unsound.as_ref().map(ToString::to_string),
        "partitions": partitions.collect::<Vec<_>>(),
    });
    Ok(line(out, &told)?)
}
