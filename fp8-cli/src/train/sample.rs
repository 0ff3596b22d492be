//! Text that a trained model generates.

use fp8_nn::GenerateOptions;
use rand::Rng;

use crate::train::batches;
use crate::train::config::Config;
use crate::train::trainer::{Run, Trainer};

const TEMPERATURE: f32 = 0.8;

/// Bytes that a model generated, and the prompt before them.
#[derive(Debug)]
pub(crate) struct Sample {
    pub(crate) run: Run,
    pub(crate) prompt: Vec<u8>,
    pub(crate) bytes: Vec<u8>,
}

/// Generates bytes from the model's distribution at temperature 0.8. The prompt begins the held-out text and is half as long
/// as the context; if that text is shorter, the prompt ends the whole text. A sample that is longer than the rest of the
/// context is generated in pieces, each of which continues the last bytes.
pub(crate) fn generate<T: Trainer>(config: &Config, run: Run, trainer: &mut T) -> Result<Sample, String> {
    let seq = config.settings.seq;
    let text = config.corpus.bytes();
    let len = (seq / 2).max(1);
    let start = config.corpus.train().len().min(text.len() - len);
    let prompt = text[start..start + len].to_vec();
    let mut seeds = batches::stream(config.settings.seed, u64::MAX);
    let mut all = prompt.clone();
    while all.len() < len + config.sample {
        let rest = len + config.sample - all.len();
        // The model does not read the last byte that it adds.
        let max_new_tokens = rest.min(seq + 1 - len);
        let options = GenerateOptions {
            max_new_tokens,
            temperature: TEMPERATURE,
            seed: seeds.random(),
            ..GenerateOptions::default()
        };
        let added = trainer.continue_text(&all[all.len() - len..], &options)?;
        all.extend(added);
    }
    Ok(Sample { run, prompt, bytes: all.split_off(len) })
}

/// Returns bytes as text. Valid UTF-8 and line breaks stay as they are; everything else becomes `\xNN`, and tabs `\t`.
pub(crate) fn printable(bytes: &[u8]) -> String {
    let mut text = String::new();
    let escape = |text: &mut String, byte: u8| text.push_str(&format!("\\x{byte:02x}"));
    for chunk in bytes.utf8_chunks() {
        for char in chunk.valid().chars() {
            match char {
                '\n' => text.push('\n'),
                '\t' => text.push_str("\\t"),
                _ if char.is_control() => {
                    let mut buffer = [0; 4];
                    char.encode_utf8(&mut buffer).bytes().for_each(|byte| escape(&mut text, byte));
                }
                _ => text.push(char),
            }
        }
        chunk.invalid().iter().for_each(|&byte| escape(&mut text, byte));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_become_readable() {
        assert_eq!(printable(b"a\tb\r\n\x00\xff"), "a\\tb\\x0d\n\\x00\\xff");
        assert_eq!(printable("2 ≤ 3".as_bytes()), "2 ≤ 3");
    }
}
