"""Tensors of a checkpoint, read one at a time; quantised ones are made whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from hybridtf.core import CheckpointError
from hybridtf.interop.settings import Settings
from hybridtf.models.weights import StoredTensors

Notes: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Lazy:
    """A tensor that is read when it is asked for."""

    dtype: torch.dtype
    read: Callable[[], Tensor]


class Tensors(Mapping[str, Tensor]):
    """Tensors by name, each read when it is asked for and not kept."""

    def __init__(self, lazy: Mapping[str, Lazy], path: Path) -> None:
        self.lazy, self.path = lazy, path

    def __getitem__(self, name: str) -> Tensor:
        return self.lazy[name].read()

    def __contains__(self, name: object) -> bool:
        return name in self.lazy  # a mapping's own way would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.lazy)

    def __len__(self) -> int:
        return len(self.lazy)

    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each."""
        return {name: one.dtype for name, one in self.lazy.items()}


def stored(held: StoredTensors) -> Tensors:
    """The tensors of files as they are."""
    return Tensors({name: Lazy(dtype, partial(held.__getitem__, name)) for name, dtype in held.dtypes().items()}, held.path)


# -- quantised ---------------------------------------------------------------------------------------------------------

READ = ("fp8", "mxfp4")
"""``quant_method`` of config.json that is read."""


@dataclass(frozen=True)
class Quantisation:
    """How the weights of a file are quantised. ``block``: rows and columns that share a number, for fp8."""

    method: str
    block: tuple[int, int] = (1, 32)


def quantisation_of(settings: Settings) -> Quantisation | None:
    """As ``quantization_config`` says it. Raises :class:`CheckpointError` for a method that is not read."""
    if "quantization_config" not in settings:
        return None
    config = settings.inner("quantization_config")
    method = config.take("quant_method", "unnamed", kind=str)
    if method not in READ:
        raise CheckpointError(f"{config.where}: the weights are quantised ({method}); read are {', '.join(READ)}")
    config.passed_over("modules_to_not_convert", "ignored_layers", "activation_scheme", "dequantize")  # the tensors tell
    if method == "mxfp4":
        return Quantisation(method)
    config.only("fmt", "e4m3")
    config.only("scale_fmt", "float", "ue8m0")  # how the numbers were chosen
    block = config.take("weight_block_size", kind=list)
    if len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise CheckpointError(f"{config.where}: weight_block_size is {block!r}, and should be two whole numbers")
    return Quantisation(method, (block[0], block[1]))


def made_whole(tensors: Tensors, how: Quantisation | None, asked: torch.dtype | None) -> tuple[Tensors, Notes]:
    """Without quantisation. ``asked``: None for the widest of two bytes and more that the others have.

    Raises :class:`CheckpointError` for a tensor without its scale; shapes that do not fit are found when one is read.
    """
    if how is None:
        return tensors, ()
    held = tensors.dtypes()
    others = [held[name] for name in held if held[name].is_floating_point and not name.endswith("_scale_inv")]
    dtype = asked or max((one for one in others if one.itemsize > 1), key=lambda one: one.itemsize, default=torch.bfloat16)
    found, n = _fp8(tensors, how.block, dtype) if how.method == "fp8" else _mxfp4(tensors, dtype)
    return found, (f"{n:,} tensors of {how.method} multiplied out to {str(dtype).removeprefix('torch.')}",)


def _fp8(tensors: Tensors, block: tuple[int, int], dtype: torch.dtype) -> tuple[Tensors, int]:
    """Weights of 8 bits with a number for each block of them, ``NAME_scale_inv``."""
    found, n = dict(tensors.lazy), 0
    for name, one in tensors.lazy.items():
        if one.dtype is not torch.float8_e4m3fn:
            continue
        scale = found.pop(f"{name}_scale_inv", None)
        if scale is None:
            raise CheckpointError(f"{tensors.path}: {name} is {one.dtype}, and {name}_scale_inv is missing")
        found[name] = Lazy(dtype, partial(_multiplied, f"{tensors.path}: {name}", one, scale, block, dtype))
        n += 1
    return Tensors(found, tensors.path), n


def _multiplied(where: str, weight: Lazy, scale: Lazy, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """In float32, as transformers does; blocks at the edges are what is left of them."""
    x, s = weight.read().float(), scale.read().float()
    grid = [-(-n // size) for n, size in zip(x.shape, block, strict=False)]
    if x.ndim != 2 or list(s.shape) != grid:
        raise CheckpointError(f"{where} is {tuple(x.shape)}, and its scales are {tuple(s.shape)}: not one a block of {block}")
    for dim, (n, size) in enumerate(zip(x.shape, block, strict=True)):
        s = s.repeat_interleave(size, dim).narrow(dim, 0, n)
    return (x * s).to(dtype)


def _mxfp4(tensors: Tensors, dtype: torch.dtype) -> tuple[Tensors, int]:
    """Experts of 4 bits in blocks of 32 with an exponent each, as gpt-oss has them: ``NAME_blocks`` and ``NAME_scales``."""
    found, n = dict(tensors.lazy), 0
    for name in tensors.lazy:
        if not name.endswith("_blocks"):
            continue
        whole = name.removesuffix("_blocks")
        blocks, scales = found.pop(name), found.pop(f"{whole}_scales", None)
        if scales is None:
            raise CheckpointError(f"{tensors.path}: {whole}_scales is missing, and {name} is there")
        found[whole] = Lazy(dtype, partial(_unpacked, f"{tensors.path}: {name}", blocks, scales, dtype))
        n += 1
    return Tensors(found, tensors.path), n


HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of 4 bits that are not below 0; those after them are the same below 0."""


def _unpacked(where: str, blocks: Lazy, scales: Lazy, dtype: torch.dtype) -> Tensor:
    """(e out n 16) bytes and (e out n) exponents as (e in out), exact in bfloat16 and wider."""
    packed, exponents = blocks.read(), scales.read()
    if packed.dtype is not torch.uint8 or exponents.dtype is not torch.uint8 or packed.shape[:-1] != exponents.shape:
        said = f"{tuple(packed.shape)} {packed.dtype}, and its scales are {tuple(exponents.shape)} {exponents.dtype}"
        raise CheckpointError(f"{where} is {said}")
    table = torch.tensor([*HALF, *(-x for x in HALF)], dtype=dtype)
    values = torch.stack([table[(packed & 15).int()], table[(packed >> 4).int()]], -1).flatten(-2)
    whole = torch.ldexp(values, exponents.int().unsqueeze(-1) - 127).flatten(-2)
    return whole.transpose(-1, -2).contiguous().to(dtype)
