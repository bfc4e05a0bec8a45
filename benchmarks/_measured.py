"""The page, the plot and the README's table of what was measured, from the result files."""

import hashlib
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from _comparisons import (
    DATA_PARALLEL,
    HANDWRITTEN,
    KERAS,
    TENSORFLOW,
    TORCH,
    Comparison,
    compare,
)

__all__ = ["fingerprint", "page", "plot", "with_table"]

Json: TypeAlias = Any

_SECTIONS = {
    HANDWRITTEN: "The same work without a strategy: steps with `jit` of `shard_map` and one `psum`,"
    " loops, input and files by hand, `import jax`. A strategy cannot be faster than the best that"
    " one writes oneself; the bars say how close it has to be. The hand-written step held against"
    " itself is off by a few percent, so differences of that size are noise. 16 steps per execution"
    " are held against a loop that takes one step per call.",
    KERAS: "`model.fit` of Keras 3 on JAX, without a strategy, on one device.",
    DATA_PARALLEL: "`model.fit` under `keras.distribution.DataParallel`, on the same devices.",
    TENSORFLOW: "`tf.distribute` with the strategy of the same name; custom loops next to"
    " `strategy.run`, Keras' `fit` next to `fit`, except with two workers, where `fit` is held"
    " against TensorFlow's custom loop, which reads no data.",
    TORCH: "`DistributedDataParallel` with fused optimizers, in a custom loop that reads no data,"
    " also next to `fit`. For wide256 it has the gradient of the whole table, as its embeddings"
    " have by default.",
}
_TABLE = re.compile(r"(?<=<!-- measured -->\n).*?(?=<!-- end of measured -->)", flags=re.DOTALL)


_PAGE = """\
# What was measured

<!-- Made by `python benchmarks/run_all.py --report-only`; changes belong there. -->

distributary next to TensorFlow, PyTorch, Keras and JAX written by hand. Every **ratio** is our time
or memory over theirs: below 1 we take less, above 1 we take more. It is the median over the rounds
of the ratio in each round, with the quartiles.

Each ratio was taken in one run, in which distributary and its peers took turns, so that a change of
the machine's speed meets all alike. Different files were taken at different times, some while other
programs used the machine, see [dates and load](#machine-versions-dates): between files, compare
ratios, not times. Everything ran on the cores of one CPU; no GPU, no TPU and no network but the
loopback interface was measured. What each peer does, and what the workloads are,
is in [benchmarks](../../benchmarks/README.md).

{summary}

*Alike*: the quartiles have 1 between them.

![Ratios of the times of training steps, by peer and workload]({image})

The plot has the training steps, each with the number of replicas at which our ratio is the largest.

## Where we lose

All in which we clearly take more than the peer (the quartiles lie above 1), or miss a bar that we
have set ourselves. What is known of the reasons is in
[reading the results](../../benchmarks/README.md#reading-the-results).

{losses}

{details}

## Machine, versions, dates

Load is the average number of busy processes before the run, and at its end, where it counts the
benchmark's own.

{sources}

## Measure it yourself

One command runs all benchmarks, then makes this page, its plot and the table of the README. With
`--quick --output FOLDER` it shows in less time that everything works.

<!-- no-run: takes hours, and measures -->
```shell
python benchmarks/run_all.py --tensorflow-python PATH --torch-python PATH
python benchmarks/run_all.py --quick --only import_time,save_time --output FOLDER
python benchmarks/run_all.py --report-only
```
"""


def page(documents: Mapping[str, Json], image: str) -> str:
    """The page in Markdown.

    Args:
        documents: Result files, by benchmark.
        image: Where the plot is, as a link.
    """
    comparisons = compare(documents)
    details = [
        f"## {peer[0].upper()}{peer[1:]}\n\n{text}\n\n{_details(rows)}"
        for peer, text in _SECTIONS.items()
        if (rows := [found for found in comparisons if found.peer == peer])
    ]
    return _PAGE.format(
        summary=_summary(comparisons),
        image=image,
        losses=_losses(comparisons),
        details="\n\n".join(details),
        sources=_sources(documents),
    )


def with_table(readme: str, documents: Mapping[str, Json]) -> str:
    """The README with the summary between its two comments.

    Raises:
        ValueError: If the comments are not there.
    """
    table = f"\n{_summary(compare(documents))}\n\n"
    changed, count = _TABLE.subn(lambda _: table, readme)
    if count != 1:
        raise ValueError(
            f"README: found {count} places between <!-- measured --> and <!-- end of measured -->"
            " for the table, expected 1. Put these two lines where it belongs."
        )
    return changed


def fingerprint(documents: Mapping[str, Json]) -> str:
    """What the plot's file holds as its description, so that one can see what it was made from."""
    drawn = [
        (label, peer, found.ratio, found.bar)
        for peer, rows in _plotted(compare(documents)).items()
        for label, found in rows.items()
    ]
    return hashlib.sha256(repr(drawn).encode()).hexdigest()


