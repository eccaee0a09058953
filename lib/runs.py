"""Runs: what they compute, where results lie, and when a result may be used again.

A result is a folder whose ``result.json`` was written last. Its hash covers the resolved parameters, the identity of
model and data, and the study's ``PROTOCOL``; versions, threads and CPU are recorded beside it and never hashed.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import torch
from tqdm import tqdm

from lib import canaries, models, paths, probes, training
from lib.canaries import Canary
from lib.config import Scale, Testbed
from lib.encoding import SPANS, Encoded, Encoder, check_distinct, content_hash
from lib.errors import LeakbookError
from lib.files import building, locked, sha256
from lib.spans import spell

PROTOCOL = {"testbed": 1}  # raised by hand when a study's results would change
RECORDED_VERSIONS = ("torch", "transformers", "tokenizers", "peft", "accelerate", "numpy", "pandas")
TABLES = ("canaries.jsonl", "training.csv", "token_nll.parquet", "recall.parquet", "images.csv")
BASE, INJECTED = "base", "injected"


class ResultError(LeakbookError, RuntimeError):
    """A result folder is damaged, was made with other parameters, or does not exist."""


@dataclass(frozen=True)
class Result:
    """A finished run: its folder, and ``result.json`` as a mapping."""

    folder: Path
    content: dict[str, Any]

    @property
    def values(self) -> dict[str, Any]:
        """The figures."""
        return self.content["results"]

    @property
    def is_reference(self) -> bool:
        """Whether this is the committed reference."""
        return not self.folder.is_relative_to(paths.outputs() / "local")

    def table(self, name: str) -> pd.DataFrame:
        """One of the run's tables by file name."""
        path = self.folder / name
        if path.suffix == ".parquet":
            return pd.read_parquet(path)
        if path.suffix == ".jsonl":
            lines = path.read_text(encoding="utf-8").split("\n")
            return pd.DataFrame([json.loads(line) for line in lines if line])  # not read_json: ids stay text
        return pd.read_csv(path)

    @property
    def origin(self) -> str:
        """One line that says which results these are."""
        kind = "the committed reference" if self.is_reference else "this machine's own run"
        return f"results: {kind}, {paths.show(self.folder)}"


