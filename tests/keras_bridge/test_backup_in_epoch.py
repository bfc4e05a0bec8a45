"""`fit` goes on in the middle of an epoch, with the examples that are left and no other."""

import random
from contextlib import nullcontext

import keras
import numpy as np
import pytest

from distributary.data import Dataset

X = np.random.default_rng(0).normal(size=(44, 4)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)
EPOCHS = 3


class _Batches(keras.utils.PyDataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return X[i * 8 : (i + 1) * 8], Y[i * 8 : (i + 1) * 8]


def _drawn():
    choice = np.random.RandomState(5)
    while True:
        rows = choice.randint(0, 44, 8)
        yield X[rows], Y[rows]


def _shuffled():
    return Dataset.from_tensor_slices((X, Y)).shuffle(40)


DATA = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": 8},
    "arrays of several epochs": lambda: {
        "x": np.tile(X, (2, 1))[:72],
        "y": np.tile(Y, (2, 1))[:72],
        "batch_size": 4,
        "steps_per_epoch": 6,
    },
    "arrays that end early": lambda: {"x": X, "y": Y, "batch_size": 4, "steps_per_epoch": 5},
    "dataset": lambda: {"x": _shuffled().batch(8)},
    "endless dataset": lambda: {"x": _shuffled().repeat().batch(8), "steps_per_epoch": 6},
    "dataset of unknown length": lambda: {"x": _shuffled().filter(lambda x, y: x[0] > -2).batch(8)},
    "shuffled batches": lambda: {"x": _Batches(), "shuffle": True},
    "batches of threads": lambda: {"x": _Batches(workers=2), "shuffle": False},
    "generator": lambda: {"x": _drawn(), "steps_per_epoch": 6, "shuffle": False},
}


class _Ends(keras.callbacks.Callback):
    """Raises at a batch of an epoch, as a killed process would end there."""

    def __init__(self, epoch, batch):
        super().__init__()
        self.where, self.seen, self.logs = (epoch, batch), [], None

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append((self.epoch, batch))
        if self.where[0] == self.epoch and batch >= self.where[1]:
            raise KeyboardInterrupt

    def on_epoch_end(self, epoch, logs=None):
        self.logs = logs


def _model(strategy, steps_per_execution):
    with strategy.scope():
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Dense(8), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile(
            "adam",
            "mse",
            metrics=["mae", keras.metrics.AUC(20, name="auc")],
            steps_per_execution=steps_per_execution,
        )
    model.fit(X, Y, verbose=0)  # builds the metrics, which draws an order of the rows
    return model


def _variables(model):
    return [*model.variables, *model.optimizer.variables]


def _values(model):
    return [np.asarray(variable) for variable in _variables(model)]


def _fit(model, data, folder, ends):
    save_freq = 2 // model.steps_per_execution
    backup = keras.callbacks.BackupAndRestore(folder, save_freq, delete_checkpoint=False)
    model.fit(**data, epochs=EPOCHS, verbose=0, callbacks=[ends, backup])
    return _values(model)


@pytest.fixture(scope="module")
def models():
    """Models by steps per execution, so that they are compiled once."""
    return {}


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("steps_per_execution", [1, 2])
@pytest.mark.parametrize("name", DATA)
def test_what_is_left_of_an_epoch_is_trained_once(
    strategy, models, name, steps_per_execution, tmp_path
):
    if steps_per_execution not in models:
        model = _model(strategy, steps_per_execution)
        models[steps_per_execution] = model, _values(model)
    model, first = models[steps_per_execution]

    def begin():
        for variable, value in zip(_variables(model), first, strict=True):
            variable.assign(value)
        np.random.seed(7)
        random.seed(7)  # which datasets draw their seeds from
        return DATA[name]()

    undisturbed = _Ends(EPOCHS, 0)
    expected = _fit(model, begin(), tmp_path / "undisturbed", undisturbed)

    data, starts = begin(), []
    for number, where in enumerate([(0, 3), (1, 1), (1, 3), (2, 0), (EPOCHS, 0)]):
        with pytest.raises(KeyboardInterrupt) if number < 4 else nullcontext():
            ends = _Ends(*where)
            got = _fit(model, data, tmp_path / "backup", ends)
        starts.append(ends.seen[0])
        # Another process does not know where the first one was.
        for variable in _variables(model):
            variable.assign(np.ones(variable.shape))
        np.random.seed(number)
        random.seed(number)
        data = DATA[name]()

    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert ends.logs == undisturbed.logs
    first_end = steps_per_execution - 1
    if name == "arrays that end early":  # of five steps: the backups are not always after the same
        return
    assert starts == [(e, b + first_end) for e, b in [(0, 0), (0, 2), (1, 0), (1, 2), (2, 0)]]


@pytest.mark.parametrize("batch_size", [4, 22])
def test_an_epoch_of_other_batches_begins_anew(strategy, batch_size, tmp_path, caplog):
    model = _model(strategy, 1)
    data = {"x": X, "y": Y, "steps_per_epoch": 2}
    with pytest.raises(KeyboardInterrupt):
        _fit(model, data | {"batch_size": 8}, tmp_path, ends := _Ends(1, 0))

    _fit(model, data | {"batch_size": batch_size}, tmp_path, ends := _Ends(EPOCHS, 0))

    assert ends.seen[0] == (1, 0)
    assert f"with batch_size 8, and an epoch has 2 with {batch_size} now. So that" in caplog.text


def test_a_class_of_the_user_extends_what_a_backup_does(strategy, tmp_path):
    class Noted(keras.callbacks.BackupAndRestore):
        calls = 0

        def on_train_begin(self, logs=None):
            self.calls += 1
            super().on_train_begin(logs)
            self.initial_epoch = self.model._initial_epoch

    model = _model(strategy, 1)
    callbacks = [_Ends(1, 2), Noted(tmp_path, 2), keras.callbacks.EarlyStopping("loss")]
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, Y, 8, EPOCHS, verbose=0, callbacks=callbacks)

    noted, ends = Noted(tmp_path, 2), _Ends(EPOCHS, 0)
    model.fit(X, Y, 8, EPOCHS, verbose=0, callbacks=[ends, noted, callbacks[2]])

    assert (noted.calls, noted.initial_epoch) == (1, 1)
    assert noted.model is model
    assert ends.seen[0] == (1, 2)
    assert not tmp_path.exists()  # the end of training removes it
