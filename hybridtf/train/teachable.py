"""Whether one model can teach another: what both read, which layers are matched, and what a layer alone would read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hybridtf.core import ConfigError, EdgeSpec, TaskConfig
from hybridtf.models import LanguageModel
from hybridtf.models.compose import check_layer, said_of_written
from hybridtf.tasks import Tokenizer, make_tokenizer
from hybridtf.train.config import TeacherOptions


def check_tokenizers(run: str, teacher: TaskConfig | None, student: TaskConfig | None) -> str:
    """What of the tokenizers cannot be checked, in words; nothing where they are the same or there is none.

    Raises :class:`ConfigError` where the teacher was trained on other tokens, :class:`DataError` for a tokenizer that is gone.
    """
    mine, theirs = _tokenizer(student), _tokenizer(teacher)
    if mine is None:
        return ""
    if theirs is None:
        return (
            f"train.teacher: the recipe of {run} does not say which tokenizer it reads with; it is given tokens of "
            f"{mine.name!r}, which must be its own"
        )
    if (mine.fingerprint, mine.bos_id) != (theirs.fingerprint, theirs.bos_id):
        raise ConfigError(
            f"train.teacher: the tokenizer of {run} ({theirs.name!r}, a document starts with {theirs.bos_id}) differs from "
            f"that of the task ({mine.name!r}, {mine.bos_id}), so it cannot teach on these tokens"
        )
    return ""


def _tokenizer(task: TaskConfig | None) -> Tokenizer | None:
    """Of a task of text."""
    name = getattr(task, "tokenizer", None)
    return make_tokenizer(name, getattr(task, "bos_token", None)) if isinstance(name, str) else None


def matched_layers(options: TeacherOptions, student: LanguageModel, teacher: LanguageModel) -> tuple[int, ...]:
    """The layers that are matched, after it is clear that both models can be held beside each other."""
    for name in ("vocab_size", "d_model") if options.hidden else ("vocab_size",):
        mine, theirs = getattr(student.config, name), getattr(teacher.config, name)
        if mine != theirs:
            raise ConfigError(f"train.teacher: {name} = {theirs} of {options.run} is not the {mine} of the model that learns")
    if not options.hidden and options.trains == "all":
        return ()
    one, other = student.config.layers(), teacher.config.layers()
    if len(one) != len(other):
        raise ConfigError(f"train.teacher: {options.run} has {len(other)} layers, and the model that learns {len(one)}")
    if options.hidden and student.stack.stream != teacher.stack.stream:
        why = f"the layers of {options.run} hand on {teacher.stack.stream}, and those of the model that learns"
        raise ConfigError(f"train.teacher: {why} {student.stack.stream}")
    if isinstance(options.layers, tuple):
        outside = [i for i in options.layers if i >= len(one)]
        if outside:
            raise ConfigError(f"train.teacher.layers names layer {outside[0]}; the model has layers 0 to {len(one) - 1}")
        return tuple(sorted(set(options.layers)))
    if options.layers == "all":
        return tuple(range(len(one)))
    configs = (student.config, teacher.config)
    mixers = [[getattr(config.blocks[name], "mixer", None) for name in config.layers()] for config in configs]
    found = tuple(i for i, (mine, theirs) in enumerate(zip(*mixers, strict=True)) if mine != theirs)
    if not found:
        raise ConfigError(f"train.teacher.layers = 'replaced': every mixer is that of {options.run}; give 'all' or numbers")
    return found


def check_edges(layers: Sequence[int], student: LanguageModel, teacher: LanguageModel) -> None:
    """A layer that is called by itself has the edges of the teacher alone: those that earlier layers wrote, as they are."""
    specs: Mapping[str, EdgeSpec] = teacher.stem.edge_specs()
    written = {edge: specs.get(edge) for edge in teacher.stem.writes}
    for i, (mine, theirs) in enumerate(zip(student.stack.blocks(), teacher.stack.blocks(), strict=True)):
        if i in layers:
            check_layer(mine, "train.teacher.given = 'teacher'", i, dict(written))
        for part in (*theirs.parts().values(), theirs):
            written.update(said_of_written(part))
