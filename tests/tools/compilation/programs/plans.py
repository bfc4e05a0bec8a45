"""Runs `distributary plan`, and prints the most memory in KiB that one of its processes has had."""

import resource
import subprocess
import sys

command = [sys.executable, "-m", "distributary", "plan", *sys.argv[1:]]
subprocess.run(command, check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
