"""Data of `fit`, `evaluate` and `predict`: distributed datasets, and arrays in memory.

Text stays on the host: functional models compute there, and other uses are refused. Keras converts
all inputs to arrays of JAX, which has no text. The layers that take text, such as `StringLookup` of
`distributary.compat.tensorflow`, compute with NumPy.
"""

import dataclasses
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from types import GeneratorType
from typing import Any, TypeAlias, final

import jax
import keras
import numpy as np
from jax.experimental.sparse import JAXSparse

from distributary.context import get_strategy, has_strategy
from distributary.data import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    AutoShardPolicy,
    Batches,
    Dataset,
    DistributedInput,
    Options,
    OwnRows,
    WorkerShare,
    is_hugging_face,
    kept,
)
from distributary.devices import private
from distributary.errors import (
    DistributaryError,
    InvalidTypeError,
    InvalidValueError,
    OutOfRangeError,
    shown,
    warn,
)
from distributary.job import check_same_data, consensus, fingerprint
from distributary.keras_bridge import _keras_private as keras_private
from distributary.options import InputOptions
from distributary.strategies import (
    ArrayBatches,
    DatasetBatches,
    DistributedDataset,
    DistributedIterator,
    ReadAhead,
    drawn_permutation,
    next_own,
    random_state,
    set_random_state,
    share_random_state,
)
from distributary.tracing import current_scope


@final
@dataclasses.dataclass(frozen=True)
class Position:
    """Where `fit` is in its data, as a backup has it.

    Args:
        steps: Finished steps of the epoch.
        batches: Batches that this pass over the data has given; 0 between two passes.
        passes: Passes that have ended.
        before: The state of random numbers when the pass began, from which comes its order.
        now: Their state now.
        seeds: Seeds that a dataset has drawn.
    """

    steps: int
    batches: int
    passes: int
    before: list[Any]
    now: list[Any]
    seeds: list[int]


@final
@dataclasses.dataclass
class Call:
    """A call of `fit`, `evaluate` or a related method.

    Args:
        method: Name of the method.
        data: Adapter of its data; with validation data, the adapter of the training data.
        callbacks: Callbacks that have the same state on all workers.
        epoch: Number of the epoch, from 0.
        resumes: Where the next epoch goes on.
        metrics: Values of the metrics there.
        due: Backups that wait for the end of the epoch.
        passes: Passes over the data that have begun.
    """

    method: str
    data: Any = None
    callbacks: list[Any] = dataclasses.field(default_factory=list)
    epoch: int = 0
    resumes: Position | None = None
    metrics: list[Any] = dataclasses.field(default_factory=list)
    due: list[Any] = dataclasses.field(default_factory=list)
    passes: int = 0
    # References to Keras' iterator over the data, and to that of the pass: threads that read ahead
    # have the call in their context, and end when nothing refers to the iterator.
    _epochs: Any = None
    _batches: Any = None
    _before: list[Any] = dataclasses.field(default_factory=list)

    def begin_epoch(self, epochs: Any) -> Iterator[Any]:
        """Returns the steps of an epoch over the data, as Keras' iterator has them.

        If the epoch goes on from a backup, they are those that are left.
        """
        at, self.resumes, self._epochs = self.resumes, None, weakref.ref(epochs)
        epochs._get_iterator = self._begin_pass
        in_pass = epochs.steps_per_epoch and epochs._current_iterator and epochs._steps_seen
        if not in_pass:  # a thread may draw the order as soon as the pass begins
            self.passes += 1
            self._before = random_state()
        if at is None:
            return epochs._enumerate_iterator()
        self.passes = at.passes + 1
        if at.batches:
            self._before = at.before
        set_random_state(self._before)
        if at.batches > at.steps:  # an earlier epoch has begun the pass
            epochs._current_iterator = self._begin_pass()
            epochs._steps_seen = at.batches - at.steps
        return _rest(epochs, at)

    def _begin_pass(self) -> Any:
        batches = batches_of(self.data, get_strategy().extended)
        self._batches = weakref.ref(batches) if isinstance(batches, ReadAhead) else None
        return batches

    @property
    def order_is_known(self) -> bool:
        """Whether the order of the data is that of a known state of random numbers.

        Threads of a `PyDataset` shuffle it again while they read ahead.
        """
        return not (getattr(self.data, "enqueuer", None) and self.data.shuffle)

    def is_last_step(self, steps: int, num_steps: int | None) -> bool:
        """Returns whether an epoch ends after so many steps; may read a batch ahead.

        Args:
            steps: Finished steps of the epoch.
            num_steps: Steps of an epoch, if they are known.
        """
        if num_steps is None:
            return bool(self._batches().is_at_end())
        epochs = self._epochs()
        ends_early = epochs._num_batches and epochs._steps_seen >= epochs._num_batches
        return bool(steps >= num_steps or ends_early)

    def position(self, steps: int) -> Position:
        """Returns the position after so many steps of an epoch, or 0 at its end."""
        epochs = self._epochs()
        in_pass = steps or (epochs.steps_per_epoch and epochs._current_iterator)
        batches = epochs._steps_seen if in_pass else 0
        seeds = self.data.dataset.seeds if isinstance(self.data, DatasetAdapter) else []
        passes = self.passes - (batches > 0)
        return Position(steps, batches, passes, self._before, random_state(), seeds)

    def go_to(self, position: Position) -> None:
        """Lets the next epoch go on at a position."""
        self.resumes = position
        set_random_state(position.now)
        if isinstance(self.data, DatasetAdapter):
            self.data.dataset.go_on(position.passes, position.seeds)
        elif epoch_of(self.data) is not None:
            self.data._epoch += position.passes


