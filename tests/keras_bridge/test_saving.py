"""Files of models of a strategy: complete, and enough to go on as if nothing had happened."""

import contextlib
import errno
import json
import os
import random
import socket
import subprocess

import h5py
import keras
import numpy as np
import pytest

import distributary as dist
from distributary.data import Dataset
from tests.forks import Fork
from tests.keras_bridge import small

X = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


def make_model(strategy):
    with strategy.scope():
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Dense(8), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile("adam", "mse")
    return model


class Fails(keras.callbacks.Callback):
    """Raises when an epoch begins, as a killed process would end there."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise KeyboardInterrupt


def state_of(model):
    return [np.asarray(v) for v in [*model.variables, *model.optimizer.variables]]


@pytest.mark.parametrize("data", ["arrays", "endless dataset"])
def test_a_run_that_goes_on_from_a_backup_ends_as_one_that_was_never_interrupted(
    strategy, data, tmp_path
):
    def fit(model, *callbacks):
        given = {"x": X, "y": Y, "batch_size": 8}
        if data != "arrays":
            dataset = Dataset.from_tensor_slices((X, Y)).shuffle(40, seed=1).batch(8)
            given = {"x": dataset.repeat(), "steps_per_epoch": 3}
        model.fit(**given, epochs=4, verbose=0, callbacks=list(callbacks))

    undisturbed = make_model(strategy)
    fit(undisturbed)

    with pytest.raises(KeyboardInterrupt):
        fit(make_model(strategy), keras.callbacks.BackupAndRestore(tmp_path), Fails(2))
    resumed = make_model(strategy)
    np.random.seed(99)  # another process does not know where the first one was
    fit(resumed, keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False))

    small.assert_equal_weights(state_of(resumed), state_of(undisturbed), rtol=0)
    assert json.loads((tmp_path / "training_metadata.json").read_text())["epoch"] == 4


def test_a_run_goes_on_from_a_backup_on_other_numbers_of_replicas(strategy_of, tmp_path):
    dataset = Dataset.from_tensor_slices((X, Y)).shuffle(40, seed=1).batch(8)
    fit = lambda model, epochs, *callbacks: model.fit(
        dataset, epochs=epochs, verbose=0, callbacks=list(callbacks)
    )
    backup = lambda: keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
    parts = dist.MirroredStrategy(["CPU:0", "CPU:1"], experimental_shard_parameters=True)
    undisturbed = make_model(strategy_of(2))
    fit(undisturbed, 4)

    for epochs, used in enumerate((strategy_of(2), strategy_of(3), parts, strategy_of(1)), 1):
        resumed = make_model(used)
        fit(resumed, epochs, backup())

    for ours, expected in zip(state_of(resumed), state_of(undisturbed), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_a_run_that_goes_on_has_the_state_of_its_callbacks(strategy, tmp_path):
    def fit(model, folder, *others):
        made = [
            keras.callbacks.ReduceLROnPlateau("loss", patience=2, cooldown=1, min_delta=10.0),
            keras.callbacks.EarlyStopping(
                "loss", patience=6, min_delta=10.0, restore_best_weights=True
            ),
            keras.callbacks.ModelCheckpoint(
                folder / "best.weights.h5", "loss", save_best_only=True, save_weights_only=True
            ),
        ]
        backup = keras.callbacks.BackupAndRestore(folder / "backup")
        callbacks = [made[0], backup, *made[1:], *others]  # some before it, some after it
        model.fit(X, Y, batch_size=8, epochs=9, verbose=0, callbacks=callbacks)
        return made

    for name in ("undisturbed", "disturbed"):
        (tmp_path / name).mkdir()
    undisturbed = make_model(strategy)
    expected = fit(undisturbed, tmp_path / "undisturbed")
    resumed = make_model(strategy)
    for epoch in (1, 4, 5):
        with pytest.raises(KeyboardInterrupt):
            fit(make_model(strategy), tmp_path / "disturbed", Fails(epoch))
    callbacks = fit(resumed, tmp_path / "disturbed", Fails(99))

    small.assert_equal_weights(state_of(resumed), state_of(undisturbed), rtol=0)
    for name in ("best", "cooldown_counter", "wait"):
        assert getattr(callbacks[0], name) == getattr(expected[0], name)
    assert (callbacks[1].stopped_epoch, callbacks[1].best_epoch) == (6, 0)
    small.assert_equal_weights(callbacks[1].best_weights, expected[1].best_weights, rtol=0)
    assert callbacks[2].best == expected[2].best


def test_a_run_with_other_callbacks_is_told_that_they_begin_anew(strategy, tmp_path, caplog):
    fit = lambda *others: _fit(
        make_model(strategy), keras.callbacks.BackupAndRestore(tmp_path), *others, epochs=4
    )

    with pytest.raises(KeyboardInterrupt):
        fit(keras.callbacks.EarlyStopping("loss"), Fails(2))
    assert "begin anew" not in caplog.text
    fit(keras.callbacks.ReduceLROnPlateau("loss"))

    assert "was made with EarlyStopping, and this call has ReduceLROnPlateau. So" in caplog.text


def test_keras_reads_backups_and_ours_reads_those_of_keras(strategy, tmp_path):
    backup = lambda: keras.callbacks.BackupAndRestore(tmp_path / "ours")
    epochs = []
    seen = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: epochs.append(epoch))

    with pytest.raises(KeyboardInterrupt):
        _fit(make_model(strategy), backup(), Fails(1), epochs=4)
    with pytest.raises(KeyboardInterrupt):
        _fit(make_model(dist.get_strategy()), backup(), seen, Fails(2), epochs=4)
    _fit(make_model(strategy), backup(), seen, epochs=4)

    assert epochs == [1, 2, 2, 3]


# Keras says that .h5 is a legacy format.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["model.keras", "model.h5", "model.weights.h5"])
def test_what_was_saved_before_stays_when_saving_fails(strategy, name, tmp_path, monkeypatch):
    model = make_model(strategy)
    path = tmp_path / name
    save = model.save_weights if "weights" in name else model.save
    save(path)
    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", _full_disk)

    with pytest.raises(OSError, match="No space left") as caught:
        save(path)

    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert str(caught.value) == (
        f"{path} was not saved: the disk is full (No space left on device). What was there before"
        " is kept."
    )
    assert caught.value.errno == errno.ENOSPC


def _full_disk(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_that_is_being_written_is_not_there_yet(strategy, tmp_path):
    model = make_model(strategy)
    path = tmp_path / "model.weights.h5"
    names = []

    class Watching(keras.layers.Layer):
        def save_own_variables(self, store):
            names.extend(p.name for p in tmp_path.iterdir())

    with dist.get_strategy().scope():
        model.add(Watching())
    model.save_weights(path)

    start = f".model.distributary-{socket.gethostname()}-"
    assert sorted(name.removeprefix(start)[8:] for name in names) == [
        ".weights.h5",
        ".weights.h5.lock",
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["model.weights.h5"]
    with h5py.File(path) as file:
        assert "layers" in file


def test_links_lead_where_they_did(strategy, tmp_path):
    model = make_model(strategy)
    model.optimizer.build(model.trainable_variables)
    (tmp_path / "far").mkdir()
    (tmp_path / "model.keras").symlink_to("far/saved.keras")

    model.save(tmp_path / "model.keras")

    assert (tmp_path / "model.keras").is_symlink()
    assert os.listdir(tmp_path / "far") == ["saved.keras"]
    loaded = keras.models.load_model(tmp_path / "model.keras")
    small.assert_equal_weights(loaded.get_weights(), model.get_weights(), rtol=0)


def _fit(model, callback, *callbacks, epochs=2):
    model.fit(X, Y, epochs=epochs, verbose=0, callbacks=[callback, *callbacks])


def test_only_the_backup_is_removed_at_the_end(strategy, tmp_path):
    model = make_model(strategy)
    (tmp_path / "backup" / "more").mkdir(parents=True)
    (tmp_path / "backup" / "notes.txt").write_text("notes")

    for folder in ("backup", "other"):
        _fit(model, keras.callbacks.BackupAndRestore(tmp_path / folder, double_checkpoint=True))

    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == ["backup", "backup/more", "backup/notes.txt"]


@pytest.mark.parametrize("name", ["latest.weights.h5", "training_metadata.json"])
def test_files_that_are_not_from_a_backup_stay(strategy, name, tmp_path):
    model = make_model(strategy)
    if name == "latest.weights.h5":
        model.save_weights(tmp_path / name)
    else:
        (tmp_path / name).write_text('{"name": "digits"}')
    (tmp_path / "latest.weights.h5.bkp").write_text("notes")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    with pytest.raises(ValueError, match=rf"{tmp_path / name} is there already, and is not from"):
        _fit(model, keras.callbacks.BackupAndRestore(tmp_path))

    after = {path.name: path.read_bytes() for path in tmp_path.glob("[!.]*")}
    assert after == before


def test_a_damaged_backup_is_refused(strategy, tmp_path):
    backup = keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
    _fit(make_model(strategy), backup)
    path, choice = tmp_path / "latest.weights.h5", random.Random(3)
    model, whole = make_model(strategy), path.read_bytes()
    model.optimizer.build(model.trainable_variables)
    before = state_of(model)
    with h5py.File(path) as file:  # by others, too
        assert "layers" in file

    for _ in range(5):
        data = bytearray(whole)
        bit = choice.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        with pytest.raises(OSError, match=f"{path} is damaged: its checksum is not right"):
            _fit(model, backup)
        small.assert_equal_weights(state_of(model), before, rtol=0)

    path.write_bytes(whole)
    (tmp_path / "training_metadata.json").write_text("{")  # for Keras without a strategy only
    _fit(model, keras.callbacks.BackupAndRestore(tmp_path), epochs=2)
    assert int(model.optimizer.iterations) == 4
    assert not tmp_path.exists()


_OTHER_JOB = """
import os, sys
import keras
import numpy as np
import distributary as dist

