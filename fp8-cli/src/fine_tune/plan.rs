//! The plan of a training, which is said before its first step, and `--dry-run`.

use crate::failure::Failure;
use crate::fine_tune::live::{duration, memory_of};
use crate::fine_tune::setup::Opened;
use crate::output;
use crate::page::grouped;
use crate::table::printable_lines;
use fp8_hf::{SequenceSource, TrainPlan, Trainer};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::time::Instant;

/// Fewer steps are said to be few.
const FEW: u64 = 20;

/// The most tokens of a sample that a plan shows.
const SHOWN: usize = 400;

/// Returns the lines that a run begins with.
pub(super) fn sentences(opened: &Opened, plan: &TrainPlan, steps: u64) -> String {
    let mut text = format!("{}\n", opened.data.train.summary());
    if let Some(validation) = &opened.data.validation {
        let _ = writeln!(text, "validation: {}", validation.summary());
    }
    let (trained, frozen) = (grouped(plan.trained as u64), grouped(plan.frozen as u64));
    let _ = writeln!(text, "{trained} parameters are trained, {frozen} are frozen");
    let seq = opened.trainer.seq;
    let _ = writeln!(
        text,
        "{} of up to {} of up to {} tokens, {} at once",
        count(steps, "step"),
        count(opened.run.batch as u64, "sequence"),
        grouped(seq as u64),
        opened.trainer.micro_batch,
    );
    if steps < FEW {
        let _ = writeln!(
            text,
            "few steps teach little: --epochs N, or a smaller --batch or --seq, makes more of them"
        );
    }
    let whose = match opened.ranks.layout() {
        None => "",
        Some(layout) => {
            let _ = writeln!(text, "{}: {layout}", count(opened.ranks.count() as u64, "rank"));
            " of each rank"
        }
    };
    let _ = writeln!(text, "memory at the peak{whose}, estimated: {}", memory_of(&plan.memory));
    text
}

pub(super) fn count(number: u64, noun: &str) -> String {
    format!("{} {noun}{}", grouped(number), if number == 1 { "" } else { "s" })
}

/// The same for machines.
pub(super) fn json(opened: &Opened, plan: &TrainPlan, steps: u64) -> Value {
    let summary = opened.data.train.summary();
    json!({
        "samples": summary.samples,
        "tokens": summary.tokens,
        "learned": summary.learned,
        "sequences": summary.sequences,
        "documents_cut": summary.documents_cut,
        "tokens_cut": summary.tokens_cut,
        "learned_cut": summary.learned_cut,
        "samples_dropped": summary.samples_dropped,
        "learned_dropped": summary.learned_dropped,
        "samples_unlearned": summary.samples_unlearned,
        "warnings": summary.warnings,
        "validation_sequences": opened.data.validation.as_ref().map(fp8_hf::data::Sequences::len),
        "trained": plan.trained,
        "frozen": plan.frozen,
        "steps": steps,
        "tokens_per_step": opened.run.batch * opened.trainer.seq,
        "memory_bytes": plan.memory.total(),
        "layout": opened.ranks.layout(),
    })
}

/// Prints the plan, and one sample with the learned part marked.
pub(super) fn dry_run(opened: Opened) -> Result<(), Failure> {
    let plan = opened.plan;
    let steps = opened.run.total_steps(opened.data.train.len())?;
    let sample = sample(&opened)?;
    let first = opened.ranks.is_first();
    let (mut text, mut value) = (sentences(&opened, &plan, steps), json(&opened, &plan, steps));
    let _ = write!(text, "one sample, with the learned part in ⟦ ⟧:\n{sample}\n");
    value["sample"] = json!(sample);
    let as_json = opened.options.json;
    if opened.options.time {
        let seconds = one_step(opened)?;
        let whole = duration(seconds * steps as f64);
        let _ = writeln!(text, "a step takes {seconds:.2} s: {whole} for all, without evaluations");
        value["seconds_per_step"] = json!(seconds);
    }
    if first {
        output::print(&if as_json { format!("{value}\n") } else { text })?;
    }
    Ok(())
}

/// Returns one sample as text, with the learned tokens in brackets.
fn sample(opened: &Opened) -> Result<String, Failure> {
    let sample = opened.data.train.sample()?;
    let decode = |ids: &[i32]| opened.tokenizer.decode_all(ids);
    let (mut text, mut at) = (String::new(), 0);
    let end = sample.ids.len().min(SHOWN);
    for range in &sample.learned {
        let (start, stop) = (range.start.min(end), range.end.min(end));
        if start >= stop {
            continue;
        }
        text += &decode(&sample.ids[at..start])?;
        let _ = write!(text, "⟦{}⟧", decode(&sample.ids[start..stop])?);
        at = stop;
    }
    text += &decode(&sample.ids[at..end])?;
    if end < sample.ids.len() {
        let _ = write!(text, " … and {} tokens more", grouped((sample.ids.len() - end) as u64));
    }
    Ok(printable_lines(&text))
}

/// Returns the time of a step, the second of two: the first one allocates.
fn one_step(opened: Opened) -> Result<f64, Failure> {
    let Opened { folder, adapter, trainer, device, ranks, data, run, .. } = opened;
    let mut trainer = Trainer::new(folder, adapter, &trainer, &device, ranks.train_ranks())?;
    let count = run.batch.min(data.train.len());
    let mut seconds = 0.0;
    for _ in 0..2 {
        let start = Instant::now();
        trainer.step(count, &mut |index| SequenceSource::read(&data.train, index), run.lr)?;
        seconds = start.elapsed().as_secs_f64();
    }
    Ok(seconds)
}
