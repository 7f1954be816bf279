"""The learning rate of every step, as a function of the step alone.

Cosine: Loshchilov and Hutter 2016 (arXiv 1608.03983), one fall without restarts. WSD (warm-up, stable, decay): Hu et
al. 2024 (arXiv 2404.06395), with a linear fall.
"""

from __future__ import annotations

import math

from hybridtf.core import ConfigError
from hybridtf.train.config import TrainConfig


def warmup_steps(config: TrainConfig, total: int) -> int:
    """Steps of the linear warm-up in a run of ``total`` steps."""
    steps = round(config.warmup * total) if config.warmup < 1 else int(config.warmup)
    if steps >= total and steps > 0 and config.warmup >= 1:
        raise ConfigError(f"train.warmup = {steps} steps leave nothing of a run of {total} steps")
    return steps


def lr_factor(config: TrainConfig, step: int, total: int) -> float:
    """What ``lr`` is multiplied with in step ``step`` (from 0) of ``total``.

    The warm-up rises from 1/n to 1 in its n steps. The fall starts from 1 and would reach ``min_lr_fraction`` at step
    ``total``, one after the last.
    """
    warm = warmup_steps(config, total)
    if step < warm:
        return (step + 1) / warm
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "cosine":
        share = (step - warm) / max(total - warm, 1)
        fallen = 0.5 * (1 - math.cos(math.pi * min(share, 1.0)))
    else:
        decay = min(max(round(config.decay_fraction * total), 1), max(total - warm, 1))
        fallen = min(max(step - (total - decay), 0) / decay, 1.0)
    return 1 - (1 - config.min_lr_fraction) * fallen
