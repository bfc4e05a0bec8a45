"""What a task might be sent by somebody who means no good."""

import random

import jax
import jax.numpy as jnp
import numpy as np

from tests.servers.wire import Message, export_function

_KINDS_OF_ALL = ["alive", "hello", "identify", "nothing"]
_KINDS = {
    "ps": [
        *("create", "read", "assign", "delete", "finish", "update", "push"),
        *("copy", "load", "save", "adopt", "drop", *_KINDS_OF_ALL),
    ],
    "worker": ["source", "peek", "plan", "run", *_KINDS_OF_ALL],
}
_FIELDS = {
    "id": [0, 1, -1, "a", [], None],
    "ids": [[], [0], [1, 1], [-1], ["a"], 5, None],
    "request": [1, 0, "a", None],
    "seconds": [0, -1, "a", None, []],
    "operation": ["assign", "assign_add", "", None, 3],
    "closure": [0, -1, 1 << 70, "a", None],
    "finished": [0, 1 << 70, -5, None, []],
    "program": ["", "0" * 64, None, 7],
    "update": [0, 1, -1, "a", [], None],
    "states": [[], [0], [[]], None],
    "outputs": [[], [0], [1 << 80], {}],
    "kind": ["next", "value", "fed", None],
    "number": [0, -1, "0", None, 1.5],
    "maker": [
        None,
        {},
        {"module": "os", "name": "abort", "args": [], "kwargs": {}},
        {"module": "subprocess", "name": "getoutput", "args": ["kill 0"], "kwargs": {}},
        {"module": "__main__", "name": "Server.join", "args": [None], "kwargs": {}},
    ],
    "nest": ["leaf", None, ["tuple", []], [[[]]]],
    "function": [0, 1, None, []],
    "sources": [[], [["next", 0, 1]], [[]], "abc"],
    "shapes": [[], [[[1], "float32"]], [[[-1], "no"]], None],
    "inputs": [[], [["data", 0]], [["state", 10**9]], [[]]],
    "num_results": [0, 1, 1 << 60, None],
    "pulls": [[], [[0, [0]]], [[9, [9]]], None],
    "servers": [[], [[0, "", [], [], []]], [[]]],
    "closures": [[], [0], [0, 1], None],
    "copy": [0, 1, None, []],
    "path": ["/", "/proc/self/mem", "", "a\0b", None, 3],
    "token": ["", "root:x:0", None, []],
    "rows": [[], [[]], [[["arrays", "a", 0, 1]]], [[["../etc", "", -1, 1 << 70]]], [["a"]], None],
    "num_args": [0, 1, -1, 1 << 60, None],
}


def strange_messages(task_type, num_messages, session):
    """Messages that a task can read, and that make no sense; most of a session."""
    generator = random.Random(2)
    aval = jax.ShapeDtypeStruct((4,), np.float32)
    program = export_function(lambda x: [jnp.sort(x)], [aval], [None]).content
    sessions = [*[session] * 20, [1, "older"], [1, 2], "session", None]
    for _ in range(num_messages):
        names = generator.sample(sorted(_FIELDS), generator.randrange(len(_FIELDS) + 1))
        yield Message(
            generator.choice(_KINDS[task_type]),
            {name: generator.choice(_FIELDS[name]) for name in names}
            | {"session": generator.choice(sessions)},
            [np.zeros(generator.randrange(9), np.float32)] * generator.randrange(4),
            [
                generator.choice([_damaged(program, generator), generator.randbytes(9)])
                for _ in range(generator.randrange(3))
            ],
        )


def _damaged(program, generator):
    damaged = bytearray(program)
    for _ in range(generator.choice([1, 2, 30])):
        damaged[generator.randrange(len(damaged))] = generator.randrange(256)
    return bytes(damaged)
