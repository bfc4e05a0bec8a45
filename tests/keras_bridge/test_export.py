"""What docs/guide/serving.md says of other programs, where these are installed."""

import subprocess
import sys

import keras
import numpy as np
import pytest

X = np.random.default_rng(0).normal(size=(12, 6)).astype(np.float32)

_AS_SAVED_MODEL = """
import sys, keras, numpy, tensorflow
keras.models.load_model("model.keras").export("folder", verbose=False)
numpy.save("served.npy", tensorflow.saved_model.load("folder").serve(numpy.load("x.npy")))
"""


@pytest.fixture
def trained(strategy_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with strategy_of(3).scope():
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2)]
        )
        model.compile("adam", "mse")
    model.fit(X, X[:, :2], batch_size=6, verbose=0)
    return model


def test_onnx_runtime_answers_as_the_training_process(trained):
    pytest.importorskip("jax2onnx")
    onnxruntime = pytest.importorskip("onnxruntime")

    trained.export("model.onnx", format="onnx", verbose=False)

    session = onnxruntime.InferenceSession("model.onnx")
    (served,) = session.run(None, {session.get_inputs()[0].name: X})
    np.testing.assert_allclose(served, trained.predict(X, verbose=0), atol=1e-5)


def test_a_saved_model_of_tensorflow_answers_as_the_training_process(trained):
    pytest.importorskip("tensorflow")
    trained.save("model.keras")
    np.save("x.npy", X)

    subprocess.run(
        [sys.executable, "-c", _AS_SAVED_MODEL],
        env={"KERAS_BACKEND": "tensorflow"},
        check=True,
        timeout=300,
    )

    np.testing.assert_allclose(np.load("served.npy"), trained.predict(X, verbose=0), atol=1e-5)
