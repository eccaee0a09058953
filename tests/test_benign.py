"""Benign data is seeded, shows what it says, and provably holds no part of a canary."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib import benign, models, pictures
from lib.benign import BenignError
from lib.canaries import Record, draw
from lib.config import CanarySettings

PLANTED = draw(CanarySettings(20, 20, 20260630, 13, 11), models.tiny_tokenizer(), "<|im_end|>")
EVERY = pytest.mark.parametrize("source", benign.SOURCES)


@EVERY
def test_records_are_seeded_and_more_of_them_keep_the_first(source):
    few, many = benign.generate(source, 5, seed=1), benign.generate(source, 40, seed=1)
    assert many[:5] == few and len({record.id for record in many}) == 40
    assert benign.generate(source, 40, seed=2) != many
    assert len({record.prompt for record in many}) > 20
    assert all(record.image is None for record in benign.generate(source, 5, seed=1, images=False))


@EVERY
def test_no_source_holds_a_part_of_any_canary(source):
    benign.screen_against(benign.generate(source, 400, seed=3), PLANTED)


def test_gui_records_click_the_button_they_name_where_the_drawing_has_it():
    for record in benign.generate("GUI", 20, seed=0):
        action = json.loads(record.target)
        label = record.prompt.rpartition("Press ")[2].rstrip(".")
        assert f"{label} at ({action['x']}, {action['y']})" in record.prompt
        drawing = pictures.picture(record.image)
        assert drawing.getpixel((action["x"], action["y"])) == (0xDD, 0xDD, 0xDD)


def test_synth_captions_say_what_is_drawn():
    for record in benign.generate("SYNTH", 20, seed=0):
        (color, shape), (other, _) = pictures.shapes(int(record.image.partition(":")[2]))
        assert record.target.startswith(f"A {color} {shape} stands to the left of a {other}")
        drawing = pictures.picture(record.image)
        found = ["#{:02x}{:02x}{:02x}".format(*drawing.getpixel((x, 30))) for x in (15, 41)]
        assert found == [pictures.COLORS[color], pictures.COLORS[other]]


@pytest.mark.parametrize(
    ("field", "text", "found"),
    [
        ("target", lambda c: f"it is {c.secret}", lambda c: c.secret[:6]),
        ("prompt", lambda c: f"so {c.secret[4:10].upper()} it is", lambda c: c.secret[4:10]),
        ("target", lambda c: "the code is textcan-", lambda c: "textcan-"),
    ],
)
def test_a_record_with_a_part_of_a_canary_is_refused_by_name(field, text, found):
    canary = PLANTED[7]
    records = benign.generate("RANDOM", 3, seed=0)
    records[1] = dataclasses.replace(records[1], **{field: text(canary)})
    with pytest.raises(BenignError, match=f"benign record 'RANDOM-0001' holds '{found(canary)}', which belongs to"):
        benign.screen_against(records, PLANTED)


@settings(max_examples=50, deadline=None)
@given(place=st.integers(0, 10), which=st.integers(0, 39), before=st.text(max_size=5), behind=st.text(max_size=5))
def test_every_six_characters_of_a_secret_are_found_wherever_they_stand(place, which, before, behind):
    part = PLANTED[which].secret[place : place + 6]
    with pytest.raises(BenignError):
        benign.screen_against([Record("r", "p", before + part + behind)], PLANTED)


def test_five_characters_are_not_enough():
    benign.screen_against([Record("r", "p", PLANTED[0].secret[:5] + "zz")], PLANTED)


def test_an_unknown_source_is_refused():
    with pytest.raises(BenignError, match="got 'gui', expected one of GUI, SYNTH, SAFETY, RANDOM, or a JSONL file"):
        benign.generate("gui", 1, 0)


def test_a_users_file_is_read_with_its_images(tmp_path):
    pictures.picture("shapes:1").save(tmp_path / "a.png")
    lines = [{"prompt": "Hi", "target": "Ho"}, {"prompt": "See", "target": "Seen", "image": "a.png"}]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert benign.read(tmp_path / "own.jsonl") == [
        Record("line-1", "Hi", "Ho"),
        Record("line-2", "See", "Seen", str(tmp_path / "a.png")),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "own.jsonl is empty"),
        (b"{", "own.jsonl, line 1: not a JSON object"),
        (b'\n{"prompt": "a"}', "own.jsonl, line 2: got the keys .'prompt'., expected prompt, target and"),
        (b'{"prompt": "a", "target": 3}', "line 1: target is 3, expected a string"),
        (b'{"prompt": "a", "target": " "}', "target is ' ', expected at least one visible character"),
        (b'{"prompt": "a", "target": "b", "image": "no.png"}', "line 1: image file '.*no.png' does not exist"),
        (b"\xff", "byte 0 is not UTF-8"),
    ],
)
def test_a_users_file_that_cannot_be_used_is_refused_by_line(tmp_path, content, message):
    (tmp_path / "own.jsonl").write_bytes(content)
    with pytest.raises(BenignError, match=message):
        benign.read(tmp_path / "own.jsonl")
