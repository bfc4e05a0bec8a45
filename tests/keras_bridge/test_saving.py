"""Files of models of a strategy: complete, and enough to go on as if nothing had happened."""

import errno
import json
import os

import h5py
import keras
import numpy as np
import pytest

import distributary as dist
from distributary.data import Dataset

X = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


def make_model(strategy):
    with strategy.scope():
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(8),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(1),
            ]
        )
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


@pytest.mark.parametrize(
    ("data", "steps"),
    [("arrays", None), ("dataset", None), ("endless", 3)],
)
def test_a_run_that_goes_on_from_a_backup_ends_as_one_that_was_never_interrupted(
    data, steps, tmp_path
):
    strategy = dist.MirroredStrategy(["CPU:0", "CPU:1"])

    def fit(model, *callbacks):
        dataset = Dataset.from_tensor_slices((X, Y)).shuffle(40, seed=1).batch(8)
        given = {
            "arrays": {"x": X, "y": Y, "batch_size": 8},
            "dataset": {"x": dataset},
            "endless": {"x": dataset.repeat()},
        }[data]
        model.fit(**given, epochs=4, steps_per_epoch=steps, verbose=0, callbacks=list(callbacks))

    undisturbed = make_model(strategy)
    fit(undisturbed)

    with pytest.raises(KeyboardInterrupt):
        fit(make_model(strategy), keras.callbacks.BackupAndRestore(tmp_path), Fails(2))
    resumed = make_model(strategy)
    np.random.seed(99)  # another process does not know where the first one was
    fit(resumed, keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False))

    for ours, expected in zip(state_of(resumed), state_of(undisturbed), strict=True):
        np.testing.assert_array_equal(ours, expected)
    assert json.loads((tmp_path / "training_metadata.json").read_text())["epoch"] == 4


def test_keras_reads_backups_and_ours_reads_those_of_keras(tmp_path):
    strategy = dist.MirroredStrategy(["CPU:0", "CPU:1"])
    model = make_model(strategy)
    with pytest.raises(KeyboardInterrupt):
        model.fit(
            X,
            Y,
            epochs=4,
            verbose=0,
            callbacks=[keras.callbacks.BackupAndRestore(tmp_path / "ours"), Fails(1)],
        )
    epochs = []
    seen = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: epochs.append(epoch))
    plain = make_model(dist.get_strategy())
    with pytest.raises(KeyboardInterrupt):
        plain.fit(
            X,
            Y,
            epochs=4,
            verbose=0,
            callbacks=[keras.callbacks.BackupAndRestore(tmp_path / "ours"), seen, Fails(2)],
        )
    model = make_model(strategy)
    model.fit(
        X,
        Y,
        epochs=4,
        verbose=0,
        callbacks=[keras.callbacks.BackupAndRestore(tmp_path / "ours"), seen],
    )
    assert epochs == [1, 2, 2, 3]


# Keras says that .h5 is a legacy format.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["model.keras", "model.h5", "model.weights.h5"])
def test_what_was_saved_before_stays_when_saving_fails(name, tmp_path, monkeypatch):
    model = make_model(dist.MirroredStrategy(["CPU:0", "CPU:1"]))
    path = tmp_path / name
    save = model.save_weights if "weights" in name else model.save
    save(path)
    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", _full_disk)

    with pytest.raises(OSError, match="No space left") as caught:
        save(path)

    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert caught.value.__notes__ == [
        f"Saving {str(path)!r}: the disk is full. What was there is kept."
    ]


def _full_disk(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_that_is_being_written_is_not_there_yet(tmp_path):
    model = make_model(dist.MirroredStrategy(["CPU:0", "CPU:1"]))
    path = tmp_path / "model.weights.h5"
    names = []

    class Watching(keras.layers.Layer):
        def save_own_variables(self, store):
            names.extend(p.name for p in tmp_path.iterdir())

    with dist.get_strategy().scope():
        model.add(Watching())
    model.save_weights(path)

    assert names == [".worker0.model.weights.h5"]
    assert [p.name for p in tmp_path.iterdir()] == ["model.weights.h5"]
    with h5py.File(path) as file:
        assert "layers" in file
