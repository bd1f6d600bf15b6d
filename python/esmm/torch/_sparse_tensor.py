"""to_sparse: a weight in compressed form that stands for the dense one in F.linear, matmul and nn.Linear."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Tuple

import torch
from torch import Tensor

from .._core import parse_format
from . import _registry
from ._formats import DTYPES, NONE, raw_or_none
from ._sparse_linear import prune_


class SparseTensor(Tensor):
    """A weight [out, in] in a compressed format: what to_sparse() returns. It has no gradient; x does.

    x @ w.t(), F.linear(x, w, bias), torch.mm and torch.addmm run on it, and so does an nn.Linear whose weight is
    nn.Parameter(w, requires_grad=False). to_dense() gives the matrix back. Its one piece of data is `packed`, the bytes
    of a weights file, which moves, copies and pickles like any tensor.
    """

    packed: Tensor
    format: str
    turned: bool

    @staticmethod
    def __new__(
        cls: Any, packed: Tensor, shape: Tuple[int, int], dtype: torch.dtype, format: str, turned: bool = False
    ) -> "SparseTensor":
        size = (shape[1], shape[0]) if turned else shape
        made: SparseTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, size, dtype=dtype, device=packed.device, requires_grad=False
        )
        made.packed, made.format, made.turned = packed, format, turned
        made._weight_shape = tuple(shape)  # type: ignore[attr-defined]
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __tensor_flatten__(self) -> Tuple[Any, Any]:
        return ["packed"], (self._weight_shape, self.dtype, self.format, self.turned)  # type: ignore[attr-defined]

    @classmethod
    def __tensor_unflatten__(cls, inner: Dict[str, Tensor], meta: Any, *_: Any) -> "SparseTensor":
        return cls(inner["packed"], *meta)

    def _stable_hash_for_caching(self) -> str:
        return repr(self.__tensor_flatten__()[1])

    def __repr__(self) -> str:  # type: ignore[override]
        what = f"shape={tuple(self.shape)}, dtype={self.dtype}, format={self.format!r}, device='{self.device}'"
        return f"SparseTensor({what})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        shape = self._weight_shape  # type: ignore[attr-defined]
        return SparseTensor, (self.packed, shape, self.dtype, self.format, self.turned)

    def __deepcopy__(self, memo: Any) -> "SparseTensor":
        return self._like(self.packed.clone())

    def requires_grad_(self, requires_grad: bool = True) -> "SparseTensor":  # type: ignore[override]
        if requires_grad:
            raise RuntimeError(
                "esmm: a SparseTensor is for inference and has no gradient: nn.Parameter(w, requires_grad=False)"
            )
        return self

    def to_dense(self, *_: Any, **__: Any) -> Tensor:  # type: ignore[override]
        return _to_dense(self)

    def _like(self, packed: Tensor, turned: Optional[bool] = None) -> "SparseTensor":
        shape = self._weight_shape  # type: ignore[attr-defined]
        return SparseTensor(packed, shape, self.dtype, self.format, self.turned if turned is None else turned)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            raise NotImplementedError(
                f"{func} does not take an esmm.torch.SparseTensor: it is for products (F.linear, matmul, mm, addmm);"
                " to_dense() gives an ordinary tensor"
            )
        return handler(func, *args, **(kwargs or {}))


_HANDLERS: Dict[Any, Callable[..., Any]] = {}
aten = torch.ops.aten


def _handles(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            _HANDLERS[op] = function
        return function

    return register


@_handles(aten.detach.default, aten.alias.default)
def _alias(func: Any, t: SparseTensor) -> SparseTensor:
    return t._like(t.packed)


@_handles(aten.clone.default)
def _clone(func: Any, t: SparseTensor, **_: Any) -> SparseTensor:
    return t._like(t.packed.clone())


@_handles(aten.t.default)
def _t(func: Any, t: SparseTensor) -> SparseTensor:
    return t._like(t.packed, not t.turned)


@_handles(aten.permute.default, aten.transpose.int)
def _permute(func: Any, t: SparseTensor, *dims: Any) -> SparseTensor:
    """w.T, w.mT and their like: the transpose is the only other order of two dimensions."""
    order = [d % 2 for d in (dims[0] if func is aten.permute.default else dims)]
    turns = order == [1, 0] if func is aten.permute.default else order[0] != order[1]
    return t._like(t.packed, t.turned != turns)


@_handles(aten._to_copy.default)
def _to_copy(func: Any, t: SparseTensor, dtype: Any = None, device: Any = None, **_: Any) -> SparseTensor:
    if dtype is not None and dtype != t.dtype:
        raise NotImplementedError(
            f"an esmm.torch.SparseTensor stays {t.dtype}: convert the dense weight to {dtype} before to_sparse()"
        )
    return t._like(t.packed.to(device) if device is not None else t.packed.clone())


def _right(x: Any, t: Any, what: str, bias: Optional[Tensor] = None) -> Tensor:
    """x @ t + bias. t has to be sparse: a transposed weight, or, as the gradient of x needs it, the weight itself."""
    if not isinstance(t, SparseTensor) or isinstance(x, SparseTensor):
        raise NotImplementedError(f"{what}: the second operand alone has to be sparse; write x @ w.t()")
    if t.turned:
        return _multiply(x, t, bias)
    made = x @ _to_dense(t)
    return made if bias is None else made + bias


def _multiply(x: Tensor, t: SparseTensor, bias: Optional[Tensor] = None) -> Tensor:
    if x.dtype != t.dtype:
        raise RuntimeError(f"esmm: x is {x.dtype}, and the sparse weight is {t.dtype}")
    out, k = t._weight_shape  # type: ignore[attr-defined]
    if x.shape[-1] != k:
        raise RuntimeError(f"esmm: x has rows of {x.shape[-1]}, and the sparse weight is [{out}, {k}]")
    made: Tensor = torch.ops.esmm.linear_packed(x, t.packed, out, bias, None, NONE)
    return made


@_handles(aten.mm.default, aten.matmul.default)
def _mm(func: Any, x: Any, t: Any) -> Tensor:
    return _right(x, t, str(func))


@_handles(aten.addmm.default)
def _addmm(func: Any, bias: Tensor, x: Any, t: Any, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if alpha != 1 or beta != 1:
        raise NotImplementedError(f"{func}: alpha and beta have to be 1 with a SparseTensor")
    if bias.dim() != 1:
        return _right(x, t, str(func)) + bias
    return _right(x, t, str(func), bias)


@_handles(aten.linear.default)
def _linear(func: Any, x: Tensor, t: Any, bias: Optional[Tensor] = None) -> Tensor:
    if not isinstance(t, SparseTensor) or t.turned:
        raise NotImplementedError(f"{func}: the weight has to be a SparseTensor [out, in], as to_sparse() made it")
    return _multiply(x, t, bias)


def _to_dense(t: SparseTensor) -> Tensor:
    out, k = t._weight_shape  # type: ignore[attr-defined]
    dense: Tensor = torch.ops.esmm.unpack(t.packed, out, k, t.dtype)
    return dense.t() if t.turned else dense


def to_sparse(tensor: Tensor, format: str, *, prune: bool = False, density: Optional[float] = None) -> SparseTensor:
    """weight [out, in], of any shape, in format '2:4' (any N:M), 'bsr:64' (blocks of 64 x 64, those of zeros left out)
    or 'dense' (zeros that share a column are).

    The weight has to fit an N:M format: of every M neighbours along `in`, at most N nonzero. prune makes it fit, or
    keeps that density of the blocks of a 'bsr' format; the tensor itself is not touched.
    """
    from .._files import dumps

    if not isinstance(tensor, Tensor) or isinstance(tensor, SparseTensor):
        raise TypeError(f"tensor is a {type(tensor).__name__}: it has to be an ordinary tensor")
    if tensor.dim() != 2:
        raise ValueError(f"tensor has the shape {list(tensor.shape)}: to_sparse() takes matrices, [out, in]")
    if tensor.dtype not in DTYPES:
        raise TypeError(f"tensor is {tensor.dtype}: it has to be float32, bfloat16 or float16")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError("tensor requires a gradient, and a SparseTensor has none: call to_sparse(w.detach(), ...)")
    wanted = parse_format(format)
    source = tensor.detach()
    if prune:
        source = source.clone(memory_format=torch.contiguous_format)
        prune_(source, wanted, density)
    raw = raw_or_none(source.t())
    if raw is None:
        source = source.contiguous()
        raw = raw_or_none(source.t())
    assert raw is not None
    with _registry.context(tensor.device) as ctx:
        weights = ctx.prepare(raw, format=wanted)
    packed = torch.frombuffer(bytearray(dumps(weights)), dtype=torch.uint8).to(tensor.device)
    return SparseTensor(packed, (tensor.shape[0], tensor.shape[1]), tensor.dtype, format)


torch.serialization.add_safe_globals([SparseTensor])