def plot(documents: Mapping[str, Json], path: Path) -> None:
    """Horizontal bars from 1 to the ratio of every training step, by peer, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullFormatter

    groups = _plotted(compare(documents))
    num_lines = sum(len(rows) + 1.4 for rows in groups.values())
    figure, axes = plt.subplots(figsize=(8, 1 + 0.2 * num_lines), layout="constrained")
    ticks: list[tuple[float, str]] = []
    line = 0.0
    for peer, rows in groups.items():
        axes.text(
            0.01, line, peer, transform=axes.get_yaxis_transform(), weight="bold", va="center"
        )
        line += 1
        for label, found in rows.items():
            ratio = found.ratio
            median = ratio["median"]
            spread = [[median - ratio["lower_quartile"]], [ratio["upper_quartile"] - median]]
            color = ("tab:blue", "tab:gray", "tab:orange")[found.standing + 1]
            axes.barh(line, median - 1, left=1, height=0.75, color=color)
            axes.errorbar(median, line, xerr=spread, color="black", linewidth=0.8, capsize=1.5)
            outer = ratio["upper_quartile" if median > 1 else "lower_quartile"]
            axes.annotate(
                f"{median:.2f}",
                (outer, line),
                xytext=(4 if median > 1 else -4, 0),
                textcoords="offset points",
                ha="left" if median > 1 else "right",
                va="center",
                fontsize=7,
            )
            ticks.append((line, label))
            line += 1
        line += 0.4
    axes.set_xscale("log")
    ratios = [_median(found) for rows in groups.values() for found in rows.values()]
    marks = [0.05, 0.1, 0.2, 0.5, 1, 2, 5]
    axes.set_xticks(marks, [f"{mark:g}" for mark in marks])
    axes.set_xlim(0.6 * min([1, *ratios]), 1.6 * max([1, *ratios]))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks([at for at, _ in ticks], [label for _, label in ticks], fontsize=8)
    axes.set_ylim(line, -1)
    axes.set_xlabel("our time per step / theirs, log scale")
    axes.set_title("Training steps: medians and quartiles; blue: we take less", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80, metadata={"Description": fingerprint(documents)})
    plt.close(figure)


def _plotted(comparisons: Sequence[Comparison]) -> dict[str, dict[str, Comparison]]:
    """The training steps by peer and label; of several numbers of replicas our worst."""
    groups: dict[str, dict[str, Comparison]] = {}
    for peer in _SECTIONS:
        steps = [found for found in comparisons if found.peer == peer and found.is_step]
        worst: dict[tuple[str, bool], Comparison] = {}
        for found in steps:
            key = found.what, found.replicas.isdigit()
            worst[key] = max(worst.get(key, found), found, key=_median)
        if worst:
            groups[peer] = {
                f"{found.what}, {_replicas(found)}".replace("`", ""): found
                for found in worst.values()
            }
    return groups


def _summary(comparisons: Sequence[Comparison]) -> str:
    rows = []
    for peer in _SECTIONS:
        own = sorted((found for found in comparisons if found.peer == peer), key=_median)
        if own:
            counts = [sum(found.standing == standing for found in own) for standing in (-1, 0, 1)]
            middle = f"{statistics.median(map(_median, own)):.2f}"
            rows.append([peer, *counts, middle, _named(own[0]), _named(own[-1])])
    header = ["Next to", "We take less in", "Alike", "More in", "Median", "Least", "Most"]
    return _table(header, rows)


def _median(found: Comparison) -> float:
    return found.ratio["median"]


def _named(found: Comparison) -> str:
    return f"{_median(found):.2f}: {found.what}, {_replicas(found)}".removesuffix(", -")


def _replicas(found: Comparison) -> str:
    if not found.replicas.isdigit():
        return found.replicas
    return f"{found.replicas} replica{'s' if found.replicas != '1' else ''}"


def _losses(comparisons: Sequence[Comparison]) -> str:
    lost = [found for found in comparisons if found.standing > 0 or found.is_over_bar]
    rows = [
        [
            found.what,
            found.replicas,
            found.unit,
            found.peer,
            _spread(found),
            _bar(found),
            {1: "more", 0: "alike", -1: "less"}[found.standing],
        ]
        for found in sorted(lost, key=_median, reverse=True)
    ]
    others = sum(_median(found) > 1 for found in comparisons if found not in lost)
    table = _table(["What", "Replicas", "Unit", "Next to", "Ratio", "Bar", "We take"], rows)
    return (
        f"{table}\n\nNot listed: {others} with a median above 1, alike within the spread of their"
        " rounds."
    )


def _details(comparisons: Sequence[Comparison]) -> str:
    return _table(
        ["What", "Replicas", "Ours", "Theirs", "Unit", "Ratio", "Rounds", "Bar", "From"],
        [
            [
                found.what,
                found.replicas,
                _number(statistics.median(found.ours)),
                _number(statistics.median(found.theirs)),
                found.unit,
                _spread(found),
                len(found.ours),
                _bar(found),
                f"`{found.benchmark}`",
            ]
            for found in comparisons
        ],
    )


def _sources(documents: Mapping[str, Json]) -> str:
    rows = []
    for name, document in documents.items():
        machine, load = document["machine"], document["load_average"]
        versions = ", ".join(
            f"{package} {version}" for package, version in document["versions"].items()
        )
        described = (
            f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB,"
            f" {machine['system']}"
        )
        loads = f"{load['before']} to {load['after']}"
        rows.append([f"`{name}`", document["date"], loads, described, versions])
    return _table(["Result file", "Date", "Load", "Machine", "Versions"], rows)


def _spread(found: Comparison) -> str:
    return "{median:.2f} ({lower_quartile:.2f} to {upper_quartile:.2f})".format(**found.ratio)


def _bar(found: Comparison) -> str:
    if found.bar is None:
        return ""
    return f"{found.bar:.3g}, {'missed' if found.is_over_bar else 'kept'}"


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
