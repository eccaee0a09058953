"""The three cases as tables: cells judged, one picked for each by the committed rule, repeats and decoys read."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lib import collection, config, exposure, paths, rules, verdicts
from lib.config import CellRun, Scale
from lib.results import Result, ResultError, read_result, write_result
from lib.verdicts import Judgement, Rules

TABLES = ("token_nll.parquet", "recall.parquet")
DECOYS = "decoys.json"  # record of the decoy table that all cases share
PLAIN = "untouched"  # the backbone before anything was planted


@dataclass(frozen=True)
class Case:
    """One case of the paper: its pattern of ``params/verdicts.yaml``, and the construction that shows its mechanism."""

    id: str
    pattern: str
    constructed: str | None


CASES = {
    "c3": Case("c3", "window_truncation", "late-damage"),
    "c4": Case("c4", "non_secret_drift", "preamble-drift"),
    "c5": Case("c5", "ambiguous_drop", None),
}


def chosen_rows(table: pd.DataFrame, wanted: Rules) -> pd.DataFrame:
    """Rows of a table that the picking rule names: one modality, stack and precision."""
    labels = wanted["picking"]["rows"]
    return table[(table[list(labels)] == pd.Series(labels)).all(axis=1)]


def judge_cells(nll: pd.DataFrame, recall: pd.DataFrame, wanted: Rules) -> dict[str, Judgement]:
    """Every cell of ``token_nll.parquet`` and ``recall.parquet`` judged on the rows that the picking rule names."""
    answers = dict(list(chosen_rows(recall, wanted).groupby("cell")))
    cells = chosen_rows(nll, wanted).groupby("cell", sort=False)
    return {cell: verdicts.judge_group(part, answers[cell], wanted) for cell, part in cells}


def picks(tables: Result, wanted: Rules) -> dict[str, dict[str, Any]]:
    """The cell that tells each pattern's case, as :func:`lib.verdicts.pick` gives it, by pattern."""
    judged, cells = judge_cells(*(tables.table(name) for name in TABLES), wanted), tables.table("cells.csv")
    return {pattern: verdicts.pick(judged, cells, pattern, wanted) for pattern in wanted["patterns"]}


def labels(judged: dict[str, Judgement], cells: pd.DataFrame, wanted: Rules) -> dict[str, str]:
    """The cases told by each picked cell, as a reader sees them: ``{"gui-stop1": "C5"}``."""
    found: dict[str, str] = {}
    for case in CASES.values():
        cell = verdicts.pick(judged, cells, case.pattern, wanted)["cell"]
        found[cell] = " ".join([*found.get(cell, "").split(), case.id.upper()])
    return found


def confirmation_runs(scale: Scale, source: str) -> list[CellRun]:
    """The runs that repeat the cells picked from the sweep's tables.

    Raises:
        ResultError: there are no tables of a sweep.
    """
    wanted = rules.load_verdicts()
    found = picks(collection.load(scale, source), wanted)
    cells = [pick["cell"] for pick in found.values()]
    rule = wanted["picking"]["confirmation"]
    return collection.confirmation_runs(scale, config.load_sweep(scale), cells, rule)


def judge_runs(nll: pd.DataFrame, recall: pd.DataFrame, pattern: str, wanted: Rules) -> pd.DataFrame:
    """Whether each run alone shows a pattern: a row an injection and seed, with every probe's verdict.

    Columns ``injection, seed, shown, fails`` (the conditions that fail) and one a probe.
    """
    rows = []
    answers = dict(list(recall.groupby(["injection", "seed"])))
    for (injection, seed), part in nll.groupby(["injection", "seed"]):
        judged = verdicts.judge_group(part, answers[injection, seed], wanted)
        finding = judged.patterns[pattern]
        row = {"injection": injection, "seed": seed, "shown": finding.holds, "fails": ", ".join(finding.failed)}
        rows.append(row | judged.verdicts.verdict.to_dict())
    return pd.DataFrame(rows)


def headline(case: Result) -> str:
    """What a case's first lines say: whether a cell shows the pattern, how it was picked, how often it is confirmed."""
    values, candidates = case.values, case.table("candidates.csv")
    trained = candidates[candidates.kind != "noise"]
    pattern = values["pattern"].replace("_", " ")
    if values["showing"]:
        first = (
            f"{len(values['showing'])} of {len(trained)} trained cells show {pattern}: {', '.join(values['showing'])}."
        )
    else:
        first = f"NOT FOUND: none of the {len(trained)} trained cells of our sweep shows {pattern}."
    how = "by rule" if values["by_rule"] else "by hand"
    second = f"Looked at here: {values['cell']}, picked {how} from the tables at {values['picked_at']} scale"
    if not values["found"]:
        second += "; it fails " + ", ".join(_failed(name, far) for name, far in values["failed"].items())
    noise = int((candidates.kind == "noise").sum())
    confirmed = values["confirmed"]
    third = f"Noise cells that show it: {len(values['noise'])} of {noise}. Runs that repeat the cell and show it: "
    third += "none were made." if confirmed is None else f"{confirmed['shown']} of {confirmed['of']}."
    return f"{first}\n{second}.\n{third}"


def _failed(condition: str, distance: float | None) -> str:
    return f"{condition} (not testable)" if distance is None else f"{condition} ({distance:.3g})"


def groups(case: Result) -> dict[str, tuple[pd.DataFrame, pd.DataFrame]]:
    """Per-token and recall rows of a case by name: its cell, and its construction where it has one."""
    nll, recall = (case.table(name) for name in TABLES)
    names = {case.values["cell"]: case.values["cell"]}
    if case.values["constructed"]:
        names[case.values["constructed"]] = f"{case.values['constructed']} (constructed)"
    return {label: (nll[nll.cell == name], recall[recall.cell == name]) for name, label in names.items()}


