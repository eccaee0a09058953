"""An audit from parameters to its report: what is there is used again, what is missing is scored."""

import dataclasses
import errno
import hashlib
import math
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tqdm import tqdm

from lib import adapters, models, paths, rules
from lib.audit import analysis, decoys, example, formats, planting, reader, report, scoring
from lib.audit.decoys import Source, draw, encodable
from lib.audit.reader import CanaryFile, Item, Skipped
from lib.audit.scoring import DECOYS, NLL, RECALL, Asked, AuditError, Scorer
from lib.audit.settings import Audit
from lib.encoding import Encoded, Encoder
from lib.errors import shown
from lib.files import building, locked, sha256
from lib.models import Backbone
from lib.pictures import picture
from lib.results import (
    MissingResult,
    Result,
    ResultError,
    differences,
    plain,
    provenance,
    read_result,
    reusable,
    write_result,
)
from lib.spans import spell

PROTOCOL = 1  # raised by hand when an audit's numbers would change
RECORD, PAGE, CANARIES, TOKENS = "report.json", "report.html", "canaries.csv", "token_nll.parquet"
BASELINE = "baseline"
UNJUDGED = ["not asked: they could only disagree about a change, and none was judged"]


def find(params: Audit) -> Result:
    """The audit: found where ``params.results`` says, or computed into ``params.folder``.

    Only the worked example has a committed reference; an audit of one's own is computed, or taken from its folder.

    Raises:
        ResultError: what is there is damaged or of other parameters, or a reference was asked for and is missing.
        LeakbookError: the model, an adapter, the canary file or a parameter cannot be used; the message says which.
    """
    reference = paths.reference(params.scale) / "audit"
    if not params.is_example or params.results == "local":
        return run(params)
    if params.results == "auto" and (found := read_result(params.folder, RECORD)) and _answers(found, params):
        return found
    found = read_result(reference, RECORD)
    if found is not None and _answers(found, params):
        return found
    if params.results == "auto":
        return run(params)
    if found is None:
        raise MissingResult(f"{paths.show(reference)} holds no {RECORD}")
    differing = differences(found.content["inputs"]["parameters"], _parameters(params))
    raise ResultError(f"{paths.show(reference)} was made with other parameters: {'; '.join(differing)}")


def _answers(found: Result, params: Audit) -> bool:
    """Whether a result is of this protocol and these parameters."""
    inputs = found.content["inputs"]
    return (inputs["protocol"], inputs["parameters"]) == (PROTOCOL, _parameters(params))


def _parameters(params: Audit) -> dict[str, Any]:
    """What was asked for, without where it lies on one machine."""
    given = dataclasses.asdict(params)
    named = {name: None if given[name] is None else _called(given[name]) for name in ("model", "baseline", "canaries")}
    named |= {"adapter": [_called(name) for name in params.adapter]}
    kept = ("scale", "n_decoys", "decoys", "hits", "windows", "template", "seed")
    shown = named | {name: given[name] for name in kept}
    return plain(shown | {"decoys": _called(params.decoys)})


def _called(name: str | Path) -> str:
    """The last part of a path or a hub id; that of the folder itself where the path is ``.``."""
    return os.path.basename(os.path.abspath(name))


@dataclass(frozen=True)
class Plan:
    """Every model that an audit scores: those it is about, what they are compared with, and the merged ones."""

    audited: tuple[Asked, ...]
    baseline: Asked | None
    merged: tuple[Asked, ...]

    @property
    def asked(self) -> list[Asked]:
        """All of them, those of one base together, the baseline first."""
        first = [] if self.baseline is None else [self.baseline]
        return first + [*self.audited, *self.merged]


def plan(params: Audit) -> Plan:
    """Which models to score for an audit with a model of its own.

    Raises:
        AdapterError: an adapter's folder is none. AuditError: one adapter is given twice.
    """
    folders = [Path(name) for name in params.adapter]
    for folder in folders:
        adapters.check_folder(folder)
    names = [_called(folder) for folder in folders]
    names = names if len(set(names)) == len(names) else list(params.adapter)
    own = (params.model, models.identity(params.model))
    audited = [Asked(n, *own, f, "stacked") for n, f in zip(names, folders, strict=True)]
    merged = [
        Asked(f"{n}, {kind}", *own, f, kind, with_decoys=False)
        for n, f in zip(names, folders, strict=True)
        for kind in ("merged", "merged_bf16")
    ]
    _refuse_twice(audited)
    if not audited:
        audited = [Asked(_called(params.model), *own)]
    taken = BASELINE in {asked.name for asked in audited}
    return Plan(tuple(audited), _baseline(params, own, f"/{BASELINE}" if taken else BASELINE), tuple(merged))


