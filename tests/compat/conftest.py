"""Keras is imported before the first test, because it sets environment variables."""

from collections.abc import Iterator

import keras  # noqa: F401
import pytest

from distributary.compat.tensorflow import as_element
from distributary.datasets import show_arrays_by


@pytest.fixture(autouse=True)
def _elements_have_numpy() -> Iterator[None]:
    """As in a program that imports the module; tests/conftest.py takes it back for all others."""
    show_arrays_by(as_element)
    yield
    show_arrays_by(None)
