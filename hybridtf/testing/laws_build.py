"""How a component is made and copied: start values, the meta device, gradients, files, copies."""

from __future__ import annotations

import copy
import pickle
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from hybridtf.core import StateLeaf, init_parameters, leaves, param_specs
from hybridtf.testing.compare import close, gradients, storages
from hybridtf.testing.errors import ContractError, NotApplicableError
from hybridtf.testing.laws_time import total_loss, weight_like
from hybridtf.testing.subject import Inputs, Outcome, Subject


def check_gradients(subject: Subject) -> None:
    """Every parameter that is learned by gradient gets one that is finite and not zero everywhere."""
    module = subject.build()
    params = {name: param for name, param in module.named_parameters() if param.requires_grad}
    if not params:
        raise NotApplicableError("has no parameters")
    inputs = subject.inputs(module, 3, 13)
    out = subject.call(module, inputs)
    found = gradients(total_loss(out, weight_like(out.y), with_state=False), list(params.values()))
    bad = [name for name, grad in zip(params, found, strict=True) if not bool(grad.isfinite().all())]
    if bad:
        raise ContractError(f"parameters with a gradient that is not finite: {bad}")
    without = [name for name, grad in zip(params, found, strict=True) if params[name].numel() and not bool(grad.any())]
    if without:
        raise ContractError(f"parameters without gradient: {without}; use them in forward, or do not make them")


def _values(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, those that are not saved included."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def check_init(subject: Subject) -> None:
    """Start values come from (seed, name) alone, and are the same in every dtype."""
    one = _values(subject.build_plain(param_dtype=torch.float64))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4711)
        two = _values(subject.build_plain(param_dtype=torch.float64))
    _equal(one, two, "two builds with the same seed differ (a start value was drawn from torch's global generator)")
    low = _values(subject.build_plain(param_dtype=torch.bfloat16))
    params = {name for name, _ in subject.build_plain().named_parameters()}
    for name in params:
        if not torch.equal(one[name].to(torch.bfloat16), low[name]):
            raise ContractError(f"{name} starts with other values in bfloat16 than in float64: use param_specs()")
    other = _values(subject.build_plain(seed=subject.seed + 1))
    specs = param_specs(subject.build_plain())
    varied = [name for name in params if one[name].numel() > 1 and float(one[name].detach().std()) > 0]
    drawn = [name for name in varied if specs[name].drawn]
    unlike = [name for name in params if not specs[name].drawn and not torch.equal(one[name], other[name])]
    if unlike:
        raise ContractError(f"start values depend on the seed although declared as not drawn: {sorted(unlike)}")
    same = [name for name in drawn if torch.equal(one[name], other[name])]
    if same:
        raise ContractError(
            f"start values do not depend on the seed: {sorted(same)}; draw from the generator given, or declare drawn=False"
        )
    pairs = [(a, b) for a in drawn for b in drawn if a < b and one[a].shape == one[b].shape]
    twins = [(a, b) for a, b in pairs if torch.equal(one[a], one[b])]
    if twins:
        raise ContractError(f"two parameters start with the same values: {twins[0]}; draw from the generator given")


def _equal(one: dict[str, Tensor], two: dict[str, Tensor], what: str) -> None:
    if one.keys() != two.keys():
        raise ContractError(f"{what}: names {sorted(one.keys() ^ two.keys())}")
    for name in one:
        if one[name].shape != two[name].shape or not torch.equal(one[name].isnan(), two[name].isnan()):
            raise ContractError(f"{what}: {name}")
        if not torch.equal(one[name].nan_to_num(), two[name].nan_to_num()):
            raise ContractError(f"{what}: {name}")


def check_meta(subject: Subject) -> None:
    """Built on the meta device, given memory and filled, it equals a normal build, buffers included."""
    module = subject.build_plain(device=torch.device("meta"))
    real = [name for name, value in _values(module).items() if not value.is_meta]
    if real:
        raise ContractError(f"not on the device asked for: {real}; make tensors with **ctx.factory")
    module = module.to_empty(device="cpu")
    fill: Any = getattr(module, "reset_parameters", None) if subject.kind == "models" else None
    if fill is not None:
        fill()
    else:
        init_parameters(module, subject.seed)
    _equal(
        _values(module), _values(subject.build_plain()),
        "built on meta, then to_empty and init_parameters, differs from a normal build (compute buffers in forward)",
    )


def _used(subject: Subject, *, decode: bool) -> tuple[nn.Module, Inputs, Tensor]:
    """A component that has run, with its input and output."""
    module = subject.build()
    inputs = subject.inputs(module, 2, 6)
    y = subject.call(module, inputs).y.detach()
    if decode:
        _decode(subject, module, inputs)
    return module, inputs, y


def _decode(subject: Subject, module: nn.Module, inputs: Inputs) -> Outcome:
    with torch.no_grad():
        out = subject.call(module, inputs, state=subject.init_state(module, 2, 16))
        return subject.call(module, inputs.later().columns(slice(0, 1)), state=out.state)


def check_save_load(subject: Subject) -> None:
    """Weights go through safetensors and come back into a build with another seed."""
    module, inputs, y = _used(subject, decode=True)
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "weights.safetensors")
        save_model(module, file)
        other = subject.build(seed=subject.seed + 1)
        missing, unexpected = load_model(other, file)
    if missing or unexpected:
        raise ContractError(f"state_dict does not come back: missing {sorted(missing)}, too many {sorted(unexpected)}")
    close(subject.call(other, inputs).y, y, tol=0.0, what="after save and load")


def check_copies(subject: Subject) -> None:
    """After a forward and after decoding the module holds nothing new, and can be deep-copied and pickled."""
    for decode in (False, True) if leaves(_probe_state(subject)) else (False,):
        module, inputs, y = _used(subject, decode=decode)
        _holds_nothing(module)
        for how, other in (("copy.deepcopy", copy.deepcopy(module)), ("pickle", _pickled(module))):
            close(subject.call(other, inputs).y, y, tol=0.0, what=f"after {how}")
            shared = storages(list(_values(module).values())) & storages(list(_values(other).values()))
            if shared:
                raise ContractError(f"after {how} the copy shares memory with the original")
            if decode:
                want = _decode(subject, module, inputs).y
                close(_decode(subject, other, inputs).y, want, tol=0.0, what=f"decode after {how}")


def _probe_state(subject: Subject) -> Any:
    return subject.init_state(subject.build_plain(), 1)


def _holds_nothing(module: nn.Module) -> None:
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if isinstance(value, Tensor | StateLeaf):
                raise ContractError(
                    f"after a call, {name or 'the module'} holds a {type(value).__name__} in .{key}: nothing hangs on "
                    "modules; carry it in the state or register it as a buffer"
                )


def _pickled(module: nn.Module) -> nn.Module:
    try:
        return pickle.loads(pickle.dumps(module))  # type: ignore[no-any-return]
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ContractError(f"cannot be pickled: {error}; use functions of a module's top level, no lambda") from error
