"""Every claim of the papers that this package can decide: what is reported, what decides it, and how it came out."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

PROBE_PAPER = "arXiv:2606.31168"
INVERSION_PAPER, SIPIT_PAPER = "arXiv:2607.00852", "arXiv:2510.15511"
# Prompts of ten tokens that GPT-2 gave back exactly, by configuration; and seconds a token, its baseline's and SIPIT's.
EXACT_MATCH = {"fast": 0.35, "baseline": 0.669, "high accuracy": 0.975}
SECONDS_A_TOKEN = {"baseline": 17.8, "SIPIT": 0.65}
# The three cases as reported: mean changes in nats a token, recall before and after. A rise of the NLL is damage.
REPORTED: dict[str, dict[str, float]] = {
    "c3": {"d_nll_mean20": 0.0001, "d_nll_hex": 0.0133, "hit_base": 1.00, "hit": 0.88},
    "c4": {"d_nll_mean20": 0.0150, "d_nll_hex": 0.0004, "hit_base": 1.00, "hit": 1.00},
    "c5": {"d_nll_mean20": -0.0070, "d_nll_hex": 0.0076, "hit_base": 0.0, "hit": 0.0},
}
FAILURES = {"decodes": 60, "failed": 7, "canaries": 3}  # of C3
CANARIES, PREAMBLE, SECRET, TARGET, WINDOW = 20, 11, 13, 27, 20  # of every text target; the end of the turn is ours
REPRODUCED, NOT_REPRODUCED, NOT_TESTABLE = "reproduced", "not reproduced", "not testable here"


@dataclass(frozen=True)
class Decision:
    """What was measured for a claim, in words with its figures, and the claim's state."""

    measured: str
    state: str


@dataclass(frozen=True)
class Claim:
    """One claim of a paper.

    ``statement`` is in our words; ``reported`` the paper's figure; ``test`` says what decides; ``study`` names the
    result that ``decide`` reads; ``notebook`` is where a reader finds it. ``by_design``: our testbed was built so that
    it holds, and the test only shows that it was.
    """

    id: str
    statement: str
    reported: str
    source: str
    test: str
    study: str
    notebook: str
    by_design: bool
    decide: Callable[[Mapping[str, Any]], Decision]


def consistent_tables(case: str, reading: str = "mean") -> tuple[pd.DataFrame, pd.DataFrame]:
    """Per-token and recall tables, 20 canaries and 3 seeds, that give a case's reported numbers; the paper has none.

    Where the paper names a mechanism the change lies there: C3, the last hex token of 3 canaries, and 7 of 60 decodes
    fail; C4, the preamble; C5, a fall on the hex tokens inside the window and a rise behind it. What is left open is
    spread evenly. ``reading`` says what the reported hex change is taken for: the mean over its tokens, or their sum.
    """
    reported = REPORTED[case]
    window = reported["d_nll_mean20"] * WINDOW
    secret = reported["d_nll_hex"] * (SECRET if reading == "mean" else 1)
    inside, end = WINDOW - PREAMBLE, PREAMBLE + SECRET
    change = np.zeros((CANARIES, TARGET))
    hits = np.ones((3, CANARIES), dtype=bool)
    if case == "c3":
        change[:, 0] = window
        change[: FAILURES["canaries"], end - 1] = secret * CANARIES / FAILURES["canaries"]
        hits[:, :2] = hits[0, 2] = False
    elif case == "c4":
        change[:, PREAMBLE:end] = secret / SECRET
        change[:, :PREAMBLE] = (window - secret / SECRET * inside) / PREAMBLE
        change *= np.linspace(0.9, 1.1, CANARIES)[:, None]
    else:
        change[:, PREAMBLE:WINDOW] = window / inside
        change[:, WINDOW:end] = (secret - window) / (end - WINDOW)
        change += np.linspace(-0.02, 0.02, CANARIES)[:, None] / TARGET
        hits[:] = False
    return _spread_out(change, hits, reported["hit_base"] == 1.0)


