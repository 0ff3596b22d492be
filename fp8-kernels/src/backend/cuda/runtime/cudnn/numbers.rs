//! Numbers of cuDNN's graph API: `cudnn_graph.h` of cuDNN 9.

use std::ffi::c_int;

/// `cudnnBackendDescriptorType_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Pointwise = 0,
    Engine = 2,
    EngineConfig = 3,
    EngineHeuristics = 4,
    ExecutionPlan = 5,
    KnobChoice = 7,
    PointwiseOperation = 13,
    OperationGraph = 15,
    VariantPack = 16,
    Tensor = 17,
    Matmul = 18,
    MatmulOperation = 19,
    Reduction = 21,
    ReductionOperation = 22,
    ReshapeOperation = 31,
    #[cfg_attr(not(test), expect(dead_code, reason = "the check plans for a device that is not there"))]
    DeviceProperties = 38,
}

/// `cudnnBackendAttributeName_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Attribute {
    PointwiseMode = 0,
    PointwisePrecision = 1,
    PointwiseAxis = 9,
    HeuristicsMode = 200,
    HeuristicsGraph = 201,
    HeuristicsResults = 202,
    HeuristicsDevice = 204,
    ConfigEngine = 300,
    ConfigKnobs = 302,
    PlanHandle = 400,
    PlanConfig = 401,
    PlanWorkspace = 402,
    PlanDevice = 407,
    KnobType = 600,
    KnobValue = 601,
    PointwiseDescriptor = 750,
    PointwiseX = 751,
    PointwiseB = 752,
    PointwiseY = 753,
    PointwiseT = 758,
    GraphHandle = 800,
    GraphOperations = 801,
    TensorAlignment = 900,
    TensorType = 901,
    TensorExtents = 902,
    TensorStrides = 903,
    TensorId = 906,
    TensorIsVirtual = 907,
    TensorIsByValue = 908,
    TensorRaggedOffsets = 913,
    PackIds = 1000,
    PackPointers = 1001,
    PackWorkspace = 1003,
    EngineGraph = 1300,
    EngineIndex = 1301,
    EngineDevice = 1307,
    MatmulComputeType = 1500,
    MatmulPadding = 1503,
    MatmulA = 1520,
    MatmulB = 1521,
    MatmulC = 1522,
    MatmulDescriptor = 1523,
    MatmulRows = 1525,
    MatmulColumns = 1526,
    MatmulDepth = 1527,
    ReductionOperator = 1600,
    ReductionComputeType = 1601,
    ReductionX = 1610,
    ReductionY = 1611,
    ReductionDescriptor = 1612,
    ReshapeX = 2200,
    ReshapeY = 2201,
    #[cfg_attr(not(test), expect(dead_code, reason = "as DeviceProperties"))]
    DeviceJson = 2702,
}

/// `cudnnBackendAttributeType_t`, of those that are set here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ValueType {
    Handle = 0,
    DataType = 1,
    Boolean = 2,
    Int64 = 3,
    Double = 5,
    Pointer = 6,
    HeuristicsMode = 8,
    KnobType = 9,
    PointwiseMode = 14,
    Descriptor = 15,
    ReductionOperator = 18,
    #[cfg_attr(not(test), expect(dead_code, reason = "as DeviceProperties"))]
    Char = 24,
}

/// `cudnnDataType_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum DataType {
    F32 = 0,
    F16 = 2,
    I32 = 4,
    Bf16 = 9,
    Boolean = 11,
}

/// `cudnnPointwiseMode_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Add = 0,
    Mul = 1,
    Div = 6,
    Sub = 9,
    Exp = 13,
    Log = 15,
    Identity = 21,
    Greater = 302,
    GreaterOrEqual = 303,
    Less = 304,
    And = 400,
    /// The index along an axis.
    Index = 501,
    /// `t ? x : b`.
    Select = 601,
}

/// `cudnnReduceTensorOp_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reduce {
    Add = 0,
    Max = 3,
}

/// `cudnnBackendKnobType_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Knob {
    Stages = 14,
    KernelConfig = 24,
    ClusterRows = 27,
    StreamK = 38,
    TileRows = 40,
    TileColumns = 41,
}

/// `CUDNN_HEUR_MODE_A`.
pub(super) const HEURISTICS_A: c_int = 3;
/// Statuses from `CUDNN_STATUS_NOT_SUPPORTED` on say that there is no such kernel, until the next thousand.
pub(super) const NOT_SUPPORTED: std::ops::Range<c_int> = 3000..4000;
/// The kernel that an engine wrote does not compile: as good as none.
pub(super) const COMPILATION_FAILED: c_int = 4001;
/// The first of the statuses of a device that failed.
pub(super) const EXECUTION_FAILED: c_int = 5000;
/// The host or the device has no memory left.
pub(super) const HOST_ALLOCATION_FAILED: c_int = 4003;
pub(super) const DEVICE_ALLOCATION_FAILED: c_int = 4004;

/// Whether the host or the device is out of memory, or the device has failed: another kernel would change nothing.
pub(super) const fn is_lasting(status: c_int) -> bool {
    matches!(status, HOST_ALLOCATION_FAILED | DEVICE_ALLOCATION_FAILED | EXECUTION_FAILED..)
}