def _rest(epochs: Any, at: Position) -> Iterator[Any]:
    """Yields the steps after a position, from an iterator that stands where its pass begins."""
    steps = itertools.islice(
        epochs._enumerate_iterator(), at.steps // epochs.steps_per_execution, None
    )
    for number, step in enumerate(steps):
        if number == 0:
            if at.batches:
                _skip(step[-1], at.batches)
            set_random_state(at.now)
        yield step


def _skip(batches: Any, count: int) -> None:
    if hasattr(batches, "skip"):
        batches.skip(count)
        return
    for number in range(count):
        try:
            next_own(batches)
        except StopIteration:
            raise InvalidValueError(
                f"BackupAndRestore: the data ends after {number} batches, and the backup was made"
                f" after {count}. Give the data of that time, or remove the backup to begin anew."
            ) from None


#: The innermost call in progress.
current_call: ContextVar[Call | None] = ContextVar("current_call", default=None)


def get_data_adapter(original: Callable[..., Any], x: object, **arguments: Any) -> Any:
    """Makes Keras accept our datasets, those of Hugging Face, and distributed ones."""
    if isinstance(x, DistributedInput) and callable(x):  # made where it is needed
        x = x()
    if hasattr(x, "keras_adapter"):  # batches that are read elsewhere
        return x.keras_adapter(arguments)
    call = current_call.get()
    if isinstance(x, Dataset) or is_hugging_face(x):
        extended = get_strategy().extended
        # Several workers read their own rows; with one worker, the step splits the batches.
        share = extended.worker_share() if extended.num_workers > 1 else WorkerShare()
        if isinstance(x, Dataset) and call is not None and call.method == "predict":
            # Predictions come in the order of the dataset, not in the order of the workers'
            # files.
            options = Options()
            options.experimental_distribute.auto_shard_policy = AutoShardPolicy.DATA
            x = x.with_options(options)
        batches = Batches(x, share, "fit, evaluate or predict: x is", extended.coworkers)
        depth = InputOptions().experimental_per_replica_buffer_size
        x = DistributedDataset(batches, None, share, depth, extended.step_counts)
    if isinstance(x, DistributedDataset):
        check_given("dataset", arguments, "y", "sample_weight")
        if x.cardinality == INFINITE_CARDINALITY and not arguments.get("steps_per_epoch"):
            raise InvalidValueError(
                "The dataset is infinite, so an epoch would never end. Give steps_per_epoch to fit,"
                " steps to evaluate and predict, or a count to repeat."
            )
        adapter: Any = DatasetAdapter(x, arguments.get("class_weight"))
    else:
        arrays = [x, arguments.get("y"), arguments.get("sample_weight")]
        require_numbers("fit, evaluate or predict", arrays)
        _check_arrays(x, arguments.get("y"), arguments.get("batch_size"))
        if isinstance(x, GeneratorType) and has_strategy():
            x = (kept(batch) for batch in x)  # Keras reads the first ones ahead
        if isinstance(x, keras.utils.PyDataset) and arguments.get("shuffle"):
            share_random_state(get_strategy().extended)  # Keras shuffles with it, in a thread
        adapter = original(x, **arguments)
    if call is not None and call.data is None:
        call.data = adapter
    return adapter


