//! The shape of the source: no path points from a lower layer to a higher one, and only the seam talks to the system.
//!
//! The sources are read as text, comments and literals taken out, and taken apart into words and signs.

use std::fs;
use std::path::{Path, PathBuf};

/// Modules by layer, lowest first. A module may name those of lower layers and itself; those of the layer `shared` also each other.
const LAYERS: [&[&str]; 10] = [
    &["guard", "sync"],
    &["io", "record"],
    SHARED,
    &["segment"],
    &["partition"],
    &["topic"],
    &["broker"],
    &["inspect"],
    &["lib"],
    &["fuzzing"],
];
const SHARED: &[&str] = &["error", "clock", "metrics", "config"];

/// Names that only `src/io/` may speak, beside `std::fs`.
const SYSTEM: [&str; 3] = ["libc", "rustix", "io_uring"];

fn layer(module: &str) -> Option<usize> {
    LAYERS.iter().position(|modules| modules.contains(&module))
}

fn may_name(from: &str, to: &str) -> bool {
    let (Some(here), Some(there)) = (layer(from), layer(to)) else { return false };
    from == to || there < here || (SHARED.contains(&from) && SHARED.contains(&to))
}

/// Words and signs; `::` is one sign. Comments are gone, literals are `"`.
fn tokens(source: &str) -> Vec<String> {
    let chars: Vec<char> = source.chars().collect();
    let at = |i: usize| chars.get(i).copied().unwrap_or('\0');
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut out = Vec::new();
    let mut i = 0;
    while i < chars.len() {
        let c = chars[i];
        if c == '/' && at(i + 1) == '/' {
            while i < chars.len() && chars[i] != '\n' {
                i += 1;
            }
        } else if c == '/' && at(i + 1) == '*' {
            let mut depth = 0;
            loop {
                match (at(i), at(i + 1)) {
                    ('/', '*') => (depth, i) = (depth + 1, i + 2),
                    ('*', '/') => (depth, i) = (depth - 1, i + 2),
                    _ => i += 1,
                }
                if depth == 0 || i >= chars.len() {
                    break;
                }
            }
        } else if is_word(c) {
            let start = i;
            while is_word(at(i)) {
                i += 1;
            }
            let word: String = chars[start..i].iter().collect();
            // r"…", br#"…"#, c"…" and the like; `r#name` is a plain word.
            let prefix = ["r", "b", "c", "br", "cr"].contains(&word.as_str());
            let mut hashes = 0;
            while prefix && word.contains('r') && at(i + hashes) == '#' {
                hashes += 1;
            }
            if prefix && at(i + hashes) == '"' {
                i += hashes;
                if word.contains('r') {
                    let end: Vec<char> = std::iter::once('"').chain(std::iter::repeat_n('#', hashes)).collect();
                    i += 1;
                    while i < chars.len() && !chars[i..].starts_with(&end) {
                        i += 1;
                    }
                    i += end.len();
                } else {
                    i = end_of_string(&chars, i);
                }
                out.push("\"".into());
            } else if word == "b" && at(i) == '\'' {
                i = end_of_char(&chars, i).unwrap_or(i + 1);
                out.push("\"".into());
            } else {
                i += if prefix && hashes == 1 { 1 } else { 0 };
                if !(prefix && hashes == 1) {
                    out.push(word);
                }
            }
        } else if c == '"' {
            i = end_of_string(&chars, i);
            out.push("\"".into());
        } else if c == '\'' {
            match end_of_char(&chars, i) {
                Some(end) => {
                    out.push("\"".into());
                    i = end;
                }
                // A lifetime.
                None => {
                    i += 1;
                    while is_word(at(i)) {
                        i += 1;
                    }
                }
            }
        } else if c == ':' && at(i + 1) == ':' {
            out.push("::".into());
            i += 2;
        } else {
            if !c.is_whitespace() {
                out.push(c.into());
            }
            i += 1;
        }
    }
    out
}

fn end_of_string(chars: &[char], start: usize) -> usize {
    let mut i = start + 1;
    while i < chars.len() && chars[i] != '"' {
        i += if chars[i] == '\\' { 2 } else { 1 };
    }
    i + 1
}

/// One past a character literal, if that is what begins here.
fn end_of_char(chars: &[char], start: usize) -> Option<usize> {
    if chars.get(start + 1) == Some(&'\\') {
        let mut i = start + 3;
        while i < chars.len() && chars[i] != '\'' {
            i += 1;
        }
        return Some(i + 1);
    }
    (chars.get(start + 2) == Some(&'\'')).then_some(start + 3)
}

