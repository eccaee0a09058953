"""Exact inversion for the price of a few forward passes: propose, verify, repair.

All tokens are proposed at once (:mod:`lib.inversion.proposer`). A forward pass over the next guesses proves those that
reproduce their states, up to the first that does not; there, growing batches of candidates are tried behind the proven
prefix, side by side in one row. Candidates that failed are data: each is an exact pair of an embedding and a state in
the true context, from which a regression re-ranks the rest. Last comes the whole vocabulary, so that an answer is
missed only where no token reproduces the state. Only what was verified is accepted, whatever proposed it.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from lib.inversion import diagnostics
from lib.inversion.continuous import check_states
from lib.inversion.proposer import Proposer
from lib.inversion.reader import CHUNK, InversionError, Prefixes, Reader

CONSISTENT, UNIQUE, SWEPT, AMBIGUOUS, BEST = "consistent", "locally unique", "swept", "ambiguous class", "best effort"
FACTOR = 10.0  # a token is accepted within so many times the numerical floor, and unique if the next is so much farther
REFIT_RIDGE = 1e-2  # of the mean square of the tried embeddings
CALIBRATED = 16  # positions of known ids from which the floor is measured


@dataclass(frozen=True)
class Settings:
    """How the search runs. ``ahead`` guesses are proven at a time; ``stages`` are candidates tried before the scan.

    Behind the stage of ``refit`` tries the rest is ranked anew from them. ``tolerance`` on |h - h'|^2 / |h|^2: None
    measures it.
    """

    ahead: int = 8
    stages: tuple[int, ...] = (8, 64, 512, 4096)
    refit: int = 64
    tolerance: float | None = None
    scan: bool = True

    def check(self) -> None:
        """Refuse settings that no search can run with.

        Raises:
            InversionError: naming the setting, its value and what would be right.
        """
        if self.ahead < 1:
            raise InversionError(f"ahead: got {self.ahead}, expected at least 1")
        if list(self.stages) != sorted(set(self.stages)) or (self.stages and self.stages[0] < 1):
            raise InversionError(f"stages: got {list(self.stages)}, expected rising numbers of candidates")
        if self.tolerance is not None and not self.tolerance > 0:
            raise InversionError(f"tolerance: got {self.tolerance}, expected more than 0")


@dataclass(frozen=True)
class Found:
    """What was found for n prompts of T tokens.

    ``ids`` [n, T]; ``tokens``, a row a prompt and position: ``prompt, position, found_id, status, candidates``
    (verified, the accepted one included), ``residual, margin`` (the runner-up's residual over the accepted one's, among
    those tried; NaN where one alone was); ``tolerance``; ``read``: tokens read by the model in all.
    """

    ids: Tensor
    tokens: pd.DataFrame
    tolerance: float
    read: int

    def exact(self, reference: Tensor) -> np.ndarray:
        """Whether every id of a prompt is the true one [n]."""
        return (self.ids == reference.to(self.ids.device)).all(-1).cpu().numpy()


def residuals(found: Tensor, targets: Tensor) -> Tensor:
    """|h - h'|^2 / |h|^2 along the last dimension."""
    return (found - targets).square().sum(-1) / targets.square().sum(-1)


def numerical_floor(reader: Reader, tokens: int = CALIBRATED, seed: int = 0) -> float:
    """The largest residual of known ids between two ways to compute their states: whole, and candidate by candidate."""
    ids = torch.randint(len(reader.embedding), (4, tokens), generator=torch.Generator().manual_seed(seed))
    ids = ids.to(reader.device)
    whole, prefixes, worst = reader.states(ids), Prefixes(reader, 4, tokens), 0.0
    rows = torch.arange(4, device=reader.device)
    for position in range(tokens):
        tried = torch.stack([ids[:, position], ids[:, (position + 1) % tokens]], 1)
        states, longer = reader.branches(tried, prefixes.rows(rows), prefixes.lengths, chain=False)
        worst = max(worst, float(residuals(states[:, 0], whole[:, position]).max()))
        start = longer.get_seq_length() - 2
        prefixes.append(rows, longer, torch.full((4, 1), start, device=reader.device))
    return max(worst, float(torch.finfo(whole.dtype).eps) ** 2)


