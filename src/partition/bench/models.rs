//! Loom's models of a bench and its threads. Run by `scripts/loom`. A job that nobody does is waited for for ever: a deadlock to loom.

use loom::thread::spawn;

use super::*;
use crate::sync::channel::{self, Receiver, Sender};
use crate::sync::model;

/// Hands each job on to who waits for it.
struct Jobs {
    sent: Receiver<u32>,
    next: Option<u32>,
    done: Arc<Done>,
}

#[derive(Default)]
struct Done {
    jobs: Mutex<Vec<u32>>,
    changed: Condvar,
}

impl Done {
    fn wait_for(&self, jobs: &[u32]) {
        let mut done = self.jobs.lock().unwrap();
        while done.len() < jobs.len() {
            done = self.changed.wait(done).unwrap();
        }
        assert_eq!(*done, jobs);
    }
}

impl Chores for Jobs {
    fn work_once(&mut self) -> bool {
        let Ok(job) = self.sent.try_recv() else { return false };
        assert_eq!(self.next.replace(job), job.checked_sub(1), "in their order");
        self.done.jobs.lock().unwrap().push(job);
        self.done.changed.notify_all();
        true
    }

    fn is_idle(&self) -> bool {
        self.sent.is_empty()
    }
}

struct Partition {
    bench: Arc<Bench<Jobs>>,
    errand: Arc<Errand<Jobs>>,
    jobs: Sender<u32>,
    done: Arc<Done>,
}

impl Partition {
    fn at(bench: &Arc<Bench<Jobs>>) -> Self {
        let (jobs, sent) = channel::bounded(2);
        let done = Arc::<Done>::default();
        let errand = Errand::new(Jobs { sent, next: None, done: Arc::clone(&done) });
        Self { bench: Arc::clone(bench), errand, jobs, done }
    }

    fn ask(&self, job: u32) {
        self.jobs.try_send(job).unwrap();
        self.bench.call(&self.errand);
    }
}

#[test]
fn loom_no_job_is_missed_while_its_thread_looks_for_the_next() {
    model(3, || {
        let bench = Bench::new();
        let partition = Partition::at(&bench);
        let its = Arc::clone(&bench);
        let thread = spawn(move || its.work());
        partition.ask(0);
        partition.ask(1);
        partition.done.wait_for(&[0, 1]);
        bench.close();
        thread.join().unwrap();
    });
}

#[test]
fn loom_two_threads_do_the_jobs_of_one_partition_in_their_order() {
    model(2, || {
        let bench = Bench::new();
        let partition = Partition::at(&bench);
        let threads = [Arc::clone(&bench), Arc::clone(&bench)].map(|its| spawn(move || its.work()));
        partition.ask(0);
        partition.ask(1);
        partition.done.wait_for(&[0, 1]);
        bench.close();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn loom_what_is_left_when_a_partition_ends_is_done_once_and_in_order() {
    model(3, || {
        let bench = Bench::new();
        let (partition, other) = (Partition::at(&bench), Partition::at(&bench));
        let its = Arc::clone(&bench);
        let thread = spawn(move || its.work());
        partition.ask(0);
        other.ask(0);
        partition.ask(1);
        partition.errand.finish();
        // The one that was at work when it ended has said so by now.
        assert_eq!(*partition.done.jobs.lock().unwrap(), [0, 1]);
        other.done.wait_for(&[0]);
        bench.close();
        thread.join().unwrap();
    });
}
