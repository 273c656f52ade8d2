//! Numbers in few bytes, for logs of what a run did. Pure.

/// Seven bits per byte, the lowest first; the high bit says that more follow.
pub fn put(into: &mut Vec<u8>, mut n: u64) {
    loop {
        let [low, ..] = n.to_le_bytes();
        n >>= 7;
        if n == 0 {
            return into.push(low & 0x7f);
        }
        into.push(low | 0x80);
    }
}

/// What [`put`] put. None at the end.
pub fn take(from: &mut &[u8]) -> Option<u64> {
    let mut n = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = from.split_first()?;
        *from = rest;
        n |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(n);
        }
    }
    None
}

/// A number by how much it is more, or less, than the one before it: few bytes where that is little.
pub fn put_change(into: &mut Vec<u8>, before: u64, n: u64) {
    put(into, zigzag(n.wrapping_sub(before)));
}

/// What [`put_change`] put. None at the end.
pub fn take_change(from: &mut &[u8], before: u64) -> Option<u64> {
    Some(before.wrapping_add(unzigzag(take(from)?)))
}

/// Small numbers of either sign to small numbers.
fn zigzag(n: u64) -> u64 {
    (n << 1) ^ (n.cast_signed() >> 63).cast_unsigned()
}

fn unzigzag(n: u64) -> u64 {
    (n >> 1) ^ (n & 1).wrapping_neg()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NUMBERS: [u64; 9] = [0, 1, 127, 128, 1 << 14, 1 << 63, (1 << 63) - 1, u64::MAX - 1, u64::MAX];

    #[test]
    fn what_is_put_is_taken() {
        let mut bytes = Vec::new();
        NUMBERS.iter().for_each(|n| put(&mut bytes, *n));
        let mut rest = bytes.as_slice();
        assert_eq!(NUMBERS.map(|_| take(&mut rest).unwrap()), NUMBERS);
        assert_eq!(take(&mut rest), None);
    }

    #[test]
    fn a_change_is_taken_from_where_it_was_put() {
        for before in NUMBERS {
            for n in NUMBERS {
                let mut bytes = Vec::new();
                put_change(&mut bytes, before, n);
                assert_eq!(take_change(&mut bytes.as_slice(), before), Some(n), "{before} {n}");
            }
        }
        for (before, n) in [(1000, 1063), (1000, 937), (u64::MAX, 5)] {
            let mut bytes = Vec::new();
            put_change(&mut bytes, before, n);
            assert_eq!(bytes.len(), 1, "{before} {n}");
        }
    }

    #[test]
    fn zigzag_round_trips() {
        for n in NUMBERS {
            assert_eq!(unzigzag(zigzag(n)), n);
        }
        assert_eq!([0, u64::MAX, 1].map(zigzag), [0, 1, 2]);
    }
}
