"""The PyTorch peers: workers of `DistributedDataParallel` over gloo, in processes of their own.

The table of a sparse workload gets a dense gradient.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from _peers import Peer, stepping
from _workloads import NUM_HEADS, NUM_LAYERS, WORKLOADS, Model, Workload
from torch.nn import functional

__all__ = ["peers"]

Tensor: TypeAlias = Any
Parameters: TypeAlias = Mapping[str, Tensor]


def peers(names: Sequence[str], workload: str | None = None, num_bytes: int = 0) -> list[Peer]:
    """Returns steps of a workload, or all-reduces of an array; there is one name."""
    torch.distributed.init_process_group("gloo")
    if workload is not None:
        return [_build_step(WORKLOADS[workload])]
    return [_build_all_reduce(num_bytes)]


def _build_step(workload: Workload) -> Peer:
    rank, num_workers = torch.distributed.get_rank(), torch.distributed.get_world_size()
    per_replica_batch_size = workload.global_batch_size // num_workers
    sum_of_losses = _LOSSES[workload.model]

    class MeanLoss(torch.nn.Module):
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

    return stepping("loop", step, lambda loss: None, mean_over_workers)


def _build_all_reduce(num_bytes: int) -> Peer:
    value = torch.zeros(num_bytes // 4)  # in place: stays zero

    def step(number: int) -> Tensor:
        torch.distributed.all_reduce(value)
        return value

    def sum_of_ranks(value: Tensor) -> float:
        numbers = torch.full_like(value, 1.0 + torch.distributed.get_rank())
        torch.distributed.all_reduce(numbers)
        return float(numbers[0])

    return stepping("all_reduce", step, lambda value: None, sum_of_ranks)


def _tensor(array: Any) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor if tensor.is_floating_point() else tensor.long()


def _mlp_loss(p: Parameters, x: Tensor, y: Tensor) -> Tensor:
    hidden = functional.relu(x @ p["hidden_kernel"] + p["hidden_bias"])
    logits = hidden @ p["output_kernel"] + p["output_bias"]
    return functional.cross_entropy(logits, y, reduction="sum")


def _transformer_loss(p: Parameters, tokens: Tensor, targets: Tensor) -> Tensor:
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
    features = functional.embedding(ids, p["table"]).flatten(1)
    hidden = functional.relu(features @ p["hidden_kernel"] + p["hidden_bias"])
    logits = (hidden @ p["output_kernel"] + p["output_bias"])[:, 0]
    return functional.binary_cross_entropy_with_logits(logits, y, reduction="sum")


_LOSSES: Mapping[Model, Callable[[Parameters, Tensor, Tensor], Tensor]] = {
    "mlp": _mlp_loss,
    "transformer": _transformer_loss,
    "wide": _wide_loss,
}
