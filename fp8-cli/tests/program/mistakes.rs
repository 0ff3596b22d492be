//! Mistakes of people: each gets exit code 2 and one sentence, and nothing is written.

use super::{listing, run};
use crate::folders::shard;
use crate::folders::{Raw, change, copy, golden, read, write, write_raw};
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// A mistake: what was done, the arguments, and a part of the sentence that is expected.
struct Mistake {
    what: &'static str,
    /// Changes the folder `model`, a copy of a small Llama.
    make: fn(&Path),
    line: &'static str,
    sentence: &'static str,
}

const QUANTIZE: &str = "quantize model out --scheme channel";

fn tensors(folder: &Path, change: impl Fn(&mut BTreeMap<String, Raw>)) {
    let file = folder.join("model/model.safetensors");
    let mut all = read(&file);
    change(&mut all);
    write(&file, &all);
}

fn config(folder: &Path, changes: &serde_json::Value) {
    change(&folder.join("model/config.json"), changes);
}

fn fp8(folder: &Path) {
    copy(&golden().join("export/llama_gqa_tied-deepseek_block"), &folder.join("fp8"));
}

fn with_text(folder: &Path) {
    fs::write(folder.join("text.txt"), "The sea is wide.").unwrap();
}

/// `model` becomes a model with a tokenizer.
fn with_tokenizer(folder: &Path) {
    fs::remove_dir_all(folder.join("model")).unwrap();
    copy(&golden().join("llama_bf16"), &folder.join("model"));
    with_text(folder);
}

/// `ids.safetensors` with these tokens.
fn ids(folder: &Path, shape: &str, tokens: &[i64]) {
    let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    let header = format!(
        r#"{{"input_ids": {{"dtype": "I64", "shape": {shape}, "data_offsets": [0, {}]}}}}"#,
        bytes.len()
    );
    write_raw(&folder.join("ids.safetensors"), &header, &bytes);
}

const NORM: &str = "model.norm.weight";
const UP: &str = "model.layers.1.mlp.up_proj.weight";

