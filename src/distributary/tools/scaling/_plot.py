"""Pictures of measurements and predictions, for terminals and as PNG."""

from collections.abc import Sequence
from pathlib import Path

from distributary.tools.scaling._measurement import Prediction
from distributary.tools.scaling._timer import Timing

_BAR_WIDTH = 60


def draw(timings: Sequence[Timing]) -> str:
    """Returns a bar per number of replicas: the step's time, and in it that of its all-reduces."""
    longest = max(timing.seconds for timing in timings)
    lines = ["time of a step: ▒ what its all-reduces take alone, █ the rest"]
    for timing in timings:
        width = max(1, round(_BAR_WIDTH * timing.seconds / longest))
        reducing = min(width, round(width * timing.communication))
        lines.append(f"{timing.num_replicas:>8}  {'█' * (width - reducing)}{'▒' * reducing}")
    return "\n".join(lines)


def write_png(
    path: Path, title: str, timings: Sequence[Timing], predictions: Sequence[Prediction]
) -> None:
    """Writes a picture of step times and efficiency, with predictions as dashed lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    figure.suptitle(title)
    times, efficiencies = figure.subplots(1, 2)
    replicas = [timing.num_replicas for timing in timings]
    seconds = [timing.seconds for timing in timings]
    reducing = [min(timing.reduction_seconds, timing.seconds) for timing in timings]
    positions = range(len(timings))
    rest = [1e3 * (a - b) for a, b in zip(seconds, reducing, strict=True)]
    times.bar(positions, rest, label="the rest of the step")
    times.bar(positions, [1e3 * x for x in reducing], bottom=rest, label="its all-reduces alone")
    times.set(xlabel="replicas on this machine", ylabel="ms per step", title="measured")
    times.set_xticks(positions, [str(n) for n in replicas])
    times.legend()
    known = [(timing.num_replicas, timing.efficiency) for timing in timings if timing.efficiency]
    if known:
        efficiencies.plot(*zip(*known, strict=True), "o-", label="measured")
        if predictions:
            start = known[-1][1]
            more = [(p.num_replicas, start * p.efficiency) for p in predictions]
            line = zip(known[-1], *more, strict=True)
            efficiencies.plot(*line, "x--", label="predicted for more hosts")
        efficiencies.legend()
    efficiencies.set(xlabel="replicas", ylabel="examples/s per replica, relative")
    efficiencies.set_title("measured, and predicted for more hosts" if predictions else "measured")
    efficiencies.set_xscale("log", base=2)
    efficiencies.xaxis.set_major_formatter("{x:.0f}")
    efficiencies.axhline(1, color="grey", linewidth=0.5)
    efficiencies.set_ylim(bottom=0)
    figure.savefig(path, format="png", dpi=120)