def inputs_hash(inputs: dict[str, Any]) -> str:
    """SHA-256 of a run's inputs, the same for equal inputs in any order of keys."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def write_result(folder: Path, inputs: dict, results: dict, provenance: dict, tables: dict[str, Callable]) -> Result:
    """Write ``tables`` (file name -> function that writes it) and then, as the last act, ``result.json``.

    Raises:
        files.StorageError: the disk is full; no half-written file stays and ``result.json`` does not appear.
    """
    for name, write in tables.items():
        with building(folder / name) as unfinished:
            write(unfinished)
    content = {
        "hash": inputs_hash(inputs),
        "inputs": inputs,
        "results": results,
        "provenance": provenance,
        "files": {name: sha256(folder / name) for name in tables},
    }
    text = json.dumps(content, indent=1) + "\n"
    with building(folder / "result.json") as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    return Result(folder, json.loads(text))  # what a later reader gets, tuples as lists


def read_result(folder: Path) -> Result | None:
    """The finished result in ``folder``, or None if there is none.

    Raises:
        ResultError: ``result.json`` cannot be read, or a table is missing or changed since it was written.
    """
    path = folder / "result.json"
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        files, stored, inputs = content["files"], content["hash"], content["inputs"]
        content["results"], content["provenance"]
    except (ValueError, KeyError, TypeError) as error:
        raise ResultError(_refusal(folder, f"is damaged: result.json cannot be read ({error!r})")) from error
    if stored != inputs_hash(inputs):
        raise ResultError(_refusal(folder, "is damaged: the hash in result.json is not that of its inputs"))
    for name, checksum in files.items():
        if not (folder / name).exists() or sha256(folder / name) != checksum:
            raise ResultError(_refusal(folder, f"is damaged: {name} is missing or not the file that was written"))
    return Result(folder, content)


def _refusal(folder: Path, reason: str) -> str:
    shown = paths.show(folder)
    if not folder.is_relative_to(paths.outputs() / "local"):
        return f"{shown} {reason}. It is the committed reference: restore it with `git checkout -- {shown}`."
    return f"{shown} {reason}. Nothing was overwritten. Move it aside with `{set_aside_command(folder)}` and run again."


def set_aside_command(folder: Path) -> str:
    """Shell command that moves a result folder aside, to a name that is still free."""
    number = 1
    while folder.with_name(f"{folder.name}.aside-{number}").exists():
        number += 1
    shown = paths.show(folder)
    return f"mv {shown} {shown}.aside-{number}"


def reusable(folder: Path, inputs: dict[str, Any]) -> Result | None:
    """The result in ``folder`` if it was made from ``inputs``, None if there is none.

    Raises:
        ResultError: it was made from other inputs (the message names the keys that differ), or is damaged.
    """
    result = read_result(folder)
    if result is not None and result.content["hash"] != inputs_hash(inputs):
        differing = "; ".join(_differences(result.content["inputs"], inputs))
        raise ResultError(_refusal(folder, f"was made with other parameters: {differing}"))
    return result


def _differences(there: Any, here: Any, key: str = "") -> list[str]:
    if isinstance(there, dict) and isinstance(here, dict):
        names = sorted(set(there) | set(here))
        return [
            text
            for name in names
            for text in _differences(there.get(name, "absent"), here.get(name, "absent"), f"{key}.{name}".lstrip("."))
        ]
    return [] if there == here else [f"{key} is {there!r} there and {here!r} here"]


def provenance(threads: int, seconds: float, **others: str | float) -> dict[str, Any]:
    """What a result does not depend on by intent, recorded so that differences can be traced."""
    return {
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name).split("+")[0] for name in RECORDED_VERSIONS},
        "cpu": _cpu_name(),
        "device": str(training.accelerator().device),
        "threads": threads,
        **others,
        "seconds": round(seconds, 1),
        "peak_memory_gb": round(_peak_memory() / 1e9, 2),
        "finished": time.strftime("%Y-%m-%d"),
    }


def _cpu_name() -> str:
    return str(torch.cpu.get_capabilities().get("cpu_name") or platform.processor() or platform.machine())


def _peak_memory() -> int:
    """Peak resident memory of this process in bytes, or the present one where the system does not keep the peak."""
    try:
        import resource
    except ImportError:
        return psutil.Process().memory_info().rss
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


# --- the testbed -----------------------------------------------------------------------------------------------------


def testbed(params: Testbed) -> Result:
    """The testbed's result: found where ``params.results`` says, or computed into ``outputs/local``.

    Raises:
        ResultError: the local result is damaged or of other parameters; or ``reference`` was asked for and there is
            none with these parameters.
        config.ConfigError, canaries.CanaryError, models.ModelError, embedded.FetchError: bad input, before any
            training.
    """
    scale = params.scale
    local, reference = paths.local(scale.name) / params.output, paths.reference(scale.name) / params.output
    if params.results == "reference":
        return _reference(reference, params)
    given = canaries.read(Path(params.canaries)) if params.canaries is not None else None
    inputs = testbed_inputs(params, given)
    found = reusable(local, inputs)
    if found is None and params.results == "auto":
        found = read_result(reference)
        if found is not None and found.content["hash"] != inputs_hash(inputs):
            found = None
    if found is not None:
        return found
    with locked(local.with_name(f"{local.name}-run")):  # a second run on the same folder waits, then finds it done
        return reusable(local, inputs) or _compute_testbed(params, given, inputs, local)


def _reference(folder: Path, params: Testbed) -> Result:
    """The committed result, without looking at any model: only the parameters are compared."""
    result = read_result(folder)
    if result is None:
        raise ResultError(f"{paths.show(folder)} holds no result; `make reference` writes it")
    differing = _differences(result.content["inputs"]["scale"], _scale_inputs(params.scale))
    if differing or params.canaries is not None:
        raise ResultError(
            f"{paths.show(folder)} was made with other parameters: {'; '.join(differing) or 'its own canaries'}. "
            "Only results with the committed parameters can be shown as reference."
        )
    return result


def testbed_inputs(params: Testbed, given: list[Canary] | None) -> dict[str, Any]:
    """Everything a testbed result depends on, as plain JSON values; what only steers speed is left out."""
    return {
        "study": "testbed",
        "protocol": PROTOCOL["testbed"],
        "scale": _scale_inputs(params.scale),
        "model": models.identity(params.scale.backbone, params.scale.revision),
        "canaries": None if given is None else _canaries_identity(given),
    }


def _scale_inputs(scale: Scale) -> dict[str, Any]:
    """A scale's settings as plain JSON values, without those that only steer speed."""
    values = dataclasses.asdict(scale)
    for name in ("threads", "evaluation_batch"):
        del values[name]
    return json.loads(json.dumps(values))


def _canaries_identity(given: list[Canary]) -> str:
    """SHA-256 of canaries as content: records without paths, and the pixels of their pictures."""
    digest = hashlib.sha256()
    for canary in given:
        digest.update(repr(dataclasses.astuple(dataclasses.replace(canary, image=None))).encode())
        if canary.image is not None:
            digest.update(canaries.picture(canary.image).tobytes())
    return digest.hexdigest()


