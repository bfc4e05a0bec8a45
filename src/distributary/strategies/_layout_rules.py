"""Rules that say how the variables of Keras models are divided over the devices of a replica.

With "auto", the layers of transformers say it. The projections of attention that make heads, and
the feed-forward layers that widen, divide what they make. Those that bring heads together, and the
ones that narrow, divide what they take. So each device computes its heads and its part of the
width, and there is one sum after each pair of layers, as in Megatron. Of a bank of experts, each
device computes some. Nothing else depends on this choice, least of all a number.
"""

import difflib
import logging
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, final

import jax
from jax.sharding import Mesh, PartitionSpec as P

from distributary.devices import REPLICA_AXIS, spec_of_axes
from distributary.errors import DeviceError, InvalidValueError, check_type, checked_int

_log = logging.getLogger(__name__)
_AXES = ("batch", "model")
_NUM_NEAR = 3  # paths in a message
_MIN_BYTES = 1 << 10  # of whole variables that are worth a word
# For a layer that makes as much as it takes, its name has to tell.
_MAKES = re.compile("query|key|value|qkv|gate|up_|intermediate")
_TAKES = re.compile("out|down")


@final
class LayoutRules:
    """The layout of each variable of a Keras model, by its path.

    Args:
        who: Name of the strategy, for messages.
        layouts: A `keras.distribution.LayoutMap`, or a mapping from regular expressions, which fit
            the whole path of a variable, to one axis per dim: `"model"`, `"batch"` or None. "auto"
            goes by the layers of a model. None divides nothing.
        model_parallel: Number of devices of each replica; None for as many as the layout map says,
            and for one without it.

    Attributes:
        num_devices: Number of devices of each replica.
        is_auto: Whether layers say how their variables are divided.

    Raises:
        InvalidTypeError: for arguments of another type.
        InvalidValueError: for a number below 1, or rules that cannot be used.

    Source: `keras.distribution.LayoutMap`.
    """

    def __init__(self, who: str, layouts: Any = None, model_parallel: Any = None) -> None:
        what = f"{who}: experimental_layout_map"
        self._who, self._what = who, what
        self.is_auto = layouts == "auto" if isinstance(layouts, str) else False
        if layouts is not None and not self.is_auto:
            expected = 'a keras.distribution.LayoutMap, a dict of rules, or "auto"'
            check_type(what, layouts, Mapping, expected)
        device_mesh = getattr(layouts, "device_mesh", None)
        names, self._mesh_shape = _AXES, None
        if device_mesh is not None:
            names, self._mesh_shape = tuple(device_mesh.axis_names), tuple(device_mesh.shape)
            if len(names) != 2:
                raise InvalidValueError(
                    f"{what} has a DeviceMesh with the axes {names!r}, expected two: the first for"
                    " the replicas, and the second for the devices of each."
                )
        self.num_devices = _checked_number(who, model_parallel, self._mesh_shape)
        rules = {} if layouts is None or self.is_auto else layouts
        # By pattern, for every dim the axis of the strategy's mesh, or "model".
        self._rules = {
            pattern: self._axes_of(pattern, layout, names) for pattern, layout in rules.items()
        }
        has_number = model_parallel is not None or device_mesh is not None
        if not has_number and any("model" in axes for axes in self._rules.values()):
            raise InvalidValueError(
                f"{what} divides dims over the devices of a replica, but it has one. Write"
                " experimental_model_parallel=k as well, for k devices per replica."
            )
        self._unused = dict.fromkeys(self._rules)
        # By the path of a block of layers, the sizes that its layers make and divide. A layer that
        # takes something else would divide what comes before the block.
        self._sizes = defaultdict[str, set[tuple[int, ...]]](set)
        self._has_told = False

    def _axes_of(self, pattern: Any, layout: Any, names: Sequence[str]) -> tuple[str | None, ...]:
        layout = getattr(layout, "axes", layout)
        check_type(f"{self._what}: the key {pattern!r}", pattern, str, "a regular expression")
        what = f"{self._what}[{pattern!r}]"
        check_type(what, layout, tuple | list, "a tuple with an axis or None for each dim")
        axes = tuple(layout)
        used = [axis for axis in axes if axis is not None]
        if len(set(used)) < len(used) or not set(used) <= set(names):
            raise InvalidValueError(
                f"{self._what}[{pattern!r}] is {axes!r}, expected for every dim one of"
                f" {', '.join(map(repr, names))} or None, and each axis once."
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise InvalidValueError(
                f"{self._what}: {pattern!r} is no regular expression ({error}), expected one that"
                " fits the whole path of a variable, such as '.*query/kernel'."
            ) from None
        meaning = dict(zip(names, (REPLICA_AXIS, "model"), strict=True))
        return tuple([None if axis is None else meaning[axis] for axis in axes])

    def replicas_of(self, devices: Sequence[jax.Device], num_workers: int = 1) -> list[Any]:
        """Returns the devices of each replica, of all workers.

        Raises:
            DeviceError: if the devices of a worker do not divide into replicas.
            InvalidValueError: if the layout map is for another mesh.
        """
        size, count = self.num_devices, len(devices) // num_workers
        if count % size:
            raise DeviceError(
                f"{self._who}: {count} devices do not divide into replicas of {size} each. Choose"
                " an experimental_model_parallel that divides their number, or fewer devices."
            )
        self.check_mesh(len(devices) // size)
        if size == 1:
            return list(devices)
        return [devices[i : i + size] for i in range(0, len(devices), size)]

    def check_mesh(self, num_replicas: int) -> None:
        """Checks that a layout map is for this number of replicas."""
        if self._mesh_shape not in (None, (num_replicas, self.num_devices)):
            raise InvalidValueError(
                f"{self._what} is for a DeviceMesh of the shape {self._mesh_shape}, expected"
                f" {(num_replicas, self.num_devices)}: replicas, and devices of each."
            )

    def spec(self, path: str, shape: Sequence[int], auto_dim: int | None, mesh: Mesh) -> P:
        """Returns the layout of a new variable.

        Args:
            path: Path of the variable.
            shape: Its shape.
            auto_dim: The dim along which its layer divides it, if the layers say it.
            mesh: The strategy's mesh: replicas, and the devices of each along the other axes.

        Raises:
            InvalidValueError: if several rules fit, or the one that fits has too many axes, or
                divides a dim whose size is not a multiple of the number of parts.
        """
        fitting = [pattern for pattern in self._rules if re.fullmatch(pattern, path)]
        rules = [path] if path in self._rules else fitting
        if len(rules) > 1:
            raise InvalidValueError(
                f"{self._what}: the rules {rules!r} all fit the variable {path!r}; expected one."
                " Make them differ."
            )
        axes: Sequence[str | None] = self._rules[rules[0]] if rules else ()
        parts = {"model": self.num_devices, REPLICA_AXIS: mesh.shape[REPLICA_AXIS], None: 1}
        divides = all(size % parts[axis] == 0 for axis, size in zip(axes, shape, strict=False))
        if len(axes) > len(shape) or not divides:
            names = {REPLICA_AXIS: "batch"}
            raise InvalidValueError(
                f"{self._what}[{rules[0]!r}] is {tuple([names.get(a or '', a) for a in axes])!r},"
                f" but the variable {path!r} has the shape {list(shape)}: there must be a dim for"
                f" each axis, that of the replicas must divide by {parts[REPLICA_AXIS]}, and that"
                f" of the model by {self.num_devices}. Change the rule, or leave it out so that the"
                " variable is whole."
            )
        if auto_dim is not None:
            axes = [None] * auto_dim + ["model"]
        for pattern in rules:
            self._unused.pop(pattern, None)
        of_devices = mesh.axis_names[1:]
        device_axes = (
            None if not of_devices else of_devices[0] if len(of_devices) == 1 else of_devices
        )
        return spec_of_axes([device_axes if axis == "model" else axis for axis in axes])

    def dim_of_product(
        self,
        block: str,
        name: str,
        equation: str,
        kernel: Sequence[int],
        bias: Sequence[int] | None,
    ) -> int | None:
        """Returns the dim that devices divide of the kernel of a layer, or of its bias, if any.

        Args:
            block: Path of the block to which the layer belongs.
            name: Name of the layer.
            equation: The product with the kernel that it computes, as `"ab,bc->ac"`.
            kernel: Shape of the kernel.
            bias: Shape of the bias; None for the dim of the kernel.
        """
        operands, result = equation.replace(" ", "").split("->")
        taken, letters = operands.split(",")
        sizes = dict(zip(letters, kernel, strict=False))
        outer = [letter for letter in result if letter in sizes and letter not in taken]
        inner = [letter for letter in letters if letter not in result]
        if not outer or not inner:
            return None
        # First heads tell, then sizes, and then names.
        to, of = (tuple([sizes[letter] for letter in side]) for side in (outer, inner))
        making, taking = ((len(side), math.prod(side)) for side in (to, of))
        makes = making > taking
        if making == taking:
            makes = bool(_MAKES.search(name))
            if makes == bool(_TAKES.search(name)):
                return None
        if bias is None:
            self._sizes[block].update([to] if makes else [])
            takes = not makes and of in self._sizes[block]
            return letters.index(outer[0]) if makes else letters.index(inner[0]) if takes else None
        place = result.index(outer[0]) - len(result) + len(bias)
        return place if makes and place >= 0 else None

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing to check or to say about a model that is complete."""
        tells = self.is_auto and self.num_devices > 1 and not self._has_told
        return not self._unused and not tells

    def check_complete(self, owner: str, variables: Sequence[tuple[str, int, bool]]) -> None:
        """Checks that every rule has met a variable, when a model is complete.

        If the layers decide, it says which variables they leave whole.

        Args:
            owner: Name of the model.
            variables: For each of its variables the path, the number of bytes, and whether layers
                leave it whole.

        Raises:
            InvalidValueError: if a rule has not.
        """
        for rule in self._unused:
            paths = [path for path, _, _ in variables]
            near = difflib.get_close_matches(rule, paths, _NUM_NEAR, 0.0)
            raise InvalidValueError(
                f"{self._what}: the rule {rule!r} fits no variable of {owner}; near paths are"
                f" {', '.join(map(repr, near))}. A rule is a regular expression for a whole path."
                " Correct it or leave it out."
            )

        if not self.is_auto:
            return
        self._has_told = True
        whole = [(path, num_bytes) for path, num_bytes, is_whole in variables if is_whole]
        whole_bytes = sum(num_bytes for _, num_bytes in whole)
        share = 1 - whole_bytes / sum(num_bytes for _, num_bytes, _ in variables)
        _log.warning(
            "%s: the layers of %s divide %.0f %% of its bytes by %d. Variables from 1 KiB on"
            " that are whole on every device of a replica: %s.",
            self._what,
            owner,
            100 * share,
            self.num_devices,
            ", ".join(path for path, num_bytes in whole if num_bytes >= _MIN_BYTES) or "none",
        )


def _checked_number(who: str, value: Any, mesh_shape: Sequence[int] | None) -> int:
    in_map = 1 if mesh_shape is None else mesh_shape[1]
    if value is None:
        return in_map
    what = f"{who}: experimental_model_parallel"
    if mesh_shape is None:
        return checked_int(what, value, minimum=1)
    if checked_int(what, value) != in_map:
        raise InvalidValueError(f"{what} is {value!r}, expected {in_map} as in the layout map.")
    return in_map
