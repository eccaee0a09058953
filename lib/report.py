"""The report of the main job: paper beside measurement, verdict by verdict and claim by claim, as Markdown and HTML."""

import base64
import io
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from markdown_it import MarkdownIt
from matplotlib.figure import Figure

from lib import cases, figures, files, paper, rules, scorecard, specification, verdicts
from lib.cases import CASES, TABLES
from lib.inversion import study
from lib.inversion.figures import loss_traces
from lib.results import Result

TITLES = {
    "c3": "C3: window truncation",
    "c4": "C4: non-secret drift",
    "c5": "C5: ambiguous drop",
}
REACHING = "K that reach\nthe secret"
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:1rem 0;font-size:.9rem}"
    "th,td{border-bottom:1px solid #ddd;padding:.3rem .7rem;text-align:left;vertical-align:top}"
    "img{max-width:100%}h1,h2{line-height:1.2}"
)


def write(
    folder: Path,
    scale: str,
    reruns: Mapping[str, Result],
    studies: Mapping[str, Result],
    claims: pd.DataFrame,
    inverted: study.Short,
) -> Path:
    """Write ``report.md``, its figures beside it, and ``report.html`` with the figures inside; give back the page.

    ``reruns`` are the cells run by this main job; ``studies`` the cases' own results, of several seeds, where there are
    any; ``claims`` the table of :func:`lib.paper.claims_table`; ``inverted`` the short inversion.
    """
    drawn: dict[str, bytes] = {}
    parts = [_opening(scale, reruns, studies)]
    for case in CASES:
        text, figure = _case(case, reruns[case], studies.get(case))
        name = f"report-{case}.png"
        drawn[name] = _png(figure)
        parts.append(f"{text}\n![{TITLES[case]}: changes in margins, by probe]({name})\n")
    drawn["report-inversion.png"] = _png(loss_traces({"": inverted.tokens}, inverted.tolerance))
    parts.append(f"{_inversion(inverted)}\n![Cumulative discrete loss along every prompt](report-inversion.png)\n")
    parts.append(_claims(claims))
    text = "\n".join(parts)
    html = MarkdownIt("commonmark").enable("table").render(text)
    for name, content in drawn.items():
        inline = f"data:image/png;base64,{base64.b64encode(content).decode()}"
        html = html.replace(f'src="{name}"', f'src="{inline}"')
        with files.building(folder / name) as unfinished:
            unfinished.write_bytes(content)
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>leakbook: report</title><style>{STYLE}</style><body>{html}</body></html>\n"
    )
    for name, content in {"report.md": text, "report.html": page}.items():
        with files.building(folder / name) as unfinished:
            unfinished.write_text(content, encoding="utf-8")
    return folder / "report.html"


def markdown(table: pd.DataFrame) -> str:
    """A table in Markdown, index first; a bar inside a text is escaped."""
    rows = [[table.index.name or "", *table.columns], ["---"] * (len(table.columns) + 1)]
    rows += [[index, *values] for index, values in zip(table.index, table.to_numpy().tolist(), strict=True)]
    return "\n".join("| " + " | ".join(str(value).replace("|", "\\|") for value in row) + " |" for row in rows) + "\n"


def write_scorecard(folder: Path, card: Result, sweep: Result) -> None:
    """The two figures of the scorecard that the README shows: ``detection.png`` and ``specification.png``."""
    graded = scorecard.detection(card.table("runs.csv"), card.table("scores.csv"))
    drawn = {"detection.png": figures.detection_chart(graded, scorecard.TASKS, scorecard.NAMES)}
    drawn["specification.png"] = specification_curve(sweep)
    for name, figure in drawn.items():
        with files.building(folder / name) as unfinished:
            unfinished.write_bytes(_png(figure))


def specification_curve(sweep: Result) -> Figure:
    """The window's verdict on every cell of a sweep under every specification, and which choice flips it."""
    wanted = rules.load_verdicts()
    nll, recall, cells = (sweep.table(name) for name in (*TABLES, "cells.csv"))
    nll, recall = (table[table.modality == "text"] for table in (nll, recall))
    table, committed = specification.specifications(nll, wanted), specification.committed(wanted)
    start = nll[nll.span == "hex"].position.min()
    sets = {"every K": table, REACHING: table[table.K.gt(start)]}
    fates = {name: specification.flips(part, committed) for name, part in sets.items()}
    ranking = {name: specification.influence(part, committed) for name, part in sets.items()}
    kinds = cells.groupby("cell", sort=False).kind.first()
    judged = cases.judge_cells(nll, recall, wanted)
    return figures.specification_curve(
        fates, ranking, list(kinds.index[kinds == "noise"]), cases.labels(judged, cells, wanted)
    )


