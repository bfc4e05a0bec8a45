"""The supported names of TensorFlow, and the objects that they stand for.

A module of TensorFlow, such as `tf.distribute.experimental`, is a function here that returns its
names. It runs when a program first uses the module, because some take a while to import. The names
of many modules are those that a module of `distributary.tensorflow` defines.
"""

import functools
import importlib
import operator
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import distributary.autograph as autograph
import distributary.checkpoint as checkpoint
import distributary.cluster_resolver as cluster_resolver
import distributary.config as config
import distributary.context as context
import distributary.data as data
import distributary.errors as errors
import distributary.experimental as experimental
import distributary.gradients as gradients
import distributary.options as options
import distributary.strategies as strategies
import distributary.tpu as tpu
import distributary.variables as values
from distributary._summaries import Summaries, SummaryWriter
from distributary.tensorflow import (
    _arrays,
    _checks,
    _composites,
    _config,
    _control,
    _data,
    _data_experimental,
    _draws,
    _examples,
    _image,
    _io,
    _linalg,
    _lookup,
    _math,
    _nn,
    _programs,
    _random,
    _saved_model,
    _strings,
    _training,
)
from distributary.tensorflow._functions import function
from distributary.tensorflow._host import of_host
from distributary.tensorflow._operations import Operation, named, operations, public
from distributary.tensorflow._variables import Variable


class Late(NamedTuple):
    """A name whose object needs Keras or another package, and is made when it is first used."""

    make: Callable[[], Any]


Names = Mapping[str, Any]
_VERSION = "2.21.0"
_nothing = _config.nothing

_CODES = (
    "OK CANCELLED UNKNOWN INVALID_ARGUMENT DEADLINE_EXCEEDED NOT_FOUND ALREADY_EXISTS"
    " PERMISSION_DENIED RESOURCE_EXHAUSTED FAILED_PRECONDITION ABORTED OUT_OF_RANGE UNIMPLEMENTED"
    " INTERNAL UNAVAILABLE DATA_LOSS UNAUTHENTICATED"
)
_DTYPES = (
    "bfloat16 bool complex64 complex128 float16 float32 float64 int8 int16 int32 int64 uint8"
    " uint16 uint32 uint64"
)


@functools.cache
def _dtypes() -> Names:
    """Returns the dtypes. In arrays, those of 64 bits become 32 bits, as everywhere in JAX."""
    return {
        **{name: jnp.dtype(name) for name in _DTYPES.split()},
        "DType": np.dtype,
        "as_dtype": np.dtype,
        "string": jnp.dtype(object),
    }


def _late(path: str) -> Late:
    """Returns a name of `tf.keras`, which imports this module."""
    keras = "distributary.compat.tensorflow.keras"
    return Late(lambda: operator.attrgetter(path)(importlib.import_module(keras)))


def _message(name: str) -> Late:
    return Late(lambda: _training.message_type(name))


def _root() -> Names:
    return {
        **_math.EVERYWHERE,
        **_arrays.ARRAYS,
        **_dtypes(),
        **operations(_arrays),
        **operations(_checks, "Assert"),
        **operations(_linalg, "einsum matmul norm"),
        **operations(_math, "add_n argmax argmin cumsum reduce_mean"),
        **public(_control),
        **public(_programs),
        **named(gradients, "GradientTape UnconnectedGradients"),
        **named(options, "VariableAggregation VariableSynchronization"),
        "IndexedSlices": values.IndexedSlices,
        **{name: _late(name) for name in ("initializers", "losses", "metrics", "optimizers")},
        "SparseTensor": _composites.SparseTensor,
        "Tensor": jax.Array,
        "TensorArray": _composites.TensorArray,
        "TensorSpec": data.TensorSpec,
        "Variable": Variable,
        "__version__": _VERSION,
        "as_string": _strings.as_string,
        "double": jnp.dtype("float64"),
        "function": function,
        "half": jnp.dtype("float16"),
        "newaxis": None,
        "ones_initializer": _late("initializers.Ones"),
        "random_normal_initializer": _late("initializers.RandomNormal"),
        "random_uniform_initializer": _late("initializers.RandomUniform"),
        "zeros_initializer": _late("initializers.Zeros"),
    }


