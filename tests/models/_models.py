"""All models."""

from typing import Any

import _keras_hub
import _loops
import _others


def all_models() -> list[Any]:
    """Returns the models in the order of the page."""
    return [*_keras_hub.cases(), *_others.cases(), *_loops.cases()]
