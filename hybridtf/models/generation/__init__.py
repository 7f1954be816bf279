"""Generation: prompts of any lengths in, tokens out, through the state that every mixer carries.

``generate`` and ``stream`` draw or take the likeliest token; ``beam_search`` keeps several continuations of each prompt;
``speculate`` lets a smaller model draft; ``read_prompt`` reads a prompt once for many continuations. A batch gives each row
exactly what its prompt gives alone.
"""

from hybridtf.models.generation.beams import Beam, BeamConfig, beam_search
from hybridtf.models.generation.config import GenerationConfig
from hybridtf.models.generation.prompts import Prefix, prefill, read_prompt
from hybridtf.models.generation.sampling import choose, distribution
from hybridtf.models.generation.speculative import Speculated, Speculation, speculate
from hybridtf.models.generation.stream import GeneratedToken, generate, stream

__all__ = [
    "Beam", "BeamConfig", "GeneratedToken", "GenerationConfig", "Prefix", "Speculated", "Speculation", "beam_search",
    "choose", "distribution", "generate", "prefill", "read_prompt", "speculate", "stream",
]
