"""`tf.function`, and control flow and calls of Python under TensorFlow's names: `tf.cond`, ..."""

import contextlib
import contextvars
import functools
import inspect
import sys
import time
import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import IO, Any, final

import jax
import jax.numpy as jnp
import numpy as np

from distributary.data import TensorSpec
from distributary.devices import Nest, canonical_name, resolve_device
from distributary.engine import Function as Compiled
from distributary.errors import DeviceError, InvalidTypeError, InvalidValueError, UnsupportedError
from distributary.strategies import PerReplicaSpec
from distributary.tensorflow._operations import (
    TensorLike,
    array,
    as_element,
    converted,
    host_array,
    require,
    tensor,
    without_effect,
)
from distributary.tensorflow.autograph import and_, is_traced, plain, while_stmt
from distributary.tracing import current_scope, outside_of_trace
from distributary.variables import DistributedValues, PerReplica, Variable

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@without_effect(
    "jit_compile reduce_retracing experimental_implements experimental_autograph_options"
    " experimental_attributes experimental_relax_shapes experimental_compile"
    " experimental_follow_type_hints"
)
def function(
    func: Callable[..., Any] | None = None,
    input_signature: Sequence[Nest] | None = None,
    autograph: bool = True,
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

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Method)
            and self.__self__ is other.__self__
            and self.__func__ is other.__func__
        )

    def __hash__(self) -> int:
        return hash((id(self.__self__), self.__func__))

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__func__, name)
        takes_owner = name in ("get_concrete_function", "concrete_functions")
        return functools.partial(value, self.__self__) if takes_owner else value

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


# Control flow, and calls of Python.


_Branch = Callable[[], Any]


@without_effect("name")
def cond(pred: TensorLike, true_fn: _Branch | None = None, false_fn: _Branch | None = None) -> Any:
    """`tf.cond`: calls one of two functions without arguments, with results of one structure."""
    if true_fn is None or false_fn is None:
        raise TypeError("tf.cond: true_fn and false_fn are functions without arguments.")
    holds = tensor(pred)
    if not is_traced(holds):
        return true_fn() if holds else false_fn()
    return jax.lax.cond(holds, _read_after(true_fn), _read_after(false_fn))


def _read_after(branch: _Branch) -> _Branch:
    """Returns a function whose results are arrays, where those of the branch are variables."""
    return lambda: jax.tree.map(plain, branch())


@without_effect("name")
def case(
    pred_fn_pairs: Any,
    default: _Branch | None = None,
    exclusive: bool = False,
    strict: bool = False,
) -> Any:
    """`tf.case`: calls the function of the first condition that holds."""
    is_dict = isinstance(pred_fn_pairs, dict)
    pairs = [*pred_fn_pairs.items()] if is_dict else [*pred_fn_pairs]
    holds = [jnp.asarray(tensor(pred), bool) for pred, _ in pairs]
    count = sum(pred.astype(int) for pred in holds) if holds else 0
    if exclusive:
        require(count <= 1, None, "tf.case: several conditions hold, but exclusive is True.")
    if default is None:
        require(count >= 1, None, "tf.case: no condition holds. Pass a default.")
        default = pairs[-1][1]
    result = default
    for pred, (_, branch) in zip(reversed(holds), reversed(pairs), strict=True):
        result = functools.partial(cond, pred, branch, result)
    return result()


@without_effect("name")
def switch_case(branch_index: TensorLike, branch_fns: Any, default: _Branch | None = None) -> Any:
    """`tf.switch_case`: the default, or the last function, for a number that has none."""
    has_keys = isinstance(branch_fns, dict) or any(isinstance(one, tuple) for one in branch_fns)
    functions = dict(branch_fns if has_keys else enumerate(branch_fns))
    numbers = sorted(functions)
    branches = [functions[number] for number in numbers]
    branches.append(branches[-1] if default is None else default)
    index = tensor(branch_index)
    if not is_traced(index):
        return functions.get(int(index), branches[-1])()
    is_own = jnp.append(jnp.asarray(numbers) == index, True)
    return jax.lax.switch(jnp.argmax(is_own), [*map(_read_after, branches)])


def py_function(
    func: Any = None, inp: Any = None, Tout: Any = None, name: str | None = None
) -> Any:
    """`tf.py_function`: in a step, `Tout` are `tf.TensorSpec`s, which say the shapes."""
    if func is None:
        return _decorating(py_function, Tout)
    call = lambda *values: func(*(as_element(np.asarray(value)) for value in values))
    return _called("py_function", call, inp, Tout)


@without_effect("stateful name")
def numpy_function(func: Any = None, inp: Any = None, Tout: Any = None) -> Any:
    """`tf.numpy_function`: in a step, `Tout` are `tf.TensorSpec`s, which say the shapes."""
    if func is None:
        return _decorating(numpy_function, Tout)
    return _called("numpy_function", func, inp, Tout)