def _check_arrays(x: object, y: object, batch_size: Any) -> None:
    """Checks arrays and their batch size; Keras takes 0 for 32, and prints lists as a whole."""
    call = current_call.get()
    what = "fit, evaluate or predict" if call is None else call.method
    for name, data in (("x", x), ("y", y)):
        numbers = data
        while isinstance(numbers, (list, tuple)) and numbers:
            numbers = numbers[0]
        if isinstance(numbers, (bool, int, float)):
            raise InvalidTypeError(
                f"{what}: {name} is a {type(data).__name__} of numbers, expected arrays. Write"
                f" np.asarray({name})."
            )
    if isinstance(x, DistributedIterator):
        raise InvalidTypeError(f"{what}: x is an iterator. Pass the distributed dataset itself.")
    check_count(what, "batch_size", batch_size)


def check_count(what: str, name: str, value: Any, least: int = 1) -> None:
    """Checks a number of rows, steps or epochs; None counts as the default."""
    if value is not None and (not hasattr(value, "__index__") or operator.index(value) < least):
        raise InvalidValueError(
            f"{what}: {name} is {shown(value)}, expected a whole number from {least}."
        )


def check_given(what: str, arguments: Mapping[str, Any], *names: str) -> None:
    """Checks that none of these arguments is given next to a dataset, which yields them."""
    for name in names:
        if arguments.get(name) is not None:
            raise InvalidValueError(
                f"x is a {what}, so {name} cannot be given next to it: let the dataset yield"
                " (x, y) or (x, y, sample_weight)."
            )


def explained_by_data(
    model: Any, what: str, error: Exception, x: Any, y: Any, validation_data: Any
) -> Exception:
    """Returns an error that says what is wrong with the data of a call, or the error itself.

    Args:
        model: The model.
        what: Name of the method.
        error: The error that has ended the call.
        x: Argument of the call.
        y: Argument of the call.
        validation_data: Argument of the call.
    """
    name, text = f"{model.name}.{what}", str(error)
    is_at_end = isinstance(error, OutOfRangeError) or "'batch_outputs'" in text
    if is_at_end and isinstance(x, Dataset) and x.cardinality() in (0, UNKNOWN_CARDINALITY):
        return InvalidValueError(
            f"{name}: {x!r} has no batch. Give it more rows or a smaller batch size, or leave out"
            " drop_remainder=True, which drops a batch that is not full."
        )
    if isinstance(error, DistributaryError) or not isinstance(error, (TypeError, ValueError)):
        return error
    if "Unrecognized data type" in text and hasattr(x, "__next__"):
        return InvalidTypeError(
            f"{name}: x is a {type(x).__name__}, which Keras does not take. Give the dataset or"
            " list behind it, or a generator: (batch for batch in x)."
        )
    optimizer, now = getattr(model, "optimizer", None), len(model.trainable_variables)
    built_with = len(getattr(optimizer, "_trainable_variables", ()))
    if "that the optimizer was built with" in text and built_with != now:
        return InvalidValueError(
            f"{name}: the optimizer was built with {built_with} trainable variables, and the model"
            f" has {now} now. After layer.trainable has changed, or layers were added, compile the"
            " model again with a new optimizer."
        )
    has_no_y = y is None or (validation_data is not None and type(validation_data) is not tuple)
    if "None is not a valid value" in text and has_no_y and getattr(model, "loss", None):
        parts = f"{type(x[0]).__name__}s" if type(x) in (list, tuple) and x else ""
        given = f"x is a {type(x).__name__} of {len(x)} {parts}, and " if parts else ""
        return InvalidValueError(
            f"{name}: {given}the loss gets no y. For batches, pass a dataset or a generator of"
            f" (x, y); for arrays, write {what}(x, y), and validation_data=(x_val, y_val)."
        )
    return _explained_by_shapes(model, name, error, getattr(x, "shape", None), y)


def _explained_by_shapes(model: Any, name: str, error: Exception, shape: Any, y: object) -> Any:
    text, loss = str(error), getattr(model, "loss", None)
    taken: Any = getattr(model, "input_shape", None)
    if "incompatible with the layer" in text and _misfits(shape, taken):
        rows = ", ".join(map(str, ("rows", *taken[1:])))
        return InvalidValueError(
            f"{name}: x has shape {shape}, but keras.Input({taken[1:]}) takes ({rows}). Give x of"
            f" that shape, or write keras.Input({shape[1:]})."
        )
    given: Any = getattr(y, "shape", None)
    returned: Any = getattr(model, "output_shape", None)
    is_of_classes = "crossentropy" in str(getattr(loss, "name", loss))
    if "shape" in text and _misfits(given, returned) and 1 not in (*given[1:], *returned[1:]):
        error.add_note(
            f"{name}: y has shape {given}, but the model returns {(given[0], *returned[1:])}."
            " Change y, or the units of the last layer."
        )
    elif "have the same shape" in text and given and is_of_classes:
        error.add_note(
            f"{name}: y has shape {given}, and the model returns {returned}. Labels as whole"
            " numbers, one per row, need sparse_categorical_crossentropy, and rows with a number"
            " per class categorical_crossentropy."
        )
    return error


