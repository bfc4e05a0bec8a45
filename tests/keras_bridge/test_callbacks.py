"""Keras' callbacks see and do under a strategy what they see and do on one device."""

import functools
import importlib.util
import re

import keras
import numpy as np
import pytest

import distributary as dist
from distributary.errors import MissingPackageError
from distributary.keras_bridge import _callbacks
from tests.keras_bridge import small


def _both(strategy, make_callbacks, *data, compile_kwargs=None, **kwargs):
    """Trains under the strategy and alone; returns models and histories of both."""
    models = [small.model(s, **(compile_kwargs or {})) for s in (strategy, None)]
    histories = [small.fit(m, *data, callbacks=make_callbacks(), **kwargs) for m in models]
    return models, histories


def _assert_same(models, histories):
    assert histories[0].epoch == histories[1].epoch
    small.assert_equal_logs(histories[0].history, histories[1].history)
    small.assert_equal_weights(*models)
    iterations = [int(m.optimizer.iterations) for m in models]
    assert iterations[0] == iterations[1] > 0


class _Recorder(keras.callbacks.Callback):
    """Notes every call with its number and logs."""

    def __init__(self):
        super().__init__()
        self.calls, self.logs = [], []

    def _note(self, name, index=None, logs=None):
        outputs = (logs or {}).get("outputs")
        self.calls.append((name, index if outputs is None else (index, outputs.shape)))
        if logs and outputs is None:
            self.logs.append(dict(logs))


for _kind in ("train", "epoch", "train_batch", "test", "test_batch", "predict_batch"):
    for _edge in ("begin", "end"):
        # Those of training and testing have no number.
        _given = (f"{_kind}_{_edge}", *[None] * (_kind in ("train", "test")))
        _method = functools.partialmethod(_Recorder._note, *_given)
        setattr(_Recorder, f"on_{_kind}_{_edge}", _method)


def _assert_same_records(got, expected):
    assert got.calls == expected.calls
    assert len(got.logs) == len(expected.logs)
    for one, other in zip(got.logs, expected.logs, strict=True):
        small.assert_equal_logs(one, other)


# What callbacks are told.


@pytest.mark.parametrize(("rows", "steps_per_execution"), [(13, 1), (26, 3)])
def test_callbacks_are_called_with_the_numbers_and_logs_of_the_whole_batch(
    rows, steps_per_execution, strategy_of
):
    recorders = [_Recorder(), _Recorder()]
    left = iter(recorders)

    models, histories = _both(
        strategy_of(2),
        lambda: [next(left)],
        *small.data(rows),
        compile_kwargs=dict(steps_per_execution=steps_per_execution),
        validation_data=small.data(14),
    )
    options = {"batch_size": 4, "verbose": 0}
    for model, recorder in zip(models, recorders, strict=True):
        model.evaluate(*small.data(6), **options, callbacks=[recorder])
        model.predict(small.data(6)[0], **options, callbacks=[recorder])

    _assert_same_records(*recorders)
    _assert_same(models, histories)
    predicted = [model.predict(small.data(14)[0], **options) for model in models]
    np.testing.assert_allclose(*predicted, **small.CLOSE)
    assert ("train_batch_end", 3) in recorders[0].calls or steps_per_execution > 1
    assert ("predict_batch_begin", 0) in recorders[0].calls


# Callbacks that steer training.


def _set_to_half(model):
    model.set_weights([np.full_like(w, 0.5) for w in model.get_weights()])


def _slow_down(model):
    model.optimizer.learning_rate = 0.001


@pytest.mark.parametrize("action", [_set_to_half, _slow_down])
def test_changes_in_the_middle_of_an_epoch_count_from_the_next_step(action, strategy_of):
    models, histories = _both(strategy_of(2), lambda: [small.AtBatch(1, action)])

    _assert_same(models, histories)
    assert not np.allclose(models[0].get_weights()[0], small.weights_after(8)[0], **small.CLOSE)


def test_terminate_on_nan_stops_at_the_batch_that_has_one(strategy_of):
    x, y = small.data()
    y[9] = np.nan  # seen by the second replica only, in the third batch
    models, histories = _both(strategy_of(2), lambda: [keras.callbacks.TerminateOnNaN()], x, y)

    assert [int(m.optimizer.iterations) for m in models] == [3, 3]
    for history in histories:
        assert history.epoch == [0]
        assert np.isnan(history.history["loss"]).all()


# Callbacks that write files.


def test_files_that_are_written_in_an_epoch_hold_exactly_that_step(strategy_of, tmp_path):
    model = small.model(strategy_of(2))
    path = str(tmp_path / "{epoch}-{batch}.weights.h5")
    checkpoint = keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=2)
    backup = keras.callbacks.BackupAndRestore(
        tmp_path / "backup", save_freq=3, delete_checkpoint=False
    )

    small.fit(model, epochs=1, callbacks=[backup])
    small.fit(model, epochs=2, initial_epoch=1, callbacks=[checkpoint])

    small.assert_equal_weights(model, small.weights_after(8))
    for name, num_steps in (
        ("backup/latest.weights.h5", 3),
        ("2-2.weights.h5", 6),
        ("2-4.weights.h5", 8),
    ):
        model.load_weights(tmp_path / name)
        small.assert_equal_weights(model, small.weights_after(num_steps))
        assert int(model.optimizer.iterations) == num_steps


