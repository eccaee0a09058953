"""The verdict under every choice an analyst could have made: how often it flips, and which choice flips it.

A specification is one way to read the window probe: its length K, how canaries become a verdict (mean with an interval,
count, or either), the interval's method, the margin, the stack.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from lib.verdicts import (
    DAMAGED,
    INCONCLUSIVE,
    STRENGTHENED,
    UNCHANGED,
    Rules,
    bootstrap_picks,
    count_reading,
    either_reading,
    place,
)

CHOICES = ["K", "interval", "reading", "margin", "stack"]
READINGS = ("mean", "count", "either")


def _studentised(values: np.ndarray, rule: Mapping) -> tuple[np.ndarray, np.ndarray]:
    """Bootstrap-t of :func:`lib.verdicts.studentised_bootstrap`, for every column of values [n, k]: low, high [k]."""
    mean, spread = values.mean(0), values.std(0, ddof=1)
    samples = values[bootstrap_picks(len(values), rule["resamples"], rule["seed"])]
    floor = np.maximum(rule["spread_floor"] * spread, 1e-300)
    t = (samples.mean(1) - mean) / np.maximum(samples.std(1, ddof=1), floor)
    upper, lower = np.quantile(t, [(1 + rule["confidence"]) / 2, (1 - rule["confidence"]) / 2], axis=0)
    return mean - upper * spread, mean - lower * spread


def _percentile(values: np.ndarray, rule: Mapping) -> tuple[np.ndarray, np.ndarray]:
    """Quantiles of resampled means."""
    means = values[bootstrap_picks(len(values), rule["resamples"], rule["seed"])].mean(1)
    low, high = np.quantile(means, [(1 - rule["confidence"]) / 2, (1 + rule["confidence"]) / 2], axis=0)
    return low, high


def _student(values: np.ndarray, rule: Mapping) -> tuple[np.ndarray, np.ndarray]:
    """Student's t interval of a mean."""
    half = stats.t.ppf((1 + rule["confidence"]) / 2, len(values) - 1) * values.std(0, ddof=1) / len(values) ** 0.5
    return values.mean(0) - half, values.mean(0) + half


INTERVALS = {"studentised bootstrap": _studentised, "percentile bootstrap": _percentile, "Student's t": _student}


def specifications(nll: pd.DataFrame, rules: Rules) -> pd.DataFrame:
    """Verdicts on one cell under every specification of the window probe.

    Args:
        nll: rows of ``token_nll.parquet`` of one cell and modality, any stacks; all seeds.

    Returns:
        Columns ``stack, K, interval, reading, margin, verdict``; ``count`` has no interval (an empty text). Changes are
        nats of the whole window, so that the mean and the sum over its tokens are one reading.
    """
    tables = []
    for stack, part in nll.groupby("stack"):
        by_seed = part.assign(change=part.nll - part.nll_base).pivot_table("change", ["canary", "seed"], "position")
        shortest = int(part.groupby(["seed", "canary"]).size().min())
        windows = by_seed.iloc[:, :shortest].cumsum(axis=1)
        means = windows.groupby("canary").mean().to_numpy()
        medians = windows.groupby("canary").median().to_numpy()
        intervals = {name: method(means, rules["readings"]["mean"]) for name, method in INTERVALS.items()}
        for margin in rules["margin"]["curve"]:
            tables.append(_at_margin(intervals, medians, margin, rules).assign(stack=stack, margin=margin))
    return pd.concat(tables, ignore_index=True)[["stack", "K", "interval", "reading", "margin", "verdict"]]


def _at_margin(intervals: dict, medians: np.ndarray, margin: float, rules: Rules) -> pd.DataFrame:
    rows = []
    for k in range(medians.shape[1]):
        up, down = int((medians[:, k] > margin).sum()), int((medians[:, k] < -margin).sum())
        count = count_reading(up, down, rules["readings"]["count_nll"])
        alone = count if count in (DAMAGED, STRENGTHENED, UNCHANGED) else INCONCLUSIVE
        rows.append((k + 1, "", "count", alone))
        for name, (low, high) in intervals.items():
            mean = place(low[k], high[k], margin)
            rows += [(k + 1, name, "mean", mean), (k + 1, name, "either", either_reading(mean, count)[0])]
    return pd.DataFrame(rows, columns=["K", "interval", "reading", "verdict"])


def flips(table: pd.DataFrame, committed: Mapping[str, Any]) -> pd.DataFrame:
    """How every cell fares over all specifications: ``committed`` (its verdict there), shares of verdicts, ``flipped``.

    ``flipped`` is the share of specifications with another verdict than the committed one; ``reversed`` that of those
    which say *damaged* where it says *strengthened* or *unchanged*, or the like: a clear verdict turned into another.
    """
    chosen = (table[list(committed)] == pd.Series(committed)).all(axis=1)
    own = table[chosen].set_index("cell").verdict
    clear = {DAMAGED, STRENGTHENED, UNCHANGED}
    expected = table.cell.map(own)
    other = table.verdict != expected
    turned = other & table.verdict.isin(clear) & expected.isin(clear)
    shares = pd.crosstab(table.cell, table.verdict, normalize="index")
    result = shares.assign(flipped=other.groupby(table.cell).mean(), reversed=turned.groupby(table.cell).mean())
    result.insert(0, "committed", own)
    return result.rename_axis(columns=None)


def influence(table: pd.DataFrame) -> pd.DataFrame:
    """How often one choice alone changes the verdict: pairs of specifications of a cell that differ in it only.

    Columns ``choice, flips`` (share of such pairs with two verdicts), ``reversals`` (share with two clear ones), the
    largest first. ``interval`` is compared where there is one.
    """
    clear, rows = {DAMAGED, STRENGTHENED, UNCHANGED}, []
    for choice in CHOICES:
        others = ["cell", *(name for name in CHOICES if name != choice)]
        part = table[table.interval != ""] if choice == "interval" else table
        if choice == "reading":  # a count has no interval: it is compared with every interval's mean
            part = _with_every_interval(table)
        pairs = different = turned = 0
        for _, verdicts in part.groupby(others, sort=False).verdict:
            counts = verdicts.value_counts()
            n = counts.sum()
            pairs += n * (n - 1) / 2
            different += (n**2 - (counts**2).sum()) / 2
            known = counts[counts.index.isin(clear)]
            turned += (known.sum() ** 2 - (known**2).sum()) / 2
        rows.append((choice, different / pairs if pairs else 0.0, turned / pairs if pairs else 0.0))
    result = pd.DataFrame(rows, columns=["choice", "flips", "reversals"])
    return result.sort_values("flips", ascending=False, ignore_index=True)


def _with_every_interval(table: pd.DataFrame) -> pd.DataFrame:
    counts, rest = table[table.interval == ""], table[table.interval != ""]
    copies = [counts.assign(interval=name) for name in rest.interval.unique()]
    return pd.concat([rest, *copies], ignore_index=True)
