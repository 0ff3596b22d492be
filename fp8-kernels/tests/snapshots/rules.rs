//! Instructions that a kernel's PTX may not contain, so that its results are the same bits everywhere.
//!
//! `add.f32` without a rounding may be fused with a multiplication by the assembler. `.approx` results differ between
//! architectures; one of them, an approximate reciprocal, may start Newton's steps in a file that is listed for it, since
//! these end at the same bits from every start (`newton_steps_end_at_the_quotient` in `src/math.rs`). `div.full` is off by
//! up to two units and names no rounding either. `.ftz` drops subnormals. Atomic float sums depend on the order in which
//! threads come, and products of matrix units on the order in which the hardware adds. Doubles and local memory are slow and
//! never meant.

/// Kernel files with an exception from a rule, and why: most are compared within a tolerance.
pub(crate) const EXCEPTIONS: [(&str, &str, &str); 26] = [
    ("activation", RECIPROCAL, STARTS_NEWTON),
    ("activation_blocks", RECIPROCAL, STARTS_NEWTON),
    ("activation_geglu", RECIPROCAL, STARTS_NEWTON),
    ("activation_gelu", RECIPROCAL, STARTS_NEWTON),
    ("activation_swiglu", RECIPROCAL, STARTS_NEWTON),
    ("attention", MATRIX_UNIT, "compared within a tolerance: no order of sums is promised"),
    ("attention", APPROXIMATION, "compared within a tolerance: ex2 of a score is within 2 ulp"),
    ("attention_backward_kv", MATRIX_UNIT, "compared within a tolerance: no order of sums is promised"),
    ("attention_backward_kv", APPROXIMATION, "compared within a tolerance: ex2 of a score is within 2 ulp"),
    ("attention_backward_q", MATRIX_UNIT, "compared within a tolerance: no order of sums is promised"),
    ("attention_backward_q", APPROXIMATION, "compared within a tolerance: ex2 of a score is within 2 ulp"),
    ("attention_fp8", MATRIX_UNIT, "compared within a tolerance: no order of sums is promised"),
    ("attention_fp8", APPROXIMATION, "compared within a tolerance: ex2 of a score is within 2 ulp"),
    ("attention_fp8_backward_kv", MATRIX_UNIT, "compared within a tolerance: no order of sums is promised"),
    (
        "attention_fp8_backward_kv",
        APPROXIMATION,
        "compared within a tolerance: ex2 of a score is within 2 ulp",
    ),
    ("attention_fp8_backward_q", MATRIX_UNIT, "compared within a tolerance: no order of sums is promised"),
    (
        "attention_fp8_backward_q",
        APPROXIMATION,
        "compared within a tolerance: ex2 of a score is within 2 ulp",
    ),
    (
        "cross_entropy",
        APPROXIMATION,
        "compared within a tolerance: ex2 of a logit's distance is within 2 ulp",
    ),
    ("softmax", APPROXIMATION, "compared within a tolerance: ex2 of a score's distance is within 2 ulp"),
    ("attention_dropout", MATRIX_UNIT, "compared within a tolerance: no order of sums is promised"),
    ("attention_dropout", APPROXIMATION, "compared within a tolerance: ex2 of a score is within 2 ulp"),
    (
        "attention_dropout_backward_kv",
        MATRIX_UNIT,
        "compared within a tolerance: no order of sums is promised",
    ),
    (
        "attention_dropout_backward_kv",
        APPROXIMATION,
        "compared within a tolerance: ex2 of a score is within 2 ulp",
    ),
    (
        "attention_dropout_backward_q",
        MATRIX_UNIT,
        "compared within a tolerance: no order of sums is promised",
    ),
    (
        "attention_dropout_backward_q",
        APPROXIMATION,
        "compared within a tolerance: ex2 of a score is within 2 ulp",
    ),
    (
        "attention_rows",
        APPROXIMATION,
        "log-sum-exp is compared within a tolerance: lg2 of a sum is within 2^-22 of it",
    ),
];

const MATRIX_UNIT: &str = "a product on matrix units adds in the hardware's own order";
const APPROXIMATION: &str = "an approximation differs between architectures";
const RECIPROCAL: &str = "an approximate reciprocal, which may only start Newton's steps";
const STARTS_NEWTON: &str =
    "the sigmoid's division: two steps, the first rounded up, end at the same bits from every start";

