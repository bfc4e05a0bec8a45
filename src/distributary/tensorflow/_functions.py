"""`tf.function`: compiled functions, their signatures and concrete functions."""

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from distributary.data import TensorSpec
from distributary.devices import Nest
from distributary.engine import Function as Compiled
from distributary.errors import InvalidTypeError, InvalidValueError
from distributary.strategies import PerReplicaSpec
from distributary.tensorflow._operations import converted
from distributary.tensorflow.autograph import plain
from distributary.variables import DistributedValues, PerReplica, Variable

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def function(
    func: Callable[..., Any] | None = None,
    input_signature: Sequence[Nest] | None = None,
    autograph: bool = True,
    jit_compile: bool | None = None,
    reduce_retracing: bool = False,
    experimental_implements: str | None = None,
    experimental_autograph_options: object = None,
    experimental_attributes: object = None,
    experimental_relax_shapes: bool | None = None,
    experimental_compile: bool | None = None,
    experimental_follow_type_hints: bool | None = None,
) -> Any:
    """Compiles a function like `distributary.function`, with the arguments of `tf.function`.

    `input_signature` converts arguments to its dtypes and checks their shapes. It can contain the
    `element_spec` of a distributed dataset. Python control flow is converted, unless `autograph` is
    False. The other options have no effect: functions are always compiled, once for every shape,
    and for every Python int. A returned variable becomes its value.

    Raises:
        InvalidValueError: if an argument does not have the shape that `input_signature` gives, or
            has another number of components.
        InvalidTypeError: if an argument has another dtype, or is not a `PerReplica` although
            `input_signature` has the spec of one.

    Source: `tf.function`.
    """
    if func is None:
        return lambda func: Function(func, input_signature, autograph)
    return Function(func, input_signature, autograph)


