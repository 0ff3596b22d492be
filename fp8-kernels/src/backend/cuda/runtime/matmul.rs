//! Matrix products by cuBLASLt: one plan for each kind of product, made at its first use and kept.
//!
//! cuBLAS is column-major, so the row-major `y[m, n] = left · right` is its `yᵀ = rightᵀ · leftᵀ`: A is the right operand,
//! B the left one. A plan holds descriptors and the kernel; a call finds the descriptor with its addresses, or sets them, and
//! enqueues. It allocates nothing.
//!
//! The library chooses a kernel by the descriptor as it finds it. One without the addresses of scales, amax and bias may get
//! a kernel that ignores them, so every address that a launch sets is set before the library is asked.

use super::context::Context;
use super::cublaslt::{Algo, Attribute, CublasLt, Failure, Found, Handle, Layouts, Scalars, Wish};
use super::descriptors::Descriptors;
use super::loader::Libraries;
use super::product::{ALIGNMENT, FactorLayout, Places, Product};
use super::queue::Queue;
use super::trial::{self, Lane};
use super::tuning::{GemmTuning, Tuner};
use crate::{Error, Result, TunedProducts};
use std::collections::{HashMap, HashSet};

/// The epilogue that adds a bias of one value a column.
const BIAS: u32 = 4;
/// The bytes of workspace that NVIDIA recommends for kernels on Hopper and later, and for kernels on earlier GPUs.
const WORKSPACE: [usize; 2] = [32 << 20, 4 << 20];
/// Plans kept at a time. A model needs a few dozen; a text that grows by a token a time, one for each length.
const MOST_PLANS: usize = 1024;

/// The key of a plan. The plan serves the product if its matrices and bias have at least this alignment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    product: Product,
    alignment: u64,
}

/// The library on one device, with the plans made so far.
pub(super) struct Blas {
    library: CublasLt,
    handle: Handle,
    plans: HashMap<Key, Plan>,
    /// Products that the library has no kernel for.
    refused: HashSet<Key>,
    tuner: Tuner,
    /// The largest that a plan has asked for; the ones before stay, since captured work may still use them.
    workspace: (u64, usize),
    /// The address of a 0 and a 1, for beta beside an alpha on the device; 0 before the first such product.
    betas: u64,
    outgrown: Vec<u64>,
}

// SAFETY: handles and descriptors belong to the process, not to a thread; they are used behind the device's lock.
unsafe impl Send for Blas {}

#[derive(Debug)]
struct Plan {
    descriptors: Descriptors,
    chosen: Chosen,
}

impl Plan {
    /// Work that is queued, or recorded, has what it needs of the descriptors.
    fn release(self, library: &CublasLt) {
        drop(Draft { library, descriptors: self.descriptors, layouts: self.chosen.layouts });
    }
}

/// A kernel for matrices of these layouts.
#[derive(Debug, Clone, Copy)]
struct Chosen {
    layouts: Layouts,
    algo: Algo,
    workspace: usize,
}

impl Blas {
    /// The device's context is current.
    pub(super) fn open(
        context: &Context,
        libraries: &'static Libraries,
        tuning: &GemmTuning,
    ) -> Result<Self> {
        let library = libraries.cublaslt()?;
        let handle = library.create().map_err(|failure| error(library, "gemm", None, failure))?;
        let tuner = Tuner::new(tuning, context.name(), library.version());
        let tuner = tuner.inspect_err(|_| library.destroy(handle))?;
        let (plans, workspace, outgrown) = (HashMap::new(), (0, 0), Vec::new());
        let refused = HashSet::new();
        Ok(Self { library: *library, handle, plans, refused, tuner, workspace, betas: 0, outgrown })
    }

    pub(super) fn run(
        &mut self,
        queue: &Queue,
        op: &'static str,
        product: &Product,
        places: &Places,
    ) -> Result<()> {
        let key = Key { product: *product, alignment: places.alignment() };
        if !self.plans.contains_key(&key) {
            self.make_plan(queue, op, &key, places)?;
        }
        let Some(plan) = self.plans.get_mut(&key) else { return Ok(()) }; // it was just made
        let library = &self.library;
        let descriptor =
            plan.descriptors.with_addresses(library, product, places, || descriptor(library, product));
        let descriptor = descriptor.map_err(|failure| error(library, op, Some(product), failure))?;
        let chosen = plan.chosen;
        self.reserve(queue, chosen.workspace)?;
        let lane = Lane { stream: queue.raw_stream(), workspace: self.workspace };
        // SAFETY: the caller vouches for the addresses; the workspace was made at least as large as the plan's, and all of it
        // is used on the device's one stream.
        unsafe { self.enqueue(queue, op, product, descriptor, &chosen, places, lane) }
    }

