"""The modules `tf`, `tf.nn`, ..., their names, and the errors for names that they lack.

A module of TensorFlow, such as `tf.distribute.experimental`, is a function here that returns its
names. It runs when a program first uses the module, because some take a while to import. The names
of many modules are those that a module of `distributary.tensorflow` defines.
"""

import difflib
import functools
import importlib
import operator
import sys
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
    _config,
    _data,
    _functions,
    _image,
    _io,
    _nn,
    _objects,
    _random,
    _saving,
    _text,
)
from distributary.tensorflow._operations import Operation, named, of_host, operations


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
    return Late(lambda: _io.message_type(name))


def _root() -> Names:
    return {
        **_arrays.EVERYWHERE,
        **_arrays.ARRAYS,
        **_dtypes(),
        **operations(
            _arrays,
            "add_n argmax argmin argsort boolean_mask cast clip_by_global_norm clip_by_norm"
            " clip_by_value concat constant convert_to_tensor cumsum einsum ensure_shape eye fill"
            " foldl foldr gather gather_nd identity linspace map_fn matmul meshgrid norm one_hot"
            " pad range_ rank reduce_mean scan scatter_nd sequence_mask shape size slice_ sort"
            " split tensor_scatter_nd_add tensor_scatter_nd_sub tensor_scatter_nd_update tile"
            " transpose unique unstack vectorized_map where zeros",
        ),
        **operations(_config, "Assert"),
        **named(
            _functions,
            "case cond control_dependencies custom_gradient device executing_eagerly function"
            " get_static_value group init_scope inside_function name_scope no_op numpy_function"
            " print_ py_function recompute_grad switch_case timestamp while_loop",
        ),
        **named(
            _objects,
            "Module SparseTensor TensorArray TensorShape Variable constant_initializer get_logger"
            " identity_n is_tensor",
        ),
        **named(gradients, "GradientTape UnconnectedGradients"),
        **named(options, "VariableAggregation VariableSynchronization"),
        "IndexedSlices": values.IndexedSlices,
        **{name: _late(name) for name in ("initializers", "losses", "metrics", "optimizers")},
        "Tensor": jax.Array,
        "TensorSpec": data.TensorSpec,
        "__version__": _VERSION,
        "as_string": _text.as_string,
        "double": jnp.dtype("float64"),
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
        "get_synchronous_execution": _config.get_log_device_placement,
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
        **_data.TRANSFORMATIONS,
        **named(
            _data,
            "CsvDataset at cardinality choose_from_datasets copy_to_device from_list"
            " get_next_as_optional get_single_element get_structure make_batched_features_dataset"
            " map_and_batch pad_to_cardinality prefetch_to_device save shuffle_and_repeat",
        ),
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
        **operations(
            _config,
            "Assert assert_all_finite assert_equal assert_greater assert_greater_equal"
            " assert_integer assert_less assert_less_equal assert_near assert_negative"
            " assert_non_negative assert_non_positive assert_none_equal assert_positive assert_rank"
            " assert_rank_at_least assert_rank_in assert_scalar assert_type check_numerics",
        ),
        **named(
            _config,
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
        **operations(
            _image,
            "adjust_brightness adjust_contrast adjust_hue adjust_saturation central_crop"
            " convert_image_dtype crop_to_bounding_box extract_patches flip_left_right flip_up_down"
            " grayscale_to_rgb pad_to_bounding_box per_image_standardization psnr random_brightness"
            " random_contrast random_crop random_flip_left_right random_flip_up_down random_hue"
            " random_saturation resize resize_with_crop_or_pad rgb_to_grayscale rot90"
            " sample_distorted_bounding_box stateless_random_brightness stateless_random_contrast"
            " stateless_random_crop stateless_random_flip_left_right stateless_random_flip_up_down"
            " stateless_random_hue stateless_random_saturation",
        ),
        **of_host(named(_image, "decode_image decode_jpeg decode_png encode_jpeg encode_png")),
        "ResizeMethod": _image.ResizeMethod,
    },
    "io": lambda: of_host(
        named(
            _image,
            "decode_and_crop_jpeg decode_bmp decode_gif decode_image decode_jpeg decode_png"
            " encode_jpeg encode_png is_jpeg",
        )
        | named(
            _io,
            "FixedLenFeature FixedLenSequenceFeature TFRecordOptions TFRecordWriter VarLenFeature"
            " decode_base64 decode_compressed decode_csv decode_raw encode_base64 matching_files"
            " parse_example parse_sequence_example parse_single_example"
            " parse_single_sequence_example parse_tensor read_file serialize_tensor write_file",
        )
    ),
    "io.gfile": lambda: named(
        _io,
        "GFile copy exists get_registered_schemes glob isdir join listdir makedirs mkdir remove"
        " rename rmtree stat walk",
    ),
    "linalg": lambda: {
        **operations(
            _arrays,
            "band_part cholesky diag diag_part eigh einsum global_norm inv matmul norm solve svd"
            " trace",
        ),
        **_arrays.LINALG,
    },
    "lookup": lambda: named(
        _text,
        "KeyValueTensorInitializer StaticHashTable StaticVocabularyTable TextFileIndex"
        " TextFileInitializer",
    ),
    "lookup.experimental": lambda: named(_text, "DenseHashTable MutableHashTable"),
    "math": lambda: {
        **_arrays.EVERYWHERE,
        **_arrays.MATH,
        **operations(
            _arrays,
            "add_n argmax argmin confusion_matrix count_nonzero cumprod cumsum divide_no_nan"
            " in_top_k l2_normalize log_softmax reduce_mean softmax squared_difference top_k",
        ),
    },
    "nest": lambda: named(
        _objects, "assert_same_structure flatten is_nested map_structure pack_sequence_as"
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
        **operations(_arrays, "in_top_k l2_normalize log_softmax softmax top_k"),
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
        **operations(
            _random,
            "categorical fold_in gamma normal poisson shuffle split stateless_binomial"
            " stateless_categorical stateless_gamma stateless_normal stateless_poisson"
            " stateless_truncated_normal stateless_uniform truncated_normal uniform",
        ),
        **operations(_nn, "log_uniform_candidate_sampler"),
        **named(_random, f"{_GENERATORS} set_seed"),
    },
    "random.experimental": lambda: {
        **named(_random, _GENERATORS),
        **operations(_random, "stateless_shuffle"),
        "stateless_fold_in": Operation(_random.fold_in),
        "stateless_split": Operation(_random.split),
    },
    "saved_model": lambda: {
        "LoadOptions": _config.ConfigProto,
        "SaveOptions": _config.ConfigProto,
        **named(_saving, "contains_saved_model load save"),
    },
    "signal": dict,
    "sparse": lambda: named(_objects, "SparseTensor to_dense"),
    "strings": lambda: {
        **named(
            _text,
            "as_string bytes_split format_ join length lower ngrams reduce_join regex_full_match"
            " regex_replace split strip substr to_hash_bucket to_number upper",
        ),
        "to_hash_bucket_fast": _text.to_hash_bucket,
    },
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
        **{name: _message(name) for name in _io.MESSAGES},
        **named(
            checkpoint,
            "Checkpoint CheckpointManager latest_checkpoint list_variables load_variable",
        ),
        **named(
            _saving, "CheckpointOptions checkpoints_iterator get_checkpoint_state load_checkpoint"
        ),
        "ClusterSpec": cluster_resolver.ClusterSpec,
        "ExponentialMovingAverage": _objects.ExponentialMovingAverage,
    },
    "train.experimental": lambda: {"PythonState": _saving.PythonState},
    "types": dict,
    "types.experimental": dict,
    "types.experimental.distributed": lambda: named(values, "Mirrored PerReplica"),
    "version": lambda: {"VERSION": _VERSION},
}


