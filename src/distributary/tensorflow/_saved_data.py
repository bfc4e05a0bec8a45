"""Datasets in a folder: `Dataset.save`, `load`, `snapshot`, and `cache` with a file name.

A folder has files of records with checksums, one record per element, and `dataset.json`, which says
what they hold. That file is written last, and in one piece: the folder has all elements or none.
"""

import contextlib
import functools
import gzip
import hashlib
import itertools
import json
import os
import pathlib
import secrets
import struct
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, final

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from distributary import data
from distributary.checkpoint import complete_file
from distributary.devices import Nest
from distributary.errors import InvalidTypeError, InvalidValueError, shown

_DESCRIPTION = "dataset.json"
_VERSION = 1
_TEXT = np.dtype(object)
_ITEM = struct.Struct("<?q")  # of text: whether it is str, and how many bytes it has
_NESTS: dict[str, Callable[[Any], Any]] = {"dict": dict, "OrderedDict": OrderedDict, "tuple": tuple}


@final
@dataclass(frozen=True, eq=False)
class Saved(data.FileSource):
    """The elements of a folder, one file after the other.

    Attributes:
        files: Paths of the files.
        counts: Number of elements of every file.
        element: Spec of an element.
        compression: Compression of the files.
        batched: Whether dim 0 of the arrays counts examples; None if only the user knows.
    """

    files: tuple[str, ...]
    counts: Mapping[str, int]
    element: Nest
    compression: str
    batched: bool | None = None
    own_arrays = True
    in_memory = False

    def cardinality(self) -> int:
        return sum(self.counts[name] for name in self.files)

    def elements(self, path: data.Path) -> data.Stream:
        return data.IteratedStream(itertools.chain.from_iterable(map(self._read, self.files)))

    def _read(self, name: str) -> Iterator[Nest]:
        tree: PyTreeDef
        specs, tree = jax.tree.flatten(self.element)
        number = 0
        for record in data.read_file("Dataset.load", name, self.compression, data.records):
            yield tree.unflatten(_decoded(record, specs))
            number += 1
        if number != self.counts[name]:
            raise InvalidValueError(
                f"Dataset.load: {name!r} has {number} elements, but {self.counts[name]} were saved."
                " It is cut off: copy the folder again, or save the dataset again."
            )

    def spec(self) -> Nest:
        return self.element

    def label(self) -> str:
        return f"saved({len(self.files)} files)"


@final
@dataclass(frozen=True, eq=False)
class Snapshot(data.SameElements):
    """Elements that the first complete pass saves in a folder, from which later passes read them.

    Attributes:
        folder: Folder; every pipeline has a folder of its own in it.
        save: Saves elements of a node in a folder while it yields them.
        load: Returns the node that reads a folder.
    """

    input: data.Node
    folder: str
    save: Callable[[data.Node, data.Stream, str], Iterator[Nest]]
    load: Callable[[str], data.Node]
    in_memory = False
    pattern = "snapshot"

    @functools.cached_property
    def key(self) -> str:
        """Name of the folder of this pipeline."""
        return fingerprint(self.input)

    def elements(self, path: data.Path) -> data.Stream:
        folder = os.path.join(self.folder, self.key)
        if is_saved(folder):
            return self.load(folder).stream(path)
        if data.is_peek(path):
            return self.input.stream(path)
        # Pass 0, because what is kept must not depend on which pass came first.
        return data.IteratedStream(self.save(self.input, self.input.stream((0,)), folder))


def is_saved(folder: str) -> bool:
    """Returns whether a folder has a dataset."""
    return os.path.isfile(os.path.join(folder, _DESCRIPTION))


def compression_of(what: str, compression: str | None) -> str:
    """Returns the compression of records: "" for none."""
    known = {None: "", "": "", "NONE": "", "AUTO": "", "GZIP": "GZIP"}
    if compression not in known:
        raise InvalidValueError(f"{what}: compression is {compression!r}, expected None or 'GZIP'.")
    return known[compression]


