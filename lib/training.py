"""LoRA training on encoded canaries, merging into a copy, and the rules an adapter must obey."""

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import json
import logging
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import peft
import torch
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs
from peft.helpers import disable_input_dtype_casting
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel

from lib import embedded
from lib.config import InjectionSettings
from lib.encoding import Encoded, Encoder, content_hash
from lib.errors import LeakbookError
from lib.files import building
from lib.models import Backbone
from lib.scoring import target_logits, token_losses

# All linear maps of the language tower, anchored: the vision tower has q, k, v and MLP layers of the same names.
ADAPTED = re.compile(r"model\.(?:language_model\.)?layers\.\d+\.(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj)")
MAX_GRADIENT_NORM = 1.0
logger = logging.getLogger(__name__)
FINAL = "final"


class TrainingError(LeakbookError, RuntimeError):
    """Training did not reach what it was asked to reach."""


class AdapterError(LeakbookError, ValueError):
    """An adapter folder is unreadable, or belongs to another model."""


@dataclass(frozen=True)
class TrainedAdapters:
    """What one training run leaves behind.

    ``folder`` holds one adapter in peft's format under ``final`` and under ``step-<n>`` for every stopping step;
    ``log`` has the columns ``step``, ``loss`` (nats a target token, before the step) and ``argmax_share`` (target
    tokens that are the arg-max); ``precision`` is the one trained in.
    """

    folder: Path
    log: pd.DataFrame
    kept_steps: tuple[int, ...]
    final_step: int
    precision: str
    seconds: float

    def adapter(self, step: int | None = None) -> Path:
        """Folder of the final adapter, or of the one kept after ``step`` steps."""
        return self.folder / (FINAL if step is None else step_name(step))


def step_name(step: int) -> str:
    """Name of the adapter kept after ``step`` steps."""
    return f"step-{step:04d}"


@functools.cache
def accelerator() -> Accelerator:
    """The process's one Accelerator: it finds the device, and holds bf16 ready where the hardware computes it."""
    return Accelerator(mixed_precision="bf16" if bf16_in_hardware() else "no")


def bf16_in_hardware() -> bool:
    """Whether the accelerator or CPU of this machine multiplies bf16 natively."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if torch.backends.mps.is_available():
        return False
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16"))


def resolve_precision(precision: str) -> str:
    """``bf16`` or ``fp32`` for ``auto``, by hardware.

    Raises:
        TrainingError: bf16 is asked for by name where the hardware does not have it.
    """
    if precision == "bf16" and not bf16_in_hardware():
        raise TrainingError("injection.precision: got 'bf16', but this machine has no bf16 arithmetic: use 'auto'")
    if precision == "auto":
        return "bf16" if bf16_in_hardware() else "fp32"
    return precision


def keep_freed_memory() -> None:
    """Tell glibc to keep freed blocks for the next step; page faults on fresh ones cost a quarter of a CPU step."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            mallopt = ctypes.CDLL("libc.so.6").mallopt
            for option, value in ((-1, 2**31 - 1), (-2, 2**26), (-3, 2**30)):  # trim, top pad, mmap threshold
                mallopt(option, value)


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


def adapter_key(backbone: Backbone, rows: Sequence[Encoded], settings: InjectionSettings, protocol: int) -> str:
    """Content hash under which finished adapters are kept: weights, data, settings, protocol."""
    model = [type(backbone.model).__name__, backbone.revision]
    parts = [model, content_hash(rows), dataclasses.asdict(settings), protocol]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def train(encoder: Encoder, rows: Sequence[Encoded], settings: InjectionSettings, folder: Path) -> TrainedAdapters:
    """Train a LoRA on the targets of ``rows`` until all are decoded exactly, or take it from ``folder`` if finished.

    The loss is the mean NLL of target tokens, AdamW without weight decay, rate by :func:`learning_rate`. The backbone
    itself is never touched: training works on a copy. State is kept every ``check_every`` steps, so a
    killed run goes on where it was and ends with the same adapters.

    Raises:
        TrainingError: ``max_steps`` passed before recall and loss were reached.
    """
    finished = load_finished(folder)
    if finished is None:
        _Run(encoder, rows, settings, folder).run()
        finished = load_finished(folder)
    return finished


def load_finished(folder: Path) -> TrainedAdapters | None:
    """The adapters of a finished run in ``folder``, or None."""
    record = folder / "training.json"
    if not record.exists():
        return None
    try:
        state = json.loads(record.read_text())
    except ValueError:
        logger.warning("%s cannot be read; the adapters are trained again", record)
        return None
    return TrainedAdapters(folder, pd.DataFrame(state.pop("log")), tuple(state.pop("kept_steps")), **state)


