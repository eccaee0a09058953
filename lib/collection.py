"""The sweep's tables: collected from its runs, written as one result, and found again by whoever reads them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pandas as pd

from lib import config, models, paths, runs, sweep, training
from lib.config import CellRun, Scale, Sweep
from lib.results import MissingResult, Result, ResultError, differences, provenance, read_result, write_result
from lib.sweep import PROTOCOL, STACKS

SAME_BASE = 1e-4  # nats: what two evaluations of one model may differ by, on several machines
CONFIRMATION = "confirm.json"  # record of the confirmation's tables, which lie beside those of the sweep
DELTAS = ["d_nll_mean20", "d_nll_hex", "d_nll_preamble", "d_nll_suffix"]


def all_runs(scale: Scale, cells: Sweep, grid: str | None = None) -> list[CellRun]:
    """Every run of a sweep, cell by cell."""
    return [CellRun(scale, cells, cell, seed, "local", grid) for cell in cells.cells for seed in cells.seeds]


def collect(wanted: list[CellRun]) -> Result:
    """Write the tables of a sweep from its runs, as one result beside them.

    ``cells.csv`` has a row a run, modality and stack; ``token_nll.parquet`` and ``recall.parquet`` are the runs' own
    one below the other; ``noise.csv`` has the further draws of the noise cells.

    Raises:
        ResultError: a run, or further draws of a noise cell, are missing, or runs on one base started from two.
    """
    first = wanted[0]
    model = models.identity(first.scale.backbone, first.scale.revision)
    found = {paths.run_name(run.cell.id, run.seed): sweep.finished(run, model) for run in wanted}
    noise = {run.cell.id: run for run in wanted if run.cell.kind == "noise"}
    draws = {f"{name} (further draws)": sweep.finished_draws(run, model) for name, run in noise.items()}
    missing = [name for name, result in (found | draws).items() if result is None]
    if missing:
        count = f"{len(missing)} of {len(found | draws)}"
        raise ResultError(f"{count} parts of the sweep are missing, {missing[0]} among them: run `make sweep`")
    tables = {"cells.csv": pd.concat([pd.DataFrame(r.values["rows"]) for r in found.values()], ignore_index=True)}
    for name in ("token_nll.parquet", "recall.parquet"):
        tables[name] = pd.concat([result.table(name) for result in found.values()], ignore_index=True)
    _refuse_two_injections(tables["token_nll.parquet"], {run.cell.id: run.cell.base for run in wanted})
    if draws and first.sweep.noise_draws:
        tables["noise.csv"] = pd.concat(list(draws.values()), ignore_index=True)
    folder, inputs = first.sweep_folder, _inputs(first, model)
    _keep_tables_of_another_grid(folder, inputs)
    (folder / "result.json").unlink(missing_ok=True)  # none of the two, old or new, until all tables are there
    return write_result(folder, inputs, _summary(tables), _provenance(first, found), writers(tables))


def confirmation_runs(scale: Scale, cells: Sweep, picked: list[str], rule: dict[str, int]) -> list[CellRun]:
    """Runs that repeat picked cells: with seeds that the sweep has not used, and on a second injection.

    ``rule`` is ``picking.confirmation`` of ``params/verdicts.yaml``.
    """
    second = config.other_injection(scale.name, 1)
    unused = [max(cells.seeds) + 1 + n for n in range(rule["unused_seeds"])]
    runs = []
    for name in dict.fromkeys(picked):
        cell = cells.cell(name)
        runs += [CellRun(scale, cells, cell, seed, "local") for seed in unused]
        runs += [CellRun(second, cells, cell, seed, "local", None, 1) for seed in range(rule["second_injection_seeds"])]
    return runs


def collect_confirmation(wanted: list[CellRun]) -> Result:
    """Write ``confirm.csv`` beside the sweep's tables, and the per-token tables of its runs (text, stacked).

    Rows are those of ``cells.csv`` with the column ``injection``; the record is ``confirm.json``.

    Raises:
        ResultError: a run is missing.
    """
    found = {run: sweep.finished(run) for run in wanted}
    missing = [f"{run.cell.id} with seed {run.seed}" for run, result in found.items() if result is None]
    if missing:
        raise ResultError(f"{len(missing)} of {len(found)} confirmation runs are missing, {missing[0]} among them")
    rows = [pd.DataFrame(result.values["rows"]).assign(injection=run.injection) for run, result in found.items()]
    tables = {"confirm.csv": pd.concat(rows, ignore_index=True)}
    for name in ("token_nll.parquet", "recall.parquet"):
        parts = [result.table(name).assign(injection=run.injection) for run, result in found.items()]
        whole = pd.concat(parts, ignore_index=True)
        kept = whole[(whole["modality"] == "text") & (whole["stack"] == "stacked")].reset_index(drop=True)
        tables[f"confirm_{name}"] = kept
    first = wanted[0]
    _refuse_another_base(
        first.scale, tables["confirm_token_nll.parquet"], {run.cell.id: run.cell.base for run in wanted}
    )
    inputs = confirmation_inputs(wanted)
    record = _provenance(first, {run.folder.name: result for run, result in found.items()})
    folder = paths.sweep(first.scale.name)
    return write_result(folder, inputs, {"runs": len(found)}, record, writers(tables), record=CONFIRMATION)


def _refuse_another_base(scale: Scale, repeats: pd.DataFrame, bases: dict[str, str]) -> None:
    """Repeats with unused seeds must have started from the models that the sweep started from."""
    try:
        before = load(scale, "auto").table("token_nll.parquet")
    except MissingResult:
        return
    own = before[before.cell.isin(bases) & (before["modality"] == "text") & (before["stack"] == "stacked")]
    _refuse_two_injections(pd.concat([own, repeats[repeats.injection == 0]]), bases)


def confirmation_inputs(wanted: list[CellRun]) -> dict[str, Any]:
    """What the confirmation depends on: every run's own inputs, without the identity of the model."""
    inputs = [sweep.cell_inputs(run, "not part of it") | {"injection": run.injection} for run in wanted]
    return {"study": "confirmation", "runs": inputs}


