"""Functions, control flow and nests: the parts of a TensorFlow program besides arrays."""

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from typing import IO, Any

import jax
import numpy as np

from distributary._types import Nest
from distributary.compat.tensorflow._operations import TensorLike, array, plain, tensor
from distributary.datasets import TensorSpec
from distributary.engine import function as compile_function
from distributary.errors import InvalidTypeError, InvalidValueError
from distributary.inputs import PerReplicaSpec
from distributary.tracing import current_scope
from distributary.values import PerReplica


def function(
    func: Callable[..., Any] | None = None,
    input_signature: Sequence[Nest] | None = None,
    autograph: bool = True,
    jit_compile: bool | None = None,
    reduce_retracing: bool = False,
    experimental_implements: str | None = None,
    experimental_autograph_options: object = None,
    experimental_attributes: object = None,
    experimental_follow_type_hints: bool | None = None,
) -> Any:
    """Compiles a function like `distributary.function`, with the arguments of `tf.function`.

    `input_signature` converts arguments to its dtypes and checks their shapes. It can contain the
    `element_spec` of a distributed dataset. Python control flow is converted, unless `autograph` is
    False. The other options have no effect: functions are always compiled, once for every shape.

    Raises:
        InvalidValueError: if an argument does not have the shape that `input_signature` gives, or
            has another number of components.
        InvalidTypeError: if an argument is not a `PerReplica` although `input_signature` has the
            spec of one.

    Source: `tf.function`.
    """
    if func is None:
        return lambda func: function(func, input_signature, autograph)
    compiled = compile_function(func, autograph=autograph)
    if input_signature is None:
        return compiled

    parameters = inspect.signature(func)
    num_own = int(next(iter(parameters.parameters), "") == "self")

    @functools.wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            given = parameters.bind(*args, **kwargs).args
        except TypeError as error:
            raise TypeError(f"tf.function {func.__name__}{parameters}: {error}") from None
        own, given = given[:num_own], given[num_own:]
        if len(given) != len(input_signature):
            raise InvalidValueError(
                f"tf.function {func.__name__}: {len(given)} arguments, but input_signature has"
                f" {len(input_signature)}."
            )
        is_spec = lambda node: isinstance(node, (TensorSpec, PerReplicaSpec))
        convert = lambda spec, value: _converted(func.__name__, spec, value)
        converted = jax.tree.map(convert, tuple(input_signature), given, is_leaf=is_spec)
        return compiled(*own, *converted)

    return checked


def _converted(name: str, spec: TensorSpec | PerReplicaSpec, value: Nest) -> Any:
    if isinstance(spec, PerReplicaSpec):
        return _converted_components(name, spec, value)
    made = array(value, spec.dtype)
    if not spec.accepts(made):
        raise InvalidValueError(
            f"tf.function {name}: an argument has shape {made.shape}, but input_signature says"
            f" {spec}."
        )
    return made


def _converted_components(name: str, spec: PerReplicaSpec, value: Nest) -> Any:
    specs = spec.value_specs
    if not isinstance(value, PerReplica):
        raise InvalidTypeError(
            f"tf.function {name}: an argument is {value!r}, but input_signature has the spec of a"
            f" PerReplica with {len(specs)} components. Pass an element of the distributed dataset."
        )
    # A stacked value, [replica, *shape], has the components of all workers; others of this one.
    is_stacked = value.form == "stacked"
    num_components = value.num_replicas if is_stacked else len(value.values)
    if num_components % len(specs) or (num_components != len(specs) and not is_stacked):
        raise InvalidValueError(
            f"tf.function {name}: an argument is a PerReplica with {num_components} components, but"
            f" input_signature has {len(specs)}."
        )
    parts = [value.payload] * len(specs) if is_stacked else value.values
    for own, part in zip(specs, parts, strict=True):
        shape = np.shape(part)[is_stacked:]
        if not own.accepts(jax.ShapeDtypeStruct(shape, own.dtype)):
            raise InvalidValueError(
                f"tf.function {name}: a component of an argument has shape {shape}, but"
                f" input_signature says {own}."
            )
    return jax.tree.map(lambda leaf: array(leaf, specs[0].dtype), value)


