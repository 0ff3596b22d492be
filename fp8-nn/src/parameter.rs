//! A named tensor that training changes, and its gradient.

use crate::Result;
use crate::data_parallel::Agreement;
use fp8_kernels::{DType, Error, MemoryKind, Tensor};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A tensor that training changes, such as a weight, with its name and its gradient.
///
/// The name is the parameter's path in the model, such as `blocks.0.mlp.fc1.weight`, and never changes. Checkpoints and
/// optimizers identify the parameter by it. The gradient, `main_grad`, has the parameter's shape and is f32 whatever the
/// parameter's dtype. Backward adds to it; [`zero_grad`](crate::zero_grad) clears it.
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let mut scale = Parameter::new("head.scale", Tensor::full(1.0, [2], DType::F32, &Device::cpu())?)?;
/// assert_eq!(scale.main_grad().to_f32_vec()?, [0.0, 0.0]);
/// let version = scale.version();
/// scale.set(Tensor::from_vec(vec![2.0f32, 3.0], [2], &Device::cpu())?)?;
/// assert_eq!(scale.tensor().to_f32_vec()?, [2.0, 3.0]);
/// assert_ne!(scale.version(), version); // so that layers quantize it again
/// # Ok::<(), fp8_nn::Error>(())
/// ```
pub struct Parameter {
    name: Arc<str>,
    tensor: Tensor,
    main_grad: Tensor,
    version: Arc<Version>,
    agreement: Agreement,
}

/// Shared with recorded steps that change the parameter.
#[derive(Debug)]
pub(crate) struct Version(AtomicU64);

impl Version {
    fn new() -> Arc<Self> {
        Arc::new(Self(AtomicU64::new(next_version())))
    }

    /// Changes the version after the value has changed.
    pub(crate) fn advance(&self) {
        self.0.store(next_version(), Relaxed);
    }
}

/// Writes one line: `Parameter(fc.weight, [64, 8], f32)`.
impl fmt::Debug for Parameter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Parameter({}, {}, {})", self.name, self.tensor.shape(), self.tensor.dtype())
    }
}

impl Parameter {
    /// Creates a parameter with this value and a gradient of 0.
    ///
    /// # Errors
    /// The device is out of memory or failed; none on the CPU.
    pub fn new(name: impl Into<Arc<str>>, tensor: Tensor) -> Result<Self> {
        let main_grad = gradient_of(&tensor)?;
        tensor.set_memory_kind(MemoryKind::Parameters);
        Ok(Self {
            name: name.into(),
            tensor,
            main_grad,
            version: Version::new(),
            agreement: Agreement::default(),
        })
    }

    /// Returns the path in the model.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Returns the value.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Returns the dtype of the value.
    pub fn dtype(&self) -> DType {
        self.tensor.dtype()
    }

    /// Returns the accumulated gradient, f32.
    pub fn main_grad(&self) -> &Tensor {
        &self.main_grad
    }

    /// Returns the accumulated gradient, for a backward of your own to add to.
    pub fn main_grad_mut(&mut self) -> &mut Tensor {
        &mut self.main_grad
    }

    /// Returns the version of the value, which every update changes. Versions are unique in the process: equal versions mean
    /// equal bytes.
    pub fn version(&self) -> u64 {
        self.version.0.load(Relaxed)
    }

    /// Calls `f` with the value, which it may change in place, and the gradient. Afterwards the parameter has a new version.
    /// This is for optimizers of your own:
    ///
    /// ```
    /// use fp8_nn::prelude::*;
    ///
    /// let mut w = Parameter::new("w", Tensor::full(1.0, [2], DType::F32, &Device::cpu())?)?;
    /// *w.main_grad_mut() = Tensor::from_vec(vec![2.0f32, -2.0], [2], &Device::cpu())?;
    /// w.update(|value, grad| {
    ///     *value = ops::add(value, &ops::scale(grad, -0.25)?)?; // SGD with a rate of 0.25
    ///     Ok(())
    /// })?;
    /// assert_eq!(w.tensor().to_f32_vec()?, [0.5, 1.5]);
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    ///
    /// # Errors
    /// The errors of `f`.
    pub fn update<T>(&mut self, f: impl FnOnce(&mut Tensor, &Tensor) -> Result<T>) -> Result<T> {
        self.version.advance();
        f(&mut self.tensor, &self.main_grad)
    }