/// All breaches of the kernel file `name` (without its ending), as `line: instruction: reason`.
pub(crate) fn breaches(name: &str, ptx: &str) -> Vec<String> {
    let allowed = |reason: &str| EXCEPTIONS.iter().any(|(file, rule, _)| *file == name && *rule == reason);
    let mut found = unfinished(ptx);
    for (number, line) in (1..).zip(ptx.lines()) {
        let code = line.split("//").next().unwrap_or_default();
        for word in code.split(|c: char| c.is_whitespace() || ";{}(),".contains(c)) {
            if let Some(reason) = breach(word).filter(|reason| !allowed(reason)) {
                found.push(format!("{number}: {}: {reason}", code.trim()));
            }
        }
    }
    found
}

/// Approximate reciprocals that are not made exact: the next step has to round up, and nothing else may read them.
fn unfinished(ptx: &str) -> Vec<String> {
    let mut found = Vec::new();
    for kernel in ptx.split(".entry ") {
        let lines = || kernel.lines().map(|line| line.trim().trim_end_matches(';'));
        for line in lines() {
            let Some((y, _)) = line.strip_prefix("rcp.approx.ftz.f32 ").and_then(|rest| rest.split_once(','))
            else {
                continue;
            };
            let has = |line: &str| line.split([' ', '\t', ',', '[', ']', '{', '}']).any(|word| word == y);
            let mut readers = lines().filter(|other| has(other) && *other != line);
            let rounds_up = |line: &str| {
                line.strip_prefix("fma.rp.f32 ").is_some_and(|rest| {
                    let operands: Vec<&str> = rest.split(", ").collect();
                    matches!(operands[..], [to, a, _, b] if to == y && a == y && b == y)
                })
            };
            let is_used_well = readers.clone().any(rounds_up) && readers.all(|line| line.starts_with("fma."));
            if !is_used_well {
                found
                    .push(format!("{line}: an approximate reciprocal that Newton's steps do not make exact"));
            }
        }
    }
    found
}

