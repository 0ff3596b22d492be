//! Matrix products by cuBLASLt: one plan for each kind of product, made at its first use and kept.
//!
//! cuBLAS is column-major, so the row-major `y[m, n] = left · right` is its `yᵀ = rightᵀ · leftᵀ`: A is the right operand,
//! B the left one. A plan holds descriptors and the kernel; a call sets the addresses and enqueues, and allocates nothing.
//!
//! The library chooses a kernel by the descriptor as it finds it. One without the addresses of scales, amax and bias may get
//! a kernel that ignores them, so every address that a launch sets is set before the library is asked.

use super::context::Context;
use super::cublaslt::{Algo, Attribute, CublasLt, Failure, Found, Handle, Layouts, Wish};
use super::loader::Libraries;
use super::product::{ALIGNMENT, FactorLayout, Places, Product};
use super::queue::Queue;
use super::tuning::{self, GemmTuning, Tuner};
use crate::{Error, Result};
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
    outgrown: Vec<u64>,
}

// SAFETY: handles and descriptors belong to the process, not to a thread; they are used behind the device's lock.
unsafe impl Send for Blas {}

#[derive(Debug, Clone, Copy)]
struct Plan {
    operation: Handle,
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
        Ok(Self { library: *library, handle, plans, refused, tuner, workspace, outgrown })
    }

    pub(super) fn run(
        &mut self,
        queue: &Queue,
        op: &'static str,
        product: &Product,
        places: &Places,
    ) -> Result<()> {
        let key = Key { product: *product, alignment: places.alignment() };
        let plan = match self.plans.get(&key) {
            Some(plan) => *plan,
            None if self.refused.contains(&key) => {
                let failure = ("cublasLtMatmulAlgoGetHeuristic", NOT_SUPPORTED);
                return Err(error(&self.library, op, Some(product), failure));
            }
            None => {
                queue.expect_eager(op, "the product is not planned yet: run the step a few times before")?;
                if self.plans.len() + self.refused.len() >= MOST_PLANS {
                    self.forget_plans();
                }
                let plan = self.plan(queue, op, &key, places);
                if let Err(Error::Gemm { code: NOT_SUPPORTED, .. }) = &plan {
                    self.refused.insert(key);
                }
                let plan = plan?;
                self.plans.insert(key, plan);
                plan
            }
        };
        self.launch(queue, op, product, &plan, places)
    }

    fn launch(
        &mut self,
        queue: &Queue,
        op: &'static str,
        product: &Product,
        plan: &Plan,
        places: &Places,
    ) -> Result<()> {
        self.reserve(queue, plan.workspace)?;
        let library = self.library;
        let fail = |failure| error(&library, op, Some(product), failure);
        self.set_addresses(plan.operation, product, places).map_err(fail)?;
        // In FP8 the output is no C; nothing is read there.
        let c = if product.out.size() == 1 { 0 } else { places.out };
        let matrices = [places.right, places.left, c, places.out];
        let beta = if product.accumulate { 1.0 } else { 0.0 };
        let stream = queue.raw_stream().cast();
        // SAFETY: the plan's layouts are those of `product`, which the addresses belong to (the caller vouches for it); the
        // workspace was made at least as large as the plan's; all of it is used on the device's one stream.
        let enqueued = unsafe {
            library.matmul(
                self.handle,
                plan.operation,
                plan.layouts,
                matrices,
                beta,
                &plan.algo,
                self.workspace,
                stream,
            )
        };
        enqueued.map_err(|failure| {
            let failed = fail(failure);
            if failure.1 == EXECUTION_FAILED {
                queue.poison(failed.to_string());
            }
            failed
        })
    }

    fn set_addresses(&self, operation: Handle, product: &Product, places: &Places) -> Result<(), Failure> {
        let set = |attribute, address: u64| self.library.set(operation, attribute, address);
        if product.is_fp8() {
            set(Attribute::ScaleA, places.right_scale)?;
            set(Attribute::ScaleB, places.left_scale)?;
        }
        if product.out.size() == 1 {
            set(Attribute::ScaleD, places.out_scale)?;
            set(Attribute::AmaxD, places.out_amax)?;
        }
        if product.bias.is_some() {
            set(Attribute::Bias, places.bias)?;
        }
        Ok(())
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

    /// Chooses a kernel for products like this one, by the addresses of its first launch.
    fn plan(&mut self, queue: &Queue, op: &'static str, key: &Key, places: &Places) -> Result<Plan> {
        let Key { product, alignment } = key;
        let library = self.library;
        let fail = |failure| error(&library, op, Some(product), failure);
        let (operation, layouts) = (std::ptr::null_mut(), [std::ptr::null_mut(); 4]);
        let mut draft = Draft { library: &library, operation, layouts };
        draft.fill(product).map_err(fail)?;
        let (operation, layouts) = (draft.operation, draft.layouts);
        self.set_addresses(operation, product, places).map_err(fail)?;
        let plan = |algo, workspace| Plan { operation, layouts, algo, workspace };
        // Kernels are timed on aligned matrices: what is known of them holds for those alone.
        let is_tuned = *alignment == ALIGNMENT;
        if let Some(algo) = self.tuner.stored(product).filter(|_| is_tuned)
            && let Some(found) = library.check(self.handle, operation, layouts, &algo)
        {
            draft.keep();
            planned(op, product, "stored", &algo, found.workspace);
            return Ok(plan(algo, found.workspace));
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
            let run = |found: &Found, places: &Places| {
                self.launch(queue, op, product, &plan(found.algo, found.workspace), places)
            };
            if let Some((fastest, microseconds)) = tuning::fastest(queue, product, &found, run)? {
                (chosen, choice) = (fastest, "tuned");
                self.tuner.store(product, fastest.algo, microseconds);
            }
        }
        draft.keep();
        planned(op, product, choice, &chosen.algo, chosen.workspace);
        Ok(plan(chosen.algo, chosen.workspace))
    }

    /// Work that is queued, or recorded, has what it needs of them.
    fn forget_plans(&mut self) {
        self.refused.clear();
        for (_, plan) in self.plans.drain() {
            drop(Draft { library: &self.library, operation: plan.operation, layouts: plan.layouts });
        }
    }

    /// Gives back all it holds; the device's context is current, and none of its work runs any more.
    pub(super) fn release(&mut self, gpu_free: impl Fn(u64)) {
        self.forget_plans();
        let (address, _) = std::mem::take(&mut self.workspace);
        self.outgrown.drain(..).chain((address != 0).then_some(address)).for_each(gpu_free);
        self.library.destroy(self.handle);
    }
}

