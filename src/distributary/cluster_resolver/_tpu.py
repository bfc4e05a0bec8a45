"""The hosts of a Cloud TPU."""

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from distributary.cluster_resolver._addresses import (
    checked_port,
    join_address,
    parse_address,
    split_port,
)
from distributary.cluster_resolver._checks import checked_name, wrong_type
from distributary.cluster_resolver._cluster_spec import ClusterSpec
from distributary.cluster_resolver._ranks import int_variable
from distributary.cluster_resolver._resolver import ClusterResolver
from distributary.errors import ClusterError, InvalidValueError, UnsupportedError

if TYPE_CHECKING:
    from distributary.devices import TPUSystemMetadata

_WHO = "TPUClusterResolver"
_HOST_VARIABLES = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
_ID_VARIABLES = ("TPU_WORKER_ID", "CLOUD_TPU_TASK_ID")
_TIMEOUT_SECONDS = 5.0


@final
class TPUClusterResolver(ClusterResolver):
    """The hosts of a TPU slice. Every host runs the program and computes on its own TPU chips.

    This differs from TensorFlow, where one program outside of the TPU controls all hosts. Here, the
    task is the number of this host, and the addresses are those of the workers' programs. The hosts
    come from the environment variables `TPU_WORKER_ID` and `TPU_WORKER_HOSTNAMES` (or
    `TPU_PROCESS_ADDRESSES`) on Google Kubernetes Engine, and from the metadata server on a Cloud
    TPU VM (at `GCE_METADATA_HOST` or `GCE_METADATA_IP`, if set). Everything is looked up when you
    ask for it, and needs no TPU. If you do not name a task, `master()` is host 0; for
    `tpu="local"`, it is `""`. `num_accelerators()` is `{"TPU": n}` with the number of TPU cores of
    this host, and starts JAX.

    Args:
        tpu: None or `""` to ask the environment, then the metadata server; `"local"` for the TPU of
            this host alone, which is an empty cluster; or the addresses of all hosts, as a list or
            separated by commas.
        zone: Ignored, because the name of a TPU cannot be looked up; accepted for compatibility.
        project: Like `zone`.
        job_name: Type of the tasks.
        coordinator_name: Type of one more task, the coordinator; give it together with
            `coordinator_address`.
        coordinator_address: Address of the coordinator.
        credentials: Like `zone`.
        service: Like `zone`.
        discovery_url: Like `zone`.
        port: Port of each host of which only the name is known. If a host is listed several times,
            because several processes share it, their ports count up.

    Raises:
        UnsupportedError: if `tpu` is the name of a TPU.
        InvalidTypeError, InvalidValueError: if an argument has the wrong type or value.

    Source: `tf.distribute.cluster_resolver.TPUClusterResolver`; hosts are found as in
    `jax.distributed.initialize`.
    """

    def __init__(
        self,
        tpu: str | Sequence[str] | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        credentials: object = "default",
        service: object = None,
        discovery_url: str | None = None,
        *,
        port: int = 8482,  # jax.distributed uses it on TPUs; 8470 to 8479 belong to libtpu
    ) -> None:
        del zone, project, credentials, service, discovery_url
        self._port = checked_port(port, f"{_WHO}: port")
        self._local = tpu == "local"
        self._addresses = None if self._local or not tpu else _explicit(tpu)
        if (coordinator_name is None) != (coordinator_address is None):
            raise InvalidValueError(
                f"{_WHO}: coordinator_name is {coordinator_name!r} and coordinator_address is"
                f" {coordinator_address!r}, expected both or neither."
            )
        self._coordinator: dict[str, list[str]] = {}
        if coordinator_name is not None and coordinator_address is not None:
            parse_address(coordinator_address, f"{_WHO}: coordinator_address")
            self._coordinator = {coordinator_name: [coordinator_address]}
        self._job_name = checked_name(job_name, f"{_WHO}: job_name", "a task type")
        self.task_type, self.rpc_layer = self._job_name, "grpc"

    def cluster_spec(self) -> ClusterSpec:
        """Returns the hosts of the slice; empty for `tpu="local"`.

        Raises:
            ClusterError: if neither the environment nor the metadata server names the hosts.
            UnsupportedError: if the job has several slices, which do not know each other's hosts.
        """
        if self._local:
            return ClusterSpec({})
        addresses = self._addresses
        if addresses is None:
            name = "MEGASCALE_NUM_SLICES"
            if name in os.environ and int_variable(name, "It counts TPU slices.") > 1:
                raise UnsupportedError(
                    f"{name} is {os.environ[name]}: a TPU host knows only the hosts of its own"
                    " slice. Pass the addresses of the hosts of all slices as tpu, slice by slice,"
                    " and set task_id of the resolver."
                )
            hosts = _hosts_of_environment() or _hosts_of_metadata()
            # Processes that share a host have ports that count up.
            addresses = [
                join_address(host, self._port + hosts[:number].count(host))
                for number, host in enumerate(hosts)
            ]
        return ClusterSpec({self._job_name: addresses, **self._coordinator})

    def get_master(self) -> str:
        """Returns `master()`."""
        return self.master()

    def get_job_name(self) -> str | None:
        """Returns `task_type`."""
        return self.task_type

    def get_tpu_system_metadata(self) -> "TPUSystemMetadata":
        """Returns the number and places of the job's TPU cores; 0 without a TPU. Starts JAX."""
        import jax

        from distributary.devices import Topology, TPUSystemMetadata, local_devices_of

        devices = tuple(jax.devices("tpu")) if local_devices_of("TPU") else ()
        if not devices:
            return TPUSystemMetadata(0, 0, 0, None, ())
        topology = Topology.of_devices(devices)
        return TPUSystemMetadata(
            len(devices), topology.num_tasks, topology.num_tpus_per_task, topology, devices
        )

    def __enter__(self) -> "TPUClusterResolver":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def _master_address(self, task_type: str | None, task_id: int | None) -> str | None:
        if self._local:
            return None
        if task_type is None or task_id is None:
            task_type, task_id = self._job_name, 0
        return self.cluster_spec().task_address(task_type, task_id)

    def _accelerators_of_any_task(self) -> dict[str, int]:
        from distributary.devices import local_devices_of

        return {"TPU": len(local_devices_of("TPU"))}

    def _current_task_id(self) -> int | None:
        if self._local or self._task_id is not None:
            return self._task_id or 0
        for name in _ID_VARIABLES:
            if name in os.environ:
                num_tasks = self.cluster_spec().num_tasks(self._job_name)
                cure = f"It numbers the {num_tasks} hosts of the TPU."
                return int_variable(name, cure, num_tasks - 1)
        hosts = self._addresses or _hosts_of_environment()
        if not hosts:
            return int(_metadata("agent-worker-number", r"\s*\d+\s*", "task_id"))
        if len(hosts) == 1:
            return 0
        if self._addresses:
            return None
        raise ClusterError(
            f"The environment lists {len(hosts)} TPU hosts ({', '.join(hosts)}), but"
            f" {' and '.join(_ID_VARIABLES)} are not set, so the number of this one is not known."
            f" Set {_ID_VARIABLES[0]}, or task_id of the resolver."
        )


