//! The library's state behind its one lock, and the checks that every call makes of it.

use std::cell::RefCell;
use std::sync::LazyLock;

use parking_lot::{Mutex, MutexGuard};

use crate::calls::Calls;
use crate::code::{Code, Outcome};
use crate::compiler::Compiler;
use crate::context::Context;
use crate::cublaslt::Blas;
use crate::cudnn::Dnn;
use crate::fault::Fault;
use crate::nccl::Communicators;
use crate::queue::{StreamId, Until};
use crate::report;
use crate::settings::Settings;
use crate::work::Work;

/// Handle of the device's primary context, the only context there is. No address of the process.
pub(crate) const CONTEXT: u64 = 0xc0de_0000_0000_0001;

/// Everything the entry points share.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) settings: Settings,
    /// Why the environment is unusable; printed by the first `cuInit`.
    pub(crate) broken: Option<String>,
    pub(crate) started: bool,
    pub(crate) calls: Calls,
    /// Retained references of the primary context; it lives while there are any.
    pub(crate) retained: u32,
    pub(crate) context: Option<Context>,
    /// The error that killed the context.
    pub(crate) dead: Option<Code>,
    /// Texts of all errors of the device.
    pub(crate) reports: Vec<String>,
    /// A line for everything that was live when a context was released.
    pub(crate) leaked: Vec<String>,
    pub(crate) compiler: Compiler,
    pub(crate) communicators: Communicators,
    pub(crate) blas: Blas,
    pub(crate) dnn: Dnn,
    handles: u64,
    launches: u64,
}

static DRIVER: LazyLock<Mutex<Driver>> = LazyLock::new(|| Mutex::new(Driver::new()));

thread_local! {
    /// Contexts current on this thread, the top one last.
    static CURRENT: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// Locks the state. Nothing in this crate calls an entry point while it holds the lock.
pub(crate) fn driver() -> MutexGuard<'static, Driver> {
    DRIVER.lock()
}

/// Locks the state unless it is in use: for the process's end, where a thread may be stuck inside.
pub(crate) fn driver_at_exit() -> Option<MutexGuard<'static, Driver>> {
    DRIVER.try_lock()
}

/// The calling thread's stack of current contexts.
pub(crate) fn with_current<T>(change: impl FnOnce(&mut Vec<u64>) -> T) -> T {
    CURRENT.with_borrow_mut(change)
}

/// A step that waits for other ranks is no failure of one who does not wait.
pub(crate) fn unless_stalled<T: Default>(outcome: Outcome<T>) -> Outcome<T> {
    match outcome {
        Err(Code::STALLED) => Ok(T::default()),
        outcome => outcome,
    }
}

impl Driver {
    fn new() -> Self {
        let (settings, faults, broken) = match Settings::from_environment() {
            Ok((settings, faults)) => (settings, faults, None),
            Err(why) => (Settings::default(), String::new(), Some(why)),
        };
        let mut driver = Self {
            settings,
            broken,
            started: false,
            calls: Calls::default(),
            retained: 0,
            context: None,
            dead: None,
            reports: Vec::new(),
            leaked: Vec::new(),
            compiler: Compiler::default(),
            communicators: Communicators::default(),
            blas: Blas::default(),
            dnn: Dnn::default(),
            handles: 0,
            launches: 0,
        };
        if let Err(why) = driver.calls.plan(&faults) {
            driver.broken.get_or_insert(format!("FP8_SIM_FAIL: {why}"));
        }
        driver
    }

    pub(crate) fn expect_started(&self) -> Outcome {
        if self.started { Ok(()) } else { Err(Code::NOT_INITIALIZED) }
    }

    /// CUDA Driver API, CUDA_ERROR_INVALID_CONTEXT: "most frequently indicates that there is no context bound to the
    /// current thread"; CUDA_ERROR_CONTEXT_IS_DESTROYED: the current context "has been destroyed […], or is a primary
    /// context which has not yet been initialized".
    pub(crate) fn expect_current(&self) -> Outcome {
        self.expect_started()?;
        with_current(|stack| stack.last().copied().filter(|&context| context != 0))
            .ok_or(Code::INVALID_CONTEXT)?;
        if self.context.is_some() { Ok(()) } else { Err(Code::CONTEXT_IS_DESTROYED) }
    }

