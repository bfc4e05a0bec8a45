"""The supported names of TensorFlow, and the objects that they stand for.

Keys are the names after `tf.`. docs/api/tensorflow.md is made from these.
"""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from distributary.tensorflow._operations import Operation


def read_table(text: str) -> Iterator[tuple[str, str, str]]:
    """Yields names after `tf.`, the full names of their objects, and the arguments of functions.

    Args:
        text: Words. One that ends with a dot is the beginning of the names that follow; a dot alone
            for none. One that ends with a colon is the module of their objects, with arguments in
            parentheses if they have any. Then come the names; if an object has another name in its
            module, that follows after a colon: `math. jax.numpy(x,y): mod truediv:true_divide`.
    """
    space = module = arguments = ""
    for word in text.split():
        if word.endswith("."):
            space = "" if word == "." else word
        elif word.endswith(":"):
            module, _, arguments = word[:-1].removesuffix(")").partition("(")
        else:
            name, _, other = word.partition(":")
            yield f"{space}{name}", f"{module}.{other or name}", arguments


def targets_of(text: str) -> dict[str, str]:
    """Returns the full names of the objects of a table."""
    return {name: target for name, target, _ in read_table(text)}


_OWN = "distributary.tensorflow"

#: The full names of the objects.
TARGETS: dict[str, str] = {
    "keras": "keras",
    **targets_of(
        f"""
        distribute. distributary:
            CrossDeviceOps DistributedDataset DistributedIterator DistributedValues
            HierarchicalCopyAllReduce InputContext InputOptions InputReplicationMode
            MirroredStrategy MultiWorkerMirroredStrategy NcclAllReduce OneDeviceStrategy
            ParameterServerStrategy ReduceOp ReductionToOneDevice ReplicaContext RunOptions Server
            Strategy StrategyExtended TPUStrategy experimental_set_strategy get_replica_context
            get_strategy has_strategy in_cross_replica_context
        distribute.experimental. distributary.experimental:
            CentralStorageStrategy CollectiveCommunication:CommunicationImplementation
            CommunicationImplementation CommunicationOptions MultiWorkerMirroredStrategy
            ParameterServerStrategy PreemptionCheckpointHandler TPUStrategy TerminationConfig
            ValueContext
        distribute.experimental.coordinator. distributary.coordinator:
            ClusterCoordinator PerWorkerValues RemoteValue experimental_get_current_worker_index
        distribute.coordinator.
            ClusterCoordinator PerWorkerValue PerWorkerValues RemoteValue
            experimental_get_current_worker_index
        distribute.experimental.partitioners. distributary.experimental.partitioners:
            FixedShardsPartitioner MaxSizePartitioner MinSizePartitioner Partitioner
        distribute.cluster_resolver. distributary.cluster_resolver:
            ClusterResolver GCEClusterResolver KubernetesClusterResolver
            KubernetesExecutableLocation SimpleClusterResolver SlurmClusterResolver
            TFConfigClusterResolver TPUClusterResolver UnionResolver
        types.experimental.distributed. distributary: Mirrored PerReplica

        . distributary:
            GradientTape IndexedSlices UnconnectedGradients VariableAggregation
            VariableSynchronization
        . {_OWN}._variables: Variable
        . numpy: DType:dtype as_dtype:dtype dtypes.DType:dtype dtypes.as_dtype:dtype
        . jax: Tensor:Array
        . distributary.data: TensorSpec
        . {_OWN}._arrays: custom_gradient
        . {_OWN}._functions: function
        . {_OWN}._programs:
            Module TensorShape device executing_eagerly get_logger is_tensor
            no_op print:print_ timestamp while_loop control_dependencies:no_dependencies group
            identity_n
        . {_OWN}._control:
            case cond foldr get_static_value init_scope inside_function name_scope numpy_function
            py_function recompute_grad switch_case
        . {_OWN}._tensor_array: TensorArray
        . {_OWN}._strings: as_string
        strings. {_OWN}._strings:
            as_string bytes_split format:format_ join length lower ngrams reduce_join
            regex_full_match regex_replace split strip substr to_hash_bucket
            to_hash_bucket_fast:to_hash_bucket to_number upper
        lookup. {_OWN}._lookup:
            KeyValueTensorInitializer StaticHashTable StaticVocabularyTable TextFileIndex
            TextFileInitializer
        lookup.experimental. {_OWN}._lookup: DenseHashTable MutableHashTable
        compat. {_OWN}._programs: as_bytes as_str:as_text as_text v1.ConfigProto:ConfigProto
        config. {_OWN}._programs:
            run_functions_eagerly set_soft_device_placement:nothing optimizer.set_jit:nothing
            threading.set_inter_op_parallelism_threads:nothing
            threading.set_intra_op_parallelism_threads:nothing
        test. {_OWN}._programs:
            gpu_device_name is_built_with_cuda is_built_with_gpu_support:is_built_with_cuda
            is_built_with_rocm is_built_with_xla is_cpu_target_available is_gpu_available
        sysconfig. {_OWN}._config: get_build_info
        io. {_OWN}._io: TFRecordOptions TFRecordWriter matching_files read_file write_file
        io. {_OWN}._examples:
            FixedLenFeature FixedLenSequenceFeature VarLenFeature decode_and_crop_jpeg
            decode_base64
            decode_bmp decode_compressed decode_csv decode_gif
            decode_image decode_jpeg decode_png decode_raw encode_base64 encode_jpeg encode_png
            is_jpeg parse_example parse_sequence_example parse_single_example
            parse_single_sequence_example parse_tensor serialize_tensor
        . {_OWN}._sparse: SparseTensor
        sparse. {_OWN}._sparse: SparseTensor to_dense
        image. {_OWN}._examples: decode_image decode_jpeg decode_png encode_jpeg encode_png
        image. {_OWN}._arrays: ResizeMethod
        train. {_OWN}._examples:
            BytesList Example Feature FeatureList FeatureLists Features FloatList Int64List
            SequenceExample
        io.gfile. {_OWN}._io:
            GFile copy exists get_registered_schemes glob isdir join listdir makedirs mkdir remove
            rename rmtree stat walk
        saved_model. {_OWN}._saved_model: save
        saved_model. {_OWN}._loaded_model: contains_saved_model load
        summary. {_OWN}._summary:
            SummaryWriter audio create_file_writer create_noop_writer
            experimental.get_step:get_step experimental.set_step:set_step flush
            histogram image record_if scalar should_record_summaries text
        debugging. {_OWN}._checks:
            assert_proper_iterable assert_same_float_dtype assert_shapes disable_check_numerics
            enable_check_numerics is_numeric_tensor set_log_device_placement
        autograph.experimental. distributary.autograph: do_not_convert set_loop_options
        autograph. {_OWN}._programs: set_verbosity:nothing
        debugging. {_OWN}._programs: get_log_device_placement
        distribute.experimental. {_OWN}._programs: CollectiveHints:collective_hints
        config.optimizer. {_OWN}._programs: set_experimental_options:nothing
        config.experimental. {_OWN}._programs:
            set_synchronous_execution:nothing get_synchronous_execution:get_log_device_placement
        train.experimental. {_OWN}._training: PythonState
        data. types: ThreadingOptions:SimpleNamespace
        data.experimental. types:
            OptimizationOptions:SimpleNamespace ThreadingOptions:SimpleNamespace
        nest. {_OWN}._programs:
            assert_same_structure flatten is_nested map_structure pack_sequence_as
        compat.v1. {_OWN}._programs:
            disable_v2_behavior:nothing enable_eager_execution:nothing
            logging.set_verbosity:nothing
        . tf_keras: initializers losses metrics optimizers
        . tf_keras.initializers:
            constant_initializer:Constant ones_initializer:Ones
            random_normal_initializer:RandomNormal random_uniform_initializer:RandomUniform
            zeros_initializer:Zeros
        keras.layers. {_OWN}._text_layers: Input IntegerLookup StringLookup TextVectorization
        keras.backend. keras.backend:
            backend clear_session epsilon floatx get_uid image_data_format is_keras_tensor
            result_type set_epsilon set_floatx set_image_data_format standardize_dtype
        keras.backend. tf_keras.backend: cast_to_floatx
        keras.backend. {_OWN}._keras_backend: batch_get_value batch_set_value

        data. distributary.data:
            AUTOTUNE INFINITE_CARDINALITY Iterator:DatasetIterator NumpyIterator:DatasetIterator
            Options UNKNOWN_CARDINALITY
        data.experimental.
            AUTOTUNE AutoShardPolicy DistributeOptions INFINITE_CARDINALITY SHARD_HINT
            UNKNOWN_CARDINALITY
        data. {_OWN}._data: Dataset FixedLengthRecordDataset TFRecordDataset TextLineDataset
        data.experimental. {_OWN}._data:
            Counter:Dataset.counter RandomDataset:Dataset.random load:Dataset.load
            sample_from_datasets:Dataset.sample_from_datasets
        data.experimental. {_OWN}._data_experimental:
            assert_cardinality at
            bucket_by_sequence_length cardinality choose_from_datasets copy_to_device
            enumerate_dataset from_list get_next_as_optional get_single_element get_structure
            group_by_window ignore_errors make_batched_features_dataset
            map_and_batch pad_to_cardinality parallel_interleave prefetch_to_device
            rejection_resample save scan
            shuffle_and_repeat snapshot take_while unbatch unique
        data.experimental. distributary.experimental: Optional
        experimental. distributary.experimental: Optional
        train. distributary.checkpoint:
            Checkpoint CheckpointManager latest_checkpoint list_variables load_variable
        train. distributary.cluster_resolver: ClusterSpec

        config. {_OWN}._config:
            LogicalDevice LogicalDeviceConfiguration PhysicalDevice functions_run_eagerly
            get_logical_device_configuration get_soft_device_placement get_visible_devices
            list_logical_devices list_physical_devices set_logical_device_configuration
            set_visible_devices threading.get_inter_op_parallelism_threads:get_num_threads
            threading.get_intra_op_parallelism_threads:get_num_threads
        config.experimental. {_OWN}._config:
            VirtualDeviceConfiguration:LogicalDeviceConfiguration
            enable_op_determinism enable_tensor_float_32_execution get_device_details
            get_memory_growth get_memory_info
            get_virtual_device_configuration:get_logical_device_configuration get_visible_devices
            list_logical_devices list_physical_devices set_memory_growth
            set_virtual_device_configuration:set_logical_device_configuration set_visible_devices
            tensor_float_32_execution_enabled
        config. distributary.config: experimental_connect_to_cluster
        tpu. distributary.tpu: XLAOptions
        tpu.experimental. distributary.tpu.experimental:
            DeviceAssignment DeviceOrderMode TPUSystemMetadata Topology initialize_tpu_system
            shutdown_tpu_system
        errors. distributary.errors:
            AbortedError:UnavailableError CancelledError DataLossError:CheckpointError
            FailedPreconditionError:ContextError InvalidArgumentError:InvalidValueError
            OpError:DistributaryError OutOfRangeError UnavailableError
            UnimplementedError:UnsupportedError
        errors. builtins:
            AlreadyExistsError:FileExistsError DeadlineExceededError:TimeoutError
            NotFoundError:FileNotFoundError PermissionDeniedError:PermissionError
            UnauthenticatedError:PermissionError
        errors. jax.errors:
            InternalError:JaxRuntimeError ResourceExhaustedError:JaxRuntimeError
            UnknownError:JaxRuntimeError

        keras.utils.experimental. {_OWN}._dataset_creator: DatasetCreator
        nn. {_OWN}._nn: compute_average_loss scale_regularization_loss
        nn. distributary: embedding_lookup
        random. {_OWN}._random: Generator get_global_generator set_global_generator set_seed
        random.experimental. {_OWN}._random:
            Generator get_global_generator set_global_generator
        train. {_OWN}._training:
            CheckpointOptions ExponentialMovingAverage checkpoints_iterator get_checkpoint_state
            load_checkpoint
        """
    ),
}

