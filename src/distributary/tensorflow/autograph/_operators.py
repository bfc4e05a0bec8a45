"""Statements and operators of converted code: as in Python, unless a value is traced.

Their names and arguments are those that diastatic-malt gives to the code it converts. It makes

    if x > 0:                        def if_body():
        y = x                            nonlocal y
    else:                    ->          y = x
        y = -x                       ...
                                     if_stmt(x > 0, if_body, else_body, get_state, set_state,
                                             ("y",), 1)
"""

import builtins
import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from distributary.errors import InvalidValueError, UnsupportedError, shown
from distributary.tensorflow.autograph._loops import (
    Range,
    Variables,
    for_loop,
    is_iterated,
    while_loop,
)
from distributary.tensorflow.autograph._reached import Reached
from distributary.tensorflow.autograph._recorded import (
    Recorded,
    check_advances,
    check_copies,
    check_handler,
    check_when_run as check_when_run,
    choose,
    is_recording,
    is_undefined,
    not_to_be_handled,
    plain,
)
from distributary.tracing import current_feeding, current_scope, script_line

_Block = Callable[[], Any]
_Get = Callable[[], Sequence[Any]]
_Set = Callable[[Sequence[Any]], None]


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.negation: tuple[Any, Any] = (None, None)  # the last traced `not x`, and x


_state = _ThreadState()


def is_traced(value: object) -> bool:
    """Returns whether there is no value yet, because a step is being traced."""
    return isinstance(value, jax.core.Tracer)


def truth(value: Any, what: str) -> Any:
    """Returns the truth of a value: bool, or bool `[]` of a traced one.

    Args:
        value: Any value.
        what: The statement, for messages.
    """
    value = plain(value)
    if not is_traced(value):
        return bool(value)
    if value.size != 1:
        raise InvalidValueError(
            f"`{what}` at {script_line()} needs one truth value, but got an array of shape"
            f" {value.shape}. Reduce it with jnp.all or jnp.any, or choose between the items of"
            " arrays with jnp.where."
        )
    try:
        return bool(value)  # jax.grad outside of a step knows values
    except jax.errors.TracerBoolConversionError:
        return value.reshape(()).astype(bool)


def if_stmt(
    cond: object,
    body: _Block,
    orelse: _Block,
    get_state: _Get,
    set_state: _Set,
    symbol_names: Sequence[str],
    nouts: int,
    private: Sequence[str] = (),
    dead: Sequence[str] = (),
) -> None:
    """Runs `if cond: body` with `else: orelse`; a traced condition with `jax.lax.cond`.

    Nothing else refers to the lists in `private`, and nothing reads those in `dead` after it.
    """
    pred = truth(cond, "if")
    if isinstance(pred, bool):
        (body if pred else orelse)()
        return
    variables = Variables(get_state, set_state, symbol_names[:nouts])
    reached = Reached(body, orelse, private=private, dead=dead)
    _choose(cond, pred, body, orelse, variables, reached)


def _choose(
    cond: object,
    pred: jax.Array,
    body: _Block,
    orelse: _Block,
    variables: Variables,
    reached: Reached,
) -> None:
    """Runs one of two blocks; `pred` is the truth of `cond`."""
    before, nouts = variables.get(), len(variables.names)
    negation, negated = _state.negation

    def after(block: _Block) -> Callable[[], Sequence[Any]]:
        def run() -> Sequence[Any]:
            variables.set(before)
            block()
            return variables.get()[:nouts]

        return run

    # malt puts `if not do_return:` around what follows a `return`.
    opposite = negated if negation is cond else None
    chosen = choose(pred, after(body), after(orelse), variables.names, reached, negated=opposite)
    variables.set((*chosen, *before[nouts:]))


def while_stmt(
    test: _Block,
    body: _Block,
    get_state: _Get,
    set_state: _Set,
    symbol_names: Sequence[str],
    opts: dict[str, Any],
    private: Sequence[str] = (),
    ended: str | None = None,
) -> None:
    """Runs `while test: body`; from the first traced condition on with `jax.lax.while_loop`.

    `ended` is a variable that is true after it, because the test is `not ended and True`.
    """
    while isinstance(going_on := truth(test(), "while"), bool):
        if not going_on:
            return
        body()

    # The condition is evaluated once for every turn, as it may do more than look.
    def turn() -> None:
        nonlocal going_on
        body()
        going_on = truth(test(), "while")

    def set_all(values: Sequence[Any]) -> None:
        nonlocal going_on
        going_on, *rest = values
        set_state(rest)

    names = ["the condition", *symbol_names]
    variables = Variables(lambda: [going_on, *get_state()], set_all, names)
    maximum = opts.get("maximum_iterations")
    while_loop(turn, variables, Reached(test, body, private=private), maximum)
    if ended is not None and ended in symbol_names and maximum is None:
        # As a bool of Python, it says that the function has returned a value.
        after = dict(zip(symbol_names, get_state(), strict=True))
        if jnp.result_type(after[ended]) == jnp.bool_:
            set_state([*(after | {ended: True}).values()])


