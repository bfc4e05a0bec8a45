"""The interface of every strategy, and what to use for names of other libraries."""

import abc
import difflib
import functools
import html
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, Self, TypeVar, final

import jax

from distributary._late import no_attribute
from distributary.cluster_resolver import ClusterResolver, size_of_job
from distributary.context import InputContext, StrategyScope, ValueContext, require_cross_replica
from distributary.devices import StepStatistics, current_trial
from distributary.engine import RUNS
from distributary.errors import (
    ContextError,
    DistributaryError,
    InvalidTypeError,
    InvalidValueError,
    check_takes,
    check_type,
    shown,
    warn,
)
from distributary.launch import misspelled, refuse_job
from distributary.options import InputOptions, ReduceOp, RunOptions
from distributary.strategies._distributed_dataset import DistributedDataset
from distributary.strategies._extended import StrategyExtended
from distributary.tracing import advise, current_scope, is_recording, name_of, shorten
from distributary.variables import as_reduce_op, in_order, key_order

# Refuses a job of several processes whose program does not bring them together.
#
# Every task of such a job would train alone, or with all of the others but the servers, and the
# results would look right.

_is_checked = False


def accept_any_strategy() -> None:
    """Leaves this process unchecked, because it examines devices and trains nothing."""
    global _is_checked
    _is_checked = True


def check_job(name: str, *, needs_servers: bool = False) -> None:
    """Checks that the first strategy of this process, or the first `fit`, is one for its job.

    If there are parameter servers, it has to be for them; several workers have to be connected,
    whether by this strategy or by the script.

    Args:
        name: Name of the strategy.
        needs_servers: Whether it is one for parameter servers.

    Raises:
        InvalidValueError: if it is not, unless a launcher has started this process; then the
            process ends.
    """
    global _is_checked
    if _is_checked:
        return
    _is_checked = True
    for text in misspelled():
        warn(text)
    num_workers, num_servers = size_of_job()
    program = Path(sys.argv[0]).name or "the program"
    if num_servers and not needs_servers:
        reason = (
            f"{name}: the cluster has {num_servers} parameter server(s), to which this strategy"
            f" gives nothing to do: every task of {program} would train alone. Start the job"
            " without them (`distributary launch` without --ps), or use ParameterServerStrategy."
        )
    elif num_workers > 1 and not num_servers and not jax.distributed.is_initialized():
        reason = (
            f"{name}: the cluster has {num_workers} workers, and nothing connects them: each would"
            f" train a model of its own in {program}, and all would write the same files. Use"
            " MultiWorkerMirroredStrategy, or start one worker (`distributary launch --workers 1`)."
            ' If each is to do work of its own, begin with os.environ.pop("TF_CONFIG").'
        )
    else:
        return
    refuse_job(reason)