def confirmation(scale: Scale, wanted: list[CellRun], source: str) -> Result | None:
    """The confirmation of exactly these runs, this machine's or the committed one as ``source`` says, or None."""
    folders = {"local": [paths.sweep(scale.name)], "reference": [paths.reference(scale.name) / "sweep"]}
    for folder in folders.get(source, folders["local"] + folders["reference"]):
        result = read_result(folder, CONFIRMATION)
        if result is not None and result.content["inputs"] == confirmation_inputs(wanted):
            return result
    return None


def _refuse_two_injections(nll: pd.DataFrame, bases: dict[str, str]) -> None:
    """Runs on one base must have found the same NLLs before: an injection trained anew elsewhere is another model."""
    before = nll.assign(base=nll.cell.map(bases)).groupby(["base", "canary", "position"]).nll_base.agg(["min", "max"])
    apart = (before["max"] - before["min"]).groupby("base").max()
    if apart.max() > SAME_BASE:
        base = apart.idxmax()
        raise ResultError(
            f"the runs on base {base!r} did not start from one model: before the tuning their NLLs differ by up to "
            f"{apart.max():.2g} nats a token. They were made on several injections; move the older ones aside."
        )


def _keep_tables_of_another_grid(folder: Path, inputs: dict[str, Any]) -> None:
    """Move earlier tables of other cells or settings into a folder of their own, named by their hash."""
    path = folder / "result.json"
    if not path.exists():
        return
    earlier = json.loads(path.read_text(encoding="utf-8"))
    if earlier["inputs"] != inputs:
        kept = folder / f"tables-{earlier['hash'][:8]}"
        kept.mkdir(exist_ok=True)
        for name in ["result.json", *earlier["files"]]:
            if (folder / name).exists():
                (folder / name).replace(kept / name)


def _inputs(run: CellRun, model: str) -> dict[str, Any]:
    return {"study": "sweep", "model": model} | _grid(run.scale, run.sweep)


def _grid(scale: Scale, cells: Sweep) -> dict[str, Any]:
    protocol = {"cell": PROTOCOL, "testbed": runs.PROTOCOL["testbed"]}
    values = {"protocol": protocol, "scale": runs.scale_inputs(scale), "sweep": dataclasses.asdict(cells)}
    return json.loads(json.dumps(values))


def _summary(tables: dict[str, pd.DataFrame]) -> dict[str, Any]:
    cells, tokens = tables["cells.csv"], tables["token_nll.parquet"]
    return {
        "cells": int(cells["cell"].nunique()),
        "runs": len(cells[["cell", "seed"]].drop_duplicates()),
        "noise_draws": len(tables.get("noise.csv", ())),
        # Largest difference of stacked and merged evaluation, in nats: of a mean change, and of one token.
        "stacked_against_merged": _difference(cells, ["cell", "seed", "modality"], DELTAS),
        "stacked_against_merged_at_a_token": _difference(tokens, ["cell", "seed", "canary", "position"], ["nll"]),
    }


def _difference(table: pd.DataFrame, keys: list[str], values: list[str]) -> float:
    stacked, merged = (table[table["stack"] == how].set_index(keys)[values].sort_index() for how in STACKS)
    return round(float((stacked - merged).abs().max().max()), 8)


def _provenance(run: CellRun, found: dict[str, Result]) -> dict[str, Any]:
    """That of the collecting process, and of the runs: their CPUs, and median and maximum of their seconds."""
    records = [result.content["provenance"] for result in found.values()]
    seconds = pd.Series([record["seconds"] for record in records])
    return provenance(
        str(training.accelerator().device),
        run.scale.threads,
        float(seconds.sum()),
        training_precision=", ".join(sorted({record["training_precision"] for record in records})),
        cpus_of_runs=", ".join(sorted({record["cpu"] for record in records})),
        seconds_of_a_run={"median": round(seconds.median(), 1), "max": round(seconds.max(), 1)},
    )


def writers(tables: dict[str, pd.DataFrame]) -> dict[str, Any]:
    """What writes each table to a path, in the format that its file name ends with."""

    def writer(name: str, table: pd.DataFrame):
        if name.endswith(".parquet"):
            return lambda path: table.to_parquet(path, index=False)
        return lambda path: table.to_csv(path, index=False)

    return {name: writer(name, table) for name, table in tables.items()}


def load(scale: Scale, source: str) -> Result:
    """The sweep's tables over ``params/cells.yaml``: this machine's where ``source`` allows and they are there.

    Raises:
        MissingResult: there are none.
        ResultError: there are, and all were made with other parameters.
    """
    others = []
    expected = _grid(scale, config.load_sweep(scale))
    folders = {"local": [paths.sweep(scale.name)], "reference": [paths.reference(scale.name) / "sweep"]}
    for folder in folders.get(source, folders["local"] + folders["reference"]):
        result = read_result(folder)
        if result is None:
            continue
        differing = differences({key: result.content["inputs"][key] for key in expected}, expected)
        if not differing:
            return result
        others.append(f"{paths.show(folder)} was made with other parameters: {'; '.join(differing)}")
    if others:
        raise ResultError(others[0])
    raise MissingResult(f"no tables of a sweep at {scale.name} scale: run `make sweep SCALE={scale.name}`")