def _refuse_twice(audited: Sequence[Asked]) -> None:
    seen: dict[str, Path] = {}
    for asked in audited:
        identity = str(asked.identity())
        if identity in seen:
            raise AuditError(
                f"adapter: {asked.adapter} holds the same matrices and configuration as {seen[identity]}; "
                "expected every adapter once"
            )
        seen[identity] = asked.adapter


def _baseline(params: Audit, own: tuple[str, str], name: str) -> Asked | None:
    given = params.baseline
    if given is None:
        return Asked(name, *own) if params.adapter else None
    if (Path(given) / "adapter_config.json").exists():
        adapters.check_folder(Path(given))
        return Asked(name, *own, Path(given), "stacked")
    return Asked(name, given, models.identity(given))


def run(params: Audit) -> Result:
    """Audit, into ``params.folder``; scores are kept beside it as they are done, so that a killed run goes on.

    Raises:
        as :func:`find`.
    """
    given = example.own(params) if params.is_example else params
    file, planned = reader.read(given.canaries), plan(given)
    inputs = {"study": "audit", "protocol": PROTOCOL, "parameters": _parameters(params)}
    inputs |= {"models": {asked.name: asked.identity() for asked in planned.asked}}
    inputs |= {"pictures": _pictures(file)}
    inputs |= {"canaries": sha256(file.path), "decoys": decoys.identity(given.decoys), "rules": rules.load_verdicts()}
    _check_output(params.folder, [given.canaries, given.decoys, *_picture_files(file)])
    with locked(params.folder):
        return reusable(params.folder, inputs, RECORD) or _Run(params, given, planned, inputs).result(file)


def _check_output(folder: Path, read: Sequence[str]) -> None:
    """Refuse a folder that cannot be written, or in which a report would replace a file that is no report's.

    Raises:
        AuditError: naming the folder or the file. ResultError: a report is there, and damaged.
    """
    parts = parts_folder(folder)
    try:
        if folder.parent == folder or parts.exists() and not parts.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{parts} must be a folder, too" if parts.name else "it is no name")
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise AuditError(
            f"output: got {str(folder)!r}, where no folder can be ({why}); expected a folder, there or to be made"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK) or not os.access(folder.parent, os.W_OK | os.X_OK):
        raise AuditError(f"output: {folder} and the folder around it cannot both be written; choose another --output")
    found = read_result(folder, RECORD)
    known = {} if found is None else found.content["files"]
    inputs = {Path(name).resolve() for name in read}
    for name in (PAGE, CANARIES, TOKENS):
        path = folder / name
        there = (path.exists() or path.is_symlink()) and name not in known and not _begun(folder, path)
        if path.resolve() in inputs or there:
            raise AuditError(
                f"output: {path} is there, and would be replaced by the report's; it is a file that the audit reads, "
                f"or that no {RECORD} beside it lists. Choose another --output, or move that file"
            )


def _begun(folder: Path, path: Path) -> bool:
    """Whether a file is one of a report that a killed process had made, and had begun to put in its place."""
    made = read_result(_made_folder(folder), RECORD)
    return made is not None and path.is_file() and made.content["files"].get(path.name) == sha256(path)


def _made_folder(folder: Path) -> Path:
    """Where a report is made, before its files are put in their place."""
    return parts_folder(folder) / "report"


def _picture_files(file: CanaryFile) -> list[str]:
    return [item.canary.image for item in file.items if item.canary.image is not None]


def parts_folder(folder: Path) -> Path:
    """Where the scores of an audit are kept, beside its report."""
    return folder.with_name(f"{folder.name}-parts") if folder.name else folder


def _pictures(file: CanaryFile) -> str | None:
    """SHA-256 over the pictures of a file's canaries, which it only names; None where there is none."""
    names = sorted({item.canary.image for item in file.items if item.canary.image is not None})
    digest = hashlib.sha256()
    for name in names:
        digest.update(picture(name).tobytes())
    return digest.hexdigest() if names else None


