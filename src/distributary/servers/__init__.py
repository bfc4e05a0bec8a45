"""Asynchronous training: a coordinator gives work to workers, and servers keep the variables.

Programs import `distributary.coordinator`. The core does not know this package.
"""
