//! Files of tokens of llm.c and nanoGPT.

use super::super::hf::check::{Check, close, text};
use super::super::tally::Tally;
use crate::result::Result as TaskResult;
use fp8_hf::{Folder, LoadOptions, TokenFile, token_losses};
use fp8_nn::prelude::*;
use serde::Deserialize;
use std::fs;
use std::path::Path;

#[derive(Deserialize)]
struct Shard {
    file: String,
    ids: Vec<i32>,
    /// The mean losses of windows of `seq` inputs, one every `seq` tokens.
    windows: Option<Vec<f32>>,
    seq: Option<u64>,
}

pub(super) fn compare(data: &Path, device: &Device, tally: &mut Tally) -> TaskResult {
    let shards: Vec<Shard> = serde_json::from_str(&fs::read_to_string(data.join("shards.json"))?)?;
    for shard in &shards {
        tally.record(&format!("train/data/{}", shard.file), ids(data, shard));
        let model = data.join("model");
        match (shard.seq, &shard.windows) {
            (Some(seq), Some(windows)) if model.is_dir() => {
                let found = losses(data, shard, &model, seq, device);
                let found = found.and_then(|found| close("windows", windows, &found, 1e-5));
                tally.record(&format!("train/data/{} windows", shard.file), found);
            }
            (Some(_), _) => tally.leave_out("windows of tokens without a model", 1),
            _ => {}
        }
    }
    Ok(())
}

fn ids(data: &Path, shard: &Shard) -> Check {
    let file = TokenFile::open(&data.join(&shard.file)).map_err(text)?;
    let found = file.read(0..file.len(), usize::MAX).map_err(text)?;
    if found == shard.ids { Ok(()) } else { Err("the ids differ".to_owned()) }
}

fn losses(data: &Path, shard: &Shard, model: &Path, seq: u64, device: &Device) -> Check<Vec<f32>> {
    let folder = Folder::open(model).map_err(text)?;
    let file = TokenFile::open(&data.join(&shard.file)).map_err(text)?;
    let model = folder.load(&LoadOptions::default(), device).map_err(text)?;
    let mut scaling = Scaling::new(&model, device).map_err(text)?;
    let mut cx = scaling.eval(&Recipe::off()).map_err(text)?;
    // The target of the last input is one token more.
    let starts = (0..).map(|window| window * seq).take_while(|start| start + seq < file.len());
    let window = |start| file.read(start..start + seq + 1, folder.config.vocab_size).map_err(text);
    let windows = starts.map(window).collect::<Check<Vec<_>>>()?;
    let found = token_losses(&model, &mut cx, &windows, &fp8_hf::Monitor::default()).map_err(text)?;
    let mean =
        |losses: &Vec<f32>| losses.iter().map(|&loss| f64::from(loss)).sum::<f64>() / losses.len() as f64;
    Ok(found.windows.iter().map(|losses| mean(losses) as f32).collect())
}
