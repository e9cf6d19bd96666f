"""Series: the points of a curve, of any length of run, in a bounded number of rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

Row = tuple[float | int | None, ...]


class Series:
    """Keeps every n-th row and the newest one. n doubles when the rows reach `most`, so that earlier rows rarely
    change."""

    def __init__(self, most: int = 1000) -> None:
        self._most = most
        self._kept: list[Row] = []
        self._stride = 1
        self._count = 0
        self._newest: Row | None = None

    def add(self, row: Row) -> None:
        """Adds the next row."""
        if self._count % self._stride == 0:
            self._kept.append(row)
        self._count += 1
        self._newest = row
        if len(self._kept) >= self._most:
            self._kept = self._kept[::2]
            self._stride *= 2

    @property
    def rows(self) -> list[Row]:
        """The kept rows in order; the newest one is the last."""
        newest = self._newest
        whole = newest is None or (self._kept and self._kept[-1] is newest)
        return list(self._kept) if whole or newest is None else [*self._kept, newest]


def interpolate(x: float, points: Sequence[tuple[float, float]]) -> float | None:
    """The value at `x` of the line through `points`, which are in order of x. None = before or after them."""
    at = bisect_left(points, (x, float("-inf")))
    if at == len(points):
        return points[-1][1] if points and points[-1][0] == x else None
    right = points[at]
    if right[0] == x:
        return right[1]
    if at == 0:
        return None
    left = points[at - 1]
    return left[1] + (right[1] - left[1]) * (x - left[0]) / (right[0] - left[0])
