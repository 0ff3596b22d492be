//! A small model in training, stage by stage.

use fp8_nn::fp8_kernels::Error as Kernels;
use fp8_nn::prelude::*;
use fp8_nn::rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;
use std::path::Path;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stage {
    Forward,
    Backward,
    Clip,
    Optimize,
    Clear,
    Read,
}

pub(crate) struct Training {
    pub(crate) device: Device,
    pub(crate) model: Gpt,
    pub(crate) optimizer: AdamW,
    pub(crate) scaling: Scaling,
    pub(crate) recipe: Recipe,
    pub(crate) ids: Tensor,
    pub(crate) stage: Stage,
}

impl Training {
    pub(crate) fn new(device: Device) -> Self {
        let options = GptOptions {
            vocab_size: 16,
            num_layers: 1,
            layer: TransformerLayerOptions {
                hidden_size: 16,
                ffn_hidden_size: 16,
                attention: AttentionOptions {
                    num_attention_heads: 1,
                    max_seq_length: 16,
                    ..GptOptions::default().layer.attention
                },
                params_dtype: DType::BF16,
                init: InitOptions { init_std: 0.1, output_layer_init_std: 0.1 },
                ..GptOptions::default().layer
            },
            ..GptOptions::default()
        };
        let model = Gpt::new("gpt", &options, &device, &mut ChaCha8Rng::seed_from_u64(7)).unwrap();
        let scaling = Scaling::new(&model, &device).unwrap();
        let optimizer = AdamW::new(AdamWOptions::default()).unwrap();
        let recipe = DelayedScaling { amax_history_len: 4, ..DelayedScaling::default() }.into();
        let ids = Tensor::from_vec::<i32>((0..16).collect(), [1, 16], &device).unwrap();
        Self { device, model, optimizer, scaling, recipe, ids, stage: Stage::Forward }
    }

    /// With plans, kernels, moments and scales made.
    pub(crate) fn warm(device: Device) -> Self {
        let mut training = Self::new(device);
        for _ in 0..2 {
            training.step().unwrap();
        }
        training
    }

    pub(crate) fn queue(&mut self) -> Result<Tensor> {
        self.queue_until(&mut |_| Ok(()))
    }

    /// `before` sees each stage but the first.
    pub(crate) fn queue_until(&mut self, before: &mut dyn FnMut(&mut Self) -> Result<()>) -> Result<Tensor> {
        self.stage = Stage::Forward;
        let mut cx = self.scaling.autocast(&self.recipe)?;
        let (loss, saved) = self.model.loss(&mut cx, &self.ids, &self.ids)?;
        cx.commit()?;
        self.stage = Stage::Backward;
        before(self)?;
        let mut cx = self.scaling.backward()?;
        self.model.loss_backward(&mut cx, saved)?;
        cx.commit()?;
        self.stage = Stage::Clip;
        before(self)?;
        let norm = clip_grad_norm(&mut self.model, 1.0)?;
        self.stage = Stage::Optimize;
        before(self)?;
        self.optimizer.step_with_norm(&mut self.model, 1e-2, &norm)?;
        self.stage = Stage::Clear;
        before(self)?;
        zero_grad(&mut self.model)?;
        Ok(loss)
    }

    pub(crate) fn step(&mut self) -> Result<u32> {
        let loss = self.queue()?;
        self.stage = Stage::Read;
        Ok(loss.item()?.to_bits())
    }

    /// All that lasts, as a checkpoint's bytes. Gradients do not, nor does the list of those that no step has used.
    pub(crate) fn bytes(&self, folder: &Path) -> Vec<u8> {
        let (folder, none) = (folder.join("state"), BTreeMap::new());
        let options = checkpoint::SaveOptions { without_gradients: true };
        checkpoint::save_with_options(&folder, &self.model, &self.optimizer, &self.scaling, &none, &options)
            .unwrap();
        let file = std::fs::read(checkpoint::path(&folder)).unwrap();
        let (len, rest) = file.split_first_chunk::<8>().unwrap();
        let (header, tensors) = rest.split_at(usize::try_from(u64::from_le_bytes(*len)).unwrap());
        let mut header: serde_json::Value = serde_json::from_slice(header).unwrap();
        let metadata = header["__metadata__"].as_object_mut().unwrap();
        metadata.remove("fp8.without_gradients");
        // A recording that fails has committed its scopes on the host.
        let scaling = metadata["fp8.scaling"].as_str().unwrap();
        let scaling = scaling.replace("\"awaits_backward\":true", "\"awaits_backward\":false");
        metadata.insert("fp8.scaling".to_owned(), scaling.into());
        [header.to_string().into_bytes(), tensors.to_vec()].concat()
    }

    pub(crate) fn save(&self, folder: &Path) -> Result<()> {
        let (none, options) = (BTreeMap::new(), checkpoint::SaveOptions { without_gradients: true });
        checkpoint::save_with_options(folder, &self.model, &self.optimizer, &self.scaling, &none, &options)
    }

    /// As after the warm-up.
    pub(crate) fn restore(&mut self, folder: &Path) {
        checkpoint::load(folder, &mut self.model, &mut self.optimizer, &mut self.scaling).unwrap();
        zero_grad(&mut self.model).unwrap();
        self.device.synchronize().unwrap();
    }

    pub(crate) fn is_poisoned(&self) -> bool {
        matches!(self.device.synchronize(), Err(Kernels::Poisoned { .. }))
    }
}

/// A poisoned device says so to all, and a checkpoint of it leaves the old file.
pub(crate) fn expect_useless(training: &mut Training, folder: &Path, old: &[u8]) {
    let steps = training.optimizer.steps();
    let mut results = vec![training.step().map(drop), training.save(folder)];
    results.push(zero_grad(&mut training.model));
    results.push(training.device.capture(|| Ok::<_, Error>(())).map(drop));
    for result in results {
        let text = result.unwrap_err().to_string();
        assert!(text.contains("restart the process") || text.contains("poisoned"), "{text}");
    }
    assert_eq!(training.optimizer.steps(), steps);
    assert!(std::fs::read(checkpoint::path(folder)).unwrap() == old, "the old checkpoint");
}