def _misfits(shape: Any, expected: Any) -> bool:
    """Returns whether arrays have as many dims as expected, but with other sizes."""
    if not isinstance(shape, tuple) or not isinstance(expected, tuple):
        return False
    sizes = zip(shape[1:], expected[1:], strict=False)
    return len(shape) == len(expected) and any(b not in (a, None) for a, b in sizes)


class UnknownSizes(keras_private.DataAdapter):
    """A data adapter that knows nothing about its batches in advance; their sizes may differ."""

    batch_size: int | None = None
    has_partial_batch: bool | None = None
    partial_batch_size: int | None = None

    @property
    def num_batches(self) -> int | None:
        """Unknown."""
        return None


@final
class DatasetAdapter(UnknownSizes):
    """An adapter for global batches of a distributed dataset, which steps split in the same way."""

    def __init__(self, dataset: DistributedDataset, class_weight: object) -> None:
        #: The dataset.
        self.dataset = dataset
        self._class_weight = class_weight

    @property
    def num_batches(self) -> int | None:
        """Number of steps, if it is known."""
        count = self.dataset.cardinality
        return count if count >= 0 else None

    def get_jax_iterator(self, super_batch: int | None = None) -> Iterator[Any]:
        """Returns an iterator over global batches, on the host unless the dataset moves them.

        Args:
            super_batch: How many batches Keras wants stacked. Only Keras 3.16 asks for this, and
                only without a strategy.
        """
        batches = DatasetBatches(self._batches)
        utils = "keras.src.trainers.data_adapters.data_adapter_utils"
        stacked = private(f"{utils}:super_batch_iterator") if super_batch else None
        return batches if stacked is None else stacked(batches, super_batch)

    def _batches(self, skip: int) -> Iterator[Any]:
        batches = self.dataset.global_batches(skip)
        return batches if self._class_weight is None else map(self._weighted, batches)

    def _weighted(self, batch: object) -> Any:
        if isinstance(batch, OwnRows):
            return dataclasses.replace(batch, rows=self._weighted(batch.rows))
        if not isinstance(batch, tuple) or len(batch) != 2:
            raise InvalidValueError(
                "class_weight needs a dataset that yields (x, y); of (x, y, sample_weight) give the"
                " weights of the classes with the others."
            )
        x, y = batch
        return x, y, keras_private.class_weight_to_sample_weights(y, self._class_weight)


def batches_of(adapter: Any, extended: Any) -> Iterator[Any]:
    """Returns the batches of an epoch, on the host.

    If all replicas can split a batch evenly, it has only this worker's rows.

    Args:
        adapter: Keras' data adapter.
        extended: The `extended` of the strategy.
    """
    if type(adapter) is keras_private.ArrayDataAdapter and adapter._shuffle != "batch":
        slicing = keras_private.array_slicing
        sliceables = slicing.convert_to_sliceable(adapter._inputs, target_backend="jax")
        leaves, tree = jax.tree.flatten(sliceables)
        if leaves and all(type(leaf) is slicing.NumpySliceable for leaf in leaves):
            arrays = [leaf.array for leaf in leaves]
            begin = functools.partial(_begin_pass, arrays, adapter, extended)
            share = extended.worker_share()
            return ArrayBatches(arrays, tree, adapter.batch_size, share, begin)
    iterator: Iterator[Any] = iter(adapter.get_jax_iterator())
    if isinstance(adapter, UnknownSizes):
        return iterator
    of_keras = (keras_private.ArrayDataAdapter, keras_private.GeneratorDataAdapter)
    if not isinstance(adapter, of_keras):
        iterator = (kept(batch) for batch in iterator)
    if extended.num_replicas > 1:
        # Arrays of nonzero elements do not have rows that could be split over the replicas.
        iterator = (_with_dense(batch) for batch in iterator)
    if extended.num_workers > 1:
        iterator = _same_everywhere(iterator)
    return ReadAhead(lambda skip: iterator) if adapter.num_batches is None else iterator


