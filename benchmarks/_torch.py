"""The PyTorch peers: workers of `DistributedDataParallel` over gloo, in processes of their own.

    train WORKLOAD      steps; the table of a sparse workload gets a dense gradient
    all_reduce BYTES..  all-reduces of zeros

`environments` gives the workers what `torchrun` would. Only they import torch.
"""

import argparse
import importlib
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from _served import serve_several
from _timing import InProcessPeer
from _workloads import NUM_HEADS, NUM_LAYERS, WORKLOADS, Model, Workload

__all__ = ["environments", "find_torch"]

Tensor: TypeAlias = Any
Parameters: TypeAlias = Mapping[str, Tensor]


def find_torch(python: str, folder: Path | None) -> str | None:
    """The version of torch that `python` would import, with `folder` on its path, or None."""
    question = "import importlib.metadata as m; print(m.version('torch'))"
    try:
        answer = subprocess.run(
            [python, "-c", question], capture_output=True, text=True, env=_environment(folder)
        )
    except OSError:
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def environments(folder: Path | None, address: str, num_workers: int) -> list[dict[str, str]]:
    """For the workers of a job that meets at `HOST:PORT`, as `torchrun` sets it."""
    host, port = address.split(":")
    common = {
        **_environment(folder),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "WORLD_SIZE": str(num_workers),
        "LOCAL_WORLD_SIZE": str(num_workers),
    }
    common.setdefault("OMP_NUM_THREADS", "1")
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_workers)]


def _environment(folder: Path | None) -> dict[str, str]:
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environ.pop("PYTHONPATH", None)
    if folder is not None:
        environ["PYTHONPATH"] = str(folder)
    return environ


def _torch() -> Any:
    """The module, only where it is needed."""
    return importlib.import_module("torch")


def _build_step(workload: Workload) -> InProcessPeer:
    torch = _torch()
    rank, num_workers = torch.distributed.get_rank(), torch.distributed.get_world_size()
    per_replica_batch_size = workload.global_batch_size // num_workers
    sum_of_losses = _LOSSES[workload.model]

    class MeanLoss(torch.nn.Module):  # type: ignore[name-defined]
        """DDP takes the mean of the workers' gradients, so each takes the mean of its rows."""

        def __init__(self) -> None:
            super().__init__()
            self.values = torch.nn.ParameterDict(
                {name: torch.from_numpy(value) for name, value in workload.parameters().items()}
            )

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return sum_of_losses(self.values, x, y) / per_replica_batch_size

    model = torch.nn.parallel.DistributedDataParallel(MeanLoss())
    optimizer = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[workload.optimizer](
        model.parameters(), lr=workload.learning_rate, fused=True
    )
    batches = [
        tuple(_tensor(array[rank]) for array in batch) for batch in workload.batches(num_workers)
    ]

    def step(number: int) -> Tensor:
        loss = model(*batches[number % len(batches)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def mean_over_workers(loss: Tensor) -> float:
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        return float(total) / num_workers

    return InProcessPeer("torch", step, lambda loss: None, mean_over_workers)


def _build_all_reduce(num_bytes: int) -> InProcessPeer:
    torch = _torch()
    value = torch.zeros(num_bytes // 4)  # in place: stays zero

    def step(number: int) -> Tensor:
        torch.distributed.all_reduce(value)
        return value

    def sum_of_ranks(value: Tensor) -> float:
        numbers = torch.full_like(value, 1.0 + torch.distributed.get_rank())
        torch.distributed.all_reduce(numbers)
        return float(numbers[0])

    return InProcessPeer(f"torch_{num_bytes}", step, lambda value: None, sum_of_ranks)


def _tensor(array: Any) -> Tensor:
    tensor = _torch().from_numpy(array)
    return tensor if tensor.is_floating_point() else tensor.long()


def _mlp_loss(p: Parameters, x: Tensor, y: Tensor) -> Tensor:
    functional = _torch().nn.functional
    hidden = functional.relu(x @ p["hidden_kernel"] + p["hidden_bias"])
    logits = hidden @ p["output_kernel"] + p["output_bias"]
    return functional.cross_entropy(logits, y, reduction="sum")


def _transformer_loss(p: Parameters, tokens: Tensor, targets: Tensor) -> Tensor:
    functional = _torch().nn.functional
    x = functional.embedding(tokens, p["tokens"]) + p["positions"]
    num_examples, length, width = x.shape

    def dense(x: Tensor, name: str) -> Tensor:
        return x @ p[f"{name}_kernel"] + p[f"{name}_bias"]

    def norm(x: Tensor, prefix: str) -> Tensor:
        scale, offset = p[f"{prefix}norm_scale"], p[f"{prefix}norm_offset"]
        return functional.layer_norm(x, (width,), scale, offset, eps=1e-5)

    def heads(x: Tensor) -> Tensor:
        return x.view(num_examples, length, NUM_HEADS, -1).transpose(1, 2)

    for layer in range(NUM_LAYERS):
        normed = norm(x, f"{layer}/attention_")
        query, key, value = (
            heads(dense(normed, f"{layer}/{name}")) for name in ("query", "key", "value")
        )
        mixed = functional.scaled_dot_product_attention(query, key, value)
        mixed = mixed.transpose(1, 2).reshape(num_examples, length, width)
        x = x + dense(mixed, f"{layer}/projection")
        expanded = functional.relu(dense(norm(x, f"{layer}/feedforward_"), f"{layer}/expand"))
        x = x + dense(expanded, f"{layer}/contract")
    logits = dense(norm(x, ""), "output")
    loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return loss / length


def _wide_loss(p: Parameters, ids: Tensor, y: Tensor) -> Tensor:
    functional = _torch().nn.functional
    features = functional.embedding(ids, p["table"]).flatten(1)
    hidden = functional.relu(features @ p["hidden_kernel"] + p["hidden_bias"])
    logits = (hidden @ p["output_kernel"] + p["output_bias"])[:, 0]
    return functional.binary_cross_entropy_with_logits(logits, y, reduction="sum")


_LOSSES: Mapping[Model, Callable[[Parameters, Tensor, Tensor], Tensor]] = {
    "mlp": _mlp_loss,
    "transformer": _transformer_loss,
    "wide": _wide_loss,
}


def _build(arguments: argparse.Namespace) -> list[InProcessPeer]:
    _torch().distributed.init_process_group("gloo")
    if arguments.what == "train":
        return [_build_step(WORKLOADS[arguments.workload])]
    return [_build_all_reduce(num_bytes) for num_bytes in arguments.num_bytes]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_subparsers(dest="what", required=True)
    what.add_parser("train").add_argument("workload", choices=list(WORKLOADS))
    what.add_parser("all_reduce").add_argument("num_bytes", type=int, nargs="+")
    chosen = parser.parse_args()
    serve_several(lambda: _build(chosen))
