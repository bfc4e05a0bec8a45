"""Keras 3 on JAX; this module becomes `keras` itself."""

import sys

from distributary.keras_bridge import import_keras

import_keras()
# So that `from distributary.compat.tensorflow.keras.layers import Dense` finds Keras's own modules.
for _name, _module in tuple(sys.modules.items()):
    if _name == "keras" or (_name.startswith("keras.") and not _name.startswith("keras.src")):
        sys.modules[f"{__name__}{_name.removeprefix('keras')}"] = _module
