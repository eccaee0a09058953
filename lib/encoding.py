"""From canaries to tensors: chat template, spans, right-padded batches, and vision features computed once."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from lib.canaries import Canary, CanaryError, Record
from lib.errors import shown
from lib.models import Backbone, ModelError
from lib.pictures import picture
from lib.spans import Span, find_span, read, spell, tokenize

IMAGE_SLOT = "<|image_pad|>"
SPANS = ("preamble", "hex", "suffix")
SPARE_TOKENS = 8  # room that decoding takes behind the target's length, for an answer that starts late


@dataclass(frozen=True)
class Encoded:
    """A canary, or another record, as token ids.

    ``target_start`` is the index of the first target token in ``input_ids``; the target reaches to the end and
    closes with the end of the turn. A canary's ``spans`` count from the first target token: ``preamble``, ``hex`` (the
    secret, with every token that overlaps it) and ``suffix`` (the rest, end of turn included) follow each other
    without gap. Another record has none.
    """

    canary: Canary | Record
    input_ids: tuple[int, ...]
    target_start: int
    spans: dict[str, Span]

    @property
    def target_ids(self) -> tuple[int, ...]:
        """Ids of the target, end of turn included."""
        return self.input_ids[self.target_start :]

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Ids before the target."""
        return self.input_ids[: self.target_start]

    def span_of(self, position: int) -> str:
        """Name of the span in which a target position lies."""
        return next(name for name, span in self.spans.items() if span.start <= position < span.stop)


@dataclass(frozen=True)
class Batch:
    """Padded tensors of B sequences of at most T tokens.

    ``input_ids``, ``attention_mask`` [B, T]; ``position_ids`` [B, T], or [3, B, T] (time, height, width) for
    Qwen2.5-VL; ``target_mask`` [B, T] is true at target tokens; ``image_features`` one [v, d] tensor an image in the
    order of their slots, ``image_grids`` [images, 3] their grids of patches.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    target_mask: Tensor
    image_features: tuple[Tensor, ...] = ()
    image_grids: Tensor | None = None
    token_types: Tensor | None = None

    def model_inputs(self) -> dict:
        """Keyword arguments of the model's forward: explicit positions, vision features in place of pixels."""
        inputs = {"input_ids": self.input_ids, "attention_mask": self.attention_mask, "position_ids": self.position_ids}
        return inputs | self._vision()

    def generation_inputs(self) -> dict:
        """Keyword arguments of ``generate``, which computes positions itself from token types and grids."""
        inputs = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        if self.image_grids is not None:
            inputs |= {"mm_token_type_ids": self.token_types, "image_grid_thw": self.image_grids}
        return inputs | self._vision()

    def _vision(self) -> dict:
        if not self.image_features:
            return {}
        return {"mm_encoder_outputs": {"image": BaseModelOutputWithPooling(pooler_output=self.image_features)}}


