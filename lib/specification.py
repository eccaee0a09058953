"""The verdict under every choice an analyst could have made: how often it flips, and which choice flips it.

A specification is one way to read the window probe: its length K, whether the margin is one of a sum or of a mean over
tokens, how canaries become a verdict (their mean with its interval, a count, or either), the interval's method, the
margin, the stack and the dtype. Which recall the window is held against cannot change the window's verdict; it changes
what is concluded from the two.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from lib.verdicts import (
    DAMAGED,
    INCONCLUSIVE,
    NOT_TESTABLE,
    STRENGTHENED,
    UNCHANGED,
    Rules,
    VerdictError,
    bootstrap_picks,
    clopper_pearson,
    disagreement,
    judge,
    probe_values,
)

CHOICES = ["K", "tokens", "reading", "interval", "margin", "stack", "dtype"]
RECALL = "recall"  # the choice that bears on conclusions only
VERDICTS = (DAMAGED, INCONCLUSIVE, UNCHANGED, STRENGTHENED)
BOTH, WINDOW_ALONE, RECALL_ALONE, NEITHER = "both fire", "the window alone", "the recall alone", "neither fires"
OPPOSITE = "in opposite directions"
UNDECIDED = {INCONCLUSIVE, NOT_TESTABLE}
GROUP = ["cell", "stack", "dtype", "merge_dtype"]


def _studentised(values: np.ndarray, rule: Mapping) -> tuple[np.ndarray, np.ndarray]:
    """Bootstrap-t of :func:`lib.verdicts.studentised_bootstrap`, for every column of values [n, k]: low, high [k]."""
    mean, spread = values.mean(0), values.std(0, ddof=1)
    spread = np.where(spread <= 1e-12 * np.maximum(1.0, np.abs(mean)), 0.0, spread)  # a column without any is a point
    samples = values[bootstrap_picks(len(values), rule["resamples"], rule["seed"])]
    floor = np.maximum(rule["spread_floor"] * spread, 1e-300)
    t = np.where(spread > 0, (samples.mean(1) - mean) / np.maximum(samples.std(1, ddof=1), floor), 0.0)
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


def committed(rules: Rules) -> dict[str, Any]:
    """The specification that ``rules`` commit to, a level a choice; the recall is the whole target's, ``hit_full``."""
    rows = rules["picking"]["rows"]
    return {
        "K": window_length(rules),
        "tokens": "sum",
        "reading": "either",
        "interval": rules["readings"]["mean"]["interval"].replace("_", " "),
        "margin": rules["margin"]["total_nats"],
        "stack": rows["stack"],
        "dtype": _dtype(rows["dtype"], rows["merge_dtype"]),
    }


def window_length(rules: Rules) -> int:
    """K of the window probe that ``rules`` name."""
    return next(rule["window"] for rule in rules["probes"].values() if "window" in rule)


def _dtype(dtype: str, merge_dtype: str) -> str:
    """One level of the choice ``dtype``: that of the evaluation, and that of the merge where it is another one."""
    return dtype if pd.isna(merge_dtype) or merge_dtype == dtype else f"{dtype}, merged in {merge_dtype}"


def specifications(nll: pd.DataFrame, rules: Rules) -> pd.DataFrame:
    """Verdicts on cells under every specification of the window probe.

    A window of K tokens has K tokens in every canary (K ends at the shortest target), so that a sum against m nats and
    a mean against m / K are one comparison, and ``rules`` convert their margin in this way. Where sum or mean *is* a
    choice is in what is held fixed when K changes: with ``tokens`` = ``sum`` a window of any K must move by m nats,
    with ``mean`` by m / 20 nats a token (20 being the committed K, at which the two are one).

    Args:
        nll: rows of ``token_nll.parquet``: one modality, all seeds, any cells, stacks and dtypes.

    Returns:
        Columns ``cell, K, tokens, reading, interval, margin, stack, dtype, verdict``, a row a cell and specification.
        ``count`` has no interval (an empty text). ``stack`` and ``dtype`` have the levels that ``nll`` has, no others.

    Raises:
        VerdictError: several modalities, a canary missing with a seed, a position missing or twice, or not a number.
    """
    if "modality" in nll and nll.modality.nunique() > 1:
        raise VerdictError(f"token_nll: got the modalities {', '.join(nll.modality.unique())}, expected one")
    tables = []
    for (cell, stack, dtype), part in _groups(nll):
        labels = {"cell": cell, "stack": stack, "dtype": dtype}
        tables.append(_of_group(_windows(part, f"{cell}, {stack}, {dtype}"), rules).assign(**labels))
    table = pd.concat(tables, ignore_index=True)[["cell", *CHOICES, "verdict"]]
    return table.astype({name: "category" for name in table if name not in ("K", "margin")})


