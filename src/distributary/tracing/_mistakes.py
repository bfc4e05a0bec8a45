"""Errors of a trace in the words of its user: the step, its argument, the line, and a remedy.

    def train_step(batch):
        if batch["x"].mean() > 0:        # line 12 of train.py

JAX would say "Attempted boolean conversion of traced array with shape bool[]". Here it becomes

    TracedValueError: train_step: `if` at train.py:12 needs the value of `batch['x']`, which ...

The error keeps only those frames of its traceback that are code of the user.
"""

import inspect
import linecache
import os
import re
import traceback
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import jax

from distributary.errors import (
    ContextError,
    DistributaryError,
    InvalidTypeError,
    InvalidValueError,
    TracedValueError,
)
from distributary.topology import function_of_tracer, origins_of_tracer
from distributary.tracing._markers import REPLICA_ID, Handle, read_p, sparse_read_p

# Code that users do not write, by the names of modules. Where a traceback is shown, these frames
# are left out.
_INTERNAL = ("distributary.", "jax.", "jax_", "keras.src.", "malt.", "contextlib")
_LIBRARIES = ("site-packages", "dist-packages", "<frozen", ".pyx")
_MAX_NAMES = 3


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


Kind = Literal["replica", "function"]


@final
@dataclass(frozen=True, slots=True)
class _Case:
    """An error together with what its message needs.

    Attributes:
        error: The error.
        subject: The name of the step.
        kind: Whether a step of a replica or a `distributary.function` is traced.
        where: File and line.
        line: The text of the line.
        depends: Names of what the value depends on.
    """

    error: BaseException
    subject: str
    kind: Kind
    where: str
    line: str
    depends: tuple[str, ...]

    def value_of(self) -> str:
        """Returns what the value depends on, as a part of a sentence."""
        names = [*dict.fromkeys(self.depends)]
        if not names:
            return "the value of an array"
        rest = len(names) - _MAX_NAMES
        shown = names if rest <= 0 else [*names[:_MAX_NAMES], f"{rest} more"]
        last = shown.pop()
        return "a value computed from " + (f"{', '.join(shown)} and {last}" if shown else last)

    def needs(self, what: str, remedy: str) -> str:
        """Returns the message for Python code that needs the value of an array."""
        traced = "step" if self.kind == "replica" else "function"
        return (
            f"{self.subject}: {what} at {self.where} needs {self.value_of()}, but there are no"
            f" values yet while the {traced} is traced: its Python runs once, for all batches and"
            f" replicas. {remedy}"
        )


_REPLICA_ID = "the replica id"


def _of_bool(case: _Case) -> str:
    if re.search(r"\bwhile\b", case.line):
        return case.needs(
            "`while`",
            "Write jax.lax.while_loop(condition, body, start), or jax.lax.fori_loop for a number of"
            " turns that you know.",
        )
    if re.search(r"\bassert\b", case.line):
        return case.needs(
            "`assert`", "Return the value from the step, and check what run has returned."
        )
    function = re.search(r"(?<![\w.])(max|min|sorted|any|all)\(", case.line)
    if function:
        name = function[1]
        other = {"max": "maximum", "min": "minimum", "sorted": "sort"}.get(name, name)
        return case.needs(f"{name}()", f"Write jnp.{other} instead.")
    word = re.search(r"\b(if|and|or|not)\b", case.line)
    return case.needs(
        f"`{word[1] if word else 'if'}`",
        "Write jnp.where(condition, a, b) to choose between values, jax.lax.cond(condition, f, g,"
        " x) to choose between functions, and & | ~ for `and`, `or`, `not`.",
    )


def _after(case: _Case) -> str:
    """Returns how to get a number after the step."""
    if case.kind == "function":
        return "Return the value, and convert what the function has returned."
    return (
        "Return it from the step, and convert it after run:"
        ' float(strategy.reduce("MEAN", value, axis=None)).'
    )