def print_(
    *inputs: object,
    output_stream: IO[str] | None = None,
    summarize: int | None = 3,
    sep: str = " ",
    end: str = "\n",
    name: str | None = None,
) -> None:
    """`tf.print`: to stderr; inside a step, each replica prints when it computes.

    Args:
        inputs: Arrays, variables and anything else that can be printed.
        output_stream: A text stream; `sys.stderr` by default.
        summarize: Number of elements to show at each end of a dim; -1 for all.
        sep: Text between the inputs.
        end: Text after the last input.
        name: Has no effect.

    Source: `tf.print`.
    """
    leaves, tree = jax.tree.flatten(jax.tree.map(plain, inputs))
    picks = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    edge = 3 if summarize is None else summarize

    def show(*arrays: Any) -> None:
        shown = list(leaves)
        for i, value in zip(picks, arrays, strict=True):
            shown[i] = _Shown(np.asarray(value), edge)
        text = sep.join(str(value) for value in jax.tree.unflatten(tree, shown))
        stream = sys.stderr if output_stream is None else output_stream
        stream.write(text + end)

    if current_scope() is None:
        show(*(leaves[i] for i in picks))
    else:
        jax.debug.callback(show, *(leaves[i] for i in picks))


class _Shown:
    """An array as `tf.print` writes it, even inside a list or dict."""

    def __init__(self, array: np.ndarray, edge: int) -> None:
        self._text = np.array2string(
            array, threshold=sys.maxsize if edge < 0 else 2 * edge, edgeitems=max(edge, 1)
        )

    def __repr__(self) -> str:
        return self._text


def cond(
    pred: TensorLike,
    true_fn: Callable[[], Any],
    false_fn: Callable[[], Any],
    name: str | None = None,
) -> Any:
    """`tf.cond`: calls one of two functions without arguments, with results of one structure."""
    return jax.lax.cond(tensor(pred), true_fn, false_fn)


def while_loop(
    cond: Callable[..., Any], body: Callable[..., Any], loop_vars: Sequence[Nest], **options: Any
) -> Any:
    """`tf.while_loop`; options such as `shape_invariants` have no effect."""

    def next_(values: tuple[Any, ...]) -> tuple[Any, ...]:
        after = body(*values)
        return tuple(after) if isinstance(after, (list, tuple)) else (after,)

    return jax.lax.while_loop(
        lambda values: cond(*values), next_, jax.tree.map(array, tuple(loop_vars))
    )


def executing_eagerly() -> bool:
    """`tf.executing_eagerly`: False inside `Strategy.run` and `tf.function`."""
    return current_scope() is None


def is_tensor(x: object) -> bool:
    """`tf.is_tensor`: True for JAX arrays and variables."""
    return isinstance(x, jax.Array) or hasattr(x, "__jax_array__")


def get_logger() -> logging.Logger:
    """`tf.get_logger`: the logger of distributary."""
    return logging.getLogger("distributary")


def map_structure(func: Callable[..., Any], *structure: Nest, **kwargs: Any) -> Any:
    """`tf.nest.map_structure`."""
    return jax.tree.map(func, *structure, is_leaf=_is_none)


def flatten(structure: Nest, expand_composites: bool = False) -> list[Any]:
    """`tf.nest.flatten`."""
    return jax.tree.leaves(structure, is_leaf=_is_none)


def pack_sequence_as(
    structure: Nest, flat_sequence: Sequence[Any], expand_composites: bool = False
) -> Any:
    """`tf.nest.pack_sequence_as`."""
    return jax.tree.unflatten(jax.tree.structure(structure, is_leaf=_is_none), flat_sequence)


def _is_none(value: object) -> bool:
    return value is None
