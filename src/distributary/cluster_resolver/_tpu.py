"""The hosts of a Cloud TPU."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from distributary.cluster_resolver._cluster_spec import (
    ClusterSpec,
    checked_strs,
    join_address,
    number_in,
    split_port,
)
from distributary.cluster_resolver._resolver import ClusterResolver, int_variable
from distributary.errors import ClusterError, UnsupportedError

if TYPE_CHECKING:
    from distributary.devices import TPUSystemMetadata

_WHO = "TPUClusterResolver"
_TIMEOUT_SECONDS = 5.0


@final
class TPUClusterResolver(ClusterResolver):
    """The hosts of a TPU slice. Every host runs the program and computes on its own TPU chips.

    This differs from TensorFlow, where one program outside of the TPU controls all hosts. Here, the
    task is the number of this host, and the addresses are those of the workers' programs. The hosts
    come from the environment variables `TPU_WORKER_ID` and `TPU_WORKER_HOSTNAMES` (or
    `TPU_PROCESS_ADDRESSES`) on Google Kubernetes Engine, and from the metadata server on a Cloud
    TPU VM (at `GCE_METADATA_IP`, if set). Everything is looked up when you ask for it, and needs no
    TPU. If you do not name a task, `master()` is host 0; for
    `tpu="local"`, it is `""`. `num_accelerators()` is `{"TPU": n}` with the number of TPU cores of
    this host, and starts JAX.

    Args:
        tpu: None or `""` to ask the environment, then the metadata server; `"local"` for the TPU of
            this host alone, which is an empty cluster; or the addresses of all hosts, as a list or
            separated by commas.
        zone: Ignored, because the name of a TPU cannot be looked up; accepted for compatibility.
        project: Like `zone`.
        job_name: Type of the tasks.
        coordinator_name: Type of one more task, the coordinator.
        coordinator_address: Address of the coordinator; None for none.
        credentials: Like `zone`.
        service: Like `zone`.
        discovery_url: Like `zone`.
        port: Port of each host of which only the name is known.

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
        self._coordinator: dict[Any, list[str]] = {}
        if coordinator_address is not None:
            self._coordinator = {coordinator_name: [coordinator_address]}
        self._local = tpu == "local"
        self._addresses = [] if self._local or not tpu else _addresses_of(tpu)
        self._port, self._job_name = port, job_name
        self.task_type, self.task_id = job_name, 0 if self._local else None
        self.rpc_layer = "grpc"

    def cluster_spec(self) -> ClusterSpec:
        """Returns the hosts of the slice; empty for `tpu="local"`.

        Raises:
            ClusterError: if neither the environment nor the metadata server names the hosts.
            UnsupportedError: if the job has several slices, which do not know each other's hosts.
        """
        if self._local:
            return ClusterSpec({})
        addresses = self._addresses
        if not addresses:
            num_slices = os.environ.get("MEGASCALE_NUM_SLICES", "1")
            if num_slices != "1":
                raise UnsupportedError(
                    f"MEGASCALE_NUM_SLICES is {num_slices}: a TPU host knows only the hosts of its"
                    " own slice. Pass the addresses of the hosts of all slices as tpu, slice by"
                    " slice, and set task_id of the resolver."
                )
            hosts = _hosts_of_environment() or _hosts_of_metadata()
            addresses = [join_address(host, self._port) for host in hosts]
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

        if not local_devices_of("TPU"):
            return TPUSystemMetadata(0, 0, 0, None, ())
        devices = tuple(jax.devices("tpu"))
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
        return {"TPU": super()._accelerators_of_any_task().get("TPU", 0)}

    def _value_of(self, name: str) -> Any:
        if name != "task_id":
            return None
        num_hosts = self.cluster_spec().num_tasks(self._job_name)
        if "TPU_WORKER_ID" in os.environ:
            cure = f"It numbers the {num_hosts} hosts of the TPU."
            return int_variable("TPU_WORKER_ID", cure, num_hosts - 1)
        if num_hosts == 1:
            return 0
        if self._addresses or _hosts_of_environment():
            return None
        return number_in(_metadata("agent-worker-number").strip())


def _addresses_of(tpu: str | Sequence[str]) -> list[str]:
    if isinstance(tpu, str) and ":" not in tpu:
        raise UnsupportedError(
            f"{_WHO}: tpu is {tpu!r}. Names of TPUs are not looked up, because JAX programs run on"
            " the hosts of the TPU itself. Start the program on every host: without tpu on a Cloud"
            ' TPU VM or GKE, elsewhere with the addresses of all hosts, "10.0.0.1:8482,'
            '10.0.0.2:8482".'
        )
    expected = 'None, "local", or the addresses of the hosts of a TPU'
    parts = tpu.split(",") if isinstance(tpu, str) else tpu
    entries = checked_strs(parts, f"{_WHO}: tpu", expected)
    return [entry.strip().removeprefix("grpc://") for entry in entries]


def _hosts_of_environment() -> list[str]:
    names = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
    text = next(filter(None, map(os.environ.get, names)), "")
    # The ports in `TPU_PROCESS_ADDRESSES` belong to libtpu, not to the program.
    return [split_port(entry.strip())[0] for entry in text.split(",")] if text else []


def _hosts_of_metadata() -> list[str]:
    # "host", or "name:number:host" on older machines
    endpoints = _metadata("worker-network-endpoints").split(",")
    return [endpoint.strip().rpartition(":")[2] for endpoint in endpoints]


def _metadata(attribute: str) -> str:
    """Returns one of the attributes that `jax.distributed.initialize` reads, too.

    Raises:
        ClusterError: if the server cannot be reached.

    Source: https://cloud.google.com/compute/docs/metadata/querying-metadata.
    """
    import urllib.request  # here, because it takes a while, and few programs run on TPUs

    server = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{attribute}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    # Without a proxy, because the server is part of the machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_SECONDS) as response:
            return str(response.read().decode("utf-8"))
    except OSError as error:
        raise ClusterError(
            f"{_WHO} asked the metadata server at {url} for the TPU of this host, but it did not"
            f" answer: {error}. Outside of Cloud TPU VMs, set TPU_WORKER_ID and"
            " TPU_WORKER_HOSTNAMES, as GKE does, or pass the addresses of the hosts as tpu, or"
            ' tpu="local" for one host. On a machine that has just booted, try again in a moment.'
        ) from error
