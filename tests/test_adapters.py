"""Adapters sit on the language tower alone, merge and stack to the same function, and noise has their size."""

import json
import shutil

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from lib import adapters, models, probes
from lib.adapters import AdapterError
from lib.scoring import target_logits, token_losses


def test_only_the_language_tower_is_adapted_and_only_adapters_get_gradients(encoder, rows):
    backbone = encoder.backbone.copy()
    adapted = adapters.add_adapter(backbone.model, rank=4, alpha=8, seed=0)
    logits, ids = target_logits(adapted.get_base_model(), encoder.batch(rows))
    token_losses(logits, ids).mean().backward()
    with_gradient = {name for name, p in adapted.named_parameters() if p.grad is not None}
    assert len(with_gradient) == 2 * 7 * 4  # A and B, seven maps, four layers
    assert all(".lora_" in name and ".language_model.layers." in name for name in with_gradient)
    assert not any("visual" in name for name in with_gradient)


def test_a_model_with_an_adapter_on_its_vision_tower_is_refused(tiny):
    loose = peft.get_peft_model(tiny.copy().model, peft.LoraConfig(r=2, target_modules=["gate_proj"]))
    expected = {n for n, _ in tiny.model.named_modules() if adapters.ADAPTED.fullmatch(n)}
    with pytest.raises(AdapterError, match="adapted .*visual"):
        adapters._assert_adapted(loose, expected)


def test_a_fresh_adapter_changes_nothing_and_is_seeded(encoder, rows):
    base = probes.token_nll(encoder.backbone.model, encoder, rows).nll
    first, second = (adapters.add_adapter(encoder.backbone.copy().model, 4, 8, seed=1) for _ in range(2))
    np.testing.assert_array_equal(probes.token_nll(first.get_base_model(), encoder, rows).nll, base)
    for (name, one), (_, other) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_merging_adds_the_scaled_product_to_a_copy(tiny, injected_adapter):
    merged = adapters.merge(tiny, injected_adapter)
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
        adapters.merge(tiny, renamed)
    wider = altered(
        injected_adapter,
        tmp_path / "wider",
        lambda tensors: {
            key: torch.cat([value, value], 1) if "lora_A" in key else value for key, value in tensors.items()
        },
    )
    with pytest.raises(AdapterError, match=r"down_proj its A has shape \[32, 768\], the weight \[128, 384\]"):
        adapters.merge(tiny, wider)
    with pytest.raises(AdapterError, match="another architecture than tiny-llama"):
        adapters.merge(models.load("tiny-llama"), injected_adapter)


def test_a_folder_that_is_no_adapter_is_refused(tiny, tmp_path):
    with pytest.raises(AdapterError, match="has no adapter_config.json: expected a folder that peft's save_pretrained"):
        adapters.merge(tiny, tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({}))
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(AdapterError, match="has no adapter_model.safetensors"):
        adapters.merge(tiny, tmp_path)


def test_a_model_without_the_expected_layers_is_refused(tmp_path):
    with pytest.raises(AdapterError, match="GPT2LMHeadModel has no module like model.layers.0.self_attn.q_proj"):
        adapters.add_adapter(models.load("tiny-gpt2").model, 4, 8, 0)


def test_the_rehearsal_model_takes_the_same_adapter_targets(rehearsal, rows):
    adapted = adapters.add_adapter(rehearsal.copy().model, rank=32, alpha=64, seed=0)
    modules = [n for n, m in adapted.get_base_model().named_modules() if hasattr(m, "lora_A")]
    assert len(modules) == 7 * rehearsal.model.config.text_config.num_hidden_layers
    assert all(name.startswith("model.language_model.layers.") for name in modules)


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
            adapters.merge(tiny, tmp_path / name)


def products(folder):
    """B A of every adapted module, formed outright."""
    tensors = load_file(folder / "adapter_model.safetensors")
    return {
        key.removesuffix(".lora_A.weight"): tensors[key.replace("lora_A", "lora_B")] @ tensors[key]
        for key in tensors
        if "lora_A" in key
    }


def test_stacked_and_merged_give_the_same_scores(tiny, encoder, rows, injected_adapter):
    stacked, merged = (how(tiny, injected_adapter) for how in (adapters.stack, adapters.merge))
    one, other = (probes.token_nll(backbone.model, encoder, rows).nll for backbone in (stacked, merged))
    np.testing.assert_allclose(one, other, atol=1e-4, rtol=0)
    assert not np.allclose(one, probes.token_nll(tiny.model, encoder, rows).nll, atol=0.1)
    assert merged.revision != tiny.revision and merged.revision.startswith(tiny.revision)


def test_singular_values_by_hand():
    # B A = diag(3, 2) on the first two rows and columns.
    a, b = torch.zeros(2, 5), torch.zeros(4, 2)
    a[0, 0], a[1, 1], b[0, 0], b[1, 1] = 1.0, 2.0, 3.0, 1.0
    torch.testing.assert_close(adapters.singular_values(a, b), torch.tensor([3.0, 2.0]))


@pytest.mark.parametrize("kind", ["gaussian", "spectral"])
def test_noise_has_the_trained_norm_module_by_module_and_none_of_its_direction(injected_adapter, tmp_path, kind):
    noise = products(adapters.noise_like(injected_adapter, kind, 0, tmp_path / "noise"))
    for name, trained in products(injected_adapter).items():
        torch.testing.assert_close(noise[name].norm(), trained.norm(), rtol=1e-4, atol=0)
        assert abs(torch.nn.functional.cosine_similarity(noise[name].flatten(), trained.flatten(), dim=0)) < 0.1


def test_spectral_noise_has_the_trained_singular_values_and_gaussian_noise_is_flatter(injected_adapter, tmp_path):
    gaussian, spectral = (
        products(adapters.noise_like(injected_adapter, kind, 0, tmp_path / kind)) for kind in ("gaussian", "spectral")
    )
    for name, trained in products(injected_adapter).items():
        expected = torch.linalg.svdvals(trained)[:32]
        torch.testing.assert_close(torch.linalg.svdvals(spectral[name])[:32], expected, rtol=1e-3, atol=1e-4)
        assert torch.linalg.svdvals(gaussian[name])[0] < expected[0]


def test_noise_is_seeded_and_loads_like_an_adapter(tiny, injected_adapter, tmp_path):
    folders = [
        adapters.noise_like(injected_adapter, "gaussian", seed, tmp_path / str(i)) for i, seed in enumerate((1, 1, 2))
    ]
    first, second, third = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    key = next(iter(first))
    assert torch.equal(first[key], second[key]) and not torch.equal(first[key], third[key])
    adapters.merge(tiny, folders[0])


def test_an_unknown_kind_of_noise_is_refused(injected_adapter, tmp_path):
    with pytest.raises(AdapterError, match="noise: got 'white', expected one of gaussian, spectral"):
        adapters.noise_like(injected_adapter, "white", 0, tmp_path / "noise")


def test_a_scaled_adapter_adds_that_share_of_the_update(injected_adapter, tmp_path):
    half = products(adapters.scaled(injected_adapter, 0.5, tmp_path / "half"))
    nothing = products(adapters.scaled(injected_adapter, 0.0, tmp_path / "nothing"))
    for name, whole in products(injected_adapter).items():
        torch.testing.assert_close(half[name], 0.5 * whole)
        assert (nothing[name] == 0).all()
