//! Frozen parameters.

use crate::support::{error, noise, values};
use fp8_nn::prelude::*;

#[test]
fn a_layer_of_ones_own_adds_nothing_to_a_frozen_parameter() {
    let mut w = Parameter::new("w", noise([3], 1)).unwrap();
    let dw = noise([3], 2);
    w.accumulate(&dw).unwrap();
    w.accumulate(&dw).unwrap();
    assert_eq!(values(w.main_grad()), values(&ops::scale(&dw, 2.0).unwrap()));
    assert!(error(w.accumulate(&noise([4], 3))).contains("[3] and [4]"));
    w.set_trainable(false).unwrap();
    w.accumulate(&dw).unwrap();
    assert_eq!(w.main_grad().numel(), 0);
}
