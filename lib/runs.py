"""Runs: what every study computes, found where its results already are."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from lib import canaries, models, paths, probes, training
from lib.adapters import ADAPTED, merge
from lib.canaries import Canary
from lib.config import LoraSettings, Scale, Testbed
from lib.encoding import SPANS, Encoded, Encoder, check_distinct, content_hash
from lib.files import locked
from lib.models import Backbone
from lib.pictures import picture
from lib.results import Result, ResultError, differences, inputs_hash, provenance, read_result, reusable, write_result
from lib.spans import spell

PROTOCOL = {"testbed": 2}  # raised by hand when a study's results would change
TABLES = ("canaries.jsonl", "training.csv", "token_nll.parquet", "recall.parquet", "images.csv")
BASE, INJECTED = "base", "injected"


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
    with locked(local):  # a second run on the same folder waits, then finds it done
        return reusable(local, inputs) or _compute_testbed(params, given, inputs, local)


def _reference(folder: Path, params: Testbed) -> Result:
    """The committed result, without looking at any model: only the parameters are compared."""
    result = read_result(folder)
    if result is None:
        raise ResultError(f"{paths.show(folder)} holds no result; `make reference` writes it")
    differing = differences(result.content["inputs"]["scale"], scale_inputs(params.scale))
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
        "scale": scale_inputs(params.scale),
        "model": models.identity(params.scale.backbone, params.scale.revision),
        "canaries": None if given is None else _canaries_identity(given),
    }


def scale_inputs(scale: Scale) -> dict[str, Any]:
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
            digest.update(picture(canary.image).tobytes())
    return digest.hexdigest()


def _compute_testbed(params: Testbed, given: list[Canary] | None, inputs: dict, folder: Path) -> Result:
    started, scale = time.perf_counter(), params.scale
    with training.threads(scale.threads):
        encoder, rows = load_testbed(scale, given)
        adapters = inject(scale, encoder, rows)
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
        str(training.accelerator().device),
        scale.threads,
        seconds,
        training_precision=adapters.precision,
        evaluation_dtype="float32",
        adapters=adapters.folder.name,
        training_seconds=adapters.seconds,
        evaluation_batch=scale.evaluation_batch,
    )
    return write_result(folder, inputs, results, record, tables)


def load_testbed(scale: Scale, given: list[Canary] | None = None) -> tuple[Encoder, list[Encoded]]:
    """The scale's backbone behind its encoder, and its canaries (the given ones, or drawn), encoded."""
    training.resolve_precision(scale.injection.precision)
    backbone = models.load(scale.backbone, scale.revision, device=training.accelerator().device)
    encoder = Encoder(backbone)
    return encoder, encode_canaries(encoder, scale, given)


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


def inject(scale: Scale, encoder: Encoder, rows: list[Encoded]) -> training.TrainedAdapters:
    """Train the canary LoRA on ``rows``, or take it from ``outputs/local`` where it was finished before."""
    return trained(scale, encoder, rows, scale.injection, PROTOCOL["testbed"])


def trained(
    scale: Scale, encoder: Encoder, rows: list[Encoded], settings: LoraSettings, protocol: int
) -> training.TrainedAdapters:
    """Adapters trained on ``rows`` with ``settings``, kept in ``outputs/local`` under their content hash."""
    key = training.adapter_key(encoder.backbone, rows, settings, protocol)
    folder = paths.local(scale.name) / "adapters" / key
    with locked(folder):
        return training.train(encoder, rows, settings, folder)


@dataclass(frozen=True)
class Evaluation:
    """Scores and recalls of one model on all canaries."""

    scores: probes.TokenNLL
    recall: probes.Recall


def evaluate(encoder: Encoder, rows: list[Encoded], adapter: Path | None, batch_size: int) -> Evaluation:
    """Score and decode ``rows`` on the backbone, or on a copy of it with ``adapter`` merged."""
    backbone = encoder.backbone if adapter is None else merge(encoder.backbone, adapter)
    return evaluate_model(backbone, encoder, rows, batch_size)


def evaluate_model(backbone: Backbone, encoder: Encoder, rows: list[Encoded], batch_size: int) -> Evaluation:
    """Score and decode ``rows`` on ``backbone`` as it is."""
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
            "adapted_modules": len([n for n, _ in encoder.backbone.model.named_modules() if ADAPTED.fullmatch(n)]),
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
