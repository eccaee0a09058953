"""The page of an audit: one file that opens offline. Whatever comes from a user's file is escaped by the template."""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lib import figures, paths
from lib.audit.analysis import LEVEL, probe_names
from lib.verdicts import DAMAGED

STRIPS = 5  # most and least memorised canaries whose tokens are shown
ROWS = 200  # canaries in the page's table; all are in canaries.csv
DARK = 3.0  # nats a token at which a token has no colour any more
LEVELS = {
    "memorised": "memorised",
    "partly": "partly memorised",
    "format only": "format, not secret",
    "no evidence": "no evidence",
    "inconclusive": "inconclusive",
}
MERGED = {"merged": "merged in fp32", "merged_bf16": "merged into bf16 weights"}
HOLM = f"{100 * LEVEL:.0f} % over all canaries, by Holm's method; the group's mean rank is tested at 2.5 %"
READINGS = {
    "recall": "secrets said by greedy decoding",
    "rank": "mean rank among decoys",
    "nll": "the secret's NLL against the baseline's",
}
COLUMNS = {
    "canary": "canary",
    "verdict": "verdict",
    "nll_secret": "NLL of the secret",
    "nll_secret_base": "baseline's",
    "exposure": "exposure, bits",
    "rank": "rank",
    "decoys": "of decoys",
    "p_value": "p",
    "hit_full": "whole answer",
    "hit_secret": "secret said",
    "hit_forced": "behind its prefix",
    "change_verdict": "change",
    "pattern": "pattern",
}


def page(results: Mapping[str, Any], tokens: pd.DataFrame, asked: Mapping[str, Any], made: Mapping[str, Any]) -> str:
    """The page as HTML.

    Args:
        results: those of ``report.json``.
        tokens: ``model, canary, position, span, token, nll``, a row a target token.
        asked: the audit's parameters; ``made``: its provenance.
    """
    table = pd.DataFrame(results["canaries"])
    cards = [
        _card(name, summary, table[table.model == name], tokens[tokens.model == name], results, asked)
        for name, summary in results["models"].items()
    ]
    rows = table.sort_values(["model", "nll_secret"]).head(ROWS)
    columns = [name for name in COLUMNS if name in table] + (["model"] if len(cards) > 1 else [])
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(paths.DATA), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("audit.html").render(
        subject=asked["model"] or f"the worked example ({asked['scale']})",
        asked=_asked(asked, results),
        cards=cards,
        notes=results["notes"],
        margin=results["margin"],
        columns=[COLUMNS.get(name, name) for name in columns],
        rows=[[_cell(value) for value in row] for row in rows[columns].itertuples(index=False)],
        rows_say=f"{len(rows)} of {len(table)} rows, best known first; all of them with every number in canaries.csv. "
        f"Named by rank: at {HOLM}.",
        skipped=results["skipped"],
        total=results["rows"],
        made=[f"{name}: {_shown(value)}" for name, value in made.items()],
    )


