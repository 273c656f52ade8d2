//! Lines on stdout, for people or for programs.

use std::io::{self, BufWriter, StdoutLock, Write};

use serde_json::{Map, Value};

/// Where the lines go.
pub type Out = BufWriter<Stdout>;

/// Stdout; where there is work to be done and an answer to be given, whether anybody reads it or not.
pub struct Stdout {
    lock: StdoutLock<'static>,
    goes_on_unread: bool,
}

/// Stdout, in large pieces. An error once nobody reads it any more.
pub fn stdout() -> Out {
    with(false)
}

/// The same, but what nobody reads is dropped.
pub fn stdout_or_nobody() -> Out {
    with(true)
}

fn with(goes_on_unread: bool) -> Out {
    BufWriter::with_capacity(64 << 10, Stdout { lock: io::stdout().lock(), goes_on_unread })
}

impl Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.lock.write(bytes) {
            Err(error) if self.goes_on_unread && error.kind() == io::ErrorKind::BrokenPipe => Ok(bytes.len()),
            result => result,
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self.lock.flush() {
            Err(error) if self.goes_on_unread && error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            result => result,
        }
    }
}

/// One object on a line of its own.
pub fn line(out: &mut Out, object: &Value) -> io::Result<()> {
    writeln!(out, "{object}")
}

/// Puts bytes into an object: as text under `name` if they are UTF-8, else in hexadecimal under `name` with `_hex`.
pub fn put_bytes(object: &mut Map<String, Value>, name: &str, bytes: &[u8]) {
    match std::str::from_utf8(bytes) {
        Ok(text) => object.insert(name.to_owned(), text.into()),
        Err(_) => object.insert(format!("{name}_hex"), hex(bytes).into()),
    };
}

fn hex(bytes: &[u8]) -> String {
    const DIGITS: [char; 16] = ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'a', 'b', 'c', 'd', 'e', 'f'];
    bytes.iter().flat_map(|byte| [DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_text_or_hexadecimal_and_never_both() {
        let mut object = Map::new();
        put_bytes(&mut object, "key", "ä\0\n".as_bytes());
        put_bytes(&mut object, "value", &[0x00, 0xff, 0x1a]);
        assert_eq!(Value::Object(object).to_string(), r#"{"key":"ä\u0000\n","value_hex":"00ff1a"}"#);
    }
}
