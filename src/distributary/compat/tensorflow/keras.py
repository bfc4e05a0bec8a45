"""`tf.keras`: Keras 3 on JAX, with the older names that TensorFlow adds to it.

`keras._tf_keras.keras` is what TensorFlow calls `tf.keras`: Keras, with names such as
`losses.Reduction` and `preprocessing`. Its functions of arrays in `backend` call TensorFlow, so
those come from the tables.
"""

import sys
from types import ModuleType
from typing import Any

from distributary.tensorflow._namespaces import Namespace, lookup, names_in
from distributary.tensorflow._operations import keras_of_tensorflow

_keras = keras_of_tensorflow()
# So that `from distributary.compat.tensorflow.keras.layers import Dense` finds Keras's own modules,
# and for a module that TensorFlow changes its own one.
for _name in (_keras.__name__, "keras"):
    for _path, _module in tuple(sys.modules.items()):
        if _path.startswith(f"{_name}.") and not _path.startswith(f"{_name}.src"):
            sys.modules.setdefault(f"{__name__}{_path.removeprefix(_name)}", _module)
globals().update({key: value for key, value in vars(_keras).items() if not key.startswith("_")})
__version__: str = _keras.__version__
backend: ModuleType = Namespace("keras.backend")
sys.modules[f"{__name__}.backend"] = backend
sys.modules[f"{__name__}.utils.experimental"] = Namespace("keras.utils.experimental")
for _name in ("layers", "utils"):
    _own = globals()[_name] = sys.modules[f"{__name__}.{_name}"] = ModuleType(f"{__name__}.{_name}")
    vars(_own).update({k: v for k, v in vars(getattr(_keras, _name)).items() if k[0] != "_"})
    # At once, so that Keras knows these layers when it loads a model.
    vars(_own).update({key: lookup(f"keras.{_name}.{key}") for key in names_in(f"keras.{_name}")})
Input: Any = lookup("keras.layers.Input")
__path__: list[str] = []  # a package, of which all modules are loaded


def __getattr__(name: str) -> Any:
    return lookup(f"keras.{name}")
