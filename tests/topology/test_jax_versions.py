"""Versions of JAX other than those of the tests, and what is new in tested ones."""

import logging
import re
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import distributary as dist
from distributary.devices import TESTED, _jax_private, make_mesh, missing_names, warn_of_untested
from distributary.errors import UnsupportedError

_ROOT = Path(__file__).parents[2]
_BEYOND = TESTED["jax"][1]


@pytest.mark.parametrize(
    ("version", "warned"), [("0.10.2", 0), (f"{_BEYOND}.0.dev1+g12", 1), ("1.0.0", 1)]
)
def test_a_version_that_was_not_tested_is_named_once(version, warned, caplog, monkeypatch):
    warn_of_untested.cache_clear()
    monkeypatch.setattr(jax, "__version__", version)

    with caplog.at_level(logging.WARNING):
        assert dist.get_strategy().run(lambda: 3) == 3
        assert not caplog.messages
        for _ in range(2):
            dist.MirroredStrategy(["CPU:0", "CPU:1"])

    warning = (
        f"JAX {version} is newer than what distributary is tested with. If a program fails that"
        f" should not, install a tested version: pip install 'jax>=0.10.2,<{_BEYOND}'."
    )
    assert caplog.messages == [warning] * warned
    warn_of_untested("keras", "3.15.1")
    assert len(caplog.messages) == warned
    warn_of_untested("keras", "3.99.0")
    assert caplog.messages[-1].startswith("Keras 3.99.0 is newer than what distributary is tested")
    assert caplog.messages[-1].endswith(f"pip install 'keras>=3.15,<{TESTED['keras'][1]}'.")


@pytest.mark.parametrize(("package", "column"), [("jax", 1), ("keras", 2)])
def test_pins_docs_and_warnings_name_the_same_versions(package, column):
    oldest, beyond = TESTED[package]
    text = (_ROOT / "docs" / "versions.md").read_text()
    rows = re.findall(r"^\| (\d\.\d+ \|.*)", text, re.MULTILINE)
    tested = [re.match(r"\d+\.\d+", row.split("|")[column].strip())[0] for row in rows]
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    pins = [*project["dependencies"], *project["optional-dependencies"]["keras"]]

    assert f"{package}>={oldest}" in pins
    major, minor = _minor(max(tested, key=_minor))
    assert (major, minor + 1) == _minor(beyond)
    assert _minor(min(tested, key=_minor)) == _minor(oldest)


def _minor(version):
    return tuple(map(int, version.split(".")[:2]))


def test_this_version_of_jax_has_every_private_name():
    """Says which have gone, all at once; what replaces them is slower or says less."""
    assert [name for name in missing_names if name.startswith("jax.")] == []


def _inside(function):
    found = []
    function(lambda x: found.append(_jax_private.inside_jax_trace()) or x)
    return found


@pytest.mark.parametrize("names", ["all", "only those for extensions", "none"])
def test_traces_are_noticed_without_private_names(names, monkeypatch):
    if names != "all":
        monkeypatch.setattr(_jax_private, "_knows_top", False)
    if names == "none":
        monkeypatch.setattr(_jax_private, "_is_under_jit", _jax_private._is_traced)
    x = jnp.ones(3)

    assert _inside(lambda note: note(x)) == [False]
    assert _inside(lambda note: jax.jit(note)(x)) == [True]
    assert _inside(lambda note: jax.vmap(note)(x)) == [False]
    assert _inside(lambda note: jax.grad(note)(1.0)) == [False]
    assert _inside(lambda note: jax.jit(jax.grad(note))(1.0)) == [True]
    assert True in _inside(lambda note: jax.lax.map(note, x))


def test_rows_are_put_without_private_names(monkeypatch):
    rows = np.arange(24, dtype=np.float64).reshape(2, 6, 2)
    sharding = jax.sharding.NamedSharding(make_mesh(tuple(jax.devices()[:2])), P(None, "replica"))
    expected = _jax_private.put_rows(rows, sharding, jax.devices()[:2], 1)
    monkeypatch.setattr(_jax_private, "_put_batched", _jax_private._put_parts)

    found = _jax_private.put_rows(rows, sharding, jax.devices()[:2], 1)

    assert (found.sharding, found.dtype) == (expected.sharding, expected.dtype)
    np.testing.assert_array_equal(found, rows)
    np.testing.assert_array_equal(expected, rows)