def _opening(scale: str, reruns: Mapping[str, Result], studies: Mapping[str, Result]) -> str:
    lines = [f"# What the probes say, at {scale} scale", ""]
    lines.append(
        "*The paper*: arXiv:2606.31168, its reported numbers judged by our rules. *Sweep*: the cell that tells the "
        "case, three seeds. *This run*: the same cell trained anew with its first seed. *Constructed*: a case made on "
        "purpose to show the mechanism. Verdicts are about change against the base; a rise of the NLL is damage."
    )
    lines.append("")
    for name, results in {"this run": reruns, "sweep": studies}.items():
        for case, result in results.items():
            made = result.content["provenance"]
            machine = (
                f"{made['seconds']:.0f} s, {made['threads']} threads, {made['cpu']}, torch {made['versions']['torch']}"
            )
            lines.append(f"- {name}, {case}: {machine}, {made['finished']}; hash {result.content['hash'][:12]}")
    return "\n".join(lines) + "\n"


def _case(case: str, run: Result, study: Result | None) -> tuple[str, Figure]:
    wanted = rules.load_verdicts()
    groups = {"the paper": paper.consistent_tables(case)}
    if study is not None:
        groups |= dict(zip(("sweep", "constructed"), cases.groups(study).values(), strict=False))
    groups["this run"] = tuple(run.table(name) for name in TABLES)
    judged = {name: verdicts.judge_group(*group, wanted) for name, group in groups.items()}
    table = pd.DataFrame({name: _cells(found.verdicts) for name, found in judged.items()}).rename_axis("probe")
    pattern = CASES[case].pattern
    table.loc["pattern holds"] = ["yes" if found.patterns[pattern].holds else "no" for found in judged.values()]
    changes = {name: found.change.verdict for name, found in judged.items()}
    decided = {"this run": run} | ({} if study is None else {"sweep": study})  # with what decoys said
    changes |= {name: result.values["change"]["verdict"] for name, result in decided.items()}
    table.loc["protocol"] = pd.Series(changes)
    values = run.values
    lines = [f"## {TITLES[case]}", "", f"Cell `{values['cell']}`, seed {values['seed']} in this run.", ""]
    if study is not None:
        lines += [*cases.headline(study).split("\n"), ""]
    lines.append(markdown(table))
    exposed = values["exposure"]
    lines.append(
        f"Exposure among 31 random decoys, mean over canaries: {exposed['before']:.2f} bits before, "
        f"{exposed['after']:.2f} after (the cap is log2(32) = {values['cap']:.0f} bits). "
        f"Decoys say: {values['decoys']}."
    )
    shown = {name: found.verdicts for name, found in judged.items()}
    return "\n".join(lines) + "\n", figures.probe_intervals(shown)


def _inversion(inverted: study.Short) -> str:
    rows = {}
    for prompt, part in inverted.tokens.sort_values("position").groupby("prompt", sort=False):
        right = int((part.found_id == part.true_id).sum())
        fell = part.position[part.fallback]
        alarm = f"at token {fell.iloc[0] + 1}" if len(fell) else "none"
        loss = f"{part.cumulative_loss.iloc[-1]:.1e}"
        rows[prompt] = [inverted.true[prompt], inverted.found[prompt], f"{right} of {len(part)}", alarm, loss]
    columns = ["text", "found from its states alone", "tokens right", "alarm", "cumulative discrete loss"]
    table = pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis("prompt")
    lines = ["## Text from hidden states", "", f"{inverted.what} {inverted.seconds:.0f} s for the search.", ""]
    return "\n".join(lines) + "\n" + markdown(table)


def _cells(table: pd.DataFrame) -> pd.Series:
    """One text a probe: its verdict with the mean change, or the canaries that lost and gained the recall."""
    texts = {}
    for probe, row in table.iterrows():
        if pd.isna(row.by_mean):
            texts[probe] = f"{row.verdict} ({row.up:.0f} lost, {row.down:.0f} gained)"
        else:
            texts[probe] = f"{row.verdict} ({row.estimate:+.4f})"
    return pd.Series(texts)


def _claims(claims: pd.DataFrame) -> str:
    table = claims.assign(state=claims.state + claims.by_design.map({True: ", by design", False: ""}))
    shown = table.set_index("id")[["claim", "reported", "measured", "state"]].rename_axis("claim id")
    return f"## Claim by claim\n\n{markdown(shown)}"


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
