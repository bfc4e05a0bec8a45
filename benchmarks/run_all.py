"""All benchmarks, one after the other, and the page and the table in the README that show them.

Every benchmark is a process of its own and leaves its result file as if it had been called alone.
One that fails does not keep the others from running; the status is 1 then. `gpu` runs only where
there is an NVIDIA driver. The report is made from the result files that the folder has, so it also
shows those that an earlier call has left. Into another folder than that of the repository
(`--output`) go the page and the plot, too, and the README stays as it is.

    python benchmarks/run_all.py --tensorflow-python PATH --torch-python PATH      # hours
    python benchmarks/run_all.py --quick --only import_time,save_time --output FOLDER
    python benchmarks/run_all.py --report-only
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import _measured
from _harness import FOLDER, NVIDIA_DRIVER, RESULTS

ROOT = FOLDER.parent

NAMES = (
    *("import_time", "host_overhead", "step_time", "fit_time", "multi_worker_time"),
    *("parameter_server", "parameter_server_scale", "ps_rows", "input_time", "memory"),
    *("save_time", "sharded_state", "central_storage", "recovery", "soak_ps", "gpu"),
)
_WITH_TENSORFLOW = ("step_time", "fit_time", "multi_worker_time", "parameter_server", "input_time")
_WITH_TORCH = ("multi_worker_time",)


def main(arguments: argparse.Namespace) -> int:
    """Runs what was asked for, writes the report; 1 if a benchmark failed, else 0."""
    failed = []
    for name in () if arguments.report_only else arguments.only:
        print(f"=== {name}", flush=True)
        start = time.monotonic()
        status = subprocess.run(command(name, arguments)).returncode
        print(f"=== {name}: {time.monotonic() - start:.0f} s, status {status}\n", flush=True)
        if status:
            failed.append(name)
    report(arguments.output)
    for name in failed:
        print(f"FAILED: {name}; see above", file=sys.stderr)
    return int(bool(failed))


def command(name: str, arguments: argparse.Namespace) -> list[str]:
    """Returns the command line of a benchmark."""
    made = [sys.executable, str(FOLDER / f"{name}.py"), "--output", str(arguments.output)]
    made += ["--quick"] * arguments.quick
    if name in _WITH_TENSORFLOW and arguments.tensorflow_python:
        made += ["--tensorflow-python", arguments.tensorflow_python]
    if name in _WITH_TORCH and arguments.torch_python:
        made += ["--torch-python", arguments.torch_python]
    return made


def report(folder: Path) -> None:
    """Writes what the result files of the folder say: tables of the page and README, and the plot.

    The text around the tables stays as it is in the repository.
    """
    documents = _measured.read(folder)
    page, image = ROOT / "docs/guide/measured.md", ROOT / "docs/images/measured.png"
    written = {page: page, ROOT / "README.md": ROOT / "README.md"}
    if folder.resolve() != RESULTS:
        image, written = folder / "measured.png", {page: folder / "measured.md"}
    _measured.plot(documents, image)
    for source, target in written.items():
        text = _measured.with_tables(source.read_text(encoding="utf-8"), documents)
        target.write_text(text, encoding="utf-8")
        print(f"written: {target}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="short: shows that it works")
    parser.add_argument(
        "--only", type=lambda text: text.split(","), metavar="NAMES", help=f"of {','.join(NAMES)}"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--report-only", action="store_true", help="from the files that are there")
    parser.add_argument("--tensorflow-python", metavar="PATH", help="a Python that has tensorflow")
    parser.add_argument("--torch-python", metavar="PATH", help="a Python that has torch")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.only or ()) - set(NAMES)):
        parser.error(f"--only: unknown {unknown}; there are {', '.join(NAMES)}")
    if arguments.quick and arguments.output.resolve() == RESULTS:
        parser.error("--quick: give an --output FOLDER; the stored results are of full runs")
    if arguments.only is None:
        arguments.only = [name for name in NAMES if name != "gpu" or NVIDIA_DRIVER.exists()]
    return arguments


if __name__ == "__main__":
    sys.exit(main(_parse()))
