"""Files of arrays with checksums, and the locks of their folders."""

from distributary.files._array_files import (
    SavedRows,
    WrittenFile,
    read_rows,
    rows_between,
    unreadable,
    write_arrays,
)
from distributary.files._save_locks import check_free, hold, release
