"""Asks Google Cloud's metadata server about the TPU that this host belongs to."""

import os
import time
from typing import final

from distributary.errors import ClusterError

__all__ = ["MetadataServer"]

_TIMEOUT_SECONDS = 5.0
_RETRY_SECONDS = (0.1, 0.5, 2.0)  # the server may be overloaded while a machine boots
_RETRIED = (429, 500, 502, 503, 504)


@final
class MetadataServer:
    """The attributes of this virtual machine.

    Args:
        address: `"host"`, `"host:port"` or a URL. None takes the address in the environment, or
            Google's.

    Source: https://cloud.google.com/compute/docs/metadata/querying-metadata. The attributes are
    those that `jax.distributed.initialize` reads.
    """

    def __init__(self, address: str | None) -> None:
        self._address = address

    def hosts(self) -> list[str]:
        """Returns the hosts of the TPU slice, in the order of their numbers.

        Raises:
            ClusterError: if the server cannot be reached, or its answer is not a list of hosts.
        """
        key = "worker-network-endpoints"
        text = self._attribute(key)
        hosts = []
        for endpoint in text.split(","):
            # "host", or "name:number:host" on older machines
            parts = endpoint.strip().split(":")
            if len(parts) not in (1, 3) or not parts[-1]:
                raise ClusterError(
                    f"The attribute {key} of {self._url(key)} is {text!r}, expected hosts separated"
                    f" by commas; {endpoint!r} is not a host. Pass the addresses of the hosts as"
                    " tpu."
                )
            hosts.append(parts[-1])
        return hosts

    def worker_number(self) -> int:
        """Returns the number of this host in the TPU slice.

        Raises:
            ClusterError: if the server cannot be reached, or its answer is not a number.
        """
        key = "agent-worker-number"
        text = self._attribute(key).strip()
        if not (text.isascii() and text.isdecimal()):
            raise ClusterError(
                f"The attribute {key} of {self._url(key)} is {text!r}, expected the number of this"
                " host. Set task_id of the resolver."
            )
        return int(text)

    def _url(self, key: str) -> str:
        address = self._address
        for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP"):
            address = address or os.environ.get(name)
        address = address or "metadata.google.internal"
        base = address.rstrip("/") if "://" in address else f"http://{address}"
        return f"{base}/computeMetadata/v1/instance/attributes/{key}"

    def _attribute(self, key: str) -> str:
        # Imported here, because few programs run on TPUs.
        import urllib.error
        import urllib.request

        url = self._url(key)
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
                    raise self._no_answer(url, f"it answered {error.code}") from error
            except OSError as error:  # urllib.error.URLError is one
                raise self._no_answer(url, str(getattr(error, "reason", error))) from error
            time.sleep(pause)
        raise AssertionError("the last attempt has returned or raised")

    def _no_answer(self, url: str, reason: str) -> ClusterError:
        return ClusterError(
            f"TPUClusterResolver asked the metadata server at {url} for the TPU of this host, but"
            f" {reason}. Outside of Cloud TPU VMs, set TPU_WORKER_ID and TPU_WORKER_HOSTNAMES, as"
            ' GKE does, or pass the addresses of the hosts as tpu, or tpu="local" for one host.'
        )
