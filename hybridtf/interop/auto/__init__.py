"""Models of hybridtf as classes of transformers: ``from_pretrained``, ``generate``, ``Trainer``, adapters.

Importing this module registers them (:func:`register`); ``hybridtf.interop`` alone imports no transformers.
"""

from hybridtf.interop.auto.cache import HybridTFCache
from hybridtf.interop.auto.config import HybridTFConfig
from hybridtf.interop.auto.modeling import HybridTFForCausalLM, HybridTFForSequenceClassification, HybridTFPreTrainedModel
from hybridtf.interop.auto.registering import register
from hybridtf.interop.auto.training import AfterStepCallback

__all__ = [
    "AfterStepCallback", "HybridTFCache", "HybridTFConfig", "HybridTFForCausalLM", "HybridTFForSequenceClassification",
    "HybridTFPreTrainedModel", "register",
]

register()
