"""The outer compile boundary, like `tf.function`."""

import contextlib
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, Literal, final

import jax

from distributary._late import converted
from distributary.context import current_mode, in_default_context
from distributary.data import Dataset, DatasetIterator, DistributedInput
from distributary.devices import progress
from distributary.engine._cache import (
    Inner,
    ProgramCache,
    changes_refused,
    check_static,
    is_dynamic,
    own_arrays,
    signature_of,
    split_result,
    struct_of,
)
from distributary.engine._executable import Executable, VariableGoneError, garbage_kept
from distributary.errors import InvalidTypeError, UnsupportedError, shown
from distributary.programs import FunctionProgram
from distributary.tracing import (
    Feeds,
    LeaveTrace,
    Origin,
    Subject,
    TraceScope,
    current_scope,
    is_recording,
    shorten,
)
from distributary.variables import TracedInitialValueError, key_order

_INPUTS = (Dataset, DatasetIterator, DistributedInput)
# Structure, signature of the leaves with the outcomes of what was taken, role, kind of context.
_Key = tuple[Any, tuple[Any, ...], Any, bool]


def function(
    func: Callable[..., Any] | None = None,
    *,
    jit_compile: bool | None = None,
    reduce_retracing: bool = False,
    autograph: bool | None = None,
) -> Any:
    """Compiles a function with everything in it, including several calls of `run` and `reduce`.

    The function is traced on the first call, and again whenever shapes, dtypes, structures, static
    arguments or the current strategy change. Variables that it assigns keep their new values.

    The function can take elements from an iterator over a `distributary.data.Dataset` that you pass
    or that it captures: every call takes the next ones. A loop over such a dataset starts a new
    pass in every call. Taking elements from any other iterator during a trace is an error.

    If the first variable that a function creates has a value that is computed there, such as a
    random one, the first call runs its Python code.

    Some functions cannot be compiled as a whole: those that take from a distributed dataset or
    iterator, take more than 100 elements, return a dataset, or let a `tf.TensorArray` grow. They
    run their Python code in every call, and compile each `Strategy.run` in it. A step function that
    they define themselves is compiled only once.

    Args:
        func: The function. Without it, `function` returns a decorator.
        jit_compile: Accepted for compatibility; the function is always compiled.
        reduce_retracing: Accepted for compatibility; no effect.
        autograph: Whether Python control flow becomes that of JAX, see `distributary.autograph`:
            True for all of it, False for none, and None if an `if`, `while` or `for` needs the
            value of an array.

    Returns:
        The compiled function, which you can also use as a method.

    Raises:
        InvalidTypeError: if `func` is not callable.
        InvalidValueError: when you call the function, if it takes from another iterator.

    Source: `tf.function`.
    """
    if func is None:
        return lambda func: function(func, autograph=autograph)
    if not callable(func):
        raise InvalidTypeError(f"function: got {shown(func)}, expected a function.")
    return Function(func, autograph)


