"""What the tables of an inversion study say: exact match by window and length, the alarm as a signal, who fails."""

import re
import warnings

import numpy as np
import pandas as pd
from scipy import stats

from lib.inversion import diagnostics
from lib.scorecard import area, roc

SIGNALS = {
    "discrete loss": "discrete_loss",
    "plateau loss": "loss_final",
}
CONFIDENCE = 0.95


def wilson(k: int, n: int) -> tuple[float, float]:
    """Wilson interval of k of n, at 95 %."""
    if n == 0:
        return 0.0, 1.0
    found = stats.binomtest(int(k), int(n)).proportion_ci(CONFIDENCE, method="wilson")
    return float(found.low), float(found.high)


def clustered(hits: pd.Series, groups: pd.Series) -> tuple[float, float]:
    """An interval of a share over positions that belong to prompts: the wider of Wilson's and the bootstrap's over
    prompts, edge by edge."""
    low, high = wilson(hits.sum(), len(hits))
    counts = hits.astype(float).groupby(groups.to_numpy()).agg(["sum", "size"]).to_numpy()
    rows = np.random.default_rng(0).integers(len(counts), size=(2000, len(counts)))
    shares = counts[rows, 0].sum(1) / counts[rows, 1].sum(1)
    below, above = np.percentile(shares, [2.5, 97.5])
    return min(low, float(below)), max(high, float(above))


def recovered(tokens: pd.DataFrame, candidates: int) -> pd.Series:
    """Whether each position of reference-commit runs would be recovered with C ``candidates``.

    So it is when the true token's rank is below C and no nearer candidate is within the tolerance. Ranks beyond those
    that the run verified are taken at their word.
    """
    unverified = tokens.fallback & (tokens.rank_final >= tokens.candidates)
    right = (tokens.accepted_id == tokens.true_id) | unverified
    return ((tokens.rank_final < candidates) & right).astype(bool)


def grid(tokens: pd.DataFrame, windows: list[int]) -> pd.DataFrame:
    """Positions recovered by every reference run and window C, and by the controls with as many candidates.

    Returns:
        ``layer, configuration, name`` (of the configuration, without its layer; or of the control), ``candidates,
        recovered, of, share, low, high`` (see :func:`clustered`).
    """
    rows = []
    for (configuration, layer), part in tokens.groupby(["configuration", "layer"], sort=False):
        mode = part["mode"].iloc[0]
        if mode == "reference":
            hits = {c: recovered(part, c) for c in windows}
            name = re.sub(r"^layer \d+ ", "", configuration)
        elif mode == "lm-order":
            right = part.found_id == part.true_id
            hits, name = {c: right & (part.candidates <= c) for c in windows}, "language model's order"
        elif mode == "random-proxy":
            right, most = part.found_id == part.true_id, part.candidates.max()
            hits = {c: right & (part.candidates <= c) for c in windows if c <= most}
            name = "random proxy"
        else:
            continue
        for c, hit in hits.items():
            low, high = clustered(hit, part.prompt)
            row = {"configuration": configuration, "layer": layer, "name": name, "candidates": c}
            rows.append(
                row | {"recovered": int(hit.sum()), "of": len(hit), "share": hit.mean(), "low": low, "high": high}
            )
    columns = ["configuration", "layer", "name", "candidates", "recovered", "of", "share", "low", "high"]
    return pd.DataFrame(rows, columns=columns)


def exact_by_length(tokens: pd.DataFrame, candidates: int | None = None, longest: int | None = None) -> pd.DataFrame:
    """Share of prompts of which the first L tokens are all right, for every L.

    Of a run that committed the true prefix it is what published mode would find with C ``candidates``: up to its first
    failure it would stand behind the same prefix. ``longest``: up to so many tokens, which a run that abandoned all its
    prompts has not.

    Returns:
        ``length, exact, of, share, low, high`` (Wilson).
    """
    right = recovered(tokens, candidates) if candidates is not None else tokens.found_id == tokens.true_id
    wide = tokens.assign(right=right).pivot_table("right", "prompt", "position", aggfunc="min", fill_value=False)
    wide = wide.reindex(columns=sorted({*wide.columns, *range(longest or 0)}), fill_value=False)
    wide = wide.astype(bool)  # a prompt that was abandoned has no tokens behind its failure
    rows = []
    for length, k in enumerate(wide.cummin(axis=1).sum(), 1):
        low, high = wilson(k, len(wide))
        rows.append(
            {"length": length, "exact": int(k), "of": len(wide), "share": k / len(wide), "low": low, "high": high}
        )
    return pd.DataFrame(rows)


