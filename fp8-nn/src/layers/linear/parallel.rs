//! The part of a Linear that a rank has.

use crate::{Cut, Error, ParallelMode, Parameter, Placement, Result, TensorParallel};
use fp8_kernels::fp8_format::Blocks;
use fp8_kernels::{Nvfp4Rule, Scale, Slot, StochasticRounding};
use fp8_recipe::{Forward, GemmSlots};
use std::fmt;

/// Whether the layer is whole on this rank, and if not, which rows or columns of its weight are here.
#[derive(Clone)]
pub(crate) struct Part(Option<OfRank>);

#[derive(Clone)]
struct OfRank {
    ranks: TensorParallel,
    mode: ParallelMode,
    weight: Cut,
    /// `None` if each rank has all of the bias.
    bias: Option<Cut>,
}

/// Short, since it is part of each Linear's.
impl fmt::Debug for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            None => f.write_str("Whole"),
            Some(of_rank) => write!(f, "{:?} of {:?}", of_rank.mode, of_rank.ranks),
        }
    }
}

impl Part {
    /// The part that the options of a layer at `path` ask for, with a weight of shape `[out_features, in_features]`.
    pub(crate) fn new(
        path: &str,
        ranks: Option<&TensorParallel>,
        mode: ParallelMode,
        shape: [usize; 2],
        output_parts: &[usize],
    ) -> Result<Self> {
        let [out_features, in_features] = shape;
        let sum = output_parts.iter().try_fold(0usize, |sum, part| sum.checked_add(*part));
        let refuse = |remedy: String| {
            let (part, value) = (path.to_owned(), format!("{output_parts:?}"));
            Err(Error::Option { part, option: "output_parts", value, remedy })
        };
        if !output_parts.is_empty() && sum != Some(out_features) {
            return refuse(format!(
                "expected numbers of features that add up to out_features, {out_features}"
            ));
        }
        let Some(ranks) = ranks else { return Ok(Self(None)) };
        match mode {
            ParallelMode::Column => {
                let whole = [out_features];
                let parts = if output_parts.is_empty() { &whole } else { output_parts };
                parts.iter().try_for_each(|part| ranks.expect_even(path, "out_features", *part))?;
                Ok(Self::columns(ranks, shape, parts))
            }
            ParallelMode::Row if !output_parts.is_empty() => {
                refuse("a row-parallel layer cuts features of its input: expected none".to_owned())
            }
            ParallelMode::Row => {
                ranks.expect_even(path, "in_features", in_features)?;
                let weight = Cut::of_parts(1, shape.into(), &[in_features], ranks.rank(), ranks.size());
                Ok(Self(Some(OfRank { ranks: ranks.clone(), mode, weight, bias: None })))
            }
        }
    }

    /// Some rows of a weight of this shape, which may be one more on some ranks than on others.
    pub(crate) fn columns(ranks: &TensorParallel, shape: [usize; 2], parts: &[usize]) -> Self {
        let cut = |global| Cut::of_parts(0, global, parts, ranks.rank(), ranks.size());
        let (weight, bias) = (cut(shape.into()), Some(cut([shape[0]].into())));
        Self(Some(OfRank { ranks: ranks.clone(), mode: ParallelMode::Column, weight, bias }))
    }

    pub(crate) fn weight(&self) -> Option<&Cut> {
        self.0.as_ref().map(|of_rank| &of_rank.weight)
    }

    pub(crate) fn bias(&self) -> Option<&Cut> {
        self.0.as_ref()?.bias.as_ref()
    }

    pub(crate) fn place_weight(&self, weight: Parameter) -> Parameter {
        match &self.0 {
            Some(OfRank { ranks, weight: cut, .. }) => weight.placed(Placement::Cut(cut.clone()), ranks),
            None => weight,
        }
    }

    pub(crate) fn place_bias(&self, bias: Parameter) -> Parameter {
        match &self.0 {
            Some(OfRank { ranks, bias: Some(cut), .. }) => bias.placed(Placement::Cut(cut.clone()), ranks),
            // Each rank sums the gradients of its own tokens.
            Some(OfRank { ranks, .. }) => bias.placed(ranks.placement_by_tokens(), ranks),
            None => bias,
        }
    }

    /// The ranks, with the way in which the weight is cut.
    pub(crate) fn ranks(&self) -> Option<(&TensorParallel, ParallelMode)> {
        self.0.as_ref().map(|of_rank| (&of_rank.ranks, of_rank.mode))
    }

