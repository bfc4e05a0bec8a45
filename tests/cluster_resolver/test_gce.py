import sys
from types import SimpleNamespace

import pytest

from distributary.cluster_resolver import GCEClusterResolver, multi_worker
from distributary.errors import ClusterError


class _Request:
    def __init__(self, answer):
        self._answer = answer

    def execute(self):
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


class _Service:
    """What the resolver uses of the API `compute` `v1`: answers page by page."""

    def __init__(self, pages, addresses, error=None):
        self._pages = pages
        self._addresses = addresses
        self._error = error
        self.asked = []

    def instanceGroups(self):  # noqa: N802
        return self

    def listInstances(self, **place):  # noqa: N802
        self.asked.append(place)
        return _Request(self._error or self._page(0))

    def listInstances_next(self, previous_request, previous_response):  # noqa: N802
        number = previous_response.get("next")
        return None if number is None else _Request(self._page(number))

    def _page(self, number):
        items = [
            {"instance": f"https://compute/v1/projects/p/zones/z/instances/{name}"} | state
            for name, state in self._pages[number]
        ]
        more = {"next": number + 1} if number + 1 < len(self._pages) else {}
        return ({"items": items} if items else {}) | more

    def instances(self):
        return self

    def get(self, project, zone, instance):
        assert (project, zone) == ("proj", "us-east1-d")
        return _Request(self._addresses[instance])


def _interface(ip):
    return {"networkInterfaces": [{}, {"networkIP": ip}]}


_ADDRESSES = {"a": _interface("10.0.0.9"), "b": _interface("10.0.0.2"), "c": _interface("fd00::3")}


def _resolver(pages, *args, addresses=_ADDRESSES, error=None, **settings):
    service = _Service(pages, addresses, error)
    resolver = GCEClusterResolver(
        "proj", "us-east1-d", "group", 8470, *args, service=service, **settings
    )
    return resolver, service


def test_machines_are_tasks_in_the_order_of_their_addresses():
    resolver, service = _resolver([[("a", {"status": "RUNNING"}), ("b", {})]])

    assert resolver.cluster_spec() == {"worker": ["10.0.0.2:8470", "10.0.0.9:8470"]}
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 0, "grpc")
    assert resolver.master() == "grpc://10.0.0.2:8470"
    assert resolver.master("worker", 1, "http") == "http://10.0.0.9:8470"
    assert service.asked[0] == {
        "project": "proj",
        "zone": "us-east1-d",
        "instanceGroup": "group",
        "body": {"instanceState": "ALL"},
        "orderBy": "name",
    }


def test_all_pages_are_read():
    resolver, _ = _resolver([[("a", {})], [], [("b", {}), ("c", {})]], "worker", 2)

    place = multi_worker(resolver.cluster_spec(), resolver.task_type, resolver.task_id)

    assert place.num_workers == 3
    assert place.address == "[fd00::3]:8470"


@pytest.mark.parametrize(
    ("pages", "settings", "message"),
    [
        ([[]], {}, "instance group 'group' in us-east1-d of project proj has no instances"),
        (
            [[("b", {"status": "STOPPING"})]],
            {},
            'https://.*/b is in the state "STOPPING", expected',
        ),
        ([[("a", {})]], {"addresses": {"a": {}}}, '"a" of .* has no internal address'),
        ([[]], {"error": PermissionError("403")}, "listing the .* of .* 403.*compute.viewer"),
        ([[("a", {})]], {"addresses": {"a": OSError("reset")}}, 'reading "a" .* OSError: reset'),
    ],
)
def test_a_group_that_cannot_be_used_is_reported(pages, settings, message):
    with pytest.raises(ClusterError, match=f"^GCEClusterResolver: {message}"):
        _resolver(pages, **settings)[0].cluster_spec()


def test_a_service_is_made_with_the_credentials_or_a_missing_package_is_named(monkeypatch):
    built = []
    package = SimpleNamespace(build=lambda *args, **kwargs: built.append((args, kwargs)))
    monkeypatch.setitem(sys.modules, "googleapiclient.discovery", package)

    for credentials in ("default", "own"):
        GCEClusterResolver("p", "z", "g", 8470, credentials=credentials)

    assert built == [(("compute", "v1"), {"credentials": passed}) for passed in (None, "own")]
    monkeypatch.delitem(sys.modules, "googleapiclient.discovery")
    monkeypatch.setitem(sys.modules, "googleapiclient", None)
    with pytest.raises(ImportError, match="pip install google-api-python-client, or pass service"):
        GCEClusterResolver("p", "z", "g", 8470)