/// What follows a path's `::`: its next word, or the first words of the paths in braces.
fn heads(tokens: &[String], mut i: usize) -> Vec<String> {
    if tokens.get(i).is_none_or(|token| token != "{") {
        return tokens.get(i).cloned().into_iter().collect();
    }
    let (mut depth, mut heads, mut fresh) = (0, Vec::new(), false);
    while let Some(token) = tokens.get(i) {
        match token.as_str() {
            "{" => {
                depth += 1;
                fresh = depth == 1;
            }
            "}" => depth -= 1,
            "," if depth == 1 => fresh = true,
            word if fresh => {
                heads.push(word.to_owned());
                fresh = false;
            }
            _ => {}
        }
        if depth == 0 {
            break;
        }
        i += 1;
    }
    heads
}

/// What is wrong with one file of the module `module`, which lies `depth` modules below the crate's root.
fn violations(module: &str, depth: usize, source: &str) -> Vec<String> {
    let tokens = tokens(source);
    let is = |i: usize, text: &str| tokens.get(i).is_some_and(|token| token == text);
    let mut found = Vec::new();
    // For each open brace: whether it is a module's, and whether of tests only.
    let mut braces: Vec<(bool, bool)> = Vec::new();
    let mut test_attribute = false;
    let mut pending = None;
    let mut point_up = |to: &str, how: &str| {
        if !may_name(module, to) {
            found.push(format!("{module} names {to} by {how}"));
        }
    };
    let mut system = Vec::new();
    for i in 0..tokens.len() {
        let in_tests = braces.iter().any(|(_, tests)| *tests);
        let token = tokens[i].as_str();
        match token {
            "#" if is(i + 1, "[") && is(i + 2, "cfg") && is(i + 4, "test") => test_attribute = true,
            "mod" if is(i + 2, "{") => pending = Some((true, std::mem::take(&mut test_attribute))),
            ";" | "fn" | "struct" | "enum" | "impl" | "use" => test_attribute = false,
            "{" => braces.push(pending.take().unwrap_or((false, false))),
            "}" => drop(braces.pop()),
            "crate" if is(i + 1, "::") => heads(&tokens, i + 2).iter().for_each(|to| {
                // What lies at the root itself belongs to the library's face.
                point_up(if layer(to).is_some() { to } else { "lib" }, &format!("crate::{to}"));
            }),
            "super" if !(i >= 2 && is(i - 1, "::") && is(i - 2, "super")) => {
                let mut steps = 1;
                while is(i + 2 * steps - 1, "::") && is(i + 2 * steps, "super") {
                    steps += 1;
                }
                let below = depth + braces.iter().filter(|(module, _)| *module).count();
                if steps >= below && is(i + 2 * steps - 1, "::") {
                    heads(&tokens, i + 2 * steps).iter().for_each(|to| {
                        point_up(if layer(to).is_some() { to } else { "lib" }, &format!("super::{to}"));
                    });
                }
            }
            "std" if is(i + 1, "::") && heads(&tokens, i + 2).iter().any(|head| head == "fs") && !in_tests => {
                system.push("std::fs".to_owned())
            }
            word if SYSTEM.contains(&word) && !in_tests => system.push(word.to_owned()),
            _ => {}
        }
    }
    if module != "io" {
        found.extend(system.iter().map(|name| format!("{module} names {name}")));
    }
    found
}

/// All Rust files below a directory.
fn sources(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found.sort();
    found
}

#[test]
fn no_layer_names_a_higher_one_and_only_the_seam_talks_to_the_system() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut wrong = Vec::new();
    let mut modules = Vec::new();
    for path in sources(&src) {
        let inner = path.strip_prefix(&src).unwrap().with_extension("");
        let mut parts: Vec<_> = inner.components().map(|part| part.as_os_str().to_str().unwrap().to_owned()).collect();
        if parts[0] == "bin" || parts == ["main"] {
            continue;
        }
        if parts.last().unwrap() == "mod" {
            parts.pop();
        }
        let module = parts[0].clone();
        if layer(&module).is_none() {
            wrong.push(format!("{}: the module {module} has no layer; give it one in LAYERS", path.display()));
            continue;
        }
        let depth = if module == "lib" { 0 } else { parts.len() };
        let source = fs::read_to_string(&path).unwrap();
        // A file of tests only, by the line that brings it in, may use what tests use.
        let tests_only = parts.last().unwrap() == "tests";
        let found = violations(&module, depth, &source)
            .into_iter()
            .filter(|told| !tests_only || !SYSTEM.iter().chain(&["std::fs"]).any(|name| told.ends_with(&format!("names {name}"))));
        wrong.extend(found.map(|told| format!("{}: {told}", path.display())));
        modules.push(module);
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    for expected in ["io", "record", "segment", "partition", "topic", "broker", "inspect", "lib"] {
        assert!(modules.iter().any(|module| module == expected), "no source of {expected} was found");
    }
}