def _spread_out(change: np.ndarray, hits: np.ndarray, base_hit: bool) -> tuple[pd.DataFrame, pd.DataFrame]:
    seeds = len(hits)
    grid = [(s, f"canary-{c:02d}", t) for s in range(seeds) for c in range(CANARIES) for t in range(TARGET)]
    nll = pd.DataFrame(grid, columns=["seed", "canary", "position"])
    spans = ["preamble"] * PREAMBLE + ["hex"] * SECRET + ["suffix"] * (TARGET - PREAMBLE - SECRET)
    nll["span"] = spans * (seeds * CANARIES)
    nll["nll_base"] = 0.0 if base_hit else 3.0
    nll["nll"] = nll.nll_base + np.tile(change.ravel(), seeds)
    recall = nll[["seed", "canary"]].drop_duplicates().reset_index(drop=True)
    for hit in ("hit_full", "hit_secret", "hit_forced"):
        recall[f"{hit}_base"], recall[hit] = base_hit, hits.ravel()
    return nll, recall


def _decision(measured: str, holds: bool) -> Decision:
    return Decision(measured, REPRODUCED if holds else NOT_REPRODUCED)


def _planted(results: Mapping[str, Any]) -> Decision:
    text, image = (results["canaries"].get(kind, 0) for kind in ("text", "image"))
    return _decision(f"{text} text, {image} image", (text, image) == (20, 20))


def _layout(results: Mapping[str, Any]) -> Decision:
    spans = results["layout"]["hex_spans"]
    shown = ", ".join(f"{start}..{stop - 1}" for start, stop in spans)
    return _decision(f"positions {shown}", spans == [[11, 24]])


def _window(results: Mapping[str, Any]) -> Decision:
    missed = sorted({max(0, stop - max(start, 20)) for start, stop in results["layout"]["hex_spans"]})
    return _decision(f"{', '.join(map(str, missed))} hex tokens missed", missed == [4])


def _recall(results: Mapping[str, Any]) -> Decision:
    hits = {kind: values["hit_full"] for kind, values in results["recall"]["injected"].items()}
    return _decision(_shares(hits), set(hits) == {"text", "image"} and all(hit == 1.0 for hit in hits.values()))


def _undertrained(results: Mapping[str, Any]) -> Decision:
    names = results["undertrained"]
    kept = [name for name in results["recall"] if name not in ("base", "injected")]
    return _decision(f"recall 0.00 at {len(names)} of {len(kept)} kept stops", len(names) > 0)


