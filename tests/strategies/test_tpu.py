"""TPUStrategy on CPU devices, with replicas of several logical devices."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import distributary as dist
from distributary.devices import make_mesh
from distributary.errors import (
    ClusterError,
    ContextError,
    DeviceError,
    InvalidTypeError,
    InvalidValueError,
    UnsupportedError,
)
from distributary.programs import ReplicaProgram, constrained, spec_of_split
from distributary.tools.compilation import collectives_of
from distributary.tpu.experimental import DeviceAssignment, Topology, initialize_tpu_system
from tests.strategies.tpu import tpu_strategy


def _mlp(strategy, split):
    """A training step of two layers, whose hidden units are split over the cores or not."""
    rng = np.random.default_rng(0)
    with strategy.scope():
        variables = [
            dist.Variable(rng.normal(size=shape).astype(np.float32) / 8)
            for shape in ((16, 64), (64, 4))
        ]

    def step(x):
        def loss(first, second):
            if split:
                first = strategy.experimental_split_to_logical_devices(first, [1, split])
            hidden = jax.nn.relu(x @ first)
            if split:
                hidden = strategy.experimental_split_to_logical_devices(hidden, [1, split])
            return (jnp.tanh(hidden @ second) ** 2).sum() / 24

        value, gradients = jax.value_and_grad(loss, (0, 1))(*(v.value() for v in variables))
        gradients = dist.get_replica_context().all_reduce("SUM", gradients)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(0.3 * gradient)
        return value

    return variables, step


def _trained(strategy, split=0, compile_step=False):
    variables, step = _mlp(strategy, split)
    run = lambda batch: strategy.reduce("SUM", strategy.run(step, (batch,)), axis=None)
    if compile_step:
        run = dist.function(run)
    x = np.random.default_rng(1).normal(size=(68, 16)).astype(np.float32)
    batches = [x[:24], x[24:48], x[48:67]]  # the last one is uneven
    losses = [float(run(batch)) for batch in strategy.experimental_distribute_dataset(batches)]
    assert all(v.value().sharding.is_fully_replicated for v in variables)
    return [v.numpy() for v in variables], losses


@pytest.mark.parametrize(
    ("num_replicas", "num_cores", "compile_step"), [(1, 4, False), (2, 2, True)]
)
def test_split_training_equals_that_of_one_device(num_replicas, num_cores, compile_step):
    expected_weights, expected_losses = _trained(dist.OneDeviceStrategy("CPU:0"))

    strategy = tpu_strategy(num_replicas, num_cores)
    weights, losses = _trained(strategy, num_cores, compile_step)

    assert strategy.num_replicas_in_sync == num_replicas
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for found, expected in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_the_computation_is_partitioned_over_the_cores():
    strategy = tpu_strategy(2, 4)
    batch = dist.PerReplica([np.ones((8, 16), np.float32)] * 2)

    def compiled(split):
        _, step = _mlp(strategy, split)
        return strategy.extended.lower(step, (batch,)).compile()

    whole, parts = compiled(0), compiled(4)

    dots = r"= f32\[([0-9,]+)\]\S* dot\("
    assert "8,64" in re.findall(dots, whole.as_text())
    assert "8,64" not in re.findall(dots, parts.as_text())
    assert "8,16" in re.findall(dots, parts.as_text())
    # Gradients are added between the same cores of the replicas only.
    groups = [collective.groups for collective in collectives_of(parts.as_text())]
    assert ((0, 4), (1, 5), (2, 6), (3, 7)) in groups
    # The hidden layer takes a quarter of the room on each device.
    temporary = [c.memory_analysis().temp_size_in_bytes for c in (whole, parts)]
    assert temporary[1] < 0.75 * temporary[0]


@pytest.mark.parametrize("parts", [[4, 1], [1, 4], [2, 2], [6, 2], [4, 3]])
def test_arrays_are_split_in_every_way(parts):
    # Of a mesh whose devices do not exist only the axes are looked at.
    mesh = make_mesh([[object()] * (parts[0] * parts[1])])

    spec = spec_of_split(mesh, (12, 24), parts)

    axes = [[names] if isinstance(names, str) else names or () for names in spec]
    assert [math.prod(mesh.shape[name] for name in names) for names in axes] == parts
    assert len({name for names in axes for name in names}) == sum(map(len, axes))


def test_a_split_over_two_dims_gives_every_core_a_block():
    strategy = tpu_strategy(1, 4)
    x = np.arange(12 * 24, dtype=np.float32).reshape(12, 24)

    def step(x):
        return jnp.sin(strategy.experimental_split_to_logical_devices(x, [2, 2]))

    text = strategy.extended.lower(step, (x,)).compile().as_text()
    result = strategy.run(step, (x,))

    assert "entry_computation_layout={(f32[6,12]" in text
    np.testing.assert_allclose(result, np.sin(x), rtol=1e-6, atol=1e-6)
    assert result.sharding.is_fully_replicated
    assert len(result.devices()) == 4


def test_a_split_can_stand_inside_transformations():
    strategy = tpu_strategy(2, 2)
    x = dist.PerReplica([np.full((3, 4, 6), 1.0 + i, np.float32) for i in range(2)])

    def split(row):
        return strategy.experimental_split_to_logical_devices(row, [1, 2])

    def step(x):
        def body(total, row):
            return total + dist.get_replica_context().all_reduce("SUM", split(row * 2)), None

        whole = strategy.experimental_replicate_to_logical_devices(jax.vmap(split)(x))
        total, _ = lax.scan(body, jnp.zeros((4, 6)), whole)
        gradient = jax.grad(lambda x: (jax.checkpoint(jax.vmap(split))(x) ** 2).sum())(x)
        return total, gradient

    total, gradient = strategy.run(step, (x,))

    for replica in range(2):
        np.testing.assert_allclose(total.values[replica], np.full((4, 6), 18.0))
        np.testing.assert_allclose(gradient.values[replica], 2 * x.values[replica])


@pytest.mark.parametrize(
    ("parts", "error", "match"),
    [
        ([1, 1, 2], InvalidValueError, r"expected one number for each dim of \(4, 6\)"),
        ([1, 4], InvalidValueError, "6 of the shape .* does not divide into 4"),
        ([0, 2], InvalidValueError, "does not divide into 0"),
        ([1, 3], InvalidValueError, "whose product is 3; a replica has 2 logical devices"),
        ([1.0, 2], InvalidTypeError, r"\[1.0, 2\], expected ints"),
    ],
)
def test_splits_that_do_not_fit_are_refused(parts, error, match):
    strategy = tpu_strategy(2, 2)

    with pytest.raises(error, match=match):
        strategy.run(
            lambda: strategy.experimental_split_to_logical_devices(jnp.ones((4, 6)) + 0, parts)
        )


def test_nothing_can_be_placed_on_one_of_several_logical_devices():
    strategy = tpu_strategy(2, 2)
    single = tpu_strategy(2, 1)

    with pytest.raises(ValueError, match="on logical device 1 alone: the 2 logical devices"):
        strategy.run(lambda: strategy.experimental_assign_to_logical_device(jnp.ones(2), 1))
    with (
        pytest.raises(ValueError, match="on logical device 0 alone"),
        strategy.extended.experimental_logical_device(0),
    ):
        pass
    with pytest.raises(ValueError, match="logical_device_id is 2, expected 0 to 1"):
        strategy.experimental_assign_to_logical_device(jnp.ones(2), 2)
    with single.extended.experimental_logical_device(0):
        assert single.experimental_assign_to_logical_device(3, 0) == 3
    with pytest.raises(ContextError, match="outside of a step"):
        strategy.experimental_replicate_to_logical_devices(jnp.ones(2))


def test_what_jax_cannot_compile_beside_logical_devices_is_refused():
    strategy = tpu_strategy(2, 2)

    def narrow():
        return dist.get_replica_context().all_reduce("SUM", jnp.ones(2, jnp.bfloat16))

    def nested():
        return lax.fori_loop(0, 2, lambda i, x: x + lax.axis_index("replica"), 0)

    with pytest.raises(UnsupportedError, match=r"bfloat16 .* Convert the values to float32"):
        strategy.run(narrow)
    with pytest.raises(UnsupportedError, match="axis_index inside control flow"):
        strategy.run(nested)
    ids = strategy.run(lambda: lax.axis_index("replica") + jnp.int32(1))
    assert [int(i) for i in ids.values] == [1, 2]
    # Of a replica's devices, on the first.
    assert [i.devices() for i in ids.values] == [{jax.devices()[0]}, {jax.devices()[2]}]


def test_the_devices_are_those_of_the_assignment():
    devices = jax.devices()
    topology = Topology.of_devices(devices, [2, 2, 1, 2])
    assignment = DeviceAssignment(topology, [[[1, 0, 0, 0], [1, 1, 0, 1]]] * 1)

    strategy = dist.experimental.TPUStrategy(None, assignment)

    assert strategy.extended.mesh.devices.ravel().tolist() == [devices[4], devices[7]]
    assert strategy.extended.worker_devices == ("/job:localhost/replica:0/task:0/device:CPU:4",)
    assert repr(strategy) == (
        "<TPUStrategy: 1 replica on CPU:4, each with 1 more for its logical devices>"
    )
    assert strategy.cluster_resolver.cluster_spec().as_dict() == {}
    options = dist.RunOptions(experimental_xla_options=dist.tpu.XLAOptions())
    assert float(strategy.run(lambda x: x + 1, (1.0,), options=options)) == 2


def test_only_a_resolver_says_which_task_this_is():
    cluster = dist.cluster_resolver.ClusterSpec({"worker": ["10.0.0.1:1"]})

    with pytest.raises(InvalidTypeError, match=r"is ClusterSpec.*expected a ClusterResolver"):
        dist.config.experimental_connect_to_cluster(cluster)


@pytest.mark.parametrize(
    "connect",
    [
        dist.MultiWorkerMirroredStrategy,
        dist.TPUStrategy,
        dist.config.experimental_connect_to_cluster,
    ],
)
def test_a_task_beside_the_workers_does_not_connect(connect):
    cluster = dist.cluster_resolver.ClusterSpec(
        {"worker": ["10.0.0.1:1", "10.0.0.2:1"], "evaluator": ["10.0.0.3:1"]}
    )
    resolver = dist.cluster_resolver.SimpleClusterResolver(
        cluster, task_type="evaluator", task_id=0
    )

    with pytest.raises(ClusterError, match=r"is evaluator.*does not train with the workers"):
        connect(resolver)


def test_without_a_tpu_it_says_what_it_looked_for():
    resolver = dist.cluster_resolver.TPUClusterResolver("local")
    serialized = Topology(mesh_shape=[1, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0]]])

    looked_for = r"there is no TPU here. JAX was asked for TPU devices and has 8 CPU devices; .*pip"
    with pytest.raises(DeviceError, match=f"TPUStrategy: {looked_for}"):
        dist.TPUStrategy(resolver)
    with pytest.raises(DeviceError, match=f"TPUStrategy: {looked_for}"):
        dist.TPUStrategy(experimental_device_assignment=DeviceAssignment.build(serialized))
    with pytest.raises(DeviceError, match=f"initialize_tpu_system: {looked_for}"):
        initialize_tpu_system(resolver)
    assert resolver.get_tpu_system_metadata() == (0, 0, 0, None, ())
    with pytest.raises(InvalidTypeError, match="resolver is 'local', expected a ClusterResolver"):
        dist.TPUStrategy("local")
    with pytest.raises(InvalidTypeError, match="assignment is 'v5e', expected a DeviceAssignment"):
        dist.TPUStrategy(experimental_device_assignment="v5e")


def test_a_step_is_partitioned_for_a_real_tpu(monkeypatch):
    pytest.importorskip("libtpu")
    from jax.experimental import topologies

    for name, value in {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }.items():
        monkeypatch.setenv(name, value)
    description = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4")
    topology = Topology.of_devices(description.devices)
    assignment = DeviceAssignment.build(topology, computation_shape=[1, 2, 1, 1], num_replicas=4)
    mesh = make_mesh([[topology.jax_device(c) for c in r] for r in assignment.core_assignment])

    def step(x, w):
        hidden = constrained(x @ constrained(w, mesh, P(None, "core0")), mesh, P(None, "core0"))
        total = lax.psum(hidden.sum(0, dtype=jnp.bfloat16), "replica")
        return [total + lax.axis_index("replica").astype(jnp.bfloat16)]

    x = jax.ShapeDtypeStruct((128, 256), jnp.float32)
    w = jax.ShapeDtypeStruct((256, 512), jnp.float32)
    program = ReplicaProgram(step, [[x, w]], [True, False], 4, mesh)
    rows = jax.ShapeDtypeStruct(
        (4, *x.shape), x.dtype, sharding=jax.sharding.NamedSharding(mesh, P("replica"))
    )
    whole = jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=jax.sharding.NamedSharding(mesh, P()))
    text = jax.jit(program).lower([[]], [], [], [rows, whole]).compile().as_text()

    assert (topology.mesh_shape.tolist(), topology.num_tasks) == ([2, 4, 1, 1], 2)
    assert {topology.jax_device(c).coords[1] for c in assignment.core_assignment[0]} == {0, 1}
    # Each core has half of the 512 columns of `w`.
    assert "f32[128,512]" not in text
    assert "[128,256]" in text
