//! Files of reference data.

#![allow(dead_code, reason = "each test binary uses a part")]

use serde_json::Value;
use std::path::PathBuf;

/// A file of tensors.
pub(crate) struct File {
    pub(crate) name: String,
    pub(crate) header: Value,
    data: Vec<u8>,
}

impl File {
    /// All files of a folder of `golden`, and of the one that this variable names.
    pub(crate) fn all(folder: &str, variable: &str) -> Vec<Self> {
        let own = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(folder);
        let other = std::env::var_os(variable).map(PathBuf::from);
        let files = |folder: PathBuf| {
            std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()))
        };
        let paths =
            [Some(own), other].into_iter().flatten().flat_map(files).map(|entry| entry.unwrap().path());
        let mut paths: Vec<PathBuf> =
            paths.filter(|path| path.extension().is_some_and(|e| e == "safetensors")).collect();
        // Files that only serve under Miri take too long there.
        paths.retain(|path| !cfg!(miri) || std::fs::metadata(path).is_ok_and(|file| file.len() < 30_000));
        paths.into_iter().map(Self::read).collect()
    }

    pub(crate) fn read(path: PathBuf) -> Self {
        let bytes = std::fs::read(&path).unwrap();
        let (len, rest) = bytes.split_first_chunk().unwrap();
        let (header, data) = rest.split_at(u64::from_le_bytes(*len) as usize);
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        Self { name, header: serde_json::from_slice(header).unwrap(), data: data.to_vec() }
    }

    pub(crate) fn kind(&self) -> &str {
        self.header["__metadata__"]["kind"].as_str().unwrap()
    }

    pub(crate) fn cases(&self) -> Vec<Value> {
        serde_json::from_str(self.header["__metadata__"]["cases"].as_str().unwrap()).unwrap()
    }

    pub(crate) fn shape(&self, tensor: &str) -> [usize; 2] {
        let size = |i: usize| self.header[tensor]["shape"][i].as_u64().unwrap() as usize;
        [size(0), size(1)]
    }

    pub(crate) fn bytes(&self, tensor: &str) -> &[u8] {
        let offset = |i: usize| self.header[tensor]["data_offsets"][i].as_u64().unwrap() as usize;
        &self.data[offset(0)..offset(1)]
    }

    pub(crate) fn words(&self, tensor: &str) -> Vec<u32> {
        self.bytes(tensor).as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
    }

    pub(crate) fn floats(&self, tensor: &str) -> Vec<f32> {
        self.words(tensor).into_iter().map(f32::from_bits).collect()
    }

    /// Floats of 16 bits.
    pub(crate) fn halves<T>(&self, tensor: &str, of: impl Fn(u16) -> T) -> Vec<T> {
        self.bytes(tensor).as_chunks().0.iter().map(|word| of(u16::from_le_bytes(*word))).collect()
    }
}

/// The tensor `case` names under `key`.
pub(crate) fn named<'a>(case: &'a Value, key: &str) -> &'a str {
    case[key].as_str().unwrap()
}

pub(crate) fn hash(values: &[f32]) -> String {
    let hash = values.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, value| {
        let bits = if value.is_nan() { 0x7FC0_0000 } else { value.to_bits() };
        (hash ^ u64::from(bits)).wrapping_mul(0x0000_0100_0000_01B3)
    });
    format!("{hash:016x}")
}
