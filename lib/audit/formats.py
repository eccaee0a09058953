"""Formats of secrets: rules from which a secret and its decoys are drawn alike, each character or word on its own."""

import functools
import json
import math
import re
import string
import unicodedata
from dataclasses import dataclass

import numpy as np

from lib import paths
from lib.errors import LeakbookError, shown

HEX = "0123456789abcdef"
DOMAINS = ("com", "net", "org")
WORD_BITS = 11.0  # what a word of unknown origin counts at most: one of two thousand
SHORTEST_HEX_RUN = 6  # characters; a shorter run of a-f and digits may as well be anything
KINDS = "hex:N, digits:N, letters:N, words:N, email, like:EXAMPLE or wordlike:EXAMPLE"


class FormatError(LeakbookError, ValueError):
    """A format is not understood, or cannot give what is asked of it."""


@dataclass(frozen=True)
class Format:
    """A rule that draws strings: one of the choices of every slot, uniformly and independently, joined.

    ``spec`` is its name, see :func:`parse`.
    """

    spec: str
    slots: tuple[tuple[str, ...], ...]

    @property
    def bits(self) -> float:
        """log2 of how many strings the rule can give."""
        return sum(math.log2(len(choices)) for choices in self.slots)

    def draw(self, count: int, rng: np.random.Generator) -> list[str]:
        """``count`` strings, repetitions included."""
        columns = [rng.integers(len(choices), size=count) for choices in self.slots]
        rows = np.stack(columns, axis=1) if columns else np.zeros((count, 0), dtype=int)
        return ["".join(choices[i] for choices, i in zip(self.slots, row, strict=True)) for row in rows]

    def matches(self, text: str) -> bool:
        """Whether the rule can give ``text``."""
        pattern = "".join(f"(?:{'|'.join(map(re.escape, choices))})" for choices in self.slots)
        return re.fullmatch(pattern, text) is not None


def parse(spec: str) -> Format:
    """The format of that name.

    ``hex:N``, ``digits:N``, ``letters:N`` (lower case): N characters. ``words:N``: N words of :func:`word_list`.
    ``email``: word.word and two digits at a word's domain. ``like:EXAMPLE``: every character replaced by one of its
    class (:func:`like`); ``wordlike:EXAMPLE``: the same, but runs of letters replaced by words.

    Raises:
        FormatError: naming what is known.
    """
    kind, _, argument = spec.partition(":")
    if kind in ("hex", "digits", "letters", "words"):
        if not (argument.isascii() and argument.isdigit() and 0 < int(argument) <= 256):
            raise FormatError(f"format {shown(spec)}: expected {kind}:N with N from 1 to 256")
        return Format(spec, _repeated(kind, int(argument)))
    if spec == "email":
        words, digits = word_list(), tuple(string.digits)
        return Format(spec, (words, (".",), words, digits, digits, ("@",), words, (".",), DOMAINS))
    if kind in ("like", "wordlike") and argument:
        return like(argument, words=kind == "wordlike")
    raise FormatError(f"format {shown(spec)} is not known: expected {KINDS}")


def _repeated(kind: str, count: int) -> tuple[tuple[str, ...], ...]:
    if kind == "words":
        return ((word_list(), (" ",)) * count)[:-1]
    alphabet = {"hex": HEX, "digits": string.digits, "letters": string.ascii_lowercase}[kind]
    return (tuple(alphabet),) * count


def like(example: str, words: bool = False) -> Format:
    """The format of an example: what a character is (a digit, a small letter ...) is kept, which one is drawn.

    A run of at least six letters a-f and digits, with both among them, is read as hexadecimal. Letters beyond ASCII are
    drawn from the 64 code points around them, of the same category; everything else stays. With ``words`` every run
    of three or more ASCII letters becomes a word of :func:`word_list` in the same case.
    """
    slots: list[tuple[str, ...]] = []
    for run in re.findall(r"[0-9A-Za-z]+|[^0-9A-Za-z]+", example):
        if _is_hex(run):
            alphabet = HEX.upper() if run.upper() == run else HEX
            slots += [tuple(alphabet)] * len(run)
        elif words:
            for part in re.findall(r"[A-Za-z]{3,}|.", run, re.DOTALL):
                slots.append(_words_like(part) if len(part) > 1 else _class_of(part))
        else:
            slots += map(_class_of, run)
    return Format(f"{'wordlike' if words else 'like'}:{example}", tuple(slots))


def _is_hex(run: str) -> bool:
    letters, digits = re.search("[a-fA-F]", run), re.search("[0-9]", run)
    same_case = run in (run.lower(), run.upper())
    return bool(len(run) >= SHORTEST_HEX_RUN and letters and digits and same_case and re.fullmatch("[0-9a-fA-F]+", run))


def _class_of(character: str) -> tuple[str, ...]:
    for alphabet in (string.digits, string.ascii_lowercase, string.ascii_uppercase):
        if character in alphabet:
            return tuple(alphabet)
    category = unicodedata.category(character)
    if character.isascii() or category[0] != "L" and category != "Nd":
        return (character,)
    first = ord(character) // 64 * 64
    block = (chr(code) for code in range(first, first + 64))
    return tuple(c for c in block if unicodedata.category(c) == category)


def _words_like(run: str) -> tuple[str, ...]:
    if run.isupper():
        return tuple(word.upper() for word in word_list())
    return tuple(word.capitalize() for word in word_list()) if run[0].isupper() else word_list()


@functools.cache
def word_list() -> tuple[str, ...]:
    """English words of four to eight small letters: those of the texts in ``params/prompts.jsonl``, sorted."""
    lines = (paths.PARAMS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    texts = (json.loads(line)["text"] for line in lines if line.strip())
    return tuple(sorted({word for text in texts for word in re.findall(r"\b[a-z]{4,8}\b", text)}))


def surprise(secret: str, stated: str | None) -> float:
    """Bits that a secret holds at most, before any model is asked.

    Those of the ``stated`` format, where the secret was drawn by one. Otherwise those of :func:`like`, but a run of
    letters counts at most as one word: names and words are guessed more easily than letters.
    """
    if stated is not None:
        return parse(stated).bits
    bits = 0.0
    for run in re.findall(r"[0-9A-Za-z]+|[^0-9A-Za-z]+", secret):
        if _is_hex(run):
            bits += 4 * len(run)
            continue
        for part in re.findall(r"[A-Za-z]+|.", run, re.DOTALL):
            whole = sum(math.log2(len(_class_of(character))) for character in part)
            bits += min(whole, WORD_BITS) if part[0].isalpha() and part.isascii() else whole
    return bits
