"""What operators use: the command line, reports, the doctor, and pages that show a run.

The core does not know this package.
"""