# Operations with a name both in `tf` and in `tf.math`.
_EVERYWHERE = """
    jax.numpy(x):
        abs acos:arccos asin:arcsin atan:arctan cos cosh exp floor logical_not negative round sign
        sin sinh sqrt square tan tanh
    jax.numpy(x,y):
        add divide:true_divide equal greater greater_equal less less_equal logical_and logical_or
        maximum minimum multiply not_equal pow:power subtract truediv:true_divide
    jax.numpy(y,x): atan2:arctan2
    jax.numpy(x;axis=0): cumsum
    jax.numpy(input_tensor;axis=None,keepdims=False):
        reduce_all:all reduce_any:any reduce_max:max reduce_min:min reduce_prod:prod reduce_sum:sum
    jax.nn(input_tensor;axis=None,keepdims=False): reduce_logsumexp:logsumexp
    jax.nn(x): sigmoid
"""

#: The operations on arrays; those of this package have TensorFlow's arguments.
OPERATIONS: dict[str, Operation] = {
    name: Operation(target, arguments)
    for name, target, arguments in read_table(
        f"""
        . {_EVERYWHERE}
        jax.numpy(input): identity:asarray
        jax.numpy(input;dtype=None): ones_like zeros_like
        jax.numpy(;shape,dtype=None): ones zeros
        jax.numpy(t;clip_value_min:min,clip_value_max:max): clip_by_value:clip
        jax.numpy(input;axis): expand_dims
        jax.numpy(;dims:shape,value:fill_value): fill:full
        jax.numpy(start,stop;num,name=None,axis=0): linspace
        jax.numpy(input;repeats,axis=None): repeat
        jax.numpy(tensor;shape): reshape
        jax.numpy(tensor;axis): reverse:flip
        jax.numpy(input;axis=None): squeeze
        jax.numpy(values;axis=0): stack
        jax.lax(input): stop_gradient
        jax.numpy(a,b;axes): tensordot
        jax.numpy(input;multiples:reps): tile
        jax.numpy(input;shift,axis): roll
        jax.numpy(input;shape): broadcast_to
        jax.numpy(input): rank:ndim
        {_OWN}._arrays:
            argsort foldl map_fn meshgrid scan scatter_nd sequence_mask slice:slice_ sort
            tensor_scatter_nd_add tensor_scatter_nd_sub tensor_scatter_nd_update unique
            vectorized_map
        {_OWN}._math:
            add_n argmax argmin boolean_mask cast clip_by_global_norm clip_by_norm concat constant
            convert_to_tensor dtypes.cast:cast einsum eye gather gather_nd matmul norm one_hot pad
            range:range_ reduce_mean shape size split transpose unstack where

        image. {_OWN}._arrays:
            convert_image_dtype:as_image flip_left_right flip_up_down per_image_standardization
            resize resize_with_crop_or_pad
        image. {_OWN}._random:
            random_crop:crop_randomly random_flip_left_right:flip_randomly
        . {_OWN}._checks: Assert:assert_ ensure_shape
        debugging. {_OWN}._checks:
            Assert:assert_ assert_all_finite assert_equal assert_greater assert_greater_equal
            assert_integer assert_less assert_less_equal assert_near assert_negative
            assert_non_negative assert_non_positive assert_none_equal assert_positive assert_rank
            assert_rank_at_least assert_rank_in assert_scalar assert_type check_numerics
        math. jax.scipy.special(x): lgamma:gammaln digamma
        jax.ops(data,segment_ids): segment_sum segment_max segment_min
        jax.ops(data,segment_ids;num_segments):
            unsorted_segment_sum:segment_sum unsorted_segment_max:segment_max
            unsorted_segment_min:segment_min

        math. {_EVERYWHERE}
        jax.numpy(x):
            acosh:arccosh asinh:arcsinh atanh:arctanh rint
        jax.numpy(input): angle conj real imag
        jax.scipy.special(x): erfc
        jax.scipy.special(x,y): xlogy xlog1py
        jax.nn(logits;axis=-1): log_softmax softmax
        jax.nn(features): softsign:soft_sign
        jax.numpy(x): ceil expm1 is_finite:isfinite is_inf:isinf is_nan:isnan log log1p reciprocal
        jax.numpy(x,y): floordiv:floor_divide floormod:mod logical_xor mod
        jax.numpy(x;axis=0): cumprod
        jax.numpy(input_tensor;axis=None,keepdims=False): reduce_std:std reduce_variance:var
        jax.lax(x): erf rsqrt
        jax.nn(x): log_sigmoid
        jax.nn(features): softplus
        {_OWN}._math:
            add_n argmax argmin confusion_matrix count_nonzero divide_no_nan in_top_k l2_normalize
            reduce_mean squared_difference top_k
        linalg. {_OWN}._math: einsum global_norm matmul norm

        nn. jax.nn(features): elu relu relu6 selu silu softplus swish:silu
        jax.nn(logits;axis=-1): log_softmax softmax
        jax.nn(features;approximate=False): gelu
        jax.nn(features;alpha=0.2:negative_slope): leaky_relu
        jax.nn(x): sigmoid
        jax.numpy(x): tanh
        {_OWN}._math: in_top_k l2_normalize top_k
        {_OWN}._nn:
            avg_pool2d bias_add conv2d dropout l2_loss max_pool2d moments
            sigmoid_cross_entropy_with_logits softmax_cross_entropy_with_logits
            sparse_softmax_cross_entropy_with_logits
        random. {_OWN}._random:
            categorical fold_in gamma normal poisson shuffle split stateless_binomial
            stateless_categorical stateless_gamma stateless_normal stateless_poisson
            stateless_truncated_normal stateless_uniform truncated_normal uniform
        random.experimental. {_OWN}._random:
            stateless_fold_in:fold_in stateless_shuffle stateless_split:split

        keras.backend. jax.numpy(x):
            abs cos exp flatten:ravel int_shape:shape log ndim round sign sin sqrt square tanh
            transpose
        jax.numpy(x,y):
            dot equal greater greater_equal less less_equal maximum minimum not_equal
        jax.numpy(x,a): pow:power
        jax.numpy(x;axis=None,keepdims=False): all any max mean min prod std sum var
        jax.numpy(x;axis=-1): argmax argmin expand_dims
        jax.numpy(x;axis=0): cumprod cumsum stack
        jax.numpy(x;axis): squeeze
        jax.numpy(x;min_value:min,max_value:max): clip
        jax.numpy(x;shape): reshape
        jax.numpy(x;n:reps): tile
        jax.numpy(x;rep:repeats,axis): repeat_elements:repeat
        jax.numpy(x;pattern:axes): permute_dimensions:transpose
        jax.numpy(x;dtype=None): ones_like zeros_like
        jax.numpy(;shape,dtype=None): ones zeros
        jax.numpy(;size:N,dtype=None): eye
        jax.numpy(start;stop=None,step=1,dtype='int32'): arange
        jax.numpy(condition,then_expression,else_expression): switch:where
        jax.nn(x): sigmoid softplus softsign:soft_sign
        jax.nn(x;axis=-1): softmax
        jax.nn(x;alpha=1.0): elu
        jax.nn(indices;num_classes): one_hot
        jax.lax(variables): stop_gradient
        keras.activations(x;alpha=0.0:negative_slope,max_value=None,threshold=0.0): relu
        keras.ops(target,output;from_logits=False): binary_crossentropy
        keras.ops(target,output;from_logits=False,axis=-1):
            categorical_crossentropy sparse_categorical_crossentropy
        keras.ops(x): hard_sigmoid
        {_OWN}._math: cast constant l2_normalize shape
        {_OWN}._keras_backend:
            concatenate count_params dtype get_value set_value update update_add update_sub
            variable
        {_OWN}._random: random_normal:normal random_uniform:uniform truncated_normal
        """
    )
}