class _Run:
    """One audit under way."""

    def __init__(self, params: Audit, given: Audit, planned: Plan, inputs: dict[str, Any]):
        self.params, self.given, self.plan, self.inputs = params, given, planned, inputs
        self.rules = analysis.audit_rules(inputs["rules"], params.windows)
        self.started = time.perf_counter()

    def result(self, file: CanaryFile) -> Result:
        """Score what is missing, judge it, and write the report as the last act."""
        source = Source(self.given.decoys)
        base = models.load(self.given.model, device=scoring.device())
        for asked in self.plan.asked:
            if asked.adapter is not None:
                adapters.check_adapter(asked.adapter, base)
        for asked in self.plan.audited:
            if asked.adapter is not None:
                adapters.check_changes(asked.adapter)
        encoder = Encoder(base, _template(self.given.template, base))
        items, skipped = self._usable(file, encoder)
        scorer = self._scorer(items, source, encoder)
        lost = self._score(scorer, base, encoder)
        del base
        results, tables = self._results(scorer, source, skipped, lost, file)
        return self._write(results | {"template": encoder.template}, tables, scorer.seconds(self.plan.asked))

    def _usable(self, file: CanaryFile, encoder: Encoder) -> tuple[list[Item], list[Skipped]]:
        items = [_for_template(item, encoder.template) for item in file.items]
        kept, reasons = scoring.usable(items, encoder)
        ids = {item.line: item.canary.id for item in items}
        skipped = [*file.skipped, *(Skipped(line, ids[line], reason) for line, reason in reasons.items())]
        if not kept:
            first = skipped[0]
            raise AuditError(f"{file.path}: the model can be asked for no canary; line {first.line}: {first.reason}")
        return kept, sorted(skipped, key=lambda row: row.line)

    def _scorer(self, items: Sequence[Item], source: Source, encoder: Encoder) -> Scorer:
        data = {"protocol": PROTOCOL, "canaries": self.inputs["canaries"], "lines": _ranges([i.line for i in items])}
        data |= {"pictures": self.inputs["pictures"], "decoys": {"source": self.inputs["decoys"]}}
        folder, count, seed = parts_folder(self.params.folder), self.params.n_decoys, self.params.seed
        return Scorer(items, source, count, seed, encoder.template, folder, data)

    def _score(self, scorer: Scorer, base: Backbone, encoder: Encoder) -> dict[str, dict[str, float]]:
        """Score what is missing; what merging into bf16 weights lost, by model."""
        lost: dict[str, dict[str, float]] = {}
        with tqdm(total=len(scorer.items) * len(self.plan.asked), unit="canary") as bar:
            for asked in self.plan.asked:
                if asked.model == self.given.model:
                    found = _score_one(scorer, asked, base, bar)
                else:
                    other = models.load(asked.model, device=scoring.device())
                    _refuse_other_tokens(encoder, Encoder(other, encoder.template), scorer.items)
                    found = _score_one(scorer, asked, other, bar)
                if found:
                    lost[asked.name] = found
                scoring.free()
        return lost

    def _results(
        self, scorer: Scorer, source: Source, skipped: list[Skipped], lost: dict, file: CanaryFile
    ) -> tuple[dict[str, Any], dict[str, pd.DataFrame]]:
        summaries, tables, tokens = {}, [], []
        for asked in self.plan.audited:
            table, nll, recall = self._collected(scorer, asked, source)
            summary = self._summary(table, nll, recall)
            summary["merged"] = {
                merged.kind: _merged(scorer, merged, table) | lost.get(merged.name, {})
                for merged in self.plan.merged
                if merged.adapter == asked.adapter
            }
            summaries[asked.name] = summary
            tables.append(table.assign(model=asked.name))
            tokens.append(nll.assign(model=asked.name))
        rows = pd.concat(tables).reset_index()
        results = {
            "models": summaries,
            "canaries": rows.to_dict("records"),
            "skipped": [dataclasses.asdict(row) for row in skipped],
            "rows": len(file.items) + len(file.skipped),
            "notes": [*self._notes(), *_decoy_notes(tables[0], self.params), *_prompt_notes(scorer.items)],
            "margin": self.rules["margin"]["total_nats"],
        }
        return plain(results), {CANARIES: rows, TOKENS: pd.concat(tokens, ignore_index=True)}

    def _collected(
        self, scorer: Scorer, asked: Asked, source: Source
    ) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
        """A row a canary; per-token rows and recalls with the baseline beside them where there is one."""
        before = scorer.results(self.plan.baseline) if self.plan.baseline is not None else None
        parts = [self._block(found, None if before is None else next(before)) for found in scorer.results(asked)]
        table, nll, recall = (pd.concat(part, sort=False) for part in zip(*parts, strict=True))
        facts = pd.DataFrame([_facts(item, source) for item in scorer.items]).set_index("canary")
        table = facts.join(table)
        table["exchangeable"] &= table.layout.isin(["own"])  # in another layout a decoy is another kind of string
        margin, window = self.rules["margin"]["total_nats"], self.params.windows[0]
        return analysis.with_verdicts(table, margin, window), nll, recall

    def _block(self, after: Result, before: Result | None) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
        hits, windows = self.params.hits, self.params.windows
        nll, recall = after.table(NLL), after.table(RECALL)
        drawn = after.table(DECOYS) if DECOYS in after.content["files"] else None
        table = analysis.canary_rows(nll, recall, drawn, hits, windows)
        table["target_tokens"] = nll.groupby("canary", sort=False).size()
        table["layout"] = pd.Series(after.values.get("layout", {}), dtype=object)
        if before is None:
            return table, nll, recall
        old_nll, old_recall = before.table(NLL), before.table(RECALL)
        old_drawn = before.table(DECOYS) if DECOYS in before.content["files"] else None
        old = analysis.canary_rows(old_nll, old_recall, old_drawn, hits, windows).drop(columns=["tokens", "straddles"])
        table = table.join(old.add_suffix("_base"))
        table["change"] = table.nll_secret - table.nll_secret_base
        for k in windows:
            table[f"change_window{k}"] = table[f"nll_window{k}"] - table[f"nll_window{k}_base"]
        if drawn is not None:
            table = table.join(analysis.compared_decoys(drawn, old_drawn))
        nll = analysis.joined(nll, old_nll, ["canary", "position", "span", "token_id", "token"], ["nll", "greedy_id"])
        return table, nll, analysis.joined(recall, old_recall, ["canary"], [*analysis.HITS, "output"])

    def _summary(self, table: pd.DataFrame, nll: pd.DataFrame, recall: pd.DataFrame) -> dict[str, Any]:
        evidence = analysis.rank_evidence(table, self.rules)
        judged, answer = None, "not_run"
        if self.plan.baseline is not None and len(table) > 1:
            judged, answer = analysis.judge(nll, recall, table, self.rules)
        names = analysis.probe_names(self.params.windows)
        return {
            "level": dataclasses.asdict(analysis.level(table, evidence, judged, self.rules)),
            "change": self._untested() if judged is None else dataclasses.asdict(judged.change),
            "probes": {} if judged is None else judged.verdicts.T.to_dict(),
            "margins": {} if judged is None else analysis.along_margins(nll, recall, self.rules),
            "disagreements": UNJUDGED if judged is None else analysis.disagreements(judged, self.rules, names),
            "decoys_say": answer,
            "evidence": evidence,
            **analysis.figures_of(table, self.params.hits),
        }

    def _untested(self) -> dict[str, Any]:
        why = "one canary" if self.plan.baseline is not None else "no baseline"
        return {"verdict": "not testable", "row": 0, "decided_by": why}

    def _notes(self) -> list[str]:
        """What about the models should make a reader look twice."""
        notes = []
        for asked in self.plan.audited:
            named = None if asked.adapter is None else adapters.made_for(asked.adapter)
            if named and Path(named).name not in ("", "..", _called(asked.model)):
                notes.append(
                    f"adapter {asked.name} says it was trained on {Path(named).name}, and is audited on "
                    f"{_called(asked.model)}: its matrices fit, whether its base is the same is for you to know"
                )
        return notes

    def _write(self, results: dict[str, Any], tables: dict[str, pd.DataFrame], seconds: float) -> Result:
        record = provenance(
            str(scoring.device()),
            torch.get_num_threads(),
            time.perf_counter() - self.started,
            evaluation_dtype="float32",
            scoring_seconds=round(seconds, 1),  # of all blocks, those of earlier runs too
        )
        folder, tokens = self.params.folder, tables[TOKENS].drop(columns=["seed"], errors="ignore")
        page = report.page(results, tokens, self.inputs["parameters"], record)
        csv = tables[CANARIES].drop(columns=["output", "output_base"], errors="ignore")
        writers = {
            CANARIES: lambda path: csv.to_csv(path, index=False),
            TOKENS: lambda path: tokens.to_parquet(path, index=False),
            PAGE: lambda path: path.write_text(page, encoding="utf-8"),
        }
        with building(_made_folder(folder)) as unfinished:
            made = write_result(unfinished, self.inputs, results, record, writers, RECORD)
        for name in (*writers, RECORD):
            with building(folder / name) as unfinished:
                shutil.copyfile(_made_folder(folder) / name, unfinished)
        shutil.rmtree(_made_folder(folder))
        return dataclasses.replace(made, folder=folder)


