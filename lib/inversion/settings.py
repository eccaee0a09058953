"""The inversion study's settings (``params/inversion.yaml``), and the prompts that it inverts."""

import dataclasses
import hashlib
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lib import config, paths
from lib.config import ConfigError, at_least, build
from lib.files import read_json_lines
from lib.inversion import channels
from lib.inversion.continuous import FIRST, METRICS, MODES, STARTS, Settings
from lib.inversion.reader import Convention

CONTROLS = ("random-proxy", "lm-order", "full-scan", "sipit")
_RUN = {
    "steps": None,
    "candidates": None,
    "tokens": None,
    "layer": None,
    "norm": "post",
    "channels": ["clean"],
    "start": "zeros",
    "first": "search",
    "metric": "l1",
    "configurations": {},
    "abandon": False,
}
ROWS = 128  # positions of true prefixes that advance together
LEAST_TOKENS = 20  # of a text of a data set, as published


@dataclass(frozen=True)
class Run:
    """One run: a mode with its settings on the first ``prompts`` prompts, cut to ``tokens`` tokens.

    ``steps`` is K (gradient modes), ``candidates`` C (where a mode has one); ``channels`` what the states go through.
    ``configurations`` are settings side by side: a name and the steps and candidates, or the start, that it has in
    place of the run's own. All of them and all channels advance together. ``abandon``: a prompt is left at its first
    fallback, behind which it can no longer come back whole.
    """

    name: str
    mode: str
    prompts: int = at_least(1)
    tokens: int = at_least(1)
    steps: int | None = at_least(1)
    candidates: int | None = at_least(1)
    layer: int | None = at_least(1)
    norm: str = dataclasses.field()
    channels: tuple[str, ...] = dataclasses.field()
    start: str = dataclasses.field()
    first: str = dataclasses.field()
    metric: str = dataclasses.field()
    configurations: dict = dataclasses.field()
    abandon: bool = dataclasses.field()

    @property
    def is_control(self) -> bool:
        """Whether no gradient is used, or only one prompt advances at a time."""
        return self.mode in CONTROLS

    @property
    def convention(self) -> Convention:
        """Where its states are taken."""
        return Convention(self.layer, self.norm)

    @property
    def method(self) -> str:
        """The method's name in the tables."""
        return self.mode if self.is_control else "continuous"

    @property
    def units(self) -> int:
        """Parts that are computed and kept one by one: blocks of prompts where no position waits for another, else
        positions."""
        return -(-self.prompts // self.block) if self.block else self.tokens

    @property
    def block(self) -> int:
        """Prompts of a unit, or 0 where a unit is a position of all prompts."""
        if self.is_control:
            return 1
        return max(1, ROWS // (self.tokens * max(1, len(self.configurations)))) if self.mode == "reference" else 0

    def variants(self) -> list["Run"]:
        """The run's configurations, each as a run of its own."""
        own = self.configurations or {self.name: {}}
        return [dataclasses.replace(self, name=name, configurations={}, **changes) for name, changes in own.items()]

    def search(self, log_every: int) -> Settings:
        """The settings of its search; the blind one looks at the nearest token alone."""
        return Settings(
            steps=self.steps,
            candidates=1 if self.mode == "blind" else self.candidates,
            mode=self.mode,
            start=self.start,
            first=self.first,
            metric=self.metric,
            log_every=log_every,
        )


@dataclass(frozen=True)
class PathSettings:
    """Tokens of the first prompt whose search is kept step by step."""

    steps: int = at_least(1)
    positions: tuple[int, ...] = at_least(0)


@dataclass(frozen=True)
class BenchSettings:
    """The bench set (``params/inversion.yaml`` says how)."""

    steps: int = at_least(1)
    candidates: int = at_least(1)
    slow: tuple[int, ...] = at_least(1)
    quick: tuple[int, ...] = at_least(1)
    batch: tuple[int, ...] = at_least(1)
    together: tuple[int, ...] = at_least(1)
    random: tuple[int, ...] = at_least(1)
    cap: float = at_least(1.0)
    budget: float = at_least(1.0)


@dataclass(frozen=True)
class Study:
    """``params/inversion.yaml`` for one scale."""

    scale: str
    model: str
    revision: str | None
    source: str
    tokens: int
    log_every: int
    grid: tuple[int, ...]
    runs: tuple[Run, ...]
    path: PathSettings
    short: Run
    bench: BenchSettings

    @property
    def has_texts(self) -> bool:
        """Whether the prompts lie on this machine, so that they are part of a result's identity."""
        return self.source == "written" or self.source.endswith(".jsonl")


@dataclass(frozen=True)
class _Own:
    model: str
    revision: str | None
    source: str
    tokens: int = at_least(1)
    log_every: int = at_least(1)
    runs: dict = dataclasses.field()
    path: PathSettings = dataclasses.field()
    short: dict = dataclasses.field()
    bench: BenchSettings = dataclasses.field()


def load(scale: str, overrides: dict[str, Any] | None = None, path: Path | None = None) -> Study:
    """Read and check ``params/inversion.yaml`` for a scale; ``overrides`` replaces a scale's ``model`` or ``source``.

    Raises:
        ConfigError: a name nobody reads, a value of the wrong type or out of range, an unknown scale, mode or channel.
    """
    path = path or paths.PARAMS / "inversion.yaml"
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    if scale not in values["scales"]:
        raise ConfigError(f"{path.name}: got the scale {scale!r}, expected one of {', '.join(values['scales'])}.")
    given = {"revision": None, "source": "written"} | values["scales"][scale] | (overrides or {})
    own = build(_Own, given, path.name)
    runs = tuple(_run(name, one, own.tokens, path.name) for name, one in own.runs.items())
    named = [one.name for run in runs for one in run.variants()]
    twice = sorted({name for name in named if named.count(name) > 1} | {run.name for run in runs} & {"path", "short"})
    if twice:
        raise ConfigError(f"{path.name}: {twice[0]!r} names two runs or configurations, expected names once each.")
    if max(own.path.positions) >= own.tokens:
        raise ConfigError(
            f"{path.name}: path.positions has {max(own.path.positions)}, expected less than {own.tokens}, the tokens"
        )
    return Study(
        scale,
        own.model,
        own.revision,
        own.source,
        own.tokens,
        own.log_every,
        tuple(values["grid"]),
        runs,
        own.path,
        _run("short", own.short, own.tokens, path.name),
        own.bench,
    )


def _run(name: str, values: Any, tokens: int, where: str) -> Run:
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: run {name!r} is {values!r}, expected a mapping.")
    where = f"{where}: run {name!r}"
    run = build(Run, _RUN | {"tokens": tokens} | values | {"name": name}, where)
    for own, changes in run.configurations.items():
        known = ("steps", "candidates", "start")
        if not isinstance(changes, dict) or set(changes) - set(known):
            raise ConfigError(f"{where}: configuration {own!r} is {changes!r}, expected some of {', '.join(known)}.")
        build(Run, _RUN | {"tokens": tokens} | values | {"name": own, "configurations": {}} | changes, where)
    if run.is_control and run.configurations:
        raise ConfigError(f"{where}: mode {run.mode} takes no configurations.")
    for variant in run.variants():
        _check(variant, where)
    for channel in run.channels:
        channels.named(channel)
    return run


def _check(run: Run, where: str) -> None:
    known_values = {"mode": (*MODES, *CONTROLS), "start": STARTS, "first": FIRST, "metric": METRICS}
    for what, known in (known_values | {"norm": ("pre", "post")}).items():
        if getattr(run, what) not in known:
            raise ConfigError(f"{where}: {what} is {getattr(run, what)!r}, expected one of {', '.join(known)}.")
    if run.is_control and run.channels != ("clean",):
        raise ConfigError(f"{where}: channels are {list(run.channels)}, expected clean alone for {run.mode}.")
    if run.abandon and run.mode != "verified":
        raise ConfigError(f"{where}: abandon is true; mode {run.mode} has no fallback after which to leave a prompt.")
    needed = {"steps": not run.is_control, "candidates": run.mode in ("reference", "verified", "random-proxy")}
    for what, wanted in needed.items():
        if wanted != (getattr(run, what) is not None):
            count = "one" if wanted else "none"
            raise ConfigError(f"{where}: {what} is {getattr(run, what)!r}; mode {run.mode} needs {count}.")


@dataclass(frozen=True)
class Prompt:
    """A text to invert: its id, and the kind of text that it is."""

    id: str
    source: str
    text: str


def prompts(source: str, count: int, enough: Any = None) -> list[Prompt]:
    """The first ``count`` prompts of a source.

    Args:
        source: ``written``: those of ``params/prompts.jsonl``, genres in turn. A file ``*.jsonl`` with a ``text`` (and
            perhaps an ``id``) a line. Else a data set of the hub, its ``en`` training documents in order by streaming.
        enough: whether a text of a data set is long enough; the others are passed over.

    Raises:
        ConfigError: there are fewer, or the source cannot be read.
    """
    if source == "written":
        found = written()
    elif source.endswith(".jsonl"):
        found = _of_file(Path(source))
    else:
        found = _of_hub(source, count, enough or (lambda text: True))
    if len(found) < count:
        raise ConfigError(f"prompts: {source} has {len(found)}, expected at least {count}.")
    return found[:count]


def written() -> list[Prompt]:
    """All prompts of ``params/prompts.jsonl``, genres in turn."""
    return _in_turn(_of_file(paths.PARAMS / "prompts.jsonl"))


def _of_file(path: Path) -> list[Prompt]:
    rows = read_json_lines(path, "prompts", ConfigError)
    for line, row in rows:
        if not isinstance(row.get("text"), str) or not row["text"].strip():
            raise ConfigError(f"{paths.show(path)}, line {line}: expected a `text` that is not empty.")
    return [Prompt(str(row.get("id", line)), str(row.get("genre", path.stem)), row["text"]) for line, row in rows]


def _in_turn(found: list[Prompt]) -> list[Prompt]:
    genres: dict[str, list[Prompt]] = {}
    for prompt in found:
        genres.setdefault(prompt.source, []).append(prompt)
    turns = itertools.zip_longest(*genres.values())
    return [prompt for turn in turns for prompt in turn if prompt is not None]


def _of_hub(source: str, count: int, enough: Any) -> list[Prompt]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ConfigError(f"prompts: {source} is a data set of the hub: `pip install datasets` reads it.") from error
    try:
        rows = load_dataset(source, "en", split="train", streaming=True)
        texts = itertools.islice((row["text"] for row in rows if enough(row["text"])), count)
        return [Prompt(f"{source}-{number}", source, text) for number, text in enumerate(texts)]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"prompts: {source} could not be read: {str(error).strip().splitlines()[0]}") from error


def checksum(chosen: list[Prompt]) -> str:
    """What identifies a list of prompts."""
    return hashlib.sha256("\0".join(prompt.text for prompt in chosen).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class InversionRun:
    """Parameters of an inversion notebook, checked. ``results`` as in :class:`lib.config.Testbed`."""

    study: Study
    results: str


@dataclass(frozen=True)
class _Values:
    """What the ``parameters`` cell of an inversion notebook may set, with its types."""

    scale: str
    model: str | None
    prompts: str | None


def from_notebook(namespace: dict[str, Any]) -> InversionRun:
    """Check the parameters of an inversion notebook, as :func:`lib.config.from_notebook` does for the others.

    Raises:
        ConfigError: a name nobody reads, a value of the wrong type, or an unknown scale.
    """
    defaults = {"scale": "laptop", "model": None, "prompts": None}
    given, source = config.checked(namespace, _Values, defaults)
    overrides = {"model": given.model, "source": given.prompts}
    return InversionRun(load(given.scale, {key: value for key, value in overrides.items() if value}), source)
