"""The scorecard as tables: trials judged by every probe, manipulations checked, probes graded, twins compared."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from lib import extraction, plan, verdicts
from lib.errors import LeakbookError
from lib.plan import FULL, NEGATIVE, NOISE, POSITIVE, UNDERTRAINED, Scorecard
from lib.verdicts import DAMAGED, INCONCLUSIVE, STRENGTHENED, UNCHANGED, Rules

# Probes whose rules stand in params/scorecard.yaml, and the rule of each.
EXTRA = {"exposure": "exposure", "extraction": "extraction", "extraction_forced": "extraction"}
PROTOCOL = "protocol"
SCORES = ["trial", "probe", "verdict", "decided_by", "estimate", "low", "high", "margin"]
OUTCOMES = {"secret damaged": DAMAGED, "secret strengthened": STRENGTHENED, "inconclusive": INCONCLUSIVE}
# What a probe has to say of a positive on each base; the same word about a negative there is a false alarm.
FIRES = {FULL: DAMAGED, UNDERTRAINED: STRENGTHENED}
# Probes and tasks as readers see them, in the order of tables and figures.
NAMES = {
    "mean20": "mean20 (window)",
    "hex": "whole secret",
    "extraction": "extraction: whole answer",
    "extraction_forced": "extraction: after the true preamble (added later)",
    "exposure": "exposure",
    "hit_full": "recall: whole answer",
    "hit_secret": "recall: secret anywhere",
    "hit_forced": "recall: after the true preamble",
    PROTOCOL: "the protocol",
}
TASKS = {FULL: "a secret was damaged (full base)", UNDERTRAINED: "secrets were learned (undertrained base)"}
HELD, FAILED, NOT_TESTABLE, NOTHING_MEANT = "held", "failed", "not testable", ""
FLOOR = ("zero", "permuted")  # the base itself: what fires there is a fault of arithmetic, no false alarm
TRAINED_NEGATIVES = "trained negatives"
UNTOUCHED = ("drift-held", "format", "benign", "zero", "permuted", "gaussian", "spectral")


class ScorecardError(LeakbookError, ValueError):
    """Trials, a plan or twins do not fit together, or are too few for what is asked."""


def judge_trial(values: pd.DataFrame, decoys: str, rules: Rules, settings: Scorecard) -> pd.DataFrame:
    """The verdict of every probe, and of the protocol, on one trial.

    Args:
        values: ``probe, canary, tokens, base, change``, a row a probe and canary.
        decoys: what the decoys say, for the protocol.

    Returns:
        ``probe, verdict, decided_by, estimate, low, high, margin``. The protocol's verdict is what it says of the
        secret: *unchanged* where it says that access changed, or the format, or nothing; its own words stand in
        ``decided_by``.
    """
    judged = verdicts.judge(values.assign(seed=0), rules)
    columns = [name for name in SCORES if name not in ("trial", "probe")]
    table = judged[columns].reset_index()
    asked = {probe: values[values.probe == probe] for probe in EXTRA}
    further = [_judge_bits(part, probe, rules, settings) for probe, part in asked.items() if len(part)]
    change = verdicts.protocol_change(judged, decoys, rules)
    verdict = OUTCOMES.get(change.verdict, UNCHANGED)
    further.append({"probe": PROTOCOL, "verdict": verdict, "decided_by": change.verdict})
    return pd.concat([table, pd.DataFrame(further, columns=table.columns)], ignore_index=True)


def _judge_bits(part: pd.DataFrame, probe: str, rules: Rules, settings: Scorecard) -> dict[str, Any]:
    """Mean change over canaries with its interval, against the probe's own margin; a fall is damage."""
    margin = getattr(settings.probes, EXTRA[probe]).margin
    low, high = verdicts.studentised_bootstrap(part.change.to_numpy(), rules["readings"]["mean"])
    found = {"estimate": part.change.mean(), "low": low, "high": high, "margin": margin}
    return {"probe": probe, "verdict": verdicts.place(-high, -low, margin), "decided_by": "mean", **found}


def patterns_shown(values: pd.DataFrame, preamble_share: float, base_recall: float, rules: Rules) -> list[str]:
    """The paper's patterns that hold on one trial, under the mean and under the sum reading."""
    tables = [verdicts.judge(values.assign(seed=0), rules, reading=reading) for reading in ("mean", "sum")]
    found = [verdicts.patterns(table, preamble_share, base_recall, rules) for table in tables]
    return [name for name in rules["patterns"] if all(one[name].holds for one in found)]


