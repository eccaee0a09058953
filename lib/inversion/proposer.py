"""Guesses for all tokens of a prompt at once, from its states alone and without a model call.

Three things tell of a token: a linear probe reads its embedding off the state; tables hold what state every token has
behind an ordinary prefix, which resembles the state that it has behind any; and the state before says what the model
expected, since h_{t-1} behind all layers and the norm *is* the input of the output layer. Guesses cost matrix products;
whether they are right is for :mod:`lib.inversion.verified` to find out.
"""

import functools
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lib import files, paths
from lib.inversion import corpus
from lib.inversion.reader import InversionError, Reader

VERSION = 3  # raised by hand when a proposer fitted before would be another one
TOKENS = 24_000  # read to fit a probe: half text, half random ids
SEQUENCE = 128  # tokens of a sequence that is read
BATCH = 8
RIDGE = 1e-3  # of the states' mean square
TEMPERATURE, FLOOR = 0.2, 1.5e-8  # of both cosines; added to probabilities (e^-18)
WORDS = 0.3  # of all expectation, for ids that continue a word that a text begins with
LONGEST_WORD = 6  # ids
PREFIXES = {
    "second": "The",
    "later": "It is a",
}  # behind which tables' states are read: a second token's, a later one's


class Usual:
    """States [V, d] that all tokens have behind one ordinary prefix; their mean, what they are without it, and how long
    that is."""

    def __init__(self, states: Tensor):
        self.states, self.middle = states, states.mean(0)
        self.centred = states - self.middle
        self.lengths = self.centred.norm(dim=-1).clamp(min=1e-12)


class Proposer:
    """A linear probe [d + 1, d] from states to unit embeddings, and the usual states of a prompt's ``second`` token and
    of ``later`` ones; ``seconds`` that these took to set up."""

    def __init__(self, reader: Reader, probe: Tensor, second: Tensor, later: Tensor, seconds: float = 0.0):
        self.reader, self.probe, self.seconds = reader, probe, seconds
        self.second, self.later = Usual(second), Usual(later)
        self.unit = torch.nn.functional.normalize(reader.embedding, dim=-1)

    def usual(self, position: int) -> Usual:
        """Which of the tables resembles a position most."""
        return self.second if position == 1 else self.later

    @functools.cached_property
    def _continuations(self) -> dict[tuple[int, ...], list[int]]:
        return corpus.continuations(self.reader.backbone.tokenizer)

    def word_prior(self, expected: Tensor, before: Tensor) -> Tensor:
        """Expectations [V] behind the ids ``before`` [t] of a whole text; where these may be the beginning of a word, a
        part of them goes to what may continue it, evenly.

        A language model that never saw a text begin with half a word knows little of its other half.
        """
        following = self._continuations.get(tuple(before.tolist()), []) if len(before) < LONGEST_WORD else []
        following = [one for one in following if one < len(expected)]
        if not following:
            return expected
        mixed = (1 - WORDS) * expected
        mixed[following] += WORDS / len(following)
        return mixed

    def likeness(self, states: Tensor) -> Tensor:
        """How well states [..., d] go with every token [..., V]: the cosines of what the probe reads with the token's
        embedding, and of the state with the token's in the table (both less the table's mean), over 0.2."""
        read = torch.nn.functional.normalize(_with_one(states) @ self.probe, dim=-1) @ self.unit.T
        later = self.later
        seen = torch.nn.functional.normalize(states - later.middle, dim=-1) @ later.centred.T / later.lengths
        return (read + seen) / TEMPERATURE

    def best(self, states: Tensor, expected: Tensor | None) -> Tensor:
        """The most promising token [B] for states [B, d]; by likeness alone where nothing is known of expectations."""
        score = self.likeness(states)
        return (score if expected is None else score + torch.log(expected + FLOOR)).argmax(-1)

    def order(self, states: Tensor, probabilities: Tensor) -> Tensor:
        """The vocabulary [B, V], most promising first, for states [B, d] where the model expected ``probabilities``.

        Every token takes the better of its ranks by two scores: likeness + log(p + e^-18), and p alone; the first is
        right more often, and what it misses the second may have.
        """
        score = self.likeness(states) + torch.log(probabilities + FLOOR)
        by_score, by_expectation = ranks(-score), ranks(-probabilities)
        return (torch.minimum(by_score, by_expectation) * 2 + (by_expectation < by_score)).argsort(-1)


def ranks(scores: Tensor) -> Tensor:
    """Ranks along the last dimension, 0 for the smallest."""
    order = scores.argsort(-1)
    places = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def _with_one(states: Tensor) -> Tensor:
    return torch.cat([states, states.new_ones(*states.shape[:-1], 1)], -1)


