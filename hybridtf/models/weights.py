"""Weights on disk: safetensors, each tensor once under its canonical name.

What fits ``max_shard_bytes`` is the file ``NAME.safetensors``. More is ``NAME-00001-of-00003.safetensors`` and so on with
``NAME.safetensors.index.json``, which says where each tensor is: the layout that huggingface_hub and transformers read
and write. Both forms are read under the path ``NAME.safetensors``. One write replaces another as a whole: the index is
put in place after the files it names, and a file that an index in place names is never written over.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hybridtf.core import CheckpointError, known_names
from hybridtf.core.files import atomic_file

MAX_SHARD_BYTES = 5_000_000_000
"""Tensors that need more than this are written as several files."""

STORED = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}
"""Dtypes as safetensors writes them."""


def canonical_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by canonical name; a tied or shared tensor appears once."""
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    persistent = set(model.state_dict(keep_vars=True))
    for name, buffer in model.named_buffers():
        if name in persistent:
            tensors[name] = buffer
    return tensors


# -- writing -----------------------------------------------------------------------------------------------------------


def save_weights(model: nn.Module, path: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write the model's tensors, see :func:`write_tensors`."""
    write_tensors(canonical_tensors(model), path, max_shard_bytes=max_shard_bytes)


def write_tensors(tensors: Mapping[str, Tensor], path: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write ``tensors`` as ``path``, one file or several; a kill at any moment leaves what was there or what is new.

    Raises :class:`CheckpointError` where the disk refuses.
    """
    shards = _shards(tensors, max_shard_bytes)
    if len(shards) == 1:
        _write_file(shards[0], path)
        # An index is read rather than a file of that name: from here on the new file is what is read.
        index_of(path).unlink(missing_ok=True)
        _remove_shards(path, keep=())
        return
    names = _shard_names(path, len(shards))
    for name, shard in zip(names, shards, strict=True):
        _write_file(shard, path.with_name(name))
    index = {
        "metadata": {"total_size": total_bytes(tensors)},
        "weight_map": {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard},
    }
    with atomic_file(index_of(path)) as temporary:
        temporary.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    path.unlink(missing_ok=True)
    _remove_shards(path, keep=names)


def index_of(path: Path) -> Path:
    """The index of tensors that are ``path`` but lie in several files."""
    return path.with_name(f"{path.name}.index.json")


def is_stored(path: Path) -> bool:
    """Whether tensors lie there, in one file or in several."""
    return path.is_file() or index_of(path).is_file()


def missing_files(path: Path) -> list[Path]:
    """The files that reading ``path`` would need and that are not there."""
    index = index_of(path)
    if index.is_file():
        return [file for file in sorted({path.with_name(name) for name in _read_index(index).values()}) if not file.is_file()]
    return [] if path.is_file() else [path]


def total_bytes(tensors: Mapping[str, Tensor]) -> int:
    """What the tensors need in files."""
    return sum(map(_n_bytes, tensors.values()))


def _n_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _shards(tensors: Mapping[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    """In order, each as full as it can be; a tensor that is larger than ``max_bytes`` has a file of its own."""
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        size = _n_bytes(tensor)
        if shards[-1] and used + size > max_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += size
    return shards


def _shard_names(path: Path, n: int) -> list[str]:
    """The field's names, with a number more where those are taken by what is there already."""
    generation = 1
    while True:
        tag = "" if generation == 1 else f"-{generation}"
        names = [f"{path.stem}{tag}-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
        if not any(path.with_name(name).exists() for name in names):
            return names
        generation += 1


def _remove_shards(path: Path, keep: tuple[str, ...] | list[str]) -> None:
    """Remove the files of ``path`` that no index names any more, those of killed writes included."""
    shard = re.compile(rf"{re.escape(path.stem)}(-\d+)?-\d{{5}}-of-\d{{5}}\.safetensors")
    for file in path.parent.iterdir():
        if shard.fullmatch(file.name) and file.name not in keep:
            file.unlink(missing_ok=True)


def _write_file(tensors: Mapping[str, Tensor], path: Path) -> None:
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_file(path) as temporary:
        try:
            # One key alone: their order in the file is not fixed, and equal tensors are to give equal bytes.
            save_file(plain, temporary, metadata={"format": "pt"})
        except SafetensorError as error:
            # Its only way to say that the disk is full; atomic_file turns the OSError into ours.
            raise OSError(str(error)) from error


# -- reading -----------------------------------------------------------------------------------------------------------


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a path, each read from its file when it is asked for and not kept.

    Raises :class:`CheckpointError` for files that are missing or corrupt, and an index that does not tell what they hold.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        index = index_of(path)
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        if index.is_file():
            self._where = _read_index(index)
            for name in sorted(set(self._where.values())):
                self._files[name] = _open(path.with_name(name), index)
            _check_index(index, self._where, {name: set(file.keys()) for name, file in self._files.items()})
        else:
            self._files[path.name] = _open(path, None)
            self._where = dict.fromkeys(self._files[path.name].keys(), path.name)

    def __getitem__(self, name: str) -> Tensor:
        file = self._where[name]
        try:
            tensor: Tensor = self._files[file].get_tensor(name)
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{self.path.with_name(file)}: {name} cannot be read ({error})") from error
        return tensor

    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each, from the files' headers alone."""
        found = {}
        for name, file in self._where.items():
            said = self._files[file].get_slice(name).get_dtype()
            if said not in STORED:
                raise CheckpointError(f"{self.path.with_name(file)}: {name} is {said}, which is not read")
            found[name] = STORED[said]
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def read_weights(path: Path) -> StoredTensors:
    """The tensors of ``path``, in one file or several; see :class:`StoredTensors`."""
    return StoredTensors(path)


def _open(path: Path, index: Path | None) -> Any:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such weights file" + (f", which {index.name} names" if index is not None else ""))
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from error


def _read_index(index: Path) -> dict[str, str]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for name, n in Counter(name for name, _ in pairs).items():
            if n > 1:
                raise CheckpointError(f"{index}: names {name} twice")
        return dict(pairs)

    try:
        found = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{index}: not readable as JSON ({error})") from error
    where = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(where, dict) or not where or not all(isinstance(name, str) for name in where.values()):
        raise CheckpointError(f"{index}: is no index of weights; it needs a table weight_map from tensors to files")
    for name in where.values():
        if Path(name).name != name:
            raise CheckpointError(f"{index}: names the file {name!r}; files of an index lie beside it")
    return where


def _check_index(index: Path, where: Mapping[str, str], held: Mapping[str, set[str]]) -> None:
    for file, names in held.items():
        for name in sorted(names):
            if name not in where:
                raise CheckpointError(f"{index}: does not name {name}, which is in {file}")
            if where[name] != file:
                raise CheckpointError(f"{index}: {name} is in {file} and, by the index, in {where[name]}")
    for name, file in where.items():
        if name not in held[file]:
            raise CheckpointError(f"{index}: {name} is not in {file}")


def load_weights(model: nn.Module, path: Path) -> None:
    """Fill the model from a file. Every tensor must fit: none missing, none left over, shapes equal; nothing is re-drawn.

    Raises :class:`CheckpointError` naming what does not fit.
    """
    assign_weights(model, read_weights(path), where=str(path))


def assign_weights(model: nn.Module, tensors: Mapping[str, Tensor], *, where: str) -> None:
    """As :func:`load_weights`, from tensors in memory."""
    own = canonical_tensors(model)
    shapes = {name: (value.shape, value.dtype) for name, value in tensors.items()}
    faults = []
    for name in sorted(own.keys() - tensors.keys()):
        faults.append(f"{name} is missing")
    for name in sorted(tensors.keys() - own.keys()):
        alike = [n for n in own if n.split(".")[-1] == name.split(".")[-1]]
        faults.append(f"{name} is not in the model. {known_names(name, alike)}")
    for name in sorted(own.keys() & tensors.keys()):
        shape, dtype = shapes[name]
        if own[name].shape != shape:
            faults.append(f"{name} has shape {tuple(shape)}, the model's is {tuple(own[name].shape)}")
        elif own[name].dtype != dtype:
            faults.append(f"{name} is {dtype}, the model's is {own[name].dtype}: build the model in that dtype")
    if faults:
        more = f" (and {len(faults) - 5} more)" if len(faults) > 5 else ""
        raise CheckpointError(f"{where}: does not fit the model: {'; '.join(faults[:5])}{more}")
    with torch.no_grad():
        for name, value in tensors.items():
            own[name].copy_(value)