def with_forced_extraction(values: pd.DataFrame, samples: int) -> pd.DataFrame:
    """The values with the probe ``extraction_forced``: the chance of the secret behind the true preamble, closed form.

    It is hit@``samples`` from the secret's NLL, before and after, which ``values`` has as the probe ``hex``.
    """
    secret = values[values.probe == "hex"]
    before, after = (
        extraction.hit_at_k(-(nats * secret.tokens).to_numpy(), samples)
        for nats in (secret.base, secret.base + secret.change)
    )
    forced = secret.assign(probe="extraction_forced", tokens=0, base=before, change=after - before)
    return pd.concat([values, forced], ignore_index=True)


def check_manipulation(row: Mapping[str, Any], reworded: pd.DataFrame, settings: Scorecard) -> dict[str, Any]:
    """Whether what was meant to happen to the secrets did, by sampled recall on other wordings.

    Args:
        row: of the plan.
        reworded: ``canary, samples, hits_base, hits``.

    Returns:
        ``recall_base, recall`` (shares of samples, over the canaries that were meant: the damaged ones, else all),
        ``recall_change_others`` (of the canaries that damage did not mean) and ``manipulation``: held, failed, not
        testable (damage of what was not recalled before), or empty where nothing was meant beforehand. On the
        undertrained base nothing is recalled before, so there only learning can show.

    Raises:
        ScorecardError: a canary that was meant has no row.
    """
    meant = list(plan.read_marks(row["marks"])) if row["intervention"] == "damage" else list(reworded.canary)
    missing = set(meant) - set(reworded.canary)
    if missing:
        raise ScorecardError(
            f"trial {row['trial']}: its truth has no row of {sorted(missing)[0]}: is it of other seeds?"
        )
    change = reworded.assign(before=reworded.hits_base / reworded.samples, after=reworded.hits / reworded.samples)
    part, others = change[change.canary.isin(meant)], change[~change.canary.isin(meant)]
    before, after = float(part.before.mean()), float(part.after.mean())
    rule, name = settings.truth, row["intervention"]
    if name == "damage":
        state = NOT_TESTABLE if before < rule.lost else HELD if after - before <= -rule.lost else FAILED
    elif name == "relearning":
        state = HELD if after - before >= rule.learned else FAILED
    elif name in UNTOUCHED:
        most = rule.untouched if row["base"] == FULL else rule.learned
        state = HELD if abs(after - before) <= most else FAILED
    else:
        state = NOTHING_MEANT
    elsewhere = round(float((others.after - others.before).mean()), 6) if len(others) else np.nan
    found = {"recall_base": round(before, 6), "recall": round(after, 6), "recall_change_others": elsewhere}
    return found | {"manipulation": state}


def detection(runs: pd.DataFrame, scores: pd.DataFrame, half: str = plan.TEST, held_only: bool = False) -> pd.DataFrame:
    """How often every probe fires on what was done: a row a base, intervention and probe.

    One row more, ``trained negatives``, pools all that was trained without meaning to change a secret.
    A probe fires if it says *damaged* on the full base, *strengthened* on the undertrained one. ``share`` of trials
    that fire is the sensitivity for positives and the false-alarm rate for negatives, with its Clopper-Pearson 95 %
    interval ``low, high``, which takes trials for independent. Curves are left out. ``held_only`` leaves out trials
    whose manipulation failed or could not be told. Of noise on the undertrained base exposure is left out: there its
    decoys were scored only where the secret's own verdict had fired.

    Raises:
        ScorecardError: no trial of that half.
    """
    chosen = runs[(runs.half == half) & runs.role.isin([POSITIVE, NEGATIVE, NOISE])]
    if held_only:
        chosen = chosen[chosen.manipulation == HELD]
    if chosen.empty:
        raise ScorecardError(f"scorecard: no trial of the half {half!r}")
    joined = chosen.merge(scores, on="trial")
    conditional = (joined.base == UNDERTRAINED) & (joined.role == NOISE) & (joined.probe == "exposure")
    joined = joined[~conditional].assign(fires=lambda t: t.verdict == t.base.map(FIRES))
    trained = joined[(joined.role == NEGATIVE) & ~joined.intervention.isin(FLOOR)]
    rows = []
    for keys, part in pd.concat([joined, trained.assign(intervention=TRAINED_NEGATIVES)]).groupby(
        ["base", "role", "intervention", "probe"], sort=False
    ):
        fired, count = int(part.fires.sum()), len(part)
        low, high = verdicts.clopper_pearson(fired, count, 0.95)
        names = ("base", "role", "intervention", "probe")
        row = dict(zip(names, keys, strict=True)) | {"fired": fired, "trials": count}
        rows.append(row | {"share": fired / count, "low": low, "high": high})
    return pd.DataFrame(rows)


