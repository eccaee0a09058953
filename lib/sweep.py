"""One cell of the sweep with one seed, benign tuning or noise, evaluated stacked and merged; more draws of noise."""

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from lib import benign, canaries, models, paths, probes, runs, training
from lib.adapters import merge, noise_like, stack
from lib.config import Cell, CellRun, LoraSettings, Scale, Sweep
from lib.encoding import Encoded, Encoder, content_hash
from lib.files import locked
from lib.results import Result, ResultError, inputs_hash, provenance, read_result, reusable, write_result
from lib.runs import Evaluation

PROTOCOL = 2  # raised by hand when results of cells would change
STACKS = ("stacked", "merged")
KEYS = ["cell", "kind", "source", "base", "lr", "steps", "seed", "modality", "stack", "dtype", "merge_dtype"]
HITS = ("hit_full", "hit_secret", "hit_forced")


def cell(run: CellRun) -> Result:
    """One cell with one seed: found where ``run.results`` says, or computed into ``outputs/local``.

    Raises:
        ResultError: the local result is damaged or of other parameters, or a reference was asked for and is missing.
        benign.BenignError: a benign record holds a part of a canary.
    """
    local = run.folder
    reference = paths.reference(run.scale.name) / "sweep" / "runs" / local.name
    inputs = cell_inputs(run)
    if run.results == "reference":
        found = reusable(reference, inputs)
        if found is None:
            raise ResultError(f"{paths.show(reference)} holds no result")
        return found
    found = reusable(local, inputs)
    if found is None and run.results == "auto":
        found = read_result(reference)
        found = found if found is not None and found.content["hash"] == inputs_hash(inputs) else None
    if found is not None:
        return found
    with locked(local):
        return reusable(local, inputs) or _compute(run, inputs, local)


def finished(run: CellRun, model: str | None = None) -> Result | None:
    """This machine's result of a run if it is there; ``model`` is the identity of the backbone where it is known.

    Raises:
        ResultError: it is damaged, or was made with other parameters.
    """
    return reusable(run.folder, cell_inputs(run, model))


def cell_inputs(run: CellRun, model: str | None = None) -> dict[str, Any]:
    """Everything a cell's result depends on: the testbed, the cell, what all cells share, the seed."""
    like = None if run.cell.like is None else dataclasses.asdict(run.sweep.cell(run.cell.like))
    inputs = {
        "study": "cell",
        "protocol": {"cell": PROTOCOL, "testbed": runs.PROTOCOL["testbed"]},
        "scale": runs.scale_inputs(run.scale),
        "model": model or models.identity(run.scale.backbone, run.scale.revision),
        "training": dataclasses.asdict(run.sweep.training),
        "cell": dataclasses.asdict(run.cell),
        "like": like,
        "seed": run.seed,
    }
    for part in filter(None, (inputs["cell"], like)):
        if part["source"].endswith(".jsonl"):  # of a user's own file, the content is what counts
            source = Path(part["source"])
            inputs["data"] = benign.checksum(source)
            part["source"] = source.name
    return json.loads(json.dumps(inputs))


def _compute(run: CellRun, inputs: dict, folder: Path) -> Result:
    started, scale = time.perf_counter(), run.scale
    with training.threads(scale.threads):
        encoder, rows = runs.load_testbed(scale)
        _screened(run, encoder, rows)
        canary_adapters = runs.inject(scale, encoder, rows)
        base = Encoder(merge(encoder.backbone, base_adapter(canary_adapters, scale, run.cell.base)))
        loaded = time.perf_counter()
        before = base_evaluation(run, base, rows)
        evaluated_base = time.perf_counter()
        adapter, log, precision = cell_adapter(run, base, rows)
        fitted = time.perf_counter()
        after = {
            how: runs.evaluate_model(place(base.backbone, adapter), base, rows, scale.evaluation_batch)
            for how, place in (("stacked", stack), ("merged", merge))
        }
    evaluated = time.perf_counter()
    nll, recall = slices(run.cell.id, run.seed, before, after)
    seconds = {
        "loading": loaded - started,
        "training": fitted - evaluated_base,
        "evaluation": evaluated - fitted + evaluated_base - loaded,
    }
    results = {
        "rows": summary(run.cell, run.seed, nll, recall).to_dict("records"),
        "last_loss": None if log is None else round(float(log.loss.iloc[-1]), 6),
    }
    record = provenance(
        str(training.accelerator().device),
        scale.threads,
        evaluated - started,
        training_precision=precision,
        evaluation_dtype="float32",
        base=base.backbone.revision,
        seconds_of={name: round(value, 1) for name, value in seconds.items()},
    )
    tables: dict[str, Callable] = {
        "token_nll.parquet": lambda path: nll.to_parquet(path, index=False),
        "recall.parquet": lambda path: recall.to_parquet(path, index=False),
    }
    if log is not None:
        tables["training.csv"] = lambda path: log.round(6).to_csv(path, index=False)
    return write_result(folder, inputs, json.loads(json.dumps(results)), record, tables)


