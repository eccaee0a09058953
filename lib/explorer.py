"""Data of the book's window explorer: for every case and cell, what each probe says for every window K.

All verdicts are those of :mod:`lib.verdicts` with the rules of ``params/verdicts.yaml``; the page only looks them up.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd

from lib import cases, paper, verdicts
from lib.results import Result
from lib.verdicts import Rules

MODALITIES = ("text", "image")
DIGITS = 4  # significant ones


@dataclass(frozen=True)
class Group:
    """Rows to judge: ``id`` in the page's address, ``label`` and ``kind`` in its menu, tables by modality."""

    id: str
    label: str
    kind: str
    tables: dict[str, tuple[pd.DataFrame, pd.DataFrame]]


def groups(sweep: Result, found: dict[str, Result], wanted: Rules) -> Iterator[Group]:
    """The paper's numbers, the constructed cases, then every cell of the sweep (adapter beside the weights, fp32).

    Args:
        sweep: the sweep's tables.
        found: the results of the cases by id.
    """
    for case in found:
        tables = {"text": paper.consistent_tables(case)}
        label = f"{case.upper()}, tables that give the paper's numbers"
        yield Group(f"paper-{case}", label, "the paper's cases", tables)
    for case, result in found.items():
        if result.values["constructed"]:
            name = result.values["constructed"]
            label = f"{name} (constructed for {case.upper()})"
            yield Group(name, label, "constructed cases", {"text": cases.groups(result)[f"{name} (constructed)"]})
    told = {result.values["cell"]: case.upper() for case, result in found.items()}
    tables = {modality: _by_cell(sweep, wanted, modality) for modality in MODALITIES}
    for cell in tables["text"]:
        label = f"{cell} (nearest to {told[cell]})" if cell in told else cell
        parts = {modality: tables[modality][cell] for modality in MODALITIES if cell in tables[modality]}
        yield Group(cell, label, "cells of the sweep", parts)


def _by_cell(sweep: Result, wanted: Rules, modality: str) -> dict[str, tuple[pd.DataFrame, pd.DataFrame]]:
    rows = {**wanted, "picking": {"rows": wanted["picking"]["rows"] | {"modality": modality}}}
    nll, recall = (dict(list(cases.chosen_rows(sweep.table(name), rows).groupby("cell"))) for name in cases.TABLES)
    return {cell: (part, recall[cell]) for cell, part in nll.items()}


def page_data(sweep: Result, found: dict[str, Result], wanted: Rules) -> dict[str, Any]:
    """Everything the page shows: ``groups`` in the order of its menu, and the ``window`` that it begins with."""
    listed = [
        {
            "id": group.id,
            "label": group.label,
            "kind": group.kind,
            "modalities": {name: view(*tables, wanted) for name, tables in group.tables.items()},
        }
        for group in groups(sweep, found, wanted)
    ]
    return {"window": wanted["probes"]["mean20"]["window"], "groups": listed}


def view(nll: pd.DataFrame, recall: pd.DataFrame, wanted: Rules) -> dict[str, Any]:
    """One group as the page needs it.

    Returns:
        ``spans`` (of every position), ``changes`` [canary][position] (nats, seeds averaged), ``windows`` (a record a K,
        from 1 on: the window probe's verdict, by what, its sums over the window in nats, the patterns that hold),
        ``probes`` (a record for every other probe) and ``protocol`` (the verdict on change, decoys not run).
    """
    averaged = nll.groupby(["span", "canary", "position"], as_index=False)[["nll", "nll_base"]].mean()  # over seeds
    change = averaged.nll.sub(averaged.nll_base).groupby([averaged.canary, averaged.position]).first().unstack()
    width = int(nll.groupby(["seed", "canary"]).size().min())
    fixed = {name: rule for name, rule in wanted["probes"].items() if "window" not in rule}
    rules = {**wanted, "probes": {k: {"kind": "nll", "window": k} for k in range(1, width + 1)} | fixed}
    values = verdicts.probe_values(nll, recall, rules)
    means = verdicts.judge(values, rules)
    sums = verdicts.judge(values, {**rules, "probes": fixed}, reading="sum")
    # A window holds K tokens of every target: its sum is K times its mean, and so is its margin. One verdict for both.
    judged = [means, pd.concat([means.drop(index=list(fixed)), sums])]
    base = float(recall.hit_full_base.astype(float).mean())
    windows = []
    for k in range(1, width + 1):
        share = float(verdicts.span_shares(averaged, k).get("preamble", 0.0))
        shown = list(wanted["patterns"])
        for table in judged:  # a pattern must hold under both readings
            if shown:
                found = verdicts.patterns(_as_window(table, k, list(fixed)), share, base, wanted)
                shown = [name for name in shown if found[name].holds]
        windows.append(_record(means.loc[k], scale=k) | {"shown": shown})
    probes = {name: _record(means.loc[name], scale=1) for name in fixed}
    spans = nll.drop_duplicates("position").sort_values("position").span.tolist()[:width]
    return {
        "spans": spans,
        "changes": [[_short(value) for value in row] for row in change.to_numpy()[:, :width]],
        "windows": windows,
        "probes": probes,
        "protocol": verdicts.protocol_change(means.loc[list(fixed)], "not_run", wanted).verdict,
    }


def _as_window(table: pd.DataFrame, k: int, fixed: list[str]) -> pd.DataFrame:
    return table.loc[[k, *fixed]].rename(index={k: "mean20"})


def _record(row: pd.Series, scale: int) -> dict[str, Any]:
    """A row of :func:`lib.verdicts.judge`, its numbers times ``scale`` and shortened; nothing where there is none."""
    record = {"verdict": row.verdict, "by": row.decided_by}
    for name in ("estimate", "low", "high", "margin"):
        record[name] = None if pd.isna(row[name]) else _short(row[name] * scale)
    return record | {name: None if pd.isna(row[name]) else int(row[name]) for name in ("up", "down", "canaries")}


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
