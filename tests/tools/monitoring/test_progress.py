"""What watchers of a run learn about `fit`: the epoch, what is done, and where the time goes."""

import threading
import time

import keras
import numpy as np
import pytest

from distributary.devices._progress import Fit, Progress, progress
from distributary.launch import numbers_of


@pytest.fixture(autouse=True)
def _own_progress(monkeypatch):
    for name, value in vars(Progress()).items():
        monkeypatch.setattr(progress, name, value)


def test_fit_tells_its_epochs_and_names_time_without_steps(strategy_of, tmp_path):
    strategy = strategy_of(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    seen = []

    class See(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(numbers_of(strategy.extended))

    x = np.ones((16, 3), np.float32)
    callbacks = [See(), keras.callbacks.ModelCheckpoint(tmp_path / "model.keras")]
    history = model.fit(
        x,
        x[:, :1],
        batch_size=4,
        epochs=5,
        initial_epoch=2,
        validation_data=(x, x[:, :1]),
        verbose=0,
        callbacks=callbacks,
    ).history

    assert [n["fit/epoch"] for n in seen] == [3, 4, 5]
    assert {n["fit/num_epochs"] for n in seen} == {5}
    assert seen[0]["fit/share"] < seen[1]["fit/share"] < seen[2]["fit/share"] <= 1
    after = numbers_of(strategy.extended)
    assert after["fit/share"] == 1
    assert after["fit/seconds"] == numbers_of(strategy.extended)["fit/seconds"]
    assert after["val_loss"] == pytest.approx(history["val_loss"][-1])
    spent = {
        name: after[f"doing/{name}_seconds"] for name in ("compilation", "validation", "saving")
    }
    assert min(spent.values()) > 0
    assert sum(spent.values()) < after["fit/seconds"]
    assert progress._open == ()


def test_the_innermost_is_charged(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    own = Progress()

    own.begin("validation")  # at 0
    own.begin("compilation")  # at 2, after 1 second of the other
    inside = own.numbers(0)  # at 3
    own.end("compilation")  # at 4, and on with the other at 5
    own.end("validation")  # at 6

    assert inside == {"doing/validation_seconds": 1, "doing/compilation_seconds": 1}
    after = {"doing/validation_seconds": 2, "doing/compilation_seconds": 2}
    assert own.numbers(0) == own.numbers(0) == after  # nothing goes on


def test_what_an_error_has_left_open_ends_and_other_threads_delay_no_steps():
    own = Progress()
    own.begin("saving")
    own.begin("validation")
    own.end("saving")
    own.end("saving")
    thread = threading.Thread(target=own.begin, args=("saving",))
    thread.start()
    thread.join()

    assert own._open == ()


def test_the_share_counts_steps_of_this_epoch():
    fit = Fit(num_epochs=4, num_steps=10)
    assert fit.numbers(0) == {}

    fit.begin_epoch(2)  # the first of two
    shares = [fit.numbers(n)["fit/share"] for n in (100, 105, 130)]
    fit.begin_epoch(3)
    shares.append(fit.numbers(130)["fit/share"])

    assert shares == [0, 0.25, 0.5, 0.5]
