"""The page that shows a run, and the numbers that it requests."""

import functools
import json
from collections.abc import Callable
from importlib import resources
from typing import Any, TypeAlias
from urllib.parse import parse_qs, urlsplit

from distributary.monitoring._numbers import finite
from distributary.monitoring._recorder import Recorder
from distributary.monitoring._server import Answer

__all__ = ["Describe", "respond"]

# Returns what is not in the samples: `title`, a line below it, and rows of `tasks`.
Describe: TypeAlias = Callable[[], dict[str, Any]]

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
    "; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def respond(recorder: Recorder, describe: Describe, path: str) -> Answer | None:
    """Returns the page for `/`, and the samples from number 0 on for `/stats.json?first=0`."""
    url = urlsplit(path)
    if url.path == "/":
        return Answer(_page(), "text/html; charset=utf-8", headers=_HEADERS)
    if url.path != "/stats.json":
        return None
    (first,) = parse_qs(url.query).get("first", ["0"])[:1]
    samples, following = recorder.samples(int(first) if first.isdecimal() else 0)
    shown = [
        {**sample, "tasks": {name: finite(numbers) for name, numbers in sample["tasks"].items()}}
        for sample in samples
    ]
    content = {**describe(), "samples": shown, "next": following}
    return Answer(json.dumps(content).encode(), "application/json", headers=_HEADERS)


@functools.cache
def _page() -> bytes:
    return resources.files(__package__).joinpath("page.html").read_bytes()
