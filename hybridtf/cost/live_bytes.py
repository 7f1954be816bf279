"""Counting the bytes of live tensors, and running a model without its memory.

Both are dispatch modes, so they see every tensor that torch's operators return, in forward and backward, and not what a
kernel allocates and frees inside one call.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, _meta_registrations, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from hybridtf.core import ConfigError

ASKS_DEVICE = torch.ops.prim.device.default
"""What ``tensor.device`` of a tensor without memory calls: half of all calls, and no work."""


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind ``tensors``; memory that several share counts once."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        seen[storage._cdata] = storage.nbytes()
    return sum(seen.values())


class LiveBytes(TorchDispatchMode):
    """Inside, ``now`` is the bytes of the live tensors it knows, and ``peak`` the most they ever were.

    It knows what operators returned since it was entered (a view makes the whole memory behind it known), and what
    :meth:`watch` was told.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Count the memory of ``tensors`` too, while it lives."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in self._known or not size:
                continue

            def forget(_: Any, key: int = key, size: int = size) -> None:
                del self._known[key]
                self.now -= size

            # A storage keeps its Python object for life, so the reference dies with the memory.
            self._known[key] = weakref.ref(storage, forget)
            self.now += size
        self.peak = max(self.peak, self.now)

    def reset_peak(self) -> None:
        """Begin a new peak, at what is live now."""
        self.peak = self.now

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is ASKS_DEVICE:
            return func(*args)
        out = func(*args, **(kwargs or {}))
        self.watch(leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor))
        return out


class _FakeFloats(TorchDispatchMode):
    """New floating-point tensors are fake (a shape without memory), integers and booleans stay real.

    What a model reads back while it runs are counts and lengths: they keep their values, so that the same code runs as
    on real tensors. A floating-point value that is read back has none, and raises. """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is ASKS_DEVICE:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        kwargs = kwargs or {}
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if given and not any(isinstance(tensor, FakeTensor) for tensor in given):
            # Real in, real out: integers, and scalars that an optimizer counts with.
            return func(*args, **kwargs)
        with self.fake:
            out = func(*args, **kwargs)
        # A factory says its dtype in many ways: what it would make is asked of the fake.
        exact = isinstance(out, Tensor) and not (out.is_floating_point() or out.is_complex())
        return func(*args, **kwargs) if exact and not given else out


class WithoutMemory:
    """A world of shapes: inside :meth:`enter`, models are built and run without memory for their floating-point
    tensors.

    What one instance made may only be used inside the same instance. ``live`` counts what its tensors would take.
    """

    def __init__(self) -> None:
        self._mode = _FakeFloats()
        self.live = LiveBytes()

    def adopt(self, model: nn.Module) -> nn.Module:
        """``model`` with every parameter and floating-point buffer that has memory replaced by its shape."""
        known: dict[int, Tensor] = {}  # tied tensors stay tied
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None and tensor.is_floating_point() and not isinstance(tensor, FakeTensor):
                        held[name] = known.setdefault(id(tensor), self.shape_of(tensor))  # type: ignore[assignment]
        return model

    def shape_of(self, tensor: Tensor) -> Tensor:
        """``tensor`` without its memory; a parameter stays one."""
        with self._mode.fake:
            shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return nn.Parameter(shape, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else shape

    @contextmanager
    def enter(self) -> Iterator[LiveBytes]:
        """Raises :class:`ConfigError` where a model reads back a floating-point value, which does not exist here, or where
        torch's form of an operator for shapes refuses what the real one takes (grouped products in float32)."""
        try:
            with self._mode, self.live:
                yield self.live
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ConfigError(
                f"memory cannot be predicted: the model reads a computed value back ({error.func}); measure it instead"
            ) from error
        except RuntimeError as error:
            if not _raised_by_shapes(error):
                raise
            raise ConfigError(
                f"memory cannot be predicted: torch runs an operator of the model on tensors alone, not on shapes ({error}); "
                "measure it instead"
            ) from error


def _raised_by_shapes(error: BaseException) -> bool:
    """Whether it was torch's form of an operator for shapes that refused."""
    return any(frame.f_code.co_filename == _meta_registrations.__file__ for frame, _ in walk_tb(error.__traceback__))
