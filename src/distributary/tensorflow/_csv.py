"""Datasets of the rows of CSV files: `tf.data.experimental.CsvDataset` and `make_csv_dataset`."""

import csv
import io
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import IO, Any, final

import numpy as np

from distributary import data
from distributary.data import AUTOTUNE, record_files
from distributary.errors import InvalidValueError
from distributary.tensorflow._data import Dataset

# From the least to the most that a column may hold, as TensorFlow tries them.
_INFERRED = ("int32", "int64", "float32", "float64", "O")


def csv_dataset(
    filenames: object,
    record_defaults: Sequence[Any],
    compression_type: str | None = None,
    buffer_size: int | None = None,
    header: bool = False,
    field_delim: str = ",",
    use_quote_delim: bool = True,
    na_value: str = "",
    select_cols: Sequence[int] | None = None,
    exclude_cols: Sequence[int] | None = None,
) -> data.Dataset:
    """`tf.data.experimental.CsvDataset`: the rows of CSV files, as tuples of scalars.

    Args:
        filenames: Name of a file, or a list of names.
        record_defaults: For each column a dtype, or a default for fields that are empty.
        compression_type: "GZIP", "ZLIB", "BZIP2" or "XZ"; None or "" for none.
        buffer_size: No effect.
        header: Whether to skip the first line of each file.
        field_delim: Separator of fields.
        use_quote_delim: Whether quotes enclose fields.
        na_value: Text of fields that count as empty.
        select_cols: Numbers of the columns to read; None for all.
        exclude_cols: Numbers of the columns not to read, in place of `select_cols`.

    Raises:
        InvalidValueError: while reading, for a row or field that does not fit.
    """
    if select_cols is not None and exclude_cols is not None:
        raise InvalidValueError(
            f"CsvDataset: select_cols is {select_cols} and exclude_cols {exclude_cols}. Give one of"
            " them."
        )
    fields = [_Field(i, one) for i, one in enumerate(record_defaults)]
    left_out = set(exclude_cols or ())

    def scalars(row: list[str]) -> tuple[Any, ...]:
        if select_cols is not None:
            columns: Sequence[int] = select_cols
        else:
            columns = [i for i in range(len(row)) if i not in left_out]
        if len(columns) != len(fields) or max(columns, default=0) >= len(row):
            raise InvalidValueError(
                f"CsvDataset: a row has {len(row)} fields, which does not fit {len(fields)} record"
                f" defaults with select_cols={select_cols} and exclude_cols={exclude_cols}: {row}."
            )
        return tuple(
            field.scalar(row[i], na_value) for field, i in zip(fields, columns, strict=True)
        )

    rows = _rows(filenames, compression_type, header, field_delim, use_quote_delim)
    return rows.map(scalars)


@final
class _Field:
    """A column of a file."""

    def __init__(self, number: int, given: Any) -> None:
        is_dtype = isinstance(given, (type, np.dtype))
        default = np.empty(0, given) if is_dtype else np.asarray(given)
        kept = is_dtype or isinstance(given, (np.ndarray, np.generic)) or hasattr(given, "devices")
        # A number of Python has 32 bits in TensorFlow.
        short = {"float64": "float32", "int64": "int32"} if not kept else {}
        dtype = np.dtype(short.get(default.dtype.name, default.dtype))
        self._number = number
        self._dtype = np.dtype(object) if dtype.kind in "US" else dtype
        self._default = default.astype(self._dtype).reshape(-1)

    def scalar(self, field: str, na_value: str) -> Any:
        """Returns a field as a scalar of the column's dtype; text as bytes."""
        if field in ("", na_value):
            if not self._default.size:
                raise InvalidValueError(
                    f"CsvDataset: field {self._number} is required but missing. Give a default in"
                    " place of a dtype."
                )
            default = self._default[0]
            return default.encode() if isinstance(default, str) else default
        if self._dtype.kind == "O":
            return field.encode()
        if not _is_number(field, self._dtype):
            raise InvalidValueError(
                f"CsvDataset: field {self._number} is {field!r}, expected a number of dtype"
                f" {self._dtype}. Give another dtype in the record defaults, or an na_value."
            )
        return self._dtype.type(field)


