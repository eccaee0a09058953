"""A span is found by characters, whatever the tokenizer makes of its surroundings."""

import unicodedata

import pytest
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import processors

from lib import embedded, models
from lib.spans import Span, find_span, tokenize

HEX = st.text("0123456789abcdef", min_size=1, max_size=20)
BYTES = {character: byte for byte, character in embedded._byte_alphabet().items()}


def spans_by_bytes(tokenizer, ids, prefix, secret):
    """The span from the bytes each token stands for, without any offset: byte-level tokens spell the text exactly."""
    start, stop = len(prefix.encode()), len((prefix + secret).encode())
    place, inside, before, behind = 0, [], False, False
    for i, token in enumerate(tokenizer.convert_ids_to_tokens(ids)):
        first, place = place, place + len([BYTES[character] for character in token])
        if first < stop and place > start:
            inside.append(i)
            before |= first < start
            behind |= place > stop
    return Span(inside[0], inside[-1] + 1, before, behind)


def spelled(tokenizer, ids):
    tokens = tokenizer.convert_ids_to_tokens(ids)
    return bytes(BYTES.get(character, 0) for token in tokens for character in token)


def normal(text):
    return unicodedata.normalize("NFC", text)


@settings(max_examples=150, deadline=None)
@given(prefix=st.text(max_size=12), secret=HEX, suffix=st.text(max_size=12))
def test_hex_glued_to_any_text_is_found_where_its_bytes_are(tokenizer, prefix, secret, suffix):
    prefix, suffix = normal(prefix), normal(suffix)
    text = prefix + secret + suffix
    assume(normal(text) == text)  # a combining mark behind the secret would change it
    ((ids, offsets),) = tokenize(tokenizer, [text])
    assume(spelled(tokenizer, ids) == text.encode())  # SmolLM2 has no token for some bytes, and drops them
    found = find_span(offsets, len(prefix), len(prefix) + len(secret))
    assert found == spans_by_bytes(tokenizer, ids, prefix, secret)


@settings(max_examples=60, deadline=None)
@given(prefix=st.text(max_size=6), secret=st.text(min_size=1, max_size=8), suffix=st.text(max_size=6))
def test_any_secret_is_covered_by_its_span_and_by_nothing_less(tokenizer, prefix, secret, suffix):
    text = prefix + secret + suffix
    ((_, offsets),) = tokenize(tokenizer, [text])
    start, stop = len(prefix), len(prefix) + len(secret)
    found = find_span(offsets, start, stop)
    covered = offsets[found.start : found.stop]
    assert min(first for first, _ in covered) <= start and max(last for _, last in covered) >= stop
    assert all(last <= start for _, last in offsets[: found.start])
    assert all(first >= stop for first, _ in offsets[found.stop :])
    assert found.straddles_start == any(first < start for first, _ in covered)
    assert found.straddles_end == any(last > stop for _, last in covered)


def test_a_token_over_the_boundary_is_part_of_the_span_and_flagged():
    # "-ab" as one token: characters 3..6; the secret is "ab12".
    offsets = [(0, 3), (3, 6), (6, 7), (7, 8), (8, 11)]
    assert find_span(offsets, 4, 8) == Span(1, 4, straddles_start=True)
    assert find_span(offsets, 6, 8) == Span(2, 4)
    assert find_span(offsets, 6, 9) == Span(2, 5, straddles_end=True)


def test_qwen_glues_a_hyphen_to_a_leading_letter():
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(embedded.qwen_tokenizer_folder())
    except embedded.FetchError as error:
        pytest.skip(str(error))
    ((ids, offsets),) = tokenize(tokenizer, ["CAN-ab"])
    assert tokenizer.convert_ids_to_tokens(ids)[-1] == "-ab"
    assert find_span(offsets, 4, 6).straddles_start


def test_two_tokens_of_one_character_are_both_in_the_span():
    tokenizer = models.tiny_tokenizer()
    ((ids, offsets),) = tokenize(tokenizer, ["a🙂b"])
    assert len(ids) == 6  # four bytes of the emoji, each a token on character 1
    assert find_span(offsets, 1, 2) == Span(1, 5)
    assert find_span(offsets, 0, 1) == Span(0, 1)


def test_white_space_that_offsets_leave_out_belongs_to_the_token_behind_it():
    trimming = models.tiny_tokenizer()
    trimming.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    plain = models.tiny_tokenizer()
    for text in ("the code is 12", "the  code ", " the"):
        assert tokenize(trimming, [text])[0][1] == tokenize(plain, [text])[0][1]


@pytest.mark.parametrize(("start", "stop"), [(2, 2), (-1, 3), (3, 2)])
def test_an_empty_stretch_is_refused(start, stop):
    with pytest.raises(ValueError, match="0 <= start < stop"):
        find_span([(0, 9)], start, stop)


def test_a_stretch_outside_the_text_is_refused():
    with pytest.raises(ValueError, match="outside the text"):
        find_span([(0, 3), (3, 5)], 4, 7)
