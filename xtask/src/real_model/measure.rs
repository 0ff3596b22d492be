//! Runs of `fp8` and of transformers, and what they must give.

use super::table::{Row, Table};
use crate::workspace::Result;
use safetensors::SafeTensors;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::available_parallelism;

/// The number of windows in a full evaluation.
pub(super) const WINDOWS: usize = 8;

/// The prompts whose continuations are known.
const PROMPTS: [&str; 3] = [
    "The capital of France is",
    "Once upon a time, there was a little",
    "<|im_start|>user\nName three primary colours.<|im_end|>\n<|im_start|>assistant\n",
];
/// New tokens of each, at most.
const NEW_TOKENS: usize = 48;
/// The prompt of the race, and its new tokens.
const RACE: (&str, usize) = (PROMPTS[1], 128);
/// Turns of the race.
const TURNS: usize = 3;

/// The results of transformers: the loss of each token, and greedy continuations with their prompts.
pub(super) struct Expected {
    nll: Vec<f32>,
    nll_bf16: Vec<f32>,
    greedy: Vec<Vec<i64>>,
}

impl Expected {
    pub(super) fn read(path: &Path) -> Result<Self> {
        let bytes = fs::read(path)?;
        let file = SafeTensors::deserialize(&bytes)?;
        let floats = |name: &str| -> Result<Vec<f32>> {
            Ok(file
                .tensor(name)?
                .data()
                .as_chunks()
                .0
                .iter()
                .map(|&bytes| f32::from_le_bytes(bytes))
                .collect())
        };
        let ids = |name: &str| -> Result<Vec<i64>> {
            Ok(file
                .tensor(name)?
                .data()
                .as_chunks()
                .0
                .iter()
                .map(|&bytes| i64::from_le_bytes(bytes))
                .collect())
        };
        let continuation = |index: usize| -> Result<Vec<i64>> {
            let prompt = ids(&format!("prompt.{index}"))?.len();
            Ok(ids(&format!("greedy.{index}"))?.split_off(prompt))
        };
        let greedy = (0..PROMPTS.len()).map(continuation).collect::<Result<_>>()?;
        Ok(Self { nll: floats("nll")?, nll_bf16: floats("nll.bf16")?, greedy })
    }
}

/// Perplexity of losses.
fn perplexity(losses: &[f32]) -> f64 {
    (losses.iter().map(|&loss| f64::from(loss)).sum::<f64>() / losses.len() as f64).exp()
}

/// A scheme of `fp8 quantize`, and what is expected of it.
struct Scheme {
    name: &'static str,
    options: &'static [&'static str],
    /// Perplexity with FP8 weights alone, computed with torch.
    weights: f64,
    /// And with FP8 inputs.
    inputs: f64,
    /// The largest allowed increase of the perplexity with FP8 inputs over that of f32, as a fraction.
    with_inputs: f64,
}

const SCHEMES: [Scheme; 3] = [
    Scheme { name: "tensor", options: &[], weights: 17.042, inputs: 17.358, with_inputs: 0.05 },
    Scheme { name: "channel", options: &[], weights: 16.978, inputs: 17.179, with_inputs: 0.03 },
    Scheme {
        name: "block128",
        options: &["--allow-ragged"],
        weights: 17.182,
        inputs: 17.296,
        with_inputs: 0.04,
    },
];

/// The output of `fp8 eval --json`.
#[derive(Deserialize)]
pub(super) struct Evaluation {
    pub(super) perplexity: f64,
    tokens_per_second: f64,
    seconds_to_load: f64,
    peak_memory_bytes: Option<u64>,
}

/// The output of `fp8 generate --json` and of the script.
#[derive(Deserialize)]
struct Generation {
    tokens: Vec<i64>,
    seconds_to_load: f64,
    tokens_per_second: f64,
    peak_memory_bytes: Option<u64>,
    version: Option<String>,
    seconds_to_load_and_read: Option<f64>,
}

/// The programs that run, and where.
pub(super) struct Programs {
    pub(super) fp8: PathBuf,
    /// With transformers.
    pub(super) python: Option<PathBuf>,
    pub(super) transformers: PathBuf,
    /// A folder for quantized models.
    pub(super) work: PathBuf,
    pub(super) windows: usize,
    pub(super) ids: PathBuf,
}

