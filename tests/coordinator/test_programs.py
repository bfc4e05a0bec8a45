"""Programs travel, and only harmless ones that have arrived whole are run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distributary.coordinator._programs import Program, ProgramCache, export_jaxpr
from distributary.errors import InvalidValueError


def _sort():
    return export_jaxpr(jax.make_jaxpr(lambda x: [jnp.sort(x)])(np.zeros(4, np.float32)))


def test_a_program_runs_elsewhere():
    program, cache = _sort(), ProgramCache()

    assert cache.add(program.content) == program.name
    (result,) = cache.run(program.name, [np.array([3, 1, 2, 0], np.float32)])
    np.testing.assert_array_equal(result, [0, 1, 2, 3])


def test_a_program_runs_on_the_cpu_whatever_the_default_device_is():
    program, cache = _sort(), ProgramCache()
    first, *_, last = jax.devices("cpu")

    with jax.default_device(last):
        (result,) = cache.run(cache.add(program.content), [jnp.ones(4, jnp.float32)])

    assert result.devices() == {first}


@pytest.mark.parametrize("position", [0, 40, -1])
def test_a_damaged_program_is_refused(position):
    damaged = bytearray(_sort().content)
    damaged[position] ^= 1

    with pytest.raises(InvalidValueError, match=r"A program of \d+ bytes has been damaged"):
        ProgramCache().add(bytes(damaged))


def test_a_program_that_calls_unknown_code_is_refused():
    def call(x):
        return jax.ffi.ffi_call("cpu_reads_files", jax.ShapeDtypeStruct((4,), np.float32))(x)

    exported = jax.export.export(
        jax.jit(call),
        platforms=["cpu"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("cpu_reads_files")],
    )(np.zeros(4, np.float32))
    program = Program.of(exported)

    with pytest.raises(InvalidValueError, match="calls 'cpu_reads_files', which is not among"):
        ProgramCache().add(program.content)
