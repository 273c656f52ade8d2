//! From rounds to lines: a table for people, JSON for programs. Pure.
//!
//! JSON: schema 1. Fields are added without a new number; one that changes its meaning or goes away takes a new one.

use std::fmt::Write;

use serde::Serialize;

use crate::units::rate;

/// What one round of a line came to.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Pair {
    /// The engine's figure.
    pub engine: f64,
    /// What it is measured against, of the same round. None where the target is an absolute one.
    pub limit: Option<f64>,
}

impl Pair {
    /// What the target speaks of.
    fn value(&self) -> f64 {
        self.limit.map_or(self.engine, |limit| self.engine / limit)
    }
}

/// What is to be reached, of the median over rounds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// No more than this.
    AtMost(f64),
    /// No less than this.
    AtLeast(f64),
    /// Told for comparison only.
    None,
}

impl Target {
    fn reached(self, value: f64) -> Option<bool> {
        match self {
            Self::AtMost(most) => Some(value <= most),
            Self::AtLeast(least) => Some(value >= least),
            Self::None => None,
        }
    }

    fn describe(self) -> String {
        match self {
            Self::AtMost(most) => format!("<= {most}"),
            Self::AtLeast(least) => format!(">= {least}"),
            Self::None => "-".to_owned(),
        }
    }
}

/// What a line measures.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Measure {
    /// In words: the engine's figure, and what it is divided by.
    pub measure: &'static str,
    /// Units of both figures.
    pub units: [&'static str; 2],
    pub target: Target,
}

/// One line of the table.
#[derive(Debug, Serialize)]
pub struct Line {
    pub name: &'static str,
    #[serde(flatten)]
    pub measure: Measure,
    /// Of the ratios, or of the engine's figure where the target is an absolute one. Null if no round was measured.
    pub value: Option<Spread>,
    pub engine: Option<Spread>,
    pub limit: Option<Spread>,
    /// Null where nothing is to be reached, or nothing was measured.
    pub reached: Option<bool>,
    pub rounds: Vec<Pair>,
    /// How the limit was measured, and what else one should know.
    pub note: String,
    /// Why there are no figures.
    pub error: Option<String>,
}

/// Over rounds.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Spread {
    fn of(figures: impl Iterator<Item = f64>) -> Option<Self> {
        let mut figures: Vec<f64> = figures.collect();
        figures.sort_unstable_by(f64::total_cmp);
        let (min, max) = (*figures.first()?, *figures.last()?);
        let middle = figures.len() / 2;
        let median = if figures.len().is_multiple_of(2) { f64::midpoint(figures[middle - 1], figures[middle]) } else { figures[middle] };
        Some(Self { median, min, max })
    }
}

impl Line {
    /// From what was measured.
    pub fn new(name: &'static str, measure: Measure, rounds: Vec<Pair>, note: String, error: Option<String>) -> Self {
        let value = Spread::of(rounds.iter().map(Pair::value));
        Self {
            name,
            measure,
            value,
            engine: Spread::of(rounds.iter().map(|pair| pair.engine)),
            limit: Spread::of(rounds.iter().filter_map(|pair| pair.limit)),
            reached: value.filter(|_| error.is_none()).and_then(|value| measure.target.reached(value.median)),
            rounds,
            note,
            error,
        }
    }
}

/// As text, one line each.
pub fn table(lines: &[Line]) -> String {
    let name_width = lines.iter().map(|line| line.name.len()).max().unwrap_or(0).max("scenario".len());
    let measure_width = lines.iter().map(|line| line.measure.measure.len()).max().unwrap_or(0);
    let mut text = format!(
        "{:name_width$}  {:measure_width$}  {:>8}  {:>8}  {:^19}  {:<11}  {:>18}  {:>18}\n",
        "scenario", "measure", "target", "median", "min to max", "", "engine", "limit"
    );
    for line in lines {
        let Measure { measure, units: [engine_unit, limit_unit], target } = line.measure;
        let _ = write!(text, "{:name_width$}  {measure:measure_width$}  {:>8}  ", line.name, target.describe());
        if let Some(error) = &line.error {
            let _ = writeln!(text, "not measured: {error}");
            continue;
        }
        let Some((value, engine)) = line.value.zip(line.engine) else {
            text.push_str("not measured\n");
            continue;
        };
        let verdict = match line.reached {
            Some(true) => "reached",
            Some(false) => "not reached",
            None => "",
        };
        let spread = format!("{} to {}", figure(value.min), figure(value.max));
        let limit = line.limit.map_or_else(|| "-".to_owned(), |limit| format!("{} {limit_unit}", figure(limit.median)));
        let engine = format!("{} {engine_unit}", figure(engine.median));
        let _ = writeln!(text, "{:>8}  {spread:^19}  {verdict:<11}  {engine:>18}  {limit:>18}", figure(value.median));
    }
    let mut told: Vec<&str> = Vec::new();
    for line in lines.iter().filter(|line| !line.note.is_empty()) {
        if !told.contains(&line.name) {
            let _ = writeln!(text, "{}{:name_width$}  {}", if told.is_empty() { "\n" } else { "" }, line.name, line.note);
            told.push(line.name);
        }
    }
    text
}

/// Three digits, and 0 as just that.
fn figure(value: f64) -> String {
    match value {
        0.0 => "0".to_owned(),
        value if value < 0.1 => format!("{value:.4}"),
        value => rate(value),
    }
}
