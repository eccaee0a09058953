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


def states(results):
    table = paper.claims_table({"testbed": results}, "smoke")
    return dict(zip(table.id, table.state, strict=True))


def test_a_testbed_like_the_papers_reproduces_all_its_claims():
    assert set(states(GOOD).values()) == {paper.REPRODUCED}


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