_DTYPES = (
    "bfloat16 complex64 complex128 float16 float32 float64 int8 int16 int32 int64 uint8 uint16"
    " uint32 uint64"
)

_CODES = (
    "OK CANCELLED UNKNOWN INVALID_ARGUMENT DEADLINE_EXCEEDED NOT_FOUND ALREADY_EXISTS"
    " PERMISSION_DENIED RESOURCE_EXHAUSTED FAILED_PRECONDITION ABORTED OUT_OF_RANGE UNIMPLEMENTED"
    " INTERNAL UNAVAILABLE DATA_LOSS UNAUTHENTICATED"
)

#: The constants. In arrays, a dtype of 64 bits becomes one of 32 bits, as everywhere in JAX.
CONSTANTS: dict[str, Any] = {
    "__version__": "2.21.0",
    # The numbers of google/rpc/code.proto.
    **{f"errors.{name}": number for number, name in enumerate(_CODES.split())},
    "newaxis": None,
    **{f"{space}{name}": jnp.dtype(name) for space in ("", "dtypes.") for name in _DTYPES.split()},
    "bool": jnp.dtype(bool),
    "dtypes.bool": jnp.dtype(bool),
    "string": jnp.dtype(object),
    "dtypes.string": jnp.dtype(object),
    "double": jnp.dtype("float64"),
    "half": jnp.dtype("float16"),
}
