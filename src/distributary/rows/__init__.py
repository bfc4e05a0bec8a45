"""Which rows of a batch each value of a program depends on."""

from typing import TYPE_CHECKING

from distributary._late import late_names
from distributary.rows._scopes import OWN_STATISTICS

if TYPE_CHECKING:
    from distributary.rows._relations import relation_of_replica, relation_warning
    from distributary.rows._row_wise import (
        bind_rows,
        numbers_of_other_rows,
        row_operands,
        rows_between,
        with_rows,
    )

__all__ = [
    "OWN_STATISTICS",
    "bind_rows",
    "numbers_of_other_rows",
    "relation_of_replica",
    "relation_warning",
    "row_operands",
    "rows_between",
    "with_rows",
]

# Imported on first use: only programs of several replicas or with servers are analyzed.
if not TYPE_CHECKING:  # or type checkers accept any name
    __getattr__ = late_names(
        __name__,
        {
            "bind_rows": "_row_wise",
            "numbers_of_other_rows": "_row_wise",
            "relation_of_replica": "_relations",
            "relation_warning": "_relations",
            "row_operands": "_row_wise",
            "rows_between": "_row_wise",
            "with_rows": "_row_wise",
        },
    )
