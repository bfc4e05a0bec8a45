"""Functions that make datasets and values, which workers get by name and never as code.

The coordinator describes a function at the top level of a module by the names of the module and the
function. A worker takes the function of that name from its own copy of the program. A worker in the
same process gets the function itself. If a function cannot be described, the coordinator calls it
and feeds the workers.
"""

import functools
import importlib
import importlib.machinery
import inspect
import json
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from distributary.context import InputContext
from distributary.data import Batches, DistributedInput, Elements, WorkerShare
from distributary.devices import StepCounts
from distributary.errors import DistributaryError
from distributary.servers._messages import JSON
from distributary.strategies import DistributedDataset

_MAIN, _MAIN_COPY = "__main__", "__mp_main__"  # the second name is that of multiprocessing
_INSTALLED = ("site-packages", "dist-packages")


class UnknownMakerError(DistributaryError, LookupError):
    """A function that cannot be described, or that a worker does not have; the text says why."""


@final
@dataclass(frozen=True, slots=True)
class DistributedSource(DistributedInput):
    """A recipe for a dataset with a batch for each replica of a worker.

    When the coordinator iterates over it, it makes such a dataset in the coordinator's process.

    Args:
        dataset: The dataset, or a function that makes it.
        num_replicas: Number of replicas of a worker.
        of_replicas: True if `dataset` is a function from an `InputContext` to a dataset whose
            elements belong to one replica each and must not be split.
        depth: Number of batches that a thread makes ahead; 0 for no thread.
    """

    dataset: Any
    num_replicas: int
    of_replicas: bool
    depth: int

    def __call__(self) -> DistributedDataset:
        """Makes the dataset, which yields `PerReplica`s of arrays if there are several replicas."""
        share = WorkerShare(1, 0, self.num_replicas)
        if self.of_replicas:
            context = InputContext(num_replicas_in_sync=self.num_replicas)
            source: Any = Elements(lambda: [self.dataset(context)], self.num_replicas)
        else:
            source = Batches(as_maker(self.dataset)(), share)
        return DistributedDataset(source, None, share, self.depth, StepCounts())

    def __iter__(self) -> Iterator[Any]:
        return iter(self())

    @property
    def element_spec(self) -> Any:
        """Shapes and dtypes of an element; see `DistributedDataset.element_spec`."""
        return self().element_spec


class ScriptEndError(BaseException):
    """The end of a script that a worker runs for its definitions, where the chief's work begins."""


_state = threading.local()


def is_reimporting() -> bool:
    """Returns whether this thread is running the main script again, for its definitions."""
    return getattr(_state, "is_reimporting", False)


def as_maker(value: object) -> Callable[[], Any]:
    """Returns a function that returns data, given such a function or the data itself."""
    return value if callable(value) else lambda: value


def distributed_by(maker: object, strategy: Any) -> Any:
    """Calls a function that distributes a dataset with the strategy, and returns the result.

    Workers could not call it, as they do not have the strategy. Any other `maker` is returned
    unchanged.

    Args:
        maker: A function, or data.
        strategy: The strategy.
    """
    maker = _plain(maker)
    if not isinstance(maker, types.FunctionType):
        return maker
    try:
        used = inspect.getclosurevars(maker)
    except ValueError:  # the function names a variable that has no value yet
        return maker
    if not any(value is strategy for value in (*used.globals.values(), *used.nonlocals.values())):
        return maker
    dataset = maker()
    return dataset if isinstance(dataset, DistributedSource) else maker


