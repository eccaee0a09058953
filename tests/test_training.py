"""Training touches the language tower alone, resumes where it was killed, and refuses foreign adapters."""

import dataclasses
import errno
import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lib import config, models, probes, training
from lib.encoding import Encoder
from lib.files import StorageError
from lib.scoring import target_logits
from lib.training import TrainingError

SETTINGS = dataclasses.replace(
    config.load_scale("smoke").injection,
    rank=8,
    alpha=16,
    batch_size=4,
    max_steps=8,
    check_every=2,
    stop_steps=(1, 3),
    target_nll=100.0,
)


def never_enough(**changes):
    """Settings under which training runs to ``max_steps`` and fails there."""
    return dataclasses.replace(SETTINGS, target_nll=1e-9, **changes)


def test_the_output_layer_sees_target_positions_only(encoder, rows):
    seen = []
    handle = encoder.backbone.model.lm_head.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape))
    try:
        logits, ids = target_logits(encoder.backbone.model, encoder.batch(rows))
    finally:
        handle.remove()
    targets = sum(len(row.target_ids) for row in rows)
    assert logits.shape[0] == len(ids) == targets
    assert seen[0][:2] == (1, targets)


def test_the_rate_warms_up_and_decays_to_a_tenth():
    settings = dataclasses.replace(SETTINGS, learning_rate=1.0, warmup_steps=4, max_steps=100)
    assert training.learning_rate(settings, 0) == pytest.approx(0.25)
    assert training.learning_rate(settings, 50) == pytest.approx(0.55)
    assert training.learning_rate(settings, 99) == pytest.approx(1 - 0.9 * 0.99)


def test_training_leaves_the_backbone_alone_and_keeps_the_stops(encoder, rows, tmp_path):
    before = {key: value.clone() for key, value in encoder.backbone.model.state_dict().items()}
    settings = dataclasses.replace(SETTINGS, target_nll=100.0, max_steps=200, batch_size=6, check_every=50)
    run = training.train(encoder, rows, dataclasses.replace(settings, learning_rate=1e-2), tmp_path)
    assert run.kept_steps == (1, 3) and run.final_step in (50, 100, 150)
    assert run.log.step.tolist() == list(range(1, run.final_step + 1))
    assert run.log.loss.iloc[-1] < run.log.loss.iloc[0] / 10
    for path in (run.adapter(1), run.adapter(3), run.adapter()):
        assert (path / "adapter_model.safetensors").exists()
    assert not (tmp_path / "checkpoint.safetensors").exists()
    for key, value in encoder.backbone.model.state_dict().items():
        assert torch.equal(value, before[key]), key
    again = training.train(encoder, rows, settings, tmp_path)  # finished: taken from the folder, whatever is asked
    assert again.final_step == run.final_step and again.seconds == run.seconds


def test_an_interrupted_run_ends_with_the_very_same_adapters(encoder, rows, tmp_path, monkeypatch):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    settings = never_enough()
    with pytest.raises(TrainingError):
        training.train(encoder, rows, settings, whole)
    advance = training._Training._advance

    def stop_after_five(run):
        if run.step == 5:
            raise KeyboardInterrupt
        advance(run)

    monkeypatch.setattr(training._Training, "_advance", stop_after_five)
    with pytest.raises(KeyboardInterrupt):
        training.train(encoder, rows, settings, halves)
    steps = []
    monkeypatch.setattr(training._Training, "_advance", lambda run: steps.append(run.step) or advance(run))
    with pytest.raises(TrainingError):
        training.train(encoder, rows, settings, halves)
    assert steps == [4, 5, 6, 7]  # state was last kept after the fourth step
    one, other = (load_file(folder / "checkpoint.safetensors") for folder in (whole, halves))
    assert one.keys() == other.keys()
    for key in one:
        assert torch.equal(one[key], other[key]), key
    for step in ("step-0001", "step-0003"):
        one, other = (load_file(folder / step / "adapter_model.safetensors") for folder in (whole, halves))
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_training_that_does_not_reach_recall_says_so(encoder, rows, tmp_path):
    with pytest.raises(TrainingError, match="after 8 steps recall is not 1.00 .* raise injection.max_steps"):
        training.train(encoder, rows, never_enough(), tmp_path)


def test_bf16_autocast_leaves_evaluation_as_it_was(encoder, rows, tmp_path):
    if not training.bf16_in_hardware():
        pytest.skip("no bf16 arithmetic on this machine")
    before = probes.token_nll(encoder.backbone.model, encoder, rows).nll
    with pytest.raises(TrainingError):
        training.train(encoder, rows, never_enough(precision="bf16"), tmp_path)
    after = probes.token_nll(encoder.backbone.model, encoder, rows).nll
    fresh = models.load("tiny-vl")
    np.testing.assert_array_equal(after, before)
    np.testing.assert_array_equal(probes.token_nll(fresh.model, Encoder(fresh), rows).nll, before)


def test_the_key_of_finished_adapters_covers_model_data_settings_and_protocol(encoder, rows):
    key = training.adapter_key(encoder.backbone, rows, SETTINGS, 1)
    assert key == training.adapter_key(encoder.backbone, rows, SETTINGS, 1)
    others = {
        training.adapter_key(dataclasses.replace(encoder.backbone, revision="x"), rows, SETTINGS, 1),
        training.adapter_key(encoder.backbone, rows[:3], SETTINGS, 1),
        training.adapter_key(encoder.backbone, rows, dataclasses.replace(SETTINGS, seed=1), 1),
        training.adapter_key(encoder.backbone, rows, SETTINGS, 2),
        training.adapter_key(models.load("tiny-llama"), rows, SETTINGS, 1),  # the same seed, tokenizer and canaries
    }
    assert len(others | {key}) == 6


def test_bf16_by_name_needs_the_hardware(monkeypatch):
    monkeypatch.setattr(training, "bf16_in_hardware", lambda: False)
    assert training.resolve_precision("auto") == "fp32"
    with pytest.raises(TrainingError, match="injection.precision: got 'bf16', but this machine has no bf16"):
        training.resolve_precision("bf16")


def test_a_full_disk_while_training_keeps_the_last_good_state(encoder, rows, tmp_path, monkeypatch):
    saved = []

    def full(tensors, path, **_):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    def save_twice(tensors, path, **options):
        saved.append(1)
        return (save_file if len(saved) < 3 else full)(tensors, path, **options)

    monkeypatch.setattr(training, "save_file", save_twice)
    with pytest.raises(StorageError, match="no space left to write .*checkpoint.safetensors"):
        training.train(encoder, rows, never_enough(), tmp_path)
    with safe_open(tmp_path / "checkpoint.safetensors", "pt") as file:
        assert json.loads(file.metadata()["state"])["step"] == 4
    assert not list(tmp_path.glob(".*"))


def test_unreadable_training_state_starts_over_with_a_warning(encoder, rows, tmp_path, caplog):
    (tmp_path / "checkpoint.safetensors").write_bytes(b"cut")
    (tmp_path / "training.json").write_text("{")
    with pytest.raises(TrainingError, match="after 8 steps"):
        training.train(encoder, rows, never_enough(), tmp_path)
    assert "cannot be read; training starts from the beginning" in caplog.text


def test_fewer_steps_than_one_pass_are_refused_before_training(encoder, rows, tmp_path):
    with pytest.raises(TrainingError, match="max_steps: got 2, but one pass over 6 canaries in batches of 1 takes 6"):
        training.train(encoder, rows, dataclasses.replace(SETTINGS, batch_size=1, max_steps=2), tmp_path)
