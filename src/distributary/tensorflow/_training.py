"""Parts of `tf.train` besides checkpoints: messages, averages, looking at checkpoints."""

import abc
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import jax.numpy as jnp

from distributary.checkpoint import latest_checkpoint, list_variables, load_variable, numbered
from distributary.errors import InvalidValueError
from distributary.tensorflow._host import package
from distributary.tensorflow._operations import array
from distributary.variables import Variable

_Path = str | os.PathLike[str]

# Messages and their fields, with the numbers that `tensorflow/core/example/*.proto` gives them.
_LISTS = {"BytesList": "TYPE_BYTES", "FloatList": "TYPE_FLOAT", "Int64List": "TYPE_INT64"}
MESSAGES = (
    *_LISTS,
    *("Feature", "Features", "Example", "FeatureList", "FeatureLists", "SequenceExample"),
)
_KINDS = ("bytes_list", "float_list", "int64_list")


def message_type(name: str) -> Any:
    """Returns the protobuf class `tf.train.{name}`, one of `MESSAGES`."""
    with _making_messages:  # or threads would get different classes
        return _messages()[name]


_making_messages = threading.Lock()


@functools.cache
def _messages() -> dict[str, Any]:
    """Makes the protobuf classes, by their names in `tf.train`."""
    descriptors = package("tf.train", "google.protobuf.descriptor_pb2", "protobuf")
    field = descriptors.FieldDescriptorProto
    file = descriptors.FileDescriptorProto(
        name="distributary/example.proto", package="tensorflow", syntax="proto3"
    )

    def add(parent: Any, label: int, number: int, field_name: str, kind: str) -> Any:
        type_name = {} if kind.startswith("TYPE_") else {"type_name": f".tensorflow.{kind}"}
        of_type = getattr(field, kind if not type_name else "TYPE_MESSAGE")
        return parent.field.add(
            name=field_name, number=number, label=label, type=of_type, **type_name
        )

    one, many = field.LABEL_OPTIONAL, field.LABEL_REPEATED
    for list_name, kind in _LISTS.items():
        add(file.message_type.add(name=list_name), many, 1, "value", kind)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, (list_name, list_type) in enumerate(zip(_LISTS, _KINDS, strict=True), 1):
        add(feature, one, number, list_type, list_name).oneof_index = 0
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    add(entry, one, 1, "key", "TYPE_STRING")
    add(entry, one, 2, "value", "Feature")
    add(features, many, 1, "feature", "Features.FeatureEntry")
    add(file.message_type.add(name="Example"), one, 1, "features", "Features")
    add(file.message_type.add(name="FeatureList"), many, 1, "feature", "Feature")
    lists = file.message_type.add(name="FeatureLists")
    entry = lists.nested_type.add(name="FeatureListEntry")
    entry.options.map_entry = True
    add(entry, one, 1, "key", "TYPE_STRING")
    add(entry, one, 2, "value", "FeatureList")
    add(lists, many, 1, "feature_list", "FeatureLists.FeatureListEntry")
    sequences = file.message_type.add(name="SequenceExample")
    add(sequences, one, 1, "context", "Features")
    add(sequences, one, 2, "feature_lists", "FeatureLists")
    # `tensorflow/core/framework/tensor.proto`, as far as arrays of numbers use it.
    shape = file.message_type.add(name="TensorShapeProto")
    add(shape.nested_type.add(name="Dim"), one, 1, "size", "TYPE_INT64")
    add(shape, many, 2, "dim", "TensorShapeProto.Dim")
    tensor = file.message_type.add(name="TensorProto")
    add(tensor, one, 1, "dtype", "TYPE_INT32")
    add(tensor, one, 2, "tensor_shape", "TensorShapeProto")
    add(tensor, one, 4, "tensor_content", "TYPE_BYTES")
    pool = package("tf.train", "google.protobuf.descriptor_pool", "protobuf").DescriptorPool()
    pool.Add(file)
    factory = package("tf.train", "google.protobuf.message_factory", "protobuf")
    types = [pool.FindMessageTypeByName(f"tensorflow.{proto.name}") for proto in file.message_type]
    return {one.name: factory.GetMessageClass(one) for one in types}


@final
@dataclass
class CheckpointOptions:
    """`tf.train.CheckpointOptions`: no option has an effect."""

    experimental_io_device: object = None
    experimental_enable_async_checkpoint: bool = False
    experimental_write_callbacks: Sequence[Callable[..., Any]] | None = None
    enable_async: bool = False
    experimental_skip_slot_variables: bool = False
    experimental_sharding_callback: object = None

    def __post_init__(self) -> None:
        if self.experimental_write_callbacks:
            raise InvalidValueError(
                "tf.train.CheckpointOptions: experimental_write_callbacks are not called. Do it"
                " after save, or after CheckpointManager.wait_until_finished."
            )


