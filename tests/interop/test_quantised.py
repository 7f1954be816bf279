"""Quantised checkpoints: multiplied out on import, as transformers does, or refused by the name of their method."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("transformers", reason="the oracles need transformers")
from hybridtf.core import CheckpointError
from hybridtf.interop import import_checkpoint
from hybridtf.models.weights import canonical_tensors
from tests.interop.oracles import oracle

pytestmark = pytest.mark.filterwarnings("ignore")


def quantised(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """In blocks, by hand: the weight of 8 bits and a number for each block."""
    rows, columns = (range(0, n, size) for n, size in zip(weight.shape, block, strict=True))
    scales, packed = torch.empty(len(rows), len(columns)), torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            at = (slice(row, row + block[0]), slice(column, column + block[1]))
            scales[i, j] = weight[at].abs().max() / 448
            packed[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
    return packed, scales


def whole(packed: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    return torch.stack([
        torch.stack([packed[i, j].float() * scales[i // block[0], j // block[1]] for j in range(packed.shape[1])])
        for i in range(packed.shape[0])
    ])


def copy(name: str, folder: Path, tensors: dict[str, Tensor], **settings: Any) -> Path:
    shutil.copytree(oracle(name).folder, folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def fp8(block: tuple[int, int], **more: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block), **more}


@pytest.mark.parametrize("block", [(10, 7), (128, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_is_the_checkpoint_multiplied_out(tmp_path: Path, block: tuple[int, int], dtype: torch.dtype) -> None:
    plain = {name: x.to(dtype) for name, x in load_file(oracle("deepseek_v3").folder / "model.safetensors").items()}
    packed = dict(plain)
    for name in [name for name in plain if name.endswith("_proj.weight") or "_mqa" in name]:
        packed[name], packed[f"{name}_scale_inv"] = quantised(plain[name].float(), block)
        plain[name] = whole(packed[name], packed[f"{name}_scale_inv"], block).to(dtype)
    want = import_checkpoint(copy("deepseek_v3", tmp_path / "plain", plain))
    config = fp8(block, scale_fmt="ue8m0", modules_to_not_convert=["lm_head"])
    found = import_checkpoint(copy("deepseek_v3", tmp_path / "packed", packed, quantization_config=config))
    assert found.dtype == want.dtype == dtype
    (note,) = found.notes
    assert note == f"{len(packed) - len(plain)} tensors of fp8 multiplied out to {str(dtype).removeprefix('torch.')}"
    for name, value in canonical_tensors(want.model).items():
        assert torch.equal(value, canonical_tensors(found.model)[name]), name


def test_as_transformers_multiplies_out(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    plain = load_file(oracle("llama").folder / "model.safetensors")
    name = "model.layers.1.mlp.gate_proj.weight"
    packed, scales = quantised(plain[name], (4, 8))
    config = fp8((4, 8))
    tensors = {**plain, name: packed, f"{name}_scale_inv": scales}
    found = import_checkpoint(copy("llama", tmp_path / "packed", tensors, quantization_config=config), dtype=torch.bfloat16)
    theirs = Fp8Dequantize(None)._dequantize_one(packed, scales, torch.bfloat16)
    assert torch.equal(canonical_tensors(found.model)["stack.layers.1.channel_mixer.gate_proj.weight"], theirs)


def test_scales_of_one_byte(tmp_path: Path) -> None:
    plain = load_file(oracle("llama").folder / "model.safetensors")
    name = "model.layers.1.mlp.gate_proj.weight"
    packed, scales = quantised(plain[name], (16, 16))
    byte = scales.log2().ceil().exp2().to(torch.float8_e8m0fnu)
    tensors = {**plain, name: packed, f"{name}_scale_inv": byte}
    found = import_checkpoint(copy("llama", tmp_path / "packed", tensors, quantization_config=fp8((16, 16))))
    want = whole(packed, byte.float(), (16, 16))
    assert torch.equal(canonical_tensors(found.model)["stack.layers.1.channel_mixer.gate_proj.weight"], want)


def test_mxfp4_of_gpt_oss(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    plain = {name: x.bfloat16() for name, x in load_file(oracle("gpt_oss").folder / "model.safetensors").items()}
    packed, generator = dict(plain), torch.Generator().manual_seed(0)
    for name in [name for name in plain if name.endswith("experts.gate_up_proj")]:
        n, d_model, width = plain[name].shape
        assert d_model % 32 == 0
        blocks = torch.randint(0, 256, (n, width, d_model // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(110, 130, (n, width, d_model // 32), dtype=torch.uint8, generator=generator)
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).contiguous()
    want = import_checkpoint(copy("gpt_oss", tmp_path / "plain", plain))
    found = import_checkpoint(copy("gpt_oss", tmp_path / "packed", packed, quantization_config={"quant_method": "mxfp4"}))
    assert "tensors of mxfp4 multiplied out to bfloat16" in found.notes[0]
    for name, value in canonical_tensors(want.model).items():
        assert torch.equal(value, canonical_tensors(found.model)[name]), name


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{one: ({"quant_method": one}, rf"quantised \({one}\); read are fp8, mxfp4") for one in ("gptq", "awq", "hqq")},
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantised \\(bitsandbytes\\)"),
    "compressed-tensors": ({"quant_method": "compressed-tensors"}, "quantised \\(compressed-tensors\\)"),
    "no block": ({"quant_method": "fp8"}, "weight_block_size is missing"),
    "odd block": (fp8((4, 4)) | {"weight_block_size": [4]}, r"weight_block_size is \[4\], and should be two whole numbers"),
    "format": (fp8((4, 4), fmt="e5m2"), "fmt is 'e5m2'"),
    "more": (fp8((4, 4), expert_dtype="fp4"), "quantization_config: expert_dtype is not known"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_methods_are_refused_by_name(tmp_path: Path, case: str) -> None:
    config, why = REFUSED[case]
    tensors = load_file(oracle("llama").folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=why):
        import_checkpoint(copy("llama", tmp_path / "packed", tensors, quantization_config=config))


def test_scales_that_do_not_fit(tmp_path: Path) -> None:
    plain = load_file(oracle("llama").folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    packed, scales = quantised(plain[name], (16, 16))
    for i, (change, why) in enumerate((
        ({name: packed}, f"{name} is torch.float8_e4m3fn, and {name}_scale_inv is missing"),
        ({name: packed, f"{name}_scale_inv": scales[:1]}, "not one a block of"),
        ({f"{name}_scale_inv": scales}, f"{name}_scale_inv is in the files and in no layer"),
    )):
        with pytest.raises(CheckpointError, match=why):
            import_checkpoint(copy("llama", tmp_path / str(i), plain | change, quantization_config=fp8((16, 16))))
