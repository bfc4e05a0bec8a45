"""Generated programs: converted code computes what Python computes."""

import importlib.util
import random
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest

import distributary as dist

NUM_PROGRAMS, INPUTS = 6, [(-3, 2, 5), (0, 0, 1), (7, -4, 2), (1, 9, 3)]


class _Writer:
    """Writes the source of random functions of three whole numbers `a`, `b` and `n`."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._loops = 0

    def function(self, name: str) -> str:
        body = "\n".join(self._block(3, inside_loop=False))
        return f"def {name}(a, b, n):\n{textwrap.indent(body, '    ')}\n    return a, b\n"

    def _value(self) -> str:
        one, two = (self._random.choice(["a", "b", "n", "1", "2", "3"]) for _ in range(2))
        operator = self._random.choice(["+", "-", "*", "//", "%"])
        if operator in ("//", "%"):
            two = self._random.choice(["2", "3", "5"])
        return f"({one} {operator} {two}) % 101"

    def _condition(self) -> str:
        compare = lambda: (
            f"{self._value()} {self._random.choice(['<', '>', '==', '!='])} "
            + (self._random.choice(["a", "b", "n", "2", "40"]))
        )
        kind = self._random.randrange(5)
        if kind == 0:
            return f"{compare()} and {compare()}"
        if kind == 1:
            return f"{compare()} or not {compare()}"
        if kind == 2:
            return f"0 < {self._value()} < 50"
        return compare()

    def _block(self, depth: int, inside_loop: bool) -> list[str]:
        lines: list[str] = []
        for _ in range(self._random.randint(1, 3)):
            lines += self._statement(depth, inside_loop)
        return lines

    def _statement(self, depth: int, inside_loop: bool) -> list[str]:
        kinds = ["assign"] * 3
        if depth:
            kinds += ["if", "if", "else", "while", "range", "array", "list"]
        if inside_loop:
            kinds += ["break", "continue"]
        if depth < 3:
            kinds += ["return"]
        kind = self._random.choice(kinds)
        target = self._random.choice("ab")
        inner = lambda loop: [f"    {line}" for line in self._block(depth - 1, loop)]
        if kind == "assign":
            choice = f"{self._value()} if {self._condition()} else {self._value()}"
            return [f"{target} = {self._random.choice([self._value(), choice])}"]
        if kind in ("if", "else"):
            lines = [f"if {self._condition()}:", *inner(inside_loop)]
            return lines if kind == "if" else [*lines, "else:", *inner(inside_loop)]
        if kind in ("break", "continue"):
            return [f"if {self._condition()}:", f"    {kind}"]
        if kind == "return":
            return [f"if {self._condition()}:", f"    return {self._value()}, {self._value()}"]
        self._loops += 1
        name = f"i{self._loops}"
        if kind == "while":
            head = [f"{name} = 0", f"while {name} < 4 and ({self._condition()}):"]
            return [*head, f"    {name} += 1", *inner(True)]
        over = {"range": "range(n % 4)", "array": "rows", "list": "[1, 5, 2]"}[kind]
        return [f"for {name} in {over}:", f"    a = (a + {name}) % 101", *inner(True)]


@pytest.mark.parametrize("seed", range(4))
def test_converted_programs_compute_what_python_computes(seed, tmp_path):
    writer = _Writer(seed)
    source = "\n".join(writer.function(f"f{i}") for i in range(NUM_PROGRAMS))
    path = tmp_path / f"programs{seed}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    for i in range(NUM_PROGRAMS):
        function = getattr(module, f"f{i}")
        module.rows = [3, 1, 4]
        expected = [function(*values) for values in INPUTS]
        module.rows = jnp.array([3, 1, 4])
        compiled = dist.function(function, autograph=True)
        got = [compiled(*map(jnp.int32, values)) for values in INPUTS]
        text = writer_text(source, i)
        np.testing.assert_array_equal(np.array(got), np.array(expected), err_msg=text)


def writer_text(source: str, number: int) -> str:
    """Returns the source of one function, for messages."""
    return "def " + source.split("def ")[number + 1]
