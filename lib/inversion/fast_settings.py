"""Settings of exact inversion and of defences (``params/fast.yaml``)."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lib import config, paths
from lib.config import ConfigError, at_least, build
from lib.inversion import channels
from lib.inversion.reader import Convention

RANDOM = "random ids"
_SET = {"layer": None, "norm": "post"}


@dataclass(frozen=True)
class Set:
    """Prompts that are inverted exactly: ``batch`` of them advance together."""

    name: str
    source: str
    prompts: int = at_least(1)
    tokens: int = at_least(1)
    batch: int = at_least(1)
    layer: int | None = at_least(1)
    norm: str = dataclasses.field()

    @property
    def convention(self) -> Convention:
        """Where its states are taken."""
        return Convention(self.layer, self.norm)

    @property
    def units(self) -> int:
        """Batches, the last one perhaps smaller."""
        return -(-self.prompts // self.batch)


@dataclass(frozen=True)
class Fitting:
    """What proposers are fitted on: so many tokens, a third of them docstrings of these packages."""

    tokens: int = at_least(2)
    packages: tuple[str, ...] = dataclasses.field()


@dataclass(frozen=True)
class Cascade:
    """Whole prompts, each token behind what the attacker found before it."""

    prompts: int = at_least(1)
    candidates: int = at_least(1)
    channels: tuple[str, ...] = dataclasses.field()


@dataclass(frozen=True)
class Defences:
    """What attackers find in released states, and what these are still good for (``params/fast.yaml`` says how)."""

    prompts: int = at_least(1)
    tokens: int = at_least(1)
    candidates: int = at_least(2)
    draws: int = at_least(1)
    swept: tuple[int, ...] = at_least(1)
    channels: tuple[str, ...] = dataclasses.field()
    cascade: Cascade = dataclasses.field()
    utility_tokens: int = at_least(1)
    utility_packages: tuple[str, ...] = dataclasses.field()


@dataclass(frozen=True)
class Fast:
    """``params/fast.yaml`` for one scale."""

    scale: str
    model: str
    revision: str | None
    proposer: Fitting
    sets: tuple[Set, ...]
    peers: dict[str, int]
    proposals: tuple[str, ...]
    defences: Defences


@dataclass(frozen=True)
class _Own:
    model: str
    revision: str | None
    proposer: Fitting
    sets: dict
    peers: dict
    proposals: tuple[str, ...] = dataclasses.field()
    defences: Defences


def load(scale: str, overrides: dict[str, Any] | None = None, path: Path | None = None) -> Fast:
    """Read and check ``params/fast.yaml`` for a scale; ``overrides`` replaces its ``model``.

    Raises:
        ConfigError: a name nobody reads, a value of the wrong type or out of range, an unknown scale, or a channel that
            there is not.
    """
    path = path or paths.PARAMS / "fast.yaml"
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    if scale not in values["scales"]:
        raise ConfigError(f"{path.name}: got the scale {scale!r}, expected one of {', '.join(values['scales'])}.")
    own = build(_Own, {"revision": None} | values["scales"][scale] | (overrides or {}), path.name)
    sets = tuple(_set(name, one, path.name) for name, one in own.sets.items())
    for name, count in own.peers.items():
        known = {one.name: one for one in sets}
        if name not in known or type(count) is not int or not 1 <= count <= known[name].prompts:
            raise ConfigError(
                f"{path.name}: peers has {name!r}: {count!r}, expected a set and a number of its prompts."
            )
    unknown = [name for name in own.proposals if name not in {one.name for one in sets}]
    if unknown:
        raise ConfigError(f"{path.name}: proposals has {unknown[0]!r}, expected names of sets.")
    for name in (*own.defences.channels, *own.defences.cascade.channels):
        channels.named(name)
    late = [place for place in own.defences.swept if place >= own.defences.tokens]
    if late:
        raise ConfigError(f"{path.name}: defences.swept has {late[0]}, expected less than {own.defences.tokens}.")
    if own.defences.cascade.prompts > own.defences.prompts:
        raise ConfigError(f"{path.name}: defences.cascade.prompts is more than {own.defences.prompts}, the sweep's.")
    return Fast(scale, own.model, own.revision, own.proposer, sets, own.peers, own.proposals, own.defences)


def _set(name: str, values: Any, where: str) -> Set:
    where = f"{where}: set {name!r}"
    if not isinstance(values, dict):
        raise ConfigError(f"{where} is {values!r}, expected a mapping.")
    found = build(Set, _SET | values | {"name": name}, where)
    if found.norm not in ("pre", "post"):
        raise ConfigError(f"{where}: norm is {found.norm!r}, expected pre or post.")
    return found


@dataclass(frozen=True)
class FastRun:
    """Parameters of notebook 06, checked. ``results`` as in :class:`lib.config.Testbed`."""

    fast: Fast
    results: str


@dataclass(frozen=True)
class _Values:
    scale: str
    model: str | None


def from_notebook(namespace: dict[str, Any]) -> FastRun:
    """Check the parameters of notebook 06, as :func:`lib.config.from_notebook` does for the others.

    Raises:
        ConfigError: a name nobody reads, a value of the wrong type, or an unknown scale.
    """
    given, source = config.checked(namespace, _Values, {"scale": "laptop", "model": None})
    return FastRun(load(given.scale, {"model": given.model} if given.model else None), source)
