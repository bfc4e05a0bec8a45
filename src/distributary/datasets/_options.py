"""Options for how a dataset is divided among workers."""

import enum
from typing import Any, ClassVar, Final, final

from distributary.errors import InvalidTypeError

#: For `num_parallel_calls` and `prefetch`: chooses a number that suits the machine.
AUTOTUNE: Final = -1
#: Result of `Dataset.cardinality` for a dataset without end.
INFINITE_CARDINALITY: Final = -1
#: Result of `Dataset.cardinality` if only reading the data would tell.
UNKNOWN_CARDINALITY: Final = -2


class AutoShardPolicy(enum.IntEnum):
    """The part of a dataset that each worker reads.

    * `AUTO`: FILE if the dataset reads files and there is one for every worker, else DATA.
    * `FILE`: worker `w` of `n` reads the files `w`, `w + n`, ...
    * `DATA`: every worker iterates over the whole dataset and keeps its rows of each batch.
    * `OFF`: every worker uses the whole dataset.
    * `HINT`: like OFF, with `shard(SHARD_HINT, SHARD_HINT)` replaced by the worker's shard.

    Source: `tf.data.experimental.AutoShardPolicy`.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


class _Checked:
    """A class whose attributes are listed in `_known`, with their defaults and types."""

    _known: ClassVar[dict[str, tuple[Any, Any]]] = {}

    def __init__(self) -> None:
        for name, (default, _) in self._known.items():
            object.__setattr__(self, name, default)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._known:
            raise AttributeError(
                f"{type(self).__name__} has no option {name!r}; it has {', '.join(self._known)}."
            )
        expected = self._known[name][1]
        if value is not None and not isinstance(value, expected):
            raise InvalidTypeError(
                f"{type(self).__name__}: {name} is {value!r}, expected {expected.__name__}."
            )
        object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._known)
        return f"{type(self).__name__}({fields})"


@final
class DistributeOptions(_Checked):
    """Options of a dataset that is distributed over workers.

    Attributes:
        auto_shard_policy: An `AutoShardPolicy`; None means AUTO.

    Source: `tf.data.experimental.DistributeOptions`.
    """

    auto_shard_policy: AutoShardPolicy | None
    _known: ClassVar = {"auto_shard_policy": (None, AutoShardPolicy)}


@final
class Options(_Checked):
    """Options of a dataset, set with `Dataset.with_options`.

    Attributes:
        experimental_distribute: `DistributeOptions`.
        deterministic: No effect: the order of elements is always the same.

    Source: `tf.data.Options`.
    """

    experimental_distribute: DistributeOptions
    deterministic: bool | None
    _known: ClassVar = {
        "experimental_distribute": (None, DistributeOptions),
        "deterministic": (None, bool),
    }

    def __init__(self) -> None:
        super().__init__()
        self.experimental_distribute = DistributeOptions()

    def merge(self, other: "Options") -> "Options":
        """Returns these options, overridden by everything that is set in `other`."""
        merged = Options()
        for options in (self, other):
            if options.deterministic is not None:
                merged.deterministic = options.deterministic
            policy = options.experimental_distribute.auto_shard_policy
            if policy is not None:
                merged.experimental_distribute.auto_shard_policy = policy
        return merged