def _is_number(text: str, dtype: Any) -> bool:
    try:
        number = np.dtype(dtype).type(text)
    except (ValueError, OverflowError):
        return False
    return bool(number == number) and "_" not in text


def _rows(
    filenames: Any, compression_type: str | None, header: bool, delimiter: str, has_quotes: bool
) -> data.Dataset:
    """Returns a dataset of the rows of files, each a list of text."""
    quoting: Any = csv.QUOTE_MINIMAL if has_quotes else csv.QUOTE_NONE

    def parse(file: IO[bytes], name: str, compression: str) -> Iterator[list[str]]:
        with io.TextIOWrapper(file, encoding="utf-8", newline="") as text:
            rows = csv.reader(text, delimiter=delimiter, quoting=quoting)
            yield from itertools.islice(rows, int(header), None)

    return Dataset(record_files("CsvDataset", filenames, compression_type, parse, None))


def make_csv_dataset(
    file_pattern: Any,
    batch_size: int,
    column_names: Sequence[str] | None = None,
    column_defaults: Sequence[Any] | None = None,
    label_name: str | None = None,
    select_columns: Sequence[int | str] | None = None,
    field_delim: str = ",",
    use_quote_delim: bool = True,
    na_value: str = "",
    header: bool = True,
    num_epochs: int | None = None,
    shuffle: bool = True,
    shuffle_buffer_size: int = 10000,
    shuffle_seed: int | None = None,
    prefetch_buffer_size: int | None = None,
    num_parallel_reads: int | None = None,
    sloppy: bool = False,
    num_rows_for_inference: int | None = 100,
    compression_type: str | None = None,
    ignore_errors: bool = False,
    encoding: str = "utf-8",
) -> data.Dataset:
    """`tf.data.experimental.make_csv_dataset`: batches of the columns of CSV files, by name.

    Args:
        file_pattern: Pattern of names of files, or a list of them.
        batch_size: Number of rows of a batch.
        column_names: Names of the columns; None for those of the first lines.
        column_defaults: For each column a dtype, or a default for fields that are empty; None looks
            at the first rows.
        label_name: Column that becomes the second item of `(features, label)`.
        select_columns: Names or numbers of the columns to read; None for all.
        field_delim: Separator of fields.
        use_quote_delim: Whether quotes enclose fields.
        na_value: Text of fields that count as empty.
        header: Whether the first line of each file has names.
        num_epochs: Number of times the rows come; None for no end.
        shuffle: Whether to shuffle files and rows.
        shuffle_buffer_size: See `Dataset.shuffle`.
        shuffle_seed: Seed of both.
        prefetch_buffer_size: Number of batches to make ahead; None chooses it.
        num_parallel_reads: Number of files that take turns; None means 1.
        sloppy: No effect: the order depends on the seed only.
        num_rows_for_inference: Number of rows to look at; None for all.
        compression_type: "GZIP", "ZLIB", "BZIP2" or "XZ"; None or "" for none.
        ignore_errors: Whether to leave out rows that do not fit.
        encoding: Must be UTF-8.

    Raises:
        InvalidValueError: if no file matches, or the arguments do not fit the columns.
    """
    if encoding.lower().replace("-", "") not in ("utf8", "ascii"):
        raise InvalidValueError(
            f"make_csv_dataset: encoding is {encoding!r}, expected 'utf-8'. Convert the files."
        )
    files = [*Dataset.list_files(file_pattern, shuffle=False).as_numpy_iterator()]
    layout = field_delim, use_quote_delim
    if column_names is None:
        column_names = _names_of(files, compression_type, header, *layout)
    if len(set(column_names)) < len(column_names):
        raise InvalidValueError(f"make_csv_dataset: two columns share a name: {column_names}.")
    columns = None if select_columns is None else _numbers(select_columns, column_names)
    names = [column_names[i] for i in columns] if columns is not None else [*column_names]
    if column_defaults is None:
        rows = _rows(files, compression_type, header, *layout).take(
            -1 if num_rows_for_inference is None else num_rows_for_inference
        )
        column_defaults = _inferred(rows, len(column_names), columns, na_value)
    if len(column_defaults) != len(names):
        raise InvalidValueError(
            f"make_csv_dataset: column_defaults has {len(column_defaults)} items, but {len(names)}"
            f" columns are read: {names}."
        )
    if label_name is not None and label_name not in names:
        raise InvalidValueError(
            f"make_csv_dataset: label_name is {label_name!r}, expected one of {names}."
        )

    def read(name: object) -> data.Dataset:
        rows = csv_dataset(
            name, column_defaults, compression_type, None, header, *layout, na_value, columns
        )
        return rows.ignore_errors() if ignore_errors else rows

    def named(*values: Any) -> Any:
        features = OrderedDict(zip(names, values, strict=True))
        return features if label_name is None else (features, features.pop(label_name))

    dataset: data.Dataset = Dataset.from_tensor_slices(files)
    if shuffle:
        dataset = dataset.shuffle(len(files), shuffle_seed)
    dataset = dataset.interleave(read, cycle_length=num_parallel_reads or 1)
    if shuffle:
        dataset = dataset.shuffle(shuffle_buffer_size, shuffle_seed)
    dataset = dataset.repeat(num_epochs).batch(batch_size, drop_remainder=num_epochs is None)
    return dataset.map(named).prefetch(
        AUTOTUNE if prefetch_buffer_size is None else prefetch_buffer_size
    )


