//! The closed loop: each producer waits for the answer before its next append, so a slow disk gets fewer appends.

use std::ops::Range;
use std::thread;
use std::time::Instant;

use sapwood::{Batch, Partition, Ticket};

use super::batcher::Batcher;
use super::recorder::{Pending, Recorder};
use super::{Control, Finished};
use crate::schedule::Claims;

/// One thread per producer, until time or records are up.
pub(super) fn run(control: &Control<'_>, claims: &Claims) -> Finished {
    let recorders = thread::scope(|scope| {
        let producers: Vec<_> =
            (0..control.load.shape.producers).map(|producer| scope.spawn(move || Producer::new(control, producer).run(claims))).collect();
        producers.into_iter().map(|producer| producer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    Finished { recorders, lag: None, sent: 0 }
}

struct Producer<'a> {
    control: &'a Control<'a>,
    number: u32,
    recorder: Recorder,
    in_flight: Vec<(Pending, Ticket)>,
}

impl<'a> Producer<'a> {
    fn new(control: &'a Control<'a>, number: u32) -> Self {
        let recorder = control.recorder((0..).zip(control.load.partitions).map(|(partition, _)| (number, partition)));
        Self { control, number, recorder, in_flight: Vec::new() }
    }

    fn run(mut self, claims: &Claims) -> Recorder {
        let Control { load, start, .. } = *self.control;
        let (measured_from, deadline) = (start + load.shape.warmup, load.shape.deadline().and_then(|deadline| start.checked_add(deadline)));
        let mut batcher = Batcher::new(load, self.number);
        let mut batches = Vec::new();
        let mut now = start;
        while !self.control.stopped() && deadline.is_none_or(|deadline| now < deadline) {
            let measured = now >= measured_from;
            let Some(sequences) = claims.take(measured) else { break };
            batcher.make(&sequences, &mut batches);
            let begun = Instant::now();
            let alone = batches.len() == 1;
            for (partition, batch) in batches.drain(..) {
                let pending = Pending::of(&batch, begun, measured, (self.number, partition), &sequences);
                if alone { self.append_and_wait(&pending, batch) } else { self.append(pending, batch) }
            }
            self.take_answers();
            now = Instant::now();
        }
        self.recorder
    }

    fn append(&mut self, pending: Pending, batch: Batch) {
        match self.partition(&pending).append(batch) {
            Ok(ticket) => self.in_flight.push((pending, ticket)),
            Err(error) => self.control.fail(pending.producer, pending.partition, error),
        }
    }

    /// The one call for the one batch of an iteration.
    fn append_and_wait(&mut self, pending: &Pending, batch: Batch) {
        let answer = self.partition(pending).append_and_wait(batch);
        self.answered(pending, answer);
    }

    fn take_answers(&mut self) {
        let mut in_flight = std::mem::take(&mut self.in_flight);
        for (pending, ticket) in in_flight.drain(..) {
            self.answered(&pending, ticket.wait());
        }
        // For its memory.
        self.in_flight = in_flight;
    }

    fn answered(&mut self, pending: &Pending, answer: sapwood::Result<Range<u64>>) {
        let log = usize::try_from(pending.partition).expect("a u32 fits in usize");
        match answer {
            Ok(offsets) => self.recorder.answered(pending, log, &offsets, self.control.live.gauge(self.number)),
            Err(error) => self.control.fail(pending.producer, pending.partition, error),
        }
    }

    fn partition(&self, pending: &Pending) -> &'a Partition {
        &self.control.load.partitions[usize::try_from(pending.partition).expect("a u32 fits in usize")]
    }
}