@final
class Function:
    """A compiled function; made by `function`.

    Args:
        python_function: The function.
        autograph: See `function`.
        constants: Types of arguments that are part of the program, although others take them for
            data.
        returned: Makes what callers get from what the function returns.
    """

    def __init__(
        self,
        python_function: Callable[..., Any],
        autograph: bool | None = None,
        constants: tuple[type, ...] = (),
        returned: Callable[[Any], Any] = lambda result: result,
    ) -> None:
        self.python_function = python_function
        #: How often the Python function was traced.
        self.num_traces = 0
        self._autograph = autograph
        self._constants = constants
        self._returned = returned
        self._programs: weakref.WeakKeyDictionary[Any, _Programs] = weakref.WeakKeyDictionary()
        self._cache = ProgramCache("distributary.function")
        self._inner = Inner()
        functools.update_wrapper(self, python_function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        scope = current_scope()
        if scope is not None:
            return self._in(scope, args, kwargs)
        if is_recording():  # a tape outside of a trace differentiates what it sees
            return self._returned(self.python_function(*args, **kwargs))
        if any(isinstance(leaf, DistributedInput) for leaf in leaves):
            return self._on_host(args, kwargs)
        mode = current_mode()
        programs = self._programs.setdefault(mode.strategy, {})
        signature = [
            (type(leaf), leaf)
            if type(leaf) in self._constants
            else signature_of(leaf, "distributary.function")
            for leaf in leaves
        ]
        iterators = [leaf for leaf in leaves if type(leaf) is DatasetIterator]
        if len(iterators) > 1:  # an iterator that is passed twice takes turns with itself
            signature += map(iterators.index, iterators)
        key: _Key = tree, tuple(signature), mode.role, in_default_context()
        leaves = own_arrays(leaves, "distributary.function")
        entry = programs.get(key)
        if type(entry) is Executable:
            try:
                return entry([leaves[i] for i in entry.picks])
            except VariableGoneError:
                del programs[key]
        try:
            return self._take_and_call(leaves, tree, key, programs, mode.strategy)
        except LeaveTrace:
            programs[key] = "host"
        except TracedInitialValueError:  # a function computes it anew in every call
            if programs.get(key) == "begun":
                raise
            programs[key] = "begun"
        except Exception as error:
            shorten(error)
            raise
        return self._on_host(args, kwargs)

    def _take_and_call(
        self, leaves: list[Any], tree: object, key: "_Key", programs: "_Programs", strategy: Any
    ) -> Any:
        """Calls the program for the elements that iterators give now; makes it if there is none.

        Raises:
            LeaveTrace: if the function has to run on the host; it has taken no elements then.
        """
        feeds = Feeds(leaves)
        of_course = key
        entry = programs.get(key)
        while isinstance(entry, Origin):
            try:
                of_course = _after(of_course, feeds.follow(entry))
            except ReferenceError:
                break
            entry = programs.get(of_course)
        if entry == "host":
            raise LeaveTrace
        if type(entry) is Executable:
            try:
                return entry([*[leaves[i] for i in entry.picks], *feeds.values])
            except VariableGoneError:
                pass
        try:
            with progress.doing("compilation"):
                entry = self._build(leaves, tree, strategy, feeds)
        except LeaveTrace:
            feeds.put_back()
            raise
        except BaseException:
            feeds.put_back(feeds.position)
            raise
        executables = {key: entry for key, entry in programs.items() if type(entry) is Executable}
        strategy.extended.step_counts.num_retraces += bool(executables)
        for origin, outcome in feeds.course:
            programs[key] = origin
            key = _after(key, outcome)
        self._cache.note_trace(self.python_function, executables, key)
        programs[key] = entry
        return entry([*[leaves[i] for i in entry.picks], *feeds.values])

    def _in(self, scope: TraceScope, args: Any, kwargs: Any) -> Any:
        """Calls the function in a trace."""
        converts = scope.converts if self._autograph is None else self._autograph
        function = converted(self.python_function) if converts else self.python_function
        return self._returned(function(*args, **kwargs))

    def _on_host(self, args: Any, kwargs: Any) -> Any:
        with self._inner.active():
            return self._returned(self.python_function(*args, **kwargs))

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def program_of(self, *args: Any, **kwargs: Any) -> tuple[FunctionProgram, Callable[..., Any]]:
        """Returns the program for arguments of certain shapes, which does not run.

        Args:
            *args: A `jax.ShapeDtypeStruct` in place of each array; its dims may be symbolic.
            **kwargs: The same, by name.

        Returns:
            The program, and a function from its outputs to the result of the function.

        Raises:
            UnsupportedError: if the function takes elements from an iterator.
        """
        leaves, tree = jax.tree.flatten((args, kwargs))
        feeds = Feeds(leaves)
        is_data = [isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves]
        with contextlib.suppress(LeaveTrace):
            pair = self._traced(leaves, tree, is_data, feeds)
            if not feeds.handles:
                return pair
        raise UnsupportedError(
            f"{Subject(self.python_function, tree)} takes elements from an iterator or a dataset,"
            " or lets a tf.TensorArray grow. Pass the element as an argument, or the final size."
        )

    def _traced(
        self, leaves: list[Any], tree: object, is_data: list[bool], feeds: Feeds
    ) -> tuple[FunctionProgram, Callable[..., Any]]:
        picks = [i for i, is_one in enumerate(is_data) if is_one]
        static = [None if is_one else leaf for leaf, is_one in zip(leaves, is_data, strict=True)]
        results: list[Callable[..., Any]] = []

        def flat(*arrays: Any) -> list[Any]:
            self.num_traces += 1
            parts = list(static)
            for i, array in zip(picks, arrays, strict=True):
                parts[i] = array
            args, kwargs = jax.tree.unflatten(tree, parts)
            with changes_refused((args, kwargs), str(names)):
                scope = current_scope()
                assert scope is not None
                result = self._in(scope, args, kwargs)
            key_order(result)  # refuses keys that JAX cannot sort
            if any(isinstance(leaf, _INPUTS) for leaf in jax.tree.leaves(result)):
                raise LeaveTrace  # a source of data is not data that a program can return
            outs, rebuild = split_result(result, "distributary.function")
            results[:] = [rebuild]
            return outs

        avals = [struct_of(leaves[i]) for i in picks]
        data = [0 if is_one else None for is_one in is_data]
        names = Subject(self.python_function, tree)
        for i, leaf in enumerate(leaves):
            if not is_data[i]:
                check_static(leaf, str(names), names.arguments(len(leaves))[i])
        structure = jax.tree.structure(jax.tree.unflatten(tree, data))
        subject = Subject(self.python_function, structure, autograph=self._autograph)
        return FunctionProgram(flat, avals, feeds, subject), results[0]

    def _build(self, leaves: list[Any], tree: object, strategy: Any, feeds: Feeds) -> Executable:
        is_data = [is_dynamic(leaf) and type(leaf) not in self._constants for leaf in leaves]
        with garbage_kept():
            program, rebuild = self._traced(leaves, tree, is_data, feeds)
        # The program runs on the devices of the strategies whose replicas run in the function.
        used = [s for s in (*program.strategies, strategy) if s.num_replicas_in_sync > 1]
        owners = [handle.cell()._layout.strategy for handle in program.handles]
        used += [s for s in owners if s.num_replicas_in_sync > 1]
        owner = used[0] if used else (owners or [strategy])[0]
        program.strategies.clear()  # so that a function does not keep strategies alive
        name = getattr(self.python_function, "__name__", repr(self.python_function))
        extended = owner.extended
        title = f"the program of {name}"
        executable = Executable(
            program, extended.placement, rebuild, name, title, extended.step_counts
        )
        executable.picks = [i for i, is_one in enumerate(is_data) if is_one]
        return executable

    def __repr__(self) -> str:
        return f"<distributary.function {getattr(self.python_function, '__qualname__', '?')}>"


# Under the key of a call is the origin of the element that is taken first. Under that key and its
# outcome is the next origin, and so on. The last one holds the program, or "host" if the call runs
# on the host, or "begun" if the first one did.
_Programs = dict[_Key, Executable | Origin | Literal["host", "begun"]]


def _after(key: _Key, outcome: object) -> _Key:
    tree, signature, role, is_default = key
    return tree, (*signature, outcome), role, is_default
