"""esmm.torch: products that skip zeros, as torch operators and modules.

>>> import torch, esmm.torch
>>> mlp = esmm.torch.SparseFFN(256, 1024, activation="relu2")
>>> y = mlp(torch.randn(64, 256))
>>> y.sum().backward()
>>> mlp.up.weight.grad.shape
torch.Size([1024, 256])
"""

from ._ops import compiled as has_compiled_operators
from ._registry import clear_cache
from .ffn import SparseFFN
from .functional import linear
from .linear import SparseLinear
from .sparse import SparseTensor, to_sparse

__all__ = ["SparseFFN", "SparseLinear", "SparseTensor", "clear_cache", "has_compiled_operators", "linear", "to_sparse"]
