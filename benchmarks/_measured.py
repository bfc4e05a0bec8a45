"""The tables and the plot of what was measured, made from the result files."""

import hashlib
import json
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from _peers import Json

__all__ = ["SHOWN", "compare", "fingerprint", "plot", "print_rows", "read", "with_tables"]

HANDWRITTEN = "hand-written JAX"
NEXT_TO: Mapping[str, str] = {
    **dict.fromkeys(("handwritten", "handwritten_keras", "psum", "jax"), HANDWRITTEN),
    **dict.fromkeys(("fit_handwritten", "fit_handwritten_keras"), HANDWRITTEN),
    **dict.fromkeys(("numpy", "by hand", "read"), HANDWRITTEN),
    "keras": "Keras alone",
    "data_parallel": "Keras DataParallel",
    **dict.fromkeys(("tensorflow", "tf.data"), "TensorFlow"),
    "torch": "PyTorch DDP",
}
"""What the page calls the peers that it has."""

SHOWN = (
    *("step_time", "fit_time", "multi_worker_time", "parameter_server"),
    *("input_time", "host_overhead", "memory", "import_time"),
)
PEERS = tuple(dict.fromkeys(NEXT_TO.values()))
_TABLE = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end of table -->)", flags=re.DOTALL)


@final
@dataclass(frozen=True)
class Comparison:
    """One quantity of distributary and of a peer, measured in the same rounds. Less is better."""

    benchmark: str
    peer: str
    what: str
    replicas: str
    unit: str
    ours: Sequence[float]
    theirs: Sequence[float]
    bar: float | None
    ours_name: str
    most_more: float | None

    @property
    def ratio(self) -> dict[str, float]:
        """Ours over theirs: median and quartiles of the rounds."""
        per_round = [mine / other for mine, other in zip(self.ours, self.theirs, strict=True)]
        quartiles = per_round * 3
        if len(per_round) > 1:
            quartiles = statistics.quantiles(per_round, n=4, method="inclusive")
        median = statistics.median(per_round)
        return {"lower_quartile": quartiles[0], "median": median, "upper_quartile": quartiles[2]}

    @property
    def median(self) -> float:
        """The median of the ratios."""
        return self.ratio["median"]

    @property
    def standing(self) -> int:
        """1 if we clearly take more, -1 if less, 0 if the quartiles, as shown, have 1 between."""
        lower, upper = (round(self.ratio[f"{name}_quartile"], 2) for name in ("lower", "upper"))
        return (lower > 1) - (upper < 1)

    @property
    def is_over_bar(self) -> bool:
        """True if there is a bar, which the median exceeds."""
        return self.bar is not None and self.median > self.bar

    @property
    def difference(self) -> float:
        """Ours less theirs, the median of the rounds."""
        return statistics.median(a - b for a, b in zip(self.ours, self.theirs, strict=True))

    @property
    def counted_replicas(self) -> str:
        """The number of replicas with its unit."""
        plural = "" if self.replicas == "1" else "s"
        return f"{self.replicas} replica{plural}" if self.replicas.isdigit() else self.replicas

    @property
    def cells(self) -> Mapping[str, object]:
        """What tables show, by the header of the column."""
        kept = "missed" if self.is_over_bar else "kept"
        more = "missed" if self.difference > (self.most_more or math.inf) else "kept"
        return {
            "What": self.what,
            "Replicas": self.replicas,
            "Peer": self.ours_name,
            "Ours": _short(statistics.median(self.ours)),
            "Theirs": _short(statistics.median(self.theirs)),
            "Unit": self.unit,
            "Next to": self.peer,
            "Ratio": "{median:.2f} ({lower_quartile:.2f} to {upper_quartile:.2f})".format(
                **self.ratio
            ),
            "Rounds": len(self.ours),
            "Difference": _short(self.difference),
            "Most": "" if self.most_more is None else f"{self.most_more:g}, {more}",
            "Bar": "" if self.bar is None else f"{self.bar:.3g}, {kept}",
            "We take": {1: "more", 0: "alike", -1: "less"}[self.standing],
            "From": f"`{self.benchmark}`",
        }


def read(folder: Path) -> dict[str, Json]:
    """Returns the result files of the folder that the page shows, by benchmark."""
    found = {name: folder / f"{name}.json" for name in SHOWN}
    return {name: json.loads(path.read_text()) for name, path in found.items() if path.is_file()}


