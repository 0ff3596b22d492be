//! Steps that are recorded in a graph, which only a GPU does.

use crate::every_device::support::{device, forward, grad, input, short, step, weight};
use fp8_recipe::fp8_kernels::{Tensor, ops};
use fp8_recipe::{
    AmaxComputeAlgo, CurrentScaling, CustomRecipe, DelayedScaling, GemmSlots, Recipe, Result, Scaling,
    ScalingState, SlotUpdate,
};

fn by_name() -> Recipe {
    Recipe::by_name(
        [
            ("b.*", DelayedScaling { margin: 3, ..short() }.into()),
            ("*.weight", CurrentScaling::default().into()),
            ("c", Recipe::off()),
        ],
        short(),
    )
}

/// Both passes of a step in which every slot of three layers runs on `x`.
fn queue(scaling: &mut Scaling, recipe: &Recipe, x: &Tensor) -> Result<()> {
    let mut origins = Vec::new();
    let mut cx = scaling.autocast(recipe)?;
    for layer in ["a", "b", "c"] {
        for slot in [input(layer), weight(layer)] {
            ops::quantize(x, &cx.slot(&slot)?)?;
        }
        origins.push((grad(layer), cx.origin(&input(layer))));
    }
    cx.commit()?;
    let mut cx = scaling.backward()?;
    for (slot, origin) in &origins {
        ops::quantize(x, &cx.slot(origin, slot)?)?;
    }
    cx.commit()
}

fn train(is_recorded: bool, recipe: &Recipe) -> ScalingState {
    let model = ["a", "b", "c"].map(GemmSlots::new).to_vec();
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let mut x = Tensor::from_vec(vec![1.0f32, -0.5], [1, 2], &device()).unwrap();
    queue(&mut scaling, recipe, &x).unwrap();
    let mut graph = None;
    if is_recorded {
        graph = Some(device().capture(|| queue(&mut scaling, recipe, &x)).unwrap().0); // this runs the step, too
    } else {
        queue(&mut scaling, recipe, &x).unwrap();
    }
    for amax in [3.0f32, 8.0, 0.25] {
        x.write(&[amax, 0.125], "x").unwrap();
        match &mut graph {
            Some(graph) => graph.replay().unwrap(),
            None => queue(&mut scaling, recipe, &x).unwrap(),
        }
    }
    scaling.state().unwrap()
}

#[test]
fn recipes_by_name_are_recorded() {
    let [eager, recorded] = [false, true].map(|is_recorded| train(is_recorded, &by_name()));
    assert_eq!(eager.arenas.len(), 4);
    // In both arenas only their own slots have run.
    let newest = [0, 2].map(|arena| eager.arenas[arena].amax_history[2].as_slice());
    assert_eq!(newest, [[0.0, 0.0, 0.25, 0.25, 0.0, 0.0], [0.25, 0.0, 0.0, 0.0, 0.0, 0.0]]);
    assert_eq!(eager, recorded);
}

#[test]
fn named_amax_rules_are_recorded() {
    // The amaxes are 1, 1, 3, 8, 0.25. The average is 1; 0.5 · 1 + 0.5 · 3 = 2; then 5; then 2.625.
    let average = AmaxComputeAlgo::Average { decay: 0.5 };
    for (amax_compute_algo, chosen) in [(AmaxComputeAlgo::MaxOfLast(2), 8.0), (average, 2.625)] {
        let recipe = Recipe::from(DelayedScaling { amax_compute_algo, ..short() });
        let [eager, recorded] = [false, true].map(|is_recorded| train(is_recorded, &recipe));
        assert_eq!(eager.arenas[0].scale, [448.0 / chosen; 6]);
        assert_eq!(eager.arenas[0].amax_history[1], [8.0; 6]);
        assert_eq!(eager, recorded);
    }
}

#[derive(Debug)]
struct Own;

impl CustomRecipe for Own {
    fn name(&self) -> &str {
        "own"
    }

    fn scale(&self, slot: &SlotUpdate<'_>, _: &mut [f32]) -> f32 {
        slot.fp8_max / slot.amax
    }
}

#[test]
fn a_recipe_of_the_users_own_is_refused() {
    let own = Recipe::custom(Own);
    let model = vec![GemmSlots::new("a")];
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    for recipe in [own.clone(), Recipe::by_name([("a.weight", own)], short())] {
        step(&mut scaling, &recipe, &input("a"), &[1.0]).unwrap();
        let before = scaling.state().unwrap();
        let refused = |queue: &mut dyn FnMut() -> Result<()>| {
            device().capture(queue).map(drop).unwrap_err().to_string()
        };
        let error = refused(&mut || scaling.autocast(&recipe).map(drop));
        assert!(error.contains("recipe \"own\""), "{error}");
        assert!(
            error.contains("its scales are computed on the host: run the step without a graph"),
            "{error}"
        );
        assert_eq!(scaling.state().unwrap(), before);
        // A backward scope, too, of a forward scope that was not recorded.
        let mut cx = scaling.autocast(&recipe).unwrap();
        forward(&mut cx, &input("a"), &[1.0]);
        cx.commit().unwrap();
        let error = refused(&mut || scaling.backward()?.commit());
        assert!(error.contains("recipe \"own\""), "{error}");
        // Evaluations can be recorded.
        let x = Tensor::from_vec(vec![2.0f32], [1, 1], &device()).unwrap();
        let evaluate = |scaling: &mut Scaling| -> Result<()> {
            ops::quantize(&x, &scaling.eval(&recipe)?.slot(&input("a"))?)?;
            Ok(())
        };
        evaluate(&mut scaling).unwrap(); // loads the kernel
        device().capture(|| evaluate(&mut scaling)).unwrap();
    }
}
