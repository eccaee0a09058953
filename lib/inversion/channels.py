"""What happens to hidden states between the model and whoever reads them: precision, quantisation, noise, secret keys.

Every channel says what is secret about it and whether it is deterministic. What is not secret is known to the attacker,
scales and sigma included. A channel therefore also says how an attacker who knows all this compares what was released
with a candidate's state: by doing to it what was done to the true one, by the noise's likelihood, or by what a secret
key leaves as it was.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy import optimize, stats
from torch import Tensor

from lib.inversion.reader import InversionError

NOTHING = "nothing"


@dataclass(frozen=True)
class Sighting:
    """What an attacker sees of a token: what was ``released`` up to it [t, d] and which states [t - 1, d] are ``known``
    to lie behind the tokens before it."""

    released: Tensor
    known: Tensor

    @property
    def row(self) -> Tensor:
        """The token's own released state [d]."""
        return self.released[-1]


@dataclass(frozen=True)
class Channel:
    """A released state is ``release`` of the true one, rows [..., d]; noise and keys come from the generator.

    ``deterministic``: the same states are released alike every time. ``secret`` says what the attacker does not know.
    ``misfit(sighting, states)`` [C]: how badly candidates' states [C, d] explain a sighting for an attacker who knows
    all that is not secret, the less the better: a squared Euclidean distance, or, where ``likelihood``, a negative
    log-likelihood in nats, up to a constant. ``slack(row)`` is the squared distance that a released row [d] may be off
    though the token is right, since a last digit can fall into another bin. ``sigma``: of Gaussian noise, relative.
    """

    name: str
    deterministic: bool
    release: Callable[[Tensor, torch.Generator], Tensor]
    misfit: Callable[[Sighting, Tensor], Tensor]
    secret: str = NOTHING
    likelihood: bool = False
    sigma: float | None = None
    slack: Callable[[Tensor], float] = lambda row: 0.0

    @property
    def repeatable(self) -> bool:
        """Whether the attacker can do to a candidate's state what was done to the true one."""
        return self.deterministic and self.secret == NOTHING


def squared(released: Tensor, states: Tensor) -> Tensor:
    """Squared Euclidean distances [C] of a released state [d] from states [C, d]."""
    return (states - released).square().sum(-1)


FLIPS = 2  # coordinates that may fall into another bin of a rounding channel


def _public(name: str, apply: Callable[[Tensor], Tensor], slack: Callable[[Tensor], float] | None = None) -> Channel:
    """A deterministic channel without a secret: candidates go through it as well."""

    def misfit(seen: Sighting, states: Tensor) -> Tensor:
        return squared(seen.row, apply(states))

    return Channel(name, True, lambda states, _: apply(states), misfit, slack=slack or (lambda row: 0.0))


def clean() -> Channel:
    """States as they are."""
    return _public("clean", lambda states: states)


CLEAN = clean()


def bfloat16() -> Channel:
    """States rounded to bf16."""
    half = torch.finfo(torch.bfloat16).eps
    return _public(
        "bf16",
        lambda states: states.to(torch.bfloat16).to(states.dtype),
        lambda row: FLIPS * float(row.abs().max() * half) ** 2,
    )


def quantised(bits: int) -> Channel:
    """Every row in 2^bits - 1 even steps around zero, the widest at its largest coordinate: round(h / s) s.

    Raises:
        InversionError: fewer than 2 bits.
    """
    if bits < 2:
        raise InversionError(f"quantisation: got {bits} bits, expected at least 2")
    levels = 2 ** (bits - 1) - 1

    def apply(states: Tensor) -> Tensor:
        step = states.abs().amax(-1, keepdim=True) / levels
        return (states / step).round() * step

    return _public(f"{bits}-bit", apply, lambda row: FLIPS * float(row.abs().max() / levels) ** 2)


def clipped(bound: float) -> Channel:
    """Every coordinate held within ``bound`` times the root mean square of its row.

    Raises:
        InversionError: a bound of zero or less.
    """
    if not bound > 0:
        raise InversionError(f"clipping: got the bound {bound}, expected more than 0")

    def apply(states: Tensor) -> Tensor:
        edge = bound * _rms(states)
        return states.clamp(-edge, edge)

    return _public(f"clipped {bound:g}", apply)