class Waits(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            print("ready", flush=True)
            sys.stdin.readline()

with dist.MirroredStrategy(["CPU:0"]).scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((8, 4), np.float32)
backup = keras.callbacks.BackupAndRestore(sys.argv[1], double_checkpoint=True)
model.fit(x, x[:, :1], epochs=2, verbose=0, callbacks=[backup, Waits()])
"""


def test_the_backup_of_another_job_is_its_own(strategy, tmp_path):
    folder, log = tmp_path / "backup", tmp_path / "log"
    program = tmp_path / "job.py"
    program.write_text(_OTHER_JOB)
    model = make_model(strategy)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(log.open("w"))
        job = Fork([program, folder], os.environ, **pipes, stderr=errors)
        stack.callback(job.stdout.close)
        stack.callback(job.kill)
        assert job.stdout.readline() == "ready\n", log.read_text()
        for name in ("latest.weights.h5", "training_metadata.json"):
            (folder / f"{name}.bkp").write_bytes((folder / name).read_bytes())
        before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

        with pytest.raises(ValueError, match=rf"^BackupAndRestore: process {job.pid} on host "):
            _fit(model, keras.callbacks.BackupAndRestore(folder))

        assert {
            path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()
        } == before
        job.stdin.close()  # it goes on
        assert job.wait(100) == 0, log.read_text()
    assert not folder.exists()
    _fit(model, keras.callbacks.BackupAndRestore(folder))


_DISK_FULL = """
import json, os, sys
import keras
import numpy as np
import distributary as dist

directory = sys.argv[1]
with dist.MirroredStrategy(["CPU:0"]).scope():
    model = keras.Sequential([keras.Input((300,)), keras.layers.Dense(800)])
    model.compile("sgd", "mse")
x = np.ones((8, 300), np.float32)
y = np.ones((8, 800), np.float32)
model.fit(x, y, verbose=0)
messages = []
for save in (
    lambda: model.save(f"{directory}/model.keras"),
    lambda: model.save_weights(f"{directory}/model.weights.h5"),
    lambda: model.fit(x, y, verbose=0, callbacks=[keras.callbacks.BackupAndRestore(directory)]),
):
    try:
        save()
    except OSError as error:
        messages.append(str(error))
free = os.statvfs(directory)
print(json.dumps([messages, sorted(os.listdir(directory)), free.f_bfree]))
"""


def test_on_a_full_disk_there_is_a_sentence_and_the_program_goes_on(small_disk, tmp_path):
    program, printed, errors = (tmp_path / name for name in ("program.py", "printed", "errors"))
    program.write_text(_DISK_FULL)
    free = os.statvfs(small_disk).f_bfree

    with printed.open("w") as stdout, errors.open("w") as stderr:
        code = Fork([program, small_disk], os.environ, stdout=stdout, stderr=stderr).wait(100)

    assert code == 0, errors.read_text()  # HDF5 likes to crash
    messages, left, free_then = json.loads(printed.read_text())
    names = ("model.keras", "model.weights.h5", "latest.weights.h5")
    assert messages == [
        f"{small_disk / name} was not saved: the disk is full (No space left on device). What was"
        " there before is kept."
        for name in names
    ]
    assert [name for name in left if name[0] != "."] == []
    assert free - free_then <= 1  # the lock of the backup