#[rustfmt::skip]
const MISTAKES: &[Mistake] = &[
    // The command line.
    Mistake { what: "no command", make: |_| {}, line: "", sentence: "expected a command: inspect, quantize, eval, generate, export" },
    Mistake { what: "an unknown command", make: |_| {}, line: "quantise model out", sentence: "unknown command quantise" },
    Mistake { what: "no folders", make: |_| {}, line: "quantize --scheme tensor", sentence: "<INPUT>, <OUTPUT> are missing" },
    Mistake { what: "no scheme", make: |_| {}, line: "quantize model out", sentence: "--scheme <SCHEME> is missing" },
    Mistake { what: "an unknown scheme", make: |_| {}, line: "quantize model out --scheme int4", sentence: "--scheme int4: unknown; the known ones are tensor, channel, block128, vllm" },
    Mistake { what: "a scheme without a value", make: |_| {}, line: "quantize model out --scheme", sentence: "--scheme needs a value" },
    Mistake { what: "an unknown option", make: |_| {}, line: "quantize model out --scheme tensor --quiet", sentence: "unknown option --quiet" },
    Mistake { what: "no threads", make: |_| {}, line: "quantize model out --scheme tensor --threads 0", sentence: "--threads 0: expected a number from 1 to 1024" },
    Mistake { what: "one folder too many", make: |_| {}, line: "inspect model model", sentence: "unexpected argument model" },
    Mistake { what: "calibration of dynamic inputs", make: with_text, line: "quantize model out --scheme channel --calibrate text.txt", sentence: "--calibrate: the inputs of scheme channel are dynamic" },
    Mistake { what: "calibration of inputs that are not quantized", make: with_text, line: "quantize model out --scheme nvfp4a16 --calibrate text.txt", sentence: "--calibrate: the inputs of scheme nvfp4a16 are in high precision" },
    Mistake { what: "NVFP4 without calibration", make: |_| {}, line: "quantize model out --scheme nvfp4", sentence: "--scheme nvfp4: it needs the largest inputs of each layer: give a text with --calibrate" },
    Mistake { what: "an export to NVFP4 without scales of inputs", make: |_| {}, line: "export model out --scheme nvfp4", sentence: "--scheme nvfp4: it needs the largest inputs of each layer: add --static-inputs" },
    Mistake { what: "calibration without a tokenizer", make: with_text, line: "quantize model out --scheme tensor --calibrate text.txt", sentence: "model/tokenizer.json: not found" },
    Mistake { what: "calibration for an output that exists", make: |folder| { with_text(folder); fs::create_dir(folder.join("out")).unwrap(); fs::write(folder.join("out/mine"), "x").unwrap(); }, line: "quantize model out --scheme tensor --calibrate text.txt", sentence: "out: it exists already" },
    Mistake { what: "calibration for an output in no folder", make: with_text, line: "quantize model no/out --scheme tensor --calibrate text.txt", sentence: "no/out: the folder around it does not exist" },
    Mistake { what: "calibration with a text that is missing", make: |_| {}, line: "quantize model out --scheme tensor --calibrate text.txt", sentence: "--calibrate text.txt: " },
    // Paths.
    Mistake { what: "a folder that does not exist", make: |_| {}, line: "quantize modle out --scheme tensor", sentence: "modle: no such folder: expected a Hugging Face folder with config.json and safetensors files" },
    Mistake { what: "a file in place of a folder", make: |_| {}, line: "quantize model/config.json out --scheme tensor", sentence: "not a folder: expected one with config.json" },
    Mistake { what: "an option that is given twice", make: |_| {}, line: "inspect model --report a.html --report b.html", sentence: "--report may be given only once" },
    Mistake { what: "no threads to inspect with", make: |_| {}, line: "inspect model --threads 0", sentence: "--threads 0: expected a number from 1 to 1024" },
    Mistake { what: "calibration tokens without a text", make: |_| {}, line: "quantize model out --scheme tensor --calibration-tokens 5", sentence: "--calibration-tokens requires --calibrate" },
    Mistake { what: "an empty folder", make: |folder| fs::create_dir(folder.join("empty")).unwrap(), line: "quantize empty out --scheme tensor", sentence: "empty/config.json: not found: empty is not a Hugging Face folder" },
    Mistake { what: "the folder above the model", make: |_| {}, line: "inspect .", sentence: "./config.json: not found" },
    Mistake { what: "an output that exists", make: |folder| { fs::create_dir(folder.join("out")).unwrap(); fs::write(folder.join("out/mine"), "x").unwrap(); }, line: QUANTIZE, sentence: "out: it exists already: name a new folder" },
    Mistake { what: "an output that is a file", make: |folder| fs::write(folder.join("out"), "x").unwrap(), line: QUANTIZE, sentence: "out: it exists already" },
    Mistake { what: "the input as the output", make: |_| {}, line: "quantize model model --scheme tensor", sentence: "model: it exists already" },
    Mistake { what: "an output in no folder", make: |_| {}, line: "quantize model no/out --scheme tensor", sentence: "no/out: the folder around it does not exist" },
    Mistake { what: "an output below a file", make: with_text, line: "quantize model text.txt/out --scheme tensor", sentence: "text.txt/out: the folder around it does not exist" },
    Mistake { what: "an output without a name", make: |_| {}, line: "quantize model / --scheme tensor", sentence: "expected a path that ends in the name of a new folder" },
    Mistake { what: "a report in no folder", make: |_| {}, line: "inspect model --report no/report.html", sentence: "--report no/report.html: its folder does not exist: create it first" },
    Mistake { what: "a report in place of the weights", make: |_| {}, line: "inspect model --report model/model.safetensors", sentence: "only files *.html are overwritten" },
    Mistake { what: "a report in place of the file that is inspected", make: |_| {}, line: "inspect model/model.safetensors --report model/../model/model.safetensors", sentence: "this file is also an input: choose another name" },
    Mistake { what: "a report in place of notes", make: with_text, line: "inspect model --report text.txt", sentence: "only files *.html are overwritten" },
    Mistake { what: "a report on a device", make: |_| {}, line: "inspect model --report /dev/null", sentence: "--report /dev/null: it exists and is not a file: expected the path of a file" },
    Mistake { what: "a report that is a folder", make: |_| {}, line: "inspect model --report model", sentence: "--report model: expected the name of a file" },
    // Configurations.
    Mistake { what: "an empty configuration", make: |folder| fs::write(folder.join("model/config.json"), "").unwrap(), line: QUANTIZE, sentence: "config.json: not a JSON object" },
    Mistake { what: "a family that is not known", make: |folder| config(folder, &json!({"model_type": "mamba"})), line: QUANTIZE, sentence: "`model_type` is \"mamba\": expected one of llama" },
    Mistake { what: "a field that changes the result", make: |folder| config(folder, &json!({"attention_bias": true})), line: QUANTIZE, sentence: "`attention_bias` is true" },
    Mistake { what: "a scaling that is not known", make: |folder| config(folder, &json!({"rope_parameters": {"rope_type": "dynamic"}})), line: QUANTIZE, sentence: "`rope_parameters.rope_type` is \"dynamic\"" },
    Mistake { what: "the configuration of another model", make: |folder| config(folder, &json!({"hidden_size": 64})), line: QUANTIZE, sentence: "config.json asks for [96, 64]" },
    Mistake { what: "a missing field", make: |folder| config(folder, &json!({"num_attention_heads": null})), line: QUANTIZE, sentence: "`num_attention_heads` is missing" },
    Mistake { what: "a model that is quantized by others", make: |folder| config(folder, &json!({"quantization_config": {"quant_method": "awq"}})), line: QUANTIZE, sentence: "`quantization_config.quant_method` is \"awq\"" },
    Mistake { what: "a GPT-2", make: |folder| { let text = r#"{"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 16}"#; fs::write(folder.join("model/config.json"), text).unwrap(); }, line: QUANTIZE, sentence: "tensor `transformer.wte.weight` is missing" },
    // Weights.
    Mistake { what: "no weights", make: |folder| fs::remove_file(folder.join("model/model.safetensors")).unwrap(), line: QUANTIZE, sentence: "model: neither model.safetensors nor model.safetensors.index.json is there" },
    Mistake { what: "weights of PyTorch alone", make: |folder| fs::rename(folder.join("model/model.safetensors"), folder.join("model/pytorch_model.bin")).unwrap(), line: QUANTIZE, sentence: "model: it has pytorch_model.bin alone: convert it" },
    Mistake { what: "a missing file of several", make: |folder| { shard(&folder.join("model"), 3); fs::remove_file(folder.join("model/model-00003-of-00003.safetensors")).unwrap(); }, line: QUANTIZE, sentence: "model-00003-of-00003.safetensors: not found" },
    Mistake { what: "a truncated header", make: |folder| fs::write(folder.join("model/model.safetensors"), [200, 0, 0, 0, 0, 0, 0, 0, b'{']).unwrap(), line: QUANTIZE, sentence: "a header of 200 bytes: at most 1 fit" },
    Mistake { what: "a truncated download", make: |folder| { let file = folder.join("model/model.safetensors"); let bytes = fs::read(&file).unwrap(); fs::write(&file, &bytes[..bytes.len() / 2]).unwrap(); }, line: QUANTIZE, sentence: "follow the header" },
    Mistake { what: "a page of HTML in place of weights", make: |folder| fs::write(folder.join("model/model.safetensors"), "<!doctype html><html>").unwrap(), line: QUANTIZE, sentence: "not a readable safetensors file" },
    Mistake { what: "a header that claims more than there is", make: |folder| write_raw(&folder.join("model/model.safetensors"), r#"{"a": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}}"#, &[0; 8]), line: QUANTIZE, sentence: "not a readable safetensors file" },
    Mistake { what: "an index that leaves the folder", make: |folder| { shard(&folder.join("model"), 2); let index = folder.join("model/model.safetensors.index.json"); fs::write(&index, r#"{"weight_map": {"x": "../secret"}}"#).unwrap(); }, line: QUANTIZE, sentence: "`x` is in \"../secret\": expected the name of a file in this folder" },
    Mistake { what: "a missing tensor", make: |folder| tensors(folder, |all| drop(all.remove(NORM))), line: QUANTIZE, sentence: "tensor `model.norm.weight` is missing" },
    Mistake { what: "an extra tensor, whose name controls the terminal", make: |folder| tensors(folder, |all| { let norm = all[NORM].clone(); all.insert("\u{1b}[2J\nx".into(), norm); }), line: QUANTIZE, sentence: "tensor `\u{FFFD}[2J x` has no place" },
    Mistake { what: "a misshapen tensor", make: |folder| tensors(folder, |all| all.get_mut(UP).unwrap().1.reverse()), line: QUANTIZE, sentence: "`model.layers.1.mlp.up_proj.weight` has shape [32, 64]" },
    Mistake { what: "weights with NaN", make: |folder| tensors(folder, |all| all.get_mut(UP).unwrap().2[4 * 33..4 * 34].copy_from_slice(&f32::NAN.to_le_bytes())), line: QUANTIZE, sentence: "`model.layers.1.mlp.up_proj.weight` is infinite or NaN in row 1, column 1" },
    // Quantization.
    Mistake { what: "a model that is FP8 already", make: fp8, line: "quantize fp8 out --scheme tensor", sentence: "fp8: it is quantized already" },
    Mistake { what: "ragged blocks", make: |_| {}, line: "quantize model out --scheme block128", sentence: "`model.layers.0.self_attn.q_proj.weight` is 32 × 32, no multiple of 128 (14 such matrices)" },
    Mistake { what: "a pattern that matches nothing", make: |_| {}, line: "quantize model out --scheme tensor --ignore donw_proj", sentence: "\"donw_proj\": it matches no layer" },
    Mistake { what: "a pattern that matches everything", make: |_| {}, line: "quantize model out --scheme tensor --ignore *", sentence: "all layers are ignored" },
    Mistake { what: "a part of what vLLM fuses", make: |_| {}, line: "quantize model out --scheme vllm --ignore gate_proj", sentence: "vLLM computes it together with model.layers.0.mlp.up_proj" },
    // Inspection.
    Mistake { what: "an original that is another model", make: |folder| { fp8(folder); config(folder, &json!({"num_hidden_layers": 1})); tensors(folder, |all| all.retain(|name, _| !name.contains("layers.1."))); }, line: "inspect fp8 --against model", sentence: "`model.layers.1.input_layernorm.weight` is missing" },
    Mistake { what: "an original that does not exist", make: fp8, line: "inspect fp8 --against modle", sentence: "modle: no such folder: expected a Hugging Face folder with config.json and safetensors files" },
    Mistake { what: "a file against a folder", make: |_| {}, line: "inspect model/model.safetensors --against model", sentence: "--against compares folders" },
    Mistake { what: "a scale that is NaN", make: |folder| { fp8(folder); let file = folder.join("fp8/model.safetensors"); let mut all = read(&file); all.get_mut("model.layers.0.mlp.up_proj.weight_scale_inv").unwrap().2 = f32::NAN.to_le_bytes().to_vec(); write(&file, &all); }, line: "inspect fp8", sentence: "is NaN at element 0: expected a finite, positive scale" },
    Mistake { what: "FP8 without its configuration", make: |folder| { fp8(folder); change(&folder.join("fp8/config.json"), &json!({"quantization_config": null})); }, line: "quantize fp8 out --scheme tensor", sentence: "config.json has no `quantization_config`" },
    // Evaluation.
    Mistake { what: "no text", make: |_| {}, line: "eval model", sentence: "give a text with --text, or tokens with --ids" },
    Mistake { what: "a text and tokens", make: |_| {}, line: "eval model --text a --ids b", sentence: "exclude each other" },
    Mistake { what: "a text that does not exist", make: with_tokenizer, line: "eval model --text txet.txt", sentence: "--text txet.txt: " },
    Mistake { what: "an empty text", make: |folder| { with_tokenizer(folder); fs::write(folder.join("text.txt"), "").unwrap(); }, line: "eval model --text text.txt", sentence: "--text text.txt: it is empty" },
    Mistake { what: "an empty folder as the text", make: |folder| { with_tokenizer(folder); fs::create_dir(folder.join("texts")).unwrap(); }, line: "eval model --text texts", sentence: "--text texts: it is empty" },
    Mistake { what: "a text of one token", make: |folder| { with_tokenizer(folder); fs::write(folder.join("text.txt"), "a").unwrap(); }, line: "eval model --text text.txt", sentence: "fewer than 2 tokens" },
    Mistake { what: "a picture as the text", make: |folder| { with_tokenizer(folder); fs::write(folder.join("text.txt"), b"\x89PNG\r\n").unwrap(); }, line: "eval model --text text.txt", sentence: "--text text.txt: not valid UTF-8 at byte 0" },
    Mistake { what: "a picture among the texts", make: |folder| { with_tokenizer(folder); fs::create_dir(folder.join("texts")).unwrap(); fs::write(folder.join("texts/a.txt"), "The").unwrap(); fs::write(folder.join("texts/b.png"), b"\x89PNG").unwrap(); }, line: "eval model --text texts", sentence: "--text texts/b.png: not valid UTF-8 at byte 0" },
    Mistake { what: "a training checkpoint as a model", make: |folder| { fs::create_dir(folder.join("run")).unwrap(); fs::write(folder.join("run/checkpoint.safetensors"), "x").unwrap(); }, line: "inspect run", sentence: "run: it is a training checkpoint: fp8 export writes it as a Hugging Face folder" },
    Mistake { what: "a model without a tokenizer", make: with_text, line: "eval model --text text.txt", sentence: "model/tokenizer.json: not found: expected the tokenizer" },
    Mistake { what: "a broken tokenizer", make: |folder| { with_tokenizer(folder); fs::write(folder.join("model/tokenizer.json"), "{").unwrap(); }, line: "eval model --text text.txt", sentence: "model/tokenizer.json: not a tokenizer" },
    Mistake { what: "a tokenizer that contradicts itself", make: |folder| { with_tokenizer(folder); change(&folder.join("model/tokenizer.json"), &json!({"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "xx"}})); }, line: "eval model --text text.txt", sentence: "it contradicts itself: the tokenizer stopped" },
    Mistake { what: "the tokenizer of another model", make: |folder| { with_text(folder); fs::copy(golden().join("llama_bf16/tokenizer.json"), folder.join("model/tokenizer.json")).unwrap(); }, line: "eval model --text text.txt", sentence: "it belongs to another model" },
    Mistake { what: "windows longer than the model", make: with_tokenizer, line: "eval model --text text.txt --seq-length 257", sentence: "--seq-length 257: expected 2 to 256" },
    Mistake { what: "windows of nothing", make: with_tokenizer, line: "eval model --text text.txt --seq-length 0", sentence: "--seq-length 0: expected at least 1" },
    Mistake { what: "no windows", make: with_tokenizer, line: "eval model --text text.txt --windows 0", sentence: "--windows 0: expected at least 1" },
    Mistake { what: "an unknown recipe", make: with_tokenizer, line: "eval model --text text.txt --recipe fp4", sentence: "--recipe fp4: unknown; the known ones are checkpoint, off, delayed, current, te-v0, rowwise, rowwise-gw-hp, block, deepseek, mxfp8, nvfp4 and files *.toml" },
    Mistake { what: "a recipe in a file that does not exist", make: with_tokenizer, line: "eval model --text text.txt --recipe my.toml", sentence: "--recipe my.toml: " },
    Mistake { what: "a recipe with a typing error", make: |folder| { with_tokenizer(folder); fs::write(folder.join("my.toml"), "recipe = \"delayed\"\nmargn = 1").unwrap(); }, line: "eval model --text text.txt --recipe my.toml", sentence: "margn" },
    Mistake { what: "an unknown dtype", make: with_tokenizer, line: "eval model --text text.txt --dtype fp8", sentence: "--dtype fp8: unknown; the known ones are f32, bf16 and f16" },
    Mistake { what: "an unknown device", make: with_tokenizer, line: "eval model --text text.txt --device gpu", sentence: "--device gpu: expected cpu or cuda:N" },
    Mistake { what: "losses in no folder", make: with_tokenizer, line: "eval model --text text.txt --losses no/out.csv", sentence: "--losses no/out.csv: its folder does not exist: create it first" },
    Mistake { what: "losses in place of the text", make: with_tokenizer, line: "eval model --text text.txt --losses text.txt", sentence: "--losses text.txt: this file is also an input: choose another name" },
    Mistake { what: "losses in place of the tokenizer", make: with_tokenizer, line: "eval model --text text.txt --losses model/tokenizer.json", sentence: "it is inside model, which is an input" },
    Mistake { what: "losses among the texts", make: |folder| { with_tokenizer(folder); fs::create_dir(folder.join("texts")).unwrap(); fs::write(folder.join("texts/a.csv"), "a,b").unwrap(); }, line: "eval model --text texts --losses texts/a.csv", sentence: "it is inside texts, which is an input" },
    Mistake { what: "weights that are NaN", make: |folder| { with_tokenizer(folder); tensors(folder, |all| all.get_mut(UP).unwrap().2[..2].copy_from_slice(&[0xC0, 0x7F])); }, line: "eval model --text text.txt", sentence: "model: the loss of window 0 at position 1 is NaN" },
    Mistake { what: "tokens that do not exist", make: |_| {}, line: "eval model --ids ids.safetensors", sentence: "--ids ids.safetensors: not found: expected a safetensors file" },
    Mistake { what: "tokens outside the vocabulary", make: |folder| ids(folder, "[1, 3]", &[1, 96, 2]), line: "eval model --ids ids.safetensors", sentence: "--ids ids.safetensors: token 96 in window 0 at position 1: expected 0 to 95" },
    Mistake { what: "tokens below zero", make: |folder| ids(folder, "[1, 3]", &[1, -5, 2]), line: "eval model --ids ids.safetensors", sentence: "token -5 in window 0 at position 1" },
    Mistake { what: "tokens beyond 32 bits", make: |folder| ids(folder, "[1, 2]", &[1, 1 << 40]), line: "eval model --ids ids.safetensors", sentence: "token 1099511627776 in window 0 at position 1" },
    Mistake { what: "tokens in one dimension", make: |folder| ids(folder, "[3]", &[1, 2, 3]), line: "eval model --ids ids.safetensors", sentence: "expected [windows, tokens] in I32 or I64" },
    Mistake { what: "windows without tokens", make: |folder| ids(folder, "[0, 3]", &[]), line: "eval model --ids ids.safetensors", sentence: "`input_ids` has shape [0, 3]: expected at least one window" },
    Mistake { what: "weights as tokens", make: |_| {}, line: "eval model --ids model/model.safetensors", sentence: "there is no `input_ids`" },
    Mistake { what: "a model that does not exist", make: with_text, line: "eval modle --text text.txt", sentence: "modle: no such folder" },
    // Generation.
    Mistake { what: "no prompt", make: with_tokenizer, line: "generate model", sentence: "--prompt <TEXT> is missing" },
    Mistake { what: "an empty prompt", make: with_tokenizer, line: "generate model --prompt=", sentence: "--prompt" },
    Mistake { what: "more tokens than the model has room for", make: with_tokenizer, line: "generate model --prompt The --max-new-tokens 300", sentence: "--max-new-tokens 300: the prompt has 2 tokens and the model reads at most 256: give at most 255" },
    Mistake { what: "top-k without a temperature", make: with_tokenizer, line: "generate model --prompt The --top-k 5", sentence: "--top-k has no effect unless --temperature is above 0" },
    Mistake { what: "top-p without a temperature", make: with_tokenizer, line: "generate model --prompt The --top-p 0.5", sentence: "--top-p has no effect unless --temperature is above 0" },
    Mistake { what: "a seed without a temperature", make: with_tokenizer, line: "generate model --prompt The --seed 1", sentence: "--seed has no effect unless --temperature is above 0" },
    Mistake { what: "a temperature below 0", make: with_tokenizer, line: "generate model --prompt The --temperature=-1", sentence: "--temperature -1: expected a number of at least 0" },
    Mistake { what: "a temperature with a sign", make: with_tokenizer, line: "generate model --prompt The --temperature -1", sentence: "--temperature -1: expected a number of at least 0" },
    Mistake { what: "a temperature that is NaN", make: with_tokenizer, line: "generate model --prompt The --temperature nan", sentence: "--temperature nan: expected a number" },
    Mistake { what: "a top-p of 0", make: with_tokenizer, line: "generate model --prompt The --top-p 0", sentence: "--top-p 0: expected a number above 0 and at most 1" },
    Mistake { what: "a top-k of 0", make: with_tokenizer, line: "generate model --prompt The --top-k 0", sentence: "--top-k 0: expected at least 1" },
    Mistake { what: "a seed with a sign", make: with_tokenizer, line: "generate model --prompt The --seed=-1", sentence: "--seed -1: expected a whole number from 0" },
    Mistake { what: "a GPU where there is none", make: with_tokenizer, line: "generate model --prompt The --device cuda:63", sentence: "--device cuda:63: " },
    Mistake { what: "a length for windows that have one", make: |folder| { with_tokenizer(folder); ids(folder, "[1, 4]", &[1, 2, 3, 4]); }, line: "eval model --ids ids.safetensors --seq-length 4", sentence: "--seq-length has no effect with windows in a safetensors file" },
    Mistake { what: "a file of tokens that does not exist", make: with_tokenizer, line: "eval model --ids tokens.bin", sentence: "tokens.bin: not found: expected a file of tokens" },
    Mistake { what: "a file of tokens with an odd number of bytes", make: |folder| { with_tokenizer(folder); fs::write(folder.join("tokens.bin"), [1, 0, 2]).unwrap(); }, line: "eval model --ids tokens.bin", sentence: "tokens.bin: it has 3 bytes, and no header of llm.c" },
    Mistake { what: "a file of tokens of another vocabulary", make: |folder| { with_tokenizer(folder); fs::write(folder.join("tokens.bin"), [1, 0, 255, 255]).unwrap(); }, line: "eval model --ids tokens.bin", sentence: "token 65535 at position 1: expected 0 to" },
    // Checkpoints.
    Mistake { what: "a checkpoint that does not exist", make: |_| {}, line: "export run out", sentence: "run: no such file or folder: expected a folder that checkpoint::save wrote" },
    Mistake { what: "a folder that is no checkpoint", make: |_| {}, line: "export model out", sentence: "model: it has no checkpoint.safetensors" },
    Mistake { what: "weights that are no checkpoint", make: |_| {}, line: "export model/model.safetensors out --config model", sentence: "expected the parameters of a Gpt" },
    Mistake { what: "a checkpoint of an unknown model", make: |_| {}, line: "export model/model.safetensors out", sentence: "it does not say which model it is: give a config.json (--config)" },
    Mistake { what: "a configuration that does not exist", make: |_| {}, line: "export model out --config config.json", sentence: "--config config.json: not found: expected a config.json, or a folder that has it" },
    Mistake { what: "static inputs without a scheme", make: |_| {}, line: "export model out --static-inputs", sentence: "--static-inputs requires --scheme" },
    Mistake { what: "a dtype that is not known", make: |_| {}, line: "export model out --dtype fp8", sentence: "--dtype fp8: unknown; the known ones are f32, bf16 and f16" },
];

#[test]
fn every_mistake_gets_a_sentence_and_nothing_is_written() {
    assert!(MISTAKES.len() >= 80);
    for Mistake { what, make, line, sentence } in MISTAKES {
        let place = tempfile::tempdir().unwrap();
        copy(&golden().join("llama_gqa_tied"), &place.path().join("model"));
        make(place.path());
        let before = listing(place.path());
        let (code, out, error) = run(place.path(), line.split_whitespace());
        assert_eq!((code, out.as_str()), (2, ""), "{what}: {error}");
        assert!(error.starts_with("error: ") && error.contains(sentence), "{what}: {error}");
        assert!(error.ends_with('\n') && error.lines().count() == 1, "{what}: {error:?}");
        assert!(!error.contains('\u{1b}'), "{what}: {error:?}");
        assert_eq!(listing(place.path()), before, "{what}: something was written");
    }
}
