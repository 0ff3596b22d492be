//! Training data: files of text, JSON lines and tokens, as sequences of ids and targets.

mod dataset;
mod digest;
mod encoder;
mod lines;
mod load;
mod options;
mod order;
mod plan;
mod row;
mod sequence;
mod sequences;
mod shards;
mod sources;
mod special;
mod summary;
mod template;
mod tokens;

pub use dataset::Dataset;
pub use options::{DataKind, DataOptions, LossOn, Pack, TooLong, Validation};
pub use order::order;
pub use sequence::{IGNORED, Sample, Sequence};
pub use sequences::Sequences;
pub use summary::DataSummary;
pub use template::ChatTemplate;
