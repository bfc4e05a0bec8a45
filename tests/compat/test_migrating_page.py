"""The tables of docs/migrating.md are those of the package; run as a program, this writes them."""

from pathlib import Path

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
    same: dict[str, list[str]] = {}
    notes: dict[str, list[str]] = {}
    for name in sorted({*targets, *CONSTANTS}, key=lambda name: (_module(name), name.lower())):
        note = _note(targets.get(name, ""))
        if note:
            notes.setdefault(note, []).append(f"`tf.{name}`")
        else:
            same.setdefault(_module(name), []).append(f"`{name.rpartition('.')[2]}`")
    modules = [f"| `tf.{module}`".replace(".`", "`") + f" | {', '.join(names)} |"
               for module, names in same.items()]  # fmt: skip
    special = [f"| {', '.join(names)} | {note} |" for note, names in notes.items()]
    others = [f"| `tf.{name}` | {advice} |" for name, advice in EQUIVALENTS.items()]
    rows = [_HEADING, "| module | names |", "| --- | --- |", *modules]
    rows += ["", "These differ, or need a word:", "", "| TensorFlow | here |", "| --- | --- |"]
    rows += [*special, _ABOUT_OTHERS, "| TensorFlow | in its place |", "| --- | --- |", *others]
    return "\n".join([*rows, ""])


def _module(name):
    return name.rpartition(".")[0]


def _note(target):
    """What a function of the package says about itself; "" if it is TensorFlow's."""
    if not target.startswith(_OWN):
        return ""
    summary = (resolve(target).__doc__ or "").partition("\n")[0].rstrip(".")
    if summary.startswith("`tf."):
        _, _, summary = summary.partition("`: ")
    return summary


def test_the_page_has_the_tables_of_the_package():
    _, _, tables = _PAGE.read_text(encoding="utf-8").partition(_HEADING)

    assert _HEADING + tables == _tables(), f"write them: python {__file__}"


if __name__ == "__main__":
    text, _, _ = _PAGE.read_text(encoding="utf-8").partition(_HEADING)
    _PAGE.write_text(text + _tables(), encoding="utf-8")
