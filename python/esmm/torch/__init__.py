"""esmm.torch: products that skip zeros, as torch operators and modules.

>>> import torch, esmm.torch
>>> mlp = esmm.torch.SparseFFN(256, 1024, activation="relu2")
>>> y = mlp(torch.randn(64, 256))
>>> y.sum().backward()
>>> mlp.up.weight.grad.shape
torch.Size([1024, 256])
"""

from ._convert import Conversion, convert, undo
from ._profile import Profile, profile
from ._registry import clear_cache
from ._sparse_ffn import SparseFFN, fit
from ._functional import linear
from ._sparse_linear import SparseLinear
from ._sparse_tensor import SparseTensor, to_sparse

__all__ = [
    "Conversion",
    "Profile",
    "SparseFFN",
    "SparseLinear",
    "SparseTensor",
    "clear_cache",
    "convert",
    "fit",
    "linear",
    "profile",
    "to_sparse",
    "undo",
]
