//! `nvmf verify`: which of its modes to run, and what that says about the data.

use std::path::Path;
use std::sync::Mutex;
use std::time::Instant;

use serde::Serialize;

use super::{Session, print_json, print_text};
use crate::cli::Verify;
use crate::error::ToolError;
use crate::exit;
use crate::journal::{Journal, JournalError, JournalHeader, Model};
use crate::pattern::Pattern;
use crate::progress::{self, StopFlag};
use crate::verify::{self, CheckReport, VerifyPlan, ZeroingMix};

/// Names the layout of the JSON report.
const SCHEMA: &str = "sluice-verify-1";
/// So that a later `--check-only` finds what a run without `--seed` wrote.
const DEFAULT_SEED: u64 = 1;

#[derive(Debug, Serialize)]
struct Outcome {
    schema: &'static str,
    mode: &'static str,
    seed: u64,
    elapsed_s: f64,
    /// Blocks (or, with a journal, writes) that the target acknowledged.
    acknowledged: u64,
    check: Option<CheckReport>,
    error: Option<String>,
    partial: bool,
}

/// Runs the mode that the arguments name.
pub fn run(args: &Verify, json: bool, stop: &StopFlag) -> Result<i32, ToolError> {
    let mut session = Session::open(&args.connect, args.namespace_id)?;
    let plan = plan(args, &session)?;
    if args.deallocate_percent > 0 && !session.namespace.deallocated_reads_zero() {
        return Err(ToolError::DeallocateUnspecified { nsid: plan.nsid });
    }
    let start = Instant::now();
    let mut outcome = Outcome {
        schema: SCHEMA,
        mode: "verify",
        seed: plan.pattern.seed,
        elapsed_s: 0.0,
        acknowledged: 0,
        check: None,
        error: None,
        partial: false,
    };
    let error = match (&args.journal, &args.check_journal) {
        (Some(path), _) => load(args, path, &plan, &mut session, stop, &mut outcome)?,
        (None, Some(path)) => check_journal(path, plan, &mut session, stop, &mut outcome)?,
        (None, None) => fill_and_check(args, &plan, &mut session, stop, &mut outcome),
    };
    outcome.elapsed_s = start.elapsed().as_secs_f64();
    outcome.error = error.as_ref().map(ToString::to_string);
    // A journalled load without a time limit has no other end than a signal.
    let endless = args.journal.is_some() && args.time.is_none();
    outcome.partial = stop.is_set() && !endless;
    if json {
        print_json(&outcome)?
    } else {
        print_text(&outcome.to_text())?
    };
    if let Some(error) = error {
        return Err(error);
    }
    session.close();
    Ok(outcome.exit_code())
}

fn plan(args: &Verify, session: &Session) -> Result<VerifyPlan, ToolError> {
    let command_blocks = session.command_blocks("--block-size", args.block_size)?;
    Ok(VerifyPlan {
        nsid: args.namespace_id,
        block_bytes: session.namespace.block_bytes,
        slba: args.start_block,
        lba_count: session.blocks_from(args.start_block, args.size)?,
        command_blocks,
        depth: usize::from(args.queue_depth),
        pattern: Pattern { seed: seed(args)?, random_percent: args.random_percent },
    })
}

/// The seed given, else the journal's. A new journal takes one of its own: what an earlier test left on the namespace is
/// then told from this test's blocks.
fn seed(args: &Verify) -> Result<u64, ToolError> {
    if let Some(seed) = args.seed {
        return Ok(seed);
    }
    match (&args.check_journal, &args.journal) {
        (Some(path), _) => Ok(Journal::peek(path)?.seed),
        (None, Some(path)) if path.metadata().is_ok_and(|m| m.len() > 0) => Ok(Journal::peek(path)?.seed),
        (None, Some(_)) => Ok(uuid::Uuid::new_v4().as_u64_pair().0),
        (None, None) => Ok(DEFAULT_SEED),
    }
}

