"""The supported names of TensorFlow, and the objects that they stand for.

Keys are the names after `tf.`. A table of docs/migrating.md is made from these.
"""

from typing import Any

import jax.numpy as jnp

from distributary.compat.tensorflow._operations import Operation

_DISTRIBUTE = (
    "CrossDeviceOps DistributedDataset DistributedIterator DistributedValues"
    " HierarchicalCopyAllReduce InputContext InputOptions InputReplicationMode MirroredStrategy"
    " MultiWorkerMirroredStrategy NcclAllReduce OneDeviceStrategy ParameterServerStrategy ReduceOp"
    " ReductionToOneDevice ReplicaContext RunOptions Server Strategy StrategyExtended TPUStrategy"
    " experimental_set_strategy get_replica_context get_strategy has_strategy"
    " in_cross_replica_context"
)
_DISTRIBUTE_EXPERIMENTAL = (
    "CentralStorageStrategy CommunicationImplementation CommunicationOptions"
    " MultiWorkerMirroredStrategy ParameterServerStrategy PreemptionCheckpointHandler TPUStrategy"
    " TerminationConfig ValueContext"
)
_COORDINATOR = (
    "ClusterCoordinator PerWorkerValues RemoteValue experimental_get_current_worker_index"
)
_PARTITIONERS = "FixedShardsPartitioner MaxSizePartitioner MinSizePartitioner Partitioner"
_CLUSTER_RESOLVER = (
    "ClusterResolver GCEClusterResolver KubernetesClusterResolver KubernetesExecutableLocation"
    " SimpleClusterResolver SlurmClusterResolver TFConfigClusterResolver TPUClusterResolver"
    " UnionResolver"
)
_DATA = (
    "AUTOTUNE Dataset INFINITE_CARDINALITY Options TFRecordDataset TextLineDataset"
    " UNKNOWN_CARDINALITY"
)
_TPU_EXPERIMENTAL = (
    "DeviceAssignment DeviceOrderMode TPUSystemMetadata Topology initialize_tpu_system"
    " shutdown_tpu_system"
)


def _same(names: str, here: str, there: str) -> dict[str, str]:
    return {f"{here}{name}": f"{there}.{name}" for name in names.split()}


_COMPAT = "distributary.compat.tensorflow"
_MATH = f"{_COMPAT}._math"
_NN = f"{_COMPAT}._nn"
_PROGRAMS = f"{_COMPAT}._programs"
_CONFIG = f"{_COMPAT}._config"

