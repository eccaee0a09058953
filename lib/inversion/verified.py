"""Exact inversion for the price of a few forward passes: propose, verify, repair.

All tokens are proposed at once (:mod:`lib.inversion.proposer`). A forward pass over the next guesses proves those that
reproduce their states, up to the first that does not; there, growing batches of candidates are tried behind the proven
prefix, side by side in one row. Candidates that failed are data: their states show how this context differs from the
proposer's, and foretell the states of all others, by which these are ranked anew. Where that does not do, a proxy
embedding is driven from the most promising candidates (:mod:`lib.inversion.continuous`), and its neighbours are tried.
Last comes the whole vocabulary, so that an answer is missed only where no token reproduces the state. Only what was
verified is accepted, whatever proposed it.

States that a channel altered are verified through the channel: an attacker says how well a candidate explains what was
released (:mod:`lib.inversion.attackers`).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from lib.inversion import attackers, channels, continuous, diagnostics
from lib.inversion.channels import Channel, Sighting
from lib.inversion.continuous import check_states
from lib.inversion.proposer import WEIGHT, Proposer, Usual, prior, ranks
from lib.inversion.reader import CHUNK, InversionError, Prefixes, Reader, view

CONSISTENT, UNIQUE, SWEPT, AMBIGUOUS, BEST = "consistent", "locally unique", "swept", "ambiguous class", "best effort"
UNCERTAIN_FIRST = (BEST, AMBIGUOUS, CONSISTENT, UNIQUE, SWEPT)
FACTOR = 10.0  # a token is accepted within so many times the numerical floor, and unique if the next is so much farther
RIDGE = 1.0  # of the regression in context, of the tried states' mean square
FEWEST, NARROW = 4096, 8192  # tokens that are ranked anew from states of less than FEW tries, and of less than MANY
FEW, MANY = 96, 512
SHARE = 2  # tries by foretold states to one by the language model's expectation alone, should the former mislead
PROMISING = 8  # candidates from whose mean a proxy is driven
TOGETHER = 64  # positions whose vocabulary is ranked at once
MOST = 64  # ids proposed a position, beside the guess
LOOSE = 1000.0  # rounding has a long tail: within so many tolerances a token's state is computed the plain way as well
EARLIER = -1  # in place of a place
CALIBRATED = 16  # positions of known ids from which the floor is measured


@dataclass(frozen=True)
class Settings:
    """How the search runs. ``ahead`` guesses are proven at a time; ``stages`` are candidates tried before the scan.

    Behind every stage of at least ``refit`` tries the rest is ranked anew from them. A search that ``park`` tries did
    not end waits until all others are through. Then a proxy is driven for all that wait together, for ``steps`` (0:
    never): at once if there are ``enough`` of them, since a step costs few rows as much as many, and behind each stage
    of ``again`` from where they then are, at the learning ``rates`` in turn. ``tolerance`` on |h - h'|^2 / |h|^2: None
    measures it. ``scan``: whether the whole vocabulary comes last; not for tokens behind one that is lost: not proven,
    and not much nearer than the next.
    """

    ahead: int = 5
    stages: tuple[int, ...] = (8, 32, 96, 256, 512, 1024, 2048, 4096)
    refit: int = 8
    park: int = 256
    enough: int = 4
    again: tuple[int, ...] = (512, 2048)
    steps: int = 50
    rates: tuple[float, ...] = (0.05, 0.2)
    tolerance: float | None = None
    scan: bool = True

    def check(self) -> None:
        """Refuse settings that no search can run with.

        Raises:
            InversionError: naming the setting, its value and what would be right.
        """
        if self.ahead < 1:
            raise InversionError(f"ahead: got {self.ahead}, expected at least 1")
        if self.steps < 0:
            raise InversionError(f"steps: got {self.steps}, expected at least 0")
        if list(self.stages) != sorted(set(self.stages)) or (self.stages and self.stages[0] < 1):
            raise InversionError(f"stages: got {list(self.stages)}, expected rising numbers of candidates")
        if self.steps and not self.rates:
            raise InversionError("rates: got none, expected a learning rate, or no steps")
        if self.tolerance is not None and not self.tolerance > 0:
            raise InversionError(f"tolerance: got {self.tolerance}, expected more than 0")


@dataclass(frozen=True)
class Found:
    """What was found for n prompts of T tokens.

    ``ids`` [n, T]; ``tokens``, a row a prompt and position: ``prompt, position, found_id, status, candidates``
    (verified, the accepted one included), ``residual, margin`` (the runner-up's residual over the accepted one's, among
    those tried; NaN where one alone was), ``guess_id`` (what was proposed) and ``round`` (of proving and repairing, in
    which it was found); ``tolerance``; ``read``: tokens read by the model in all.
    """

    ids: Tensor
    tokens: pd.DataFrame
    tolerance: float
    read: int

    def exact(self, reference: Tensor) -> np.ndarray:
        """Whether every id of a prompt is the true one [n]."""
        return (self.ids == reference.to(self.ids.device)).all(-1).cpu().numpy()


def residuals(found: Tensor, target: Tensor) -> Tensor:
    """|h - h'|^2 / |h|^2 of states [..., d] from a target [d]."""
    return channels.squared(target, found) / target.square().sum()