# The strategy

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _short(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Returns a method whose errors show the frames of the user alone."""

    @functools.wraps(method)
    def shortened(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return method(*args, **kwargs)
        except DistributaryError as error:
            shorten(error)
            raise
        except jax.errors.JaxRuntimeError as error:
            advise(error)
            raise

    return shortened


@final
class _NotEntered(functools.partial[Any]):
    """The method `scope` of a strategy, which refuses to be a scope itself."""

    def __enter__(self) -> NoReturn:
        raise ContextError("strategy.scope is a method: write `with strategy.scope():`, with ().")

    def __exit__(self, *exc_info: object) -> None:
        """Does nothing: `with` looks for this method before it calls `__enter__`."""


@final
class _ScopeMethod:
    """The descriptor of `scope`, in whose place `with` finds a sentence."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __get__(self, strategy: object, owner: Any = None) -> Any:
        if strategy is not None:
            return _NotEntered(self._method, strategy)

        @functools.wraps(self._method)
        def of_class(*args: Any) -> Any:
            if args:
                return self._method(*args)
            raise ContextError(
                f"{owner.__name__}.scope() is called on the class. Create a strategy first,"
                f" strategy = {owner.__name__}(), and write `with strategy.scope():`."
            )

        return of_class


def _advised(init: Callable[..., None]) -> Callable[..., None]:
    """Returns the `__init__` of a strategy with advice for arguments that it does not have."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def __init__(self: object, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        trial = current_trial()
        if trial is not None:
            kwargs |= {k: v for k, v in trial.arguments.items() if k in signature.parameters}
        try:
            init(self, *args, **kwargs)
        except DistributaryError as error:
            shorten(error)
            raise
        except TypeError as error:
            called = error.__traceback__ and error.__traceback__.tb_next
            if called is None:  # Python cannot call it with these arguments
                text = f"{type(self).__name__}: {str(error).rpartition('() ')[2]}."
                for names, remedy in _OF_ARGUMENTS.items():
                    if any(f"'{name}'" in str(error) for name in names.split()):
                        raise InvalidTypeError(f"{text} {remedy}") from None
                known = [*signature.parameters][1:]
                for name in kwargs.keys() - known if "unexpected" in text else ():
                    for close in difflib.get_close_matches(name, known, 1, 0.75):
                        raise InvalidTypeError(f"{text} Did you mean {close!r}?") from None
            raise

    return __init__


MISSING: Any = object()
"""Default of an argument that is required, but whose absence needs a message of its own."""


class Strategy(abc.ABC):  # noqa: B024  (abstract: only its subclasses are constructed)
    """A policy for spreading a computation over devices.

    Create variables in `scope()`, call `run` with a step function, and combine the values that the
    replicas return with `reduce` or `gather`.

    Source: `tf.distribute.Strategy`.
    """

    _needs_servers = False

    @_advised
    def __init__(self, extended: StrategyExtended) -> None:
        check_job(type(self).__name__, needs_servers=self._needs_servers)
        self._extended = extended

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.__init__ = _advised(cls.__init__)  # type: ignore[method-assign]

    @property
    def extended(self) -> StrategyExtended:
        """Methods for library authors."""
        return self._extended

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas over which gradients are combined, counting all processes.

        It is 1 in a step of Keras' `fit` and its relatives, which sees the whole batch.
        """
        scope = current_scope()
        if scope is not None:
            scope.asked_for_replicas = True
        return self._extended.num_replicas

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """Cluster resolver of a strategy that spans processes, else None."""
        return None

    @property
    def is_chief(self) -> bool:
        """True in the one process that saves, logs and prints for all.

        It is the task "chief" or, without one, worker 0; with parameter servers, the coordinator.
        It is always True if there is only one process. All workers save checkpoints of distributary
        together, so these need no `if`.
        """
        return self._extended.should_checkpoint

    @property
    def step_statistics(self) -> StepStatistics:
        """Times and waits of steps, in `fit` and in loops over distributed datasets."""
        return self._extended.step_counts.snapshot()

    def scope(self) -> AbstractContextManager[Self]:
        """Makes this strategy current in a `with` block: variables created there belong to it.

        `with strategy.scope() as s` binds the strategy to `s`. The scope holds for the current
        thread, and you can enter it repeatedly.

        Raises:
            ContextError: when you enter it inside another strategy's scope or inside `run`.

        Source: `tf.distribute.Strategy.scope`.
        """
        return StrategyScope(self)

    if not TYPE_CHECKING:
        scope = _ScopeMethod(scope)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Calls `fn` once per replica, as one compiled program on all devices.

        `fn` is traced once, for all replicas together. It is traced again only when shapes, dtypes,
        the structure of the arguments or static arguments change. Python side effects happen only
        during a trace. Variables that `fn` assigns keep their new values.

        Args:
            fn: The step of one replica. Inside it, `get_replica_context()` gives you the id of the
                replica and the collectives.
            args: Positional arguments, a list or tuple. Each replica receives its own component of
                a `PerReplica`. Variables are passed as variables; other arrays and numbers are the
                same for all replicas. Strings, booleans and other objects become part of the
                compiled program.
            kwargs: Keyword arguments, treated in the same way.
            options: Whether Python control flow of `fn` is converted; see `RunOptions`.

        Returns:
            The nest that `fn` returns, with a `PerReplica` in place of every array. With one
            replica, the arrays themselves.

        Raises:
            ContextError: inside another `run` or another strategy's scope, or in the block of a
                `GradientTape` that is not inside a traced function.
            InvalidValueError: if `args` is not a list or tuple.
            InvalidTypeError: if `fn` returns something that cannot leave a compiled program.
            ReplicaDivergenceError: if copies of a mirrored variable would differ.

        Source: `tf.distribute.Strategy.run`.
        """
        if not isinstance(args, (list, tuple)):
            by_name = isinstance(args, Mapping)
            other = " To pass its parts by name, write kwargs=batch." if by_name else ""
            raise InvalidValueError(
                f"Strategy.run({name_of(fn)}): args is {shown(args)}, expected a list or tuple. For"
                f" one argument write args=(value,).{other}"
            )
        if not callable(fn):
            raise InvalidTypeError(
                f"Strategy.run: fn is {shown(fn)}, expected a function. Pass the function and its"
                " arguments separately: strategy.run(step, args=(batch,))."
            )
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise InvalidTypeError(
                f"Strategy.run: kwargs is {shown(kwargs)}, expected a dict. Positional arguments"
                f" belong together into one tuple: strategy.run(step, args=(x, y))."
            )
        expected = "distributary.RunOptions or None"
        check_type("Strategy.run: options", options, RunOptions | None, expected)
        require_cross_replica(self, "run")
        if is_recording():
            raise ContextError(
                f"Strategy.run({name_of(fn)}) inside of a GradientTape: a compiled step is not"
                " recorded. Open the tape in the step, and return or apply its gradients there."
            )
        try:
            kind = RUNS[None if options is None else options.autograph]
            arguments = tuple(args), dict(kwargs) if kwargs else {}
            return self._extended.engine.run(fn, arguments, kind)
        except Exception as error:
            shorten(error)
            raise

    @_short
    def reduce(
        self, reduce_op: ReduceOp | str, value: object, axis: int | Sequence[int] | None = MISSING
    ) -> Any:
        """Combines the values of all replicas into one.

        Args:
            reduce_op: `ReduceOp.SUM` or `MEAN`, or its name.
            value: `PerReplica` from `run`, a SyncOnRead variable, or a nest of them.
            axis: Required. None combines element by element, and all components must have the same
                shape. A dim, or a tuple of dims, is reduced within each component first. A mean
                over dims gives every element the same weight, even on uneven batches.

        Returns:
            The combined arrays, on all devices of the strategy.

        Raises:
            ContextError: inside `run`.
            InvalidValueError: for unknown operations, and for a SUM of values that are the same on
                all replicas.
            ReplicaMismatchError: if dtypes differ, or shapes in dims other than `axis`.

        Source: `tf.distribute.Strategy.reduce`.
        """
        require_cross_replica(self, "reduce")
        if axis is MISSING:
            raise InvalidTypeError(
                "Strategy.reduce: axis is missing. Write axis=None to combine the replicas' values"
                " element by element, such as losses, or axis=0 to reduce the rows of each replica"
                " as well."
            )
        if value is None:
            raise InvalidTypeError(
                "Strategy.reduce: value is None, as of a step that returns nothing. Return the"
                " value from the step."
            )
        op, order = as_reduce_op(reduce_op, "reduce"), key_order(value)
        return in_order(self._extended.combine.reduce(op, value, axis), order)

    @_short
    def gather(self, value: object, axis: int = MISSING) -> Any:
        """Concatenates the values of all replicas along dim `axis`, in replica order.

        Args:
            value: `PerReplica` whose components differ only in dim `axis`, or a nest of them.
            axis: Required. The dim; a negative number counts from the end.

        Returns:
            The concatenated arrays. Values that are not distributed are returned unchanged.

        Raises:
            ContextError: inside `run`; use `ReplicaContext.all_gather` there.
            InvalidValueError: for scalars, and for dims that are out of range.
            ReplicaMismatchError: if the components differ in other dims, or in dtype.
            UnsupportedError: for `IndexedSlices`.

        Source: `tf.distribute.Strategy.gather`.
        """
        require_cross_replica(self, "gather")
        if axis is MISSING:
            raise InvalidTypeError(
                "Strategy.gather: axis is missing. Write axis=0 to join the rows of all replicas."
            )
        return self._extended.combine.gather(value, axis)

    def experimental_local_results(self, value: object) -> tuple[Any, ...]:
        """Returns the components of this process's replicas, in replica order.

        A value that is not distributed comes back as `(value,)`.

        Each component lies on the device of its replica, but is not bound to it: if you compute
        with several of them, as in `sum(...)`, JAX uses its default device.

        Source: `tf.distribute.Strategy.experimental_local_results`.
        """
        return self._extended.local_results(value)

    @_short
    def experimental_distribute_dataset(
        self, dataset: Iterable[Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Splits global batches over the replicas.

        Args:
            dataset: One of these: a `distributary.data.Dataset` of batches; a dataset of tf.data,
                grain, torch (DataLoader) or Hugging Face (batched); a `keras.utils.PyDataset`; or
                an iterable or generator of batches, nests of arrays that share the size of dim 0.
            options: Input options.

        Returns:
            A `DistributedDataset`. If the size of a batch is not a multiple of the number of
            replicas, the sizes of the parts differ by one, and may be 0; no example is dropped or
            repeated. With several workers, each one reads the part that `auto_shard_policy` assigns
            to it, until all have nothing left.

        Raises:
            ClusterError: if the datasets of several workers do not fit together, or the dataset of
                one worker cannot be distributed. In this case, the error on that worker says why.

        Source: `tf.distribute.Strategy.experimental_distribute_dataset`.
        """
        return self._extended.distribute_dataset(dataset, options)

    @_short
    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Iterable[Any]],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Distributes a dataset whose elements are batches of one replica.

        Args:
            dataset_fn: Function from an `InputContext` to an iterable of per-replica batches. Each
                step takes one element for every replica of this worker. Every worker calls the
                function once, and steps go on until all workers have nothing left.
            options: Input options; `PER_REPLICA` calls `dataset_fn` once per replica.

        Returns:
            A `DistributedDataset`.

        Raises:
            ClusterError: if `dataset_fn` failed on another worker.

        Source: `tf.distribute.Strategy.distribute_datasets_from_function`.
        """
        check_takes("distribute_datasets_from_function", dataset_fn, "dataset_fn(context)")
        return self._extended.distribute_datasets_from_function(dataset_fn, options)

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Makes a `PerReplica` by calling `value_fn(ValueContext)` once per replica.

        Args:
            value_fn: Returns the value of one replica, a nest of arrays or numbers.

        Returns:
            A nest of `PerReplica`. On strategies with one device, the value itself.

        Source: `tf.distribute.Strategy.experimental_distribute_values_from_function`.
        """
        check_takes("experimental_distribute_values_from_function", value_fn, "value_fn(context)")
        return self._extended.distribute_values(value_fn)

    if not TYPE_CHECKING:  # or type checkers accept any name

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(type(self).__name__, name, _OF_STRATEGY, dir(type(self)))

    def __enter__(self) -> NoReturn:
        raise ContextError("A strategy is not a scope. Write `with strategy.scope():`.")

    def __exit__(self, *exc_info: object) -> None:  # noqa: B027  (not abstract)
        """Does nothing: `with` looks for this method before it calls `__enter__`."""

    def __copy__(self) -> Any:
        raise ContextError(
            f"{shown(self)} cannot be copied: its variables belong to one strategy object. Pass the"
            " strategy itself around, or construct another one."
        )

    def __deepcopy__(self, memo: object) -> "Strategy":
        # A strategy is immutable, and the variables of a copied model must keep belonging to it.
        return self

    def __reduce__(self) -> NoReturn:
        raise InvalidTypeError(
            f"{shown(self)} cannot be pickled: it belongs to the devices of this process. Create a"
            " strategy in each process; save variables with distributary.checkpoint.Checkpoint."
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._extended.describe()}>"

    def _repr_html_(self) -> str:  # for notebooks
        parts = html.escape(self._extended.describe()).split("; ")
        items = "".join(f"<li>{part}</li>" for part in parts)
        return f"<b>{type(self).__name__}</b><ul>{items}</ul>"


