"""The modules `tf`, `tf.distribute`, `tf.nn`, ..., and the errors for names that they lack."""

import difflib
import importlib
import sys
from types import ModuleType
from typing import Any

from distributary.compat.tensorflow._names import MODULES, Late, names_of
from distributary.tensorflow._operations import Operation

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


class Namespace(ModuleType):
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
    "math.bessel_i0e": "jax.scipy.special.i0e",
    "math.bessel_i1": "jax.scipy.special.i1",
    "math.bessel_i1e": "jax.scipy.special.i1e",
    "math.igamma": "jax.scipy.special.gammainc",
    "math.igammac": "jax.scipy.special.gammaincc",
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
