//! The tasks, each with its options.

use crate::{
    bench, chaos, checks, conformance, cudnn_check, gpu_bundle, mutate, mutate_codec, mutate_crates, neon,
    network, ptx, real_model, sass, sim, test, tidy,
};
use clap::Subcommand;

#[derive(Subcommand)]
pub(crate) enum Task {
    /// Runs what CI's main job checks: format, lints, tests, docs, examples, benches once (a quarter of an hour from scratch)
    Test(test::Test),
    /// Checks rules of the tree that no compiler checks: file sizes, error messages, docs, links, circles of files (a second; part of `test`)
    Tidy(tidy::Tidy),
    /// Compares the codec, recipes and layers with reference data, case by case (seconds)
    Golden(checks::Passed),
    /// Evaluates SmolLM2-135M with `fp8` and compares with transformers (downloads 240 MB; a quarter of an hour)
    RealModel(real_model::RealModel),
    /// Compiles the CUDA kernels, checks registers and spills, and writes the PTX snapshots (seconds)
    Ptx(ptx::Ptx),
    /// Counts the machine instructions of the CUDA kernels on an H100 and estimates times from them, without a GPU (minutes)
    Sass(sass::Sass),
    /// Runs a command with the simulated CUDA device in place of NVIDIA's libraries
    Sim(sim::Sim),
    /// Runs what `test` leaves out on the simulated CUDA device: collectives on other architectures, sums of fewer bits, reference data, trainings (minutes)
    Simulated,
    /// Runs the conformance suite on each backend, on the simulated device with several seeds (minutes)
    Conformance(conformance::Conformance),
    /// Plants mistakes in the kernels and checks that the suite finds them (hours; minutes with --sample)
    Mutate(mutate::Mutate),
    /// Plants mistakes in the codec's rounding and checks that its tests find them (minutes with --sample)
    MutateCodec(mutate_codec::MutateCodec),
    /// Plants mistakes in fp8-recipe, fp8-dist, fp8-nn, fp8-hf and fp8-cli and checks that their tests find them (half an hour or more)
    MutateCrates(mutate_crates::MutateCrates),
    /// Attacks the library with random calls, corrupted checkpoints, and kills during saves (minutes)
    Attack(checks::Passed),
    /// Attacks groups of processes: kills and suspends ranks, sends garbage, starts two jobs on one port (minutes)
    Chaos(chaos::Chaos),
    /// Trains small models in FP8 and in high precision, from three seeds each, and compares their losses (minutes)
    Convergence,
    /// Asks the real cuDNN, without a GPU, which graphs of attention it plans, and records the answers (downloads 900 MB; half an hour)
    CudnnCheck(cudnn_check::CudnnCheck),
    /// Runs the tests of the codec's slices under AddressSanitizer (minutes; x86-64 Linux)
    Asan,
    /// Runs every crate's suites on this machine's CUDA device, or on a simulated one of the architecture that FP8_TEST_ARCH names; fails if a suite ran nothing (minutes)
    GpuTest,
    /// Builds a folder for a GPU machine without cargo: run.sh, programs and data to test and measure (minutes)
    GpuBundle(gpu_bundle::GpuBundle),
    /// Runs fp8-format's tests and a sweep over f32 on emulated AArch64; installs the emulator (minutes)
    Neon(neon::Neon),
    /// Trains on two ranks over a slow link between network namespaces, and cuts it (minutes; Linux, root, ip and tc)
    Network(network::Network),
    /// Runs the criterion benches of the crates (a minute or two each); codec, train and gemm compare with other libraries
    Bench(bench::Bench),
    /// Compares the codec with an independent oracle for all inputs (minutes; uses an optimized build)
    Exhaustive(checks::Passed),
    /// Fine-tunes SmolLM2-135M in high precision and in FP8, beside losses of PyTorch (an hour; uses an optimized build)
    RealTraining(checks::Passed),
}
