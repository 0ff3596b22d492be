//! The common start of all contenders: initial weights, batches and learning rates, as `fp8 train` has them by default.

use std::collections::HashMap;
use std::path::Path;

use fp8_nn::prelude::*;
use fp8_nn::rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use safetensors::tensor::{Dtype, TensorView};

use crate::result::Result;
use crate::size::{Size, VOCABULARY};

/// Plays by Shakespeare. The last tenth is not trained on.
const TEXT: &[u8] =
    include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fp8-cli/data/shakespeare.txt"));
const SEED: u64 = 1337;
/// Batches that differ; then they start again.
pub(crate) const BATCHES: usize = 64;
/// Steps of the schedule; then the rate stays.
const STEPS: u64 = 400;

/// Windows of the text, and the byte after each of theirs.
#[derive(Debug, PartialEq)]
pub(crate) struct Batch {
    pub(crate) ids: Vec<i32>,
    pub(crate) targets: Vec<i32>,
}

fn stream(number: u64) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    rng.set_stream(number);
    rng
}

/// Returns the model before the first step.
pub(crate) fn model(size: &Size) -> fp8_nn::Result<Gpt> {
    let options = GptOptions {
        vocab_size: VOCABULARY,
        num_layers: size.layers,
        layer: TransformerLayerOptions {
            hidden_size: size.hidden,
            ffn_hidden_size: 4 * size.hidden,
            attention: AttentionOptions {
                num_attention_heads: size.heads,
                max_seq_length: size.seq,
                ..Default::default()
            },
            ..Default::default()
        },
        ..Default::default()
    };
    Gpt::new("gpt", &options, &Device::cpu(), &mut stream(0))
}

/// Returns [`BATCHES`] batches.
pub(crate) fn batches(size: &Size) -> Result<Vec<Batch>> {
    let text = &TEXT[..TEXT.len() / 10 * 9 + TEXT.len() % 10 * 9 / 10];
    let places = text.len().checked_sub(size.seq).filter(|places| *places > 0);
    let places = places.ok_or_else(|| format!("{size}: the text has only {} bytes", text.len()))? as u64;
    let batch = |number: u64| {
        let mut rng = stream(number);
        let starts: Vec<usize> = (0..size.batch).map(|_| rng.random_range(0..places) as usize).collect();
        let bytes = |shift: usize| {
            let windows = starts.iter().flat_map(move |start| &text[start + shift..][..size.seq]);
            windows.map(|&byte| i32::from(byte)).collect()
        };
        Batch { ids: bytes(0), targets: bytes(1) }
    };
    Ok((1..=BATCHES as u64).map(batch).collect())
}

/// Returns the learning rate of each step.
pub(crate) fn rates() -> fp8_nn::Result<Vec<f32>> {
    let schedule = Schedule::cosine(1e-3, STEPS / 10, STEPS, 0.01)?;
    Ok((0..STEPS).map(|step| schedule.lr(step)).collect())
}

/// Writes everything to a safetensors file: the parameters by name, `ids` and `targets` `[batches, batch, seq]`, and `lr`.
pub(crate) fn export(size: &Size, file: &Path) -> Result {
    let model = model(size)?;
    let batches = batches(size)?;
    let shape = vec![BATCHES, size.batch, size.seq];
    let ids = batches.iter().flat_map(|batch| &batch.ids).flat_map(|id| id.to_le_bytes()).collect();
    let targets = batches.iter().flat_map(|batch| &batch.targets).flat_map(|id| id.to_le_bytes()).collect();
    let rates = rates()?;
    let floats = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let mut tensors: HashMap<String, (Dtype, Vec<usize>, Vec<u8>)> = HashMap::from([
        ("ids".to_owned(), (Dtype::I32, shape.clone(), ids)),
        ("targets".to_owned(), (Dtype::I32, shape, targets)),
        ("lr".to_owned(), (Dtype::F32, vec![rates.len()], floats(&rates))),
    ]);
    for parameter in parameters(&model) {
        let tensor = parameter.tensor();
        let bytes = floats(&tensor.to_f32_vec()?);
        tensors.insert(parameter.name().to_string(), (Dtype::F32, tensor.shape().to_vec(), bytes));
    }
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| Ok((name, TensorView::new(*dtype, shape.clone(), bytes)?)))
        .collect::<std::result::Result<Vec<_>, safetensors::SafeTensorError>>()?;
    Ok(safetensors::serialize_to_file(views, None, file)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = "2/16/2/8/3";

    #[test]
    fn targets_are_the_next_bytes() {
        let batches = batches(&SMALL.parse().unwrap()).unwrap();
        assert_eq!(batches.len(), BATCHES);
        assert_ne!(batches[0], batches[1]);
        for row in 0..3 {
            let (ids, targets) = (&batches[5].ids[row * 8..][..8], &batches[5].targets[row * 8..][..8]);
            assert_eq!(ids[1..], targets[..7]);
        }
        let long = super::batches(&"1/16/2/500000/1".parse().unwrap()).unwrap_err().to_string();
        assert_eq!(long, "1/16/2/500000/1: the text has only 449954 bytes");
    }

    #[test]
    fn the_file_has_the_weights_bit_for_bit() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("start.safetensors");
        let size = SMALL.parse().unwrap();
        export(&size, &file).unwrap();
        let bytes = std::fs::read(&file).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let model = model(&size).unwrap();
        assert_eq!(tensors.len(), parameters(&model).len() + 3);
        for parameter in parameters(&model) {
            let view = tensors.tensor(parameter.name()).unwrap();
            assert_eq!(view.shape(), &**parameter.tensor().shape());
            let stored: Vec<f32> = view
                .data()
                .chunks_exact(4)
                .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
                .collect();
            assert_eq!(stored, parameter.tensor().to_f32_vec().unwrap());
        }
        assert_eq!(tensors.tensor("ids").unwrap().shape(), [BATCHES, 3, 8]);
    }
}