def largest(share: float) -> Channel:
    """Of every row the coordinates largest in size, a ``share`` of them; the others are zero (top-k sparsification).

    Raises:
        InversionError: no share.
    """
    if not 0 < share <= 1:
        raise InversionError(f"sparsification: got the share {share}, expected more than 0, at most 1")

    def apply(states: Tensor) -> Tensor:
        kept = states.abs().topk(max(1, round(share * states.shape[-1])), dim=-1).indices
        return torch.zeros_like(states).scatter(-1, kept, states.gather(-1, kept))

    return _public(f"top {share:g}", apply, lambda row: 2 * float(row[row != 0].abs().min()) ** 2)


def gaussian(sigma: float) -> Channel:
    """Independent normal noise on every coordinate, ``sigma`` times the root mean square of its row.

    Raises:
        InversionError: a sigma of zero or less.
    """
    if not sigma > 0:
        raise InversionError(f"noise: got sigma {sigma}, expected more than 0")

    def release(states: Tensor, generator: torch.Generator) -> Tensor:
        return states + sigma * _rms(states) * _normal(states, generator)

    def misfit(seen: Sighting, states: Tensor) -> Tensor:
        width = (sigma * _rms(states)).squeeze(-1)
        return squared(seen.row, states) / (2 * width.square()) + states.shape[-1] * width.log()

    return Channel(f"gaussian {sigma:g}", False, release, misfit, "the noise", likelihood=True, sigma=sigma)


def laplace(scale: float) -> Channel:
    """Independent Laplace noise on every coordinate, its scale b = ``scale`` times the root mean square of its row.

    Raises:
        InversionError: a scale of zero or less.
    """
    if not scale > 0:
        raise InversionError(f"noise: got the scale {scale}, expected more than 0")

    def release(states: Tensor, generator: torch.Generator) -> Tensor:
        uniform = torch.rand(states.shape, generator=generator, dtype=torch.float64) - 0.5
        noise = -uniform.sign() * torch.log1p(-2 * uniform.abs().clamp(max=0.5 - 1e-12))
        return states + scale * _rms(states) * noise.to(states)

    def misfit(seen: Sighting, states: Tensor) -> Tensor:
        width = (scale * _rms(states)).squeeze(-1)
        return (states - seen.row).abs().sum(-1) / width + states.shape[-1] * width.log()

    return Channel(f"laplace {scale:g}", False, release, misfit, "the noise", likelihood=True)


def dropout(rate: float) -> Channel:
    """Every coordinate zeroed with a chance of ``rate``, the others divided by what is left.

    Raises:
        InversionError: a rate that is no chance, or 1.
    """
    if not 0 <= rate < 1:
        raise InversionError(f"dropout: got the rate {rate}, expected 0 to below 1")

    def release(states: Tensor, generator: torch.Generator) -> Tensor:
        kept = torch.rand(states.shape, generator=generator) >= rate
        return states * kept.to(states) / (1 - rate)

    def misfit(seen: Sighting, states: Tensor) -> Tensor:
        kept = seen.row != 0  # what is left is exact
        return squared(seen.row[kept] * (1 - rate), states[..., kept])

    return Channel(f"dropout {rate:g}", False, release, misfit, "the coordinates that were dropped")


def permuted() -> Channel:
    """All rows' coordinates in one secret order (arXiv:2505.18332); the generator's state is the key.

    Sorted coordinates are the same in any order: no key is needed to compare them.
    """

    def release(states: Tensor, generator: torch.Generator) -> Tensor:
        return states[..., torch.randperm(states.shape[-1], generator=generator).to(states.device)]

    def misfit(seen: Sighting, states: Tensor) -> Tensor:
        return squared(seen.row.sort().values, states.sort(-1).values)

    return Channel("permuted", True, release, misfit, "the order of coordinates")


