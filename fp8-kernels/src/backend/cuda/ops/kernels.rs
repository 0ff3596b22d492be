//! The kernels and their parameters. Written by `cargo xtask ptx` from the kernel files: do not edit.

use super::source::Source;
use super::{In, Out, Void, signatures};

signatures! {
    pointees DropoutKey dropout_key, Entry entry, OptimizerRecord optimizer_record, Record record, Row row;

    group BackwardParams {
        dy: In<Void>, dy_dtype: i32, x: In<Void>, dtype: i32, gamma: In<Void>, gamma_dtype: i32, around_one: i32,
        means: In<f32>, rsigmas: In<f32>, residual: In<Void>, residual_dtype: i32, dx: Out<Void>, rows: u64,
        cols: u64, }

    group BlockParams {
        blocks: i32, rule: i32, fp8_max: f32, epsilon: f32, scale_max: f32, codes: Out<u8>, columnwise: Out<u8>,
        format: i32, scale_inv: Out<Void>, columnwise_scale_inv: Out<Void>, row_amaxes: Out<i32>,
        col_amaxes: Out<i32>, one_column: i32, measure: i32, amax: Out<i32>, counters: Out<u64>,
        partial_sums: Out<f32>, }

    group CallParameters {
        query_lengths: In<i32>, key_lengths: In<i32>, tile_table: In<i32>, fault: Out<i64>, tiles: u32,
        queries: u32, keys: u32, heads: u32, groups: u32, head_dim: u32, q_pitch: u32, k_pitch: u32,
        result_pitch: u32, left: u32, right: u32, bottom_right: i32, scale: f32, }

    group DropoutOnParameters {
        dropout_key: In<DropoutKey>, dropout_first: u64, dropout_threshold: u32, dropout_factor: f32,
        dropout_first_head: u32, dropout_heads: u32, }

    group MaskParameters {
        mask: In<u8>, extent0: u64, extent1: u64, extent2: u64, extent3: u64, extent4: u64, stride0: u64,
        stride1: u64, stride2: u64, stride3: u64, stride4: u64, step: u64, }

    group WholeCodesParams {
        codes: Out<u8>, columnwise: Out<u8>, scale: In<f32>, scale_inv: Out<f32>, unset: In<f32>, amax: Out<i32>, }

    kernel Accumulate {
        out: Out<f32>, x: In<Void>, n: u64, dtype: i32, add: i32, }
    ACCUMULATE = Accumulate "accumulate";

    kernel Activation {
        h: In<Void>, dtype: i32, kind: i32, rows: u64, cols: u64, run: u64, codes: Out<u8>, columnwise: Out<u8>,
        format: i32, scale: In<f32>, scale_inv: Out<f32>, high: Out<Void>, unset: In<f32>, amax: Out<i32>,
        counters: Out<u64>, }
    ACTIVATION = Activation "activation",
    ACTIVATION_GATED = Activation "activation_gated";

    kernel ActivationBackward {
        dy: In<Void>, dy_dtype: i32, h: In<Void>, dtype: i32, kind: i32, rows: u64, cols: u64, run: u64,
        codes: Out<u8>, columnwise: Out<u8>, format: i32, scale: In<f32>, scale_inv: Out<f32>, high: Out<Void>,
        unset: In<f32>, amax: Out<i32>, counters: Out<u64>, partial_sums: Out<f32>, }
    ACTIVATION_BACKWARD = Activation "activation_backward",
    ACTIVATION_BACKWARD_GATED = Activation "activation_backward_gated";

    kernel ActivationBlocks {
        h: In<Void>, dtype: i32, kind: i32, rows: u64, cols: u64, block: BlockParams, }
    ACTIVATION_BLOCKS = ActivationBlocks "activation_blocks",
    ACTIVATION_BLOCKS_GATED = ActivationBlocks "activation_blocks_gated";

    kernel ActivationBackwardBlocks {
        dy: In<Void>, dy_dtype: i32, h: In<Void>, dtype: i32, kind: i32, rows: u64, cols: u64, block: BlockParams, }
    ACTIVATION_BACKWARD_BLOCKS = ActivationBlocks "activation_backward_blocks",
    ACTIVATION_BACKWARD_BLOCKS_GATED = ActivationBlocks "activation_backward_blocks_gated";

    kernel ActivationCodes {
        h: In<u16>, rows: u32, cols: u32, run: u32, whole_codes: WholeCodesParams, }
    ACTIVATION_CODES_GEGLU_E4M3 = ActivationGeglu "activation_codes_geglu_e4m3",
    ACTIVATION_CODES_GELU_E4M3 = ActivationGelu "activation_codes_gelu_e4m3",
    ACTIVATION_CODES_SWIGLU_E4M3 = ActivationSwiglu "activation_codes_swiglu_e4m3";

    kernel ActivationHigh {
        h: In<u16>, rows: u32, cols: u32, run: u32, high: Out<u16>, }
    ACTIVATION_HIGH_GEGLU = ActivationGeglu "activation_high_geglu",
    ACTIVATION_HIGH_GELU = ActivationGelu "activation_high_gelu",
    ACTIVATION_HIGH_SWIGLU = ActivationSwiglu "activation_high_swiglu";

    kernel ActivationBackwardCodes {
        dy: In<u16>, h: In<u16>, rows: u32, cols: u32, run: u32, whole_codes: WholeCodesParams,
        partial_sums: Out<f32>, }
    ACTIVATION_BACKWARD_CODES_GEGLU_E4M3 = ActivationGeglu "activation_backward_codes_geglu_e4m3",
    ACTIVATION_BACKWARD_CODES_GEGLU_E5M2 = ActivationGeglu "activation_backward_codes_geglu_e5m2",
    ACTIVATION_BACKWARD_CODES_GELU_E4M3 = ActivationGelu "activation_backward_codes_gelu_e4m3",
    ACTIVATION_BACKWARD_CODES_GELU_E5M2 = ActivationGelu "activation_backward_codes_gelu_e5m2",
    ACTIVATION_BACKWARD_CODES_SWIGLU_E4M3 = ActivationSwiglu "activation_backward_codes_swiglu_e4m3",
    ACTIVATION_BACKWARD_CODES_SWIGLU_E5M2 = ActivationSwiglu "activation_backward_codes_swiglu_e5m2";

    kernel ActivationBackwardHigh {
        dy: In<u16>, h: In<u16>, rows: u32, cols: u32, run: u32, high: Out<u16>, partial_sums: Out<f32>, }
    ACTIVATION_BACKWARD_HIGH_GEGLU = ActivationGeglu "activation_backward_high_geglu",
    ACTIVATION_BACKWARD_HIGH_GELU = ActivationGelu "activation_backward_high_gelu",
    ACTIVATION_BACKWARD_HIGH_SWIGLU = ActivationSwiglu "activation_backward_high_swiglu";

    kernel AdamwUpdate {
        records: In<Record>, first_tiles: In<u64>, tensors: i32, factors: In<f32>, amaxes: Out<i32>,
        norm: In<f32>, skipped: Out<u64>, }
    ADAMW_UPDATE = AdamW "adamw_update";

    kernel AdamwScales {
        records: In<Record>, tensors: i32, amaxes: In<i32>, late: Out<f32>, }
    ADAMW_SCALES = AdamW "adamw_scales";

    kernel AdamwCodes {
        records: In<Record>, first_tiles: In<u64>, tensors: i32, late: In<f32>, }
    ADAMW_CODES = AdamW "adamw_codes";

    kernel Amax {
        x: In<Void>, dtype: i32, n: u64, unset: In<f32>, cell: Out<i32>, }
    AMAX = Amax "amax";

    kernel Attention {
        q: In<u16>, k: In<u16>, v: In<u16>, o: Out<u16>, row_max: Out<f32>, row_sum: Out<f32>,
        call: CallParameters, }
    ATTENTION_BF16_64 = Attention "attention_bf16_64",
    ATTENTION_BF16_128 = Attention "attention_bf16_128",
    ATTENTION_F16_64 = Attention "attention_f16_64",
    ATTENTION_F16_128 = Attention "attention_f16_128";

    kernel AttentionBackward {
        q: In<u16>, k: In<u16>, v: In<u16>, dy: In<u16>, row_numbers: In<Row>, d_first: Out<u16>,
        d_second: Out<u16>, call: CallParameters, }
    ATTENTION_BACKWARD_KV_BF16_64 = AttentionBackwardKv "attention_backward_kv_bf16_64",
    ATTENTION_BACKWARD_KV_BF16_128 = AttentionBackwardKv "attention_backward_kv_bf16_128",
    ATTENTION_BACKWARD_KV_F16_64 = AttentionBackwardKv "attention_backward_kv_f16_64",
    ATTENTION_BACKWARD_KV_F16_128 = AttentionBackwardKv "attention_backward_kv_f16_128",
    ATTENTION_BACKWARD_Q_BF16_64 = AttentionBackwardQ "attention_backward_q_bf16_64",
    ATTENTION_BACKWARD_Q_BF16_128 = AttentionBackwardQ "attention_backward_q_bf16_128",
    ATTENTION_BACKWARD_Q_F16_64 = AttentionBackwardQ "attention_backward_q_f16_64",
    ATTENTION_BACKWARD_Q_F16_128 = AttentionBackwardQ "attention_backward_q_f16_128";

    kernel AttentionDropout {
        q: In<u16>, k: In<u16>, v: In<u16>, o: Out<u16>, row_max: Out<f32>, row_sum: Out<f32>,
        dropout_on: DropoutOnParameters, call: CallParameters, }
    ATTENTION_DROPOUT_BF16_64 = AttentionDropout "attention_dropout_bf16_64",
    ATTENTION_DROPOUT_BF16_128 = AttentionDropout "attention_dropout_bf16_128",
    ATTENTION_DROPOUT_F16_64 = AttentionDropout "attention_dropout_f16_64",
    ATTENTION_DROPOUT_F16_128 = AttentionDropout "attention_dropout_f16_128";

    kernel AttentionDropoutBackward {
        q: In<u16>, k: In<u16>, v: In<u16>, dy: In<u16>, row_numbers: In<Row>, d_first: Out<u16>,
        d_second: Out<u16>, dropout_on: DropoutOnParameters, call: CallParameters, }
    ATTENTION_DROPOUT_BACKWARD_KV_BF16_64 = AttentionDropoutBackwardKv "attention_dropout_backward_kv_bf16_64",
    ATTENTION_DROPOUT_BACKWARD_KV_BF16_128 = AttentionDropoutBackwardKv "attention_dropout_backward_kv_bf16_128",
    ATTENTION_DROPOUT_BACKWARD_KV_F16_64 = AttentionDropoutBackwardKv "attention_dropout_backward_kv_f16_64",
    ATTENTION_DROPOUT_BACKWARD_KV_F16_128 = AttentionDropoutBackwardKv "attention_dropout_backward_kv_f16_128",
    ATTENTION_DROPOUT_BACKWARD_Q_BF16_64 = AttentionDropoutBackwardQ "attention_dropout_backward_q_bf16_64",
    ATTENTION_DROPOUT_BACKWARD_Q_BF16_128 = AttentionDropoutBackwardQ "attention_dropout_backward_q_bf16_128",
    ATTENTION_DROPOUT_BACKWARD_Q_F16_64 = AttentionDropoutBackwardQ "attention_dropout_backward_q_f16_64",
    ATTENTION_DROPOUT_BACKWARD_Q_F16_128 = AttentionDropoutBackwardQ "attention_dropout_backward_q_f16_128";

    kernel AttentionDropoutPlain {
        q: In<Void>, k: In<Void>, v: In<Void>, o: Out<Void>, dtype: i32, row_max: Out<f32>, row_sum: Out<f32>,
        dropout_on: DropoutOnParameters, call: CallParameters, }
    ATTENTION_DROPOUT_PLAIN = AttentionDropoutPlain "attention_dropout_plain";

    kernel AttentionDropoutPlainBackward {
        q: In<Void>, k: In<Void>, v: In<Void>, dy: In<Void>, dtype: i32, row_numbers: In<Row>, d_first: Out<Void>,
        d_second: Out<Void>, dropout_on: DropoutOnParameters, call: CallParameters, }
    ATTENTION_DROPOUT_PLAIN_BACKWARD_Q = AttentionDropoutPlain "attention_dropout_plain_backward_q",
    ATTENTION_DROPOUT_PLAIN_BACKWARD_KV = AttentionDropoutPlain "attention_dropout_plain_backward_kv";

    kernel AttentionFp8Rows {
        dy: In<u8>, format: i32, dy_scale_inv: In<f32>, o: In<Void>, dtype: i32, row_max: In<f32>,
        row_sum: In<f32>, rows: Out<Row>, count: u64, queries: u32, heads: u32, head_dim: u32, }
    ATTENTION_FP8_ROWS = AttentionFp8 "attention_fp8_rows";

    kernel AttentionFp8 {
        q: In<u8>, k: In<u8>, v: In<u8>, q_scale_inv: In<f32>, k_scale_inv: In<f32>, v_scale_inv: In<f32>,
        o: Out<Void>, dtype: i32, row_max: Out<f32>, row_sum: Out<f32>, dropout_on: DropoutOnParameters,
        call: CallParameters, }
    ATTENTION_FP8_64 = AttentionFp8 "attention_fp8_64",
    ATTENTION_FP8_128 = AttentionFp8 "attention_fp8_128";

    kernel AttentionFp8Backward {
        q: In<u8>, k: In<u8>, v: In<u8>, dy: In<u8>, q_scale_inv: In<f32>, k_scale_inv: In<f32>,
        v_scale_inv: In<f32>, dy_scale_inv: In<f32>, row_numbers: In<Row>, d_first: Out<Void>,
        d_second: Out<Void>, dtype: i32, dropout_on: DropoutOnParameters, call: CallParameters, }
    ATTENTION_FP8_BACKWARD_KV_E5M2_64 = AttentionFp8BackwardKv "attention_fp8_backward_kv_e5m2_64",
    ATTENTION_FP8_BACKWARD_KV_E5M2_128 = AttentionFp8BackwardKv "attention_fp8_backward_kv_e5m2_128",
    ATTENTION_FP8_BACKWARD_KV_E4M3_64 = AttentionFp8BackwardKv "attention_fp8_backward_kv_e4m3_64",
    ATTENTION_FP8_BACKWARD_KV_E4M3_128 = AttentionFp8BackwardKv "attention_fp8_backward_kv_e4m3_128",
    ATTENTION_FP8_BACKWARD_Q_E5M2_64 = AttentionFp8BackwardQ "attention_fp8_backward_q_e5m2_64",
    ATTENTION_FP8_BACKWARD_Q_E5M2_128 = AttentionFp8BackwardQ "attention_fp8_backward_q_e5m2_128",
    ATTENTION_FP8_BACKWARD_Q_E4M3_64 = AttentionFp8BackwardQ "attention_fp8_backward_q_e4m3_64",
    ATTENTION_FP8_BACKWARD_Q_E4M3_128 = AttentionFp8BackwardQ "attention_fp8_backward_q_e4m3_128";

    kernel AttentionLengths {
        query_lengths: In<i32>, key_lengths: In<i32>, lengths: Out<i32>, keys_at: u64, fault: Out<i64>,
        batch: u64, queries: u32, keys: u32, backward: i32, }
    ATTENTION_LENGTHS = AttentionLibrary "attention_lengths";

    kernel AttentionUnseen {
        lengths: In<i32>, keys_at: u64, log_sums: Out<f32>, rows: u32, heads: u32, queries: u32, value: f32, }
    ATTENTION_UNSEEN = AttentionLibrary "attention_unseen";

    kernel AttentionPlain {
        q: In<Void>, k: In<Void>, v: In<Void>, o: Out<Void>, dtype: i32, row_max: Out<f32>, row_sum: Out<f32>,
        call: CallParameters, }
    ATTENTION_PLAIN = AttentionPlain "attention_plain";

    kernel AttentionPlainBackward {
        q: In<Void>, k: In<Void>, v: In<Void>, dy: In<Void>, dtype: i32, row_numbers: In<Row>, d_first: Out<Void>,
        d_second: Out<Void>, call: CallParameters, }
    ATTENTION_PLAIN_BACKWARD_Q = AttentionPlain "attention_plain_backward_q",
    ATTENTION_PLAIN_BACKWARD_KV = AttentionPlain "attention_plain_backward_kv";

    kernel AttentionBackwardRows {
        dy: In<Void>, o: In<Void>, dtype: i32, row_max: In<f32>, row_sum: In<f32>, rows: Out<Row>, count: u64,
        queries: u32, heads: u32, head_dim: u32, }
    ATTENTION_BACKWARD_ROWS = AttentionRows "attention_backward_rows";

    kernel AttentionLogSumExp {
        row_max: In<f32>, row_sum: In<f32>, out: Out<f32>, count: u64, }
    ATTENTION_LOG_SUM_EXP = AttentionRows "attention_log_sum_exp";

    kernel Cast {
        x: In<Void>, y: Out<Void>, n: u64, from: i32, to: i32, }
    CAST = Cast "cast";

    kernel CellsMergeMax {
        cells: Out<i32>, values: In<i32>, n: u64, }
    CELLS_MERGE_MAX = Cells "cells_merge_max";

    kernel CellsReplaceNegative {
        cells: Out<f32>, value: f32, n: u64, }
    CELLS_REPLACE_NEGATIVE = Cells "cells_replace_negative";

    kernel CompareCalls {
        calls: In<u32>, scales: In<u32>, ranks: u64, name: u64, fault: Out<i64>, }
    COMPARE_CALLS = CompareCalls "compare_calls";

    kernel CrossEntropyRows {
        logits: In<Void>, dtype: i32, targets: In<i32>, rows: u64, columns: u64, first: u64, total: u64,
        has_ignore: i32, ignore: i32, row_max: Out<f32>, sums: Out<f32>, fault: Out<i64>, }
    CROSS_ENTROPY_ROWS = CrossEntropy "cross_entropy_rows";

    kernel CrossEntropyPartSums {
        own_max: In<f32>, own_sums: In<f32>, row_max: In<f32>, rows: u64, sums: Out<f32>, }
    CROSS_ENTROPY_PART_SUMS = CrossEntropy "cross_entropy_part_sums";

    kernel CrossEntropy {
        row_max: In<f32>, sums: In<f32>, targets: In<i32>, rows: u64, total: u64, has_ignore: i32, ignore: i32,
        normalizer: f32, row_sum: Out<f32>, out: Out<f32>, count: Out<i32>, }
    CROSS_ENTROPY = CrossEntropy "cross_entropy";

    kernel CrossEntropyBackward {
        logits: In<Void>, dtype: i32, targets: In<i32>, rows: u64, columns: u64, first_column: u64, total: u64,
        has_ignore: i32, ignore: i32, row_max: In<f32>, row_sum: In<f32>, count: In<i32>, normalizer: f32,
        loss_scale: f32, device_scale: In<f32>, span: u64, dx: Out<Void>, fault: Out<i64>, }
    CROSS_ENTROPY_BACKWARD = CrossEntropy "cross_entropy_backward";

    kernel Dropout {
        x: In<Void>, y: Out<Void>, n: u64, dtype: i32, key: In<DropoutKey>, first: u64, threshold: u32,
        factor: f32, }
    DROPOUT = Dropout "dropout";

    kernel DropoutAdd {
        residual: In<Void>, x: In<Void>, y: Out<Void>, n: u64, entry: u64, residual_type: i32, x_type: i32,
        y_type: i32, hidden_key: In<DropoutKey>, hidden_first: u64, hidden_threshold: u32, hidden_factor: f32,
        path_key: In<DropoutKey>, path_first: u64, path_threshold: u32, path_factor: f32, }
    DROPOUT_ADD = Dropout "dropout_add";

    kernel DropoutAdvance {
        state: Out<u64>, key: Out<DropoutKey>, }
    DROPOUT_ADVANCE = Dropout "dropout_advance";

    kernel Elementwise {
        a: In<Void>, b: In<Void>, y: Out<Void>, n: u64, a_type: i32, b_type: i32, }
    ELEMENTWISE_ADD = Elementwise "elementwise_add",
    ELEMENTWISE_MUL = Elementwise "elementwise_mul";

    kernel ElementwiseBias {
        x: In<Void>, bias: In<Void>, y: Out<Void>, n: u64, cols: u64, x_type: i32, bias_type: i32, }
    ELEMENTWISE_BIAS = Elementwise "elementwise_bias";

    kernel ElementwiseScale {
        x: In<Void>, y: Out<Void>, n: u64, dtype: i32, factor: f32, }
    ELEMENTWISE_SCALE = Elementwise "elementwise_scale";

    kernel ElementwiseScaleInPlace {
        x: Out<Void>, n: u64, dtype: i32, factor: f32, norm: In<f32>, }
    ELEMENTWISE_SCALE_IN_PLACE = Elementwise "elementwise_scale_in_place";

    kernel Embedding {
        ids: In<i32>, table: In<Void>, y: Out<Void>, n: u64, first: u64, limit: u64, total: u64, width: u64,
        unit: i32, fault: Out<i64>, }
    EMBEDDING = Embedding "embedding";

    kernel EmbeddingBackwardCount {
        ids: In<i32>, entries: In<u64>, n: u64, first_row: u32, limit: u32, total: u32, shift: i32,
        counts: Out<u32>, fault: Out<i64>, }
    EMBEDDING_BACKWARD_COUNT = Embedding "embedding_backward_count";

    kernel EmbeddingBackwardScan {
        counts: Out<u32>, totals: Out<u32>, blocks: u32, }
    EMBEDDING_BACKWARD_SCAN = Embedding "embedding_backward_scan";

    kernel EmbeddingBackwardPlace {
        ids: In<i32>, entries: In<u64>, sorted: Out<u64>, n: u64, first_row: u32, limit: u32, shift: i32,
        counts: In<u32>, totals: In<u32>, }
    EMBEDDING_BACKWARD_PLACE = Embedding "embedding_backward_place";

    kernel EmbeddingBackwardAdd {
        dy: In<Void>, sorted: In<u64>, dtable: Out<f32>, n: u64, hidden: u64, limit: u32, dtype: i32,
        fault: In<i64>, }
    EMBEDDING_BACKWARD_ADD = Embedding "embedding_backward_add";

    kernel GemmPad {
        x: In<u8>, rows: u64, cols: u64, y: Out<u8>, padded_rows: u64, padded_cols: u64, }
    GEMM_PAD = Gemm "gemm_pad";

    kernel GemmFinish {
        x: In<f32>, ld: u64, addend: In<Void>, bias: In<Void>, y: Out<Void>, n: u64, cols: u64, addend_type: i32,
        bias_type: i32, y_type: i32, add: i32, }
    GEMM_FINISH = Gemm "gemm_finish";

    kernel GemmFactors {
        scale_inv: In<Void>, blocks: i32, rows: u64, depth: u64, padded_rows: u64, layout: i32, y: Out<Void>,
        n: u64, }
    GEMM_FACTORS = Gemm "gemm_factors";

    kernel GemmFinishRows {
        x: In<f32>, ld: u64, a: In<f32>, one_a: i32, b: In<f32>, one_b: i32, addend: In<Void>, bias: In<Void>,
        y: Out<Void>, n: u64, cols: u64, addend_type: i32, bias_type: i32, y_type: i32, add: i32, }
    GEMM_FINISH_ROWS = Gemm "gemm_finish_rows";

    kernel GradNormSquares {
        table: In<Entry>, tensors: u64, tiles: u64, partial: Out<f32>, }
    GRAD_NORM_SQUARES = GradNorm "grad_norm_squares";

    kernel GradNorm {
        partial: In<f32>, blocks: u64, out: Out<f32>, }
    GRAD_NORM = GradNorm "grad_norm";

    kernel KvCacheAppend {
        cache: Out<Void>, values: In<Void>, starts: In<i32>, lengths: In<i32>, batch: u64, capacity: u64,
        seq: u64, width: u64, pitch: u64, unit: i32, fault: Out<i64>, }
    KV_CACHE_APPEND = KvCache "kv_cache_append";

    kernel LossScaleMultiply {
        x: In<Void>, y: Out<Void>, n: u64, dtype: i32, scale: In<f32>, inverse: i32, }
    LOSS_SCALE_MULTIPLY = LossScale "loss_scale_multiply";

    kernel LossScaleCheck {
        norm: In<f32>, overflow: Out<f32>, }
    LOSS_SCALE_CHECK = LossScale "loss_scale_check";

    kernel LossScaleCheckAmaxes {
        row: In<f32>, n: u64, overflow: Out<f32>, }
    LOSS_SCALE_CHECK_AMAXES = LossScale "loss_scale_check_amaxes";

    kernel LossScaleUpdate {
        scale: Out<f32>, overflow: Out<f32>, counts: Out<u64>, growth_factor: f32, backoff_factor: f32,
        growth_interval: u64, is_dynamic: i32, }
    LOSS_SCALE_UPDATE = LossScale "loss_scale_update";

    kernel LossScaleFactors {
        groups: In<In<f32>>, count: u64, scale: In<f32>, overflow: Out<f32>, norm: In<f32>, updates: Out<u64>,
        counts_skipped: i32, factors: Out<f32>, verdict: Out<f32>, }
    LOSS_SCALE_FACTORS = LossScale "loss_scale_factors";

    kernel NormBlocks {
        x: In<Void>, dtype: i32, gamma: In<Void>, gamma_dtype: i32, beta: In<Void>, beta_dtype: i32,
        around_one: i32, rows: u64, cols: u64, means: In<f32>, rsigmas: In<f32>, block: BlockParams, }
    NORM_BLOCKS = Norm "norm_blocks";

    kernel Norm {
        x: In<Void>, dtype: i32, gamma: In<Void>, gamma_dtype: i32, beta: In<Void>, beta_dtype: i32,
        centered: i32, around_one: i32, eps: f32, rows: u64, cols: u64, means: Out<f32>, rsigmas: Out<f32>,
        y: Out<Void>, codes: Out<u8>, format: i32, scale: In<f32>, scale_inv: Out<f32>, amax: Out<i32>,
        counters: Out<u64>, unset: In<f32>, }
    NORM_HELD_WARP = Norm "norm_held_warp",
    NORM_HELD_BLOCK = Norm "norm_held_block",
    NORM_READ_WARP = Norm "norm_read_warp",
    NORM_READ_BLOCK = Norm "norm_read_block",
    NORM_ROWS_LAYER_F32_CODES = NormRows "norm_rows_layer_f32_codes",
    NORM_ROWS_LAYER_F32_VALUES = NormRows "norm_rows_layer_f32_values",
    NORM_ROWS_LAYER_BF16_CODES = NormRows "norm_rows_layer_bf16_codes",
    NORM_ROWS_LAYER_BF16_VALUES = NormRows "norm_rows_layer_bf16_values",
    NORM_ROWS_RMS_F32_CODES = NormRows "norm_rows_rms_f32_codes",
    NORM_ROWS_RMS_F32_VALUES = NormRows "norm_rows_rms_f32_values",
    NORM_ROWS_RMS_BF16_CODES = NormRows "norm_rows_rms_bf16_codes",
    NORM_ROWS_RMS_BF16_VALUES = NormRows "norm_rows_rms_bf16_values";

    kernel NormBackwardHeld {
        backward: BackwardParams, partial_gamma: Out<f32>, partial_beta: Out<f32>, }
    NORM_BACKWARD_HELD = NormBackward "norm_backward_held",
    NORM_BACKWARD_HELD_LAYER = NormBackward "norm_backward_held_layer",
    NORM_BACKWARD_HELD_LAYER_ADD = NormBackward "norm_backward_held_layer_add",
    NORM_BACKWARD_HELD_RMS = NormBackward "norm_backward_held_rms",
    NORM_BACKWARD_HELD_RMS_ADD = NormBackward "norm_backward_held_rms_add";

    kernel NormBackward {
        backward: BackwardParams, }
    NORM_BACKWARD_WARP = NormBackward "norm_backward_warp",
    NORM_BACKWARD_BLOCK = NormBackward "norm_backward_block";

    kernel NormBackwardColumns {
        dy: In<Void>, dy_dtype: i32, x: In<Void>, dtype: i32, means: In<f32>, rsigmas: In<f32>, rows: u64,
        cols: u64, parts: u64, part_rows: u64, partial_gamma: Out<f32>, partial_beta: Out<f32>, }
    NORM_BACKWARD_COLUMNS = NormBackward "norm_backward_columns";

    kernel NormBackwardSums {
        partial_gamma: In<f32>, partial_beta: In<f32>, parts: u64, cols: u64, dgamma: Out<f32>, dbeta: Out<f32>,
        add_gamma: i32, add_beta: i32, }
    NORM_BACKWARD_SUMS = NormBackward "norm_backward_sums";

    kernel Nvfp4Amax {
        x: In<Void>, dtype: i32, rows: u64, cols: u64, hadamard: i32, amax: Out<i32>, }
    NVFP4_AMAX = Nvfp4 "nvfp4_amax";

    kernel QuantizeNvfp4 {
        x: In<Void>, dtype: i32, rows: u64, cols: u64, amax: In<f32>, tiles: i32, hadamard: i32, codes: Out<u8>,
        scales: Out<u8>, tensor: Out<f32>, columnwise: Out<u8>, columnwise_scales: Out<u8>,
        columnwise_tensor: Out<f32>, key: In<u64>, first: u64, step: u64, columnwise_first: u64,
        columnwise_step: u64, counters: Out<u64>, partial_sums: Out<f32>, }
    QUANTIZE_NVFP4 = Nvfp4 "quantize_nvfp4";

    kernel DequantizeNvfp4 {
        codes: In<u8>, scales: In<u8>, tensor: In<f32>, tiles: i32, rows: u64, cols: u64, out: Out<Void>,
        dtype: i32, }
    DEQUANTIZE_NVFP4 = Nvfp4 "dequantize_nvfp4";

    kernel Nvfp4ScaledCodes {
        codes: In<u8>, scales: In<u8>, tiles: i32, rows: u64, cols: u64, width: u64, out: Out<Void>, }
    NVFP4_SCALED_CODES = Nvfp4 "nvfp4_scaled_codes";

    kernel Nvfp4Transpose {
        codes: In<u8>, rows: u64, cols: u64, out: Out<u8>, }
    NVFP4_TRANSPOSE = Nvfp4 "nvfp4_transpose";

    kernel Nvfp4Alpha {
        a: In<f32>, b: In<f32>, out: Out<f32>, }
    NVFP4_ALPHA = Nvfp4 "nvfp4_alpha";

    kernel Nvfp4Factors {
        scales: In<u8>, tiles: i32, rows: u64, depth: u64, y: Out<u8>, n: u64, }
    NVFP4_FACTORS = Nvfp4 "nvfp4_factors";

    kernel Optimizer {
        records: In<OptimizerRecord>, first_blocks: In<u64>, tensors: i32, factors: In<f32>, numbers: In<f32>,
        norm: In<f32>, skipped: Out<u64>, }
    OPTIMIZER = Optimizer "optimizer";

    kernel Permute {
        x: In<Void>, y: Out<Void>, n: u64, d1: u64, d2: u64, d3: u64, d4: u64, d5: u64, s0: u64, s1: u64, s2: u64,
        s3: u64, s4: u64, s5: u64, unit: i32, }
    PERMUTE = Permute "permute";

    kernel Quantize {
        x: In<Void>, n: u64, codes: Out<u8>, format: i32, scale: In<f32>, scale_inv: Out<f32>, amax: Out<i32>,
        counters: Out<u64>, }
    QUANTIZE_F32 = Quantize "quantize_f32",
    QUANTIZE_BF16 = Quantize "quantize_bf16",
    QUANTIZE_F16 = Quantize "quantize_f16";

    kernel QuantizeScale {
        cell: Out<f32>, keep: i32, amax: In<f32>, kind: i32, fp8_max: f32, scaled_max: f32, margin: i32,
        epsilon: f32, scale: Out<f32>, }
    QUANTIZE_SCALE = Quantize "quantize_scale";

    kernel Dequantize {
        codes: In<u8>, n: u64, format: i32, scale_inv: In<f32>, out: Out<Void>, dtype: i32, }
    DEQUANTIZE = Quantize "dequantize";

    kernel QuantizeBlocks {
        x: In<Void>, dtype: i32, rows: u64, cols: u64, block: BlockParams, }
    QUANTIZE_BLOCKS = QuantizeBlocks "quantize_blocks";

    kernel DequantizeBlocks {
        codes: In<u8>, n: u64, cols: u64, format: i32, blocks: i32, scale_inv: In<Void>, out: Out<Void>,
        dtype: i32, }
    DEQUANTIZE_BLOCKS = QuantizeBlocks "dequantize_blocks";

    kernel QuantizeBlocksBf16 {
        x: In<u16>, rows: u32, cols: u32, block: BlockParams, }
    QUANTIZE_BLOCKS_BF16_1X128_E4M3 = QuantizeBlocksBf16 "quantize_blocks_bf16_1x128_e4m3",
    QUANTIZE_BLOCKS_BF16_1X128_E5M2 = QuantizeBlocksBf16 "quantize_blocks_bf16_1x128_e5m2",
    QUANTIZE_BLOCKS_BF16_128X128_E4M3 = QuantizeBlocksBf16 "quantize_blocks_bf16_128x128_e4m3",
    QUANTIZE_BLOCKS_BF16_128X128_E5M2 = QuantizeBlocksBf16 "quantize_blocks_bf16_128x128_e5m2",
    QUANTIZE_BLOCKS_BF16_MX_E4M3 = QuantizeMxBf16 "quantize_blocks_bf16_mx_e4m3",
    QUANTIZE_BLOCKS_BF16_MX_E5M2 = QuantizeMxBf16 "quantize_blocks_bf16_mx_e5m2",
    QUANTIZE_BLOCKS_BF16_ROWS_MEASURE = QuantizeRowsBf16 "quantize_blocks_bf16_rows_measure",
    QUANTIZE_BLOCKS_BF16_ROWS_E4M3 = QuantizeRowsBf16 "quantize_blocks_bf16_rows_e4m3",
    QUANTIZE_BLOCKS_BF16_ROWS_E5M2 = QuantizeRowsBf16 "quantize_blocks_bf16_rows_e5m2";

    kernel QuantizeMany {
        table: In<u64>, entries: i32, tiles: u64, run: u64, }
    QUANTIZE_MANY = QuantizeMany "quantize_many";

    kernel QuantizeManyBf16 {
        table: In<u64>, entries: i32, tiles: u32, run: u32, }
    QUANTIZE_MANY_BF16 = QuantizeManyBf16 "quantize_many_bf16";

    kernel QuantizeTiles {
        x: In<Void>, dtype: i32, rows: u64, cols: u64, run: u64, codes: Out<u8>, columnwise: Out<u8>, format: i32,
        scale: In<f32>, scale_inv: Out<f32>, amax: Out<i32>, counters: Out<u64>, partial_sums: Out<f32>, }
    QUANTIZE_TILES = QuantizeTiles "quantize_tiles";

    kernel QuantizeTilesBf16 {
        x: In<u16>, rows: u32, cols: u32, run: u32, codes: Out<u8>, columnwise: Out<u8>, scale: In<f32>,
        scale_inv: Out<f32>, amax: Out<i32>, partial_sums: Out<f32>, }
    QUANTIZE_TILES_BF16_E4M3 = QuantizeTilesBf16 "quantize_tiles_bf16_e4m3",
    QUANTIZE_TILES_BF16_E5M2 = QuantizeTilesBf16 "quantize_tiles_bf16_e5m2",
    QUANTIZE_TILES_BF16_E4M3_SUMS = QuantizeTilesBf16 "quantize_tiles_bf16_e4m3_sums",
    QUANTIZE_TILES_BF16_E5M2_SUMS = QuantizeTilesBf16 "quantize_tiles_bf16_e5m2_sums";

    kernel ReduceSum {
        x: In<Void>, dtype: i32, n: u64, partial: Out<f32>, out: Out<f32>, divisor: f32, }
    REDUCE_SUM = Reduce "reduce_sum";

    kernel ReduceSumFinish {
        partial: In<f32>, blocks: u64, out: Out<f32>, divisor: f32, }
    REDUCE_SUM_FINISH = Reduce "reduce_sum_finish";

    kernel ReduceMax {
        x: In<Void>, dtype: i32, n: u64, out: Out<f32>, }
    REDUCE_MAX = Reduce "reduce_max";

    kernel ReduceColumns {
        x: In<Void>, dtype: i32, rows: u64, cols: u64, partial: Out<f32>, }
    REDUCE_COLUMNS = Reduce "reduce_columns";

    kernel ReduceColumnsFinish {
        partial: In<f32>, pieces: u64, cols: u64, lanes: i32, out: Out<f32>, add: i32, }
    REDUCE_COLUMNS_FINISH = Reduce "reduce_columns_finish";

    kernel Rope {
        x: In<Void>, y: Out<Void>, cos: In<f32>, sin: In<f32>, positions: In<i32>, rows: u64, sequence: u64,
        heads: u64, half: u64, pitch: u64, start: u64, limit: u64, dtype: i32, direction: f32, fault: Out<i64>, }
    ROPE = Rope "rope";

    kernel SampleLargest {
        logits: In<Void>, dtype: i32, rows: u64, vocabulary: u64, out: Out<i32>, }
    SAMPLE_LARGEST = Sample "sample_largest";

    kernel Sample {
        logits: In<Void>, dtype: i32, rows: u64, vocabulary: u64, factor: f32, top_k: u64, has_top_p: i32,
        top_p: u64, key: In<DropoutKey>, first: u64, out: Out<i32>, }
    SAMPLE = Sample "sample";

    kernel Softmax {
        x: In<Void>, y: Out<Void>, dtype: i32, rows: u64, keys: u32, queries: u64, scale: f32, causal: i32,
        mask: MaskParameters, }
    SOFTMAX_WARP = Softmax "softmax_warp",
    SOFTMAX_BLOCK = Softmax "softmax_block",
    SOFTMAX_BLOCK_RAGGED = Softmax "softmax_block_ragged";

    kernel SoftmaxBackward {
        dy: In<Void>, y: In<Void>, dx: Out<Void>, dy_dtype: i32, dtype: i32, rows: u64, keys: u32, scale: f32, }
    SOFTMAX_BACKWARD_WARP = Softmax "softmax_backward_warp",
    SOFTMAX_BACKWARD_BLOCK = Softmax "softmax_backward_block";

    kernel SplitCopy {
        x: In<Void>, y: Out<Void>, rows: u64, width: u64, x_pitch: u64, x_offset: u64, y_pitch: u64,
        y_offset: u64, unit: i32, }
    SPLIT_COPY = Split "split_copy";

    kernel TransposeU8 {
        x: In<u8>, rows: u64, cols: u64, out: Out<u8>, }
    TRANSPOSE_U8 = Transpose "transpose_u8";

    kernel TransposeU16 {
        x: In<u16>, rows: u64, cols: u64, out: Out<u16>, }
    TRANSPOSE_U16 = Transpose "transpose_u16";

    kernel TransposeU32 {
        x: In<u32>, rows: u64, cols: u64, out: Out<u32>, }
    TRANSPOSE_U32 = Transpose "transpose_u32";

    kernel UpdateScales {
        history: Out<f32>, scale: Out<f32>, cast_scale: Out<f32>, skipped: Out<u64>, clock: Out<u64>,
        last_updates: Out<u64>, slots: u64, rows: u64, rest: f32, recompute: i32, counted: u64, decay: f32,
        record_non_finite: i32, kind: i32, largest: f32, scaled_max: f32, margin: i32, epsilon: f32, }
    UPDATE_SCALES = UpdateScales "update_scales";
}
