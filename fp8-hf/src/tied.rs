//! A head that the configuration ties to the embedding.

use super::family::HEAD;
use super::folder::{CONFIG, Folder, UNTIE};
use crate::Result;

/// Elements that are compared at a time.
const CHUNK: usize = 1 << 20;

impl Folder {
    /// Checks that the head in the files of a tied model is its embedding. transformers uses a head that differs, although the
    /// configuration ties them.
    pub(super) fn expect_tied(&self) -> Result<()> {
        let (Some(head), Some(spec)) = (self.tied_head(), self.config.tensors().into_iter().next()) else {
            return Ok(());
        };
        let table = self.stored(&spec.name);
        let [rows, cols] = head.matrix();
        let step = (CHUNK / cols.max(1)).max(1);
        for first in (0..rows).step_by(step) {
            let rows = first..(first + step).min(rows);
            let (head, table) = (self.rows(HEAD, rows.clone())?, self.rows(table, rows)?);
            if head.iter().zip(&table).any(|(head, table)| head.to_bits() != table.to_bits()) {
                return Err(self.problem(format!(
                    "`{HEAD}` differs from the embedding, but {CONFIG} ties them: {UNTIE}"
                )));
            }
        }
        Ok(())
    }
}