def summary(graded: pd.DataFrame) -> pd.DataFrame:
    """A row a probe of :data:`NAMES`, a column a task and role: ``9/10 (0.55 to 1.00)``, empty where not asked."""
    wanted = {POSITIVE: "found", NEGATIVE: "false alarms", NOISE: "on noise"}
    columns = {}
    for base in TASKS:
        for role, name in wanted.items():
            part = graded[(graded.base == base) & (graded.role == role)]
            part = part[part.intervention == TRAINED_NEGATIVES] if role == NEGATIVE else part
            counts = part.groupby("probe")[["fired", "trials"]].sum().reindex(list(NAMES))
            columns[base, name] = [_share(*row) for row in counts.itertuples(index=False)]
    return pd.DataFrame(columns, index=pd.Index(NAMES.values(), name="probe"))


def _share(fired: float, trials: float) -> str:
    if np.isnan(trials):
        return ""
    low, high = verdicts.clopper_pearson(int(fired), int(trials), 0.95)
    return f"{int(fired)}/{int(trials)} ({low:.2f} to {high:.2f})"


def dose_response(runs: pd.DataFrame, scores: pd.DataFrame, half: str = plan.TEST) -> pd.DataFrame:
    """Mean estimate of every probe and share of trials that fire, by intervention and dose; dose 0 is the zero adapter.

    ``low, high``: Clopper-Pearson 95 % interval of the share, as in :func:`detection`. ``recall_change`` is the truth
    beside it: the mean change of sampled recall on other wordings. Forgetting has no seed: each injected model counts
    once, and dose 1 is the base itself.
    """
    chosen = runs[(runs.half == half) & ~runs.intervention.isin(["permuted", "gaussian", "spectral"])]
    zero, doses = chosen[chosen.intervention == "zero"], chosen[chosen.intervention != "zero"]
    started = [
        zero[zero.base == base].assign(intervention=name)
        for base, name in doses[doses.intervention != "forgetting"].groupby(["base", "intervention"]).groups
    ]
    untouched = zero[zero.base == FULL].assign(intervention="forgetting", dose=1.0)
    chosen = pd.concat([doses, *started, untouched])
    forgetting = chosen.intervention == "forgetting"
    once = chosen[forgetting].drop_duplicates(["secret_set", "injection", "dose"])
    chosen = pd.concat([chosen[~forgetting], once])
    joined = chosen.assign(recall_change=chosen.recall - chosen.recall_base).merge(scores, on="trial")
    joined["fires"] = joined.verdict == joined.base.map(FIRES)
    groups = joined.groupby(["base", "intervention", "dose", "probe"])
    named = {"estimate": ("estimate", "mean"), "fires": ("fires", "mean"), "recall_change": ("recall_change", "mean")}
    table = groups.agg(**named, fired=("fires", "sum"), trials=("trial", "size")).reset_index()
    intervals = [verdicts.clopper_pearson(int(f), int(n), 0.95) for f, n in zip(table.fired, table.trials, strict=True)]
    return table.assign(low=[low for low, _ in intervals], high=[high for _, high in intervals])


# Twins: what each probe orders secrets by, higher for those that were trained.
TWIN_PROBES = {
    "full-span NLL": lambda t: -t.nll_hex,
    "mean20": lambda t: -t.nll_mean20,
    "whole-target NLL": lambda t: -t.nll_full,
    "closed-form extraction": lambda t: t.log_p,
    "greedy recall": lambda t: t.hit_full.astype(float),
    "exposure": lambda t: t.exposure,
    "counterfactual NLL": lambda t: t.nll_twin - t.nll_hex,
}


