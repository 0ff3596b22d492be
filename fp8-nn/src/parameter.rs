//! A named tensor that training changes, and its gradient.

use crate::Result;
use crate::data_parallel::Agreement;
use fp8_kernels::{DType, Error, Tensor};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A weight, bias or norm factor. Its name is its path in the model and never changes.
///
/// The gradient, `main_grad`, is f32 whatever the parameter's dtype, and backward adds to it:
/// [`zero_grad`](crate::zero_grad) clears it.
#[derive(Debug)]
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

    /// The parameter has other bytes now.
    pub(crate) fn advance(&self) {
        self.0.store(next_version(), Relaxed);
    }
}

impl Parameter {
    /// With this value and no gradient.
    ///
    /// # Errors
    /// The device is out of memory or failed; none on the CPU.
    pub fn new(name: impl Into<Arc<str>>, tensor: Tensor) -> Result<Self> {
        let main_grad = Tensor::zeros(*tensor.shape(), DType::F32, tensor.device())?;
        Ok(Self {
            name: name.into(),
            tensor,
            main_grad,
            version: Version::new(),
            agreement: Agreement::default(),
        })
    }

    /// Its path in the model.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Its value.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.tensor.dtype()
    }

    /// The accumulated gradient, f32.
    pub fn main_grad(&self) -> &Tensor {
        &self.main_grad
    }

    /// The accumulated gradient, to add to.
    pub fn main_grad_mut(&mut self) -> &mut Tensor {
        &mut self.main_grad
    }

    /// Changes with every update, and is unique in the process: equal versions mean equal bytes.
    pub fn version(&self) -> u64 {
        self.version.0.load(Relaxed)
    }

    /// Changes the value in place, with the gradient at hand, and moves on to a new version.
    ///
    /// # Errors
    /// What `f` returns.
    pub fn update<T>(&mut self, f: impl FnOnce(&mut Tensor, &Tensor) -> Result<T>) -> Result<T> {
        self.version.advance();
        f(&mut self.tensor, &self.main_grad)
    }

    /// What is known of its equality with other ranks'.
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

    /// Replaces the value, where it lies: a recorded step goes on with it. One whose storage others hold too moves away
    /// from them, and from recorded steps. An optimizer that keeps f32 copies overwrites it in its next step, unless
    /// [`AdamW::reload_params`](crate::AdamW::reload_params) is called before.
    ///
    /// Among several ranks, all set it, to the same value: the next
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
        overwrite(&mut self.tensor, value, &self.name)
    }

    /// Clears the gradient.
    ///
    /// # Errors
    /// The device is out of memory or failed; none on the CPU.
    pub fn zero_grad(&mut self) -> Result<()> {
        if let Some(grad) = self.new_grad()? {
            self.main_grad = grad;
            return Ok(());
        }
        // In place, where recorded steps find it.
        Ok(self.main_grad.set_zero(&self.name)?)
    }

    /// A cleared gradient in a place of its own, if others hold the gradient's storage, who may still read it.
    pub(crate) fn new_grad(&self) -> Result<Option<Tensor>> {
        if self.main_grad.holders() == 0 {
            return Ok(None);
        }
        self.tensor.device().expect_eager("zero_grad", "drop what shares the gradient's storage before")?;
        Ok(Some(Tensor::zeros(*self.tensor.shape(), DType::F32, self.tensor.device())?))
    }
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
