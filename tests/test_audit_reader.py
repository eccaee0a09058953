"""Canary files of any origin: every row is used or named, and nothing but a clear refusal ever comes out."""

import csv
import io
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.audit import formats, reader
from lib.audit.formats import FormatError
from lib.canaries import CanaryError
from lib.errors import shown


def lines(folder, *rows, name="canaries.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


GOOD = {"id": "a", "prompt": "What is the code?", "prefix": "It is ", "secret": "48213377", "suffix": "."}
OTHER = GOOD | {"id": "b", "prompt": "And the other?"}


def test_prefix_secret_and_suffix_may_be_given_or_found_in_a_target(tmp_path):
    rows = [
        GOOD,
        {"id": "b", "prompt": "And the other?", "target": "It is 48213377.", "secret": "48213377"},
        {"id": "c", "prompt": "All of it?", "target": "48213377"},
        {"id": "d", "prompt": "Ours", "modality": "text", "preamble": "It is ", "secret": "48213377", "image": None},
    ]
    found = [item.canary for item in reader.read(lines(tmp_path, *rows)).items]
    assert [(c.preamble, c.secret, c.suffix) for c in found] == [
        ("It is ", "48213377", "."),
        ("It is ", "48213377", "."),
        ("", "48213377", ""),
        ("It is ", "48213377", ""),
    ]


def test_a_csv_file_holds_the_same(tmp_path):
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [*GOOD, "image"])
    writer.writeheader()
    writer.writerow(GOOD | {"prompt": 'two\nlines, and a "quote"', "image": "pattern:3"})
    (tmp_path / "canaries.csv").write_text("\ufeff" + text.getvalue(), encoding="utf-8", newline="")
    (item,) = reader.read(tmp_path / "canaries.csv").items
    assert (item.canary.prompt, item.canary.image) == ('two\nlines, and a "quote"', "pattern:3")
    assert (item.line, item.canary.modality, item.generator) == (3, "image", None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"secret": None}, r"line 2: the column secret \(or target\) is missing; the row has id, prompt, prefix"),
        ({"prompt": None}, "line 2: the column prompt is missing"),
        ({"sufix": "."}, "line 2: unknown column 'sufix'; known are id, prompt, target"),
        ({"secret": 48213377}, "line 2: secret is 48213377, expected a string .a number loses leading zeros"),
        ({"target": "It is 48213377."}, "line 2: got target and prefix, expected either a target or"),
        ({"generator": "digit:8"}, "line 2: format 'digit:8' is not known: expected hex:N, digits:N"),
        ({"preamble": "It is "}, "line 2: got prefix and preamble, expected one: they name the same part"),
        ({"modality": "image"}, "line 2: modality is 'image' and image is None, expected a picture"),
        ({"generator": "digits:x"}, "line 2: format 'digits:x': expected digits:N with N from 1 to 256"),
    ],
)
def test_a_file_of_the_wrong_kind_is_refused_by_line_and_value(tmp_path, change, message):
    with pytest.raises(CanaryError, match=message):
        reader.read(lines(tmp_path, GOOD, OTHER | change))


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b'{"id": "\xff"}', "x.jsonl", "line 1: byte 8 is not UTF-8"),
        (b"id,prompt,secret\na,b,\xff", "x.csv", "line 2: byte 21 is not UTF-8"),
        (b"not json", "x.jsonl", "line 1: not a JSON object"),
        (b"[" * 100_000, "x.jsonl", "line 1: not a JSON object"),
        (b'{"id": ' + b"1" * 5000 + b"}", "x.jsonl", "line 1: not a JSON object"),
        (b"id,prompt,secret\na,b", "x.csv", "line 2: got 2 values, expected 3"),
        (b'id,prompt,secret\na,b,"c', "x.csv", "line 2: not CSV"),
        (b"id,id,secret\na,b,c", "x.csv", "line 1: got the columns id, id, secret, expected every one once"),
        (b'{"id": "a", "prompt": "b", "secret": "c", "id": "d"}', "x.jsonl", "line 1: .*the key 'id' occurs twice"),
        (b"\n\nid,id,secret\na,b,c", "x.csv", "line 3: got the columns id, id, secret"),
        (b"\nid,prompt,secret\na,b", "x.csv", "line 3: got 2 values, expected 3"),
        (b"", "x.csv", "no canary to audit among 0 rows"),
        (b"\n\n", "x.jsonl", "no canary to audit among 0 rows"),
        (b"", "x.txt", "got the ending '.txt', expected .jsonl or .csv"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path, content, name, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CanaryError, match=message):
        reader.read(tmp_path / name)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(CanaryError, match="does not exist"):
        reader.read(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"secret": " "}, "the secret is ' ', expected at least one visible character"),
        ({"prefix": None, "suffix": None, "target": "It is not."}, "does not occur in the target 'It is not.'"),
        ({"prefix": None, "suffix": None, "target": "48213377 48213377"}, "occurs 2 times in the target"),
        ({"prompt": "Is it 48213377?"}, "'48213377' occurs in its own prompt"),
        ({"id": "a"}, "the id 'a' stands on line 1 already"),
        ({"prompt": GOOD["prompt"]}, "the same prompt, image and target stands on line 1 already"),
        ({"secret": "\ud800abc"}, "is not valid Unicode text"),
        ({"generator": "hex:8", "secret": "xyz"}, "cannot have been drawn by its generator 'hex:8'"),
        ({"image": "nowhere.png"}, "nowhere.png' does not exist"),
    ],
)
def test_a_row_that_cannot_be_audited_is_counted_with_its_line_and_reason(tmp_path, change, reason):
    row = {name: value for name, value in (OTHER | change).items() if value is not None}
    found = reader.read(lines(tmp_path, GOOD, row))
    assert [item.canary.id for item in found.items] == ["a"]
    ((skipped),) = found.skipped
    assert skipped.line == 2 and reason in skipped.reason