def _asked(asked: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    compared = asked["baseline"] or ("the same model without the adapter" if asked["adapter"] else "nothing")
    if asked["model"] is None:
        compared = "the same model without the adapter"
    return (
        f"{results['rows']} rows in {asked['canaries'] or 'the example file'}, {len(results['skipped'])} not audited; "
        f"baseline: {compared}; prompts as {results['template']} text. Numbers: report.json and canaries.csv beside it."
    )


def _card(
    name: str, summary: Mapping, table: pd.DataFrame, tokens: pd.DataFrame, results: Mapping, asked: Mapping
) -> dict[str, Any]:
    windows = asked["windows"]
    names = probe_names(windows)
    level = {"verdict": LEVELS[summary["level"]["verdict"]], "decided_by": readable(summary["level"], READINGS)}
    change = {"verdict": changed(summary), "decided_by": readable(summary["change"], names)}
    strips, say = _strips(table, tokens)
    return {
        "name": name,
        "level": level,
        "change": change,
        "numbers": numbers(summary),
        "disagreements": summary["disagreements"],
        "limits": limits(summary, table),
        "strips": strips,
        "strips_say": say,
        "probes": _probes(summary["probes"], names),
        "figures": [{"alt": alt, "png": _png(figure)} for alt, figure in drawings(summary, table, windows).items()],
        "margins": {names[probe]: list(said.items()) for probe, said in summary["margins"].items()},
        "merged": [_merged(kind, row, len(table)) for kind, row in summary["merged"].items()],
    }


def readable(decision: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """What decided, with every reading by its name."""
    parts = decision["decided_by"].replace("no row matched", "no row of the decision table").split(", ")
    shown = []
    for part in parts:
        name, _, rest = part.partition(" ")
        said = rest.strip("()").replace("_", " ")
        shown.append(part if name not in names else f"{names[name]} ({said})" if said else names[name])
    return "; ".join(shown)


def changed(summary: Mapping[str, Any]) -> str:
    """The verdict on change in a reader's words; where only the format changed, which way."""
    verdict = summary["change"]["verdict"]
    if verdict != "format only":
        return verdict
    way = "rose" if summary["probes"]["hex"]["verdict"] == DAMAGED else "fell"
    return f"format, not secret: the NLL of secrets {way}, and their decoys' with it"


def numbers(summary: Mapping[str, Any]) -> list[str]:
    """The figures of the first screen, a sentence each."""
    count, drawn = summary["canaries"], summary["decoys"]
    said = f"{summary['recalled']['hit_secret']} of {count} secrets are said by greedy decoding"
    if "recalled_base" in summary:
        said += f" ({summary['recalled_base']['hit_secret']} by the baseline)"
    chances = ", ".join(f"{chance:.3g} in {k}" for k, chance in summary["hit_at_k"].items())
    lines = [f"{said}; chance of at least one hit in k samples behind the true prefix, mean: {chances}"]
    if drawn["canaries"]:
        several = f"{drawn['least']:.0f}" + ("" if drawn["least"] == drawn["most"] else f" to {drawn['most']:.0f}")
        exposed = summary["exposure"]
        lines.append(
            f"{count} canaries, {several} decoys each; exposure {exposed['mean']:.2f} bits on average, where it cannot "
            f"exceed {exposed['cap']:.2f}"
        )
        before = summary.get("normalised_rank_base")
        against = "" if before is None else f" ({before:.3f} on the baseline)"
        lines.append(
            f"mean normalised rank of the secrets among their decoys: {summary['normalised_rank']:.3f}{against}"
        )
        lines.append(_ranks(summary["evidence"]))
    else:
        lines.append(f"{count} canaries, no decoys: no exposure, and no rank")
    lines += _secret(summary)
    named = summary["named"]
    if named:
        more = f" and {len(named) - 10} more" if len(named) > 10 else ""
        lines.append(f"named by their rank alone ({HOLM}): {', '.join(named[:10])}{more}")
    return lines


def _secret(summary: Mapping[str, Any]) -> list[str]:
    """The NLL of the secret before and after, where a change was judged."""
    secret = summary["probes"].get("hex")
    if not secret or secret["low"] is None:
        return []
    return [
        f"NLL of the secret: {summary['nll_secret']:.2f} nats, {summary['nll_secret_base']:.2f} on the baseline; "
        f"change {secret['estimate']:+.3f} nats a token (95 % interval {secret['low']:+.3f} to {secret['high']:+.3f})"
    ]


def _ranks(evidence: Mapping[str, Any]) -> str:
    if evidence["reads"] == "nothing":
        return "ranks among decoys decide nothing here: no secret's generator is stated"
    line = f"ranks: mean normalised {evidence['reads']}, {evidence['canaries']} canaries"
    if "low" in evidence:
        line += f", 95 % interval {evidence['low']:.3f} to {evidence['high']:.3f} (0.5 is chance)"
    if evidence["p_value"] is not None:
        return f"{line}; p = {evidence['p_value']:.2g}, low at 0.025 or less"
    return f"{line}; a rank and no p-value, since no secret's generator is stated: it decides nothing"


def limits(summary: Mapping[str, Any], table: pd.DataFrame) -> list[str]:
    """What the verdicts leave open, in sentences that follow from the numbers."""
    found = [
        "other wordings, longer prompts and sampling were not asked: teacher forcing and greedy decoding were",
        "one training is one training: intervals are over canaries, and another run may differ",
    ]
    if summary["level"]["verdict"] == "no evidence":
        found.append(_least_seen(summary))
    if summary["change"]["decided_by"] == "no baseline":
        found.append("without a baseline no change is judged, and a learned format cannot be told from nothing learned")
    if summary["change"]["decided_by"] == "one canary":
        found.append("one canary is no group: change is not judged, and its level rests on this canary alone")
    if summary["straddling"]:
        found.append(
            f"{summary['straddling']} secrets share a token with the text around them: it is read as the secret's, and "
            "their decoys share theirs alike"
        )
    if summary["too_short"]:
        found.append(
            f"{summary['too_short']} secrets hold fewer than {summary['bits_needed']:.1f} bits: saying one may be a "
            f"guess, and counts as recall only with so many others that all are guesses with a chance of 1 % at most; "
            f"{summary['too_short_recalled']} of them are said ({summary['guessed']:.2g})"
        )
    return found + (_rank_limits(summary, table) if summary["decoys"]["canaries"] else [])


def _rank_limits(summary: Mapping[str, Any], table: pd.DataFrame) -> list[str]:
    """What ranks among decoys cannot say here."""
    count, drawn, found = summary["canaries"], summary["decoys"], []
    if drawn["least"] < summary["decoys_needed_to_name"]:
        found.append(
            f"no single canary can be named by its rank: {count} canaries take {summary['decoys_needed_to_name']} "
            f"decoys each ({HOLM}), and {drawn['least']:.0f} end exposure at {math.log2(drawn['least'] + 1):.2f} bits"
        )
    unstated = int((~table.exchangeable.astype(bool)).sum())
    if unstated:
        found.append(
            f"ranks of {unstated} of {count} canaries are no p-values: no generator of the secret is stated, or too "
            "few decoys have its tokens"
        )
    free = summary["layouts"].get("free", 0)
    if free:
        found.append(f"decoys of {free} canaries have other numbers of tokens than their secret, which shifts ranks")
    base = summary.get("normalised_rank_base")
    if base is not None and abs(base - 0.5) > 0.25:
        found.append(f"on the baseline already the secrets' mean normalised rank is {base:.2f}: decoys are unlike them")
    return found


def _least_seen(summary: Mapping[str, Any]) -> str:
    """How small an effect on ranks would have gone unseen: half an interval below 0.5, each rank uniform."""
    drawn, count = summary["decoys"]["least"], summary["evidence"]["canaries"]
    if not drawn or not count:
        return "no evidence is not absence: nothing recalled, and no decoys to rank the secrets among"
    far = 1.96 * math.sqrt((drawn + 2) / (12 * drawn * count))
    return (
        f"no evidence is not absence: with {count} canaries a mean normalised rank of {max(0.0, 0.5 - far):.2f} to 0.5 "
        "looks like chance"
    )


def _strips(table: pd.DataFrame, tokens: pd.DataFrame) -> tuple[list[dict], str]:
    """Tokens of the most and least memorised canaries, by nats a token of the secret."""
    order = (table.nll_secret / table.tokens).groupby(table.canary.to_numpy()).first().sort_values(kind="stable").index
    few = len(order) <= 2 * STRIPS
    chosen = list(order) if few else [*order[:STRIPS], *order[-STRIPS:]]
    parts = dict(list(tokens[tokens.canary.isin(chosen)].groupby("canary", sort=False)))
    facts = table.set_index("canary")
    strips = [
        {
            "canary": name,
            "what": f"{facts.verdict[name]}, secret {facts.nll_secret[name]:.3f} nats",
            "tokens": [_token(row) for row in parts[name].sort_values("position").itertuples()],
        }
        for name in chosen
    ]
    return strips, "" if few else f"The {STRIPS} most and the {STRIPS} least memorised of {len(order)}."


def _token(row: Any) -> dict[str, Any]:
    text = row.token.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣") or "∅"
    shade = f"{max(0.0, 1 - row.nll / DARK):.2f}"
    return {"text": text, "nll": f"{row.nll:.2f}", "shade": shade, "secret": row.span == "hex"}


def _probes(probes: Mapping[str, Mapping], names: Mapping[str, str]) -> list[dict[str, str]]:
    rows = []
    for probe, row in probes.items():
        shown = {key: _number(row[key]) for key in ("estimate", "half_width", "margin")}
        interval = "" if row["low"] is None else f"{_number(row['low'])} to {_number(row['high'])}"
        warned = row["decided_by"] + (f"; {row['warning']}" if row["warning"] else "")
        rows.append(
            {"probe": names[probe], "verdict": row["verdict"], "decided_by": warned, "interval": interval} | shown
        )
    return rows


def drawings(summary: Mapping, table: pd.DataFrame, windows: Sequence[int]) -> dict[str, Figure]:
    """Figures of one audited model by caption: changes where there is a baseline, ranks where there are decoys.

    ``summary`` and ``table`` are its part of ``models`` and its rows of ``canaries`` in ``report.json``.
    """
    drawn, names = {}, probe_names(windows)
    if summary["probes"]:
        judged = pd.DataFrame(summary["probes"]).T.rename(index=names)
        judged = judged[judged.by_mean.notna() & judged.margin.notna()].infer_objects()
        if len(judged):
            drawn["Change by probe, in margins"] = figures.probe_intervals({"against the baseline": judged})
    ranked = {"normalised_rank": "audited", "normalised_rank_base": "baseline"}
    ranked = {name: label for name, label in ranked.items() if name in table and table[name].notna().any()}
    if ranked:
        long = table.melt(value_vars=list(ranked), var_name="of", value_name="value").dropna()
        long = long.rename(columns={"of": "model", "value": "normalised_rank"}).assign(kind="random")
        caption = "Rank of every secret among its decoys (0: before all of them; red: mean; 0.5: chance)"
        drawn[caption] = figures.rank_strips(long, ranked)
    return drawn


def probe_table(summary: Mapping, windows: Sequence[int]) -> pd.DataFrame:
    """``verdict, decided_by, estimate, low, high, margin`` of every probe, by the name that readers know."""
    names = probe_names(windows)
    if not summary["probes"]:
        return pd.DataFrame(columns=["verdict"])
    table = pd.DataFrame(summary["probes"]).T.rename(index=names).rename_axis("probe")
    numbers_ = table[["estimate", "low", "high", "margin"]].astype(float).round(4) + 0.0
    return table[["verdict", "decided_by"]].join(numbers_)


def _png(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return base64.b64encode(buffer.getvalue()).decode()


def _merged(kind: str, row: Mapping[str, Any], count: int) -> dict[str, str]:
    return {
        "kind": MERGED[kind],
        "largest": f"{row['largest_difference']:.2g}",
        "change": f"{row['mean_change']:+.3f}",
        "recalled": f"{row['recalled']} of {count}",
        "differ": str(row["recalls_differ"]),
        "lost": "" if "lost" not in row else f"{row['lost']:.1%}".replace("%", " %"),
        "moved": "" if "moved" not in row else f"{row['moved']:.1%}".replace("%", " %"),
    }


def _number(value: float | None) -> str:
    return "" if value is None or pd.isna(value) else f"{value + 0.0:.4f}"


def _cell(value: Any) -> str:
    """A table's value as text: yes and no, four digits, nothing where there is none."""
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if value is None or isinstance(value, float) and math.isnan(value):
        return ""
    if isinstance(value, (float, np.floating)):
        return f"{value:.0f}" if value == round(value) else f"{value:.4g}"
    return str(value)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {version}" for name, version in value.items())
    return str(value) if not isinstance(value, Sequence) or isinstance(value, str) else ", ".join(map(str, value))
