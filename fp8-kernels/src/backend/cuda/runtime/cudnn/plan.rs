//! A graph compiled by the library, and its execution.

use super::describe::{Described, Target};
use super::descriptor::Descriptor;
use super::graph::{Graph, Number, Place, Storage};
use super::library::{Cudnn, Failure, Handle};
use super::numbers::{Attribute, HEURISTICS_A, Kind, Knob, NOT_SUPPORTED, ValueType, is_lasting};
use std::ffi::{c_int, c_void};

/// The kernels that a graph may be compiled to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Choice {
    /// Those that the library's heuristics prefer.
    Heuristics,
    /// One engine with these knobs.
    Engine { number: i64, knobs: &'static [(Knob, i64)] },
}

/// The number of the heuristics' configurations that are tried, best first.
const MOST_CONFIGURATIONS: usize = 4;

/// A compiled graph.
#[derive(Debug)]
pub(super) struct Plan {
    plan: Descriptor,
    /// Bytes of the workspace that it needs.
    pub(super) workspace: usize,
    /// The storage of each tensor that needs an address, with its number.
    tensors: Vec<(i64, Storage)>,
    /// Kept while the plan is: the library does not say that it copies them.
    _configuration: Descriptor,
    _described: Described,
}

impl Plan {
    pub(super) fn new(
        library: &Cudnn,
        graph: &Graph,
        choice: Choice,
        target: Target<'_>,
    ) -> Result<Self, Failure> {
        let described = graph.describe(library, target)?;
        let configurations = match choice {
            Choice::Heuristics => preferred(library, &described.graph, target)?,
            Choice::Engine { number, knobs } => {
                vec![configuration(library, &described.graph, number, knobs, target)?]
            }
        };
        let mut failure = ("cudnnBackendGetAttribute", NOT_SUPPORTED.start);
        for configuration in configurations {
            match compile(library, &configuration, target) {
                Ok(plan) => {
                    let workspace = plan.get_int(Attribute::PlanWorkspace)?;
                    let workspace = usize::try_from(workspace).unwrap_or(0);
                    let tensors = graph.bound().map(|(id, storage)| (id.unique(), storage)).collect();
                    return Ok(Self {
                        plan,
                        workspace,
                        tensors,
                        _configuration: configuration,
                        _described: described,
                    });
                }
                Err(failed) if is_lasting(failed.1) => return Err(failed),
                Err(refused) => failure = refused,
            }
        }
        Err(failure)
    }

    /// Enqueues the computation on the handle's stream, with `scale` at [`Place::Scale`].
    ///
    /// # Safety
    /// `address` returns addresses of memory that has the extents, strides and types of the graph's tensors, and room for what
    /// is written; `workspace` has the bytes that the plan needs. All of it is on the handle's device, used on its stream.
    pub(super) unsafe fn run(
        &self,
        library: &Cudnn,
        handle: Handle,
        scale: f32,
        workspace: u64,
        address: impl Fn(Place) -> u64,
    ) -> Result<(), Failure> {
        let device = |address: u64| std::ptr::with_exposed_provenance_mut::<c_void>(address as usize);
        let mut ids = Vec::with_capacity(self.tensors.len());
        let mut pointers = Vec::with_capacity(self.tensors.len());
        for (id, storage) in &self.tensors {
            ids.push(*id);
            pointers.push(match storage {
                Storage::At(Place::Scale) => std::ptr::from_ref(&scale).cast_mut().cast(),
                Storage::Number(Number::F32(value)) => std::ptr::from_ref(value).cast_mut().cast(),
                Storage::Number(Number::I32(value)) => std::ptr::from_ref(value).cast_mut().cast(),
                Storage::At(place) => device(address(*place)),
                Storage::Virtual => std::ptr::null_mut(), // none of these is in the list
            });
        }
        let pack = Descriptor::new(library, Kind::VariantPack)?
            .ints(Attribute::PackIds, &ids)?
            .pointers(Attribute::PackPointers, &pointers)?
            .pointers(Attribute::PackWorkspace, &[device(workspace)])?
            .finalize()?;
        // SAFETY: the pack has an address for each stored tensor, as the caller vouches, and host addresses of numbers, which
        // are read before the call returns.
        unsafe { library.execute(handle, self.plan.handle(), pack.handle()) }
    }
}

fn preferred(library: &Cudnn, graph: &Descriptor, target: Target<'_>) -> Result<Vec<Descriptor>, Failure> {
    let heuristics = Descriptor::new(library, Kind::EngineHeuristics)?
        .descriptors(Attribute::HeuristicsGraph, &[graph])?
        .choice(Attribute::HeuristicsMode, ValueType::HeuristicsMode, HEURISTICS_A)?;
    let heuristics = match target {
        Target::Handle(_) => heuristics,
        Target::Described(device) => heuristics.descriptors(Attribute::HeuristicsDevice, &[device])?,
    };
    heuristics.finalize()?.get_descriptors(
        Attribute::HeuristicsResults,
        Kind::EngineConfig,
        MOST_CONFIGURATIONS,
    )
}

fn configuration(
    library: &Cudnn,
    graph: &Descriptor,
    number: i64,
    knobs: &[(Knob, i64)],
    target: Target<'_>,
) -> Result<Descriptor, Failure> {
    let engine = Descriptor::new(library, Kind::Engine)?
        .descriptors(Attribute::EngineGraph, &[graph])?
        .ints(Attribute::EngineIndex, &[number])?;
    let engine = match target {
        Target::Handle(_) => engine,
        Target::Described(device) => engine.descriptors(Attribute::EngineDevice, &[device])?,
    };
    let engine = engine.finalize()?;
    let mut choices = Vec::with_capacity(knobs.len());
    for (knob, value) in knobs {
        choices.push(
            Descriptor::new(library, Kind::KnobChoice)?
                .choice(Attribute::KnobType, ValueType::KnobType, *knob as c_int)?
                .ints(Attribute::KnobValue, &[*value])?
                .finalize()?,
        );
    }
    let choices: Vec<&Descriptor> = choices.iter().collect();
    Descriptor::new(library, Kind::EngineConfig)?
        .descriptors(Attribute::ConfigEngine, &[&engine])?
        .descriptors(Attribute::ConfigKnobs, &choices)?
        .finalize()
}

fn compile(library: &Cudnn, configuration: &Descriptor, target: Target<'_>) -> Result<Descriptor, Failure> {
    let plan = Descriptor::new(library, Kind::ExecutionPlan)?
        .descriptors(Attribute::PlanConfig, &[configuration])?;
    let plan = match target {
        Target::Handle(handle) => plan.library_handle(Attribute::PlanHandle, handle)?,
        Target::Described(device) => plan.descriptors(Attribute::PlanDevice, &[device])?,
    };
    plan.finalize()
}
