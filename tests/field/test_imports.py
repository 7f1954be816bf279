"""A machine without GPU, CUDA libraries, Triton or kernel packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocked())
import torch
from hybridtf.core import BuildContext, active, kernels_used
from hybridtf.models import LanguageModelConfig

registry = active()["mixers"]
for name, made in registry.configs().items():
    if made.looks_ahead:
        continue
    meta = made.tiny().build(BuildContext(d_model=16, device=torch.device("meta")))
    if meta.reads or meta.needs_context:
        continue
    blocks = {"x": {"mixer": made.tiny(), "channel_mixer": {"type": "swiglu", "d_ff": 8}}}
    net = LanguageModelConfig(vocab_size=7, d_model=16, pattern="x x", blocks=blocks).build()
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    loss = net.loss(ids[:, :4], ids[:, 1:])
    (loss.mean() + sum(total for total, _ in loss.losses.values())).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters() if p.requires_grad)
    with torch.no_grad():
        state = net(ids, state=net.init_state(1)).state
        assert net(ids[:, :1], state=state).logits.isfinite().all()
    print(name, kernels_used(net))
assert not set(sys.argv[1:]) & set(sys.modules)
"""
BLOCKED = ("triton", "flash_attn", "causal_conv1d", "mamba_ssm", "fla", "transformers")


def test_every_layer_builds_trains_and_decodes_without_kernel_packages():
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-c", PROGRAM, *BLOCKED]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert {line.split()[0] for line in lines} >= {"attention", "mamba2", "griffin_recurrent"}
    said = next(line for line in lines if line.startswith("mamba2 "))
    assert "'chunked'" in said  # what each op ran
