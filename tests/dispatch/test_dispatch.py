import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from distributary.devices import Dispatcher, dispatcher_for, latest_program

_TIMEOUT_SECONDS = 20


class _Token:
    """Stands for an output of a program that ends when the test says so."""

    def __init__(self, *, finished: bool = True):
        self.finished = threading.Event()
        self.waited_for = threading.Event()
        if finished:
            self.finished.set()

    def block_until_ready(self):
        self.waited_for.set()
        assert self.finished.wait(_TIMEOUT_SECONDS)


def _bounded(max_in_flight: int = 4) -> Dispatcher:
    return Dispatcher(threading.RLock(), max_in_flight)


def _itself(value):
    return value


def test_several_cpu_devices_need_tokens_and_share_one_window():
    cpu = tuple(jax.local_devices(backend="cpu"))

    assert dispatcher_for(cpu).bounded
    assert dispatcher_for(cpu[:2]) is dispatcher_for(cpu[2:])
    assert not dispatcher_for(cpu[:1]).bounded


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_accelerators_keep_their_order_without_a_window(platform):
    devices = tuple(SimpleNamespace(platform=platform, process_index=0) for _ in range(2))

    dispatcher = dispatcher_for(devices)

    assert not dispatcher.bounded
    assert dispatcher is not dispatcher_for(devices[:1])
    assert dispatcher.run(lambda: 3, token_of=pytest.fail) == 3
    # Devices of other processes do not count.
    elsewhere = SimpleNamespace(platform=platform, process_index=1)
    assert dispatcher_for((devices[0], elsewhere)) is dispatcher_for(devices[:1])


def test_a_fifth_program_waits_for_the_first():
    dispatcher = _bounded()
    tokens = [_Token(finished=False) for _ in range(5)]
    for token in tokens[:4]:
        dispatcher.run(lambda token=token: token, _itself)
    dispatched = threading.Event()

    thread = threading.Thread(
        target=dispatcher.run, args=(lambda: dispatched.set() or tokens[4], _itself)
    )
    thread.start()

    assert tokens[0].waited_for.wait(_TIMEOUT_SECONDS)
    assert not dispatched.is_set()
    tokens[0].finished.set()
    assert dispatched.wait(_TIMEOUT_SECONDS)
    thread.join(_TIMEOUT_SECONDS)
    assert not any(token.waited_for.is_set() for token in tokens[1:])


def test_threads_share_the_window_and_dispatch_one_at_a_time():
    dispatcher = _bounded()
    in_call = threading.Lock()
    in_flight: list[_Token] = []
    most_in_flight = 0

    class Token(_Token):
        def block_until_ready(self):
            in_flight.remove(self)

    def call() -> Token:
        nonlocal most_in_flight
        assert in_call.acquire(blocking=False), "two threads dispatch at once"
        in_flight.append(Token())
        most_in_flight = max(most_in_flight, len(in_flight))
        token = in_flight[-1]
        in_call.release()
        return token

    def dispatch_many() -> None:
        for _ in range(200):
            dispatcher.run(call, _itself)

    threads = [threading.Thread(target=dispatch_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_TIMEOUT_SECONDS)

    assert most_in_flight == 4
    assert len(in_flight) == 4


def test_a_wide_window_looks_at_every_eighth_program():
    dispatcher = _bounded(32)
    tokens = [_Token() for _ in range(80)]

    for token in tokens:
        dispatcher.run(lambda token=token: token, _itself)

    # The last 32 are in flight; of the others the eighth, sixteenth, ... had to have ended.
    waited = [i + 1 for i, token in enumerate(tokens) if token.waited_for.is_set()]
    assert waited == [8, 16, 24, 32, 40, 48]


def test_a_narrowed_window_waits_for_all_it_knows_of():
    dispatcher = _bounded(32)
    tokens = [_Token() for _ in range(24)]
    for token in tokens:
        dispatcher.run(lambda token=token: token, _itself)

    dispatcher.narrow(4)

    assert [i + 1 for i, t in enumerate(tokens) if t.waited_for.is_set()] == [8, 16, 24]
    later = [_Token() for _ in range(5)]
    for token in later:
        dispatcher.run(lambda token=token: token, _itself)
    assert [token.waited_for.is_set() for token in later] == [True, False, False, False, False]


def test_programs_that_fail_or_have_no_token_take_no_place_and_free_the_lock():
    class Failed(_Token):
        def block_until_ready(self):
            raise jax.errors.JaxRuntimeError("the program failed")

        def is_deleted(self):
            return False

    lock = threading.Lock()
    dispatcher = Dispatcher(lock, 1)

    with pytest.raises(ZeroDivisionError):
        dispatcher.run(lambda: 1 / 0, pytest.fail)
    assert not lock.locked()
    dispatcher.run(Failed, _itself)
    unfinished = _Token(finished=False)
    assert dispatcher.run(lambda: unfinished, _itself) is unfinished
    unfinished.finished.set()
    for _ in range(2):
        assert dispatcher.run(lambda: "result", lambda _: None) == "result"


def test_a_program_may_be_dispatched_while_another_is_prepared():
    dispatcher = _bounded(1)
    inner = _Token()

    outer = dispatcher.run(
        lambda: (dispatcher.run(lambda: inner, _itself), _Token()), lambda r: r[1]
    )

    assert outer[0] is inner


def test_a_token_that_was_donated_is_an_error():
    dispatcher = _bounded(1)
    token = jnp.ones(3)
    dispatcher.run(lambda: token, _itself)
    token.delete()

    with pytest.raises(jax.errors.JaxRuntimeError, match="deleted or donated"):
        dispatcher.run(lambda: token, _itself)


def test_the_latest_program_runs_until_its_output_is_there():
    program = type(latest_program)()
    assert not program.is_running()
    array = jnp.ones(3).block_until_ready()
    for output in (array, [array, array]):
        program.output = output
        assert not program.is_running()
    array.delete()
    assert not program.is_running()