def _groups(table: pd.DataFrame) -> Iterator[tuple[tuple[str, str, str], pd.DataFrame]]:
    """Rows of every cell, stack and level of dtype."""
    for (cell, stack, dtype, merge_dtype), part in table.groupby(GROUP, sort=False, dropna=False):
        yield (cell, stack, _dtype(dtype, merge_dtype)), part


def _windows(part: pd.DataFrame, where: str) -> np.ndarray:
    """Change of every window's sum, in nats [seed, canary, K]: entry k - 1 sums the first k positions."""
    if part.duplicated(["seed", "canary", "position"]).any():
        raise VerdictError(f"token_nll: {where}: a position of a canary and seed occurs twice; expected it once")
    by_position = part.assign(change=part.nll - part.nll_base).pivot(
        index=["seed", "canary"], columns="position", values="change"
    )
    shortest = int(part.groupby(["seed", "canary"]).size().min())
    changes = by_position.reindex(columns=range(shortest)).to_numpy(dtype=float)
    shape = part.seed.nunique(), part.canary.nunique()
    if len(changes) != shape[0] * shape[1]:
        raise VerdictError(f"token_nll: {where}: got {len(changes)} targets, expected {shape[0]} seeds x {shape[1]}")
    if not np.isfinite(changes).all():
        raise VerdictError(f"token_nll: {where}: a change below position {shortest} is missing or not a number")
    return changes.cumsum(axis=1).reshape(*shape, shortest)


def _of_group(windows: np.ndarray, rules: Rules) -> pd.DataFrame:
    """Verdicts of one group's windows [seed, canary, K] along everything but stack and dtype."""
    means, medians = windows.mean(0), np.median(windows, axis=0)  # [canary, K]
    ks, margins = np.arange(1, windows.shape[2] + 1), np.array(rules["margin"]["curve"])
    share = np.stack([np.ones(len(ks)), ks / window_length(rules)])  # of the margin, for a sum and for a mean
    bounds = (share[:, None] * margins[:, None]).reshape(-1, len(ks))  # [tokens x margin, K], nats of the window
    low, high = np.stack([method(means, rules["readings"]["mean"]) for method in INTERVALS.values()], axis=1)
    mean = _placed(low[:, None], high[:, None], bounds)  # [interval, tokens x margin, K]
    up, down = (medians > bounds[:, None]).sum(1), (medians < -bounds[:, None]).sum(1)
    count = _counted(up, down, rules["readings"]["count_nll"]["min_canaries"])
    either = _either(mean, count)
    tables = []
    for reading, intervals, found in (("count", [""], count), ("mean", INTERVALS, mean), ("either", INTERVALS, either)):
        levels = {"reading": [reading], "interval": intervals, "tokens": ["sum", "mean"], "margin": margins, "K": ks}
        grid = pd.MultiIndex.from_product(levels.values(), names=levels).to_frame(index=False)
        tables.append(grid.assign(verdict=found.ravel()))
    return pd.concat(tables, ignore_index=True)


def _placed(low: np.ndarray, high: np.ndarray, margin: np.ndarray) -> np.ndarray:
    """:func:`lib.verdicts.place` for arrays."""
    within = (-margin < low) & (high < margin)
    return np.select([low > margin, high < -margin, within], [DAMAGED, STRENGTHENED, UNCHANGED], INCONCLUSIVE)


def _counted(up: np.ndarray, down: np.ndarray, least: int) -> np.ndarray:
    """:func:`lib.verdicts.count_reading` for arrays; *mixed*, said by a count alone, is inconclusive."""
    one_way = (up == 0) | (down == 0)
    fires = [one_way & (up >= least), one_way & (down >= least), (up == 0) & (down == 0)]
    return np.select(fires, [DAMAGED, STRENGTHENED, UNCHANGED], INCONCLUSIVE)


def _either(mean: np.ndarray, count: np.ndarray) -> np.ndarray:
    """:func:`lib.verdicts.either_reading` for arrays."""
    mean_fires, count_fires = _fires(mean), _fires(count)
    opposed = mean_fires & count_fires & (mean != count)
    return np.select([opposed, mean_fires | ~count_fires], [np.full_like(mean, INCONCLUSIVE), mean], count)


def _fires(verdict: np.ndarray) -> np.ndarray:
    return (verdict == DAMAGED) | (verdict == STRENGTHENED)


