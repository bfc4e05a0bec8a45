"""The layouts that layers of transformers ask for, and what they leave whole.

The projections of attention that make heads, and the feed-forward layers that widen, divide what
they make. Those that bring heads together, and the ones that narrow, divide what they take. So each
device computes its heads and its part of the width, and there is one sum after each pair of layers,
as in Megatron. Of a bank of experts, each device computes some. Nothing else depends on this
choice, least of all a number.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import keras

from distributary.context import get_strategy, has_strategy
from distributary.keras_bridge import _keras_private as keras_private

_MIN_BYTES = 1 << 10  # of whole variables that are worth a word
# For a layer that makes as much as it takes, its name has to tell.
_MAKES = re.compile("query|key|value|qkv|gate|up_|intermediate")
_TAKES = re.compile("out|down")


def note_role(variable: Any, name: object, shape: Sequence[int] | None) -> None:
    """Notes along which dim the layer that creates a variable divides it, if layers decide it."""
    if shape is None or not has_strategy():
        return
    rules = get_strategy().extended.layout_rules
    layer = keras_private.current_layer()
    if rules.is_auto and rules.num_devices > 1 and isinstance(layer, keras.Layer):
        sizes = rules.sizes.setdefault(keras_private.current_path().rpartition("/")[0], set())
        dim = _divided_dim(layer, name, tuple(shape), sizes)
        if dim is not None and shape[dim] % rules.num_devices == 0:
            variable._distributary_dim = dim


def _divided_dim(
    layer: Any, name: object, shape: tuple[int, ...], block_sizes: set[tuple[int, ...]]
) -> int | None:
    """Returns the dim of a new variable of a layer that devices divide; None for the whole.

    Args:
        layer: The layer.
        name: Name of the variable.
        shape: Its shape.
        block_sizes: The sizes of what other layers of the same block make and divide. It gets new
            ones. A layer that takes something else would divide what comes before the block.
    """
    if isinstance(layer, keras.layers.Embedding):  # its vocabulary, also where it is reversed
        return {"embeddings": 0, "reverse_embeddings": len(shape) - 1}.get(str(name))
    if shape and getattr(layer, "num_experts", None) == shape[0]:  # as a bank of keras-hub has it
        return 0
    is_einsum = isinstance(layer, keras.layers.EinsumDense)
    if name not in ("kernel", "bias") or not (is_einsum or isinstance(layer, keras.layers.Dense)):
        return None
    operands, result = (layer.equation if is_einsum else "ab,bc->ac").replace(" ", "").split("->")
    taken, letters = operands.split(",")
    kernel = shape if name == "kernel" else tuple(layer.weights[0].shape)
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
        makes = bool(_MAKES.search(layer.name))
        if makes == bool(_TAKES.search(layer.name)):
            return None
    if name == "kernel":
        block_sizes.update([to] if makes else [])
        takes = not makes and of in block_sizes
        return letters.index(outer[0]) if makes else letters.index(inner[0]) if takes else None
    place = result.index(outer[0]) - len(result) + len(shape)
    return place if makes and place >= 0 else None


def check_rules(model: Any, strategy: Any) -> None:
    """Checks that each rule of a strategy fits a variable, before a model's first step."""
    rules = strategy.extended.layout_rules
    if rules.is_settled or not model.built or not model.variables:
        return
    variables = model.variables
    rules.check_complete(model.name, [v.path for v in variables])
    if not rules.is_auto:
        return
    whole = [v for v in variables if not hasattr(v, "_distributary_dim")]
    rules.tell_whole(
        model.name,
        [v.path for v in whole if v._value.nbytes >= _MIN_BYTES],
        1 - sum(v._value.nbytes for v in whole) / sum(v._value.nbytes for v in variables),
    )
