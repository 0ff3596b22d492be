//! `quantize` with scales of 1 × 128 and 128 × 128 blocks for bf16 matrices that consist of whole tiles, without counters: the kernels for those.

super::whole_blocks::cases_of![B1x128, B128x128];
