"""Asks Google Cloud's metadata server about the TPU that this host belongs to."""

import os
import time

from distributary.cluster_resolver._checks import number_in
from distributary.errors import ClusterError

__all__ = ["hosts_of_slice", "worker_number"]

_TIMEOUT_SECONDS = 5.0
_RETRY_SECONDS = (0.1, 0.5, 2.0)  # the server may be overloaded while a machine boots
_RETRIED = (429, 500, 502, 503, 504)


def hosts_of_slice(server: str | None) -> list[str]:
    """Returns the hosts of the TPU slice, in the order of their numbers.

    Args:
        server: `"host"`, `"host:port"` or a URL. None takes the address in the environment, or
            Google's.

    Raises:
        ClusterError: if the server cannot be reached, or its answer is not a list of hosts.
    """
    url = _url("worker-network-endpoints", server)
    text = _answer(url)
    hosts = []
    for endpoint in text.split(","):
        # "host", or "name:number:host" on older machines
        parts = endpoint.strip().split(":")
        if len(parts) not in (1, 3) or not parts[-1]:
            raise _wrong_answer(
                url,
                text,
                f"hosts separated by commas; {endpoint!r} is not a host. Pass the addresses of the"
                " hosts as tpu",
            )
        hosts.append(parts[-1])
    return hosts


def worker_number(server: str | None) -> int:
    """Returns the number of this host in the TPU slice.

    Args:
        server: As in `hosts_of_slice`.

    Raises:
        ClusterError: if the server cannot be reached, or its answer is not a number.
    """
    url = _url("agent-worker-number", server)
    text = _answer(url).strip()
    number = number_in(text)
    if number is None:
        raise _wrong_answer(url, text, "the number of this host. Set task_id of the resolver")
    return number


# Source: https://cloud.google.com/compute/docs/metadata/querying-metadata. The attributes are those
# that `jax.distributed.initialize` reads.
def _url(attribute: str, server: str | None) -> str:
    for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP"):
        server = server or os.environ.get(name)
    server = server or "metadata.google.internal"
    base = server.rstrip("/") if "://" in server else f"http://{server}"
    return f"{base}/computeMetadata/v1/instance/attributes/{attribute}"


def _answer(url: str) -> str:
    # Imported here, because few programs run on TPUs.
    import urllib.error
    import urllib.request

    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    # Without a proxy, because the server is part of the machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for pause in (*_RETRY_SECONDS, None):
        try:
            with opener.open(request, timeout=_TIMEOUT_SECONDS) as response:
                return str(response.read().decode("utf-8"))
        except urllib.error.HTTPError as error:
            error.close()
            if error.code not in _RETRIED or pause is None:
                raise _no_answer(url, f"it answered {error.code}") from error
        except OSError as error:  # urllib.error.URLError is one
            raise _no_answer(url, str(getattr(error, "reason", error))) from error
        time.sleep(pause)
    raise AssertionError("the last attempt has returned or raised")


def _wrong_answer(url: str, text: str, expected: str) -> ClusterError:
    attribute = url.rpartition("/")[2]
    return ClusterError(f"The attribute {attribute} of {url} is {text!r}, expected {expected}.")


def _no_answer(url: str, reason: str) -> ClusterError:
    return ClusterError(
        f"TPUClusterResolver asked the metadata server at {url} for the TPU of this host, but"
        f" {reason}. Outside of Cloud TPU VMs, set TPU_WORKER_ID and TPU_WORKER_HOSTNAMES, as"
        ' GKE does, or pass the addresses of the hosts as tpu, or tpu="local" for one host.'
    )