def _with_dense(batch: object) -> Any:
    """Replaces JAX's sparse arrays in a batch by NumPy arrays."""
    is_sparse = lambda leaf: isinstance(leaf, JAXSparse)
    dense = lambda leaf: np.asarray(leaf.todense()) if is_sparse(leaf) else leaf
    return jax.tree.map(dense, batch, is_leaf=is_sparse)


def _same_everywhere(batches: Iterator[Any]) -> Iterator[Any]:
    for number, batch in enumerate(batches):
        if number == 0:
            check_same(batch)
        yield batch


def check_same(batch: object, what: str = "The first batch of the data") -> None:
    """Compares the first batch of a pass, or the batch of a call, on all workers.

    Raises:
        InvalidValueError: on all workers, if the batches differ.
    """
    job = consensus()
    assert job is not None
    check_same_data(what, job.agree(what, lambda: fingerprint(batch)))


def _begin_pass(arrays: list[Any], adapter: Any, extended: Any) -> Any:
    """Returns the order in which Keras' own adapter yields the rows, or None.

    Keras 3.16 counts epochs, and each number has its order. Before, orders come from NumPy's global
    generator.
    """
    num_rows, epoch, order = len(arrays[0]), epoch_of(adapter), None
    if adapter._shuffle and epoch is not None:
        order = np.random.default_rng(epoch).permutation(num_rows)
    elif adapter._shuffle:
        order = drawn_permutation(num_rows, extended)
    if extended.num_workers > 1:
        first: Any = slice(adapter.batch_size)
        first = first if order is None else order[first]
        check_same([num_rows, *(a[first] for a in arrays)])
    return order


def epoch_of(adapter: Any) -> int | None:
    """Returns how many epochs Keras' adapter has seen; None before Keras 3.16, or of our own."""
    return getattr(adapter, "_epoch", None)


# Text


FUNCTIONAL = "keras.src.models.functional.Functional"


def convert_inputs(
    original: Callable[..., Any], self: Any, flat_inputs: Iterable[Any]
) -> list[Any]:
    """Leaves text on the host."""
    if not _has_text(self):
        flat_inputs = list(flat_inputs)
        require_numbers("A model", flat_inputs)
        return original(self, flat_inputs)
    return [
        value
        if value is None
        else _text(value, len(symbolic.shape), symbolic.shape[-1:] == (1,))
        if symbolic.dtype == "string"
        else keras.ops.convert_to_tensor(value, symbolic.dtype, symbolic.sparse)
        for value, symbolic in zip(flat_inputs, self.inputs, strict=True)
    ]


def _text(value: object, ndim: int, is_column: bool) -> np.ndarray:
    """Returns text as an array; adds or removes a last dim of 1, as Keras does for numbers."""
    text = np.asarray(value)
    if text.ndim == ndim + 1 and text.shape[-1] == 1:
        return text[..., 0]
    return text[..., None] if is_column and text.ndim == ndim - 1 else text


def adjust_input_rank(original: Callable[..., Any], self: Any, flat_inputs: list[Any]) -> list[Any]:
    """Accepts one example without the dim of the batch, as in `Dataset.map`."""
    is_example = _has_text(self) and all(
        value is None or value.shape == symbolic.shape[1:]
        for value, symbolic in zip(flat_inputs, self.inputs, strict=True)
    )
    return flat_inputs if is_example else original(self, flat_inputs)


def require_numbers(what: str, data: object) -> None:
    """Raises an error if arrays in memory hold text."""
    for leaf in keras.tree.flatten(data):
        dtypes: Any = getattr(leaf, "dtypes", getattr(leaf, "dtype", None))
        is_frame = hasattr(dtypes, "items")  # of pandas, whose columns have a dtype each
        columns = dtypes.items() if is_frame else [(getattr(leaf, "name", None), dtypes)]
        text = [name for name, dtype in columns if getattr(dtype, "kind", "-") in "USO"]
        if text:
            where = "" if text[0] is None else f" in column {text[0]!r}"
            raise InvalidTypeError(
                f"{what} is given {shown(leaf)} with strings or objects{where}, which cannot go to"
                " a device. Map them to numbers first: dataset.map(lambda text: layer(text)), with"
                " a layer such as keras.layers.StringLookup or TextVectorization outside of the"
                " model, or column.astype('category').cat.codes."
            )


def _has_text(model: Any) -> bool:
    return any(symbolic.dtype == "string" for symbolic in model.inputs)