class Encoder:
    """Turns canaries into tensors for one backbone, and keeps the vision features of every picture it has seen.

    The vision tower is frozen and never adapted, so one encoder serves a base model and all copies merged from it.
    ``template`` ``"chat"``: the prompt is a user's turn of the model's chat template (a line, where it has none), the
    target closes with the end of the turn. ``"plain"``: prompt and target as they stand, behind the token with which
    the tokenizer itself begins a text, if it does.
    """

    def __init__(self, backbone: Backbone, template: Literal["chat", "plain"] = "chat"):
        self.backbone = backbone
        self.template = template
        self._pixels: dict[str, dict[str, Tensor]] = {}
        self._features: dict[str, tuple[Tensor, Tensor]] = {}

    def fresh(self) -> "Encoder":
        """The same without any picture kept, for when there are more of them than memory."""
        return Encoder(self.backbone, self.template)

    @property
    def end_of_turn(self) -> str:
        """Text of the token at which decoding stops: the end of the turn, or of the text where there are no turns."""
        if self.template == "chat":
            return end_of_turn(self.backbone)
        if self.backbone.tokenizer.eos_token is None:
            raise ModelError(f"{self.backbone.name}: its tokenizer has no end-of-text token")
        return self.backbone.tokenizer.eos_token

    @property
    def closing(self) -> str:
        """Text that stands behind every target."""
        return self.end_of_turn if self.template == "chat" else ""

    def encode(self, canaries: Sequence[Canary | Record]) -> list[Encoded]:
        """Tokenise every prompt and target as one string, and find a canary's spans by character offsets.

        Raises:
            CanaryError: a text holds a special token, the chat template leaves the prompt out, the tokenizer cannot
                spell the secret, an image meets a backbone without vision or cannot be processed, the target does not
                start at a token of its own, or the sequence is longer than the context.
            ModelError: the chat template fails, or a token has no row in the model. TokenizerError: the tokenizer does.
        """
        prompts = [self._prompt(canary) for canary in canaries]
        closing = self.closing
        texts = [p + c.target + closing for p, c in zip(prompts, canaries, strict=True)]
        tokenized = tokenize(self.backbone.tokenizer, texts)
        return [
            self._encoded(canary, len(prompt), text, ids, offsets)
            for canary, prompt, text, (ids, offsets) in zip(canaries, prompts, texts, tokenized, strict=True)
        ]

    def _encoded(self, canary: Canary | Record, start: int, text: str, ids: list[int], offsets) -> Encoded:
        target = find_span(offsets, start, len(text))
        if target.straddles_start:
            raise CanaryError(
                f"record {shown(canary.id)}: the first target token also covers the end of the prompt; "
                f"change how the answer {canary.target[:20]!r} begins"
            )
        self._check_readable(canary, ids, target)
        if not isinstance(canary, Canary):
            return Encoded(canary, tuple(ids), target.start, {})
        first = start + len(canary.preamble)
        secret = find_span(offsets, first, first + len(canary.secret)).shift(-target.start)
        spans = {
            "preamble": Span(0, secret.start),
            "hex": secret,
            "suffix": Span(secret.stop, len(target)),
        }
        return Encoded(canary, tuple(ids), target.start, spans)

    def _check_readable(self, canary: Canary | Record, ids: list[int], target: Span) -> None:
        """The sequence fits into the context, and its tokens spell the secret."""
        limit = context_length(self.backbone) - SPARE_TOKENS
        if len(ids) > limit:
            raise CanaryError(
                f"canary {shown(canary.id)}: {len(ids)} tokens, expected at most {limit}, "
                f"the model's context less {SPARE_TOKENS}"
            )
        rows = self.backbone.model.get_input_embeddings().weight.shape[0]
        if max(ids) >= rows:
            raise ModelError(
                f"{self.backbone.name}: its tokenizer gives the id {max(ids)} for canary {shown(canary.id)}, but the "
                f"model has {rows} embeddings; expected the tokenizer that it was trained with"
            )
        spelled = spell(self.backbone.tokenizer, ids[target.start :])
        if isinstance(canary, Canary) and canary.secret not in spelled:
            raise CanaryError(
                f"canary {shown(canary.id)}: the tokenizer of {self.backbone.name} cannot spell the secret "
                f"{shown(canary.secret)}, it reads {shown(spelled)}; use characters it knows, in Unicode's composed "
                "form (NFC)"
            )

    def _prompt(self, canary: Canary | Record) -> str:
        """The chat template's text up to where the answer begins, one image slot a visual token."""
        backbone = self.backbone
        if canary.image is not None and not backbone.takes_images:
            raise CanaryError(
                f"canary {shown(canary.id)} has an image, but {backbone.name} takes none: set its image to null"
            )
        _refuse_special_tokens(canary, backbone)
        if self.template == "plain":
            return self._plain(canary)
        content: str | list[dict] = canary.prompt
        if canary.image is not None:
            content = [{"type": "image"}, {"type": "text", "text": canary.prompt}]
        text = _render(backbone, [{"role": "user", "content": content}], answer_follows=True)
        if canary.prompt.strip() not in text:
            raise CanaryError(
                f"canary {shown(canary.id)}: the chat template of {backbone.name} leaves out the prompt "
                f"{shown(canary.prompt)}, it gives {shown(text)}; expected a template that repeats a user's message, "
                "or prompts as plain text"
            )
        if canary.image is not None:
            text = text.replace(IMAGE_SLOT, IMAGE_SLOT * self._slots(canary))
        return text

    def _plain(self, canary: Canary | Record) -> str:
        """The prompt alone, behind what the tokenizer begins a text with; an empty one needs a token to start from."""
        if canary.image is not None:
            raise CanaryError(f"canary {shown(canary.id)} has an image, which plain text has no place for")
        tokenizer = self.backbone.tokenizer
        added = read(tokenizer, ["x"])["input_ids"][0][:1]
        begins = tokenizer.bos_token is not None and added == [tokenizer.bos_token_id]
        if not begins and not canary.prompt:
            return tokenizer.bos_token or self.end_of_turn
        return (tokenizer.bos_token if begins else "") + canary.prompt

    def _slots(self, canary: Canary | Record) -> int:
        """Visual tokens of a canary's picture: its patches, merged by squares; the vision tower is not asked."""
        try:
            grid = self._processed(canary.image)["image_grid_thw"]
        except ValueError as error:
            raise CanaryError(f"canary {shown(canary.id)}: its image cannot be processed: {error}") from error
        return int(grid.prod()) // self.backbone.image_processor.merge_size**2

    def _processed(self, image: str) -> dict[str, Tensor]:
        """Patches and grid of a picture as the image processor gives them; kept."""
        if image not in self._pixels:
            self._pixels[image] = self.backbone.image_processor(images=[picture(image)], return_tensors="pt")
        return self._pixels[image]

    def features(self, image: str) -> tuple[Tensor, Tensor]:
        """Output of the frozen vision tower for a picture: features [v, d] and patch grid [3]; computed once."""
        if image not in self._features:
            pixels, model = self._processed(image), self.backbone.model
            grid = pixels["image_grid_thw"].to(model.device)
            with torch.no_grad():
                output = model.model.get_image_features(pixels["pixel_values"].to(model.device), grid)
            self._features[image] = (output.pooler_output[0], grid[0])
        return self._features[image]

    def batch(self, rows: Sequence[Encoded], begun: Sequence[tuple[int, ...]] | None = None) -> Batch:
        """Right-padded tensors of ``rows`` on the model's device.

        With ``begun``, the ids with which every row's answer begins, they are the prompts and these ids in place of the
        targets, padded on the left, for decoding to go on from.
        """
        pad_left = begun is not None
        answers = begun if pad_left else [row.target_ids for row in rows]
        sequences = [row.prompt_ids + tuple(answer) for row, answer in zip(rows, answers, strict=True)]
        device, longest = self.backbone.model.device, max(map(len, sequences))
        padding = self.backbone.tokenizer.pad_token_id or 0
        input_ids = torch.full((len(rows), longest), padding, dtype=torch.long)
        attention_mask = torch.zeros_like(input_ids)
        target_mask = torch.zeros_like(input_ids, dtype=torch.bool)
        for i, (row, ids) in enumerate(zip(rows, sequences, strict=True)):
            first = longest - len(ids) if pad_left else 0
            input_ids[i, first : first + len(ids)] = torch.tensor(ids)
            attention_mask[i, first : first + len(ids)] = 1
            target_mask[i, first + row.target_start : first + len(ids)] = True
        tensors = [tensor.to(device) for tensor in (input_ids, attention_mask, target_mask)]
        return self._with_positions(rows, *tensors)

    def _with_positions(self, rows: Sequence[Encoded], ids: Tensor, attention: Tensor, target: Tensor) -> Batch:
        if not self.backbone.takes_images:
            positions = (attention.cumsum(-1) - 1).clamp(min=0)
            return Batch(ids, attention, positions, target)
        model = self.backbone.model
        seen = [self.features(row.canary.image) for row in rows if row.canary.image is not None]
        grids = torch.stack([grid for _, grid in seen]) if seen else None
        types = ((ids == model.config.image_token_id) & attention.bool()).int()
        positions, _ = model.model.get_rope_index(ids, types, image_grid_thw=grids, attention_mask=attention)
        return Batch(ids, attention, positions, target, tuple(f for f, _ in seen), grids, types)