def _distribute() -> Names:
    return {
        **named(
            values, "CrossDeviceOps HierarchicalCopyAllReduce NcclAllReduce ReductionToOneDevice"
        ),
        **named(
            context,
            "InputContext ReplicaContext experimental_set_strategy get_replica_context get_strategy"
            " has_strategy in_cross_replica_context",
        ),
        **named(experimental.coordinator, "ParameterServerStrategy Server"),
        **named(options, "InputOptions InputReplicationMode ReduceOp RunOptions"),
        **named(
            strategies,
            "DistributedDataset DistributedIterator MirroredStrategy MultiWorkerMirroredStrategy"
            " OneDeviceStrategy Strategy StrategyExtended TPUStrategy",
        ),
        "DistributedValues": values.DistributedValues,
    }


def _distribute_experimental() -> Names:
    return {
        **named(
            experimental,
            "CentralStorageStrategy CommunicationImplementation CommunicationOptions"
            " MultiWorkerMirroredStrategy ParameterServerStrategy PreemptionCheckpointHandler"
            " TPUStrategy TerminationConfig ValueContext",
        ),
        "CollectiveCommunication": experimental.CommunicationImplementation,
        "CollectiveHints": _config.collective_hints,
    }


def _coordinator() -> dict[str, Any]:
    return named(
        experimental.coordinator,
        "ClusterCoordinator PerWorkerValues RemoteValue experimental_get_current_worker_index",
    )


def _errors() -> Names:
    return {
        **{name: number for number, name in enumerate(_CODES.split())},  # of google/rpc/code.proto
        "AbortedError": errors.UnavailableError,
        "AlreadyExistsError": FileExistsError,
        "CancelledError": errors.CancelledError,
        "DataLossError": errors.CheckpointError,
        "DeadlineExceededError": TimeoutError,
        "FailedPreconditionError": errors.ContextError,
        "InternalError": jax.errors.JaxRuntimeError,
        "InvalidArgumentError": errors.InvalidValueError,
        "NotFoundError": FileNotFoundError,
        "OpError": errors.DistributaryError,
        "OutOfRangeError": errors.OutOfRangeError,
        "PermissionDeniedError": PermissionError,
        "ResourceExhaustedError": jax.errors.JaxRuntimeError,
        "UnauthenticatedError": PermissionError,
        "UnavailableError": errors.UnavailableError,
        "UnimplementedError": errors.UnsupportedError,
        "UnknownError": jax.errors.JaxRuntimeError,
    }


# Both in `tf.config` and in `tf.config.experimental`.
_DEVICES = "get_visible_devices list_logical_devices list_physical_devices set_visible_devices"


def _config_experimental() -> Names:
    return {
        **named(
            _config,
            f"{_DEVICES} enable_op_determinism enable_tensor_float_32_execution get_device_details"
            " get_memory_growth get_memory_info set_memory_growth"
            " tensor_float_32_execution_enabled",
        ),
        "VirtualDeviceConfiguration": _config.LogicalDeviceConfiguration,
        "get_synchronous_execution": _checks.get_log_device_placement,
        "get_virtual_device_configuration": _config.get_logical_device_configuration,
        "set_synchronous_execution": _nothing,
        "set_virtual_device_configuration": _config.set_logical_device_configuration,
    }


@functools.cache
def _summaries() -> Any:
    return Summaries()


def _summary() -> Names:
    summaries = _summaries()
    methods = [name for name in dir(summaries) if not name.startswith(("_", "get_", "set_"))]
    names = {name: getattr(summaries, name) for name in methods}
    traces = named(_config, "trace_export trace_off trace_on")
    return {**names, **traces, "SummaryWriter": SummaryWriter}


_FILES = "TFRecordOptions TFRecordWriter matching_files read_file write_file"
_GENERATORS = "Generator get_global_generator set_global_generator"

