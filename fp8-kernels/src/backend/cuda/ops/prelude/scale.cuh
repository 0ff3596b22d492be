// ---- from an amax to a scale: src/scale_rule.rs ----

enum { RULE_EXACT = 0, RULE_POWER_OF_TWO = 1, RULE_CURRENT = 2, RULE_CURRENT_POWER_OF_TWO = 3 };

// `scaled_max` is fp8_max · 2^-margin, rounded by the host.
struct Rule {
    int kind;
    float fp8_max;
    float scaled_max;
    int margin;
    float epsilon;
};

__device__ __forceinline__ float finite_scale(float scale) {
    const float smallest = __int_as_float(0x00800000), largest = __int_as_float(0x7f7fffff);
    scale = scale < smallest ? smallest : scale;
    return scale > largest ? largest : scale;
}

__device__ __forceinline__ int usable_amax(float amax) { return amax > 0.0f && amax < INFINITY_F; }

// floor(log2(v)) for finite v > 0, subnormals included.
__device__ __forceinline__ int floor_log2(float v) {
    int bits = __float_as_int(v);
    if (bits >= 0x00800000) return (bits >> 23) - 127;
    return -118 - __clz(bits);
}

__device__ __forceinline__ float scale_of(const Rule& rule, float amax, float old) {
    if (rule.kind >= RULE_CURRENT) {
        amax = amax < rule.epsilon ? rule.epsilon : amax;
        if (!usable_amax(amax)) return 1.0f;
        float scale = finite_scale(rule.fp8_max / amax);
        return rule.kind == RULE_CURRENT ? scale : __int_as_float(__float_as_int(scale) & 0x7f800000);
    }
    if (!usable_amax(amax)) return old;
    if (rule.kind == RULE_EXACT) return finite_scale(rule.scaled_max / amax);
    float quotient = rule.fp8_max / amax;
    int e = quotient < INFINITY_F ? floor_log2(quotient) : 128;
    // Saturating, as the host's: margins reach beyond what an int holds.
    i64 wide = (i64)e - (i64)rule.margin;
    int exponent = wide < -126 ? -126 : wide > 127 ? 127 : (int)wide;
    return power_of_two(exponent);
}