@functools.lru_cache(maxsize=8)
def numerical_floor(
    reader: Reader, channel: Channel = channels.CLEAN, tokens: int = CALIBRATED, seed: int = 0
) -> float:
    """The largest residual of known ids between two ways to compute their states: whole, and candidate by candidate.

    Through a channel that can be repeated it holds what the channel makes of the difference.
    """
    tokens = min(tokens, reader.context)
    ids = torch.randint(len(reader.embedding), (4, tokens), generator=torch.Generator().manual_seed(seed))
    ids = ids.to(reader.device)
    whole, prefixes, worst = reader.states(ids), Prefixes(reader, 4, tokens), 0.0
    seen = torch.stack([channel.release(row, torch.Generator().manual_seed(seed)) for row in whole])
    rows = torch.arange(4, device=reader.device)
    for position in range(tokens):
        tried = torch.stack([ids[:, position], ids[:, (position + 1) % tokens]], 1)
        states, longer = reader.branches(tried, prefixes.rows(rows), prefixes.lengths, chain=False)
        for row in range(4):
            sighting = Sighting(seen[row, : position + 1], whole[row, :position])
            worst = max(worst, float(channel.misfit(sighting, states[row, :1]) / sighting.row.square().sum()))
        start = longer.get_seq_length() - 2
        prefixes.append(rows, longer, torch.full((4, 1), start, device=reader.device))
    return max(worst, float(torch.finfo(whole.dtype).eps) ** 2)


