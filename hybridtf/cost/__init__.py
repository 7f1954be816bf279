"""What a model will need, from what was built: parameters, operations, bytes and times before anything runs."""

from hybridtf.cost.devices import DEVICES, Device, device_named
from hybridtf.cost.flops import CountWork, Work, count_flops
from hybridtf.cost.footprint import Footprint, Predictor, predict_bytes
from hybridtf.cost.parameters import parameter_counts
from hybridtf.cost.plan import make_plan
from hybridtf.cost.sibling import attention_sibling
from hybridtf.cost.states import STATE_KINDS, state_size

__all__ = [
    "DEVICES", "STATE_KINDS", "CountWork", "Device", "Footprint", "Predictor", "Work", "attention_sibling", "count_flops",
    "device_named", "make_plan", "parameter_counts", "predict_bytes", "state_size",
]