def compare(documents: Mapping[str, Json]) -> list[Comparison]:
    """Returns all comparisons of the result files with peers of the page, in their order."""
    return [
        found
        for name, document in documents.items()
        for row in document["rows"]
        for found in pairs_of(name, row)
        # A pair may also hold distributary, or the hand-written step, against itself.
        if found.peer in PEERS and found.ours_name != "control"
    ]


def pairs_of(benchmark: str, row: Mapping[str, Json]) -> Iterator[Comparison]:
    """Yields the comparisons of a row, also with peers that the page does not have."""
    for pair in row["pairs"]:
        theirs = pair["theirs"]
        yield Comparison(
            benchmark,
            NEXT_TO.get(theirs.removesuffix("_16"), theirs),
            pair["what"],
            row["replicas"],
            row["unit"],
            row["rounds"][pair["ours"]],
            row["rounds"][theirs],
            pair["bar"],
            pair["ours"],
            pair.get("most_more"),
        )


def with_tables(text: str, documents: Mapping[str, Json]) -> str:
    """Returns a page with new tables between its comments `table: NAME` and `end of table`."""

    def replaced(match: re.Match[str]) -> str:
        return f"{match[1]}\n{TABLES[match[2]](documents)}\n\n{match[3]}"

    return _TABLE.sub(replaced, text)


#: The rows of the small table, by what was measured, and the replicas; time only.
_SUMMARY = (
    *(("`fit`, mlp256", "2"), ("`fit`, cnn64", "1"), ("`fit`, transformer32", "2")),
    *(("`fit`, resnet18", "1"), ("`fit`, resnet18", "2")),
    *(("`strategy.run`, mlp256", "2"), ("`strategy.run`, wide256", "2")),
    *(("`strategy.run`, mlp256", "2 workers"), ("`strategy.run`, transformer32", "2 workers")),
    *(("`reduce` of 4 B", "2 workers"), ("the host's part of a cached `run`", "1")),
)
#: Models whose gradients are rewritten for CPUs.
_REWRITTEN = ("cnn", "resnet", "transformer")


def _summary(documents: Mapping[str, Json]) -> str:
    found = {(one.what, one.replicas, one.peer): one for one in compare(documents)}
    rows = []
    for what, replicas in _SUMMARY:
        own = [found.get((what, replicas, peer)) for peer in PEERS]
        if any(own):
            mark = " (rewritten)" if any(name in what for name in _REWRITTEN) else ""
            ratios = ["" if one is None else f"{one.median:.2f}" for one in own]
            rows.append([what + mark, replicas, *ratios])
    return table(["Time of", "Replicas", *PEERS], rows)


def _losses(documents: Mapping[str, Json]) -> str:
    comparisons = compare(documents)
    lost = [found for found in comparisons if found.standing > 0 or found.is_over_bar]
    others = sum(found.median > 1 for found in comparisons if found not in lost)
    lost.sort(key=lambda found: found.median, reverse=True)
    table = _columns("What, Replicas, Unit, Next to, Ratio, Bar, We take", lost)
    return (
        f"{table}\n\nNot listed: {others} with a median above 1, alike within the spread of their"
        " rounds."
    )


def _details(peer: str) -> Callable[[Mapping[str, Json]], str]:
    columns = "What, Replicas, Ours, Theirs, Unit, Ratio, Rounds, Bar, From"
    return lambda documents: _columns(
        columns, [found for found in compare(documents) if found.peer == peer]
    )


def _sources(documents: Mapping[str, Json]) -> str:
    rows = []
    for name, document in documents.items():
        load = document["load_average"]
        versions = ", ".join(map(" ".join, document["versions"].items()))
        machine = "{processor}, {cores} cores, {memory_gib} GiB, {system}".format(
            **document["machine"]
        )
        loads = f"{load['before']} to {load['after']}"
        rows.append([f"`{name}`", document["date"], loads, machine, versions])
    return table(["Result file", "Date", "Load", "Machine", "Versions"], rows)


TABLES: Mapping[str, Callable[[Mapping[str, Json]], str]] = {
    "summary": _summary,
    "where we lose": _losses,
    **{peer: _details(peer) for peer in PEERS},
    "sources": _sources,
}