def _of_number(case: _Case) -> str:
    text = str(case.error)
    if "size argument" in text or (re.search(r"jnp\.\w+\(?\)?", text) and "jnp.array" not in text):
        called = re.search(r"jnp\.(\w+)", text)
        name = f"jnp.{called[1]}" if called else "the function"
        return case.needs(
            f"the size of what {name} returns",
            f"Pass size=, the most entries that there can be, to {name}, or write"
            " jnp.where(condition, a, b) with three arguments.",
        )
    if ".item()" in case.line or "item()" in text:
        return case.needs(".item()", _after(case))
    converted = re.search(r"`(\w+)` function", text)
    name = converted[1] if converted else "float"
    if name == "int":
        return case.needs(
            "int()",
            "Write x.astype(int) for a whole number in the step. A number that never changes goes"
            " to the step as functools.partial(step, n=3), not in args.",
        )
    return case.needs(f"{name}()", f"{_after(case)} To change the dtype, write x.astype({name}).")


def _of_index(case: _Case) -> str:
    if "range(" in case.line:
        return case.needs(
            "range()",
            "Write jax.lax.fori_loop(0, n, body, start). If the number never changes, give it to"
            " the step as functools.partial(step, n=3), not in args.",
        )
    return case.needs(
        "the index of a list",
        "Look up in an array: jnp.asarray(values)[i]. To choose between functions, write"
        " jax.lax.switch(i, functions, x).",
    )


def _of_shape(case: _Case) -> str:
    return case.needs(
        "a shape",
        "Take sizes from x.shape, which a step knows. A size that never changes goes to the step as"
        " functools.partial(step, size=3), not in args.",
    )


def _of_slice(case: _Case) -> str:
    return case.needs(
        "a slice",
        "Write jax.lax.dynamic_slice(x, starts, sizes) if only the start changes. If the size"
        " changes, keep all rows, and set the rest to zero:"
        " jnp.where(jnp.arange(len(x)) < size, x, 0), for x of one dim.",
    )


def _of_mask(case: _Case) -> str:
    return case.needs(
        "the size of what a mask selects",
        "Keep all entries and set the others to zero, jnp.where(mask, x, 0); divide a sum by"
        " mask.sum() for the mean.",
    )


def _of_numpy(case: _Case) -> str:
    called = re.search(r"\bnp\.((?:\w+\.)*\w+)\(", case.line)
    library = _library(case.error)
    if called and called[1] in ("array", "asarray"):
        remedy = "Write jnp.asarray, or leave it out: the value is an array of JAX already."
    elif library == "NumPy":
        name = called[1] if called else "function"
        remedy = f"Write jnp.{name} (import jax.numpy as jnp) or the function of keras.ops."
    else:
        remedy = (
            f"Steps compute with JAX: write it with jax.numpy or keras.ops, or call {library} on"
            " what the step returns."
        )
    return case.needs(f"np.{called[1]}" if called else library, remedy)


def _library(error: BaseException) -> str:
    """Returns the library whose code asked for an array of NumPy."""
    names = {"torch": "torch", "tensorflow": "TensorFlow", "sklearn": "scikit-learn"}
    names |= {"scipy": "SciPy", "pandas": "pandas", "matplotlib": "matplotlib"}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        root = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if root in names:
            return names[root]
    return "NumPy"


def _of_format(case: _Case) -> str:
    return case.needs(
        "a format such as {loss:.3f}",
        'Write jax.debug.print("loss {}", loss) to print in every step, or return the value and'
        " print it after run.",
    )


def _of_hash(case: _Case) -> str:
    return case.needs(
        "hash()",
        "A dict or set cannot look up an array: look up in an array, jnp.asarray(values)[i], or"
        " choose with jnp.where.",
    )


def _of_seed(case: _Case) -> str:
    return case.needs(
        "the seed of a generator", "Draw with jax.random and a key: jax.random.fold_in(key, seed)."
    )


def _of_items(case: _Case) -> str:
    return (
        f"{case.subject}: {case.where} assigns to an item of an array, but arrays of JAX never"
        " change. Write x = x.at[i].set(value), or .add, .multiply, .min, .max in place of .set."
    )


