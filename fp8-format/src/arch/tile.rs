//! The size of tiles.

/// Side of a tile: its rows and its columns are a cache line of codes each.
pub(crate) const TILE: usize = 64;