#: The full names of the objects.
TARGETS: dict[str, str] = {
    **_same(_DISTRIBUTE, "distribute.", "distributary"),
    **_same(_DISTRIBUTE_EXPERIMENTAL, "distribute.experimental.", "distributary.experimental"),
    "distribute.experimental.CollectiveCommunication": (
        "distributary.experimental.CommunicationImplementation"
    ),
    **_same(_COORDINATOR, "distribute.experimental.coordinator.", "distributary.coordinator"),
    **_same(_COORDINATOR, "distribute.coordinator.", "distributary.coordinator"),
    "distribute.coordinator.PerWorkerValue": "distributary.coordinator.PerWorkerValue",
    **_same(
        _PARTITIONERS,
        "distribute.experimental.partitioners.",
        "distributary.experimental.partitioners",
    ),
    **_same(_CLUSTER_RESOLVER, "distribute.cluster_resolver.", "distributary.cluster_resolver"),
    "types.experimental.distributed.Mirrored": "distributary.Mirrored",
    "types.experimental.distributed.PerReplica": "distributary.PerReplica",
    # State, programs and gradients.
    **_same(
        "GradientTape IndexedSlices UnconnectedGradients Variable VariableAggregation"
        " VariableSynchronization",
        "",
        "distributary",
    ),
    "DType": "numpy.dtype",
    "Tensor": "jax.Array",
    "as_dtype": "numpy.dtype",
    "dtypes.DType": "numpy.dtype",
    "dtypes.as_dtype": "numpy.dtype",
    "dtypes.cast": f"{_MATH}.cast",
    "TensorSpec": "distributary.data.TensorSpec",
    "function": f"{_PROGRAMS}.function",
    "cond": f"{_PROGRAMS}.cond",
    "while_loop": f"{_PROGRAMS}.while_loop",
    "executing_eagerly": f"{_PROGRAMS}.executing_eagerly",
    "get_logger": f"{_PROGRAMS}.get_logger",
    "is_tensor": f"{_PROGRAMS}.is_tensor",
    "print": f"{_PROGRAMS}.print_",
    **_same("flatten map_structure pack_sequence_as", "nest.", _PROGRAMS),
    # Keras 3.
    "keras": "keras",
    "initializers": "keras.initializers",
    "losses": "keras.losses",
    "metrics": "keras.metrics",
    "optimizers": "keras.optimizers",
    # Input.
    **_same(_DATA, "data.", "distributary.data"),
    "data.Iterator": "distributary.data.DatasetIterator",
    "data.experimental.AUTOTUNE": "distributary.data.AUTOTUNE",
    "data.experimental.AutoShardPolicy": "distributary.data.AutoShardPolicy",
    "data.experimental.DistributeOptions": "distributary.data.DistributeOptions",
    "data.experimental.INFINITE_CARDINALITY": "distributary.data.INFINITE_CARDINALITY",
    "data.experimental.SHARD_HINT": "distributary.data.SHARD_HINT",
    "data.experimental.UNKNOWN_CARDINALITY": "distributary.data.UNKNOWN_CARDINALITY",
    "experimental.Optional": "distributary.experimental.Optional",
    # Saving.
    **_same("Checkpoint CheckpointManager latest_checkpoint", "train.", "distributary.checkpoint"),
    "train.ClusterSpec": "distributary.cluster_resolver.ClusterSpec",
    # Devices.
    **_same(
        "LogicalDevice LogicalDeviceConfiguration PhysicalDevice list_logical_devices"
        " list_physical_devices set_logical_device_configuration set_visible_devices",
        "config.",
        _CONFIG,
    ),
    "config.experimental.set_memory_growth": f"{_CONFIG}.set_memory_growth",
    "config.experimental_connect_to_cluster": "distributary.config.experimental_connect_to_cluster",
    "tpu.XLAOptions": "distributary.tpu.XLAOptions",
    **_same(_TPU_EXPERIMENTAL, "tpu.experimental.", "distributary.tpu.experimental"),
    # Errors that distributary raises in their place.
    "errors.CancelledError": "distributary.errors.CancelledError",
    "errors.OutOfRangeError": "distributary.errors.OutOfRangeError",
    "errors.UnavailableError": "distributary.errors.UnavailableError",
    "errors.UnimplementedError": "distributary.errors.UnsupportedError",
    # Arrays and mathematics.
    **_same(
        "add_n argmax argmin boolean_mask cast clip_by_global_norm clip_by_norm concat constant"
        " einsum fill gather gather_nd matmul norm pad reduce_mean shape size split stack unstack",
        "",
        _MATH,
    ),
    "range": f"{_MATH}.range_",
    **_same(
        "add_n argmax argmin confusion_matrix count_nonzero divide_no_nan in_top_k l2_normalize"
        " reduce_mean squared_difference top_k",
        "math.",
        _MATH,
    ),
    **_same("einsum global_norm matmul norm", "linalg.", _MATH),
    **_same(
        "avg_pool2d bias_add compute_average_loss conv2d dropout l2_loss max_pool2d moments"
        " scale_regularization_loss sigmoid_cross_entropy_with_logits"
        " softmax_cross_entropy_with_logits sparse_softmax_cross_entropy_with_logits",
        "nn.",
        _NN,
    ),
    **_same("in_top_k l2_normalize top_k", "nn.", _MATH),
    "nn.embedding_lookup": "distributary.embedding_lookup",
    **_same(
        "categorical normal set_seed shuffle stateless_normal stateless_uniform truncated_normal"
        " uniform",
        "random.",
        f"{_COMPAT}._random",
    ),
}


def _operations(module: str, tensors: str, names: str, options: str = "") -> dict[str, Operation]:
    """Returns operations with alike arguments; a name may be followed by that in the module."""
    pairs = (name.partition(":") for name in names.split())
    return {
        name: Operation(f"{module}.{target or name}", tensors, options) for name, _, target in pairs
    }


