"""What an audit is asked: models, canaries, decoys, hits and windows, checked before any work starts."""

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lib import config, paths
from lib.config import ConfigError, at_least

QUICK = 31  # decoys a canary: exposure ends at 5 bits, and a single canary is never named
MOST = 32_768  # decoys a canary; so many strings are drawn for one at most
DEFAULTS: dict[str, Any] = {
    "scale": "laptop",
    "model": None,
    "adapter": [],
    "baseline": None,
    "canaries": None,
    "n_decoys": 63,
    "decoys": "characters",
    "hits": [1, 4, 16],
    "windows": [20],
    "template": "auto",
    "seed": 0,
    "output": "audit",
}


@dataclass(frozen=True)
class _Values:
    """What the ``parameters`` cell may set, with its types."""

    scale: str
    model: str | None
    adapter: tuple[str, ...]
    baseline: str | None
    canaries: str | None
    decoys: str
    template: Literal["auto", "chat", "plain"]
    output: str
    hits: tuple[int, ...] = at_least(1)
    windows: tuple[int, ...] = at_least(1)
    n_decoys: int = at_least(0)
    seed: int = at_least(0)


@dataclass(frozen=True)
class Audit:
    """Parameters of an audit, checked.

    ``model`` None: the worked example of the scale, which is then planted and trained (:mod:`lib.audit.example`).
    ``adapter`` are audited one by one on ``model``; without one, the model itself is. ``baseline`` is what they are
    compared with: a model, or an adapter on ``model``; None: ``model`` without its adapters, nothing where there is
    none. ``decoys`` says what decoys are like where a canary states no generator of its own: ``characters``, ``words``,
    a file (``.txt``, a secret a line for all; ``.jsonl``, with ``id`` and ``secret``), or a function of one's own as
    ``module:function``. ``hits`` are numbers of samples, ``windows`` lengths in tokens, the first the one that patterns
    are about. ``results`` as in :class:`lib.config.Testbed`.
    """

    scale: str
    model: str | None
    adapter: tuple[str, ...]
    baseline: str | None
    canaries: str | None
    n_decoys: int
    decoys: str
    hits: tuple[int, ...]
    windows: tuple[int, ...]
    template: Literal["auto", "chat", "plain"]
    seed: int
    output: str
    results: Literal["auto", "local", "reference"]

    @property
    def is_example(self) -> bool:
        """Whether this is the worked example and no model of one's own."""
        return self.model is None

    @property
    def folder(self) -> Path:
        """Where the report goes: ``outputs/local/<scale>/<output>``, or ``output`` where that is a path."""
        named = os.path.basename(self.output) == self.output
        return paths.local(self.scale) / self.output if named else Path(self.output).absolute()


def numbers(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers above 0, separated by commas.

    Raises:
        ConfigError: naming what is none.
    """
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not (part.isascii() and part.isdigit() and int(part) > 0)]
    if wrong:
        raise ConfigError(f"{name}: got {wrong[0]!r}, expected whole numbers above 0, separated by commas.")
    return tuple(map(int, parts))


def cost_of(n_decoys: int) -> str:
    """What a number of decoys can say at most, in one line."""
    if n_decoys == 0:
        return "No decoys: no exposure and no rank; level rests on recall alone."
    alone = int(0.05 * (n_decoys + 1))
    named = (
        f"a canary can be named by its rank among at most {alone}" if alone else "no canary can be named by its rank"
    )
    return (
        f"Up to {n_decoys} decoys a canary: exposure ends at {math.log2(n_decoys + 1):.2f} bits at most, and {named}; "
        "a group is tested by its mean rank. 255 decoys: 8 bits, and among 12."
    )


def from_notebook(namespace: dict[str, Any]) -> Audit:
    """Check the parameters of an audit notebook, as :func:`lib.config.from_notebook` does for the others.

    Raises:
        ConfigError: a name nobody reads, a value of the wrong type, or values that do not go together.
    """
    names = dict(namespace)
    if "adapter" in names and not isinstance(names["adapter"], (list, tuple)):
        names["adapter"] = [] if names["adapter"] is None else [names["adapter"]]
    given, source = config.checked(names, _Values, DEFAULTS)
    return audit(source, **vars(given))


def audit(results: str = "local", **given: Any) -> Audit:
    """An audit's parameters by name; what is left out has its value of :data:`DEFAULTS`.

    Raises:
        ConfigError: values that do not go together.
    """
    params = Audit(**{**DEFAULTS, **given}, results=results)
    if params.scale not in config.scale_names():
        raise ConfigError(f"scale: got {params.scale!r}, expected one of {', '.join(config.scale_names())}.")
    own = [name for name in ("adapter", "baseline", "canaries") if getattr(params, name)]
    if params.is_example and own:
        raise ConfigError(f"{own[0]}: got {getattr(params, own[0])!r} without a model; name the model it belongs to.")
    if not params.is_example and params.canaries is None:
        raise ConfigError("canaries: got none for a model of one's own; expected a JSONL or CSV file.")
    if params.n_decoys > MOST:
        raise ConfigError(f"n_decoys: got {params.n_decoys}, expected at most {MOST}: no more are drawn for a canary.")
    for name in ("hits", "windows"):
        values = getattr(params, name)
        if not values or len(set(values)) < len(values):
            raise ConfigError(f"{name}: got {list(values)}, expected at least one number, each once.")
    if len(set(params.adapter)) < len(params.adapter):
        raise ConfigError(f"adapter: got {list(params.adapter)}, expected every adapter once.")
    if not params.output or params.output in (".", ".."):
        raise ConfigError(f"output: got {params.output!r}, expected a folder's name or path.")
    if params.decoys not in ("characters", "words") and not re.search(r"\.(txt|jsonl)$|^[\w.]+:\w+$", params.decoys):
        raise ConfigError(
            f"decoys: got {params.decoys!r}, expected 'characters', 'words', a .txt or .jsonl file, or module:function."
        )
    return params
