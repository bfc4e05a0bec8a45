"""The protobuf classes of `tensorflow/core/example/*.proto` and `framework/tensor.proto`."""

import functools
import importlib
import threading
from types import ModuleType
from typing import Any

from distributary.errors import MissingPackageError

# Messages and their fields, with the numbers that `tensorflow/core/example/*.proto` gives them.
_LISTS = {"BytesList": "TYPE_BYTES", "FloatList": "TYPE_FLOAT", "Int64List": "TYPE_INT64"}
MESSAGES = (
    *_LISTS,
    *("Feature", "Features", "Example", "FeatureList", "FeatureLists", "SequenceExample"),
)
_KINDS = ("bytes_list", "float_list", "int64_list")


def message_type(name: str) -> Any:
    """Returns the protobuf class `tf.train.{name}`, one of `MESSAGES`."""
    with _making_messages:  # or threads would get different classes
        return _messages()[name]


_making_messages = threading.Lock()


@functools.cache
def _messages() -> dict[str, Any]:
    """Makes the protobuf classes, by their names in `tf.train`."""
    descriptors = package("google.protobuf.descriptor_pb2", "protobuf")
    field = descriptors.FieldDescriptorProto
    file = descriptors.FileDescriptorProto(
        name="distributary/example.proto", package="tensorflow", syntax="proto3"
    )

    def add(parent: Any, label: int, number: int, field_name: str, kind: str) -> Any:
        type_name = {} if kind.startswith("TYPE_") else {"type_name": f".tensorflow.{kind}"}
        of_type = getattr(field, kind if not type_name else "TYPE_MESSAGE")
        return parent.field.add(
            name=field_name, number=number, label=label, type=of_type, **type_name
        )

    one, many = field.LABEL_OPTIONAL, field.LABEL_REPEATED
    for list_name, kind in _LISTS.items():
        add(file.message_type.add(name=list_name), many, 1, "value", kind)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, (list_name, list_type) in enumerate(zip(_LISTS, _KINDS, strict=True), 1):
        add(feature, one, number, list_type, list_name).oneof_index = 0
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    add(entry, one, 1, "key", "TYPE_STRING")
    add(entry, one, 2, "value", "Feature")
    add(features, many, 1, "feature", "Features.FeatureEntry")
    add(file.message_type.add(name="Example"), one, 1, "features", "Features")
    add(file.message_type.add(name="FeatureList"), many, 1, "feature", "Feature")
    lists = file.message_type.add(name="FeatureLists")
    entry = lists.nested_type.add(name="FeatureListEntry")
    entry.options.map_entry = True
    add(entry, one, 1, "key", "TYPE_STRING")
    add(entry, one, 2, "value", "FeatureList")
    add(lists, many, 1, "feature_list", "FeatureLists.FeatureListEntry")
    sequences = file.message_type.add(name="SequenceExample")
    add(sequences, one, 1, "context", "Features")
    add(sequences, one, 2, "feature_lists", "FeatureLists")
    # `tensorflow/core/framework/tensor.proto`, as far as arrays of numbers use it.
    shape = file.message_type.add(name="TensorShapeProto")
    add(shape.nested_type.add(name="Dim"), one, 1, "size", "TYPE_INT64")
    add(shape, many, 2, "dim", "TensorShapeProto.Dim")
    array = file.message_type.add(name="TensorProto")
    add(array, one, 1, "dtype", "TYPE_INT32")
    add(array, one, 2, "tensor_shape", "TensorShapeProto")
    add(array, one, 4, "tensor_content", "TYPE_BYTES")
    pool = package("google.protobuf.descriptor_pool", "protobuf").DescriptorPool()
    pool.Add(file)
    factory = package("google.protobuf.message_factory", "protobuf")
    types = [pool.FindMessageTypeByName(f"tensorflow.{proto.name}") for proto in file.message_type]
    return {one.name: factory.GetMessageClass(one) for one in types}


def package(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingPackageError(
            f"tf.io and tf.train need {package} for this: pip install {package}"
        ) from None
