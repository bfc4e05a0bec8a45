"""Names that people know from TensorFlow, torch, Horovod and JAX, and what to use here."""

_RANK = (
    "A step has get_replica_context().replica_id_in_sync_group; strategy.is_chief is True in the"
    " process that saves and prints."
)
_MODEL = (
    "Create the model in `with distributary.MirroredStrategy().scope():` and call model.fit, or"
    " strategy.run in a loop of your own."
)
_COLLECTIVE = (
    "In a step, call distributary.get_replica_context().all_reduce or all_gather; after run,"
    " strategy.reduce or strategy.gather."
)
_DATASET = "Loop over strategy.experimental_distribute_dataset(dataset)."
_EXTENDED = "It is a part of strategy.extended."

#: For `distributary`.
OF_MODULE = {
    "DistributedDataParallel FullyShardedDataParallel DataParallel DistributedOptimizer"
    " DistributedGradientTape Accelerator": _MODEL,
    "init_process_group init initialize": (
        "Create distributary.MultiWorkerMirroredStrategy(), which connects the workers that"
        " `distributary launch` starts."
    ),
    "destroy_process_group shutdown": "Leave it out: workers part when their programs end.",
    "get_rank rank local_rank is_chief is_main_process": _RANK,
    "get_world_size size world_size device_count": "Use strategy.num_replicas_in_sync.",
    "all_reduce allreduce all_gather allgather reduce gather broadcast reduce_scatter psum pmean": (
        _COLLECTIVE
    ),
    "barrier": "Leave it out: run, fit and checkpoints wait for all workers where they have to.",
    "pmap shard_map jit": "Use strategy.run for a step, and distributary.function around it.",
    "DistributedSampler DataLoader": _DATASET,
    "Dataset": "Use distributary.data.Dataset.",
    "Checkpoint CheckpointManager train": (
        "Use distributary.checkpoint.Checkpoint and distributary.checkpoint.CheckpointManager."
    ),
    "ClusterCoordinator": "Use distributary.coordinator.ClusterCoordinator.",
    "CommunicationOptions CommunicationImplementation": (
        "They are in distributary.experimental, as in tf.distribute."
    ),
    "CollectiveAllReduceStrategy": "Use distributary.MultiWorkerMirroredStrategy.",
    "get_loss_reduction": "Use distributary.ReduceOp.SUM or MEAN.",
    "DistributionStrategy": "Use distributary.Strategy.",
    "keras": "Write `import keras`, with KERAS_BACKEND=jax.",
    "distribute": "Its names are those of this module: distributary.MirroredStrategy.",
}
#: For `distributary.experimental`.
OF_EXPERIMENTAL = {
    "CollectiveHints": "Use distributary.experimental.CommunicationOptions.",
    "CollectiveCommunication": "Use distributary.experimental.CommunicationImplementation.",
    "MirroredStrategy OneDeviceStrategy": "It is in distributary itself.",
    "PreemptionWatcher": "Use distributary.experimental.PreemptionCheckpointHandler.",
}
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
#: For replica contexts.
OF_REPLICA_CONTEXT = {
    "replica_id rank id replica_id_in_sync get_rank": "Use replica_id_in_sync_group.",
    "num_replicas world_size": "Use num_replicas_in_sync.",
    "reduce psum pmean sum mean": 'Use all_reduce("SUM", value) or all_reduce("MEAN", value).',
    "gather": "Use all_gather(value, axis=0).",
    "device": "Use devices.",
}
#: For distributed datasets.
OF_DATASET = {
    "batch map shuffle repeat take skip prefetch cache filter unbatch padded_batch": (
        "Call it on the dataset before strategy.experimental_distribute_dataset(dataset)."
    ),
    "get_next": "Write iterator = iter(dataset), and next(iterator).",
}
