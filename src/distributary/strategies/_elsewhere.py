"""Names that people know from TensorFlow, torch and Horovod, and what to use here."""

_DATASET = "Loop over strategy.experimental_distribute_dataset(dataset)."
_EXTENDED = "It is a part of strategy.extended."

#: For strategies.
OF_STRATEGY = {
    "experimental_run_v2 experimental_run call_for_each_replica call_for_each_tower __call__": (
        "Call strategy.run(step, args=(batch,))."
    ),
    "make_dataset_iterator distribute_dataset prepare": _DATASET,
    "make_input_fn_iterator": "Use strategy.distribute_datasets_from_function(dataset_fn).",
    "experimental_make_numpy_dataset": (
        "Use strategy.experimental_distribute_dataset with"
        " distributary.data.Dataset.from_tensor_slices(arrays).batch(global_batch_size)."
    ),
    "num_replicas num_towers num_devices world_size num_gpus": (
        "Use strategy.num_replicas_in_sync."
    ),
    "is_main_process is_master is_main rank local_rank process_index": (
        "Use strategy.is_chief, True in the process that saves and prints."
    ),
    "unwrap local_results": "Use strategy.experimental_local_results(value).",
    "configure update_config_proto initialize_system": "Leave it out: there are no sessions.",
    "all_reduce all_gather merge_call": (
        "In a step, it is a method of distributary.get_replica_context(); after run, use"
        " strategy.reduce or strategy.gather."
    ),
    "update update_non_slot colocate_vars_with worker_devices parameter_devices"
    " should_checkpoint should_save_summary non_slot_devices": _EXTENDED,
    "devices device": "Use strategy.extended.worker_devices.",
    "fit compile evaluate predict backward": (
        "It is a method of the model, which you create in `with strategy.scope():`."
    ),
}
#: For arguments of strategies.
OF_ARGUMENTS = {
    "num_gpus num_gpus_per_worker gpus num_devices num_replicas device_count": (
        'Name the devices, devices=["GPU:0", "GPU:1"], or leave the argument out for all of them.'
    ),
    "num_workers workers num_hosts hosts num_ps ps worker_hosts rank world_size": (
        "Workers are started, not asked for: `distributary launch --workers 2 train.py` (--ps 1"
        " adds a parameter server) gives each its TF_CONFIG, from which the strategy knows all."
    ),
    "device": (
        'Write OneDeviceStrategy("GPU:0") or "CPU:0"; other strategies take a list,'
        ' devices=["GPU:0", "GPU:1"].'
    ),
    "communication collective_communication": (
        "Write communication_options=distributary.experimental.CommunicationOptions(...)."
    ),
    "cluster_resolver": (
        "Pass distributary.cluster_resolver.TFConfigClusterResolver() in a job, or"
        " distributary.experimental.local_cluster(workers=2, ps=1) to try it in this process."
    ),
    "extended": (
        "Strategy is abstract: create a MirroredStrategy, MultiWorkerMirroredStrategy or another"
        " strategy."
    ),
}
