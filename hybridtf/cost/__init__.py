"""What a model will need, from what was built: parameters, operations, bytes and times before anything runs."""

from hybridtf.cost.flops import count_flops
from hybridtf.cost.footprint import Footprint, Predictor, predict_bytes
from hybridtf.cost.parameters import parameter_counts
from hybridtf.cost.states import STATE_KINDS, state_size

__all__ = ["STATE_KINDS", "Footprint", "Predictor", "count_flops", "parameter_counts", "predict_bytes", "state_size"]