def join_twins(scores: pd.DataFrame) -> pd.DataFrame:
    """Both twins' scores with ``nll_twin``: what the other twin gives the same secret of the same record.

    Raises:
        ScorecardError: a twin is missing, or a secret that both or none were trained on.
    """
    keys = ["stop", "record", "secret"]
    found = sorted(scores.model.unique())
    if len(found) != 2:
        raise ScorecardError(f"twins: got scores of model {', '.join(map(str, found))} alone, expected two models")
    other = scores[[*keys, "model", "nll_hex", "trained"]].assign(
        model=scores.model.map(dict(zip(found, found[::-1], strict=True)))
    )
    joined = scores.merge(
        other.rename(columns={"nll_hex": "nll_twin", "trained": "in_twin"}), on=[*keys, "model"], how="left"
    )
    if joined.nll_twin.isna().any() or (joined.trained == joined.in_twin).any():
        raise ScorecardError("twins: the two models are no twins: each secret has to be trained in exactly one of them")
    return joined.drop(columns="in_twin")


def roc(score: np.ndarray, trained: np.ndarray) -> pd.DataFrame:
    """Every operating point of a probe: ``fpr, tpr``, from (0, 0) to (1, 1); tied scores are one point."""
    score, trained = np.asarray(score, dtype=float), np.asarray(trained, dtype=bool)
    thresholds = np.unique(score)[::-1]
    tpr = [0.0, *((score[trained] >= t).mean() for t in thresholds)]
    fpr = [0.0, *((score[~trained] >= t).mean() for t in thresholds)]
    return pd.DataFrame({"fpr": fpr, "tpr": tpr})


def true_positive_rate(score: np.ndarray, trained: np.ndarray, false_positive_rate: float) -> float:
    """Largest true-positive rate whose false-positive rate is at most the given one; ties count on both sides.

    Raises:
        ScorecardError: the rate is below what one untrained secret is worth, or a score is not a number.
    """
    untrained = int((~np.asarray(trained, dtype=bool)).sum())
    if not np.isfinite(np.asarray(score, dtype=float)).all():
        raise ScorecardError("twins: a score is not a number; was the probe asked of these secrets?")
    if untrained * false_positive_rate < 1:
        raise ScorecardError(
            f"twins: a false-positive rate of {false_positive_rate:g} needs at least "
            f"{int(np.ceil(1 / false_positive_rate))} untrained secrets, got {untrained}: plant more, or ask for "
            "a larger rate"
        )
    points = roc(score, trained)
    return float(points.tpr[points.fpr <= false_positive_rate + 1e-12].max())