def fitted(reader: Reader, tokens: int = TOKENS, packages: Sequence[str] = corpus.FITTED, seed: int = 0) -> Proposer:
    """The proposer of a model and convention, from the cache folder or fitted and kept there.

    ``packages`` are those whose docstrings it is fitted on, half and half with random ids, ``tokens`` in all. With it
    comes the reader's table of one-token prompts. Three tables of the embedding matrix's size are kept.

    Raises:
        InversionError: what lies in the cache is of another model, or damaged.
    """
    path, identity = _place(reader, tokens, packages, seed)
    with files.locked(path):
        if not path.exists():
            started = time.perf_counter()
            probe = fit(reader, sequences(reader, corpus.docstrings(packages), tokens, seed))
            found = {"probe": probe.contiguous(), "first": reader.first_states}
            found |= {name: usual_states(reader, prefix) for name, prefix in PREFIXES.items()}
            about = {"identity": json.dumps(identity), "seconds": f"{time.perf_counter() - started:.1f}"}
            with files.building(path) as unfinished:
                save_file(found, unfinished, metadata=about)
    return read(reader, path)


def is_kept(reader: Reader) -> bool:
    """Whether the cache folder holds what :func:`fitted` gives by default."""
    return _place(reader, TOKENS, corpus.FITTED, 0)[0].exists()


def _place(reader: Reader, tokens: int, packages: Sequence[str], seed: int) -> tuple[Path, dict]:
    identity = {
        "version": VERSION,
        "model": reader.backbone.revision,
        "name": reader.backbone.name,
        "convention": str(reader.convention),
        "rows": len(reader.embedding),
        "tokens": tokens,
        "seed": seed,
        "dtype": str(reader.embedding.dtype),
        "corpus": corpus.versions(packages),
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    return paths.cache() / "proposers" / f"{key}.safetensors", identity


def read(reader: Reader, path: Path) -> Proposer:
    """A proposer that was kept; the reader takes over its table of one-token prompts.

    Raises:
        InversionError: it is of another width or vocabulary than the reader's, or cannot be read.
    """
    try:
        with safe_open(path, "pt", device=str(reader.device)) as kept:
            probe, first, second, later = (kept.get_tensor(name) for name in ("probe", "first", *PREFIXES))
            seconds = float(kept.metadata()["seconds"])
    except (OSError, KeyError, ValueError, TypeError, SafetensorError) as error:
        raise InversionError(f"proposer {path}: cannot be read ({error}); delete it, and it is fitted again") from error
    if probe.shape != (reader.width + 1, reader.width) or later.shape != reader.embedding.shape:
        raise InversionError(
            f"proposer {path}: is for {len(later)} ids of width {probe.shape[1]}, expected {len(reader.embedding)} of "
            f"width {reader.width}: of another model"
        )
    reader.first_states = first
    return Proposer(reader, probe, second, later, seconds)


def usual_states(reader: Reader, prefix: str = PREFIXES["later"]) -> Tensor:
    """States [V, d] of every token behind one prefix."""
    ids = reader.backbone.tokenizer(prefix, add_special_tokens=False)["input_ids"]
    cache = reader.read(torch.tensor([ids], dtype=torch.long, device=reader.device))
    return reader.candidates(torch.arange(len(reader.embedding), device=reader.device), cache)


def sequences(reader: Reader, texts: Sequence[str], tokens: int, seed: int) -> Tensor:
    """Ids [n, 128] to fit on: half of them text, half drawn at random."""
    half = max(1, tokens // 2 // SEQUENCE)
    rng = torch.Generator().manual_seed(seed)
    rows: list[Tensor] = []
    for place in torch.randperm(len(texts), generator=rng).tolist():
        ids = reader.backbone.tokenizer(texts[place], add_special_tokens=False)["input_ids"]
        rows += torch.tensor(ids[: len(ids) // SEQUENCE * SEQUENCE], dtype=torch.long).view(-1, SEQUENCE)
        if len(rows) >= half:
            break
    drawn = torch.randint(len(reader.embedding), (half, SEQUENCE), generator=rng)
    return torch.cat([torch.stack(rows[:half]), drawn]) if rows else drawn


def fit(reader: Reader, ids: Tensor) -> Tensor:
    """The ridge regression [d + 1, d] from states to unit embeddings, first positions left out, in float64."""
    width = reader.width
    square = torch.zeros(width + 1, width + 1, dtype=torch.float64)
    cross = torch.zeros(width + 1, width, dtype=torch.float64)
    unit = torch.nn.functional.normalize(reader.embedding, dim=-1)
    for part in ids.split(BATCH):
        part = part.to(reader.device)
        states = _with_one(reader.states(part)[:, 1:]).flatten(0, 1).cpu().double()
        square += states.T @ states
        cross += states.T @ unit[part[:, 1:]].flatten(0, 1).cpu().double()
    ridge = RIDGE * square.diagonal().mean() * torch.eye(width + 1, dtype=torch.float64)
    return torch.linalg.solve(square + ridge, cross).to(unit)
