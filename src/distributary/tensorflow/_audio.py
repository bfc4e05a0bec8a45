"""`tf.audio`: WAV files of 16 bits, on the host."""

import io
import wave
from typing import Any, NamedTuple

import numpy as np

from distributary.errors import InvalidValueError
from distributary.tensorflow._host import host_array


class DecodedWav(NamedTuple):
    """The result of `tf.audio.decode_wav`: numbers from -1 to 1, and how many a second has."""

    audio: np.ndarray
    sample_rate: np.ndarray


def decode_wav(
    contents: Any, desired_channels: int = -1, desired_samples: int = -1, name: str | None = None
) -> DecodedWav:
    """`tf.audio.decode_wav`: `[samples, channels]` in float32."""
    with wave.open(io.BytesIO(host_array(contents).item())) as file:
        if file.getsampwidth() != 2:
            raise InvalidValueError(
                f"tf.audio.decode_wav: samples have {8 * file.getsampwidth()} bits, expected 16."
            )
        frames = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        samples = frames.reshape(-1, file.getnchannels()).astype(np.float32) / 2**15
        rate = file.getframerate()
    if desired_channels != -1:  # the last channel stands for those that are not there
        samples = samples[:, [min(k, samples.shape[1] - 1) for k in range(desired_channels)]]
    if desired_samples != -1:
        samples = samples[:desired_samples]
        samples = np.pad(samples, [(0, desired_samples - len(samples)), (0, 0)])
    return DecodedWav(host_array(samples), host_array(rate, np.int32))