fn fill_and_check(
    args: &Verify,
    plan: &VerifyPlan,
    session: &mut Session,
    stop: &StopFlag,
    outcome: &mut Outcome,
) -> Option<ToolError> {
    let bytes = plan.lba_count.saturating_mul(u64::from(plan.block_bytes));
    if args.check_only {
        outcome.mode = "check-only";
    } else {
        let bar = progress::bytes_bar("write", bytes);
        let (written, error) = verify::fill(plan, args.generation, &mut session.queues, stop, &bar);
        bar.finish_and_clear();
        outcome.acknowledged = written;
        if error.is_some() || stop.is_set() {
            return error;
        }
    }
    let bar = progress::bytes_bar("check", bytes);
    let model = Model::uniform(args.generation);
    let (report, _, error) = verify::check(plan, &model, None, &mut session.queues, stop, &bar);
    bar.finish_and_clear();
    outcome.check = Some(report);
    error
}

fn open_journal(path: &Path, plan: &VerifyPlan) -> Result<(Journal, Model), JournalError> {
    let header = JournalHeader { seed: plan.pattern.seed, block_bytes: plan.block_bytes, nsid: plan.nsid };
    Journal::open(path, header)
}

fn load(
    args: &Verify,
    path: &Path,
    plan: &VerifyPlan,
    session: &mut Session,
    stop: &StopFlag,
    outcome: &mut Outcome,
) -> Result<Option<ToolError>, ToolError> {
    outcome.mode = "journal";
    if plan.lba_count < u64::from(plan.command_blocks) {
        return Err(ToolError::EmptyRange);
    }
    let (journal, model) = open_journal(path, plan)?;
    let journal = Mutex::new(journal);
    let mix = ZeroingMix { zeroes_percent: args.zeroes_percent, deallocate_percent: args.deallocate_percent };
    let load = verify::Load { mix, journal: &journal, last_generation: model.last_generation(), limit: args.time };
    let bar = progress::counter("acknowledged writes:");
    let (acknowledged, error) = verify::overwrite(plan, &load, &mut session.queues, stop, &bar);
    bar.finish_and_clear();
    outcome.acknowledged = acknowledged;
    Ok(error)
}

fn check_journal(
    path: &Path,
    plan: VerifyPlan,
    session: &mut Session,
    stop: &StopFlag,
    outcome: &mut Outcome,
) -> Result<Option<ToolError>, ToolError> {
    outcome.mode = "check-journal";
    let (mut journal, model) = open_journal(path, &plan)?;
    outcome.acknowledged = model.acknowledged_writes();
    let runs = model.runs(u64::from(plan.command_blocks));
    let bytes = runs.iter().map(|(_, count)| count * u64::from(plan.block_bytes)).sum();
    let bar = progress::bytes_bar("check", bytes);
    let (report, seen, error) = verify::check(&plan, &model, Some(&runs), &mut session.queues, stop, &bar);
    bar.finish_and_clear();
    outcome.check = Some(report);
    journal.append(&seen)?;
    Ok(error)
}

impl Outcome {
    fn exit_code(&self) -> i32 {
        let check = self.check.as_ref();
        if check.is_some_and(|c| c.wrong_blocks() > 0) {
            exit::DATA_WRONG
        } else if check.is_some_and(|c| c.unreadable_blocks() > 0) {
            exit::COMMAND_FAILED
        } else if self.partial {
            exit::INTERRUPTED
        } else {
            exit::OK
        }
    }

    fn to_text(&self) -> String {
        let mut out = self.check.as_ref().map(CheckReport::to_text).unwrap_or_default();
        let what = match self.mode {
            "journal" => format!("{} writes acknowledged and in the journal", self.acknowledged),
            "check-journal" => format!("{} acknowledged writes in the journal", self.acknowledged),
            "check-only" => "checked only".to_owned(),
            _ => format!("{} blocks written", self.acknowledged),
        };
        let partial = if self.partial { " (PARTIAL: interrupted)" } else { "" };
        out.push_str(&format!("{what}, seed {}, {:.1} s{partial}\n", self.seed, self.elapsed_s));
        out
    }
}