def saving(
    node: data.Node,
    elements: Iterable[Nest],
    folder: str,
    compression: str,
    shard_func: Callable[..., Any] | None,
    replaces: bool,
) -> Iterator[Nest]:
    """Yields elements and saves them; after the last one, the folder has them all.

    Args:
        node: Their dataset.
        elements: The elements.
        folder: Folder to make.
        compression: "GZIP" or "".
        shard_func: Function from an element to the number of its file; None for one file.
        replaces: Whether they take the place of a dataset that is there by then.

    Raises:
        InvalidTypeError: for elements that cannot be saved.
    """
    os.makedirs(folder, exist_ok=True)
    with _Writer(folder, compression) as writer:
        for element in elements:
            shard = 0 if shard_func is None else int(np.asarray(data.call(shard_func, element)))
            writer.write(element, shard)
            yield element
        writer.commit(node, replaces)


@final
class _Writer:
    """The files of a folder, until they are complete."""

    def __init__(self, folder: str, compression: str) -> None:
        self._folder, self._compression = folder, compression
        self._run = secrets.token_hex(8)
        self._files: dict[int, IO[bytes]] = {}
        self._counts: dict[int, int] = {}
        self._spec: Nest = None
        self._structure: Any = None
        self._is_complete = False

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *exc_info: object) -> None:
        for shard, file in self._files.items():
            file.close()
            if not self._is_complete:
                os.unlink(self._path(shard))

    def _name(self, shard: int) -> str:
        return f"{self._run}-{shard:08d}.records"

    def _path(self, shard: int) -> str:
        return os.path.join(self._folder, self._name(shard))

    def write(self, element: Nest, shard: int) -> None:
        """Writes an element to a file."""
        if shard not in self._files:
            opened = gzip.open if self._compression else open
            self._files[shard] = opened(self._path(shard), "wb")  # type: ignore[assignment]
            self._counts[shard] = 0
        leaves, tree = data.flatten(element)
        arrays = [np.asarray(data.as_array(leaf)) for leaf in leaves]
        spec = tree.unflatten([data.TensorSpec(array.shape, _dtype(array)) for array in arrays])
        if not sum(self._counts.values()):
            self._spec, self._structure = spec, _described(element)
        elif spec != self._spec:
            self._spec = data.common_spec(self._spec, spec, "Dataset.save")
        self._files[shard].write(data.framed(b"".join(map(_encoded, arrays))))
        self._counts[shard] += 1

    def commit(self, node: data.Node, replaces: bool) -> None:
        """Makes the files the dataset of the folder."""
        if not self._counts:  # an empty dataset has no files, but a spec
            self._spec = node.spec()
            self._structure = _described(self._spec)
        for file in self._files.values():
            file.close()
        for shard in self._files:
            with open(self._path(shard), "rb") as written:
                os.fsync(written.fileno())
        path = pathlib.Path(self._folder, _DESCRIPTION)
        before = _read_description(self._folder) if path.exists() else {"files": {}}
        if before["files"] and not replaces:
            return
        described = {
            "format": "distributary.data.Dataset",
            "version": _VERSION,
            "compression": self._compression,
            "batched": node.trait("batched"),
            "structure": self._structure,
            "specs": [[s.shape, s.dtype.name] for s in jax.tree.leaves(self._spec)],
            "files": {self._name(shard): self._counts[shard] for shard in sorted(self._counts)},
        }
        with complete_file(path) as new:
            new.write_text(json.dumps(described), encoding="utf-8")
        self._is_complete = True
        for name in before["files"]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self._folder, os.path.basename(name)))