def learning_rate(settings: InjectionSettings, step: int) -> float:
    """Rate of the step that follows ``step`` finished ones: linear warm-up, then linear decay to a tenth at the end."""
    warm = min(1.0, (step + 1) / max(1, settings.warmup_steps))
    return settings.learning_rate * warm * (1.0 - 0.9 * step / settings.max_steps)


class _Run:
    """One training run: model copy, optimiser, and what is kept on disk."""

    def __init__(self, encoder: Encoder, rows: Sequence[Encoded], settings: InjectionSettings, folder: Path):
        self.encoder, self.rows, self.settings, self.folder = encoder, rows, settings, folder
        self.precision = resolve_precision(settings.precision)
        self.batches = -(-len(rows) // settings.batch_size)  # of one pass over the rows
        if settings.max_steps < self.batches:
            raise TrainingError(
                f"injection.max_steps: got {settings.max_steps}, but one pass over {len(rows)} canaries in batches of "
                f"{settings.batch_size} takes {self.batches} steps; expected many passes"
            )
        keep_freed_memory()
        model = encoder.backbone.copy().model
        self.adapted = add_adapter(model, settings.rank, settings.alpha, settings.seed).train()
        self.weights = {name: p for name, p in self.adapted.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(self.weights.values(), lr=settings.learning_rate, weight_decay=0.0)
        self.step, self.log, self.seconds = 0, [], 0.0
        self._restore()

    def run(self) -> None:
        settings, started = self.settings, time.perf_counter()
        before = self.seconds
        bar = tqdm(total=settings.max_steps, initial=self.step, desc="canary LoRA", unit="step", mininterval=1.0)
        with bar:
            while not self._reached():
                if self.step >= settings.max_steps:
                    raise TrainingError(
                        f"after {self.step} steps recall is not 1.00 at a loss of {settings.target_nll} nats a token "
                        f"(the last loss is {self.log[-1]['loss']:.4f}): raise injection.max_steps"
                    )
                self._advance()
                bar.update()
                bar.set_postfix(loss=f"{self.log[-1]['loss']:.3f}", argmax=f"{self.log[-1]['argmax_share']:.0%}")
                self.seconds = before + time.perf_counter() - started
                if self.step in settings.stop_steps:
                    self._save_adapter(step_name(self.step))
                if self.step % settings.check_every == 0:
                    self._checkpoint()
        self._finish()

    def _batch_rows(self) -> list[Encoded]:
        """Rows of the next step: a fresh seeded order every pass, the last batch of a pass possibly smaller."""
        size = self.settings.batch_size
        epoch, place = divmod(self.step, self.batches)
        order = np.random.default_rng([self.settings.seed, epoch]).permutation(len(self.rows))
        return [self.rows[i] for i in order[place * size : (place + 1) * size]]

    def _advance(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.settings, self.step)
        batch = self.encoder.batch(self._batch_rows())
        autocast = accelerator().autocast(AutocastKwargs(enabled=self.precision == "bf16"))
        model = self.adapted.get_base_model()
        with autocast, disable_input_dtype_casting(model, active=self.precision == "bf16"):
            logits, ids = target_logits(model, batch)
        loss = token_losses(logits, ids).mean()
        accelerator().backward(loss)
        nn.utils.clip_grad_norm_(self.weights.values(), MAX_GRADIENT_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        share = (logits.argmax(-1) == ids).float().mean().item()
        self.log.append({"step": self.step, "loss": loss.item(), "argmax_share": share})

    def _reached(self) -> bool:
        """At a check: the last pass over the rows met the loss target, and in fp32 every target is the arg-max."""
        recent, due = self.log[-self.batches :], self.step % self.settings.check_every == 0
        if len(recent) < self.batches or not (due or self.step == self.settings.max_steps):
            return False
        if np.mean([entry["loss"] for entry in recent]) > self.settings.target_nll:
            return False
        model, size = self.adapted.get_base_model(), self.settings.batch_size
        with torch.no_grad():
            for i in range(0, len(self.rows), size):
                logits, ids = target_logits(model, self.encoder.batch(self.rows[i : i + size]))
                if not (logits.argmax(-1) == ids).all():
                    return False
        return True

    def _save_adapter(self, name: str) -> None:
        with building(self.folder / name) as unfinished:
            self.adapted.peft_config["default"].base_model_name_or_path = self.encoder.backbone.name
            self.adapted.save_pretrained(unfinished, save_embedding_layers=False)  # "auto" would ask a hub

    def _checkpoint(self) -> None:
        """Keep weights, optimiser moments and log; one rename makes them the state to go on from."""
        tensors = {f"weight/{name}": p.detach() for name, p in self.weights.items()}
        for name, parameter in self.weights.items():
            state = self.optimizer.state[parameter]
            tensors |= {f"{key}/{name}": state[key] for key in ("exp_avg", "exp_avg_sq")}
        state = {"step": self.step, "log": self.log, "seconds": self.seconds}
        with building(self.folder / "checkpoint.safetensors") as unfinished:
            save_file(tensors, unfinished, metadata={"state": json.dumps(state)})

    def _restore(self) -> None:
        path = self.folder / "checkpoint.safetensors"
        if not path.exists():
            return
        try:
            with safe_open(path, "pt") as file:
                state = json.loads(file.metadata()["state"])
        except SafetensorError:
            logger.warning("%s cannot be read; training starts from the beginning", path)
            return
        tensors = load_file(path, device=str(self.encoder.backbone.model.device))
        self.step, self.log, self.seconds = state["step"], state["log"], state["seconds"]
        with torch.no_grad():
            for name, parameter in self.weights.items():
                parameter.copy_(tensors[f"weight/{name}"])
                moments = {key: tensors[f"{key}/{name}"] for key in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[parameter] = {"step": torch.tensor(float(self.step))} | moments

    def _finish(self) -> None:
        self._save_adapter(FINAL)
        kept = [step for step in self.settings.stop_steps if step <= self.step]
        record = {"log": self.log, "kept_steps": kept, "final_step": self.step}
        record |= {"precision": self.precision, "seconds": round(self.seconds, 1)}
        with building(self.folder / "training.json") as unfinished:
            unfinished.write_text(json.dumps(record))
        (self.folder / "checkpoint.safetensors").unlink(missing_ok=True)


def merge(backbone: Backbone, adapter: Path) -> Backbone:
    """A copy of ``backbone`` with W + (alpha / rank) B A as its weights; ``backbone`` itself stays as it is.

    Raises:
        AdapterError: see :func:`check_adapter`.
    """
    check_adapter(adapter, backbone)
    stacked = peft.PeftModel.from_pretrained(backbone.copy().model, str(adapter))
    return backbone.with_model(stacked.merge_and_unload().eval().requires_grad_(False))


def check_adapter(adapter: Path, backbone: Backbone) -> None:
    """Refuse an adapter that does not belong to the backbone, before anything is loaded.

    Raises:
        AdapterError: the folder is no peft adapter in safetensors, or a matrix does not fit a module of the model.
    """
    adapter = Path(adapter)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (adapter / name).exists():
            raise AdapterError(f"{adapter} has no {name}: expected a folder that peft's save_pretrained wrote")
    try:
        with safe_open(adapter / "adapter_model.safetensors", "pt") as file:
            shapes = {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118, no mapping
    except SafetensorError as error:
        raise AdapterError(f"{adapter}/adapter_model.safetensors cannot be read ({error})") from error
    if not shapes:
        raise AdapterError(f"{adapter}/adapter_model.safetensors holds no matrix: expected those of a LoRA")
    modules = dict(backbone.model.named_modules())
    for key, shape in shapes.items():
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_(A|B)\.weight", key)
        if match is None:
            raise AdapterError(f"{adapter} holds {key}: expected only the A and B matrices of a LoRA")
        _check_matrix(adapter, backbone, modules.get(match[1]), match, shape)


def _check_matrix(adapter: Path, backbone: Backbone, module: nn.Module | None, match: re.Match, shape: list) -> None:
    made_for = f"adapter {adapter} was made for another architecture than {backbone.name}"
    if module is None:
        raise AdapterError(f"{made_for}: it adapts {match[1]}, which the model does not have")
    weight = list(getattr(getattr(module, "weight", None), "shape", []))
    axis = 1 if match[2] == "A" else 0  # A [rank, in] shares its columns with W [out, in], B [out, rank] its rows
    if len(weight) != 2 or shape[axis] != weight[axis]:
        raise AdapterError(f"{made_for}: at {match[1]} its {match[2]} has shape {shape}, the weight {weight}")


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Torch's CPU threads set to ``count`` inside the block: results depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
