//! What appends allocate once everything has its size: all threads of the process, from `malloc` and `realloc` alike.

use std::alloc::System;

use sapwood::{Partition, TopicConfig};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

use crate::load::{Engine, make_batch};
use crate::report::Pair;
use crate::units::{float, to_u64};
use crate::{Context, Outcome, named};

// It counts under the other scenarios, too. That is an atomic addition per allocation, of which there should be none.
#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Single records, then batches of 256; allocations per record. The first half of the appends only warms up.
pub fn round(context: &Context, appends: u64) -> Outcome<Vec<Pair>> {
    let per_record = |records, appends| {
        let engine = Engine::open(context, TopicConfig::default())?;
        let value = vec![7; 1_000];
        append(engine.partition(0), &value, records, appends)?;
        let region = Region::new(ALLOCATOR);
        append(engine.partition(0), &value, records, appends)?;
        let change = region.change();
        engine.close()?;
        let allocations = float(to_u64(change.allocations + change.reallocations));
        Ok::<_, String>(Pair { engine: allocations / float(records * appends), limit: None })
    };
    Ok(vec![per_record(1, appends)?, per_record(256, appends.div_ceil(8))?])
}

fn append(partition: &Partition, value: &[u8], records: u64, appends: u64) -> Outcome<()> {
    for _ in 0..appends {
        let batch = make_batch(partition, value, records)?;
        partition.append_and_wait(batch).map_err(named("append"))?;
    }
    Ok(())
}
