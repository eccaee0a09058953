"""The rules of ``params/verdicts.yaml``, read and checked: everything it says is something that the code does."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from lib import paths
from lib.config import ConfigError, at_least, build, check_range, convert

CHANGES = ("damaged", "strengthened", "unchanged", "inconclusive", "not testable")
_TABLES: dict[str, dict[str, tuple[str, ...]]] = {  # of params/verdicts.yaml: what a row may ask, and the answers
    "change": {
        **dict.fromkeys(("mean20", "hex", "preamble", "suffix", "hit_full", "hit_secret", "hit_forced"), CHANGES),
        "decoys": ("specific", "general", "at_cap", "not_run"),
    },
    "level": {
        "recall": ("all", "some", "none"),
        "rank": ("low", "chance", "not_run"),
        "nll": ("below", "not_below"),
    },
}
_SHARES = ("preamble_share_at_least", "base_recall_is")


def load_verdicts(path: Path | None = None) -> dict[str, Any]:
    """Read and check the rules in ``params/verdicts.yaml``, which say what they mean.

    Raises:
        ConfigError: a rule asks something unknown, expects an unknown answer, or a table has no last row for the rest.
    """
    path = path or paths.PARAMS / "verdicts.yaml"
    with open(path, encoding="utf-8") as file:
        rules = yaml.safe_load(file)
    expected = ["margin", "readings", "probes", "patterns", "change", "level", "decoys", "picking"]
    if not isinstance(rules, dict) or list(rules) != expected:
        raise ConfigError(
            f"{path.name}: got {list(rules or ())}, expected the parts {', '.join(expected)} in this order."
        )
    build(_Margin, rules["margin"], f"{path.name}, margin")
    build(_Decoys, rules["decoys"], f"{path.name}, decoys")
    _check_readings(rules["readings"], f"{path.name}, readings")
    _check_probes(rules["probes"], f"{path.name}, probes")
    _check_picking(rules["picking"], rules["patterns"], f"{path.name}, picking")
    for name, pattern in rules["patterns"].items():
        _check_conditions(pattern, f"{path.name}, pattern {name}", {*_SHARES, "any"})
    for table, answers in _TABLES.items():
        for number, row in enumerate(rules[table], 1):
            where = f"{path.name}, {table}, row {number}"
            if not isinstance(row.get("verdict"), str):
                raise ConfigError(f"{where}: got {row!r}, expected a row with a verdict.")
            _check_answers({key: value for key, value in row.items() if key != "verdict"}, where, answers)
        if set(rules[table][-1]) != {"verdict"}:
            raise ConfigError(f"{path.name}, {table}: the last row {rules[table][-1]!r} must match everything else.")
    return rules


def _check_conditions(pattern: Any, where: str, special: set[str]) -> None:
    for key in special & set(pattern):
        if key == "any":
            _check_conditions(pattern["any"], f"{where}, any", set())
        else:
            check_range(f"{where}.{key}", convert(float, pattern[key], f"{where}.{key}"), 0.0)
    _check_answers({k: v for k, v in pattern.items() if k not in special}, where, _TABLES["change"])


def _check_answers(conditions: dict[str, Any], where: str, answers: dict[str, tuple[str, ...]]) -> None:
    for key, expected in conditions.items():
        if key not in answers:
            raise ConfigError(f"{where}: unknown rule {key!r}; known are {', '.join(answers)}.")
        for answer in convert(tuple[str, ...], expected, f"{where}.{key}"):
            if answer not in answers[key]:
                raise ConfigError(f"{where}.{key}: got {answer!r}, expected one of {', '.join(answers[key])}.")


@dataclass(frozen=True)
class _Margin:
    total_nats: float = at_least(0.0)
    curve: tuple[float, ...] = at_least(0.0)


@dataclass(frozen=True)
class _Mean:
    interval: Literal["studentised_bootstrap"]
    decision: Literal["beyond_margin"]
    confidence: float = at_least(0.0)
    equivalence_alpha: float = at_least(0.0)
    resamples: int = at_least(100)
    seed: int = at_least(0)
    spread_floor: float = at_least(0.0)


@dataclass(frozen=True)
class _CountNLL:
    opposite: Literal["mixed"]
    min_canaries: int = at_least(1)


@dataclass(frozen=True)
class _CountRecall:
    interval: Literal["clopper_pearson"]
    confidence: float = at_least(0.0)
    damaged_above: float = at_least(0.0)
    min_canaries: int = at_least(1)


@dataclass(frozen=True)
class _Decoys:
    kind: Literal["random", "shuffled", "other"]
    base_above: float = at_least(0.0)


_READINGS = {"mean": _Mean, "count_nll": _CountNLL, "count_recall": _CountRecall}
_PROBES = {
    "nll": ({"kind", "window"}, {"kind", "span"}),
    "recall": ({"kind"},),
}


def _check_readings(readings: Any, where: str) -> None:
    if not isinstance(readings, dict) or set(readings) != set(_READINGS):
        raise ConfigError(f"{where}: got {list(readings or ())}, expected {', '.join(_READINGS)}.")
    built = {name: build(kind, readings[name], f"{where}.{name}") for name, kind in _READINGS.items()}
    mean = built["mean"]
    if not mean.confidence < 1.0 or abs(mean.equivalence_alpha - (1 - mean.confidence) / 2) > 1e-9:
        raise ConfigError(
            f"{where}.mean.equivalence_alpha: got {mean.equivalence_alpha}, expected {(1 - mean.confidence) / 2:.3g}, "
            f"half of what an interval of confidence {mean.confidence} leaves."
        )


def _check_probes(probes: Any, where: str) -> None:
    for name, rule in probes.items():
        kind = rule.get("kind")
        if kind not in _PROBES or set(rule) not in _PROBES[kind]:
            raise ConfigError(f"{where}.{name}: got {rule!r}, expected kind nll with window or span, or kind recall.")
        if "window" in rule:
            check_range(f"{where}.{name}.window", convert(int, rule["window"], f"{where}.{name}.window"), 1)
        if rule.get("span", "hex") not in ("preamble", "hex", "suffix"):
            raise ConfigError(f"{where}.{name}.span: got {rule['span']!r}, expected preamble, hex or suffix.")
        if kind == "recall" and name not in ("hit_full", "hit_secret", "hit_forced"):
            raise ConfigError(f"{where}.{name}: there is no such recall; known are hit_full, hit_secret, hit_forced.")


def _check_picking(picking: Any, patterns: dict, where: str) -> None:
    if set(picking) != {"rows", "confirmation", *patterns}:
        raise ConfigError(f"{where}: got {list(picking)}, expected rows, confirmation, {', '.join(patterns)}.")
    for name in patterns:
        effects = {key: value for key, value in picking[name].items() if key != "kinds"}
        known = [f"d_nll_{probe}" for probe in ("mean20", "hex", "preamble", "suffix")]
        if len(effects) != 1 or not set(effects) <= {"largest", "smallest"} or not set(effects.values()) <= set(known):
            raise ConfigError(
                f"{where}.{name}: got {picking[name]!r}, expected kinds and largest or smallest of {', '.join(known)}."
            )