def agreement(own: pd.DataFrame, reference: pd.DataFrame, candidates: int) -> dict:
    """Whether a run in published mode finds what a run of the same K behind true prefixes says that it would.

    Returns:
        ``prompts`` that both have, and how many of them are exact up to each length: ``predicted`` and ``found`` (none
        at lengths that every prompt was abandoned before).
    """
    both = set(own.prompt) & set(reference.prompt)
    said = exact_by_length(reference[reference.prompt.isin(both)], candidates)
    did = exact_by_length(own[own.prompt.isin(both)], longest=len(said))
    return {"prompts": len(both), "predicted": said.exact.tolist(), "found": did.exact.tolist()}


def read_back(tokens: pd.DataFrame) -> pd.DataFrame:
    """What came back of every prompt of a run: ``text, found`` (token by token), ``right`` (how many tokens), and
    ``first error``: the true token, its kind and its final rank."""
    rows = {}
    for prompt, part in tokens.sort_values("position").groupby("prompt", sort=False):
        wrong = part[part.found_id != part.true_id]
        first = wrong.iloc[0] if len(wrong) else None
        said = "" if first is None else f"{first.token!r} ({first.category}, rank {first.rank_final:,})"
        row = {"text": "".join(part.token), "found": "".join(part.found_token)}
        rows[prompt] = row | {"right": f"{len(part) - len(wrong)} of {len(part)}", "first error": said}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("prompt")


def paired(prompts: pd.DataFrame, one: str, other: str) -> dict[str, float]:
    """Exact match of two configurations on the prompts that both inverted: those of one alone, and McNemar's p."""
    wide = prompts[prompts.channel == "clean"].pivot_table("exact_match", "prompt", "configuration", aggfunc="min")
    both = wide[[one, other]].dropna().astype(bool)
    first, second = int((both[one] & ~both[other]).sum()), int((~both[one] & both[other]).sum())
    p = 1.0 if first + second == 0 else float(stats.binomtest(first, first + second).pvalue)
    return {"prompts": len(both), f"only {one}": first, f"only {other}": second, "p": p}


def ends(prompts: pd.DataFrame) -> pd.DataFrame:
    """Separation of exact from failed prompts in orders of magnitude of the cumulative discrete loss, a row a run.

    Returns:
        ``layer, configuration, channel, exact, failed, largest_exact, smallest_failed, separation`` (None where only
        one kind exists).
    """
    rows = []
    judged = prompts[prompts.exact_match.notna() & (prompts.method == "continuous")]
    for key, part in judged.groupby(["layer", "configuration", "channel"], sort=False):
        exact = part.exact_match.astype(bool)
        row = dict(zip(("layer", "configuration", "channel"), key, strict=True))
        row |= {"exact": int(exact.sum()), "failed": int((~exact).sum())}
        row |= {
            "largest_exact": part.cumulative_loss[exact].max(),
            "smallest_failed": part.cumulative_loss[~exact].min(),
        }
        rows.append(row | {"separation": diagnostics.separation(part.cumulative_loss, exact)})
    return pd.DataFrame(rows)


def separation_by_length(tokens: pd.DataFrame) -> pd.DataFrame:
    """As :func:`ends`, for the first L tokens of every prompt: ``length, exact, failed, separation``.

    An abandoned prompt keeps the sum that it had, which is a lower bound of what it would have come to.
    """
    rows = []
    losses = tokens.pivot(index="prompt", columns="position", values="cumulative_loss")
    right = tokens.assign(right=tokens.found_id == tokens.true_id)
    right = right.pivot(index="prompt", columns="position", values="right").eq(True).cummin(axis=1)  # noqa: FBT003
    for position, sums in losses.ffill(axis=1).items():
        exact = right[position]
        row = {"length": position + 1, "exact": int(exact.sum()), "failed": int((~exact).sum())}
        rows.append(row | {"separation": diagnostics.separation(sums, exact)})
    return pd.DataFrame(rows)


def signal_curves(tokens: pd.DataFrame, per: str) -> dict[str, pd.DataFrame]:
    """Operating points of every signal for a wrong token, or for a prompt with one, by signal.

    Args:
        tokens: a blind run in one channel.
        per: ``token``: searched ones behind a true prefix, the first wrong one included. ``prompt``: the signals are
            summed over the prompt.
    """
    return {name: roc(score, wrong) for name, (score, wrong) in _signals(tokens, per).items()}


