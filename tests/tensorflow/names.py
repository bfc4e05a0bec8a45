"""Public names of TensorFlow that programs with `tf.distribute` use, and whether they are here.

`RECORDED` has a line for every name, with its arguments in TensorFlow 2.21. Run as a program where
TensorFlow is installed, this writes the arguments anew; to add a name, add a line first. What does
not mean quite the same stands on `PAGE` alone: write it there, behind the name.
"""

import enum
import functools
import importlib
import inspect
import re
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "api" / "tensorflow.md"
RECORDED = Path(__file__).with_name("tensorflow-2.21-names.txt")
_LITERAL = re.compile(r"None|True|False|-?[\d.e+-]+|'.*'|\(\)")
_ARGUMENTS = r"(?:`[*\w]+`, )*`[*\w]+`"

#: Arguments without an effect wherever they are, by name, and why.
WITHOUT_EFFECT = {
    "parallel_iterations": "no effect: XLA schedules the loop",
    "swap_memory": "no effect: XLA decides what stays in memory",
    "back_prop": "no effect: use tf.stop_gradient",
    "infer_shape": "no effect: shapes are known",
    "use_locking": "no effect: assignments do not overlap",
    "read_value": "no effect",
    "deterministic": "no effect: elements always come in the same order",
    "experimental_use_pfor": "no effect: XLA compiles the loop",
    "alg": "no effect: numbers are those of JAX's generator",
    "bad_indices_policy": "no effect: places out of range are left out",
    "experimental_is_anonymous": "no effect",
    "num_parallel_reads": "no effect: files are read one after the other; use interleave",
    "caching_device": "no effect",
    "summarize": "no effect: messages show short arrays",
    "experimental_trackable": "no effect",
    "experimental_mesh": "no effect",
    "max_queue": "no effect: tensorboardX chooses",
    "flush_millis": "no effect: tensorboardX chooses",
    "experimental_priority": "no effect",
    "experimental_device_ordinal": "no effect",
    "latest_filename": "no effect",
    "sorted": "no effect: always sorted",
}


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


@functools.cache
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


def signature(name):
    """A name with its arguments in TensorFlow, as the page shows them."""
    wanted = recorded()[name]
    call = "" if wanted is None else f"({', '.join(wanted)})"
    return f"`tf.{name.replace('function()', 'function(...)')}{call}`"


@functools.cache
def remarks():
    """What the page says of names, and of arguments as `name(argument)`: "different: why"."""
    page = PAGE.read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (`tf\.[^`]+`) \| (.+) \|$", page, flags=re.MULTILINE))
    found = {}
    for name in recorded():
        text = rows.get(signature(name), "equal")
        for part in re.split(rf"; (?={_ARGUMENTS} (?:different|absent): )", text):
            of_arguments = re.fullmatch(rf"({_ARGUMENTS}) (.+)", part)
            if of_arguments:
                those = re.findall(r"`(.+?)`", of_arguments[1])
                found |= {f"{name}({argument})": of_arguments[2] for argument in those}
            elif part != "equal":
                found[name] = part
    return found


def states(tf):
    """Of every name and argument, "equal", "different: why" or "absent: what to use instead"."""
    found = {}
    for name, wanted in recorded().items():
        remark = remarks().get(name, "equal")
        try:
            own = arguments(find(tf, name))
        except AttributeError:
            found[name] = f"absent: {advice(tf, name) or remark.partition('absent: ')[2]}"
            found |= {f"{name}({argument})": found[name] for argument in wanted or ()}
            continue
        found[name] = remark
        for argument in wanted or ():
            found[f"{name}({argument})"] = _state_of(name, argument, wanted, own or {})
    return found


def _state_of(name, argument, wanted, own):
    if remark := remarks().get(f"{name}({argument})"):
        return remark
    plain = argument.lstrip("*")
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
        own = arguments(find(tensorflow, recorded_name))
        if recorded_name == "data.Options":
            own = {}
        pairs = [f"{key}={default}" if default else key for key, default in (own or {}).items()]
        shown = "" if own is None else "|" + "; ".join(pairs)
        lines.append(recorded_name + shown)
    RECORDED.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.exit()
