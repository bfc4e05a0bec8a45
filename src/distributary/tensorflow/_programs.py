"""Names of `tf` itself besides operations: printing, shapes, modules."""

import contextlib
import functools
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any, final

import jax
import numpy as np

from distributary._late import Library, register
from distributary.data import TensorSpec
from distributary.devices import Nest, canonical_name, resolve_device
from distributary.errors import DeviceError, InvalidValueError, UnsupportedError
from distributary.keras_bridge import import_keras
from distributary.tensorflow._control import name_scope
from distributary.tensorflow._draws import Generator
from distributary.tensorflow._host import host_array
from distributary.tensorflow._operations import array
from distributary.tensorflow.autograph import and_, plain, while_stmt
from distributary.tracing import current_scope
from distributary.variables import PerReplica


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
    shown = jax.tree.map(_of_replicas, inputs, is_leaf=lambda node: isinstance(node, PerReplica))
    leaves, tree = jax.tree.flatten(jax.tree.map(plain, shown))
    picks = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    edge = 3 if summarize is None else summarize

    def show(*arrays: Any) -> None:
        texts = list(leaves)
        for i, value in zip(picks, arrays, strict=True):
            texts[i] = _Shown(np.asarray(value), edge)
        text = sep.join(str(value) for value in jax.tree.unflatten(tree, texts))
        stream = sys.stderr if output_stream is None else output_stream
        stream.write(text + end)

    if current_scope() is None:
        show(*(leaves[i] for i in picks))
    else:
        jax.debug.callback(show, *(leaves[i] for i in picks))


def _of_replicas(value: Any) -> Any:
    """Returns a value of replicas as theirs, not as the array of all that holds them."""
    is_stacked = isinstance(value, PerReplica) and value.form == "stacked"
    return PerReplica(value.values) if is_stacked else value


class _Shown:
    """An array as `tf.print` writes it, even inside a list or dict."""

    def __init__(self, array: np.ndarray, edge: int) -> None:
        self._text = np.array2string(
            array, threshold=sys.maxsize if edge < 0 else 2 * edge, edgeitems=max(edge, 1)
        )

    def __repr__(self) -> str:
        return self._text


def while_loop(
    cond: Callable[..., Any],
    body: Callable[..., Any],
    loop_vars: Sequence[Nest],
    shape_invariants: object = None,
    parallel_iterations: int = 10,
    back_prop: bool = True,
    swap_memory: bool = False,
    maximum_iterations: Any = None,
    name: str | None = None,
) -> Any:
    """`tf.while_loop`: a loop of Python until the condition is traced, as that of `tf.function`.

    In a step, `maximum_iterations` makes it a loop of that length, through which gradients pass.
    """
    number = lambda leaf: array(leaf) if isinstance(leaf, (bool, int, float, np.ndarray)) else leaf
    state = [0, *(jax.tree.map(number, value) for value in loop_vars)]
    limit = None if maximum_iterations is None else int(maximum_iterations)

    def goes_on() -> Any:
        below = limit is None or state[0] < limit
        return cond(*state[1:]) if below is True else and_(lambda: below, lambda: cond(*state[1:]))

    def turn() -> None:
        after = body(*state[1:])
        state[:] = state[0] + 1, *(after if isinstance(after, (list, tuple)) else [after])

    def put(values: Sequence[Any]) -> None:
        state[:] = values

    names = [f"loop_vars[{i}]" for i in range(len(loop_vars))]
    options = {"maximum_iterations": limit}
    while_stmt(goes_on, turn, lambda: tuple(state), put, ["the count", *names], options)
    return state[1:] if isinstance(loop_vars, list) else tuple(state[1:])


def executing_eagerly() -> bool:
    """`tf.executing_eagerly`: False inside `Strategy.run` and `tf.function`."""
    return current_scope() is None


def is_tensor(x: object) -> bool:
    """`tf.is_tensor`: True for JAX arrays and variables."""
    return isinstance(x, jax.Array) or hasattr(x, "__jax_array__")


