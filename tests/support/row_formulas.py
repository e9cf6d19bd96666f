"""The formulas of row optimizers in float64, for one row: its config, step and rate, weights, gradient, the roots whose
squares the second moments take (the gradient, unless it is a sum of several), and slots, which change in place."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Slots = list[np.ndarray]


def sgd(c: Any, t: int, rate: float, w: np.ndarray, g: np.ndarray, root: np.ndarray, slots: Slots) -> np.ndarray:
    return w - rate * (g + c.weight_decay * w)


def adagrad(c: Any, t: int, rate: float, w: np.ndarray, g: np.ndarray, root: np.ndarray, slots: Slots) -> np.ndarray:
    slots[0] += (root + c.weight_decay * w) ** 2
    return w - rate * (g + c.weight_decay * w) / (np.sqrt(slots[0]) + c.eps)


def rowwise(c: Any, t: int, rate: float, w: np.ndarray, g: np.ndarray, root: np.ndarray, slots: Slots) -> np.ndarray:
    g = g + c.weight_decay * w
    slots[0] += np.mean(g * g)
    return w - rate * g / (np.sqrt(slots[0]) + c.eps)


def adam(c: Any, t: int, rate: float, w: np.ndarray, g: np.ndarray, root: np.ndarray, slots: Slots) -> np.ndarray:
    beta1, beta2 = c.betas
    slots[0][:] = beta1 * slots[0] + (1 - beta1) * (g + c.weight_decay * w)
    slots[1][:] = beta2 * slots[1] + (1 - beta2) * (root + c.weight_decay * w) ** 2
    if c.eps_after_correction:
        return w - rate / (1 - beta1 ** (t + 1)) * slots[0] / (np.sqrt(slots[1] / (1 - beta2 ** (t + 1))) + c.eps)
    rate = rate * math.sqrt(1 - beta2 ** (t + 1)) / (1 - beta1 ** (t + 1))
    return w - rate * slots[0] / (np.sqrt(slots[1]) + c.eps)


def partial_adam(
    c: Any, t: int, rate: float, w: np.ndarray, g: np.ndarray, root: np.ndarray, slots: Slots
) -> np.ndarray:
    """As FBGEMM's kernel: the moments as weighted means, both corrected, then eps."""
    g = g + c.weight_decay * w
    beta1, beta2 = c.betas
    slots[0][:] = beta1 * slots[0] + (1 - beta1) * g
    slots[1][:] = beta2 * slots[1] + (1 - beta2) * np.mean((root + c.weight_decay * w) ** 2)
    mean, square = slots[0] / (1 - beta1 ** (t + 1)), slots[1] / (1 - beta2 ** (t + 1))
    return w - rate * mean / (np.sqrt(square) + c.eps)


def lars(c: Any, t: int, rate: float, w: np.ndarray, g: np.ndarray, root: np.ndarray, slots: Slots) -> np.ndarray:
    length = np.linalg.norm(w)
    trust = c.eta * length / (np.linalg.norm(g) + c.weight_decay * length)
    slots[0][:] = c.momentum * slots[0] + rate * trust * (g + c.weight_decay * w)
    return w - slots[0]


def lamb(c: Any, t: int, rate: float, w: np.ndarray, g: np.ndarray, root: np.ndarray, slots: Slots) -> np.ndarray:
    beta1, beta2 = c.betas
    slots[0][:] = beta1 * slots[0] + (1 - beta1) * g
    slots[1][:] = beta2 * slots[1] + (1 - beta2) * root**2
    mean, square = slots[0] / (1 - beta1 ** (t + 1)), slots[1] / (1 - beta2 ** (t + 1))
    direction = mean / (np.sqrt(square) + c.eps) + c.weight_decay * w
    return w - rate * np.linalg.norm(w) / np.linalg.norm(direction) * direction


def ftrl(c: Any, t: int, rate: float, w: np.ndarray, g: np.ndarray, root: np.ndarray, slots: Slots) -> np.ndarray:
    z, n = slots
    sigma = (np.sqrt(n + root**2) - np.sqrt(n)) / c.lr
    z += (rate / c.lr) * g - sigma * w
    n += root**2
    return np.where(np.abs(z) <= c.l1, 0, -(z - np.sign(z) * c.l1) / ((c.beta + np.sqrt(n)) / c.lr + c.l2))


FORMULAS = {
    "sgd": sgd,
    "adagrad": adagrad,
    "rowwise_adagrad": rowwise,
    "adam": adam,
    "partial_rowwise_adam": partial_adam,
    "lars_sgd": lars,
    "lamb": lamb,
    "ftrl": ftrl,
}


def new_slots(c: Any, dim: int) -> Slots:
    width = 1 if c.name == "rowwise_adagrad" else dim
    return [np.full(width, getattr(c, "initial_accumulator", 0.0)), np.zeros(width)]
