//! Checks the error messages of layers, optimizers and checkpoints, word for word.

#[cfg(feature = "cuda")]
use crate::every_device::support::block_options;
use crate::every_device::support::{delayed, device, error, in_dtype, linear, noise, rng, step};
use fp8_nn::prelude::*;
use safetensors::tensor::{Dtype, TensorView};
use std::collections::BTreeMap;
use std::path::Path;

/// A model that is trained for a step, with what a checkpoint needs besides.
struct Job<M> {
    model: M,
    optimizer: AdamW,
    scaling: Scaling,
}

impl<M: Module> Job<M> {
    fn new(mut model: M, options: AdamWOptions) -> Self {
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        let mut optimizer = AdamW::new(options).unwrap();
        let (x, dy) = (noise([4, 4], 1), noise([4, 4], 2));
        step(&mut scaling, &delayed(), &in_dtype(DType::BF16), &mut model, &x, &dy).unwrap();
        optimizer.step(&mut model, 0.1).unwrap();
        Self { model, optimizer, scaling }
    }

    fn save(&self, dir: &Path) -> Result<()> {
        checkpoint::save(dir, &self.model, &self.optimizer, &self.scaling, &BTreeMap::new())
    }

    /// Returns the error of loading, without the file's path.
    fn refused(&mut self, dir: &Path) -> String {
        let loaded = checkpoint::load(dir, &mut self.model, &mut self.optimizer, &mut self.scaling);
        without_path(dir, &error(loaded.map(drop)))
    }
}

fn without_path(dir: &Path, text: &str) -> String {
    text.strip_prefix(&format!("{}: ", checkpoint::path(dir).display())).unwrap().to_owned()
}

fn fc() -> Linear {
    linear("fc", 4, 4, 1)
}

fn two() -> Stack {
    Stack(vec![Box::new(fc()), Box::new(linear("head", 4, 4, 2))])
}

#[test]
fn debug_of_parameters_slots_and_scaling_state_is_short() {
    let mut job = Job::new(fc(), AdamWOptions::default());
    let rank = fp8_nn::LoraOptions { rank: 2, ..Default::default() };
    job.model.loras_mut().add("q", 0..3, &rank, &mut rng(1)).unwrap();
    let fc = &job.model;
    assert_eq!(format!("{:?}", fc.loras()), "Loras(fc, 0..3: fc.lora.q.a [2, 4])");
    assert_eq!(format!("{:?}", fc.weight()), "Parameter(fc.weight, [4, 4], f32)");
    assert_eq!(format!("{:?}", fc.gemm_slots()), "GemmSlots(fc)");
    assert_eq!(format!("{:?}", fc.gemm_slots().input), "SlotName(fc.input)");
    assert_eq!(format!("{:?}", job.scaling), "Scaling(3 slots, [delayed (amax_history_len=4)], cpu)");
    assert!(format!("{fc:#?}").lines().count() <= 11, "{fc:#?}");
}

#[test]
fn a_model_that_is_not_finite() {
    let mut job = Job::new(fc(), AdamWOptions::default());
    checkpoint::expect_finite(&job.model, &job.optimizer).unwrap();
    let mut values = vec![1.0; 16];
    values[5] = f32::INFINITY;
    let weight = parameters_mut(&mut job.model).remove(0);
    weight.set(Tensor::from_vec(values, [4, 4], &device()).unwrap()).unwrap();
    assert_eq!(
        error(checkpoint::expect_finite(&job.model, &job.optimizer)),
        "`fc.weight` is inf at element 5 of 16: training has diverged; go on from an earlier checkpoint, with a lower rate"
    );
}

#[test]
fn a_checkpoint_of_another_model_or_optimizer() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let job = Job::new(fc(), AdamWOptions::default());
    let trained = Job::new(two(), AdamWOptions::default());
    // Saved with the optimizer of a larger model, or of a smaller one.
    let saved = checkpoint::save(dir, &job.model, &trained.optimizer, &job.scaling, &BTreeMap::new());
    assert_eq!(
        without_path(dir, &error(saved)),
        "the optimizer has moments of `head.bias`, which is no parameter of this model: save the model that it trains"
    );
    let saved = checkpoint::save(dir, &trained.model, &job.optimizer, &trained.scaling, &BTreeMap::new());
    assert_eq!(
        without_path(dir, &error(saved)),
        "the optimizer has taken 1 step, but `head.weight` has no moments: expected those of every parameter that is \
         trained; freeze it if it was frozen in these steps"
    );
    job.save(dir).unwrap();
    let mut larger = Job::new(two(), AdamWOptions::default());
    assert_eq!(larger.refused(dir), "it has no tensor `model.head.weight`: it was saved from another model");
    // bf16 parameters have f32 copies in the optimizer, if it keeps any.
    let bf16 = || {
        let options = LinearOptions {
            in_features: 4,
            out_features: 4,
            params_dtype: DType::BF16,
            ..Default::default()
        };
        Linear::new("fc", options, &device(), &mut rng(1)).unwrap()
    };
    let keeps = |main_params| AdamWOptions { main_params, ..Default::default() };
    for (saves, loads, found) in [
        (true, false, "has an f32 copy in the optimizer, this one wants no"),
        (false, true, "has no f32 copy in the optimizer, this one wants an"),
    ] {
        Job::new(bf16(), keeps(saves)).save(dir).unwrap();
        assert_eq!(
            Job::new(bf16(), keeps(loads)).refused(dir),
            format!("`fc.weight` {found}: set AdamWOptions::main_params as it was")
        );
    }
}