def describe(maker: Any) -> JSON:
    """Describes a function by its name, its module, and its arguments if it is a `partial`.

    Raises:
        UnknownMakerError: if it is not a function at the top level of a module, or its arguments
            are not JSON.
    """
    if isinstance(maker, DistributedSource):
        return {
            **describe(maker.dataset),
            "distributed": [maker.num_replicas, maker.of_replicas, maker.depth],
        }
    args, kwargs = [], {}
    if isinstance(maker, functools.partial):
        maker, args, kwargs = maker.func, list(maker.args), dict(maker.keywords)
    maker = _plain(maker)
    if not isinstance(maker, types.FunctionType):
        raise UnknownMakerError(f"it is not a function, but a {type(maker).__name__}")
    module, name = maker.__module__, maker.__qualname__
    if _attribute(sys.modules.get(module), name) is not maker:
        raise UnknownMakerError(f"{name} is not at the top level of a module")
    try:
        is_json = json.loads(json.dumps([args, kwargs])) == [args, kwargs]
    except (TypeError, ValueError):
        is_json = False
    if not is_json:
        raise UnknownMakerError(f"the arguments of {name} are not JSON: {args}, {kwargs}")
    return {"module": module, "name": name, "args": args, "kwargs": kwargs}


def find(description: JSON) -> Callable[[], Any]:
    """Returns the function that another process has described.

    It finds only functions of the main script, of modules in the script's folder and of its
    package. A description must not be a way to call anything else.

    Raises:
        UnknownMakerError: if there is no such function here.
        Exception: any error that a module raises when it is imported.
    """
    module_name, name = description["module"], description["name"]
    module = sys.modules[_MAIN] if module_name == _MAIN else _import(module_name)
    function = _attribute(module, name)
    reason = ""
    if function is None and module_name == _MAIN:
        # The script may not have reached it yet: Server.join() can come before other definitions.
        module, reason = _main_copy()
        function = _attribute(module, name)
    if not isinstance(function, types.FunctionType) or (
        function.__module__.replace(_MAIN_COPY, _MAIN),
        function.__qualname__,
    ) != (module_name, name):
        raise UnknownMakerError(f"a worker has no function {name} in {module_name}{reason}")
    maker = functools.partial(function, *description["args"], **description["kwargs"])
    how = description.get("distributed")
    return maker if how is None else DistributedSource(maker, *how)


def _attribute(module: types.ModuleType | None, qualified_name: str) -> Any:
    value = module
    for name in qualified_name.split("."):
        value = getattr(value, name, None)
    return _plain(value)


def _plain(function: object) -> Any:
    """Returns the Python function of a compiled one: data is made without compiling."""
    return getattr(function, "python_function", function)


def _import(name: str) -> types.ModuleType:
    main = sys.modules[_MAIN]
    package = (main.__package__ or "").partition(".")[0]
    try:
        if not package or name.partition(".")[0] != package:
            _check_is_beside(main, name)
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UnknownMakerError(f"a worker cannot import {name}: {error}") from error


def _check_is_beside(main: types.ModuleType, name: str) -> None:
    folder = Path(getattr(main, "__file__", None) or "/nowhere").resolve().parent
    # Finds the module without running it.
    spec = importlib.machinery.PathFinder.find_spec(name.partition(".")[0], [str(folder)])
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    if not places or any(part in str(place) for place in places for part in _INSTALLED):
        raise UnknownMakerError(
            f"{name} is not a module in the folder {folder} of a worker's script: write a function"
            " in the script that calls it"
        )


@functools.cache
def _main_copy() -> tuple[types.ModuleType, str]:
    """Runs the main script under another name; returns it, and for messages where it stopped."""
    main = sys.modules[_MAIN]
    file = getattr(main, "__file__", None)
    if file is None:
        raise UnknownMakerError("a worker has no script")
    module = types.ModuleType(_MAIN_COPY)
    module.__file__, module.__package__ = file, main.__package__
    sys.modules[_MAIN_COPY] = module  # as multiprocessing does, whose children look for it
    _state.is_reimporting = True
    try:
        exec(compile(Path(file).read_bytes(), file, "exec"), vars(module))
    except (Exception, ScriptEndError, SystemExit) as error:
        return module, f" above the line that raises {type(error).__name__}: {error}"
    finally:
        _state.is_reimporting = False
    return module, ""
