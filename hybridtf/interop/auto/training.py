"""What a trainer of transformers must be told of models of ours."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from hybridtf.train.step import after_step


class AfterStepCallback(TrainerCallback):  # type: ignore[misc]
    """Tells the model that an optimizer step is done: routers with a selection bias (``bias_step``) move it then.

    ``Trainer(model=..., callbacks=[AfterStepCallback()])``
    """

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Called by the trainer, with ``model``."""
        after_step(more["model"])
