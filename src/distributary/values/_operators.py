"""Arithmetic for objects that stand for an array."""

import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp


class ArrayOperators:
    """Python's operators and the methods of `jax.Array`, applied to the array of `__jax_array__`.

    Comparison with `==` is element-wise, as for arrays.
    """

    __slots__ = ()

    # Makes NumPy arrays on the left leave the operation to us instead of converting to NumPy.
    __array_priority__ = 100

    def __jax_array__(self) -> Any:
        raise NotImplementedError

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Returns an attribute of the array. For type checkers only.

            At run time, the attributes of `jax.Array` are properties. With this function, Python
            could not cache where it finds attributes, and each would take twice as long to read,
            including those that a cached program reads of its variables.
            """

        def _operator(self, other: Any) -> Any: ...

        __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = _operator
        __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = _operator
        __rpow__ = __matmul__ = __rmatmul__ = __lshift__ = __rlshift__ = _operator
        __rshift__ = __rrshift__ = __and__ = __rand__ = __or__ = __ror__ = _operator
        __xor__ = __rxor__ = __lt__ = __le__ = __gt__ = __ge__ = _operator

    def __getitem__(self, index: Any) -> Any:
        return self.__jax_array__()[index]

    def __len__(self) -> int:
        return len(self.__jax_array__())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__jax_array__())

    def __bool__(self) -> bool:
        return bool(self.__jax_array__())

    def __int__(self) -> int:
        return int(self.__jax_array__())

    def __float__(self) -> float:
        return float(self.__jax_array__())

    def __complex__(self) -> complex:
        return complex(self.__jax_array__())

    def __index__(self) -> int:
        return operator.index(self.__jax_array__())

    def __neg__(self) -> Any:
        return -self.__jax_array__()

    def __pos__(self) -> Any:
        return +self.__jax_array__()

    def __abs__(self) -> Any:
        return abs(self.__jax_array__())

    def __invert__(self) -> Any:
        return ~self.__jax_array__()

    def __round__(self, ndigits: int | None = None) -> Any:
        return jnp.round(self.__jax_array__(), ndigits or 0)


def _plain(value: Any) -> Any:
    return value.__jax_array__() if isinstance(value, ArrayOperators) else value


def _binary(function: Callable[[Any, Any], Any]) -> Any:
    def method(self: ArrayOperators, other: Any) -> Any:
        return function(self.__jax_array__(), _plain(other))

    return method


def _reflected(function: Callable[[Any, Any], Any]) -> Any:
    def method(self: ArrayOperators, other: Any) -> Any:
        return function(_plain(other), self.__jax_array__())

    return method


def _attribute(name: str) -> Any:
    return property(lambda self: getattr(self.__jax_array__(), name))


_ARITHMETIC = (
    "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()  # noqa: SIM905
)
_COMPARISON = ("eq", "ne", "lt", "le", "gt", "ge")
for _name in (*_ARITHMETIC, *_COMPARISON):
    setattr(ArrayOperators, f"__{_name}__", _binary(getattr(operator, f"__{_name}__")))
for _name in _ARITHMETIC:
    setattr(ArrayOperators, f"__r{_name}__", _reflected(getattr(operator, f"__{_name}__")))
for _name in dir(jax.Array):
    if not _name.startswith("_"):
        setattr(ArrayOperators, _name, _attribute(_name))
ArrayOperators.__hash__ = None  # type: ignore[assignment]
