"""Keras is imported before the first test, because it sets environment variables."""

import keras  # noqa: F401
import pytest

from tests import interpreters


@pytest.fixture(scope="session")
def run_python():
    """Runs code in a process that has nothing imported yet; returns what it prints."""

    def run(code, *arguments, **environ):
        process = interpreters.run_python(
            *("-W", "error", "-c", code, *arguments), environ={"KERAS_BACKEND": None, **environ}
        )
        assert process.returncode == 0, process.stderr
        return process.stdout

    return run
