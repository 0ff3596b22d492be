//! `quantize` with scales of MX blocks for bf16 matrices that consist of whole tiles, without counters: the kernels for those.

super::whole_blocks::cases_of![Mx32];
