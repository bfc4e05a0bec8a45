"""Choices, and options that check their values, so a wrong one fails where you write it."""

import enum
import math
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, final, get_args

from distributary._late import no_attribute
from distributary.errors import InvalidValueError, check_type, checked_int

_MIN_HEARTBEAT_TIMEOUT_SECONDS = 3


class _Choice(enum.EnumMeta):
    """The type of choices that people look up under other names."""

    if not TYPE_CHECKING:  # or type checkers accept any name

        def __getattr__(cls, name: str) -> Any:
            members = vars(cls).get("_member_map_", {})
            if name in members:  # up to Python 3.11
                return members[name]
            advice = {"AVG AVERAGE avg average": f"Write {cls.__name__}.MEAN."}
            if name.upper() in members:
                advice[name] = f"Write {cls.__name__}.{name.upper()}."
            raise no_attribute(cls.__name__, name, advice, members)


class VariableAggregation(enum.Enum, metaclass=_Choice):
    """The way in which values that replicas assign, or copies that are read, become one value.

    * `NONE`: they are not combined.
    * `SUM`, `MEAN`: their sum or mean.
    * `ONLY_FIRST_REPLICA`: only the value of replica 0 counts.

    Source: `tf.VariableAggregation`.
    """

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


class VariableSynchronization(enum.Enum):
    """The time at which the copies of a variable are combined.

    * `AUTO`: the same as ON_WRITE.
    * `NONE`: never. Strategies with replicas refuse it.
    * `ON_WRITE`: at every assignment, so that all copies are equal (mirrored).
    * `ON_READ`: when the variable is saved, or read in a cross-replica context. In `run`, each
      replica has its own value.

    Source: `tf.VariableSynchronization`.
    """

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class ReduceOp(enum.Enum, metaclass=_Choice):
    """The way in which values of the replicas are combined.

    * `SUM`: their sum.
    * `MEAN`: their sum divided by the number of replicas. It never overflows if the mean is
      finite; the mean of integers is float32.

    Source: `tf.distribute.ReduceOp`.
    """

    SUM = "SUM"
    MEAN = "MEAN"

    @staticmethod
    def from_variable_aggregation(aggregation: VariableAggregation) -> "ReduceOp":
        """Returns the operation of a `VariableAggregation`.

        Raises:
            InvalidValueError: for NONE and ONLY_FIRST_REPLICA, which are not reductions.
        """
        name = str(getattr(aggregation, "name", None))
        if name in ReduceOp.__members__:
            return ReduceOp[name]
        raise InvalidValueError(
            f"ReduceOp.from_variable_aggregation: {aggregation!r} is not a reduction; only"
            " VariableAggregation.SUM and MEAN are."
        )


class CommunicationImplementation(enum.Enum):
    """The algorithm that carries out a collective.

    * `AUTO`: one XLA all-reduce; XLA picks the algorithm for the hardware.
    * `RING`: a reduce-scatter followed by an all-gather, the two halves of a ring all-reduce.
    * `NCCL`: one XLA all-reduce, which NCCL executes on NVIDIA GPUs; elsewhere the same as `AUTO`.

    Source: `tf.distribute.experimental.CommunicationImplementation`.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@final
@dataclass(frozen=True)
class CommunicationOptions:
    """Hints for collective communication.

    Args:
        bytes_per_pack: Size in bytes at which a pack of tensors is full; each pack is sent by its
            own collective. 0 sends everything in one collective. A tensor is never split.
        timeout_seconds: Seconds that workers wait for another one, at the start and in each step,
            before the job ends and says where all of them are. None and 0 wait two minutes at the
            start, and forever later.
        implementation: A `CommunicationImplementation` or its name, in upper or lower case.
        hierarchical: Whether to reduce arrays inside hosts (or TPU slices) first: reduce-scatter
            inside, all-reduce across, all-gather inside. Less data travels between the hosts, and
            the sums are the same up to rounding. It needs several hosts with several devices each,
            and has no effect otherwise. None does this for TPU slices, where the compiler would
            split one all-reduce into several. Elsewhere None uses one all-reduce, and the transport
            chooses the route.
        heartbeat_timeout_seconds: Seconds of silence, 3 or more, after which a worker counts as
            lost although its connections are open: it is frozen, or its machine or network is
            gone. A worker is also silent while C code keeps Python's threads from running. When
            workers have waited for another one that long, worker 0 reports where that one is.

    Raises:
        InvalidValueError: for a negative size or timeout, an unknown implementation, or
            `hierarchical` together with RING.

    Source: `tf.distribute.experimental.CommunicationOptions`; `hierarchical` and the heartbeat are
    ours.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO
    heartbeat_timeout_seconds: float = 20.0
    hierarchical: bool | None = None

    def __post_init__(self) -> None:
        expected = "a number of bytes >= 0; 0 sends all tensors in one collective"
        what = "CommunicationOptions: bytes_per_pack"
        checked_int(what, self.bytes_per_pack, expected, minimum=0)
        for name in ("timeout_seconds", "heartbeat_timeout_seconds"):
            seconds = getattr(self, name)
            if seconds is not None or name != "timeout_seconds":
                check_type(f"CommunicationOptions: {name}", seconds, Real, "a number of seconds")
        if self.timeout_seconds is not None and self.timeout_seconds < 0:
            raise InvalidValueError(
                f"CommunicationOptions: timeout_seconds is {self.timeout_seconds}, expected None or"
                " a number of seconds >= 0."
            )
        if not _MIN_HEARTBEAT_TIMEOUT_SECONDS <= self.heartbeat_timeout_seconds < math.inf:
            raise InvalidValueError(
                "CommunicationOptions: heartbeat_timeout_seconds is"
                f" {self.heartbeat_timeout_seconds}, expected a number of seconds >="
                f" {_MIN_HEARTBEAT_TIMEOUT_SECONDS}; workers send one heartbeat per second."
            )
        object.__setattr__(self, "implementation", _implementation(self.implementation))
        if self.hierarchical and self.implementation is CommunicationImplementation.RING:
            raise InvalidValueError(
                "CommunicationOptions: hierarchical=True does not work with implementation='RING':"
                " a ring goes over all replicas, a hierarchical reduction inside and across hosts."
                " Choose one."
            )

    def merge(self, other: "CommunicationOptions | None") -> "CommunicationOptions":
        """Returns these options, overridden by every field of `other` that is not its default."""
        if other is None:
            return self
        default = CommunicationOptions()
        changed = {
            field.name: getattr(other, field.name)
            for field in fields(other)
            if getattr(other, field.name) != getattr(default, field.name)
        }
        return replace(self, **changed)


