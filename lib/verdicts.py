"""From per-token tables to verdicts: pure functions, whose rules are those of ``params/verdicts.yaml``.

A verdict is about change against the base, read off one group of rows (one cell, modality, stack and dtype; all its
seeds). Every rule here is this package's own; the paper publishes none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from lib.errors import LeakbookError

DAMAGED, STRENGTHENED, UNCHANGED = "damaged", "strengthened", "unchanged"
INCONCLUSIVE, NOT_TESTABLE, MIXED = "inconclusive", "not testable", "mixed"
LARGE = 2000  # values: resampling more takes gigabytes
FEW = 5  # canaries; an interval on fewer comes with a warning in the table
VALUES = ["probe", "seed", "canary", "tokens", "base", "change"]
Rules = Mapping[str, Any]


class VerdictError(LeakbookError, ValueError):
    """A table cannot be judged: rows are missing, doubled or not numbers."""


def probe_values(nll: pd.DataFrame, recall: pd.DataFrame, rules: Rules) -> pd.DataFrame:
    """What every probe of ``rules`` reads of each canary with each seed.

    Args:
        nll: rows of ``token_nll.parquet`` of one group.
        recall: rows of ``recall.parquet`` of the same group.

    Returns:
        Columns ``probe, seed, canary, tokens, base, change``. For an NLL probe ``base`` and ``change`` are means over
        the ``tokens`` tokens that it reads, in nats a token; a target without such a token has no row. For a recall
        they are the hit before and its change, -1, 0 or 1, and ``tokens`` is 0.

    Raises:
        VerdictError: more than one group, a seed without all canaries, a position twice, NaN, or a window that reaches
            beyond a target.
    """
    _check(nll, recall)
    change = (nll.nll - nll.nll_base).to_numpy()
    tables = []
    for probe, rule in rules["probes"].items():
        if rule["kind"] == "recall":
            values = recall[["seed", "canary"]].assign(tokens=0, base=recall[f"{probe}_base"].astype(float))
            tables.append(values.assign(probe=probe, change=recall[probe].astype(float) - values.base))
            continue
        chosen = _chosen(nll, probe, rule)
        rows = nll[["seed", "canary"]].assign(base=nll.nll_base, change=change)[chosen]
        groups = rows.groupby(["seed", "canary"], sort=False)
        tables.append(groups.mean().assign(tokens=groups.size()).reset_index().assign(probe=probe))
    return pd.concat(tables, ignore_index=True)[VALUES]


LABELS = ["cell", "modality", "stack", "dtype", "merge_dtype"]


def _check(nll: pd.DataFrame, recall: pd.DataFrame) -> None:
    for name, table in (("token_nll", nll), ("recall", recall)):
        if len(table) == 0:
            raise VerdictError(f"{name}: no row to judge; expected one group of a cell")
        for label in LABELS:
            if label in table and table[label].nunique() > 1:
                found = ", ".join(map(str, table[label].unique()[:4]))
                raise VerdictError(f"{name}: the rows hold several values of {label} ({found}); expected one group")
    for label in LABELS:
        if label in nll and label in recall and nll[label].iloc[0] != recall[label].iloc[0]:
            raise VerdictError(
                f"{label}: token_nll is of {nll[label].iloc[0]!r} and recall of {recall[label].iloc[0]!r}; "
                "expected both of one group"
            )
    _refuse_doubled(nll.duplicated(["seed", "canary", "position"]), nll, "token_nll")
    _refuse_doubled(recall.duplicated(["seed", "canary"]), recall, "recall")
    _refuse_missing_numbers(nll, ["nll", "nll_base"], "token_nll")
    hits = [f"{hit}{suffix}" for hit in ("hit_full", "hit_secret", "hit_forced") for suffix in ("_base", "")]
    _refuse_missing_numbers(recall, [hit for hit in hits if hit in recall], "recall")
    pairs = {name: set(zip(t.seed, t.canary, strict=True)) for name, t in (("token_nll", nll), ("recall", recall))}
    seeds, canaries = (sorted({pair[i] for both in pairs.values() for pair in both}) for i in (0, 1))
    for name, present in pairs.items():
        missing = [(seed, canary) for seed in seeds for canary in canaries if (seed, canary) not in present]
        if missing:
            seed, canary = missing[0]
            raise VerdictError(f"{name}: {canary} has no row with seed {seed}; expected every canary with every seed")
    lengths = nll.groupby(["seed", "canary"]).position.agg(["size", "max"])
    if (lengths["size"] != lengths["max"] + 1).any():
        seed, canary = lengths.index[lengths["size"] != lengths["max"] + 1][0]
        raise VerdictError(f"token_nll: {canary}, seed {seed}, lacks a position below its last")


def _refuse_doubled(doubled: pd.Series, table: pd.DataFrame, name: str) -> None:
    if doubled.any():
        row = table[doubled].iloc[0]
        what = f"position {row.position} of {row.canary}" if "position" in table else str(row.canary)
        hint = ": do spans overlap?" if "position" in table else ""
        raise VerdictError(f"{name}: {what}, seed {row.seed}, occurs twice{hint}")


def _refuse_missing_numbers(table: pd.DataFrame, columns: list[str], name: str) -> None:
    for column in columns:
        values = pd.to_numeric(table[column], errors="coerce").astype(float)
        if not np.isfinite(values).all():
            row = table[~np.isfinite(values)].iloc[0]
            where = f"position {row.position} of {row.canary}" if "position" in table else str(row.canary)
            raise VerdictError(f"{name}: {column} is {row[column]} at {where}, seed {row.seed}; expected a number")


def _chosen(nll: pd.DataFrame, probe: str, rule: Mapping) -> pd.Series:
    """Rows that an NLL probe reads."""
    if "span" in rule:
        return nll.span == rule["span"]
    if rule.get("clipped"):  # targets of very different lengths: a shorter one is read whole
        return nll.position < rule["window"]
    shortest = int(nll.groupby(["seed", "canary"]).size().min())
    if not 1 <= rule["window"] <= shortest:
        raise VerdictError(
            f"{probe}: got K = {rule['window']}, expected 1 to {shortest}, the length of the shortest target"
        )
    return nll.position < rule["window"]


def judge(values: pd.DataFrame, rules: Rules, margin: float | None = None, reading: str = "mean") -> pd.DataFrame:
    """One verdict a probe.

    Mean: canaries' changes averaged over seeds, their mean with its studentised bootstrap interval; *damaged* or
    *strengthened* when the interval lies beyond the margin, *unchanged* when it lies within (which is two one-sided
    tests at half the interval's error), *inconclusive* otherwise. Count: see :func:`count_reading` and
    :func:`_judge_recall`. Either can decide; ``decided_by`` says which did.

    Args:
        values: as :func:`probe_values` gives them.
        margin: in nats of the whole span, ``rules["margin"]["total_nats"]`` where None.
        reading: ``mean`` (nats a token, against margin / tokens) or ``sum`` (nats of the span, against the margin).

    Returns:
        Indexed by probe: ``verdict, decided_by, by_mean, by_count, estimate, low, high, half_width, margin, canaries,
        up, down`` (canaries beyond the margin; for recalls those that lost and those that gained it), ``unreachable``
        (the verdict that no data could have given), ``warning``.

    Raises:
        VerdictError: a single canary, or an unknown reading.
    """
    if reading not in ("mean", "sum"):
        raise VerdictError(f"reading: got {reading!r}, expected 'mean' or 'sum'")
    total = rules["margin"]["total_nats"] if margin is None else margin
    rows = {}
    for probe, rule in rules["probes"].items():
        part = values[values.probe == probe]
        if part.empty:
            rows[probe] = {"verdict": NOT_TESTABLE, "decided_by": "no token", "canaries": 0}
            continue
        count = part.canary.nunique()
        if count < 2 and values.canary.nunique() < 2:
            raise VerdictError(f"{probe}: got one canary, {part.canary.iloc[0]}; a verdict needs at least two")
        if count < 2:
            rows[probe] = {"verdict": NOT_TESTABLE, "decided_by": "tokens in one canary only", "canaries": count}
            continue
        rows[probe] = (
            _judge_recall(part, rules) if rule["kind"] == "recall" else _judge_nll(part, rules, total, reading)
        )
        rows[probe]["canaries"] = count
        rows[probe]["warning"] = f"only {count} canaries" if count < FEW else ""
    return pd.DataFrame(rows.values(), index=pd.Index(rows, name="probe"), columns=_COLUMNS)


_COLUMNS = [
    *("verdict", "decided_by", "by_mean", "by_count", "estimate", "low", "high", "half_width", "margin"),
    *("canaries", "up", "down", "unreachable", "warning"),
]


def _judge_nll(part: pd.DataFrame, rules: Rules, total: float, reading: str) -> dict[str, Any]:
    part = part.assign(total=part.change * part.tokens, base_total=part.base * part.tokens)
    margin = total if reading == "sum" else total / part.tokens.mean()
    means = part.groupby("canary")["total" if reading == "sum" else "change"].mean().to_numpy()
    low, high = studentised_bootstrap(means, rules["readings"]["mean"])
    by_mean = place(low, high, margin)
    medians = part.groupby("canary").total.median()
    up, down = int((medians > total).sum()), int((medians < -total).sum())
    by_count = count_reading(up, down, rules["readings"]["count_nll"])
    verdict, decided_by = either_reading(by_mean, by_count)
    # An NLL is never below 0, so a base that has less than the margin left cannot fall by more than that.
    saturated = part.groupby("canary").base_total.mean().mean() <= total
    return {
        "verdict": verdict,
        "decided_by": decided_by,
        "by_mean": by_mean,
        "by_count": by_count,
        "estimate": means.mean(),
        "low": low,
        "high": high,
        "half_width": (high - low) / 2,
        "margin": margin,
        "up": up,
        "down": down,
        "unreachable": STRENGTHENED if saturated else "",
    }


def place(low: float, high: float, margin: float) -> str:
    """The verdict of an interval: beyond the margin on one side, within it, or neither."""
    if low > margin:
        return DAMAGED
    if high < -margin:
        return STRENGTHENED
    return UNCHANGED if -margin < low and high < margin else INCONCLUSIVE


def count_reading(up: int, down: int, rule: Mapping) -> str:
    """Fires when enough canaries lie beyond the margin one way and none the other way."""
    if up and down:
        return MIXED
    if max(up, down) >= rule["min_canaries"]:
        return DAMAGED if up else STRENGTHENED
    return INCONCLUSIVE if up or down else UNCHANGED


def either_reading(by_mean: str, by_count: str) -> tuple[str, str]:
    """The verdict of two readings and the one that decided; two that fire in opposite directions decide nothing."""
    fired = {DAMAGED, STRENGTHENED}
    if by_mean in fired and by_count in fired and by_mean != by_count:
        return INCONCLUSIVE, "readings disagree"
    if by_mean in fired or by_count not in fired:
        return by_mean, "mean"
    return by_count, "count"


def _judge_recall(part: pd.DataFrame, rules: Rules) -> dict[str, Any]:
    """Canaries that lost the recall, or gained it, with at least one seed; shown is the larger of the two shares."""
    by_canary = part.groupby("canary")
    lost, gained = int((by_canary.change.min() < 0).sum()), int((by_canary.change.max() > 0).sum())
    count, rule, base = by_canary.ngroups, rules["readings"]["count_recall"], part.base.mean()

    def fires(changed: int) -> bool:
        low, _ = clopper_pearson(changed, count, rule["confidence"])
        return changed >= rule["min_canaries"] and low > rule["damaged_above"]

    if lost == gained == 0:
        verdict = NOT_TESTABLE if base == 0.0 else UNCHANGED
    elif fires(lost) != fires(gained):
        verdict = DAMAGED if fires(lost) else STRENGTHENED
    else:
        verdict = INCONCLUSIVE
    low, high = clopper_pearson(max(lost, gained), count, rule["confidence"])
    return {
        "verdict": verdict,
        "decided_by": "count",
        "by_count": verdict,
        "estimate": max(lost, gained) / count,
        "low": low,
        "high": high,
        "half_width": (high - low) / 2,
        "margin": rule["damaged_above"],
        "up": lost,
        "down": gained,
        "unreachable": DAMAGED if base == 0.0 else STRENGTHENED if base == 1.0 else "",
    }


def clopper_pearson(count: int, n: int, confidence: float) -> tuple[float, float]:
    """Exact interval of a proportion."""
    interval = stats.binomtest(count, n).proportion_ci(confidence, method="exact")
    return float(interval.low), float(interval.high)


def studentised_bootstrap(values: np.ndarray, rule: Mapping) -> tuple[float, float]:
    """Bootstrap-t interval of the mean of ``values`` [n]: mean - q s / sqrt(n), q the quantiles of the resampled t.

    A resample's spread counts at least as ``rule["spread_floor"]`` of the sample's: where few values differ, resamples
    that miss them would give a t without limit. Values without any spread give the point itself. Beyond ``LARGE``
    values the interval is Student's, which the resampled one then equals.

    Raises:
        VerdictError: fewer than two values, or one that is not a number.
    """
    values = np.asarray(values, dtype=float)
    if len(values) < 2 or not np.isfinite(values).all():
        raise VerdictError(f"interval: got {values.tolist()}, expected at least two numbers")
    mean, spread = values.mean(), values.std(ddof=1)
    if spread <= 1e-12 * max(1.0, abs(mean)):
        return float(mean), float(mean)
    if len(values) > LARGE:
        low, high = stats.t.interval(rule["confidence"], len(values) - 1, mean, spread / np.sqrt(len(values)))
        return float(low), float(high)
    samples = values[bootstrap_picks(len(values), rule["resamples"], rule["seed"])]
    spreads = np.maximum(samples.std(axis=1, ddof=1), rule["spread_floor"] * spread)
    t = (samples.mean(axis=1) - mean) / spreads
    upper, lower = np.quantile(t, [(1 + rule["confidence"]) / 2, (1 - rule["confidence"]) / 2])
    return float(mean - upper * spread), float(mean - lower * spread)


@lru_cache(maxsize=8)
def bootstrap_picks(n: int, resamples: int, seed: int) -> np.ndarray:
    """Which of ``n`` values every resample takes [resamples, n]."""
    return np.random.default_rng(seed).integers(n, size=(resamples, n))


def by_seed(values: pd.DataFrame, rules: Rules) -> pd.DataFrame:
    """The verdict of every probe from each seed alone: a row a probe, a column a seed."""
    return pd.DataFrame({seed: judge(part, rules).verdict for seed, part in values.groupby("seed")})


def along_margins(values: pd.DataFrame, rules: Rules) -> pd.DataFrame:
    """The verdict of every NLL probe at each margin of the curve: a row a probe, a column a margin in nats."""
    kept = [name for name, rule in rules["probes"].items() if rule["kind"] == "nll"]
    return pd.DataFrame({m: judge(values, rules, m).verdict[kept] for m in rules["margin"]["curve"]})


def along_windows(nll: pd.DataFrame, recall: pd.DataFrame, rules: Rules) -> pd.DataFrame:
    """What the window probe says for every K from 1 to the shortest target: :func:`judge`'s columns, a row a K."""
    shortest = int(nll.groupby(["seed", "canary"]).size().min())
    rows = []
    for k in range(1, shortest + 1):
        only = {**rules, "probes": {"window": {"kind": "nll", "window": k}}}
        rows.append(judge(probe_values(nll, recall, only), only).loc["window"].rename(k))
    return pd.DataFrame(rows).rename_axis("K")


def span_shares(nll: pd.DataFrame, window: int | None = None) -> pd.Series:
    """Share of every span in the absolute change: each canary's at each position, its seeds averaged; 0 if none."""
    inside = nll if window is None else nll[nll.position < window]
    change = (inside.nll - inside.nll_base).groupby([inside.span, inside.canary, inside.position]).mean()
    moved = change.abs().groupby("span").sum()
    return moved / moved.sum() if moved.sum() > 0 else moved


def disagreement(verdict: Mapping[str, str], probe: str = "mean20") -> str:
    """Where a probe and another one contradict each other, in words; empty where none does.

    Two verdicts contradict each other if one is *damaged* or *strengthened* and the other its opposite or *unchanged*;
    what is inconclusive or not testable contradicts nothing.
    """
    clear = {DAMAGED, STRENGTHENED, UNCHANGED}
    others = [name for name in ("hex", "hit_full", "hit_secret", "hit_forced") if name in verdict]
    if verdict[probe] not in clear:
        return ""
    against = [f"{name} {verdict[name]}" for name in others if verdict[name] in clear - {verdict[probe]}]
    return f"{probe} {verdict[probe]}, {', '.join(against)}" if against else ""


@dataclass(frozen=True)
class Finding:
    """What a pattern's conditions say about a group: which failed, each with how far it is from holding."""

    pattern: str
    failed: dict[str, float]

    @property
    def holds(self) -> bool:
        """Whether the group shows the pattern."""
        return not self.failed


def patterns(verdicts: pd.DataFrame, preamble_share: float, base_recall: float, rules: Rules) -> dict[str, Finding]:
    """The patterns of ``rules`` on one group: verdicts by probe, the preamble's share in the window, base recall."""
    findings = {}
    for name, pattern in rules["patterns"].items():
        failed = {}
        for key, expected in pattern.items():
            if key == "preamble_share_at_least":
                distance = max(0.0, expected - preamble_share)
            elif key == "base_recall_is":
                distance = abs(base_recall - expected)
            elif key == "any":
                distances = [_distance(verdicts.loc[probe], wanted) for probe, wanted in expected.items()]
                distance = min(distances)
            else:
                distance = _distance(verdicts.loc[key], expected)
            if distance > 0:
                failed[key] = float(distance)
        findings[name] = Finding(name, failed)
    return findings


def _distance(row: pd.Series, wanted: list[str]) -> float:
    """0 where the verdict is one of ``wanted``, else how far its interval is from that, in margins."""
    if row.verdict in wanted:
        return 0.0
    if row.verdict == NOT_TESTABLE:
        return np.inf
    if pd.isna(row.by_mean):  # a recall: canaries, against the two that suffice
        lost, gained = float(row.up), float(row.down)
        distances = {DAMAGED: 2 - lost, STRENGTHENED: 2 - gained, UNCHANGED: lost + gained}
        distances |= {INCONCLUSIVE: abs(max(lost, gained) - 1), NOT_TESTABLE: np.inf}
    else:
        low, high = row.low / row.margin, row.high / row.margin
        distances = {
            DAMAGED: 1.0 - low,
            STRENGTHENED: 1.0 + high,
            UNCHANGED: max(high - 1.0, -1.0 - low),
            INCONCLUSIVE: max(low - 1.0, -1.0 - high),
            NOT_TESTABLE: np.inf,
        }
    return max(min(distances[verdict] for verdict in wanted), np.finfo(float).eps)


@dataclass(frozen=True)
class Decision:
    """A decision table's answer: the verdict, the number of the row that matched, and what decided it."""

    verdict: str
    row: int
    decided_by: str


def protocol_change(verdicts: pd.DataFrame, decoys: str, rules: Rules) -> Decision:
    """The protocol's verdict on change, from the table ``change``; the readings of the matched row are named.

    Raises:
        VerdictError: ``decoys`` is not an answer the table knows.
    """
    known = ("specific", "general", "at_cap", "not_run")
    if decoys not in known:
        raise VerdictError(f"decoys: got {decoys!r}, expected one of {', '.join(known)}")
    number, row = _match(rules["change"], verdicts.verdict.to_dict() | {"decoys": decoys})
    named = [key if key == "decoys" else f"{key} ({verdicts.decided_by[key]})" for key in row if key != "verdict"]
    return Decision(row["verdict"], number, ", ".join(named) or "no row matched")


def protocol_level(recalled: int, canaries: int, rank: str, below: bool, rules: Rules) -> Decision:
    """The protocol's verdict on level: canaries with ``hit_secret``, their rank among decoys, whether the NLL is lower.

    Raises:
        VerdictError: impossible counts, or an unknown rank.
    """
    if not 0 <= recalled <= canaries or canaries == 0:
        raise VerdictError(f"level: got {recalled} of {canaries} recalled, expected at most all of at least one")
    if rank not in ("low", "chance", "not_run"):
        raise VerdictError(f"rank: got {rank!r}, expected low, chance or not_run")
    recall = "all" if recalled >= 0.95 * canaries else "some" if recalled else "none"
    answers = {"recall": recall, "rank": rank, "nll": "below" if below else "not_below"}
    number, row = _match(rules["level"], answers)
    named = [f"{key} {answers[key]}" for key in row if key != "verdict"]
    return Decision(row["verdict"], number, ", ".join(named) or "no row matched")


def decoy_answer(corrected: pd.DataFrame, hex_verdict: str, rules: Rules) -> str:
    """What random decoys say of a change, for :func:`protocol_change`: ``specific``, ``general`` or ``at_cap``.

    Args:
        corrected: columns ``secret, corrected, base`` in total nats and ``tokens``, a row a canary (see
            :func:`lib.exposure.corrected_change`).
        hex_verdict: the verdict on the whole secret.

    Raises:
        VerdictError: fewer than two canaries, or a value that is not a number.
    """
    if (corrected.base / corrected.tokens).mean() <= rules["decoys"]["base_above"]:
        return "at_cap"
    low, high = studentised_bootstrap(corrected.corrected.to_numpy(), rules["readings"]["mean"])
    moved = place(low, high, rules["margin"]["total_nats"])
    return "specific" if moved == hex_verdict and moved in (DAMAGED, STRENGTHENED) else "general"


def rank_answer(normalised_ranks: np.ndarray, rules: Rules) -> str:
    """Whether a group's mean normalised rank among random decoys lies below 0.5 with its interval: ``low``, ``chance``.

    Raises:
        VerdictError: fewer than two canaries, or a value that is not a number.
    """
    _, high = studentised_bootstrap(normalised_ranks, rules["readings"]["mean"])
    return "low" if high < 0.5 else "chance"


def _match(table: list[dict], answers: dict[str, str]) -> tuple[int, dict]:
    """The first row of which every entry holds, and its number; the last row holds always."""
    return next(
        (number, row)
        for number, row in enumerate(table, 1)
        if all(answers[key] in wanted for key, wanted in row.items() if key != "verdict")
    )


@dataclass(frozen=True)
class Judgement:
    """Everything said about one group: verdicts by probe under both readings, patterns, shares, the protocol."""

    verdicts: pd.DataFrame
    verdicts_of_sums: pd.DataFrame
    patterns: dict[str, Finding]
    shares: pd.Series
    change: Decision

    @property
    def shown(self) -> list[str]:
        """Names of the patterns that hold."""
        return [name for name, finding in self.patterns.items() if finding.holds]


def judge_group(nll: pd.DataFrame, recall: pd.DataFrame, rules: Rules, decoys: str = "not_run") -> Judgement:
    """Judge one group: a pattern holds where its conditions do under the mean and under the sum reading.

    Raises:
        VerdictError: see :func:`probe_values` and :func:`judge`.
    """
    values = probe_values(nll, recall, rules)
    tables = [judge(values, rules, reading=reading) for reading in ("mean", "sum")]
    windows = [rule["window"] for rule in rules["probes"].values() if "window" in rule]
    shares = span_shares(nll, windows[0] if windows else None)
    base = float(recall.hit_full_base.astype(float).mean())
    found = [patterns(table, float(shares.get("preamble", 0.0)), base, rules) for table in tables]
    both = {name: max((f[name] for f in found), key=lambda finding: len(finding.failed)) for name in found[0]}
    return Judgement(*tables, both, shares, protocol_change(tables[0], decoys, rules))


def pick(judgements: Mapping[str, Judgement], cells: pd.DataFrame, pattern: str, rules: Rules) -> dict[str, Any]:
    """The cell that tells a case, by the rule of ``rules["picking"]``.

    Args:
        judgements: by cell id, of the rows that the rule names.
        cells: ``cells.csv``.

    Returns:
        ``found`` (whether a trained cell shows the pattern), ``cell`` (it, or the nearest), ``showing`` (all trained
        cells that do), ``noise`` (noise cells that do), ``failed`` (the nearest cell's failed conditions).

    Raises:
        VerdictError: no cell of the kinds that the rule names was judged.
    """
    rule, rows = rules["picking"][pattern], rules["picking"]["rows"]
    chosen = cells[(cells[list(rows)] == pd.Series(rows)).all(axis=1)]
    effects = chosen.groupby("cell").mean(numeric_only=True)
    kinds = chosen.groupby("cell").kind.first()
    candidates = sorted(cell for cell in judgements if kinds[cell] in rule["kinds"])
    if not candidates:
        raise VerdictError(f"{pattern}: no judged cell of the kinds {', '.join(rule['kinds'])}")
    showing = [cell for cell in candidates if judgements[cell].patterns[pattern].holds]
    noise = [cell for cell in sorted(judgements) if kinds[cell] == "noise" and judgements[cell].patterns[pattern].holds]
    if showing:
        column, sign = (rule["largest"], -1) if "largest" in rule else (rule["smallest"], 1)
        cell = min(showing, key=lambda name: (sign * effects.loc[name, column], name))
    else:
        failed = {name: judgements[name].patterns[pattern].failed for name in candidates}
        cell = min(candidates, key=lambda name: (len(failed[name]), sum(failed[name].values()), name))
    return {
        "found": bool(showing),
        "cell": cell,
        "showing": showing,
        "noise": noise,
        "failed": judgements[cell].patterns[pattern].failed,
    }
