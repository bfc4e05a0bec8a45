"""Options for how a dataset is divided among workers."""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Final, final, get_args

from distributary.errors import check_type

#: For `num_parallel_calls` and `prefetch`: chooses a number that suits the machine.
AUTOTUNE: Final = -1
#: Result of `Dataset.cardinality` for a dataset without end.
INFINITE_CARDINALITY: Final = -1
#: Result of `Dataset.cardinality` if only reading the data would tell.
UNKNOWN_CARDINALITY: Final = -2


def combined(cardinalities: Sequence[int], combine: Callable[[Sequence[int]], int] = max) -> int:
    """Returns the number of elements of several datasets together, if none of them is unusual."""
    for unusual in (INFINITE_CARDINALITY, UNKNOWN_CARDINALITY):
        if unusual in cardinalities:
            return unusual
    return combine(cardinalities)


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
    """A dataclass whose options can be assigned; None means that an option is not set."""

    def __setattr__(self, name: str, value: object) -> None:
        types = type(self).__annotations__
        if name not in types:
            raise AttributeError(
                f"{type(self).__name__} has no option {name!r}; it has {', '.join(types)}."
            )
        expected, *_ = get_args(types[name]) or (types[name],)  # `bool` of `bool | None`
        check_type(f"{type(self).__name__}: {name}", value, expected | None, expected.__name__)
        object.__setattr__(self, name, value)


@final
@dataclass
class DistributeOptions(_Checked):
    """Options of a dataset that is distributed over workers.

    Attributes:
        auto_shard_policy: An `AutoShardPolicy`; None means AUTO.

    Source: `tf.data.experimental.DistributeOptions`.
    """

    auto_shard_policy: AutoShardPolicy | None = field(default=None, init=False)


@final
@dataclass
class Options(_Checked):
    """Options of a dataset, set with `Dataset.with_options`.

    Attributes:
        experimental_distribute: `DistributeOptions`.
        deterministic: No effect: the order of elements is always the same.
        experimental_deterministic: No effect.
        experimental_slack: No effect.
        autotune: No effect; takes any attribute, as the next two do.
        threading: No effect: `map` and `interleave` say how many threads they use.
        experimental_optimization: No effect.

    Source: `tf.data.Options`.
    """

    experimental_distribute: DistributeOptions = field(
        default_factory=DistributeOptions, init=False
    )
    deterministic: bool | None = field(default=None, init=False)
    experimental_deterministic: bool | None = field(default=None, init=False, repr=False)
    experimental_slack: bool | None = field(default=None, init=False, repr=False)
    autotune: SimpleNamespace = field(default_factory=SimpleNamespace, init=False, repr=False)
    threading: SimpleNamespace = field(default_factory=SimpleNamespace, init=False, repr=False)
    experimental_optimization: SimpleNamespace = field(
        default_factory=SimpleNamespace, init=False, repr=False
    )

    def merge(self, options: "Options") -> "Options":
        """Returns these options, overridden by everything that is set in the others."""
        merged = Options()
        for one in (self, options):
            if one.deterministic is not None:
                merged.deterministic = one.deterministic
            policy = one.experimental_distribute.auto_shard_policy
            if policy is not None:
                merged.experimental_distribute.auto_shard_policy = policy
        return merged
