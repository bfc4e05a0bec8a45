"""Control flow and calls of Python under TensorFlow's names: `tf.case`, `tf.py_function`, ..."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from distributary.data import TensorSpec
from distributary.devices import Nest
from distributary.errors import UnsupportedError
from distributary.tensorflow._host import as_element, host_array, require
from distributary.tensorflow._operations import TensorLike, array, tensor
from distributary.tensorflow.autograph import is_traced, plain
from distributary.tracing import current_scope, outside_of_trace

_Branch = Callable[[], Any]


def cond(
    pred: TensorLike,
    true_fn: _Branch | None = None,
    false_fn: _Branch | None = None,
    name: str | None = None,
) -> Any:
    """`tf.cond`: calls one of two functions without arguments, with results of one structure."""
    if true_fn is None or false_fn is None:
        raise TypeError("tf.cond: true_fn and false_fn are functions without arguments.")
    holds = tensor(pred)
    if not is_traced(holds):
        return true_fn() if holds else false_fn()
    return jax.lax.cond(holds, true_fn, false_fn)


def case(
    pred_fn_pairs: Any,
    default: _Branch | None = None,
    exclusive: bool = False,
    strict: bool = False,
    name: str = "case",
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


def switch_case(
    branch_index: TensorLike,
    branch_fns: Any,
    default: _Branch | None = None,
    name: str = "switch_case",
) -> Any:
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
    return jax.lax.switch(jnp.argmax(is_own), branches)


def foldr(
    fn: Callable[[Any, Any], Any],
    elems: Nest,
    initializer: Nest = None,
    parallel_iterations: int = 10,
    back_prop: bool = True,
    swap_memory: bool = False,
    name: str | None = None,
) -> Any:
    """`tf.foldr`: the result after the first element, from the last one on."""
    arrays = jax.tree.map(array, elems)
    if initializer is None:
        initializer = jax.tree.map(lambda x: x[-1], arrays)
        arrays = jax.tree.map(lambda x: x[:-1], arrays)
    step = lambda carry, element: (fn(carry, element), None)
    return jax.lax.scan(step, jax.tree.map(array, initializer), arrays, reverse=True)[0]


def py_function(
    func: Any = None, inp: Any = None, Tout: Any = None, name: str | None = None
) -> Any:
    """`tf.py_function`: in a step, `Tout` are `tf.TensorSpec`s, which say the shapes."""
    if func is None:
        return _decorating(py_function, Tout)
    return _called("py_function", lambda *values: func(*map(_element, values)), inp, Tout)


def numpy_function(
    func: Any = None,
    inp: Any = None,
    Tout: Any = None,
    stateful: bool = True,
    name: str | None = None,
) -> Any:
    """`tf.numpy_function`: in a step, `Tout` are `tf.TensorSpec`s, which say the shapes."""
    if func is None:
        return _decorating(numpy_function, Tout)
    return _called("numpy_function", func, inp, Tout)


def _decorating(call: Callable[..., Any], wanted: Any) -> Callable[..., Any]:
    return lambda func: functools.wraps(func)(lambda *inp: call(func, inp, wanted))


def _element(value: object) -> Any:
    return as_element(np.asarray(value))


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
