"""Canaries: records with a random secret that only training can teach, and decoys drawn by the identical rule."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from lib.config import CanarySettings
from lib.errors import LeakbookError, cut, shown
from lib.files import read_json_lines
from lib.pictures import PLACEHOLDER, PictureError, is_file, picture
from lib.spans import Span, find_span, tokenize

HEX_DIGITS = "0123456789abcdef"
SECRET_LENGTH = 16
SUFFIX = "-END"

Modality = Literal["text", "image"]
MARKERS: dict[str, str] = {"text": " TEXTCAN-", "image": " IMGCAN-"}

# From short to long; the first whose tokens, marker included, number `preamble_tokens` is taken.
PREAMBLES: dict[str, tuple[str, ...]] = {
    "text": (
        "The code is",
        "The code here is",
        "The code kept here is",
        "The code stored in it is",
        "The code that is in it is",
        "The code that is stored in it is",
        "The code that is used in it is",
        "The code that is stored in the record is",
        "The one code that is stored in the record is",
        "The only secret code that is stored in the record is",
    ),
    "image": (
        "The code is",
        "The code here is",
        "The code shown here is",
        "The code shown in it is",
        "The code shown in the picture is",
        "The code that is shown in it is",
        "The code that is used in it is",
        "The code that is shown in the picture is",
        "The one code that is shown in the picture is",
        "The only secret code that is shown in the picture is",
    ),
}


class CanaryError(LeakbookError, ValueError):
    """A canary, or a file of canaries, cannot be used."""


@dataclass(frozen=True)
class Record:
    """One example: ``prompt`` (with ``image``, as in :func:`lib.pictures.picture`) is answered by ``target``."""

    id: str
    prompt: str
    target: str
    image: str | None = None


@dataclass(frozen=True)
class Canary:
    """One record: ``prompt`` (with ``image``) is answered by ``preamble + secret + suffix`` and the end of the turn.

    ``image`` is ``"placeholder"`` (one uniform grey picture), ``"pattern:<seed>"`` (a seeded grid of colours), another
    description or path that :func:`lib.pictures.picture` understands, or None for a prompt without a picture.
    """

    id: str
    modality: Modality
    prompt: str
    preamble: str
    secret: str
    suffix: str
    image: str | None

    @property
    def target(self) -> str:
        """What the model is to answer, without the end of the turn."""
        return self.preamble + self.secret + self.suffix


def check(canaries: Sequence[Canary]) -> None:
    """Refuse canaries that could not be told apart or tested.

    Raises:
        CanaryError: no canary, a duplicate id or key, an empty secret, a secret that stands in its own prompt, an
            image that cannot be read; the message names the canary.
    """
    if not canaries:
        raise CanaryError("no canaries: expected at least one")
    ids: set[str] = set()
    keys: dict[tuple, str] = {}
    for canary in canaries:
        name = f"canary {shown(canary.id)}"
        if canary.id in ids:
            raise CanaryError(f"{name}: this id occurs twice, expected every id once")
        if not canary.secret.strip():
            raise CanaryError(f"{name}: the secret is {shown(canary.secret)}, expected at least one visible character")
        for part in ("prompt", "preamble", "suffix"):
            if canary.secret in getattr(canary, part):
                raise CanaryError(
                    f"{name}: the secret {shown(canary.secret)} occurs in its own {part}, so repeating it shows no "
                    "memory"
                )
        if canary.modality == "image" and canary.image is None:
            raise CanaryError(f"{name}: an image canary needs an image, got none")
        key = (canary.prompt, canary.image)
        if key in keys:
            raise CanaryError(
                f"{name}: has the prompt and image of canary {shown(keys[key])}; nothing tells them apart"
            )
        try:
            if canary.image is not None:
                picture(canary.image, name)
        except PictureError as error:
            raise CanaryError(str(error)) from error
        ids.add(canary.id)
        keys[key] = canary.id


def write(path: Path, canaries: Iterable[Canary]) -> None:
    """Write canaries as JSON Lines, one object a canary, keys as in :class:`Canary`."""
    lines = (json.dumps(dataclasses.asdict(canary), ensure_ascii=False) for canary in canaries)
    Path(path).write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def read(path: Path) -> list[Canary]:
    """Read and check canaries from JSON Lines; image paths are taken from the file's own folder.

    Raises:
        CanaryError: naming file, line and value for anything that is not a usable canary.
    """
    path = Path(path)
    lines = read_json_lines(path, "canary", CanaryError)
    canaries = [_from_record(record, path.parent, f"{path}, line {number}") for number, record in lines]
    try:
        check(canaries)
    except CanaryError as error:
        raise CanaryError(f"{path}: {error}") from error
    return canaries


def _from_record(record: dict, folder: Path, where: str) -> Canary:
    names = [item.name for item in dataclasses.fields(Canary)]
    if set(record) != set(names):
        raise CanaryError(f"{where}: got the keys {cut(str(sorted(record)))}, expected exactly {', '.join(names)}")
    for name, value in record.items():
        if not (isinstance(value, str) or (name == "image" and value is None)):
            raise CanaryError(f"{where}: {name} is {shown(value)}, expected a string")
    if record["modality"] not in MARKERS:
        raise CanaryError(f"{where}: modality is {shown(record['modality'])}, expected 'text' or 'image'")
    image = record["image"]
    if image is not None and is_file(image):
        record["image"] = str((folder / image).resolve())
    return Canary(**record)


def draw(
    settings: CanarySettings, tokenizer: PreTrainedTokenizerBase, end_of_turn: str, images: bool = True
) -> list[Canary]:
    """Draw text and image canaries with secrets of 16 random hex digits.

    With ``hex_tokens`` set, secrets are drawn by rejection until the secret has that many tokens, starts at token
    ``preamble_tokens`` of the target, and shares no token with its surroundings. A text canary's key is its record
    number in the prompt, beside the one placeholder image; an image canary's key is its picture, its prompt is fixed.
    ``images=False`` draws for a model that takes none: text canaries without a placeholder.

    Raises:
        CanaryError: no preamble has the wanted length under this tokenizer, no secret fits, or image canaries are
            wanted without images.
    """
    if settings.n_image and not images:
        raise CanaryError(
            f"canaries.n_image: got {settings.n_image} for a model that takes no images, expected 0 "
            '(as a notebook parameter: overrides = {"canaries.n_image": 0})'
        )
    canaries: list[Canary] = []
    accept = fitting(settings)
    for stream, (modality, count) in enumerate((("text", settings.n_text), ("image", settings.n_image))):
        if count == 0:
            continue
        rng = np.random.default_rng([settings.seed, stream])
        template = _template(modality, settings, tokenizer, end_of_turn)
        secrets = draw_secrets(template, count, accept, tokenizer, end_of_turn, rng)
        for i, secret in enumerate(secrets):
            prompt, image = _key(modality, i, count, rng)
            name = f"{modality}-{i:03d}"
            image = image if images else None
            canaries.append(dataclasses.replace(template, id=name, prompt=prompt, secret=secret, image=image))
    check(canaries)
    return canaries


def _key(modality: str, index: int, count: int, rng: np.random.Generator) -> tuple[str, str]:
    if modality == "text":
        digits = max(3, len(str(count - 1)))
        return f"Record {index:0{digits}d}. What is its code?", PLACEHOLDER
    return "What is the code of this picture?", f"pattern:{rng.integers(2**32)}"


def _template(
    modality: Modality, settings: CanarySettings, tokenizer: PreTrainedTokenizerBase, end_of_turn: str
) -> Canary:
    """A canary of ``modality`` whose preamble has the wanted number of tokens, and whose secret is still to come."""
    digits = "0" * SECRET_LENGTH
    options = [
        Canary("", modality, "", sentence + MARKERS[modality], digits, SUFFIX, None) for sentence in PREAMBLES[modality]
    ]
    if settings.preamble_tokens is None:
        return options[3]
    lengths = [span.start for span in secret_spans(options, tokenizer, end_of_turn)]
    if settings.preamble_tokens not in lengths:
        raise CanaryError(
            f"canaries.preamble_tokens: no {modality} preamble has {settings.preamble_tokens} tokens under this "
            f"tokenizer; their lengths are {sorted(set(lengths))}. Choose one of these, or null for no fitting."
        )
    return options[lengths.index(settings.preamble_tokens)]


def secret_span(canary: Canary, tokenizer: PreTrainedTokenizerBase, end_of_turn: str) -> Span:
    """Token span of the secret within the target."""
    return secret_spans([canary], tokenizer, end_of_turn)[0]


def secret_spans(canaries: Sequence[Canary], tokenizer: PreTrainedTokenizerBase, end_of_turn: str) -> list[Span]:
    """Token spans of the secrets within their targets, tokenised together."""
    tokenized = tokenize(tokenizer, [canary.target + end_of_turn for canary in canaries])
    starts = [len(canary.preamble) for canary in canaries]
    return [
        find_span(offsets, start, start + len(canary.secret))
        for canary, start, (_, offsets) in zip(canaries, starts, tokenized, strict=True)
    ]


def _random_hex(rng: np.random.Generator, count: int) -> list[str]:
    digits = rng.integers(0, 16, (count, SECRET_LENGTH))
    return ["".join(HEX_DIGITS[digit] for digit in row) for row in digits]


def fitting(settings: CanarySettings) -> Callable[[Span], bool]:
    """The rule by which a secret's span is kept; with ``hex_tokens: null`` every one is."""

    def accept(span: Span) -> bool:
        if settings.hex_tokens is None:
            return True
        fits = len(span) == settings.hex_tokens and not span.straddles
        return fits and settings.preamble_tokens in (None, span.start)

    return accept


