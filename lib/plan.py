"""The plan of the scorecard: which trials there are, drawn from ``params/scorecard.yaml`` before any of them is run."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from lib import paths
from lib.config import ConfigError, Scale, at_least, build, load_scale
from lib.errors import LeakbookError

FULL, UNDERTRAINED = "full", "undertrained"
DEVELOPMENT, TEST = "development", "test"
# What a trial is there for. Positives and negatives are counted, curves only drawn; noise is reported apart.
POSITIVE, NEGATIVE, CURVE, NOISE = "positive", "negative", "curve", "noise"
ON = {
    "damage": FULL,
    "drift-held": FULL,
    "drift-free": FULL,
    "relearning": UNDERTRAINED,
    "format": UNDERTRAINED,
    "benign": UNDERTRAINED,
}
ROLES = {"damage": POSITIVE, "relearning": POSITIVE, "drift-free": CURVE}  # of the largest dose; all others: negative
COLUMNS = ["trial", "half", "seed", "secret_set", "injection", "base", "intervention", "dose", "role", "marks"]
HEX_TOKENS = 13
LEAST_RECORDS = 10  # of twins: 20 untrained secrets, one of which is 5 %
SOURCES = ("GUI", "SYNTH", "SAFETY", "RANDOM")


class PlanError(LeakbookError, ValueError):
    """A plan cannot be drawn, or is not the one that its results belong to."""


@dataclass(frozen=True)
class Seeds:
    """Seeds of the two halves. Settings may be chosen on the first; only the second is reported."""

    development: tuple[int, ...] = at_least(0)
    test: tuple[int, ...] = at_least(0)


@dataclass(frozen=True)
class Taught:
    """How an intervention is trained, and the shares of its update that are tried (the largest last)."""

    steps: int = at_least(1)
    learning_rate: float = at_least(0.0)
    batch_size: int = at_least(1)
    hold_weight: float = at_least(0.0)
    doses: tuple[float, ...] = at_least(0.0)


@dataclass(frozen=True)
class Relearning:
    """The second truth: so many canaries, taught again beside as many new records."""

    canaries: int = at_least(1)
    steps: int = at_least(1)
    learning_rate: float = at_least(0.0)


@dataclass(frozen=True)
class Truth:
    """What every manipulation is checked by (``params/scorecard.yaml`` says how)."""

    samples: int = at_least(1)
    prompts: tuple[str, ...] = dataclasses.field()
    lost: float = at_least(0.0)
    learned: float = at_least(0.0)
    untouched: float = at_least(0.0)
    relearning: Relearning = dataclasses.field()


@dataclass(frozen=True)
class ExposureRule:
    """Margin of the exposure's verdict, in bits."""

    margin: float = at_least(0.0)


@dataclass(frozen=True)
class ExtractionRule:
    """Margin of the closed-form extraction's verdict, a change of hit@``samples``."""

    margin: float = at_least(0.0)
    samples: int = at_least(1)


@dataclass(frozen=True)
class ProbeRules:
    """Rules of the two probes that ``params/verdicts.yaml`` does not have."""

    exposure: ExposureRule = dataclasses.field()
    extraction: ExtractionRule = dataclasses.field()


@dataclass(frozen=True)
class Twins:
    """Twin injections: records, how they are trained, where they are looked at, and what decoys they get."""

    records: int = at_least(2)
    steps: int = at_least(1)
    batch_size: int = at_least(1)
    learning_rate: float = at_least(0.0)
    stops: tuple[int, ...] = at_least(1)
    decoys: int = at_least(1)
    decoy_records: int = at_least(1)
    decoy_stop: int = at_least(1)


@dataclass(frozen=True)
class ScaleSettings:
    """What differs between scales."""

    canaries: int = at_least(2)
    decoys: int = at_least(1)
    seeds: Seeds = dataclasses.field()
    stop_steps: tuple[int, ...] = at_least(1)
    undertrained: int = at_least(1)
    trained: dict = dataclasses.field()
    forgetting: tuple[float, ...] = at_least(0.0)
    twins: Twins = dataclasses.field()


@dataclass(frozen=True)
class Scorecard:
    """``params/scorecard.yaml`` for one scale."""

    scale: str
    secret_sets: int = at_least(1)
    injections: int = at_least(1)
    probes: ProbeRules = dataclasses.field()
    truth: Truth = dataclasses.field()
    own: ScaleSettings = dataclasses.field()

    @property
    def taught(self) -> dict[str, Taught]:
        """How each trained intervention is trained."""
        return {name: build(Taught, values, f"scorecard, {name}") for name, values in self.own.trained.items()}

    @property
    def seeds(self) -> dict[int, str]:
        """Every seed with the half that it belongs to."""
        halves = {DEVELOPMENT: self.own.seeds.development, TEST: self.own.seeds.test}
        return {seed: half for half, seeds in halves.items() for seed in seeds}


