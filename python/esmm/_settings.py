"""Which device and how many threads the calling thread's own contexts use."""

from __future__ import annotations

from typing import Any, Optional, Union

from . import _core
from ._core import Context, local
from ._errors import ArgumentError


class Setting:
    """A setting that was changed; as a context manager it is changed back at the end."""

    def __init__(self, name: str, before: Any) -> None:
        self._name = name
        self._before = before

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: Any) -> None:
        setattr(local, self._name, self._before)


_ASK: Any = object()


def device(name: Optional[str] = _ASK) -> Union[str, Setting]:
    """Without an argument: the device that weights are prepared for by default, 'cpu' or 'cuda:0'. With one, sets it
    for the calling thread: 'auto', 'cpu', 'cuda', 'cuda:1'; None goes back to $ESMM_DEVICE, else 'auto'.

    >>> import esmm
    >>> with esmm.device("cpu"):
    ...     esmm.device()
    'cpu'
    """
    if name is _ASK:
        return _core.context().device
    before = local.device
    _core.context(name)  # raises where there is no such device
    local.device = name
    return Setting("device", before)


def threads(count: int = _ASK) -> Union[int, Setting]:
    """Without an argument: how many CPU threads a product uses at most. With one, sets it for the calling thread; 0
    goes back to $ESMM_THREADS, else to all CPUs that the process may run on.

    >>> import esmm
    >>> with esmm.threads(1):
    ...     esmm.threads()
    1
    """
    if count is _ASK:
        return _core.context().threads
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= 1024:
        raise ArgumentError(f"threads is {count!r}: it is a number from 1 to 1024, or 0 for the default")
    before = local.threads
    local.threads = count
    return Setting("threads", before)


def default_context(device: Optional[str] = None) -> Context:
    """The calling thread's own context for a device."""
    return _core.context(device)
