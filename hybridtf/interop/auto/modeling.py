"""The classes: a :class:`LanguageModel` behind the calls that transformers, its trainer and PEFT make.

Axes: b batch, t time. Weights keep their canonical names below ``model.``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.loss.loss_utils import ForSequenceClassificationLoss
from transformers.modeling_outputs import CausalLMOutputWithPast, SequenceClassifierOutputWithPast

from hybridtf.core import BuildContext, CheckpointError, ConfigError, Head, OpKernel, Segments, State
from hybridtf.interop.auto.cache import HybridTFCache
from hybridtf.interop.auto.config import HybridTFConfig
from hybridtf.interop.auto.inputs import check_positions, columns, refuse_unknown
from hybridtf.models import LanguageModel
from hybridtf.models.generation.model import refusal
from hybridtf.models.language_model import IGNORED
from hybridtf.models.weights import canonical_tensors

KEEP_ALL = 0
"""``logits_to_keep`` for the scores of every column."""


@contextmanager
def _plain_torch() -> Iterator[torch.dtype]:
    """Inside, tensors are made as hybridtf makes them, whatever device and dtype transformers has set; gives that dtype."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield dtype
    finally:
        torch.set_default_dtype(dtype)


class HybridTFPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """What both classes share: a language model under ``model``, made from the config or handed in."""

    config_class = HybridTFConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = False
    _no_split_modules: tuple[str, ...] = ()

    model: LanguageModel

    def __init__(self, config: HybridTFConfig, model: LanguageModel | None = None) -> None:
        super().__init__(config)
        if model is None:
            with _plain_torch() as dtype:
                model = config.recipe().build(BuildContext(d_model=0, param_dtype=dtype))
        self.model = model

    def _finish(self) -> None:
        """The last step of a constructor: tensors with several names are declared, and what no file tells is noted."""
        first = {id(tensor): name for name, tensor in canonical_tensors(self).items()}
        several = {
            name: first[id(tensor)] for name, tensor in self.state_dict(keep_vars=True).items() if first[id(tensor)] != name
        }
        self._tied_weights_keys = several
        if several:
            self.config.tie_word_embeddings = True
        self._unsaved = dict(self.named_non_persistent_buffers())
        self._frozen = [name for name, p in self.named_parameters() if not p.requires_grad]
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: a model of ours is built with its weights."""

    def _initialize_missing_keys(self, is_quantized: bool) -> None:
        """After a checkpoint was read: tensors that are in no file come back; one that should have been there is an error."""
        loaded = getattr(self, "_is_hf_initialized", False)
        missing = [
            name for name, tensor in canonical_tensors(self.model).items() if not getattr(tensor, "_is_hf_initialized", False)
        ]
        if missing and not loaded and not is_quantized:
            more = f" (and {len(missing) - 5} more)" if len(missing) > 5 else ""
            raise CheckpointError(f"the checkpoint lacks {', '.join(missing[:5])}{more}, which the model has")
        now = dict(self.named_non_persistent_buffers())
        for name, value in self._unsaved.items():
            now[name].data.copy_(value)
        self._unsaved = {}
        for name in self._frozen:
            self.get_parameter(name).requires_grad_(False)  # reading a file forgets it
        for module in self.modules():
            if isinstance(module, OpKernel):
                module.fill()  # its device may be another by now
        super()._initialize_missing_keys(is_quantized)

    def get_input_embeddings(self) -> nn.Module:
        """The stem's embedding."""
        found = getattr(self.model.stem, "embedding", None)
        if not isinstance(found, nn.Module):
            raise ConfigError(f"the stem {type(self.model.stem).__name__} has no embedding of its own")
        return found

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Put another embedding in its place; a tied head follows."""
        self.get_input_embeddings()
        self.model.stem.embedding = value

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Module:
        """Refused, unless nothing changes: the recipe says how many tokens there are."""
        if new_num_tokens not in (None, self.model.config.vocab_size):
            raise ConfigError("the vocabulary belongs to the recipe: build a model with another vocab_size instead")
        return self.get_input_embeddings()


class HybridTFForCausalLM(HybridTFPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A language model of ours as transformers' causal language model.

    ``logits_to_keep = 1`` gives the scores after each row's last real token, so that prompts may be padded on either side.
    """

    accepts_loss_kwargs = True
    """A trainer that accumulates tells how many tokens its step scores."""

    def __init__(self, config: HybridTFConfig, model: LanguageModel | None = None) -> None:
        super().__init__(config, model)
        if self.model.head.scores != "next":
            raise ConfigError(f"the head {type(self.model.head).__name__} scores the tokens it reads, not those that follow")
        self._finish()

    @classmethod
    def from_model(cls, model: LanguageModel) -> Self:
        """The same model, weights and all, behind transformers' calls; nothing is copied."""
        dtype = next(model.parameters()).dtype
        wrapped: Self = cls(HybridTFConfig.from_recipe(model.config, dtype=dtype), model)
        wrapped.train(model.training)
        return wrapped

    def get_output_embeddings(self) -> nn.Module | None:
        """The head's projection; None where the embedding is it."""
        found = getattr(self.model.head, "proj", None)
        return found if isinstance(found, nn.Module) else None

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Put another projection in its place."""
        if self.get_output_embeddings() is None:
            raise ConfigError("the head of this model has no projection of its own")
        self.model.head.proj = new_embeddings

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        cache: HybridTFCache | None = None, labels: Tensor | None = None, use_cache: bool | None = None,
        logits_to_keep: int | Tensor = KEEP_ALL, past_key_values: HybridTFCache | None = None,
        num_items_in_batch: Tensor | int | None = None, return_dict: bool | None = None, **more: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Scores; see the class. ``attention_mask`` is of all columns so far, or, on a new cache, of these.

        ``labels`` are the tokens themselves, as everywhere in transformers; one that follows a pad is not scored.
        Raises :class:`ConfigError` for positions that are not those of the mask, and for options that are not known.
        """
        refuse_unknown(self.config, more)
        if labels is not None and not (isinstance(logits_to_keep, int) and logits_to_keep == KEEP_ALL):
            raise ConfigError("labels need the scores of every column: leave logits_to_keep out")
        cache = self._cache_for(cache if cache is not None else past_key_values, use_cache, labels)
        seen = None if cache is None else cache.real
        every, real, segments = columns(input_ids, attention_mask, seen)
        check_positions(position_ids, every, input_ids.shape[1])
        last = isinstance(logits_to_keep, int) and logits_to_keep == 1
        if cache is None:
            out = self.model(input_ids, segments=segments, logits="last" if last else "all")
        else:
            # A draft is taken back by as much as it was checked for; a drafting model by one column of its prompt.
            width = input_ids.shape[1]
            keep = min(width, logits_to_keep) if isinstance(logits_to_keep, int) and logits_to_keep else width
            out = cache.advance(
                self.model, input_ids, real, segments, keep=keep, logits="last" if last else "all"
            )
        logits = _kept(out.logits, logits_to_keep)
        if cache is not None:
            logits = _of_rows_that_read(logits, real, cache, last)
        loss = None if labels is None else self._loss(out, labels, real, num_items_in_batch)
        found = CausalLMOutputWithPast(loss=loss, logits=logits, cache=cache)
        return found if return_dict in (None, True) else found.to_tuple()

    def _cache_for(self, given: Any, use_cache: bool | None, labels: Tensor | None) -> HybridTFCache | None:
        if given is not None:
            if not isinstance(given, HybridTFCache):
                raise ConfigError(f"the cache of this model is a HybridTFCache; got a {type(given).__name__}")
            return given
        wanted = use_cache
        if wanted is None:
            wanted = self.config.use_cache and not self.training and labels is None and refusal(self.model, "cut") is None
        return HybridTFCache(self.model) if wanted else None

    def _loss(self, out: Any, labels: Tensor, real: Tensor, n_items: Tensor | int | None) -> Tensor:
        """Cross-entropy in float32 at least, a scored token or of ``n_items``, and the model's auxiliary losses."""
        scored = real[:, 1:] & real[:, :-1]
        targets = labels[:, 1:].masked_fill(~scored, IGNORED)
        scores = out.logits[:, :-1]
        scores = scores if scores.dtype == torch.float64 else scores.float()
        total = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        own = (targets != IGNORED).sum().clamp(min=1)
        count = own if n_items is None else torch.as_tensor(n_items, device=total.device)
        loss = total / count
        for name, (part, n) in out.losses.items():
            # Of a step with several batches each gives its share.
            loss = loss + self.config.loss_weights.get(name, 1.0) * part / n.clamp(min=1) * (own / count)
        return loss

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> None:
        """None: the model counts real tokens itself, past pads on the right too, which ``generate`` would count on from."""

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int,
        max_cache_length: int,
    ) -> None:
        """``generate``'s cache is the model's state, whichever it would choose itself."""
        if (asked := generation_config.cache_implementation) not in (None, "dynamic"):
            raise ConfigError(f"cache_implementation = {asked!r}: a hybridtf model has one kind of cache, its state")
        if model_kwargs.get("cache") is not None:
            self._cache_for(model_kwargs["cache"], None, None)
            model_kwargs["cache"]._is_user_defined = True
        elif generation_config.use_cache is not False:
            model_kwargs["cache"] = HybridTFCache(self.model, room=max_cache_length)
            if generation_config.is_assistant:
                model_kwargs["cache"].activate_past_recording()


