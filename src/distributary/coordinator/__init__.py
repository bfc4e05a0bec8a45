"""Asynchronous training: a coordinator gives work to workers, servers keep the variables."""
