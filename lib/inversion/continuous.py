"""Continuous inversion (arXiv:2607.00852): one proxy embedding a position is driven until its state is the leaked one.

For position t, with the committed prefix in the cache, Adam lowers L(e) = mean_d (f(prefix, e)_d - h_{t,d})^2 over
the proxy e. Then the C vocabulary rows nearest to e are verified, and the first whose own state lies within the
tolerance is committed; if none does, the nearest is (the fallback). The discrete loss of a position is L at the
committed row, and its sum over positions the signal that an inversion has failed. All prompts of a batch advance
together.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from lib.inversion.conventions import check_norm
from lib.inversion.reader import InversionError, Reader, view

METRICS = ("l1", "l2", "cosine", "dot")
STARTS = ("zeros", "random", "mean", "prior")
MODES = ("verified", "blind", "reference")
FIRST = ("search", "table")
NO_TRACE = pd.DataFrame(columns=["prompt", "position", "step", "loss", "rank"])
ROWS = 8  # proxies whose distances to the whole vocabulary are held at once
BETAS, EPSILON = (0.9, 0.999), 1e-8  # of Adam, as torch has them
GROWTH = (1, 8, 64, 256)  # candidates verified at a time, the last size repeated


@dataclass(frozen=True)
class Settings:
    """How the search runs; defaults are the published baseline (its scripts), the seed our choice.

    ``steps`` is K, ``candidates`` C. ``mode``: ``verified`` as published; ``blind`` commits the nearest row without a
    look; ``reference`` commits the true token whatever was found, to study every position behind a true prefix.
    ``start``: ``zeros`` (the scripts), ``random``, a vocabulary row (the paper's summary), or ours: ``mean``, that of
    all rows, and ``prior``, their mean under the model's own next-token probabilities. ``first``: ``search`` as
    published, or ``table`` (ours): the first token is looked up among the states of all one-token prompts. A Llama-type
    model needs it: its first position carries an enormous state that hardly depends on the token, and behind RMSNorm
    layers the gradient at a zero proxy is beyond fp32.
    """

    steps: int = 1000
    candidates: int = 2000
    learning_rate: float = 0.05
    weight_decay: float = 1e-5
    clip: float = 1.0
    tolerance: float = 1e-4
    metric: str = "l1"
    start: str = "zeros"
    first: str = "search"
    mode: str = "verified"
    seed: int = 0
    log_every: int = 20

    def check(self, vocabulary: int) -> None:
        """Refuse settings that no search can run with.

        Raises:
            InversionError: naming the setting, its value and what would be right.
        """
        if self.steps < 1:
            raise InversionError(f"steps: got K = {self.steps}, expected at least 1")
        if not 1 <= self.candidates <= vocabulary:
            raise InversionError(f"candidates: got C = {self.candidates}, expected 1 to {vocabulary}, the vocabulary")
        for name, known in (("metric", METRICS), ("start", STARTS), ("mode", MODES), ("first", FIRST)):
            if getattr(self, name) not in known:
                raise InversionError(f"{name}: got {getattr(self, name)!r}, expected one of {', '.join(known)}")
        if self.log_every < 1:
            raise InversionError(f"log_every: got {self.log_every}, expected at least 1")
        if not self.tolerance > 0 or not self.learning_rate > 0:
            raise InversionError(f"got tolerance {self.tolerance} and learning rate {self.learning_rate}, expected > 0")


@dataclass(frozen=True)
class Inverted:
    """What was found for n prompts of T tokens.

    ``ids`` [n, T]; ``tokens``, a row a prompt and position: ``prompt, position, found_id`` (committed),
    ``accepted_id`` (within the tolerance, else -1), ``fallback, steps, candidates`` (verified, the accepted one
    included), ``loss_final`` (the proxy's last loss), ``discrete_loss, cumulative_loss`` and, with a reference,
    ``true_id, rank_final`` (of the true token among the vocabulary, 0 is nearest) and ``rank_<metric>`` for every
    metric; ``seconds``, its share of the steps and its verification; ``trace``: ``prompt, position, step, loss, rank``.
    """

    ids: Tensor
    tokens: pd.DataFrame
    trace: pd.DataFrame = field(default_factory=pd.DataFrame)

    def exact(self, reference: Tensor) -> np.ndarray:
        """Whether every id of a prompt is the true one [n]."""
        return (self.ids == reference.to(self.ids.device)).all(-1).cpu().numpy()


def check_states(reader: Reader, states: Tensor, altered: bool = False) -> None:
    """Refuse given states that cannot be those of a prompt; of ``altered`` ones the norm is not asked for.

    Raises:
        InversionError: the wrong shape or width, NaN, a row of zeros, more rows than the model can read, or the wrong
            side of the final norm.
    """
    if states.ndim != 3 or states.shape[-1] != reader.width:
        raise InversionError(
            f"hidden states: got the shape {list(states.shape)}, expected [prompts, positions, {reader.width}], the "
            f"width of {reader.backbone.name}"
        )
    if not torch.isfinite(states).all():
        prompt, position = (~torch.isfinite(states)).any(-1).nonzero()[0].tolist()
        raise InversionError(f"hidden states: prompt {prompt}, position {position} holds NaN or infinity")
    if (states == 0).all(-1).any():
        prompt, position = (states == 0).all(-1).nonzero()[0].tolist()
        raise InversionError(f"hidden states: prompt {prompt}, position {position} is all zeros: was it padding?")
    if states.shape[1] > reader.context:
        raise InversionError(
            f"hidden states: got {states.shape[1]} positions, {reader.backbone.name} reads at most {reader.context}"
        )
    if not altered:
        check_norm(reader, states)


def invert(
    reader: Reader,
    states: Tensor,
    settings: Settings | Sequence[Settings] = Settings(),
    reference: Tensor | None = None,
    keys: Sequence[int] | None = None,
) -> Inverted:
    """Invert states [n, T, d] of n prompts of equal length.

    Args:
        settings: for all, or one a prompt; these may differ in steps, candidates and start.
        reference: true ids [n, T]; used for the log of ranks, and to commit in the mode ``reference``. The search
            itself never reads it.
        keys: a number a prompt that its random starts are drawn by, so that a prompt starts alike in any batch.

    Raises:
        InversionError: see :func:`check_states` and :meth:`Settings.check`; or ``reference`` mode without a reference.
    """
    states = states.to(reader.embedding)
    check_states(reader, states)
    n, count, _ = states.shape
    if reference is not None and reference.shape != states.shape[:2]:
        raise InversionError(f"reference: got ids {list(reference.shape)}, expected {list(states.shape[:2])}")
    settings = each(settings, n, len(reader.embedding))
    if settings[0].mode == "reference" and reference is None:
        raise InversionError("mode: got 'reference' without the true ids to commit")
    keys = list(range(n)) if keys is None else list(keys)
    prefix, tables, traces = torch.empty((n, 0), dtype=torch.long, device=reader.device), [], []
    for position in range(count):
        true = None if reference is None else reference[:, position].to(reader.device)
        committed, table, trace = search(reader, prefix, states[:, position], settings, keys, true)
        prefix = torch.cat([prefix, committed[:, None]], 1)
        tables.append(table)
        traces.append(trace)
    tokens = pd.concat(tables, ignore_index=True).sort_values(["prompt", "position"], ignore_index=True)
    tokens["cumulative_loss"] = tokens.groupby("prompt").discrete_loss.cumsum()
    logged = [trace for trace in traces if len(trace)]
    return Inverted(prefix, tokens, pd.concat(logged, ignore_index=True) if logged else NO_TRACE)


def each(settings: Settings | Sequence[Settings], n: int, vocabulary: int) -> list[Settings]:
    """Settings of each of n rows, checked.

    Raises:
        InversionError: see :meth:`Settings.check`; or the rows differ in more than steps, candidates and start.
    """
    rows = [settings] * n if isinstance(settings, Settings) else list(settings)
    alike = {replace(one, steps=1, candidates=1, start="zeros") for one in rows}
    if len(rows) != n or len(alike) > 1:
        raise InversionError(
            f"settings: got {len(rows)} of {len(alike)} kinds for {n} rows, expected one a row, which differ in steps, "
            "candidates and start alone"
        )
    for one in set(rows):
        one.check(vocabulary)
    return rows


def search(
    reader: Reader,
    prefix: Tensor,
    targets: Tensor,
    settings: Sequence[Settings],
    keys: Sequence[int],
    true: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, pd.DataFrame, pd.DataFrame]:
    """One position of n prompts: what is committed behind the ids ``prefix`` [n, t] for the states ``targets`` [n, d].

    ``lengths`` [n] says how many ids of each row's prefix stand before its position (None: all), so that different
    positions of prompts whose prefixes are known advance together.

    Returns:
        The ids [n], and the rows of :class:`Inverted`'s tokens (but the cumulative loss) and trace.
    """
    if lengths is None and prefix.shape[1] == 0 and settings[0].first == "table":
        return _look_up(reader, targets, settings[0], true)
    cache = reader.read(prefix)
    places = torch.full((len(prefix),), prefix.shape[1]) if lengths is None else lengths
    found = drive(reader, cache, targets, starts(reader, settings, keys, prefix, places), settings, true, lengths)
    committed, table = _commit(reader, cache, targets, found, settings, true, places)
    table.insert(1, "position", places.tolist())
    return committed, table, found.trace.assign(position=places.numpy()[found.trace.prompt.to_numpy(dtype=int)])


def _look_up(
    reader: Reader, targets: Tensor, settings: Settings, true: Tensor | None
) -> tuple[Tensor, pd.DataFrame, pd.DataFrame]:
    """The first token from the table of all one-token prompts: the nearest state, whatever its distance."""
    rows, ids = [], []
    for i, target in enumerate(targets):
        losses = (reader.first_states - target).square().mean(-1)
        chosen = losses.argmin()
        accepted = settings.mode != "blind" and bool(losses[chosen] < settings.tolerance)
        row = {"prompt": i, "position": 0, "accepted_id": int(chosen) if accepted else -1}
        row |= {"fallback": not accepted and settings.mode != "blind"}
        if settings.mode == "reference":
            chosen = true[i]
        row |= {"found_id": int(chosen), "steps": 0, "candidates": 0, "loss_final": torch.nan}
        row |= {"discrete_loss": float(losses[chosen]), "seconds": 0.0}
        if true is not None:
            row |= {"true_id": int(true[i]), "rank_final": int((losses < losses[true[i]]).sum())}
            row |= {f"rank_{metric}": row["rank_final"] for metric in METRICS}
        ids.append(chosen)
        rows.append(row)
    return torch.stack(ids), pd.DataFrame(rows), NO_TRACE


def starts(reader: Reader, settings: Sequence[Settings], keys: Sequence[int], prefix: Tensor, places: Tensor) -> Tensor:
    """Where proxies start [n, d]; see :class:`Settings`. ``places`` [n] are the rows' positions behind ``prefix``."""
    found = torch.zeros(len(settings), reader.width, device=reader.device, dtype=reader.embedding.dtype)
    for i, (one, key, place) in enumerate(zip(settings, keys, places.tolist(), strict=True)):
        if one.start == "mean":
            found[i] = reader.embedding.mean(0)
        elif one.start == "random":
            found[i] = reader.embedding[np.random.default_rng([one.seed, key, place]).integers(len(reader.embedding))]
    prior = torch.tensor([one.start == "prior" for one in settings])
    for place in places[prior].unique().tolist():
        rows = (prior & (places == place)).to(prefix.device)
        found[rows] = reader.next_probabilities(prefix[rows, :place]) @ reader.embedding
    return found


@dataclass(frozen=True)
class Driven:
    """Proxies [n, d] after the inner loop, their last losses [n], the steps each took [n], the trace, and seconds [n]:
    a row's share of every step that it took part in."""

    proxies: Tensor
    losses: Tensor
    steps: Tensor
    trace: pd.DataFrame
    seconds: np.ndarray


def drive(
    reader: Reader,
    cache,
    targets: Tensor,
    starts: Tensor,
    settings: Sequence[Settings],
    true: Tensor | None = None,
    lengths: Tensor | None = None,
    watch: Callable[[int, Tensor, Tensor], None] | None = None,
) -> Driven:
    """Adam on one proxy a row; a row that comes within the tolerance, or to its last step, retires.

    The gradient of every row is clipped by itself, so rows never touch each other. ``lengths`` as in :func:`search`.
    ``watch(step, alive, proxies)`` is called before every step with the rows that are left and their proxies.

    Raises:
        InversionError: a gradient that the precision cannot hold.
    """
    n, shared = len(targets), settings[0]
    limits = torch.tensor([one.steps for one in settings], device=reader.device)
    final, losses = starts.clone(), torch.full((n,), torch.nan, device=reader.device, dtype=starts.dtype)
    taken = torch.zeros(n, dtype=torch.long, device=reader.device)
    alive = torch.arange(n, device=reader.device)
    proxies, behind, trace = starts.clone(), cache, []
    adam = _Adam(torch.zeros_like(starts), torch.zeros_like(starts))
    seconds = np.zeros(n)
    for step in range(int(limits.max()) + 1):
        begun = time.perf_counter()
        before = None if lengths is None else lengths[alive.cpu()]
        loss, gradient = _slope(reader, proxies, behind, before, targets[alive])
        if not torch.isfinite(loss).all():
            raise InversionError(f"{reader.backbone.name}: the loss at step {step} is beyond {loss.dtype}")
        final[alive], losses[alive], taken[alive] = proxies, loss, step
        going = (loss >= shared.tolerance) & (step < limits[alive])
        if watch is not None:
            watch(step, alive, proxies)
        if true is not None:
            logged = torch.ones_like(going) if step % shared.log_every == 0 else step == limits[alive]
            trace += _noted(reader, proxies[logged], true[alive][logged], alive[logged], step, loss[logged], shared)
        if not going.any():
            break
        if not going.all():
            proxies, gradient, adam = proxies[going], gradient[going], adam.of(going)
            alive, behind = alive[going], view(cache, alive[going])
        gradient = _clipped(gradient, shared.clip, f"{reader.backbone.name}: the gradient at step {step}")
        rates = proxies.new_tensor([_rate(shared.learning_rate, step, steps) for steps in limits[alive].tolist()])
        proxies = adam.step(proxies, gradient + shared.weight_decay * proxies, rates[:, None], step + 1)
        seconds[alive] += (time.perf_counter() - begun) / len(alive)
    columns = ["prompt", "step", "loss", "rank"]
    return Driven(final, losses, taken, pd.DataFrame(trace, columns=columns), seconds)


def _slope(reader: Reader, proxies: Tensor, cache, lengths: Tensor | None, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of every row [m] and its gradient [m, d]."""
    proxies = proxies.requires_grad_(True)
    loss = (reader.proxies(proxies, cache, lengths) - targets).square().mean(-1)
    (gradient,) = torch.autograd.grad(loss.sum(), proxies)
    proxies.requires_grad_(False)
    return loss.detach(), gradient


def _clipped(gradient: Tensor, most: float, where: str) -> Tensor:
    """Every row's gradient, of a norm of at most ``most``.

    Raises:
        InversionError: one that the precision cannot hold, named by ``where``.
    """
    norm = gradient.norm(dim=-1, keepdim=True)
    if not torch.isfinite(norm).all():
        raise InversionError(
            f"{where} is beyond {gradient.dtype}, as it is at a zero proxy behind RMSNorm layers: start elsewhere "
            "(prior, random) or look the first token up (first: table)"
        )
    return gradient * (most / (norm + 1e-6)).clamp(max=1.0)


def _rate(full: float, step: int, steps: int) -> float:
    """A cosine from the full learning rate to zero at the last step."""
    return full * 0.5 * (1 + math.cos(math.pi * step / steps))


@dataclass
class _Adam:
    """Moments [m, d] of the rows that are left: Adam as torch has it, with a learning rate a row."""

    mean: Tensor
    square: Tensor

    def of(self, rows: Tensor) -> "_Adam":
        return _Adam(self.mean[rows], self.square[rows])

    def step(self, values: Tensor, gradient: Tensor, rates: Tensor, count: int) -> Tensor:
        """The values after the ``count``-th step."""
        self.mean = BETAS[0] * self.mean + (1 - BETAS[0]) * gradient
        self.square = BETAS[1] * self.square + (1 - BETAS[1]) * gradient.square()
        scale = (self.square / (1 - BETAS[1] ** count)).sqrt() + EPSILON
        return values - rates * (self.mean / (1 - BETAS[0] ** count)) / scale


def distances(reader: Reader, proxies: Tensor, metric: str) -> Tensor:
    """Distance [m, V] of every proxy to every vocabulary row; of similarities, the negative."""
    table = reader.embedding
    if metric in ("l1", "l2"):
        return torch.cdist(proxies, table, p=1.0 if metric == "l1" else 2.0)
    if metric == "cosine":
        return -torch.nn.functional.normalize(proxies, dim=-1) @ torch.nn.functional.normalize(table, dim=-1).T
    return -proxies @ table.T


def ranks(reader: Reader, proxies: Tensor, true: Tensor, metric: str) -> Tensor:
    """Rank [m] of the true ids among the vocabulary: how many rows are nearer."""
    found = [true[:0]]
    if not torch.isfinite(proxies).all():
        raise InversionError("proxies: got NaN or infinity, which would rank first among the vocabulary")
    for rows, ids in zip(proxies.split(ROWS), true.split(ROWS), strict=True):
        far = distances(reader, rows, metric)
        found.append((far < far.gather(1, ids[:, None])).sum(-1))
    return torch.cat(found)


def _noted(reader, proxies, true, alive, step, loss, settings) -> list[tuple[int, int, float, int]]:
    ranked = ranks(reader, proxies, true, settings.metric).tolist()
    return list(zip(alive.tolist(), [step] * len(alive), loss.tolist(), ranked, strict=True))


def _commit(
    reader: Reader,
    cache,
    targets: Tensor,
    found: Driven,
    settings: Sequence[Settings],
    true: Tensor | None,
    places: Tensor,
) -> tuple[Tensor, pd.DataFrame]:
    """The committed id of every row [n], and its row of the table."""
    ids, rows = [], []
    for i, (one, place) in enumerate(zip(settings, places.tolist(), strict=True)):
        begun = time.perf_counter()
        far = distances(reader, found.proxies[i : i + 1], one.metric)[0]
        ranked = {} if true is None else _all_ranks(reader, found.proxies[i], far, int(true[i]), one.metric)
        order = far.topk(one.candidates, largest=False).indices
        behind = view(cache, [i], place)
        if one.mode == "blind":
            chosen, verified, accepted = order[0], 0, True
        elif one.mode == "reference" and ranked["rank_final"] >= one.candidates:
            chosen, verified, accepted = order[0], one.candidates, False  # none would fit: counted, not tried
        else:
            chosen, verified, accepted = verify(reader, behind, targets[i], order, one.tolerance)
        row = {"prompt": i, "accepted_id": int(chosen) if accepted and verified else -1, "fallback": not accepted}
        if one.mode == "reference":
            chosen = true[i]
        loss = float((reader.candidates(chosen[None], behind)[0] - targets[i]).square().mean())
        row |= {"found_id": int(chosen), "steps": int(found.steps[i]), "candidates": verified}
        row |= {"loss_final": float(found.losses[i]), "discrete_loss": loss}
        row |= {"seconds": found.seconds[i] + time.perf_counter() - begun}
        if true is not None:
            row |= {"true_id": int(true[i])} | ranked
        ids.append(chosen)
        rows.append(row)
    return torch.stack(ids), pd.DataFrame(rows)


def _all_ranks(reader: Reader, proxy: Tensor, far: Tensor, true: int, metric: str) -> dict[str, int]:
    """Rank of the true token by the search's own distances ``far`` [V], and by every metric."""
    found = {"rank_final": int((far < far[true]).sum())}
    for name in METRICS:
        other = far if name == metric else distances(reader, proxy[None], name)[0]
        found[f"rank_{name}"] = int((other < other[true]).sum())
    return found


def verify(reader: Reader, cache, target: Tensor, order: Tensor, tolerance: float) -> tuple[Tensor, int, bool]:
    """The first id of ``order`` whose state lies within the tolerance of ``target`` [d], or the first one of all.

    Returns:
        The id, the candidates up to and including it (all, where none fits), and whether one fits.
    """
    start = 0
    for size in _sizes(len(order)):
        chunk = order[start : start + size]
        losses = (reader.candidates(chunk, cache) - target).square().mean(-1)
        fits = (losses < tolerance).nonzero()
        if len(fits):
            place = int(fits[0])
            return chunk[place], start + place + 1, True
        start += len(chunk)
    return order[0], len(order), False


def _sizes(total: int):
    """Growing sizes of chunks that add up to at least ``total``."""
    done, steps = 0, iter(GROWTH)
    size = next(steps)
    while done < total:
        yield size
        done += size
        size = next(steps, size)
