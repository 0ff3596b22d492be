//! Whole parameters of a model whose layers ranks share, for the first rank, which writes them.

use crate::{Error, Result};
use fp8_kernels::{DType, Tensor};
use fp8_nn::{Gpt, Parameter, Placement, TensorParallel, parameters};
use std::sync::{Mutex, PoisonError};

/// Numbers that the first rank says in place of that of a parameter.
const DONE: i32 = -1;
const FAILED: i32 = -2;

/// Runs `write` on the first of the ranks that share the layers of a model, or on the only one. The others, which call this too, send it
/// their parts of the parameters that it asks for, one after the other. On all ranks an error says that it failed; `work` names what it
/// did.
pub(super) fn on_first(model: &Gpt, work: &str, write: impl FnOnce(&Wholes<'_>) -> Result<()>) -> Result<()> {
    let wholes = Wholes::new(model);
    match wholes.ranks.map(|ranks| ranks.group().rank()) {
        None => write(&wholes),
        Some(0) => {
            let written = write(&wholes);
            let told = wholes.say(if written.is_ok() { DONE } else { FAILED });
            written.and(told.map(drop))
        }
        Some(_) => wholes.send(work),
    }
}

/// The whole parameters of a model.
#[derive(Debug)]
pub(super) struct Wholes<'a> {
    parameters: Vec<&'a Parameter>,
    /// The ranks that share the model, if there are others.
    ranks: Option<&'a TensorParallel>,
    /// The last parameter that was gathered, which is often read row by row.
    last: Mutex<Option<(usize, Tensor)>>,
}

impl<'a> Wholes<'a> {
    fn new(model: &'a Gpt) -> Self {
        let parameters = parameters(model);
        let ranks = parameters.iter().find_map(|parameter| parameter.tensor_parallel());
        Self { parameters, ranks, last: Mutex::default() }
    }

    /// Returns the value of a whole parameter of the model, in f32 if it is stored in FP8.
    pub(super) fn value(&self, parameter: &Parameter) -> Result<Tensor> {
        let Placement::Cut(_) = parameter.placement() else { return own(parameter) };
        let place = self.parameters.iter().position(|other| std::ptr::eq(*other, parameter));
        let Some(place) = place.filter(|_| self.ranks.is_some()) else { return own(parameter) };
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, value)) = last.as_ref().filter(|(other, _)| *other == place) {
            return Ok(value.clone());
        }
        *last = None; // its memory is for the next one
        self.say(i32::try_from(place).unwrap_or(FAILED))?;
        let value = whole(parameter)?;
        *last = Some((place, value.clone()));
        Ok(value)
    }

    /// Sends this rank's parts to the first one, until that has done its work.
    fn send(&self, work: &str) -> Result<()> {
        loop {
            let said = self.say(FAILED)?;
            match usize::try_from(said).ok().and_then(|place| self.parameters.get(place)) {
                Some(parameter) => drop(whole(parameter)?),
                None if said == DONE => return Ok(()),
                None => return Err(Error::Rank { work: work.to_owned() }),
            }
        }
    }

    /// Returns the number that the first rank says.
    fn say(&self, number: i32) -> Result<i32> {
        let (Some(ranks), Some(first)) = (self.ranks, self.parameters.first()) else { return Ok(number) };
        let own = Tensor::from_vec(vec![number], [1], first.device())?;
        let said = ranks.group().broadcast("the next parameter to write", &own, 0)?.to_vec::<i32>()?;
        Ok(said.first().copied().unwrap_or(FAILED))
    }
}

/// Returns the value that this rank has.
fn own(parameter: &Parameter) -> Result<Tensor> {
    match parameter.fp8() {
        None => Ok(parameter.tensor().clone()),
        Some(_) => Ok(parameter.values(DType::F32)?),
    }
}

/// Gathers the value of all ranks.
fn whole(parameter: &Parameter) -> Result<Tensor> {
    let dtype = if parameter.fp8().is_some() { DType::F32 } else { parameter.dtype() };
    Ok(parameter.gather_values(dtype)?)
}
