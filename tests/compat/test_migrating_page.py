"""The tables of docs/migrating.md are those of the package; run as a program, this writes them."""

from pathlib import Path

import numpy as np

from distributary.compat.tensorflow._equivalents import EQUIVALENTS
from distributary.compat.tensorflow._operations import resolve
from distributary.compat.tensorflow._tables import CONSTANTS, OPERATIONS, TARGETS

_PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"
_HEADING = "## All names of the compat module\n"
_OWN = "distributary.compat.tensorflow._"


_ABOUT_OTHERS = """
## Names that are not there

The error that a name raises says the same. A module stands for all of its names. Functions of
arrays that are not in the table have the same name in `jax.numpy` or `keras.ops`, mostly.
"""


def _tables():
    targets = TARGETS | {name: operation.target for name, operation in OPERATIONS.items()}
    named = {name: (target, _shown(target)) for name, target in targets.items()}
    for name, value in CONSTANTS.items():
        shown = f"the dtype {value}" if isinstance(value, np.dtype) else repr(value)
        named[name] = (shown, shown)
    same: dict[str, list[str]] = {}
    for name in sorted(named, key=lambda name: (name.rpartition(".")[0], name.lower())):
        same.setdefault(named[name][0], []).append(name)
    there = [f"| {_code(names)} | {named[names[0]][1]} |" for names in same.values()]
    others = [f"| `tf.{name}` | {advice} |" for name, advice in EQUIVALENTS.items()]
    rows = [_HEADING, "| TensorFlow | what it is |", "| --- | --- |", *there, _ABOUT_OTHERS]
    return "\n".join([*rows, "| TensorFlow | in its place |", "| --- | --- |", *others, ""])


def _code(names):
    return ", ".join(f"`tf.{name}`" for name in names)


def _shown(target):
    """A public object's name; what a function of the package itself says about itself."""
    if not target.startswith(_OWN):
        return f"`{target}`"
    summary = resolve(target).__doc__.partition("\n")[0].rstrip(".")
    _, _, special = summary.partition("`: ") if summary.startswith("`tf.") else ("", "", summary)
    return special or "the same, on arrays of JAX"


def test_the_page_has_the_tables_of_the_package():
    _, _, tables = _PAGE.read_text(encoding="utf-8").partition(_HEADING)

    assert _HEADING + tables == _tables(), f"write them: python {__file__}"


if __name__ == "__main__":
    text, _, _ = _PAGE.read_text(encoding="utf-8").partition(_HEADING)
    _PAGE.write_text(text + _tables(), encoding="utf-8")
