"""The page of results, docs/guide/models.md."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

_INTRODUCTION = """\
# Models that others wrote

This page holds {models} models from {packages} packages, or built from their layers, against the
same models on one device. It is the result of [`tests/models/run.py`](../../tests/models/run.py),
with small sizes and random weights.

Each model is trained on one device by Keras alone, or by JAX and optax alone, and again in each
setting, with the same initial weights and the same global batches: two batches of 8 rows and one of
5, which does not divide by the number of replicas. Then it is evaluated, predicts, is saved and is
loaded. A run is **equal** if

- the losses of `fit` and `evaluate` differ by at most 1e-5,
- the weights and predictions differ by at most 1e-4, relative to values above 1, and
- the model that is loaded has the weights that were saved, bit by bit, as with Keras alone.

{counts}

{settings}

{shares}

In the tables, `=` is an equal run. `64` is a run that is equal in float64: in float32, its rounding
grows. `≈` is a run that differs by at most ten times as much as one device does from itself, if its
initial weights change in the last bit. `–` is a run that an error refuses. An empty cell was not
run. The columns "loss" and "weights" have the largest differences of a row.

## What is the same in all rows

- **Random numbers**, as those of dropout, begin with the same seed. `fit` draws what one device
  draws.
- **The optimizer** is SGD with momentum, unless the name of the row has another one. Adam divides a
  gradient by its size. Where a gradient is zero but for rounding, such as that of a bias before a
  normalization, each run takes steps of the full learning rate in a direction of its own. So some
  weights differ by as much as they move, on any two machines, and losses by a little.
"""
_COUNTED = {
    "equal": "equal",
    "equal in float64": "equal in float64",
    "differs, as one device": "different, as one device is from itself",
    "differs": "different without a reason",
    "refused": "refused, with an error that says what to do",
    "fails": "failed",
}
_SIGNS = {"equal": "=", "equal in float64": "64", "differs, as one device": "≈", "refused": "–"}
# The head of each column, and what it stands for.
_COLUMNS = {
    "2 replicas": ("2", "`MirroredStrategy` with 2 replicas"),
    "4 replicas": ("4", "`MirroredStrategy` with 4 replicas"),
    "sharded state": ("sharded", "2 replicas, `experimental_shard_optimizer_state=True`"),
    "central storage": ("central", "`CentralStorageStrategy` with 2 replicas"),
    "2 workers": ("workers", "`MultiWorkerMirroredStrategy`, two processes"),
    "servers": ("servers", "`ParameterServerStrategy`, one worker and two servers"),
    "sharded parameters": ("parts 2", "2 replicas, `experimental_shard_parameters=True`"),
    "sharded parameters, 4 replicas": ("parts 4", "the same with 4 replicas"),
    "sharded parameters, 2 workers": ("parts 2x2", "the same with two processes of 2 replicas"),
}


def write(path: Path, results: Path) -> int:
    """Writes the page.

    Of several rows of one model in one setting, the last counts, and is kept in `results`.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for line in results.read_text().splitlines():
        row = json.loads(line)
        rows[row["model"], row["setting"]] = row
    results.write_text("".join(f"{json.dumps(row)}\n" for row in rows.values()))
    packages: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    for (model, setting), row in rows.items():
        packages.setdefault(row["package"], {}).setdefault(model, {})[setting] = row
    counted = Counter(row["result"] for row in rows.values() if row["setting"] in _COLUMNS)
    models = sum(map(len, packages.values()))
    ran = {setting for _, setting in rows}
    settings = [f"| {head} | {what} |" for s, (head, what) in _COLUMNS.items() if s in ran]
    shares = [
        f"{sorted(found)[len(found) // 2]:.0%} of the bytes with {devices} replicas (at most"
        f" {max(found):.0%})"
        for devices, setting in ((2, "sharded parameters"), (4, "sharded parameters, 4 replicas"))
        if (found := [row["share"] for row in rows.values() if row["setting"] == setting])
    ]
    text = _INTRODUCTION.format(
        shares="With parameters in parts, a device holds parts of all variables from 1 KiB on, and"
        f"\nthose of its optimizer. In these small models, the median is {' and '.join(shares)}.",
        settings="\n".join(["| Column | Setting |", "| --- | --- |", *settings]),
        models=models,
        packages=len(packages),
        counts=f"{sum(counted.values())} runs: "
        + ", ".join(f"{number} {_COUNTED[result]}" for result, number in counted.most_common())
        + ".",
    )
    for package, of_package in packages.items():
        used = [s for s in _COLUMNS if any(s in found for found in of_package.values())]
        text += f"\n## {package}\n\n"
        text += "| Model | " + " | ".join(_COLUMNS[s][0] for s in used) + " | loss | weights | |\n"
        text += "| --- |" + " --- |" * (len(used) + 3) + "\n"
        for model, found in of_package.items():
            cells = [_cell(found.get(setting)) for setting in used]
            columns = [row for setting, row in found.items() if setting in _COLUMNS]
            apart = [
                f"{max(row.get(name, 0.0) for row in columns):.0e}" if columns else ""
                for name in ("loss", "weights")
            ]
            reasons = sorted({row["reason"] for row in found.values() if row["reason"]})
            longer = [a for a in reasons if not any(b != a and b.startswith(a) for b in reasons)]
            note = re.sub(r"\x1b\[\d*m", "", "; ".join(longer))  # colors of a terminal
            note = note.replace("|", "\\|").replace("\n", " ")[:200]
            text += f"| {model} | " + " | ".join([*cells, *apart]) + f" | {note} |\n"
    path.write_text(text)
    print(f"{path}: {models} models, {dict(counted)}")
    return 0


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return _SIGNS.get(row["result"], f"**{row['result']}**")
