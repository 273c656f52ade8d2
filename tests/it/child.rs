//! Second processes: this binary started again in another role, to be killed, limited, or locked out.
//!
//! A child runs the one test [`entry`], which an environment variable turns into the role. It talks in lines that begin with `@`.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{ChildStdin, ChildStdout, Command, ExitStatus, Stdio};

use sapwood::{Backend, Broker, Error, TopicConfig};
use serde_json::{Value, json};

use crate::support::{append, config, open, partition_of};
use crate::{environment, fork, kill, lengths, limits, many, pinning};

const ROLE: &str = "SAPWOOD_IT_ROLE";
const ARGUMENTS: &str = "SAPWOOD_IT_ARGUMENTS";

/// A running child; killed when dropped.
pub struct Child {
    process: std::process::Child,
    output: BufReader<ChildStdout>,
    input: Option<ChildStdin>,
}

impl Child {
    pub fn start(role: &str, arguments: &Value) -> Self {
        // A file that meets a limit of its size is told by an error: the signal that ends the process is none of a library's business.
        let mut process = Command::new("sh")
            .args(["-c", r#"trap "" XFSZ; exec "$0" "$@""#])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "child::entry", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .env(ARGUMENTS, arguments.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        let input = process.stdin.take();
        Self { process, output, input }
    }

    /// What it says next; none once it ended. A line that the end cut off was not said.
    pub fn line(&mut self) -> Option<String> {
        loop {
            let mut line = Vec::new();
            self.output.read_until(b'\n', &mut line).unwrap();
            if line.pop() != Some(b'\n') {
                return None;
            }
            if let Some(said) = line.strip_prefix(b"@") {
                return Some(String::from_utf8(said.to_vec()).unwrap());
            }
        }
    }

    /// What it says next, which must be something.
    #[track_caller]
    pub fn expect_line(&mut self) -> String {
        self.line().expect("the child ended early; what it printed tells why")
    }

    /// SIGKILL, and waits until it is gone. What it said before can still be read.
    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Ends its input, which it takes as the sign to end, and waits for that.
    pub fn finish(&mut self) -> ExitStatus {
        self.input = None;
        self.process.wait().unwrap()
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// What a child was told.
pub fn argument(name: &str) -> Value {
    let all: Value = serde_json::from_str(&std::env::var(ARGUMENTS).unwrap()).unwrap();
    all[name].clone()
}

pub fn text(name: &str) -> String {
    argument(name).as_str().unwrap().to_owned()
}

/// Says a line to the parent.
pub fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    out.write_all(format!("@{line}\n").as_bytes()).unwrap();
    out.flush().unwrap();
}

/// Blocks until the parent ends this process or its input.
pub fn wait_for_the_parent() {
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

pub fn backend_name(backend: Backend) -> &'static str {
    match backend {
        Backend::Auto => "auto",
        Backend::Uring => "uring",
        Backend::Posix => "posix",
    }
}

/// The backend that a child was told to use.
pub fn backend() -> Backend {
    match text("backend").as_str() {
        "auto" => Backend::Auto,
        "uring" => Backend::Uring,
        "posix" => Backend::Posix,
        other => panic!("no backend is called {other}"),
    }
}

/// Appends the records in a process of their own, each acknowledged before the next, then kills that process.
pub fn append_and_kill(data: &Path, backend: Backend, fallback: &TopicConfig, records: &[(Vec<u8>, Vec<u8>)]) -> Vec<u64> {
    let arguments = json!({ "data": data, "backend": backend_name(backend), "fallback": fallback, "records": records });
    let mut child = Child::start("append", &arguments);
    let offsets = records.iter().map(|_| child.expect_line().parse().unwrap()).collect();
    child.kill();
    assert_eq!(child.line(), None);
    offsets
}

fn append_role() {
    let records: Vec<(Vec<u8>, Vec<u8>)> = serde_json::from_value(argument("records")).unwrap();
    let fallback: TopicConfig = serde_json::from_value(argument("fallback")).unwrap();
    let broker = open(Path::new(&text("data")), backend(), &fallback);
    let partition = partition_of(&broker);
    for (key, value) in records {
        say(&append(&partition, &key, &value).to_string());
    }
    wait_for_the_parent();
}

/// Opens a data directory, says so, and holds it; or says that it is locked.
fn hold_role() {
    match Broker::open(text("data"), config(backend(), TopicConfig::default())) {
        Ok(_broker) => {
            say("open");
            wait_for_the_parent();
        }
        Err(Error::Locked { .. }) => say("locked"),
        Err(other) => panic!("{other}"),
    }
}

fn echo_role() {
    say(&text("word"));
    wait_for_the_parent();
    say("end");
}

#[test]
fn entry() {
    let Ok(role) = std::env::var(ROLE) else {
        let mut child = Child::start("echo", &json!({ "word": "hello" }));
        assert_eq!(child.expect_line(), "hello");
        assert!(child.finish().success());
        assert_eq!(child.line().as_deref(), Some("end"));
        assert_eq!(child.line(), None);
        return;
    };
    // The harness may have begun a line.
    std::io::stdout().write_all(b"\n").unwrap();
    match role.as_str() {
        "echo" => echo_role(),
        "append" => append_role(),
        "hold" => hold_role(),
        "produce" => kill::produce_role(),
        "recover" => lengths::recover_role(),
        "fork" => fork::fork_role(),
        "no uring" => environment::no_uring_role(),
        "no probe" => environment::no_probe_role(),
        "pinning" => pinning::pinning_role(),
        "signals" => environment::signals_role(),
        "few files" => limits::few_files_role(),
        "no threads" => limits::no_threads_role(),
        "rest" => many::rest_role(),
        "little locked memory" => many::little_locked_memory_role(),
        "few descriptors" => many::few_descriptors_role(),
        "coming and going" => many::coming_and_going_role(),
        "small files" => limits::small_files_role(),
        other => panic!("no role is called {other}"),
    }
}