def _decoy_notes(table: pd.DataFrame, params: Audit) -> list[str]:
    """Where fewer decoys were to be had than were asked for, or none."""
    notes, none, taken = [], list(table.index[table.layout == "none"]), table.decoys.dropna()
    if none:
        notes.append(
            f"{len(none)} of {len(table)} canaries have no decoys, {shown(none[0])} first, and so no exposure and no "
            f"rank: `{_called(params.decoys)}` gives none but planted secrets, or what the canary's own text holds"
        )
    if len(taken) and taken.min() < params.n_decoys:
        edges = sorted({taken.min(), taken.max()})
        several = " to ".join(f"{n:.0f}" for n in edges)
        bits = " to ".join(f"{math.log2(n + 1):.2f}" for n in edges)
        notes.append(
            f"{params.n_decoys} decoys a canary were asked for and {several} taken: exposure ends at {bits} bits"
        )
    return notes


def _prompt_notes(items: Sequence[Item]) -> list[str]:
    """Which canaries nothing but their answer tells apart."""
    groups: dict[tuple, list[str]] = {}
    for item in items:
        groups.setdefault((item.canary.prompt, item.canary.image), []).append(item.canary.id)
    shared = [names for names in groups.values() if len(names) > 1]
    if not shared:
        return []
    more = f" ({len(shared)} prompts are shared in all)" if len(shared) > 1 else ""
    return [
        f"canaries {shown(shared[0][0])} and {shown(shared[0][1])} have one prompt{more}: greedy decoding gives one "
        "answer to both, so a secret that is not said may be known all the same"
    ]