fn breach(word: &str) -> Option<&'static str> {
    let mut parts = word.split('.');
    let opcode = parts.next().unwrap_or_default();
    let modifiers: Vec<&str> = parts.collect();
    let has = |modifier: &str| modifiers.contains(&modifier);
    let rounds = ["rn", "rz", "rm", "rp"].iter().any(|rounding| has(rounding));
    let has_float = ["f16", "f16x2", "bf16", "bf16x2", "tf32", "f32"].iter().any(|kind| has(kind));
    let is_float = modifiers.last().is_some_and(|kind| kind.starts_with('f') || kind.starts_with("bf"));
    if word == "rcp.approx.ftz.f32" {
        Some(RECIPROCAL)
    } else if has("approx") {
        Some(APPROXIMATION)
    } else if has("ftz") {
        Some("subnormals are dropped")
    } else if has("f64") {
        Some("double precision")
    } else if has("local") {
        Some("local memory")
    } else if opcode == "call" || has("func") {
        Some("a function that was not inlined")
    } else if ["atom", "red"].contains(&opcode) && has("add") && has_float {
        Some("an atomic float sum depends on the order of the threads")
    } else if ["mma", "wmma", "wgmma"].contains(&opcode) && has_float {
        Some(MATRIX_UNIT)
    } else if ["add", "sub", "mul", "mad", "fma", "div", "rcp", "sqrt"].contains(&opcode)
        && is_float
        && !rounds
    {
        Some("no rounding is named: the assembler may fuse it")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::breaches;

    #[test]
    fn each_rule_finds_its_breach_and_nothing_else() {
        let clean = "\tadd.rn.f32 %f1, %f2, %f3; // add.f32\n\tmul.wide.u32 %rd1, %r1, 4;\n\t.loc 1 4 5\n\t@%p1 bra $L;\n\
                     \tdiv.rn.f32 %f1, %f2, %f3; add.s64 %rd1, %rd1, 4; ld.global.f32 %f1, [%rd1+4]; fma.rm.f32 a, b, c, d;\n\
                     \tmax.f32 %f1, %f2, %f3; cvt.rn.f16x2.e4m3x2 %r1, h; neg.f32 %f1, %f1; atom.global.add.u32 %r1, [%rd1], 1;\n\
                     \tred.global.add.u64 [%rd1], 1; atom.global.max.s32 %r1, [%rd1], 1; wgmma.fence.sync.aligned;\n\
                     \tmma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r1}, {%r2}, {%r3}, {%r4};\n";
        assert_eq!(breaches("cast", clean), [""; 0]);
        for bad in [
            "add.f32 %f1, %f2, %f3;",
            "{mul.f32 %f1, %f2, %f3;}",
            "mul.f32x2 %rd1, %rd2, %rd3;",
            "ex2.approx.ftz.f32 %f1, %f2;",
            "add.rn.ftz.f32 %f1, %f2, %f3;",
            "cvt.f64.f32 %fd1, %f1;",
            "st.local.u32 [%rd1], %r1;",
            "call.uni (retval0), f, (param0);",
            ".visible .func f()",
            "sqrt.approx.f32 %f1, %f2;",
            "rsqrt.approx.ftz.f32 %f1, %f2;",
            "rcp.approx.f32 %f1, %f2;",
            "rcp.approx.f64 %fd1, %fd2;",
            "div.approx.f32 %f1, %f2, %f3;",
            "div.full.f32 %f1, %f2, %f3;",
            "lg2.approx.f32 %f1, %f2;",
            "sin.approx.f32 %f1, %f2;",
            "tanh.approx.f32 %f1, %f2;",
            "tanh.approx.bf16x2 %r1, %r2;",
            "ex2.approx.f16x2 %r1, %r2;",
            "atom.global.add.f32 %f1, [%rd1], %f2;",
            "atom.add.noftz.f16x2 %r1, [%rd1], %r2;",
            "red.global.add.f32 [%rd1], %f1;",
            "red.global.gpu.relaxed.add.noftz.bf16 [%rd1], %rs1;",
            "red.global.add.v4.f32 [%rd1], {%f1, %f2, %f3, %f4};",
            "atom.shared.add.f64 %fd1, [%rd1], %fd2;",
            "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%f1}, %rd1, %rd2, 1, 1, 1;",
            "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r1}, {%r2}, {%r3}, {%r4};",
        ] {
            assert_eq!(breaches("cast", &format!("ret;\n\t{bad}\n")).len(), 1, "{bad}");
        }
    }

    #[test]
    fn an_exception_is_for_its_file_and_its_rule_alone() {
        let product = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f2};";
        assert_eq!(breaches("attention", product), [""; 0]);
        assert_eq!(breaches("attention_plain", product).len(), 1);
        let power = "ex2.approx.ftz.f32 %f1, %f2;";
        assert_eq!(breaches("attention", power), [""; 0]);
        assert_eq!(breaches("attention_plain", power).len(), 1);
        assert_eq!(breaches("attention", "add.rn.ftz.f32 %f1, %f2, %f3;").len(), 1);
    }

    #[test]
    fn a_reciprocal_is_for_newtons_steps() {
        let start = "rcp.approx.ftz.f32 %f1, %f2;\n\tfma.rn.f32 \t%f3, %f4, %f1, %f5;\n";
        let steps = "\tfma.rp.f32 %f1, %f1, %f3, %f1;\n\tfma.rn.f32 \t%f6, %f1, %f3, %f1;\n";
        let good = format!("{start}{steps}");
        assert_eq!(breaches("activation", &good), [""; 0]);
        assert_eq!(breaches("attention", &good).len(), 1);
        assert_eq!(breaches("cast", &good).len(), 1);
        // The registers of another kernel are others.
        let two = format!(".entry a() {{\n{start}}}\n.entry b() {{\n{start}{steps}}}\n");
        for bad in [
            start.to_owned(),
            two,
            format!("{good}mul.rn.f32 %f7, %f1, %f2;\n"),
            good.replace("fma.rp", "fma.rn"),
            good.replace("ftz.", ""),
            "rsqrt.approx.ftz.f32 %f1, %f2;\n".to_owned(),
        ] {
            assert_eq!(breaches("activation", &bad).len(), 1, "{bad}");
        }
    }
}