def conclusions(table: pd.DataFrame, nll: pd.DataFrame, recall: pd.DataFrame, rules: Rules) -> pd.DataFrame:
    """What window and recall together make an analyst say, for every specification and every definition of recall.

    A probe fires when it says *damaged* or *strengthened*. Where nobody recalled anything before or after, a recall has
    nothing to say, and the conclusion is *not testable* whatever the window does.

    Args:
        table: as :func:`specifications` gives it.
        nll, recall: the rows of ``token_nll.parquet`` and ``recall.parquet`` that it was made of.

    Returns:
        The table's columns, with ``recall`` (``hit_full``, ``hit_secret``, ``hit_forced``) and ``conclusion``.

    Raises:
        VerdictError: see :func:`lib.verdicts.probe_values`.
    """
    only = {**rules, "probes": {name: rule for name, rule in rules["probes"].items() if rule["kind"] == "recall"}}
    answers, said = dict(_groups(recall)), {}
    for group, part in _groups(nll):
        said[group] = judge(probe_values(part, answers.get(group, recall[:0]), only), only).verdict
    said = pd.DataFrame(said).T.rename_axis(["cell", "stack", "dtype"])
    places = said.index.get_indexer(pd.MultiIndex.from_frame(table[list(said.index.names)]))
    window, tables = table.verdict.to_numpy(dtype=str), []
    for name, verdicts in said.items():
        found = _concluded(window, verdicts.to_numpy(dtype=str)[places])
        tables.append(table.assign(recall=name, conclusion=pd.Categorical(found)))
    return pd.concat(tables, ignore_index=True).astype({RECALL: "category", "conclusion": "category"})


def _concluded(window: np.ndarray, recall: np.ndarray) -> np.ndarray:
    one, other = _fires(window), _fires(recall)
    cases = [recall == NOT_TESTABLE, one & other & (window != recall), one & other, one, other]
    return np.select(cases, [NOT_TESTABLE, OPPOSITE, BOTH, WINDOW_ALONE, RECALL_ALONE], NEITHER)


def flips(table: pd.DataFrame, committed: Mapping[str, Any], outcome: str = "verdict") -> pd.DataFrame:
    """How every cell fares over all specifications: ``committed`` (its outcome there), shares of outcomes, ``flipped``.

    ``flipped`` is the share of specifications with another outcome than the committed one; ``reversed`` the share in
    which one clear outcome became another: neither of the two is *inconclusive* or *not testable*.

    Args:
        table: of :func:`specifications`, or of :func:`conclusions` with ``outcome`` = ``conclusion``.
        committed: levels of the choices, that name one row of every cell.

    Returns:
        Indexed by cell: ``committed, specifications`` (their number), a share an outcome, ``flipped, reversed``.

    Raises:
        VerdictError: a cell has no row of the committed specification, or several.
    """
    cell, found = table.cell.to_numpy(dtype=object), table[outcome].to_numpy(dtype=object)
    own = _own(table, committed, outcome)
    expected = own.loc[cell].to_numpy()
    other = pd.Series(found != expected)
    clear = ~np.isin(found.astype(str), list(UNDECIDED)) & ~np.isin(expected.astype(str), list(UNDECIDED))
    shares = pd.crosstab(cell, found, normalize="index")
    named = list(VERDICTS) if outcome == "verdict" else sorted(shares)
    shares = shares.reindex(columns=named, fill_value=0.0).rename_axis(index="cell", columns=None)
    shares.insert(0, "committed", own)
    shares.insert(1, "specifications", pd.Series(cell).value_counts())
    return shares.assign(flipped=other.groupby(cell).mean(), reversed=(other & clear).groupby(cell).mean())


def _own(table: pd.DataFrame, committed: Mapping[str, Any], outcome: str) -> pd.Series:
    """Every cell's outcome under the committed specification."""
    rows = table[_chosen(table, committed)]
    own = pd.Series(rows[outcome].to_numpy(dtype=object), index=rows.cell.to_numpy(dtype=object))
    if sorted(own.index) != sorted(set(table.cell)):
        raise VerdictError(f"committed: {dict(committed)} names {len(own)} rows, expected one in each cell")
    return own


def _chosen(table: pd.DataFrame, levels: Mapping[str, Any]) -> np.ndarray:
    return np.logical_and.reduce([(table[name] == level).to_numpy() for name, level in levels.items()])


def influence(table: pd.DataFrame, committed: Mapping[str, Any], outcome: str = "verdict") -> pd.DataFrame:
    """How often one choice alone changes the outcome: pairs of specifications of a cell that differ in it only.

    ``interval`` is compared where there is one; a count, which has none, is compared with every interval's mean. An
    influence depends on the levels that were offered: K from 1 to the end is a wider choice than two stacks.

    Args:
        table: of :func:`specifications`, or of :func:`conclusions` with ``outcome`` = ``conclusion``.
        committed: levels of the choices, that name one row of every cell.

    Returns:
        Columns ``choice, levels, flips`` (share of pairs with two outcomes), ``reversals`` (with two clear ones),
        ``alone`` (of the cells, each at the committed specification, and of this choice's other levels: the share that
        changes the outcome). The largest first; a choice of one level is last and has no numbers: nothing was varied.

    Raises:
        VerdictError: ``committed`` leaves a choice open, or names no row, or several, of a cell.
    """
    choices = [name for name in [*CHOICES, RECALL] if name in table]
    missing = [name for name in choices if name not in committed]
    if missing:
        raise VerdictError(f"committed: no level of {', '.join(missing)}; expected one of every choice")
    rows = [_influence(table, choice, choices, committed, outcome) for choice in choices]
    result = pd.DataFrame(rows, columns=["choice", "levels", "flips", "reversals", "alone"])
    return result.sort_values("flips", ascending=False, ignore_index=True, kind="stable")


