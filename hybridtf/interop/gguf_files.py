"""GGUF files, through the reader of transformers: what that one passes over in silence is refused here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridtf.core import CheckpointError, HybridTFError
from hybridtf.interop.settings import Settings
from hybridtf.interop.tensors import Lazy, Notes, Tensors

SUFFIX = ".gguf"
READ = ("llama", "qwen2", "qwen3")
"""Architectures whose files are read: those where the tests hold scores against transformers."""

WIDTHS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
"""Keys that have to be the width of a head, where the reader passes over them."""


def read_gguf(file: Path) -> tuple[Settings, Tensors, Notes]:
    """Settings and tensors of a file in the published names; quantised tensors multiplied out to float32, all in memory.

    Raises :class:`CheckpointError` for a file that is none, another architecture, and keys and tensors that transformers'
    reader leaves unread.
    """
    try:
        import gguf  # type: ignore[import-not-found, unused-ignore]
        import transformers.integrations.ggml as keys
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM
        from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map, load_gguf_checkpoint
    except ImportError as error:
        raise HybridTFError(f"{file}: reading GGUF needs gguf and transformers: pip install 'hybridtf[gguf]'") from error
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file")
    try:
        reader = gguf.GGUFReader(str(file))
        name = str(reader.fields["general.architecture"].contents())
        if name not in READ:
            raise CheckpointError(f"{file}: GGUF files of {name!r} are not read; read are {', '.join(READ)}")
        values = load_gguf_checkpoint(str(file))["config"]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise CheckpointError(f"{file}: not a readable GGUF file ({error})") from error
    if values["model_type"] != name:
        raise CheckpointError(f"{file}: is of {name!r}, and transformers reads it as {values['model_type']!r}")
    values.pop("_model_name_or_path", None)
    config = CONFIG_MAPPING[name].from_dict(dict(values))
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    _check_keys(file, reader, name, keys.GGUF_CONFIG_MAPPING[name], width)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    held = {one.name: one.tensor_type.name for one in reader.tensors}
    left = sorted(set(held) - set(get_gguf_hf_weights_map(model, _AsItIs())))
    if left:
        raise CheckpointError(f"{file}: {left[0]} is in the file, and transformers' reader leaves it unread")
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    return Settings(values, str(file)), in_memory(tensors, file), _notes(held.values())


def _check_keys(file: Path, reader: Any, name: str, known: dict[str, str | None], width: int) -> None:
    """Raises for keys of the architecture that the reader does not ask for, but where they say what is so without them."""
    for key, field in reader.fields.items():
        below = key.removeprefix(f"{name}.")
        if below == key or known.get(below) is not None:
            continue
        if below not in WIDTHS:
            raise CheckpointError(f"{file}: {key} is {field.contents()!r}, and transformers' reader passes it over")
        if field.contents() != width:
            raise CheckpointError(f"{file}: {key} is {field.contents()!r}, where transformers takes heads to be {width} wide")


class _AsItIs:
    """Names as they are, for architectures without experts."""

    def preprocess_name(self, hf_name: str) -> str:
        return hf_name

    def perform_fallback_tensor_mapping(self, *_: Any) -> None:
        """There is none."""


def in_memory(tensors: dict[str, Tensor], path: Path) -> Tensors:
    """Tensors that are read already."""
    return Tensors({name: Lazy(x.dtype, partial(tensors.__getitem__, name)) for name, x in tensors.items()}, path)


def _notes(kinds: Iterable[str]) -> Notes:
    count = Counter(kind for kind in kinds if kind != "F32")
    if not count:
        return ()
    said = ", ".join(f"{n:,} tensors of {kind}" for kind, n in count.most_common())
    return (f"{said} multiplied out to float32",)
