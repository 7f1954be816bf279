"""The families that are read and written, one file for those that share their parts."""

from hybridtf.interop.families import decoders, delta, glm_hybrids, hybrids, lightning, qwen_hybrids, scans
from hybridtf.interop.family import Family

FAMILIES: dict[str, Family] = {
    name: family
    for module in (decoders, scans, hybrids, delta, glm_hybrids, lightning, qwen_hybrids)
    for family in module.FAMILIES
    for name in (family.model_type, *family.aliases)
}
"""By ``model_type`` of config.json."""