impl Programs {
    /// Returns the perplexity in f32.
    pub(super) fn run(
        &self,
        expected: &Expected,
        f32_model: &Path,
        bf16_model: &Path,
        table: &mut Table,
    ) -> Result<f64> {
        if self.work.exists() {
            fs::remove_dir_all(&self.work)?;
        }
        fs::create_dir_all(&self.work)?;
        let base = self.high_precision("f32", f32_model, &expected.nll, table)?;
        self.high_precision("bf16 weights", bf16_model, &expected.nll_bf16, table)?;
        for scheme in &SCHEMES {
            let out = self.work.join(scheme.name);
            let mut command = Command::new(&self.fp8);
            command
                .arg("quantize")
                .arg(f32_model)
                .arg(&out)
                .args(["--scheme", scheme.name])
                .args(scheme.options);
            output(&mut command)?;
            let weights = self.eval(&out, &["--recipe", "off"])?;
            let bar = (weights.perplexity / scheme.weights - 1.0).abs() <= 1e-4;
            table.push(row(
                &format!("FP8 weights, `--scheme {}`", scheme.name),
                &weights,
                format!("{:.3}", scheme.weights),
                self.judged(bar),
            ));
            let both = self.eval(&out, &[])?;
            let above = both.perplexity / base - 1.0;
            table.push(row(
                "… and FP8 inputs",
                &both,
                format!(
                    "{:.3}; {:+.1} % of f32 (at most {:.0} %)",
                    scheme.inputs,
                    above * 100.0,
                    scheme.with_inputs * 100.0
                ),
                self.judged(above <= scheme.with_inputs),
            ));
        }
        self.greedy(expected, f32_model, table)?;
        self.race(f32_model, table)?;
        fs::remove_dir_all(&self.work)?;
        Ok(base)
    }

    /// With fewer windows, there is nothing to compare with.
    pub(super) fn judged(&self, bar: bool) -> Option<bool> {
        (self.windows == WINDOWS).then_some(bar)
    }

    /// Evaluates without FP8 and compares each token's loss.
    fn high_precision(&self, name: &str, model: &Path, expected: &[f32], table: &mut Table) -> Result<f64> {
        let path = self.work.join("losses.csv");
        let path_text = path.display().to_string();
        let found = self.eval(model, &["--losses", &path_text])?;
        let losses = losses(&fs::read_to_string(&path)?)?;
        let expected = &expected[..losses.len().min(expected.len())];
        let worst = losses.iter().zip(expected).fold(0f32, |worst, (a, b)| worst.max((a - b).abs()));
        let reference = perplexity(expected);
        let bar = losses.len() == expected.len()
            && (found.perplexity / reference - 1.0).abs() <= 1e-4
            && worst <= 1e-3;
        let note = format!("{reference:.5}; tokens within {worst:.1e}");
        table.push(Row { passed: Some(bar), ..row(name, &found, note, None) });
        Ok(found.perplexity)
    }

    pub(super) fn eval(&self, model: &Path, options: &[&str]) -> Result<Evaluation> {
        let mut command = Command::new(&self.fp8);
        command.arg("eval").arg(model).arg("--ids").arg(&self.ids);
        command.args(["--json", "--windows", &self.windows.to_string()]).args(options);
        json(&mut command)
    }

    /// Continues the prompts.
    fn greedy(&self, expected: &Expected, model: &Path, table: &mut Table) -> Result {
        let (mut same, mut all) = (0, 0);
        let mut last = None;
        for (prompt, expected) in PROMPTS.iter().zip(&expected.greedy) {
            let found = self.generate(model, prompt, NEW_TOKENS, &[])?;
            same += found.tokens.iter().zip(expected).filter(|(a, b)| a == b).count();
            all += expected.len().max(found.tokens.len());
            last = Some(found);
        }
        let mut row = Row {
            name: "greedy text, f32".into(),
            note: format!("{same} of {all} tokens equal"),
            ..Row::default()
        };
        row.passed = Some(same == all);
        if let Some(found) = last {
            row = Row { speed: Some(found.tokens_per_second), memory: found.peak_memory_bytes, ..row };
        }
        table.push(row);
        Ok(())
    }

    fn generate(&self, model: &Path, prompt: &str, tokens: usize, options: &[&str]) -> Result<Generation> {
        let mut command = Command::new(&self.fp8);
        command.arg("generate").arg(model).args(["--prompt", prompt, "--json"]);
        json(command.args(["--max-new-tokens", &tokens.to_string()]).args(options))
    }

