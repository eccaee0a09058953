"""The scorecard collected from its trials and twins as one result, and found again by whoever reads it."""

import dataclasses
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd

from lib import config, models, paths, plan, rules, runs, scorecard, trials, twins
from lib.collection import writers
from lib.files import building
from lib.plan import PlanError, Scorecard
from lib.results import MissingResult, Result, ResultError, first_found, found_or_made, provenance, write_result

PROTOCOL = 1  # raised by hand when the tables would change though trials and twins do not
PLAN = "plan.csv"
TABLES = ("runs.csv", "scores.csv", "values.parquet", "relearning.csv", "twins.parquet")


class Part(NamedTuple):
    """A part of the scorecard: its name, the arguments of the command that makes it, and what says that it is there."""

    name: str
    arguments: list[str]
    is_done: Callable[[], bool]


@dataclasses.dataclass(frozen=True)
class ScorecardRun:
    """Parameters of the scorecard's notebook, checked. ``results`` as in :class:`lib.config.Testbed`."""

    scale: config.Scale
    settings: Scorecard
    results: Literal["auto", "local", "reference"]


@dataclasses.dataclass(frozen=True)
class _Values:
    """What the ``parameters`` cell of the scorecard's notebook may set, with its types."""

    scale: str


def from_notebook(namespace: dict[str, Any]) -> ScorecardRun:
    """Check the parameters of the scorecard's notebook, as :func:`lib.config.from_notebook` does for the others.

    Raises:
        config.ConfigError: a name nobody reads, a value of the wrong type, or an unknown scale.
    """
    given, source = config.checked(namespace, _Values, {"scale": "laptop"})
    return ScorecardRun(config.load_scale(given.scale), plan.load(given.scale), source)


def draw_plan(settings: Scorecard) -> pd.DataFrame:
    """The plan that the settings draw, refused where the committed one says otherwise.

    Raises:
        PlanError: the committed plan of this scale is another one.
    """
    drawn, committed = plan.draw(settings), paths.reference(settings.scale) / "scorecard" / PLAN
    if committed.exists():
        plan.refuse_another(plan.read(committed), drawn, paths.show(committed))
    return drawn


def commit_plan(settings: Scorecard) -> Path:
    """Write the plan to where it is committed from, before anything is run; trials that were made stay in it.

    Raises:
        PlanError: another plan lies there with results of its own, or a trial was made that the plan lacks or alters.
    """
    target, drawn = paths.reference(settings.scale) / "scorecard" / PLAN, plan.draw(settings)
    if (target.parent / "result.json").exists():
        draw_plan(settings)
    rows = {row["trial"]: row for row in drawn.to_dict("records")}
    for record in sorted((trials.folder_of(settings.scale) / "trials").glob("*/result.json")):
        made, row = json.loads(record.read_text(encoding="utf-8"))["inputs"]["trial"], rows.get(record.parent.name)
        if row is None or any(row[key] != value for key, value in made.items()):
            raise PlanError(
                f"{paths.show(record.parent)} was made by another plan than params/scorecard.yaml now draws; move "
                f"{paths.show(trials.folder_of(settings.scale))} aside, or restore the settings"
            )
    with building(target) as unfinished:
        drawn.to_csv(unfinished, index=False)
    return target


def parts(settings: Scorecard) -> list[Part]:
    """Everything the scorecard is made of: trials by seed, and two twins."""
    drawn, model, found = draw_plan(settings), _identity(settings), []
    for seed in settings.seeds:
        rows = drawn[drawn.seed == seed].to_dict("records")
        there = functools.partial(_trials_there, settings, rows, model)
        found.append(Part(f"seed-{seed:02d}", ["trials", "--scale", settings.scale, "--seed", str(seed)], there))
    for twin in twins.MODELS:
        there = functools.partial(_twin_there, settings, model, twin)
        found.append(Part(f"twin-{twin}", ["twin", "--scale", settings.scale, "--model", str(twin)], there))
    return found


def _trials_there(settings: Scorecard, rows: list[dict], model: str) -> bool:
    found = [trials.finished(settings, row, model) for row in rows]  # all of them: each may be of other parameters
    return None not in found


def _twin_there(settings: Scorecard, model: str, twin: int) -> bool:
    return twins.finished(settings, model, twin) is not None


def _identity(settings: Scorecard) -> str:
    scale = config.load_scale(settings.scale)
    return models.identity(scale.backbone, scale.revision)