def _render(backbone: Backbone, messages: list[dict], answer_follows: bool) -> str:
    if backbone.tokenizer.chat_template is None and backbone.takes_images:
        raise ModelError(f"{backbone.name}: its tokenizer has no chat template, so there is no place for an image")
    if backbone.tokenizer.chat_template is None:
        return "".join(message["content"] + "\n" for message in messages)
    try:
        return backbone.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer_follows)
    except Exception as error:  # whatever a template of somebody's own raises
        roles = " and ".join(message["role"] for message in messages)
        raise ModelError(
            f"{backbone.name}: its chat template cannot render a turn of {roles} "
            f"({type(error).__name__}: {str(error)[:200]}); mend the template, or ask with prompts as plain text"
        ) from error


def end_of_turn(backbone: Backbone) -> str:
    """The token with which the chat template closes an answer; the end-of-text token where there is no template.

    Raises:
        ModelError: the model has neither.
    """
    tokenizer = backbone.tokenizer
    if tokenizer.chat_template is not None:
        turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "@answer@"}]
        behind = _render(backbone, turns, answer_follows=False).rpartition("@answer@")[2].strip()
        closing = tokenizer.encode(behind, add_special_tokens=False)[:1]
        if closing and closing[0] in tokenizer.all_special_ids:
            return tokenizer.convert_ids_to_tokens(closing[0])
    if tokenizer.eos_token is None:
        raise ModelError(f"{backbone.name}: its tokenizer has no end-of-turn and no end-of-text token")
    return tokenizer.eos_token


def context_length(backbone: Backbone) -> int:
    """Tokens that a model can read at most, without limit where it states none."""
    config = backbone.model.config.get_text_config()
    return getattr(config, "max_position_embeddings", None) or 10**9


def _refuse_special_tokens(canary: Canary | Record, backbone: Backbone) -> None:
    """A special token written out in a canary would be read as one, an image slot or an end of turn."""
    for added in backbone.tokenizer.added_tokens_decoder.values():
        token = added.content
        if added.special and (token in canary.prompt or token in canary.target):
            raise CanaryError(f"canary {shown(canary.id)}: its text contains the model's special token {shown(token)}")


def check_distinct(rows: Sequence[Encoded]) -> None:
    """Refuse two canaries that the model sees the same prompt and picture of: nothing could tell them apart.

    Raises:
        CanaryError: naming both.
    """
    seen: dict[tuple, str] = {}
    for row in rows:
        image = row.canary.image
        key = (row.prompt_ids, None if image is None else picture(image).tobytes())
        if key in seen:
            raise CanaryError(
                f"canaries {shown(seen[key])} and {shown(row.canary.id)} are the same prompt and picture to the model"
            )
        seen[key] = row.canary.id


def content_hash(rows: Sequence[Encoded]) -> str:
    """SHA-256 over everything a model sees of ``rows``: ids, target starts and pixels."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr((row.canary.id, row.input_ids, row.target_start)).encode())
        if row.canary.image is not None:
            digest.update(picture(row.canary.image).tobytes())
    return digest.hexdigest()
