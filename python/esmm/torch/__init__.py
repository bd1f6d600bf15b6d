"""esmm.torch: products that skip zeros, as torch operators and modules."""
from . import _ops
