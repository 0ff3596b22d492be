//! Checkpoints of models whose parameters are cut over the ranks of a mesh: one file of whole tensors.

use super::layout::path;
use super::load::{Checked, Loaded};
use super::outcome::outcome;
use super::save::{SaveOptions, contents, note_saved};
use super::writer::{Output, Plan, Writer};
use crate::data_parallel::common_state;
use crate::{AdamW, Error, Layer, Optimizer, Parameter, Result, parameters};
use fp8_dist::{Mesh, StateDigest};
use fp8_recipe::Scaling;
use std::collections::BTreeMap;
use std::path::Path;

const SAVE: &str = "save_on";
const LOAD: &str = "load_on";

/// Writes a checkpoint of a model whose parameters are [cut over ranks](crate::Placement::Cut). All ranks of the mesh call it.
///
/// The file is the one that [`save`](super::save) would write on one device with the same state: it has whole tensors and does not say
/// how they were cut. [`load_on`] reads it on any number of ranks, and [`load`](super::load) on one device.
///
/// The first rank of the mesh writes the file and its own `metadata`. The ranks that share its layers send it their parts, one tensor at
/// a time, so it needs host memory for one whole tensor besides what it has, and a part. All ranks wait for each other after each
/// tensor, as long as their groups' deadline. All return an error if one of them fails, and the old file is untouched unless the error
/// says otherwise.
///
/// The ranks first compare what they have in common: shapes, the optimizer's options and counts, the loss scale, and the scaling state of
/// recipes that reduce amaxes. Of other recipes, and of dropout, the file has the first rank's state.
///
/// ```
/// use fp8_nn::fp8_dist::{Mesh, MeshOptions};
/// use fp8_nn::prelude::*;
/// use fp8_nn::rand::{SeedableRng, rngs::StdRng};
/// use fp8_nn::{TensorParallel, TensorParallelOptions};
/// use std::{path::Path, sync::Arc, thread, time::Duration};
///
/// fn layer(seed: u64, tensor_parallel: Option<TensorParallel>) -> Result<(Linear, AdamW, Scaling)> {
///     let options = LinearOptions { in_features: 4, out_features: 6, tensor_parallel, ..Default::default() };
///     let mut fc = Linear::new("fc", options, &Device::cpu(), &mut StdRng::seed_from_u64(seed))?;
///     let (mut optimizer, scaling) = (AdamW::new(AdamWOptions::default())?, Scaling::new(&fc, &Device::cpu())?);
///     optimizer.step(&mut fc, 1e-3)?;
///     Ok((fc, optimizer, scaling))
/// }
/// fn run(world: Arc<dyn ProcessGroup>, dir: &Path) -> Result<()> {
///     let mesh = Mesh::new(world, &MeshOptions { dp: 1, tp: 2 })?;
///     let ranks = TensorParallel::new(mesh.tp().clone(), &TensorParallelOptions::default())?;
///     let (fc, optimizer, scaling) = layer(1, ranks.clone())?;
///     checkpoint::save_on(&mesh, dir, &fc, &optimizer, &scaling, &Default::default())?;
///
///     let (mut other, mut optimizer, mut scaling) = layer(2, ranks)?;
///     checkpoint::load_on(&mesh, dir, &mut other, &mut optimizer, &mut scaling)?;
///     assert_eq!(other.weight().tensor().to_f32_vec()?, fc.weight().tensor().to_f32_vec()?); // this rank's rows
///     Ok(())
/// }
/// let dir = std::env::temp_dir().join(format!("fp8-doc-save-on-{}", std::process::id()));
/// thread::scope(|scope| {
///     let worlds = local("world", 2, Duration::from_secs(10))?.into_iter();
///     let ranks: Vec<_> = worlds.map(|world| scope.spawn(|| run(world, &dir))).collect();
///     ranks.into_iter().try_for_each(|rank| rank.join().unwrap())
/// })?;
/// let (mut whole, mut optimizer, mut scaling) = layer(3, None)?; // on one device
/// checkpoint::load(&dir, &mut whole, &mut optimizer, &mut scaling)?;
/// assert_eq!(whole.weight().tensor().to_f32_vec()?, layer(1, None)?.0.weight().tensor().to_f32_vec()?);
/// # std::fs::remove_dir_all(&dir).unwrap();
/// # Ok::<(), fp8_nn::Error>(())
/// ```
///
/// # Errors
/// Those of [`save`](super::save) of any rank, on all; ranks that differ, with the first difference; parameters that are cut over other
/// ranks than the mesh's; moments in FP8 of a parameter that is cut inside of the blocks that share a scale; a failure of a group.
pub fn save_on(
    mesh: &Mesh,
    dir: &Path,
    model: &(impl Layer + ?Sized),
    optimizer: &(impl Optimizer + ?Sized),
    scaling: &Scaling,
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    save_on_with_options(mesh, dir, model, optimizer, scaling, metadata, &SaveOptions::default())
}