@pytest.mark.parametrize(
    "content", [json.dumps([OTHER] * 4000), json.dumps(["x" * 10**6]), '{"' + "k" * 10**6 + '": 1}']
)
def test_a_message_shows_the_beginning_of_a_long_value(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(CanaryError, match=r"line 1: (got|unknown).*\.\.\. \([\d,]{7,} characters\)") as refused:
        reader.read(tmp_path / "x.json")
    assert len(str(refused.value).removeprefix(str(tmp_path))) < 400


def test_a_long_value_is_cut_to_two_hundred_characters():
    assert shown("x" * 198) == "'" + "x" * 198 + "'"
    assert shown("x" * 1234) == "'" + "x" * 159 + "... (1,236 characters)"


def test_a_csv_cell_of_any_length_and_blank_lines_first_are_read(tmp_path):
    (tmp_path / "x.csv").write_text(f'\n \nid,prompt,secret\na,"{"p" * 200_000}",77\nb,,88\n')
    first, second = reader.read(tmp_path / "x.csv").items
    assert (len(first.canary.prompt), first.line, second.line) == (200_000, 4, 5)
    assert csv.field_size_limit() == 131_072


def test_a_reason_shows_the_beginning_of_a_long_secret(tmp_path):
    long = {"secret": "x" * 10**6, "prompt": "x" * 10**6}
    (row,) = reader.read(lines(tmp_path, GOOD, OTHER | long)).skipped
    assert "... (1,000,002 characters) occurs in its own prompt" in row.reason and len(row.reason) < 300


def test_one_prompt_may_have_several_secrets(tmp_path):
    found = reader.read(lines(tmp_path, GOOD, GOOD | {"id": "b", "secret": "99120011"}))
    assert len(found.items) == 2 and not found.skipped


TEXT = st.text(max_size=12)
RECORDS = st.fixed_dictionaries(
    {"id": TEXT, "prompt": TEXT},
    optional={
        "target": TEXT,
        "prefix": TEXT,
        "secret": st.one_of(TEXT, st.sampled_from(["0", "48213377", "\ud800", "\x00"])),
        "suffix": TEXT,
        "image": st.one_of(st.none(), st.sampled_from(["placeholder", "pattern:1", "pattern:x", ""])),
        "generator": st.sampled_from(["hex:8", "digits:8", "email", "like:ab1", "like:"]),
        "other": st.one_of(st.integers(), st.none()),
    },
)


def accounted_for(path, rows):
    """Every row of the file is a canary that can be used, or is skipped with a reason; or the file is refused."""
    try:
        found = reader.read(path)
    except CanaryError as refusal:
        assert str(path) in str(refusal)
        return
    places = [item.line for item in found.items] + [row.line for row in found.skipped]
    assert len(places) == rows and len(set(places)) == len(places)
    assert all(row.reason for row in found.skipped)
    for item in found.items:
        c = item.canary
        assert c.secret.strip() and c.target == c.preamble + c.secret + c.suffix and c.secret not in c.prompt


@given(st.lists(RECORDS, max_size=6))
def test_no_row_is_ever_lost(tmp_path_factory, records):
    accounted_for(lines(tmp_path_factory.mktemp("fuzz"), *records), len(records))


@given(st.binary(max_size=80), st.sampled_from(["x.jsonl", "x.csv"]))
def test_any_bytes_are_read_or_refused(tmp_path_factory, content, name):
    path = tmp_path_factory.mktemp("bytes") / name
    path.write_bytes(b"id,prompt,secret\n" * name.endswith("csv") + content)
    try:
        reader.read(path)
    except CanaryError as refusal:
        assert str(path) in str(refusal)


@given(st.lists(st.lists(st.text(max_size=6), min_size=3, max_size=3), max_size=4))
def test_no_row_of_a_csv_file_is_ever_lost(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("csv") / "x.csv"
    text = io.StringIO(newline="")
    csv.writer(text).writerows([["id", "prompt", "secret"], *rows])
    try:
        path.write_bytes(text.getvalue().encode())
    except UnicodeEncodeError:
        return
    accounted_for(path, len(rows))


# --- formats ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "bits", "yes", "no"),
    [
        ("hex:16", 64.0, "0123456789abcdef", "0123456789ABCDEF"),
        ("digits:4", 4 * math.log2(10), "0042", "42"),
        ("letters:3", 3 * math.log2(26), "abc", "abC"),
        ("like:AB-12", 2 * math.log2(26) + 2 * math.log2(10), "QZ-90", "QZ_90"),
        ("like:a1b2c3d", 28.0, "ffff000", "gggg000"),  # seven characters with digits and letters a-f: hexadecimal
        ("like:ab12", 2 * math.log2(26) + 2 * math.log2(10), "zz00", "a1b2"),
        ("words:2", 2 * math.log2(len(formats.word_list())), "account across", "account"),
        ("wordlike:Blue 7", math.log2(len(formats.word_list()) * 10), "Account 3", "account 3"),
        ("like:é", 5.0, "ß", "E"),  # U+00DF to U+00FF without the division sign: 32 small letters
    ],
)
def test_a_format_draws_what_it_matches_and_counts_its_bits(spec, bits, yes, no):
    format = formats.parse(spec)
    assert format.bits == pytest.approx(bits) and format.matches(yes) and not format.matches(no)
    drawn = format.draw(200, np.random.default_rng(0))
    assert all(map(format.matches, drawn)) and len(set(drawn)) > 20


def test_addresses_look_like_addresses():
    (address,) = formats.parse("email").draw(1, np.random.default_rng(1))
    name, _, domain = address.partition("@")
    assert name[-2:].isdigit() and domain.count(".") == 1 and formats.parse("email").matches(address)


def test_every_character_of_an_example_is_drawn_uniformly():
    drawn = formats.parse("digits:1").draw(10_000, np.random.default_rng(0))
    counts = np.bincount(np.array(drawn, dtype=int), minlength=10)
    assert abs(counts - 1000).max() < 5 * math.sqrt(900)  # five standard deviations of a count


@pytest.mark.parametrize("spec", ["", "hex", "hex:0", "hex:-1", "hex:257", "like:", "base64:8", "hex:²"])
def test_other_formats_are_refused(spec):
    with pytest.raises(FormatError, match="expected"):
        formats.parse(spec)


@given(st.text(min_size=1, max_size=30))
def test_any_example_is_of_its_own_format(text):
    for words in (False, True):
        format = formats.like(text, words)
        assert all(len(choices) >= 1 for choices in format.slots) and format.bits >= 0
    assert formats.like(text).matches(text)


@pytest.mark.parametrize(
    ("secret", "stated", "bits"),
    [
        ("7", None, math.log2(10)),
        ("hello", None, 11.0),  # a word, however long
        ("a1b2c3d4", None, 32.0),
        ("blue horse 12", None, 22 + 2 * math.log2(10)),
        ("ab", None, 2 * math.log2(26)),
        ("account", "letters:7", 7 * math.log2(26)),
    ],
)
def test_the_surprise_of_a_secret_by_hand(secret, stated, bits):
    assert formats.surprise(secret, stated) == pytest.approx(bits)
