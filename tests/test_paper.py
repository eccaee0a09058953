"""Claims are decided from results, and every one has a row and a place in a notebook."""

import pytest

from lib import paper, paths

GOOD = {
    "canaries": {"text": 20, "image": 20},
    "layout": {"hex_spans": [[11, 24]]},
    "recall": {
        "base": {"text": {"hit_full": 0.0}},
        "step-0010": {"text": {"hit_full": 0.0}},
        "injected": {"text": {"hit_full": 1.0}, "image": {"hit_full": 1.0}},
    },
    "undertrained": ["step-0010"],
}


def states(results, study="testbed"):
    table = paper.claims_table({study: results}, "smoke")
    own = [claim.id for claim in paper.CLAIMS if claim.study == study]
    return {name: state for name, state in zip(table.id, table.state, strict=True) if name in own}


def test_a_testbed_like_the_papers_reproduces_all_its_claims():
    assert set(states(GOOD).values()) == {paper.REPRODUCED}


# A sweep in which the paper's cases happen as reported.
SWEEP = {"cells": 34, "noise": 4, "undertrained": 12, "undertrained_runs": 42, "undertrained_strengthened": 0}
SWEEP |= {"recalled": [], "noise_shown": 0, "noise_changed": 1, "disagreements": 3, "noise_disagreements": 0}
FOUND = {"found": True, "showing": ["a-cell"], "cell": "a-cell", "confirmed": {"shown": 4, "of": 6}, "sweep": SWEEP}
CASES = {
    "c3": FOUND | {"failures": {"decodes": 60, "failed": 7, "canaries": 3, "late": 7}},
    "c4": FOUND
    | {
        "preamble_share": 0.99,
        "merge": {
            "a-cell-s0": {"stacked": 0.01, "merged": 0.001, "noise_stacked": 0.0, "noise_merged": 1e-4, "floor": 1e-4}
        },
    },
    "c5": FOUND | {"pattern": "ambiguous_drop"},
}
RECALLED = {"cell": "x", "seed": 0, "modality": "image", "hit_full_base": 0.0, "hit_full": 0.05, "hit_secret": 0.05}


@pytest.mark.parametrize("case", CASES)
def test_cases_like_the_papers_reproduce_their_claims(case):
    found = states(CASES[case], case)
    open_claims = {"noise-control"}  # the paper gives no figure
    assert {name for name, state in found.items() if state != paper.REPRODUCED} == open_claims & set(found)


@pytest.mark.parametrize(
    ("case", "change", "fails"),
    [
        ("c3", {"failures": {"decodes": 60, "failed": 7, "canaries": 3, "late": 6}}, {"late-damage"}),
        ("c3", {"failures": {"decodes": 60, "failed": 9, "canaries": 4, "late": 9}}, {"few-canaries"}),
        ("c3", {"failures": {"decodes": 60, "failed": 0, "canaries": 0, "late": 0}}, {"late-damage", "few-canaries"}),
        ("c4", {"preamble_share": 0.85}, {"preamble-share"}),
        ("c4", {"merge": {"a-cell-s0": CASES["c4"]["merge"]["a-cell-s0"] | {"merged": 0.006}}}, {"merge-collapse"}),
        # A fall by merging that merged noise of the same size shows, too, is rounding.
        (
            "c4",
            {"merge": {"a-cell-s0": CASES["c4"]["merge"]["a-cell-s0"] | {"noise_merged": 0.02}}},
            {"merge-collapse"},
        ),
        ("c5", {"sweep": SWEEP | {"recalled": [RECALLED]}}, {"never-recalled", "reactivation"}),
        ("c5", {"sweep": SWEEP | {"recalled": [RECALLED | {"hit_full_base": 0.05}]}}, {"never-recalled"}),
        ("c5", {"sweep": SWEEP | {"disagreements": 0, "noise_disagreements": 3}}, {"probes-disagree"}),
    ],
)
def test_a_claim_about_a_case_fails_by_its_own_test(case, change, fails):
    found = states(CASES[case] | change, case)
    assert {claim for claim, state in found.items() if state == paper.NOT_REPRODUCED} == fails


def test_where_no_cell_shows_a_pattern_claims_about_its_cell_stay_open():
    found = states(CASES["c3"] | {"found": False, "showing": [], "confirmed": None}, "c3")
    assert found == {
        "window-truncation": paper.NOT_REPRODUCED,
        "late-damage": paper.NOT_TESTABLE,
        "few-canaries": paper.NOT_TESTABLE,
    }


def test_a_grid_of_other_size_is_not_the_papers():
    assert states({"cells": 34, "runs": 102}, "sweep") == {"grid": paper.REPRODUCED}
    assert states({"cells": 2, "runs": 6}, "sweep") == {"grid": paper.NOT_REPRODUCED}


