"""Devices of machines that are not here, as the compilers describe them."""

import importlib.util
import itertools
import operator
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from typing import Any, final

import jax

from distributary.errors import InvalidValueError, MissingPackageError, pip_install

_GIB = 1 << 30


@final
@dataclass(frozen=True)
class Topology:
    """Accelerators of one or several hosts, for which programs can be compiled.

    Args:
        name: Name as the user wrote it, such as `"v5e:2x4"`.
        kind: `"TPU"` or `"GPU"`.
        hosts: The devices, host by host.
        num_slices: Number of TPU slices, which are connected by a slower network; 1 for GPUs.
        memory_bytes: Memory of one device that a program can use.
    """

    name: str
    kind: str
    hosts: tuple[tuple[jax.Device, ...], ...]
    num_slices: int
    memory_bytes: int


@final
@dataclass(frozen=True)
class _Tpu:
    """A generation of TPUs.

    Args:
        num_dims: Number of dims of the grid of chips.
        memory_gib: Memory of a device that a program can use, as libtpu 0.0.42.1 reports it when a
            program needs more. A device is a chip, except on v2, v3, v4 and tpu7x, where it is one
            of the two cores of a chip.
        largest_host: Largest grid of chips in one host.
        smaller_hosts: Grid of chips in each host if a grid does not fit into `largest_host`.
    """

    num_dims: int
    memory_gib: float
    largest_host: tuple[int, ...]
    smaller_hosts: tuple[int, ...]


# Hosts as Google Cloud offers them: https://cloud.google.com/tpu/docs/tpus-in-gke
_TPUS = {
    "v2": _Tpu(2, 7.48, (2, 2), (2, 2)),
    "v3": _Tpu(2, 15.48, (2, 2), (2, 2)),
    "v4": _Tpu(3, 15.25, (2, 2, 1), (2, 2, 1)),
    "v5e": _Tpu(2, 15.75, (2, 4), (2, 2)),
    "v5p": _Tpu(3, 95.74, (2, 2, 1), (2, 2, 1)),
    "v6e": _Tpu(2, 31.25, (2, 4), (2, 2)),
    "tpu7x": _Tpu(3, 94.75, (2, 2, 1), (2, 2, 1)),
}

_H100_MEMORY_BYTES = 84929347584

_NAME = re.compile(r"(?:(?P<slices>\d+) ?x ?)?(?P<chip>[a-z]\w*):(?P<shape>\d+(?:x\d+)*)", re.ASCII)


def known_topologies() -> str:
    """Returns the names of the known topologies, for messages."""
    return (
        f"TPUs {', '.join(_TPUS)} with the grid of their chips (v5e:2x4, v4:2x2x1, and 2xv5e:2x4"
        " for two slices), and GPUs h100 with their number, also per host (h100:8, h100:2x8 for two"
        " hosts)"
    )


def prepare_compilers() -> None:
    """Makes JAX see nothing but a CPU to run on; call it before JAX starts."""
    jax.config.update("jax_platforms", "cpu")
    # Otherwise libtpu asks the cloud which machine it is on, and warns that there is none.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    # libtpu admits one process per machine, because of its chips, which are not used here.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


def parse_topology(name: str) -> Topology:
    """Returns the devices with a name; loads the compiler, which starts the JAX backends.

    Raises:
        InvalidValueError: for names that do not exist.
        MissingPackageError: if the compiler is not installed.
    """
    match = _NAME.fullmatch(name.strip().lower())
    shape = tuple(map(int, match["shape"].split("x"))) if match else ()
    if match is not None and 0 not in shape:
        num_slices = int(match["slices"] or 1)
        if match["chip"] == "h100" and num_slices == 1 and len(shape) <= 2:
            return _gpus(name, *shape)
        tpu = _TPUS.get(match["chip"])
        if tpu is not None and num_slices >= 1 and len(shape) == tpu.num_dims:
            return _tpus(name, match["chip"], tpu, shape, num_slices)
    raise InvalidValueError(f"--topology {name!r} is unknown. Known are {known_topologies()}.")


def _tpus(name: str, chip: str, tpu: _Tpu, shape: tuple[int, ...], num_slices: int) -> Topology:
    _require("libtpu", "TPU", "tpu")
    fits = all(size <= most for size, most in zip(shape, tpu.largest_host, strict=True))
    host = shape if fits else tpu.smaller_hosts
    options: dict[str, Any] = {"chips_per_host_bounds": [*host, 1][:3]}
    if num_slices > 1:
        options["num_slices"] = num_slices
    grid = "x".join(map(str, shape))
    devices = _described(name, platform="tpu", topology_name=f"{chip}:{grid}", **options)
    return Topology(name, "TPU", _by_host(devices), num_slices, round(tpu.memory_gib * _GIB))


def _gpus(name: str, *shape: int) -> Topology:
    _require("jax_plugins.xla_cuda13", "GPU", "compile")
    num_hosts, num_each = shape if len(shape) == 2 else (1, shape[0])
    grid = f"1x{num_hosts}x{num_each}"
    target = resources.files(__package__).joinpath("h100.txtpb").read_text(encoding="utf-8")
    devices = _described(name, platform="cuda", target_config=target, topology=grid)
    return Topology(name, "GPU", _by_host(devices), 1, _H100_MEMORY_BYTES)


def _require(module: str, what: str, extra: str) -> None:
    try:
        exists = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # because its parent does not exist
        exists = False
    if not exists:
        raise MissingPackageError(
            f"The {what} compiler is not installed: there is no module {module!r}. Install it with"
            f" `{pip_install(extra)}`; no {what} is needed."
        )


def _described(name: str, **description: Any) -> list[jax.Device]:
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(**description).devices)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        raise InvalidValueError(
            f"--topology {name!r} does not exist, the compiler says: {error}. Known are"
            f" {known_topologies()}."
        ) from error


def _by_host(devices: Iterable[jax.Device]) -> tuple[tuple[jax.Device, ...], ...]:
    of_host = operator.attrgetter("process_index")
    return tuple(tuple(of) for _, of in itertools.groupby(sorted(devices, key=of_host), of_host))