@functools.cache
def names_of(module: str) -> Names:
    """Returns the names of a module of TensorFlow, and the objects they stand for."""
    return MODULES[module]()


_ROOT = "distributary.compat.tensorflow"


def names_in(module: str) -> list[str]:
    """Returns the names in a module such as `"distribute.experimental"`; `""` is `tf` itself."""
    prefix = f"{module}." if module else ""
    inner = [name.removeprefix(prefix) for name in MODULES if name and name.startswith(prefix)]
    return sorted({*names_of(module), *(name for name in inner if "." not in name)})


def lookup(module: str, name: str) -> Any:
    """Returns a name of a module.

    Raises:
        AttributeError: if it is not supported; the error says what to use instead.
    """
    full = f"{module}.{name}" if module else name
    names = names_of(module) if module in MODULES else {}
    if name in names:
        value = names[name]
        if isinstance(value, Operation):
            return value.function(f"tf.{full}")
        return value.make() if isinstance(value, Late) else value
    if f"{_ROOT}.{full}" in sys.modules:
        # Not from `sys.modules`, where a module is while another thread executes it.
        return importlib.import_module(f"{_ROOT}.{full}")
    message = f"tf.{full} is not among the names that {_ROOT} has."
    if not name.startswith("_") or full in EQUIVALENTS:
        remedy = equivalent(full)
        is_unknown = remedy == ANYTHING and module in MODULES
        close = difflib.get_close_matches(name, names_in(module) if is_unknown else (), 1, 0.85)
        advice = f"Did you mean {close[0]!r}?" if close else f"Use in its place: {remedy}."
        message = f"{message} {advice}"
    raise AttributeError(message, name=name)