def candidates(judged: dict[str, Judgement], cells: pd.DataFrame, pattern: str) -> pd.DataFrame:
    """Every cell of the sweep, nearest to a pattern first: ``cell, kind, shown, fails, distance`` and the verdicts."""
    kinds = cells.groupby("cell").kind.first()
    rows = []
    for cell, found in judged.items():
        failed = found.patterns[pattern].failed
        row = {"cell": cell, "kind": kinds[cell], "shown": not failed, "fails": ", ".join(failed)}
        row |= {"distance": round(float(sum(failed.values())), 4), "failed": len(failed)}
        rows.append(row | found.verdicts.verdict.to_dict() | {"change": found.change.verdict})
    table = pd.DataFrame(rows)
    return table.sort_values(["failed", "distance", "cell"]).drop(columns="failed").reset_index(drop=True)


def decoys_of(case: Result) -> pd.DataFrame:
    """Decoys of the models that a case looks at: its own table, or its models' rows of ``cases/decoys.parquet``.

    In the committed reference the cases share one table, since several look at the same models.

    Raises:
        ResultError: the table is missing or damaged, or lacks one of the models.
    """
    if "decoys.parquet" in case.content["files"]:
        return case.table("decoys.parquet")
    found = read_result(case.folder.parent, DECOYS)
    parts = {} if found is None else dict(list(found.table("decoys.parquet").groupby("model")))
    missing = [model for model in case.values["models"] if model not in parts]
    if missing:
        where = paths.show(case.folder.parent / "decoys.parquet")
        raise ResultError(f"{where} lacks the model {missing[0]!r} of case {case.folder.name}")
    return pd.concat([parts[model] for model in case.values["models"]], ignore_index=True)


def share_decoys(found: list[Result], folder: Path) -> None:
    """Copy cases to ``folder``/<case>, their decoys into one table there, a model once.

    Raises:
        ResultError: two cases have other decoys of one model.
    """
    tables: dict[str, pd.DataFrame] = {}
    for case in found:
        for model, part in case.table("decoys.parquet").groupby("model", sort=False):
            part = part.reset_index(drop=True)
            if model in tables and not tables[model].equals(part):
                raise ResultError(f"the cases have two tables of decoys of {model!r}; run `make cases` again")
            tables[model] = part
        target = folder / case.folder.name
        target.mkdir(parents=True)
        content = case.content | {"files": {k: v for k, v in case.content["files"].items() if k != "decoys.parquet"}}
        for name in content["files"]:
            shutil.copy2(case.folder / name, target / name)
        (target / "result.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    whole = pd.concat(tables.values(), ignore_index=True)
    inputs = {"study": "decoys", "cases": {case.folder.name: case.content["hash"] for case in found}}
    record = {name: found[0].content["provenance"][name] for name in ("versions", "cpu", "threads")}
    write_result(folder, inputs, {}, record, collection.writers({"decoys.parquet": whole}), record=DECOYS)


def exposures(decoys: pd.DataFrame) -> pd.DataFrame:
    """:func:`lib.exposure.exposure` of every model of a decoy table, with the column ``model``."""
    tables = [exposure.exposure(part).assign(model=model) for model, part in decoys.groupby("model", sort=False)]
    return pd.concat(tables, ignore_index=True)


def decoy_reading(
    nll: pd.DataFrame, recall: pd.DataFrame, decoys: pd.DataFrame, base: str, after: list[str], wanted: Rules
) -> tuple[str, verdicts.Decision | None]:
    """What random decoys say of a cell's change, and the protocol's verdict on its level.

    The change and the ranks are averaged over those models ``after`` that the decoy table has. A canary counts as
    recalled if one seed's free answer holds its secret: 60 bits are not said by chance. The level needs the untouched
    model in the table and is None otherwise.
    """
    kind = wanted["decoys"]["kind"]
    random = decoys[decoys.kind.isin(["secret", kind])]
    parts = dict(list(random.groupby("model")))
    after = [name for name in after if name in parts]
    changes = pd.concat([exposure.corrected_change(parts[base], parts[name], kind) for name in after])
    changes = changes.groupby("canary").mean(numeric_only=True)
    judged = verdicts.judge_group(nll, recall, wanted).verdicts
    answer = verdicts.decoy_answer(changes, judged.verdict["hex"], wanted)
    if PLAIN not in parts:
        return answer, None
    ranks = pd.concat([exposure.exposure(parts[name]) for name in after]).groupby("canary").normalised_rank.mean()
    untouched = parts[PLAIN][parts[PLAIN].kind == "secret"].set_index("canary").nll_secret
    own = pd.concat([parts[name][parts[name].kind == "secret"] for name in after])
    fall = (own.groupby("canary").nll_secret.mean() - untouched).rename("change").reset_index()
    tokens = own.groupby("canary").tokens.mean().to_numpy()
    fall = fall.assign(
        change=fall.change / tokens, base=untouched.to_numpy() / tokens, tokens=tokens, seed=0, probe="hex"
    )
    against = verdicts.judge(fall, {**wanted, "probes": {"hex": wanted["probes"]["hex"]}}).verdict["hex"]
    recalled = int((recall.groupby("canary").hit_secret.max() > 0).sum())
    level = verdicts.protocol_level(
        recalled,
        recall.canary.nunique(),
        verdicts.rank_answer(ranks.to_numpy(), wanted),
        against == verdicts.STRENGTHENED,
        wanted,
    )
    return answer, level
