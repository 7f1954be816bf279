"""The class that lm-eval finds as ``hybridtf``; importing this module imports lm_eval."""

from __future__ import annotations

from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from hybridtf.core import active
from hybridtf.cost import parameter_counts
from hybridtf.interop.lm_eval.arguments import read_arguments
from hybridtf.interop.lm_eval.loading import load, max_length
from hybridtf.interop.lm_eval.scoring import score
from hybridtf.interop.lm_eval.texts import TransformersTexts, find_texts
from hybridtf.interop.lm_eval.writing import Wish, read_wish, write


class HybridTFLM(TemplateLM):  # type: ignore[misc]
    """A run of ours, an imported model, or a published checkpoint: ``pretrained=DIR``.

    Also ``tokenizer`` (``bytes``, a ``tokenizer.json``, or a folder; by default that of DIR or of the run's task),
    ``bos_token`` (which token of a ``tokenizer.json`` begins a document), ``add_bos_token``, ``batch_size``, ``max_length``,
    ``max_gen_toks``, ``dtype``, ``device``, and of a run ``step`` and ``weights`` (``model`` or ``ema``).
    """

    def __init__(self, **given: Any) -> None:
        super().__init__()
        said = read_arguments(given)
        for name, reason in active().failures.items():
            tqdm.write(f"warning: plugin {name!r} was not loaded: {reason}")
        self.model, recipe = load(said)
        self.texts = find_texts(said, recipe, self.model.config.vocab_size)
        self.tokenizer = self.texts.tokenizer if isinstance(self.texts, TransformersTexts) else None
        self.max_length, self.max_gen_toks = max_length(self.model, said), said.max_gen_toks
        self.batch_size = said.batch_size
        self._device = self.model.device

    @property
    def eot_token_id(self) -> int:
        return self.texts.end_ids[0] if self.texts.end_ids else self.texts.prefix_id

    @property
    def prefix_token_id(self) -> int:
        return self.texts.prefix_id

    @property
    def tokenizer_name(self) -> str:
        return self.texts.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Tokens; special ones as the tokenizer adds them unless it is said."""
        return self.texts.encode(string, add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as one text. Raises :class:`ConfigError` where the tokenizer has no template."""
        return self.texts.chat(chat_history, add_generation_prompt)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        rows = [(context, following) for _, context, following in requests]
        with tqdm(total=len(rows), disable=disable_tqdm, desc="Scoring continuations") as bar:
            found = score(
                self.model, rows, batch_size=self.batch_size, max_length=self.max_length, progress=bar.update
            )
        for (texts, _, _), result in zip(requests, found, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, result)
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, in lm-eval's own windows of ``max_length``."""
        windows, sizes = [], []
        for request in requests:
            pairs = get_rolling_token_windows(
                self.texts.whole(request.args[0]), self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            here = [(None, *make_disjoint_window(pair)) for pair in pairs]
            windows += here
            sizes.append(len(here))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        found = [sum(next(scores)[0] for _ in range(size)) for size in sizes]
        for request, total in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts up to a stop of each request, or ``max_gen_toks`` tokens."""
        seed = torch.initial_seed() % 2**31
        alike: dict[Wish, list[int]] = {}
        for i, request in enumerate(requests):
            wish = read_wish(request.args[1], self.max_gen_toks, self.texts.end_ids, seed)
            alike.setdefault(wish, []).append(i)
        made = [""] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Writing texts") as bar:
            for wish, places in alike.items():
                prompts = [self.texts.encode(requests[i].args[0]) for i in places]
                texts = write(
                    self.model, self.texts, prompts, wish, batch_size=self.batch_size, max_length=self.max_length,
                    progress=bar.update,
                )
                for i, text in zip(places, texts, strict=True):
                    made[i] = text
                    self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return made

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes beside its results."""
        (stack,) = self.model.config.stacks()
        dtype = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        counts = parameter_counts(self.model)
        return {"model_num_parameters": counts["total"], "model_dtype": dtype, "model_pattern": stack.pattern}
