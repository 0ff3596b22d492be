//! Philox4x32-10 from its definition.

pub(crate) fn philox(counter: u64, key: u64) -> [u32; 4] {
    philox_128(counter.into(), key)
}

pub(crate) fn philox_128(counter: u128, key: u64) -> [u32; 4] {
    let (mut c, mut k) = ([0, 32, 64, 96].map(|at| (counter >> at) as u32), [key as u32, (key >> 32) as u32]);
    for _ in 0..10 {
        let wide = |a: u64, b: u32| a * u64::from(b);
        let (first, second) = (wide(0xD251_1F53, c[0]), wide(0xCD9E_8D57, c[2]));
        c = [
            (second >> 32) as u32 ^ c[1] ^ k[0],
            second as u32,
            (first >> 32) as u32 ^ c[3] ^ k[1],
            first as u32,
        ];
        k = [k[0].wrapping_add(0x9E37_79B9), k[1].wrapping_add(0xBB67_AE85)];
    }
    c
}