    /// Generates in turns from each form of the model, and with transformers, and takes the best of each.
    fn race(&self, model: &Path, table: &mut Table) -> Result {
        let threads = available_parallelism().map_or(1, usize::from).to_string();
        let fp8 = self.work.join("channel");
        let contenders: [(&str, &Path, &[&str]); 4] = [
            ("f32", model, &[]),
            ("bf16", model, &["--dtype", "bf16"]),
            ("FP8, `--scheme channel`", &fp8, &[]),
            ("FP8, all else in bf16", &fp8, &["--dtype", "bf16"]),
        ];
        let (prompt, tokens) = RACE;
        let mut ours = contenders.map(|_| Vec::new());
        let mut theirs = Vec::new();
        for _ in 0..TURNS {
            for (runs, (_, model, options)) in ours.iter_mut().zip(contenders) {
                runs.push(self.generate(model, prompt, tokens, options)?);
            }
            if let Some(python) = &self.python {
                let mut command = Command::new(python);
                command.arg(&self.transformers).arg(model).args([&threads, &tokens.to_string(), prompt]);
                theirs.push(json::<Generation>(&mut command)?);
            }
        }
        let f32_speed = speed(&ours[0]);
        for (runs, (name, ..)) in ours.iter().zip(contenders) {
            let mut note = format!("{:.2} × f32", speed(runs) / f32_speed);
            if !theirs.is_empty() {
                note += &format!(", {:.2} × transformers", speed(runs) / speed(&theirs));
            }
            table.push(Row {
                name: format!("{} tokens, {name}, {threads} threads", runs[0].tokens.len()),
                load: Some(load(runs)),
                speed: Some(speed(runs)),
                memory: memory(runs),
                note,
                ..Row::default()
            });
        }
        if theirs.is_empty() { Ok(()) } else { self.judge(&ours[0], &theirs, table) }
    }

    /// Compares our f32 with that of transformers.
    fn judge(&self, ours: &[Generation], theirs: &[Generation], table: &mut Table) -> Result {
        let read = best(theirs, |run| run.seconds_to_load_and_read.unwrap_or(f64::NAN), f64::min);
        let same = ours.iter().zip(theirs).all(|(a, b)| a.tokens == b.tokens);
        table.push(Row {
            name: theirs.iter().find_map(|run| run.version.clone()).unwrap_or_default(),
            load: Some(load(theirs)),
            speed: Some(speed(theirs)),
            memory: memory(theirs),
            note: format!(
                "{}; f32 loads in {:.2} × its time, {:.2} × with the reading of mapped weights",
                if same { "the same tokens as f32" } else { "other tokens than f32" },
                load(ours) / load(theirs),
                load(ours) / read,
            ),
            passed: Some(same && speed(ours) >= speed(theirs)),
            ..Row::default()
        });
        Ok(())
    }
}

/// The best of several runs.
fn best(runs: &[Generation], value: fn(&Generation) -> f64, is_better: fn(f64, f64) -> f64) -> f64 {
    runs.iter().map(value).reduce(is_better).unwrap_or(f64::NAN)
}

fn speed(runs: &[Generation]) -> f64 {
    best(runs, |run| run.tokens_per_second, f64::max)
}

fn load(runs: &[Generation]) -> f64 {
    best(runs, |run| run.seconds_to_load, f64::min)
}

fn memory(runs: &[Generation]) -> Option<u64> {
    runs.iter().filter_map(|run| run.peak_memory_bytes).min()
}

pub(super) fn row(name: &str, found: &Evaluation, note: String, passed: Option<bool>) -> Row {
    Row {
        name: name.to_owned(),
        perplexity: Some(found.perplexity),
        load: Some(found.seconds_to_load),
        speed: Some(found.tokens_per_second),
        memory: found.peak_memory_bytes,
        note,
        passed,
    }
}

/// Reads the last column of a CSV of losses.
fn losses(text: &str) -> Result<Vec<f32>> {
    let last = |line: &str| -> Result<f32> { Ok(line.rsplit(',').next().unwrap_or_default().parse()?) };
    text.lines().skip(1).map(last).collect()
}

pub(super) fn output(command: &mut Command) -> Result<Vec<u8>> {
    let words: Vec<String> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.display().to_string())
        .collect();
    println!("{}", words.join(" ").replace('\n', "\\n"));
    let output = command.output().map_err(|error| format!("real-model: {}: {error}", words[0]))?;
    match output.status.success() {
        true => Ok(output.stdout),
        false => Err(format!("real-model: {}", String::from_utf8_lossy(&output.stderr).trim()).into()),
    }
}

pub(super) fn json<T: DeserializeOwned>(command: &mut Command) -> Result<T> {
    Ok(serde_json::from_slice(&output(command)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_is_what_the_table_compares_with() {
        let expected = Expected::read(&crate::workspace::root().join(super::super::EXPECTED)).unwrap();
        assert_eq!((expected.nll.len(), expected.nll_bf16.len()), (8 * 511, 8 * 511));
        assert_eq!(format!("{:.5}", perplexity(&expected.nll)), "16.86806");
        assert_eq!(format!("{:.5}", perplexity(&expected.nll_bf16)), "16.87007");
        assert_eq!(expected.greedy.iter().map(Vec::len).sum::<usize>(), 126);
    }

    #[test]
    fn losses_are_read_from_the_last_column() {
        assert_eq!(losses("window,position,token,loss\n0,1,5,2.5\n0,2,6,0.25\n").unwrap(), [2.5, 0.25]);
        assert!(losses("window,position,token,loss\n0,1,5,x\n").is_err());
    }
}
