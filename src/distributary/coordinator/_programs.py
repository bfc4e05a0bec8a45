"""Programs that travel: StableHLO with a hash as its name."""

import functools
import hashlib
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.export

from distributary.errors import InvalidValueError, UnsupportedError

__all__ = ["Program", "ProgramCache", "export_function", "export_jaxpr"]

_DIGEST_BYTES = hashlib.sha256().digest_size


@final
@dataclass(frozen=True, slots=True)
class Program:
    """A serialized program.

    Attributes:
        name: Hash of the serialized `jax.export.Exported`.
        content: The hash, and what was serialized.
    """

    name: str
    content: bytes

    @classmethod
    def of(cls, exported: jax.export.Exported) -> "Program":
        """The program of an exported function."""
        serialized = bytes(exported.serialize())
        digest = hashlib.sha256(serialized).digest()
        return cls(digest.hex(), digest + serialized)


def export_jaxpr(closed: Any) -> Program:
    """A program of a closed jaxpr, from a flat list of arrays to one."""

    def run(*inputs: Any) -> list[Any]:
        outs: list[Any] = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *inputs)
        return outs

    return export_function(run, closed.in_avals, [None] * len(closed.in_avals))


def export_function(
    run: Callable[..., list[Any]], avals: Sequence[Any], buckets: Sequence[int | None]
) -> Program:
    """A program of a function, from a flat list of arrays to one.

    Args:
        run: The function.
        avals: Shapes and dtypes of its arrays.
        buckets: For every array, None or a number: all arrays with an equal number have, instead
            of that in the shape, any equal number of rows.

    Raises:
        UnsupportedError: if it has callbacks.
    """
    names = sorted({bucket for bucket in buckets if bucket is not None})
    sizes: dict[int | None, Any] = {}
    if names:
        symbols = jax.export.symbolic_shape(",".join(f"rows_{name}" for name in names))
        sizes.update(zip(names, symbols, strict=True))
    structs = [
        jax.ShapeDtypeStruct(
            aval.shape if bucket is None else (sizes[bucket], *aval.shape[1:]), aval.dtype
        )
        for aval, bucket in zip(avals, buckets, strict=True)
    ]
    try:
        return Program.of(jax.export.export(jax.jit(run), platforms=["cpu"])(*structs))
    except NotImplementedError as error:
        if "callback" not in str(error):
            raise
        raise UnsupportedError(
            "A step calls back into Python, as jax.debug.print and jax.pure_callback do, but only"
            f" programs travel to workers, no Python code ({error}). Return what is to be printed,"
            " and fetch it."
        ) from error


@final
class ProgramCache:
    """The programs that a task knows, by name. Tasks in one process compile each of them once."""

    def __init__(self) -> None:
        self._calls: dict[str, Callable[..., Sequence[Any]]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._calls

    def add(self, content: bytes) -> str:
        """Adds the content of a program; returns its name.

        Raises:
            InvalidValueError: if it has been damaged, or calls custom code that is not known to be
                harmless.
        """
        digest, serialized = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        # XLA's parser crashes on damaged programs.
        if hashlib.sha256(serialized).digest() != digest:
            raise InvalidValueError(f"A program of {len(content)} bytes has been damaged.")
        name = digest.hex()
        if name not in self._calls:
            with _loading:
                self._calls[name] = _loaded(serialized)
        return name

    def run(self, name: str, inputs: Sequence[Any]) -> list[jax.Array]:
        """Runs a program."""
        return list(self._calls[name](*inputs))


_loading = threading.Lock()


@functools.lru_cache(maxsize=256)
def _loaded(serialized: bytes) -> Callable[..., Sequence[Any]]:
    exported = jax.export.deserialize(bytearray(serialized))
    _check_custom_calls(exported)
    # Programs are exported for CPUs; arrays may be on another device by default.
    cpu = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    call = jax.jit(exported.call, in_shardings=cpu)
    if not any(jax.export.is_symbolic_dim(dim) for aval in exported.in_avals for dim in aval.shape):
        call.lower(*exported.in_avals).compile()  # not while others wait for the first result
    return call


# What JAX lowers numeric functions to on CPUs; none of them touches anything but its operands.
_HARMLESS = re.compile(
    r"Sharding|SPMDFullToShardShape|SPMDShardToFullShape|ducc_fft|(lapack_\w+_ffi)|mhlo\.\w+|TopK"
    r"|ApproxTopK|cpu_threefry2x32|shape_assertion"
)
_CUSTOM_CALL = re.compile(r'custom_call @"?([^"\s(]+)|call_target_name = "([^"]*)"')


def _check_custom_calls(exported: Any) -> None:
    for names in _CUSTOM_CALL.findall(exported.mlir_module()):
        name = next(filter(None, names), "")
        if _HARMLESS.fullmatch(name) is None:
            raise InvalidValueError(
                f"A program calls {name!r}, which is not among the functions that a program from"
                " another process may call. Steps are made of JAX operations, without host"
                " callbacks and custom kernels."
            )