def load(folder: str, element_spec: Nest) -> Saved:
    """Returns the node that reads a folder.

    Args:
        folder: Folder that `saving` has made.
        element_spec: Nest of `TensorSpec`; None for that of the saved elements.

    Raises:
        InvalidValueError: if there is no dataset, it is damaged, or has other elements.
    """
    description = _read_description(folder)
    tree: PyTreeDef
    try:
        specs = [data.TensorSpec(shape, np.dtype(name)) for shape, name in description["specs"]]
        structure, compression = description["structure"], description["compression"]
        files = tuple(os.path.join(folder, os.path.basename(name)) for name in description["files"])
        counts = dict(zip(files, map(int, description["files"].values()), strict=True))
        batched = description["batched"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(folder) from error
    if element_spec is not None:
        wanted, tree = jax.tree.flatten(element_spec)
        stored_tree: PyTreeDef = tree if structure is None else jax.tree.structure(_nest(structure))
        fits = tree == stored_tree and len(wanted) == len(specs)
        if not fits or not all(map(_is_alike, specs, wanted)):
            raise InvalidValueError(
                f"Dataset.load: element_spec is {element_spec}, but the arrays in {folder!r} are"
                f" {specs}. Leave element_spec out, or give that of the saved dataset."
            )
    elif structure is None:
        raise InvalidValueError(
            f"Dataset.load: the elements in {folder!r} are named tuples or objects. Pass their"
            " element_spec, as saved_dataset.element_spec returned it."
        )
    else:
        tree = jax.tree.structure(_nest(structure))
    return Saved(files, counts, tree.unflatten(specs), compression, batched)


def _read_description(folder: str) -> dict[str, Any]:
    path = os.path.join(folder, _DESCRIPTION)
    try:
        with open(path, encoding="utf-8") as file:
            description = json.load(file)
    except FileNotFoundError:
        raise InvalidValueError(
            f"Dataset.load: {folder!r} has no dataset (in {os.getcwd()}). Give the folder of"
            " Dataset.save, whose last file is dataset.json; TensorFlow's format is another one."
        ) from None
    except ValueError as error:
        raise _damaged(folder) from error
    if not isinstance(description, dict) or description.get("version") != _VERSION:
        raise _damaged(folder)
    return description


def _damaged(folder: str) -> InvalidValueError:
    return InvalidValueError(
        f"Dataset.load: {os.path.join(folder, _DESCRIPTION)!r} is damaged, or of a newer version of"
        " distributary. Save the dataset again."
    )


def _dtype(array: np.ndarray) -> np.dtype:
    """Returns the dtype with which an array is loaded."""
    if array.dtype.kind in "OUS":
        return _TEXT
    dtype = array.dtype.newbyteorder("=")
    if array.dtype.names or dtype != np.dtype(dtype.name):
        raise InvalidTypeError(
            f"Dataset.save: an element has an array of dtype {array.dtype}. Save arrays of numbers"
            " and text; map others to them."
        )
    return dtype


def _is_alike(spec: data.TensorSpec, wanted: data.TensorSpec) -> bool:
    dtype = _TEXT if wanted.dtype.kind in "US" else wanted.dtype
    return spec.is_compatible_with(data.TensorSpec(wanted.shape, dtype))


def _encoded(array: np.ndarray) -> bytes:
    parts = [struct.pack(f"<B{array.ndim}q", array.ndim, *array.shape)]
    dtype = _dtype(array)
    if dtype != _TEXT:
        return b"".join((*parts, np.asarray(array, dtype).tobytes()))
    for item in array.reshape(-1).tolist():
        if not isinstance(item, (str, bytes)):
            raise InvalidTypeError(
                f"Dataset.save: an array of objects has {shown(item)}, expected text or bytes."
            )
        content = item.encode() if isinstance(item, str) else item
        parts += [_ITEM.pack(isinstance(item, str), len(content)), content]
    return b"".join(parts)


def _decoded(record: bytes, specs: list[data.TensorSpec]) -> Iterator[Any]:
    at = 0
    for spec in specs:
        ndim = record[at]
        shape = struct.unpack_from(f"<{ndim}q", record, at + 1)
        at += 1 + 8 * ndim
        size = int(np.prod(shape))
        if spec.dtype != _TEXT:
            array = np.frombuffer(record, spec.dtype, size, at).reshape(shape).copy()
            at += array.nbytes
        else:
            array = np.empty(size, object)
            for i in range(size):
                is_text, length = _ITEM.unpack_from(record, at)
                at += _ITEM.size + length
                content = record[at - length : at]
                array[i] = content.decode() if is_text else content
            array = array.reshape(shape)
        yield array[()]


def _described(element: Nest) -> Any:
    """Returns the structure of an element for JSON; None if it has other types than JSON names."""
    kind = type(element).__name__
    if isinstance(element, tuple) and type(element) is tuple:
        parts = [_described(part) for part in element]
        return None if None in parts else {kind: parts}
    if type(element) in (dict, OrderedDict):
        items = [[key, _described(part)] for key, part in element.items()]
        is_plain = all(type(key) in (str, int) and part is not None for key, part in items)
        return {kind: items} if is_plain else None
    if isinstance(element, data.TensorSpec) or jax.tree_util.treedef_is_leaf(
        data.flatten(element)[1]
    ):
        return "array"
    return None


def _nest(described: Any) -> Nest:
    """Returns a nest of the described structure."""
    if described == "array":
        return 0
    ((kind, parts),) = described.items()
    if kind == "tuple":
        return tuple(map(_nest, parts))
    return _NESTS[kind]((key, _nest(part)) for key, part in parts)


def fingerprint(node: data.Node) -> str:
    """Returns a text that differs between pipelines of other data, functions or arguments.

    Of objects and global variables that functions use, only the names are compared.
    """
    digest = hashlib.sha256()
    for part in _essence(node, set()):
        content = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(struct.pack("<q", len(content)) + content)
    return digest.hexdigest()[:32]


def _fields_of(node: data.Node) -> Iterator[Any]:
    yield node.label()
    for name, value in vars(node).items():
        if name == "files":
            for file in value:
                status = os.stat(file)
                yield file, status.st_size, status.st_mtime_ns
        # Differ between runs, or hold what other fields say.
        elif name not in ("drawn", "cache", "opened", "save", "load", "folder", "key"):
            yield value


def _essence(value: Any, seen: set[int]) -> Iterator[str | bytes]:
    """Yields texts that tell a value of a pipeline from another one."""
    parts: Iterable[Any] = ()
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        array = np.asarray(value)
        yield f"{array.dtype} {array.shape}"
        has_objects = array.dtype.hasobject
        yield repr(array.tolist()) if has_objects else hashlib.sha256(array.tobytes()).digest()
    elif isinstance(value, (str, bytes, int, float, complex, type(None), PyTreeDef)):
        yield repr(value)
    elif id(value) in seen:
        yield "seen"
    else:
        yield f"{type(value).__name__} {getattr(value, '__qualname__', '')}"
        if isinstance(value, data.Node):
            parts = _fields_of(value)
        elif isinstance(getattr(value, "node", None), data.Node):  # a dataset
            parts = (value.node,)
        elif isinstance(value, (tuple, list)):
            parts = value
        elif isinstance(value, dict):
            parts = itertools.chain.from_iterable(value.items())
        elif isinstance(value, functools.partial):
            parts = value.func, value.args, value.keywords
        elif isinstance(value, types.FunctionType):
            seen.add(id(value))  # it can refer to itself
            cells = [_content(cell) for cell in value.__closure__ or ()]
            parts = value.__code__, value.__defaults__, value.__kwdefaults__, cells
        elif isinstance(value, types.MethodType):
            parts = value.__func__, value.__self__
        elif isinstance(value, types.CodeType):
            parts = value.co_code, value.co_names, value.co_consts
    for part in parts:
        yield from _essence(part, seen)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
