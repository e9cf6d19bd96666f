"""Kernels of sorted rows: finds ids among those sorted by placement key, and copies rows of any number format as
float32.

A row of `descriptors`, int64, describes a table by the columns below. `starts` has what its initial values depend on.
The caller keeps all arrays alive.
"""
# N = rows of a table, S = sections, U = ids of one section, V = ids of all sections, D = embedding dim

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import carray  # type: ignore[attr-defined]
from numba.core.types import int64, void

from shardkeep.base.array_kernels import float_of, pointer, prefetch
from shardkeep.base.arrays import Ints, Rows
from shardkeep.base.compiling.kernels import kernel
from shardkeep.base.hashing_kernels import mix
from shardkeep.ps.server.table.descriptor_kernels import FLOATS, INTS, START, Descriptors
from shardkeep.ps.server.table.initializers.initial_kernels import initial_values

IDS, NUM_ROWS, OFFSETS, BITS = 0, 1, 2, 3  # addresses of ids (N,) and offsets (2**bits + 1,), both int64
ROWS, SCALES, FORMAT, DIM = 4, 5, 6, 7  # addresses of rows (N, D) and scales (N,)
COLUMNS = 8

FP32, FP16, INT8 = 0, 1, 2
"""Numbers of the formats."""


@kernel("float32(uint16)")
def half(bits: int) -> np.float32:
    """A float16 as float32, exactly."""
    rest = np.uint32(bits & np.uint16(0x7FFF))
    if rest >= np.uint32(0x7C00):  # infinite, or not a number
        found = float_of(np.uint32(0x7F800000) | ((rest & np.uint32(0x3FF)) << np.uint32(13)))
    else:
        found = np.float32(float_of(rest << np.uint32(13)) * np.float32(2.0**112))
    return np.float32(-found) if bits & np.uint16(0x8000) else np.float32(found)


@kernel("void(int64[::1], int64[::1], int64[::1], int64[::1], int64, int64[::1])")
def find(descriptor: Ints, ids_U: Ints, places_U: Ints, layers_U: Ints, layer: int, buckets_U: Ints) -> None:
    """Where the row of each id is, for ids that have no place yet: the place in this layer, and its number. First all
    offsets are on their way from memory, then all ids."""
    shift = np.uint64(64) - np.uint64(descriptor[BITS])
    offsets = carray(pointer(descriptor[OFFSETS]), ((1 << descriptor[BITS]) + 1,), np.int64)
    ids_N = carray(pointer(descriptor[IDS]), (descriptor[NUM_ROWS],), np.int64)
    for i in range(ids_U.size):
        buckets_U[i] = np.int64(mix(np.uint64(ids_U[i])) >> shift)
        prefetch(descriptor[OFFSETS] + buckets_U[i] * 8)
    for i in range(ids_U.size):
        prefetch(descriptor[IDS] + offsets[buckets_U[i]] * 8)
    for i in range(ids_U.size):
        if places_U[i] >= 0:
            continue
        for n in range(offsets[buckets_U[i]], offsets[buckets_U[i] + 1]):
            if ids_N[n] == ids_U[i]:
                places_U[i], layers_U[i] = n, layer
                break


@kernel("void(int64[::1], int64, float32[::1])")
def copy_row(descriptor: Ints, place: int, out: Rows) -> None:
    """A row as float32."""
    dim, kind = descriptor[DIM], descriptor[FORMAT]
    if kind == FP32:
        row32 = carray(pointer(descriptor[ROWS] + place * dim * 4), (dim,), np.float32)
        for d in range(dim):
            out[d] = row32[d]
    elif kind == FP16:
        row16 = carray(pointer(descriptor[ROWS] + place * dim * 2), (dim,), np.uint16)
        for d in range(dim):
            out[d] = half(row16[d])
    else:
        row8 = carray(pointer(descriptor[ROWS] + place * dim), (dim,), np.int8)
        scale = carray(pointer(descriptor[SCALES]), (descriptor[NUM_ROWS],), np.float32)[place]
        for d in range(dim):
            out[d] = np.float32(row8[d]) * scale


@kernel(void(int64[:, :, ::1], START[::1], INTS, INTS, INTS, INTS, FLOATS))
def pull(
    descriptors: npt.NDArray[np.int64],
    starts: Descriptors,
    tables_S: Ints,
    starts_S1: Ints,
    ids_V: Ints,
    places_V: Ints,
    values: Rows,
) -> None:
    """Rows of all ids, table after table, into `values`; their places, -1 = no row in any layer.

    `descriptors` (layers, tables, COLUMNS): a row of an earlier layer hides those of later ones."""
    layers_V, buckets_V = np.empty(ids_V.size, np.int64), np.empty(ids_V.size, np.int64)
    places_V[:] = -1
    at = 0
    for s in range(tables_S.size):
        t, first, end = tables_S[s], starts_S1[s], starts_S1[s + 1]
        ids_U, places_U, layers_U = ids_V[first:end], places_V[first:end], layers_V[first:end]
        for layer in range(descriptors.shape[0]):
            if descriptors[layer, t, NUM_ROWS]:
                find(descriptors[layer, t], ids_U, places_U, layers_U, layer, buckets_V[first:end])
        dim = descriptors[0, t, DIM]
        for i in range(ids_U.size):
            out = values[at : at + dim]
            if places_U[i] < 0:
                initial_values(starts[t], ids_U[i], dim, out)
            else:
                copy_row(descriptors[layers_U[i], t], places_U[i], out)
            at += dim
