"""The families that are read and written, one file for those that share their parts."""

from hybridtf.interop.families import decoders, griffin, hybrids, hybrids_mamba2, lfm, scans, zamba
from hybridtf.interop.family import Family

FAMILIES: dict[str, Family] = {
    name: family
    for module in (decoders, scans, hybrids, hybrids_mamba2, zamba, griffin, lfm)
    for family in module.FAMILIES
    for name in (family.model_type, *family.aliases)
}
"""By ``model_type`` of config.json."""
