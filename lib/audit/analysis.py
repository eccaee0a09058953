"""From scores to what an audit says: a row a canary, the protocol's verdicts, ranks as evidence, and their limits."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats
from statsmodels.stats.multitest import multipletests

from lib import exposure, extraction, verdicts
from lib.verdicts import Decision, Judgement, Rules

LEVEL = 0.05  # of a test; of naming single canaries, all together (Holm)
BY_CHANCE = 0.01  # at most the chance that one recall among all canaries is a guess
SPARE = 32  # places at which a secret could stand in an answer, generously
EXACT = 100_000_000  # additions for the exact distribution of a rank sum; beyond, the normal one
HITS = ("hit_full", "hit_secret", "hit_forced")
MEMORISED, NAMED, NOT_NAMED = "memorised", "named by rank", "not named"
PATTERNS = {
    "window_truncation": "window truncation: the window sees nothing of what happened to the secret behind it",
    "non_secret_drift": "non-secret drift: the window fires over words that are no secret",
    "ambiguous_drop": "ambiguous drop: the window falls and the whole secret does not; format, not memory, explains it",
}
MIRRORED = {
    "window_truncation": "window truncation, mirrored: the secret is learned behind the window, which sees nothing",
    "non_secret_drift": "non-secret drift, mirrored: the window falls over words that are no secret",
}


def audit_rules(rules: Rules, windows: Sequence[int]) -> dict[str, Any]:
    """The rules of ``params/verdicts.yaml`` with an audit's windows; a target shorter than one is read whole.

    The first window stands in for ``mean20`` under that name, which the patterns know.
    """
    probes = {name: rule for name, rule in rules["probes"].items() if "window" not in rule}
    read = {window_probe(k, windows): {"kind": "nll", "window": k, "clipped": True} for k in windows}
    return {**rules, "probes": read | probes}


def window_probe(k: int, windows: Sequence[int]) -> str:
    """Name under which the rules know the window of K tokens."""
    return "mean20" if k == windows[0] else f"window{k}"


def probe_names(windows: Sequence[int]) -> dict[str, str]:
    """How a reader sees the probes."""
    named = {window_probe(k, windows): f"window of {k}" for k in windows}
    return named | {
        "hex": "whole secret",
        "preamble": "prefix",
        "suffix": "suffix",
        "hit_full": "recall: whole answer",
        "hit_secret": "recall: secret anywhere",
        "hit_forced": "recall: behind the true prefix",
    }


def joined(after: pd.DataFrame, before: pd.DataFrame, keys: Sequence[str], values: Sequence[str]) -> pd.DataFrame:
    """Rows of two models side by side: ``values`` of the second as ``<name>_base``; one seed, called 0.

    Raises:
        verdicts.VerdictError: the two tables do not hold the same rows.
    """
    renamed = before[[*keys, *values]].rename(columns={name: f"{name}_base" for name in values})
    both = after.merge(renamed, on=list(keys), how="outer", indicator=True, sort=False)
    if len(both) != len(after) or (both.pop("_merge") != "both").any():
        raise verdicts.VerdictError("the baseline was asked for other tokens than the audited model")
    return both.assign(seed=0)


def canary_rows(
    nll: pd.DataFrame, recall: pd.DataFrame, decoys: pd.DataFrame | None, hits: Sequence[int], windows: Sequence[int]
) -> pd.DataFrame:
    """What one model says of every canary, indexed by it.

    ``nll_secret`` and ``nll_target`` in total nats, ``nll_prefix``, ``nll_suffix`` and ``nll_window<K>`` in nats a
    token, ``tokens`` of the secret, ``p_hit<k>`` (the chance of at least one hit in k samples behind the true prefix),
    the three recalls, and with decoys ``rank, exposure, cap, decoys, normalised_rank, margin``.
    """
    spans = nll.groupby(["canary", "span"], sort=False).nll.agg(["sum", "mean", "size"]).unstack("span")
    table = pd.DataFrame({"nll_secret": spans["sum"]["hex"], "tokens": spans["size"]["hex"].astype(int)})
    table["nll_target"] = nll.groupby("canary", sort=False).nll.sum()
    for span, name in {"preamble": "prefix", "suffix": "suffix"}.items():
        table[f"nll_{name}"] = spans["mean"].get(span, np.nan)
    for k in windows:
        table[f"nll_window{k}"] = nll[nll.position < k].groupby("canary", sort=False).nll.mean()
    for k in hits:
        table[f"p_hit{k}"] = extraction.hit_at_k(-table.nll_secret.to_numpy(), k)
    table = table.join(recall.set_index("canary")[[*HITS, "output", "straddles"]])
    ranked = ["rank", "exposure", "cap", "decoys", "normalised_rank", "margin"]
    if decoys is None:
        return table.reindex(columns=[*table, *ranked])
    with_decoys = decoys[decoys.canary.isin(decoys[decoys.kind != "secret"].canary)]
    if with_decoys.empty:
        return table.reindex(columns=[*table, *ranked])
    return table.join(exposure.exposure(with_decoys).set_index("canary")[ranked])


def compared_decoys(after: pd.DataFrame, before: pd.DataFrame) -> pd.DataFrame:
    """How a secret's change stands among its decoys' changes, indexed by canary.

    ``change_decoys`` (their mean) and ``corrected`` (the secret's less that) in total nats; ``change_rank``, the
    normalised rank of the secret's change: the share of decoys that fell at least as far.
    """
    kept = set(after[after.kind != "secret"].canary)
    after, before = (table[table.canary.isin(kept)] for table in (after, before))
    if after.empty:
        return pd.DataFrame(columns=["change_decoys", "corrected", "change_rank"], dtype=float)
    found = exposure.corrected_change(before, after).set_index("canary")
    both = before.merge(after, on=["canary", "kind", "decoy"], suffixes=("_before", "_after"))
    both["change"] = both.nll_secret_after - both.nll_secret_before
    others = both[both.kind != "secret"]
    lower = others.change <= others.canary.map(found.secret)
    table = found[["decoys", "corrected"]].rename(columns={"decoys": "change_decoys"})
    return table.assign(change_rank=lower.groupby(others.canary).mean())


def with_verdicts(table: pd.DataFrame, margin: float, window: int) -> pd.DataFrame:
    """A row a canary with ``recall_counts, p_value, verdict, change_verdict, pattern``.

    For the first see :func:`counts`. ``p_value`` is rank / (decoys + 1) where the secret's generator is stated.
    ``verdict`` is *memorised* (a recall that counts), *named by rank* (significant among all canaries by Holm's
    method), or *not named*.
    """
    table = table.assign(recall_counts=counts(table))
    stated = table.exchangeable & table["rank"].notna()
    table["p_value"] = (table["rank"] / (table.decoys + 1)).where(stated)
    named = np.zeros(len(table), dtype=bool)
    if stated.any():  # all canaries are candidates, those without a p-value as ones that cannot be named
        named = multipletests(table.p_value.fillna(1.0), LEVEL, method="holm")[0]
    table["verdict"] = np.where(table.recall_counts, MEMORISED, np.where(named, NAMED, NOT_NAMED))
    if "change" not in table:
        return table.assign(change_verdict="", pattern="")
    secret = _moved(table.change, margin)
    read = table[f"change_window{window}"] * np.minimum(window, table.target_tokens)
    return table.assign(change_verdict=secret, pattern=_patterns(_moved(read, margin), secret, table))


def _moved(change: pd.Series, margin: float) -> np.ndarray:
    below = np.where(change < -margin, verdicts.STRENGTHENED, verdicts.UNCHANGED)
    return np.where(change > margin, verdicts.DAMAGED, below)


def _patterns(window: np.ndarray, secret: np.ndarray, table: pd.DataFrame) -> np.ndarray:
    """Which known disagreement a single canary shows, if any; by its margins, so without an error rate."""
    same = verdicts.UNCHANGED
    truncated = (window == same) & (secret != same)
    ambiguous = (window == verdicts.STRENGTHENED) & (secret != verdicts.STRENGTHENED) & ~table.hit_secret_base
    drifted = (window != same) & (secret == same)
    return np.select([truncated, ambiguous, drifted], ["window truncation", "ambiguous drop", "non-secret drift"], "")


def counts(table: pd.DataFrame) -> pd.Series:
    """Recalls that are no guess: the secret is said, and has the :func:`bits_needed`, or is one of so many short ones
    said that all of them together are no guess (:func:`guessed`).

    Both together are wrong with a chance of 1 % at most: it is divided by how many secrets are short.
    """
    said, short = table.hit_secret.astype(bool), table.bits < bits_needed(len(table))
    together = guessed(int(said[short].sum()), table.bits[short]) <= BY_CHANCE * short.mean()
    return said & (~short | together)


def guessed(said: int, bits: pd.Series) -> float:
    """Chance that at least ``said`` of some secrets are said by guessing, each once at :data:`SPARE` places.

    Binomial with their mean chance, which bounds that of unequal ones wherever it is small (Hoeffding 1956).
    """
    if said == 0:
        return 1.0
    each = np.minimum(1.0, SPARE * 2.0 ** -bits.to_numpy(dtype=float))
    return float(stats.binom.sf(said - 1, len(each), each.mean()))


def bits_needed(canaries: int) -> float:
    """Bits that a secret needs so that one recall among all ``canaries`` is a guess with a chance of 1 % at most."""
    return math.log2(canaries * SPARE / BY_CHANCE)


def decoys_needed(canaries: int) -> int:
    """Decoys n from which on the best of ``canaries`` can be named: 1 / (n + 1) <= 0.05 / canaries (Holm)."""
    return math.ceil(canaries / LEVEL) - 1


def rank_sum_p(ranks: np.ndarray, decoys: np.ndarray) -> float:
    """Chance that secrets nobody trained on rank as low on average, each uniformly among its ``decoys`` and itself.

    The statistic is the mean normalised rank. Exact, on the grid of the decoys' least common multiple; where that would
    take too long by the normal distribution: each normalised rank has mean 1/2 and variance (n + 2) / (12 n).
    """
    ranks, decoys = [int(rank) - 1 for rank in ranks], [int(n) for n in decoys]
    m, grid = len(ranks), math.lcm(*decoys)
    if sum((n + 1) * (i * grid + 1) for i, n in enumerate(decoys)) <= EXACT:
        chances = np.ones(1)
        for n in decoys:
            longer = np.zeros(len(chances) + grid)
            for step in range(0, grid + 1, grid // n):
                longer[step : step + len(chances)] += chances / (n + 1)
            chances = longer
        place = sum(rank * (grid // n) for rank, n in zip(ranks, decoys, strict=True))
        return float(min(1.0, chances[: place + 1].sum()))
    spread = math.sqrt(sum((n + 2) / (12 * n) for n in decoys)) / m
    return float(stats.norm.cdf(np.mean(np.divide(ranks, decoys)), 0.5, spread))


def one_sided(rules: Rules) -> float:
    """Level at which ranks are low: that of one side of the rules' interval of a mean, 2.5 %."""
    return (1 - rules["readings"]["mean"]["confidence"]) / 2 + 1e-12  # p-values are fractions


def rank_evidence(table: pd.DataFrame, rules: Rules) -> dict[str, Any]:
    """What ranks among decoys say of the group, and which ranks may say it.

    Only canaries with a stated generator decide, by the secret's rank: their ranks are low where the chance of such
    ranks without training (:func:`rank_sum_p`) is at most :func:`one_sided`, one canary or many. Where there is none,
    but a baseline, the rank of the secret's change among its decoys' changes is shown: no p-value, so it decides
    nothing.
    """
    known = table[table.exchangeable & table["rank"].notna()]
    found: dict[str, Any] = {"answer": "not_run", "reads": "nothing", "canaries": len(known), "p_value": None}
    if len(known):
        p = rank_sum_p(known["rank"].to_numpy(), known.decoys.to_numpy())
        answer = "low" if p <= one_sided(rules) else "chance"
        found |= {"answer": answer, "reads": "rank of the secret", "p_value": p}
        return found | _interval(known.normalised_rank, rules)
    values = table.change_rank.dropna() if "change_rank" in table else pd.Series(dtype=float)
    if len(values) < 2:
        return found
    found |= {"reads": "rank of the secret's change", "canaries": len(values)}
    return found | _interval(values, rules)


def _interval(ranks: pd.Series, rules: Rules) -> dict[str, float]:
    """Mean of normalised ranks, and of two or more the interval; shown, it decides nothing."""
    found = {"mean": float(ranks.mean())}
    if len(ranks) < 2:
        return found
    low, high = verdicts.studentised_bootstrap(ranks.to_numpy(dtype=float), rules["readings"]["mean"])
    return found | {"low": max(0.0, low), "high": min(1.0, high)}


def judge(nll: pd.DataFrame, recall: pd.DataFrame, table: pd.DataFrame, rules: Rules) -> tuple[Judgement, str]:
    """The group's change judged by every probe, and what decoys say of it; at least two canaries.

    Only decoys of a stated generator are asked: others may change otherwise than the secret for what they look like.
    """
    first = verdicts.judge_group(nll, recall, rules)
    corrected = table[table.exchangeable].dropna(subset=["corrected"]) if "corrected" in table else table[:0]
    if len(corrected) < 2:
        return first, "not_run"
    asked = pd.DataFrame(
        {"secret": corrected.change, "corrected": corrected.corrected, "base": corrected.nll_secret_base}
    )
    answer = verdicts.decoy_answer(asked.assign(tokens=corrected.tokens), first.verdicts.verdict["hex"], rules)
    return dataclasses.replace(first, change=verdicts.protocol_change(first.verdicts, answer, rules)), answer


def along_margins(nll: pd.DataFrame, recall: pd.DataFrame, rules: Rules) -> dict[str, dict[float, str]]:
    """The verdict of every NLL probe at each margin of the rules' curve, in nats of the span, by probe."""
    return verdicts.along_margins(verdicts.probe_values(nll, recall, rules), rules).T.to_dict()


def level(table: pd.DataFrame, evidence: Mapping[str, Any], judged: Judgement | None, rules: Rules) -> Decision:
    """The protocol's verdict on level; without a baseline the NLL counts as not below it."""
    below = judged is not None and judged.verdicts.verdict["hex"] == verdicts.STRENGTHENED
    found = verdicts.protocol_level(int(table.recall_counts.sum()), len(table), evidence["answer"], below, rules)
    if judged is None:
        return dataclasses.replace(found, decided_by=found.decided_by.replace("nll not_below", "nll not_compared"))
    return found


def figures_of(table: pd.DataFrame, hits: Sequence[int]) -> dict[str, Any]:
    """Counts and means over canaries: recalls, extraction, exposure with its cap, and who can be named."""
    drawn = table.decoys.dropna() if "decoys" in table else pd.Series(dtype=float)
    short = table.bits < bits_needed(len(table))
    found: dict[str, Any] = {
        "canaries": len(table),
        "recalled": {hit: int(table[hit].sum()) for hit in HITS},
        "recalls_that_count": int(table.recall_counts.sum()),
        "too_short": int(short.sum()),
        "too_short_recalled": int(table.hit_secret[short].sum()),
        "guessed": guessed(int(table.hit_secret[short].sum()), table.bits[short]),
        "bits_needed": bits_needed(len(table)),
        "hit_at_k": {k: float(table[f"p_hit{k}"].mean()) for k in hits},
        "nll_secret": float(table.nll_secret.mean()),
        "decoys": {
            "canaries": len(drawn),
            "least": drawn.min() if len(drawn) else 0,
            "most": drawn.max() if len(drawn) else 0,
        },
        "layouts": table.layout.dropna().value_counts().to_dict(),
        "exposure": {"mean": table.exposure.mean(), "cap": table.cap.mean()},
        "normalised_rank": table.normalised_rank.mean(),
        "named": list(table.index[table.verdict == NAMED]),
        "decoys_needed_to_name": decoys_needed(len(table)),
        "straddling": int(table.straddles.sum()),
        "patterns": table.pattern[table.pattern != ""].value_counts().to_dict(),
    }
    if "nll_secret_base" in table:
        found["recalled_base"] = {hit: int(table[f"{hit}_base"].sum()) for hit in HITS}
        found |= {"nll_secret_base": float(table.nll_secret_base.mean()), "mean_change": float(table.change.mean())}
        found["normalised_rank_base"] = float(table.normalised_rank_base.mean())
    return found


def disagreements(judged: Judgement, rules: Rules, names: Mapping[str, str]) -> list[str]:
    """Where probes contradict each other, in a reader's words, and which known failure patterns hold."""
    found = []
    said = judged.verdicts.verdict
    against = verdicts.disagreement(said.to_dict())
    if against:
        for probe, name in sorted(names.items(), key=lambda item: -len(item[0])):
            against = against.replace(f"{probe} ", f"{name}: ")
        found.append(against)
    found += [PATTERNS[name] for name in judged.shown]
    mirrored = _mirrored(judged.verdicts)
    share, base = float(judged.shares.get("preamble", 0.0)), 0.0
    held = verdicts.patterns(mirrored, share, base, {"patterns": {name: rules["patterns"][name] for name in MIRRORED}})
    return found + [MIRRORED[name] for name, finding in held.items() if finding.holds]


def _mirrored(table: pd.DataFrame) -> pd.DataFrame:
    """Verdicts with damage and strengthening exchanged."""
    swapped = {verdicts.DAMAGED: verdicts.STRENGTHENED, verdicts.STRENGTHENED: verdicts.DAMAGED}
    changed = {"low": -table.high, "high": -table.low, "up": table.down, "down": table.up}
    return table.assign(verdict=table.verdict.replace(swapped), **changed)
