//! Options of AdamW.

use super::moments::MomentDtype;

/// Options of [`AdamW`](super::AdamW). The defaults are the usual ones for language models and differ from PyTorch's.
///
/// | field | default | `torch.optim.AdamW` |
/// |---|---|---|
/// | `beta1` | 0.9 | 0.9 |
/// | `beta2` | 0.95 | 0.999 |
/// | `eps` | 1e-8 | 1e-8 |
/// | `weight_decay` | 0.1, of parameters with two dimensions or more | 0.01, of all parameters |
/// | `main_params` | true | none: 16-bit parameters are updated in 16 bits |
/// | `groups` | none | one, or as many as `param_groups` lists |
/// | `moments` | f32 | the parameter's dtype |
/// | `stochastic_rounding` | false | none |
///
/// The learning rate is an argument of [`AdamW::step`](super::AdamW::step).
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let like_pytorch = AdamWOptions { beta2: 0.999, weight_decay: 0.01, ..Default::default() };
/// assert_eq!(AdamWOptions::default(), AdamWOptions { beta2: 0.95, weight_decay: 0.1, ..like_pytorch });
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct AdamWOptions {
    /// The decay of the first moment, at least 0 and less than 1. Default: 0.9, as in PyTorch.
    pub beta1: f32,
    /// The decay of the second moment, at least 0 and less than 1. Default: 0.95. PyTorch's default is 0.999.
    pub beta2: f32,
    /// ε, which is added to the root of the second moment. Default: 1e-8, as in PyTorch.
    pub eps: f32,
    /// The decoupled weight decay, which applies to parameters with two or more dimensions and therefore not to
    /// norms and biases. Default: 0.1. PyTorch's default is 0.01, for all parameters.
    pub weight_decay: f32,
    /// Whether the optimizer keeps an f32 copy of each bf16 or f16 parameter and updates that copy, so that small
    /// updates are not lost to rounding. f32 parameters need no copy. Default: true. PyTorch's optimizer
    /// updates 16-bit parameters in 16 bits.
    pub main_params: bool,
    /// Parameters with a learning rate or a weight decay of their own, by patterns of their names. The first group whose pattern
    /// matches a name has the parameter; the other parameters are as the fields above say. [`ParameterGroup`] has an example.
    /// Checkpoints do not contain groups, like all options: a resumed job continues with those of its optimizer. Default: none.
    pub groups: Vec<ParameterGroup>,
    /// The format in which the moments are stored. Default: f32. [`MomentDtype`] says what the others cost and save.
    pub moments: MomentDtype,
    /// Whether bf16 parameters are rounded stochastically, so that small updates are not lost without an f32 copy: they are right in
    /// the mean. It needs `main_params: false`, and saves the 4 bytes a parameter of the copies. f16 parameters are rounded to
    /// nearest. The random numbers are those of [`MomentDtype`]. Default: false.
    ///
    /// ```
    /// use fp8_nn::prelude::*;
    /// let options = LinearOptions { in_features: 64, out_features: 64, bias: false, params_dtype: DType::BF16, ..Default::default() };
    /// let mut fc = Linear::new("fc", options, &Device::cpu(), &mut fp8_nn::rand::rng())?;
    /// parameters_mut(&mut fc)[0].set(Tensor::full(1.0, [64, 64], DType::BF16, &Device::cpu())?)?;
    /// *parameters_mut(&mut fc)[0].main_grad_mut() = Tensor::full(1.0, [64, 64], DType::F32, &Device::cpu())?;
    /// let options = AdamWOptions { main_params: false, stochastic_rounding: true, weight_decay: 0.0, ..Default::default() };
    /// let mut optimizer = AdamW::new(options)?;
    /// (0..10).try_for_each(|_| optimizer.step(&mut fc, 1e-4))?; // by an update that is less than half an ulp
    /// let mean = fc.weight().tensor().to_f32_vec()?.iter().sum::<f32>() / 4096.0;
    /// assert!((mean - 0.999).abs() < 2e-4);
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    pub stochastic_rounding: bool,
}

impl Default for AdamWOptions {
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            main_params: true,
            groups: Vec::new(),
            moments: MomentDtype::F32,
            stochastic_rounding: false,
        }
    }
}

/// Parameters of [`AdamWOptions::groups`]: those whose names match a pattern, with a learning rate and a weight decay of their own.
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let group = |pattern: &str| ParameterGroup { pattern: pattern.to_owned(), ..Default::default() };
/// let groups = vec![
///     ParameterGroup { lr_factor: 0.1, ..group("*.embedding.weight") }, // a tenth of the learning rate
///     ParameterGroup { weight_decay: Some(0.0), ..group("head") },      // no decay for the head, whatever its shape
/// ];
/// let mut optimizer = AdamW::new(AdamWOptions { groups, ..Default::default() })?;
///
/// let options = LinearOptions { in_features: 4, out_features: 4, ..Default::default() };
/// let mut other = Linear::new("fc", options, &Device::cpu(), &mut fp8_nn::rand::rng())?;
/// let refused = optimizer.step(&mut other, 1e-3).unwrap_err();
/// assert_eq!(
///     refused.to_string(),
///     "AdamW: groups = \"*.embedding.weight\": it matches no parameter of the model: expected a pattern such as \"*.bias\" or \"head\""
/// );
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterGroup {
    /// The pattern of the names. `*` stands for any text, as in `*.bias` or `gpt.blocks.0.*`; a pattern without `*` matches a name
    /// that has it as a part between dots, as `norm` matches `gpt.norm.weight`. Required. A step refuses a pattern that matches no
    /// parameter of its model, frozen ones included.
    pub pattern: String,
    /// The factor of the learning rate, 0 or more. Default: 1.
    pub lr_factor: f32,
    /// The weight decay of all parameters of the group, whatever their dimensions. Default: `None`, which is that of
    /// [`AdamWOptions::weight_decay`] for parameters with two dimensions or more.
    pub weight_decay: Option<f32>,
}

impl Default for ParameterGroup {
    fn default() -> Self {
        Self { pattern: String::new(), lr_factor: 1.0, weight_decay: None }
    }
}