    /// Returns which groups have compared this parameter.
    pub(crate) fn agreement(&self) -> &Agreement {
        &self.agreement
    }

    pub(crate) fn agreement_mut(&mut self) -> &mut Agreement {
        &mut self.agreement
    }

    /// The parts that an optimizer's step uses: the name, the value to change, the gradient and the version.
    pub(crate) fn parts_mut(&mut self) -> (&Arc<str>, &mut Tensor, &Tensor, &Arc<Version>) {
        (&self.name, &mut self.tensor, &self.main_grad, &self.version)
    }

    /// Replaces the value.
    ///
    /// It is written in place, so recorded steps continue with it, unless the old value shares its storage with another
    /// tensor: then the parameter gets new storage. An optimizer that keeps f32 copies overwrites the value in its next step,
    /// unless [`AdamW::reload_params`](crate::AdamW::reload_params) is called before.
    ///
    /// With several ranks, set it to the same value on all of them. The next
    /// [`all_reduce_gradients`](crate::all_reduce_gradients) compares them.
    ///
    /// # Errors
    /// Another shape or dtype; the device failed.
    pub fn set(&mut self, value: Tensor) -> Result<()> {
        let (lhs, rhs) = (*self.tensor.shape(), *value.shape());
        if lhs != rhs {
            let remedy = "a parameter keeps its shape";
            return Err(Error::Shapes { op: "set", what: "parameter and value", lhs, rhs, remedy }.into());
        }
        if self.dtype() != value.dtype() {
            let (found, expected) = (value.dtype(), self.dtype().name());
            return Err(Error::DType { op: "set", what: "the value", found, expected }.into());
        }
        self.version.advance();
        self.agreement.forget_groups();
        overwrite(&mut self.tensor, value, &self.name)?;
        self.tensor.set_memory_kind(MemoryKind::Parameters);
        Ok(())
    }

    /// Sets the gradient to 0.
    ///
    /// # Errors
    /// The device is out of memory or failed; none on the CPU.
    pub fn zero_grad(&mut self) -> Result<()> {
        if let Some(grad) = self.new_grad()? {
            self.main_grad = grad;
            return Ok(());
        }
        // In place, because recorded steps read it at this address.
        Ok(self.main_grad.set_zero(&self.name)?)
    }

    /// Allocates a gradient of 0 if the present one shares its storage with a tensor that may still be read.
    pub(crate) fn new_grad(&self) -> Result<Option<Tensor>> {
        if self.main_grad.holders() == 0 {
            return Ok(None);
        }
        self.tensor.device().expect_eager("zero_grad", "drop what shares the gradient's storage before")?;
        gradient_of(&self.tensor).map(Some)
    }
}

/// Allocates a gradient of 0.
fn gradient_of(parameter: &Tensor) -> Result<Tensor> {
    let _kind = MemoryKind::Gradients.enter();
    Ok(Tensor::zeros(*parameter.shape(), DType::F32, parameter.device())?)
}

/// Gives `tensor` the elements of `value`, which has the same shape and dtype. Writes them in place, unless `tensor` shares
/// its storage: then `value` replaces it.
pub(crate) fn overwrite(tensor: &mut Tensor, value: Tensor, name: &str) -> Result<()> {
    let value = value.to_device(tensor.device())?;
    if tensor.holders() == 0 {
        return Ok(tensor.copy_from(&value, name)?);
    }
    *tensor = value;
    Ok(())
}

fn next_version() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Relaxed)
}
