"""esmm.torch: products that skip zeros, as torch operators and modules."""
from .functional import linear
from .linear import SparseLinear
from .sparse import SparseTensor, to_sparse
from ._registry import clear_cache