#: Functions that return the names of TensorFlow's modules; "" is `tf` itself.
MODULES: dict[str, Callable[[], Names]] = {
    "": _root,
    "audio": lambda: named(_io, "DecodedWav decode_wav"),
    "autograph": lambda: {"set_verbosity": _nothing},
    "autograph.experimental": lambda: named(autograph, "do_not_convert set_loop_options"),
    "bitwise": dict,
    "compat": lambda: {**named(_config, "as_bytes as_text"), "as_str": _config.as_text},
    "compat.v1": lambda: {
        "ConfigProto": _config.ConfigProto,
        "disable_v2_behavior": _nothing,
        "enable_eager_execution": _nothing,
    },
    "compat.v1.logging": lambda: {"set_verbosity": _nothing},
    "config": lambda: {
        **named(
            _config,
            f"{_DEVICES} LogicalDevice LogicalDeviceConfiguration PhysicalDevice"
            " functions_run_eagerly get_logical_device_configuration get_soft_device_placement"
            " run_functions_eagerly set_logical_device_configuration",
        ),
        "experimental_connect_to_cluster": config.experimental_connect_to_cluster,
        "experimental_run_functions_eagerly": _config.run_functions_eagerly,
        "set_soft_device_placement": _nothing,
    },
    "config.experimental": _config_experimental,
    "config.optimizer": lambda: {"set_experimental_options": _nothing, "set_jit": _nothing},
    "config.threading": lambda: {
        "get_inter_op_parallelism_threads": _config.get_num_threads,
        "get_intra_op_parallelism_threads": _config.get_num_threads,
        "set_inter_op_parallelism_threads": _nothing,
        "set_intra_op_parallelism_threads": _nothing,
    },
    "data": lambda: {
        **named(_data, "Dataset FixedLengthRecordDataset TFRecordDataset TextLineDataset"),
        **named(data, "AUTOTUNE INFINITE_CARDINALITY Options UNKNOWN_CARDINALITY"),
        "Iterator": data.DatasetIterator,
        "NumpyIterator": data.DatasetIterator,
        "ThreadingOptions": types.SimpleNamespace,
    },
    "data.experimental": lambda: {
        **public(_data_experimental),
        **named(
            data,
            "AUTOTUNE AutoShardPolicy DistributeOptions INFINITE_CARDINALITY SHARD_HINT"
            " UNKNOWN_CARDINALITY",
        ),
        "Counter": _data.Dataset.counter,
        "OptimizationOptions": types.SimpleNamespace,
        "Optional": experimental.Optional,
        "RandomDataset": _data.Dataset.random,
        "ThreadingOptions": types.SimpleNamespace,
        "load": _data.Dataset.load,
        "sample_from_datasets": _data.Dataset.sample_from_datasets,
    },
    "debugging": lambda: {
        **operations(_checks),
        **named(
            _checks,
            "assert_proper_iterable assert_same_float_dtype assert_shapes disable_check_numerics"
            " enable_check_numerics get_log_device_placement is_numeric_tensor"
            " set_log_device_placement",
        ),
    },
    "distribute": _distribute,
    "distribute.cluster_resolver": lambda: named(
        cluster_resolver,
        "ClusterResolver GCEClusterResolver KubernetesClusterResolver KubernetesExecutableLocation"
        " SimpleClusterResolver SlurmClusterResolver TFConfigClusterResolver TPUClusterResolver"
        " UnionResolver",
    ),
    "distribute.coordinator": lambda: (
        _coordinator() | named(experimental.coordinator, "PerWorkerValue")
    ),
    "distribute.experimental": _distribute_experimental,
    "distribute.experimental.coordinator": _coordinator,
    "distribute.experimental.partitioners": lambda: named(
        experimental.partitioners,
        "FixedShardsPartitioner MaxSizePartitioner MinSizePartitioner Partitioner",
    ),
    "dtypes": lambda: {**_dtypes(), **operations(_arrays, "cast")},
    "errors": _errors,
    "experimental": lambda: {"Optional": experimental.Optional},
    "image": lambda: {
        **operations(_image),
        **of_host(named(_examples, "decode_image decode_jpeg decode_png encode_jpeg encode_png")),
        "ResizeMethod": _image.ResizeMethod,
    },
    "io": lambda: of_host({**public(_examples), **named(_io, _FILES)}),
    "io.gfile": lambda: named(
        _io,
        "GFile copy exists get_registered_schemes glob isdir join listdir makedirs mkdir remove"
        " rename rmtree stat walk",
    ),
    "linalg": lambda: {**operations(_linalg), **_linalg.OF_JAX},
    "lookup": lambda: named(
        _lookup,
        "KeyValueTensorInitializer StaticHashTable StaticVocabularyTable TextFileIndex"
        " TextFileInitializer",
    ),
    "lookup.experimental": lambda: named(_lookup, "DenseHashTable MutableHashTable"),
    "math": lambda: {**_math.EVERYWHERE, **_math.MATH, **operations(_math)},
    "nest": lambda: named(
        _composites, "assert_same_structure flatten is_nested map_structure pack_sequence_as"
    ),
    "nn": lambda: {
        **_nn.ACTIVATIONS,
        **operations(
            _nn,
            "avg_pool2d bias_add conv2d depthwise_conv2d dropout l2_loss leaky_relu max_pool2d"
            " moments nce_loss sampled_softmax_loss sigmoid_cross_entropy_with_logits"
            " softmax_cross_entropy_with_logits sparse_softmax_cross_entropy_with_logits",
        ),
        **named(_nn, "compute_average_loss scale_regularization_loss"),
        **operations(_math, "in_top_k l2_normalize top_k"),
        "embedding_lookup": values.embedding_lookup,
        "avg_pool": Operation(_nn.avg_pool2d),
        "max_pool": Operation(_nn.max_pool2d),
    },
    "profiler": dict,
    "profiler.experimental": lambda: {
        "ProfilerOptions": _config.ConfigProto,
        "Trace": jax.profiler.TraceAnnotation,
        "start": _config.start_profiler,
        "stop": _config.stop_profiler,
    },
    "profiler.experimental.server": lambda: {"start": jax.profiler.start_server},
    "random": lambda: {
        **operations(_random),
        **operations(_nn, "log_uniform_candidate_sampler"),
        **named(_draws, _GENERATORS),
        "set_seed": _draws.set_seed,
    },
    "random.experimental": lambda: {
        **named(_draws, _GENERATORS),
        **operations(_draws, "stateless_shuffle"),
        "stateless_fold_in": Operation(_random.fold_in),
        "stateless_split": Operation(_random.split),
    },
    "saved_model": lambda: {
        "LoadOptions": _config.ConfigProto,
        "SaveOptions": _config.ConfigProto,
        **named(_saved_model, "contains_saved_model load save"),
    },
    "signal": dict,
    "sparse": lambda: {"SparseTensor": _composites.SparseTensor, "to_dense": _composites.to_dense},
    "strings": lambda: {**public(_strings), "to_hash_bucket_fast": _strings.to_hash_bucket},
    "summary": _summary,
    "summary.experimental": lambda: named(_summaries(), "get_step set_step"),
    "sysconfig": lambda: {"get_build_info": _config.get_build_info},
    "test": lambda: {
        **named(
            _config,
            "gpu_device_name is_built_with_cuda is_built_with_rocm is_built_with_xla"
            " is_cpu_target_available is_gpu_available",
        ),
        "is_built_with_gpu_support": _config.is_built_with_cuda,
    },
    "tpu": lambda: {"XLAOptions": tpu.XLAOptions},
    "tpu.experimental": lambda: named(
        tpu.experimental,
        "DeviceAssignment DeviceOrderMode TPUSystemMetadata Topology initialize_tpu_system"
        " shutdown_tpu_system",
    ),
    "train": lambda: {
        **{name: _message(name) for name in _training.MESSAGES},
        **named(
            checkpoint,
            "Checkpoint CheckpointManager latest_checkpoint list_variables load_variable",
        ),
        **named(
            _training,
            "CheckpointOptions ExponentialMovingAverage checkpoints_iterator get_checkpoint_state"
            " load_checkpoint",
        ),
        "ClusterSpec": cluster_resolver.ClusterSpec,
    },
    "train.experimental": lambda: {"PythonState": _training.PythonState},
    "types": dict,
    "types.experimental": dict,
    "types.experimental.distributed": lambda: named(values, "Mirrored PerReplica"),
    "version": lambda: {"VERSION": _VERSION},
}


@functools.cache
def names_of(module: str) -> Names:
    """Returns the names of a module of TensorFlow, and the objects they stand for."""
    return MODULES[module]()
