"""`tf.keras`: Keras 3 on JAX, with the older names that TensorFlow adds to it.

`keras._tf_keras.keras` is what TensorFlow calls `tf.keras`: Keras, with names such as
`losses.Reduction` and `preprocessing`. Its functions of arrays in `backend` call TensorFlow, so
those come from `_keras_parts`.
"""

import sys
from types import ModuleType
from typing import Any

from distributary.compat.tensorflow._names import MODULES, Namespace, lookup
from distributary.tensorflow import _data, _keras_parts
from distributary.tensorflow._operations import keras_of_tensorflow, named

_keras = keras_of_tensorflow()


class _Module(ModuleType):
    """A module of Keras, whose error for a name that is not there says what to use instead."""

    def __getattr__(self, name: str) -> Any:
        path = self.__name__.removeprefix(f"{__name__}.")
        of_keras_3 = sys.modules.get(f"keras.{path}")  # e.g. `losses.mean_squared_error`
        if name[0] != "_" and hasattr(of_keras_3, name):
            return getattr(of_keras_3, name)
        return lookup(f"keras.{path}", name)


# So that `from distributary.compat.tensorflow.keras.layers import Dense` finds Keras's own modules,
# and for a module that TensorFlow changes its own one.
for _name in (_keras.__name__, "keras"):
    for _path, _module in tuple(sys.modules.items()):
        if _path.startswith(f"{_name}.") and not _path.startswith(f"{_name}.src"):
            sys.modules.setdefault(f"{__name__}{_path.removeprefix(_name)}", _module)
globals().update({key: value for key, value in vars(_keras).items() if not key.startswith("_")})
__version__: str = _keras.__version__
MODULES["keras.backend"] = _keras_parts.backend_names
MODULES["keras.utils.experimental"] = lambda: named(_data, "DatasetCreator")
backend: ModuleType = Namespace("keras.backend")
sys.modules[f"{__name__}.backend"] = backend
for _name, _module in vars(_keras).items():
    if type(_module) is ModuleType and f"{__name__}.{_name}" in sys.modules and _name != "backend":
        _copy = globals()[_name] = _Module(f"{__name__}.{_name}")
        vars(_copy).update({k: v for k, v in vars(_module).items() if not k.startswith("__")})
        sys.modules[_copy.__name__] = _copy
for _name, _parts in _keras_parts.PARTS.items():
    vars(sys.modules[f"{__name__}{_name}"]).update(_parts)
vars(sys.modules[f"{__name__}.utils"])["experimental"] = Namespace("keras.utils.experimental")
sys.modules[f"{__name__}.utils.experimental"] = sys.modules[f"{__name__}.utils"].experimental
__path__: list[str] = []  # a package, of which all modules are loaded


def __getattr__(name: str) -> Any:
    return lookup("keras", name)
