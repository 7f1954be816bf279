"""Tasks: data to train on, the measure it is judged by, and what trivial models reach."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtf.core import ComponentConfig, Preset
from hybridtf.hookspecs import hookimpl
from hybridtf.tasks import arithmetic, listops, mqar, word_problem
from hybridtf.tasks.arithmetic import ModularArithmeticConfig
from hybridtf.tasks.base import IGNORE, Batch, Stream, Task, TaskSplit, Totals
from hybridtf.tasks.listops import ListOpsConfig
from hybridtf.tasks.mqar import MQARConfig
from hybridtf.tasks.synthetic import Rows, RowsOf, SyntheticConfig, SyntheticTask, VaryingRows
from hybridtf.tasks.text import EvalDocument, TextConfig, TextTask
from hybridtf.tasks.tokenization import ByteTokenizer, Decoder, FileTokenizer, Tokenizer, make_tokenizer
from hybridtf.tasks.word_problem import WordProblemConfig

__all__ = [
    "IGNORE", "Batch", "ByteTokenizer", "Decoder", "EvalDocument", "FileTokenizer", "ListOpsConfig", "MQARConfig",
    "ModularArithmeticConfig", "Rows", "RowsOf", "Stream", "SyntheticConfig", "SyntheticTask", "Task", "TaskSplit",
    "TextConfig", "TextTask", "Tokenizer", "Totals", "VaryingRows", "WordProblemConfig", "hybridtf_tasks",
    "make_tokenizer",
]


@hookimpl
def hybridtf_tasks() -> Sequence[type[ComponentConfig] | Preset]:
    """The built-in tasks."""
    return (
        TextConfig,
        ListOpsConfig, *listops.PRESETS,
        MQARConfig, *mqar.PRESETS,
        ModularArithmeticConfig, *arithmetic.PRESETS,
        WordProblemConfig, *word_problem.PRESETS,
    )
