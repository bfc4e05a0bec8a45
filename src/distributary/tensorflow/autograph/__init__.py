"""Python control flow over traced values, converted to control flow of JAX.

    def step(x):
        while jnp.max(x) > 1:      # `while` needs the value of x ...
            x = x / 2
        return x

becomes, without a change to its file, `jax.lax.while_loop`. `converted` rewrites a function with
diastatic-malt, which is TensorFlow's AutoGraph without TensorFlow, and `_operators` says what
`if`, `while`, `for`, `and`, `assert` and others mean. Python values stay Python: a loop over a list
is unrolled, and `if training:` is decided while the step is traced.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, final

from distributary._late import Library, register
from distributary.tensorflow.autograph._conversion import (
    converted as converted,
    do_not_convert,
    set_loop_options,
)
from distributary.tensorflow.autograph._loops import Range as Range
from distributary.tensorflow.autograph._operators import (
    and_ as and_,
    check_when_run as check_when_run,
    is_traced as is_traced,
    while_stmt as while_stmt,
)
from distributary.tensorflow.autograph._recorded import (
    NOT_YET as NOT_YET,
    checked_copies,
    plain as plain,
)

__all__ = ["do_not_convert", "set_loop_options"]  # for users


@final
class _AutoGraph(Library):
    def around_trace(self) -> AbstractContextManager[object]:
        return checked_copies()

    def converted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return converted(function)


register(_AutoGraph())
