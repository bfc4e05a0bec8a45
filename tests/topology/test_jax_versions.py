"""Versions of JAX other than those of the tests, and what is new in tested ones."""

import logging
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.errors import UnsupportedError
from distributary.topology._versions import NEWEST_TESTED_JAX, _minor, warn_of_untested_jax

_DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("version", "warned"),
    [("0.10.2", 0), (f"{NEWEST_TESTED_JAX}.9", 0), ("0.99.0.dev1+g12", 1), ("1.0.0", 1)],
)
def test_a_version_that_was_not_tested_is_named_once(version, warned, caplog, monkeypatch):
    warn_of_untested_jax.cache_clear()
    monkeypatch.setattr(jax, "__version__", version)

    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            dist.MirroredStrategy(["CPU:0", "CPU:1"])

    assert len(caplog.messages) == warned
    assert all(message.startswith(f"JAX {version} is newer") for message in caplog.messages)


def test_the_default_strategy_says_nothing(caplog, monkeypatch):
    warn_of_untested_jax.cache_clear()
    monkeypatch.setattr(jax, "__version__", "1.0.0")

    assert dist.get_strategy().run(lambda: 3) == 3

    assert not caplog.messages


def test_the_docs_name_the_newest_tested_version():
    text = (_DOCS / "versions.md").read_text()

    versions = re.findall(r"^\| \d\.\d+ \| (\d+\.\d+)", text, re.MULTILINE)

    assert max(versions, key=_minor) == NEWEST_TESTED_JAX


# One equation in JAX 0.12: its parts show only when it is compiled.
_SEARCHES = {
    "searchsorted": lambda x: jnp.searchsorted(jnp.arange(8.0), x),
    "nonzero": lambda x: jnp.nonzero(x > 2, size=4)[0],
    "ldexp": lambda x: jnp.ldexp(x, 2),
    "root": lambda x: jax.lax.custom_root(
        lambda r: r**3 - x, x, lambda f, x: x ** (1 / 3), lambda g, y: y / g(jnp.ones_like(y))
    ),
}


@pytest.mark.parametrize("function", _SEARCHES.values(), ids=_SEARCHES)
@pytest.mark.parametrize("is_looped", [False, True], ids=["once", "in a loop"])
def test_functions_that_stay_one_equation_can_be_in_steps(function, is_looped, strategy_of):
    strategy = strategy_of(2)
    with strategy.scope():
        count = dist.Variable(jnp.zeros(4), aggregation=dist.VariableAggregation.MEAN)

    def step(x):
        def once(_, total):
            total = total + function(x + dist.get_replica_context().replica_id_in_sync_group)
            return dist.get_replica_context().all_reduce("MEAN", total)

        zero = jnp.zeros(4)
        total = jax.lax.fori_loop(0, 3, once, zero) if is_looped else once(0, zero)
        count.assign_add(total)
        return total

    x = np.array([1.0, 8.0, 3.0, 5.0], np.float32)
    found = strategy.run(step, (x,))

    expected = (3 if is_looped else 1) * (function(x) + function(x + 1)) / 2
    for own in (*found.values, count.value()):
        np.testing.assert_allclose(own, expected, rtol=1e-6)


def test_the_derivative_of_a_root_is_its_own(strategy_of):
    strategy = strategy_of(2)
    with strategy.scope():
        weight = dist.Variable(jnp.full(4, 8.0))

    def step():
        with dist.GradientTape() as tape:
            root = _SEARCHES["root"](weight.value()).sum()
        return tape.gradient(root, weight)

    # Of x ** (1 / 3).
    for gradient in strategy.run(step).values:
        np.testing.assert_allclose(gradient, np.full(4, 1 / 12), rtol=1e-5)


def test_a_variable_read_inside_a_root_is_refused(strategy_of):
    strategy = strategy_of(2)
    with strategy.scope():
        weight = dist.Variable(8.0)

    def step():
        def function(r):
            return r**3 - weight.value()

        return jax.lax.custom_root(
            function, jnp.float32(1), lambda f, x: x - f(x), lambda g, y: y / g(jnp.ones_like(y))
        )

    with pytest.raises(UnsupportedError, match="A variable or a GradientTape is used inside"):
        strategy.run(step)
