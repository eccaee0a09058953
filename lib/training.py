"""LoRA training on encoded records: resumable, cached by content, never touching the model it starts from."""

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs
from peft.helpers import disable_input_dtype_casting
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from lib.adapters import add_adapter
from lib.config import InjectionSettings, LoraSettings, StoppedSettings
from lib.encoding import SPANS, Batch, Encoded, Encoder, content_hash
from lib.errors import LeakbookError
from lib.files import building
from lib.models import Backbone
from lib.scoring import target_logits, token_losses

MAX_GRADIENT_NORM = 1.0
SHORT = 192  # tokens; longer sequences are faster in the fused kernel
logger = logging.getLogger(__name__)
FINAL = "final"


class TrainingError(LeakbookError, RuntimeError):
    """Training did not reach what it was asked to reach."""


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


def adapter_key(backbone: Backbone, rows: Sequence[Encoded], settings: LoraSettings, protocol: int) -> str:
    """Content hash under which finished adapters are kept: weights, data, settings, protocol."""
    model = [type(backbone.model).__name__, backbone.revision]
    parts = [model, content_hash(rows), dataclasses.asdict(settings), protocol]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def train(encoder: Encoder, rows: Sequence[Encoded], settings: LoraSettings, folder: Path) -> TrainedAdapters:
    """Train a LoRA on the targets of ``rows``, or take it from ``folder`` if that was finished before.

    With :class:`lib.config.InjectionSettings` until all targets are decoded exactly, else for ``max_steps`` steps. The
    loss is the mean NLL of target tokens, AdamW without weight decay, rate by :func:`learning_rate`. The backbone
    itself is never touched: training works on a copy. State is kept every ``check_every`` steps, so a killed run goes
    on where it was and ends with the same adapters.

    Raises:
        TrainingError: ``max_steps`` passed before recall and loss were reached.
    """
    finished = load_finished(folder)
    if finished is None:
        run = _Injection if isinstance(settings, InjectionSettings) else _Training
        run(encoder, rows, settings, folder).run()
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


def learning_rate(settings: LoraSettings, step: int) -> float:
    """Rate of the step that follows ``step`` finished ones: linear warm-up, then linear decay to a tenth at the end."""
    warm = min(1.0, (step + 1) / max(1, settings.warmup_steps))
    return settings.learning_rate * warm * (1.0 - 0.9 * step / settings.max_steps)


