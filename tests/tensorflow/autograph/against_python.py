"""Python itself as the reference: functions that are converted, and the same ones that are not."""

import jax
import jax.numpy as jnp
import numpy as np

import distributary as dist


def assert_results_are_those_of_python(functions, inputs):
    """Compiles functions of the same arguments into one program, and compares their results."""
    compiled = dist.function(
        lambda *values: {f.__name__: f(*values) for f in functions}, autograph=True
    )
    for values in inputs:
        got = compiled(*map(jnp.asarray, values))
        for function in functions:
            expected, own = function(*values), got[function.__name__]
            assert jax.tree.structure(own) == jax.tree.structure(expected), function.__name__
            for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-6, err_msg=f"{function.__name__}{values}")