def _compute_testbed(params: Testbed, given: list[Canary] | None, inputs: dict, folder: Path) -> Result:
    started, scale = time.perf_counter(), params.scale
    training.resolve_precision(scale.injection.precision)
    with training.threads(scale.threads):
        backbone = models.load(scale.backbone, scale.revision, device=training.accelerator().device)
        encoder = Encoder(backbone)
        rows = encode_canaries(encoder, scale, given)
        adapters = inject(params, encoder, rows)
        stops = {training.step_name(step): adapters.adapter(step) for step in adapters.kept_steps}
        stages = {BASE: None} | stops | {INJECTED: adapters.adapter()}
        evaluations = {
            name: evaluate(encoder, rows, adapter, scale.evaluation_batch)
            for name, adapter in tqdm(stages.items(), desc="evaluation", unit="model")
        }
        images = separability(encoder, rows)
        draws = {} if given else _draws(encoder, rows, scale)
        results = _testbed_results(encoder, rows, adapters, evaluations, images, draws)
    tables = _testbed_tables(encoder, rows, adapters, evaluations, images)
    seconds = time.perf_counter() - started
    record = provenance(
        scale.threads,
        seconds,
        training_precision=adapters.precision,
        evaluation_dtype="float32",
        adapters=adapters.folder.name,
        training_seconds=adapters.seconds,
        evaluation_batch=scale.evaluation_batch,
    )
    return write_result(folder, inputs, results, record, tables)


def encode_canaries(encoder: Encoder, scale: Scale, given: list[Canary] | None) -> list[Encoded]:
    """The given canaries, or drawn ones, encoded and found fit for planting.

    Raises:
        CanaryError: two are the same to the model, or a drawn secret lost its layout behind the prompt.
    """
    backbone = encoder.backbone
    drawn = given or canaries.draw(scale.canaries, backbone.tokenizer, encoder.end_of_turn, backbone.takes_images)
    rows = encoder.encode(drawn)
    check_distinct(rows)
    accept = canaries.fitting(scale.canaries)
    for row in rows if given is None else ():
        if not accept(row.spans["hex"]):
            raise canaries.CanaryError(
                f"canary {row.canary.id!r}: behind its prompt the secret is {row.spans['hex']}, not as it was drawn; "
                "set canaries.hex_tokens to null for this tokenizer"
            )
    return rows


def inject(params: Testbed, encoder: Encoder, rows: list[Encoded]) -> training.TrainedAdapters:
    """Train the canary LoRA on ``rows``, or take it from ``outputs/local`` where it was finished before."""
    settings = params.scale.injection
    key = training.adapter_key(encoder.backbone, rows, settings, PROTOCOL["testbed"])
    folder = paths.local(params.scale.name) / "adapters" / key
    with locked(folder):
        return training.train(encoder, rows, settings, folder)


@dataclass(frozen=True)
class Evaluation:
    """Scores and recalls of one model on all canaries."""

    scores: probes.TokenNLL
    recall: probes.Recall


def evaluate(encoder: Encoder, rows: list[Encoded], adapter: Path | None, batch_size: int) -> Evaluation:
    """Score and decode ``rows`` on the backbone, or on a copy of it with ``adapter`` merged."""
    backbone = encoder.backbone if adapter is None else training.merge(encoder.backbone, adapter)
    scores = probes.token_nll(backbone.model, encoder, rows, batch_size)
    return Evaluation(scores, probes.recall(backbone.model, encoder, scores, batch_size))


def separability(encoder: Encoder, rows: list[Encoded]) -> pd.DataFrame:
    """How far the vision tower keeps every canary's picture from the nearest other one.

    Columns ``canary, norm, nearest, distance``: L2 norm of the picture's flattened features, the canary with the
    nearest ones, and their L2 distance. Empty where fewer than two canaries have a picture of their own.
    """
    own = [row for row in rows if row.canary.modality == "image"]
    if len(own) < 2:
        return pd.DataFrame(columns=["canary", "norm", "nearest", "distance"])
    features = [encoder.features(row.canary.image)[0].float().flatten() for row in own]
    longest = max(map(len, features))
    stacked = torch.stack([torch.nn.functional.pad(f, (0, longest - len(f))) for f in features]).cpu()
    distances = torch.cdist(stacked, stacked).fill_diagonal_(torch.inf)
    nearest = distances.argmin(1)
    return pd.DataFrame(
        {
            "canary": [row.canary.id for row in own],
            "norm": stacked.norm(dim=1).numpy(),
            "nearest": [own[i].canary.id for i in nearest],
            "distance": distances.min(1).values.numpy(),
        }
    )