@final
@dataclass(frozen=True)
class CheckpointState:
    """The checkpoints of a folder, the last one and all of them.

    Source: `tf.train.get_checkpoint_state`.
    """

    model_checkpoint_path: str
    all_model_checkpoint_paths: list[str]


def get_checkpoint_state(
    checkpoint_dir: _Path, latest_filename: str | None = None
) -> CheckpointState | None:
    """`tf.train.get_checkpoint_state`: None if the folder has no checkpoint."""
    last = latest_checkpoint(checkpoint_dir)
    if last is None:
        return None
    return CheckpointState(last, [str(p) for p, _ in numbered(Path(checkpoint_dir).absolute())])


@final
class CheckpointReader:
    """Reads the arrays of a checkpoint.

    Source: `tf.train.load_checkpoint`.
    """

    def __init__(self, path: _Path) -> None:
        self._path = path
        self._shapes = dict(list_variables(path))

    def get_variable_to_shape_map(self) -> dict[str, list[int]]:
        """Returns the shapes of all arrays, by name."""
        return dict(self._shapes)

    def has_tensor(self, tensor_str: str) -> bool:
        """Returns whether there is an array of this name."""
        return tensor_str in self._shapes

    def get_tensor(self, tensor_str: str) -> Any:
        """Returns an array."""
        return load_variable(self._path, tensor_str)


def load_checkpoint(ckpt_dir_or_file: _Path) -> CheckpointReader:
    """`tf.train.load_checkpoint`: a reader of its arrays."""
    return CheckpointReader(ckpt_dir_or_file)


class PythonState(abc.ABC):
    """State of Python that a checkpoint saves as text; a subclass has the two methods.

    Source: `tf.train.experimental.PythonState`.
    """

    @abc.abstractmethod
    def serialize(self) -> str:
        """Returns the state."""

    @abc.abstractmethod
    def deserialize(self, string_value: str) -> None:
        """Takes over a state."""

    def get_state(self) -> dict[str, str]:
        """Returns the state, for checkpoints."""
        return {"text": self.serialize()}

    def set_state(self, state: dict[str, str]) -> None:
        """Takes over the state of a checkpoint."""
        self.deserialize(state["text"])


def checkpoints_iterator(
    checkpoint_dir: _Path,
    min_interval_secs: float = 0,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
) -> Iterator[str]:
    """`tf.train.checkpoints_iterator`: each newest checkpoint of a folder, as it appears."""
    last: str | None = None
    while True:
        began = time.monotonic()
        while (path := latest_checkpoint(checkpoint_dir)) in (None, last):
            if timeout is not None and time.monotonic() - began >= timeout:
                if timeout_fn is None or timeout_fn():
                    return
                began = time.monotonic()
            time.sleep(min(1.0, timeout or 1.0))
        last = path
        assert path is not None
        yield path
        time.sleep(max(0.0, began + min_interval_secs - time.monotonic()))


@final
class ExponentialMovingAverage:
    """Averages of variables in which each step counts less the older it is.

    Args:
        decay: Weight of the average; 1 - decay is that of a new value.
        num_updates: Number of steps; the weight is then at most (1 + n) / (10 + n).
        zero_debias: Not supported; averages begin with the value of the variable.
        name: No effect.

    Source: `tf.train.ExponentialMovingAverage`.
    """

    def __init__(
        self,
        decay: float,
        num_updates: Any = None,
        zero_debias: bool = False,
        name: str = "ExponentialMovingAverage",
    ) -> None:
        if zero_debias:
            raise InvalidValueError(
                "tf.train.ExponentialMovingAverage: zero_debias is True, but averages begin with"
                " the value of the variable and need no correction. Leave it out."
            )
        #: The name.
        self.name = name
        self._decay, self._num_updates = decay, num_updates
        self._averages: dict[int, tuple[Any, Variable]] = {}

    def apply(self, var_list: Sequence[Any] | None = None) -> None:
        """Takes the values of variables into their averages, which the first call makes."""
        if var_list is None:
            var_list = [variable for variable, _ in self._averages.values()]
        decay = jnp.float32(self._decay)
        if self._num_updates is not None:
            updates = array(self._num_updates).astype(jnp.float32)
            decay = jnp.minimum(decay, (1 + updates) / (10 + updates))
        for variable in var_list:
            if id(variable) not in self._averages:
                average = Variable(array(variable), False, f"{variable.name}/{self.name}")
                self._averages[id(variable)] = variable, average
            average = self._averages[id(variable)][1]
            average.assign_sub((1 - decay) * (average.value() - array(variable)))

    def average(self, var: Any) -> Variable | None:
        """Returns the average of a variable, which is a variable; None if there is none."""
        return self._averages.get(id(var), (None, None))[1]

    def average_name(self, var: Any) -> str:
        """Returns the name of the average of a variable."""
        return f"{var.name}/{self.name}"

    def variables_to_restore(
        self, moving_avg_variables: Sequence[Any] | None = None
    ) -> dict[str, Variable]:
        """Returns the averages by their names."""
        return {average.name: average for _, average in self._averages.values()}
