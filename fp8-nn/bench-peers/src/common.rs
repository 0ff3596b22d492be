//! The options of both benches.

use std::path::PathBuf;

use clap::Args;

use crate::contender::Contender;
use crate::result::Result;
use crate::size::{self, Size};

/// Options of both benches.
#[derive(Args, Debug)]
pub(crate) struct Common {
    /// Also measures other libraries, with this Python interpreter
    #[arg(long, value_name = "PYTHON")]
    pub(crate) peers: Option<PathBuf>,

    /// Models and batches, as layers/hidden/heads/seq/batch
    #[arg(long, value_name = "SIZE", value_delimiter = ',', default_values = size::SIZES)]
    pub(crate) sizes: Vec<Size>,

    /// Numbers of threads [default: 1 and, if there are as many cores, 2]
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = positive)]
    pub(crate) threads: Vec<usize>,

    /// Contenders that take part [default: the usual ones; other libraries only with --peers]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub(crate) contenders: Vec<Contender>,

    /// Turns that each contender takes
    #[arg(long, value_name = "N", default_value = "7", value_parser = positive)]
    pub(crate) rounds: usize,

    /// Writes all results to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

impl Common {
    pub(crate) fn threads(&self) -> Result<Vec<usize>> {
        if !self.threads.is_empty() {
            return Ok(self.threads.clone());
        }
        let mut threads = vec![1, std::thread::available_parallelism()?.get().min(2)];
        threads.dedup();
        Ok(threads)
    }
}

pub(crate) fn positive(text: &str) -> std::result::Result<usize, String> {
    text.parse().ok().filter(|number| *number > 0).ok_or_else(|| "expected a number of at least 1".to_owned())
}