    /// CUDA Driver API, CUDA_ERROR_ILLEGAL_ADDRESS and its kin: "This leaves the process in an inconsistent state and
    /// any further CUDA work will return the same error."
    pub(crate) fn expect_healthy(&self) -> Outcome {
        self.dead.map_or(Ok(()), Err)
    }

    /// The live context, which `expect_current` has seen.
    pub(crate) fn context(&mut self) -> Outcome<&mut Context> {
        self.context.as_mut().ok_or(Code::CONTEXT_IS_DESTROYED)
    }

    /// A new handle. Handles are tagged with their kind, so that none passes for another, and are no addresses.
    pub(crate) fn handle(&mut self, kind: u64) -> u64 {
        self.handles += 1;
        0xa000_0000_0000_0000 | (kind << 48) | (self.handles * 16)
    }

    /// The number of a launch, from 1.
    pub(crate) fn next_launch(&mut self) -> u64 {
        self.launches += 1;
        self.launches
    }

    /// Starts the seed's sequence of orders anew.
    pub(crate) fn reseed(&mut self) {
        self.launches = 0;
        if let Some(context) = &mut self.context {
            context.queue.reseed();
        }
    }

    /// Queues work, or notes it where the stream is in capture; in eager mode, and where the stream is as deep as a launch queue, runs work too.
    pub(crate) fn submit(&mut self, stream: StreamId, work: Work) -> Outcome {
        if self.settings.stub
            && !matches!(work, Work::Download { .. } | Work::Allocate { .. } | Work::Free { .. })
        {
            return Ok(());
        }
        let context = self.context()?;
        let Some(work) = context.captures.submit(stream, work)? else { return Ok(()) };
        context.queue.submit(stream, work);
        self.after_submit(stream)
    }

    /// As `submit`, for what was queued already.
    pub(crate) fn after_submit(&mut self, stream: StreamId) -> Outcome {
        if self.settings.eager {
            return unless_stalled(self.drive(Until::Everything));
        }
        while self.context()?.queue.is_deep(stream) {
            match self.step(Until::Stream(stream)) {
                Ok(_) => {}
                // The caller goes on: what it waits for may be its own next call.
                Err(Code::STALLED) => return Ok(()),
                Err(code) => return Err(code),
            }
        }
        Ok(())
    }

    /// Runs queued work until the condition holds.
    pub(crate) fn drive(&mut self, until: Until) -> Outcome {
        while self.step(until)? {}
        Ok(())
    }

    /// Runs one task on the way to the condition; false if nothing is left to run for it. An error of the device kills
    /// the context and drops all its queued work.
    pub(crate) fn step(&mut self, until: Until) -> Outcome<bool> {
        let seed = self.settings.seed;
        match self.context()?.step(until, seed) {
            Ok(moved) => Ok(moved),
            Err(Fault { code: Code::STALLED, .. }) => Err(Code::STALLED),
            Err(fault) => Err(self.die(fault)),
        }
    }

    fn die(&mut self, mut fault: Fault) -> Code {
        if self.settings.seed != 0 {
            // A launch has its own seed, drawn from the device's; this is the one to set again.
            fault.text += &format!("\n  with FP8_SIM_SEED={}", self.settings.seed);
        }
        report::print(&fault.text);
        self.reports.push(fault.text);
        self.dead = Some(fault.code);
        if let Some(context) = &mut self.context {
            context.queue.abandon();
            context.captures.abandon();
            context.settle_frees();
        }
        fault.code
    }

    /// Frees all the context has left, and notes it as leaked.
    pub(crate) fn release_context(&mut self) -> Outcome {
        // Collectives whose other ranks do not come end with the context.
        let outcome =
            if self.dead.is_none() { unless_stalled(self.drive(Until::Everything)) } else { Ok(()) };
        if let Some(context) = self.context.take() {
            let lines = context.live();
            self.leaked.extend(lines.lines().map(|line| format!("{line} (its context was released)")));
        }
        outcome
    }
}