    fn make_plan(&mut self, queue: &Queue, op: &'static str, key: &Key, places: &Places) -> Result<()> {
        if self.refused.contains(key) {
            let failure = ("cublasLtMatmulAlgoGetHeuristic", NOT_SUPPORTED);
            return Err(error(&self.library, op, Some(&key.product), failure));
        }
        queue.expect_eager(op, "the product is not planned yet: run the step a few times before")?;
        if self.plans.len() + self.refused.len() >= MOST_PLANS {
            self.forget_plans();
        }
        if key.product.device_alpha {
            self.write_betas(queue)?;
        }
        let plan = self.plan(queue, op, key, places);
        if let Err(Error::Gemm { code: NOT_SUPPORTED, .. }) = &plan {
            self.refused.insert(*key);
        }
        self.plans.insert(*key, plan?);
        Ok(())
    }

    /// Enqueues the product.
    ///
    /// # Safety
    /// `descriptor` and `chosen` are those of `product`, with the addresses of `places`, which name matrices of its extents
    /// and types, and its alpha if it is on the device. The workspace has room for what the kernel needs. All of it is used on the
    /// lane's stream, in its order.
    #[expect(clippy::too_many_arguments, reason = "what one call of the library consists of")]
    unsafe fn enqueue(
        &self,
        queue: &Queue,
        op: &'static str,
        product: &Product,
        descriptor: Handle,
        chosen: &Chosen,
        places: &Places,
        lane: Lane,
    ) -> Result<()> {
        // In FP8 the output is no C; nothing is read there.
        let c = match (product.out.is_fp8(), product.addend) {
            (true, _) => 0,
            (_, true) => places.addend,
            (_, false) => places.out,
        };
        let matrices = [places.right, places.left, c, places.out];
        let adds = places.accumulate || product.addend;
        let scalars = if product.device_alpha {
            Scalars::Device { alpha: places.alpha, beta: self.betas + if adds { 4 } else { 0 } }
        } else {
            Scalars::Host { beta: if adds { 1.0 } else { 0.0 } }
        };
        let Chosen { layouts, algo, .. } = chosen;
        let Lane { stream, workspace } = lane;
        // SAFETY: as the caller promises.
        let enqueued = unsafe {
            self.library.matmul(
                self.handle,
                descriptor,
                *layouts,
                matrices,
                scalars,
                algo,
                workspace,
                stream.cast(),
            )
        };
        enqueued.map_err(|failure| {
            let failed = error(&self.library, op, Some(product), failure);
            if failure.1 == EXECUTION_FAILED {
                queue.poison(failed.to_string());
            }
            failed
        })
    }

    /// Room for what a kernel keeps between its parts.
    fn reserve(&mut self, queue: &Queue, bytes: usize) -> Result<()> {
        let (address, room) = self.workspace; // always enough for plans made before a capture
        if bytes <= room {
            return Ok(());
        }
        let larger = queue.driver_alloc(bytes)?;
        if address != 0 {
            self.outgrown.push(address);
        }
        self.workspace = (larger, bytes);
        Ok(())
    }

    /// Writes the values of beta to the device, unless they are there.
    fn write_betas(&mut self, queue: &Queue) -> Result<()> {
        if self.betas != 0 {
            return Ok(());
        }
        let values = [0.0f32, 1.0];
        let address = queue.driver_alloc(size_of_val(&values))?;
        let written = queue.write(address, bytemuck::bytes_of(&values));
        written.inspect_err(|_| self.outgrown.push(address))?;
        self.betas = address;
        Ok(())
    }

