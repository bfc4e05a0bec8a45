"""Errors of a trace in the words of its user: the step, its argument, the line, and a remedy.

    def train_step(batch):
        if batch["x"].mean() > 0:        # line 12 of train.py

JAX would say "Attempted boolean conversion of traced array with shape bool[]". Here it becomes

    TracedValueError: train_step: `if` at train.py:12 needs the value of `batch['x']`, which ...

The error keeps only those frames of its traceback that are code of the user.
"""

import collections
import inspect
import logging
import os
import pickle
import random
import re
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np

from distributary.devices import function_of_tracer
from distributary.errors import (
    ContextError,
    DistributaryError,
    InvalidTypeError,
    InvalidValueError,
    TracedValueError,
)
from distributary.tracing._scope import ScopeKind

# Code that users do not write, by the names of modules. Where a traceback is shown, these frames
# are left out.
_INTERNAL = ("distributary.", "jax.", "jax_", "keras.src.", "malt.", "contextlib")
_LIBRARIES = ("site-packages", "dist-packages", "<frozen", ".pyx")
_UNKNOWN = "an unknown line"


@final
@dataclass(frozen=True, slots=True)
class Subject:
    """A function that is traced, as its user knows it.

    Attributes:
        function: The function.
        tree: The structure of its arguments, `(args, kwargs)`, with None in place of what is not
            data. None if the function gets the arrays themselves.
        name: Its name in messages if it is not that of the function, such as `model.fit`. The
            arguments are then not its user's, so no message names them.
        autograph: Whether its Python control flow is converted to that of JAX: always, never, or,
            with None, if it depends on traced values.
    """

    function: Callable[..., Any]
    tree: Any = None
    name: str | None = None
    autograph: bool | None = None

    def nested(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the positional and keyword arguments with `leaves` in place of the data."""
        if self.tree is None:
            return tuple(leaves), {}
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        return args, kwargs

    def arguments(self, count: int) -> list[str]:
        """Returns names of its arrays, such as `batch['x']`."""
        if self.name is not None:
            return ["the batch"] * count
        args, kwargs = self.nested(range(count))
        try:
            bound = dict(inspect.signature(self.function).bind(*args, **kwargs).arguments)
        except (TypeError, ValueError):
            bound = {"args": args, "kwargs": kwargs}
        names = [""] * count
        for name, value in bound.items():
            for path, number in jax.tree.leaves_with_path(value):
                names[number] = f"`{name}{jax.tree_util.keystr(path)}`"
        return names

    def misfit(self, leaves: Sequence[Any]) -> str | None:
        """Returns what is wrong if the function does not take the arguments, else None."""
        if self.name is not None:
            return None
        args, kwargs = self.nested(leaves)
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):
            return None
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            count = f"{len(args)} argument{'s' * (len(args) != 1)}"
            remedy = "Write args=(x, y) for two arguments, and args=(x,) for one."
            if len(args) == 1 and isinstance(args[0], (tuple, list)):
                count += f", a {type(args[0]).__name__} of {len(args[0])}"
                remedy = "Write args=batch to pass the parts of a batch one by one."
            elif len(args) > 1 and len(signature.parameters) == 1:
                remedy = "Write args=((x, y),) to pass one tuple."
            takes = ", ".join(signature.parameters)
            return f"{self}({takes}) was called with {count}: {error}. {remedy}"
        return None

    def __str__(self) -> str:
        return self.name or name_of(self.function)


def name_of(function: object) -> str:
    """Returns the name of a function for messages: without the functions that it is defined in."""
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    name = getattr(function, "__qualname__", None) or type(function).__name__
    return str(name).rpartition("<locals>.")[2]


@final
@dataclass(frozen=True, slots=True)
class _Mistake:
    """A kind of error in a step, and what to say in its place.

    In texts, `{1}` is the first group of the pattern, and `{after}` how to get a number after the
    step.

    Attributes:
        error: Kind of the error.
        pattern: Pattern of its text.
        remedy: What to write instead.
        what: The Python code that needs the value of an array; else what is wrong.
        raised: Kind of the error that is raised in its place.
        cause: Kind of the error that it was raised from.
    """

    error: type[BaseException]
    pattern: str
    what: str
    remedy: str
    raised: type[DistributaryError] = TracedValueError
    cause: type[BaseException] | None = None

    def explained(
        self, error: BaseException, subject: Subject | None, kind: ScopeKind
    ) -> DistributaryError | None:
        """Returns the error in the words of the user; None for an error of another kind."""
        is_one = isinstance(error, self.error)
        if not is_one or (self.cause is not None and not isinstance(error.__cause__, self.cause)):
            return None
        match = re.search(self.pattern, str(error))
        if match is None:
            return None
        step, where = _place(error, subject)
        what, remedy = (
            text.format("", *match.groups(), after=_AFTER[kind], where=where)
            for text in (self.what, self.remedy)
        )
        if self.raised is not TracedValueError:
            return self.raised(f"{step}: {what} {remedy}")
        traced = "step" if kind == "replica" else "function"
        return TracedValueError(
            f"{step}: {what} at {where} needs {_value_of(error, subject)}, but there are no values"
            f" yet while the {traced} is traced: its Python runs once, for all batches and"
            f" replicas. {remedy}"
        )


_AFTER: dict[ScopeKind, str] = {
    "function": "Return the value, and convert what the function has returned.",
    "replica": (
        "Return it from the step, and convert it after run:"
        ' float(strategy.reduce("MEAN", value, axis=None)).'
    ),
}
_NUMPY = (
    "Write jnp.log for np.log, with import jax.numpy as jnp, or keras.ops; jnp.asarray for"
    " np.asarray; array = array.at[i].set(value) for an item. Call other libraries on what the"
    " step returns."
)
_METHODS = {
    "numpy tolist": "Return the array from the step, and convert it after run: np.asarray(result).",
    "backward": "Write dist.value_and_grad(loss_function, variables)() or dist.GradientTape.",
    "detach": "Write jax.lax.stop_gradient(x).",
    "cpu cuda to": (
        "Leave it out: each replica's arrays are on its device already. To change the dtype, write"
        " x.astype(dtype)."
    ),
    "unsqueeze": "Write jnp.expand_dims(x, axis).",
    "view": "Write x.reshape(shape).",
    "permute": "Write jnp.transpose(x, axes).",
    "float long int double half bool cast type": "Write x.astype(dtype).",
    "numel": "Write x.size.",
    "dim": "Write x.ndim.",
    "clone contiguous cont requires_grad_": "Leave it out: arrays of JAX never change.",
    "masked_fill": "Write jnp.where(mask, value, x).",
    "expand expand_as": "Write jnp.broadcast_to(x, shape).",
    "get_shape as_list set_shape": "Write x.shape, a tuple.",
    "assign assign_add assign_sub add_ mul_ sub_ copy_ zero_ grad": (
        "Arrays of JAX never change and hold no gradients: keep what changes in a"
        " distributary.Variable."
    ),
}
# The first that fits counts.
_MISTAKES = [
    _Mistake(
        jax.errors.TracerBoolConversionError,
        "",
        "`if`, `while`, `assert` or max()",
        "To choose, write jnp.where(condition, a, b), jnp.maximum or jax.lax.cond(condition, f, g,"
        " x); for a loop jax.lax.while_loop(condition, body, start); & | ~ for `and`, `or`, `not`."
        " To check a value, return it.",
    ),
    _Mistake(
        jax.errors.TracerIntegerConversionError,
        "",
        "range() or the index of a list",
        "Write jax.lax.fori_loop(0, n, body, start), jnp.asarray(values)[i], or jax.lax.switch(i,"
        " functions, x). A number that never changes goes to the step as functools.partial(step,"
        " n=3), not in args.",
    ),
    _Mistake(jax.errors.TracerArrayConversionError, "", "a function of NumPy", _NUMPY),
    _Mistake(
        jax.errors.NonConcreteBooleanIndexError,
        "",
        "the size of what a mask selects",
        "Keep all entries and set the others to zero, jnp.where(mask, x, 0); divide a sum by"
        " mask.sum() for the mean.",
    ),
    _Mistake(
        jax.errors.ConcretizationTypeError,
        r"(jnp\.(?!array\b)\w+)",
        "the size of what {1} returns",
        "Pass size=, the most entries that there can be, to {1}, or write jnp.where(condition, a,"
        " b) with three arguments.",
    ),
    _Mistake(
        jax.errors.ConcretizationTypeError,
        "",
        "float(), int() or .item()",
        "{after} To change the dtype, write x.astype(int). A number that never changes goes to the"
        " step as functools.partial(step, n=3), not in args.",
    ),
    _Mistake(
        TypeError,
        "Shapes must be 1D sequences of concrete values",
        "a shape",
        "Take sizes from x.shape, which a step knows. A size that never changes goes to the step as"
        " functools.partial(step, size=3), not in args.",
    ),
    _Mistake(
        Exception,
        "[Ss]lice (?:entries|indices) must .*static",
        "a slice",
        "Write jax.lax.dynamic_slice(x, starts, sizes) if only the start changes. If the size"
        " changes, keep all rows, and set the rest to zero:"
        " jnp.where(jnp.arange(len(x)) < size, x, 0), for x of one dim.",
    ),
    _Mistake(
        TypeError,
        "unsupported format string passed to .*Tracer",
        "a format such as {{loss:.3f}}",
        'Write jax.debug.print("loss {{}}", loss) to print in every step, or return the value and'
        " print it after run.",
    ),
    _Mistake(
        TypeError,
        "unhashable type: '.*Tracer",
        "hash()",
        "A dict or set cannot look up an array: look up in an array, jnp.asarray(values)[i], or"
        " choose with jnp.where.",
    ),
    _Mistake(
        TypeError,
        "SeedSequence expects int|seed types? .*Tracer|supported seed types",
        "the seed of a generator",
        "Draw with jax.random and a key: jax.random.fold_in(key, seed).",
    ),
    _Mistake(
        ValueError,
        "setting an array element with a sequence",
        "an item of a NumPy array",
        _NUMPY,
        cause=jax.errors.ConcretizationTypeError,
    ),
    _Mistake(
        TypeError,
        "arrays are immutable|does not support item assignment",
        "{where} assigns to an item of an array, but arrays of JAX never change.",
        "Write x = x.at[i].set(value), or .add, .multiply, .min, .max in place of .set.",
        InvalidTypeError,
    ),
    _Mistake(
        NameError,
        r"unbound axis name: (\w+)",
        "the collective at {where} uses the axis '{1}', which does not exist here.",
        'Combine replicas with dist.get_replica_context().all_reduce("MEAN", value) or'
        " all_gather(value, axis=0); collectives of jax.lax find them under the axis 'replica'.",
        InvalidValueError,
    ),
    _Mistake(
        Exception,
        "from (?:a )?different trace level",
        "{where} changes an nnx object made outside of the step; its values would be lost.",
        "Write state = dist.nnx.State(model) before, in the scope of the strategy, and in the step"
        " `with state.merged() as model:`, as in examples/digits_flax.py. It takes optimizers and"
        " Rngs, too.",
        ContextError,
    ),
    _Mistake(
        TypeError,
        "must be Tensor, not",
        "{where} calls torch with an array of JAX, but steps compute with JAX alone.",
        "Write the model with Keras or Flax, and call torch outside of the step.",
        InvalidTypeError,
    ),
    _Mistake(
        ValueError,
        "Triggering __jax_array__",
        "{where} passes a variable to a function of JAX that takes arrays.",
        "Write variable.value() for the array, and for gradients dist.grad(loss_function,"
        " variable)() or dist.value_and_grad.",
        InvalidTypeError,
    ),
    _Mistake(
        Exception,
        r"apply_gradients\(\) takes|'(SGD|RMSprop|Ada\w+|Nadam|Ftrl|Lion|Lamb|Muon)' object has no"
        " attribute 'minimize'",
        "{where} updates variables, and an optimizer of Keras takes pairs.",
        "Write optimizer.apply_gradients(zip(gradients, variables)).",
        InvalidTypeError,
    ),
    _Mistake(
        TypeError,
        "unsupported operand .*'NoneType'",
        "{where} computes with None.",
        "A gradient is None if the loss does not use the variable in the tape's block, and the"
        " result of a function that has no return.",
        InvalidTypeError,
    ),
    _Mistake(
        TypeError,
        "cannot unpack non-iterable function",
        "{where} takes the parts of a function, as of dist.value_and_grad.",
        "Call it for the value and the gradients: dist.value_and_grad(loss, variables)().",
        InvalidTypeError,
    ),
    _Mistake(
        TypeError,
        "string indexing; got idx=(.+)",
        "{where} takes the part {1} of an array, which has no names.",
        "Let the dataset yield dicts, or give the step its parts by position, args=batch.",
        InvalidTypeError,
    ),
    *(
        _Mistake(
            AttributeError,
            rf"(?:Tracer|'tuple' object) has no attribute '?({names.replace(' ', '|')})\b",
            "arrays of JAX have no .{1}(), at {where}.",
            remedy,
            InvalidTypeError,
        )
        for names, remedy in _METHODS.items()
    ),
]


def explained(
    error: Exception,
    subject: Subject | None = None,
    kind: ScopeKind = "replica",
    tracers: Sequence[Any] = (),
) -> Exception:
    """Returns an error in the words of the user for one of a trace, or the error itself.

    Args:
        error: The error. It may stand for another one that was raised before; Keras does this.
        subject: What is traced; None finds a name in the traceback.
        kind: Whether a step of a replica or a `distributary.function` is traced.
        tracers: The arguments of the trace.
    """
    advise(error)
    if isinstance(error, DistributaryError) and not hasattr(error, "__notes__"):
        name, where = _place(error, subject)
        if where != _UNKNOWN and name not in str(error):
            error.add_note(f"In {name}, at {where}.")
    before: BaseException | None = error
    while before is not None and not isinstance(before, DistributaryError):
        explanation = _explained(before, subject, kind, tracers)
        if explanation is not None:
            return explanation
        before = before.__cause__ or before.__context__
    # Keras replaces an error of ours by one of its own, with several lines about arguments.
    return before if isinstance(before, TracedValueError) else error


_NO_MEMORY = (
    'There is too little memory for this. A smaller batch, the policy "mixed_bfloat16" of'
    " keras.mixed_precision and more replicas help, and so do arguments of the strategy:"
    " experimental_shard_optimizer_state=True divides the state of the optimizer by the number of"
    " replicas, experimental_shard_parameters=True the model as well. `distributary plan --topology"
    " h100:8 SCRIPT.py` shows what each of them needs on your devices, what rematerialization"
    " saves, and the largest batch that fits."
)


def advise(error: Exception) -> None:
    """Adds what to do to an error that says only that memory is exhausted, once."""
    text = str(error) if isinstance(error, jax.errors.JaxRuntimeError) else ""
    is_one = "RESOURCE_EXHAUSTED" in text or "Out of memory" in text  # on CPUs
    is_one |= isinstance(error, MemoryError)
    if is_one and _NO_MEMORY not in getattr(error, "__notes__", ()):
        error.add_note(_NO_MEMORY)


def _explained(
    error: BaseException, subject: Subject | None, kind: ScopeKind, tracers: Sequence[Any]
) -> Exception | None:
    if isinstance(error, jax.errors.UnexpectedTracerError):
        name, where = _place(error, subject)
        leaked = re.search(r"when the value leaked was (.+?) traced for", str(error))
        origin = "" if leaked is None else f" (made in {leaked[1]})"
        return ContextError(
            f"{name}: {where} uses a value that an earlier step has left in"
            f" a list, an attribute or a global variable{origin}. Values of a"
            " step exist only while it is traced. Return what you need later, or assign it to a"
            " distributary.Variable."
        ).with_traceback(error.__traceback__)
    if isinstance(error, TypeError) and subject is not None and kind == "replica":
        misfit = subject.misfit(tracers)
        if misfit is not None:
            return InvalidTypeError(misfit).with_traceback(error.__traceback__)
    candidates = (mistake.explained(error, subject, kind) for mistake in _MISTAKES)
    explanation = next(filter(None, candidates), None)
    return None if explanation is None else explanation.with_traceback(error.__traceback__)


def _value_of(error: BaseException, subject: Subject | None) -> str:
    """Returns what a value depends on, as JAX says it, as a part of a sentence."""
    match = re.search(r"depends on the values? of the arguments? (.+)\.", str(error))
    if match is None or subject is None:  # JAX then names arguments of Keras' own functions
        return "the value of an array"
    if subject.name is not None:
        return "a value computed from the batch"
    names = re.sub("(, and | and |, )", r"`\1`", match[1])
    return f"a value computed from `{names}`"


def leaked_at(tracer: object) -> str:
    """Returns where a value was made that its step has left behind, as a part of a sentence."""
    step = function_of_tracer(tracer)
    return "" if step is None else f" (made in {step})"


def _place(error: BaseException, subject: Subject | None) -> tuple[str, str]:
    """Returns the name of the step, and the user's innermost line that an error has passed."""
    frames = [(f, n) for f, n in traceback.walk_tb(error.__traceback__) if not is_internal(f)]
    if not frames:
        return str(subject or "the step"), _UNKNOWN
    in_libraries = lambda file: any(part in file for part in _LIBRARIES)
    user_frames = [(f, n) for f, n in frames if not in_libraries(f.f_code.co_filename)]
    frame, lineno = (user_frames or frames)[-1]
    name = str(subject or frame.f_code.co_qualname.rpartition("<locals>.")[2])
    return name, f"{os.path.basename(frame.f_code.co_filename)}:{lineno}"


def is_internal(frame: types.FrameType) -> bool:
    """Returns whether a frame is code of distributary, JAX or Keras."""
    return str(frame.f_globals.get("__name__", "")).startswith(_INTERNAL)


def shorten(error: Exception) -> None:
    """Leaves only the user's frames in the traceback of an error, as JAX does with its own.

    Like those of JAX, all frames stay with `JAX_TRACEBACK_FILTERING=off`.
    """
    options: Any = jax.config
    if options.jax_traceback_filtering == "off":
        return
    kept = None
    for frame, lineno in reversed([*traceback.walk_tb(error.__traceback__)]):
        if not is_internal(frame):
            kept = types.TracebackType(kept, frame, frame.f_lasti, lineno)
    notes = getattr(error, "__notes__", None)
    if notes:
        notes[:] = [note for note in notes if "JAX_TRACEBACK_FILTERING" not in note]
    error.with_traceback(kept)


_log = logging.getLogger(__name__)
_DEPTH = 8  # a list can contain itself
_ARRAYS = (jax.Array, np.ndarray)
_NUMBERS = (int, float)
_CHANGED = (
    "%s changes the number %s, which is outside of it, while it is traced. Its Python runs once, so"
    " later runs do not. Count outside of the step, or in a distributary.Variable; ignore this if"
    " it counts traces, or keeps a size."
)
_DRAWN = (
    "%s draws random numbers from %s while it is traced. Its Python runs once, so every run has the"
    " same ones. Draw them outside and pass them in args, or with jax.random and a key from args;"
    " ignore this if another thread draws them."
)


@final
class OuterNames:
    """The names outside of a function, and what they hold before it is traced.

        def step(batch):
            global params
            params = update(params, batch)     # runs while the step is traced, and never again

    The compiled step would start from the first parameters each time, and raise no error until
    somebody reads `params`.

    Args:
        function: The function. Names outside of it that it uses count, their attributes, and those
            that functions of the same file use that it calls.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._before: dict[str, list[Any]] = {}
        self._states: dict[str, list[Any]] = {}
        for name, value in _names(function):
            known, state = [leaf for leaf in _leaves(value) if _is_known(leaf)], _state(value)
            if known:
                self._before[name] = known
            # Two functions can use one name for different numbers.
            self._states.setdefault(name, []).extend([] if state is None else [state])

    def check(self, step: str, numbers: Sequence[Any] = ()) -> None:
        """Checks that no name holds a traced value in the place of an array or number.

        Args:
            step: The function, for messages.
            numbers: The traced values that Python code has asked for as numbers.

        Raises:
            TracedValueError: naming `step` and the name.
        """
        collected = set(map(id, numbers))
        for name, value in _names(self._function):
            leaves = _leaves(value)
            before, state = self._states.get(name, []), _state(value)
            if state is not None and before and state not in before:
                _log.warning(_CHANGED if type(state) in _NUMBERS else _DRAWN, step, name)
            if any(id(leaf) in collected for leaf in leaves):
                raise TracedValueError(
                    f"{step} keeps a number in {name}, which is outside of it. The step is"
                    " compiled: its Python runs once, before there are numbers. Return the value"
                    f" from the step, and put what run returns into {name}."
                )
            held = set(map(id, leaves))
            if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
                continue
            if any(id(array) not in held for array in self._before.get(name, ())):
                raise TracedValueError(
                    f"{step} assigns {name}, which is outside of it. The step is compiled, so later"
                    f" runs would start from the first value again. Return the new {name} from"
                    " the step, or keep it in a distributary.Variable."
                )
            # It may only count traces, so there is no warning that a program can make an error.
            _log.warning(
                "%s keeps an array in %s, which is outside of it. Arrays of a step have no values"
                " there. Return it, and put what run returns into %s.",
                step,
                name,
                name,
            )


def _is_known(leaf: object) -> bool:
    return isinstance(leaf, _ARRAYS) and not isinstance(leaf, jax.core.Tracer)


def _state(value: object) -> Any:
    """Returns a number, or the state of a generator of random numbers; None for other objects."""
    owner: object = value
    if isinstance(value, (types.BuiltinFunctionType, types.MethodType)):
        owner = value.__self__  # such as of `from random import gauss`
    if isinstance(owner, np.random.Generator):
        return pickle.dumps(owner.bit_generator.state)
    if owner is np.random or isinstance(owner, np.random.RandomState):
        return pickle.dumps(owner.get_state())
    if owner is random or isinstance(owner, random.Random):
        return owner.getstate()
    return value if type(value) in _NUMBERS else None


def _names(function: Any, seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Yields the names outside of a function and what they hold."""
    seen = set() if seen is None else seen
    function = inspect.unwrap(function)
    if not hasattr(function, "__code__"):  # an object that can be called
        function = getattr(function, "__call__", None)  # noqa: B004
    code = getattr(function, "__code__", None)
    if code is None or id(code) in seen:
        return
    seen.add(id(code))
    cells = zip(code.co_freevars, function.__closure__ or (), strict=False)
    # A cell without contents equals another one: the name is assigned later.
    outer = {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
    known = function.__globals__
    outer |= {name: known[name] for name in code.co_names if name in known}
    if inspect.ismethod(function):
        outer[(*code.co_varnames, "self")[0]] = function.__self__
    for name, value in outer.items():
        yield name, value
        if value is np and "random" in code.co_names:
            yield f"{name}.random", np.random
        if inspect.isfunction(value) and value.__code__.co_filename == code.co_filename:
            yield from _names(value, seen)
        elif not inspect.isclass(value) and not inspect.ismodule(value):
            held = {**vars(type(value)), **getattr(value, "__dict__", {})}
            yield from [(f"{name}.{k}", held[k]) for k in code.co_names if k in held]


def _leaves(value: object, depth: int = 0) -> list[Any]:
    """Returns the arrays of a container; the keys of a dict may have no order."""
    if isinstance(value, _ARRAYS):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if depth > _DEPTH:
        return []
    if not isinstance(value, (list, tuple, collections.deque)):  # such as a module of equinox
        leaves = jax.tree.leaves(value)
        return [leaf for leaf in leaves if leaf is not value and isinstance(leaf, _ARRAYS)]
    return [leaf for part in value for leaf in _leaves(part, depth + 1)]
