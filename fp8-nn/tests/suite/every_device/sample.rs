//! Recorded layers: a file's tensors by name, and its options, which are JSON in its metadata.

use super::support::device;
use fp8_nn::prelude::*;
use safetensors::SafeTensors;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

pub(crate) struct Sample {
    pub(crate) config: Value,
    pub(crate) tensors: BTreeMap<String, Tensor>,
}

impl Sample {
    fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let config = serde_json::from_str(&header.metadata().as_ref().unwrap()["config"]).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file.iter().map(|(name, view)| {
            let values = view.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
            let shape = Shape::from_slice(view.shape()).unwrap();
            (name.to_owned(), Tensor::from_vec(values.collect(), shape, &device()).unwrap())
        });
        Self { config, tensors: tensors.collect() }
    }

    pub(crate) fn size(&self, option: &str) -> Option<usize> {
        self.config[option].as_u64().map(|size| size as usize)
    }

    pub(crate) fn flag(&self, option: &str) -> bool {
        self.config[option].as_bool().unwrap()
    }

    pub(crate) fn text(&self, option: &str) -> &str {
        self.config[option].as_str().unwrap_or_default()
    }
}

/// The files of a folder of `tests/golden`, with their names.
pub(crate) fn samples(folder: &str) -> Vec<(String, Sample)> {
    // At run time first: the program may run on another machine than the one that built it.
    let package = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let files = std::fs::read_dir(Path::new(&package).join("tests/golden").join(folder)).unwrap();
    let files = files.map(|entry| entry.unwrap().path());
    let files = files.filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    files.map(|path| (path.file_stem().unwrap().to_string_lossy().into(), Sample::read(&path))).collect()
}
