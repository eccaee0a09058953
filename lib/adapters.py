"""LoRA adapters on disk and on a model: adding, checking, stacking, merging into a copy, and noise of the same size."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.tuners_utils import _maybe_include_all_linear_layers as spelled_out
from peft.tuners.tuners_utils import check_target_module_exists as adapts
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lib import embedded
from lib.errors import LeakbookError
from lib.files import building, sha256
from lib.models import Backbone

# All linear maps of the language tower, anchored: the vision tower has MLP layers of the same names.
ADAPTED = re.compile(r"model\.(?:language_model\.)?layers\.\d+\.(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj)")


class AdapterError(LeakbookError, ValueError):
    """An adapter folder is unreadable, or belongs to another model."""


def add_adapter(model: PreTrainedModel, rank: int, alpha: int, seed: int) -> peft.PeftModel:
    """Put a fresh LoRA on all linear maps of the language tower, W + (alpha / rank) B A with B = 0 (arXiv:2106.09685).

    Raises:
        AdapterError: the model has none of the modules, or peft adapted others than expected.
    """
    expected = {name for name, _ in model.named_modules() if ADAPTED.fullmatch(name)}
    if not expected:
        raise AdapterError(
            f"{type(model).__name__} has no module like model.layers.0.self_attn.q_proj: "
            "expected a Qwen2.5-VL or Llama type model"
        )
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=ADAPTED.pattern)
    with embedded.seeded(seed):
        adapted = peft.get_peft_model(model, config)
    _assert_adapted(adapted, expected)
    return adapted


def _assert_adapted(adapted: peft.PeftModel, expected: set[str]) -> None:
    """Exactly ``expected`` carry an adapter, and nothing but adapters gets a gradient: no part of the vision tower."""
    modules = {name for name, module in adapted.get_base_model().named_modules() if hasattr(module, "lora_A")}
    trainable = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    strays = [name for name in trainable if ".lora_" not in name or ".visual." in name]
    if modules != expected or strays:
        raise AdapterError(f"adapted {sorted(modules ^ expected)[:3]} and trains {strays[:3]}, expected neither")


def merge(backbone: Backbone, adapter: Path) -> Backbone:
    """A copy of ``backbone`` with W + (alpha / rank) B A as its weights; ``backbone`` itself stays as it is.

    Raises:
        AdapterError: see :func:`check_adapter`.
    """
    merged = _load(backbone, adapter).merge_and_unload()
    revision = f"{backbone.revision}+{sha256(Path(adapter) / 'adapter_model.safetensors')[:16]}"
    return replace(backbone, model=merged.eval().requires_grad_(False), revision=revision)


def check_folder(adapter: Path) -> None:
    """Refuse a folder that is no adapter of peft in safetensors.

    Raises:
        AdapterError: naming the file that is missing or unreadable.
    """
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (Path(adapter) / name).exists():
            raise AdapterError(f"{adapter} has no {name}: expected a folder that peft's save_pretrained wrote")
    file, config = Path(adapter) / "adapter_config.json", _configuration(adapter)
    for name, (fits, expected) in CONFIGURED.items():
        if not fits(config.get(name)):
            raise AdapterError(f"{file}: {name} is {config.get(name)!r}, expected {expected}")


def made_for(adapter: Path) -> str | None:
    """What an adapter's own configuration says its base model was.

    Raises:
        AdapterError: the configuration is not a JSON object.
    """
    return _configuration(adapter).get("base_model_name_or_path")


def _configuration(adapter: Path) -> dict[str, Any]:
    file = Path(adapter) / "adapter_config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{file} cannot be read ({error}): expected a JSON object") from error
    if not isinstance(found, dict):
        raise AdapterError(f"{file} cannot be read (got {str(found)[:80]!r}): expected a JSON object")
    return found


def _names(value: Any) -> bool:
    several = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return bool(value) and (several or isinstance(value, str))


CONFIGURED: dict[str, tuple[Callable[[Any], bool], str]] = {  # what an adapter's configuration must say
    "peft_type": (lambda value: value == "LORA", "'LORA'"),
    "use_dora": (lambda value: value in (None, False), "false: only W + (alpha / r) B A is computed"),
    "r": (lambda value: type(value) is int and value > 0, "a whole number above 0"),
    "target_modules": (_names, "names of modules, or a pattern"),
    "base_model_name_or_path": (lambda value: value is None or isinstance(value, str), "a text, or null"),
}


def check_adapter(adapter: Path, backbone: Backbone) -> None:
    """Refuse an adapter that does not belong to the backbone, before anything is loaded.

    Raises:
        AdapterError: the folder is no peft adapter in safetensors, a matrix does not fit a module of the model or is
            not finite, or the configuration's modules and ranks are not those of the matrices.
    """
    adapter = Path(adapter)
    check_folder(adapter)
    modules, matrices = dict(backbone.model.named_modules()), _matrices(adapter)
    for match, shape in matrices:
        _check_matrix(adapter, backbone, modules.get(match[1]), match, shape)
    config = spelled_out(_lora_config(adapter), backbone.model)  # "all-linear" by the modules' names
    _check_ranks(adapter, matrices, {config.r, *config.rank_pattern.values()})
    _check_targets(adapter, {match[1] for match, _ in matrices}, {n for n in modules if n and adapts(config, n)})
    _check_finite(adapter)


def _lora_config(adapter: Path) -> peft.LoraConfig:
    try:
        return peft.LoraConfig.from_pretrained(str(adapter))
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise AdapterError(f"{adapter}/adapter_config.json: peft cannot use it ({error})") from error


def _check_ranks(adapter: Path, matrices: list[tuple[re.Match, list[int]]], expected: set[int]) -> None:
    """Every module has an A and a B of one rank, which the configuration states."""
    ranks: dict[str, dict[str, int]] = {}
    for match, shape in matrices:
        ranks.setdefault(match[1], {})[match[2]] = shape[0 if match[2] == "A" else 1]
    for module, found in ranks.items():
        if len(found) < 2:
            lacking = "B" if "A" in found else "A"
            raise AdapterError(f"{adapter}: {module} has no lora_{lacking}: expected an A and a B for every module")
        if found["A"] != found["B"] or found["A"] not in expected:
            stated = " or ".join(map(str, sorted(expected)))
            raise AdapterError(
                f"{adapter}: at {module} A has rank {found['A']} and B {found['B']}, expected r = {stated} of its "
                "configuration"
            )


def _check_targets(adapter: Path, held: set[str], named: set[str]) -> None:
    """The modules that the file has matrices for are those that peft will adapt."""
    if held - named:
        raise AdapterError(
            f"{adapter} holds matrices for {sorted(held - named)[0]}, which the target_modules of its configuration "
            "leave out: they would be passed over"
        )
    if named - held:
        raise AdapterError(
            f"{adapter} holds no matrices for {sorted(named - held)[0]}, which the target_modules of its configuration "
            "name: expected those of every module"
        )


def _check_finite(adapter: Path) -> None:
    with safe_open(adapter / "adapter_model.safetensors", "pt") as file:
        for key in file.keys():  # noqa: SIM118, no mapping
            if not torch.isfinite(file.get_tensor(key)).all():
                raise AdapterError(f"{adapter}: {key} holds a value that is no finite number")


def check_changes(adapter: Path) -> None:
    """Refuse an adapter that adds nothing, as one does that was saved before its training: B A is zero everywhere.

    Raises:
        AdapterError: for every module A or B is zero.
    """
    zero: dict[str, bool] = {}
    for key, matrix in load_file(Path(adapter) / "adapter_model.safetensors").items():
        module = key.rpartition(".lora_")[0]
        zero[module] = zero.get(module, False) or not matrix.any()
    if all(zero.values()):
        raise AdapterError(
            f"{adapter} changes nothing: B A is zero for all its {len(zero)} modules; expected an adapter saved after "
            "training (the model alone is audited without --adapter)"
        )


def adapted_modules(adapter: Path) -> set[str]:
    """Names of the modules whose weights an adapter changes.

    Raises:
        AdapterError: its file is unreadable, or holds something else than a LoRA.
    """
    return {match[1] for match, _ in _matrices(Path(adapter))}


def _matrices(adapter: Path) -> list[tuple[re.Match, list[int]]]:
    """Module and side of every matrix of an adapter's file, as the groups of a match, with its shape."""
    try:
        with safe_open(adapter / "adapter_model.safetensors", "pt") as file:
            shapes = {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118, no mapping
    except SafetensorError as error:
        raise AdapterError(f"{adapter}/adapter_model.safetensors cannot be read ({error})") from error
    if not shapes:
        raise AdapterError(f"{adapter}/adapter_model.safetensors holds no matrix: expected those of a LoRA")
    matches = {key: re.fullmatch(r"base_model\.model\.(.+)\.lora_(A|B)\.weight", key) for key in shapes}
    for key, match in matches.items():
        if match is None:
            raise AdapterError(f"{adapter} holds {key}: expected only the A and B matrices of a LoRA")
    return [(match, shapes[key]) for key, match in matches.items()]


def _check_matrix(adapter: Path, backbone: Backbone, module: nn.Module | None, match: re.Match, shape: list) -> None:
    made_for = f"adapter {adapter} was made for another architecture than {backbone.name}"
    if module is None:
        raise AdapterError(f"{made_for}: it adapts {match[1]}, which the model does not have")
    weight = list(getattr(getattr(module, "weight", None), "shape", []))
    if isinstance(module, Conv1D):  # GPT-2 keeps W as [in, out]
        weight = weight[::-1]
    axis = 1 if match[2] == "A" else 0  # A [rank, in] shares its columns with W [out, in], B [out, rank] its rows
    if len(weight) != 2 or shape[axis] != weight[axis]:
        raise AdapterError(f"{made_for}: at {match[1]} its {match[2]} has shape {shape}, the weight {weight}")


def stack(backbone: Backbone, adapter: Path) -> Backbone:
    """A copy of ``backbone`` with the adapter beside its weights, computed at every call and not merged.

    Raises:
        AdapterError: see :func:`check_adapter`.
    """
    stacked = _load(backbone, adapter).get_base_model()
    return backbone.with_model(stacked.eval().requires_grad_(False))


def _load(backbone: Backbone, adapter: Path) -> peft.PeftModel:
    check_adapter(adapter, backbone)
    return peft.PeftModel.from_pretrained(backbone.copy().model, str(adapter))


def singular_values(a: Tensor, b: Tensor) -> Tensor:
    """Singular values of B A [rank], from A [rank, in] and B [out, rank], without forming the product."""
    right, left = torch.linalg.qr(a.T).R, torch.linalg.qr(b).R
    return torch.linalg.svdvals(left @ right.T)


def noise_like(adapter: Path, kind: str, seed: int, folder: Path) -> Path:
    """Write a random adapter of the size of a trained one to ``folder``, module by module (LoRA-NOISE).

    ``gaussian``: A and B with independent normal entries, scaled so that B A has the trained product's Frobenius norm.
    ``spectral``: random singular vectors with the trained product's singular values. Rank and alpha are the trained
    adapter's, so the equalities hold for (alpha / rank) B A, too.

    Raises:
        AdapterError: the kind is unknown.
    """
    if kind not in NOISE:
        raise AdapterError(f"noise: got {kind!r}, expected one of {', '.join(NOISE)}")
    trained = load_file(adapter / "adapter_model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    noise = {}
    for key in sorted(key for key in trained if key.endswith(".lora_A.weight")):
        partner = key.replace(".lora_A.", ".lora_B.")
        a, b = trained[key].float(), trained[partner].float()
        noise[key], noise[partner] = (matrix.contiguous() for matrix in NOISE[kind](a, b, generator))
    with building(folder) as unfinished:
        unfinished.mkdir()
        save_file(noise, unfinished / "adapter_model.safetensors")
        shutil.copy2(adapter / "adapter_config.json", unfinished)
    return folder


def scaled(adapter: Path, factor: float, folder: Path) -> Path:
    """Write an adapter that adds ``factor`` times what a trained one adds, factor (alpha / rank) B A, to ``folder``."""
    matrices = load_file(adapter / "adapter_model.safetensors")
    written = {key: (factor * m if ".lora_B." in key else m).contiguous() for key, m in matrices.items()}
    with building(folder) as unfinished:
        unfinished.mkdir()
        save_file(written, unfinished / "adapter_model.safetensors")
        shutil.copy2(adapter / "adapter_config.json", unfinished)
    return folder


def _gaussian(a: Tensor, b: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    random_a, random_b = (torch.randn(matrix.shape, generator=generator) for matrix in (a, b))
    scale = (_product_norm(a, b) / _product_norm(random_a, random_b)).sqrt()
    return scale * random_a, scale * random_b


def _product_norm(a: Tensor, b: Tensor) -> Tensor:
    """Frobenius norm of B A: ||BA||^2 = tr(B^T B A A^T)."""
    return ((b.T @ b) * (a @ a.T)).sum().sqrt()


def _spectral(a: Tensor, b: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    root = singular_values(a, b).sqrt()
    left, right = (torch.linalg.qr(torch.randn(size, generator=generator)).Q for size in (b.shape, a.T.shape))
    return (right * root).T, left * root


NOISE = {"gaussian": _gaussian, "spectral": _spectral}
