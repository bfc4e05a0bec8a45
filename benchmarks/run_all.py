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

import _comparisons
import _measured
import _report

_FOLDER = Path(__file__).resolve().parent
_ROOT = _FOLDER.parent
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")

NAMES = (
    "import_time",
    "host_overhead",
    "step_time",
    "fit_time",
    "multi_worker_time",
    "parameter_server",
    "parameter_server_scale",
    "ps_rows",
    "input_time",
    "memory",
    "save_time",
    "sharded_state",
    "central_storage",
    "recovery",
    "soak_ps",
    "gpu",
)
_WITH_TENSORFLOW = {
    "step_time",
    "fit_time",
    "multi_worker_time",
    "parameter_server",
    "input_time",
}
_WITH_TORCH = {"multi_worker_time"}


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
    """The command line of a benchmark."""
    made = [sys.executable, str(_FOLDER / f"{name}.py"), "--output", str(arguments.output)]
    if name == "soak_ps":  # has no rounds
        made += ["--minutes", "0.5", "--server-kills", "1"] if arguments.quick else []
    elif arguments.quick:
        made.append("--quick")
    if name in _WITH_TENSORFLOW and arguments.tensorflow_python:
        made += ["--tensorflow-python", arguments.tensorflow_python]
    if name in _WITH_TORCH and arguments.torch_python:
        made += ["--torch-python", arguments.torch_python]
    return made


def report(folder: Path) -> None:
    """Writes what the result files of the folder say: page, plot and the README's table."""
    documents = _comparisons.read(folder)
    is_stored = folder.resolve() == _report.RESULTS
    page = _ROOT / "docs" / "guide" / "measured.md" if is_stored else folder / "measured.md"
    image = "../images/measured.png" if is_stored else "measured.png"
    _measured.plot(documents, page.parent / image)
    written = {page: _measured.page(documents, image)}
    if is_stored:
        readme = _ROOT / "README.md"
        written[readme] = _measured.with_table(readme.read_text(encoding="utf-8"), documents)
    for path, text in written.items():
        path.write_text(text, encoding="utf-8")
        print(f"written: {path}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="short: shows that it works")
    parser.add_argument(
        "--only", type=lambda text: text.split(","), metavar="NAMES", help=f"of {','.join(NAMES)}"
    )
    parser.add_argument("--output", type=Path, default=_report.RESULTS, metavar="FOLDER")
    parser.add_argument("--report-only", action="store_true", help="from the files that are there")
    parser.add_argument("--tensorflow-python", metavar="PATH", help="a Python that has tensorflow")
    parser.add_argument("--torch-python", metavar="PATH", help="a Python that has torch")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.only or ()) - set(NAMES)):
        parser.error(f"--only: unknown {unknown}; there are {', '.join(NAMES)}")
    if arguments.quick and arguments.output.resolve() == _report.RESULTS:
        parser.error("--quick: give an --output FOLDER; the stored results are of full runs")
    if arguments.only is None:
        has_gpu = _NVIDIA_DRIVER.exists()
        arguments.only = [name for name in NAMES if name != "gpu" or has_gpu]
    return arguments


if __name__ == "__main__":
    sys.exit(main(_parse()))