def _implementation(value: CommunicationImplementation | str) -> CommunicationImplementation:
    if isinstance(value, CommunicationImplementation):
        return value
    names = [member.name for member in CommunicationImplementation]
    if isinstance(value, str) and value.upper() in names:
        return CommunicationImplementation[value.upper()]
    raise InvalidValueError(
        f"CommunicationOptions: implementation is {value!r}, expected one of {names} or a"
        " CommunicationImplementation."
    )


class InputReplicationMode(enum.Enum):
    """The choice between calling `dataset_fn` once per worker and once per replica.

    Source: `tf.distribute.InputReplicationMode`.
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@final
@dataclass(frozen=True)
class InputOptions:
    """Options for how a distributed dataset hands out its batches.

    Args:
        experimental_fetch_to_device: Whether to place batches on the replicas' devices; None
            means True.
        experimental_replication_mode: How often `dataset_fn` is called.
        experimental_place_dataset_on_device: Must be False: the dataset itself is Python code and
            stays on the host.
        experimental_per_replica_buffer_size: Number of batches that wait on the devices, ahead of
            the step that needs them, while a thread makes the next one. With 0, each batch is made
            when you ask for it.

    Source: `tf.distribute.InputOptions`.
    """

    experimental_fetch_to_device: bool | None = None
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1

    def __post_init__(self) -> None:
        what, mode = "InputOptions: experimental_replication_mode", InputReplicationMode
        check_type(what, self.experimental_replication_mode, mode, "an InputReplicationMode")
        if self.experimental_place_dataset_on_device:
            raise InvalidValueError(
                "InputOptions: experimental_place_dataset_on_device=True is not possible, because"
                " the dataset is Python code on the host. Leave it False; batches still go to the"
                " devices with experimental_fetch_to_device=True."
            )
        if self.experimental_per_replica_buffer_size < 0:
            raise InvalidValueError(
                "InputOptions: experimental_per_replica_buffer_size is"
                f" {self.experimental_per_replica_buffer_size}, expected a number >= 0."
            )


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


@final
@dataclass(frozen=True)
class RecoveryOptions:
    """Limits after which a coordinator gives up on workers, servers and closures that fail.

    Args:
        heartbeat_seconds: Time between two signs of life of a worker or server. One that is silent
            for three times as long is lost: it is frozen, or its machine or network is gone. A
            process that has ended is noticed at once.
        worker_timeout_seconds: Time that a lost worker has to come back. After that, the
            coordinator stops waiting for it.
        no_worker_timeout_seconds: Time that the job may be without any worker. After that,
            `schedule`, `join` and `done` raise `UnavailableError` if a closure is waiting.
        max_closure_losses: When this many workers were lost while running the same closure, the
            closure raises `UnavailableError`, because it seems to be what ends them.

    Raises:
        InvalidValueError: for a value that is not positive.
    """

    heartbeat_seconds: float = 2.0
    worker_timeout_seconds: float = 3600.0
    no_worker_timeout_seconds: float = 600.0
    max_closure_losses: int = 3

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if not value > 0:
                raise InvalidValueError(
                    f"RecoveryOptions: {option.name} is {value}, expected more than 0."
                )


@final
@dataclass(frozen=True)
class RunOptions:
    """Switches of `Strategy.run`.

    Those of `tf.distribute.RunOptions` are accepted for compatibility: in TensorFlow only TPUs have
    them, and here XLA compiles every step.

    Attributes:
        experimental_enable_dynamic_batch_size: No effect.
        experimental_bucketizing_dynamic_shape: No effect.
        experimental_xla_options: No effect.
        autograph: Whether Python control flow of the step becomes that of JAX, see
            `distributary.autograph`: True for all of it, False for none, and None if an `if`,
            `while` or `for` needs the value of an array.
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: "XLAOptions | None" = None
    autograph: bool | None = None


@final
@dataclass(frozen=True)
class XLAOptions:
    """Settings for XLA's compilation of a step in TensorFlow; accepted for compatibility.

    They have no effect, like `RunOptions`. A step is always one program that XLA partitions over
    the logical devices of a replica, and a batch of another shape is compiled anew instead of
    padded.

    Source: `tf.tpu.XLAOptions`.
    """

    use_spmd_for_xla_partitioning: bool = True
    enable_xla_dynamic_padder: bool = True
    use_shardy_partitioner: bool = False