def load(scale: str, path: Path | None = None) -> Scorecard:
    """Read and check ``params/scorecard.yaml`` for a scale.

    Raises:
        ConfigError: a name nobody reads, a value of the wrong type or out of range, nothing for this scale, a seed in
            both halves, or a stop that the injection does not keep.
    """
    path = path or paths.PARAMS / "scorecard.yaml"
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    if scale not in values["scales"]:
        raise ConfigError(f"{path.name}: got the scale {scale!r}, expected one of {', '.join(values['scales'])}.")
    own = values.pop("scales")[scale]
    settings = build(Scorecard, {"scale": scale, **values, "own": own}, path.name)
    _check(settings, path.name)
    return settings


def _check(settings: Scorecard, where: str) -> None:
    own, twins = settings.own, settings.own.twins
    both = set(own.seeds.development) & set(own.seeds.test)
    if both:
        raise ConfigError(f"{where}: seed {min(both)} is in both halves, expected it in one.")
    if not own.seeds.test:
        raise ConfigError(f"{where}: the test half is empty, expected at least one seed.")
    if set(own.trained) != set(ON):
        raise ConfigError(f"{where}: trained has {sorted(own.trained)}, expected exactly {', '.join(sorted(ON))}.")
    for name, taught in settings.taught.items():
        _check_rising(f"{where}: {name}.doses", taught.doses)
    _check_rising(f"{where}: forgetting", own.forgetting)
    _check_rising(f"{where}: twins.stops", twins.stops)
    for name, wanted, kept in (
        ("undertrained", own.undertrained, own.stop_steps),
        ("twins.decoy_stop", twins.decoy_stop, twins.stops),
    ):
        if wanted not in kept:
            raise ConfigError(f"{where}: {name} is {wanted}, expected one of the stops {list(kept)}.")
    if twins.stops[-1] > twins.steps:
        raise ConfigError(
            f"{where}: twins stop after step {twins.stops[-1]}, expected at most {twins.steps}, all steps."
        )
    if not LEAST_RECORDS <= twins.decoy_records <= twins.records <= 1000:
        raise ConfigError(
            f"{where}: twins have {twins.decoy_records} records with decoys of {twins.records}, expected "
            f"{LEAST_RECORDS} to 1000: with fewer no false-positive rate of 5 % can be resolved."
        )
    truth = settings.truth
    if truth.samples < len(truth.prompts) or not truth.prompts:
        raise ConfigError(f"{where}: truth has {truth.samples} samples for {len(truth.prompts)} wordings.")
    for prompt in truth.prompts:
        if prompt.replace("{key}", "").count("{") or "{key}" not in prompt:
            raise ConfigError(f"{where}: truth.prompts has {prompt!r}, expected a wording with {{key}} in it alone.")
    if truth.relearning.canaries >= own.canaries:
        raise ConfigError(
            f"{where}: truth.relearning.canaries is {truth.relearning.canaries}, expected fewer than {own.canaries}, "
            "so that some are held out."
        )


def _check_rising(where: str, values: tuple[float, ...]) -> None:
    if not values or list(values) != sorted(set(values)):
        raise ConfigError(f"{where} is {list(values)}, expected rising numbers.")


def injection_of(settings: Scorecard, seed: int) -> tuple[int, int]:
    """Set of secrets and injection seed of a seed: the crossing is gone through pair by pair."""
    return seed // settings.injections % settings.secret_sets, seed % settings.injections


def injected_scale(settings: Scorecard, seed: int) -> Scale:
    """The scale whose testbed a seed's trials start from: text canaries only, its pair's secrets and initialisation."""
    secret_set, injection = injection_of(settings, seed)
    own = load_scale(settings.scale)
    changes = {
        "canaries.n_text": settings.own.canaries,
        "canaries.n_image": 0,
        "canaries.seed": own.canaries.seed + secret_set,
        "injection.seed": own.injection.seed + injection,
        "injection.stop_steps": list(settings.own.stop_steps),
    }
    return load_scale(settings.scale, changes)


