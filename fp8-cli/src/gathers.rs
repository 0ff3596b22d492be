//! Tensors that ranks gather in high precision, in reports.

use fp8_nn::{Gather, Layer, TensorParallel, parameters};

/// Returns the tensors of a model that ranks have gathered in high precision, although the recipe quantizes them.
pub(crate) fn in_high_precision(model: &(impl Layer + ?Sized)) -> Vec<String> {
    let ranks = parameters(model).into_iter().find_map(|parameter| parameter.tensor_parallel());
    let gathers = ranks.map(TensorParallel::gathers).unwrap_or_default();
    let name = |gather: &Gather| {
        let again = if gather.again { " (for its weight gradient)" } else { "" };
        format!("{}{again}", gather.tensor)
    };
    gathers.iter().filter(|gather| !gather.in_fp8).map(name).collect()
}

/// Returns the row of a report for these tensors, if there are any.
pub(crate) fn row(tensors: &[String]) -> Option<(&'static str, String)> {
    let first = tensors.first()?;
    let text = match tensors.len() {
        1 => first.clone(),
        n => format!("{n} tensors, such as {first}: blocks of them are on two ranks"),
    };
    Some(("gathered in high precision", text))
}
