//! Every input there is: the codec over all 2³² f32 patterns, all f16 and bf16 patterns and all codes, judged by the
//! integer oracle of fp8-format's tests; with `--math`, our `exp`, `tanh` and `sigmoid` over all of f32, judged by f64.

mod codec;
mod count;
mod draw;
mod e2m1;
mod math;
#[path = "../../../fp8-format/tests/oracle/mod.rs"]
mod oracle;
mod places;

use std::error::Error;
use std::time::Instant;

/// Tries every input of the codec, or of the activation functions.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Exhaustive {
    /// Tests `exp`, `tanh` and `sigmoid` over all f32 instead of the codec; fails above 2 ulp, and 2.5 for `sigmoid`
    #[arg(long)]
    pub(crate) math: bool,
    /// Tests only every N-th f32 pattern
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) stride: u32,
}

/// Runs the sweep, one line per path; an error if anything was wrong.
pub(crate) fn run(args: &Exhaustive) -> Result<(), Box<dyn Error>> {
    if args.math {
        return math::sweep_all(args.stride);
    }
    let start = Instant::now();
    let [codec, e2m1] = [codec::sweep_all(args.stride), e2m1::sweep(args.stride)];
    let (conversions, mismatches) = (codec.0 + e2m1.0, codec.1 + e2m1.1);
    println!("{:.0} s", start.elapsed().as_secs_f64());
    println!("{conversions} conversions, {mismatches} mismatches");
    if mismatches > 0 {
        return Err(
            format!("exhaustive: {mismatches} of {conversions} conversions differ from the oracle").into()
        );
    }
    Ok(())
}
