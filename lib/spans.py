"""Where a stretch of text lies among its tokens, found by character offsets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from lib.errors import LeakbookError

Offsets = Sequence[tuple[int, int]]


class TokenizerError(LeakbookError, ValueError):
    """A tokenizer cannot read a text."""


@dataclass(frozen=True)
class Span:
    """Token positions ``start`` up to, not including, ``stop``.

    ``straddles_start``: the first token also covers characters before the text that was looked for;
    ``straddles_end``: the last one also covers characters behind it.
    """

    start: int
    stop: int
    straddles_start: bool = False
    straddles_end: bool = False

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def straddles(self) -> bool:
        """Whether a token at either end belongs only in part to the span."""
        return self.straddles_start or self.straddles_end

    def shift(self, by: int) -> "Span":
        """The same span counted from position ``-by``."""
        return Span(self.start + by, self.stop + by, self.straddles_start, self.straddles_end)


def read(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], **options: bool) -> Mapping:
    """What a tokenizer gives for some texts.

    Raises:
        TokenizerError: it fails, for a character that it does not know for instance.
    """
    try:
        return tokenizer(list(texts), return_attention_mask=False, **options)
    except Exception as error:  # tokenizers raises plain ones
        reason = f"{type(error).__name__}: {error}"[:200]
        raise TokenizerError(f"the tokenizer cannot read {repr(texts[0])[:80]} ({reason})") from error


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[tuple[list[int], Offsets]]:
    """Token ids and character offsets of every text; nothing is added, and special tokens in a text count as such.

    Some tokenizers leave white space out of a token's offsets. It is given back to the token that carries it, which
    is the one behind it, so that every character of a text belongs to a token.

    Raises:
        TokenizerError: see :func:`read`.
    """
    encoded = read(tokenizer, texts, add_special_tokens=False, return_offsets_mapping=True)
    return [
        (ids, _close_gaps(offsets, len(text)))
        for ids, offsets, text in zip(encoded["input_ids"], encoded["offset_mapping"], texts, strict=True)
    ]


def _close_gaps(offsets: Offsets, length: int) -> Offsets:
    covered, closed = 0, []
    for start, stop in offsets:
        closed.append((min(start, covered), max(stop, min(start, covered))))
        covered = max(covered, stop)
    if closed and covered < length:
        closed[-1] = (closed[-1][0], length)
    return closed


def find_span(offsets: Offsets, start: int, stop: int) -> Span:
    """Span of all tokens that overlap characters ``start`` up to, not including, ``stop``.

    A token that reaches over a boundary is part of the span, and flagged. Two byte-level tokens may share one
    character; both are then part of it.

    Raises:
        ValueError: the stretch is empty, or lies outside what the tokens cover.
    """
    if not 0 <= start < stop:
        raise ValueError(f"characters {start} to {stop} are not a stretch of text: expected 0 <= start < stop")
    inside = [i for i, (first, last) in enumerate(offsets) if first < stop and last > start]
    if not inside or max(offsets[i][1] for i in inside) < stop or min(offsets[i][0] for i in inside) > start:
        raise ValueError(f"characters {start} to {stop} lie outside the text that the tokens cover")
    first, last = inside[0], inside[-1]
    return Span(
        start=first,
        stop=last + 1,
        straddles_start=any(offsets[i][0] < start for i in inside),
        straddles_end=any(offsets[i][1] > stop for i in inside),
    )


def spell(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The exact text of ``ids``: special tokens kept, no clean-up of spaces."""
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
