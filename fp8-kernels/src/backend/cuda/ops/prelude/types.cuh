// Put before every kernel file: element types, conversions, the project's exp and tanh, reductions.
//
// Self-contained, since NVRTC brings no headers. Compiled with -fmad=false: each `a * b + c` here rounds twice, each
// fmaf once, as the same expressions do in Rust. Expressions that decide codes are spelled as in src/math.rs and
// src/backend/cpu, operation by operation.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Element types as the host numbers them.
enum { F32 = 0, BF16 = 1, F16 = 2 };
// FP8 formats as the host numbers them.
enum { E4M3 = 0, E5M2 = 1 };

#define FULL_WARP 0xffffffffu
#define WARP 32
#define INFINITY_F __int_as_float(0x7f800000)
#define NAN_F __int_as_float(0x7fc00000)
// A staging cell at rest and a scale cell before its slot's first amax: -1, below the bits of every amax.
#define REST_BITS ((int)0xbf800000)

