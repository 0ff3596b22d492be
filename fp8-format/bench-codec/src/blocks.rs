//! Quantization with a scale for each row or block, beside that with one scale.

use crate::row::{Format, Source, Work};
use crate::work::{Buffers, Group, Shape, done};
use fp8_format::slice::{BlockOutput, BlockScaling, MxOutput, MxRounding, Nvfp4Options, Nvfp4Output, Path};
use fp8_format::{Blocks, E4M3, E8M0};

/// Blocks with f32 scales, their work in one direction and in both, and whether their scales are powers of two.
const F32: [(Blocks, Work, Work, &str); 5] = [
    (Blocks::B1x128, Work::Quantize1x128, Work::Quantize1x128Both, "power_of_two"),
    (Blocks::B1x128, Work::Quantize1x128, Work::Quantize1x128Both, "any"),
    (Blocks::B128x128, Work::Quantize128x128, Work::Quantize128x128Both, "power_of_two"),
    (Blocks::Row, Work::QuantizeRow, Work::QuantizeRowBoth, "power_of_two"),
    (Blocks::Row, Work::QuantizeRow, Work::QuantizeRowBoth, "any"),
];

/// Destinations of one direction, long enough for any of the blocks.
fn out<'a>(
    blocks: Blocks,
    [rows, cols]: [usize; 2],
    codes: &'a mut [E4M3],
    scales: &'a mut [f32],
) -> BlockOutput<'a, E4M3> {
    let [height, width] = blocks.grid(rows, cols);
    BlockOutput::new(codes, &mut scales[..height * width])
}

fn mx_out<'a>([rows, cols]: [usize; 2], codes: &'a mut [E4M3], scales: &'a mut [E8M0]) -> MxOutput<'a, E4M3> {
    let [height, width] = Blocks::Mx32.grid(rows, cols);
    MxOutput::new(codes, &mut scales[..height * width])
}

macro_rules! for_sources {
    ($($source:expr, $field:ident, $lines:literal;)*) => {
        /// Tasks that read a source once and write its codes once or twice, on one thread.
        pub(crate) fn quantization(path: Path) -> Vec<Group> {
            let mut groups = Vec::new();
            $(
                let kind = ($source, Format::E4M3);
                let mut one = Group::new([$lines, 1], 1);
                let mut two = Group::new([$lines, 2], 1);
                for (blocks, work, work_of_both, scale) in F32 {
                    let power_2_scales = scale == "power_of_two";
                    let scaling = BlockScaling { power_2_scales, ..BlockScaling::new(blocks) };
                    one.add_matrix(work, path, kind, Shape::Square, move |codec, b, (rows, cols)| {
                        let Buffers { $field, out: codes, scales: [scales, _], .. } = b;
                        let out = out(blocks, [rows, cols], codes, scales);
                        done(codec.quantize_blocks($field, rows, cols, &scaling, out));
                    });
                    one.name_scale(scale);
                    if path != Path::best() {
                        continue;
                    }
                    two.add_matrix(work_of_both, path, kind, Shape::Square, move |codec, b, (rows, cols)| {
                        let Buffers { $field, out: codes, columns, scales: [scales, scales_t], .. } = b;
                        let rowwise = Some(out(blocks, [rows, cols], codes, scales));
                        let columnwise = out(blocks, [cols, rows], columns, scales_t);
                        let done_both =
                            codec.quantize_blocks_transpose($field, rows, cols, &scaling, rowwise, columnwise);
                        done(done_both);
                    });
                    two.name_scale(scale);
                }
                one.add_matrix(Work::QuantizeMx32, path, kind, Shape::Square, |codec, b, (rows, cols)| {
                    let Buffers { $field, out: codes, e8m0: [scales, _], .. } = b;
                    let out = mx_out([rows, cols], codes, scales);
                    done(codec.quantize_mx($field, rows, cols, MxRounding::Ceil, out));
                });
                one.name_scale("ceil");
                if path == Path::best() {
                    let work = Work::QuantizeMx32Both;
                    two.add_matrix(work, path, kind, Shape::Square, |codec, b, (rows, cols)| {
                        let Buffers { $field, out: codes, columns, e8m0: [scales, scales_t], .. } = b;
                        let rowwise = Some(mx_out([rows, cols], codes, scales));
                        let columnwise = mx_out([cols, rows], columns, scales_t);
                        let rounding = MxRounding::Ceil;
                        done(codec.quantize_mx_transpose($field, rows, cols, rounding, rowwise, columnwise));
                    });
                    two.name_scale("ceil");
                }
                groups.extend([one, two]);
            )*
            groups
        }
    };
}

/// Quantization to NVFP4, with the amax of the tensor given and computed first.
pub(crate) fn nvfp4(path: Path) -> Group {
    let mut group = Group::new([8, 1], 1);
    let kind = (Source::F32, Format::E2M1);
    for amax in ["given", "computed"] {
        group.add_matrix(Work::QuantizeNvfp4, path, kind, Shape::Square, move |codec, b, (rows, cols)| {
            let options = Nvfp4Options::default();
            let most = match amax {
                "given" => 6.0,
                _ => codec.nvfp4_amax(&b.f32s, rows, cols, options.copy).unwrap_or_default(),
            };
            let out = Nvfp4Output::new(&mut b.packed, &mut b.e4m3);
            done(codec.quantize_nvfp4(&b.f32s, rows, cols, most, &options, out));
        });
        group.name_scale(amax);
    }
    group
}

for_sources! {
    Source::F32, f32s, 4;
    Source::F16, f16s, 2;
    Source::BF16, bf16s, 2;
}
