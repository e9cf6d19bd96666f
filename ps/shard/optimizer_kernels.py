"""Fused row optimizers: one pass per row over [D weights | S slots] of its record.

The formulas are those of ps/config.py. Every value is float32; what depends on the step only is computed in
float64 by the caller and handed over in `scalars`. A zero divisor (eps 0, no gradient yet) means no change.

`squares_U`: a row's mean squared gradient, where the gradient is a sum of several steps' and its own square would be
something else; its elements share it like their own squares. Empty = the gradient's own. Plain SGD ignores it.
"""
# U = unique ids, D = embedding dim

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardkeep.base.kernels import kernel
from shardkeep.ps.shard.index_kernels import FIRST_WEIGHT, prefetch_record, record

Rows = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

_SIGNATURE = "void(int64[::1], int64, int64, int64[::1], float32[:,::1], float32[::1], float32[::1])"
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_LARGEST = np.float32(3.4028235e38)


@kernel("UniTuple(float32, 2)(float32[::1], float32)")
def share(grad_D: Rows, square: np.float32) -> tuple[np.float32, np.float32]:
    """(factor, addend): an element's part of the row's mean square is (factor * its gradient)² + addend. In equal parts
    where the gradient has vanished beside what it is the sum of."""
    total = _ZERO
    for d in range(grad_D.size):
        total += grad_D[d] * grad_D[d]
    ratio = square * np.float32(grad_D.size) / total
    if total > _ZERO and ratio < _LARGEST:
        return np.sqrt(ratio), _ZERO
    return _ZERO, square


@kernel(_SIGNATURE)
def sgd(
    addresses: Integers, shift: int, width: int, slots_U: Integers, grad_UD: Rows, squares_U: Rows, scalars: Rows
) -> None:
    """scalars: rate, weight decay."""
    rate, decay = scalars[0], scalars[1]
    dim = grad_UD.shape[1]
    for i in range(slots_U.size):
        weights = record(addresses, shift, width, slots_U[i])[FIRST_WEIGHT:]
        for d in range(dim):
            weights[d] -= rate * (grad_UD[i, d] + decay * weights[d])


@kernel(_SIGNATURE)
def adagrad(
    addresses: Integers, shift: int, width: int, slots_U: Integers, grad_UD: Rows, squares_U: Rows, scalars: Rows
) -> None:
    """scalars: rate, weight decay, eps. Slots: sums of squares."""
    rate, decay, eps = scalars[0], scalars[1], scalars[2]
    dim = grad_UD.shape[1]
    for i in range(slots_U.size):
        prefetch_record(addresses, shift, width, slots_U, i)
        row = record(addresses, shift, width, slots_U[i])
        weights, sums = row[FIRST_WEIGHT : FIRST_WEIGHT + dim], row[FIRST_WEIGHT + dim :]
        factor, addend = share(grad_UD[i], squares_U[i]) if squares_U.size else (_ONE, _ZERO)
        for d in range(dim):
            g = grad_UD[i, d] + decay * weights[d]
            root = factor * grad_UD[i, d] + decay * weights[d]
            total = sums[d] + root * root + addend
            divisor = np.sqrt(total) + eps
            sums[d] = total
            weights[d] -= rate * g / divisor if divisor > _ZERO else _ZERO