def told(result: Result) -> list[str]:
    """The verdicts of an audit, two lines a model, its notes, and what was skipped."""
    lines, names = [], analysis.probe_names(result.content["inputs"]["parameters"]["windows"])
    for name, found in result.values["models"].items():
        level, change = found["level"], found["change"]
        lines += [
            f"{name}: level: {report.LEVELS[level['verdict']]}, by {report.readable(level, report.READINGS)}",
            f"{name}: change: {report.changed(found)}, by {report.readable(change, names)}",
        ]
    lines += [f"note: {note}" for note in result.values["notes"]]
    skipped = result.values["skipped"]
    lines += [f"line {row['line']} not audited: {row['reason']}" for row in skipped[:10]]
    return lines + ([f"... {len(skipped) - 10} more rows not audited"] if len(skipped) > 10 else [])


def check_planted(
    file: Path, tokenised: Path, model: str, n_decoys: int = 63, kind: str = "characters", template: str = "auto"
) -> pd.DataFrame:
    """:func:`lib.audit.planting.check` on files, with the decoys that an audit of this model will draw (seed 0).

    Rows that an audit would skip are among them, with the reason as their problem.

    Raises:
        LeakbookError: a file or the model cannot be used.
    """
    backbone, canaries, source = models.load(model), reader.read(file), Source(kind)
    encoder = Encoder(backbone, _template(template, backbone))
    items = [_for_template(item, encoder.template) for item in canaries.items]
    planted, names = frozenset(item.canary.secret for item in items), {item.line: item.canary.id for item in items}
    kept, reasons = scoring.usable(items, encoder)
    drawn, asked = {}, {}
    for item in kept:
        found = draw(encoder, source, item, n_decoys, 0, planted).decoys.rows
        drawn[item.canary.id] = [row.canary.secret for row in found[1:]]
        asked[item.canary.id] = _asked_text(encoder, found[0])
    rows = planting.read_tokenised(tokenised)
    table = planting.check([item.canary for item in kept], backbone.tokenizer, rows, drawn, asked)
    skipped = [(row.id, row.line, row.reason) for row in canaries.skipped]
    skipped += [(names[line], line, reason) for line, reason in reasons.items()]
    unread = [(name, 0, 0, f"line {line} cannot be audited: {reason}") for name, line, reason in skipped]
    return pd.concat([table, pd.DataFrame(unread, columns=planting.COLUMNS)], ignore_index=True) if unread else table


