"""What happens to hidden states between the model and whoever reads them: precision, quantisation, noise."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lib.inversion.reader import InversionError


@dataclass(frozen=True)
class Channel:
    """A released state is ``release`` of the true one. ``deterministic``: an attacker who knows it can do the same."""

    name: str
    deterministic: bool
    release: Callable[[Tensor, torch.Generator], Tensor]


def clean() -> Channel:
    """States as they are."""
    return Channel("clean", True, lambda states, _: states)


def bfloat16() -> Channel:
    """States rounded to bf16."""
    return Channel("bf16", True, lambda states, _: states.to(torch.bfloat16).to(states.dtype))


def quantised(bits: int) -> Channel:
    """Every row in 2^bits - 1 even steps around zero, the widest at its largest coordinate: round(h / s) s.

    Raises:
        InversionError: fewer than 2 bits.
    """
    if bits < 2:
        raise InversionError(f"quantisation: got {bits} bits, expected at least 2")
    levels = 2 ** (bits - 1) - 1

    def release(states: Tensor, _: torch.Generator) -> Tensor:
        step = states.abs().amax(-1, keepdim=True) / levels
        return (states / step).round() * step

    return Channel(f"{bits}-bit", True, release)


def gaussian(sigma: float) -> Channel:
    """Independent normal noise on every coordinate, ``sigma`` times the root mean square of its row.

    Raises:
        InversionError: a negative sigma.
    """
    if sigma < 0:
        raise InversionError(f"noise: got sigma {sigma}, expected at least 0")

    def release(states: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.randn(states.shape, generator=generator, dtype=states.dtype).to(states.device)
        return states + sigma * states.square().mean(-1, keepdim=True).sqrt() * noise

    return Channel(f"gaussian {sigma:g}", False, release)


def named(name: str) -> Channel:
    """A channel by its name in ``params/inversion.yaml``: ``clean``, ``bf16``, ``4-bit``, ``gaussian 0.1``.

    Raises:
        InversionError: no channel has that name.
    """
    if name in ("clean", "bf16"):
        return clean() if name == "clean" else bfloat16()
    try:
        if name.endswith("-bit"):
            return quantised(int(name.removesuffix("-bit")))
        if name.startswith("gaussian "):
            return gaussian(float(name.removeprefix("gaussian ")))
    except ValueError as error:
        if isinstance(error, InversionError):
            raise
    raise InversionError(f"channel: got {name!r}, expected clean, bf16, <k>-bit or gaussian <sigma>")