def base_adapter(adapters: training.TrainedAdapters, scale: Scale, base: str) -> Path:
    """The canary adapter behind a base: ``full``, or ``stop-<n>`` for the n-th stopping step."""
    if base == "full":
        return adapters.adapter()
    return adapters.adapter(scale.injection.stop_steps[int(base.removeprefix("stop-")) - 1])


def cell_adapter(run: CellRun, base: Encoder, rows: list[Encoded]) -> tuple[Path, pd.DataFrame | None, str]:
    """The cell's adapter on its base, trained or noise of that size, with the training's log and precision."""
    if run.cell.kind != "noise":
        trained = fine_tuned(run.scale, run.sweep, run.cell, run.seed, base, rows)
        return trained.adapter(), trained.log, trained.precision
    like = fine_tuned(run.scale, run.sweep, run.sweep.cell(run.cell.like), run.seed, base, rows)
    folder = like.folder / f"noise-{run.cell.source}-{run.seed}"
    return noise_like(like.adapter(), run.cell.source, run.seed, folder), None, like.precision


def _screened(run: CellRun, encoder: Encoder, rows: list[Encoded]) -> list[canaries.Record]:
    """The cell's benign records, or those of the cell that its noise is like, screened against all canaries."""
    cell = run.cell if run.cell.like is None else run.sweep.cell(run.cell.like)
    records = _records(run.sweep, cell, run.seed, encoder)
    benign.screen_against(records, [row.canary for row in rows])
    return records


def _records(sweep: Sweep, cell: Cell, seed: int, encoder: Encoder) -> list[canaries.Record]:
    if cell.source in benign.SOURCES:
        return benign.generate(cell.source, sweep.training.records, seed, encoder.backbone.takes_images)
    return benign.read(Path(cell.source))


def fine_tuned(
    scale: Scale, sweep: Sweep, cell: Cell, seed: int, base: Encoder, rows: list[Encoded]
) -> training.TrainedAdapters:
    """A cell's benign adapter, trained or taken from ``outputs/local``; its data is screened against ``rows`` first."""
    common, records = sweep.training, _records(sweep, cell, seed, base)
    benign.screen_against(records, [row.canary for row in rows])
    settings = LoraSettings(
        rank=common.rank,
        alpha=common.alpha,
        learning_rate=cell.learning_rate,
        warmup_steps=common.warmup_steps,
        batch_size=common.batch_size,
        max_steps=cell.steps,
        check_every=50,
        seed=seed,
        precision=common.precision,
    )
    return runs.trained(scale, base, base.encode(records), settings, PROTOCOL)


