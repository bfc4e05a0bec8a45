"""Calls of TensorFlow's functions, a line each in a file, and what TensorFlow returns.

Run as a program where TensorFlow is installed, it writes the results to `RESULTS`.
"""

from pathlib import Path

import numpy as np

RESULTS = Path(__file__).with_name("tensorflow-2.21.npz")
CALLS = RESULTS.with_name("tensorflow-2.21-calls.txt").read_text(encoding="utf-8").splitlines()

_rng = np.random.default_rng(0)
F = _rng.normal(size=(4, 3)).astype("float32")
G = _rng.normal(size=(4, 3)).astype("float32")
I = _rng.integers(1, 7, (4, 3)).astype("int32")  # noqa: E741
P = np.abs(F) + 0.1  # positive
U = np.tanh(F)  # from -1 to 1
L = np.array([0, 2, 1, 2], "int32")  # labels
D = np.array([[1, 0, 0], [0.2, 0.3, 0.5], [0, 1, 0], [0, 0, 1]], "float32")  # distributions
IMG = _rng.normal(size=(2, 6, 6, 3)).astype("float32")
K = _rng.normal(size=(3, 3, 3, 4)).astype("float32")
V = _rng.uniform(0, 1, (2, 6, 5, 3)).astype("float32")  # images from 0 to 1
B = _rng.integers(0, 256, (7, 6, 3)).astype("uint8")
S = [np.array([3, 0, 2]), P[:, :1], P[0]]  # classes that are drawn, and expected counts
SQ = F @ F.T + np.eye(4, dtype="float32")
N = np.array([[0, 1, -1], [0, 0, 0], [6, -0.5, 2]], "float32")  # with zeros and limits
H = np.array([[1, 1, -1], [0, -2, 3], [6, 0.5, 0]], "float32")  # equal to `N` in some places
WAV = (  # 2 channels of 16 bits, 8000 Hz
    b"RIFF8\0\0\0WAVEfmt \x10\0\0\0\x01\0\x02\0\x40\x1f\0\0\0\x7d\0\0\x04\0\x10\0data\x10\0\0\0"
    + _rng.integers(-(2**15), 2**15, 8).astype("<i2").tobytes()
)


def T(tf, keys, values):  # noqa: N802
    """The content of a table."""
    return tf.lookup.KeyValueTensorInitializer(keys, values)


def rows(tf):
    """The gradient of a table, one row of it given twice."""
    values, indices = tf.constant(F[:3]), tf.constant([2, 0, 2])
    return tf.IndexedSlices(values, indices, tf.constant([4, 3]))


def gradients(tf, function, *arrays):
    """The gradients of a weighted sum of the results."""
    sources = [tf.constant(array) for array in arrays]
    with tf.GradientTape() as tape:
        for source in sources:
            tape.watch(source)
        found = function(*sources)
        total = tf.reduce_sum(found * np.resize([1.0, -2.0, 0.5], found.shape).astype("float32"))
    return tape.gradient(total, sources)


def results(tf, call):
    """The arrays that a call returns; text in place of bytes of UTF-8."""
    found = eval(call, {**globals(), "tf": tf})
    parts = tf.nest.flatten(found) if isinstance(found, (list, tuple)) else [found]
    return [_as_text(np.asarray(p, object if isinstance(p, bytes) else None)) for p in parts]


def _as_text(array):
    if array.dtype.kind not in "SO":
        return array
    return np.array([one.decode("latin1") for one in array.ravel().tolist()]).reshape(array.shape)


if __name__ == "__main__":
    import tensorflow

    arrays = {
        f"{call} [{i}]": array
        for call in CALLS
        for i, array in enumerate(results(tensorflow, call))
    }
    np.savez_compressed(RESULTS, **arrays)
