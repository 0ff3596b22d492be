//! Models that the ranks of a group read together.

use super::folder::Folder;
use super::model::LoadOptions;
use super::parameter_source::ParameterSource;
use crate::Result;
use fp8_dist::ProcessGroup;
use fp8_kernels::Device;
use fp8_nn::{Gpt, broadcast_parameter, parameters_mut};
use std::collections::BTreeMap;
use std::sync::Arc;

impl Folder {
    /// Makes the same model on all ranks of a group, for data-parallel training or evaluation. Each rank reads the files of some of
    /// the parameters, about 1 / `world_size` of the bytes, and sends the values to the others.
    ///
    /// The result is that of [`load`](Self::load), bit for bit. It saves a file system that ranks share from reading the model
    /// once for each of them. All ranks call it with equal options. Folders may be copies in different places; their
    /// configurations and the shapes and dtypes of their tensors are compared.
    ///
    /// ```
    /// use fp8_nn::fp8_dist::local;
    /// use fp8_hf::{self as hf, Config, Folder, LoadOptions};
    /// use fp8_nn::prelude::*;
    /// use std::{sync::Arc, thread, time::Duration};
    /// # let place = std::env::temp_dir().join(format!("fp8-load-on-ranks-{}", std::process::id()));
    /// # std::fs::create_dir(&place)?;
    /// # let path = place.join("model");
    /// # let config = Config::from_json(
    /// #     r#"{"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
    /// #         "num_attention_heads": 2}"#,
    /// # )?;
    /// # let model = Gpt::new("model", &config.gpt_options(), &Device::cpu(), &mut fp8_nn::rand::rng())?;
    /// # hf::save_model(&path, &config, &model, None)?;
    ///
    /// let run = |group: Arc<dyn ProcessGroup>| -> fp8_hf::Result<u64> {
    ///     let folder = Folder::open(&path)?;
    ///     folder.load_on_ranks(&LoadOptions::default(), &Device::cpu(), &*group)?;
    ///     Ok(folder.weights.bytes_read())
    /// };
    /// let bytes = thread::scope(|scope| {
    ///     let groups = local("dp", 2, Duration::from_secs(10))?.into_iter();
    ///     let ranks: Vec<_> = groups.map(|group| scope.spawn(move || run(group))).collect();
    ///     ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<fp8_hf::Result<Vec<u64>>>()
    /// })?;
    /// let folder = Folder::open(&path)?;
    /// folder.load(&LoadOptions::default(), &Device::cpu())?;
    /// assert_eq!(bytes.iter().sum::<u64>(), folder.weights.bytes_read()); // no byte was read twice
    /// # std::fs::remove_dir_all(place)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`load`](Self::load), on every rank; folders or options that differ between ranks; a rank that left, failed or makes
    /// another call.
    pub fn load_on_ranks(
        &self,
        options: &LoadOptions,
        device: &Device,
        group: &dyn ProcessGroup,
    ) -> Result<Gpt> {
        let world_size = group.world_size();
        if world_size == 1 {
            return self.load(options, device);
        }
        group.agree_on_names("load_on_ranks", &self.form_of_files(options))?;
        let owners = own(group, self.owners(world_size))?;
        let reads = |parameter: &str| owners.get(parameter) == Some(&group.rank());
        let mut model = own(group, self.load_parts(options, device, &reads))?;
        for parameter in parameters_mut(&mut model) {
            let behind = parameter.name().strip_prefix(&*options.path).unwrap_or_default();
            let owner = owners.get(behind.trim_start_matches('.')).copied().unwrap_or(0);
            broadcast_parameter(parameter, group, owner)?;
        }
        Ok(model)
    }

    /// Describes everything that must be equal on all ranks.
    fn form_of_files(&self, options: &LoadOptions) -> Vec<Arc<str>> {
        let mut form: Vec<Arc<str>> = vec![self.config.json().into(), format!("{options:?}").into()];
        for name in self.weights.names() {
            if let Some(info) = self.weights.info(name) {
                form.push(format!("{name}: {:?} {:?}", info.dtype, info.shape).into());
            }
        }
        form
    }

    /// Returns the rank that reads each parameter: the one that has fewest bytes so far.
    fn owners(&self, world_size: usize) -> Result<BTreeMap<String, usize>> {
        let mut bytes = vec![0u64; world_size];
        let mut owners = BTreeMap::new();
        for ParameterSource { parameter, tensors, .. } in self.config.parameters() {
            let least = bytes.iter().enumerate().min_by_key(|&(_, &bytes)| bytes);
            let owner = least.map_or(0, |(rank, _)| rank);
            for tensor in &tensors {
                bytes[owner] += self.info(self.stored(tensor))?.bytes;
            }
            owners.insert(parameter, owner);
        }
        Ok(owners)
    }
}

/// Returns `result`. If it is an error, which only this rank has, poisons the group so that the other ranks do not wait.
fn own<T>(group: &dyn ProcessGroup, result: Result<T>) -> Result<T> {
    result.inspect_err(|error| group.poison(&error.to_string()))
}
