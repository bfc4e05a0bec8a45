"""Device names, logical CPU devices, meshes, and the order in which programs reach devices."""

from typing import TYPE_CHECKING

from distributary._late import late_names
from distributary.topology._cpu import (
    cpu_thread_pool_size,
    cpu_threads_suffice,
    prepare_cpu_threads,
    prepare_local_devices,
    requested_cpu_devices,
    set_logical_cpu_devices,
)
from distributary.topology._device_strings import (
    DeviceName,
    canonical_name,
    local_devices_of,
    parse_device,
    resolve_device,
    short_name,
)
from distributary.topology._discovery import (
    REPLICA_AXIS,
    host_groups,
    make_abstract_mesh,
    make_mesh,
    num_logical_devices,
    replica_devices,
)
from distributary.topology._dispatch import (
    Dispatcher,
    JobEvent,
    dispatcher_for,
    job_programs,
    latest_program,
    progress,
)
from distributary.topology._interrupts import interrupts
from distributary.topology._jax_private import (
    all_params,
    backends_started,
    coordination_client,
    inside_jax_trace,
    is_left_over,
    scan_counts,
    uncommitted,
    without_high_primitives,
)
from distributary.topology._placement import (
    HOST_MEMORY,
    has_host_memory,
    in_device_memory,
    in_host_memory,
    local_copy,
    local_devices,
    num_local_replicas,
    own_copies,
    put_own,
    put_replicated,
    put_stacked,
)
from distributary.topology._shards import (
    fetch_whole,
    padded,
    put_sharded,
    shard_dim,
    shard_spec,
    stored_shards,
    whole_shards,
)
from distributary.topology._target import (
    ProgramKind,
    Target,
    aim_at,
    compile_ahead,
    current_target,
    devices_of_all_hosts,
    for_target,
    mesh_of_values,
    watch_programs,
)
from distributary.topology._thread_pool import SHARE_VARIABLE, num_cores, threads_needed
from distributary.topology._threads import call_when_collected, start_thread
from distributary.topology._timing import ProgramTimer, profiled_steps
from distributary.topology._versions import warn_of_untested_jax

if TYPE_CHECKING:
    from distributary.topology._device_assignment import DeviceAssignment, DeviceOrderMode
    from distributary.topology._tpu_topology import Topology, TPUSystemMetadata

__all__ = [
    "HOST_MEMORY",
    "REPLICA_AXIS",
    "SHARE_VARIABLE",
    "DeviceAssignment",
    "DeviceName",
    "DeviceOrderMode",
    "Dispatcher",
    "JobEvent",
    "ProgramKind",
    "ProgramTimer",
    "TPUSystemMetadata",
    "Target",
    "Topology",
    "aim_at",
    "all_params",
    "backends_started",
    "call_when_collected",
    "canonical_name",
    "compile_ahead",
    "coordination_client",
    "cpu_thread_pool_size",
    "cpu_threads_suffice",
    "current_target",
    "devices_of_all_hosts",
    "dispatcher_for",
    "fetch_whole",
    "for_target",
    "has_host_memory",
    "host_groups",
    "in_device_memory",
    "in_host_memory",
    "inside_jax_trace",
    "interrupts",
    "is_left_over",
    "job_programs",
    "latest_program",
    "local_copy",
    "local_devices",
    "local_devices_of",
    "make_abstract_mesh",
    "make_mesh",
    "mesh_of_values",
    "num_cores",
    "num_local_replicas",
    "num_logical_devices",
    "own_copies",
    "padded",
    "parse_device",
    "prepare_cpu_threads",
    "prepare_local_devices",
    "profiled_steps",
    "progress",
    "put_own",
    "put_replicated",
    "put_sharded",
    "put_stacked",
    "replica_devices",
    "requested_cpu_devices",
    "resolve_device",
    "scan_counts",
    "set_logical_cpu_devices",
    "shard_dim",
    "shard_spec",
    "short_name",
    "start_thread",
    "stored_shards",
    "threads_needed",
    "uncommitted",
    "warn_of_untested_jax",
    "watch_programs",
    "whole_shards",
    "without_high_primitives",
]

# Imported on first use: only TPUs need these.
__getattr__ = late_names(
    __name__,
    {
        "DeviceAssignment": "_device_assignment",
        "DeviceOrderMode": "_device_assignment",
        "TPUSystemMetadata": "_tpu_topology",
        "Topology": "_tpu_topology",
    },
)
