"""Runs command lines of `distributary compile`, one JSON list each on stdin, in one process.

Prints a line of JSON per command: exit code, stdout, stderr and the report.
"""

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path

from distributary.tools.cli import main

with tempfile.TemporaryDirectory() as folder:
    report = Path(folder) / "report.json"
    for line in sys.stdin:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            report.write_text("[]")
            try:
                code = main(["compile", "--json", str(report), *json.loads(line)])
            except SystemExit as end:
                code = end.code
        print(json.dumps([code, out.getvalue(), err.getvalue(), json.loads(report.read_text())]))
