//! The cases, one file an operation, and what they share.

mod cancel;
mod case;
mod compare;
mod counters;
mod data;
mod edge;
mod reference;
mod threads;
mod whole;
mod whole_blocks;

mod accumulate;
mod activation;
mod activation_blocks;
mod activation_counters;
mod activation_tiles;
mod adamw;
mod adamw_codes;
mod adamw_counters;
mod adamw_skips;
mod amax;
mod attention;
mod attention_bits;
mod attention_dropout;
mod attention_fp8;
mod attention_fp8_dropout;
mod attention_heads;
mod attention_log_sum_exp;
mod attention_sequences;
mod attention_specials;
mod cast;
mod cells;
mod compare_calls;
mod cross_entropy;
mod cross_entropy_part;
mod dropout;
mod elementwise;
mod embedding;
mod fp8_product;
mod gemm;
mod gemm_blocks;
mod gemm_fp8;
mod gemm_terms;
mod grad_norm;
mod gradient;
mod kv_cache;
mod linear;
mod loss_scale;
mod norm;
mod norm_ahead;
mod norm_blocks;
mod norm_counters;
mod norm_gradients;
mod norm_specials;
mod nvfp4;
mod odd_scales;
mod optimizer;
mod optimizer_rules;
mod optimizer_steps;
mod permute;
mod quantize;
mod quantize_blocks;
mod quantize_blocks_bf16;
mod quantize_counters;
mod quantize_many;
mod quantize_many_bf16;
mod quantize_mx_bf16;
mod quantize_rows_bf16;
mod quantize_tiles_bf16;
mod reduce;
mod rope;
mod rows;
mod sample;
mod scale_from_amax;
mod softmax;
mod split;
mod stress;
mod transpose;
mod update_scales;
mod update_scales_amax;

pub(crate) use case::{BY_CUDNN, Case, Outcome};

/// Every case of every operation.
pub(crate) const ALL: &[&[Case]] = &[
    accumulate::CASES,
    activation::CASES,
    activation_blocks::CASES,
    activation_counters::CASES,
    activation_tiles::CASES,
    adamw::CASES,
    adamw_codes::CASES,
    adamw_counters::CASES,
    adamw_skips::CASES,
    amax::CASES,
    attention::CASES,
    attention_bits::CASES,
    attention_dropout::CASES,
    attention_fp8::CASES,
    attention_fp8_dropout::CASES,
    attention_heads::CASES,
    attention_log_sum_exp::CASES,
    attention_sequences::CASES,
    attention_specials::CASES,
    cast::CASES,
    cells::CASES,
    compare_calls::CASES,
    cross_entropy::CASES,
    cross_entropy_part::CASES,
    dropout::CASES,
    elementwise::CASES,
    embedding::CASES,
    gemm::CASES,
    gemm_blocks::CASES,
    gemm_fp8::CASES,
    gemm_terms::CASES,
    grad_norm::CASES,
    gradient::CASES,
    kv_cache::CASES,
    linear::CASES,
    loss_scale::CASES,
    norm::CASES,
    norm_ahead::CASES,
    norm_blocks::CASES,
    norm_counters::CASES,
    norm_gradients::CASES,
    norm_specials::CASES,
    nvfp4::CASES,
    odd_scales::CASES,
    optimizer::CASES,
    optimizer_rules::CASES,
    optimizer_steps::CASES,
    permute::CASES,
    quantize::CASES,
    quantize_blocks::CASES,
    quantize_blocks_bf16::CASES,
    quantize_counters::CASES,
    quantize_many::CASES,
    quantize_many_bf16::CASES,
    quantize_mx_bf16::CASES,
    quantize_rows_bf16::CASES,
    quantize_tiles_bf16::CASES,
    reduce::CASES,
    rope::CASES,
    rows::CASES,
    sample::CASES,
    scale_from_amax::CASES,
    softmax::CASES,
    split::CASES,
    stress::CASES,
    transpose::CASES,
    update_scales::CASES,
    update_scales_amax::CASES,
];
