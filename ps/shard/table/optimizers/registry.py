"""The registry of row optimizers.

To add one, write its settings (ps/config.py), a module with its kernel, a module with its ENTRY, and name it here.

| name | follows | eps | first slot value | weight decay | bias correction | schedule |
|---|---|---|---|---|---|---|
| sgd | torch.optim.SGD | - | - | L2 | - | on lr |
| adagrad | torch.optim.Adagrad | outside the root | initial_accumulator | L2 | - | on lr |
| rowwise_adagrad | FBGEMM exact row-wise | outside the root | initial_accumulator | L2 | - | on lr |
| adam | torch.optim.SparseAdam | outside the root, corrected or not | 0 | L2 | by the step + 1 | on lr |
| partial_rowwise_adam | FBGEMM partial row-wise | outside the root, corrected | 0 | L2 | by the step + 1 | on lr |
| lars_sgd | FBGEMM LARS_SGD | - | 0 | L2, its norm in the divisor | - | on lr |
| lamb | FBGEMM LAMB | outside the root, corrected | 0 | in the step, not in the moments | by the step + 1 | on lr |
| rmsprop | torch.optim.RMSprop | outside the root | 0 | L2 | - | on lr |
| adadelta | torch.optim.Adadelta | inside both roots | 0 | L2 | - | on lr |
| ftrl | McMahan et al. 2013, Algorithm 1 | beta | z = n = 0 | l2 of the paper | - | on the gradient in z |
"""

from __future__ import annotations

import functools
import importlib
from types import MappingProxyType

from shardkeep.ps.shard.table.optimizers import (
    adadelta,
    adagrad,
    adam,
    ftrl,
    lamb,
    lars_sgd,
    partial_rowwise_adam,
    rmsprop,
    rowwise_adagrad,
    sgd,
)
from shardkeep.ps.shard.table.optimizers.optimizer import RowOptimizer

_MODULES = (sgd, adagrad, rowwise_adagrad, adam, partial_rowwise_adam, lars_sgd, lamb, rmsprop, adadelta, ftrl)
OPTIMIZERS = MappingProxyType[str, RowOptimizer]({module.ENTRY.name: module.ENTRY for module in _MODULES})


@functools.cache
def code_address(module: str, kernel: str = "update") -> int:
    """The address of the machine code of a kernel, for `table_kernels`, which is compiled without it."""
    (compiled,) = getattr(importlib.import_module(module), kernel).overloads.values()
    return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name))
