"""Keeps compiled programs beside checkpoints: a training that starts again computes sooner."""

import os
import shutil
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

_NAME = ".compiled"


def keep_programs(directory: Path) -> None:
    """Lets JAX keep the programs of this process in a folder of a checkpoint directory.

    The directory that comes first counts. A folder that the user has chosen
    (`JAX_COMPILATION_CACHE_DIR`) stays. A directory of another user has none: programs are machine
    code. JAX keeps programs that took a second or more to compile, and finds them by all that they
    depend on, the features of the processor included.
    """
    if _folder() is None and not (directory.exists() and directory.stat().st_uid != os.getuid()):
        jax.config.update("jax_compilation_cache_dir", str(directory / _NAME))


def remove_programs(directory: Path) -> None:
    """Removes the programs that this process keeps in a checkpoint directory, and keeps no more."""
    folder = directory / _NAME
    if _folder() == str(folder):
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()  # JAX reads its configuration only once
        shutil.rmtree(folder, ignore_errors=True)


def _folder() -> str | None:
    folder: str | None = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    return folder