def invert(reader: Reader, states: Tensor, proposer: Proposer, settings: Settings = Settings()) -> Found:
    """Invert states [n, T, d] of n prompts of equal length; all advance together, each at its own pace.

    Raises:
        InversionError: see :func:`lib.inversion.continuous.check_states`.
    """
    settings.check()
    states = states.to(reader.embedding)
    check_states(reader, states)
    tolerance = settings.tolerance
    if tolerance is None:
        tolerance = FACTOR * numerical_floor(reader)
    run = _Run(reader, states, proposer, settings, tolerance)
    while len(run.active):
        failed = run.prove(run.active)
        if len(failed):
            run.repair(failed)
    tokens = pd.DataFrame(run.rows).sort_values(["prompt", "position"], ignore_index=True)
    return Found(run.ids, _classed(tokens, reader), tolerance, run.read)


class _Run:
    """The state of a search: what is proven of every prompt, and what has been spent."""

    def __init__(self, reader: Reader, states: Tensor, proposer: Proposer, settings: Settings, tolerance: float):
        self.reader, self.states, self.proposer = reader, states, proposer
        self.settings, self.tolerance = settings, tolerance
        self.count, self.tokens, _ = states.shape
        self.prefixes = Prefixes(reader, self.count, self.tokens)
        self.ids = torch.zeros(self.count, self.tokens, dtype=torch.long, device=reader.device)
        self.rows: list[dict] = []
        self.read = 0
        self.failed: dict[int, Tensor] = {}  # the state of each prompt's guess that failed
        self.guesses = self._guess()

    @property
    def active(self) -> Tensor:
        """Prompts that are not proven to their end."""
        return (self.prefixes.lengths < self.tokens).nonzero()[:, 0]

    def _guess(self) -> Tensor:
        """The best proposal [n, T] at every position: the first one from the table of all one-token prompts."""
        guesses = torch.zeros_like(self.ids)
        for i, row in enumerate(self.states):
            guesses[i, 0] = (self.reader.first_states - row[0]).square().sum(-1).argmin()
            if self.tokens > 1:
                expected = self.reader.expected(row[:-1])
                guesses[i, 1:] = self.proposer.best(row[1:], expected)
        return guesses

    def prove(self, rows: Tensor) -> Tensor:
        """Read the next guesses of some prompts and commit those that reproduce their states, up to the first failure.

        Returns:
            The prompts whose next guess was read and failed.
        """
        lengths, ahead = self.prefixes.lengths[rows], self.settings.ahead
        places = lengths[:, None] + torch.arange(ahead, device=rows.device)
        inside = places < self.tokens
        places = places.clamp(max=self.tokens - 1)
        ids = self.guesses[rows[:, None], places]
        states, longer = self.reader.branches(ids, self.prefixes.rows(rows), lengths, chain=True)
        self.read += ids.numel()
        found = residuals(states, self.states[rows[:, None], places])
        right = ((found <= self.tolerance) & inside).long().cumprod(1).bool()
        start = longer.get_seq_length() - ahead
        columns = torch.where(right, start + torch.arange(ahead, device=rows.device), -1)
        for i, j in right.nonzero().tolist():
            self._note(int(rows[i]), int(places[i, j]), int(ids[i, j]), CONSISTENT, 1, float(found[i, j]), np.nan)
        self.prefixes.append(rows, longer, columns)
        stopped = ~right.all(1) & (self.prefixes.lengths[rows] < self.tokens)
        for i in stopped.nonzero()[:, 0].tolist():
            self.failed[int(rows[i])] = states[i, int(right[i].sum())]
        return rows[stopped]

    def repair(self, rows: Tensor) -> None:
        """Find the next token of some prompts among growing batches of candidates."""
        search = [_Search(self, int(row)) for row in rows]
        vocabulary, tried = len(self.reader.embedding), 0
        for total in [*(stage for stage in self.settings.stages if stage < vocabulary), vocabulary]:
            if total == vocabulary and not self.settings.scan:
                break
            while tried < total and search:
                size = min(CHUNK, total - tried)
                search = self._try(search, size)
                tried += size
            if self.settings.refit <= tried < vocabulary:
                for one in search:
                    one.rank_anew()
        for one in search:
            self._accept_best(one)

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
            else:
                columns[i, 0] = start + place
                self._note(one.row, one.position, int(ids[i, place]), *one.answer())
        self.prefixes.append(rows, longer, columns)
        return left

    def _accept_best(self, one: "_Search") -> None:
        """Commit the nearest of all that were tried, though it is not within the tolerance."""
        row = torch.tensor([one.row], device=self.states.device)
        ids = one.nearest[None, None]
        _, longer = self.reader.branches(ids, self.prefixes.rows(row), self.prefixes.lengths[row], chain=False)
        self.read += 1
        self.prefixes.append(row, longer, torch.full((1, 1), longer.get_seq_length() - 1, device=row.device))
        _, tried, best, margin = one.answer()
        self._note(one.row, one.position, int(one.nearest), BEST, tried, best, margin)

    def _note(self, row: int, place: int, found: int, status: str, tried: int, residual: float, margin: float) -> None:
        self.ids[row, place] = found
        known = {"prompt": row, "position": place, "found_id": found, "status": status}
        self.rows.append(known | {"candidates": tried, "residual": residual, "margin": margin})


