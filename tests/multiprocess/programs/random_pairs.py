"""Random scripts that two workers run, of which one has another in one place.

    random_pairs.py SEED FIRST LAST

Prints a line for every pair: its number, what differs, and what this worker has heard of it. A pair
that ends the job prints what was heard, too; the next job goes on after it.
"""

import copy
import json
import random
import sys

import jax
import jax.numpy as jnp
import numpy as np

import distributary as dist
from distributary.job import consensus

SIZE = 4
seed, first, last = map(int, sys.argv[1:])
strategy = dist.MultiWorkerMirroredStrategy(
    communication_options=dist.experimental.CommunicationOptions(heartbeat_timeout_seconds=3.0)
)
is_odd = strategy.extended.worker_number == 1

OPERATIONS = {
    "add": lambda x, c: x + c,
    "multiply": lambda x, c: x * c,
    "maximum": lambda x, c: jnp.maximum(x, c),
    "sine": lambda x, c: jnp.sin(x + c),
    "roll": lambda x, c: jnp.roll(x, int(c)),
    "sum": lambda x, c: dist.get_replica_context().all_reduce("SUM", x * c),
    "mean": lambda x, c: dist.get_replica_context().all_reduce("MEAN", x * c),
    "gather": lambda x, c: dist.get_replica_context().all_gather(x * c, 0)[:SIZE],
    "scan": lambda x, c: jax.lax.scan(lambda a, _: (a * c, None), x, length=2 + int(c))[0],
    "cond": lambda x, c: jax.lax.cond(x[0] > c, jnp.sin, lambda y: y * c, x),
    "half": lambda x, c: (x.astype(jnp.float16) * c).astype(jnp.float32),
    "gradient": lambda x, c: jax.grad(lambda y: (y * y * c).sum())(x),
    "array": lambda x, c: x + np.full(SIZE, c, np.float32),
}
EVENTS = ("step", "step", "step", "other step", "argument", "reduce", "gather", "assign", "values")


def random_step(rng):
    """A list of operations with a number each."""
    names = list(OPERATIONS)
    return [(rng.choice(names), 1 + rng.randrange(3)) for _ in range(rng.randint(2, 6))]


def random_script(rng):
    return {
        "variable": rng.choice(["float32", "float16"]),
        "steps": [random_step(rng), random_step(rng)],
        "events": [(rng.choice(EVENTS), 1 + rng.randrange(3)) for _ in range(rng.randint(3, 10))],
    }


def _meaning(items):
    """What matters of operations or events: of most events the number does not."""
    idle = set(EVENTS) - {"argument", "assign"}
    return [(name, 0 if name in idle else number) for name, number in items]


def mutated(script, rng):
    """The same script but for one place, and what that is."""
    place = rng.choice(["step", "step", "event", "variable"])
    if place == "variable":
        other = "float16" if script["variable"] == "float32" else "float32"
        return script | {"variable": other}, "dtype of the variable"
    if place == "step":
        script["events"].insert(0, ("step", 1))
    new = copy.deepcopy(script)
    items = new["events"] if place == "event" else new["steps"][0]
    before = _meaning(items)
    while _meaning(items) == before:
        i = rng.randrange(len(items))
        name, number = items[i]
        kind, items[i : i + 1] = rng.choice(
            [
                ("number", [(name, number + 1)]),
                ("name", [(rng.choice(EVENTS if place == "event" else list(OPERATIONS)), number)]),
                ("drop", []),
                ("repeat", [(name, number)] * 2),
            ]
        )
    return new, f"{kind} in {place} {i}"


def play(script):
    with strategy.scope():
        v = dist.Variable(np.zeros(SIZE), dtype=script["variable"], name="v")

    def step_of(operations):
        def step():
            x = v.value().astype(jnp.float32) + 1
            for name, number in operations:
                x = OPERATIONS[name](x, number)
            v.assign(dist.get_replica_context().all_reduce("MEAN", x).astype(v.dtype))
            return x.sum()

        return step

    one, other = map(step_of, script["steps"])
    ones = np.ones(2, np.float32)
    for name, number in script["events"]:
        result = None
        if name == "step":
            result = strategy.run(one)
        elif name == "other step":
            result = strategy.run(other)
        elif name == "argument":
            result = strategy.run(
                lambda n: dist.get_replica_context().all_reduce("SUM", n), args=(float(number),)
            )
        elif name == "assign":
            v.assign(np.full(SIZE, number))
        else:
            value = strategy.experimental_distribute_values_from_function(lambda _: ones)
            if name == "reduce":
                result = strategy.reduce("SUM", value, axis=None)
            elif name == "gather":
                result = strategy.gather(value, axis=0)
        jax.block_until_ready(result)


for number in range(first, last):
    rng = random.Random(f"{seed} {number}")
    script = random_script(rng)
    other, what = mutated(script, rng)
    print(json.dumps({"pair": number, "what": what}), flush=True)
    try:
        play(other if is_odd else script)
        consensus().exchange(f"the end of pair {number}", b"")
        heard = None
    except dist.errors.WorkerMismatchError as error:
        heard = str(error)
    print(json.dumps({"pair": number, "heard": heard}), flush=True)
