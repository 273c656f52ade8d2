//! The rule for topic names. Pure: a name is checked before any path is built from it.

use crate::error::{Error, Result};

const MAX_BYTES: usize = 249;

/// Checks a name against the rule of docs/format.md: 1 to 249 of `A-Z a-z 0-9 . _ -`, and not the engine's own.
///
/// # Errors
/// [`Error::InvalidTopicName`].
pub(crate) fn check_name(name: &str) -> Result<()> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    // Names that begin with a dot, `.` and `..` among them, are the engine's own.
    if (1..=MAX_BYTES).contains(&name.len()) && !name.starts_with('.') && name.bytes().all(allowed) {
        Ok(())
    } else {
        Err(Error::InvalidTopicName { name: name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_by_the_rule_pass() {
        for good in ["a", "orders", "A-Z_0.9", "-x", "0", &"n".repeat(249)] {
            assert!(check_name(good).is_ok(), "{good:?}");
        }
        let bad = ["", ".", "..", ".lock", "../x", "a/b", "/abs", "a\0b", "lost+found", "new\nline", "ümlaut", "a b", &"n".repeat(250)];
        for bad in bad {
            assert!(matches!(check_name(bad), Err(Error::InvalidTopicName { name }) if name == bad), "{bad:?}");
        }
    }
}