@kernel(_SIGNATURE)
def rowwise_adagrad(
    addresses: Integers, shift: int, width: int, slots_U: Integers, grad_UD: Rows, squares_U: Rows, scalars: Rows
) -> None:
    """scalars: rate, weight decay, eps. Slot: the sum of mean squares."""
    rate, decay, eps = scalars[0], scalars[1], scalars[2]
    dim = grad_UD.shape[1]
    for i in range(slots_U.size):
        prefetch_record(addresses, shift, width, slots_U, i)
        row = record(addresses, shift, width, slots_U[i])
        a = b = c = e = _ZERO  # four chains of additions hide the latency of one
        whole = dim & ~3
        for d in range(0, whole, 4):
            g0 = grad_UD[i, d] + decay * row[FIRST_WEIGHT + d]
            g1 = grad_UD[i, d + 1] + decay * row[FIRST_WEIGHT + d + 1]
            g2 = grad_UD[i, d + 2] + decay * row[FIRST_WEIGHT + d + 2]
            g3 = grad_UD[i, d + 3] + decay * row[FIRST_WEIGHT + d + 3]
            a, b, c, e = a + g0 * g0, b + g1 * g1, c + g2 * g2, e + g3 * g3
        for d in range(whole, dim):
            g0 = grad_UD[i, d] + decay * row[FIRST_WEIGHT + d]
            a += g0 * g0
        square = squares_U[i] if squares_U.size else ((a + c) + (b + e)) / np.float32(dim)
        total = row[FIRST_WEIGHT + dim] + square
        row[FIRST_WEIGHT + dim] = total
        divisor = np.sqrt(total) + eps
        factor = rate / divisor if divisor > _ZERO else _ZERO
        for d in range(dim):
            row[FIRST_WEIGHT + d] -= factor * (grad_UD[i, d] + decay * row[FIRST_WEIGHT + d])


@kernel(_SIGNATURE)
def adam(
    addresses: Integers, shift: int, width: int, slots_U: Integers, grad_UD: Rows, squares_U: Rows, scalars: Rows
) -> None:
    """scalars: rate with bias correction, weight decay, eps, 1 - beta1, 1 - beta2. Slots: moments 1, then 2."""
    rate, decay, eps, blend1, blend2 = scalars[0], scalars[1], scalars[2], scalars[3], scalars[4]
    dim = grad_UD.shape[1]
    for i in range(slots_U.size):
        prefetch_record(addresses, shift, width, slots_U, i)
        row = record(addresses, shift, width, slots_U[i])
        weights = row[FIRST_WEIGHT : FIRST_WEIGHT + dim]
        means, squares = row[FIRST_WEIGHT + dim : FIRST_WEIGHT + 2 * dim], row[FIRST_WEIGHT + 2 * dim :]
        factor, addend = share(grad_UD[i], squares_U[i]) if squares_U.size else (_ONE, _ZERO)
        for d in range(dim):
            g = grad_UD[i, d] + decay * weights[d]
            root = factor * grad_UD[i, d] + decay * weights[d]
            mean = means[d] + (g - means[d]) * blend1
            square = squares[d] + (root * root + addend - squares[d]) * blend2
            means[d], squares[d] = mean, square
            divisor = np.sqrt(square) + eps
            weights[d] -= rate * (mean / divisor) if divisor > _ZERO else _ZERO


@kernel(_SIGNATURE)
def ftrl(
    addresses: Integers, shift: int, width: int, slots_U: Integers, grad_UD: Rows, squares_U: Rows, scalars: Rows
) -> None:
    """scalars: 1 / alpha, beta, l1, l2, the schedule's factor. Slots: z, then n.

    The factor scales the gradient's term in z: without l1 and l2 a step is then `w -= factor * alpha * g /
    (beta + sqrt(n))`. A factor on alpha itself would shrink the weights, for z remembers the old alpha."""
    inverse, beta, l1, l2, factor = scalars[0], scalars[1], scalars[2], scalars[3], scalars[4]
    dim = grad_UD.shape[1]
    for i in range(slots_U.size):
        prefetch_record(addresses, shift, width, slots_U, i)
        row = record(addresses, shift, width, slots_U[i])
        weights = row[FIRST_WEIGHT : FIRST_WEIGHT + dim]
        zs, ns = row[FIRST_WEIGHT + dim : FIRST_WEIGHT + 2 * dim], row[FIRST_WEIGHT + 2 * dim :]
        factor_i, addend = share(grad_UD[i], squares_U[i]) if squares_U.size else (_ONE, _ZERO)
        for d in range(dim):
            g = grad_UD[i, d]
            n = ns[d] + (factor_i * g) * (factor_i * g) + addend
            root = np.sqrt(n)
            z = zs[d] + factor * g - (root - np.sqrt(ns[d])) * inverse * weights[d]
            zs[d], ns[d] = z, n
            divisor = (beta + root) * inverse + l2
            excess = z - np.copysign(l1, z)
            weights[d] = -excess / divisor if abs(z) > l1 and divisor > _ZERO else _ZERO