def _columns(header: str, rows: Sequence[Comparison]) -> str:
    names = header.split(", ")
    return table(names, [[found.cells[name] for name in names] for found in rows])


def table(header: Sequence[str], rows: Sequence[Sequence[object]], is_aligned: bool = False) -> str:
    """Returns a Markdown table, for a page or aligned for the screen."""
    cells = [list(header), ["---"] * len(header), *([_cell(one) for one in line] for line in rows)]
    widths = [max(map(len, column)) if is_aligned else 0 for column in zip(*cells, strict=True)]
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in cells)


def _cell(value: object) -> str:
    return _short(value) if isinstance(value, float) else str(value)


def print_rows(benchmark: str, rows: Sequence[Mapping[str, Json]]) -> None:
    """Prints numbers of the peers, and their ratios."""
    measured = [
        [row["what"], row["replicas"], name, min(found), statistics.median(found), row["unit"]]
        for row in rows
        for name, found in row["rounds"].items()
    ]
    pairs = [found for row in rows for found in pairs_of(benchmark, row)]
    columns = ("What", "Replicas", "Peer", "Next to", "Ratio", "Bar", "Difference", "Most")
    for header, lines in (
        (("What", "Replicas", "Peer", "Least", "Median", "Unit"), measured),
        (columns, [[found.cells[name] for name in columns] for found in pairs]),
    ):
        if lines:
            print("\n" + table(header, lines, is_aligned=True), flush=True)


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def fingerprint(documents: Mapping[str, Json]) -> str:
    """Returns the description in the plot's file, so that one can see what it was made from."""
    drawn = [
        (label, peer, found.ratio, found.bar)
        for peer, rows in _plotted(compare(documents)).items()
        for label, found in rows.items()
    ]
    return hashlib.sha256(repr(drawn).encode()).hexdigest()


def _plotted(comparisons: Sequence[Comparison]) -> dict[str, dict[str, Comparison]]:
    """Returns the training steps by peer and label; of several numbers of replicas our worst."""
    groups: dict[str, dict[str, Comparison]] = {}
    for peer in PEERS:
        worst: dict[tuple[str, bool], Comparison] = {}
        for found in comparisons:
            if found.peer == peer and found.unit == "ms/step":
                key = found.what, found.replicas.isdigit()
                worst[key] = max(worst.get(key, found), found, key=lambda one: one.median)
        if worst:
            groups[peer] = {
                f"{found.what}, {found.counted_replicas}".replace("`", ""): found
                for found in worst.values()
            }
    return groups


def plot(documents: Mapping[str, Json], path: Path) -> None:
    """Draws horizontal bars from 1 to the ratio of every training step, by peer, as PNG."""
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
        left = axes.get_yaxis_transform()
        axes.text(0.01, line, peer, transform=left, weight="bold", va="center")
        for label, found in rows.items():
            line += 1
            _draw_bar(axes, line, found)
            ticks.append((line, label))
        line += 1.4
    axes.set_xscale("log")
    medians = [1.0, *(found.median for rows in groups.values() for found in rows.values())]
    marks = [0.05, 0.1, 0.2, 0.5, 1, 2, 5]
    axes.set_xticks(marks, [f"{mark:g}" for mark in marks])
    axes.set_xlim(0.6 * min(medians), 1.6 * max(medians))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks([at for at, _ in ticks], [label for _, label in ticks], fontsize=8)
    axes.set_ylim(line, -1)
    axes.set_xlabel("our time per step / theirs, log scale")
    axes.set_title("Training steps: medians and quartiles; blue: we take less", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80, metadata={"Description": fingerprint(documents)})
    plt.close(figure)


def _draw_bar(axes: Json, line: float, found: Comparison) -> None:
    keys = ("median", "lower_quartile", "upper_quartile")
    median, lower, upper = (found.ratio[key] for key in keys)
    color = ("tab:blue", "tab:gray", "tab:orange")[found.standing + 1]
    spread = [[median - lower], [upper - median]]
    style = {"linewidth": 0.8, "capsize": 1.5}
    bars = axes.barh(line, median - 1, 0.75, left=1, color=color, xerr=spread, error_kw=style)
    axes.bar_label(bars, [f"{median:.2f}"], padding=4, fontsize=7)