def collect(settings: Scorecard) -> Result:
    """Write the scorecard's tables from its trials and twins, as one result beside them.

    Raises:
        ResultError: a trial or a twin is missing, damaged, or of other parameters than the plan's.
        PlanError: the committed plan is not the one that the settings draw.
    """
    started, drawn, model, wanted = time.perf_counter(), draw_plan(settings), _identity(settings), rules.load_verdicts()
    rows = drawn.to_dict("records")
    found = {row["trial"]: trials.finished(settings, row, model) for row in rows}
    missing = [name for name, result in found.items() if result is None]
    pair = {twin: twins.finished(settings, model, twin) for twin in twins.MODELS}
    missing += [f"twin {twin}" for twin, result in pair.items() if result is None]
    if missing:
        raise ResultError(
            f"{len(missing)} of {len(found) + len(pair)} parts of the scorecard are missing, {missing[0]} among them: "
            f"run `make scorecard SCALE={settings.scale}`"
        )
    tables = {PLAN: drawn} | _trial_tables(rows, found, wanted, settings)
    tables["twins.parquet"] = pd.concat([result.table("scores.parquet") for result in pair.values()], ignore_index=True)
    scorecard.join_twins(tables["twins.parquet"])
    seconds = sum(result.content["provenance"]["seconds"] for result in [*found.values(), *pair.values()])
    made = [result.content["provenance"] for result in [*found.values(), *pair.values()]]
    threads = sorted({record["threads"] for record in made})
    record = provenance(
        made[0]["device"],
        threads[-1],
        time.perf_counter() - started,
        threads_of_trials=", ".join(map(str, threads)),
        computed_in=round(seconds, 1),
    )
    results = {"trials": len(rows), "manipulations": tables["runs.csv"].manipulation.value_counts().to_dict()}
    folder = trials.folder_of(settings.scale)
    (folder / "result.json").unlink(missing_ok=True)  # none of the two, old or new, until all tables are there
    return write_result(folder, inputs(settings) | {"model": model}, results, record, writers(tables))


def _trial_tables(
    rows: list[dict[str, Any]], found: dict[str, Result], wanted: dict[str, Any], settings: Scorecard
) -> dict[str, pd.DataFrame]:
    """The tables that trials make: what each was and did, every probe's verdict, values and relearning curves."""
    graded, scores, values, curves = [], [], [], []
    for row in rows:
        result = found[row["trial"]]
        samples = settings.probes.extraction.samples
        table = scorecard.with_forced_extraction(result.table("values.parquet"), samples)
        seen = result.values["preamble_share"], result.values["base_hit_full"]
        shown = {"patterns": ", ".join(scorecard.patterns_shown(table, *seen, wanted))}
        graded.append(row | _run(row, result, settings) | shown)
        scores.append(
            scorecard.judge_trial(table, result.values["decoys"], wanted, settings).assign(trial=row["trial"])
        )
        values.append(table.assign(trial=row["trial"]))
        if "relearning.csv" in result.content["files"]:
            curves.append(result.table("relearning.csv").assign(trial=row["trial"]))
    return {
        "runs.csv": pd.DataFrame(graded),
        "scores.csv": pd.concat(scores, ignore_index=True)[scorecard.SCORES].round(8),
        "values.parquet": pd.concat(values, ignore_index=True)[["trial", *trials.VALUES]],
        "relearning.csv": pd.concat(curves, ignore_index=True)[["trial", "step", "known", "nll"]],
    }


def _run(row: dict[str, Any], result: Result, settings: Scorecard) -> dict[str, Any]:
    """What ``runs.csv`` says of a trial beyond the plan: its truth, and what was seen on the way."""
    reworded = result.table("reworded.csv")
    if set(reworded.canary) != set(result.table("values.parquet").canary):
        raise ResultError(f"{paths.show(result.folder)}: its truth is of other canaries than its probes")
    checked = scorecard.check_manipulation(row, reworded, settings)
    names = ("decoys", "base_hit_full", "preamble_share", "head_start", "regained")
    return (
        checked
        | {name: result.values.get(name) for name in names}
        | {"seconds": result.content["provenance"]["seconds"]}
    )


def inputs(settings: Scorecard) -> dict[str, Any]:
    """What the tables depend on beyond the model."""
    scale = config.load_scale(settings.scale)
    found = {
        "study": "scorecard",
        "protocol": [PROTOCOL, trials.PROTOCOL, twins.PROTOCOL],
        "settings": dataclasses.asdict(settings),
        "rules": rules.load_verdicts(),
        "scale": runs.scale_inputs(scale),
        "training": dataclasses.asdict(config.load_sweep(scale).training),
    }
    return json.loads(json.dumps(found))


def load(settings: Scorecard, source: str) -> Result:
    """The scorecard where ``source`` says (see :class:`lib.config.Testbed`); ``auto``: this machine's, else committed.

    Raises:
        MissingResult: there is none.
        ResultError: it is damaged, or was made with other parameters.
    """
    folders = {"local": trials.folder_of(settings.scale), "reference": paths.reference(settings.scale) / "scorecard"}
    found = first_found(folders, source, inputs(settings))
    if found is not None:
        return found
    raise MissingResult(f"there is no scorecard at {settings.scale} scale: run `make scorecard SCALE={settings.scale}`")


def study(params: ScorecardRun) -> Result:
    """The scorecard: found where ``params.results`` says, or made, trial by trial, in this process.

    Raises:
        ResultError: ``reference`` was asked for and there is none; or what is there is damaged or of other parameters.
    """

    def make() -> Result:
        draw_plan(params.settings)
        for seed in params.settings.seeds:
            trials.run_seed(params.settings, seed)
        for twin in twins.MODELS:
            twins.run(params.settings, twin)
        return collect(params.settings)

    return found_or_made(lambda source: load(params.settings, source), make, params.results)
