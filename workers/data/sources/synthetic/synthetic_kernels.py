"""Kernels of the synthetic stream: samples and the teacher's logits as pure functions of (key, row).

F = features, I = dense columns, B = samples asked for
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from shardkeep.base.compiling.kernels import kernel
from shardkeep.base.hashing_kernels import GOLDEN, mix

RANK = 2  # factors of an id in the teacher
SPREAD = 2_654_435_761  # a prime beyond every table's size: times it, ranks fill [0, size) in no order


@kernel("float64(uint64)")
def unit(x: np.uint64) -> float:
    """A number in [0, 1) from the upper 53 bits."""
    return float(x >> np.uint64(11)) * 1.1102230246251565e-16


@kernel("float64(uint64)")
def bell(x: np.uint64) -> float:
    """Mean 0, variance 1: the sum of four 16-bit uniforms (Irwin-Hall), within +-3.46."""
    total = (
        (x & np.uint64(0xFFFF))
        + ((x >> np.uint64(16)) & np.uint64(0xFFFF))
        + ((x >> np.uint64(32)) & np.uint64(0xFFFF))
        + (x >> np.uint64(48))
    )
    return (float(total) / 65536.0 - 1.99996948) * 1.7320508


@kernel("int64(float64, int64, float64)")
def zipf_rank(u: float, size: int, exponent: float) -> int:
    """A rank in [0, size) by the inverse distribution function of the density x^-exponent on [1, size + 1)."""
    rest = 1.0 - exponent
    if abs(rest) < 1e-9:
        x = math.exp(u * math.log(size + 1.0))
    else:
        x = math.exp(math.log1p(u * (math.exp(rest * math.log(size + 1.0)) - 1.0)) / rest)
    return min(max(int(x) - 1, 0), size - 1)


@kernel(
    "void(uint64, uint64, int64[::1], int64[::1], float64, boolean, float64[::1],"
    " float64[::1], float32[:,::1], int64[:,::1], float32[::1], float64[::1])"
)
def make_samples(
    teacher_key: np.uint64,
    sample_key: np.uint64,
    rows_B: NDArray[np.int64],
    size_F: NDArray[np.int64],
    exponent: float,
    numbered: bool,
    strength: NDArray[np.float64],
    factor_F: NDArray[np.float64],
    dense_BI: NDArray[np.float32],
    ids_FB: NDArray[np.int64],
    label_B: NDArray[np.float32],
    logit_B: NDArray[np.float64],
) -> None:
    """Writes samples `rows_B`, their labels and the teacher's logits.

    logit = bias + sum_i w_i x_i + sum_f e(id_f) + (|sum_f v(id_f)|^2 - sum_f |v(id_f)|^2) / 2, the last term being
    all pairs of a factorization machine (Rendle 2010). e and v are hashes of the id and shrink with its rank;
    strength = (bias, dense, id, half rank of e, half rank of v), factor_F = strength of v, 0 where v is 0.
    """
    factor = np.empty(RANK, np.float64)
    num_dense = dense_BI.shape[1]
    weight_I = np.empty(num_dense, np.float64)
    for i in range(num_dense):
        weight_I[i] = bell(mix(np.uint64(teacher_key) ^ np.uint64(i + 1)))
    for b in range(len(rows_B)):
        base = mix(np.uint64(sample_key) + np.uint64(rows_B[b]) * GOLDEN)
        logit = strength[0]
        for i in range(num_dense):
            x = bell(mix(base + np.uint64(i + 1) * GOLDEN))
            dense_BI[b, i] = x
            logit += strength[1] * weight_I[i] * x
        factor[:] = 0.0
        squares = 0.0
        for f in range(len(size_F)):
            draw = unit(mix(base + np.uint64(num_dense + f + 1) * GOLDEN))
            rank = zipf_rank(draw, size_F[f], exponent)
            # A bijection of 64 bits: ids never collide within a table and say nothing about their rank.
            code = mix(np.uint64(teacher_key) + np.uint64(f + 1) * GOLDEN + np.uint64(rank))
            ids_FB[f, b] = rank * SPREAD % size_F[f] if numbered else np.int64(code)
            fade = strength[2] / (1.0 + rank / strength[3])
            effect = mix(code ^ np.uint64(0x5851F42D4C957F2D))
            logit += fade * bell(effect)
            if factor_F[f] == 0.0:
                continue
            fade = factor_F[f] / (1.0 + rank / strength[4])
            pieces = mix(effect + GOLDEN)
            for r in range(RANK):
                piece = (pieces >> np.uint64(16 * r)) & np.uint64(0xFFFF)
                v = fade * (float(piece) / 32767.5 - 1.0) * 1.7320508
                factor[r] += v
                squares += v * v
        for r in range(RANK):
            logit += 0.5 * factor[r] * factor[r]
        logit -= 0.5 * squares
        logit_B[b] = logit
        chance = unit(mix(base ^ np.uint64(0xD1B54A32D192ED03)))
        label_B[b] = 1.0 if chance < 1.0 / (1.0 + math.exp(-logit)) else 0.0
