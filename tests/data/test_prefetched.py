"""A thread makes elements ahead of time, where that is worth it."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import distributary as dist
from distributary._threads import Prefetched


def _idents(seconds):
    for _ in range(40):
        time.sleep(seconds)  # the work
        yield threading.get_ident()


def test_a_source_that_is_slow_gets_a_thread_and_others_have_their_errors_and_end_without():
    idents = list(Prefetched(_idents(0.001), 1, only_if_slow=True))
    assert idents[0] == threading.get_ident()
    assert idents[-1] != threading.get_ident()
    assert len(idents) == 40

    def source():
        yield 1
        raise KeyError("lost")

    elements = Prefetched(source(), 1, only_if_slow=True)
    assert next(elements) == 1
    for _ in range(2):
        with pytest.raises(KeyError, match="lost"):
            next(elements)

    empty = Prefetched(iter(()), 1, only_if_slow=True)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(empty)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_threads_may_share_a_pass_and_all_of_them_end(is_ahead):
    dataset = dist.data.Dataset.from_generator(lambda: iter(range(300)))
    elements = iter(dataset.prefetch(2) if is_ahead else dataset)

    with ThreadPoolExecutor(4) as executor:
        taken = list(executor.map(lambda _: [int(x) for x in elements], range(4)))

    assert sorted(itertools.chain(*taken)) == list(range(300))


def _names_of_new_threads(strategy, dataset):
    before = set(threading.enumerate())
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    next(iterator)
    names = {thread.name for thread in set(threading.enumerate()) - before}
    iterator.close()
    return names


def test_only_arrays_in_memory_go_without_a_thread(strategy_of):
    x = np.zeros((64, 2), np.float32)
    arrays = dist.data.Dataset.from_tensor_slices(x).shuffle(64).batch(8).repeat()
    endless = dist.data.Dataset.from_generator(lambda: itertools.repeat(x[0])).batch(8)
    strategy = strategy_of(1)

    assert "distributary-prefetch" not in _names_of_new_threads(strategy, arrays)
    assert "distributary-prefetch" in _names_of_new_threads(strategy, endless)
    mapped = arrays.map(lambda batch: batch + 1)
    assert "distributary-prefetch" in _names_of_new_threads(strategy, mapped)
