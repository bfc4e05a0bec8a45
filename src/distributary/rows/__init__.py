"""Which rows of a batch each value of a program depends on."""

from typing import TYPE_CHECKING

from distributary._late import late_names

if TYPE_CHECKING:
    from distributary.rows._row_wise import (
        adds_rows,
        bind_rows,
        numbers_of_other_rows,
        row_operands,
        rows_between,
        takes_rows,
        with_rows,
    )
    from distributary.rows._sparse_gradients import with_sparse_gradients

__all__ = [
    "adds_rows",
    "bind_rows",
    "numbers_of_other_rows",
    "row_operands",
    "rows_between",
    "takes_rows",
    "with_rows",
    "with_sparse_gradients",
]

# Imported on first use: only programs of several replicas or with servers are analyzed.
if not TYPE_CHECKING:  # or type checkers accept any name
    __getattr__ = late_names(
        __name__,
        {
            "_row_wise": (
                "adds_rows bind_rows numbers_of_other_rows row_operands rows_between takes_rows"
                " with_rows"
            ),
            "_sparse_gradients": "with_sparse_gradients",
        },
    )
