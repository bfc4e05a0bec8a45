"""Checks of a machine, and of the links between the tasks of a cluster.

The command `distributary doctor` is built on it. `import distributary` does not import this
package.
"""

from distributary.tools.diagnosis._examination import Report, all_reduce_seconds, examine
from distributary.tools.diagnosis._links import Link, loopback
from distributary.tools.diagnosis._machine import Check, Json, devices_as_text, find_devices
