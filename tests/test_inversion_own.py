"""The command that reads prompts back from a file of states."""

import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from lib import models
from lib.__main__ import main
from lib.errors import LeakbookError
from lib.inversion import corpus, own
from lib.inversion.reader import Convention, InversionError, Reader

TEXT = "It was 7 o'clock."


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache folder of these tests' own, for proposers."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def small(monkeypatch, cache):
    """A corpus of a few sentences, and that cache."""
    monkeypatch.setattr(corpus, "docstrings", lambda _: ["The quick brown fox jumps over the lazy dog. " * 40])
    monkeypatch.setenv("LEAKBOOK_CACHE", str(cache))


def states(name="tiny-llama", convention=Convention(), text=TEXT):  # noqa: B008 - frozen
    reader = Reader(models.load(name), convention)
    return reader.states(torch.tensor([reader.backbone.tokenizer(text)["input_ids"]]))


def run(*arguments):
    done = CliRunner().invoke(main, ["invert", *map(str, arguments)])
    if done.exception is not None and isinstance(done.exception, LeakbookError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("suffix", [".npy", ".pt", ".safetensors"])
def test_a_file_of_states_is_read_back(tmp_path, suffix):
    found, path = states(), tmp_path / f"states{suffix}"
    if suffix == ".npy":
        np.save(path, found[0].numpy())
    elif suffix == ".pt":
        torch.save(found, path)
    else:
        save_file({"hidden_states": found.contiguous()}, path)
    told = run(path, "--model", "tiny-llama", "--output", tmp_path / "tokens.csv")
    assert repr(TEXT) in told and "best effort" not in told
    assert len(pd.read_csv(tmp_path / "tokens.csv")) == found.shape[1]


def test_half_precision_states_are_compared_within_their_rounding():
    table, found = own.read_back("tiny-llama", states().half(), Convention())
    assert table.text.tolist() == [TEXT] and found.tolerance == pytest.approx(4 * 2.0**-20)
    table, _ = own.read_back("tiny-gpt2", states("tiny-gpt2").bfloat16(), Convention())
    assert table.text.tolist() == [TEXT]


@pytest.mark.parametrize(
    ("given", "stated", "message"),
    [
        (Convention(2, "pre"), Convention(1, "pre"), "stated as layer 1, pre-norm, but layer 2, pre-norm reproduces"),
        (Convention(2, "pre"), Convention(), "taken before the final norm, or of another model"),
        (Convention(2, "post"), Convention(), "but layer 2, post-norm reproduces them"),
    ],
)
def test_another_convention_than_stated_is_named_before_any_search(given, stated, message, monkeypatch):
    monkeypatch.setattr(own.verified, "invert", None)
    with pytest.raises(InversionError, match=message):
        own.read_back(
            "tiny-llama",
            20 * states(convention=given) if stated.norm != given.norm else states(convention=given),
            stated,
        )


def test_states_of_another_model_are_refused(monkeypatch):
    monkeypatch.setattr(own.verified, "invert", None)
    with pytest.raises(InversionError, match="no layer of tiny-gpt2 reproduces them"):
        own.read_back("tiny-gpt2", states(), Convention())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: np.save(path, np.arange(5)), r"got \[5\] of torch.int64, expected floating-point"),
        (
            lambda path: np.save(path, np.arange(12).reshape(3, 4)),
            r"got \[3, 4\] of torch.int64, expected floating-point",
        ),
        (lambda path: np.save(path, np.array([{"a": 1}], dtype=object)), "cannot be read"),
        (lambda path: path.write_bytes(b"nothing"), "cannot be read"),
        (lambda path: np.save(path, np.zeros((0, 3, 4))), "which is empty"),
    ],
)
def test_files_that_hold_no_states_are_refused(tmp_path, make, message):
    make(tmp_path / "states.npy")
    with pytest.raises(InversionError, match=message):
        own.load_states(tmp_path / "states.npy")


def test_other_endings_and_files_of_several_arrays_are_refused(tmp_path):
    (tmp_path / "states.csv").write_text("1")
    (tmp_path / "states.pt").write_bytes(b"nothing")
    with pytest.raises(InversionError, match="cannot be read"):
        own.load_states(tmp_path / "states.pt")
    with pytest.raises(InversionError, match="got the ending '.csv', expected one of .npy"):
        own.load_states(tmp_path / "states.csv")
    save_file({"a": torch.zeros(1, 2), "b": torch.zeros(1, 2)}, tmp_path / "two.safetensors")
    with pytest.raises(InversionError, match=r"holds 2 arrays \(a, b\)"):
        own.load_states(tmp_path / "two.safetensors")


def test_a_second_call_checks_states_by_the_table_that_the_first_one_kept(monkeypatch):
    own.read_back("tiny-llama", states(), Convention())
    monkeypatch.setattr(own.conventions, "fitting", lambda *_: pytest.fail("all layers were read again"))
    table, _ = own.read_back("tiny-llama", states(text="Later."), Convention())
    assert table.text.tolist() == ["Later."]


def test_states_that_the_kept_table_does_not_hold_are_still_named(tmp_path):
    own.read_back("tiny-llama", states(), Convention())
    with pytest.raises(InversionError, match="but layer 2, post-norm reproduces them"):
        own.read_back("tiny-llama", states(convention=Convention(2, "post")), Convention())