@pytest.mark.parametrize(
    ("change", "fails"),
    [
        ({"canaries": {"text": 20}}, {"planted"}),
        ({"layout": {"hex_spans": [[10, 23]]}}, {"layout", "window"}),
        ({"layout": {"hex_spans": [[11, 24], [11, 25]]}}, {"layout", "window"}),
        ({"recall": {"base": {}, "injected": {"text": {"hit_full": 0.95}, "image": {"hit_full": 1.0}}}}, {"recall"}),
        ({"recall": {"base": {}, "injected": {"text": {"hit_full": 1.0}}}}, {"recall"}),
        ({"undertrained": []}, {"undertrained"}),
    ],
)
def test_a_claim_that_does_not_hold_is_not_reproduced(change, fails):
    found = states(GOOD | change)
    assert {claim for claim, state in found.items() if state == paper.NOT_REPRODUCED} == fails


def test_a_testbed_of_ones_own_settings_is_not_held_against_the_paper():
    table = paper.claims_table({"testbed": GOOD}, "laptop", is_standard=False)
    assert set(table.state) == {paper.NOT_TESTABLE} and table.measured.iloc[0] == "20 text, 20 image"


def test_a_study_that_was_not_run_decides_nothing():
    table = paper.claims_table({}, "laptop")
    assert set(table.state) == {paper.NOT_TESTABLE} and set(table.scale) == {"laptop"}


def test_every_claim_has_one_row_and_is_cited_by_its_notebook():
    ids = [claim.id for claim in paper.CLAIMS]
    assert len(ids) == len(set(ids))
    for claim in paper.CLAIMS:
        assert f"`{claim.id}`" in (paths.NOTEBOOKS / f"{claim.notebook}.py").read_text()


def exact(k, n, low, high):
    return {"exact": k, "of": n, "low": low, "high": high, "seconds": 1.0, "similarity": 0.9}


# An inversion study in which everything is as the papers report it.
INVERSION = {
    "model": "gpt2",
    "exact": {
        "fast": exact(17, 50, 0.22, 0.48),
        "baseline": exact(33, 50, 0.52, 0.78),
        "high accuracy": exact(49, 50, 0.90, 1.0),
        "sipit": exact(2, 2, 0.3, 1.0),
    },
    "separation": {"baseline": 9.7, "fast": None},
    "online": {"failed": 17, "flagged": 17, "false": 0},
    "cost": {"few": 60, "all": 30, "of": 100},
    "failures": {
        "first_errors": {"function words": 12, "of": 17},
        "error_rates": {"function word": [20, 100], "content word": [2, 100]},
        "misses": {"near miss": 15, "wrong basin": 7},
        "metrics": {"l1": 0.9, "l2": 0.89, "cosine": 0.6, "dot": 0.5},
    },
}
UNDECIDED = {"inversion-seconds", "projection", "sipit-seconds"}  # no figure here could decide them


def test_an_inversion_like_the_papers_reproduces_its_claims():
    found = states(INVERSION, "inversion")
    assert {name for name, state in found.items() if state != paper.REPRODUCED} == UNDECIDED


@pytest.mark.parametrize(
    ("change", "fails"),
    [
        ({"exact": INVERSION["exact"] | {"fast": exact(1, 50, 0.0, 0.1)}}, {"inversion-fast"}),
        ({"exact": INVERSION["exact"] | {"sipit": exact(1, 2, 0.1, 0.9)}}, {"sipit-exact"}),
        ({"separation": {"baseline": 9.7, "fast": 6.0}}, {"loss-separation"}),
        ({"online": {"failed": 17, "flagged": 16, "false": 0}}, {"detected-online"}),
        ({"online": {"failed": 17, "flagged": 17, "false": 1}}, {"detected-online"}),
        ({"cost": {"few": 40, "all": 30, "of": 100}}, {"two-humped-cost"}),
        ({"cost": {"few": 90, "all": 0, "of": 100}}, {"two-humped-cost"}),
    ],
)
def test_a_claim_about_inversion_fails_by_its_own_test(change, fails):
    found = states(INVERSION | change, "inversion")
    assert {claim for claim, state in found.items() if state == paper.NOT_REPRODUCED} == fails


@pytest.mark.parametrize(
    ("change", "fails"),
    [
        ({"first_errors": {"function words": 8, "of": 17}}, {"function-words"}),
        ({"error_rates": {"content word": [6, 100]}}, {"content-words"}),
        ({"misses": {"near miss": 7, "wrong basin": 7}}, {"near-misses"}),
        ({"metrics": {"l1": 0.9, "l2": 0.8, "cosine": 0.6, "dot": 0.5}}, {"distances"}),
        ({"metrics": {"l1": 0.9, "l2": 0.9, "cosine": 0.85, "dot": 0.5}}, {"distances"}),
    ],
)
def test_a_claim_about_failures_fails_by_its_own_test(change, fails):
    found = states(INVERSION | {"failures": INVERSION["failures"] | change}, "inversion")
    assert {claim for claim, state in found.items() if state == paper.NOT_REPRODUCED} == fails


def test_without_the_run_that_failures_are_decided_on_their_claims_stay_open():
    found = states(INVERSION | {"failures": None}, "inversion")
    open_claims = {"function-words", "content-words", "near-misses", "distances"}
    assert {name for name, state in found.items() if state == paper.NOT_TESTABLE} == open_claims | UNDECIDED