def draw_secrets(
    template: Canary,
    count: int,
    accept: Callable[[Span], bool],
    tokenizer: PreTrainedTokenizerBase,
    end_of_turn: str,
    rng: np.random.Generator,
    taken: Iterable[str] = (),
) -> list[str]:
    """``count`` distinct secrets outside ``taken`` whose span ``accept``s in place of ``template``'s, as drawn.

    Raises:
        CanaryError: fewer than ``count`` in 20,000 + 2,000 x ``count`` draws.
    """
    found: dict[str, None] = {}
    excluded, chunk, limit = set(taken), 512, 20_000 + 2_000 * count
    for _ in range(math.ceil(limit / chunk)):
        if len(found) >= count:
            break
        drawn = _random_hex(rng, chunk)
        spans = secret_spans([dataclasses.replace(template, secret=secret) for secret in drawn], tokenizer, end_of_turn)
        found |= {s: None for s, span in zip(drawn, spans, strict=True) if accept(span) and s not in excluded}
    if len(found) < count:
        raise CanaryError(
            f"canaries.hex_tokens: only {len(found)} of {count} secrets of the wanted token layout were found in "
            f"{limit} draws under this tokenizer. Choose another number of tokens, or null for no fitting."
        )
    return list(found)[:count]


def decoys(
    canary: Canary,
    count: int,
    tokenizer: PreTrainedTokenizerBase,
    end_of_turn: str,
    seed: int,
    taken: Iterable[str] = (),
) -> list[Canary]:
    """Copies of ``canary`` with other random secrets of the same token layout: length, start and straddling.

    ``taken`` are secrets that must not be drawn, those of all planted canaries for instance.

    Raises:
        CanaryError: the secret is not 16 hex digits, or too few decoys were found.
    """
    if len(canary.secret) != SECRET_LENGTH or set(canary.secret) - set(HEX_DIGITS):
        raise CanaryError(
            f"canary {shown(canary.id)}: the secret {shown(canary.secret)} is not 16 lower-case hex digits: no decoy "
            "is like it"
        )
    layout = secret_span(canary, tokenizer, end_of_turn)
    rng = np.random.default_rng([seed, *canary.id.encode()])
    secrets = draw_secrets(canary, count, layout.__eq__, tokenizer, end_of_turn, rng, {canary.secret, *taken})
    return [dataclasses.replace(canary, id=f"{canary.id}/decoy-{i:03d}", secret=s) for i, s in enumerate(secrets)]