/// Does what [`save_on`] does, with the options of [`save_with_options`](super::save_with_options), which has an example.
///
/// ```
/// use fp8_nn::checkpoint::SaveOptions;
/// use fp8_nn::fp8_dist::{Mesh, MeshOptions};
/// use fp8_nn::prelude::*;
/// use std::time::Duration;
///
/// let mesh = Mesh::new(local("world", 1, Duration::from_secs(10))?.remove(0), &MeshOptions::default())?;
/// let dir = std::env::temp_dir().join(format!("fp8-doc-save-on-with-{}", std::process::id()));
/// let options = LinearOptions { in_features: 4, out_features: 4, ..Default::default() };
/// let model = Linear::new("fc", options, &Device::cpu(), &mut fp8_nn::rand::rng())?;
/// let (optimizer, scaling) = (AdamW::new(AdamWOptions::default())?, Scaling::new(&model, &Device::cpu())?);
/// let options = SaveOptions { without_gradients: true };
/// checkpoint::save_on_with_options(&mesh, &dir, &model, &optimizer, &scaling, &Default::default(), &options)?;
/// # std::fs::remove_dir_all(&dir).unwrap();
/// # Ok::<(), fp8_nn::Error>(())
/// ```
///
/// # Errors
/// Those of [`save_on`], except that gradients are no reason to refuse with [`SaveOptions::without_gradients`].
pub fn save_on_with_options(
    mesh: &Mesh,
    dir: &Path,
    model: &(impl Layer + ?Sized),
    optimizer: &(impl Optimizer + ?Sized),
    scaling: &Scaling,
    metadata: &BTreeMap<String, String>,
    options: &SaveOptions,
) -> Result<()> {
    let (world, path, optimizer) = (&**mesh.world(), path(dir), optimizer.state());
    let prepared = expect_ranks(mesh, model)
        .and_then(|()| contents(&path, model, optimizer, scaling, metadata, options))
        .and_then(|writer| Ok((state(&writer, optimizer, scaling)?, writer.plan(&path)?)));
    let (state, Plan { header, sources }) = outcome(world, SAVE, prepared)?;
    world.agree_on_state(SAVE, &state)?;

    let created = (world.rank() == 0).then(|| Output::create(&path, &header)).transpose();
    let mut output = outcome(world, SAVE, created)?;
    // The other replicas have the same parts, and wait.
    let is_sender = mesh.dp().rank() == 0;
    for (name, source) in sources {
        let takes_part = output.is_some() || (is_sender && source.is_joined());
        let elements = if takes_part { source.elements(&name) } else { Ok(None) };
        let written = elements.and_then(|elements| match (&mut output, elements) {
            (Some(output), Some(elements)) => output.write(&elements),
            _ => Ok(()),
        });
        outcome(world, SAVE, written)?;
    }
    // All ranks are well. From here on only the one that writes can fail.
    outcome(world, SAVE, output.map(Output::commit).transpose())?;
    note_saved(&path, optimizer);
    Ok(())
}

/// Reads the checkpoint in `dir` into a model whose parameters are [cut over ranks](crate::Placement::Cut), in any way: the file has
/// whole tensors. All ranks of the mesh call it, and all read the file, which is in a folder that they share or a copy of one. See
/// [`save_on`] for an example.
///
/// It does what [`load`](super::load) does. Each rank needs host memory for one whole tensor besides its part of it. All ranks have the
/// dropout seed of the file afterwards: set others where replicas have their own.
///
/// # Errors
/// Those of [`load`](super::load) of any rank, on all; files that differ between the ranks, with the first difference. Nothing has
/// changed then. If a device fails while the state is written, or another program writes to the file meanwhile, a part of it has
/// changed, on all ranks or on some. A failure of a group.
pub fn load_on(
    mesh: &Mesh,
    dir: &Path,
    model: &mut (impl Layer + ?Sized),
    optimizer: &mut (impl Optimizer + ?Sized),
    scaling: &mut Scaling,
) -> Result<Loaded> {
    let (world, path, optimizer) = (&**mesh.world(), path(dir), optimizer.state_mut());
    let checked = outcome(world, LOAD, Checked::read(&path, model, optimizer))?;
    world.agree_on_state(LOAD, &checked.reader.digests())?;
    outcome(world, LOAD, checked.load(model, optimizer, scaling))
}

/// Returns digests of what all ranks have in common, and of the shapes in the file.
fn state(writer: &Writer, optimizer: &AdamW, scaling: &Scaling) -> Result<Vec<StateDigest>> {
    let shape = |(name, shape)| StateDigest::new(format!("the shape of `{name}`"), [shape]);
    let mut all: Vec<_> = writer.shapes().map(shape).collect();
    all.extend(common_state(optimizer, scaling)?);
    Ok(all)
}

/// Returns an error if a parameter is cut over other ranks than those of the mesh.
fn expect_ranks(mesh: &Mesh, model: &(impl Layer + ?Sized)) -> Result<()> {
    let members = mesh.tp().members();
    let others = |parameter: &&Parameter| {
        let ranks = parameter.tensor_parallel().filter(|_| parameter.cut().is_some());
        ranks.is_some_and(|ranks| ranks.group().members() != members)
    };
    let Some(parameter) = parameters(model).into_iter().find(others) else { return Ok(()) };
    Err(Error::Option {
        part: SAVE.to_owned(),
        option: "mesh",
        value: format!("one whose tp group has ranks {members:?}"),
        remedy: format!(
            "`{}` is cut over others: pass the mesh that its layer was made with",
            parameter.name()
        ),
    })
}
