"""Guesses for all tokens of a prompt at once, from its states alone and without a model call.

A token's state is, but for a rest, a sum of two: what the token brings, whatever stands before it, and what the state
before brings, whatever the token. Both are linear in what is known, the token's embedding and its state as a prompt of
its own, and the state before; the rest is taken for normal with one covariance for all tokens (:class:`Usual`). With
the language model's expectation, which h_{t-1} behind all layers and the norm holds in itself, Bayes' rule then ranks
the vocabulary:

    log p(v | h_t, h_{t-1}) = log p(v | h_{t-1}) - w/2 |h_t - A x_v - B h_{t-1} - c|^2_S + a constant

This is ours. A guess costs a matrix product; whether it is right is for :mod:`lib.inversion.verified` to find out.
"""

import functools
import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lib import files, paths
from lib.inversion import corpus, fitting
from lib.inversion.fitting import TOKENS, Fitted
from lib.inversion.reader import InversionError, Reader

VERSION = 4  # raised by hand when a proposer fitted before would be another one
WEIGHT = 0.1  # w: a state's coordinates tell less together than if the rest were normal
EVEN = 0.5  # of all expectation is spread evenly: the text may be none
WORDS = 0.3  # of all expectation, for ids that continue a word that a text begins with
LONGEST_WORD = 6  # ids
SAMPLED = 64  # weights of every matrix that a digest takes, or a few more
NONE = -1  # where a word has no further id
KINDS = ("second", "later")  # tokens of a prompt; behind a single one states are of another make


class Usual:
    """What states tokens have: v behind a state h about N(``table``[v] + h B + c, S).

    Of ``features`` [V, f] of all tokens, fitted ``weights`` [f + d + 1, d] (those of a token's features, B, c) and the
    ``covariance`` S [d, d].
    """

    def __init__(self, features: Tensor, weights: Tensor, covariance: Tensor):
        self.table = features @ weights[: features.shape[1]]
        self.context, self.constant = weights[features.shape[1] : -1], weights[-1]
        self.covariance = covariance
        self.whitened = functools.lru_cache(maxsize=2)(self._whitened)

    def behind(self, before: Tensor) -> Tensor:
        """What states [..., d] before a token bring to its own [..., d]."""
        return before @ self.context + self.constant

    def _whitened(self, noise: float) -> tuple[Tensor, Tensor, Tensor]:
        """A root L [d, d] of S^-1 = L L', with ``noise`` on every coordinate added to S; the table times L, and the
        squared lengths [V] of its rows."""
        wide = self.covariance.cpu().double()
        wide = wide + noise * torch.eye(len(wide), dtype=torch.float64)
        root = torch.linalg.cholesky(torch.linalg.inv(wide)).to(self.table)
        table = self.table @ root
        return root, table, table.square().sum(-1)

    def misfit(self, states: Tensor, before: Tensor, noise: float = 0.0) -> Tensor:
        """Mahalanobis distances |h - A x_v - B h' - c|^2_S [..., V] of states [..., d] behind others [..., d]."""
        root, table, lengths = self.whitened(noise)
        own = (states - self.behind(before)) @ root
        return own.square().sum(-1, keepdim=True) - 2 * own @ table.T + lengths


class Proposer:
    """What states a prompt's ``second`` token and ``later`` ones have, each as (weights, covariance) of :class:`Usual`;
    how ``words`` are split at a text's beginning; ``seconds`` that these took to set up."""

    def __init__(
        self,
        reader: Reader,
        second: Fitted,
        later: Fitted,
        words: Iterable[Sequence[int]] = (),
        seconds: float = 0.0,
    ):
        self.reader, self.seconds = reader, seconds
        self.continuations = corpus.continuations(words)
        self.unit = torch.nn.functional.normalize(reader.embedding, dim=-1)
        known = fitting.features(reader)
        self._usual = [Usual(known, *one) for one in (second, later)]

    def usual(self, position: int) -> Usual:
        """What states tokens have at a position behind the first."""
        return self._usual[min(position, 2) - 1]

    def word_prior(self, expected: Tensor, before: Tensor) -> Tensor:
        """Expectations [V] behind the ids ``before`` [t] of a whole text; where these may be the beginning of a word, a
        part of them goes to what may continue it, evenly.

        A language model that never saw a text begin with half a word knows little of its other half.
        """
        following = self.continuations.get(tuple(before.tolist()), []) if len(before) < LONGEST_WORD else []
        following = [one for one in following if one < len(expected)]
        if not following:
            return expected
        mixed = (1 - WORDS) * expected
        mixed[following] += WORDS / len(following)
        return mixed

    def scores(
        self, position: int, states: Tensor, before: Tensor, expected: Tensor | None, noise: float = 0.0
    ) -> Tensor:
        """How likely every token [B, V] is, as a logarithm up to a constant, for states [B, d] at a position behind
        others [B, d], where the model expected [B, V]; by the states alone where nothing is known of that. ``noise``:
        variance that a channel added."""
        found = self.usual(position).misfit(states, before, noise) * (-WEIGHT / 2)
        return found if expected is None else found + prior(expected)


