"""Training touches the language tower alone, resumes where it was killed, and refuses foreign adapters."""

import dataclasses
import errno
import json
import shutil

import numpy as np
import peft
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lib import config, models, probes, training
from lib.encoding import Encoder
from lib.files import StorageError
from lib.scoring import target_logits, token_losses
from lib.training import AdapterError, TrainingError

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


def test_only_the_language_tower_is_adapted_and_only_adapters_get_gradients(encoder, rows):
    backbone = encoder.backbone.copy()
    adapted = training.add_adapter(backbone.model, rank=4, alpha=8, seed=0)
    logits, ids = target_logits(adapted.get_base_model(), encoder.batch(rows))
    token_losses(logits, ids).mean().backward()
    with_gradient = {name for name, p in adapted.named_parameters() if p.grad is not None}
    assert len(with_gradient) == 2 * 7 * 4  # A and B, seven maps, four layers
    assert all(".lora_" in name and ".language_model.layers." in name for name in with_gradient)
    assert not any("visual" in name for name in with_gradient)


def test_a_model_with_an_adapter_on_its_vision_tower_is_refused(tiny):
    loose = peft.get_peft_model(tiny.copy().model, peft.LoraConfig(r=2, target_modules=["gate_proj"]))
    expected = {n for n, _ in tiny.model.named_modules() if training.ADAPTED.fullmatch(n)}
    with pytest.raises(AdapterError, match="adapted .*visual"):
        training._assert_adapted(loose, expected)


def test_a_fresh_adapter_changes_nothing_and_is_seeded(encoder, rows):
    base = probes.token_nll(encoder.backbone.model, encoder, rows).nll
    first, second = (training.add_adapter(encoder.backbone.copy().model, 4, 8, seed=1) for _ in range(2))
    np.testing.assert_array_equal(probes.token_nll(first.get_base_model(), encoder, rows).nll, base)
    for (name, one), (_, other) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_the_output_layer_sees_target_positions_only(encoder, rows):
    seen = []
    handle = encoder.backbone.model.lm_head.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape))
    try:
        logits, ids = target_logits(encoder.backbone.model, encoder.batch(rows))
    finally:
        handle.remove()
    targets = sum(len(row.target_ids) for row in rows)
    starts, ends = [row.target_start for row in rows], [len(row.input_ids) for row in rows]
    assert logits.shape[0] == len(ids) == targets
    assert seen[0][:2] == (len(rows), max(ends) - min(starts))


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
    advance = training._Run._advance

    def stop_after_five(run):
        if run.step == 5:
            raise KeyboardInterrupt
        advance(run)

    monkeypatch.setattr(training._Run, "_advance", stop_after_five)
    with pytest.raises(KeyboardInterrupt):
        training.train(encoder, rows, settings, halves)
    steps = []
    monkeypatch.setattr(training._Run, "_advance", lambda run: steps.append(run.step) or advance(run))
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


def test_merging_adds_the_scaled_product_to_a_copy(tiny, injected_adapter):
    merged = training.merge(tiny, injected_adapter)
    tensors = load_file(injected_adapter / "adapter_model.safetensors")
    name = "model.language_model.layers.0.self_attn.q_proj"
    a, b = (tensors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
    before = tiny.model.get_submodule(name).weight
    after = merged.model.get_submodule(name).weight
    torch.testing.assert_close(after - before, 64 / 32 * b @ a, atol=1e-6, rtol=0)
    assert not any(parameter.requires_grad for parameter in merged.model.parameters())
    assert not any("lora" in key for key in merged.model.state_dict())


def altered(adapter, folder, change):
    """A copy of ``adapter`` whose tensors went through ``change``."""
    shutil.copytree(adapter, folder)
    save_file(change(load_file(adapter / "adapter_model.safetensors")), folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_for_another_architecture_is_refused(tiny, injected_adapter, tmp_path):
    renamed = altered(
        injected_adapter,
        tmp_path / "renamed",
        lambda tensors: {
            key.replace("language_model.layers.0", "language_model.layers.9"): value for key, value in tensors.items()
        },
    )
    with pytest.raises(AdapterError, match="another architecture than tiny-vl: it adapts .*layers.9.*does not have"):
        training.merge(tiny, renamed)
    wider = altered(
        injected_adapter,
        tmp_path / "wider",
        lambda tensors: {
            key: torch.cat([value, value], 1) if "lora_A" in key else value for key, value in tensors.items()
        },
    )
    with pytest.raises(AdapterError, match=r"down_proj its A has shape \[32, 768\], the weight \[128, 384\]"):
        training.merge(tiny, wider)
    with pytest.raises(AdapterError, match="another architecture than tiny-llama"):
        training.merge(models.load("tiny-llama"), injected_adapter)


def test_a_folder_that_is_no_adapter_is_refused(tiny, tmp_path):
    with pytest.raises(AdapterError, match="has no adapter_config.json: expected a folder that peft's save_pretrained"):
        training.merge(tiny, tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({}))
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(AdapterError, match="has no adapter_model.safetensors"):
        training.merge(tiny, tmp_path)


def test_a_model_without_the_expected_layers_is_refused(tmp_path):
    with pytest.raises(AdapterError, match="GPT2LMHeadModel has no module like model.layers.0.self_attn.q_proj"):
        training.add_adapter(models.load("tiny-gpt2").model, 4, 8, 0)


def test_the_rehearsal_model_takes_the_same_adapter_targets(rehearsal, rows):
    adapted = training.add_adapter(rehearsal.copy().model, rank=32, alpha=64, seed=0)
    modules = [n for n, m in adapted.get_base_model().named_modules() if hasattr(m, "lora_A")]
    assert len(modules) == 7 * rehearsal.model.config.text_config.num_hidden_layers
    assert all(name.startswith("model.language_model.layers.") for name in modules)


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


def test_a_damaged_or_foreign_matrix_file_is_refused(tiny, injected_adapter, tmp_path):
    for name in ("cut", "empty", "other"):
        shutil.copytree(injected_adapter, tmp_path / name)
    (tmp_path / "cut" / "adapter_model.safetensors").write_bytes(b"cut")
    save_file({}, tmp_path / "empty" / "adapter_model.safetensors")
    save_file({"base_model.model.x.ia3_l": torch.ones(2)}, tmp_path / "other" / "adapter_model.safetensors")
    for name, message in (
        ("cut", "cannot be read"),
        ("empty", "holds no matrix"),
        ("other", "holds .*ia3_l: expected"),
    ):
        with pytest.raises(AdapterError, match=message):
            training.merge(tiny, tmp_path / name)
