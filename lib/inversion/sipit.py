"""What continuous inversion is held against: SIPIT (arXiv:2510.15511), and searches that use no gradient at all.

All commit a token only when its own state is the leaked one, position by position; they differ in the order in which
they try the vocabulary.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from lib.inversion.continuous import Inverted, check_states, distances, verify
from lib.inversion.reader import Reader, empty, length, view


@dataclass(frozen=True)
class Sipit:
    """The published schedule: plain gradient steps of 1.0, clipped to norm 1, on the mean squared error.

    Every iteration verifies the nearest token that has not been tried; every ``snap`` iterations the proxy is set on
    it. A try is accepted if every coordinate lies within ``tolerance``. ``tries`` and ``seconds`` end a position's
    search (None: the whole vocabulary, however long it takes).
    """

    learning_rate: float = 1.0
    clip: float = 1.0
    snap: int = 50
    tolerance: float = 1e-5
    tries: int | None = None
    seconds: float | None = None
    seed: int = 0


def sipit(reader: Reader, states: Tensor, settings: Sipit = Sipit()) -> Inverted:
    """SIPIT on states [n, T, d], one prompt after the other, on cached prefixes (ours; the original reads them anew).

    Raises:
        InversionError: see :func:`lib.inversion.continuous.check_states`.
    """

    def search(prompt: int, position: int, target: Tensor, cache, _: list[int]) -> tuple[Tensor, int, bool]:
        start = np.random.default_rng([settings.seed, prompt, position]).integers(len(reader.embedding))
        return descend(reader, cache, target, int(start), settings)

    return _position_by_position(reader, states, search)


def descend(reader: Reader, cache, target: Tensor, start: int, settings: Sipit) -> tuple[Tensor, int, bool]:
    """Steps and tries in turn until one fits: the id, the tries, and whether it fits (else the first one tried)."""
    proxy = reader.embedding[start].clone()
    untried = torch.ones(len(reader.embedding), dtype=torch.bool, device=reader.device)
    first, started = None, time.perf_counter()
    for iteration in range(1, (settings.tries or len(untried)) + 1):
        proxy = proxy.detach().requires_grad_(True)
        loss = (reader.proxies(proxy[None], cache)[0] - target).square().mean()
        (gradient,) = torch.autograd.grad(loss, proxy)
        scale = (settings.clip / (gradient.norm() + 1e-6)).clamp(max=1.0)
        proxy = proxy.detach() - settings.learning_rate * scale * gradient
        far = distances(reader, proxy[None], "l2")[0].masked_fill(~untried, torch.inf)
        nearest = far.argmin()
        first = nearest if first is None else first
        if torch.allclose(reader.candidates(nearest[None], cache)[0], target, rtol=0.0, atol=settings.tolerance):
            return nearest, iteration, True
        untried[nearest] = False
        if settings.seconds is not None and time.perf_counter() - started > settings.seconds:
            break
        if iteration % settings.snap == 0:
            proxy = reader.embedding[far.masked_fill(~untried, torch.inf).argmin()].clone()
    return first, iteration, False


def full_scan(reader: Reader, states: Tensor, tolerance: float = 1e-4) -> Inverted:
    """Every vocabulary row in order of its id: exact whatever any optimiser does, half the vocabulary a token."""
    order = torch.arange(len(reader.embedding), device=reader.device)
    return in_order(reader, states, lambda *_: order, tolerance)


def lm_order(reader: Reader, states: Tensor, tolerance: float = 1e-4) -> Inverted:
    """Every vocabulary row in the order of the model's own next-token probability; the first position by id.

    The language model reads the tokens committed so far, on a cache of its own.
    """
    model, table = reader.backbone.model, len(reader.embedding)
    read: dict[int, tuple[list[int], object]] = {}

    def order(prompt: int, position: int, _: Tensor, committed: list[int]) -> Tensor:
        """Every id, the most expected first; the tokens committed so far are read once each."""
        if position == 0:
            return torch.arange(table, device=reader.device)
        known, cache = read.get(prompt, ([], empty()))
        fresh = torch.tensor([committed[len(known) :]], device=reader.device)
        with torch.no_grad():
            logits = model(input_ids=fresh, cache=cache, use_cache=True).logits[0, -1, :table]
        read[prompt] = (list(committed), cache)
        ids = logits.argsort(descending=True)
        rest = torch.arange(len(ids), table, device=reader.device)  # rows that the output layer does not have
        return torch.cat([ids, rest])

    return in_order(reader, states, order, tolerance)


def random_proxy(
    reader: Reader,
    states: Tensor,
    candidates: int,
    metric: str = "l1",
    seed: int = 0,
    tolerance: float = 1e-4,
    reference: Tensor | None = None,
) -> Inverted:
    """The C rows nearest to a random vocabulary row: a straw man, right in C of |V| positions behind a true prefix.

    ``reference`` [n, T] commits the true ids, so that every position has one.
    """

    def order(prompt: int, position: int, *_) -> Tensor:
        """The C ids nearest to a random row."""
        pick = np.random.default_rng([seed, prompt, position]).integers(len(reader.embedding))
        far = distances(reader, reader.embedding[[pick]], metric)[0]
        return far.topk(candidates, largest=False).indices

    return in_order(reader, states, order, tolerance, reference)


def in_order(
    reader: Reader, states: Tensor, order: Callable, tolerance: float, reference: Tensor | None = None
) -> Inverted:
    """Try the ids that ``order(prompt, position, target, committed)`` gives, position by position.

    Raises:
        InversionError: see :func:`lib.inversion.continuous.check_states`.
    """

    def search(prompt: int, position: int, target: Tensor, cache, committed: list[int]) -> tuple[Tensor, int, bool]:
        return verify(reader, cache, target, order(prompt, position, target, committed), tolerance)

    return _position_by_position(reader, states, search, reference)


def _position_by_position(
    reader: Reader, states: Tensor, search: Callable, reference: Tensor | None = None
) -> Inverted:
    """One prompt after the other: ``search(prompt, position, target, cache, committed)`` gives id, tries, accepted."""
    states = states.to(reader.embedding)
    check_states(reader, states)
    ids, rows = [], []
    for prompt, targets in enumerate(states):
        cache, found = empty(), []
        for position, target in enumerate(targets):
            chosen, tried, accepted = search(prompt, position, target, cache, [int(i) for i in found])
            rows.append(_row(reader, cache, prompt, position, target, chosen, tried, accepted))
            committed = chosen if reference is None else reference[prompt, position].to(chosen)
            found.append(committed)
            cache = reader.extend(cache, committed[None])
        ids.append(torch.stack(found))
    return _collected(ids, rows)


def _row(reader, cache, prompt, position, target, chosen, verified, accepted) -> dict:
    assert length(cache) == position
    loss = float((reader.candidates(chosen[None], view(cache))[0] - target).square().mean())
    row = {"prompt": prompt, "position": position, "found_id": int(chosen), "fallback": not accepted}
    return row | {"candidates": verified, "discrete_loss": loss}


def _collected(ids: list[Tensor], rows: list[dict]) -> Inverted:
    tokens = pd.DataFrame(rows)
    tokens["cumulative_loss"] = tokens.groupby("prompt").discrete_loss.cumsum()
    return Inverted(torch.stack(ids), tokens)
