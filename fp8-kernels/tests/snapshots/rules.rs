//! What a kernel's PTX may not contain, so that its results are the same bits everywhere.
//!
//! `add.f32` without a rounding may be fused with a multiplication by the assembler; `.approx` results differ between
//! architectures; `.ftz` drops subnormals; doubles and local memory are slow and never meant.

/// All breaches, as `line: instruction: reason`.
pub(crate) fn breaches(ptx: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (number, line) in (1..).zip(ptx.lines()) {
        let code = line.split("//").next().unwrap_or_default();
        for word in code.split(|c: char| c.is_whitespace() || ";{}(),".contains(c)) {
            if let Some(reason) = breach(word) {
                found.push(format!("{number}: {}: {reason}", code.trim()));
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
    let is_float = modifiers.last().is_some_and(|kind| kind.starts_with('f') || kind.starts_with("bf"));
    if has("approx") {
        Some("an approximation differs between architectures")
    } else if has("ftz") {
        Some("subnormals are dropped")
    } else if has("f64") {
        Some("double precision")
    } else if has("local") {
        Some("local memory")
    } else if opcode == "call" || has("func") {
        Some("a function that was not inlined")
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
                     \tmax.f32 %f1, %f2, %f3; cvt.rn.f16x2.e4m3x2 %r1, h; neg.f32 %f1, %f1; atom.global.add.u32 %r1, [%rd1], 1;\n";
        assert_eq!(breaches(clean), [""; 0]);
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
        ] {
            assert_eq!(breaches(&format!("ret;\n\t{bad}\n")).len(), 1, "{bad}");
        }
    }
}