@final
class Function:
    """A compiled function; made by `function`.

    Source: `tf.types.experimental.PolymorphicFunction`.
    """

    def __init__(
        self,
        python_function: Callable[..., Any],
        input_signature: Sequence[Nest] | None,
        autograph: bool,
    ) -> None:
        self.python_function = python_function
        self.input_signature = None if input_signature is None else tuple(input_signature)
        self._compiled = Compiled(python_function, autograph, (int,), _with_values)
        functools.update_wrapper(self, python_function, updated=())
        self._name = getattr(python_function, "__name__", repr(python_function))
        self._signature = inspect.signature(python_function)
        self._num_own = int(next(iter(self._signature.parameters), "") == "self")
        # The arguments of concrete functions, and of calls that made a program, by the object whose
        # method this is, or this itself.
        self._asked: weakref.WeakKeyDictionary[Any, list[_Arguments]] = weakref.WeakKeyDictionary()
        self._called: weakref.WeakKeyDictionary[Any, list[_Arguments]] = weakref.WeakKeyDictionary()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.input_signature is None:
            num_traces = self._compiled.num_traces
            result = self._compiled(*args, **kwargs)
            if self._compiled.num_traces > num_traces:
                self._note(self._called, args, kwargs)
            return result
        num_own = self._num_own
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"tf.function {self._name}{self._signature}: {error}") from None
        num_given = len(bound.args)
        bound.apply_defaults()  # of the arguments that input_signature has
        arguments = bound.args[: max(num_given, num_own + len(self.input_signature))]
        instance, arguments = arguments[:num_own], arguments[num_own:]
        if len(arguments) != len(self.input_signature):
            raise InvalidValueError(
                f"tf.function {self._name}: {len(arguments)} arguments, but input_signature has"
                f" {len(self.input_signature)}."
            )
        return self._compiled(*instance, *_checked(self._name, self.input_signature, arguments))

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else Method(self, instance)

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> "ConcreteFunction":
        """Returns the function for arguments of these shapes and dtypes.

        Args:
            *args: `tf.TensorSpec`s or arrays in place of arrays, and the values of other arguments.
                Without arguments, those of `input_signature`.
            **kwargs: The same, by name.

        Raises:
            TypeError: if the arguments do not fit the function.

        Source: `tf.types.experimental.PolymorphicFunction.get_concrete_function`.
        """
        if len(args) + len(kwargs) == self._num_own:
            args = (*args, *(self.input_signature or ()))
        concrete = ConcreteFunction(self, args, kwargs)
        self._note(self._asked, args, kwargs)
        return concrete

    def _note(self, noted: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        num_own = self._num_own
        with contextlib.suppress(TypeError):  # of an object without a hash or a weak reference
            of_owner = noted.setdefault(args[0] if num_own else self, [])
            of_owner.append(jax.tree.map(_spec_of, (args[num_own:], kwargs), is_leaf=_is_spec))

    def concrete_functions(self, *instance: Any, called: bool = False) -> list["ConcreteFunction"]:
        """Returns a function for `input_signature`, or for each that `get_concrete_function` made.

        Args:
            *instance: The object, for a method.
            called: Whether to return those of calls instead.
        """
        if self.input_signature is not None:
            return [ConcreteFunction(self, (*instance, *self.input_signature), {})]
        owner = instance[0] if instance else self
        noted = self._called if called else self._asked
        known = noted.get(owner, []) if isinstance(owner, Hashable) else []
        return [ConcreteFunction(self, (*instance, *args), kwargs) for args, kwargs in known]

    def pretty_printed_concrete_signatures(self, verbose: bool = True) -> str:
        """Returns the parameters of the function as text, for messages."""
        return f"{self._name}{self._signature}"

    def experimental_get_tracing_count(self) -> int:
        """Returns how often the Python function was traced."""
        return int(self._compiled.num_traces)

    def __repr__(self) -> str:
        return f"<tf.function {self._name}>"


class Method:
    """A `Function` as the method of an object; like `types.MethodType`, but with methods."""

    def __init__(self, function: Function, owner: object) -> None:
        self.__func__ = function
        self.__self__ = owner
        self.__wrapped__ = types.MethodType(function.python_function, owner)  # for its signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> "ConcreteFunction":
        """Returns the method for arguments of these shapes and dtypes."""
        return self.__func__.get_concrete_function(self.__self__, *args, **kwargs)

    def concrete_functions(self, called: bool = False) -> list["ConcreteFunction"]:
        """Returns the functions of `Function.concrete_functions` for this object."""
        return self.__func__.concrete_functions(self.__self__, called=called)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Method)
            and self.__self__ is other.__self__
            and self.__func__ is other.__func__
        )

    def __hash__(self) -> int:
        return hash((id(self.__self__), self.__func__))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__func__, name)

    def __repr__(self) -> str:
        return repr(self.__func__)