def _scalars(folder):
    """`(tag, step)` and value of every scalar in the event files of a folder."""
    from tensorboardX.proto.event_pb2 import Event

    # Our reader checks the checksums, which TensorBoard does, too.
    records = dist.data.TFRecordDataset(sorted(map(str, folder.glob("events.out*"))))
    events = [Event.FromString(bytes(record)) for record in records]
    values = [(e.step, v) for e in events for v in e.summary.value]
    found = {(v.tag, step): v.simple_value for step, v in values if v.HasField("simple_value")}
    return found, [v.tag for _, v in values if v.HasField("histo")]


@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is not None, reason="it writes with TensorFlow here"
)
def test_tensorboard_needs_no_tensorflow(strategy_of, tmp_path, monkeypatch):
    monkeypatch.setenv("CRC32C_SW_MODE", "auto")  # which importing tensorboardX sets
    pytest.importorskip("tensorboardX", reason="the extra tensorboard is not installed")
    callback = keras.callbacks.TensorBoard(
        tmp_path, histogram_freq=1, write_images=True, write_steps_per_second=True, update_freq=2
    )
    history = small.fit(
        small.model(strategy_of(2)), validation_data=small.data(6), callbacks=[callback]
    ).history

    train, weights = _scalars(tmp_path / "train")
    validation, _ = _scalars(tmp_path / "validation")
    for epoch in range(2):
        for name in ("loss", "mae"):
            assert train[f"epoch_{name}", epoch] == pytest.approx(history[name][epoch])
            found = validation[f"epoch_{name}", epoch]
            assert found == pytest.approx(history[f"val_{name}"][epoch])
    # Four steps per epoch, of which every other one is written.
    assert sorted(step for tag, step in train if tag == "batch_loss") == [2, 4, 6, 8]
    assert train["epoch_steps_per_second", 1] > 0
    assert {tag for tag, _ in validation} >= {"evaluation_loss_vs_iterations"}
    assert len(weights) == 2 * 2  # kernel and bias, every epoch


def test_tensorboard_without_a_writer_says_what_to_install(strategy_of, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(MissingPackageError, match="pip install tensorboardX"):
        small.fit(small.model(strategy_of(2)), callbacks=[keras.callbacks.TensorBoard(tmp_path)])


def test_callbacks_of_other_packages_are_those_of_the_chief():
    class Metrics(keras.callbacks.Callback):
        __module__ = "wandb.integration.keras"

    class Own(Metrics):
        pass

    callbacks = [Metrics(), Own(), keras.callbacks.CSVLogger("x"), keras.callbacks.Callback()]
    found = [_callbacks._is_of_chief(callback) for callback in callbacks]

    assert found == [True, True, True, False]


# The progress bar, and lists of callbacks.


def _without_times(text):
    text = re.sub(r"\x1b\[[0-9;]*m|\x08", "", text)
    return re.sub(r"\d+(ms|us|s)(/(step|epoch))?", "", text)


def _final_numbers(text):
    """Names and values at the end of every epoch."""
    last = [re.findall(r"(\w+): ([\d.e+-]+)", part)[-4:] for part in text.split("Epoch ")[1:]]
    return [{name: float(value) for name, value in numbers} for numbers in last]


def test_the_progress_bar_shows_what_it_shows_on_one_device(strategy_of, capsys):
    texts = []
    for strategy in (strategy_of(2), None):
        small.fit(small.model(strategy), validation_data=small.data(6), verbose=1)
        texts.append(_without_times(capsys.readouterr().out))
    small.fit(small.model(strategy_of(2)), verbose=0)
    assert capsys.readouterr().out == ""

    for text in texts:
        assert re.findall(r"Epoch (\d)/2", text) == ["1", "2"]
        assert "4/4" in text
    for one, other in zip(*map(_final_numbers, texts), strict=True):
        assert one.keys() == other.keys() == {"loss", "mae", "val_loss", "val_mae"}
        # Four decimals are shown.
        np.testing.assert_allclose([*one.values()], [*other.values()], atol=2e-4)


def test_a_callback_list_of_the_user_is_used_as_it_is(strategy_of):
    class Counting(keras.callbacks.CallbackList):
        batches = 0

        def on_train_batch_end(self, batch, logs=None):
            self.batches += 1
            super().on_train_batch_end(batch, logs)

    recorders, histories, lists = [], [], []
    for strategy in (strategy_of(2), None):
        model = small.model(strategy)
        recorders.append(_Recorder())
        lists.append(Counting([recorders[-1]], add_history=True, model=model, epochs=2, steps=4))
        histories.append(small.fit(model, callbacks=lists[-1]))

    assert [one.batches for one in lists] == [8, 8]
    _assert_same_records(*recorders)
    small.assert_equal_logs(histories[0].history, histories[1].history)


def test_old_names_of_methods_and_those_that_are_added_to_the_instance_are_called(strategy_of):
    class Old(keras.callbacks.Callback):
        def on_batch_begin(self, batch, logs=None):
            called.append(("begin", batch))

        def on_batch_end(self, batch, logs=None):
            called.append(("end", batch))

    called, seen = [], []
    callback = keras.callbacks.Callback()
    callback.on_train_batch_end = lambda batch, logs=None: seen.append((batch, set(logs)))

    small.fit(small.model(strategy_of(2)), epochs=1, callbacks=[Old(), callback])

    assert called == [(edge, step) for step in range(4) for edge in ("begin", "end")]
    assert seen == [(step, {"loss", "mae"}) for step in range(4)]
