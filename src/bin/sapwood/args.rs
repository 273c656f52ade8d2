//! The command line of `sapwood`.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use sapwood::inspect::{RepairChoices, SealedDamage};

const EXIT_CODES: &str = "Exit codes: 0 nothing is wrong, 1 something is, 2 it could not be found out.";

/// Looks at the topics and partitions of a sapwood commit log, and repairs them.
#[derive(Debug, Parser)]
#[command(name = "sapwood", version, arg_required_else_help = true, after_help = EXIT_CODES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Check every record, index entry, segment boundary, checksum and checkpoint, by reading only
    #[command(after_help = VERIFY_HELP)]
    Verify(VerifyArgs),
    /// Print records or index entries, and say where and why they end
    #[command(after_help = DUMP_HELP)]
    Dump(DumpArgs),
    /// Mend what can be mended, after showing what will be done; what is cut is set aside first
    #[command(after_help = REPAIR_HELP)]
    Repair(RepairArgs),
    /// Print the names of the topics
    #[command(after_help = TOPICS_HELP)]
    Topics(TopicsArgs),
    /// Print each topic's settings, and of each partition its segments, offsets and size
    #[command(after_help = DESCRIBE_HELP)]
    Describe(TopicsArgs),
}

const TOPICS_HELP: &str = "\
Takes no lock and changes nothing, also while a broker has the data directory open.

Examples:
  sapwood topics data           one name a line
  sapwood topics data --json    one JSON object a line

Exit codes: 0 there they are, 2 it could not be found out.";

const DESCRIBE_HELP: &str = "\
Takes no lock and changes nothing, also while a broker has the topics open. It reads the last segment of each partition; sealed
ones are verify's.

Examples:
  sapwood describe data                  all topics
  sapwood describe data/orders --json    one topic; one JSON object

Exit codes: 0 nothing is wrong, 1 settings that cannot be used, a partition that is missing, or damage at the end of one, 2 it could
not be found out.";

/// The flags of `topics` and `describe`.
#[derive(Debug, Args)]
pub struct TopicsArgs {
    /// A data directory, or a topic's
    pub dir: PathBuf,
    /// One JSON object a line
    #[arg(long)]
    pub json: bool,
}

const VERIFY_HELP: &str = "\
Takes no lock and changes nothing, also while a broker has the partition open.

Examples:
  sapwood verify data                    all partitions of all topics
  sapwood verify data/orders/0 --json    one partition; one JSON object a line, the last of each partition is its summary

Exit codes: 0 clean, 1 a warning or an error was found, 2 it could not be found out.";

/// The flags of `verify`.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// A partition's directory, a topic's, or a data directory
    pub dir: PathBuf,
    /// One JSON object a line: each finding, then a summary of its partition
    #[arg(long)]
    pub json: bool,
    /// Print nothing of what is legal, and no summary where nothing is wrong
    #[arg(long, short)]
    pub quiet: bool,
    /// How long to look again at what a broker at work could explain, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 1000)]
    pub patience: u64,
}

const DUMP_HELP: &str = "\
Takes no lock and changes nothing. Reads up to damage, also where a broker refuses to open; what was set aside
(*.torn) is dumped as far as it holds records from its start on.

Text shows bytes as Rust and C do: printable ASCII as it is, \\n, \\\\, \\xff. JSON has \"key\" and \"value\" where they are
UTF-8, and \"key_hex\" and \"value_hex\" where they are not.

Examples:
  sapwood dump data/orders/0 --max 10                                the first ten records
  sapwood dump data/orders/0 --from 5000 --to 5010 --json            ten records, one JSON object a line
  sapwood dump data/orders/0/00000000000000000000.log                one segment
  sapwood dump data/orders/0 --what index                            the entries of all indexes

Exit codes: 0 to the end or to where it should end, 1 damage or a gap ended it, 2 it could not be done.";

/// What is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum What {
    /// The records
    Records,
    /// The entries of the indexes: offset and position
    Index,
    /// The entries of the time indexes: offset and timestamp
    Timeindex,
}

/// The flags of `dump`.
#[derive(Debug, Args)]
pub struct DumpArgs {
    /// A partition's directory, or one of its files
    pub path: PathBuf,
    /// The first offset to print
    #[arg(long, value_name = "OFFSET", default_value_t = 0)]
    pub from: u64,
    /// The first offset not to print
    #[arg(long, value_name = "OFFSET")]
    pub to: Option<u64>,
    /// Print so many at most
    #[arg(long, value_name = "N")]
    pub max: Option<u64>,
    /// One JSON object a line; the last one says where and why it ended
    #[arg(long)]
    pub json: bool,
    /// What to print of a partition's directory; a file is what its name says
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = What::Records)]
    pub what: What,
}

const REPAIR_HELP: &str = "\
Shows what it will do, and does it if that is confirmed or --yes is given. The data directory is locked meanwhile.
It mends torn tails, damage in the active segment, index files, zeros behind sealed logs, what interruptions left, and
checkpoints that do not fit. What is cut lies beside the log afterwards, named <base>.<position>.torn.
Damage in sealed segments and gaps between segments stay unless --sealed says otherwise.

Examples:
  sapwood repair data --dry-run                             what would be done, everywhere
  sapwood repair data/orders/0 --sealed keep-before --yes   end the log before its first damage

Exit codes: 0 nothing is wrong any more, 1 something is left or was not confirmed, 2 it could not be done.";

/// What becomes of damage in sealed segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SealedArg {
    /// It stays as it is
    Leave,
    /// The log ends with the last record before the first damage or gap; what is behind is set aside
    KeepBefore,
    /// The log begins with the first segment behind the last damage or gap; what is before is set aside
    KeepBehind,
}

/// The flags of `repair`.
#[derive(Debug, Args)]
pub struct RepairArgs {
    /// A partition's directory, a topic's, or a data directory
    pub dir: PathBuf,
    /// Only show what would be done; the exit code is 1 if that is anything
    #[arg(long, conflicts_with = "yes")]
    pub dry_run: bool,
    /// Do it without asking
    #[arg(long, short)]
    pub yes: bool,
    /// Damage in sealed segments, gaps and overlaps
    #[arg(long, value_enum, value_name = "CHOICE", default_value_t = SealedArg::Leave)]
    pub sealed: SealedArg,
    /// Accept sealed logs whose checksum does not fit though every record does
    #[arg(long)]
    pub accept_sums: bool,
    /// Write the checksums that sealed segments lack
    #[arg(long)]
    pub write_sums: bool,
}

impl RepairArgs {
    /// The choices that the flags make.
    pub fn choices(&self) -> RepairChoices {
        let sealed = match self.sealed {
            SealedArg::Leave => SealedDamage::Leave,
            SealedArg::KeepBefore => SealedDamage::KeepBefore,
            SealedArg::KeepBehind => SealedDamage::KeepBehind,
        };
        RepairChoices { sealed, accept_sums: self.accept_sums, write_sums: self.write_sums }
    }
}
