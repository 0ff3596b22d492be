//! Copies of matrices, by the slices of fp8-format on every path, and by fp8-kernels.

use fp8_format::philox::BlockRandom;
use fp8_format::slice::{Codec, Nvfp4Copy, Nvfp4Options, Nvfp4Output, Path};
use fp8_format::{Blocks, E4M3, Source};
use fp8_kernels::Device;
use serde::Deserialize;

use crate::golden::blocks::file::{Check, Elements, File};
use crate::golden::blocks::quantize::{canonical, equal, hash};
use crate::golden::tally::Tally;

/// One copy. Names are those of tensors.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Case {
    pub(super) x: String,
    dtype: String,
    pub(super) block: String,
    pub(super) columnwise: bool,
    pub(super) hadamard: bool,
    pub(super) random: Option<Random>,
    pub(super) amax_bits: u32,
    /// Whether the amax is not that of the matrix itself.
    pub(super) amax_given: bool,
    pub(super) encode_bits: u32,
    pub(super) decode_bits: u32,
    pub(super) codes: String,
    pub(super) scales: String,
    dq: Option<String>,
    /// FNV-1a over the bits of the values.
    dq_fnv: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Random {
    pub(super) seed: String,
    pub(super) offset: String,
}

pub(super) fn number(text: &str) -> Check<u64> {
    text.parse().map_err(|error| format!("{text}: {error}"))
}

pub(super) fn random(seed: &str, offset: &str) -> Check<BlockRandom> {
    Ok(BlockRandom::new(number(seed)?, number(offset)?))
}

pub(super) fn blocks(name: &str) -> Check<Blocks> {
    match name {
        "1x16" => Ok(Blocks::B1x16),
        "16x16" => Ok(Blocks::B16x16),
        other => Err(format!("block {other}: expected 1x16 or 16x16")),
    }
}

impl Case {
    fn options(&self) -> Check<Nvfp4Options> {
        Ok(Nvfp4Options {
            copy: match (self.columnwise, self.hadamard) {
                (false, false) => Nvfp4Copy::Rowwise,
                (true, false) => Nvfp4Copy::Columnwise,
                (true, true) => Nvfp4Copy::Hadamard,
                (false, true) => return Err("a rowwise copy is never transformed".to_owned()),
            },
            blocks: blocks(&self.block)?,
            random: match &self.random {
                Some(Random { seed, offset }) => Some(random(seed, offset)?),
                None => None,
            },
        })
    }

    fn compare<S: Source>(&self, file: &File<'_>, x: &[S], [rows, cols]: [usize; 2], codec: Codec) -> Check {
        let options = self.options()?;
        let error = |error: fp8_format::Error| error.to_string();
        let amax = f32::from_bits(self.amax_bits);
        if !self.amax_given {
            let own = codec.nvfp4_amax(x, rows, cols, options.copy).map_err(error)?;
            equal("amax", &[own.to_bits()], &[self.amax_bits])?;
        }
        let [height, width] = options.copy.shape(rows, cols);
        let [down, across] = options.blocks.grid(height, width);
        let (mut codes, mut scales) = (vec![0; height * width.div_ceil(2)], vec![E4M3::ZERO; down * across]);
        let out = Nvfp4Output::new(&mut codes, &mut scales);
        let tensor = codec.quantize_nvfp4(x, rows, cols, amax, &options, out).map_err(error)?;
        let factors = [tensor.encode().to_bits(), tensor.decode().to_bits()];
        equal("factor", &factors, &[self.encode_bits, self.decode_bits])?;
        let bytes: Vec<u8> = scales.iter().map(|scale| scale.to_bits()).collect();
        equal("scale", &bytes, &file.bytes(&self.scales)?)?;
        equal("byte of codes", &codes, &file.bytes(&self.codes)?)?;
        let mut values = vec![0.0_f32; height * width];
        codec
            .dequantize_nvfp4(&codes, height, width, options.blocks, &scales, tensor, &mut values)
            .map_err(error)?;
        if let Some(dq) = &self.dq {
            let want: Vec<u32> = file.f32_bits(dq)?.into_iter().map(canonical).collect();
            let got: Vec<u32> = values.iter().map(|x| canonical(x.to_bits())).collect();
            equal("value", &got, &want)?;
        }
        match hash(&values) {
            hash if hash == self.dq_fnv => Ok(()),
            hash => Err(format!("the hash of the values is {hash}, expected {}", self.dq_fnv)),
        }
    }
}

pub(super) fn check(file: &File<'_>, name: &str, device: &Device, tally: &mut Tally) -> Check {
    for case in file.cases::<Case>()? {
        let on_device = case.compare_on(file, device);
        tally.record(&format!("nvfp4/{name} {} {} as a tensor", case.codes, case.dtype), on_device);
        let x = file.matrix(&case.x)?;
        let result = Path::available().try_for_each(|path| {
            let codec = Codec::new().on(path);
            match &x.elements {
                Elements::F32(data) => case.compare(file, data, x.shape, codec),
                Elements::F16(data) => case.compare(file, data, x.shape, codec),
                Elements::BF16(data) => case.compare(file, data, x.shape, codec),
            }
            .map_err(|difference| format!("{path}: {difference}"))
        });
        tally.record(&format!("nvfp4/{name} {} {}", case.codes, case.dtype), result);
    }
    Ok(())
}