def _influence(table: pd.DataFrame, choice: str, choices: list[str], committed: Mapping, outcome: str) -> tuple:
    if choice == "interval":
        table = table[table.interval != ""]
    elif choice == "reading":
        table = _with_every_interval(table)
    levels = table[choice].nunique()
    if levels < 2:
        return choice, levels, np.nan, np.nan, np.nan
    others = [name for name in choices if name != choice]
    counts, names = _outcomes(table, ["cell", *others], outcome)
    pairs = _pairs(counts.sum(1)).sum()
    same = _pairs(counts).sum()
    clear = counts[:, ~np.isin(names, list(UNDECIDED))]
    turned = _pairs(clear.sum(1)).sum() - _pairs(clear).sum()
    near = table[_chosen(table, {name: committed[name] for name in others}) & (table[choice] != committed[choice])]
    expected = _own(table, committed, outcome).loc[near.cell.to_numpy(dtype=object)]
    moved = near[outcome].to_numpy(dtype=object) != expected.to_numpy()
    return choice, levels, (pairs - same) / pairs, turned / pairs, moved.mean()


def _pairs(n: np.ndarray) -> np.ndarray:
    return n * (n - 1) // 2


def _outcomes(table: pd.DataFrame, keys: list[str], outcome: str) -> tuple[np.ndarray, np.ndarray]:
    """Counts [group, outcome] of the groups that agree in ``keys``, and the outcomes' names."""
    group = np.zeros(len(table), dtype=np.int64)
    for key in keys:
        codes, levels = pd.factorize(table[key])
        group = group * len(levels) + codes
    _, group = np.unique(group, return_inverse=True)
    codes, names = pd.factorize(table[outcome].to_numpy(dtype=object))
    counts = np.bincount(group * len(names) + codes, minlength=(group.max() + 1) * len(names))
    return counts.reshape(-1, len(names)), names.astype(str)


def _with_every_interval(table: pd.DataFrame) -> pd.DataFrame:
    counts, rest = table[table.interval == ""], table[table.interval != ""]
    copies = [counts.assign(interval=name) for name in rest.interval.unique()]
    return pd.concat([rest, *copies], ignore_index=True) if copies else table


def contradictions(verdicts: pd.DataFrame, kinds: pd.Series, probe: str, confidence: float = 0.95) -> pd.DataFrame:
    """How often a probe and another one contradict each other, as :func:`lib.verdicts.disagreement` has it.

    Only cells in which both verdicts are clear can contradict; they are the ``comparable`` ones, and the share is of
    them. The interval is exact for independent cells. These are not: all share one injection and its secrets, so that
    it tells how little so few cells can say at best, and nothing about other injections.

    Args:
        verdicts: a row a cell, a column a probe.
        kinds: the kind of every cell; ``noise`` is told apart from the trained ones.
        probe: the probe that the others are held against.

    Returns:
        Indexed by ``group`` (``trained``, ``noise``) and ``against`` (every other probe of the secret, and ``any``):
        ``cells, comparable, contradict, share, low, high, which`` (the cells that contradict).
    """
    clear = ~verdicts.isin(UNDECIDED)
    others = [name for name in verdicts if name == "hex" or name.startswith("hit_")]
    noise = kinds.loc[verdicts.index] == "noise"
    rows = {}
    for group, part in (("trained", verdicts[~noise]), ("noise", verdicts[noise])):
        for against in [*others, "any"]:
            held = others if against == "any" else [against]
            comparable = int((clear[probe] & clear[held].any(axis=1)).loc[part.index].sum())
            which = [cell for cell, row in part[[probe, *held]].iterrows() if disagreement(row.to_dict(), probe)]
            share = len(which) / comparable if comparable else np.nan
            low, high = clopper_pearson(len(which), comparable, confidence) if comparable else (np.nan, np.nan)
            rows[group, against] = (len(part), comparable, len(which), share, low, high, ", ".join(which))
    columns = ["cells", "comparable", "contradict", "share", "low", "high", "which"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns).set_index(
        pd.MultiIndex.from_tuples(rows, names=["group", "against"])
    )
