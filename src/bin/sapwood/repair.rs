//! `sapwood repair`: shows the plan of each partition, asks, does it, and looks whether all is well.

use std::io::{self, BufRead, IsTerminal, Write};
use std::time::Duration;

use sapwood::inspect::{Inspector, RepairPlan};

use crate::args::RepairArgs;
use crate::output::{Out, stdout_or_nobody};
use crate::{Answer, Stop, partitions};

/// Plans and repairs every partition there is, one after another.
pub fn run(args: &RepairArgs) -> Result<Answer, Stop> {
    let inspector = Inspector::new().patience(Duration::ZERO);
    let mut out = stdout_or_nobody();
    let plans = partitions(&inspector, &args.dir)?;
    let plans: Vec<RepairPlan> =
        plans.into_iter().map(|partition| inspector.plan_repair(partition, args.choices())).collect::<sapwood::Result<_>>()?;
    for plan in &plans {
        writeln!(out, "{plan}")?;
    }
    out.flush()?;
    let left = plans.iter().any(|plan| !plan.left().is_empty());
    let to_do: Vec<&RepairPlan> = plans.iter().filter(|plan| !plan.is_empty()).collect();
    if args.dry_run || (!to_do.is_empty() && !args.yes && !is_confirmed(&mut out)?) {
        return Ok(Answer::clean_if(to_do.is_empty() && !left));
    }
    let mut answer = Answer::clean_if(!left);
    let mut failed = Vec::new();
    for plan in to_do {
        match apply(&inspector, plan, &mut out) {
            Ok(repaired) => answer = answer.and(repaired),
            // The others are no worse for it.
            Err(Stop::Failed(error)) => failed.push(error),
            Err(stop) => return Err(stop),
        }
    }
    out.flush()?;
    if failed.is_empty() { Ok(answer) } else { Err(Stop::Failed(failed.join("\nsapwood: "))) }
}

/// Asks, if there is somebody to ask.
fn is_confirmed(out: &mut Out) -> Result<bool, Stop> {
    let stdin = io::stdin();
    if !stdin.is_terminal() {
        return Err(Stop::Failed("nothing was done: there is no terminal to ask at; --yes does it without asking".to_owned()));
    }
    write!(out, "Do it? [y/N] ")?;
    out.flush()?;
    let mut answer = String::new();
    stdin.lock().read_line(&mut answer).map_err(|error| Stop::Failed(format!("could not read the answer: {error}")))?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

fn apply(inspector: &Inspector, plan: &RepairPlan, out: &mut Out) -> Result<Answer, Stop> {
    let repaired = inspector.apply(plan)?;
    for path in &repaired.set_aside {
        writeln!(out, "set aside: {}", path.display())?;
    }
    let report = inspector.verify(plan.path())?;
    let records = format!("the records {} up to, not including, {} can be read", report.first_offset, report.next_offset);
    let lost = match plan.loses() {
        lost if lost.is_empty() => String::new(),
        lost => format!("; the records {} up to, not including, {}, which were durable, are not in the log any more", lost.start, lost.end),
    };
    let done = if plan.left().is_empty() { "repaired" } else { "repaired, but for what is left as it is" };
    writeln!(out, "{}: {done}; {records}{lost}", plan.path().display())?;
    Ok(Answer::clean_if(report.is_clean()))
}