def signal_areas(tokens: pd.DataFrame) -> pd.DataFrame:
    """Area under every curve of :func:`signal_curves`, a row a channel, unit and signal; NaN where one is missing."""
    rows = []
    for channel, part in tokens.groupby("channel", sort=False):
        for per in ("token", "prompt"):
            for name, (score, wrong) in _signals(part, per).items():
                value = area(score, wrong) if 0 < wrong.sum() < len(wrong) else np.nan
                rows.append({"channel": channel, "per": per, "signal": name, "area": value})
                rows[-1] |= {"wrong": int(wrong.sum()), "right": int((~wrong).sum())}
    return pd.DataFrame(rows)


def _signals(tokens: pd.DataFrame, per: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    ordered = tokens.sort_values(["prompt", "position"])
    wrong = ordered.found_id != ordered.true_id
    if per == "token":
        part = ordered[at_risk(ordered) & (ordered.steps > 0)]  # a first token that was looked up has no plateau
        return {name: (part[column].to_numpy(), wrong[part.index].to_numpy()) for name, column in SIGNALS.items()}
    grouped = ordered.assign(wrong=wrong).groupby("prompt")
    truth = grouped.wrong.any().to_numpy()
    return {f"sum of {name}": (grouped[column].sum().to_numpy(), truth) for name, column in SIGNALS.items()}


def alarm_delays(tokens: pd.DataFrame) -> pd.DataFrame:
    """How soon the cumulative discrete loss of a blind run passes a threshold after a prompt's first wrong token.

    The threshold is the largest sum that an exact prompt reached on clean states. Exact prompts that pass it are false
    alarms.

    Returns:
        A row a channel: ``threshold, failed, at once`` (at the first wrong token), ``earlier, later, never`` of the
        failed, ``exact, false alarms``.
    """
    right = (tokens.found_id == tokens.true_id).groupby([tokens.channel, tokens.prompt]).transform("min")
    clean = tokens[right & (tokens.channel == "clean")]
    if clean.empty:
        return pd.DataFrame()
    threshold, rows = clean.cumulative_loss.max(), {}
    for channel, part in tokens.groupby("channel", sort=False):
        delays = diagnostics.alarm_delay(part, threshold)
        exact = part[right[part.index]].groupby("prompt").cumulative_loss.max()
        rows[channel] = {
            "threshold": threshold,
            "failed": len(delays),
            "at once": int((delays.delay == 0).sum()),
            "earlier": int((delays.delay < 0).sum()),
            "later": int((delays.delay > 0).sum()),
            "never": int(delays.delay.isna().sum()),
            "exact": len(exact),
            "false alarms": int((exact > threshold).sum()),
        }
    return pd.DataFrame(rows).T


def candidate_spread(tokens: pd.DataFrame) -> pd.DataFrame:
    """Candidates verified for a searched token of published mode behind a true prefix: how many took very few or all.

    Returns:
        A row a configuration: ``tokens, median, mean``, ``at most 10``, ``between``, ``all of them``.
    """
    part = verified(tokens)
    part = part[(part.steps > 0) & at_risk(part)]
    rows = {}
    for name, own in part.groupby("configuration", sort=False):
        few = (own.candidates <= 10) & ~own.fallback
        row = {"tokens": len(own), "median": float(own.candidates.median()), "mean": float(own.candidates.mean())}
        row |= {"at most 10": int(few.sum()), "all of them": int(own.fallback.sum())}
        rows[name] = row | {"between": int(len(own) - few.sum() - own.fallback.sum())}
    return (
        pd.DataFrame(rows).T[["tokens", "median", "mean", "at most 10", "between", "all of them"]]
        if rows
        else pd.DataFrame()
    )


def at_risk(tokens: pd.DataFrame) -> pd.Series:
    """Whether each position's committed prefix is the true one."""
    wrong = (tokens.found_id != tokens.true_id).astype(int)
    return wrong.groupby([tokens.configuration, tokens.channel, tokens.prompt]).cumsum() - wrong == 0


def error_rates(tokens: pd.DataFrame, candidates: int) -> pd.DataFrame:
    """Error rate of every kind of token behind a true prefix, position 0 apart.

    Intervals as of :func:`clustered`, since tokens of a prompt share its text.

    Returns:
        ``category, errors, of, rate, low, high``; the category of position 0 is ``first token``.
    """
    failed = tokens.assign(error=~recovered(tokens, candidates))
    failed["category"] = failed.category.where(failed.position > 0, "first token")
    rows = []
    for category, part in failed.groupby("category"):
        low, high = clustered(part.error, part.prompt)
        row = {"category": category, "errors": int(part.error.sum()), "of": len(part)}
        rows.append(row | {"rate": part.error.mean(), "low": low, "high": high})
    columns = ["category", "errors", "of", "rate", "low", "high"]
    return pd.DataFrame(rows, columns=columns).sort_values("rate", ascending=False, ignore_index=True)


def first_errors(tokens: pd.DataFrame, candidates: int) -> pd.DataFrame:
    """Which kind of token a prompt's first error is, as the paper counts: ``category, first_errors, share``.

    It mixes how often a kind errs with how often it is met and how early; see :func:`error_rates` for the rate.
    """
    failed = tokens[~recovered(tokens, candidates)].sort_values("position").groupby("prompt").head(1)
    failed = failed.assign(category=failed.category.where(failed.position > 0, "first token"))
    counts = failed.category.value_counts().rename_axis("category").reset_index(name="first_errors")
    return counts.assign(share=counts.first_errors / counts.first_errors.sum())


def error_model(tokens: pd.DataFrame, candidates: int) -> pd.DataFrame:
    """A logistic model of errors behind a true prefix, position 0 left out: kind, rank, density and position together.

    Generalised estimating equations with exchangeable correlation within a prompt (statsmodels). Numbers are
    standardised, so that an odds ratio is that of one standard deviation; a kind's is against content words. Kinds with
    fewer than ten tokens, or with one outcome alone (whose odds ratio would be zero or infinite), are left out.

    Returns:
        ``term, odds_ratio, low, high, p`` (Wald, 95 %).
    """
    import statsmodels.api as sm

    part = tokens[tokens.position > 0].sort_values(["prompt", "position"])
    failed = ~recovered(part, candidates)
    counts = failed.groupby(part.category).agg(["sum", "size"])
    told = counts[(counts["size"] >= 10) & (counts["sum"] > 0) & (counts["sum"] < counts["size"])].index
    common = [kind for kind in told if kind != "content word"]
    part = part[part.category.isin([*common, "content word"])]
    kinds = pd.get_dummies(part.category, dtype=float)
    numbers = {
        "log merge rank": np.log(part.merge_rank + 1.0),
        "distance to neighbours": part.neighbour_distance,
        "position": part.position.astype(float),
    }
    design = pd.DataFrame({name: (values - values.mean()) / values.std() for name, values in numbers.items()})
    design = sm.add_constant(pd.concat([kinds.loc[part.index, common], design], axis=1))
    error = failed[part.index].astype(float)
    model = sm.GEE(
        error, design, groups=part.prompt, family=sm.families.Binomial(), cov_struct=sm.cov_struct.Exchangeable()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # separation of a rare kind shows as a wide interval
        found = model.fit()
    bounds = np.exp(found.conf_int())
    table = pd.DataFrame({"odds_ratio": np.exp(found.params), "low": bounds[0], "high": bounds[1], "p": found.pvalues})
    return table.rename_axis("term").reset_index().query("term != 'const'").reset_index(drop=True)


def misses(tokens: pd.DataFrame, candidates: int, vocabulary: int) -> pd.DataFrame:
    """Why positions fail: ``fate`` (near miss, wrong basin), ``count, share``, and medians of rank and plateau loss."""
    failed = tokens[~recovered(tokens, candidates)]
    fates = pd.Series(
        diagnostics.near_miss(failed.rank_final, candidates, vocabulary), index=failed.index, dtype=object
    ).replace("recovered", "another token fits")
    table = (
        failed.assign(fate=fates)
        .groupby("fate")
        .agg(count=("rank_final", "size"), rank=("rank_final", "median"), plateau_loss=("loss_final", "median"))
    )
    return table.assign(share=table["count"] / max(len(failed), 1)).reset_index()


def metric_ranks(tokens: pd.DataFrame, candidates: int) -> pd.DataFrame:
    """Positions whose true token is within C of the same proxy by every metric: ``metric, recovered, of, share``."""
    rows = []
    for metric in ("l1", "l2", "cosine", "dot"):
        inside = tokens[f"rank_{metric}"] < candidates
        low, high = clustered(inside, tokens.prompt)
        rows.append({"metric": metric, "recovered": int(inside.sum()), "of": len(inside), "share": inside.mean()})
        rows[-1] |= {"low": low, "high": high, "median_rank": tokens[f"rank_{metric}"].median()}
    return pd.DataFrame(rows)


def configurations(prompts: pd.DataFrame) -> pd.DataFrame:
    """Exact match, similarity, time and candidates a token of every run that found something, a row a run.

    Only clean states. ``seconds`` (NaN where a run's configurations were timed together) and ``candidates`` are means
    over tokens of all prompts, failed ones included.
    """
    rows = []
    judged = prompts[prompts.exact_match.notna() & (prompts.channel == "clean")]
    for (layer, configuration), part in judged.groupby(["layer", "configuration"], sort=False):
        k, n = int(part.exact_match.sum()), len(part)
        low, high = wilson(k, n)
        row = {"layer": layer, "configuration": configuration, "method": part.method.iloc[0], "exact": k, "of": n}
        row |= {"share": k / n, "low": low, "high": high, "similarity": part.similarity.mean()}
        tokens = part.n_tokens.sum()
        row |= {"exact_up_to_class": int(part.exact_up_to_class.sum())}
        rows.append(
            row | {"seconds": part.seconds.sum(skipna=False) / tokens, "candidates": part.candidates.sum() / tokens}
        )
    return pd.DataFrame(rows)


BASELINE, WINDOW = "zeros 1000", 2000  # what the claims about failures are decided on: the published baseline's K and C


EXACT = ("exact", "of", "low", "high", "seconds", "similarity")


def summary(prompts: pd.DataFrame, tokens: pd.DataFrame, vocabulary: int) -> dict:
    """What :mod:`lib.paper` decides the claims from. Failures are those of the published baseline's K and C behind true
    prefixes; without that run nothing is said of them.
    """
    shown = configurations(prompts)
    exact = {
        row.configuration: {name: None if pd.isna(getattr(row, name)) else getattr(row, name) for name in EXACT}
        for row in shown.itertuples()
    }
    found = {"model": prompts.model.iloc[0], "exact": exact, "separation": _separations(tokens)}
    found |= {"online": _flagged(tokens), "cost": _costs(tokens), "failures": None}
    part, window = tokens[tokens.configuration == BASELINE], min(WINDOW, vocabulary)
    later = part[(part.steps > 0) & (part.position > 0)]
    if len(later):
        found["failures"] = _failures(later, window, vocabulary)
    return found


def _failures(later: pd.DataFrame, window: int, vocabulary: int) -> dict:
    """Who fails, how, and by which distance."""
    rates = error_rates(later, window)
    first = first_errors(later, window).set_index("category").first_errors
    return {
        "first_errors": {"function words": int(first.get("function word", 0)), "of": int(first.sum())},
        "error_rates": {row.category: [int(row.errors), int(row.of)] for row in rates.itertuples()},
        "misses": misses(later, window, vocabulary).set_index("fate")["count"].to_dict(),
        "metrics": metric_ranks(later, window).set_index("metric").share.round(4).to_dict(),
    }


def verified(tokens: pd.DataFrame) -> pd.DataFrame:
    """The rows of runs in published mode."""
    return tokens[tokens["mode"] == "verified"]


def _separations(tokens: pd.DataFrame) -> dict[str, float | None]:
    """The smallest separation of every run in published mode, over all lengths at which there are both kinds."""
    found = {}
    for name, part in verified(tokens).groupby("configuration", sort=False):
        values = separation_by_length(part).separation.dropna()
        found[name] = round(float(values.min()), 3) if len(values) else None
    return found


def _flagged(tokens: pd.DataFrame) -> dict[str, int]:
    """Failed prompts of published mode whose first fallback is at their first wrong token, and exact ones with one."""
    counts = {"failed": 0, "flagged": 0, "false": 0}
    for _, part in verified(tokens).sort_values("position").groupby(["configuration", "prompt"]):
        wrong, fell = part.position[part.found_id != part.true_id], part.position[part.fallback]
        if len(wrong):
            counts["failed"] += 1
            counts["flagged"] += int(len(fell) > 0 and fell.iloc[0] == wrong.iloc[0])
        else:
            counts["false"] += int(len(fell) > 0)
    return counts


def _costs(tokens: pd.DataFrame) -> dict[str, int]:
    """Searched tokens of the published baseline by the candidates they took, behind true prefixes: others take all."""
    part = verified(tokens)
    part = part[(part.configuration == "baseline") & (part.steps > 0)]
    part = part[at_risk(part)]
    few, everything = part.candidates <= 10, part.fallback
    return {"few": int((few & ~everything).sum()), "all": int(everything.sum()), "of": len(part)}
