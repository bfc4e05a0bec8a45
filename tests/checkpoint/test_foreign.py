"""What is not a checkpoint of ours stays as it is, wherever it is in the way."""

import logging
import os
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest

from distributary.checkpoint import Checkpoint, CheckpointManager, latest_checkpoint
from distributary.errors import CheckpointError


def _tree(directory):
    """Everything below a directory but locks."""
    found = {}
    for path in sorted(directory.rglob("*")):
        if path.is_symlink():
            found[str(path)] = os.readlink(path)
        elif not path.name.endswith(".distributary-lock"):
            found[str(path)] = None if path.is_dir() else path.read_bytes()
    return found


def _checkpoint():
    return Checkpoint(a=np.arange(5.0), step=1)


def _file(path):
    path.write_text("notes")


def _folder(path):
    path.mkdir()
    (path / "notes.txt").write_text("notes")


def _of_another_tool(path):
    path.mkdir()
    (path / "checkpoint.json").write_text('{"format": 2, "step": 7}')
    (path / "arrays.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")


def _of_tensorflow(path):
    for end in (".index", ".data-00000-of-00001"):
        path.with_name(path.name + end).write_bytes(b"\0")


def _saved_model(path):
    path.mkdir()
    (path / "saved_model.pb").write_bytes(b"\0")


@pytest.mark.parametrize(
    ("name", "make", "text"),
    [
        ("ckpt-1", _of_tensorflow, r"/ckpt-1\.index is one of TensorFlow\. Only TensorFlow reads"),
        (
            "folder",
            lambda path: (path.mkdir(), _of_tensorflow(path / "ckpt-1")),
            r"/folder/ckpt-1\.index is one of TensorFlow\.",
        ),
        (
            "model",
            _saved_model,
            r"/model: it is a SavedModel of TensorFlow\. Only TensorFlow reads",
        ),
        ("a.weights.h5", Path.touch, r"it is a file of Keras\. Load it with model\.load_"),
        ("a.keras", Path.touch, r"it is a file of Keras\. .* or keras\.models\.load_model"),
        ("ckpt-1", lambda path: None, r"There is no checkpoint at .*ckpt-1: it has no file checkp"),
    ],
)
def test_checkpoints_of_other_programs_are_recognised(name, make, text, tmp_path):
    make(tmp_path / name)

    with pytest.raises(CheckpointError, match=text):
        _checkpoint().restore(tmp_path / name)


def test_checkpoints_given_to_keras_are_recognised(strategy, tmp_path):
    _of_tensorflow(tmp_path / "weights")
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    path = Checkpoint(model=model).save(tmp_path / "ckpt")

    with pytest.raises(CheckpointError, match=r"a checkpoint of distributary.*\.restore\(path\)"):
        model.load_weights(path)
    with pytest.raises(CheckpointError, match=r"weights\.index is one of TensorFlow\."):
        model.load_weights(tmp_path / "weights")


def test_a_folder_of_tensorflow_is_recognised_once(tmp_path, caplog):
    _of_tensorflow(tmp_path / "ckpt-3")
    (tmp_path / "notes.index").touch()

    found = [latest_checkpoint(tmp_path) for _ in range(2)]

    assert found == [None, None]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"{tmp_path} has the checkpoint ckpt-3 of TensorFlow. Only TensorFlow")
    assert _checkpoint().save(tmp_path / "ckpt") == str(tmp_path / "ckpt-1")
    assert latest_checkpoint(tmp_path) == str(tmp_path / "ckpt-1")


def _ours(path):
    return Path(_checkpoint().write(path))


FOREIGN = {
    "a file": (_file, "is a file"),
    "a folder": (_folder, "is a folder of something else than a checkpoint"),
    "another tool": (_of_another_tool, "is a folder of something else than a checkpoint"),
    "a link to ours": (
        lambda path: path.symlink_to(_ours(path.with_name("target"))),
        "is a symbolic link",
    ),
    "ours with a file": (
        lambda path: _file(_ours(path) / "notes.txt"),
        r"has more in it than the checkpoint \(notes.txt\)",
    ),
    "ours with a link": (
        lambda path: (_ours(path) / "ps-0.safetensors").symlink_to(path / "checkpoint.json"),
        r"has more in it than the checkpoint \(ps-0.safetensors\)",
    ),
    "ours with a replaced one of others": (
        lambda path: _folder(_ours(path).with_name(f"{path.name}.replaced")),
        "replaced is a folder of something else",
    ),
}


