//! Numbers with units, in from the command line and out into the report. Pure.

use std::time::Duration;

const SIZES: [(&str, u64); 9] = [
    ("b", 1),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
];

const TIMES: [(&str, u64); 7] = [
    ("ns", 1),
    ("us", 1_000),
    ("µs", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("m", 60 * 1_000_000_000),
    ("h", 3_600 * 1_000_000_000),
];

/// `1000`, `64MiB`, `1.5GB`: bytes.
pub fn parse_size(text: &str) -> Result<u64, String> {
    parse(text, &SIZES, 1).ok_or_else(|| format!("{text:?} is no size; write bytes, or a number with kB, MB, GB, TB, KiB, MiB, GiB or TiB"))
}

/// `10s`, `500ms`, `1.5m`; a bare number is seconds.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    parse(text, &TIMES, 1_000_000_000)
        .map(Duration::from_nanos)
        .ok_or_else(|| format!("{text:?} is no duration; write a number with ns, us, ms, s, m or h"))
}

/// [`parse_duration`], but no time at all is no duration.
pub fn parse_some_duration(text: &str) -> Result<Duration, String> {
    let duration = parse_duration(text)?;
    if duration.is_zero() { Err("it must be longer than 0".to_owned()) } else { Ok(duration) }
}

/// Digits (with `_` between them as one likes), perhaps a fraction, perhaps a unit. What is less than the smallest unit is cut off.
fn parse(text: &str, units: &[(&str, u64)], bare: u64) -> Option<u64> {
    let split = text.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '_')).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let unit = unit.trim_start().to_lowercase();
    let scale = if unit.is_empty() { bare } else { units.iter().find(|(name, _)| *name == unit)?.1 };
    let number = number.replace('_', "");
    let (whole, fraction) = number.split_once('.').unwrap_or((&number, ""));
    if whole.is_empty() || fraction.len() > 9 || (number.contains('.') && fraction.is_empty()) {
        return None;
    }
    let mut total = whole.parse::<u64>().ok()?.checked_mul(scale)?;
    if !fraction.is_empty() {
        let denominator = 10_u128.pow(u32::try_from(fraction.len()).ok()?);
        let part = u128::from(fraction.parse::<u64>().ok()?) * u128::from(scale) / denominator;
        total = total.checked_add(u64::try_from(part).ok()?)?;
    }
    Some(total)
}

/// `1234567` as `1,234,567`.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// [`count`] of one noun or several.
pub fn plural(n: u64, noun: &str) -> String {
    let tail = match (n, noun) {
        (1, _) => "",
        (_, "batch") => "es",
        _ => "s",
    };
    format!("{} {noun}{tail}", count(n))
}

/// Bytes in the largest binary unit that leaves at least 1, exact where it is a whole number.
pub fn size(bytes: u64) -> String {
    let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units.into_iter().find(|(_, shift)| bytes >> shift > 0) {
        Some((unit, shift)) if bytes.is_multiple_of(1 << shift) => format!("{} {unit}", bytes >> shift),
        Some((unit, shift)) => format!("{:.1} {unit}", float(bytes) / float(1 << shift)),
        None => format!("{bytes} B"),
    }
}

/// A time in the unit that suits it, three digits.
pub fn time(ns: u64) -> String {
    let value = float(ns);
    let (value, unit) = match ns {
        0..1_000 => return format!("{ns} ns"),
        1_000..1_000_000 => (value / 1e3, "µs"),
        1_000_000..1_000_000_000 => (value / 1e6, "ms"),
        _ => (value / 1e9, "s"),
    };
    format!("{} {unit}", three_digits(value))
}

/// Per second: whole from 100 on, three digits below.
pub fn rate(per_second: f64) -> String {
    if per_second < 100.0 {
        return three_digits(per_second);
    }
    // The text of a float that is not negative, without a fraction, is the digits of a whole number.
    format!("{per_second:.0}").parse().map_or_else(|_| format!("{per_second:.0}"), count)
}

fn three_digits(value: f64) -> String {
    match value {
        v if v < 9.995 => format!("{v:.2}"),
        v if v < 99.95 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

/// The nearest float; exact up to 2^53, which is 104 days in nanoseconds and 8 PiB.
#[allow(clippy::cast_precision_loss, reason = "figures for people, and for ratios")]
pub fn float(n: u64) -> f64 {
    n as f64
}

/// Nanoseconds of a duration; 584 years at most.
pub fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Lossless: the crate builds for 64-bit targets only.
pub fn to_u64(n: usize) -> u64 {
    u64::try_from(n).expect("usize has at most 64 bits")
}

/// Lossless: the crate builds for 64-bit targets only.
pub fn to_usize(n: u64) -> usize {
    usize::try_from(n).expect("usize has 64 bits")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        let good = [
            ("0", 0),
            ("1000", 1000),
            ("1_000", 1000),
            ("1B", 1),
            ("64MiB", 64 << 20),
            ("1GiB", 1 << 30),
            ("2 kb", 2000),
            ("1.5KiB", 1536),
            ("0.25gb", 250_000_000),
        ];
        for (text, bytes) in good {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "B", "-1", "1.", ".5", "1.2.3", "1k", "1 parsec", "99999999999999999999", "99999999TiB", "1e3", "+1"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn durations() {
        let good = [("10s", 10_000), ("500ms", 500), ("2m", 120_000), ("1.5s", 1_500), ("1h", 3_600_000), ("3", 3_000), ("0", 0)];
        for (text, ms) in good {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        assert_eq!(parse_duration("250us"), Ok(Duration::from_micros(250)));
        assert_eq!(parse_duration("250µs"), Ok(Duration::from_micros(250)));
        assert_eq!(parse_duration("7ns"), Ok(Duration::from_nanos(7)));
        for text in ["", "s", "10 years", "-1s", "1d", "9999999999h"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
        assert!(parse_some_duration("0ms").is_err());
        assert!(parse_some_duration("1ms").is_ok());
    }

    #[test]
    fn figures_for_people() {
        assert_eq!([0, 999, 1000, 1_234_567].map(count), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([0, 1023, 1024, 1536, 1 << 30, 3 << 40].map(size), ["0 B", "1023 B", "1 KiB", "1.5 KiB", "1 GiB", "3 TiB"]);
        assert_eq!(
            [0, 999, 1_500, 118_300, 12_340_000, 2_000_000_000].map(time),
            ["0 ns", "999 ns", "1.50 µs", "118 µs", "12.3 ms", "2.00 s"]
        );
        assert_eq!([0.5, 12.34, 99.99, 100.4, 1_234_567.8].map(rate), ["0.50", "12.3", "100", "100", "1,234,568"]);
        assert_eq!(
            [plural(1, "batch"), plural(2, "batch"), plural(0, "record"), plural(1, "record")],
            ["1 batch", "2 batches", "0 records", "1 record"]
        );
    }
}
