"""Weights & Biases and MLflow get the numbers of `fit`, as docs/guide/logging.md shows it."""

import json
import os
from collections.abc import Iterator
from unittest import mock

import keras
import pytest

from tests.keras_bridge import small


@pytest.fixture(autouse=True)
def _own_environ() -> Iterator[None]:
    with mock.patch.dict(os.environ):  # both set variables
        yield


def _history(strategy, callback):
    model = small.model(strategy)
    return small.fit(model, validation_data=small.data(6), callbacks=[callback]).history


def test_wandb_offline(strategy, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    seen = []

    with wandb.init(project="digits", mode="offline", dir=tmp_path) as run:
        log = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: (run.log({"epoch": epoch, **logs}), seen.append(logs))
        )
        history = _history(strategy, log)
        summary = dict(run.summary)

    for name in ("loss", "val_loss"):
        assert summary[name] == pytest.approx(history[name][-1])
    assert len(seen) == 2
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


# SQLAlchemy warns of what MLflow calls.
@pytest.mark.filterwarnings("default")
def test_mlflow_with_files(strategy, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)  # where it writes what is not a number
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")

    with mlflow.start_run() as run:
        history = _history(strategy, mlflow.keras.MlflowCallback())

    metrics = mlflow.get_run(run.info.run_id).data.metrics
    assert metrics["loss"] == pytest.approx(history["loss"][-1])
    assert metrics["validation_loss"] == pytest.approx(history["val_loss"][-1])
    assert json.dumps(metrics)