def prior(expected: Tensor) -> Tensor:
    """The logarithm of what is expected of tokens [..., V], a half of it spread evenly."""
    return torch.log((1 - EVEN) * expected + EVEN / expected.shape[-1])


def ranks(scores: Tensor) -> Tensor:
    """Ranks along the last dimension, 0 for the smallest."""
    order = scores.argsort(-1)
    places = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def fitted(reader: Reader, tokens: int = TOKENS, packages: Sequence[str] = corpus.FITTED, seed: int = 0) -> Proposer:
    """The proposer of a model and convention, from the cache folder or fitted and kept there.

    ``packages`` are those whose docstrings it is fitted on, ``tokens`` the number of tokens that are read for later
    positions. With it comes the reader's table of one-token prompts.

    Raises:
        InversionError: what lies in the cache is of another model, or damaged.
    """
    path, identity = _place(reader, tokens, packages, seed)
    with files.locked(path):
        if not path.exists():
            started = time.perf_counter()
            texts, words = corpus.docstrings(packages), corpus.split_words(reader.backbone.tokenizer)
            words = [torch.tensor(ids[:LONGEST_WORD], dtype=torch.long) for ids in words] or [
                torch.zeros(0, dtype=torch.long)
            ]
            words = torch.nn.utils.rnn.pad_sequence(words, batch_first=True, padding_value=NONE)
            found = {"first": reader.first_states, "words": words}
            chosen = {"second": fitting.pairs(reader, texts, _without_padding(words), min(fitting.PAIRS, tokens), seed)}
            chosen["later"] = fitting.sequences(reader, texts, tokens, seed)
            for kind, ids in chosen.items():
                weights, covariance = fitting.fit(reader, ids)
                found |= {kind: weights.contiguous(), f"{kind} covariance": covariance.contiguous()}
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
        "weights": _digest(reader),
        "convention": str(reader.convention),
        "rows": len(reader.embedding),
        "tokens": tokens,
        "seed": seed,
        "dtype": str(reader.embedding.dtype),
        "corpus": corpus.versions(packages),
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    return paths.cache() / "proposers" / f"{key}.safetensors", identity


def _digest(reader: Reader) -> str:
    """What tells weights of one name and revision apart, trained ones from those before: some of every matrix."""
    digest = hashlib.sha256()
    for weight in reader.model.parameters():
        some = weight.detach().flatten()[:: max(1, weight.numel() // SAMPLED)]
        digest.update(some.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def read(reader: Reader, path: Path) -> Proposer:
    """A proposer that was kept; the reader takes over its table of one-token prompts.

    Raises:
        InversionError: it is of another width or vocabulary than the reader's, or cannot be read.
    """
    try:
        with safe_open(path, "pt", device=str(reader.device)) as kept:
            first, words = kept.get_tensor("first"), kept.get_tensor("words")
            both = [(kept.get_tensor(kind), kept.get_tensor(f"{kind} covariance")) for kind in KINDS]
            seconds = float(kept.metadata()["seconds"])
    except (OSError, KeyError, ValueError, TypeError, SafetensorError) as error:
        raise InversionError(f"proposer {path}: cannot be read ({error}); delete it, and it is fitted again") from error
    if first.shape != reader.embedding.shape:
        raise InversionError(
            f"proposer {path}: is for {len(first)} ids of width {first.shape[1]}, expected {len(reader.embedding)} of "
            f"width {reader.width}: of another model"
        )
    reader.first_states = first
    return Proposer(reader, *both, _without_padding(words), seconds)


def _without_padding(words: Tensor) -> list[list[int]]:
    return [[one for one in ids if one != NONE] for ids in words.tolist()]
