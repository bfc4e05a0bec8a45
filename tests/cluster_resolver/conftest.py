"""An environment without anything that a launcher has set."""

import os
from collections.abc import Callable

import pytest

_PREFIXES = ("CLOUD_TPU_", "GCE_METADATA_", "MEGASCALE_", "MPI_", "OMPI_", "PMI_", "SLURM", "TPU_")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in list(os.environ):
        if name.startswith(_PREFIXES):
            monkeypatch.delenv(name)
    for name in ("CUDA_VISIBLE_DEVICES", "TF_CONFIG"):
        monkeypatch.setenv(name, "")  # so that it is restored whatever the code under test sets
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", "/nonexistent")  # no nvidia-smi


@pytest.fixture
def set_environ(monkeypatch) -> Callable[..., None]:
    """Sets environment variables; None unsets one."""

    def set_all(**variables: object) -> None:
        for name, value in variables.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, str(value))

    return set_all
