"""What `Strategy.run` and `distributary.function` do with functions, arguments and errors."""

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist
from distributary.errors import ContextError


def _replica_id():
    return dist.get_replica_context().replica_id_in_sync_group


def test_arguments_by_position_and_keyword(strategy_of):
    def step(a, b, *, c=0, d=0):
        return a + 10 * b + 100 * c + 1000 * d

    for run in (strategy_of(2).run, dist.OneDeviceStrategy("CPU:0").run, dist.get_strategy().run):
        for args in ((1, 2), [1, 2]):
            result = run(step, args, {"c": 3}, options=dist.RunOptions())
            for component in getattr(result, "values", (result,)):
                assert int(component) == 321


def test_arguments_are_not_changed(strategy_of):
    arguments = {"x": dist.PerReplica([1.0, 2.0]), "y": [np.ones(2)]}
    kept = arguments["x"]

    def step(nest):
        nest["y"].append(1)
        nest["z"] = nest.pop("x")

    strategy_of(2).run(step, (arguments,))

    assert arguments.keys() == {"x", "y"}
    assert arguments["x"] is kept
    assert len(arguments["y"]) == 1


@dataclasses.dataclass
class Model:
    """An object with state in attributes, as users write them; it has no hash."""

    scale: float

    def __post_init__(self):
        self.v = dist.Variable(1.0)

    def step(self, x):
        return self.v.assign_add(self.scale * x)

    @dist.function
    def compiled(self, x):
        return self.step(x)

    @classmethod
    def name_length(cls):
        return len(cls.__name__)

    @staticmethod
    def double(x):
        return x * 2

    def __call__(self, x):
        return self.step(x)


def test_every_kind_of_callable_is_run(strategy):
    with strategy.scope():
        model, other = Model(1.0), Model(10.0)
    x = jnp.float32(1.0)

    results = [
        strategy.run(function, args)
        for function, args in (
            (model.step, (x,)),
            (other.step, (x,)),
            (model, (x,)),
            (functools.partial(model.step, x), ()),
            (Model.double, (x,)),
            (jax.jit(lambda y: y * 3), (x,)),
            (dist.function(lambda y: y * 4), (x,)),
            (model.compiled, (x,)),
            (jnp.negative, (x,)),
        )
    ]

    assert [float(r.values[1]) for r in results] == [2, 11, 3, 4, 2, 3, 4, 5, -1]
    assert strategy.run(Model.name_length) == 5
    assert float(model.compiled(x)) == 6.0
    assert float(other.compiled(x)) == 21.0


def test_functions_nest_and_mix_variables_of_one_device_and_of_replicas(strategy, variable):
    steps_done = dist.Variable(0)
    v = variable(0.0)

    @dist.function
    def train():
        strategy.run(lambda: v.assign_add(steps_done * 1.0))
        steps_done.assign_add(1)

    @dist.function
    def outer():
        train()
        v.assign_add(strategy.reduce("SUM", strategy.run(lambda: v * 1.0), axis=None))
        return strategy.run(dist.function(lambda: v * 1.0)).values[1] + v

    for _ in range(2):
        train()
    assert float(outer()) == 2 * 3 * (0 + 1 + 2)
    strategy.run(lambda: v.assign_add(steps_done * 100.0))

    assert (steps_done.numpy(), v.numpy()) == (3, 3 * (0 + 1 + 2) + 300)


def test_function_is_used_as_decorator_with_options(strategy_of):
    @dist.function(jit_compile=True, reduce_retracing=True, autograph=False)
    def double(x):
        """Doubles."""
        return x * 2

    assert float(double(2.0)) == 4.0
    assert (double.__name__, double.__doc__) == ("double", "Doubles.")
    assert "double" in repr(double)
    assert float(double.python_function(3.0)) == 6.0
    with pytest.raises(TypeError, match="function: got 3, expected a function"):
        dist.function(3)


def test_captured_arrays_may_lie_anywhere(strategy_of):
    strategy = strategy_of(2)
    with strategy.scope():
        v = dist.Variable(0.0)
    elsewhere = jax.device_put(np.float32(2.0), jax.devices()[5])
    everywhere = strategy_of(4).run(lambda: jnp.ones(()))

    def step(x):
        return v.assign_add(elsewhere + everywhere.values[3] + x)

    assert float(strategy.run(step, (elsewhere,)).values[1]) == 5.0
    assert float(dist.function(step)(elsewhere)) == 10.0


def test_strategies_are_not_copied(strategy):
    with pytest.raises(ContextError, match=r"2 replicas.* cannot be copied"):
        copy.copy(strategy)
    assert copy.deepcopy(strategy) is strategy
    with pytest.raises(ContextError, match="one default strategy"):
        copy.deepcopy(dist.get_strategy())


def test_strategies_name_their_devices(strategy_of):
    for strategy, start, devices in (
        (strategy_of(2), "<MirroredStrategy: 2 replicas on CPU:0, CPU:1;", ["CPU:0", "CPU:1"]),
        (strategy_of(1), "<MirroredStrategy: 1 replica on CPU:0>", ["CPU:0"]),
        (dist.OneDeviceStrategy("CPU:3"), "<OneDeviceStrategy: 1 replica on CPU:3>", ["CPU:3"]),
        (dist.get_strategy(), "<the default strategy: 1 replica", None),
    ):
        assert repr(strategy).startswith(start)
        assert start.rstrip(";>").partition(": ")[2] in strategy._repr_html_()
        assert strategy.num_replicas_in_sync == len(devices or [1])
        assert strategy.cluster_resolver is None
        assert strategy.extended.experimental_require_static_shapes is False
        if devices is not None:
            names = strategy.extended.worker_devices
            assert [name.rpartition("device:")[2] for name in names] == devices
            assert strategy.extended.parameter_devices == names
    with pytest.raises(ContextError, match="default strategy has no devices"):
        _ = dist.get_strategy().extended.worker_devices
    with pytest.raises(TypeError, match="cross_device_ops is 'nccl'"):
        dist.MirroredStrategy(cross_device_ops="nccl")
    with pytest.raises(TypeError, match=r"device is \['CPU:0'\]"):
        dist.OneDeviceStrategy(["CPU:0"])
