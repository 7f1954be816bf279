"""The contract kit: checks that any component keeps the laws of its contract.

    from hybridtf.testing import check_mixer
    check_mixer(MyMixerConfig.tiny())

``run_checks`` gives results instead of an exception; ``hybridtf.testing.doubles`` holds small exact components.
"""

from hybridtf.testing.errors import ContractError, NotApplicableError
from hybridtf.testing.facts import MixerFacts, mixer_facts
from hybridtf.testing.laws_config import check_config, option_variants, preset_config
from hybridtf.testing.laws_kernel import check_kernel
from hybridtf.testing.run import (
    LAW_CHECKS,
    CheckResult,
    check_block,
    check_channel_mixer,
    check_head,
    check_mixer,
    check_model,
    check_norm,
    check_position,
    check_stem,
    check_task,
    laws_for,
    run_checks,
    run_law,
)
from hybridtf.testing.subject import Subject

__all__ = [
    "LAW_CHECKS", "CheckResult", "ContractError", "MixerFacts", "NotApplicableError", "Subject", "check_block",
    "check_channel_mixer", "check_config", "check_head", "check_kernel", "check_mixer", "check_model", "check_norm",
    "check_position", "check_stem", "check_task", "laws_for", "mixer_facts", "option_variants", "preset_config", "run_checks",
    "run_law",
]
