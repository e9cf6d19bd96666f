"""Dot interaction of DLRM: the first vector of a sample beside the dot products of all pairs of its vectors.

Two forms of one thing: kernels where plain float32 is computed eagerly on a CPU, torch operators everywhere else
(GPUs, autocast, and graphs that are being captured for torch.compile or export).
"""
# B = batch, V = vectors of a sample, D = their dim, P = pairs V (V - 1) / 2, O = D + P

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from shardkeep.workers.models.layers.axes import Name, named


class DotInteraction(nn.Module):
    """The lower triangle of Z Z^T without its diagonal, Z the V vectors of a sample, behind the first vector."""

    lower_P: torch.Tensor

    def __init__(self, num_vectors: int) -> None:
        super().__init__()
        # One index_select on the flattened product saves 9 % of the tower against two index tensors.
        row_P, column_P = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.register_buffer("lower_P", row_P * num_vectors + column_P, persistent=False)
        self.num_pairs = named(len(row_P), num_vectors, _pair_names)

    def forward(self, vectors: list[torch.Tensor]) -> torch.Tensor:
        """(B, D + P) of V tensors (B, D)."""
        if _eager_on_the_cpu(vectors):
            if torch.is_inference_mode_enabled():
                return _pairs(torch.stack(vectors))
            joined_BO: torch.Tensor = _Pairs.apply(*vectors)  # type: ignore[no-untyped-call]
            return joined_BO
        return torch.cat([vectors[0], self.products(vectors).to(vectors[0].dtype)], dim=1)

    def products(self, vectors: list[torch.Tensor]) -> torch.Tensor:
        """The products alone, (B, P), by torch operators."""
        vectors_BVD = torch.stack(vectors, dim=1)
        products_BVV = torch.bmm(vectors_BVD, vectors_BVD.transpose(1, 2))
        return products_BVV.flatten(1).index_select(1, self.lower_P)


def _pair_names(names: Sequence[Name]) -> list[Name]:
    return [tuple(sorted(a + b)) for i, a in enumerate(names) for b in names[:i]]


def _eager_on_the_cpu(vectors: list[torch.Tensor]) -> bool:
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    return all(v.is_cpu and v.dtype is torch.float32 for v in vectors)


def _pairs(vectors_VBD: torch.Tensor) -> torch.Tensor:
    from shardkeep.workers.models.layers import interaction_kernels  # here: other models do not load it

    num_vectors, num_samples, dim = vectors_VBD.shape
    joined_BO = vectors_VBD.new_empty((num_samples, dim + num_vectors * (num_vectors - 1) // 2))
    interaction_kernels.multiply_pairs(vectors_VBD.numpy(), joined_BO.numpy())
    return joined_BO


class _Pairs(torch.autograd.Function):
    """DotInteraction in float32 on the CPU. Its gradients are contiguous parts of one tensor, which autograd takes
    as they are: views of (B, V, D) would be copied one by one."""

    @staticmethod
    def forward(ctx: Any, *vectors: torch.Tensor) -> torch.Tensor:
        vectors_VBD = torch.stack(vectors)
        ctx.save_for_backward(vectors_VBD)
        return _pairs(vectors_VBD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BO: torch.Tensor) -> tuple[torch.Tensor, ...]:
        from shardkeep.workers.models.layers import interaction_kernels  # here: as above

        (vectors_VBD,) = ctx.saved_tensors
        num_vectors, num_samples, dim = vectors_VBD.shape
        matrix_BVV = vectors_VBD.new_empty((num_samples, num_vectors, num_vectors))
        interaction_kernels.spread_pairs(grad_BO.contiguous().numpy(), dim, matrix_BVV.numpy())
        grad_VBD = torch.bmm(matrix_BVV, vectors_VBD.transpose(0, 1)).transpose(0, 1).contiguous()
        grad_VBD[0] += grad_BO[:, :dim]
        return grad_VBD.unbind()
