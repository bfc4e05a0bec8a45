"""First values of Keras variables, each computed by one program, where it is stored."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from distributary.devices import dispatcher_for, stored_shards

_CONSTANTS = {keras.initializers.Zeros: 0, keras.initializers.Ones: 1}
_RANDOM = {
    kind
    for kind in vars(keras.initializers).values()
    if isinstance(kind, type) and "seed" in inspect.signature(kind).parameters
}


@final
class _Seed(keras.random.SeedGenerator):
    """A generator for one draw: of a value of a program."""

    def __init__(self, seed: jax.Array) -> None:
        self._seed_of_program = seed

    def next(self, ordered: bool = True) -> jax.Array:
        return self._seed_of_program


def first_value(
    initializer: Any,
    shape: tuple[int, ...],
    dtype: str,
    layout: NamedSharding | None,
    agreed: Callable[[list[np.ndarray]], list[np.ndarray]],
) -> Any:
    """Returns the value of an initializer of Keras; None for other initializers.

    Those of Keras give the same value in every process, and leave nothing behind. Others may draw
    from generators of their own, so they run as they are. A normal distribution around another
    number than 0 can differ in the last bit from what Keras computes operation by operation.

    Args:
        initializer: A callable of a shape and dtype.
        shape: Shape of the variable.
        dtype: Dtype of the variable.
        layout: Sharding of a value that is stored in parts; each device computes its part. None
            gives a value of one device, or of NumPy.
        agreed: Returns the seeds that all workers use, for those of this one.
    """
    constant = _CONSTANTS.get(type(initializer))
    if constant is not None:
        agreed([])
        return np.broadcast_to(np.asarray(constant, jnp.dtype(dtype)), shape)
    seed = getattr(initializer, "seed", None)
    if type(initializer) not in _RANDOM or not isinstance(seed, int):
        return None
    kind: Any = type(initializer)
    attributes = {k: v for k, v in vars(initializer).items() if k not in ("seed", "_init_seed")}
    settings = tuple([(k, tuple(v) if isinstance(v, list) else v) for k, v in attributes.items()])
    try:
        program = _program(kind, settings, tuple(shape), dtype, layout)
    except TypeError:  # a setting is an array
        return None
    # What Keras makes of a number that is a seed.
    (seed,) = agreed([np.asarray([seed, 0], np.uint32)])
    if layout is None:
        return program(seed)
    # Ends before others begin, whose temporaries would be in memory, too. So there is no token: a
    # step may donate the value.
    devices = tuple(layout.mesh.devices.flat)
    return dispatcher_for(devices).run(
        lambda seed: program(seed).block_until_ready(), lambda value: None, seed
    )


@functools.lru_cache(maxsize=256)
def _program(
    kind: Any, settings: Any, shape: tuple[int, ...], dtype: str, layout: NamedSharding | None
) -> Callable[[np.ndarray], jax.Array]:
    def value(seed: jax.Array) -> jax.Array:
        initializer = object.__new__(kind)
        vars(initializer).update(settings, seed=_Seed(seed))
        whole = keras.ops.convert_to_tensor(initializer(shape, dtype=dtype))
        return whole if layout is None else stored_shards(whole, layout)

    everywhere = None if layout is None else NamedSharding(layout.mesh, P())
    first = jax.devices()[0] if layout is None else layout.mesh.devices.flat[0]
    options = _cpu_options() if first.platform == "cpu" else None
    program = jax.jit(
        value, in_shardings=everywhere, out_shardings=layout, compiler_options=options
    )
    # Compiled, it gives an array also in a trace. `ensure_compile_time_eval` does that, too, but
    # makes constants of what does not depend on the seed: arrays as large as the variable.
    compiled: Callable[[np.ndarray], jax.Array] = program.lower(
        jax.ShapeDtypeStruct((2,), np.uint32)
    ).compile()
    return compiled


@functools.cache
def _cpu_options() -> dict[str, str | bool]:
    """Returns compiler options for programs that run about once.

    Compiling one costs more than running it. The simplifier of algebra would round in another way
    than Keras does, operation by operation.
    """
    options: dict[str, str | bool] = {
        "xla_backend_optimization_level": "1",
        "xla_disable_hlo_passes": "algsimp",
    }
    # Since jaxlib 0.11, nothing else is there, and the option is gone.
    without_emitters = {**options, "xla_cpu_use_fusion_emitters": False}
    try:
        jax.jit(lambda: 0, compiler_options=without_emitters).lower().compile()
    except jax.errors.JaxRuntimeError:
        return options
    return without_emitters
