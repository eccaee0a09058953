"""What the tables of exact inversion and defences say, by hand on small ones."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from lib.inversion import defence_figures, weighing


def sweep(rows):
    """Rows of (prompt, position, channel, attacker, recovered, loss); what is not recovered is found as another id."""
    table = pd.DataFrame(rows, columns=["prompt", "position", "channel", "attacker", "recovered", "loss"])
    return table.assign(draw=0, true_id=1, found_id=np.where(table.recovered == 1, 1, 2), rank=0)


UTILITY = pd.DataFrame(
    [
        (name, kl, 0.9, 4.0, 3.0)
        for name, kl in (("4-bit", 0.05), ("2-bit", 0.5), ("rotated", 9.0), ("gaussian 0.1", 0.05))
    ],
    columns=["channel", "kl", "agreement", "nll", "nll_clean"],
)


def test_costs_and_peers_by_hand():
    tokens = pd.DataFrame(
        {
            "configuration": "a",
            "prompt": ["p", "p", "q", "q"],
            "position": [0, 1, 0, 1],
            "candidates": [1, 1, 1, 9],
            "status": ["consistent", "consistent", "best effort", "locally unique"],
        }
    )
    prompts = pd.DataFrame(
        {"configuration": "a", "prompt": ["p", "q"], "n_tokens": 2, "batch": 2, "seconds": [1.0, 3.0]}
    )
    prompts = prompts.assign(forward=[0.1, 0.1], read=[8.0, 8.0], exact_match=[True, False], setup=60.0)
    (row,) = weighing.costs(prompts, tokens).itertuples()
    assert (row.prompts, row.tokens, row.exact, row.seconds, row.mean, row.worst) == (2, 4, 0.5, 1.0, 3.0, 9)
    assert row.guessed == 0.75 and row.overhead == pytest.approx(20.0) and row.read == 4.0
    peers = pd.DataFrame({"configuration": "a", "prompt": ["q"], "position": [1], "true_id": [5], "found_id": [5]})
    peers = peers.assign(candidates=[90], seconds=[6.0])
    found = weighing.against_peers(tokens, prompts, peers).loc["a"]
    assert found["ours"] == 9 and found["candidates ratio"] == 10.0  # of prompt q alone, behind its first token
    assert found["our seconds"] == 1.5 and found["seconds ratio"] == 4.0


def test_where_true_tokens_stand_at_first_sight():
    ranks = pd.DataFrame({"configuration": "a", "order": "both", "rank": [0, 7, 8, 600]})
    (row,) = weighing.at_first_sight(ranks).reset_index().to_dict("records")
    assert (row["first"], row["of 8"], row["of 64"], row["of 512"]) == (0.25, 0.5, 0.75, 0.75)
    assert (row["tokens"], row["mean before"], row["worst"]) == (4, 153.75, 600)


def test_recovery_whole_prompts_and_the_alarm():
    rows = sweep(
        [
            ("p", 0, "4-bit", "nearest", 1, 0.1),
            ("p", 1, "4-bit", "nearest", 0, 0.9),
            ("q", 0, "4-bit", "nearest", 1, 0.2),
        ]
    )
    (found,) = weighing.recovery(rows).itertuples()
    assert found.recovered == pytest.approx(2 / 3) and found.alarm == 1.0 and found.family == "quantised"
    assert found.low == 0.5 and found.high == 1.0  # prompts of 0.5 and 1.0: resamples lie between
    assert weighing.exact_prompts(rows)["whole prompts"].tolist() == [0.5]


def test_equal_utility_takes_the_strongest_setting_within_a_budget():
    rows = sweep(
        [
            ("p", 0, "4-bit", "nearest", 0, 1.0),
            ("p", 0, "4-bit", "aware", 1, 1.0),
            ("p", 0, "2-bit", "nearest", 0, 1.0),
            ("p", 0, "2-bit", "aware", 0, 1.0),
            ("p", 0, "rotated", "nearest", 0, 1.0),
            ("p", 0, "rotated", "aware", 1, 1.0),
            ("p", 0, "gaussian 0.1", "prior alone", 1, 1.0),
            ("p", 0, "gaussian 0.1", "nearest", 0, 1.0),
        ]
    )
    weighed = weighing.weighed(rows, UTILITY)
    assert (weighed[weighed.channel == "rotated"].kl == 0).all()  # who holds the key loses nothing
    assert (weighed[weighed.channel == "rotated"].nll == 3.0).all()
    table = weighing.at_equal_utility(weighed, (0.1, 1.0)).set_index(["budget", "family"])
    assert table.channel[0.1, "quantised"] == "4-bit" and table.channel[1.0, "quantised"] == "2-bit"
    assert (table.naive[0.1, "quantised"], table.best[0.1, "quantised"], table.by[0.1, "quantised"]) == (0, 1, "aware")
    assert table.best[1.0, "quantised"] == 0 and table.best[0.1, "gaussian"] == 0  # without states is no attack on them
    assert table.naive[0.1, "rotated"] == 0 and table.best[0.1, "rotated"] == 1


def test_bounds_and_half_margins_by_hand():
    rows = sweep([("p", 0, "gaussian 0.1", "nearest", 1, 1.0), ("p", 1, "gaussian 0.1", "nearest", 0, 1.0)])
    margins = pd.DataFrame({"prompt": "p", "position": [0, 1], "channel": "gaussian 0.1", "sigma": 0.1, "rms": 1.0})
    margins = margins.assign(delta=[1.0, 0.5], bound=[0.2, 3.0])
    (found,) = weighing.bounds(rows, margins, width=16).itertuples()  # noise of the usual length 0.1 x 4 = 0.4
    assert found.measured == 0.5 and found.union == pytest.approx(0.4)  # (0.8 + 0) / 2
    assert found._4 == 0.5  # 0.4 < 1 / 2, but not < 0.5 / 2


def test_cascades_and_whole_vocabulary():
    cascade = pd.DataFrame({"channel": "4-bit", "attacker": "aware", "prompt": ["p", "p", "q", "q"]})
    cascade = cascade.assign(found_id=[1, 1, 1, 2], true_id=1, candidates=[1, 2, 3, 4])
    rows = sweep([("p", 0, "4-bit", "aware", 1, 0.0), ("p", 1, "4-bit", "aware", 1, 0.0)])
    (found,) = weighing.cascades(cascade, rows).itertuples()
    assert (found.tokens, found.candidates, found.prompts, found._4) == (0.75, 2.5, 0.5, 1.0)
    swept = sweep([("p", 1, "4-bit", "aware", 0, 0.0)])
    near = pd.DataFrame({"prompt": "p", "position": [0, 1], "delta": [3.0, 2.0]})
    table = weighing.whole_vocabulary(rows, swept, near, near.assign(delta=1.5).iloc[1:])
    assert table.loc[("p", 1)].tolist() == [1.0, 2.0, 0.0, 1.5] and len(table) == 1


def test_epsilon_stands_beside_what_it_costs():
    rows = sweep([("p", 0, "private 1 2", "aware", 1, 0.0), ("p", 0, "private 1 2", "prior alone", 0, 0.0)])
    utility = pd.DataFrame(
        {"channel": ["private 1 2"], "kl": [0.3], "agreement": [0.7], "nll": [3.0], "nll_clean": [3.0]}
    )
    (found,) = weighing.private_noise(["private 1 2", "4-bit"], weighing.weighed(rows, utility)).itertuples()
    assert found.best == 1 and found.kl == 0.3 and 4 < found.epsilon < 5  # sensitivity 2, sigma 2: ratio 1
    assert len(weighing.private_noise(["4-bit"], weighing.weighed(rows, utility))) == 0


def test_figures_are_drawn():
    rows = sweep(
        [("p", 0, name, "aware", 1, 0.0) for name in UTILITY.channel] + [("p", 0, "4-bit", "prior alone", 0, 0)]
    )
    weighed = weighing.weighed(rows, UTILITY)
    lines = pd.DataFrame({"sigma": [0.1, 1.0], "measured": [1.0, 0.5], "union": [0.9, 0.0], "half margin": [0.5, 0.0]})
    costs = pd.DataFrame({"method": ["a", "b"], "seconds": [0.1, 9.0], "exact": [1.0, 0.5], "ours": [True, False]})
    for figure in (
        defence_figures.privacy_against_utility(weighed, {"aware": "aware", "tolerance": "tolerance"}),
        defence_figures.noise_and_bounds(lines, 0.3),
        defence_figures.method_costs(costs),
        defence_figures.tries(pd.Series([1, 2, 900]), pd.Series([5, 4000])),
    ):
        assert isinstance(figure, Figure) and figure.axes


def test_methods_that_were_stopped_are_called_lower_bounds():
    names = ["exact, together", "lm order", "full scan"]
    bench = pd.DataFrame(
        {"method": names, "tokens": [10, 4, 2], "capped": [0, 0, 1], "right": [10, 4, 1], "mean": [0.1, 1.0, 90.0]}
    )
    found = weighing.methods(bench)
    assert found.method.tolist() == [
        "exact, together (10 tokens)",
        "lm order (4 tokens)",
        "full scan (2 tokens, at least)",
    ]
    assert found.exact.tolist() == [1.0, 1.0, 0.5] and found.ours.tolist() == [True, False, False]