# Numbers of a batch that no class or row of a table has, and columns that are repeated. JAX says
# nothing of them.


# The part of a batch, 0 for x or 1 for y; the array's name and number there; the largest number it
# may hold, from 0; what to say of another one.
Limit: TypeAlias = tuple[int, str, int, int, str]
_ROUNDING = 1e-3  # of images that were resized, for example


def limits_of(model: Any) -> Iterator[Limit]:
    """Yields the limits of the labels and ids that a model takes."""
    outputs = getattr(model, "outputs", None) or ()
    names = getattr(model, "output_names", [""])
    for number, (name, output) in enumerate(zip(names, outputs, strict=False)):
        loss = _entry(getattr(model, "loss", None), name, number)
        loss = keras.losses.get(loss) if isinstance(loss, str) else loss
        function = getattr(loss, "fn", loss)
        # Of masked places and of this class, Keras takes no loss.
        masks = keras_private.mask_of(output), getattr(loss, "ignore_class", None)
        if any(mask is not None for mask in masks):
            continue
        if function is keras.losses.binary_crossentropy:
            text = (
                "y has the label {}, and binary_crossentropy takes 0 to 1. For more classes, give"
                " each a unit of the last layer, with sparse_categorical_crossentropy."
            )
            yield 1, name, number, 1, text
        elif function is keras.losses.sparse_categorical_crossentropy and output.shape:
            size = output.shape[-1]
            text = (
                f"y has the label {{}}, but the {size} classes of the output are 0 to {size - 1}:"
                " the loss is wrong. Number them from 0, or give the last layer more units."
            )
            yield 1, name, number, size - 1, text
    for layer in getattr(model, "layers", ()):
        ids: Any = getattr(layer, "input", None) if type(layer) is keras.layers.Embedding else None
        for number, tensor in enumerate(getattr(model, "inputs", None) or ()):
            if tensor is ids:
                text = (
                    f"x has the id {{}}, but those of {layer.name} are 0 to {layer.input_dim - 1}:"
                    " the output is NaN, or a row from the end. Number them from 0, or give it a"
                    " larger input_dim."
                )
                yield 0, tensor.name, number, layer.input_dim - 1, text


def _entry(nest: Any, name: str, number: int) -> Any:
    """Returns what a nest of losses or arrays has for an input or output."""
    if isinstance(nest, dict):
        return nest.get(name)
    return nest[number] if isinstance(nest, (list, tuple)) and number < len(nest) else nest


def warn_beyond(model: Any, limits: Iterable[Limit], batch: Any, is_first: bool) -> bool:
    """Warns of a number in a batch that is beyond a limit; returns whether there is one.

    Arrays on devices are looked at in the first batch alone, because that waits for them.
    """
    for part, name, number, largest, text in limits if type(batch) is tuple else ():
        array, weights = (_entry((*batch, None, None)[i], name, number) for i in (part, 2))
        if is_first and isinstance(array, jax.Array) and array.is_fully_addressable:
            array = np.asarray(array)
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "iuf":
            continue
        found = _beyond(array, largest)
        if found is not None and part == 1 and isinstance(weights, np.ndarray):
            if weights.shape == (*array.shape, 1):
                weights = weights[..., 0]
            if weights.shape == array.shape[: weights.ndim]:
                found = _beyond(array[weights != 0], largest)
        if found is not None:
            warn(f"{model.name}: {text.format(found)}")
            return True
    return False


def _beyond(array: np.ndarray, largest: int) -> Any:
    """Returns a number that is not 0 to `largest`, but for rounding; NaN is another matter."""
    for found in (array.max(initial=0), array.min(initial=0)):
        if found > largest + _ROUNDING or found < -_ROUNDING:
            return found
    return None


def check_columns(loss: Any, y_true: Any, y_pred: Any) -> None:
    """Warns, while a step is traced, of a column that Keras repeats to make two shapes agree."""
    elementwise = keras.losses.mean_squared_error, keras.losses.mean_absolute_error
    if current_scope() is None or getattr(loss, "fn", None) not in elementwise:
        return
    shapes: Any = [getattr(y, "shape", ()) for y in (y_true, y_pred)]
    columns = {shape[1] for shape in shapes if len(shape) == 2}
    if len(columns) == 2 and 1 in columns:
        warn(
            f"{loss.name}: y has shape {shapes[0]}, and the output {shapes[1]}: the one column is"
            " repeated. Give both as many columns, such as by the units of the last layer."
        )