def _names_of(
    files: Sequence[str], compression_type: str | None, header: bool, *layout: Any
) -> list[str]:
    """Returns the first line, which all files share."""
    if not header:
        raise InvalidValueError(
            "make_csv_dataset: column_names is None, but header is False. Give the names."
        )
    first: list[list[str]] = []
    for name in files:
        first += _rows(name, compression_type, False, *layout).take(1).as_numpy_iterator()
    if len(first) < len(files) or any(names != first[0] for names in first):
        raise InvalidValueError(
            f"make_csv_dataset: the files {files} must begin with the same names of columns, but"
            f" they begin with {first}. Give column_names and header=False if they have none."
        )
    return first[0]


def _numbers(selected: Sequence[int | str], names: Sequence[str]) -> list[int]:
    """Returns the numbers of columns in the order of the file."""
    found = sorted({names.index(c) if c in names else c for c in selected}, key=str)
    wrong = [c for c in found if not isinstance(c, int) or not 0 <= c < len(names)]
    if wrong or len(found) != len(selected):
        raise InvalidValueError(
            f"make_csv_dataset: select_columns is {selected}, expected different names or numbers"
            f" of the columns {list(names)}."
        )
    return sorted(int(c) for c in found)


def _inferred(
    rows: data.Dataset, num_columns: int, columns: Sequence[int] | None, na_value: str
) -> list[Any]:
    """Returns a default for each column, of the least dtype that holds what is there."""
    picked = range(num_columns) if columns is None else columns
    levels: list[int | None] = [None] * len(picked)
    for row in rows.as_numpy_iterator():
        if len(row) != num_columns:
            raise InvalidValueError(
                f"make_csv_dataset: a row has {len(row)} fields, expected {num_columns}: {row}."
            )
        for k, i in enumerate(picked):
            while row[i] not in ("", na_value) and not _holds(levels[k], row[i]):
                levels[k] = 0 if (level := levels[k]) is None else level + 1
    text = len(_INFERRED) - 1
    found = [text if level is None else level for level in levels]
    return [b"" if level == text else np.zeros(1, _INFERRED[level]) for level in found]


def _holds(level: int | None, field: str) -> bool:
    if level is None or level == len(_INFERRED) - 1:
        return level is not None
    dtype = _INFERRED[level]
    return _is_number(field, dtype) and bool(np.dtype(dtype).type(field) < np.inf)
