"""Decoys for secrets of any format: drawn by the secret's own rule, or by the user's, in the secret's token layout."""

import copy
import dataclasses
import importlib
import itertools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lib.audit import formats
from lib.audit.formats import Format
from lib.audit.reader import Item, is_unicode
from lib.audit.settings import MOST
from lib.canaries import Canary, CanaryError, secret_spans
from lib.encoding import Encoded, Encoder
from lib.errors import cut, shown
from lib.exposure import DecoySet
from lib.files import decoded, read_json_lines, sha256

CHUNK, CHUNKS = 256, MOST // 256  # candidates tokenised at a time, and how often for one canary
PATIENCE = 8  # chunks after which the search ends if all of them would not give enough
Generator = Callable[[str, int, np.random.Generator], Sequence[str]]


class DecoyError(CanaryError):
    """Decoys of the user's own cannot be used."""


@dataclass(frozen=True)
class Drawn:
    """A canary's secret and its decoys.

    ``layout`` is ``own`` where all have the secret's tokens: as many, from the same place on, shared with the same
    neighbours; ``free`` where too few such exist; ``none`` without any decoy.
    """

    decoys: DecoySet
    layout: str


class Source:
    """Where decoys come from: a canary's stated generator, or ``decoys`` of :class:`lib.audit.settings.Audit`.

    ``states_p_values``: a canary's stated generator draws both its secret and its decoys, so that among them every rank
    is as likely as any other for a secret nobody trained on.

    Raises:
        DecoyError: a file or function that cannot be had.
    """

    def __init__(self, decoys: str):
        self.words = decoys == "words"
        self.states_p_values = decoys in ("characters", "words")
        self._pool: list[str] | None = None
        self._by_id: dict[str, list[str]] | None = None
        self._function: Generator | None = None
        self._repeats = False  # whether the function was seen to give the same for the same rng
        if decoys.endswith(".txt"):
            self._pool = [line.strip() for line in decoded(Path(decoys), "decoy", DecoyError).splitlines()]
            self._pool = list(dict.fromkeys(filter(None, self._pool)))
            _refuse_empty(decoys, self._pool)
        elif decoys.endswith(".jsonl"):
            self._by_id = _by_id(Path(decoys))
            _refuse_empty(decoys, self._by_id)
        elif not self.states_p_values:
            self._function = _imported(decoys)

    def candidates(self, item: Item, rng: np.random.Generator) -> Iterator[list[str]]:
        """Strings to put in place of an item's secret, chunk by chunk; repetitions may be among them."""
        secret = item.canary.secret
        if self._pool is not None or self._by_id is not None:
            pool = self._pool if self._by_id is None else self._by_id.get(item.canary.id, [])
            order = [pool[i] for i in rng.permutation(len(pool))]
            yield from (order[start : start + CHUNK] for start in range(0, len(order), CHUNK))
        elif self._function is not None:
            for _ in range(CHUNKS):
                yield self._called(secret, rng)
        else:
            rule = self.format_of(item)
            for _ in range(CHUNKS if rule.bits else 0):
                yield rule.draw(CHUNK, rng)

    def format_of(self, item: Item) -> Format:
        """The rule by which an item's decoys are drawn, where no file and no function gives them."""
        if item.generator is not None:
            return formats.parse(item.generator)
        return formats.like(item.canary.secret, self.words)

    def _called(self, secret: str, rng: np.random.Generator) -> list[str]:
        again = None if self._repeats else copy.deepcopy(rng)
        drawn = self._asked(secret, rng)
        wrong = [value for value in drawn if not isinstance(value, str) or not value.strip() or not is_unicode(value)]
        if wrong:
            raise DecoyError(
                f"decoys: the generator gave {shown(wrong[0])} for {shown(secret)}, expected visible texts"
            )
        if again is not None and self._asked(secret, again) != drawn:
            raise DecoyError(
                f"decoys: the generator gave other texts for {shown(secret)} when it was called again with the same "
                "rng; expected all chance to come from rng, so that every model is asked for the same decoys"
            )
        self._repeats = True
        return drawn

    def _asked(self, secret: str, rng: np.random.Generator) -> list[str]:
        try:
            given = self._function(secret, CHUNK, rng)
            if not isinstance(given, str | bytes):
                return list(itertools.islice(given, CHUNK))
        except Exception as error:  # the user's own code may raise anything
            reason = cut(f"{type(error).__name__}: {error}")
            raise DecoyError(f"decoys: the generator failed for {shown(secret)} ({reason}); expected texts") from error
        raise DecoyError(
            f"decoys: the generator gave the one text {shown(given)} for {shown(secret)}, expected a list of texts"
        )


def _refuse_empty(name: str, found: Collection[str]) -> None:
    if not found:
        raise DecoyError(f"decoys: {name} holds none; expected a secret on every line")


