//! The simulation's choices: splitmix64, so that a seed alone decides what a run does. Nothing secret may come from it.

/// A stream of pseudo-random numbers.
#[derive(Debug, Clone)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// One of `0..end`. The bias towards small numbers is far below what a test could notice.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        assert!(end > 0, "a choice needs at least one possibility");
        self.next() % end
    }

    pub(crate) fn coin(&mut self) -> bool {
        self.below(2) == 0
    }

    /// One of `0..=last`, both ends much more often than a fair choice: all and nothing are what finds most faults.
    pub(crate) fn prefix(&mut self, last: u64) -> u64 {
        match self.below(4) {
            0 => 0,
            1 => last,
            _ => self.below(last.saturating_add(1)),
        }
    }
}
