"""Devices: their names, meshes, the arrays on them, and how programs reach them."""

from distributary.devices._device_strings import (
    canonical_name,
    local_devices_of,
    resolve_device,
    short_name,
)
from distributary.devices._discovery import (
    LOCAL_AXIS,
    REPLICA_AXIS,
    host_groups,
    make_abstract_mesh,
    make_mesh,
    num_hosts,
    num_logical_devices,
    replica_devices,
    sharding_on,
)
from distributary.devices._dispatcher import (
    Dispatcher,
    JobEvent,
    Nest,
    ProgramTimer,
    dispatcher_for,
    job_programs,
    latest_program,
)
from distributary.devices._interrupts import interrupts
from distributary.devices._jax_private import (
    TESTED,
    alias_of,
    all_params,
    backends_started,
    coordination_client,
    function_of_tracer,
    inside_jax_trace,
    is_left_over,
    key_of_devices,
    missing_names,
    no_private_name,
    private,
    put_rows,
    recorded_by,
    scan_counts,
    set_key_of_devices,
    uncommitted,
    warn_of_untested,
    without_high_primitives,
)
from distributary.devices._placement import (
    HOST_MEMORY,
    fetch_whole,
    has_host_memory,
    in_device_memory,
    in_host_memory,
    is_divided,
    is_gathered,
    local_box,
    local_copy,
    local_devices,
    local_replicas,
    own_copies,
    padded,
    put_replicated,
    put_sharded,
    put_stacked,
    shard_dim,
    shard_spec,
    spec_of_axes,
    stored_shape,
    stored_shards,
    whole_shards,
)
from distributary.devices._progress import Fit, progress
from distributary.devices._target import (
    ProgramKind,
    Target,
    Trial,
    current_target,
    current_trial,
    devices_of_all_hosts,
    for_target,
    mesh_of_values,
    watch_programs,
    without_memory,
)
from distributary.devices._thread_pool import (
    CpuThreads,
    cpu_thread_pool_size,
    cpu_threads_suffice,
    prepare_cpu_threads,
    prepare_local_devices,
    requested_cpu_devices,
    set_logical_cpu_devices,
)
from distributary.devices._tpu_topology import (
    DeviceAssignment,
    DeviceOrderMode,
    Topology,
    TPUSystemMetadata,
)