def for_stmt(
    iter_: Any,
    extra_test: _Block | None,
    body: Callable[[Any], Any],
    get_state: _Get,
    set_state: _Set,
    symbol_names: Sequence[str],
    opts: dict[str, Any],
    private: Sequence[str] = (),
) -> None:
    """Runs `for target in iter_: body(target)`; over arrays with `jax.lax.scan`.

    A loop over other values is unrolled. After `break` or `return` under a traced condition, its
    turns are those of `if not ended: body(target)`.
    """
    variables = Variables(get_state, set_state, symbol_names)

    def guarded(target: object) -> None:
        assert extra_test is not None
        goes_on = extra_test()
        pred = truth(goes_on, "for")
        if pred is True:
            body(target)
        elif pred is not False:
            run, reached = lambda: body(target), Reached(body, private=private)
            nothing = lambda: None
            _choose(goes_on, pred, run, nothing, variables, reached)

    if is_iterated(iter_):
        test = guarded if extra_test is not None else None
        blocks = (body,) if extra_test is None else (body, extra_test)
        reached = Reached(*blocks, private=private)
        for_loop(iter_, body, test, variables, reached)
        return
    check_advances(iter_)
    if extra_test is None:
        for target in iter_:
            body(target)
    else:
        _for_until(iter_, extra_test, body, guarded)


def _for_until(
    iter_: Any, extra_test: _Block, body: Callable[[Any], Any], guarded: Callable[[Any], Any]
) -> None:
    """Runs a loop over values of Python that can end early."""
    going_on = truth(extra_test(), "for")
    if going_on is False:
        return
    for target in iter_:
        (body if going_on is True else guarded)(target)
        going_on = truth(extra_test(), "for")
        if going_on is False:
            return
        if going_on is not True and not isinstance(iter_, Sequence):
            error = UnsupportedError(
                f"The `for` at {script_line()} ends early under a condition that is known only when"
                f" the step runs, but what it has taken from {shown(iter_)} is gone then. Loop over"
                " a list or an array, or outside of the step."
            )
            feeding = current_feeding()
            if feeding is None:
                raise error
            feeding.leave(error)  # a function can run on the host instead


def if_exp(cond: object, if_true: _Block, if_false: _Block, expr_repr: str) -> Any:
    """Returns `if_true() if cond else if_false()`."""
    pred = truth(cond, "if")
    if isinstance(pred, bool):
        return (if_true if pred else if_false)()
    once = lambda block: lambda: [block()]
    reached = Reached(if_true, if_false)
    return choose(pred, once(if_true), once(if_false), [expr_repr], reached)[0]


def and_(a: _Block, b: _Block) -> Any:
    """Returns `a() and b()`."""
    return _logical(a(), b, "and")


def or_(a: _Block, b: _Block) -> Any:
    """Returns `a() or b()`."""
    return _logical(a(), b, "or")


def _logical(first: object, b: _Block, what: Literal["and", "or"]) -> Any:
    pred = truth(first, what)
    if isinstance(pred, bool):
        return b() if pred is (what == "and") else first
    return _both(pred, first, b, what)


@not_to_be_handled
def _both(pred: jax.Array, first: object, b: _Block, what: Literal["and", "or"]) -> Any:
    """Returns `first and b()`, or `first or b()`."""
    scalar = lambda value: jnp.reshape(plain(value), ())
    reached = Reached(b)
    block = Recorded(lambda: [scalar(b())], reached)
    if block.is_simple():
        (second,) = block.run().values()
        pair = (second, first) if what == "and" else (first, second)
        return jnp.where(pred, *map(scalar, pair))
    blocks = lambda: [scalar(b())], lambda: [scalar(first)]
    if_true, if_false = blocks if what == "and" else blocks[::-1]
    return choose(pred, if_true, if_false, ["the value"], reached, what)[0]


def not_(a: object) -> Any:
    """Returns `not a`."""
    value = truth(a, "not")
    if isinstance(value, bool):
        return not value
    negation = ~value
    _state.negation = negation, a
    return negation


def assert_stmt(
    expression: object, values: Callable[[], tuple[Any, ...]], message: Callable[..., Any]
) -> None:
    """Runs `assert expression, message(*values())`; a traced condition when the step runs."""
    holds = truth(expression, "assert")
    if isinstance(holds, bool):
        assert holds, message(*values())
        return
    where = script_line()
    text = lambda *known: AssertionError(f"{message(*known)} (the assert at {where})")
    check_when_run(holds, text, values())


def handled() -> BaseException | None:
    """Begins the handler of an exception, and returns it."""
    error = sys.exception()
    check_handler(error)
    return error


def contains(values: Any, item: Any) -> Any:
    """Returns `item in values`."""
    values, item = plain(values), plain(item)
    if is_traced(values):
        return jnp.any(values == item)
    if isinstance(values, (list, tuple)) and any(map(is_traced, (item, *map(plain, values)))):
        return _any([value is item or value == item for value in values])
    return item in values


