//! What the engine has a ring do, and since when kernels can: found out before the first ring is made, so that no append is what finds it out.

use std::io;

use io_uring::opcode;

/// One thing that a ring must be able to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Need {
    /// What the kernel calls it.
    name: &'static str,
    /// The first Linux that has it.
    since: (u8, u8),
    what: What,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum What {
    /// An operation, by its number.
    Operation(u8),
    /// A wait for completions that ends after a while.
    TimedWait,
}

/// Everything. No operation is submitted that is not in it.
pub(super) const NEEDS: [Need; 5] = [
    Need { name: "IORING_OP_READ_FIXED", since: (5, 1), what: What::Operation(opcode::ReadFixed::CODE) },
    Need { name: "IORING_OP_WRITE_FIXED", since: (5, 1), what: What::Operation(opcode::WriteFixed::CODE) },
    Need { name: "IORING_OP_READ", since: (5, 6), what: What::Operation(opcode::Read::CODE) },
    Need { name: "IORING_OP_WRITE", since: (5, 6), what: What::Operation(opcode::Write::CODE) },
    Need { name: "IORING_FEAT_EXT_ARG", since: (5, 11), what: What::TimedWait },
];

/// The Linux from which on a ring can be asked which operations it has.
const PROBES: (u8, u8) = (5, 6);

/// What a ring says of itself.
#[derive(Debug, Clone, Copy)]
pub(super) struct Offer<F> {
    /// Whether it has an operation; none if it cannot be asked, as before Linux 5.6.
    pub(super) operations: Option<F>,
    pub(super) timed_wait: bool,
}

/// Whether a ring that offers so much serves.
///
/// # Errors
/// `Unsupported`, with the name of all that is missing and the Linux that has it first.
pub(super) fn judge(offer: &Offer<impl Fn(u8) -> bool>) -> io::Result<()> {
    let has = |need: &Need| match (need.what, &offer.operations) {
        (What::Operation(code), Some(has)) => has(code),
        (What::Operation(_), None) => need.since < PROBES,
        (What::TimedWait, _) => offer.timed_wait,
    };
    let missing: Vec<_> = NEEDS.iter().filter(|need| !has(need)).map(ToString::to_string).collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::Unsupported, format!("the kernel's io_uring lacks {}", missing.join(", "))))
}

impl std::fmt::Display for Need {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (major, minor) = self.since;
        write!(f, "{}, which Linux {major}.{minor} and later have", self.name)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;

    /// The judgement on a ring that has all but that.
    pub(in super::super) fn without(need: &Need) -> io::Result<()> {
        let operations = Some(|code| need.what != What::Operation(code));
        judge(&Offer { operations, timed_wait: need.what != What::TimedWait })
    }

    /// That the error names that need, with its kernel, and no other one.
    #[track_caller]
    pub(in super::super) fn assert_names(error: &io::Error, missing: &[Need]) {
        assert_eq!(error.kind(), io::ErrorKind::Unsupported);
        let text = error.to_string();
        for need in &NEEDS {
            // A name may be the beginning of another.
            assert_eq!(text.contains(&need.to_string()), missing.contains(need), "{}: {text}", need.name);
        }
    }

    #[test]
    fn a_ring_that_has_everything_serves() {
        judge(&Offer { operations: Some(|_| true), timed_wait: true }).unwrap();
    }

    #[test]
    fn b133_each_operation_that_a_kernel_lacks_is_named_with_the_kernel_that_has_it() {
        for need in &NEEDS {
            assert_names(&without(need).unwrap_err(), &[*need]);
        }
        let text = without(&NEEDS[2]).unwrap_err().to_string();
        assert_eq!(text, "the kernel's io_uring lacks IORING_OP_READ, which Linux 5.6 and later have");
    }

    #[test]
    fn b133_a_kernel_that_cannot_be_asked_has_what_the_first_ones_had() {
        let error = judge(&Offer { operations: None::<fn(u8) -> bool>, timed_wait: false }).unwrap_err();
        assert_names(&error, &NEEDS[2..]);
        let error = judge(&Offer { operations: Some(|_| false), timed_wait: false }).unwrap_err();
        assert_names(&error, &NEEDS);
    }

    /// Reads the source: what is submitted is asked for before, and the other way round.
    #[test]
    fn b133_no_operation_is_submitted_that_was_not_asked_for() {
        let source = include_str!("uring.rs");
        let mut built: Vec<&str> =
            source.split("opcode::").skip(1).map(|rest| rest.split(|letter: char| !letter.is_alphanumeric()).next().unwrap()).collect();
        built.sort_unstable();
        built.dedup();
        // IORING_OP_READ_FIXED is called ReadFixed there.
        let of_camel = |name: &&str| {
            let name = name.strip_prefix("IORING_OP_").unwrap();
            let (first, rest): (Vec<_>, Vec<_>) = name.split('_').map(|word| (&word[..1], word[1..].to_lowercase())).unzip();
            first.into_iter().zip(rest).map(|(first, rest)| format!("{first}{rest}")).collect::<String>()
        };
        let operations = NEEDS.iter().filter(|need| need.what != What::TimedWait).map(|need| need.name);
        let mut asked: Vec<_> = operations.map(|name| of_camel(&name)).collect();
        asked.sort_unstable();
        assert_eq!(built, asked);
        // And nothing else makes operations.
        let mut left = vec![PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/src/io"))];
        while let Some(path) = left.pop() {
            if path.is_dir() {
                left.extend(fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
            } else if !path.ends_with("io/uring.rs") && !path.ends_with("io/needs.rs") {
                assert!(!fs::read_to_string(&path).unwrap().contains("io_uring::"), "{}", path.display());
            }
        }
    }
}
