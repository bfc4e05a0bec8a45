"""The interface of every strategy."""

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self

from distributary.collectives import ReduceOp, as_reduce_op
from distributary.context import StrategyScope, require_cross_replica
from distributary.errors import ContextError, InvalidTypeError, InvalidValueError
from distributary.inputs import InputContext, StepStatistics, ValueContext
from distributary.options import InputOptions, RunOptions
from distributary.strategies._extended import StrategyExtended

if TYPE_CHECKING:
    from distributary.cluster_resolver import ClusterResolver
    from distributary.inputs import DistributedDataset


class Strategy(abc.ABC):  # noqa: B024  (abstract: only its subclasses are constructed)
    """How a computation is spread over devices.

    Create variables in `scope()`, call `run` with a step function, and combine what the replicas
    return with `reduce` or `gather`.

    Source: `tf.distribute.Strategy`.
    """

    def __init__(self, extended: StrategyExtended) -> None:
        self._extended = extended

    @property
    def extended(self) -> StrategyExtended:
        """Methods for library authors."""
        return self._extended

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas over which gradients are combined, of all processes."""
        return self._extended.num_replicas

    @property
    def cluster_resolver(self) -> "ClusterResolver | None":
        """The cluster resolver of strategies that span processes, else None."""
        return None

    @property
    def step_statistics(self) -> StepStatistics:
        """What the steps of `fit` and of loops over distributed datasets took, and waited for."""
        return self._extended.step_counts.snapshot()

    def scope(self) -> AbstractContextManager[Self]:
        """Context manager that makes this strategy current: variables created in it are its own.

        `with` binds the strategy. The scope holds for this thread and may be entered repeatedly.

        Raises:
            ContextError: on entering it inside another strategy's scope or inside `run`.

        Source: `tf.distribute.Strategy.scope`.
        """
        return StrategyScope(self)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Calls `fn` once per replica, as one compiled program on all devices.

        `fn` is traced once, for all replicas together, and again only when shapes, dtypes, the
        structure of the arguments or static arguments change. Python side effects happen while it
        is traced. Variables that it assigns keep their new values.

        Args:
            fn: The step of one replica. Inside, `get_replica_context()` gives the replica's id
                and the collectives.
            args: Positional arguments, a list or tuple. Of a `PerReplica` each replica receives its
                component, of a variable the variable; other arrays and numbers are the same for
                all. Strings, booleans and other objects are part of the compiled program.
            kwargs: Keyword arguments, likewise.
            options: Without effect.

        Returns:
            The nest `fn` returns with a `PerReplica` in the place of every array; the arrays
            themselves with one replica.

        Raises:
            ContextError: inside another `run` or another strategy's scope.
            InvalidValueError: if `args` is no list or tuple.
            InvalidTypeError: if `fn` returns something that cannot leave a compiled program.
            ReplicaDivergenceError: if copies of a mirrored variable would differ.

        Source: `tf.distribute.Strategy.run`.
        """
        if not isinstance(args, (list, tuple)):
            raise _bad_args(args)
        if not callable(fn):
            raise InvalidTypeError(f"Strategy.run: fn is {fn!r}, expected a function.")
        require_cross_replica(self, "run")
        return self._extended.runner.run(fn, tuple(args), dict(kwargs) if kwargs else {}, "replica")

    def reduce(
        self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None
    ) -> Any:
        """Combines the replicas' values to one.

        Args:
            reduce_op: `ReduceOp.SUM` or `MEAN`, or its name.
            value: `PerReplica` from `run`, a SyncOnRead variable, or a nest of them.
            axis: None to combine element by element, for which all components must have the same
                shape; or a dim, or tuple of dims, that is reduced within each component first. The
                mean over dims counts every element the same, also on uneven batches.

        Returns:
            The combined arrays, on all devices of the strategy.

        Raises:
            ContextError: inside `run`.
            InvalidValueError: for unknown operations, and a SUM of values that are the same on all
                replicas.
            ReplicaMismatchError: if shapes differ and `axis` is None.

        Source: `tf.distribute.Strategy.reduce`.
        """
        require_cross_replica(self, "reduce")
        return self._extended.combine.reduce(as_reduce_op(reduce_op, "reduce"), value, axis)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenates the replicas' values along dim `axis`, in replica order.

        Args:
            value: `PerReplica` whose components differ in dim `axis` only, or a nest of them.
            axis: The dim; negative counts from the end.

        Returns:
            The concatenated arrays; values that are not distributed come back as they are.

        Raises:
            ContextError: inside `run`; use `ReplicaContext.all_gather` there.
            InvalidValueError: for scalars and dims out of range.
            UnsupportedError: for `IndexedSlices`.

        Source: `tf.distribute.Strategy.gather`.
        """
        require_cross_replica(self, "gather")
        return self._extended.combine.gather(value, axis)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The components of this process' replicas, in replica order; `(value,)` without any.

        Each lies on the device of its replica and is not bound to it: what is computed from several
        of them, `sum(...)` for example, is computed on JAX's default device.

        Source: `tf.distribute.Strategy.experimental_local_results`.
        """
        return self._extended.local_results(value)

    def experimental_distribute_dataset(
        self, dataset: Iterable[Any], options: InputOptions | None = None
    ) -> "DistributedDataset":
        """Splits global batches over the replicas.

        Args:
            dataset: A `distributary.data.Dataset` of batches; or one of tf.data, grain, torch
                (DataLoader), Hugging Face (batched) or a `keras.utils.PyDataset`; or an iterable or
                generator of batches, nests of arrays that share the size of dim 0; or an array
                `[num_batches, global_batch_size, ...]`, or a dict of them.
            options: Input options.

        Returns:
            A `DistributedDataset`. A batch that does not divide by the number of replicas gives
            parts whose sizes differ by one, or are 0; nothing is dropped or repeated. Of several
            workers each reads what `auto_shard_policy` says, until all have nothing left.

        Raises:
            ClusterError: if the datasets of several workers do not fit together, or one cannot be
                distributed; then that worker's error says why.

        Source: `tf.distribute.Strategy.experimental_distribute_dataset`.
        """
        return self._extended.distribute_dataset(dataset, options)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Iterable[Any]],
        options: InputOptions | None = None,
    ) -> "DistributedDataset":
        """Distributes a dataset whose elements are batches of one replica.

        Args:
            dataset_fn: From an `InputContext` to an iterable of per-replica batches. Each step
                takes as many consecutive elements as this worker has replicas. Every worker calls
                it once, and steps go on until all have nothing left.
            options: Input options; `PER_REPLICA` calls `dataset_fn` once per replica.

        Returns:
            A `DistributedDataset`.

        Raises:
            ClusterError: if `dataset_fn` failed on another worker.

        Source: `tf.distribute.Strategy.distribute_datasets_from_function`.
        """
        if not callable(dataset_fn):
            raise InvalidTypeError(
                f"distribute_datasets_from_function: dataset_fn is {dataset_fn!r}, expected a"
                " function from an InputContext to an iterable of batches."
            )
        return self._extended.distribute_datasets_from_function(dataset_fn, options)

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Makes a `PerReplica` by calling `value_fn(ValueContext)` once per replica.

        Args:
            value_fn: Gives the value of one replica, a nest of arrays or numbers.

        Returns:
            A nest of `PerReplica`; on strategies with one device the value itself.

        Source: `tf.distribute.Strategy.experimental_distribute_values_from_function`.
        """
        return self._extended.distribute_values(value_fn)

    def __copy__(self) -> Any:
        raise ContextError(
            f"{self!r} cannot be copied: its variables belong to one strategy object. Pass the"
            " strategy itself around, or construct another one."
        )

    def __deepcopy__(self, memo: Any) -> "Strategy":
        # A strategy is immutable, and variables of a copied model must stay with it.
        return self

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._extended.describe()}>"


def _bad_args(args: Any) -> InvalidValueError:
    return InvalidValueError(
        f"Strategy.run: args is {args!r}, a {type(args).__name__}; expected a list or tuple. For"
        " one argument write args=(value,)."
    )
