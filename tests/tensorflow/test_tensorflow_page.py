"""docs/api/tensorflow.md says what is there; run as a program, this writes it.

To add a name to the table of those that are not there, add a line first.
"""

import collections

import distributary.compat.tensorflow as tf
from tests.tensorflow.names import (
    PAGE,
    WITHOUT_EFFECT,
    advice,
    advised,
    find,
    known,
    recorded,
    remarks,
    signature,
    states,
)

_BEGIN = """# TensorFlow's names

`distributary.compat.tensorflow` has {num_names} names of TensorFlow.
[Coming from tf.distribute](../migrating.md) says how to use them, and what differs everywhere. The
lists below are made from the package, and tests compare them with TensorFlow 2.21.

## Names and arguments of TensorFlow 2.21

The public names of `tf.distribute`, `tf.data`, `tf.Variable`, `tf.function` and
`tf.GradientTape`, and those around them that programs use, with all of their arguments. Left out
are those of TensorFlow 1's graphs and sessions, of protocol buffers and type specs, and
experiments with data services.

| | names | names and arguments |
| --- | --- | --- |
{counts}

A name without a remark has the same meaning, and so have its arguments.

| TensorFlow | here |
| --- | --- |
{rows}

## All names

| module | names |
| --- | --- |
{modules}

These need a word:

| TensorFlow | here |
| --- | --- |
{notes}

## Names that are not there

The error that a name raises says the same. A module stands for all of its names. Functions of
arrays that are not in the table have the same name in `jax.numpy` or `keras.ops`, mostly.

| TensorFlow | in its place |
| --- | --- |
{others}
"""


def _page():
    names = sorted(known(tf), key=lambda n: (_module(n), n.lower()))
    own, notes = collections.defaultdict(list), collections.defaultdict(list)
    for name in names:
        own[_module(name)].append(f"`{name.rpartition('.')[2]}`")
        note = _note(find(tf, name))
        if note and name not in recorded():
            notes[note].append(f"`tf.{name}`")
    found = states(tf)
    return _BEGIN.format(
        num_names=len(names),
        counts="\n".join(_counts(found)),
        rows="\n".join(_row(name, found) for name in recorded()),
        modules="\n".join(
            f"| `{'.'.join(filter(None, ('tf', space)))}` | {', '.join(of_space)} |"
            for space, of_space in own.items()
        ),
        notes="\n".join(f"| {', '.join(of_note)} | {note} |" for note, of_note in notes.items()),
        others="\n".join(f"| `tf.{name}` | {advice(tf, name)} |" for name in advised()),
    )


def _counts(found):
    names = [found[name] for name in recorded()]
    for state in ("equal", "different", "absent"):
        shares = (
            (sum(one.startswith(state) for one in of), len(of)) for of in (names, found.values())
        )
        cells = [f"{count} ({100 * count / total:.1f} %)" for count, total in shares]
        yield f"| {state} | {' | '.join(cells)} |"


def _row(name, found):
    own = [] if found[name] == "equal" else [found[name]]
    if not found[name].startswith("absent"):
        by_state = collections.defaultdict(list)
        for argument in recorded()[name] or ():
            state = found[f"{name}({argument})"]
            if state != "equal":
                by_state[state].append(f"`{argument}`")
        own += [f"{', '.join(those)} {state}" for state, those in by_state.items()]
    return f"| {signature(name)} | {'; '.join(own) or 'equal'} |"


def _module(name):
    return name.rpartition(".")[0]


def _note(found):
    """What a function of the package says about itself; "" if it is TensorFlow's."""
    if not (getattr(found, "__module__", None) or "").startswith("distributary.tensorflow._"):
        return ""
    summary = (found.__doc__ or "").partition("\n")[0].rstrip(".")
    if summary.startswith("`tf."):
        _, _, summary = summary.partition("`: ")
    return summary


def test_every_name_and_argument_of_tensorflow_is_there_or_says_what_to_use():
    found = states(tf)

    assert {name: s for name, s in found.items() if s.startswith("unlike")} == {}
    assert {name: s for name, s in found.items() if s.endswith(": ")} == {}
    absent = [name for name in recorded() if found[name].startswith("absent")]
    assert len(absent) <= 0.05 * len(recorded())
    assert {remark for remark in remarks().values() if not remark.partition(": ")[2]} == set()
    arguments = {argument for wanted in recorded().values() for argument in wanted or ()}
    assert set(WITHOUT_EFFECT) <= arguments


def test_the_page_is_made_from_the_package():
    assert PAGE.read_text(encoding="utf-8") == _page(), f"write it: python {__file__}"


if __name__ == "__main__":
    PAGE.write_text(_page(), encoding="utf-8")
