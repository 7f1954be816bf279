"""Making ``AutoConfig`` and the auto models know ``model_type = "hybridtf"``."""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from hybridtf.interop.auto.config import HybridTFConfig
from hybridtf.interop.auto.modeling import HybridTFForCausalLM, HybridTFForSequenceClassification


def register() -> None:
    """Tell transformers of the classes; once or often is the same."""
    AutoConfig.register(HybridTFConfig.model_type, HybridTFConfig, exist_ok=True)
    AutoModelForCausalLM.register(HybridTFConfig, HybridTFForCausalLM, exist_ok=True)
    AutoModelForSequenceClassification.register(HybridTFConfig, HybridTFForSequenceClassification, exist_ok=True)
