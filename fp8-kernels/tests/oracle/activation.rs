//! Activations from their textbook formulas; derivatives as difference quotients.

/// Returns the value of the function that a plain or gated activation applies to its input.
pub(crate) fn value(name: &str, x: f64) -> f64 {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let relu = |x: f64| if x < 0.0 { 0.0 } else { x };
    match name {
        "gelu" | "geglu" => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh())
        }
        "relu" | "reglu" => relu(x),
        "silu" | "swiglu" => x * sigmoid(x),
        "qgelu" | "qgeglu" => x * sigmoid(1.702 * x),
        "srelu" | "sreglu" => relu(x) * relu(x),
        "glu" => sigmoid(x),
        _ => f64::NAN,
    }
}

/// Not for the kink of relu.
pub(crate) fn slope(name: &str, x: f64) -> f64 {
    let step = 1e-4;
    let quotient = |step: f64| (value(name, x + step) - value(name, x - step)) / (2.0 * step);
    // Richardson: the error of order step² cancels.
    (4.0 * quotient(step / 2.0) - quotient(step)) / 3.0
}
