"""Published checkpoints in and out: the same numbers under other names."""

from hybridtf.interop.exporting import export_checkpoint
from hybridtf.interop.families import FAMILIES
from hybridtf.interop.family import Family
from hybridtf.interop.importing import Imported, import_checkpoint

__all__ = ["FAMILIES", "Family", "Imported", "export_checkpoint", "import_checkpoint"]