    /// Chooses a kernel for products like this one, by the addresses of its first launch.
    fn plan(&mut self, queue: &Queue, op: &'static str, key: &Key, places: &Places) -> Result<Plan> {
        let Key { product, alignment } = key;
        let library = self.library;
        let fail = |failure| error(&library, op, Some(product), failure);
        let mut draft = Draft::new(&library);
        draft.fill(product).map_err(fail)?;
        let operation = draft.with_addresses(product, places).map_err(fail)?;
        let layouts = draft.layouts;
        // Kernels are timed on aligned matrices: what is known of them holds for those alone.
        let is_tuned = *alignment == ALIGNMENT;
        if let Some(algo) = self.tuner.stored(product).filter(|_| is_tuned)
            && let Some(found) = library.check(self.handle, operation, layouts, &algo)
        {
            planned(op, product, "stored", &algo, found.workspace);
            return Ok(draft.plan(algo, found.workspace));
        }
        let most = WORKSPACE[usize::from(queue.capability().0 < 9)];
        let wishes = [
            (Wish::WorkspaceBytes, most as u64),
            (Wish::ReductionSchemes, product.reductions()),
            (Wish::AlignmentA, *alignment),
            (Wish::AlignmentB, *alignment),
            (Wish::AlignmentC, *alignment),
            (Wish::AlignmentD, *alignment),
        ];
        let candidates = if is_tuned { self.tuner.candidates() } else { 1 };
        let found = library.heuristics(self.handle, operation, layouts, &wishes, candidates).map_err(fail)?;
        let Some(mut chosen) = found.first().copied() else {
            return Err(fail(("cublasLtMatmulAlgoGetHeuristic", NOT_SUPPORTED)));
        };
        let mut choice = "heuristic";
        if found.len() > 1 {
            let run = |found: &Found, places: &Places, lane: Lane| {
                let descriptor = draft.with_addresses(product, places).map_err(fail)?;
                let chosen = Chosen { layouts, algo: found.algo, workspace: found.workspace };
                // SAFETY: the tuner's matrices are those of `product`, and its workspace is large enough for every
                // candidate; it uses them on the lane's stream alone.
                unsafe { self.enqueue(queue, op, product, descriptor, &chosen, places, lane) }
            };
            if let Some(pick) = trial::pick(queue, product, &found, run)? {
                (chosen, choice) = (pick.found, "tuned");
                self.tuner.store(product, chosen.algo, pick.microseconds);
            }
        }
        planned(op, product, choice, &chosen.algo, chosen.workspace);
        Ok(draft.plan(chosen.algo, chosen.workspace))
    }

    pub(super) fn tuned_products(&self) -> TunedProducts {
        self.tuner.choices()
    }

    /// Uses these kernels from now on, where they are for this GPU and library. Returns how many are.
    pub(super) fn use_tuned_products(&mut self, tuned: &TunedProducts) -> usize {
        let taken = self.tuner.take(tuned);
        let tuner = &self.tuner;
        let is_other = |key: &Key, plan: &mut Plan| {
            let stored = tuner.stored(&key.product).filter(|_| key.alignment == ALIGNMENT);
            stored.is_some_and(|algo| algo != plan.chosen.algo)
        };
        for (_, plan) in self.plans.extract_if(is_other) {
            plan.release(&self.library);
        }
        taken
    }

    fn forget_plans(&mut self) {
        self.refused.clear();
        self.plans.drain().for_each(|(_, plan)| plan.release(&self.library));
    }

    /// Gives back all it holds; the device's context is current, and none of its work runs any more.
    pub(super) fn release(&mut self, gpu_free: impl Fn(u64)) {
        self.forget_plans();
        let (workspace, _) = std::mem::take(&mut self.workspace);
        let all = [workspace, std::mem::take(&mut self.betas)].into_iter().filter(|address| *address != 0);
        self.outgrown.drain(..).chain(all).for_each(gpu_free);
        self.library.destroy(self.handle);
    }
}

/// Emits the event of a new plan. The first word of a kernel is the one that tells kernels of one product apart.
fn planned(op: &'static str, product: &Product, choice: &str, algo: &Algo, workspace: usize) {
    let algo = format_args!("{:016x}", algo.0[0]);
    tracing::debug!(op, product = %product.describe(), choice, %algo, workspace, "product planned");
}

/// Makes a descriptor of products like this one, without addresses.
fn descriptor(library: &CublasLt, product: &Product) -> Result<Handle, Failure> {
    let operation = library.operation()?;
    describe(library, operation, product).inspect_err(|_| library.destroy_operation(operation))?;
    Ok(operation)
}