def test_arrays_are_combined_without_private_names(monkeypatch):
    monkeypatch.setattr(_jax_private, "_array", _jax_private._copy_of)
    here, there = (jax.device_put(jnp.arange(3.0), device) for device in jax.devices()[:2])
    with pytest.raises(ValueError, match="incompatible devices"):
        here + there

    np.testing.assert_array_equal(here + _jax_private.uncommitted(there), [0, 2, 4])
    np.testing.assert_array_equal(there + _jax_private.uncommitted(here), [0, 2, 4])


def test_that_jax_has_started_is_noticed_without_private_names(run_python):
    printed = run_python("""
from distributary.devices import _jax_private

_jax_private._backends_started = _jax_private._refuses_another_count
before = jax.config.jax_num_cpu_devices
found = [_jax_private.backends_started() for _ in range(2)]
jax.devices()
print(*found, _jax_private.backends_started(), jax.config.jax_num_cpu_devices == before)
""")

    assert printed == "False False True True"


def test_what_nothing_replaces_is_named(monkeypatch):
    class High:
        is_high = True

    monkeypatch.setattr(_jax_private, "_lower", None)
    monkeypatch.setattr(_jax_private, "_distributed", None)

    assert _jax_private.coordination_client() is None
    with pytest.raises(UnsupportedError) as caught:
        _jax_private.without_high_primitives(High())
    assert str(caught.value) == (
        f"JAX {jax.__version__} has no jax._src.interpreters.partial_eval.lower_jaxpr2, which"
        f" distributary needs. Install a tested version: pip install 'jax>=0.10.2,<{_BEYOND}'."
    )


# One equation in JAX 0.12: its parts show only when it is compiled.
_SEARCHES = {
    "searchsorted": lambda x: jnp.searchsorted(jnp.arange(8.0), x),
    "nonzero": lambda x: jnp.nonzero(x > 2, size=4)[0],
    "ldexp": lambda x: jnp.ldexp(x, 2),
    "root": lambda x: jax.lax.custom_root(
        lambda r: r**3 - x, x, lambda f, x: x ** (1 / 3), lambda g, y: y / g(jnp.ones_like(y))
    ),
}


@pytest.mark.parametrize("is_looped", [False, True], ids=["once", "in a loop"])
def test_functions_that_stay_one_equation_can_be_in_steps(is_looped, strategy):
    zeros, x = jnp.zeros((len(_SEARCHES), 4)), np.array([1.0, 8.0, 3.0, 5.0], np.float32)
    with strategy.scope():
        count = dist.Variable(zeros, aggregation=dist.VariableAggregation.MEAN)
        weight = dist.Variable(jnp.full(4, 8.0))

    def searched(x):
        return jnp.stack([function(x) * 1.0 for function in _SEARCHES.values()])

    def step(x):
        def once(_, total):
            total = total + searched(x + dist.get_replica_context().replica_id_in_sync_group)
            return dist.get_replica_context().all_reduce("MEAN", total)

        total = jax.lax.fori_loop(0, 3, once, zeros) if is_looped else once(0, zeros)
        count.assign_add(total)
        with dist.GradientTape() as tape:
            root = _SEARCHES["root"](weight.value()).sum()
        return total, tape.gradient(root, weight)

    found, gradients = strategy.run(step, (x,))

    expected = (3 if is_looped else 1) * (searched(x) + searched(x + 1)) / 2
    for own in (*found.values, count.value()):
        np.testing.assert_allclose(own, expected, rtol=1e-6)
    for gradient in gradients.values:  # that of x ** (1 / 3)
        np.testing.assert_allclose(gradient, np.full(4, 1 / 12), rtol=1e-5)


def test_a_variable_read_inside_a_root_is_refused(strategy):
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