def rotated() -> Channel:
    """All rows in one secret orthonormal basis, drawn evenly (QR of a normal matrix); the generator is the key.

    Norms and inner products are the same in any basis: the Gram matrix with tokens already read needs no key.
    """

    def release(states: Tensor, generator: torch.Generator) -> Tensor:
        width = states.shape[-1]
        basis, upper = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))
        return states @ (basis * upper.diagonal().sign()).to(states)

    def misfit(seen: Sighting, states: Tensor) -> Tensor:
        length = seen.row.square().sum()
        own = states.square().sum(-1) - length
        others = states @ seen.known.T - seen.released[:-1] @ seen.row
        return (own.square() + 2 * others.square().sum(-1)) / length  # of both triangles of the Gram matrix

    return Channel("rotated", True, release, misfit, "the basis")


def private(clip: float, sigma: float) -> Channel:
    """Rows cut to the Euclidean norm ``clip``, then normal noise of ``sigma`` on every coordinate: (epsilon, delta)-
    differentially private a row, see :func:`epsilon`.

    Raises:
        InversionError: a clip or sigma of zero or less.
    """
    if not clip > 0 or not sigma > 0:
        raise InversionError(f"private release: got clip {clip} and sigma {sigma}, expected more than 0")

    def held(states: Tensor) -> Tensor:
        return states * (clip / states.norm(dim=-1, keepdim=True)).clamp(max=1)

    def release(states: Tensor, generator: torch.Generator) -> Tensor:
        return held(states) + sigma * _normal(states, generator)

    def misfit(seen: Sighting, states: Tensor) -> Tensor:
        return squared(seen.row, held(states)) / (2 * sigma**2)

    return Channel(f"private {clip:g} {sigma:g}", False, release, misfit, "the noise", likelihood=True)


def epsilon(clip: float, sigma: float, delta: float) -> float:
    """The epsilon of :func:`private` for one row at a ``delta``: any row may be exchanged for any other (2 clip apart).

    By the exact condition of the Gaussian mechanism, delta = Phi(D / 2s - e s / D) - exp(e) Phi(-D / 2s - e s / D),
    with the sensitivity D (Balle and Wang, arXiv:1805.06530).

    Raises:
        InversionError: a delta that is no chance, or numbers of zero or less.
    """
    if not 0 < delta < 1 or not clip > 0 or not sigma > 0:
        raise InversionError(
            f"epsilon: got clip {clip}, sigma {sigma}, delta {delta}, expected numbers above 0, delta < 1"
        )
    ratio = 2 * clip / sigma

    def excess(e: float) -> float:
        second = e + stats.norm.logcdf(-ratio / 2 - e / ratio)
        return float(stats.norm.cdf(ratio / 2 - e / ratio) - np.exp(second) - delta)

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    return float(optimize.brentq(excess, 0.0, high))


def _rms(states: Tensor) -> Tensor:
    return states.square().mean(-1, keepdim=True).sqrt()


def _normal(states: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(states.shape, generator=generator, dtype=states.dtype).to(states.device)


_NAMED: dict[str, Callable[..., Channel]] = {
    "gaussian": gaussian,
    "laplace": laplace,
    "clipped": clipped,
    "top": largest,
    "dropout": dropout,
    "private": private,
    "clean": lambda: CLEAN,
    "bf16": bfloat16,
    "permuted": permuted,
    "rotated": rotated,
}


def named(name: str) -> Channel:
    """A channel by the name that it has: ``clean``, ``bf16``, ``4-bit``, ``gaussian 0.1``, ``private 10 0.5``.

    Raises:
        InversionError: no channel has that name, or its numbers are out of range.
    """
    kind, *numbers = name.split() or [""]
    try:
        if kind.endswith("-bit") and not numbers:
            return quantised(int(kind.removesuffix("-bit")))
        if not np.isfinite([float(number) for number in numbers]).all():
            raise ValueError("not finite")
        return _NAMED[kind](*map(float, numbers))
    except InversionError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        known = ", ".join(["<k>-bit", *_NAMED])
        raise InversionError(f"channel: got {name!r}, expected one of {known}, with its numbers") from error