def _asked_text(encoder: Encoder, row: Encoded) -> str:
    """What a model is asked, from the prompt up to the end of the secret, as its tokens spell it."""
    text, secret = spell(encoder.backbone.tokenizer, row.input_ids), row.canary.secret
    text = text[: text.rindex(secret) + len(secret)]
    return text[max(0, text.rfind(row.canary.prompt.strip())) :]


def _template(asked: str, backbone: Backbone) -> str:
    """``chat`` or ``plain`` for ``auto``: plain text where the tokenizer has no chat template."""
    if asked != "auto":
        return asked
    return "plain" if backbone.tokenizer.chat_template is None else "chat"


def _ranges(lines: Sequence[int]) -> list[list[int]]:
    """Line numbers as first and last of every run of them."""
    runs: list[list[int]] = []
    for line in lines:
        if runs and line == runs[-1][1] + 1:
            runs[-1][1] = line
        else:
            runs.append([line, line])
    return runs


def _for_template(item: Item, template: str) -> Item:
    """In plain text white space at a prompt's end belongs to the token behind it, so it moves into the prefix."""
    if template != "plain":
        return item
    prompt = item.canary.prompt.rstrip()
    moved = item.canary.prompt[len(prompt) :]
    return dataclasses.replace(
        item, canary=dataclasses.replace(item.canary, prompt=prompt, preamble=moved + item.canary.preamble)
    )


def _score_one(scorer: Scorer, asked: Asked, base: Backbone, bar: tqdm) -> dict[str, float]:
    """Score one model where that is missing; for one merged into bf16 weights, what rounding took (kept, too)."""
    folder = scorer.folder_of(asked) / "rounding"
    kept = read_result(folder) if asked.kind == "merged_bf16" else None
    if scorer.is_done(asked) and (asked.kind != "merged_bf16" or kept is not None):
        bar.update(len(scorer.items))
        return {} if kept is None else kept.values
    model, lost = scoring.make(asked, base)
    scorer.score(asked, model, bar)
    if lost:
        write_result(folder, asked.identity(), lost, {}, {})
    return lost


def _refuse_other_tokens(encoder: Encoder, other: Encoder, items: Sequence[Item]) -> None:
    """Two models can be compared token by token only where both read a canary as the same tokens."""
    for start in range(0, len(items), decoys.CHUNK):
        chunk = items[start : start + decoys.CHUNK]
        canaries = [item.canary for item in chunk]
        own, (rows, reasons) = encoder.fresh().encode(canaries), encodable(other.fresh(), canaries)
        for item, expected, row, reason in zip(chunk, own, rows, reasons, strict=True):
            if reason or row.input_ids != expected.input_ids:
                raise AuditError(
                    f"baseline {other.backbone.name} cannot be compared with {encoder.backbone.name} on line "
                    f"{item.line}, canary {item.canary.id!r}: {reason or 'it reads other tokens'}; expected a model of "
                    "the same tokenizer and chat template"
                )


def _facts(item: Item, source: Source) -> dict[str, Any]:
    """What is known of a canary before any model is asked."""
    return {
        "canary": item.canary.id,
        "line": item.line,
        "bits": formats.surprise(item.canary.secret, item.generator),
        "exchangeable": item.generator is not None and source.states_p_values,
    }


def _merged(scorer: Scorer, asked: Asked, stacked: pd.DataFrame) -> dict[str, float]:
    """A merged model on the canaries alone, against the stacked one: nats of the secret, and recalls."""
    parts = list(scorer.results(asked))
    nll = pd.concat([part.table(NLL) for part in parts])
    recall = pd.concat([part.table(RECALL) for part in parts]).set_index("canary")
    secret = nll[nll.span == "hex"].groupby("canary", sort=False).nll.sum()
    apart = secret - stacked.nll_secret
    return {
        "largest_difference": float(apart.abs().max()),
        "mean_difference": float(apart.mean()),
        "mean_change": float((secret - stacked.nll_secret_base).mean()),
        "recalled": int(recall.hit_secret.sum()),
        "recalls_differ": int((recall.hit_secret != stacked.hit_secret).sum()),
    }
