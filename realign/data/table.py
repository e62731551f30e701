"""`Table`: rows in memory, with the place of each row in its file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realign.data.columns import Row, read_column
from realign.data.row_files import RowFile
from realign.errors import DataError


@dataclass(frozen=True, eq=False)
class Table:
    """The rows of one or several files, with the position of each row in its file.

    Attributes:
        path: Path of the file, or name of the source.
        rows: The rows, one dictionary each.
        places: Position of each row in its file, from 1.
        unit: Unit of the positions if there is one file: "line" or "row".
        files: File of each row; empty if `path` is the only file.
    """

    path: Path | str
    rows: Sequence[Row]
    places: Sequence[int]
    unit: str = "row"
    files: Sequence[RowFile] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, index: int) -> str:
        """Return file and line (or row) of the row at `index`, for messages."""
        if self.files:
            return self.files[index].where(self.places[index])
        return f"{self.path}, {self.unit} {self.places[index]}"

    def take(self, chosen: Sequence[int]) -> Table:
        """Return the rows at these indices."""
        files = [self.files[i] for i in chosen] if self.files else ()
        rows, places = [self.rows[i] for i in chosen], [self.places[i] for i in chosen]
        return Table(self.path, rows, places, self.unit, files)

    def column(self, name: str) -> list[Any]:
        """Return the values of a column.

        Args:
            name: Name of the column, or path to an item in it; see `read_column`.

        Raises:
            DataError: a row lacks the column; names the row, its columns and the nearest one.
        """
        values = []
        for index, row in enumerate(self.rows):
            try:
                values.append(read_column(row, name))
            except DataError as error:
                raise DataError(f"{self.where(index)}: {error}") from error
        return values
