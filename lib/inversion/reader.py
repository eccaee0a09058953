"""A decoder cut where hidden states were taken, read with cached prefixes, many candidates side by side."""

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from lib.errors import LeakbookError
from lib.models import Backbone

CHUNK = 256  # candidates read in one row
_PARTS = {"layers": "norm", "h": "ln_f"}  # names of layers and final norm: Llama and its kin, GPT-2


class InversionError(LeakbookError, ValueError):
    """Hidden states, a model or settings with which no search can start."""


@dataclass(frozen=True)
class Convention:
    """Where states are taken: behind ``layer`` layers (None: all), before (pre) or behind (post) the final norm.

    ``hidden_states[-1]`` of transformers is behind all layers, post; every earlier one is pre.
    """

    layer: int | None = None
    norm: str = "post"

    def __str__(self) -> str:
        return f"layer {'last' if self.layer is None else self.layer}, {self.norm}-norm"


class Reader:
    """Gives the states of a convention for token ids or embeddings, behind prefixes that were read before.

    The model is cut, not copied: weights are shared with the backbone, and layers behind the convention's never run.
    ``embedding`` [V, d] holds the rows that are searched.
    """

    def __init__(self, backbone: Backbone, convention: Convention = Convention(), vocabulary: int | None = None):
        if backbone.takes_images:
            raise InversionError(f"{backbone.name} takes images: expected a language model of text alone")
        self.backbone, self.convention = backbone, convention
        self.model = _cut(backbone, convention)
        table = self.model.get_input_embeddings().weight
        spelled = len(backbone.tokenizer)
        if vocabulary is None and len(table) > spelled:
            raise InversionError(
                f"{backbone.name} embeds {len(table)} ids and its tokenizer spells {spelled}: the rest was never "
                f"trained. Say vocabulary={spelled} to search those that are spelled, or {len(table)} for all"
            )
        self.embedding = table[: vocabulary or len(table)]
        self.width = table.shape[1]
        self._check_embedding()

    def _check_embedding(self) -> None:
        """Refuse a model that does more to an id than look its row up: rows are what is searched."""
        ids = torch.tensor([[1, len(self.embedding) // 2, len(self.embedding) - 1]], device=self.device)
        with torch.no_grad():
            rows = self.model(inputs_embeds=self.embedding[ids], use_cache=False).last_hidden_state
        if not torch.allclose(rows, self.states(ids), rtol=1e-3, atol=1e-3):
            raise InversionError(
                f"{self.backbone.name}: states of ids are not those of their embedding rows: expected a model that "
                "reads its embedding matrix as it is"
            )

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return self.embedding.device

    @property
    def context(self) -> int:
        """Longest prompt that the model can read."""
        return int(self.backbone.model.config.max_position_embeddings)

    @torch.no_grad()
    def states(self, ids: Tensor) -> Tensor:
        """States [B, T, d] of whole prompts of equal length, ids [B, T]."""
        return self.model(input_ids=ids, use_cache=False).last_hidden_state

    @torch.no_grad()
    def read(self, ids: Tensor) -> DynamicCache:
        """The cache of whole prefixes of equal length, ids [B, t]; of t = 0, the empty one."""
        cache = empty()
        if ids.shape[1]:
            self.model(input_ids=ids, cache=cache, use_cache=True)
        return cache

    @torch.no_grad()
    def next_probabilities(self, ids: Tensor) -> Tensor:
        """The whole model's own probabilities [B, V] of the next id behind ids [B, t]; uniform where t = 0."""
        rows = len(self.embedding)
        if not ids.shape[1]:
            return self.embedding.new_full((len(ids), rows), 1 / rows)
        logits = self.backbone.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1, :rows]
        known = logits.softmax(-1)
        return torch.nn.functional.pad(known, (0, rows - known.shape[1]))  # rows that the output layer does not have

    @property
    def reads_expectation(self) -> bool:
        """Whether states are what the output layer reads: behind all layers and the norm."""
        layers, _ = decoder_parts(self.backbone)
        return self.convention.norm == "post" and self.convention.layer in (None, len(layers))

    @torch.no_grad()
    def expected(self, states: Tensor) -> Tensor | None:
        """The model's probabilities [B, V] of the next id, read off states [B, d]; None where not in them."""
        if not self.reads_expectation:
            return None
        rows = len(self.embedding)
        known = self.backbone.model.lm_head(states)[..., :rows].softmax(-1)
        return torch.nn.functional.pad(known, (0, rows - known.shape[-1]))

    @functools.cached_property
    def first_states(self) -> Tensor:
        """States [V, d] of every one-token prompt: a minute or more for 50,000 ids on two cores, once a reader."""
        every = torch.arange(len(self.embedding), device=self.device)[:, None]
        return torch.cat([self.states(chunk)[:, 0] for chunk in every.split(CHUNK)])

    @torch.no_grad()
    def extend(self, cache: DynamicCache, ids: Tensor) -> DynamicCache:
        """The cache with one more token a prompt, ids [B]; the given one stays as it was."""
        longer = view(cache)
        self._step(self.model.get_input_embeddings()(ids[:, None]), longer)
        return longer

    def proxies(self, embeddings: Tensor, cache: DynamicCache, lengths: Tensor | None = None) -> Tensor:
        """States [B, d] of one embedding a prompt, [B, d], behind its prefix; gradients flow to the embeddings.

        ``lengths`` [B] lets each see only so many tokens of its row of the cache, and stand right behind them.
        """
        if lengths is None:
            return self._step(embeddings[:, None], view(cache))
        lengths = lengths.to(self.device)
        before = torch.arange(length(cache), device=self.device) < lengths[:, None]
        mask = torch.cat([before, before.new_ones(len(before), 1)], 1)
        output = self.model(
            inputs_embeds=embeddings[:, None],
            attention_mask=mask[:, None, None],
            position_ids=lengths[:, None],
            cache=view(cache),
            use_cache=True,
        )
        return output.last_hidden_state[:, -1]

    @torch.no_grad()
    def candidates(self, ids: Tensor, cache: DynamicCache) -> Tensor:
        """States [C, d] of C candidate ids behind one prefix, the cache of a single prompt.

        A chunk is one row in which every candidate has the same position and sees the prefix and itself alone, so that
        the prefix is not copied for each.
        """
        found = []
        for chunk in ids.split(CHUNK):
            before, count = length(cache), len(chunk)
            mask = torch.cat([torch.ones(count, before), torch.eye(count)], 1).bool().to(self.device)
            positions = torch.full((1, count), before, device=self.device)
            output = self.model(
                inputs_embeds=self.model.get_input_embeddings()(chunk[None]),
                attention_mask=mask[None, None],
                position_ids=positions,
                cache=view(cache),
                use_cache=True,
            )
            found.append(output.last_hidden_state[0])
        return torch.cat(found)

    @torch.no_grad()
    def branches(self, ids: Tensor, cache: DynamicCache, lengths: Tensor, chain: bool) -> tuple[Tensor, DynamicCache]:
        """States [B, M, d] of M tokens a prompt, ids [B, M], behind the first ``lengths`` [B] tokens of its cache.

        As a ``chain`` each follows the one before it; else all are candidates for one position and see the prefix and
        themselves alone. The cache that is given back holds the M tokens behind the given one.
        """
        rows, count = ids.shape
        before = torch.arange(length(cache), device=self.device) < lengths[:, None]
        among = torch.ones(count, count, device=self.device).tril() if chain else torch.eye(count, device=self.device)
        mask = torch.cat([before[:, None].expand(-1, count, -1), among.bool().expand(rows, -1, -1)], -1)
        places = lengths[:, None] + (torch.arange(count, device=self.device) if chain else 0)
        places = places.clamp(max=self.context - 1)  # what a chain reads behind the end of a prompt is thrown away
        longer = view(cache)
        output = self.model(
            inputs_embeds=self.model.get_input_embeddings()(ids),
            attention_mask=mask[:, None],
            position_ids=places.expand(rows, count),
            cache=longer,
            use_cache=True,
        )
        return output.last_hidden_state, longer

    def _step(self, embeddings: Tensor, cache: DynamicCache) -> Tensor:
        positions = torch.full((len(embeddings), 1), length(cache), device=self.device)
        output = self.model(inputs_embeds=embeddings, position_ids=positions, cache=cache, use_cache=True)
        return output.last_hidden_state[:, -1]


def decoder_parts(backbone: Backbone) -> tuple[nn.ModuleList, nn.Module]:
    """Layers and final norm of a model.

    Raises:
        InversionError: the architecture is unknown.
    """
    base = backbone.model.base_model
    layers, norm = _names(base)
    return getattr(base, layers), getattr(base, norm)


def _names(base: nn.Module) -> tuple[str, str]:
    pairs = _PARTS.items()
    found = next(((layers, norm) for layers, norm in pairs if hasattr(base, layers) and hasattr(base, norm)), None)
    if found is None:
        raise InversionError(
            f"{type(base).__name__} has neither `layers` and `norm` nor `h` and `ln_f`: expected a GPT-2 or Llama type "
            "decoder"
        )
    return found


def _cut(backbone: Backbone, convention: Convention) -> nn.Module:
    """The decoder without head, its layers up to the convention's, its final norm only where states are post-norm.

    Raises:
        InversionError: the layer or norm is none of the model's, or the architecture is unknown.
    """
    base = backbone.model.base_model
    layers, norm = _names(base)
    depth = len(getattr(base, layers))
    wanted = depth if convention.layer is None else convention.layer
    if not 1 <= wanted <= depth:
        raise InversionError(f"layer: got {wanted}, expected 1 to {depth}, the layers of {backbone.name}")
    if convention.norm not in ("pre", "post"):
        raise InversionError(f"norm: got {convention.norm!r}, expected 'pre' or 'post'")
    cut = copy.copy(base)
    cut._modules = dict(base._modules)
    cut.config = copy.copy(base.config)
    cut.config.num_hidden_layers = wanted
    setattr(cut, layers, nn.ModuleList(getattr(base, layers)[:wanted]))
    if convention.norm == "pre":
        setattr(cut, norm, nn.Identity())
    return cut


def empty() -> DynamicCache:
    """The cache of no token."""
    return DynamicCache()


def length(cache: DynamicCache) -> int:
    """Tokens in a cache."""
    return cache.get_seq_length()


class Prefixes:
    """The cached prefixes of n prompts that grow at their own pace: keys and values [n, heads, T, width] a layer."""

    def __init__(self, reader: Reader, n: int, tokens: int):
        self.reader, self.tokens = reader, tokens
        self.lengths = torch.zeros(n, dtype=torch.long, device=reader.device)
        self.cache: DynamicCache | None = None

    def rows(self, rows: Tensor) -> DynamicCache:
        """The cache of some prompts, as long as the longest of their prefixes."""
        if self.cache is None:
            return empty()
        return view(self.cache, rows, int(self.lengths[rows].max()))

    def append(self, rows: Tensor, longer: DynamicCache, columns: Tensor) -> None:
        """Take over tokens of ``longer``, the cache that :meth:`Reader.branches` gave back for some prompts.

        ``columns`` [rows, m] are places in it, -1 for none: from the left on, they become the prompts' next tokens.
        """
        if self.cache is None:
            n = len(self.lengths)
            self.cache = view(longer)
            for layer in self.cache.layers:
                for name in ("keys", "values"):
                    _, heads, _, width = getattr(layer, name).shape
                    setattr(layer, name, getattr(layer, name).new_zeros(n, heads, self.tokens, width))
        here, at = (columns >= 0).nonzero(as_tuple=True)
        targets, places, sources = rows[here], self.lengths[rows[here]] + at, columns[here, at]
        for own, other in zip(self.cache.layers, longer.layers, strict=True):
            own.keys[targets, :, places] = other.keys[here, :, sources]
            own.values[targets, :, places] = other.values[here, :, sources]
        self.lengths[rows] += (columns >= 0).sum(1)


def view(cache: DynamicCache, rows: Tensor | Sequence[int] | None = None, tokens: int | None = None) -> DynamicCache:
    """A cache over the same tensors, or over those of some prompts or first tokens: extending it leaves the given one
    as it was."""
    copied = DynamicCache()
    copied.layers = [copy.copy(layer) for layer in cache.layers] if tokens != 0 else []
    for layer in copied.layers:
        if rows is not None:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]
        if tokens is not None:
            layer.keys, layer.values = layer.keys[:, :, :tokens], layer.values[:, :, :tokens]
    return copied
