"""Lets Keras' callback for TensorBoard write without TensorFlow, through tensorboardX."""

import importlib.util

import keras

from distributary.keras_bridge._summaries import Summaries


def write_without_tensorflow(callback: keras.callbacks.TensorBoard) -> None:
    """Gives the callback a place to write to if there is no TensorFlow.

    The graph of the model is left out: TensorBoard shows those of TensorFlow.
    """
    if not _has_tensorflow():
        callback._summary_module = Summaries()
        callback.write_graph = False


def _has_tensorflow() -> bool:
    try:
        return importlib.util.find_spec("tensorflow") is not None
    except ValueError:  # something else has its name
        return False
