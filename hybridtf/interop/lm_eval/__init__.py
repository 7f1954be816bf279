"""Models of hybridtf in lm-evaluation-harness, as ``--model hybridtf``.

Nothing here imports lm_eval before the class itself is asked for. ``pyproject.toml`` names the class under the entry point
group ``lm_eval.models``; a release that does not look there yet gets it from :func:`register`.
"""

from hybridtf.interop.lm_eval.program import NAME, register, run

__all__ = ["NAME", "register", "run"]
