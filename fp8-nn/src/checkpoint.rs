//! Checkpoints: one safetensors file with named, typed tensors, from which training resumes bit for bit.
//!
//! | tensors of `DIR/checkpoint.safetensors` | |
//! |---|---|
//! | `model.<parameter>` | the parameters |
//! | `optimizer.<parameter>.{exp_avg,exp_avg_sq}_scale_inv` | the scales of moments in FP8 |
//! | `optimizer.<parameter>.{exp_avg,exp_avg_sq,main_param}` | AdamW's moments, and its f32 copies of bf16, f16 and FP8 parameters; frozen parameters have neither |
//! | `loss_scaler.{scale,growth_tracker,skipped_steps}` | the state of the optimizer's [`LossScaler`](crate::LossScaler), if it has one |
//! | `optimizer_updates` | the steps that count in the bias correction, if skipped ones do not |
//! | `scaling.<n>.{scale,amax_history}` | the scaling state of each recipe and direction |
//!
//! Everything else is in the metadata, including the caller's own and the kernels that [tuning](fp8_kernels::TunedProducts) chose
//! for matrix products. Training continues with these kernels on the same GPU and version of cuBLASLt; elsewhere they are ignored.
//!
//! [`save`] writes a temporary file in the same folder, flushes it to disk and renames it
//! ([`AtomicFile`](fp8_kernels::AtomicFile)), so a reader sees the whole old file or the whole new one. The next save removes
//! temporary files of programs that were killed while they saved.
//!
//! [`load`] reads the file twice, with read calls. The first pass checks everything: the header, names, shapes and dtypes
//! against the model, the scaling state, the step count, and that every byte can be read. Only the second pass changes
//! anything. A save that replaces the file in between is harmless, since the old file remains open. If another program writes
//! into the open file, the second pass finds other bytes than the first and returns an error, which says that a part of the
//! file has been loaded.
//!
//! Both need memory for one tensor besides what is saved or loaded.
//!
//! [`save_on`] and [`load_on`] write and read the same file where ranks have parts of the parameters
//! ([tensor parallelism](crate::TensorParallel)).

mod describe;
mod finite;
mod gradients;
mod layout;
mod load;
mod loss_scale;
mod moments;
mod on_mesh;
mod outcome;
mod parameters;
mod reader;
mod save;
pub(crate) mod scaling_state;
pub mod stream;
mod tuned_products;
mod values;
mod whole;
mod writer;

pub use describe::{describe, metadata};
pub use finite::expect_finite;
pub use layout::path;
pub use load::{Loaded, load};
pub use on_mesh::{load_on, save_on, save_on_with_options};
pub use parameters::{
    LoadParametersOptions, LoadedParameters, load_parameters, load_parameters_with_options, save_parameters,
};
pub use save::{SaveOptions, save, save_with_options};