class Namespace(types.ModuleType):
    """A module of TensorFlow."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{_ROOT}.{name}", f"`tf.{name}`, without TensorFlow.")
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `inspect` asks every module, also those that need a package
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}", name=name)
        return vars(self).setdefault(name, lookup(self._name, name))

    def __dir__(self) -> list[str]:
        return names_in(self._name)


def install() -> None:
    """Makes every module importable, as in `from distributary.compat.tensorflow.nn import relu`."""
    for name in filter(None, MODULES):
        sys.modules.setdefault(f"{_ROOT}.{name}", Namespace(name))


# Advice for names after `tf.`; several of them may share it. That for a module is for all in it.
_ADVICE: dict[str, str] = {
    # Objects that have another name elsewhere.
    "autodiff": "jax.jvp",
    "grad_pass_through no_gradient": "jax.custom_vjp",
    "hessians": "jax.hessian",
    "matrix_square_root": "jax.scipy.linalg.sqrtm",
    "random.create_rng_state": "jax.random.key",
    "raw_ops": "jax.lax",
    "xla": "jax.jit",
    "bitcast": "jax.lax.bitcast_convert_type",
    "math.cumulative_logsumexp": "jax.lax.cumlogsumexp",
    "truncatediv": "jax.lax.div",
    "truncatemod": "jax.lax.rem",
    "broadcast_dynamic_shape broadcast_static_shape": "jax.numpy.broadcast_shapes",
    "histogram_fixed_width": "jax.numpy.histogram",
    "histogram_fixed_width_bins": "jax.numpy.digitize",
    "math.invert_permutation": "jax.numpy.argsort",
    "math.reduce_euclidean_norm": "jax.numpy.linalg.norm",
    "math.bessel_i0": "jax.scipy.special.i0",
    "math.bessel_i1": "jax.scipy.special.i1",
    "math.lbeta": "jax.scipy.special.betaln",
    "math.segment_prod math.unsorted_segment_prod": "jax.ops.segment_prod",
    "nn.conv1d nn.conv3d nn.convolution": "keras.ops.conv",
    "nn.conv2d_transpose": "keras.ops.conv_transpose",
    "nn.ctc_loss": "keras.ops.ctc_loss",
    "nn.depth_to_space": "keras.ops.depth_to_space",
    "nn.separable_conv2d": "keras.ops.separable_conv",
    "nn.softsign": "keras.ops.softsign",
    "nn.space_to_depth": "keras.ops.space_to_depth",
    "feature_column": "keras.utils.FeatureSpace",
    "quantization": "keras.quantizers",
    "tpu.experimental.embedding": "keras.layers.Embedding",
    "queue": "tf.data.Dataset.prefetch",
    "realdiv": "tf.divide",
    "scalar_mul": "tf.multiply",
    "config.experimental_connect_to_host": "tf.config.experimental_connect_to_cluster",
    "distribute.experimental.PreemptionWatcher": (
        "tf.distribute.experimental.PreemptionCheckpointHandler"
    ),
    "distribute.experimental.rpc": "tf.distribute.coordinator.ClusterCoordinator.schedule",
    # Names that TensorFlow 2.21 has not either.
    "keras.engine": "tf.keras",
    "keras.experimental": "tf.keras.optimizers.schedules",
    "keras.layers.DenseFeatures": "tf.keras.utils.FeatureSpace",
    "keras.layers.experimental": (
        "tf.keras.layers; SyncBatchNormalization is BatchNormalization(synchronized=True)"
    ),
    "keras.mixed_precision.experimental": (
        "tf.keras.mixed_precision.set_global_policy, Policy and LossScaleOptimizer"
    ),
    "keras.utils.generic_utils": "tf.keras.utils and tf.keras.saving",
    "logging": "logging of Python",
    "contrib": "tf.keras and tf.distribute; TensorFlow 2 has no tf.contrib",
    "estimator": "tf.keras.Model with fit, in the scope of a strategy",
    "reset_default_graph get_default_graph global_variables_initializer get_session": (
        "nothing: leave it out, there are no graphs and sessions"
    ),
    "placeholder ConfigProto Session": "tf.function; sessions of TensorFlow 1 are not there",
    "random_uniform": "tf.random.uniform",
    # Programs and control flow.
    "Graph": "tf.function, and jax.make_jaxpr to look at a program",
    "gradients": "tf.GradientTape or jax.grad",
    "autograph": "tf.function, which converts control flow",
    "variable_creator_scope": "strategy.scope()",
    "assert_equal assert_greater assert_less": (
        "an assert on what the step returns, or checkify of JAX"
    ),
    "debugging": "an assert on what the step returns, numpy.testing, or checkify of JAX",
    "assert_rank": "an assert on the shape, which is known while a step is traced",
    "TypeSpec": "tf.TensorSpec or jax.ShapeDtypeStruct",
    "is_symbolic_tensor": "isinstance(x, jax.core.Tracer)",
    "config.optimizer": "the environment variable XLA_FLAGS",
    "config.threading": "the environment variable PJRT_NPROC, the number of threads of XLA",
    "config.experimental": "tf.config, or the settings of JAX: jax.config",
    # Strategies.
    "dtensor": "jax.sharding.NamedSharding and jax.jit, or keras.distribution.ModelParallel",
    "tpu.experimental.HardwareFeature": "jax.devices()[0].device_kind",
    # Data.
    "data.experimental.service": "several workers, each with its share of the dataset",
    "data.experimental.make_csv_dataset": (
        "tf.data.experimental.CsvDataset and map, or slices of what pandas reads"
    ),
    "data.experimental": "tf.data.Dataset, the methods of distributary.data.Dataset",
    "io.gfile": "pathlib, os and shutil of Python, or fsspec for object stores",
    "io": "functions of Python and NumPy in Dataset.map; pillow for images",
    "image.crop_and_resize": "jax.image.scale_and_translate",
    "image.decode_and_crop_jpeg": "tf.image.decode_jpeg and crop_to_bounding_box",
    "image.extract_jpeg_shape": "the shape of tf.image.decode_jpeg",
    "image.combined_non_max_suppression image.non_max_suppression"
    " image.non_max_suppression_padded image.non_max_suppression_with_scores": (
        "NumPy outside of the step, or keras_hub.layers.NonMaxSuppression"
    ),
    "image": "keras.ops.image in a step, keras.layers.RandomFlip and others, NumPy in Dataset.map",
    "load_op_library": "jax.ffi.ffi_call",
    "strings.unicode_split": "list(text) of Python in Dataset.map",
    "strings.unicode_decode": "ord of Python in Dataset.map",
    "strings.unicode_encode": "chr of Python in Dataset.map",
    "strings": "methods of Python's str in Dataset.map",
    "ragged RaggedTensor RaggedTensorSpec": "arrays padded by Dataset.padded_batch, with a mask",
    "sparse": "jax.experimental.sparse, or tf.IndexedSlices for rows of a table",
    # Saving, logging and what surrounds a program.
    "io.RaggedFeature io.SparseFeature": (
        "tf.io.FixedLenSequenceFeature(shape, dtype, allow_missing=True)"
    ),
    "train.Coordinator": "threading and concurrent.futures of Python",
    "train": "tf.train.Checkpoint and keras.optimizers",
    "summary": "keras.callbacks.TensorBoard, or tensorboardX",
    "lite": "model.export(path, format='onnx') of Keras",
    "mlir": "jax.jit(f).lower(x).as_text()",
    "profiler": "tf.profiler.experimental, or jax.profiler",
    "test.compute_gradient": "jax.test_util.check_grads",
    "test": "pytest, numpy.testing, and tf.config.list_physical_devices for what is there",
    # What `model.export` of Keras asks for.
    "__internal__": "tf.saved_model.save(model, path), or model.export(path, format='onnx')",
    "compat": "the names of TensorFlow 2; those of TensorFlow 1 are not there",
    "errors": "the exceptions of distributary.errors, which are also those of Python",
    "random.experimental random": "jax.random with a key",
    # Mathematics under other names.
    "batch_to_space": "jax.numpy.reshape and jax.numpy.transpose",
    "bitwise": "jax.numpy.bitwise_and, bitwise_or, left_shift and others",
    "dynamic_partition": "a boolean mask, x[mask], outside of the step",
    "dynamic_stitch": "x.at[indices].set(values)",
    "linalg": "jax.numpy.linalg and jax.scipy.linalg",
    "keras.backend.ctc_batch_cost": "keras.ops.ctc_loss",
    "keras.backend.ctc_decode": "keras.ops.ctc_decode",
    "keras.backend.gather": "keras.ops.take",
    "keras.backend.set_session": "no sessions, which are TensorFlow 1's",
    "keras.backend.set_learning_phase": "the argument training of layers and models",
    "keras.backend": "keras.ops, which has nearly the same names",
    "keras": "the names of Keras 3",
    "saturate_cast": "tf.clip_by_value and tf.cast",
    "sets": "jax.numpy.intersect1d, union1d and setdiff1d outside of the step",
    "signal.stft": "keras.ops.stft",
    "signal": "jax.numpy.fft, jax.scipy.signal, keras.ops.stft",
    "strided_slice": "x[begin:end:step]",
    "tensor_scatter_nd_max": "x.at[indices].max(updates)",
    "tensor_scatter_nd_min": "x.at[indices].min(updates)",
    "unique_with_counts": "jax.numpy.unique with return_counts=True",
    "math.erfcinv": "jax.scipy.special.erfinv of 1 - x",
    "math.multiply_no_nan": "jax.numpy.where(y == 0, 0, x * y)",
    "math.reciprocal_no_nan": "jax.numpy.where(x == 0, 0, 1 / x)",
    "math.segment_mean math.unsorted_segment_mean": "jax.ops.segment_sum, divided by the counts",
    "math.unsorted_segment_sqrt_n": "jax.ops.segment_sum, divided by the roots of the counts",
    "math.zero_fraction nn.zero_fraction": "jax.numpy.mean(x == 0)",
    "math": "jax.numpy, jax.lax and jax.scipy.special",
    "nn.batch_normalization": "keras.layers.BatchNormalization, keras.ops.batch_normalization",
    "nn.crelu": "jax.nn.relu of x and -x",
    "nn.weighted_cross_entropy_with_logits": "keras.losses.BinaryCrossentropy with sample_weight",
    "nn.weighted_moments": "jax.numpy.average and its square",
    "nn.embedding_lookup_sparse nn.safe_embedding_lookup_sparse": (
        "tf.nn.embedding_lookup with padded ids and a mask"
    ),
    "nn": "jax.nn and keras.ops",
}

#: The advice, by the name after `tf.`. docs/api/tensorflow.md shows it.
EQUIVALENTS: dict[str, str] = {
    name: advice for names, advice in _ADVICE.items() for name in names.split()
}

#: The advice for a name about which nothing is known.
ANYTHING = "jax.numpy, jax.lax, keras.ops or distributary; docs/api/tensorflow.md has a table"

# Modules in which a function of the same name usually has the same meaning.
_SEARCHED = ("numpy", "nn", "lax", "scipy.special", "numpy.linalg", "scipy.linalg", "numpy.fft")


def equivalent(name: str) -> str:
    """Returns what to use instead of `tf.{name}`, as the end of an error message."""
    if name in EQUIVALENTS:
        return EQUIVALENTS[name]
    space, _, last = name.rpartition(".")
    if space in ("", "math", "nn", "bitwise", "linalg", "signal"):
        if last in EQUIVALENTS:
            return EQUIVALENTS[last]
        for module in (f"jax.{name}" for name in _SEARCHED):
            if hasattr(importlib.import_module(module), last):
                return f"{module}.{last}"
    while space:
        if space in EQUIVALENTS:
            return EQUIVALENTS[space]
        space = space.rpartition(".")[0]
    return ANYTHING
