//! The projection in front of an attention.

use super::residual::Around;
use crate::{
    Error, Layer, LayerNormLinear, LayerNormLinearOptions, LayerNormLinearSaved, Linear, LinearOptions,
    LinearSaved, Loras, Module, NormOptions, Parameter, Result,
};
use fp8_kernels::{Device, Operand, Tensor};
use fp8_recipe::{Backward, Forward, SlotName, Slots};
use rand::Rng;

/// A Linear with or without a norm in front.
#[expect(clippy::large_enum_variant, reason = "one a layer, in the layer's own memory")]
#[derive(Debug)]
pub(crate) enum Projection {
    Plain(Linear),
    Normed(LayerNormLinear),
}

/// The values that the backward pass of the projection needs.
#[expect(clippy::large_enum_variant, reason = "one a layer and step, and a box would cost an allocation")]
#[derive(Debug)]
pub(crate) enum ProjectionSaved {
    Plain(LinearSaved),
    Normed(LayerNormLinearSaved),
}

impl Projection {
    /// Parameters are `<path>.norm.*`, with a norm, and `<path>.<name>.*`. A norm comes with whether backward computes it again.
    pub(crate) fn new(
        path: &str,
        name: &str,
        norm: Option<(NormOptions, bool)>,
        options: LinearOptions,
        device: &Device,
        rng: &mut impl Rng,
    ) -> Result<Self> {
        let linear_path = format!("{path}.{name}");
        let Some((norm, recompute_norm)) = norm else {
            return Linear::new(&linear_path, options, device, rng).map(Self::Plain);
        };
        let LinearOptions {
            in_features,
            out_features,
            bias,
            params_dtype,
            init_std,
            return_bias,
            tensor_parallel,
            output_parts,
            save_original_input: _,
            parallel_mode: _, // a norm reads all features
        } = options;
        let options = LayerNormLinearOptions {
            in_features,
            out_features,
            bias,
            norm,
            params_dtype,
            init_std,
            return_bias,
            recompute_norm,
            tensor_parallel,
            output_parts,
        };
        let norm_path = format!("{path}.norm");
        LayerNormLinear::with_paths(&norm_path, &linear_path, options, device, rng).map(Self::Normed)
    }

    pub(crate) fn linear(&self) -> &Linear {
        match self {
            Self::Plain(linear) => linear,
            Self::Normed(layer) => layer.linear(),
        }
    }

    /// Returns the layer if there is a norm in front.
    pub(crate) const fn normed(&self) -> Option<&LayerNormLinear> {
        match self {
            Self::Plain(_) => None,
            Self::Normed(layer) => Some(layer),
        }
    }

    /// With `output`, a slot of the Linear, the output is quantized.
    pub(crate) fn forward(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        output: Option<&SlotName>,
    ) -> Result<(Operand, ProjectionSaved)> {
        Ok(match self {
            Self::Plain(linear) => {
                let (y, saved) = linear.forward_to(cx, x, output.into())?;
                (y, ProjectionSaved::Plain(saved))
            }
            Self::Normed(linear) => {
                let (y, saved) = linear.forward_to(cx, x, output)?;
                (y, ProjectionSaved::Normed(saved))
            }
        })
    }

    /// Also returns the norm's output. `layer` is the path of the layer around it.
    pub(crate) fn forward_with_layernorm_output(
        &self,
        cx: &mut Forward<'_>,
        layer: &str,
        x: &Tensor,
        output: Option<&SlotName>,
    ) -> Result<(Operand, Tensor, ProjectionSaved)> {
        match self {
            Self::Plain(_) => {
                let remedy = "expected a norm, whose output is asked for".to_owned();
                let (layer, value) = (layer.to_owned(), "None".to_owned());
                Err(Error::Option { part: layer, option: "input_layernorm", value, remedy })
            }
            Self::Normed(linear) => {
                let (y, normed, saved) = linear.forward_with_layernorm_output_to(cx, x, output)?;
                Ok((y, normed, ProjectionSaved::Normed(saved)))
            }
        }
    }

    /// `dnormed` is the gradient of the norm's output from its other reader. Without a norm there is none. `around` is that of a
    /// residual connection around the layer.
    pub(crate) fn backward(
        &mut self,
        cx: &mut Backward<'_>,
        saved: ProjectionSaved,
        dy: &Tensor,
        dnormed: Option<&Tensor>,
        around: Option<Around<'_>>,
    ) -> Result<Tensor> {
        match (self, saved) {
            (Self::Plain(linear), ProjectionSaved::Plain(saved)) => {
                let dx = linear.backward(cx, saved, dy)?;
                around.map_or(Ok(dx.clone()), |around| around.sum(&dx))
            }
            (Self::Normed(linear), ProjectionSaved::Normed(saved)) => {
                linear.backward_around(cx, saved, dy, dnormed, around)
            }
            (Self::Plain(linear), ProjectionSaved::Normed(_)) => {
                Err(another_layer(linear, "with a norm before it"))
            }
            (Self::Normed(layer), ProjectionSaved::Plain(_)) => {
                Err(another_layer(&layer.linear, "without a norm before it"))
            }
        }
    }

    fn layer(&self) -> &dyn Layer {
        match self {
            Self::Plain(linear) => linear,
            Self::Normed(linear) => linear,
        }
    }

    fn layer_mut(&mut self) -> &mut dyn Layer {
        match self {
            Self::Plain(linear) => linear,
            Self::Normed(linear) => linear,
        }
    }
}

fn another_layer(linear: &Linear, found: &str) -> Error {
    let (layer, found) = (linear.path().to_string(), format!("a layer {found}"));
    fp8_recipe::Error::Origin { layer, found }.into()
}

impl Slots for Projection {
    fn slots(&self, f: &mut dyn FnMut(&SlotName)) {
        self.layer().slots(f);
    }
}

impl Layer for Projection {
    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Parameter)) {
        self.layer().visit(f);
    }

    fn visit_mut<'a>(&'a mut self, f: &mut dyn FnMut(&'a mut Parameter)) {
        self.layer_mut().visit_mut(f);
    }

    fn visit_loras<'a>(&'a self, f: &mut dyn FnMut(&'a Loras)) {
        self.layer().visit_loras(f);
    }

    fn visit_loras_mut<'a>(&'a mut self, f: &mut dyn FnMut(&'a mut Loras)) {
        self.layer_mut().visit_loras_mut(f);
    }
}
