//! The part of an adapter that is left after its sum with the weights was quantized.

use super::Adapter;
use crate::{Error, Folder, Result};

/// The part of an adapter's update that reached the weights of a quantized folder: see [`Adapter::survival`].
///
/// ```
/// use fp8_hf::Survival;
/// let all = Survival { kept: 1.0, noise: 0.0 }; // as in high precision
/// assert!(all.kept > Survival { kept: 0.9, noise: 3.0 }.kept);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Survival {
    /// The share of the update that the weights carry, ⟨D, Δ⟩ / ⟨Δ, Δ⟩ over all modules: 1 if none is lost, 0 if the codes are those of
    /// the base. Δ is what the adapter adds, and D the difference between the quantized weights and the base.
    pub kept: f64,
    /// The size of the rounding beside it, ‖D − Δ‖ / ‖Δ‖.
    pub noise: f64,
}

impl Adapter {
    /// Compares the weights of the folder `quantized`, which was made of the merged model, with the sums that were to be there.
    ///
    /// The values of an FP8 format are coarse: an update that is smaller than half the distance between two of them is lost in most
    /// values, and rounds to more than its size in a few, so that on average it is kept. [`Survival::kept`] says how well that worked, and
    /// [`Survival::noise`] what it costs.
    ///
    /// ```
    /// # use fp8_hf::{self as hf, Adapter, Config, Folder, LoraTargets, QuantizeOptions, save_adapter};
    /// # use fp8_nn::prelude::*;
    /// # let place = std::env::temp_dir().join(format!("fp8-survival-{}", std::process::id()));
    /// # std::fs::create_dir(&place)?;
    /// # let config = Config::from_json(
    /// #     r#"{"model_type": "llama", "vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    /// #         "num_attention_heads": 2}"#,
    /// # )?;
    /// # let mut model = Gpt::new("model", &config.gpt_options(), &Device::cpu(), &mut fp8_nn::rand::rng())?;
    /// # hf::save_model(&place.join("model"), &config, &model, None)?;
    /// # Adapter::new(&config, &LoraTargets { rank: 2, ..Default::default() }, 1)?.add_to(&mut model, &config, DType::F32)?;
    /// # for parameter in parameters_mut(&mut model).into_iter().filter(|parameter| parameter.name().ends_with(".b")) {
    /// #     parameter.set(Tensor::full(0.1, *parameter.shape(), DType::F32, &Device::cpu())?)?;
    /// # }
    /// # save_adapter(&place.join("adapter"), &model, &config, "model")?;
    /// let folder = Folder::open(&place.join("model"))?;
    /// let adapter = Adapter::open(&place.join("adapter"), &folder.config)?;
    /// adapter.merge(&folder, &place.join("merged"), None)?;
    /// let merged = Folder::open(&place.join("merged"))?;
    /// hf::quantize(&merged, &place.join("fp8"), &QuantizeOptions::default(), &Default::default())?;
    /// let survival = adapter.survival(&folder, &Folder::open(&place.join("fp8"))?)?;
    /// assert!((survival.kept - 1.0).abs() < 0.1, "{survival:?}");
    /// # std::fs::remove_dir_all(place)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// A folder without one of the modules, or with one of another shape; a file that cannot be read.
    pub fn survival(&self, base: &Folder, quantized: &Folder) -> Result<Survival> {
        let (mut product, mut square, mut rest) = (0.0, 0.0, 0.0);
        for module in &self.modules {
            let name = format!("{}.weight", module.name);
            let (before, after) =
                (base.values(base.stored(&name))?, quantized.values(quantized.stored(&name))?);
            if before.len() != after.len() || before.len() != module.shape[0] * module.shape[1] {
                return Err(Error::File {
                    path: quantized.path().to_owned(),
                    problem: format!(
                        "`{name}` has another shape than the adapter's: expected the merged model"
                    ),
                });
            }
            let mut sums = before.clone();
            module.add_to(&mut sums, base.config.family.is_transposed);
            for ((before, sum), after) in before.iter().zip(&sums).zip(&after) {
                let update = f64::from(*sum) - f64::from(*before);
                let found = f64::from(*after) - f64::from(*before);
                product += update * found;
                square += update * update;
                rest += (found - update).powi(2);
            }
        }
        // Without an update nothing can be lost.
        let ratio = |part: f64, whole: f64, empty: f64| if whole > 0.0 { part / whole } else { empty };
        Ok(Survival { kept: ratio(product, square, 1.0), noise: ratio(rest.sqrt(), square.sqrt(), 0.0) })
    }
}
