//! Runs one thread from its first instruction to its last.

use super::execute::{Next, step};
use super::thread::Thread;
use crate::workspace::Result;

/// Runs a thread to its end.
///
/// # Errors
/// An unknown instruction, an access outside of all buffers, a listing that ends early, more than `limit` instructions.
pub(super) fn run(thread: &mut Thread<'_>, limit: u64) -> Result {
    let listing = thread.listing;
    let kernel = &listing.kernel;
    let mut at = 0;
    for _ in 0..limit {
        let Some(instruction) = listing.instructions.get(at) else {
            return Err(format!("sass: {kernel}: the listing ends before the thread does").into());
        };
        at += 1;
        thread.count(instruction);
        if instruction.guard.is_some_and(|guard| !thread.is(guard)) {
            continue;
        }
        let next = step(thread, instruction).map_err(|problem| {
            format!("sass: {kernel}: {problem}: /*{:04x}*/ {}", instruction.address, instruction.text)
        })?;
        match next {
            Next::Following => {}
            Next::Jump(target) => at = target,
            Next::Exit => return Ok(()),
        }
    }
    let last = listing.instructions.get(at).map_or("", |instruction| instruction.text.as_str());
    Err(format!("sass: {kernel}: {limit} instructions and no end, near {last}").into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sass::listing::kernels;
    use crate::sass::memory::{Content, Memory};
    use crate::sass::thread::{Place, Tally};

    /// Runs instructions, one a line, with two buffers of ones and the number 3 as parameters.
    fn execute(body: &str) -> Result<(Tally, Memory)> {
        let mut text = "//--- .text.k ---\n".to_owned();
        let mut address = 0;
        for line in body.lines() {
            if line.ends_with(':') {
                text += &format!("{line}\n");
            } else {
                text += &format!("        /*{address:04x}*/  {line} ;\n");
                address += 16;
            }
        }
        let listing = kernels(&text)?.remove("k").ok_or("no kernel")?;
        let mut memory = Memory::default();
        let mut parameters: Vec<u8> = Vec::new();
        for _ in 0..2 {
            parameters.extend(memory.add(Content::Ones).to_le_bytes());
        }
        parameters.extend(3_u32.to_le_bytes());
        let place = Place { grid: 4, threads: 256, block: 2, thread: 37 };
        let mut shared = Vec::new();
        let mut thread = Thread::new(&listing, place, &parameters, &mut memory, &mut shared)?;
        run(&mut thread, 1000)?;
        let tally = thread.tally;
        Ok((tally, memory))
    }

    #[test]
    fn a_loop_runs_as_often_as_its_arguments_say() {
        // Three times: load 16 bytes, add, store; the second buffer is 2^40 behind the first.
        let (tally, memory) = execute(
            "ULDC.64 UR4, c[0x0][0x208]\nLDC.64 R2, c[0x0][0x210]\nLDC.64 R4, c[0x0][0x218]\nMOV R0, RZ\n.L_x_0:\n\
             LDG.E.128 R8, desc[UR4][R2.64]\nLDG.E.128 R12, desc[UR4][R2.64+0x10]\nFADD R8, R8, 1.5\n\
             STG.E.64 desc[UR4][R4.64+0x8], R8\nIADD3 R2, P0, R2, 0x20, RZ\nIMAD.X R3, RZ, RZ, R3, P0\nVIADD R0, R0, 0x1\n\
             ISETP.GE.AND P1, PT, R0, c[0x0][0x220], PT\n@!P1 BRA `(.L_x_0)\nNOP\nEXIT",
        )
        .unwrap();
        assert_eq!(tally.instructions, 4 + 3 * 9 + 1);
        assert_eq!((tally.opcodes["LDG"], tally.opcodes.get("NOP")), (6, None));
        // Both loads of a round are under way before the first is used.
        assert_eq!(tally.in_flight, 32);
        let (first, second) = (1 << 40, 2 << 40);
        assert_eq!((memory.traffic(first).read, memory.traffic(second).written), (96, 24));
        let mut memory = memory;
        assert_eq!(memory.read(second + 8, 4).unwrap()[..4], 2.5_f32.to_le_bytes());
    }

    #[test]
    fn wide_integers_carry_and_functions_return() {
        let (_, mut memory) = execute(
            "LDC.64 R2, c[0x0][0x210]\nMOV R4, 0xffffffff\nMOV R5, 0x1\nIADD3 R6, P0, R4, 0x2, RZ\nIADD3.X R7, R5, RZ, RZ, P0, !PT\n\
             IMAD.WIDE.U32 R8, R4, 0x2, R6\nMOV R10, 0x90\nCALL.REL.NOINC `(.L_twice)\nNOP\nSTG.E.64 desc[UR4][R2.64], R8\n\
             STG.E desc[UR4][R2.64+0x8], R12\nEXIT\n.L_twice:\nS2R R12, SR_TID.X\nLEA R12, R12, R12, 0x1\n\
             LOP3.LUT R12, R12, 0xf0, RZ, 0xc0, !PT\nRET.REL.NODEC R10 `(k)",
        )
        .unwrap();
        let word = |memory: &mut Memory, at: u64, bytes: usize| {
            memory
                .read((1 << 40) + at, bytes)
                .unwrap()
                .iter()
                .take(bytes)
                .rev()
                .fold(0_u64, |v, b| v << 8 | u64::from(*b))
        };
        // 0x1_ffff_ffff + 2, and 2 · 0xffff_ffff more.
        assert_eq!(word(&mut memory, 0, 8), 0x2_0000_0001 + 2 * 0xffff_ffff);
        assert_eq!(word(&mut memory, 8, 4), (37 * 3) & 0xf0);
    }

    #[test]
    fn products_and_shared_memory_are_counted() {
        let (tally, _) = execute(
            "S2R R0, SR_TID.X\nIMAD.SHL.U32 R0, R0, 0x10, RZ\nLDC.64 R2, c[0x0][0x210]\n\
             LDGSTS.E.BYPASS.128 [R0], desc[UR4][R2.64]\nLDGDEPBAR\nLDGSTS.E.BYPASS.128 [R0+0x1000], desc[UR4][R2.64+0x10]\n\
             LDGDEPBAR\nDEPBAR.LE SB0, 0x1\nBAR.SYNC.DEFER_BLOCKING 0x0\nLDSM.16.M88.4 R4, [R0]\nLDSM.16.MT88.2 R8, [R0]\n\
             HMMA.16816.F32.BF16 R12, R4, R8, RZ\nSTS.64 [R0], R12\nEXIT",
        )
        .unwrap();
        assert_eq!((tally.hmma, tally.ldmatrix, tally.in_flight), (1, 2, 32));
        assert_eq!(tally.shared, 16 + 16 + 16 + 8 + 8);
    }

    #[test]
    fn a_listing_that_cannot_be_run_says_why() {
        let error = |body: &str| execute(body).err().map(|error| error.to_string()).unwrap();
        assert_eq!(
            error("FROB R1, R2\nEXIT"),
            "sass: k: the instruction FROB is unknown here: /*0000*/ FROB R1, R2"
        );
        assert_eq!(error("MOV R1, RZ"), "sass: k: the listing ends before the thread does");
        let endless = error(".L_x_0:\nBRA `(.L_x_0)");
        assert_eq!(endless, "sass: k: 1000 instructions and no end, near BRA `(.L_x_0)");
        assert_eq!(error("BRA `(.L_x_9)"), "sass: k: there is no label .L_x_9: /*0000*/ BRA `(.L_x_9)");
        assert_eq!(
            error("LDG.E R0, desc[UR4][R2.64]"),
            "sass: k: address 0x0 is in no buffer of the case: /*0000*/ LDG.E R0, desc[UR4][R2.64]"
        );
        assert_eq!(
            error("MOV R1, 0x7fffffff\nLDS R0, [R1]"),
            "sass: k: place 0x7fffffff is beyond shared memory: /*0010*/ LDS R0, [R1]"
        );
        assert_eq!(
            error("LDC R0, c[0x3][0x0]"),
            "sass: k: nothing is at place 0x0 of constant bank 3: /*0000*/ LDC R0, c[0x3][0x0]"
        );
        for short in [
            "IADD3 R0, R1",
            "ISETP.GE.AND P0, PT, R0",
            "MUFU.FROB R0, R1",
            "BRX R2",
            "STS [R0]",
            "RET.REL R1",
        ] {
            assert!(error(short).starts_with("sass: k: "), "{short}");
        }
    }
}
