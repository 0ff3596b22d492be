use super::case::{Outcome, cases};
use super::compare::{equal, same};
use super::data::{Random, specials};
use fp8_kernels::{Arena, ArenaOptions, Cell, Device, REST, UNSET};

cases![merges_the_larger, merges_whole_rows, rolls_back, writes_are_read, blocks_start_as_told];

/// A signed maximum of the bits.
fn larger(a: f32, b: f32) -> f32 {
    if (b.to_bits() as i32) > (a.to_bits() as i32) { b } else { a }
}

fn merges_the_larger(device: &Device) -> Outcome {
    let values: Vec<f32> = specials().into_iter().filter(|v| v.to_bits() >> 31 == 0).chain([REST]).collect();
    for &first in &values {
        let cell = Cell::new(first, device)?;
        let mut want = first;
        for &value in &values {
            cell.merge_max(value)?;
            want = larger(want, value);
        }
        same(&format!("{first} and all others"), &[cell.read()?], &[want], 1)?;
    }
    Ok(())
}

fn merges_whole_rows(device: &Device) -> Outcome {
    for slots in [1, 31, 33, 255, 256, 257, 40_001] {
        let arena = Arena::new(slots, ArenaOptions { history_len: 2, ..ArenaOptions::default() }, device)?;
        let row = |seed| Random::new(seed).normals(slots).into_iter().map(f32::abs).collect::<Vec<_>>();
        let (first, second) = (row(1), row(2));
        arena.merge_staged(&first)?;
        same(&format!("{slots} slots"), &arena.staged()?, &first, slots)?;
        arena.merge_staged(&second)?;
        let want: Vec<f32> = first.iter().zip(&second).map(|(&a, &b)| larger(a, b)).collect();
        same(&format!("{slots} slots, twice"), &arena.staged()?, &want, slots)?;
        same("the rest of the history", &arena.newest_all()?, &vec![0.0; slots], slots)?;
    }
    Ok(())
}

/// Provisional scales, below 0, become unset; the others stay.
fn rolls_back(device: &Device) -> Outcome {
    for slots in [1, 31, 33, 255, 256, 257, 40_001] {
        let mut arena =
            Arena::new(slots, ArenaOptions { history_len: 2, ..ArenaOptions::default() }, device)?;
        let mut scales: Vec<f32> = Random::new(3).normals(slots).into_iter().map(|v| 100.0 * v).collect();
        scales[slots / 2] = -f32::MIN_POSITIVE;
        scales[slots - 1] = 0.0;
        arena.set_scales(&scales)?;
        arena.merge_staged(&vec![3.0; slots])?;
        arena.roll_back()?;
        let want: Vec<f32> = scales.iter().map(|&scale| if scale < 0.0 { UNSET } else { scale }).collect();
        same(&format!("{slots} slots"), &arena.scales()?, &want, slots)?;
        same("staging", &arena.staged()?, &vec![REST; slots], slots)?;
    }
    Ok(())
}

fn writes_are_read(device: &Device) -> Outcome {
    let cell = Cell::new(1.0, device)?;
    for value in specials() {
        cell.write(value)?;
        same("a cell", &[cell.read()?], &[value], 1)?;
    }
    Ok(())
}

fn blocks_start_as_told(device: &Device) -> Outcome {
    for first_scale in [UNSET, 1.0] {
        let options = ArenaOptions { history_len: 3, rest: 0.0, first_scale };
        let arena = Arena::new(5, options, device)?;
        equal("scales", arena.scales()?, vec![first_scale; 5])?;
        equal("staging", arena.staged()?, vec![0.0; 5])?;
        equal("history", arena.history()?, vec![0.0; 10])?;
        equal("copies", arena.copy_scales()?.len(), 5)?;
    }
    Ok(())
}
