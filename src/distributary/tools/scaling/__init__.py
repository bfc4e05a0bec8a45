"""Measures what more replicas gain on this machine, and predicts what more machines would gain.

The command `distributary bench` is built on it. `import distributary` does not import this
package.
"""

from distributary.tools.scaling._measurement import Network, Timing, predict, report