_REDUCE = "axis=None keepdims=False"
# Operations with a name both in `tf` and in `tf.math`.
_EVERYWHERE = {
    **_operations(
        "jax.numpy",
        "x",
        "abs acos:arccos asin:arcsin atan:arctan cos cosh exp floor logical_not negative round sign"
        " sin sinh sqrt square tan tanh",
    ),
    **_operations(
        "jax.numpy",
        "x y",
        "add divide:true_divide equal greater greater_equal less less_equal logical_and logical_or"
        " maximum minimum multiply not_equal pow:power subtract",
    ),
    **_operations(
        "jax.numpy",
        "input_tensor",
        "reduce_all:all reduce_any:any reduce_max:max reduce_min:min reduce_prod:prod"
        " reduce_sum:sum",
        _REDUCE,
    ),
    "atan2": Operation("jax.numpy.arctan2", "y x"),
    "cumsum": Operation("jax.numpy.cumsum", "x", "axis=0"),
    "reduce_logsumexp": Operation("jax.nn.logsumexp", "input_tensor", _REDUCE),
    "sigmoid": Operation("jax.nn.sigmoid", "x"),
}
_MATHEMATICS = {
    **_EVERYWHERE,
    **_operations(
        "jax.numpy",
        "x",
        "ceil expm1 is_finite:isfinite is_inf:isinf is_nan:isnan log log1p reciprocal",
    ),
    **_operations(
        "jax.numpy",
        "x y",
        "floordiv:floor_divide floormod:mod logical_xor mod truediv:true_divide",
    ),
    **_operations("jax.numpy", "input_tensor", "reduce_std:std reduce_variance:var", _REDUCE),
    **_operations("jax.lax", "x", "erf rsqrt"),
    "cumprod": Operation("jax.numpy.cumprod", "x", "axis=0"),
    "log_sigmoid": Operation("jax.nn.log_sigmoid", "x"),
    "softplus": Operation("jax.nn.softplus", "features"),
}
_ACTIVATIONS = {
    **_operations("jax.nn", "features", "elu relu relu6 selu silu softplus swish:silu"),
    **_operations("jax.nn", "logits", "log_softmax softmax", "axis=-1"),
    "gelu": Operation("jax.nn.gelu", "features", "approximate=False"),
    "leaky_relu": Operation("jax.nn.leaky_relu", "features", "alpha=0.2:negative_slope"),
    "sigmoid": Operation("jax.nn.sigmoid", "x"),
    "tanh": Operation("jax.numpy.tanh", "x"),
}

#: The operations on arrays.
OPERATIONS: dict[str, Operation] = {
    **_EVERYWHERE,
    **{f"math.{name}": operation for name, operation in _MATHEMATICS.items()},
    **{f"nn.{name}": operation for name, operation in _ACTIVATIONS.items()},
    "identity": Operation("jax.numpy.asarray", "input"),
    **_operations("jax.numpy", "input", "ones_like zeros_like", "dtype=None"),
    **_operations("jax.numpy", "", "ones zeros", "shape dtype=None"),
    "truediv": Operation("jax.numpy.true_divide", "x y"),
    "clip_by_value": Operation("jax.numpy.clip", "t", "clip_value_min:min clip_value_max:max"),
    "convert_to_tensor": Operation("jax.numpy.asarray", "value", "dtype=None"),
    "expand_dims": Operation("jax.numpy.expand_dims", "input", "axis"),
    "eye": Operation("jax.numpy.eye", "", "num_rows:N num_columns=None:M dtype=None"),
    "linspace": Operation("jax.numpy.linspace", "start stop", "num axis=0"),
    "one_hot": Operation("jax.nn.one_hot", "indices", "depth:num_classes axis=-1 dtype=None"),
    "repeat": Operation("jax.numpy.repeat", "input", "repeats axis=None"),
    "reshape": Operation("jax.numpy.reshape", "tensor", "shape"),
    "reverse": Operation("jax.numpy.flip", "tensor", "axis"),
    "squeeze": Operation("jax.numpy.squeeze", "input", "axis=None"),
    "stop_gradient": Operation("jax.lax.stop_gradient", "input"),
    "tensordot": Operation("jax.numpy.tensordot", "a b", "axes"),
    "tile": Operation("jax.numpy.tile", "input", "multiples:reps"),
    "transpose": Operation("jax.numpy.transpose", "a", "perm=None:axes"),
    "where": Operation("jax.numpy.where", "condition x y"),
}

_DTYPES = (
    "bfloat16 complex64 complex128 float16 float32 float64 int8 int16 int32 int64 uint8 uint16"
    " uint32 uint64"
)

#: The constants. In arrays, a dtype of 64 bits becomes one of 32 bits, as everywhere in JAX.
CONSTANTS: dict[str, Any] = {
    "__version__": "2.21.0",
    "newaxis": None,
    **{f"{space}{name}": jnp.dtype(name) for space in ("", "dtypes.") for name in _DTYPES.split()},
    "bool": jnp.dtype(bool),
    "dtypes.bool": jnp.dtype(bool),
    "double": jnp.dtype("float64"),
    "half": jnp.dtype("float16"),
}
