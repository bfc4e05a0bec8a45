"""How much longer does `import distributary` take than `import jax`?

Fresh processes in turns: an empty program, `import jax`, `import distributary`. Times are of the
whole process, as a user waits for it. One round before the first fills the file cache.

    python benchmarks/import_time.py
"""

import argparse
import statistics
import subprocess
import sys
import time

import _command_line
import _processes
import _report
import _timing

BAR = 1.1
PROGRAMS = {"empty": "pass", "jax": "import jax", "distributary": "import distributary"}


def main(arguments: argparse.Namespace) -> int:
    """Measures, prints, writes; 1 if an import failed, else 0."""
    load_before = _report.load_average()
    seconds: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    try:
        for name in PROGRAMS:
            _time_process(PROGRAMS[name])
        for round_number in range(arguments.rounds):
            for name in PROGRAMS if round_number % 2 == 0 else reversed(PROGRAMS):
                seconds[name].append(_time_process(PROGRAMS[name]))
        imports_jax = _imports_jax()
    except subprocess.CalledProcessError as error:
        print(f"FAILED: {error.cmd[-1]}\n{error.stderr}", file=sys.stderr)
        return 1
    ratio = _timing.summarize_ratio(seconds["distributary"], seconds["jax"])
    print("Seconds per process, whole.\n")
    _report.print_table(
        ["program", "min", "median", "ratio to jax", "of min", "bar", ""],
        [
            [
                program,
                min(seconds[name]),
                statistics.median(seconds[name]),
                *(
                    [
                        ratio["median"],
                        ratio["of_minima"],
                        BAR,
                        _report.verdict(ratio["median"], BAR),
                    ]
                    if name == "distributary"
                    else [None] * 4
                ),
            ]
            for name, program in PROGRAMS.items()
        ],
    )
    if not imports_jax:
        print("\n`import distributary` does not import jax: the ratio says little.")
    _report.write(
        "import_time",
        rows=[{"seconds": seconds, "ratio": ratio, "imports_jax": imports_jax}],
        settings={"rounds": arguments.rounds, "bar": BAR},
        load_before=load_before,
        folder=arguments.output,
    )
    return 0


def _imports_jax() -> bool:
    """False would mean that users pay for jax later, where this benchmark does not look."""
    answer = subprocess.run(
        [sys.executable, "-c", "import sys, distributary; print('jax' in sys.modules)"],
        env=_processes.environment(),
        check=True,
        capture_output=True,
        text=True,
    )
    return answer.stdout.strip() == "True"


def _time_process(program: str) -> float:
    """Seconds from starting a Python that runs `program` to its end."""
    environ = _processes.environment()
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or every round would compile what we measure
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", program], env=environ, check=True, capture_output=True, text=True
    )
    return time.perf_counter() - start


def _parse() -> argparse.Namespace:
    parser = _command_line.parser(__doc__, "processes per program", 15, 3)
    arguments = _command_line.parse(parser)
    return arguments


if __name__ == "__main__":
    sys.exit(main(_parse()))
