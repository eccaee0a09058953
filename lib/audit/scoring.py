"""Models scored block by block: each block's tables are kept as they are done, in batches that fit into free memory."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import torch
from tqdm import tqdm

from lib import adapters, exposure, precision, probes
from lib.audit import decoys
from lib.audit.decoys import Drawn, Source
from lib.audit.reader import Item
from lib.encoding import Encoded, Encoder
from lib.errors import LeakbookError
from lib.files import sha256
from lib.models import Backbone
from lib.probes import TokenNLL
from lib.results import Result, inputs_hash, reusable, write_result
from lib.spans import spell

LARGEST = 128  # rows in a batch; more are not faster
SHARE = 0.4  # of the free memory for one batch
BLOCKS = 2000  # files a model at most
NLL, RECALL, DECOYS = "token_nll.parquet", "recall.parquet", "decoys.parquet"


class AuditError(LeakbookError, RuntimeError):
    """A model cannot be audited on this machine, or models do not belong together."""


@dataclass(frozen=True)
class Asked:
    """One model to score: ``model`` alone, or with an ``adapter`` beside its weights or merged into them.

    ``kind``: ``alone``, ``stacked``, ``merged`` (in fp32), or ``merged_bf16`` (into weights rounded to bf16, read in
    fp32). ``revision`` identifies the weights behind ``model``; ``with_decoys`` says whether decoys are asked for.
    """

    name: str
    model: str
    revision: str
    adapter: Path | None = None
    kind: str = "alone"
    with_decoys: bool = True

    def identity(self) -> dict[str, Any]:
        """What its scores depend on, files by checksum; the name too, where it is no folder: built-in ones share a
        revision."""
        found = {"model": self.revision, "kind": self.kind}
        if not Path(self.model).is_dir():
            found["name"] = self.model
        if self.adapter is not None:
            found["adapter"] = sha256(self.adapter / "adapter_model.safetensors")
            found["adapter_config"] = sha256(self.adapter / "adapter_config.json")
        return found


def device() -> torch.device:
    """The accelerator where there is one, else the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")


def usable(items: Sequence[Item], encoder: Encoder) -> tuple[list[Item], dict[int, str]]:
    """Items that a model can be asked for, and why not the others, by line."""
    kept, reasons = [], {}
    for start in range(0, len(items), decoys.CHUNK):
        chunk = items[start : start + decoys.CHUNK]
        _, found = decoys.encodable(encoder.fresh(), [item.canary for item in chunk])
        kept += [item for item, reason in zip(chunk, found, strict=True) if not reason]
        reasons |= {item.line: reason for item, reason in zip(chunk, found, strict=True) if reason}
    return kept, reasons


