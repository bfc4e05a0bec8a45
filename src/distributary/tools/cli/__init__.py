"""The command `distributary`."""

from distributary.tools.cli._main import launch_options, main, parser

__all__ = ["launch_options", "main", "parser"]