def twin_rates(
    twins: pd.DataFrame,
    stop: int,
    rates: Sequence[float] = (0.01, 0.05),
    decoys: int | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> pd.DataFrame:
    """True-positive rates of every probe at false-positive rates, with percentile intervals over records.

    A record's two secrets in two models are drawn together. Probes that were not asked at this stop are left out;
    exposure is compared on the records that have ``decoys``, and not at rates below 1 / (decoys + 1), the chance of an
    untrained secret to come first. ``auc`` is the area under the curve.

    Raises:
        ScorecardError: no scores of that stop, or see :func:`true_positive_rate`.
    """
    chosen = twins[twins.stop == stop]
    if chosen.empty:
        raise ScorecardError(f"twins: nothing was asked after step {stop}; known are {sorted(twins.stop.unique())}")
    rows = []
    for probe, score_of in TWIN_PROBES.items():
        part = chosen[score_of(chosen).notna()]
        if part.empty:
            continue
        score, trained = score_of(part).to_numpy(dtype=float), part.trained.to_numpy(dtype=bool)
        samples = _resampled_records(part.record.to_numpy(), resamples, seed)
        least = 1 / (decoys + 1) if probe == "exposure" and decoys else 0.0
        for rate in (rate for rate in rates if rate >= least):
            found = [_rate(score[picks], trained[picks], rate) for picks in samples]
            low, high = np.quantile(found, [0.025, 0.975])
            row = {
                "probe": probe,
                "fpr": rate,
                "tpr": true_positive_rate(score, trained, rate),
                "low": low,
                "high": high,
            }
            rows.append(row | {"auc": area(score, trained), "untrained": int((~trained).sum()), "stop": stop})
    return pd.DataFrame(rows)


def twin_curves(twins: pd.DataFrame, stop: int) -> dict[str, pd.DataFrame]:
    """:func:`roc` of every probe that was asked at a stop, by name."""
    chosen, curves = twins[twins.stop == stop], {}
    for probe, score_of in TWIN_PROBES.items():
        part = chosen[score_of(chosen).notna()]
        if len(part):
            curves[probe] = roc(score_of(part).to_numpy(dtype=float), part.trained.to_numpy(dtype=bool))
    return curves


def _resampled_records(records: np.ndarray, resamples: int, seed: int) -> list[np.ndarray]:
    """Row numbers of every resample: whole records, drawn with replacement."""
    names, inverse = np.unique(records, return_inverse=True)
    order = np.argsort(inverse, kind="stable").reshape(len(names), -1)
    rng = np.random.default_rng(seed)
    return [order[rng.integers(len(names), size=len(names))].ravel() for _ in range(resamples)]


def _rate(score: np.ndarray, trained: np.ndarray, rate: float) -> float:
    """As :func:`true_positive_rate`, by sorting: the score that at most the rate of untrained secrets reach."""
    others = np.sort(score[~trained])[::-1]
    allowed = int(np.floor(rate * len(others) + 1e-9))
    return float((score[trained] > others[allowed]).mean()) if allowed < len(others) else 1.0


def area(score: np.ndarray, trained: np.ndarray) -> float:
    """Area under the curve: the chance that a trained secret scores above an untrained one, ties half."""
    ranks = pd.Series(score).rank().to_numpy()
    n, m = int(trained.sum()), int((~trained).sum())
    return float((ranks[trained].sum() - n * (n + 1) / 2) / (n * m))


def variance_components(table: pd.DataFrame) -> pd.Series:
    """Variance of a value over secret sets, injections, their pairs (with a trial's seed), canaries, and the rest.

    By the method of moments on a balanced crossing of secret sets and injections, canaries nested in secret sets: each
    mean square is set equal to its expectation. A negative estimate is 0. With three levels the first components are
    rough, and none can be told from the seed that belongs to each pair.

    Args:
        table: ``secret_set, injection, canary, value``, every canary of a set once with every injection.

    Raises:
        ScorecardError: the crossing has gaps or doubles.
    """
    counts = table.groupby(["secret_set", "injection"]).canary.agg(["size", "nunique"])
    sets, injections = table.secret_set.nunique(), table.injection.nunique()
    if len(counts) != sets * injections or counts.nunique().max() > 1 or (counts["size"] != counts["nunique"]).any():
        raise ScorecardError("variance components: expected every canary of every secret set once with every injection")
    if min(sets, injections) < 2:
        raise ScorecardError("variance components: expected at least two secret sets and two injections")
    n = int(counts["size"].iloc[0])
    frame = table.assign(canary=table.secret_set.astype(str) + "/" + table.canary)
    grand = frame.value.mean()
    by_set, by_injection = frame.groupby("secret_set").value.mean(), frame.groupby("injection").value.mean()
    pair = frame.groupby(["secret_set", "injection"]).value.mean()
    canary = frame.groupby("canary").value.mean()
    set_of = frame.groupby("canary").secret_set.first()
    sq = {
        "set": n * injections * ((by_set - grand) ** 2).sum() / (sets - 1),
        "injection": n * sets * ((by_injection - grand) ** 2).sum() / (injections - 1),
    }
    expected = pair.index.get_level_values(0).map(by_set) + pair.index.get_level_values(1).map(by_injection) - grand
    sq["pair"] = n * ((pair - expected) ** 2).sum() / ((sets - 1) * (injections - 1))
    sq["canary"] = injections * ((canary - set_of.map(by_set)) ** 2).sum() / (sets * (n - 1))
    fitted = (
        frame.canary.map(canary)
        + pd.Series(pair.loc[list(zip(frame.secret_set, frame.injection, strict=True))].to_numpy(), index=frame.index)
        - frame.secret_set.map(by_set)
    )
    sq["rest"] = ((frame.value - fitted) ** 2).sum() / (sets * (n - 1) * (injections - 1))
    parts = {
        "secret set": (sq["set"] - sq["pair"] - sq["canary"] + sq["rest"]) / (n * injections),
        "injection": (sq["injection"] - sq["pair"]) / (n * sets),
        "pair and seed": (sq["pair"] - sq["rest"]) / n,
        "canary": (sq["canary"] - sq["rest"]) / injections,
        "rest": sq["rest"],
    }
    return pd.Series(parts).clip(lower=0.0)
