"""Tasks: data to train on, the measure it is judged by, and what trivial models reach."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtf.core import ComponentConfig, Preset
from hybridtf.hookspecs import hookimpl
from hybridtf.tasks import (
    arithmetic,
    common_words,
    compression,
    copying,
    frequent_words,
    fuzzy_recall,
    in_context_recall,
    induction_heads,
    listops,
    memorization,
    mqar,
    needles,
    needles_text,
    phonebook,
    selective_copying,
    variable_tracking,
    variable_tracking_text,
    word_counts_text,
    word_problem,
)
from hybridtf.tasks.arithmetic import ModularArithmeticConfig
from hybridtf.tasks.base import IGNORE, NO_EVIDENCE, Batch, Stream, Task, TaskSplit, Totals
from hybridtf.tasks.common_words import CommonWordsConfig
from hybridtf.tasks.compression import CompressionConfig
from hybridtf.tasks.copying import CopyingConfig
from hybridtf.tasks.frequent_words import FrequentWordsConfig
from hybridtf.tasks.fuzzy_recall import FuzzyRecallConfig
from hybridtf.tasks.in_context_recall import InContextRecallConfig
from hybridtf.tasks.induction_heads import InductionHeadsConfig
from hybridtf.tasks.listops import ListOpsConfig
from hybridtf.tasks.memorization import MemorizationConfig
from hybridtf.tasks.mqar import MQARConfig
from hybridtf.tasks.needles import NeedlesConfig
from hybridtf.tasks.needles_text import NeedlesTextConfig
from hybridtf.tasks.phonebook import PhonebookConfig
from hybridtf.tasks.selective_copying import SelectiveCopyingConfig
from hybridtf.tasks.sweeps import MAD_TASKS, Setting, mad_sweep, state_tracking_sweep, zoology_sweep
from hybridtf.tasks.synthetic import Rows, RowsOf, SyntheticConfig, SyntheticTask, VaryingRows, WholeRowTask
from hybridtf.tasks.text import EvalDocument, TextConfig, TextTask
from hybridtf.tasks.text_rows import HaystackConfig, TextRowsConfig, TextRowsTask
from hybridtf.tasks.tokenization import ByteTokenizer, Decoder, FileTokenizer, Tokenizer, make_tokenizer
from hybridtf.tasks.variable_tracking import VariableTrackingConfig
from hybridtf.tasks.variable_tracking_text import VariableTrackingTextConfig
from hybridtf.tasks.word_counts_text import CommonWordsTextConfig, FrequentWordsTextConfig
from hybridtf.tasks.word_problem import WordProblemConfig

__all__ = [
    "IGNORE", "MAD_TASKS", "NO_EVIDENCE", "Batch", "ByteTokenizer", "CommonWordsConfig", "CommonWordsTextConfig",
    "CompressionConfig", "CopyingConfig", "Decoder", "EvalDocument", "FileTokenizer", "FrequentWordsConfig",
    "FrequentWordsTextConfig", "FuzzyRecallConfig", "HaystackConfig", "InContextRecallConfig", "InductionHeadsConfig",
    "ListOpsConfig", "MQARConfig", "MemorizationConfig", "ModularArithmeticConfig", "NeedlesConfig", "NeedlesTextConfig",
    "PhonebookConfig", "Rows", "RowsOf", "SelectiveCopyingConfig", "Setting", "Stream", "SyntheticConfig",
    "SyntheticTask", "Task", "TaskSplit", "TextConfig", "TextRowsConfig", "TextRowsTask", "TextTask", "Tokenizer",
    "Totals", "VariableTrackingConfig", "VariableTrackingTextConfig", "VaryingRows", "WholeRowTask", "WordProblemConfig",
    "hybridtf_tasks", "mad_sweep", "make_tokenizer", "state_tracking_sweep", "zoology_sweep",
]


@hookimpl
def hybridtf_tasks() -> Sequence[type[ComponentConfig] | Preset]:
    """The built-in tasks."""
    return (
        TextConfig,
        CommonWordsConfig, *common_words.PRESETS,
        CommonWordsTextConfig, FrequentWordsTextConfig, *word_counts_text.PRESETS,
        CompressionConfig, *compression.PRESETS,
        CopyingConfig, *copying.PRESETS,
        FrequentWordsConfig, *frequent_words.PRESETS,
        FuzzyRecallConfig, *fuzzy_recall.PRESETS,
        InContextRecallConfig, *in_context_recall.PRESETS,
        InductionHeadsConfig, *induction_heads.PRESETS,
        ListOpsConfig, *listops.PRESETS,
        MQARConfig, *mqar.PRESETS,
        MemorizationConfig, *memorization.PRESETS,
        ModularArithmeticConfig, *arithmetic.PRESETS,
        NeedlesConfig, *needles.PRESETS,
        NeedlesTextConfig, *needles_text.PRESETS,
        PhonebookConfig, *phonebook.PRESETS,
        SelectiveCopyingConfig, *selective_copying.PRESETS,
        VariableTrackingConfig, *variable_tracking.PRESETS,
        VariableTrackingTextConfig, *variable_tracking_text.PRESETS,
        WordProblemConfig, *word_problem.PRESETS,
    )