@final
class ConcreteFunction:
    """A compiled function for arguments of certain shapes and dtypes.

    Call it with the same arguments; those that are not arrays may be left out. It is compiled when
    you call it first.

    Source: `tf.types.experimental.ConcreteFunction`.
    """

    def __init__(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            bound = function._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"get_concrete_function of {function._name}: {error}") from None
        self._function = function
        self._parameters = bound.signature
        #: The arguments by name, in the order of the parameters; a `tf.TensorSpec` for each array.
        self.arguments: dict[str, Any] = {
            name: jax.tree.map(_spec_of, value, is_leaf=_is_spec)
            for name, value in bound.arguments.items()
        }
        self.name = function._name

    @property
    def structured_input_signature(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with a `tf.TensorSpec` for each array."""
        bound = inspect.BoundArguments(self._parameters, self.arguments)
        return bound.args, bound.kwargs

    def program(self, structs: Sequence[jax.ShapeDtypeStruct]) -> tuple[Any, Any, list[int]]:
        """Returns the program, see `distributary.function`, and how it takes the arrays.

        Args:
            structs: Shape and dtype for every spec in `arguments`.

        Returns:
            The program, a function from its outputs to the result, and the numbers of its arrays in
            `structs`.
        """
        rest = iter(structs)
        arguments = {
            name: jax.tree.map(
                lambda leaf: next(rest) if _is_spec(leaf) else leaf, value, is_leaf=_is_spec
            )
            for name, value in self.arguments.items()
        }
        bound = inspect.BoundArguments(self._parameters, arguments)
        numbers = {id(struct): number for number, struct in enumerate(structs)}
        leaves = jax.tree.leaves((bound.args, bound.kwargs))
        order = [numbers[id(leaf)] for leaf in leaves if id(leaf) in numbers]
        return *self._function._compiled.program_of(*bound.args, **bound.kwargs), order

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arrays = [
            name
            for name, argument in self.arguments.items()
            if any(map(_is_spec, jax.tree.leaves(argument, is_leaf=_is_spec)))
        ]
        complete = dict(self.arguments)
        if len(args) + len(kwargs) == len(arrays) and not set(kwargs) - set(arrays):
            rest = iter([name for name in arrays if name not in kwargs])
            complete |= dict(zip(rest, args, strict=True)) | kwargs
        else:
            own = [complete["self"]] if "self" in complete else []
            complete |= self._parameters.bind(*own, *args, **kwargs).arguments
        for name, fixed in self.arguments.items():
            if isinstance(fixed, (bool, int, float, str)) and complete[name] != fixed:
                raise InvalidTypeError(
                    f"tf.function {self.name}: {name} is {complete[name]!r}, but"
                    f" get_concrete_function has made the function for {fixed!r}."
                )
        checked = {
            name: _checked(self.name, self.arguments[name], complete[name]) for name in complete
        }
        bound = inspect.BoundArguments(self._parameters, checked)
        return self._function(*bound.args, **bound.kwargs)

    def __repr__(self) -> str:
        return f"<ConcreteFunction {self.name}{self.structured_input_signature}>"


def _with_values(result: Any) -> Any:
    """Returns what a function returns, as in TensorFlow: values of variables, arrays of numbers."""

    def value_of(leaf: Any) -> Any:
        if isinstance(leaf, Variable):
            return leaf.value()
        if type(leaf) in (bool, int, float):
            return jnp.asarray(leaf, jnp.result_type(leaf))
        return leaf if isinstance(leaf, DistributedValues) else plain(leaf)  # of Keras' variables

    return jax.tree.map(value_of, result, is_leaf=lambda leaf: isinstance(leaf, DistributedValues))


def _is_spec(node: object) -> bool:
    return isinstance(node, (TensorSpec, PerReplicaSpec))


def _spec_of(leaf: Any) -> Any:
    is_array = isinstance(leaf, (jax.Array, np.ndarray, np.generic))
    return TensorSpec(leaf.shape, leaf.dtype) if is_array else leaf


def _checked(name: str, specs: Nest, values: Nest) -> Any:
    """Returns arguments as arrays of the specs, where there are specs."""
    convert = lambda spec, value: _converted(name, spec, value) if _is_spec(spec) else value
    return jax.tree.map(convert, specs, values, is_leaf=_is_spec)


def _converted(name: str, spec: TensorSpec | PerReplicaSpec, value: Nest) -> Any:
    if isinstance(spec, PerReplicaSpec):
        return _converted_components(name, spec, value)
    result = converted(f"tf.function {name}", value, spec.dtype)
    if not spec.accepts(result):
        raise InvalidValueError(
            f"tf.function {name}: an argument has shape {result.shape}, but input_signature says"
            f" {spec}."
        )
    return result


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
    for part_spec, part in zip(specs, parts, strict=True):
        shape = np.shape(part)[is_stacked:]
        if not part_spec.accepts(jax.ShapeDtypeStruct(shape, part_spec.dtype)):
            raise InvalidValueError(
                f"tf.function {name}: a component of an argument has shape {shape}, but"
                f" input_signature says {part_spec}."
            )
    convert = lambda leaf: converted(f"tf.function {name}", leaf, specs[0].dtype)
    return jax.tree.map(convert, value)