# Names that people know from TensorFlow, torch and Horovod, and what to use here.

_DATASET = "Loop over strategy.experimental_distribute_dataset(dataset)."
_EXTENDED = "It is a part of strategy.extended."

# For strategies.
_OF_STRATEGY = {
    "experimental_run_v2 experimental_run call_for_each_replica call_for_each_tower __call__": (
        "Call strategy.run(step, args=(batch,))."
    ),
    "make_dataset_iterator distribute_dataset prepare": _DATASET,
    "make_input_fn_iterator": "Use strategy.distribute_datasets_from_function(dataset_fn).",
    "experimental_make_numpy_dataset": (
        "Use strategy.experimental_distribute_dataset with"
        " distributary.data.Dataset.from_tensor_slices(arrays).batch(global_batch_size)."
    ),
    "num_replicas num_towers num_devices world_size num_gpus": (
        "Use strategy.num_replicas_in_sync."
    ),
    "is_main_process is_master is_main rank local_rank process_index": (
        "Use strategy.is_chief, True in the process that saves and prints."
    ),
    "unwrap local_results": "Use strategy.experimental_local_results(value).",
    "configure update_config_proto initialize_system": "Leave it out: there are no sessions.",
    "all_reduce all_gather merge_call": (
        "In a step, it is a method of distributary.get_replica_context(); after run, use"
        " strategy.reduce or strategy.gather."
    ),
    "update update_non_slot colocate_vars_with worker_devices parameter_devices"
    " should_checkpoint should_save_summary non_slot_devices": _EXTENDED,
    "devices device": "Use strategy.extended.worker_devices.",
    "fit compile evaluate predict backward": (
        "It is a method of the model, which you create in `with strategy.scope():`."
    ),
}
# For arguments of strategies.
_OF_ARGUMENTS = {
    "num_gpus num_gpus_per_worker gpus num_devices num_replicas device_count": (
        'Name the devices, devices=["GPU:0", "GPU:1"], or leave the argument out for all of them.'
    ),
    "num_workers workers num_hosts hosts num_ps ps worker_hosts rank world_size": (
        "Workers are started, not asked for: `distributary launch --workers 2 train.py` (--ps 1"
        " adds a parameter server) gives each its TF_CONFIG, from which the strategy knows all."
    ),
    "device": (
        'Write OneDeviceStrategy("GPU:0") or "CPU:0"; other strategies take a list,'
        ' devices=["GPU:0", "GPU:1"].'
    ),
    "communication collective_communication": (
        "Write communication_options=distributary.experimental.CommunicationOptions(...)."
    ),
    "cluster_resolver": (
        "Pass distributary.cluster_resolver.TFConfigClusterResolver() in a job, or"
        " distributary.experimental.local_cluster(workers=2, ps=1) to try it in this process."
    ),
    "extended": (
        "Strategy is abstract: create a MirroredStrategy, MultiWorkerMirroredStrategy or another"
        " strategy."
    ),
}