class HybridTFForSequenceClassification(HybridTFPreTrainedModel):
    """Scores of a class, by a linear map of the last real token's features after the final norm.

    A checkpoint of :class:`HybridTFForCausalLM` loads: its head is left out, and ``score`` is new.
    """

    _keys_to_ignore_on_load_unexpected = (r"^model\.head\.",)
    accepts_loss_kwargs = False
    """The loss is a mean over the rows of its batch, and a trainer that accumulates divides it."""

    def __init__(self, config: HybridTFConfig) -> None:
        super().__init__(config)
        self.model.head = Features()
        self.num_labels = config.num_labels
        self.score = nn.Linear(self.model.config.d_model, config.num_labels, bias=False, dtype=_dtype_of(self.model))
        self._finish()

    def _init_weights(self, module: nn.Module) -> None:
        """``score`` alone, as any matrix of ours: by its fan-in."""
        if module is getattr(self, "score", None):
            with torch.no_grad():
                module.weight.normal_(0.0, module.weight.shape[1] ** -0.5)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        labels: Tensor | None = None, return_dict: bool | None = None, **more: Any,
    ) -> SequenceClassifierOutputWithPast | tuple[Any, ...]:
        """Scores (b labels). Without a mask every token is real."""
        refuse_unknown(self.config, more, known=("use_cache",))
        every, _, segments = columns(input_ids, attention_mask, None)
        check_positions(position_ids, every, input_ids.shape[1])
        out = self.model(input_ids, segments=segments, logits="last")
        logits = self.score(out.logits)
        loss = None if labels is None else ForSequenceClassificationLoss(labels, logits, self.config)
        for name, (part, n) in () if loss is None else out.losses.items():
            loss = loss + self.config.loss_weights.get(name, 1.0) * part / n.clamp(min=1)
        found = SequenceClassifierOutputWithPast(loss=loss, logits=logits)
        return found if return_dict in (None, True) else found.to_tuple()


class Features(Head):
    """A head that hands on what it is given."""

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, keep: int = 0,
        tied: Tensor | None = None,
    ) -> tuple[Tensor, State | None]:
        return x, state


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def _kept(logits: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    if isinstance(logits_to_keep, Tensor):
        return logits[:, logits_to_keep]
    if logits_to_keep == 1:
        return logits[:, None]
    return logits[:, -logits_to_keep:] if logits_to_keep else logits


def _of_rows_that_read(logits: Tensor, real: Tensor, cache: HybridTFCache, last: bool) -> Tensor:
    """Where a row got pads alone, the scores after its last real token, which an earlier call read."""
    if not last:
        cache.scores = None
        return logits
    if cache.scores is not None and not bool((read := real.any(1)).all()):
        logits = torch.where(read[:, None, None], logits, cache.scores[:, None])
    cache.scores = logits[:, 0].detach()
    return logits
