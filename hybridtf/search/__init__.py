"""Searching a space of stacks at equal parameters: blocks, their order, their options."""

from __future__ import annotations

from hybridtf.search.outcome import best_recipe, trials_json, trials_markdown, write_outcome
from hybridtf.search.run import Search, Trial
from hybridtf.search.score import Scores, normalised, score_of, scores
from hybridtf.search.space import SearchConfig, Space, Stack, load_space, parse_space, space_names
from hybridtf.search.trials import Evaluate, Evaluation, at_params, largest_vocabulary, with_third_sides

__all__ = [
    "Evaluate", "Evaluation", "Scores", "Search", "SearchConfig", "Space", "Stack", "Trial", "at_params", "best_recipe",
    "largest_vocabulary", "load_space", "normalised", "parse_space", "score_of", "scores", "space_names", "trials_json",
    "trials_markdown", "with_third_sides", "write_outcome",
]