@pytest.mark.parametrize(("make", "problem"), FOREIGN.values(), ids=FOREIGN)
def test_what_is_in_the_way_is_named_and_stays(make, problem, tmp_path):
    for name in ("results", "run-1"):
        (tmp_path / name).mkdir()
        make(tmp_path / name / name)
    (path, numbered) = (tmp_path / "results" / "results", tmp_path / "run-1" / "run-1")
    manager = CheckpointManager(_checkpoint(), numbered.parent, 1, checkpoint_name="run")
    prefix = numbered.with_name("run")
    before = _tree(tmp_path)

    for save, place in (
        (lambda: _checkpoint().write(path), path),
        (lambda: _checkpoint().save(prefix), numbered),
        (lambda: manager.save(1), numbered),
    ):
        with pytest.raises(
            CheckpointError,
            match=rf"^The checkpoint {place} was not written: {place}.*{problem}.*"
            "Move it away, or choose another path",
        ):
            save()

    assert _tree(tmp_path) == before


def test_a_file_where_a_folder_is_needed_is_named(tmp_path):
    (tmp_path / "file").write_text("notes")
    (tmp_path / "link").symlink_to("nowhere")
    before = _tree(tmp_path)

    for place in ("file", "link"):
        for path in (tmp_path / place / "ckpt", tmp_path / place / "a" / "b"):
            with pytest.raises(
                CheckpointError,
                match=rf"^The checkpoint {path} was not written: {tmp_path / place} is not a folder"
                r"\. Move it away, or choose another path\.",
            ):
                _checkpoint().write(path)

    assert _tree(tmp_path) == before
    # An empty folder is taken.
    (tmp_path / "results").mkdir()
    _checkpoint().restore(_checkpoint().write(tmp_path / "results"))


def test_what_others_have_left_or_changed_stays(tmp_path, caplog):
    """Names like those of temporary folders of ours, and copies and changes that users make."""
    manager = CheckpointManager(
        _checkpoint(), tmp_path, 4, checkpoint_name="run", asynchronous=False
    )
    for number in (4, 5, 6, 7):
        manager.save(number)
    shutil.rmtree(tmp_path / "run-4")
    _file(tmp_path / "run-5" / "notes.txt")
    (tmp_path / "run-6").rename(tmp_path / "elsewhere")
    (tmp_path / "run-6").symlink_to("elsewhere")
    for end in ("4", "7.old", "8.replaced", "7.tmp-0123abcd", "9", "0.tmp-00000000"):
        _folder(tmp_path / f"run-{end}")
    _file(tmp_path / "run-3.tmp-0123abcd")
    (tmp_path / "run-4.tmp-0123abcd").symlink_to(tmp_path / "run-7")
    for end in ("7.backup", "6.old", "5.tmp-0123abcd"):
        shutil.copytree(tmp_path / "run-7", tmp_path / f"run-{end}")
    _file(tmp_path / "run-5.tmp-0123abcd" / "notes.txt")
    before = {name: data for name, data in _tree(tmp_path).items() if "run-7/" not in name}

    with caplog.at_level(logging.WARNING):
        for number in (7, 10, 11, 12):
            manager.save(number)

    names = [os.path.basename(path) for path in manager.checkpoints]
    assert names == ["run-7", "run-10", "run-11", "run-12"]
    assert before.items() <= _tree(tmp_path).items()
    for name, problem in (("run-5", "has more in it"), ("run-6", "is a symbolic link")):
        assert f"old checkpoint is not removed: {tmp_path}/{name} {problem}" in caplog.text


def test_remains_of_a_killed_writer_are_removed(tmp_path):
    """Those of this series, as far as this writer has come."""
    path = _checkpoint().save(tmp_path / "ckpt")
    for number, keep in (
        (5, {"checkpoint.json"}),
        (6, {"checkpoint.json", "arrays.safetensors", "token"}),
        (7, set()),
    ):
        temporary = tmp_path / f"ckpt-{number}.tmp-01234567"
        temporary.mkdir()
        for name in keep:
            (temporary / name).write_bytes(b"\0" * 100)
        if keep:
            (temporary / "checkpoint.json").write_bytes(b'{\n "written_by": "distributary"')
    (tmp_path / "ckpt-9.tmp-01234567").mkdir()
    (tmp_path / "ckpt-9.tmp-01234567" / "checkpoint.json").touch()
    (tmp_path / "other-7.tmp-0123abcd").mkdir()
    # Complete, but it has not got its name.
    shutil.copytree(path, tmp_path / "ckpt-8.tmp-01234567")
    shutil.copytree(path, tmp_path / "other" / "ckpt-8.tmp-01234567")
    assert latest_checkpoint(tmp_path / "other") is None

    _checkpoint().save(tmp_path / "ckpt")

    names = sorted(p.name for p in tmp_path.glob("[!.]*"))
    assert names == [os.path.basename(path), "other", "other-7.tmp-0123abcd"]