def _explicit(tpu: str | Sequence[str]) -> list[str]:
    field = f"{_WHO}: tpu"
    if isinstance(tpu, str):
        entries = [entry.strip() for entry in tpu.split(",")]
        if not any(":" in entry for entry in entries):
            raise UnsupportedError(
                f"{field} is {tpu!r}. Names of TPUs are not looked up, because JAX programs run on"
                " the hosts of the TPU itself. Start the program on every host: without tpu on a"
                ' Cloud TPU VM or GKE, elsewhere with the addresses of all hosts, "10.0.0.1:8482,'
                '10.0.0.2:8482".'
            )
    elif isinstance(tpu, (list, tuple)):
        entries = list(tpu)
    else:
        raise wrong_type(tpu, field, 'None, "local", or the addresses of the hosts of a TPU')
    addresses = []
    for number, entry in enumerate(entries):
        address = entry.removeprefix("grpc://") if isinstance(entry, str) else entry
        parse_address(address, f"{field}[{number}]")
        addresses.append(address)
    return addresses


def _hosts_of_environment() -> list[str]:
    for name in _HOST_VARIABLES:
        text = os.environ.get(name)
        if text:
            # The ports in `TPU_PROCESS_ADDRESSES` belong to libtpu, not to the program.
            hosts = [split_port(entry.strip())[0] for entry in text.split(",")]
            if not all(hosts):
                raise ClusterError(
                    f"The environment variable {name} is {text!r}, expected names of hosts"
                    " separated by commas."
                )
            return hosts
    return []


def _hosts_of_metadata() -> list[str]:
    # "host", or "name:number:host" on older machines
    expected = r"[^:,]+|[^:,]*:[^:,]*:[^:,]+"
    text = _metadata("worker-network-endpoints", f"({expected})(,({expected}))*", "tpu")
    return [endpoint.strip().rpartition(":")[2] for endpoint in text.split(",")]


def _metadata(attribute: str, expected: str, argument: str) -> str:
    """Returns one of the attributes that `jax.distributed.initialize` reads, too.

    Args:
        attribute: Name of the attribute.
        expected: Regular expression for a right answer.
        argument: The argument with which the user can do without the attribute.

    Raises:
        ClusterError: if the server cannot be reached, or its answer is not right.

    Source: https://cloud.google.com/compute/docs/metadata/querying-metadata.
    """
    # Imported here, because few programs run on TPUs.
    import urllib.error
    import urllib.request

    servers = (os.environ.get(name) for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP"))
    server = next(filter(None, servers), "metadata.google.internal")
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{attribute}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    # Without a proxy, because the server is part of the machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_SECONDS) as response:
            text = str(response.read().decode("utf-8"))
    except OSError as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        raise ClusterError(
            f"{_WHO} asked the metadata server at {url} for the TPU of this host, but it did not"
            f" answer: {error}. Outside of Cloud TPU VMs, set TPU_WORKER_ID and"
            " TPU_WORKER_HOSTNAMES, as GKE does, or pass the addresses of the hosts as tpu, or"
            ' tpu="local" for one host. On a machine that has just booted, try again in a moment.'
        ) from error
    if not re.fullmatch(expected, text, re.ASCII):
        raise ClusterError(f"{_WHO}: {url} is {text!r}, which cannot be read. Set {argument}.")
    return text
