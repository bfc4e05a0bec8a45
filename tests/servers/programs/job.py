"""A job as `distributary launch --ps` runs it: every task runs this script."""

import functools
import os
import signal

import batches  # beside the script
import numpy as np

import distributary as dist

resolver = dist.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type != "chief":
    dist.Server(resolver).join()


def dataset(start, step):
    """Numbers; the first worker is killed as it makes the fifth."""
    for i in range(1000):
        if i == 4 and resolver.task_id == 0 and os.environ["DISTRIBUTARY_RESTART"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        yield np.float32(start + i * step)


strategy = dist.ParameterServerStrategy(resolver)
with strategy.scope():
    total = dist.Variable(np.float32(0))
    count = dist.Variable(0)
coordinator = dist.coordinator.ClusterCoordinator(strategy)


def step(iterator, value):
    number = next(iterator)
    total.assign_add(number * value)
    count.assign_add(1)
    return number


for dataset_fn in (functools.partial(dataset, 1, step=2), batches.make):
    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    value = coordinator.create_per_worker_value(batches.value)
    total.assign(0)
    results = [coordinator.schedule(step, args=(iterator, value)) for _ in range(50)]
    coordinator.join()
    numbers = [int(number) for number in coordinator.fetch(results)]
    print(count.numpy(), int(total.numpy()), 10 * sum(numbers), sorted(set(numbers))[:3])

# Each worker has two devices.


def of_worker():
    """As in programs for tf.distribute; workers have no strategy."""
    return strategy.distribute_datasets_from_function(batches.of_replicas)


iterator = iter(coordinator.create_per_worker_dataset(of_worker))


def on_device(rows):
    context = dist.get_replica_context()
    total.assign_add(context.all_reduce("SUM", rows.sum()))
    return rows.sum() + context.replica_id_in_sync_group


def on_devices(iterator):
    return strategy.run(lambda it: on_device(next(it)), args=(iterator,))


total.assign(0)
results = [coordinator.schedule(on_devices, args=(iterator,)) for _ in range(20)]
coordinator.join()
parts = [strategy.experimental_local_results(r) for r in coordinator.fetch(results)]
first, second = np.array(parts).T
print(strategy, int(total.numpy()), int((first + second - 1).sum()), {*map(int, second - first)})
raise SystemExit(7)