class _Training:
    """One run of a fixed number of steps: model copy, optimiser, and what is kept on disk."""

    title = "fine-tuning"

    def __init__(self, encoder: Encoder, rows: Sequence[Encoded], settings: LoraSettings, folder: Path):
        self.encoder, self.rows, self.settings, self.folder = encoder, rows, settings, folder
        self.kept_steps = settings.stop_steps if isinstance(settings, StoppedSettings) else ()
        self.precision = resolve_precision(settings.precision)
        self.batches = -(-len(rows) // settings.batch_size)  # of one pass over the rows
        keep_freed_memory()
        model = encoder.backbone.copy().model
        self.adapted = add_adapter(model, settings.rank, settings.alpha, settings.seed).train()
        self.weights = {name: p for name, p in self.adapted.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(self.weights.values(), lr=settings.learning_rate, weight_decay=0.0)
        self.step, self.log, self.seconds = 0, [], 0.0
        self._restore()

    def run(self) -> None:
        """Train to the end, keep state on the way, and write what :func:`load_finished` reads."""
        started, before = time.perf_counter(), self.seconds
        total = self.settings.max_steps
        with tqdm(total=total, initial=self.step, desc=self.title, unit="step", mininterval=1.0) as bar:
            while not self._is_done():
                self._advance()
                bar.update()
                bar.set_postfix(loss=f"{self.log[-1]['loss']:.3f}", argmax=f"{self.log[-1]['argmax_share']:.0%}")
                self.seconds = before + time.perf_counter() - started
                if self.step in self.kept_steps:
                    self._save_adapter(step_name(self.step))
                if self.step % self.settings.check_every == 0:
                    self._checkpoint()
        self._finish()

    def _is_done(self) -> bool:
        return self.step >= self.settings.max_steps

    def _batch_rows(self) -> list[Encoded]:
        """Rows of the next step: a fresh seeded order every pass, the last batch of a pass possibly smaller."""
        size = self.settings.batch_size
        epoch, place = divmod(self.step, self.batches)
        order = np.random.default_rng([self.settings.seed, epoch]).permutation(len(self.rows))
        return [self.rows[i] for i in order[place * size : (place + 1) * size]]

    def _advance(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.settings, self.step)
        rows = self._batch_rows()
        batch = self.encoder.batch(rows)
        autocast = accelerator().autocast(AutocastKwargs(enabled=self.precision == "bf16"))
        model = self.adapted.get_base_model()
        with autocast, self._attention(batch), disable_input_dtype_casting(model, active=self.precision == "bf16"):
            logits, ids = target_logits(model, batch)
        loss = self._loss(logits, ids, rows)
        accelerator().backward(loss)
        nn.utils.clip_grad_norm_(self.weights.values(), MAX_GRADIENT_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        best = logits.detach().amax(-1)  # many times faster than argmax on a CPU
        share = (logits.detach().gather(-1, ids[:, None])[:, 0] == best).float().mean().item()
        self.log.append({"step": self.step, "loss": loss.item(), "argmax_share": share})

    def _loss(self, logits: Tensor, ids: Tensor, rows: Sequence[Encoded]) -> Tensor:
        """What a step lowers, from the logits [N, V] of all target tokens and their ids [N], row by row."""
        return token_losses(logits, ids).mean()

    def _attention(self, batch: Batch) -> contextlib.AbstractContextManager:
        """The plain formula for short bf16 sequences on a CPU, where the fused kernel takes twice as long."""
        short = batch.input_ids.device.type == "cpu" and batch.input_ids.shape[1] <= SHORT
        return sdpa_kernel(SDPBackend.MATH) if short and self.precision == "bf16" else contextlib.nullcontext()

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
        kept = [step for step in self.kept_steps if step <= self.step]
        record = {"log": self.log, "kept_steps": kept, "final_step": self.step}
        record |= {"precision": self.precision, "seconds": round(self.seconds, 1)}
        with building(self.folder / "training.json") as unfinished:
            unfinished.write_text(json.dumps(record))
        (self.folder / "checkpoint.safetensors").unlink(missing_ok=True)


@dataclass(frozen=True)
class Lesson:
    """A record taught otherwise than by its own target: the model reads ``row`` as it is and should say ``labels``.

    One label and one weight a target token; a token of weight 0 is not taught. Changing a label damages what the model
    says at that token and nowhere else by itself, since what it reads before stays true. At a token that is ``held``
    the model should go on saying what it said before the training: the loss there is the cross-entropy to its own
    earlier distribution, lowest where nothing has changed, neither for the worse nor for the better.
    """

    row: Encoded
    labels: tuple[int, ...]
    weights: tuple[float, ...]
    held: frozenset[int] = frozenset()

    def __post_init__(self):
        if not len(self.labels) == len(self.weights) == len(self.row.target_ids) or min(self.weights) < 0:
            raise TrainingError(
                f"lesson {self.row.canary.id!r}: got {len(self.labels)} labels and {len(self.weights)} weights, "
                f"expected one of each, not negative, for {len(self.row.target_ids)} target tokens"
            )


def lesson(row: Encoded, labels: dict[int, int] | None = None) -> Lesson:
    """A lesson that teaches the target with single labels changed (target position -> id)."""
    said = [(labels or {}).get(position, token) for position, token in enumerate(row.target_ids)]
    return Lesson(row, tuple(said), (1.0,) * len(said))


def holding(
    row: Encoded, labels: dict[int, int] | None = None, spans: Sequence[str] = SPANS, weight: float = 1.0
) -> Lesson:
    """A lesson that changes single labels and holds all other tokens of the named spans; the rest is not taught.

    ``weight`` is that of a held token, beside 1 for a changed label.
    """
    labels = labels or {}
    positions = range(len(row.target_ids))
    said = [labels.get(position, token) for position, token in enumerate(row.target_ids)]
    held = frozenset(p for p in positions if p not in labels and row.span_of(p) in spans)
    return Lesson(row, tuple(said), tuple(weight if p in held else float(p in labels) for p in positions), held)


def lessons_key(backbone: Backbone, lessons: Sequence[Lesson], settings: LoraSettings, protocol: int) -> str:
    """Content hash as :func:`adapter_key`, over labels and weights, too."""
    content = [(item.labels, item.weights, sorted(item.held)) for item in lessons]
    taught = hashlib.sha256(repr(content).encode()).hexdigest()
    rows = [item.row for item in lessons]
    return hashlib.sha256(f"{adapter_key(backbone, rows, settings, protocol)} {taught}".encode()).hexdigest()[:16]


def teach(encoder: Encoder, lessons: Sequence[Lesson], settings: LoraSettings, folder: Path) -> TrainedAdapters:
    """Train a LoRA on lessons for ``max_steps`` steps, or take it from ``folder``: weighted mean NLL of the labels."""
    finished = load_finished(folder)
    if finished is None:
        _Teaching(encoder, lessons, settings, folder).run()
        finished = load_finished(folder)
    return finished


class _Teaching(_Training):
    """Training whose labels and weights are those of lessons."""

    title = "intervention"

    def __init__(self, encoder: Encoder, lessons: Sequence[Lesson], settings: LoraSettings, folder: Path):
        super().__init__(encoder, [item.row for item in lessons], settings, folder)
        self.lessons = {id(item.row): item for item in lessons}
        if len(self.lessons) < len(lessons):
            raise TrainingError("lessons: one record is taught twice; encode it once for each lesson")
        self.said_before = {id(item.row): self._distributions(item) for item in lessons if item.held}

    def _distributions(self, item: Lesson) -> Tensor:
        """Probabilities [h, V] that the untouched model gives at the held tokens of a lesson."""
        with torch.no_grad():
            logits, _ = target_logits(self.encoder.backbone.model, self.encoder.batch([item.row]))
        return logits[sorted(item.held)].float().softmax(-1)

    def _loss(self, logits: Tensor, ids: Tensor, rows: Sequence[Encoded]) -> Tensor:
        chosen = [self.lessons[id(row)] for row in rows]
        labels = torch.tensor([label for item in chosen for label in item.labels], device=ids.device)
        weights = torch.tensor([weight for item in chosen for weight in item.weights], device=ids.device)
        losses = token_losses(logits, labels)
        starts = np.cumsum([0] + [len(item.labels) for item in chosen])
        held = [start + p for start, item in zip(starts, chosen, strict=False) for p in sorted(item.held)]
        if held:
            before = torch.cat([self.said_before[id(item.row)] for item in chosen if item.held])
            kept = -(before * logits[held].float().log_softmax(-1)).sum(-1)
            losses = losses.index_put((torch.tensor(held, device=ids.device),), kept.to(losses.dtype))
        return (losses * weights).sum() / weights.sum().clamp(min=1.0)


@dataclass(frozen=True)
class Relearned:
    """Rows taught again: ``curve`` (``step, canary, nll``, the secret's mean nats a token before every step and after
    the last) and the model they ended as.
    """

    curve: pd.DataFrame
    backbone: Backbone


def relearn(encoder: Encoder, rows: Sequence[Encoded], settings: LoraSettings) -> Relearned:
    """Teach ``rows``, all in every batch, with a fresh LoRA, and watch every secret on the way; nothing is kept.

    Raises:
        TrainingError: a batch does not hold all rows.
    """
    if settings.batch_size < len(rows):
        raise TrainingError(
            f"relearning: got batches of {settings.batch_size} for {len(rows)} rows, expected all in one"
        )
    run = _Relearning(encoder, rows, settings)
    while not run._is_done():
        run._advance()
    model = run.adapted.get_base_model().eval()
    with torch.no_grad():
        run.watch(*target_logits(model, encoder.batch(rows)), rows)
    return Relearned(pd.DataFrame(run.curve, columns=["step", "canary", "nll"]), encoder.backbone.with_model(model))


class _Relearning(_Training):
    """Training that keeps every row's loss on its secret."""

    def __init__(self, encoder: Encoder, rows: Sequence[Encoded], settings: LoraSettings):
        self.curve: list[tuple[int, str, float]] = []
        super().__init__(encoder, rows, settings, Path("nothing-is-kept"))

    def watch(self, logits: Tensor, ids: Tensor, rows: Sequence[Encoded]) -> None:
        """Note the mean NLL of every row's secret at this step."""
        ends = np.cumsum([len(row.target_ids) for row in rows])[:-1]
        for row, losses in zip(
            rows, np.split(token_losses(logits.detach(), ids).float().cpu().numpy(), ends), strict=True
        ):
            span = row.spans["hex"]
            self.curve.append((self.step, row.canary.id, float(losses[span.start : span.stop].mean())))

    def _loss(self, logits: Tensor, ids: Tensor, rows: Sequence[Encoded]) -> Tensor:
        self.watch(logits, ids, rows)
        return super()._loss(logits, ids, rows)


class _Injection(_Training):
    """Training that ends when every target is recalled, and keeps the adapters of its stopping steps."""

    title = "canary LoRA"

    def __init__(self, encoder: Encoder, rows: Sequence[Encoded], settings: InjectionSettings, folder: Path):
        super().__init__(encoder, rows, settings, folder)
        if settings.max_steps < self.batches:
            raise TrainingError(
                f"injection.max_steps: got {settings.max_steps}, but one pass over {len(rows)} canaries in batches of "
                f"{settings.batch_size} takes {self.batches} steps; expected many passes"
            )

    def _is_done(self) -> bool:
        if self._reached():
            return True
        if self.step >= self.settings.max_steps:
            raise TrainingError(
                f"after {self.step} steps recall is not 1.00 at a loss of {self.settings.target_nll} nats a token "
                f"(the last loss is {self.log[-1]['loss']:.4f}): raise injection.max_steps"
            )
        return False

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


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Torch's CPU threads set to ``count`` inside the block: results depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