def _decorating(call: Callable[..., Any], wanted: Any) -> Callable[..., Any]:
    return lambda func: functools.wraps(func)(lambda *inp: call(func, inp, wanted))


def _called(what: str, func: Callable[..., Any], inp: Sequence[Any], wanted: Any) -> Any:
    values = [tensor(value) for value in inp or ()]
    is_spec = lambda leaf: isinstance(leaf, TensorSpec)
    if not any(map(is_traced, values)) and current_scope() is None:
        reply = func(*map(np.asarray, values))
        if isinstance(wanted, (list, tuple)):
            reply = [] if reply is None else reply
            parts = [reply] if len(wanted) == 1 and not isinstance(reply, (list, tuple)) else reply
            dtypes = [spec.dtype if is_spec(spec) else spec for spec in wanted]
            return [host_array(p, dtype) for p, dtype in zip(parts, dtypes, strict=True)]
        return host_array(reply, wanted.dtype if is_spec(wanted) else wanted)
    specs = list(wanted) if isinstance(wanted, (list, tuple)) else [wanted]
    if not all(map(is_spec, specs)) or any(None in spec.shape for spec in specs):
        raise UnsupportedError(
            f"tf.{what}: in a step, the shape of the result must be known, but Tout is {wanted!r}."
            " Pass tf.TensorSpec(shape, dtype) in its place, or call it in Dataset.map."
        )
    shapes = [jax.ShapeDtypeStruct(spec.shape, array(0, spec.dtype).dtype) for spec in specs]

    def call(*arrays: Any) -> list[np.ndarray]:
        reply = func(*map(np.asarray, arrays))
        parts = reply if isinstance(reply, (list, tuple)) else [reply]
        return [np.asarray(part, shape.dtype) for part, shape in zip(parts, shapes, strict=True)]

    if not specs:  # a pure callback without results would be left out
        jax.debug.callback(lambda *arrays: func(*map(np.asarray, arrays)), *values)
        return []
    results = jax.pure_callback(call, shapes, *values)
    return results if isinstance(wanted, (list, tuple)) else results[0]


def recompute_grad(f: Callable[..., Any]) -> Callable[..., Any]:
    """`tf.recompute_grad`: computes the function again for its gradient, to save memory."""
    compute = jax.checkpoint(f)

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        arrays, named = jax.tree.map(plain, (args, kwargs))
        return compute(*arrays, **named)

    return recomputed


_path = contextvars.ContextVar("path", default="")


@final
class name_scope:  # noqa: N801
    """`tf.name_scope`: names what is computed in a profile; variables keep their own names."""

    def __init__(self, name: str) -> None:
        #: The name.
        self.name = name
        self._entered: list[tuple[Any, str]] = []

    def __enter__(self) -> str:
        scope, outer = jax.named_scope(self.name), _path.get()
        scope.__enter__()
        self._entered.append((scope, outer))
        _path.set(f"{outer}{self.name.removesuffix('/')}/")
        return _path.get()

    def __exit__(self, *exc_info: Any) -> None:
        scope, outer = self._entered.pop()
        _path.set(outer)
        scope.__exit__(*exc_info)


def init_scope() -> contextlib.AbstractContextManager[None]:
    """`tf.init_scope`: computes at once what does not depend on the arguments of the step."""
    return outside_of_trace()


def inside_function() -> bool:
    """`tf.inside_function`: True inside `Strategy.run` and `tf.function`."""
    return current_scope() is not None


def get_static_value(tensor: object, partial: bool = False) -> Any:
    """`tf.get_static_value`: None for what is computed in a step."""
    return None if is_traced(tensor) else np.asarray(tensor)


def custom_gradient(f: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """`tf.custom_gradient`: `f` returns its result, and a function of the gradient.

    The result and the gradients are arrays of positional arguments; variables are not read in `f`.
    """
    if f is None:
        return custom_gradient

    @jax.custom_vjp
    def call(*args: Nest) -> Nest:
        return f(*args)[0]

    def forward(*args: Nest) -> tuple[Nest, Nest]:
        return f(*args)[0], args

    def backward(args: Nest, upstream: Nest) -> tuple[Any, ...]:
        parts = upstream if isinstance(upstream, (list, tuple)) else (upstream,)
        gradients = f(*args)[1](*parts)
        return tuple(gradients) if isinstance(gradients, (list, tuple)) else (gradients,)

    call.defvjp(forward, backward)

    def with_gradient(*args: Any) -> Any:
        return call(*[jnp.asarray(arg) for arg in args])

    return with_gradient


# Printing, and what surrounds the code of a step.


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


@without_effect(
    "shape_invariants parallel_iterations back_prop swap_memory", before="maximum_iterations"
)
def while_loop(
    cond: Callable[..., Any],
    body: Callable[..., Any],
    loop_vars: Sequence[Nest],
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