#[test]
fn a_header_that_does_not_fit_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let (dir, mut job) = (folder.path(), Job::new(fc(), AdamWOptions::default()));
    let with_header = |json: &str| [&(json.len() as u64).to_le_bytes()[..], json.as_bytes()].concat();
    let mut cut =
        safetensors::serialize([("x", TensorView::new(Dtype::F32, vec![2], &[0; 8]).unwrap())], None)
            .unwrap();
    cut.truncate(cut.len() - 4);
    for (bytes, text) in [
        (vec![0; 7], "7 bytes: a header has at least 8"),
        (cut, "its tensors have 8 bytes, but 4 follow the header"),
        (with_header("[]"), "invalid type: sequence, expected tensors by name at line 1 column 0"),
        (
            with_header("{\"__metadata__\": 1}"),
            "invalid type: integer `1`, expected strings by name at line 1 column 18",
        ),
    ] {
        std::fs::write(checkpoint::path(dir), bytes).unwrap();
        assert_eq!(job.refused(dir), format!("not a readable safetensors file: {text}"));
    }
}

#[test]
fn scales_of_another_type() {
    let folder = tempfile::tempdir().unwrap();
    let (dir, mut job) = (folder.path(), Job::new(fc(), AdamWOptions::default()));
    job.save(dir).unwrap();
    let path = checkpoint::path(dir);
    let bytes = std::fs::read(&path).unwrap();
    let len = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = String::from_utf8(bytes[8..len].to_vec()).unwrap();
    let at = header.find("\"scaling.0.scale\"").unwrap();
    let (before, scale) = header.split_at(at);
    let header = format!("{before}{}", scale.replacen("\"F32\"", "\"I32\"", 1));
    std::fs::write(&path, [&bytes[..8], header.as_bytes(), &bytes[len..]].concat()).unwrap();
    assert_eq!(job.refused(dir), "`scaling.0.scale` is I32, expected f32");
}

#[test]
fn an_optimizer_of_another_model() {
    let mut job = Job::new(fc(), AdamWOptions::default());
    let other = linear("fc", 2, 8, 1);
    assert_eq!(
        error(job.optimizer.reload_params(&other)),
        "AdamW: parameter and its moments: got [8, 2] and [4, 4]: each model has an optimizer of its own"
    );
}

#[test]
fn sizes_beyond_memory() {
    let options = LayerNormMlpOptions {
        hidden_size: 4,
        ffn_hidden_size: usize::MAX,
        activation: Activation::Swiglu,
        ..Default::default()
    };
    assert_eq!(
        error(LayerNormMlp::new("mlp", options, &device(), &mut rng(1))),
        format!("mlp: ffn_hidden_size = {}: twice this many rows do not fit into memory", usize::MAX)
    );
    let options = GptOptions {
        vocab_size: 16,
        num_layers: usize::MAX,
        layer: TransformerLayerOptions {
            hidden_size: 32,
            ffn_hidden_size: 128,
            attention: AttentionOptions { max_seq_length: 8, num_attention_heads: 4, ..Default::default() },
            ..Default::default()
        },
        ..Default::default()
    };
    assert_eq!(
        error(Gpt::new("gpt", &options, &device(), &mut rng(1))),
        format!("gpt: num_layers = {}: so many blocks do not fit into memory: use fewer", usize::MAX)
    );
}

/// A simulated GPU of this test alone.
#[cfg(feature = "cuda")]
fn gpu() -> Device {
    let library = Some(fp8_cuda_sim::library_path().unwrap());
    let cache_dir = Some(std::env::temp_dir().join("fp8-nn-tests"));
    let options = fp8_nn::fp8_kernels::CudaOptions { library, cache_dir, ..Default::default() };
    Device::cuda_with_options(&options).unwrap()
}

#[cfg(feature = "cuda")]
#[test]
fn an_input_on_another_device() {
    let [home, away] = [gpu(), gpu()];
    let block = TransformerLayer::new("block", block_options(), &home, &mut rng(1)).unwrap();
    let mut scaling = Scaling::new(&block, &home).unwrap();
    let x = noise([2, 6, 32], 1);
    let forward = |scaling: &mut Scaling, x: &Tensor| {
        let mut cx = scaling.autocast(&delayed())?;
        block.forward(&mut cx, x).map(drop)
    };
    let text = "the layer on cuda:0: move it there with Tensor::to_device";
    for (x, found) in [
        (x.to_device(&Device::cpu()).unwrap(), "cpu"),
        (x.to_device(&away).unwrap(), "another device opened on cuda:0"),
    ] {
        assert_eq!(error(forward(&mut scaling, &x)), format!("block: input is on {found}, {text}"));
    }
}

#[cfg(feature = "cuda")]
#[test]
fn what_an_optimizer_does_not_do_in_a_recorded_step() {
    let device = gpu();
    let options = LinearOptions { in_features: 4, out_features: 4, ..Default::default() };
    let mut model = Linear::new("fc", options, &device, &mut rng(1)).unwrap();
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    let refused = error(device.capture(|| optimizer.step(&mut model, 0.1)));
    assert_eq!(
        refused,
        "AdamW: cannot be recorded: the optimizer's first step makes its state: run it before"
    );
    optimizer.step(&mut model, 0.1).unwrap();
    let refused = error(device.capture(|| optimizer.reload_params(&model)));
    assert_eq!(refused, "AdamW: cannot be recorded: reload parameters before the step is recorded");
    // Someone holds the gradient, who may still read it.
    let _held: Vec<_> = parameters(&model).iter().map(|parameter| parameter.main_grad().clone()).collect();
    let refused = error(device.capture(|| zero_grad(&mut model)));
    assert_eq!(refused, "zero_grad: cannot be recorded: drop what shares the gradient's storage before");
}
