//! The sources of scales, for reports.

/// The source of a slot's scales. It determines what [`SlotTrace::advice`](crate::SlotTrace::advice) can suggest.
///
/// ```
/// use fp8_recipe::fp8_kernels::{Device, Tensor, ops};
/// use fp8_recipe::{CurrentScaling, GemmSlots, ScaleSource, Scaling, SlotTrace};
///
/// let (fc, device) = (GemmSlots::new("fc"), Device::cpu());
/// let mut scaling = Scaling::new(&fc, &device)?;
/// scaling.set_counting(true);
/// let mut trace = SlotTrace::new(100);
/// let mut cx = scaling.autocast(&CurrentScaling::rowwise().into())?;
/// ops::quantize(&Tensor::from_vec(vec![3.5f32, 0.5], [1, 2], &device)?, &cx.slot(&fc.input)?)?;
/// cx.commit()?;
/// trace.record(0, &scaling)?;
/// let series = &trace.series()[0];
/// assert_eq!((series.scales, series.points[0].scale), (ScaleSource::RowsOrBlocks, None));
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ScaleSource {
    /// One scale, from the steps before: delayed scaling and recipes of your own.
    Past,
    /// One scale, from the tensor itself: current scaling.
    Tensor,
    /// A scale for each row or block of the tensor, from its own values.
    RowsOrBlocks,
}
