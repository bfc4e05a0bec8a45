"""The public names are the documented ones, and importing them has no effects but one."""

import re
from pathlib import Path

import pytest

import distributary
from tests.interpreters import run_python

_API_PAGE = Path(__file__).parents[1] / "docs" / "api" / "index.md"

_IMPORT_WITHOUT_EFFECTS = """
import os, sys
import jax, numpy  # JAX sets environment variables of its own.

environ_before = dict(os.environ)
import distributary
from jax._src import xla_bridge

environ_after = dict(os.environ)
assert environ_after.pop("KERAS_BACKEND") == "jax"  # the only effect
assert environ_after == environ_before, "the environment has changed"
assert not xla_bridge.backends_are_initialized(), "JAX backends were started"
unwanted = {"cryptography", "grpc", "keras", "matplotlib", "optax", "orbax"} & set(sys.modules)
assert not unwanted, f"imported {sorted(unwanted)}"

import distributary.compat.tensorflow  # which imports Keras
assert not xla_bridge.backends_are_initialized(), "JAX backends were started"
"""


def test_public_names_exist_and_are_the_documented_ones_in_order():
    missing = [name for name in distributary.__all__ if not hasattr(distributary, name)]

    assert missing == []
    assert distributary.__all__ == sorted(_documented_names())


def test_import_has_no_effects():
    process = run_python(
        *("-W", "error", "-c", _IMPORT_WITHOUT_EFFECTS), environ={"KERAS_BACKEND": None}
    )

    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("backend", [None, "numpy"])
def test_keras_finds_jax_unless_another_backend_is_set(backend, tmp_path):
    process = run_python(
        *("-c", "import distributary, keras, os; print(keras.config.backend(), os.environ)"),
        # Keras writes a file there, in which it says that its backend is TensorFlow.
        environ={"KERAS_BACKEND": backend, "KERAS_HOME": str(tmp_path)},
    )

    assert process.stdout.startswith(f"{backend or 'jax'} "), process.stderr
    assert f"'KERAS_BACKEND': '{backend or 'jax'}'" in process.stdout


_WRONG_NAMES = """
import sys, distributary
for expression in sys.argv[1:]:
    try:
        eval(expression)
    except AttributeError:
        sys.excepthook(*sys.exc_info())
"""


def test_a_wrong_name_gets_one_piece_of_advice():
    advice = {
        "distributary.MiroredStrategy": "Did you mean 'MirroredStrategy'?",
        "distributary.MirroredStrategy(['CPU:0']).runn": "Did you mean 'run'?",
        "distributary.get_rank": "is True in the process that saves and prints.",
    }

    process = run_python("-c", _WRONG_NAMES, *advice)

    said = re.findall("^AttributeError: (.*)$", process.stderr, re.MULTILINE)
    for line, text in zip(said, advice.values(), strict=True):
        assert line.endswith(text)  # Python has a "Did you mean" of its own


def _documented_names() -> list[str]:
    """The names of the list items "- `name`: ..." below the heading "Top level"."""
    _, _, section = _API_PAGE.read_text(encoding="utf-8").partition("\n## Top level\n")
    section, _, _ = section.partition("\n## ")
    return re.findall(r"^- `(\w+)`: ", section, flags=re.MULTILINE)
