//! `dbg!` of tensors and of what holds many numbers is a line: shapes, types and devices, and only the first values.

use fp8_kernels::{
    Arena, ArenaOptions, Cell, Counters, DType, Device, Encoding, Fp8Tensor, Operand, Slot, Tensor, bf16, ops,
};

#[test]
fn a_tensor_prints_shape_dtype_device_and_its_first_values() {
    let device = Device::cpu();
    let x = Tensor::from_vec((0..3000).map(|i| i as f32).collect(), [3, 1000], &device).unwrap();
    assert_eq!(format!("{x:?}"), "Tensor([3, 1000], f32, cpu, [0.0, 1.0, 2.0, 3.0, ..])");
    let x = Tensor::from_vec(vec![bf16::from_f32(1.5)], [], &device).unwrap();
    assert_eq!(format!("{x:?}"), "Tensor([], bf16, cpu, [1.5])");
    let x = Tensor::zeros([0, 7], DType::I32, &device).unwrap();
    assert_eq!(format!("{x:?}"), "Tensor([0, 7], i32, cpu, [])");
}

#[test]
fn fp8_tensors_print_their_factor_and_layouts_but_no_codes() {
    let device = Device::cpu();
    let codes = Tensor::zeros([16, 32], DType::U8, &device).unwrap();
    let scale_inv = Tensor::scalar(0.5, &device).unwrap();
    let x = Fp8Tensor::from_codes(codes, [16, 32], Encoding::E4M3, scale_inv).unwrap();
    assert_eq!(format!("{x:?}"), "Fp8Tensor([16, 32], E4M3, cpu, rowwise, scale_inv 0.5)");
    let both = x.with_columnwise().unwrap();
    let expected = "Fp8Tensor([16, 32], E4M3, cpu, rowwise and columnwise, scale_inv 0.5)";
    assert_eq!(format!("{both:?}"), expected);
    assert_eq!(format!("{:?}", Operand::Fp8(both)), format!("Fp8({expected})"));
    let high = ops::quantize(&Tensor::scalar(2.0, &device).unwrap(), &Slot::off(Encoding::E4M3)).unwrap();
    assert_eq!(format!("{high:?}"), "High(Tensor([], f32, cpu, [2.0]))");
}

#[test]
fn cells_and_arenas_print_a_line_however_many_slots_they_have() {
    let device = Device::cpu();
    assert_eq!(format!("{:?}", Cell::new(-2.0, &device).unwrap()), "Cell(-2.0, cpu)");
    let counters = format!("{:?}", Counters::new(&device).unwrap());
    assert!(counters.starts_with("Counters(CounterValues { saturated: 0,"), "{counters}");
    let arena = Arena::new(500, ArenaOptions { history_len: 16, ..Default::default() }, &device).unwrap();
    assert_eq!(format!("{arena:?}"), "Arena(500 slots, history_len 16, cpu, 0 updates)");
    assert_eq!(format!("{device:?}"), "Device(cpu, transposes Never)");
}