def added(channel: Channel, states: Tensor, rows: int = 256) -> float:
    """The mean square of what a channel adds to states [n, d], by some of them: as noise, whatever it is."""
    some = states[:: max(1, len(states) // rows)]
    return float((channel.release(some, torch.Generator().manual_seed(0)) - some).square().mean())


@functools.lru_cache(maxsize=8)
def _shared_rows(reader: Reader) -> frozenset[int]:
    return frozenset(diagnostics.duplicates(reader.embedding))


@dataclass(frozen=True)
class Local:
    """States in one context, foretold from those that were tried there: ``states_of(ids)`` [W, d], and the ``errors``
    [C, d] of the tried ones, each when it is left out."""

    states_of: Callable[[Tensor], Tensor]
    errors: Tensor


def foretold(usual: Usual, before: Tensor, ids: Tensor, states: Tensor) -> Local:
    """Fit how states [C, d] of tried ids [C] differ from what is usual behind the state [d] of the token before.

    A ridge regression of the differences on what the tokens bring, t_v, which is to say a prior that the context only
    shifts them: h_v = u_v + mean + W' (t_v - mean), W = (X'X + lambda I)^-1 X'D, in its dual form where fewer are tried
    than there are coordinates.
    """
    table, common = usual.table, usual.behind(before)
    inputs, apart = table[ids], states - table[ids] - common
    middle, shift = inputs.mean(0), apart.mean(0)
    inputs, apart = inputs - middle, apart - shift
    ridge = RIDGE * inputs.square().sum(-1).mean().clamp(min=1e-12)
    if len(ids) <= inputs.shape[1]:
        inverse = torch.linalg.inv(inputs @ inputs.T + ridge * torch.eye(len(ids)).to(inputs))
        weights = inverse @ apart
        left_out = weights / inverse.diagonal()[:, None]
        slope = None if len(ids) * 2 < inputs.shape[1] else inputs.T @ weights
    else:
        inverse = torch.linalg.inv(inputs.T @ inputs + ridge * torch.eye(inputs.shape[1]).to(inputs))
        slope = inverse @ (inputs.T @ apart)
        leverage = (inputs @ inverse * inputs).sum(-1, keepdim=True)
        left_out = (apart - inputs @ slope) / (1 - leverage)

    def states_of(wanted: Tensor) -> Tensor:
        own = table[wanted] - middle
        moved = (own @ inputs.T) @ weights if slope is None else own @ slope
        return table[wanted] + common + shift + moved

    return Local(states_of, left_out)


def invert(
    reader: Reader,
    states: Tensor,
    proposer: Proposer,
    settings: Settings = Settings(),
    channel: Channel = channels.CLEAN,
    attacker: str = "aware",
) -> Found:
    """Invert states [n, T, d] of n prompts of equal length; all advance together, each at its own pace.

    Args:
        channel: what the states went through.
        attacker: who compares candidates with them (:mod:`lib.inversion.attackers`). Where the channel has a likelihood
            nothing is ever accepted: the best of the tried ones is committed, so that ``stages`` bound the cost.

    Raises:
        InversionError: see :func:`lib.inversion.continuous.check_states`; or the channel does not suit the attacker.
    """
    settings.check()
    states = states.to(reader.embedding)
    check_states(reader, states, altered=channel.name != "clean")
    who = attackers.named(attacker)
    if not who.suits(channel):
        raise InversionError(f"attacker: {attacker!r} needs a likelihood, which channel {channel.name!r} has not")
    run = _Run(reader, states, proposer, settings, channel, who)
    while len(run.active) or run.parked:
        run.round += 1
        failed = run.prove(run.active)
        if len(failed):
            run.repair(failed)
        if run.parked and not len(run.active):
            run.finish()
    tokens = pd.DataFrame(run.rows).sort_values(["prompt", "position"], ignore_index=True)
    shared = tokens.found_id.isin(_shared_rows(reader)) & (tokens.status != BEST)
    return Found(run.ids, tokens.assign(status=tokens.status.mask(shared, AMBIGUOUS)), run.tolerance, run.read)


class _Run:
    """The state of a search: what is proven of every prompt, and what has been spent."""

    def __init__(self, reader: Reader, states: Tensor, proposer: Proposer, settings: Settings, channel, attacker):
        self.reader, self.states, self.proposer = reader, states, proposer
        self.settings, self.channel, self.attacker = settings, channel, attacker
        self.tolerance = settings.tolerance or FACTOR * numerical_floor(reader, channel)
        self.window = LOOSE * FACTOR * numerical_floor(reader) if channel.name == "clean" else 0.0
        self.count, self.tokens, _ = states.shape
        self.prefixes = Prefixes(reader, self.count, self.tokens)
        self.ids = torch.zeros(self.count, self.tokens, dtype=torch.long, device=reader.device)
        self.known = torch.zeros_like(states)  # of committed tokens, as the model gives them
        self.rows: list[dict] = []
        self.parked: list[_Search] = []
        self.lost: set[int] = set()  # prompts with a token that is neither proven nor alone
        self.read, self.round = 0, 0
        self.failed: dict[int, Tensor] = {}  # the state of each prompt's guess that failed
        self.noise = added(channel, reader.first_states)
        self.proposals = self._propose()
        self.guesses = self.proposals[..., 0]

    @property
    def active(self) -> Tensor:
        """Prompts that are neither proven to their end nor parked."""
        going = self.prefixes.lengths < self.tokens
        going[[one.row for one in self.parked]] = False
        return going.nonzero()[:, 0]

    def sighting(self, row: int, place: int) -> Sighting:
        """What is seen of a token behind those that are committed."""
        return Sighting(self.states[row, : place + 1], self.known[row, :place])

    def allowed(self, seen: Sighting) -> float:
        """Misfit within which a token is accepted, whatever else may fit."""
        if self.channel.likelihood or not self.attacker.proves:
            return -np.inf
        return self.tolerance * float(seen.row.square().sum())

    def _propose(self) -> Tensor:
        """The most promising ids [n, T, m] at every position: a guess, and what the first stage may take."""
        count = min(1 + min([*self.settings.stages, MOST]), len(self.reader.embedding))
        found = self.ids[..., None].repeat(1, 1, count)
        for row, states in enumerate(self.states):
            found[row, 0] = self.first_order(states)[:count]
        for position, places in ((1, range(1, min(2, self.tokens))), (2, range(2, self.tokens))):
            every = [(row, place) for row in range(self.count) for place in places]
            for part in range(0, len(every), TOGETHER):
                row, place = torch.tensor(every[part : part + TOGETHER], device=self.ids.device).T
                before = self.states[row, place - 1]
                expected = self.reader.expected(before)
                if position == 1 and expected is not None:
                    begun = zip(expected, found[row, 0, :1], strict=True)
                    expected = torch.stack([self.proposer.word_prior(*one) for one in begun])
                scores = self.proposer.scores(position, self.states[row, place], before, expected, self.noise)
                found[row, place] = scores.topk(count).indices
        return found

    def first_order(self, row: Tensor) -> Tensor:
        """The vocabulary [V] in the order in which it is tried for the first token of a prompt, states [T, d]."""
        if self.channel.name == "clean":  # the same order, by one product
            return (self._lengths - self.reader.first_states @ (2 * row[0])).argsort()
        return self.channel.misfit(Sighting(row[:1], row[:0]), self.reader.first_states).argsort()

    @functools.cached_property
    def _lengths(self) -> Tensor:
        return self.reader.first_states.square().sum(-1)

    def prove(self, rows: Tensor) -> Tensor:
        """Read the next guesses of some prompts and commit those that reproduce their states, up to the first failure.

        Returns:
            The prompts whose next guess was read and failed.
        """
        lengths, ahead = self.prefixes.lengths[rows], self.settings.ahead
        places = lengths[:, None] + torch.arange(ahead, device=rows.device)
        ids = self.guesses[rows[:, None], places.clamp(max=self.tokens - 1)]
        states, longer = self.reader.branches(ids, self.prefixes.rows(rows), lengths, chain=True)
        self.read += ids.numel()
        start, columns = longer.get_seq_length() - ahead, torch.full_like(ids, -1)
        stopped = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        for i, (row, begin) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
            right = self._prove_chain(row, begin, ids[i], states[i])
            columns[i, :right] = start + torch.arange(right, device=rows.device)
            if begin + right < self.tokens and right < ahead:
                stopped[i] = True
                self.failed[row] = states[i, right]
        self.prefixes.append(rows, longer, columns)
        return rows[stopped]

    def _prove_chain(self, row: int, begin: int, ids: Tensor, states: Tensor) -> int:
        """Commit a prompt's guesses from the first on, as far as they reproduce their states; how many do."""
        for j in range(min(len(ids), self.tokens - begin)):
            seen = self.sighting(row, begin + j)
            found = float(self.attacker.score(self.channel, seen, states[j : j + 1], states.new_ones(1))[0])
            if not found <= self.allowed(seen):
                return j
            self.commit(
                row, begin + j, ids[j], states[j], CONSISTENT, 1, found / float(seen.row.square().sum()), np.nan
            )
        return min(len(ids), self.tokens - begin)

    def repair(self, rows: Tensor) -> None:
        """Find the next token of some prompts among growing batches of candidates; the hard ones are parked."""
        search = [_Search(self, int(row)) for row in rows]
        for one in search:
            if one.best <= one.limit:  # the guess, computed the plain way
                self._accept_best(one)
        search = [one for one in search if one.best > one.limit]
        self.parked += self._through(search, [stage for stage in self.stages if stage <= self.settings.park])

    @property
    def stages(self) -> list[int]:
        """Candidates tried before the whole vocabulary, which comes last if it is to come at all."""
        vocabulary = len(self.reader.embedding)
        scan = self.settings.scan and self.attacker.proves and not self.channel.likelihood
        return [*(stage for stage in self.settings.stages if stage < vocabulary), *[vocabulary] * scan]

    def finish(self) -> None:
        """Go on with all parked searches together, to their end."""
        search, self.parked = self.parked, []
        left = [stage for stage in self.stages if stage > self.settings.park]
        if left and len(search) >= self.settings.enough:
            self._drive(search)
        for number, stage in enumerate(left, 1):
            if stage == len(self.reader.embedding):  # behind a token that is lost none can be expected to fit
                for one in search:
                    if one.row in self.lost:
                        self._accept_best(one)
                search = [one for one in search if one.row not in self.lost]
            search = self._through(search, [stage])
            if search and stage in self.settings.again and number < len(left):
                self._drive(search)
        for one in search:
            self._accept_best(one)

    def _through(self, search: list["_Search"], stages: list[int]) -> list["_Search"]:
        """Try so many candidates in all, and rank the rest anew behind each stage; the searches that found none."""
        for total in stages:
            while search and search[0].tried < total and search[0].left:
                search = self._try(search, min(CHUNK, total - search[0].tried, search[0].left))
            if self.settings.refit <= total < len(self.reader.embedding):
                for one in search:
                    one.rank_anew()
        return search

    def _try(self, search: list["_Search"], size: int) -> list["_Search"]:
        """Read the next candidates of every search side by side; those that found none go on."""
        rows = torch.tensor([one.row for one in search], device=self.states.device)
        ids = torch.stack([one.next(size) for one in search])
        lengths = self.prefixes.lengths[rows]
        states, longer = self.reader.branches(ids, self.prefixes.rows(rows), lengths, chain=False)
        self.read += ids.numel()
        start, columns = longer.get_seq_length() - ids.shape[1], torch.full((len(rows), 1), -1, device=rows.device)
        left = []
        for i, one in enumerate(search):
            place = one.take(ids[i], states[i])
            if place is None:
                left.append(one)
            elif place == EARLIER:
                self._accept_best(one)
            else:
                columns[i, 0] = start + place
                self.commit(one.row, one.position, ids[i, place], states[i, place], *one.answer())
        self.prefixes.append(rows, longer, columns)
        return left

    def _drive(self, search: list["_Search"]) -> None:
        """Drive a proxy for every search from what it holds most likely, and try the proxy's neighbours as well."""
        search = [one for one in search if one.left and one.position]
        if not (search and self.settings.steps and self.channel.repeatable):  # else no state equals what is seen
            return
        rows = torch.tensor([one.row for one in search], device=self.states.device)
        cache, lengths = view(self.prefixes.rows(rows)), self.prefixes.lengths[rows].cpu()
        starts = torch.stack([one.middle() for one in search])
        targets = torch.stack([one.seen.row for one in search])
        rates = self.settings.rates
        settings = continuous.Settings(
            steps=self.settings.steps, learning_rate=rates[len(search[0].by_proxy) % len(rates)]
        )
        driven = continuous.drive(self.reader, cache, targets, starts, [settings] * len(search), lengths=lengths)
        self.read += int(driven.steps.sum())
        for one, proxy in zip(search, driven.proxies, strict=True):
            one.by_proxy.append(ranks(-(self.proposer.unit @ torch.nn.functional.normalize(proxy, dim=-1))))
            one.rank_anew()

    def _accept_best(self, one: "_Search") -> None:
        """Commit the nearest of all that were tried: best effort, unless a last digit in another bin explains it."""
        row = torch.tensor([one.row], device=self.states.device)
        ids = one.nearest[None, None]
        states, longer = self.reader.branches(ids, self.prefixes.rows(row), self.prefixes.lengths[row], chain=False)
        self.read += 1
        self.prefixes.append(row, longer, torch.full((1, 1), longer.get_seq_length() - 1, device=row.device))
        status, tried, best, margin = one.answer()
        status = status if one.best <= one.loose else BEST
        self.commit(one.row, one.position, one.nearest, states[0, 0], status, tried, best, margin)

    def commit(self, row: int, place: int, found: Tensor, state: Tensor, status, tried, residual, margin) -> None:
        """Take a token over, and note what it cost and how sure it is."""
        self.ids[row, place], self.known[row, place] = found, state
        if status == BEST and not margin >= FACTOR:
            self.lost.add(row)
        known = {"prompt": row, "position": place, "found_id": int(found), "status": status}
        known |= {"guess_id": int(self.guesses[row, place]), "round": self.round}
        self.rows.append(known | {"candidates": tried, "residual": residual, "margin": margin})


class _Search:
    """The search for one token: its order of the vocabulary, and what was tried."""

    def __init__(self, run: _Run, row: int):
        self.run, self.row = run, row
        self.position = int(run.prefixes.lengths[row])
        self.seen = run.sighting(row, self.position)
        self.limit = run.allowed(self.seen)
        self.loose = self.limit + run.channel.slack(self.seen.row)
        self.window = min(LOOSE * self.limit, run.window * float(self.seen.row.square().sum()))
        self.proposed = run.proposals[row, self.position, 1:]
        self.ids, self.states, self.found, self.tried, self.by_proxy = [], [], [], 0, []
        self.nearest, self.best = run.guesses[row, self.position], np.inf
        self.take(self.nearest[None], run.failed[row][None])

    @functools.cached_property
    def expected(self) -> Tensor:
        """What the language model expects [V] behind what is known."""
        reader, before = self.run.reader, self.run.ids[self.row, : self.position]
        if self.position and reader.reads_expectation:
            found = reader.expected(self.run.known[self.row, self.position - 1][None])[0]
        else:
            found = reader.next_probabilities(before[None])[0]
            self.run.read += len(before)
        return self.run.proposer.word_prior(found, before)

    @functools.cached_property
    def by_expectation(self) -> Tensor:
        """Ranks [V] by that."""
        return ranks(-self.expected)

    @functools.cached_property
    def order(self) -> Tensor:
        """What was not tried, most promising first; made when the first proposals did not do."""
        run, row, place = self.run, self.row, self.position
        if place == 0:
            every = run.first_order(run.states[row])
        else:
            before, expected = run.known[row, place - 1], self.expected[None]
            scores = run.proposer.scores(place, self.seen.row[None], before[None], expected, run.noise)
            every = scores[0].argsort(descending=True)
        untried = torch.ones_like(every, dtype=torch.bool)
        untried[torch.cat(self.ids)] = False
        return every[untried[every]]

    @property
    def left(self) -> int:
        """How many ids were not tried."""
        return len(self.order) if "order" in self.__dict__ else len(self.run.reader.embedding) - 1 - self.tried

    def next(self, size: int) -> Tensor:
        """The next candidates."""
        if "order" not in self.__dict__ and len(self.proposed) >= size:
            part, self.proposed = self.proposed[:size], self.proposed[size:]
        else:
            part, self.order = self.order[:size], self.order[size:]
        self.tried += size
        return part

    def take(self, ids: Tensor, states: Tensor) -> int | None:
        """Keep what candidates gave; the place of the one that is accepted, if there is one (EARLIER: tried before)."""
        attacker = self.run.attacker
        expected = states.new_ones(len(ids)) if attacker.proves else self.expected[ids]
        found = attacker.score(self.run.channel, self.seen, states, expected)
        self.ids.append(ids)
        self.states.append(states)
        self.found.append(found)
        place = int(found.argmin())
        if float(found[place]) < self.best:
            self.nearest, self.best = ids[place], float(found[place])
            if self.limit < self.best <= self.window:
                plain = self._plainly()
                self.best = plain if plain <= self.limit else self.best
        else:
            place = EARLIER
        return place if self.best <= self.limit or self._alone() else None

    def _plainly(self) -> float:
        """The score of the best where its prompt up to here is read whole, as states usually come to be."""
        run = self.run
        ids = torch.cat([run.ids[self.row, : self.position], self.nearest[None]])
        run.read += len(ids)
        state = run.reader.states(ids[None])[0, -1:]
        return float(run.attacker.score(run.channel, self.seen, state, state.new_ones(1))[0])

    def _alone(self) -> bool:
        """Whether the best is within a few digits in other bins, and no other that was tried anywhere near."""
        if self.best > self.loose or sum(map(len, self.found)) < 2:
            return False
        return float(torch.cat(self.found).topk(2, largest=False).values[1]) > FACTOR * self.loose

    def answer(self) -> tuple[str, int, float, float]:
        """Status, candidates tried, residual, and the runner-up's over it."""
        every = torch.cat(self.found)
        tried = len(every)
        if self.run.channel.likelihood:
            return BEST, tried, np.nan, np.nan
        residual = self.best / float(self.seen.row.square().sum())
        margin = float(every.topk(2, largest=False).values[1] / max(self.best, 1e-30)) if len(every) > 1 else np.nan
        if self.left == 0:
            return SWEPT, tried, residual, margin
        return (UNIQUE if margin >= FACTOR else CONSISTENT), tried, residual, margin

    def rank_anew(self) -> None:
        """Order what is left by the best of its ranks: by states foretold from everything tried in this very context
        together with what the language model expects, by the latter alone, and by nearness to what was driven. A
        first token's states are known to begin with."""
        if self.position == 0:
            return
        run, tried, usual = self.run, torch.cat(self.ids), self.run.proposer.usual(self.position)
        before = run.known[self.row, self.position - 1]
        local = foretold(usual, before, tried, torch.cat(self.states))
        some = self.order if len(tried) >= MANY else self.order[: FEWEST if len(tried) < FEW else NARROW]
        if run.channel.name == "clean":
            root, _, _ = usual.whitened(run.noise)
            apart = ((local.states_of(some) - self.seen.row) @ root).square().sum(-1)
            error = (local.errors @ root).square().mean()
        else:
            apart = run.channel.misfit(self.seen, local.states_of(some))
            error = local.errors.square().mean()
        if not run.channel.likelihood:
            apart = WEIGHT / 2 * apart / error.clamp(min=1e-30)
        best = torch.stack([SHARE * self.by_expectation, *self.by_proxy]).amin(0)[self.order]
        by_states = ranks(apart - prior(self.expected)[some])
        best[: len(some)] = torch.minimum(best[: len(some)], by_states)
        self.order = self.order[best.argsort(stable=True)]

    def middle(self) -> Tensor:
        """The mean embedding [d] of the most promising that are left."""
        return self.run.reader.embedding[self.order[:PROMISING]].mean(0)