    fn of_mode(&self, wanted: ParallelMode) -> Option<&TensorParallel> {
        self.ranks().filter(|(_, mode)| *mode == wanted).map(|(ranks, _)| ranks)
    }

    /// The ranks over which the output is summed.
    pub(crate) fn sums_output(&self) -> Option<&TensorParallel> {
        self.of_mode(ParallelMode::Row)
    }

    /// The ranks over which the gradient of the input is summed.
    pub(crate) fn sums_input_gradient(&self) -> Option<&TensorParallel> {
        self.of_mode(ParallelMode::Column)
    }

    /// The ranks that have parts of the input's tokens.
    pub(crate) fn gathers_input(&self) -> Option<&TensorParallel> {
        self.of_mode(ParallelMode::Column).filter(|ranks| ranks.is_sequence_parallel())
    }

    /// The ranks that have parts of the tokens of the output's gradient.
    pub(crate) fn gathers_output_gradient(&self) -> Option<&TensorParallel> {
        self.of_mode(ParallelMode::Row).filter(|ranks| ranks.is_sequence_parallel())
    }
}

/// Returns the length of the blocks of a slot along the features that are cut.
fn block(slot: &Slot<'_>) -> usize {
    let blocks = match slot.scale {
        Scale::Blocks(rule) => rule.blocks(),
        Scale::Nvfp4(rule) => rule.blocks,
        _ => return 1,
    };
    match blocks {
        Blocks::B1x128 | Blocks::B128x128 => 128,
        Blocks::Mx32 => 32,
        Blocks::B1x16 | Blocks::B16x16 => 16,
        _ => 1,
    }
}

impl Part {
    /// Tells a scope, before anything can fail, that the layer has collectives of its own.
    pub(crate) fn enter(&self, cx: &mut Forward<'_>) {
        if let Some((ranks, _)) = self.ranks() {
            cx.add_group(&ranks.amax_group());
        }
    }

    /// Refuses scopes in which the ranks would compute with scales that differ, and blocks that lie on two ranks. `slots` are the layer's.
    pub(crate) fn check(&self, cx: &mut Forward<'_>, slots: &GemmSlots) -> Result<()> {
        let Some((ranks, mode)) = self.ranks() else { return Ok(()) };
        self.enter(cx);
        ranks.expect_shared_scales(cx, &slots.input, ranks.is_sequence_parallel())?;
        let block = block(&cx.slot(&slots.input)?).max(block(&cx.slot(&slots.weight)?));
        let (Some(cut), true) = (self.weight(), block > 1) else { return Ok(()) };
        let Some(range) = cut.ranges().iter().find(|range| !range.len().is_multiple_of(block)) else {
            return Ok(());
        };
        let (n, of) = (ranks.size(), range.len());
        let option = if mode == ParallelMode::Column { "out_features" } else { "in_features" };
        Err(Error::Option {
            part: slots.weight.layer().to_string(),
            option,
            value: format!("{of} on each of {n} ranks"),
            remedy: format!(
                "the recipe has a scale for each {block} of them, and the cut would split blocks: expected a multiple of {block} on \
                 each rank, {} of all, or a recipe with one scale for a tensor",
                block * n
            ),
        })
    }

    /// Returns the slot of the output's gradient with the random numbers of this rank's part of the whole, if it is rounded stochastically.
    /// The ranks compare `seed`, from which the numbers come. `rows` are those of the output.
    ///
    /// Features that are cut are numbered in rank order, each rank's as one range, also where the output has several parts. Tokens that are
    /// gathered are numbered where that is done.
    pub(crate) fn number<'a>(&self, slot: Slot<'a>, rows: usize, seed: u64) -> Result<Slot<'a>> {
        let (Some((ranks, mode)), Scale::Nvfp4(rule)) = (self.ranks(), slot.scale) else { return Ok(slot) };
        let Some(random) = rule.random else { return Ok(slot) };
        ranks.expect_one_seed(seed)?;
        let (Some(cut), ParallelMode::Column) = (self.weight(), mode) else { return Ok(slot) };
        let features = |rank| cut.shape_of(rank).first().copied().unwrap_or_default();
        let random = StochasticRounding {
            origin: [0, (0..ranks.rank()).map(features).sum()],
            whole: Some([rows, cut.global().first().copied().unwrap_or_default()]),
            ..random
        };
        Ok(Slot { scale: Scale::Nvfp4(Nvfp4Rule { random: Some(random), ..rule }), ..slot })
    }
}
