//! The options that arrange the processes of a training.

use clap::Args;
use fp8_nn::fp8_dist::MeshOptions;

use crate::failure::Failure;
use crate::train::numbers::count;

/// The layout that the command line asks for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Args)]
pub(crate) struct Layout {
    /// Train on N replicas of the model, each with its part of every step. The option starts no process: fp8 launch, torchrun, mpirun or
    /// srun do [default: 1, or all processes divided by --tp]
    #[arg(long, value_name = "N", value_parser = count::<1024>)]
    pub(crate) dp: Option<usize>,

    /// Share the layers of a replica among N processes, each with 1 / N of the heads, of the MLPs' features and of the vocabulary (tensor
    /// parallelism) [default: 1]
    #[arg(long, value_name = "N", value_parser = count::<1024>)]
    pub(crate) tp: Option<usize>,

    /// Share the tokens between the layers that --tp divides, too, which takes less memory
    #[arg(long)]
    pub(crate) sequence_parallel: bool,
}

impl Layout {
    pub(crate) fn dp(&self) -> usize {
        self.dp.unwrap_or(1)
    }

    pub(crate) fn tp(&self) -> usize {
        self.tp.unwrap_or(1)
    }

    /// Returns sizes as a command line has them.
    fn options(dp: usize, tp: usize) -> String {
        match (dp, tp) {
            (dp, 1) => format!("--dp {dp}"),
            (1, tp) => format!("--tp {tp}"),
            (dp, tp) => format!("--dp {dp} --tp {tp}"),
        }
    }

    /// Returns the sizes of the mesh for so many processes; `None` for one that trains alone.
    pub(crate) fn sizes(&self, started: usize) -> Result<Option<MeshOptions>, Failure> {
        let tp = self.tp();
        if self.sequence_parallel && tp == 1 {
            let sentence = "--sequence-parallel shares tokens among the processes that --tp N divides layers among: add --tp N, or leave it out";
            return Err(Failure::input(sentence));
        }
        let alone = |options: &str, needed: usize| {
            Err(Failure::input(format!(
                "{options}: this is the only process: fp8 launch -n {needed} -- fp8 train {options} starts {needed} on this machine"
            )))
        };
        match (self.dp, started) {
            (Some(1), _) | (None, 1) if tp == 1 => Ok(None),
            (None, 1) => alone(&Self::options(1, tp), tp),
            (Some(dp), 1) => alone(&Self::options(dp, tp), dp * tp),
            (None, _) if self.tp.is_none() => Err(Failure::input(format!(
                "{started} processes were started: --dp {started} trains one model on them, --dp 1 one in each"
            ))),
            (None, _) if started.is_multiple_of(tp) => Ok(Some(MeshOptions { dp: started / tp, tp })),
            (None, _) => Err(Failure::input(format!(
                "--tp {tp}: {started} processes were started: expected a multiple of {tp}"
            ))),
            (Some(dp), _) if dp * tp == started => Ok(Some(MeshOptions { dp, tp })),
            (Some(dp), _) if tp == 1 => Err(Failure::input(format!(
                "--dp {dp}: {started} processes were started: expected --dp {started}"
            ))),
            (Some(dp), _) => Err(Failure::input(format!(
                "--dp {dp} --tp {tp}: {started} processes were started: expected {}",
                dp * tp
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_follow_from_the_options_and_the_number_of_processes() {
        let sizes = |dp: usize, tp: usize, started| {
            let [dp, tp] = [dp, tp].map(|size| (size > 0).then_some(size)); // 0: not given
            let sizes = Layout { dp, tp, sequence_parallel: false }.sizes(started);
            sizes.map(|sizes| sizes.map(|sizes| (sizes.dp, sizes.tp))).map_err(|failure| failure.to_string())
        };
        for (dp, tp, started, expected) in [
            (0, 0, 1, None),
            (0, 1, 1, None),
            (1, 0, 4, None),
            (4, 0, 4, Some((4, 1))),
            (0, 2, 2, Some((1, 2))),
            (0, 2, 4, Some((2, 2))),
            (0, 1, 4, Some((4, 1))),
            (2, 2, 4, Some((2, 2))),
            (1, 4, 4, Some((1, 4))),
        ] {
            assert_eq!(sizes(dp, tp, started), Ok(expected), "{dp} {tp} {started}");
        }
        for (dp, tp, started, expected) in [
            (
                2,
                2,
                1,
                "--dp 2 --tp 2: this is the only process: fp8 launch -n 4 -- fp8 train --dp 2 --tp 2 starts 4 on this machine",
            ),
            (
                0,
                4,
                1,
                "--tp 4: this is the only process: fp8 launch -n 4 -- fp8 train --tp 4 starts 4 on this machine",
            ),
            (0, 3, 4, "--tp 3: 4 processes were started: expected a multiple of 3"),
            (2, 4, 4, "--dp 2 --tp 4: 4 processes were started: expected 8"),
            (2, 0, 4, "--dp 2: 4 processes were started: expected --dp 4"),
        ] {
            assert_eq!(sizes(dp, tp, started), Err(format!("error: {expected}")));
        }
        let lone = Layout { sequence_parallel: true, ..Default::default() }.sizes(1).unwrap_err().to_string();
        assert!(lone.contains("add --tp N, or leave it out"), "{lone}");
    }
}
