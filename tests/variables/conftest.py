"""The fixtures of this folder."""

from tests.two_replicas import strategy, variable  # noqa: F401