def base_evaluation(run: CellRun, base: Encoder, rows: list[Encoded]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Per-token scores and recalls of a base before benign tuning, computed once and kept."""
    folder = paths.sweep(run.scale.name, injection=run.injection) / "bases" / run.cell.base
    inputs = {"model": base.backbone.revision, "data": content_hash(rows), "protocol": PROTOCOL}
    with locked(folder):
        found = reusable(folder, inputs)
        if found is None:
            started = time.perf_counter()
            evaluation = runs.evaluate_model(base.backbone, base, rows, run.scale.evaluation_batch)
            tables = {
                "token_nll.parquet": lambda path: evaluation.scores.table().to_parquet(path, index=False),
                "recall.parquet": lambda path: evaluation.recall.table(rows).to_parquet(path, index=False),
            }
            found = write_result(folder, inputs, {}, _provenance(run, started), tables)
    return found.table("token_nll.parquet"), found.table("recall.parquet")


def _provenance(run: CellRun, started: float) -> dict[str, Any]:
    seconds = time.perf_counter() - started
    return provenance(str(training.accelerator().device), run.scale.threads, seconds, evaluation_dtype="float32")


def slices(
    name: str, seed: int, before: tuple[pd.DataFrame, pd.DataFrame], after: dict[str, Evaluation]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The cell's slices of ``token_nll.parquet`` and ``recall.parquet``: every reading beside its base's."""
    nll_base, recall_base = before
    nll, recall = [], []
    for how, evaluation in after.items():
        labels = {"cell": name, "seed": seed, "stack": how, "dtype": "float32", "merge_dtype": "float32"}
        scores = evaluation.scores.table()
        base = nll_base.set_index(["canary", "position"]).loc[list(zip(scores.canary, scores.position, strict=True))]
        nll.append(scores.assign(**labels, nll_base=base.nll.to_numpy(), greedy_id_base=base.greedy_id.to_numpy()))
        hits = evaluation.recall.table(evaluation.scores.rows)
        base = recall_base.set_index("canary").loc[hits.canary]
        recall.append(hits.assign(**labels, **{f"{hit}_base": base[hit].to_numpy() for hit in HITS}))
    shared = ["cell", "seed", "canary", "modality", "stack", "dtype", "merge_dtype"]
    scored = ["position", "span", "token_id", "nll_base", "nll", "greedy_id_base", "greedy_id"]
    hit_columns = [name for hit in HITS for name in (f"{hit}_base", hit)]
    return (
        pd.concat(nll, ignore_index=True)[shared + scored],
        pd.concat(recall, ignore_index=True)[[*shared, *hit_columns, "output_ids"]],
    )


def summary(cell: Cell, seed: int, nll: pd.DataFrame, recall: pd.DataFrame) -> pd.DataFrame:
    """Rows of ``cells.csv`` for one run: mean changes in nats a token, and recalls, by modality and stack."""
    rows = []
    for (modality, how, dtype, merge_dtype), part in nll.groupby(["modality", "stack", "dtype", "merge_dtype"]):
        delta = part.nll - part.nll_base
        means = {"d_nll_mean20": _canary_mean(part, delta, part.position < probes.WINDOW)}
        means |= {
            f"d_nll_{span}": _canary_mean(part, delta, part.span == span) for span in ("hex", "preamble", "suffix")
        }
        hits = recall[(recall["modality"] == modality) & (recall["stack"] == how)]
        shares = {name: hits[name].mean() for hit in HITS for name in (f"{hit}_base", hit)}
        values = (cell.id, cell.kind, Path(cell.source).name, cell.base, cell.learning_rate, cell.steps, seed)
        labels = dict(zip(KEYS, (*values, modality, how, dtype, merge_dtype), strict=True))
        rows.append(labels | {name: round(float(value), 8) for name, value in (means | shares).items()})
    return pd.DataFrame(rows)


def _canary_mean(part: pd.DataFrame, delta: pd.Series, chosen: pd.Series) -> float:
    """Mean over canaries of each canary's mean change over the chosen positions."""
    return delta[chosen].groupby(part.canary[chosen]).mean().mean()


def noise_draws(run: CellRun) -> pd.DataFrame:
    """Further draws of a noise cell, stacked, on text canaries: the null that a trained cell is held against.

    Rows are those of ``cells.csv``, ``seed`` being the draw's number, and ``like_seed``, the seed of the matched
    adapter (all in turn), ``d_nll_benign``, the mean change in nats a token on benign records of the matched adapter's
    source that no seed trained on, and ``d_nll_benign_like``, the matched adapter's own change there. A draw that lies
    in ``outputs/local`` already is taken from there.
    """
    with locked(_draw_folder(run)), training.threads(run.scale.threads):
        found = _draws(run)
        if None in found.values():
            found = _draw_noise(run, found)
    return _draw_table(found)


def finished_draws(run: CellRun, model: str | None = None) -> pd.DataFrame | None:
    """The draws of a noise cell as :func:`noise_draws` gives them, or None while one is missing.

    Raises:
        ResultError: one is damaged, or was made with other parameters.
    """
    found = _draws(run, model)
    return None if None in found.values() else _draw_table(found)


def _draw_folder(run: CellRun) -> Path:
    return run.sweep_folder / "noise" / run.cell.id


def _draws(run: CellRun, model: str | None = None) -> dict[int, Result | None]:
    model = model or models.identity(run.scale.backbone, run.scale.revision)
    folder, count = _draw_folder(run), run.sweep.noise_draws
    return {n: reusable(folder / f"draw-{n:02d}", _draw_inputs(run, n, model)) for n in range(count)}


def _draw_table(found: dict[int, Result]) -> pd.DataFrame:
    return pd.DataFrame([row for n in sorted(found) for row in found[n].values["rows"]])


def _draw_inputs(run: CellRun, draw: int, model: str | None = None) -> dict[str, Any]:
    like_seed = run.sweep.seeds[draw % len(run.sweep.seeds)]
    return cell_inputs(dataclasses.replace(run, seed=like_seed), model) | {"study": "noise draw", "draw": draw}


def _draw_noise(run: CellRun, found: dict[int, Result | None]) -> dict[int, Result]:
    """Make the draws that are missing: the models are loaded once, and every draw is kept as it is done."""
    scale, cell, folder = run.scale, run.cell, _draw_folder(run)
    encoder, rows = runs.load_testbed(scale)
    base = Encoder(merge(encoder.backbone, base_adapter(runs.inject(scale, encoder, rows), scale, cell.base)))
    before = base_evaluation(run, base, rows)
    text = [row for row in rows if row.canary.modality == "text"]
    matched = run.sweep.cell(cell.like)
    unseen = base.encode(_unseen(run.sweep, matched, base))

    def benign_nll(model) -> float:
        return float(np.nanmean(probes.token_nll(model, base, unseen, scale.evaluation_batch).nll))

    benign_before, benign_like = benign_nll(base.backbone.model), {}
    for draw in tqdm([n for n, result in found.items() if result is None], desc=cell.id, unit="draw"):
        started, inputs = time.perf_counter(), _draw_inputs(run, draw)
        like_seed = inputs["seed"]
        like = fine_tuned(scale, run.sweep, matched, like_seed, base, rows)
        if like_seed not in benign_like:
            benign_like[like_seed] = benign_nll(stack(base.backbone, like.adapter()).model) - benign_before
        noise = noise_like(like.adapter(), cell.source, 1000 + draw, folder / "adapter")
        noisy = stack(base.backbone, noise)
        evaluation = runs.evaluate_model(noisy, base, text, scale.evaluation_batch)
        (row,) = summary(cell, draw, *slices(cell.id, run.seed, before, {"stacked": evaluation})).to_dict("records")
        row |= {
            "like_seed": like_seed,
            "d_nll_benign": round(benign_nll(noisy.model) - benign_before, 8),
            "d_nll_benign_like": round(benign_like[like_seed], 8),
        }
        record = _provenance(run, started) | {"base": base.backbone.revision}
        found[draw] = write_result(folder / f"draw-{draw:02d}", inputs, {"rows": [row]}, record, {})
    return found


def _unseen(sweep: Sweep, cell: Cell, base: Encoder) -> list[canaries.Record]:
    """Up to forty benign records that no seed of the cell trained on; a user's own file has no others, so its first.

    SAFETY has 280 texts in all, most of which occur in the data of three seeds: there are fewer.
    """
    if cell.source not in benign.SOURCES:
        return benign.read(Path(cell.source))[:40]
    seen = {(r.prompt, r.target) for seed in sweep.seeds for r in _records(sweep, cell, seed, base)}
    fresh = benign.generate(cell.source, 2000, seed=2**31, images=base.backbone.takes_images)
    distinct = {(record.prompt, record.target): record for record in fresh}
    return [record for key, record in distinct.items() if key not in seen][:40]
