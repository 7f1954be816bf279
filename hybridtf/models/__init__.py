"""Models: the composer, stems, heads, and what stands on them."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtf.core import ComponentConfig
from hybridtf.hookspecs import hookimpl
from hybridtf.models.compose import Stack, build_stack
from hybridtf.models.generation import (
    Beam,
    BeamConfig,
    GeneratedToken,
    GenerationConfig,
    Prefix,
    Speculated,
    Speculation,
    beam_search,
    generate,
    read_prompt,
    speculate,
    stream,
)
from hybridtf.models.heads import LMHead, LMHeadConfig
from hybridtf.models.language_model import (
    IGNORED,
    LanguageModel,
    LanguageModelConfig,
    LanguageModelOutput,
    Loss,
)
from hybridtf.models.pattern import expand_pattern, print_pattern
from hybridtf.models.position_decoder import PositionDecoder, PositionDecoderConfig
from hybridtf.models.stems import TokenEmbedding, TokenEmbeddingConfig
from hybridtf.models.weights import load_weights, save_weights

__all__ = [
    "IGNORED", "Beam", "BeamConfig", "GeneratedToken", "GenerationConfig", "LMHead", "LMHeadConfig", "LanguageModel",
    "LanguageModelConfig", "LanguageModelOutput", "Loss", "PositionDecoder", "PositionDecoderConfig", "Prefix",
    "Speculated", "Speculation", "Stack", "TokenEmbedding", "TokenEmbeddingConfig", "beam_search", "build_stack",
    "expand_pattern", "generate", "load_weights", "print_pattern", "read_prompt", "save_weights", "speculate", "stream",
]


@hookimpl
def hybridtf_stems() -> Sequence[type[ComponentConfig]]:
    return (TokenEmbeddingConfig,)


@hookimpl
def hybridtf_heads() -> Sequence[type[ComponentConfig]]:
    return (LMHeadConfig, PositionDecoderConfig)


@hookimpl
def hybridtf_models() -> Sequence[type[ComponentConfig]]:
    return (LanguageModelConfig,)
