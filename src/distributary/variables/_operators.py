"""Arithmetic for objects that stand for an array."""

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


class ArrayOperators:
    """Python's operators and the methods of `jax.Array`, applied to the array of `__jax_array__`.

    Comparison with `==` is element-wise, as for arrays.
    """

    __slots__ = ()

    # Makes NumPy arrays on the left leave the operation to us instead of converting to NumPy.
    __array_priority__ = 100

    def value(self) -> Any:
        """Returns the array."""
        raise NotImplementedError

    def numpy(self) -> np.ndarray:
        """Returns the array as a NumPy array."""
        raise NotImplementedError

    def __jax_array__(self) -> Any:
        return self.value()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)  # `numpy` gives a number for a scalar

    if TYPE_CHECKING:
        __hash__: ClassVar[None]  # type: ignore[assignment]

        def __getattr__(self, name: str) -> Any:
            """Returns an attribute of the array. For type checkers only.

            At run time, the attributes of `jax.Array` are properties. With this function, Python
            could not cache where it finds attributes, and each would take twice as long to read,
            including those that a cached program reads of its variables.
            """

        def _operator(self, other: object) -> Any: ...

        __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = _operator
        __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = _operator
        __rpow__ = __matmul__ = __rmatmul__ = __lshift__ = __rlshift__ = _operator
        __rshift__ = __rrshift__ = __and__ = __rand__ = __or__ = __ror__ = _operator
        __xor__ = __rxor__ = __lt__ = __le__ = __gt__ = __ge__ = _operator

        def _unary_operator(self) -> Any: ...

        __neg__ = __pos__ = __abs__ = __invert__ = __index__ = _unary_operator
        __bool__ = __int__ = __float__ = __complex__ = __len__ = __iter__ = _unary_operator

    def __getitem__(self, index: object) -> Any:
        return self.value()[index]

    def __round__(self, ndigits: int | None = None) -> Any:
        return jnp.round(self.value(), ndigits or 0)


def _unary(function: Callable[[Any], Any]) -> Any:
    return lambda self: function(self.value())


def _binary(function: Callable[[Any, Any], Any]) -> Any:
    def method(self: ArrayOperators, other: object) -> Any:
        if isinstance(other, (list, tuple)):  # which operators of JAX's arrays do not take
            dtype = self.value().dtype if jnp.issubdtype(self.value().dtype, jnp.inexact) else None
            other = jnp.asarray(other, dtype)
        plain = other.value() if isinstance(other, ArrayOperators) else other
        return function(self.value(), plain)

    return method


def _reflected(function: Callable[[Any, Any], Any]) -> Any:
    return _binary(lambda value, other: function(other, value))


def _attribute(name: str) -> property:
    return property(lambda self: getattr(self.value(), name))


_ARITHMETIC = (
    "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()  # noqa: SIM905
)
_COMPARISON = ("eq", "ne", "lt", "le", "gt", "ge")
for _name in ("neg", "pos", "abs", "invert", "index"):
    setattr(ArrayOperators, f"__{_name}__", _unary(getattr(operator, _name)))
for _function in (bool, int, float, complex, len, iter):
    setattr(ArrayOperators, f"__{_function.__name__}__", _unary(_function))
for _name in (*_ARITHMETIC, *_COMPARISON):
    setattr(ArrayOperators, f"__{_name}__", _binary(getattr(operator, f"__{_name}__")))
for _name in _ARITHMETIC:
    setattr(ArrayOperators, f"__r{_name}__", _reflected(getattr(operator, f"__{_name}__")))
for _name in dir(jax.Array):
    if not _name.startswith("_"):
        setattr(ArrayOperators, _name, _attribute(_name))
ArrayOperators.__hash__ = None