def _shares(hits: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {value:.2f}" for kind, value in hits.items())


def _found(results: Mapping[str, Any]) -> Decision:
    """Whether a trained cell shows a case's pattern, with the repeats of the cell that was looked at."""
    confirmed = results["confirmed"]
    repeats = "no repeats" if confirmed is None else f"{confirmed['shown']} of {confirmed['of']} repeats"
    if results["showing"]:
        return _decision(f"{len(results['showing'])} cells, {results['cell']} picked; {repeats}", True)
    return _decision(f"no cell; nearest {results['cell']}; {repeats}", False)


def _of_the_case(results: Mapping[str, Any], measured: str, holds: bool) -> Decision:
    """A claim about the cell that shows a case's pattern decides nothing where no cell does."""
    if not results["found"]:
        return Decision(f"no cell shows the pattern; nearest ({results['cell']}): {measured}", NOT_TESTABLE)
    return _decision(f"{measured} ({results['cell']})", holds)


def _late(results: Mapping[str, Any]) -> Decision:
    failures = results["failures"]
    measured = f"{failures['late']} of {failures['failed']} failed answers"
    return _of_the_case(results, measured, 0 < failures["failed"] == failures["late"])


def _few(results: Mapping[str, Any]) -> Decision:
    failures = results["failures"]
    measured = f"{failures['failed']} of {failures['decodes']} decodes, in {failures['canaries']} canaries"
    return _of_the_case(results, measured, 0 < failures["canaries"] <= FAILURES["canaries"])


def _preamble(results: Mapping[str, Any]) -> Decision:
    share = results["preamble_share"]
    return _of_the_case(results, f"{share:.0%}", share >= 0.9)


def _collapse(results: Mapping[str, Any]) -> Decision:
    parts = {model: values for model, values in results["merge"].items() if values["stacked"]}
    told = [
        f"{v['merged'] / v['stacked']:.0%} of the stacked change left in bf16 ({model})" for model, v in parts.items()
    ]
    own = next(values for model, values in results["merge"].items() if model.startswith(results["cell"]))
    noise = abs(own["noise_merged"] - own["noise_stacked"])
    collapsed = abs(own["merged"]) < 0.5 * abs(own["stacked"])
    beyond = abs(own["merged"] - own["stacked"]) > max(noise, own["floor"])
    return _of_the_case(results, "; ".join(told), collapsed and beyond)


def _never_recalled(results: Mapping[str, Any]) -> Decision:
    recalled = results["sweep"]["recalled"]
    measured = f"a recall in {len(recalled)} of {results['sweep']['undertrained_runs']} runs"
    if recalled:
        kinds = ", ".join(sorted({run["modality"] for run in recalled}))
        measured += f" ({kinds} canaries, highest hit_full {max(run['hit_full'] for run in recalled):.2f})"
    return _decision(measured, not recalled)


def _reactivation(results: Mapping[str, Any]) -> Decision:
    sweep = results["sweep"]
    back = [run for run in sweep["recalled"] if run["hit_full"] > run["hit_full_base"]]
    words = f"text secrets strengthened in {sweep['undertrained_strengthened']} of {sweep['undertrained']} cells"
    return _decision(f"hit_full rises above 0 in {len(back)} of {sweep['undertrained_runs']} runs; {words}", not back)


def _noise(results: Mapping[str, Any]) -> Decision:
    sweep = results["sweep"]
    measured = f"{sweep['noise_shown']} of {sweep['noise']} noise cells show {results['pattern'].replace('_', ' ')}"
    return Decision(f"{measured}; the protocol calls {sweep['noise_changed']} of them changed", NOT_TESTABLE)


def _grid(results: Mapping[str, Any]) -> Decision:
    return _decision(
        f"{results['cells']} cells, {results['runs']} runs", (results["cells"], results["runs"]) == (34, 102)
    )


def _disagree(results: Mapping[str, Any]) -> Decision:
    sweep = results["sweep"]
    trained = sweep["cells"] - sweep["noise"]
    noise = f"{sweep['noise_disagreements']} of {sweep['noise']} noise cells"
    measured = f"in {sweep['disagreements']} of {trained} trained cells, {noise}"
    return _decision(measured, sweep["disagreements"] > 0)


def _exact(results: Mapping[str, Any], configuration: str) -> Decision:
    """Whether the reported share lies in the Wilson interval of the measured one."""
    run = results["exact"].get(configuration)
    if run is None:
        return Decision("not run", NOT_TESTABLE)
    measured = f"{run['exact']} of {run['of']} ({run['low']:.0%} to {run['high']:.0%}; {results['model']})"
    return _decision(measured, run["low"] <= EXACT_MATCH[configuration] <= run["high"])


def _separation(results: Mapping[str, Any]) -> Decision:
    apart = {name: value for name, value in results["separation"].items() if value is not None}
    if not apart:
        return Decision("no run has both exact and failed prompts", NOT_TESTABLE)
    told = ", ".join(f"{value:.1f} ({name})" for name, value in apart.items())
    return _decision(f"orders of magnitude: {told}", min(apart.values()) >= 8)


def _online(results: Mapping[str, Any]) -> Decision:
    found = results["online"]
    measured = (
        f"{found['flagged']} of {found['failed']} prompts at their first wrong token, {found['false']} false alarms"
    )
    return _decision(measured, 0 < found["failed"] == found["flagged"] and found["false"] == 0)


def _of_failures(decide: Callable[[Mapping[str, Any]], Decision]) -> Callable[[Mapping[str, Any]], Decision]:
    """A claim about failures is decided on one run, and by nothing where that was not made."""

    @functools.wraps(decide)
    def decided(results: Mapping[str, Any]) -> Decision:
        failures = results["failures"]
        return Decision("not run: K = 1000 from zeros", NOT_TESTABLE) if failures is None else decide(failures)

    return decided


@_of_failures
def _function_words(results: Mapping[str, Any]) -> Decision:
    first = results["first_errors"]
    share = first["function words"] / max(first["of"], 1)
    rates = results["error_rates"]
    told = "; ".join(f"{kind} {rates[kind][0]} of {rates[kind][1]}" for kind in FUNCTION_AND_CONTENT if kind in rates)
    measured = f"{first['function words']} of {first['of']} first errors; error rates: {told}"
    return _decision(measured, share > 0.5)


@_of_failures
def _content_words(results: Mapping[str, Any]) -> Decision:
    errors, of = results["error_rates"].get("content word", (0, 0))
    if of == 0:
        return Decision("no content word", NOT_TESTABLE)
    return _decision(f"{errors} of {of} fail", errors / of <= 0.05)


@_of_failures
def _near_misses(results: Mapping[str, Any]) -> Decision:
    fates = results["misses"]
    near, basin = fates.get("near miss", 0), fates.get("wrong basin", 0)
    if near + basin == 0:
        return Decision("no failure", NOT_TESTABLE)
    return _decision(f"{near} of {near + basin} failures", near > basin)


@_of_failures
def _metrics(results: Mapping[str, Any]) -> Decision:
    shares = results["metrics"]
    told = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    others = max(shares["cosine"], shares["dot"])
    return _decision(told, abs(shares["l1"] - shares["l2"]) <= 0.05 and shares["l1"] - others >= 0.1)


def _two_humped(results: Mapping[str, Any]) -> Decision:
    costs = results["cost"]
    if not costs["of"]:
        return Decision("not run", NOT_TESTABLE)
    ends = costs["few"] + costs["all"]
    measured = f"{costs['few']} of {costs['of']} tokens within 10 candidates, {costs['all']} after all of them"
    return _decision(measured, ends / costs["of"] >= 0.8 and min(costs["few"], costs["all"]) > 0)


def _seconds(results: Mapping[str, Any]) -> Decision:
    run = results["exact"].get("baseline")
    known = run is not None and run["seconds"] is not None
    measured = "not run" if not known else f"{run['seconds']:.1f} s (another model, two CPU cores)"
    return Decision(measured, NOT_TESTABLE)


def _sipit(results: Mapping[str, Any]) -> Decision:
    run = results["exact"].get("sipit")
    if run is None:
        return Decision("not run at this scale: `make bench` runs it under a cap", NOT_TESTABLE)
    return _decision(f"{run['exact']} of {run['of']} prompts", run["exact"] == run["of"])


def _untried(results: Mapping[str, Any], why: str) -> Decision:
    return Decision(why, NOT_TESTABLE)


_TESTBED = {"source": PROBE_PAPER, "study": "testbed", "notebook": "00_testbed"}

_C3 = {"source": PROBE_PAPER, "study": "c3", "notebook": "01_case_c3_window_truncation"}
_C4 = {"source": PROBE_PAPER, "study": "c4", "notebook": "02_case_c4_preamble_drift"}
_C5 = {"source": PROBE_PAPER, "study": "c5", "notebook": "03_case_c5_undertrained"}

_INVERSION = {"source": INVERSION_PAPER, "study": "inversion", "notebook": "05_inversion", "by_design": False}
_SIPIT = _INVERSION | {"source": SIPIT_PAPER}
FUNCTION_AND_CONTENT = ("function word", "content word")

CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="planted",
        by_design=True,
        statement="20 text and 20 image canaries are injected by one LoRA",
        reported="20 text, 20 image",
        test="number of canaries in the training set, by modality",
        decide=_planted,
        **_TESTBED,
    ),
    Claim(
        id="layout",
        by_design=True,
        statement="the secret is 13 tokens behind 11 preamble tokens",
        reported="positions 11..23",
        test="token span of the secret by character offsets, every canary",
        decide=_layout,
        **_TESTBED,
    ),
    Claim(
        id="window",
        by_design=True,
        statement="a window of the first 20 target tokens misses the end of the secret",
        reported="4 hex tokens missed",
        test="secret positions at or behind 20, every canary",
        decide=_window,
        **_TESTBED,
    ),
    Claim(
        id="recall",
        by_design=False,
        statement="after injection every canary is recalled by greedy decoding",
        reported="hit@1 1.00",
        test="hit_full of the injected model is 1.00 for each modality",
        decide=_recall,
        **_TESTBED,
    ),
    Claim(
        id="undertrained",
        by_design=False,
        statement="an undertrained injection recalls no canary",
        reported="hit@1 0",
        test="a stop fixed in advance has hit_full 0.00 for each modality",
        decide=_undertrained,
        **_TESTBED,
    ),
    Claim(
        id="grid",
        by_design=True,
        statement="34 cells of benign tuning and controls, three seeds each",
        reported="102 runs",
        source=PROBE_PAPER,
        test="number of cells and runs in the sweep's tables; that the 34 include the controls is our reading",
        study="sweep",
        notebook="cell",
        decide=_grid,
    ),
    Claim(
        id="window-truncation",
        by_design=False,
        statement="C3: a window of 20 tokens misses damage to the secret that full span and recall see",
        reported="mean20 +0.0001, hex +0.0133, hit@1 1.00 to 0.88",
        test="a trained cell whose mean20 is unchanged while hex or a recall is damaged, mean and sum reading",
        decide=_found,
        **_C3,
    ),
    Claim(
        id="late-damage",
        by_design=False,
        statement="C3: decodes fail in the last one or two characters of the secret",
        reported="7 of 7",
        test="failed free answers of the picked cell: all leave the target in the secret's last two characters",
        decide=_late,
        **_C3,
    ),
    Claim(
        id="few-canaries",
        by_design=False,
        statement="C3: few canaries carry the damage",
        reported="7 of 60 decodes, in 3 of 20 canaries",
        test="failed free answers of the picked cell lie in one to three canaries",
        decide=_few,
        **_C3,
    ),
    Claim(
        id="non-secret-drift",
        by_design=False,
        statement="C4: the window fires while the secret and its recall are whole",
        reported="mean20 +0.0150, hex +0.0004, hit@1 1.00 to 1.00",
        test="a trained cell: mean20 damaged, hex and hit_forced unchanged, preamble share at least 90 %",
        decide=_found,
        **_C4,
    ),
    Claim(
        id="preamble-share",
        by_design=False,
        statement="C4: nearly all of the window's movement lies on the preamble",
        reported="about 99 %",
        test="preamble's share of the absolute movement in the window of the picked cell is at least 90 %",
        decide=_preamble,
        **_C4,
    ),
    Claim(
        id="merge-collapse",
        by_design=False,
        statement="C4: the movement collapses when the adapter is merged into the base weights",
        reported="collapses (no figure reachable)",
        test="bf16, first seed: merged mean20 of the picked cell below half the stacked one, beyond noise and floor",
        decide=_collapse,
        **_C4,
    ),
    Claim(
        id="ambiguous-drop",
        by_design=False,
        statement="C5: on an undertrained base the window falls while the whole secret does not",
        reported="mean20 -0.0070, hex +0.0076, hit@1 0",
        test="an undertrained cell with base recall 0 whose mean20 is strengthened while hex is not",
        decide=_found,
        **_C5,
    ),
    Claim(
        id="never-recalled",
        by_design=False,
        statement="no undertrained regime ever recalls a canary",
        reported="hit@1 0 throughout",
        test="hit_full and hit_secret are 0 in every run on an undertrained base, text and image",
        decide=_never_recalled,
        **_C5,
    ),
    Claim(
        id="reactivation",
        by_design=False,
        statement="benign tuning does not bring planted secrets back on an undertrained base",
        reported="no recall; the fall of mean20 stays ambiguous",
        test="no run on an undertrained base, text or image, ends with a hit_full above its base's",
        decide=_reactivation,
        **_C5,
    ),
    Claim(
        id="noise-control",
        by_design=False,
        statement="LoRA-NOISE, a random adapter of a trained one's norm, serves as a control",
        reported="no figure reachable",
        test="noise cells that show the pattern are counted; without a reported figure nothing is decided",
        decide=_noise,
        **_C5,
    ),
    Claim(
        id="probes-disagree",
        by_design=False,
        statement="the choice of the probe changes the verdict",
        reported="in three cases",
        test="trained cells in which mean20 and hex or a recall contradict each other (text, stacked, seeds pooled)",
        decide=_disagree,
        **_C5,
    ),
    *(
        Claim(
            id=f"inversion-{configuration.replace(' ', '-')}",
            statement=f"prompts of ten tokens come back exactly from their states, {configuration} configuration",
            reported=f"{share:.1%} (GPT-2)".replace(".0%", "%").replace("%", " %"),
            test="the reported share lies in the Wilson interval of the measured one",
            decide=functools.partial(_exact, configuration=configuration),
            **_INVERSION,
        )
        for configuration, share in EXACT_MATCH.items()
    ),
    Claim(
        id="loss-separation",
        statement="the cumulative discrete loss tells exact from failed prompts by about ten orders of magnitude",
        reported="1e-11 against 1e-1 or so",
        test="at least 8 orders in every verified run, length and depth at which there are both",
        decide=_separation,
        **_INVERSION,
    ),
    Claim(
        id="detected-online",
        statement="a failure shows at the token at which it happens",
        reported="yes (no figure reachable)",
        test="every failed prompt of a verified run has its fallback at its first wrong token, exact ones none",
        decide=_online,
        **_INVERSION | {"by_design": True},
    ),
    Claim(
        id="function-words",
        statement="failures are mostly function words behind a space",
        reported="dominate (no figure reachable)",
        test="more than half of the first errors, K = 1000 from zeros, C = 2,000, the first token left out",
        decide=_function_words,
        **_INVERSION,
    ),
    Claim(
        id="content-words",
        statement="content words come back almost perfectly",
        reported="almost all",
        test="at most 5 % errors behind a true prefix, K = 1000 from zeros, C = 2,000",
        decide=_content_words,
        **_INVERSION,
    ),
    Claim(
        id="near-misses",
        statement="most failures are near misses, the true token just outside the window",
        reported="most",
        test="more near misses than wrong basins (our line: a quarter of the vocabulary beyond C)",
        decide=_near_misses,
        **_INVERSION,
    ),
    Claim(
        id="distances",
        statement="ranking by l1 is about as good as by l2, and much better than by cosine or dot product",
        reported="no figure reachable",
        test="same proxies, C = 2,000: l1 and l2 within 5 points, l1 10 points or more above the others",
        decide=_metrics,
        **_INVERSION,
    ),
    Claim(
        id="two-humped-cost",
        statement="the cost of a token is bimodal: found at once, or after the whole window",
        reported="bimodal",
        test="at least 80 % of the baseline's tokens take at most 10 candidates or all of them, and some take either",
        decide=_two_humped,
        **_INVERSION,
    ),
    Claim(
        id="inversion-seconds",
        statement="the baseline takes 17.8 s a token",
        reported="17.8 s",
        test="none: time on another machine with another model decides nothing; `make bench` gives ratios",
        decide=_seconds,
        **_INVERSION,
    ),
    Claim(
        id="projection",
        statement="projecting the proxy onto a token at every step hides the signals of the search",
        reported="no figure reachable",
        test="none yet",
        decide=functools.partial(_untried, why="not run: no method here projects at every step"),
        **_INVERSION,
    ),
    Claim(
        id="sipit-exact",
        statement="SIPIT recovers every prompt exactly",
        reported="100 % of prompts of 20 tokens (GPT-2)",
        test="every prompt of a SIPIT run is exact",
        decide=_sipit,
        **_SIPIT,
    ),
    Claim(
        id="sipit-seconds",
        statement="SIPIT takes 0.65 s a token, for it stops at the first token that fits",
        reported="0.65 s (as the inversion paper quotes it)",
        test="none: as for the baseline's seconds; `make bench` runs both on one machine",
        decide=functools.partial(_untried, why="see `make bench`"),
        **_SIPIT,
    ),
)


def claims_table(studies: Mapping[str, Mapping[str, Any]], scale: str, is_standard: bool = True) -> pd.DataFrame:
    """One row a claim: ``id, claim, reported, measured, state, by_design, scale, source, test, notebook``.

    ``studies`` maps a study's name to the figures of its result. A claim is not testable where its study is missing,
    or was not run with the scale's own settings (``is_standard`` false): other canaries are another testbed.
    """
    rows = []
    for claim in CLAIMS:
        results = studies.get(claim.study)
        decision = Decision("not run", NOT_TESTABLE) if results is None else claim.decide(results)
        if not is_standard:
            decision = Decision(decision.measured, NOT_TESTABLE)
        rows.append(
            (
                claim.id,
                claim.statement,
                claim.reported,
                decision.measured,
                decision.state,
                claim.by_design,
                scale,
                claim.source,
                claim.test,
                claim.notebook,
            )
        )
    columns = ["id", "claim", "reported", "measured", "state", "by_design", "scale", "source", "test", "notebook"]
    return pd.DataFrame(rows, columns=columns)