def blocks(count: int, with_decoys: bool) -> list[range]:
    """Canaries by number in blocks: small ones where decoys take long, so that little is lost to a killed process."""
    size = max(4 if with_decoys else 64, -(-count // BLOCKS))
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


class Scorer:
    """Scores models on items into ``folder``, each block once: what is there from the same inputs is used again.

    Raises:
        AuditError: from :meth:`score`, when not even one row fits into memory.
    """

    def __init__(
        self, items: Sequence[Item], source: Source, count: int, seed: int, template: str, folder: Path, data: dict
    ):
        self.items, self.source, self.count, self.seed = items, source, count, seed
        self.template, self.folder, self.data = template, folder, data
        self.planted = frozenset(item.canary.secret for item in items)

    def _inputs(self, asked: Asked) -> dict[str, Any]:
        drawn = {"count": self.count, "seed": self.seed} | self.data["decoys"]
        wanted = {"decoys": drawn if asked.with_decoys and self.count else None}
        return asked.identity() | self.data | {"template": self.template} | wanted

    def folder_of(self, asked: Asked) -> Path:
        """Where the blocks of a model's scores lie."""
        return self.folder / inputs_hash(self._inputs(asked))[:12]

    def parts(self, asked: Asked) -> Iterator[tuple[range, Path, dict[str, Any]]]:
        """Every block of a model's scores: its canaries by number, its folder and its inputs."""
        inputs, folder = self._inputs(asked), self.folder_of(asked)
        for number, block in enumerate(blocks(len(self.items), inputs["decoys"] is not None)):
            yield block, folder / f"{number:05d}", inputs | {"block": [block.start, block.stop]}

    def is_done(self, asked: Asked) -> bool:
        """Whether all blocks of a model are there."""
        return all((folder / "result.json").exists() for _, folder, _ in self.parts(asked))

    def score(self, asked: Asked, backbone: Backbone, bar: tqdm) -> None:
        """Score what is missing of one model, which ``backbone`` is. The bar counts canaries."""
        bar.set_description(asked.name)
        for block, folder, inputs in self.parts(asked):
            if reusable(folder, inputs) is None:
                self._block(asked, Encoder(backbone, self.template), block, folder, inputs)
            bar.update(len(block))

    def seconds(self, asked: Sequence[Asked]) -> float:
        """How long scoring some models took, whenever that was."""
        return sum(part.values["seconds"] for one in asked for part in self.results(one))

    def results(self, asked: Asked) -> Iterator[Result]:
        """The finished blocks of a model, in order."""
        for _, folder, inputs in self.parts(asked):
            yield reusable(folder, inputs)

    def _block(self, asked: Asked, encoder: Encoder, block: range, folder: Path, inputs: dict) -> None:
        started, items = time.perf_counter(), [self.items[i] for i in block]
        rows = encoder.encode([item.canary for item in items])
        longest = max(len(row.input_ids) for row in rows)
        nll, recall = shrinking(lambda size: answers(encoder, rows, size), fitting(encoder.backbone, longest, longest))
        tables, facts = {NLL: nll, RECALL: recall}, {}
        if asked.with_decoys and self.count:
            drawn = [decoys.draw(encoder, self.source, item, self.count, self.seed, self.planted) for item in items]
            facts["layout"] = {one.decoys.canary: one.layout for one in drawn}
            tables[DECOYS] = pd.concat([self._ranked(encoder, one) for one in drawn], ignore_index=True)
        facts["seconds"] = time.perf_counter() - started
        write_result(folder, inputs, facts, {}, {name: _writer(table) for name, table in tables.items()})

    def _ranked(self, encoder: Encoder, drawn: Drawn) -> pd.DataFrame:
        rows = drawn.decoys.rows
        longest = max(len(row.input_ids) for row in rows)
        own = longest - min(row.target_start + row.spans["hex"].start for row in rows) + 1
        return shrinking(
            lambda size: exposure.decoy_table(encoder.backbone.model, encoder, [drawn.decoys], size),
            fitting(encoder.backbone, longest, own),
        )


def _writer(table: pd.DataFrame) -> Callable[[Path], None]:
    return lambda path: table.to_parquet(path, index=False)


def answers(encoder: Encoder, rows: Sequence[Encoded], size: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Per-token NLL and greedy recalls of some canaries.

    The first is :meth:`lib.probes.TokenNLL.table` with the tokens' texts, the second has ``canary, hit_full,
    hit_secret, hit_forced, output, straddles``.
    """
    model = encoder.backbone.model
    scores: TokenNLL = probes.token_nll(model, encoder, rows, size)
    recall = probes.recall(model, encoder, scores, size)
    tokenizer, table = encoder.backbone.tokenizer, recall.table(rows)
    table["output"] = [spell(tokenizer, ids) for ids in table.output_ids]
    table["straddles"] = [row.spans["hex"].straddles for row in rows]
    nll = scores.table()
    nll["token"] = [spell(tokenizer, [token]) for token in nll.token_id]
    return nll.drop(columns="modality"), table.drop(columns=["modality", "output_ids"])


def fitting(backbone: Backbone, longest: int, predicted: int) -> int:
    """Rows in a batch of sequences of ``longest`` tokens of which ``predicted`` get logits, by the memory free now.

    Counted in fp32: three copies of the logits, keys and values of every layer twice, a layer's intermediate states.
    """
    config = backbone.model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    cache = 16 * config.num_hidden_layers * heads * (config.hidden_size // config.num_attention_heads)
    row = 12 * config.vocab_size * predicted + (cache + 64 * config.hidden_size) * longest
    return int(min(LARGEST, max(1, SHARE * free_memory(backbone.model.device) // row)))


def free_memory(where: torch.device) -> int:
    """Bytes free on a device; on the CPU those that the system could give."""
    if where.type == "cuda":
        return torch.cuda.mem_get_info(where)[0]
    return psutil.virtual_memory().available


def shrinking(work: Callable[[int], Any], size: int) -> Any:
    """What ``work`` gives for a batch size, halved until it fits into memory.

    Raises:
        AuditError: one row alone does not fit.
    """
    while True:
        try:
            return work(size)
        except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
            full = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(error)
            if not full:
                raise
            if size == 1:
                raise AuditError(f"out of memory with a single row: {str(error).splitlines()[0]}") from error
        free()
        size //= 2


def free() -> None:
    """Give back memory that nothing holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def make(asked: Asked, base: Backbone) -> tuple[Backbone, dict[str, float]]:
    """The model that is asked for, made of its loaded base, which stays as it is.

    With it, for ``merged_bf16``, how much of the update rounding lost: see :func:`lib.precision.kept`.
    """
    if asked.kind == "alone":
        return base, {}
    if asked.kind == "stacked":
        return adapters.stack(base, asked.adapter), {}
    exact = adapters.merge(base, asked.adapter)
    if asked.kind == "merged":
        return exact, {}
    rounded = precision.cast(base, torch.bfloat16)
    model = adapters.merge(rounded, asked.adapter)
    lost = precision.kept(base, exact, rounded, model, asked.adapter)
    del exact, rounded
    return precision.cast(model, torch.float32), lost
