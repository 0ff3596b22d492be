//! Text that a trained model generates.

use rand::Rng;

use crate::train::batches;
use crate::train::config::Config;
use crate::train::trainer::{Run, Trainer};

const TEMPERATURE: f64 = 0.8;

/// Bytes that a model generated, and the prompt before them.
#[derive(Debug)]
pub(crate) struct Sample {
    pub(crate) run: Run,
    pub(crate) prompt: Vec<u8>,
    pub(crate) bytes: Vec<u8>,
}

/// Generates bytes one by one from the model's distribution at temperature 0.8. The prompt is the first sequence of the
/// held-out text or, if that is shorter, the last sequence of the whole text.
pub(crate) fn generate<T: Trainer>(config: &Config, run: Run, trainer: &mut T) -> Result<Sample, String> {
    let seq = config.settings.seq;
    let text = config.corpus.bytes();
    let start = config.corpus.train().len().min(text.len() - seq);
    let prompt = text[start..start + seq].to_vec();
    let mut rng = batches::stream(config.settings.seed, u64::MAX);
    let mut all = prompt.clone();
    for _ in 0..config.sample {
        let scores = trainer.next_byte(&all[all.len() - seq..])?;
        all.push(draw(&scores, rng.random())?);
    }
    Ok(Sample { run, prompt, bytes: all.split_off(seq) })
}

/// Returns the byte at `point` (0 to 1) of the cumulative distribution.
fn draw(scores: &[f32], point: f64) -> Result<u8, String> {
    let highest = f64::from(scores.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let weights: Vec<f64> =
        scores.iter().map(|&score| ((f64::from(score) - highest) / TEMPERATURE).exp()).collect();
    let total: f64 = weights.iter().sum();
    if !total.is_finite() {
        return Err("the model's scores are not finite".to_owned());
    }
    let mut rest = point * total;
    for (byte, weight) in weights.iter().enumerate() {
        rest -= weight;
        if rest < 0.0 {
            return u8::try_from(byte).map_err(|_| format!("the model scores {} bytes", scores.len()));
        }
    }
    // Rounding errors left a small rest of `point`: take the most probable byte.
    let most = weights.iter().zip(0_u8..=255).max_by(|a, b| a.0.total_cmp(b.0));
    most.map(|(_, byte)| byte).ok_or_else(|| "the model scores no bytes".to_owned())
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

    #[test]
    fn drawing_follows_the_scores() {
        let mut scores = vec![f32::NEG_INFINITY; 256];
        scores[65] = 0.0;
        scores[66] = 0.0;
        assert_eq!(draw(&scores, 0.0), Ok(65));
        assert_eq!(draw(&scores, 0.49), Ok(65));
        assert_eq!(draw(&scores, 0.51), Ok(66));
        assert!(matches!(draw(&scores, 1.0), Ok(65 | 66)));
        assert!(draw(&[f32::NAN; 256], 0.5).is_err());
        assert!(draw(&[f32::NEG_INFINITY; 256], 0.5).is_err());
    }
}
