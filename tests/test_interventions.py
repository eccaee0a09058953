"""What a lesson changes and what it leaves, on the trained tiny model."""

import dataclasses

import numpy as np
import pytest

from lib import adapters, canaries, interventions, models, probes, training
from lib.config import LoraSettings
from lib.encoding import Encoder
from lib.interventions import InterventionError
from lib.training import TrainingError

SETTINGS = LoraSettings(16, 32, 2e-3, 3, 20, 40, 100, 0, "fp32")


@pytest.fixture(scope="module")
def planted(smoke, injected_adapter):
    """The injected tiny model behind its encoder, and its text canaries."""
    base = Encoder(adapters.merge(models.load("tiny-vl"), injected_adapter))
    given = canaries.read(smoke.folder / "canaries.jsonl")
    return base, base.encode([canary for canary in given if canary.modality == "text"])


def changes(base, rows, adapter):
    """Change of the NLL [canary, position] by an adapter."""
    before = probes.token_nll(base.backbone.model, base, rows).nll
    return probes.token_nll(adapters.stack(base.backbone, adapter).model, base, rows).nll - before


def test_late_damage_is_where_it_was_put(planted, tmp_path):
    base, rows = planted
    lessons, damaged = interventions.late_damage(base, rows, window=20, count=4, seed=2)
    assert len(lessons) == 20 and len(damaged) == 4 and all(20 <= position < 24 for position in damaged.values())
    taught = training.teach(base, lessons, SETTINGS, tmp_path)
    change = changes(base, rows, taught.adapter())
    here = np.zeros(change.shape, dtype=bool)
    for i, row in enumerate(rows):
        if row.canary.id in damaged:
            here[i, damaged[row.canary.id]] = True
    assert change[here].min() > 1.0 and np.abs(change[~here]).max() < 0.5


def test_drift_moves_the_preamble_and_holds_the_secret(planted, tmp_path):
    base, rows = planted
    settings = dataclasses.replace(SETTINGS, batch_size=40, max_steps=30)
    moved = {}
    for hold in (True, False):
        lessons = interventions.preamble_drift(base, rows, 20, seed=1, hold=hold)
        taught = training.teach(base, lessons, settings, tmp_path / str(hold))
        change = changes(base, rows, taught.adapter())
        moved[hold] = change[:, :11].sum(1).mean(), change[:, 11:24].sum(1).mean()
    (preamble, secret), (_, secret_not_held) = moved[True], moved[False]
    assert preamble > 1.0 and abs(secret) < 0.2 * preamble
    assert abs(secret) < 0.5 * secret_not_held


def test_new_records_are_nobodys(planted):
    base, rows = planted
    fresh = interventions.new_records(base, [row.canary for row in rows], 30, seed=0)
    old = [row.canary for row in rows]
    assert not {c.prompt for c in fresh} & {c.prompt for c in old}
    assert len({c.secret for c in fresh} - {c.secret for c in old}) == 30
    assert {c.preamble for c in fresh} == {old[0].preamble}


def test_lessons_are_told_apart_by_what_they_teach(planted):
    base, rows = planted
    plain = [training.lesson(row) for row in rows]
    changed = [training.lesson(rows[0], {20: 5}), *plain[1:]]
    keys = {training.lessons_key(base.backbone, lessons, SETTINGS, 1) for lessons in (plain, changed, plain)}
    assert len(keys) == 2


def test_a_plain_lesson_is_plain_training(planted, tmp_path):
    base, rows = planted
    settings = dataclasses.replace(SETTINGS, max_steps=2)
    taught = training.teach(base, [training.lesson(row) for row in rows], settings, tmp_path / "a")
    trained = training.train(base, rows, settings, tmp_path / "b")
    assert taught.log.loss.tolist() == pytest.approx(trained.log.loss.tolist(), abs=1e-6)


def test_what_cannot_be_taught_is_refused(planted, tmp_path):
    base, rows = planted
    with pytest.raises(InterventionError, match="got 21 canaries to damage, expected 1 to 20"):
        interventions.late_damage(base, rows, 20, 21, 0)
    with pytest.raises(InterventionError, match="does not reach behind token 24"):
        interventions.late_damage(base, rows, 24, 1, 0)
    with pytest.raises(TrainingError, match="got 1 labels and 1 weights, expected one of each"):
        training.Lesson(rows[0], (1,), (1.0,))
    with pytest.raises(TrainingError, match="one record is taught twice"):
        training.teach(base, [training.lesson(rows[0])] * 2, SETTINGS, tmp_path)
    images = [dataclasses.replace(row.canary, modality="image") for row in rows]
    with pytest.raises(InterventionError, match="there is no text canary"):
        interventions.new_records(base, images, 1, 0)


def test_damage_is_where_the_marks_say(planted, tmp_path):
    base, rows = planted
    marks = {rows[1].canary.id: (0, 5), rows[7].canary.id: (12,)}
    taught = training.teach(base, interventions.damage(rows, marks, seed=4), SETTINGS, tmp_path)
    change = changes(base, rows, taught.adapter())
    here = np.zeros(change.shape, dtype=bool)
    here[1, [11, 16]] = here[7, 23] = True
    assert change[here].min() > 1.0 and np.abs(change[~here]).max() < 0.5


def test_marks_that_nothing_answers_to_are_refused(planted):
    _, rows = planted
    with pytest.raises(InterventionError, match="text-900 is marked"):
        interventions.damage(rows, {"text-900": (1,)}, seed=0)
    with pytest.raises(InterventionError, match="has 13 secret tokens, none at 13"):
        interventions.damage(rows, {rows[0].canary.id: (13,)}, seed=0)


def test_relearning_watches_every_secret_and_leaves_the_model(planted):
    base, rows = planted
    before = {key: value.clone() for key, value in base.backbone.model.state_dict().items()}
    fresh = base.encode(interventions.new_records(base, [row.canary for row in rows], 3, seed=8))
    settings = dataclasses.replace(SETTINGS, max_steps=6, batch_size=6)
    found = training.relearn(base, [*rows[:3], *fresh], settings)
    lines = found.curve.pivot(index="step", columns="canary", values="nll")
    assert lines.index.tolist() == list(range(7)) and lines.shape[1] == 6
    start = probes.token_nll(base.backbone.model, base, rows[:3]).span_mean("hex").values
    np.testing.assert_allclose(lines.loc[0, start.index], start, atol=1e-4)
    new = [row.canary.id for row in fresh]
    assert (lines.loc[6, new] < lines.loc[0, new] - 0.5).all()
    assert all(np.array_equal(value, before[key]) for key, value in base.backbone.model.state_dict().items())
    with pytest.raises(TrainingError, match="batches of 5 for 6 rows"):
        training.relearn(base, [*rows[:3], *fresh], dataclasses.replace(settings, batch_size=5))