class FunctionScope:
    """The body of a converted function; malt asks for one."""

    def __init__(self, function_name: str, scope_name: str, options: object) -> None:
        self.function_name = function_name
        self.name = scope_name

    def __enter__(self) -> "FunctionScope":
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            check_copies()  # here, where the traceback has the function

    def ret(self, value: object, did_return: object) -> Any:
        """Returns the result of the function.

        Raises:
            UnsupportedError: if only some of its paths return a value.
        """
        if is_undefined(value):
            return None
        if value is not None and is_traced(did_return):
            raise UnsupportedError(
                f"{self.function_name}: one path of the function at {script_line()} returns a value"
                " and another one nothing, and which it is depends on a value that is known only"
                " when the step runs. Return a value of the same shape and dtype on every path."
            )
        return value


def with_function_scope(thunk: Callable[[Any], Any], scope_name: str, options: object) -> Any:
    """Returns the result of a lambda."""
    with FunctionScope("lambda", scope_name, options) as scope:
        return thunk(scope)


def _next(iterator: Any, *default: Any) -> Any:
    check_advances(iterator)
    return builtins.next(iterator, *default)


def _int(value: Any = 0, *base: Any) -> Any:
    value, scope = plain(value), current_scope()
    # Python's own `int` makes every replica be traced with its number, which a text then has.
    if not is_traced(value) or (scope is not None and scope.is_replica_id(value)):
        return builtins.int(value, *base)
    return _number(value.astype(int))


def _float(value: Any = 0.0) -> Any:
    value = plain(value)
    return _number(value.astype(float)) if is_traced(value) else builtins.float(value)


def _number(value: Any) -> Any:
    """Returns a traced value in the place of a number, which nothing outside may keep."""
    scope = current_scope()
    if scope is not None:
        scope.numbers.append(value)
    return value


def _bool(value: object = False) -> Any:
    return truth(value, "bool()")


def _range(*ends: Any) -> Any:
    if not any(is_traced(plain(end)) for end in ends):
        return range(*ends)
    start, stop, step = ((0, *ends, 1), (*ends, 1), ends)[len(ends) - 1]
    return Range(start, stop, step)


def _print(*values: Any, sep: str | None = " ", end: str | None = "\n", **options: Any) -> None:
    leaves, tree = jax.tree.flatten([plain(value) for value in values])
    traced = [i for i, leaf in enumerate(leaves) if is_traced(leaf)]
    if not traced and not is_recording():
        builtins.print(*values, sep=sep, end=end, **options)
        return

    def show(*arrays: Any) -> None:
        for i, array in zip(traced, arrays, strict=True):
            leaves[i] = array
        builtins.print(*jax.tree.unflatten(tree, leaves), sep=sep, end=end, **options)

    jax.debug.callback(show, *(leaves[i] for i in traced))


def _extreme(python: Callable[..., Any], of_two: Callable[..., Any]) -> Callable[..., Any]:
    def extreme(*values: Any, **options: Any) -> Any:
        values = tuple(plain(value) for value in values)
        among = values[0] if len(values) == 1 else values
        if isinstance(among, jax.Array):
            among = list(among) if among.ndim else [among]
        if options or not hasattr(among, "__len__") or not any(map(is_traced, among)):
            return python(*values, **options)
        return functools.reduce(of_two, among)

    return extreme


def _all(values: object) -> Any:
    return _reduced(values, builtins.all, jnp.logical_and, "all()")


def _any(values: object) -> Any:
    return _reduced(values, builtins.any, jnp.logical_or, "any()")


def _reduced(values: Any, python: Callable[..., Any], of_two: Callable[..., Any], what: str) -> Any:
    values = list(values)
    if not any(map(is_traced, values)):
        return python(values)
    return functools.reduce(of_two, [truth(value, what) for value in values])


def _sorted(values: Any, *, key: Any = None, reverse: bool = False) -> Any:
    if key is not None or not any(map(is_traced, values := list(values))):
        return builtins.sorted(values, key=key, reverse=reverse)
    ordered = jnp.sort(jnp.stack([plain(value) for value in values]), axis=0)
    return list(ordered[::-1] if reverse else ordered)


_OVERLOADS: dict[Any, Callable[..., Any]] = {
    builtins.all: _all,
    builtins.any: _any,
    builtins.bool: _bool,
    builtins.float: _float,
    builtins.int: _int,
    builtins.max: _extreme(builtins.max, jnp.maximum),
    builtins.min: _extreme(builtins.min, jnp.minimum),
    builtins.next: _next,
    builtins.print: _print,
    builtins.range: _range,
    builtins.sorted: _sorted,
}


def overload_of(function: object) -> Callable[..., Any] | None:
    """Returns what a builtin function does in converted code; None if it is called as it is."""
    try:
        return _OVERLOADS.get(function)
    except TypeError:  # not hashable
        return None