def get_logger() -> logging.Logger:
    """`tf.get_logger`: the logger of distributary."""
    return logging.getLogger("distributary")


def constant_initializer(value: Any = 0, support_partition: bool = False) -> Any:
    """`tf.constant_initializer`: a number everywhere, or as many numbers as there are places."""
    number = np.asarray(value).tolist()
    if not isinstance(number, list):
        return import_keras().initializers.Constant(number)
    from distributary.tensorflow._keras_parts import ConstantInitializer

    return ConstantInitializer(number)


@contextlib.contextmanager
def device(device_name: str | Callable[..., str] | None) -> Iterator[None]:
    """`tf.device`: where new arrays are made; has no effect in a step or without the device.

    Raises:
        DeviceError: if the name is not one of a device.
    """
    name, place = device_name if isinstance(device_name, str) else "", None
    if name and current_scope() is None:
        canonical_name(name)
        with contextlib.suppress(DeviceError):  # as with TensorFlow's soft placement
            place = resolve_device(name)
    with contextlib.nullcontext() if place is None else jax.default_device(place):
        yield


@final
class TensorShape(tuple[int | None, ...]):
    """`tf.TensorShape`: a tuple of sizes, None for one that is not known."""

    def __new__(cls, dims: int | Iterable[int | None] | None) -> "TensorShape":
        return super().__new__(cls, dims if isinstance(dims, Iterable) else (dims,))

    @property
    def rank(self) -> int:
        """Number of dims."""
        return len(self)

    ndims = rank
    dims = property(list)

    def as_list(self) -> list[int | None]:
        """Returns the sizes."""
        return list(self)

    def concatenate(self, other: Iterable[int | None]) -> "TensorShape":
        """Returns the sizes of both."""
        return TensorShape((*self, *other))

    def is_compatible_with(self, other: Iterable[int | None]) -> bool:
        """Returns whether some array has both shapes."""
        return TensorSpec(self).accepts(TensorSpec(other))

    def assert_is_compatible_with(self, other: Iterable[int | None]) -> None:
        """Raises an error if no array has both shapes."""
        if not self.is_compatible_with(other):
            raise InvalidValueError(f"TensorShape: {self} and {tuple(other)} do not fit.")

    def assert_has_rank(self, rank: int) -> None:
        """Raises an error for another number of dims."""
        self.with_rank(rank)

    def assert_is_fully_defined(self) -> None:
        """Raises an error if a size is unknown."""
        if not self.is_fully_defined():
            raise InvalidValueError(f"TensorShape: {self} has unknown sizes.")

    def merge_with(self, other: Iterable[int | None]) -> "TensorShape":
        """Returns the sizes that one of both knows.

        Raises:
            InvalidValueError: if no array has both shapes.
        """
        sizes = tuple(other)
        self.assert_is_compatible_with(sizes)
        return TensorShape(b if a is None else a for a, b in zip(self, sizes, strict=True))

    def most_specific_compatible_shape(self, other: Iterable[int | None]) -> "TensorShape":
        """Returns the sizes that both have, and None for the others."""
        return TensorShape(a if a == b else None for a, b in zip(self, other, strict=True))

    def with_rank(self, rank: int) -> "TensorShape":
        """Returns this shape; an error if it has another number of dims."""
        return self._with_dims(len(self) == rank, f"{rank}")

    def with_rank_at_least(self, rank: int) -> "TensorShape":
        """Returns this shape; an error if it has fewer dims."""
        return self._with_dims(len(self) >= rank, f"{rank} or more")

    def with_rank_at_most(self, rank: int) -> "TensorShape":
        """Returns this shape; an error if it has more dims."""
        return self._with_dims(len(self) <= rank, f"at most {rank}")

    def _with_dims(self, holds: bool, wanted: str) -> "TensorShape":
        if not holds:
            raise InvalidValueError(f"TensorShape: {self} has {len(self)} dims, expected {wanted}.")
        return self

    def is_fully_defined(self) -> bool:
        """Returns whether all sizes are known."""
        return None not in self

    def num_elements(self) -> int | None:
        """Returns the number of elements; None if it is not known."""
        return math.prod(size for size in self if size is not None) if None not in self else None


