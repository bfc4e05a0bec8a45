"""`tf.profiler.experimental`, by `jax.profiler`: profiles that TensorBoard shows."""

from types import TracebackType
from typing import Any, Self, final

import jax

from distributary.errors import InvalidValueError


def start(logdir: str, options: object = None) -> None:
    """`tf.profiler.experimental.start`: `jax.profiler.start_trace`; options have no effect."""
    jax.profiler.start_trace(logdir)


def stop(save: bool = True) -> None:
    """`tf.profiler.experimental.stop`: `jax.profiler.stop_trace`, which always saves."""
    jax.profiler.stop_trace()


@final
class Profile:
    """`tf.profiler.experimental.Profile`: profiles a block."""

    def __init__(self, logdir: str, options: object = None) -> None:
        self._logdir = logdir

    def __enter__(self) -> Self:
        start(self._logdir)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        stop()


def trace(name: str, **kwargs: Any) -> jax.profiler.TraceAnnotation:
    """`tf.profiler.experimental.Trace`: names a block in a profile."""
    return jax.profiler.TraceAnnotation(name, **kwargs)


_folders: list[str | None] = []


def trace_on(
    graph: bool = True, profiler: bool = False, profiler_outdir: str | None = None
) -> None:
    """`tf.summary.trace_on`: profiles, if `profiler` is True; graphs are not written."""
    if profiler:
        _folders.append(profiler_outdir)
        if profiler_outdir is None:
            raise InvalidValueError(
                "tf.summary.trace_on: profiler_outdir is None, but JAX writes the profile there."
            )
        start(profiler_outdir)


def trace_export(name: str, step: object = None, profiler_outdir: str | None = None) -> None:
    """`tf.summary.trace_export`: writes the profile to the folder of `trace_on`."""
    trace_off()


def trace_off() -> None:
    """`tf.summary.trace_off`: ends the profile."""
    if _folders:
        _folders.clear()
        stop()
