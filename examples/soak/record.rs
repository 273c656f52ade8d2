//! Records that tell what they are: where they belong, who appended them, and as the how manieth. Whoever reads one can check all of it.

/// Random numbers, reproducible (SplitMix64).
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Those of one part of what a seed decides.
    pub fn of(seed: u64, part: u64) -> Self {
        let mut rng = Self(seed ^ part.wrapping_mul(0xD6E8_FEB8_6659_FD93));
        Self(rng.next())
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    pub fn one_of<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize].clone()
    }
}

/// Where a record belongs: a partition of a topic, and the how manieth topic of that name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    pub topic: String,
    pub partition: u32,
    pub incarnation: u32,
}

impl Place {
    fn hash(&self) -> u64 {
        let bytes = self.topic.bytes().chain(self.partition.to_be_bytes()).chain(self.incarnation.to_be_bytes());
        bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
    }
}

/// Names a record of a place. A producer counts from 0 in each life; lives and sequence numbers only grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tag {
    pub life: u32,
    pub producer: u32,
    pub sequence: u64,
}

impl Tag {
    pub fn key(&self, place: &Place) -> Vec<u8> {
        [&place.hash().to_be_bytes()[..], &self.life.to_be_bytes(), &self.producer.to_be_bytes(), &self.sequence.to_be_bytes()].concat()
    }

    pub fn value(&self, place: &Place, seed: u64) -> Vec<u8> {
        let mut rng = Rng::of(seed ^ place.hash(), (u64::from(self.life) << 48) ^ (u64::from(self.producer) << 40) ^ self.sequence);
        let len = match rng.below(16) {
            0 => 3000 + rng.below(9000),
            1 => 0,
            _ => rng.below(600),
        };
        let mut value = Vec::with_capacity(len as usize + 8);
        while value.len() < len as usize {
            value.extend(rng.next().to_le_bytes());
        }
        value.truncate(len as usize);
        value
    }

    /// What a record that was read is, every byte of it checked.
    #[track_caller]
    pub fn check(place: &Place, seed: u64, (offset, key, value): (u64, &[u8], &[u8])) -> Self {
        let what = || format!("{place:?}, offset {offset}, key {}", key.escape_ascii());
        let (hash, rest) = key.split_first_chunk().unwrap_or_else(|| panic!("a key of nobody's: {}", what()));
        assert_eq!(*hash, place.hash().to_be_bytes(), "a record of another place: {}", what());
        let tag = Self {
            life: u32::from_be_bytes(rest[..4].try_into().unwrap()),
            producer: u32::from_be_bytes(rest[4..8].try_into().unwrap()),
            sequence: u64::from_be_bytes(rest[8..].try_into().unwrap()),
        };
        assert!(value == tag.value(place, seed), "another value: {}, {tag:?}", what());
        tag
    }
}

/// The order in which a place's records must come: each producer's in each life one after the other, and, where one producer alone appends and what it
/// appended may be cut again, later ones behind earlier ones.
#[derive(Debug, Default)]
pub struct Order {
    last: std::collections::BTreeMap<(u32, u32), u64>,
    latest: Option<Tag>,
}

impl Order {
    #[track_caller]
    pub fn follow(&mut self, place: &Place, offset: u64, tag: Tag) {
        if place.topic == crate::load::CUT {
            let latest = self.latest.replace(tag);
            assert!(latest.is_none_or(|latest| latest < tag), "{place:?}, offset {offset}: {tag:?} behind {latest:?}");
        } else {
            let last = self.last.insert((tag.life, tag.producer), tag.sequence);
            assert!(last.is_none_or(|last| last + 1 == tag.sequence), "{place:?}, offset {offset}: {tag:?} behind {last:?}");
        }
    }
}