def _testbed_results(encoder, rows, adapters, evaluations, images, draws) -> dict[str, Any]:
    recalls = {name: _recall_means(evaluation) for name, evaluation in evaluations.items()}
    stops = [training.step_name(step) for step in adapters.kept_steps]
    return {
        "canaries": {modality: sum(r.canary.modality == modality for r in rows) for modality in ("text", "image")},
        "recall": recalls,
        "nll": {name: _nll_means(evaluation) for name, evaluation in evaluations.items()},
        "undertrained": [name for name in stops if all(r["hit_full"] == 0.0 for r in recalls[name].values())],
        "training": {
            "steps": adapters.final_step,
            "final_loss": _rounded(adapters.log.loss.iloc[-1]),
            "adapted_modules": len(
                [n for n, _ in encoder.backbone.model.named_modules() if training.ADAPTED.fullmatch(n)]
            ),
        },
        "layout": _layout(rows),
        "draws": draws,
        "images": {}
        if images.empty
        else {"smallest_distance": _rounded(images.distance.min()), "mean_norm": _rounded(images.norm.mean())},
        "data": content_hash(rows),
    }


def _rounded(value: float) -> float:
    return round(float(value), 6)


def _by_modality(evaluation: Evaluation) -> dict[str, np.ndarray]:
    kinds = np.array([row.canary.modality for row in evaluation.scores.rows])
    return {kind: kinds == kind for kind in ("text", "image") if (kinds == kind).any()}


def _recall_means(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    hits = (evaluation.recall.hit_full, evaluation.recall.hit_secret, evaluation.recall.hit_forced)
    masks = _by_modality(evaluation)
    return {kind: {hit.probe: _rounded(hit.values[mask].mean()) for hit in hits} for kind, mask in masks.items()}


def _nll_means(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    scores = evaluation.scores
    shortest = min(len(row.target_ids) for row in scores.rows)
    readings = [scores.window_mean(min(probes.WINDOW, shortest))]
    present = [span for span in SPANS if all(len(row.spans[span]) for row in scores.rows)]
    readings += [scores.span_mean(span) for span in present]
    masks = _by_modality(evaluation)
    return {kind: {r.probe: _rounded(r.values[mask].mean()) for r in readings} for kind, mask in masks.items()}


def _layout(rows: list[Encoded]) -> dict[str, Any]:
    """Where the secret lies, as [first position, position behind the last]; every distinct layout is listed."""
    return {
        "hex_spans": sorted({(row.spans["hex"].start, row.spans["hex"].stop) for row in rows}),
        "straddling": sum(row.spans["hex"].straddles for row in rows),
        "target_tokens": sorted({len(row.target_ids) for row in rows}),
    }


def _draws(encoder: Encoder, rows: list[Encoded], scale: Scale) -> dict[str, Any]:
    """Acceptance rate, bits and digit share of drawn secrets, a modality each."""
    draws = {}
    for canary in (row.canary for row in rows):
        if canary.modality not in draws:
            found = canaries.draw_statistics(canary, scale.canaries, encoder.backbone.tokenizer, encoder.end_of_turn)
            draws[canary.modality] = {"acceptance": _rounded(found.acceptance)} | {
                name: value if isinstance(value, int) else _rounded(value)
                for name, value in dataclasses.asdict(found).items()
            }
    return draws


def _testbed_tables(encoder, rows, adapters, evaluations, images) -> dict[str, Callable]:
    tokenizer = encoder.backbone.tokenizer
    nll = pd.concat([e.scores.table().assign(model=name) for name, e in evaluations.items()], ignore_index=True)
    names = {i: tokenizer.convert_ids_to_tokens(i) for i in {*nll.token_id, *nll.greedy_id}}
    nll["token"], nll["greedy_token"] = nll.token_id.map(names), nll.greedy_id.map(names)
    hits = pd.concat([e.recall.table(rows).assign(model=name) for name, e in evaluations.items()], ignore_index=True)
    hits["output"] = [spell(tokenizer, ids) for ids in hits.output_ids]
    writers = {
        "canaries.jsonl": lambda path: canaries.write(path, [row.canary for row in rows]),
        "training.csv": lambda path: adapters.log.round(6).to_csv(path, index=False),
        "token_nll.parquet": lambda path: nll.to_parquet(path, index=False),
        "recall.parquet": lambda path: hits.to_parquet(path, index=False),
        "images.csv": lambda path: images.round(6).to_csv(path, index=False),
    }
    return {name: writers[name] for name in TABLES}
