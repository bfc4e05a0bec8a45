"""Tables, JSON files and the plot; what machine and which versions a result belongs to."""

import json
import math
import os
import platform
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

__all__ = [
    "RESULTS",
    "load_average",
    "machine",
    "plot_ratios",
    "print_table",
    "rows_to_add_to",
    "verdict",
    "versions",
    "write",
]

Json: TypeAlias = Any

RESULTS = Path(__file__).resolve().parent / "results"

_PACKAGES = ("jax", "jaxlib", "numpy", "optax")


def machine() -> dict[str, Json]:
    """What a reader needs to judge the numbers; nothing that names the machine."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory_bytes / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Versions of Python and of what is measured."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    try:
        found["distributary"] = metadata.version("distributary")
    except metadata.PackageNotFoundError:
        found["distributary"] = "this checkout"
    return found


def load_average() -> float:
    """Runnable processes, averaged over the last minute."""
    return round(os.getloadavg()[0], 2)


def verdict(measured: float | None, bar: float | None) -> str:
    """`"ok"` up to and including the bar, `"over"` beyond it, `"-"` without bar or measurement."""
    if measured is None or bar is None or math.isnan(measured):
        return "-"
    return "ok" if measured <= bar else "over"


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A Markdown table; None shows as `-`, floats with three digits behind the point."""
    cells = [list(header), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    print("\n".join(lines), flush=True)


def rows_to_add_to(
    name: str,
    settings: Mapping[str, Json],
    more_versions: Mapping[str, str],
    folder: Path = RESULTS,
) -> list[dict[str, Json]]:
    """The rows of `folder/name.json`, to which rows measured like them are to be added.

    Raises:
        SystemExit: if they are of another day or machine, or of other versions or settings.
    """
    path = folder / f"{name}.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    now = {
        "date": _today(),
        "machine": machine(),
        "versions": {**versions(), **more_versions},
        "settings": dict(settings),
    }
    for what, value in now.items():
        if document[what] != value:
            raise SystemExit(
                f"--add: the {what} of {path} is {document[what]}, now it is {value}. Measure all"
                " rows again, without --add."
            )
    rows: list[dict[str, Json]] = document["rows"]
    return rows


def _today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())


def write(
    name: str,
    *,
    rows: Sequence[Mapping[str, Json]],
    settings: Mapping[str, Json],
    load_before: float,
    more_versions: Mapping[str, str] | None = None,
    folder: Path = RESULTS,
) -> Path:
    """Prints machine and versions and writes everything to `folder/name.json`."""
    document: dict[str, Json] = {
        "benchmark": name,
        "date": _today(),
        "machine": machine(),
        "versions": {**versions(), **(more_versions or {})},
        "load_average": {"before": load_before, "after": load_average()},
        "settings": dict(settings),
        "rows": [dict(row) for row in rows],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    described = document["machine"]
    print(
        f"\n{described['processor']}, {described['cores']} cores, {described['memory_gib']} GiB,"
        f" {described['system']}; load average {load_before} before,"
        f" {document['load_average']['after']} after"
    )
    print(", ".join(f"{package} {version}" for package, version in document["versions"].items()))
    print(f"written: {folder.name}/{path.name}", flush=True)
    return path


def plot_ratios(rows: Sequence[Mapping[str, Json]], path: Path, title: str) -> None:
    """Grouped columns: ratio to hand-written JAX per workload, one per replica count.

    Args:
        rows: With `workload`, `replicas`, `ratio` (median and quartiles), `bar`, drawn as a line
            over the workload, or None, and `control`, the same ratio for a second copy of the
            hand-written step, or None.
        path: PNG file to write.
        title: Says what is compared and where.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    replica_counts = sorted({row["replicas"] for row in rows})
    figure, axes = plt.subplots(figsize=(2.2 + 1.7 * len(workloads), 4.6), layout="constrained")
    width = 0.8 / len(replica_counts)
    colors = plt.get_cmap("viridis")
    bars = {workloads.index(row["workload"]): row["bar"] for row in rows if row["bar"]}
    highest = max([1.0, *bars.values()])
    for index, count in enumerate(replica_counts):
        selected = [row for row in rows if row["replicas"] == count]
        positions = [
            workloads.index(row["workload"]) + (index - (len(replica_counts) - 1) / 2) * width
            for row in selected
        ]
        heights = [row["ratio"]["median"] for row in selected]
        errors = [
            [row["ratio"]["median"] - row["ratio"]["lower_quartile"] for row in selected],
            [row["ratio"]["upper_quartile"] - row["ratio"]["median"] for row in selected],
        ]
        axes.bar(
            positions,
            heights,
            width * 0.92,
            yerr=errors,
            capsize=3,
            color=colors(0.15 + 0.7 * index / max(1, len(replica_counts) - 1)),
            label=f"{count} replica{'s' if count > 1 else ''}",
        )
        for position, row in zip(positions, selected, strict=True):
            upper = max(row["ratio"]["upper_quartile"], row["ratio"]["median"])
            highest = max(highest, upper)
            axes.annotate(
                f"{row['ratio']['median']:.2f}",
                (position, upper),
                xytext=(0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
        controls = [
            (position, row["control"]["median"])
            for position, row in zip(positions, selected, strict=True)
            if row.get("control")
        ]
        if controls:
            axes.scatter(
                [position for position, _ in controls],
                [ratio for _, ratio in controls],
                marker="o",
                s=26,
                facecolor="white",
                edgecolor="black",
                zorder=3,
                label="hand-written against itself" if index == len(replica_counts) - 1 else None,
            )
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.hlines(
        list(bars.values()),
        [position - 0.45 for position in bars],
        [position + 0.45 for position in bars],
        color="tab:red",
        linewidth=1,
        linestyle="--",
        label="bar",
    )
    axes.set_xticks(range(len(workloads)), [name.replace("_", "\n") for name in workloads])
    axes.set_ylim(0, highest * 1.12)
    axes.set_ylabel("time per step, hand-written JAX = 1")
    axes.set_title(title, fontsize=10)
    figure.legend(fontsize=8, ncols=len(replica_counts) + 2, loc="outside lower center")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown processor"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown processor"