fn describe(library: &CublasLt, operation: Handle, product: &Product) -> Result<(), Failure> {
    let Product { left_transposed, right_transposed, factors, bias, fast, device_alpha, .. } = *product;
    library.set(operation, Attribute::TransposeA, i32::from(right_transposed))?;
    library.set(operation, Attribute::TransposeB, i32::from(left_transposed))?;
    if product.has_factors() {
        library.set(operation, Attribute::FastAccumulation, i8::from(fast))?;
        // Libraries from before the modes do not know the attribute.
        let modes = [(Attribute::ScaleModeA, factors[1]), (Attribute::ScaleModeB, factors[0])];
        for (attribute, layout) in modes.into_iter().filter(|(_, layout)| *layout != FactorLayout::Tensor) {
            library.set(operation, attribute, layout as i32)?;
        }
    }
    if device_alpha {
        library.set(operation, Attribute::PointerMode, Scalars::DEVICE)?;
    }
    if let Some(bias) = bias {
        library.set(operation, Attribute::Epilogue, BIAS)?;
        library.set(operation, Attribute::BiasType, bias.number())?;
    }
    Ok(())
}

/// Descriptors that are destroyed when dropped.
struct Draft<'a> {
    library: &'a CublasLt,
    descriptors: Descriptors,
    layouts: Layouts,
}

impl<'a> Draft<'a> {
    fn new(library: &'a CublasLt) -> Self {
        Self { library, descriptors: Descriptors::default(), layouts: [std::ptr::null_mut(); 4] }
    }

    /// Makes the layouts.
    fn fill(&mut self, product: &Product) -> Result<(), Failure> {
        let Product { m, n, k, left_transposed, right_transposed, left, right, out, .. } = *product;
        let library = self.library;
        let a = if right_transposed { [k, n] } else { [n, k] };
        let b = if left_transposed { [m, k] } else { [k, m] };
        self.layouts[0] = library.layout(right, a[0], a[1])?;
        self.layouts[1] = library.layout(left, b[0], b[1])?;
        self.layouts[3] = library.layout(out, n, m)?;
        // In place C and D are one matrix, and so one layout; an addend has the same.
        self.layouts[2] = match product.c_type() {
            kind if kind == out => self.layouts[3],
            kind => library.layout(kind, n, m)?,
        };
        Ok(())
    }

    fn with_addresses(&mut self, product: &Product, places: &Places) -> Result<Handle, Failure> {
        let library = self.library;
        self.descriptors.with_addresses(library, product, places, || descriptor(library, product))
    }

    /// Hands the descriptors to a plan.
    fn plan(mut self, algo: Algo, workspace: usize) -> Plan {
        let layouts = std::mem::replace(&mut self.layouts, [std::ptr::null_mut(); 4]);
        let descriptors = std::mem::take(&mut self.descriptors);
        Plan { descriptors, chosen: Chosen { layouts, algo, workspace } }
    }
}

impl Drop for Draft<'_> {
    fn drop(&mut self) {
        self.descriptors.destroy(self.library);
        let [a, b, c, d] = self.layouts;
        let c = if c == d { std::ptr::null_mut() } else { c };
        [a, b, c, d].into_iter().filter(|layout| !layout.is_null()).for_each(|layout| {
            self.library.destroy_layout(layout);
        });
    }
}

const ALLOC_FAILED: i32 = 3;
const EXECUTION_FAILED: i32 = 13;
const NOT_SUPPORTED: i32 = 15;

fn error(library: &CublasLt, op: &'static str, product: Option<&Product>, (call, status): Failure) -> Error {
    let version = library.version();
    Error::Gemm {
        op,
        product: product.map_or_else(|| "opening cuBLASLt".to_owned(), Product::describe),
        call,
        code: status,
        text: library.describe(status),
        remedy: match status {
            NOT_SUPPORTED => format!(
                "no kernel of cuBLAS {}.{}.{} for these types and extents on this GPU; a newer cuBLAS may have one",
                version / 10_000,
                version / 100 % 100,
                version % 100
            ),
            ALLOC_FAILED => "the host or the device is out of memory: free tensors".to_owned(),
            EXECUTION_FAILED => "the device failed before: start the process again".to_owned(),
            _ => "CUBLASLT_LOG_LEVEL=5 makes the library say more".to_owned(),
        },
    }
}
