"""Public names of TensorFlow that programs with `tf.distribute` use, and whether they are here.

`RECORDED` has a line for every name, with its arguments in TensorFlow 2.21. Run as a program where
TensorFlow is installed, this writes the arguments anew; to add a name, add a line first.
"""

import enum
import importlib
import inspect
import re
import sys
from pathlib import Path

from tests.tensorflow.differences import ABSENT, ABSENT_ARGUMENTS, DIFFERENT, WITHOUT_EFFECT

PAGE = Path(__file__).parents[2] / "docs" / "api" / "tensorflow.md"
RECORDED = Path(__file__).with_name("tensorflow-2.21-names.txt")
_LITERAL = re.compile(r"None|True|False|-?[\d.e+-]+|'.*'|\(\)")


def known(tf):
    """The names in `tf` and in its modules, with Keras as one of them."""
    found, modules = ["keras"], ["", "keras.backend", "keras.utils.experimental"]
    for module in modules:
        for name in dir(find(tf, module) if module else tf):
            full = f"{module}.{name}" if module else name
            if type(find(tf, full)) is type(tf.nn):
                modules.append(full)
            elif full != "keras":
                found.append(full)
    layers = [f"keras.layers.{name}" for name in dir(tf.keras.layers) if name[0] != "_"]
    return found + [name for name in layers if _is_of_distributary(find(tf, name))]


def _is_of_distributary(found):
    return (getattr(found, "__module__", None) or "").startswith("distributary.")


def advised():
    """The names with advice on the page; a module stands for all of its names."""
    _, _, table = PAGE.read_text(encoding="utf-8").partition("## Names that are not there")
    return re.findall(r"^\| `tf\.([\w.]+)` \|", table, flags=re.MULTILINE)


def advice(tf, name):
    """What the error for a name says to use in its place."""
    for asked in (name, f"{name}.no_such_name"):
        try:
            find(tf, asked)
        except AttributeError as error:
            return str(error).partition("Use in its place: ")[2].removesuffix(".")
    return None


def recorded():
    """The arguments in TensorFlow by name: None for what is not called, else names to defaults."""
    found = {}
    for line in RECORDED.read_text(encoding="utf-8").splitlines():
        name, _, text = line.partition("|")
        pairs = (part.partition("=") for part in text.removesuffix(")").split("; ") if part)
        found[name] = {key: default for key, _, default in pairs} if "|" in line else None
    return found


# Objects whose attributes are there once they are made.
_MADE = {
    "function()": lambda tf: tf.function(lambda: None),
    "data.Options": lambda tf: tf.data.Options(),
    "TensorSpec": lambda tf: tf.TensorSpec([1]),
    "Module": lambda tf: tf.Module(),
    "TensorArray": lambda tf: tf.TensorArray(tf.float32, 1),
    "train.Checkpoint": lambda tf: tf.train.Checkpoint(),
    "train.CheckpointManager": lambda tf: tf.train.CheckpointManager(
        tf.train.Checkpoint(), "/nowhere", 1
    ),
    "io.gfile.GFile": lambda tf: tf.io.gfile.GFile("/nowhere"),
    "lookup.StaticHashTable": lambda tf: tf.lookup.StaticHashTable(_pairs(tf), 0),
    "lookup.StaticVocabularyTable": lambda tf: tf.lookup.StaticVocabularyTable(_pairs(tf), 1),
    "lookup.TextFileInitializer": lambda tf: tf.lookup.TextFileInitializer(
        "/nowhere", tf.string, 0, tf.int64, 1
    ),
    "lookup.experimental.DenseHashTable": lambda tf: tf.lookup.experimental.DenseHashTable(
        tf.int64, tf.int64, 0, -1, -2
    ),
    "lookup.experimental.MutableHashTable": lambda tf: tf.lookup.experimental.MutableHashTable(
        tf.int64, tf.int64, 0
    ),
}


def _pairs(tf):
    return tf.lookup.KeyValueTensorInitializer(["a"], [0], tf.string, tf.int64)


def find(tf, name):
    """The object with a name such as "data.Dataset.map"; AttributeError if there is none."""
    space, _, last = name.rpartition(".")
    if space in _MADE and (is_ours(tf) or space == "function()"):
        return getattr(_MADE[space](tf), last)
    found = tf
    for part in name.split("."):
        found = getattr(found, part)
    return found


def is_ours(tf):
    """Whether this is not TensorFlow."""
    return tf.__name__ != "tensorflow"


def arguments(found):
    """The arguments of a function or class and their defaults, without `self`; None if none."""
    is_called = callable(found) and not (isinstance(found, type) and issubclass(found, enum.Enum))
    if not is_called or (isinstance(found, type) and issubclass(found, BaseException)):
        return None
    try:
        parameters = inspect.signature(found).parameters.values()
        if isinstance(found, type) and {p.name for p in parameters} == {"args", "kwargs"}:
            parameters = inspect.signature(found.__init__).parameters.values()  # of a metaclass
    except (TypeError, ValueError):
        return None
    return {
        {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "") + p.name: (
            "" if p.default is p.empty else repr(p.default) if _is_literal(p.default) else "..."
        )
        for p in parameters
        if p.name not in ("self", "cls")
    }


def _is_literal(default):
    return _LITERAL.fullmatch(repr(default)) is not None


def states(tf):
    """Of every name and argument, "equal", "different: why" or "absent: what to use instead"."""
    found = {}
    for name, wanted in recorded().items():
        try:
            own = arguments(find(tf, name))
        except AttributeError:
            found[name] = f"absent: {ABSENT.get(name) or advice(tf, name)}"
            found |= {f"{name}({argument})": found[name] for argument in wanted or ()}
            continue
        found[name] = f"different: {DIFFERENT[name]}" if name in DIFFERENT else "equal"
        for argument in wanted or ():
            found[f"{name}({argument})"] = _state_of(name, argument, wanted, own or {})
    return found


def _state_of(name, argument, wanted, own):
    full, plain = f"{name}({argument})", argument.lstrip("*")
    if full in ABSENT_ARGUMENTS or name in ABSENT_ARGUMENTS:
        return f"absent: {ABSENT_ARGUMENTS.get(full) or ABSENT_ARGUMENTS[name]}"
    if full in DIFFERENT:
        return f"different: {DIFFERENT[full]}"
    is_open = any(key.startswith("**") for key in own)
    if argument not in own and not argument.startswith("*") and not is_open:
        return "unlike: there is no such argument"
    if plain in WITHOUT_EFFECT:
        return f"different: {WITHOUT_EFFECT[plain]}"
    default = own.get(argument, wanted[argument])
    if argument == "name":
        default = wanted[argument]
    if default != wanted[argument] and "..." not in (default, wanted[argument]):
        return f"unlike: the default is {default}, in TensorFlow {wanted[argument]}"
    order = [key for key in own if key in wanted]
    if argument in own and order.index(argument) != [k for k in wanted if k in own].index(argument):
        return f"unlike: it is argument {order.index(argument)}"
    return "equal"


if __name__ == "__main__":
    tensorflow = importlib.import_module("tensorflow")
    lines = []
    for recorded_name in recorded():
        signature = arguments(find(tensorflow, recorded_name))
        if recorded_name == "data.Options":
            signature = {}
        shown = (
            ""
            if signature is None
            else "|"
            + "; ".join(
                f"{key}={default}" if default else key for key, default in signature.items()
            )
        )
        lines.append(recorded_name + shown)
    RECORDED.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.exit()
