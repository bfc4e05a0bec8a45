"""Values whose shapes differ between workers: what tf.distribute computes of them."""

import json

import numpy as np

import distributary as dist

strategy = dist.MultiWorkerMirroredStrategy()
worker, num_workers = strategy.extended.worker_number, strategy.extended.num_workers


def rows(context):
    number = context.replica_id_in_sync_group
    return {
        "x": np.arange(2 * (number + 1), dtype=np.float32).reshape(number + 1, 2) + 10 * number,
        "same": np.float32(number),
    }


def message(function, *args):
    try:
        function(*args)
    except ValueError as error:
        return str(error)


values = strategy.experimental_distribute_values_from_function(rows)
x = values["x"]


def step(x):
    context = dist.get_replica_context()
    everything = context.all_gather(x, 0)
    return everything.sum(), context.all_reduce("SUM", x.sum())


gathered, summed = strategy.run(step, args=(x,))
result = {
    "gather": np.asarray(strategy.gather(x, axis=0)).tolist(),
    "all_gather": [float(v) for v in strategy.experimental_local_results(gathered)],
    "all_reduce": [float(v) for v in strategy.experimental_local_results(summed)],
    "sum": np.asarray(strategy.reduce("SUM", x, axis=0)).tolist(),
    "mean": np.asarray(strategy.reduce("MEAN", x, axis=0)).tolist(),
    "local": [np.asarray(v).tolist() for v in strategy.experimental_local_results(x)],
    "same": float(strategy.reduce("SUM", values["same"], axis=None)),
    "no axis": message(strategy.reduce, "SUM", x, None),
    "dtypes": message(
        strategy.experimental_distribute_values_from_function,
        lambda c: np.ones(1 + worker, np.int32 if worker else np.float32),
    ),
}
print(json.dumps(result))
