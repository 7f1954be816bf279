"""The families that are read and written, one file for those that share their parts."""

from hybridtf.interop.families import afmoe, decoders, gemma, gpt_oss, hybrids, llama4, scans, windows
from hybridtf.interop.family import Family

FAMILIES: dict[str, Family] = {
    name: family
    for module in (decoders, scans, hybrids, gemma, gpt_oss, windows, llama4, afmoe)
    for family in module.FAMILIES
    for name in (family.model_type, *family.aliases)
}
"""By ``model_type`` of config.json."""