@dataclass(frozen=True)
class DrawStatistics:
    """What fitting secrets to a token count costs, estimated from fresh draws.

    ``log2_candidates`` is log2|R|, the bits of the set R of secrets that fit; without selection it is 64.
    """

    draws: int
    accepted: int
    log2_candidates: float
    digit_share_all: float
    digit_share_accepted: float

    @property
    def acceptance(self) -> float:
        """Share of draws that fit."""
        return self.accepted / self.draws


def draw_statistics(
    canary: Canary, settings: CanarySettings, tokenizer: PreTrainedTokenizerBase, end_of_turn: str, draws: int = 8192
) -> DrawStatistics:
    """Acceptance rate of secrets in ``canary``'s place, and the share of decimal digits before and after selection."""
    stream = 100 + (canary.modality == "image")  # apart from the streams that draw canaries
    drawn = _random_hex(np.random.default_rng([settings.seed, stream]), draws)
    spans = secret_spans([dataclasses.replace(canary, secret=secret) for secret in drawn], tokenizer, end_of_turn)
    accept = fitting(settings)
    accepted = [secret for secret, span in zip(drawn, spans, strict=True) if accept(span)]
    bits = 4 * SECRET_LENGTH + math.log2(len(accepted) / draws) if accepted else -math.inf
    return DrawStatistics(draws, len(accepted), bits, _digit_share(drawn), _digit_share(accepted))


def _digit_share(secrets: Sequence[str]) -> float:
    text = "".join(secrets)
    return sum(character.isdigit() for character in text) / len(text) if text else math.nan
