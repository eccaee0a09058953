"""Who reads defended states: attackers that know more or less of what was done to them.

All choose among candidate tokens by the candidates' own states. They differ in what they compare, and in whether they
also trust the language model's expectation.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lib.inversion.channels import Channel, Sighting, squared
from lib.inversion.reader import InversionError

TOLERANCE = 1e-4  # mean squared error within which the published method accepts a token
FLOOR = 1e-12  # added to probabilities before their logarithm is taken


@dataclass(frozen=True)
class Attacker:
    """``score(channel, sighting, states, probabilities)`` [C], the less the better, of candidates with states [C, d]
    that the language model expects with ``probabilities`` [C].

    ``accepts`` says whether the best candidate, at the mean squared error ``loss``, is taken for found. ``proves``: the
    score of the true token can be told from the others' by its size alone, without noise.
    """

    name: str
    knows: str
    score: Callable[[Channel, Sighting, Tensor, Tensor], Tensor]
    accepts: Callable[[float], bool] = lambda loss: True
    suits: Callable[[Channel], bool] = lambda channel: True
    proves: bool = True


def _nearest(_: Channel, seen: Sighting, states: Tensor, probabilities: Tensor) -> Tensor:
    return squared(seen.row, states)


def _aware(channel: Channel, seen: Sighting, states: Tensor, probabilities: Tensor) -> Tensor:
    return channel.misfit(seen, states)


def _posterior(channel: Channel, seen: Sighting, states: Tensor, probabilities: Tensor) -> Tensor:
    return channel.misfit(seen, states) - torch.log(probabilities + FLOOR)


def _prior(_: Channel, seen: Sighting, states: Tensor, probabilities: Tensor) -> Tensor:
    return -probabilities


ATTACKERS = {
    one.name: one
    for one in (
        Attacker("tolerance", "the model", _nearest, accepts=lambda loss: loss < TOLERANCE),
        Attacker("nearest", "the model", _nearest),
        Attacker("aware", "the model and the channel", _aware),
        Attacker(
            "aware, prior",
            "the model, the channel and what text is likely",
            _posterior,
            suits=lambda channel: channel.likelihood,
            proves=False,
        ),
        Attacker("prior alone", "what text is likely; no state", _prior, proves=False),
    )
}


def named(name: str) -> Attacker:
    """An attacker by its name.

    Raises:
        InversionError: none has it.
    """
    if name not in ATTACKERS:
        raise InversionError(f"attacker: got {name!r}, expected one of {', '.join(ATTACKERS)}")
    return ATTACKERS[name]