def control_dependencies(control_inputs: object) -> contextlib.AbstractContextManager[None]:
    """`tf.control_dependencies`: has no effect, as programs keep their order."""
    return contextlib.nullcontext()


def group(*inputs: object, **kwargs: object) -> None:
    """`tf.group`: has no effect, as everything in a step runs."""


def no_op(name: str | None = None) -> None:
    """`tf.no_op`."""


def timestamp(name: str | None = None) -> np.ndarray:
    """`tf.timestamp`: the seconds since 1970, outside of steps."""
    if current_scope() is not None:
        raise UnsupportedError(
            "tf.timestamp in a step: arrays of 32 bits cannot hold the time. Call it outside of the"
            " step, or tf.py_function inside."
        )
    return host_array(time.time())


def identity_n(input: Sequence[Any], name: str | None = None) -> list[jax.Array]:
    """`tf.identity_n`."""
    return [array(value) for value in input]


class Module:
    """`tf.Module`: an object that knows the variables and modules in its attributes."""

    def __init__(self, name: str | None = None) -> None:
        self.name = type(self).__name__.lower() if name is None else name

    @property
    def variables(self) -> tuple[Any, ...]:
        """The variables in attributes, and in lists, dicts and modules there."""
        parts = (part for part in _parts_of(self) if not isinstance(part, Module))
        return tuple({id(part): part for part in parts}.values())

    @property
    def trainable_variables(self) -> tuple[Any, ...]:
        """The variables that are trainable."""
        return tuple([variable for variable in self.variables if variable.trainable])

    @property
    def non_trainable_variables(self) -> tuple[Any, ...]:
        """The variables that are not trainable."""
        return tuple([variable for variable in self.variables if not variable.trainable])

    @property
    def name_scope(self) -> name_scope:
        """A `tf.name_scope` with the name of the module."""
        return name_scope(self.name)

    @classmethod
    def with_name_scope(cls, method: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a method that runs in the name scope of its module."""

        @functools.wraps(method)
        def named(self: Module, *args: Any, **kwargs: Any) -> Any:
            with self.name_scope:
                return method(self, *args, **kwargs)

        return named

    @property
    def submodules(self) -> tuple["Module", ...]:
        """The modules below this one."""
        return tuple([part for part in _parts_of(self) if isinstance(part, Module)])


def _parts_of(module: object) -> Iterator[Any]:
    """Yields the modules and variables below a module, those of its own before those below them.

    They come in the order of the names of attributes.
    """
    below: list[Any] = []
    for leaf in jax.tree.leaves(dict(vars(module)), is_leaf=lambda x: isinstance(x, Module)):
        if isinstance(leaf, Module):
            yield leaf
            below.append(leaf)
        elif hasattr(leaf, "trainable_variables"):  # a layer or model of Keras
            below.append(leaf)
        elif hasattr(leaf, "trainable"):  # a variable; optimizers of Keras have `assign`, too
            yield leaf
    for part in below:
        yield from _parts_of(part) if isinstance(part, Module) else part.variables


@final
class _Modules(Library):
    def parts(self, value: object) -> dict[str, Any] | None:
        if isinstance(value, Generator):
            return {"state": value.state}
        if not isinstance(value, Module):
            return None
        return {name: part for name, part in vars(value).items() if _has_state(part)}


def _has_state(value: object) -> bool:
    leaves = jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, Module))
    names = ("assign", "variables", "get_state")
    return any(
        isinstance(leaf, Generator) or any(hasattr(leaf, name) for name in names) for leaf in leaves
    )


register(_Modules())