def _by_id(path: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line, record in read_json_lines(path, "decoy", DecoyError):
        name, secret = record.get("id"), record.get("secret")
        if not isinstance(name, str) or not isinstance(secret, str) or not secret.strip():
            raise DecoyError(f"{path}, line {line}: got {shown(record)}, expected the texts id and secret")
        found.setdefault(name, []).append(secret)
    return {name: list(dict.fromkeys(secrets)) for name, secrets in found.items()}


def identity(decoys: str) -> str | list[str]:
    """What decoys depend on: a file by its checksum, a function by its name and the checksums of the files that it is
    named and defined in, anything else by its name.

    Raises:
        DecoyError: a function that cannot be had.
    """
    if Path(decoys).is_file():
        return sha256(Path(decoys))
    if ":" not in decoys or decoys.endswith((".txt", ".jsonl")):
        return decoys
    modules = {decoys.partition(":")[0], getattr(_imported(decoys), "__module__", None)}
    files = {getattr(sys.modules.get(name), "__file__", None) for name in modules}
    return [decoys, *sorted(sha256(Path(file)) for file in files if file and Path(file).is_file())]


def _imported(name: str) -> Generator:
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # the user's own module may raise anything
        raise DecoyError(
            f"decoys: {shown(name)} cannot be imported ({cut(str(error))}); expected module:function"
        ) from error
    if not callable(found):
        raise DecoyError(
            f"decoys: {shown(name)} is {shown(found)}, expected a function of a secret, a count and an rng"
        )
    return found


def encodable(encoder: Encoder, canaries: Sequence[Canary]) -> tuple[list[Encoded | None], list[str]]:
    """Every canary encoded, or None where that cannot be, and the reasons in the same order (empty where it can)."""
    try:
        return list(encoder.encode(canaries)), [""] * len(canaries)
    except (ValueError, TypeError) as error:  # CanaryError among them; a tokenizer raises the others
        if len(canaries) == 1:
            return [None], [str(error)]
    parts = [encodable(encoder, [canary]) for canary in canaries]
    return [rows[0] for rows, _ in parts], [reasons[0] for _, reasons in parts]


def draw(
    encoder: Encoder, source: Source, item: Item, count: int, seed: int, planted: frozenset[str] = frozenset()
) -> Drawn:
    """Up to ``count`` distinct decoys for an item, the same for every model of one tokenizer.

    Those with the secret's own token layout, since fewer tokens are likelier ones. Where fewer than ``count`` such are
    found among the first candidates, those of any layout are taken if they are more. ``planted`` secrets are left out.
    """
    canary = item.canary
    own = encoder.encode([canary])[0]
    rng = np.random.default_rng([seed, 2, *canary.id.encode()])
    seen, alike, free = {canary.secret}, [], []
    for number, chunk in enumerate(source.candidates(item, rng), 1):
        fresh = [secret for secret in dict.fromkeys(chunk) if secret not in seen and secret not in planted]
        seen.update(fresh)
        free += _rows(encoder, canary, fresh[: max(0, count - len(free))])
        rows = _rows(encoder, canary, _alike(encoder, canary, fresh))
        alike += [row for row in rows if row.spans["hex"] == own.spans["hex"]]
        if len(alike) >= count or (number >= PATIENCE and len(alike) * CHUNKS < count * number):
            break
    chosen, layout = (alike[:count], "own") if len(alike) >= min(count, len(free)) else (free, "free")
    kinds = ("secret",) + ("random",) * len(chosen)
    return Drawn(DecoySet(canary.id, kinds, (own, *chosen)), layout if chosen else "none")


def _alike(encoder: Encoder, canary: Canary, secrets: Sequence[str]) -> list[str]:
    """Secrets with the canary's token layout in a target that stands alone: quick, and to be confirmed in its place."""
    tokenizer, closing = encoder.backbone.tokenizer, encoder.closing
    copies = [dataclasses.replace(canary, secret=secret) for secret in secrets]
    try:
        own, *spans = secret_spans([canary, *copies], tokenizer, closing)
    except ValueError:  # the tokenizer leaves out a part of some text
        return list(secrets)
    return [secret for secret, span in zip(secrets, spans, strict=True) if span == own]


def _rows(encoder: Encoder, canary: Canary, secrets: Iterable[str]) -> list[Encoded]:
    """The canary with each of the secrets, encoded, without those that its own text holds or nothing can spell."""
    fit = [s for s in secrets if s not in canary.prompt + "\0" + canary.preamble + "\0" + canary.suffix]
    copies = [dataclasses.replace(canary, id=f"{canary.id}/{secret}", secret=secret) for secret in fit]
    return [row for row in encodable(encoder, copies)[0] if row is not None] if copies else []