def _of_axis(case: _Case) -> str:
    name = str(case.error).rpartition("name: ")[2].partition(".")[0]
    return (
        f"{case.subject}: the collective at {case.where} names the axis {name!r}, which there is"
        ' not. Combine replicas with dist.get_replica_context().all_reduce("MEAN", value) or'
        " all_gather(value, axis=0); collectives of jax.lax find them under the axis 'replica'."
    )


def _of_nnx(case: _Case) -> str:
    return (
        f"{case.subject}: {case.where} changes an nnx object that was made outside of the step; its"
        " values would be lost. Split it before, graph, state = nnx.split(model), keep the state in"
        " distributary.Variable, and call nnx.merge(graph, state) in the step, as in"
        " examples/digits_flax.py."
    )


def _of_torch(case: _Case) -> str:
    return (
        f"{case.subject}: {case.where} calls torch with an array of JAX, but steps compute with JAX"
        " alone. Write the model with Keras or Flax, and call torch outside of the step."
    )


def _of_variable(case: _Case) -> str:
    return (
        f"{case.subject}: {case.where} passes a variable to a function of JAX that takes arrays."
        " Write dist.grad(loss_function, variable)() or dist.value_and_grad for gradients, and"
        " variable.value() for the array."
    )


_METHODS = {
    "numpy": "Return the array from the step, and convert it after run: np.asarray(result).",
    "tolist": "Return the array from the step, and convert it after run.",
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
_REMEDIES = {name: text for names, text in _METHODS.items() for name in names.split()}


def _of_method(case: _Case) -> str | None:
    found = re.search(r"has no attribute '?(\w+)", str(case.error))
    name = found[1] if found else ""
    remedy = _REMEDIES.get(name)
    if remedy is None:
        return None
    return f"{case.subject}: arrays of JAX have no .{name}(), at {case.where}. {remedy}"


_Explanation = Callable[[_Case], str | None]
# Kinds of errors, a pattern of their text, what to say instead, and the error that says it. The
# first match counts.
_RULES: list[tuple[type[BaseException], str, _Explanation, type[DistributaryError]]] = [
    (jax.errors.TracerBoolConversionError, "", _of_bool, TracedValueError),
    (jax.errors.TracerIntegerConversionError, "", _of_index, TracedValueError),
    (jax.errors.TracerArrayConversionError, "", _of_numpy, TracedValueError),
    (jax.errors.NonConcreteBooleanIndexError, "", _of_mask, TracedValueError),
    (jax.errors.ConcretizationTypeError, "", _of_number, TracedValueError),
    (TypeError, "Shapes must be 1D sequences of concrete values", _of_shape, TracedValueError),
    (Exception, "[Ss]lice (entries|indices) must .*static", _of_slice, TracedValueError),
    (TypeError, "unsupported format string passed to .*Tracer", _of_format, TracedValueError),
    (TypeError, "unhashable type: '.*Tracer", _of_hash, TracedValueError),
    (TypeError, "SeedSequence expects int", _of_seed, TracedValueError),
    (TypeError, "seed types? .*Tracer|supported seed types", _of_seed, TracedValueError),
    (
        TypeError,
        "arrays are immutable|does not support item assignment",
        _of_items,
        InvalidTypeError,
    ),
    (AttributeError, "(Tracer|'tuple' object) has no attribute", _of_method, InvalidTypeError),
    (NameError, "unbound axis name", _of_axis, InvalidValueError),
    (Exception, "from (a )?different trace level", _of_nnx, ContextError),
    (TypeError, "must be Tensor, not", _of_torch, InvalidTypeError),
    (ValueError, "Triggering __jax_array__", _of_variable, InvalidTypeError),
]


def explained(
    error: Exception,
    subject: Subject | None = None,
    kind: Kind = "replica",
    tracers: Sequence[Any] = (),
) -> Exception:
    """Returns an error in the words of the user for one of a trace, or the error itself.

    Args:
        error: The error. It may stand for another one that was raised before; Keras does this.
        subject: What is traced; None finds a name in the traceback.
        kind: Whether a step of a replica or a `distributary.function` is traced.
        tracers: The arguments of the trace.
    """
    if isinstance(error, DistributaryError) and not hasattr(error, "__notes__"):
        place = _place(error)
        if place.line and str(subject or place.name) not in str(error):
            error.add_note(f"In {subject or place.name}, at {place.where}.")
    before: BaseException | None = error
    while before is not None and not isinstance(before, DistributaryError):
        made = _explained(before, subject, kind, tracers)
        if made is not None:
            return made
        before = before.__cause__ or before.__context__
    # Keras replaces an error of ours by one of its own, with several lines about arguments.
    return before if isinstance(before, TracedValueError) else error


def _explained(
    error: BaseException, subject: Subject | None, kind: Kind, tracers: Sequence[Any]
) -> Exception | None:
    if isinstance(error, jax.errors.UnexpectedTracerError):
        place = _place(error)
        return ContextError(
            f"{subject or place.name}: {place.where} uses a value that an earlier step has left in"
            f" a list, an attribute or a global variable{leaked_at(_tracer_of(error))}. Values of a"
            " step exist only while it is traced. Return what you need later, or assign it to a"
            " distributary.Variable."
        ).with_traceback(error.__traceback__)
    if isinstance(error, TypeError) and subject is not None and kind == "replica":
        misfit = subject.misfit(tracers)
        if misfit is not None:
            return InvalidTypeError(misfit).with_traceback(error.__traceback__)
    for of_kind, pattern, explain, kind_of_error in _RULES:
        if isinstance(error, of_kind) and re.search(pattern, str(error)):
            place = _place(error)
            depends = _depends(error, subject, tracers)
            name = str(subject or place.name)
            text = explain(_Case(error, name, kind, place.where, place.line, depends))
            if text is not None:
                return kind_of_error(text).with_traceback(error.__traceback__)
    return None


def leaked_at(tracer: object) -> str:
    """Returns where a value was made that its step has left behind, as a part of a sentence."""
    step = function_of_tracer(tracer)
    return "" if step is None else f" (made in {step})"


@final
@dataclass(frozen=True, slots=True)
class _Place:
    name: str
    where: str
    line: str


def _place(error: BaseException) -> _Place:
    """Returns the innermost line of the user's code that an error has passed through."""
    frames = [
        (frame, lineno)
        for frame, lineno in traceback.walk_tb(error.__traceback__)
        if not is_internal(frame)
    ]
    own = [
        (frame, lineno)
        for frame, lineno in frames
        if not any(part in frame.f_code.co_filename for part in _LIBRARIES)
    ]
    if not frames:
        return _Place("the step", "an unknown line", "")
    frame, lineno = (own or frames)[-1]
    file = frame.f_code.co_filename
    name = frame.f_code.co_qualname.rpartition("<locals>.")[2]
    return _Place(
        name, f"{os.path.basename(file)}:{lineno}", linecache.getline(file, lineno, frame.f_globals)
    )


def _depends(
    error: BaseException, subject: Subject | None, tracers: Sequence[Any]
) -> tuple[str, ...]:
    """Returns names of what the value depends on that an error is about."""
    tracer = _tracer_of(error)
    if tracer is None:
        return ()
    numbers, eqns = origins_of_tracer(tracer, tracers)
    names: list[str] = []
    if subject is not None:
        arguments = subject.arguments(len(tracers))
        names += [arguments[i] for i in numbers]
    for eqn in eqns:
        if eqn.primitive in (read_p, sparse_read_p):
            names.append(_name_of_handle(eqn.params["handle"]))
    return tuple(names)


def _name_of_handle(handle: Handle) -> str:
    return _REPLICA_ID if handle is REPLICA_ID else f"variable {handle.name!r}"


def _tracer_of(error: BaseException) -> Any:
    """Returns the tracer that an error is about, from the innermost frames that have one."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith(("jax.", "numpy", "random")):
            return None
        for value in frame.f_locals.values():
            parts = value if isinstance(value, (tuple, list)) else (value,)
            for part in parts:
                ends = (part.start, part.stop) if isinstance(part, slice) else (part,)
                for end in ends:
                    if isinstance(end, jax.core.Tracer):
                        return end
    return None


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
