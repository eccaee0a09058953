"""Backbones: one loader for every model of the package, and for any directory or hub id of the same families."""

import copy
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers import Qwen2_5_VLForConditionalGeneration as VLModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from lib import embedded, paths
from lib.errors import LeakbookError
from lib.files import sha256

VL_TYPE = "qwen2_5_vl"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
IDENTIFYING = {".safetensors", ".json", ".jinja", ".txt", ".model"}  # weights, configuration, tokenizer, template


class ModelError(LeakbookError, ValueError):
    """A model cannot be loaded, or is not of a kind this package handles."""


@dataclass(frozen=True)
class Backbone:
    """A language model with what is needed to feed it.

    ``image_processor`` is None for models without images. ``revision`` identifies the weights: a pinned checksum for
    the embedded models, the commit for a hub model, a checksum of the files of a directory.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    image_processor: Qwen2VLImageProcessorPil | None
    name: str
    revision: str

    @property
    def takes_images(self) -> bool:
        """Whether prompts may hold an image."""
        return self.image_processor is not None

    def with_model(self, model: PreTrainedModel) -> "Backbone":
        """The same backbone around other weights, a merged copy for instance."""
        return replace(self, model=model)

    def copy(self) -> "Backbone":
        """A backbone whose model can be changed without touching this one."""
        return self.with_model(_restrict_softmax(copy.deepcopy(self.model)))


def load(
    name: str,
    revision: str | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Backbone:
    """Load a backbone in evaluation mode, every parameter frozen.

    Args:
        name: a built-in name (:data:`BUILT_IN`), a directory, or a Hugging Face id: a Qwen2.5-VL model or any
            causal language model with safetensors weights. Remote code is never run.
        revision: commit, branch or tag of a hub model.

    Raises:
        ModelError: the name is unknown, the directory has no weights, or they are not safetensors.
        embedded.FetchError: an embedded model cannot be downloaded or fails its checksum.
    """
    maker = BUILT_IN.get(name)
    if maker is not None:
        backbone = maker()
    else:
        _check_source(name)
        backbone = replace(_from_pretrained(name, revision, dtype), name=name, revision=identity(name, revision))
    model = _restrict_softmax(backbone.model.to(device=device, dtype=dtype)).eval().requires_grad_(False)
    return backbone.with_model(model)


def identity(name: str, revision: str | None = None) -> str:
    """What identifies the weights behind ``name``, found without loading them."""
    if name in ("smollm2", "smol-vl"):
        return f"{embedded.SMOLLM2.sha256[:16]}-{embedded.BUILD}"
    if name in BUILT_IN:
        return f"seeded-{embedded.BUILD}"
    _check_source(name)
    if not Path(name).is_dir():
        return _configuration(name, revision)._commit_hash or "unknown"
    digest = hashlib.sha256()
    for file in sorted(Path(name).iterdir()):
        if file.suffix in IDENTIFYING:
            digest.update(f"{file.name} {sha256(file)}\n".encode())
    return digest.hexdigest()[:16]


def _check_source(name: str) -> None:
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise ModelError(f"{name} is a folder without config.json: expected a Hugging Face model directory.")
        if not list(folder.glob("*.safetensors")):
            others = [file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in folder.glob(pattern)]
            raise ModelError(
                f"{name} holds no safetensors weights (found {', '.join(others) or 'no weight file at all'}): "
                "expected model.safetensors or its shards; save the model again with save_pretrained."
            )
    elif not HUB_ID.fullmatch(name):
        raise ModelError(
            f"model {name!r} is neither built in ({', '.join(BUILT_IN)}) nor an existing folder "
            "nor a hub id of the form owner/name."
        )


def _from_pretrained(source: str | Path, revision: str | None = None, dtype: torch.dtype = torch.float32) -> Backbone:
    options = {"revision": revision, "trust_remote_code": False}
    config = _configuration(str(source), revision)
    is_vl = config.model_type == VL_TYPE
    kind = VLModel if is_vl else transformers.AutoModelForCausalLM
    try:
        model, report = kind.from_pretrained(
            source, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
        )
        tokenizer = _tokenizer(source, options)
        processor = Qwen2VLImageProcessorPil.from_pretrained(source, revision=revision) if is_vl else None
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"model {str(source)!r} of type {config.model_type!r} could not be loaded: {reason}"
        ) from error
    if report["missing_keys"]:
        first = sorted(report["missing_keys"])[0]
        raise ModelError(
            f"model {str(source)!r}: its weight files lack {len(report['missing_keys'])} tensors, {first} among them; "
            "expected all shards of a complete model"
        )
    if not tokenizer.is_fast:
        raise ModelError(f"model {str(source)!r} has no fast tokenizer: spans need character offsets.")
    return Backbone(model, tokenizer, processor, str(source), "")


def _tokenizer(source: str | Path, options: dict) -> PreTrainedTokenizerBase:
    try:
        return transformers.AutoTokenizer.from_pretrained(source, **options)
    except Exception as error:  # a damaged tokenizer.json raises plain ones
        raise ValueError(f"its tokenizer cannot be read ({type(error).__name__}: {str(error)[:200]})") from error


def _configuration(source: str, revision: str | None) -> transformers.PretrainedConfig:
    try:
        return transformers.AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"model {source!r} is not built in ({', '.join(BUILT_IN)}) and could not be read as a folder or from the "
            f"hub: {reason}"
        ) from error


def _restrict_softmax(model: PreTrainedModel) -> PreTrainedModel:
    """Let the output layer see only the first ``config.softmax_rows`` embedding rows, where the model says so.

    Rows appended for vision tokens are never predicted; inside the softmax they would shift every NLL.
    """
    rows = getattr(model.config, "softmax_rows", None)
    if rows is not None:
        table = model.get_input_embeddings().weight
        head = nn.Linear(table.shape[1], rows, bias=False, device="meta")
        head.weight = nn.Parameter(table.detach()[:rows], requires_grad=False)
        model.lm_head = head
    return model


def _embedded(name: str, folder: Callable[[], Path]) -> Callable[[], Backbone]:
    def make() -> Backbone:
        backbone = _from_pretrained(folder())
        return replace(backbone, name=name, revision=identity(name))

    return make


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """Byte-level BPE of 1,024 entries, digits split one by one, with the ChatML and vision tokens of Qwen2.5-VL."""
    tokenizer = Tokenizer.from_file(str(paths.DATA / "tiny_tokenizer.json"))
    return embedded.chat_tokenizer(tokenizer, TINY_SPECIALS)


TINY_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *embedded.VISION_TOKENS)


def _random_vl(name: str, tokenizer: PreTrainedTokenizerBase, text: dict, tie: bool, **vision: int) -> Backbone:
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in embedded.VISION_TOKENS}
    # With the usual 0.02 a random tied output layer cannot raise any logit far enough to memorise.
    text = {
        "initializer_range": 0.1,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    } | text
    config = embedded.vl_config(text | {"tie_word_embeddings": tie}, ids, tie=tie, **vision)
    with embedded.seeded(0):
        model = VLModel(config)
    return Backbone(model, tokenizer, Qwen2VLImageProcessorPil(), name, identity(name))


def _tiny_vl() -> Backbone:
    tokenizer = tiny_tokenizer()
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
    }
    return _random_vl("tiny-vl", tokenizer, text, True, depth=2, hidden_size=64, intermediate_size=128, num_heads=2)


def _rehearsal_vl() -> Backbone:
    tokenizer = transformers.AutoTokenizer.from_pretrained(embedded.qwen_tokenizer_folder())
    text = {
        "vocab_size": 152_064,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
    }
    sizes = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2}
    return _random_vl("rehearsal-vl", tokenizer, text, False, **sizes)


def _tiny_gpt2() -> Backbone:
    tokenizer = tiny_tokenizer()
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=256,
        n_embd=64,
        n_layer=3,
        n_head=4,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with embedded.seeded(0):
        model = transformers.GPT2LMHeadModel(config)
    return Backbone(model, tokenizer, None, "tiny-gpt2", identity("tiny-gpt2"))


def _tiny_llama() -> Backbone:
    tokenizer = tiny_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with embedded.seeded(0):
        model = transformers.LlamaForCausalLM(config)
    return Backbone(model, tokenizer, None, "tiny-llama", identity("tiny-llama"))


BUILT_IN: dict[str, Callable[[], Backbone]] = {
    "tiny-vl": _tiny_vl,
    "smol-vl": _embedded("smol-vl", embedded.smol_vl_folder),
    "rehearsal-vl": _rehearsal_vl,
    "tiny-gpt2": _tiny_gpt2,
    "tiny-llama": _tiny_llama,
    "smollm2": _embedded("smollm2", embedded.smollm2_folder),
}
