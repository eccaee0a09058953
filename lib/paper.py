"""Every claim of the papers that this package can decide: what is reported, what decides it, and how it came out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

PROBE_PAPER = "arXiv:2606.31168"
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


_TESTBED = {"source": PROBE_PAPER, "study": "testbed", "notebook": "00_testbed"}

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