#[test]
fn arrows_that_point_up_are_seen() {
    let wrong: [(&str, usize, &str); 19] = [
        ("segment", 1, "use crate::partition::Writer;"),
        ("segment", 2, "fn f() { crate::topic::route(b\"x\") }"),
        ("record", 1, "use crate::error::Error;"),
        ("record", 1, "use crate::io::Disk;"),
        ("io", 2, "use crate::record::Record;"),
        ("io", 1, "use crate::Error;"),
        ("error", 1, "use crate::segment::Name;"),
        ("partition", 2, "use crate::{error::Error, segment, broker::{Broker, OpenReport}};"),
        ("partition", 2, "use crate :: broker;"),
        ("topic", 1, "type A = Option<crate::broker::Broker>;"),
        ("segment", 1, "use super::partition::Writer;"),
        ("segment", 2, "use super::super::partition::Writer;"),
        ("segment", 1, "mod inner { use super::super::{record, topic}; }"),
        ("segment", 1, "#[cfg(test)] mod tests { use crate::partition; }"),
        ("config", 1, "use crate::*;"),
        ("segment", 1, "let a = 'x'; use crate::partition; let b = '\\'';"),
        ("segment", 1, "fn f<'a>(x: &'a str) { let q = '\"'; crate::partition::g() }"),
        ("segment", 1, "let s = r#\"a \" b\"#; use crate::partition;"),
        ("segment", 1, "/* /* nested */ */ use crate::partition;"),
    ];
    for (module, depth, source) in wrong {
        assert_eq!(violations(module, depth, source).len(), 1, "{source}: {:?}", violations(module, depth, source));
    }
}

#[test]
fn talk_to_the_system_outside_the_seam_is_seen() {
    let wrong = [
        "use std::fs;",
        "use std::fs::File;",
        "use std::{collections::BTreeMap, fs, io};",
        "use std::{io, fs::File};",
        "fn f() { std::fs::remove_file(p) }",
        "use rustix::fs::statx;",
        "use libc::EIO;",
        "let errno = libc::EIO;",
        "extern crate libc;",
        "use io_uring::IoUring;",
        "#[cfg(test)] use std::io; fn f() { libc::close(0) }",
        "#[cfg(test)] mod tests { } fn f() { libc::close(0) }",
    ];
    for module in ["record", "error", "segment", "partition", "topic", "broker", "inspect", "lib"] {
        for source in wrong {
            assert_eq!(violations(module, 1, source).len(), 1, "{module}: {source}");
        }
    }
    assert!(wrong.iter().all(|source| violations("io", 1, source).is_empty()));
}

#[test]
fn what_is_allowed_is_not_complained_of() {
    let right: [(&str, usize, &str); 17] = [
        ("segment", 2, "use crate::segment::Name; use crate::record::Record; use crate::io::Disk; use crate::error::{Error, Result};"),
        ("broker", 1, "use crate::{topic::Topic, partition, segment, config::BrokerConfig};"),
        ("config", 1, "use crate::error::Error; use crate::io::Backend;"),
        ("error", 1, "use crate::record::{Flaw, RecordTooLarge}; pub(crate) fn f() {}"),
        ("segment", 1, "// use crate::partition;\n/// [`crate::broker::Broker`]\n/* use std::fs; */ //! libc"),
        ("segment", 1, "let text = \"use crate::partition; std::fs; libc\";"),
        ("segment", 1, "let text = r#\"use crate::partition; \" std::fs\"#; let c = b'\"'; let d = br\"libc\";"),
        ("segment", 2, "use super::Segment; use super::name::Name;"),
        ("segment", 2, "mod inner { use super::super::Segment; }"),
        ("segment", 1, "mod tests { use super::*; }"),
        ("segment", 1, "use super::record::Record;"),
        ("segment", 1, "#[cfg(test)] mod tests { use super::*; fn f() { std::fs::read(p); libc::EIO } }"),
        ("record", 1, "use std::{fmt, io}; use std::io::Error;"),
        ("record", 2, "pub(in crate::record) fn f() {}"),
        ("lib", 0, "mod io; pub use broker::Broker;"),
        ("partition", 1, "fn f<'crate_>(fs: &'crate_ str) -> &'static str { fs }"),
        ("io", 1, "use std::fs; use rustix::fs::flock; use super::io::Disk;"),
    ];
    for (module, depth, source) in right {
        assert_eq!(violations(module, depth, source), Vec::<String>::new(), "{source}");
    }
}