/// Emits the event of a new plan. The first word of a kernel is the one that tells kernels of one product apart.
fn planned(op: &'static str, product: &Product, choice: &str, algo: &Algo, workspace: usize) {
    let algo = format_args!("{:016x}", algo.0[0]);
    tracing::debug!(op, product = %product.describe(), choice, %algo, workspace, "product planned");
}

/// Descriptors that are destroyed when dropped.
struct Draft<'a> {
    library: &'a CublasLt,
    operation: Handle,
    layouts: Layouts,
}

impl Draft<'_> {
    fn fill(&mut self, product: &Product) -> Result<(), Failure> {
        let Product { m, n, k, left_transposed, right_transposed, left, right, .. } = *product;
        let Product { factors, out, bias, fast, .. } = *product;
        let library = self.library;
        self.operation = library.operation()?;
        library.set(self.operation, Attribute::TransposeA, i32::from(right_transposed))?;
        library.set(self.operation, Attribute::TransposeB, i32::from(left_transposed))?;
        if product.is_fp8() {
            library.set(self.operation, Attribute::FastAccumulation, i8::from(fast))?;
            // Libraries from before the modes do not know the attribute.
            let modes = [(Attribute::ScaleModeA, factors[1]), (Attribute::ScaleModeB, factors[0])];
            for (attribute, layout) in modes.into_iter().filter(|(_, layout)| *layout != FactorLayout::Tensor)
            {
                library.set(self.operation, attribute, layout as i32)?;
            }
        }
        if let Some(bias) = bias {
            library.set(self.operation, Attribute::Epilogue, BIAS)?;
            library.set(self.operation, Attribute::BiasType, bias.number())?;
        }
        let a = if right_transposed { [k, n] } else { [n, k] };
        let b = if left_transposed { [m, k] } else { [k, m] };
        self.layouts[0] = library.layout(right, a[0], a[1])?;
        self.layouts[1] = library.layout(left, b[0], b[1])?;
        self.layouts[3] = library.layout(out, n, m)?;
        // In place C and D are one matrix, and so one layout.
        self.layouts[2] = match product.c_type() {
            kind if kind == out => self.layouts[3],
            kind => library.layout(kind, n, m)?,
        };
        Ok(())
    }

    /// A plan has them now.
    fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Draft<'_> {
    fn drop(&mut self) {
        if !self.operation.is_null() {
            self.library.destroy_operation(self.operation);
        }
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
