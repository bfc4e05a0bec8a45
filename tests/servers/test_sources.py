"""Functions that workers find by their names."""

import functools
import sys
import types

import numpy as np
import pytest

from distributary.servers._sources import UnknownMakerError, _main_copy, describe, find


def make_batches(start=0, *, count=3):
    return [np.float32(start + i) for i in range(count)]


@pytest.mark.parametrize(
    ("maker", "reason"),
    [
        (lambda: 1, "<lambda> is not at the top level"),
        ([1], "it is not a function, but a list"),
        (functools.partial(make_batches, np.float32(1)), "are not JSON"),
        (functools.partial(make_batches, count=(1, 2)), "are not JSON"),
    ],
)
def test_what_has_no_name_is_not_described(maker, reason):
    with pytest.raises(UnknownMakerError, match=reason):
        describe(maker)


@pytest.fixture
def as_script(tmp_path, monkeypatch):
    """A function that makes the main script of this process look like one with some text."""

    def pretend(text):
        script = tmp_path / "train.py"
        script.write_text(text)
        main = types.ModuleType("__main__")
        main.__file__ = str(script)
        monkeypatch.setitem(sys.modules, "__main__", main)
        monkeypatch.syspath_prepend(tmp_path)
        return main

    yield pretend
    _main_copy.cache_clear()
    for name in ("__mp_main__", "train_data", "installed"):
        sys.modules.pop(name, None)


def test_functions_are_found_by_name(as_script, tmp_path):
    as_script(
        "from subprocess import getoutput\n"
        "from distributary import ParameterServerStrategy, Server\n"
        "spec = {'worker': ['127.0.0.1:1'], 'ps': ['127.0.0.1:2']}\n"
        "Server(spec, 'ps').join()\n"
        "def make(start, count=3): return [start] * count\n"
        "from distributary.cluster_resolver import ClusterSpec, SimpleClusterResolver\n"
        "ParameterServerStrategy(SimpleClusterResolver(ClusterSpec(spec)))\n"
        "def too_late(): pass\n"
    )
    (tmp_path / "train_data.py").write_text("import os\ndef make(): return [5]\n")

    def found(module, name, *args, **kwargs):
        return find({"module": module, "name": name, "args": args, "kwargs": kwargs})()

    assert found("__main__", "make", 7, count=2) == [7, 7]
    assert found("train_data", "make") == [5]
    for module, name, reason in (
        ("__main__", "too_late", "ScriptEndError: only the chief creates the strategy"),
        ("__main__", "getoutput", "no function getoutput in __main__"),
        ("__main__", "spec", "no function spec"),
        ("train_data", "os.getpid", "no function os.getpid in train_data"),
        ("os", "getpid", "os is not a module in the folder"),
        ("subprocess", "getoutput", "subprocess is not a module in the folder"),
        ("absent", "make", "absent is not a module in the folder"),
    ):
        with pytest.raises(UnknownMakerError, match=reason):
            found(module, name)


def test_functions_of_the_running_script_come_first(as_script):
    main = as_script("raise AssertionError('run again')")
    exec("def make(): return 1", vars(main))

    assert find({"module": "__main__", "name": "make", "args": [], "kwargs": {}})() == 1
    with pytest.raises(UnknownMakerError, match="above the line that raises AssertionError"):
        find({"module": "__main__", "name": "other", "args": [], "kwargs": {}})


def test_a_compiled_function_is_described_and_found_like_the_one_it_compiles(as_script):
    main = as_script("")
    exec(
        "import distributary\n@distributary.function\ndef make(start): return [start, start + 1]",
        vars(main),
    )

    description = describe(functools.partial(main.make, 2))

    assert description == {"module": "__main__", "name": "make", "args": [2], "kwargs": {}}
    assert find(description)() == [2, 3]
