"""All models, and the settings in which each is trained."""

from typing import Any

import _keras_hub
import _loops
import _others


def all_models() -> list[Any]:
    """Returns the models in the order of the page."""
    return [*_keras_hub.cases(), *_others.cases(), *_loops.cases()]


def settings_of(case: Any) -> list[str]:
    """Returns the settings of a model."""
    return ["2 replicas", "4 replicas"]
