"""Pictures of measurements and predictions, for terminals and as PNG."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distributary.errors import MissingPackageError
from distributary.scaling._measurement import Row
from distributary.scaling._prediction import Prediction

__all__ = ["draw", "write_png"]

_BAR_WIDTH = 60


def draw(rows: Sequence[Row]) -> str:
    """Returns a bar per number of replicas: the step's time, and in it that of its all-reduces."""
    longest = max(row.timing.seconds for row in rows)
    lines = ["time of a step: ▒ what its all-reduces take alone, █ the rest"]
    for row in rows:
        width = max(1, round(_BAR_WIDTH * row.timing.seconds / longest))
        reducing = min(width, round(width * row.communication))
        lines.append(f"{row.timing.num_replicas:>8}  {'█' * (width - reducing)}{'▒' * reducing}")
    return "\n".join(lines)


def write_png(
    path: Path, title: str, rows: Sequence[Row], predictions: Sequence[Prediction]
) -> None:
    """Writes a picture of step times and efficiency, with predictions as dashed lines.

    Raises:
        MissingPackageError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            "--plot needs matplotlib. Install it: pip install 'distributary[examples]'."
        ) from error
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    figure.suptitle(title)
    times, efficiencies = figure.subplots(1, 2)
    replicas = [row.timing.num_replicas for row in rows]
    seconds = [row.timing.seconds for row in rows]
    reducing = [min(row.timing.reduction_seconds, row.timing.seconds) for row in rows]
    positions = range(len(rows))
    rest = [1e3 * (a - b) for a, b in zip(seconds, reducing, strict=True)]
    times.bar(positions, rest, label="the rest of the step")
    times.bar(positions, [1e3 * x for x in reducing], bottom=rest, label="its all-reduces alone")
    times.set(xlabel="replicas on this machine", ylabel="ms per step", title="measured")
    times.set_xticks(positions, [str(n) for n in replicas])
    times.legend()
    known = [
        (row.timing.num_replicas, row.efficiency) for row in rows if row.efficiency is not None
    ]
    if known:
        efficiencies.plot(*zip(*known, strict=True), "o-", label="measured")
    if predictions and known:
        start = known[-1][1]
        line: list[Any] = [
            known[-1],
            *((p.num_replicas, start * p.efficiency) for p in predictions),
        ]
        efficiencies.plot(*zip(*line, strict=True), "x--", label="predicted for more hosts")
    efficiencies.set(xlabel="replicas", ylabel="examples/s per replica, relative")
    efficiencies.set_title("measured, and predicted for more hosts" if predictions else "measured")
    efficiencies.set_xscale("log", base=2)
    efficiencies.xaxis.set_major_formatter("{x:.0f}")
    efficiencies.axhline(1, color="grey", linewidth=0.5)
    efficiencies.set_ylim(bottom=0)
    if known:
        efficiencies.legend()
    figure.savefig(path, format="png", dpi=120)
