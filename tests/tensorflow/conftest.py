"""Keras is imported before the first test, because it sets environment variables."""

import keras  # noqa: F401
