//! Models of folders that are trained for a few steps.

use crate::folders::{golden, read};
use fp8_hf::{Config, Folder, LoadOptions};
use fp8_nn::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;

/// A model with the state of its training.
pub(crate) struct Trained {
    pub(crate) model: Gpt,
    pub(crate) optimizer: AdamW,
    pub(crate) scaling: Scaling,
}

impl Trained {
    pub(crate) fn new(folder: &Path, params_dtype: DType) -> Self {
        let options = LoadOptions { path: "gpt".into(), params_dtype, trainable: true, ..Default::default() };
        let model = Folder::open(folder).unwrap().load(&options, &Device::cpu()).unwrap();
        let scaling = Scaling::new(&model, &Device::cpu()).unwrap();
        Self { model, optimizer: AdamW::new(AdamWOptions::default()).unwrap(), scaling }
    }

    pub(crate) fn train(&mut self, recipe: &Recipe, ids: &Tensor) {
        let Self { model, optimizer, scaling } = self;
        let (_, saved) = scaling.in_autocast(recipe, |cx| model.loss(cx, ids, ids)).unwrap();
        scaling.in_backward(|cx| model.loss_backward(cx, saved)).unwrap();
        optimizer.step(model, 1e-2).unwrap();
        zero_grad(model).unwrap();
    }

    pub(crate) fn save(&self, dir: &Path, metadata: &BTreeMap<String, String>) {
        checkpoint::save(dir, &self.model, &self.optimizer, &self.scaling, metadata).unwrap();
    }
}

pub(crate) fn config_of(model: &str) -> Config {
    Folder::open(&golden().join(model)).unwrap().config
}

pub(crate) fn ids(path: &Path) -> Tensor {
    let (_, shape, bytes) = &read(&path.join("expected.safetensors"))["input_ids"];
    let ids = bytes.as_chunks::<8>().0.iter().map(|&bytes| i64::from_le_bytes(bytes) as i32).collect();
    Tensor::from_vec::<i32>(ids, [shape[0], shape[1]], &Device::cpu()).unwrap()
}