class _Search:
    """The search for one token: its order of the vocabulary, and what was tried."""

    def __init__(self, run: _Run, row: int):
        self.run, self.row = run, row
        self.position = int(run.prefixes.lengths[row])
        self.target = run.states[row, self.position]
        expected = self._expected()
        order = run.proposer.order(self.target[None], expected[None])[0]
        guess = run.guesses[row, self.position]
        self.order = order[order != guess]
        self.ids, self.states, self.found = [], [], []
        self.nearest, self.best = guess, np.inf
        self.take(guess[None], run.failed[row][None])

    def _expected(self) -> Tensor:
        reader = self.run.reader
        if self.position == 0:
            return reader.embedding.new_full((len(reader.embedding),), 1 / len(reader.embedding))
        if reader.reads_expectation:
            return reader.expected(self.run.states[self.row, self.position - 1][None])[0]
        return reader.next_probabilities(self.run.ids[self.row, : self.position][None])[0]

    def next(self, size: int) -> Tensor:
        """The next candidates; short of ``size``, the last ones again."""
        part, self.order = self.order[:size], self.order[size:]
        return torch.nn.functional.pad(part, (0, size - len(part)), value=int(self.nearest))

    def take(self, ids: Tensor, states: Tensor) -> int | None:
        """Keep what candidates gave; the place of the one within the tolerance, if there is one."""
        found = residuals(states, self.target)
        self.ids.append(ids)
        self.states.append(states)
        self.found.append(found)
        place = int(found.argmin())
        if float(found[place]) < self.best:
            self.nearest, self.best = ids[place], float(found[place])
        return place if self.best <= self.run.tolerance else None

    def answer(self) -> tuple[str, int, float, float]:
        """Status, candidates tried, residual, and the runner-up's over it."""
        every = torch.cat(self.found)
        tried = min(len(every), len(self.run.reader.embedding))
        margin = float(every.topk(2, largest=False).values[1] / max(self.best, 1e-30)) if len(every) > 1 else np.nan
        if len(self.order) == 0:
            return SWEPT, tried, self.best, margin
        return (UNIQUE if margin >= FACTOR else CONSISTENT), tried, self.best, margin

    def rank_anew(self) -> None:
        """Order what is left by a regression of states on embeddings over everything tried in this very context."""
        ids, states, table = torch.cat(self.ids), torch.cat(self.states), self.run.reader.embedding
        inputs = table[ids]
        middle, centre = inputs.mean(0), states.mean(0)
        inputs, states = inputs - middle, states - centre
        width = inputs.shape[1]
        gram = inputs.T @ inputs + REFIT_RIDGE * inputs.square().mean() * torch.eye(width).to(inputs)
        slope = torch.linalg.solve(gram, inputs.T @ states)  # [d, d]
        predicted = (table[self.order] - middle) @ slope + centre
        apart = (predicted - self.target).square().sum(-1)
        self.order = self.order[apart.argsort()]


def _classed(tokens: pd.DataFrame, reader: Reader) -> pd.DataFrame:
    """Tokens whose embedding row others share: any of the class reproduces the states."""
    shared = diagnostics.duplicates(reader.embedding)
    accepted = tokens.status != BEST
    return tokens.assign(status=tokens.status.mask(accepted & tokens.found_id.isin(shared), AMBIGUOUS))
