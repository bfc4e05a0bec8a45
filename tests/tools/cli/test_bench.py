"""`distributary bench`."""

import json
import re

import numpy as np
import pytest

from distributary.devices import watch_programs
from distributary.errors import InvalidValueError
from distributary.tools.cli import main
from distributary.tools.compilation import Script, run_script
from distributary.tools.scaling import Network, Timing, predict
from distributary.tools.scaling._measurement import StepTimer

# As a user would write it: input in every step, a batch that does not grow, other programs too.
_SCRIPT = """
import sys
import jax.numpy as jnp
import numpy as np
import distributary as dist

dist.config.set_logical_cpu_devices(2)  # has no effect
strategy = dist.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
with strategy.scope():
    weights = dist.Variable(np.ones((5, 7), np.float32))
    count = dist.Variable(0, trainable=False)

def count_up():
    count.assign_add(1)

def train_step(x):
    loss, gradient = dist.value_and_grad(lambda x: jnp.sum(x @ weights.value()), weights)(x)
    gradient = dist.get_replica_context().all_reduce("SUM", gradient)
    weights.assign_sub(1e-9 * gradient)
    return loss

dataset = [np.ones((12, 5), np.float32)] * int(sys.argv[1])
for batch in strategy.experimental_distribute_dataset(dataset):
    strategy.run(count_up)
    strategy.run(train_step, args=(batch,))
"""


@pytest.fixture
def timed(tmp_path):
    """A function that runs the script or a module in this process and returns its timing."""
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)

    def run(*arguments, module=None, step_name=None):
        timer = StepTimer(0.1, step_name)
        watch_programs(timer.wrap)
        path = module or str(script)
        run_script(Script(path, [*map(str, arguments)], is_module=module is not None))
        return timer.timing("train.py")

    yield run
    watch_programs(None)


def test_the_step_of_a_script_is_found_and_its_all_reduce_measured(timed):
    timing = timed(10**6)

    assert (timing.step, timing.platform, timing.num_replicas) == ("train_step", "cpu", 3)
    assert timing.examples_per_step == 12
    assert (timing.num_reductions, timing.reduced_bytes) == (1, 5 * 7 * 4)
    assert len(timing.block_seconds) == 5
    assert 0 < timing.seconds < 0.1
    assert timing.reduction_seconds > 0


def test_a_script_without_enough_steps(timed):
    with pytest.raises(InvalidValueError, match=r"train.py ended after 2 steps. Let it train"):
        timed(2)
    with pytest.raises(InvalidValueError, match=r"train.py ended without running 'no_step' under"):
        timed(2, step_name="no_step")


def test_the_transformer_is_measured(timed):
    timing = timed("transformer", 1, module="distributary.tools.scaling._training_loop")

    weights = 1000 * 128 + 64 * 128 + 2 * (4 * 128 * 128 + 2 * 128 * 512) + 128 * 1000
    assert (timing.num_replicas, timing.examples_per_step) == (8, 8)
    assert (timing.num_reductions, timing.reduced_bytes) == (1, 4 * (weights + 1))  # and the loss


def test_activations_that_travel_are_named_with_their_line(tmp_path, capsys):
    script = tmp_path / "train.py"
    text = _SCRIPT.replace('"CPU:0", "CPU:1", "CPU:2"', '"CPU:0", "CPU:1"')
    text = text.replace(
        "def train_step(x):",
        """def train_step(x):
    x = x - dist.get_replica_context().all_reduce("MEAN", jnp.mean(x, 0))""",
    )
    line = 1 + next(i for i, line in enumerate(text.splitlines()) if "jnp.mean(x, 0)" in line)
    script.write_text(text)

    code = main(["bench", "--replicas", "2", "--seconds", "0.1", str(script), "1000000"])

    out = capsys.readouterr().out
    assert code == 0, out
    place = rf"1 all-reduce, 20 B, train.py:{line}: \S+\n"
    assert re.search(rf"activations that travel between devices:\n +{place}", out), out


def test_models_are_measured_and_hosts_predicted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    network = ["--hosts", "4", "--gbit", "8", "--latency-us", "100"]
    options = ["--replicas", "2,1", "--global-batch", "8", "--seconds", "0.1"]

    code = main(["bench", *options, *network, "--json", "out.json", "--plot", "plot.png"])

    found = json.loads((tmp_path / "out.json").read_text())
    one, two = found["measured"]
    assert code == 0
    assert (one["num_replicas"], two["num_replicas"]) == (1, 2)
    assert (one["num_reductions"], two["num_reductions"]) == (0, 1)
    # The gradients and the loss.
    assert two["reduced_bytes"] == 4 * (784 * 512 + 512 * 512 + 512 * 10 + 1)
    assert one["examples_per_step"] == two["examples_per_step"] == 8
    assert two["seconds"] == np.median(two["block_seconds"])
    assert two["efficiency"] == pytest.approx(one["seconds"] / two["seconds"] / 2)
    assert two["communication"] == pytest.approx(two["reduction_seconds"] / two["seconds"])
    (four,) = found["predicted"]
    assert four["num_replicas"] == 8
    # 2 * 3 / 4 of the bytes at 1 GB/s, 2 * 3 times 100 us.
    more = 1.5 * two["reduced_bytes"] / 1e9 + 6e-4
    assert four["seconds"] == pytest.approx(two["seconds"] + more)
    assert four["examples_per_second"] == pytest.approx(32 / four["seconds"])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "measured: mlp, 8 examples, step 'step', CPU devices" in out
    assert "predicted, not measured: hosts of 2 replicas in a ring" in out
    assert "(the given latency and the given bandwidth)" in out
    assert "█" in out
    gain = two["examples_per_second"] / one["examples_per_second"]
    more = f"pay: 2 train {gain:.2f} times as fast as 1." if gain > 1 else "do not pay: 1 trains"
    assert f"More devices {more}" in out


def test_a_script_that_fails_shows_its_last_lines(tmp_path, capsys):
    script = tmp_path / "broken.py"
    script.write_text("print('about to fail')\nraise SystemExit(3)")

    code = main(["bench", "--replicas", "1", str(script)])

    error = capsys.readouterr().err
    assert code == 1
    assert f"With --replicas 1, {script} ended with exit code 3. Its last lines:" in error
    assert error.endswith("  about to fail\n")


def test_a_host_alone_is_predicted_as_measured():
    timing = Timing("step", "cpu", 2, (0.3, 0.1, 0.2), None, 3, 1000, 0.01, [])

    one, two = predict(timing, Network(1.0, 100.0, "given"), [1, 2])

    assert (one.seconds, one.efficiency, one.examples_per_second) == (0.2, 1.0, None)
    assert two.seconds == pytest.approx(0.2 + 10 + 2 * 3)
