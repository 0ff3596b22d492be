//! The tensors in NVFP4: what their blocks lost, and how exact they are beside FP8.

use std::fmt::Write as _;

use crate::page::{escape, grouped, percent, section};
use crate::table::decibels;
use crate::train::nvfp4::{self, Nvfp4Tensor};
use crate::train::telemetry::Telemetry;

/// At most this many tensors are listed: those that lose most.
const MAX_ROWS: usize = 64;

const NOTE: &str = " Norms and activations write their outputs in high precision, and they are quantized after. A block has 16 \
                    values, or 16 × 16 of a weight. A lost block became 0 throughout; a saturated one has a value beyond the \
                    largest code. The SQNR is that of the last measured step. In MXFP8 and in FP8 with one scale, the same \
                    tensor would have the SQNR beside it.";

/// Returns the table of the tensors in NVFP4. It is empty if there are none.
pub(crate) fn table(telemetry: &Telemetry) -> String {
    let mut tensors: Vec<Nvfp4Tensor> = telemetry.nvfp4().to_vec();
    let all = tensors.len();
    if all == 0 {
        return String::new();
    }
    let mut note = nvfp4::sentence(&tensors) + NOTE;
    if all > MAX_ROWS {
        let lost = |tensor: &Nvfp4Tensor| tensor.share(tensor.lost_blocks + tensor.saturated_blocks);
        let sqnr = |tensor: &Nvfp4Tensor| tensor.sqnr_db.unwrap_or(f64::INFINITY);
        tensors.sort_by(|a, b| lost(b).total_cmp(&lost(a)).then(sqnr(a).total_cmp(&sqnr(b))));
        tensors.truncate(MAX_ROWS);
        let _ = write!(note, " These are the {MAX_ROWS} of {all} tensors that lose most.");
    }
    let mut html =
        String::from("<div class=\"tensors\"><table class=\"numbers\">\n<thead><tr><th>tensor</th>");
    let has = |count: fn(&Nvfp4Tensor) -> u64| tensors.iter().any(|tensor| count(tensor) > 0);
    let (has_nan, has_infinities) = (has(|tensor| tensor.nan_blocks), has(|tensor| tensor.infinite_blocks));
    let mut columns = vec!["blocks", "lost, %", "saturated, %"];
    columns.extend(has_nan.then_some("with NaN"));
    columns.extend(has_infinities.then_some("with infinities"));
    columns.extend(["SQNR, dB", "in MXFP8, dB", "in FP8, dB"]);
    columns.iter().for_each(|column| html.extend(["<th>", column, "</th>"]));
    html += "</tr></thead>\n<tbody>\n";
    for tensor in &tensors {
        let _ = write!(html, "<tr><th>{}</th>", escape(&tensor.tensor));
        let share = |blocks| if tensor.blocks == 0 { String::new() } else { percent(tensor.share(blocks)) };
        let mut cells =
            vec![grouped(tensor.blocks), share(tensor.lost_blocks), share(tensor.saturated_blocks)];
        cells.extend(has_nan.then(|| grouped(tensor.nan_blocks)));
        cells.extend(has_infinities.then(|| grouped(tensor.infinite_blocks)));
        cells.extend([tensor.sqnr_db, tensor.mxfp8_sqnr_db, tensor.fp8_sqnr_db].map(decibels));
        cells.iter().for_each(|cell| html.extend(["<td>", cell, "</td>"]));
        html += "</tr>\n";
    }
    section("Tensors in NVFP4", &note, &(html + "</tbody>\n</table></div>\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::telemetry::SlotState;
    use fp8_nn::fp8_recipe::Nvfp4Report;

    fn telemetry(count: usize, report: Option<Nvfp4Report>) -> Telemetry {
        let mut telemetry = Telemetry::new(2);
        let slot = |index: usize| SlotState {
            name: format!("gpt.blocks.{index}.mlp.fc1.input"),
            backward: false,
            amax: 1.0,
            scale: 2.0,
            has_powers_of_two: false,
            saturated: 0,
            underflowed: 0,
            elements: 4096,
            nan: 0,
            sqnr: report.map(|_| 20.31),
            is_nvfp4: index < count,
            nvfp4: report
                .filter(|_| index < count)
                .map(|report| Nvfp4Report { lost: report.lost * index as u64, ..report }),
        };
        (1..=2).for_each(|step| telemetry.record(step, (0..100).map(slot).collect()));
        telemetry
    }

    const REPORT: Nvfp4Report = Nvfp4Report {
        blocks: 1000,
        lost: 5,
        saturated: 1,
        nan: 0,
        infinite: 0,
        mxfp8_sqnr: Some(31.5),
        fp8_sqnr: Some(31.25),
    };

    #[test]
    fn blocks_and_errors_have_a_row_for_each_tensor_in_nvfp4_alone() {
        assert_eq!(table(&telemetry(0, None)), "");
        let html = table(&telemetry(2, Some(REPORT)));
        assert!(
            html.contains("2 tensors ran in NVFP4. Of 4,000 blocks that were measured, 0.25 % lost"),
            "{html}"
        );
        assert_eq!(html.matches("<tr><th>gpt").count(), 2);
        let row = "<tr><th>gpt.blocks.1.mlp.fc1.input</th><td>2,000</td><td>0.50</td><td>0.10</td><td>20.31</td>\
                   <td>31.50</td><td>31.25</td></tr>";
        assert!(html.contains(row), "{html}");
        assert!(!html.contains("with NaN") && !html.contains("with infinities"));
        let infinite = Nvfp4Report { nan: 3, infinite: 2, ..REPORT };
        let html = table(&telemetry(2, Some(infinite)));
        assert!(html.contains("<th>with NaN</th><th>with infinities</th>"), "{html}");
        assert!(html.contains("<td>6</td><td>4</td>"), "{html}");
        assert!(
            table(&telemetry(1, None)).contains("1 tensor ran in NVFP4. Their blocks were not measured.")
        );
    }

    #[test]
    fn of_many_tensors_those_that_lose_most_are_listed() {
        let html = table(&telemetry(100, Some(REPORT)));
        assert!(html.contains("These are the 64 of 100 tensors that lose most."), "{html}");
        assert_eq!(html.matches("<tr><th>gpt").count(), 64);
        assert!(html.contains("blocks.99.") && html.contains("blocks.36.") && !html.contains("blocks.35."));
    }
}