def draw(settings: Scorecard) -> pd.DataFrame:
    """Every trial of the scorecard, seed by seed.

    Returns:
        ``trial`` (its name), ``half``, ``seed``, ``secret_set``, ``injection``, ``base`` (full, undertrained),
        ``intervention``, ``dose``, ``role`` (what it is counted as) and ``marks``: the canaries and secret tokens that
        damage was drawn for (``text-003:2+5``), the source of benign tuning, else empty.
    """
    rows = []
    for seed, half in settings.seeds.items():
        secret_set, injection = injection_of(settings, seed)
        fixed = {"half": half, "seed": seed, "secret_set": secret_set, "injection": injection}
        for one in _of_seed(settings, seed):
            name = f"s{seed:02d}-{one['base']}-{one['intervention']}-{one['dose']:g}"
            rows.append({"trial": name, **fixed, **one})
    return pd.DataFrame(rows, columns=COLUMNS)


def _of_seed(settings: Scorecard, seed: int) -> list[dict]:
    trials = []
    for name, taught in settings.taught.items():
        marks = {"damage": lambda: damage_marks(settings, seed), "benign": lambda: SOURCES[seed % len(SOURCES)]}
        drawn = marks.get(name, str)()
        for dose in taught.doses:
            role = ROLES.get(name, NEGATIVE) if dose == taught.doses[-1] else CURVE
            trials.append(_trial(ON[name], name, dose, role, drawn))
    trials += [_trial(FULL, "forgetting", dose, CURVE) for dose in settings.own.forgetting]
    for base in (FULL, UNDERTRAINED):
        trials += [_trial(base, name, 0.0, NEGATIVE) for name in ("zero", "permuted")]
        trials += [_trial(base, name, 1.0, NOISE) for name in ("gaussian", "spectral")]
    return trials


def _trial(base: str, intervention: str, dose: float, role: str, marks: str = "") -> dict:
    return {"base": base, "intervention": intervention, "dose": dose, "role": role, "marks": marks}


def damage_marks(settings: Scorecard, seed: int) -> str:
    """Which secret tokens of which canaries are damaged: 2 to 10 canaries, 1 to 13 tokens each, blind to any window."""
    rng = np.random.default_rng([seed, 2])
    most = min(10, settings.own.canaries)
    chosen = sorted(rng.choice(settings.own.canaries, int(rng.integers(2, most + 1)), replace=False).tolist())
    marks = []
    for canary in chosen:
        tokens = rng.choice(HEX_TOKENS, int(rng.integers(1, HEX_TOKENS + 1)), replace=False)
        marks.append(f"text-{canary:03d}:{'+'.join(map(str, sorted(tokens.tolist())))}")
    return " ".join(marks)


def read_marks(marks: str) -> dict[str, tuple[int, ...]]:
    """Damaged secret tokens by canary, from a plan's ``marks``."""
    pairs = (mark.split(":") for mark in marks.split())
    return {canary: tuple(map(int, tokens.split("+"))) for canary, tokens in pairs}


def read(path: Path) -> pd.DataFrame:
    """A plan as it was written.

    Raises:
        PlanError: there is none, or it is no plan.
    """
    if not path.exists():
        raise PlanError(f"{paths.show(path)} does not exist: `python -m lib plan` writes it")
    try:
        table = pd.read_csv(path, keep_default_na=False)
    except ValueError as error:
        raise PlanError(f"{paths.show(path)} is no table: {error}") from error
    if table.columns.size and "trial" in table and table.trial.duplicated().any():
        raise PlanError(f"{paths.show(path)} names trial {table.trial[table.trial.duplicated()].iloc[0]} twice")
    if list(table.columns) != COLUMNS:
        raise PlanError(f"{paths.show(path)} has the columns {list(table.columns)}, expected {COLUMNS}")
    return table


def refuse_another(plan: pd.DataFrame, drawn: pd.DataFrame, where: str) -> None:
    """Refuse a plan that is not what the settings draw.

    Raises:
        PlanError: naming the first trial that differs.
    """
    first, second = (table.set_index("trial").astype(str) for table in (plan, drawn))
    for trial in [*second.index, *first.index]:
        if trial not in first.index or trial not in second.index:
            side = "is not in" if trial not in first.index else "is only in"
            raise PlanError(f"{where}: trial {trial} {side} the plan; params/scorecard.yaml draws another one")
        if not first.loc[trial].equals(second.loc[trial]):
            column = next(name for name in second if first.loc[trial, name] != second.loc[trial, name])
            values = f"{first.loc[trial, column]!r} in the plan, {second.loc[trial, column]!r} from the settings"
            raise PlanError(f"{where}: trial {trial} differs in {column}: {values}")
