"""A case computed: its cell's group of rows, a constructed case beside it, and what the models are asked besides.

Decoys, failed answers, sampled hits, a repetition penalty, the change under several precisions: everything here needs
the models; what is read off the tables is in :mod:`lib.cases`.
"""

import dataclasses
import json
import os
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from lib import (
    cases,
    collection,
    config,
    exposure,
    extraction,
    interventions,
    models,
    paper,
    paths,
    precision,
    probes,
    rules,
    runs,
    sweep,
    training,
    verdicts,
)
from lib.adapters import merge, scaled, stack
from lib.cases import CASES, PLAIN, TABLES, Case
from lib.config import CaseRun, CellRun, LoraSettings, Scale
from lib.encoding import Encoder, content_hash
from lib.errors import LeakbookError
from lib.exposure import DecoySet
from lib.files import locked
from lib.models import Backbone
from lib.results import (
    MissingResult,
    Result,
    ResultError,
    differences,
    inputs_hash,
    other_result_aside,
    plain,
    provenance,
    read_result,
    reusable,
    write_result,
)
from lib.spans import spell

PROTOCOL = 1  # raised by hand when results of cases would change
SAME_SECRET = 1e-2  # nats: what a secret's NLL may differ by between tables and decoys, in sums over 13 tokens
STRENGTHS = (0.5, 1.0, 2.0, 4.0)  # factors on an update, for what bf16 leaves of it
PICKED_AT = "laptop"  # the scale whose tables pick a case's cell where a scale has no sweep of its own


class CaseError(LeakbookError, ValueError):
    """There is no such case."""


class Models:
    """The models that cases look at: the testbed loaded once, bases merged and adapters trained when asked for."""

    def __init__(self, scale: Scale):
        self.scale = scale
        self.encoder, self.rows = runs.load_testbed(scale)
        self.text = [row for row in self.rows if row.canary.modality == "text"]
        self._bases: dict[str, Encoder] = {}
        self._before: dict[str, tuple[pd.DataFrame, pd.DataFrame]] = {}

    @cached_property
    def injected(self) -> training.TrainedAdapters:
        """The canary LoRA and its undertrained stops."""
        return runs.inject(self.scale, self.encoder, self.rows)

    def base(self, name: str) -> Encoder:
        """The model before benign tuning: ``full``, or ``stop-<n>``."""
        if name not in self._bases:
            adapter = sweep.base_adapter(self.injected, self.scale, name)
            self._bases[name] = Encoder(merge(self.encoder.backbone, adapter))
        return self._bases[name]

    def before(self, base: str) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Scores and recalls of the text canaries on a base."""
        if base not in self._before:
            encoder = self.base(base)
            found = runs.evaluate_model(encoder.backbone, encoder, self.text, self.scale.evaluation_batch)
            self._before[base] = found.scores.table(), found.recall.table(self.text)
        return self._before[base]

    def change(self, base: str, adapter: Path, name: str, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
        """What an adapter changes, stacked on a base: slices of ``token_nll.parquet`` and ``recall.parquet``."""
        encoder = self.base(base)
        tuned = stack(encoder.backbone, adapter)
        after = runs.evaluate_model(tuned, encoder, self.text, self.scale.evaluation_batch)
        return sweep.slices(name, seed, self.before(base), {"stacked": after})

    def cell_adapter(self, run: CellRun) -> Path:
        """The adapter of a cell with a seed, trained or found in ``outputs/local``."""
        return sweep.cell_adapter(run, self.base(run.cell.base), self.rows)[0]

    def constructed(self, settings: config.CaseSettings, name: str, seed: int) -> tuple[Path, dict[str, int]]:
        """The adapter of a constructed case on the full base, and where it damages which canary."""
        base, text, damaged = self.base("full"), self.text, {}
        if name == "late-damage":
            rule = settings.late_damage
            count = min(rule.canaries, len(text))
            lessons, damaged = interventions.late_damage(
                base, text, probes.WINDOW, count, rule.draw_seed, rule.hold_weight
            )
        else:
            rule = settings.preamble_drift
            lessons = interventions.preamble_drift(base, text, rule.records, rule.draw_seed, True, rule.hold_weight)
        taught = _lora(settings.constructed, config.load_sweep(self.scale).training, seed)
        key = training.lessons_key(base.backbone, lessons, taught, PROTOCOL)
        folder = paths.local(self.scale.name) / "adapters" / key
        with locked(folder):
            adapter = training.teach(base, lessons, taught, folder).adapter()
            if name == "preamble-drift":
                strength = settings.preamble_drift.strength
                adapter = scaled(adapter, strength, folder / f"scaled-{strength:g}")
            return adapter, damaged


def _lora(settings: config.Constructed, benign: config.BenignTraining, seed: int) -> LoraSettings:
    """A constructed adapter has a benign one's rank, alpha, warm-up and precision."""
    return LoraSettings(
        rank=benign.rank,
        alpha=benign.alpha,
        learning_rate=settings.learning_rate,
        warmup_steps=benign.warmup_steps,
        batch_size=settings.batch_size,
        max_steps=settings.steps,
        check_every=settings.steps,
        seed=seed,
        precision=benign.precision,
    )


def study(params: CaseRun, case: str) -> Result:
    """A case's result: found where ``params.results`` says, or computed into ``outputs/local``.

    Its cell comes from the sweep's tables of this scale, and so do its rows where the sweep was run on this machine;
    else the cell is run here with all seeds. Where this scale has no tables, the cell is the one that the laptop's
    pick, run with the first seed. An earlier result from other tables is kept beside it, under its hash.

    Raises:
        CaseError: there is no such case.
        ResultError: ``reference`` was asked for and there is none with these parameters.
    """
    if case not in CASES:
        raise CaseError(f"case: got {case!r}, expected one of {', '.join(CASES)}")
    name = case if params.cell is None else f"{case}-{params.cell}"
    reference = paths.reference(params.scale.name) / "cases" / name
    if params.results == "reference":
        return _reference(params, case, reference)
    tables = _tables(params.scale, params.results)
    source = tables or _committed_tables()
    confirmed = None if tables is None else _confirmation(params, tables)
    inputs = case_inputs(params, case, tables, confirmed)
    inputs |= {
        "model": models.identity(params.scale.backbone, params.scale.revision),
        "picked_from": source.content["files"],
    }
    local = paths.local(params.scale.name) / "cases" / name
    if params.results == "auto":
        for folder in (local, reference):
            found = read_result(folder)
            if found is not None and found.content["hash"] == inputs_hash(inputs):
                return found
    with locked(local):
        found = other_result_aside(local, inputs)
        return found or _Study(params, CASES[case], tables, source, confirmed, inputs, local).write()


def _tables(scale: Scale, source: str) -> Result | None:
    """The sweep's tables at this scale, or None where there are none.

    Raises:
        ResultError: there are some, damaged or of other parameters.
    """
    try:
        return collection.load(scale, "auto" if source == "local" else source)
    except MissingResult:
        return None


def sweep_tables(scale: Scale, source: str) -> Result:
    """The sweep's tables of this scale; the committed laptop ones where it has none."""
    return _tables(scale, source) or _committed_tables()


def _committed_tables() -> Result:
    """The sweep that comes with the package, wherever this run's own outputs go."""
    folder = paths.ROOT / "outputs" / PICKED_AT / "sweep"
    found = read_result(folder)
    if found is None:
        raise ResultError(
            f"{paths.show(folder)} holds no tables, and there is no sweep of this scale to pick a cell from"
        )
    return found


def _reference(params: CaseRun, case: str, folder: Path) -> Result:
    """The committed result; only parameters and tables are compared, no model is looked at."""
    found = read_result(folder)
    if found is None:
        raise ResultError(f"{paths.show(folder)} holds no result; `make reference` writes it")
    tables = collection.load(params.scale, "reference")
    expected = case_inputs(params, case, tables, read_result(tables.folder, collection.CONFIRMATION))
    differing = differences({key: found.content["inputs"][key] for key in expected}, expected)
    if differing:
        raise ResultError(f"{paths.show(folder)} was made with other parameters: {'; '.join(differing)}")
    return found


def case_inputs(params: CaseRun, case: str, tables: Result | None, confirmed: Result | None) -> dict[str, Any]:
    """What a case depends on, apart from its model and from tables of another scale that picked its cell."""
    inputs = {
        "study": "case",
        "case": case,
        "protocol": {"case": PROTOCOL, "cell": sweep.PROTOCOL, "testbed": runs.PROTOCOL["testbed"]},
        "scale": runs.scale_inputs(params.scale),
        "sweep": dataclasses.asdict(params.sweep),
        "settings": dataclasses.asdict(params.settings),
        "rules": rules.load_verdicts(),
        "cell": params.cell,
        "decoys": params.decoys,
        "tables": None if tables is None else tables.content["files"],
        "confirmation": None if confirmed is None else confirmed.content["files"],
    }
    return json.loads(json.dumps(inputs))


def _confirmation(params: CaseRun, tables: Result) -> Result | None:
    """The repeats of the cells that these tables pick, from where the tables are."""
    source = "reference" if tables.is_reference else "local"
    return collection.confirmation(params.scale, cases.confirmation_runs(params.scale, source), source)


class _Study:
    """One case being computed."""

    def __init__(
        self,
        params: CaseRun,
        case: Case,
        tables: Result | None,
        source: Result,
        confirmed: Result | None,
        inputs: dict[str, Any],
        folder: Path,
    ):
        self.params, self.case, self.tables, self.source, self.folder = params, case, tables, source, folder
        self.inputs, self.repeats = inputs, confirmed
        self.rules = rules.load_verdicts()
        self.models = Models(params.scale)
        self.picked = self._pick()
        self.confirmed = self._confirmed()
        self.cell = params.sweep.cell(self.picked["cell"])
        self.constructed_at: dict[str, int] = {}

    def write(self) -> Result:
        """Compute everything and write it as the case's result, all or nothing."""
        started = time.perf_counter()
        with training.threads(self.params.scale.threads):
            tables = self._tables()
        results = self._results(tables)
        record = provenance(
            str(training.accelerator().device),
            self.params.scale.threads,
            time.perf_counter() - started,
            evaluation_dtype="float32",
        )
        return write_result(self.folder, self.inputs, results, record, collection.writers(tables))

    def _pick(self) -> dict[str, Any]:
        """The cell by rule; a cell that was asked for by name is looked at in the same way."""
        judged = cases.judge_cells(*(self.source.table(name) for name in TABLES), self.rules)
        found = verdicts.pick(judged, self.source.table("cells.csv"), self.case.pattern, self.rules)
        self.candidates = cases.candidates(judged, self.source.table("cells.csv"), self.case.pattern)
        if self.params.cell is not None:
            finding = judged[self.params.cell].patterns[self.case.pattern]
            found |= {"cell": self.params.cell, "found": finding.holds, "failed": finding.failed}
        return found | {"by_rule": self.params.cell is None}

    def _confirmed(self) -> pd.DataFrame:
        """The confirmation runs of the picked cell, each judged alone; empty where there are none."""
        if self.repeats is None or self.params.cell is not None:
            return pd.DataFrame(columns=["injection", "seed", "shown", "fails"])
        cell = self.picked["cell"]
        nll, recall = (self.repeats.table(f"confirm_{name}") for name in TABLES)
        return cases.judge_runs(nll[nll.cell == cell], recall[recall.cell == cell], self.case.pattern, self.rules)

    def _null(self) -> dict[str, dict[str, float]]:
        """What nothing meaningful does to every NLL probe, in nats of its span, by kind of null.

        ``floor``: largest difference of stacked and merged fp32 evaluation of a mean change. A kind of noise: the 95 %
        quantile of the absolute mean change over the further draws on the cell's base (on the undertrained base that
        has noise cells, where the cell's has none).
        """
        nll = cases.chosen_rows(self.source.table("token_nll.parquet"), self.rules)
        one = nll[(nll.cell == nll.cell.iloc[0]) & (nll.seed == nll.seed.iloc[0])]
        tokens = {"mean20": float(probes.WINDOW)}
        tokens |= {span: float(size) for span, size in (one.groupby("span").size() / one.canary.nunique()).items()}
        floor = self.source.values["stacked_against_merged"]
        null = {"floor": {probe: floor * count for probe, count in tokens.items()}}
        draws = self.source.table("noise.csv")
        bases = [self.cell.base] if self.cell.base in set(draws.base) else sorted(set(draws.base) - {"full"})
        for kind, part in draws[draws.base.isin(bases)].groupby("source"):
            quantile = {probe: part[f"d_nll_{probe}"].abs().quantile(0.95) * n for probe, n in tokens.items()}
            null[f"{kind} noise"] = {probe: float(value) for probe, value in quantile.items()}
        return null

    def _tables(self) -> dict[str, pd.DataFrame]:
        groups = [self._cell_group(), *self._constructed_groups()]
        nll, recall = (pd.concat(parts, ignore_index=True) for parts in zip(*groups, strict=True))
        tables = {
            "token_nll.parquet": nll,
            "recall.parquet": recall.drop(columns="output_ids"),
            "answers.csv": self._answers(recall),
            "decoys.parquet": pd.concat([self._decoys(*one) for one in self._asked(decoys=True)], ignore_index=True),
        }
        tables |= {"candidates.csv": self.candidates, "confirmed.csv": self.confirmed}
        if self.case.id == "c3":
            tables |= {"penalty.csv": self._penalty(), "samples.csv": self._samples()}
        if self.case.id != "c4":
            tables["extraction.csv"] = self._extraction()
        if self.case.id == "c4":
            tables |= {"precision.csv": self._precision(), "strengths.csv": self._strengths()}
        return tables

    @property
    def seeds(self) -> list[int]:
        """The sweep's seeds, or the first alone where the cell is run here."""
        return list(self.params.sweep.seeds)[: None if self.tables is not None else 1]

    def _run(self, seed: int) -> CellRun:
        return CellRun(self.params.scale, self.params.sweep, self.cell, seed, "local")

    def _cell_group(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """The cell's rows of this machine's sweep, or of runs of its own.

        The committed tables pick a cell, and no more: their models are on another machine, and adapters trained anew
        are others in the last digits and beyond.
        """
        if self.tables is not None and not self.tables.is_reference:
            parts = [cases.chosen_rows(self.tables.table(name), self.rules) for name in TABLES]
            return tuple(part[part.cell == self.cell.id] for part in parts)
        base, runs_here = self.cell.base, [(seed, self._run(seed)) for seed in self.seeds]
        parts = [self.models.change(base, self.models.cell_adapter(run), self.cell.id, s) for s, run in runs_here]
        return tuple(pd.concat(part, ignore_index=True) for part in zip(*parts, strict=True))

    def _constructed_groups(self) -> list[tuple[pd.DataFrame, pd.DataFrame]]:
        if self.case.constructed is None:
            return []
        groups = []
        for seed in self.params.settings.constructed.seeds:
            adapter, self.constructed_at = self.models.constructed(self.params.settings, self.case.constructed, seed)
            groups.append(self.models.change("full", adapter, self.case.constructed, seed))
        return groups

    def _answers(self, recall: pd.DataFrame) -> pd.DataFrame:
        """Answers that are not the whole target, in text, and the first target position at which each goes astray.

        ``says`` is the canary whose secret stands in the answer instead, where there is one.
        """
        secrets = {row.canary.secret: row.canary.id for row in self.models.rows}
        targets = {row.canary.id: row for row in self.models.text}
        tokenizer = self.models.encoder.backbone.tokenizer
        rows = []
        for answer in recall[~recall.hit_full.astype(bool)].itertuples():
            row, ids = targets[answer.canary], list(answer.output_ids)
            first = next((i for i, (a, b) in enumerate(zip(row.target_ids, ids, strict=False)) if a != b), len(ids))
            said = spell(tokenizer, ids).removesuffix(self.models.encoder.end_of_turn)
            says = next((name for secret, name in secrets.items() if secret in said), "")
            rows.append((answer.cell, answer.seed, answer.canary, first, says, row.canary.target, said))
        return pd.DataFrame(rows, columns=["cell", "seed", "canary", "first_wrong", "says", "expected", "said"])

    def _asked(self, decoys: bool = False) -> list[tuple[str, Encoder, Path | None]]:
        """Models that are looked at, each a name, a base and an adapter beside it.

        For decoys, minutes a model, the constructed drift is left out: its secret is held, so there is nothing to rank.
        """
        models, base = self.models, self.models.base(self.cell.base)
        undertrained = self.case.id == "c5"
        asked = [(self.cell.base, base, None)]
        asked += [
            (f"{self.cell.id}-s{seed}", base, models.cell_adapter(self._run(seed)))
            for seed in (self.seeds if undertrained else self.seeds[:1])
        ]
        if undertrained:
            asked.append((PLAIN, models.encoder, None))
        if self.case.constructed is not None and not (decoys and self.case.id == "c4"):
            seed = self.params.settings.constructed.seeds[0]
            adapter = models.constructed(self.params.settings, self.case.constructed, seed)[0]
            asked.append((f"{self.case.constructed}-s{seed}", models.base("full"), adapter))
        return asked

    @cached_property
    def _sets(self) -> list[DecoySet]:
        return exposure.draw_decoys(self.models.encoder, self.models.text, count=self.params.decoys)

    def _decoys(self, name: str, base: Encoder, adapter: Path | None) -> pd.DataFrame:
        """Decoys of one model: kept as they are done, since several cases ask the same models.

        All three kinds, but of further seeds of a cell the random ones alone, which say whether a change is specific.
        """
        further = [f"{self.cell.id}-s{seed}" for seed in self.seeds[1:]]
        kinds = ["random"] if name in further else list(exposure.KINDS)
        inputs = {"study": "decoys", "protocol": PROTOCOL, "count": self.params.decoys, "kinds": kinds}
        inputs |= {"base": base.backbone.revision, "adapter": None if adapter is None else adapter.parent.name}
        inputs |= {"canaries": content_hash(self.models.text)}
        folder = paths.local(self.params.scale.name) / "cases" / "decoys" / f"{name}-{inputs_hash(inputs)[:8]}"
        with locked(folder):
            found = reusable(folder, inputs)
            if found is None:
                started = time.perf_counter()
                model = (base.backbone if adapter is None else stack(base.backbone, adapter)).model
                sets = tqdm([one.only(kinds) for one in self._sets], desc=f"decoys, {name}", unit="canary")
                table = exposure.decoy_table(model, base, sets).assign(model=name)
                record = provenance(
                    str(training.accelerator().device), self.params.scale.threads, time.perf_counter() - started
                )
                found = write_result(folder, inputs, {}, record, collection.writers({"decoys.parquet": table}))
        return found.table("decoys.parquet")[["model", "canary", "kind", "decoy", "tokens", "nll_secret"]]

    @cached_property
    def _named(self) -> dict[str, Backbone]:
        """The base and what the case's cell and construction make of it, by name."""
        models, asked = self.models, self._asked()
        named = {
            name: (base.backbone if adapter is None else stack(base.backbone, adapter)) for name, base, adapter in asked
        }
        return named | ({} if "full" in named else {"full": models.base("full").backbone})

    def _penalty(self) -> pd.DataFrame:
        """What a repetition penalty alone does to exact recall: a row a model, penalty and canary."""
        models, rows = self.models, []
        for name, backbone in self._named.items():
            for penalty in (1.0, self.params.settings.repetition_penalty):
                said = probes.greedy_decode(backbone.model, models.encoder, models.text, None, 20, penalty)
                for row, ids in zip(models.text, said, strict=True):
                    pairs = enumerate(zip(row.target_ids, ids, strict=False))
                    wrong = next((i for i, (a, b) in pairs if a != b), None)
                    hit = tuple(ids) == row.target_ids
                    secret = row.canary.secret in spell(models.encoder.backbone.tokenizer, ids)
                    rows.append((name, penalty, row.canary.id, hit, secret, wrong))
        return pd.DataFrame(rows, columns=["model", "penalty", "canary", "hit_full", "hit_secret", "first_wrong"])

    def _extraction(self) -> pd.DataFrame:
        """The chance of every secret in closed form, plain and top-k: a row a model and canary."""
        models, tables = self.models, []
        for name, backbone in self._named.items():
            scores = probes.token_nll(backbone.model, models.encoder, models.text, self.params.scale.evaluation_batch)
            table = pd.DataFrame({"model": name, "canary": scores.ids})
            table["log_p"] = extraction.log_probability(scores)
            table["log_p_with_preamble"] = extraction.log_probability(scores, with_preamble=True)
            top_k = self.params.settings.top_k
            table["log_p_top_k"] = extraction.top_k_log_probability(backbone.model, models.encoder, models.text, top_k)
            tables.append(table)
        return pd.concat(tables, ignore_index=True)

    def _samples(self) -> pd.DataFrame:
        """Hits among sampled continuations of the cell's first model: a row a canary and way of sampling."""
        settings, models, name = self.params.settings, self.models, f"{self.cell.id}-s{self.seeds[0]}"
        model, rows = self._named[name].model, []
        for i, row in enumerate(tqdm(models.text[: settings.sampled_canaries], desc=f"samples, {name}", unit="canary")):
            for top_k in (None, settings.top_k):
                seed = 2 * i + (top_k is not None)
                hits = extraction.sampled_hits(model, models.encoder, row, settings.samples, seed, top_k)
                rows.append((name, row.canary.id, top_k or 0, settings.samples, int(hits.sum())))
        return pd.DataFrame(rows, columns=["model", "canary", "top_k", "samples", "hits"])

    def _precision(self) -> pd.DataFrame:
        """The change read stacked and merged in fp32 and bf16, with its controls, for cell and construction."""
        tables = []
        for name, base, adapter in self._asked():
            if adapter is not None:
                work = self.folder / "adapters"
                table = precision.readings(base, adapter, self.models.text, work, self.params.scale.evaluation_batch)
                tables.append(table.assign(model=name))
        return pd.concat(tables, ignore_index=True)

    def _strengths(self) -> pd.DataFrame:
        """What merging into bf16 weights leaves of smaller and larger updates of cell and construction."""
        tables, size = [], self.params.scale.evaluation_batch
        for name, base, adapter in self._asked():
            if adapter is not None:
                work = self.folder / "adapters"
                table = precision.by_strength(base, adapter, self.models.text, work, STRENGTHS, size)
                tables.append(table.assign(model=name))
        return pd.concat(tables, ignore_index=True)

    def _results(self, tables: dict[str, pd.DataFrame]) -> dict[str, Any]:
        nll, recall, decoys = (tables[name] for name in (*TABLES, "decoys.parquet"))
        own = nll[nll.cell == self.cell.id], recall[recall.cell == self.cell.id]
        after = [f"{self.cell.id}-s{seed}" for seed in self.seeds]
        self._refuse_other_models(own[0], decoys)
        answer, level = cases.decoy_reading(*own, decoys, self.cell.base, after, self.rules)
        judged = verdicts.judge_group(*own, self.rules, answer)
        finding = judged.patterns[self.case.pattern]
        confirmed = {"shown": int(self.confirmed.shown.sum()), "of": len(self.confirmed)}
        results = {
            **self.picked,
            "found": finding.holds,
            "failed": finding.failed,
            "seeds": self.seeds,
            "confirmed": confirmed if len(self.confirmed) else None,
            "picked_at": self.source.content["inputs"]["scale"]["name"],
            "null": self._null(),
            "probes": judged.verdicts[["estimate", "low", "high", "margin"]].astype(float).round(8).T.to_dict(),
            "verdicts": judged.verdicts.verdict.to_dict(),
            "pattern": self.case.pattern,
            "paper": paper.REPORTED[self.case.id],
            "change": dataclasses.asdict(judged.change),
            "decoys": answer,
            "models": list(dict.fromkeys(decoys.model)),
            "level": None if level is None else dataclasses.asdict(level),
            "constructed": self.case.constructed,
            "constructed_at": self.constructed_at,
            "preamble_share": float(judged.shares.get("preamble", 0.0)),
            "failures": self._failures(tables["answers.csv"], len(own[1])),
            "merge": self._merge(tables.get("precision.csv")),
            "sweep": self._sweep(),
        }
        return plain(results)

    def _refuse_other_models(self, nll: pd.DataFrame, decoys: pd.DataFrame) -> None:
        """The models asked here must be those of the tables: an adapter trained anew elsewhere is another one."""
        own = decoys[decoys.kind == "secret"].set_index(["model", "canary"]).nll_secret
        secret = nll[nll.span == "hex"].groupby(["seed", "canary"]).nll.sum()
        for (seed, canary), expected in secret.items():
            found = own.get((f"{self.cell.id}-s{seed}", canary))
            if found is not None and abs(found - expected) > SAME_SECRET:
                raise ResultError(
                    f"{self.cell.id} with seed {seed}: the secret of {canary} has an NLL of {expected:.4f} in the "
                    f"sweep's tables and {found:.4f} here. The adapters were trained on another machine or anew; run "
                    "`make sweep` here first, so that tables and models belong together."
                )

    def _failures(self, answers: pd.DataFrame, decodes: int) -> dict[str, int]:
        """Free answers of the cell that miss the target; how many go wrong in the secret's last two characters."""
        failed = answers[answers.cell == self.cell.id]
        ends = {row.canary.id: len(row.canary.preamble + row.canary.secret) for row in self.models.text}
        late = [0 <= ends[row.canary] - 1 - _first_apart(row.expected, row.said) < 2 for row in failed.itertuples()]
        return {"decodes": decodes, "failed": len(failed), "canaries": failed.canary.nunique(), "late": sum(late)}

    def _merge(self, table: pd.DataFrame | None) -> dict[str, dict[str, float]] | None:
        """The window's change in bf16, stacked and merged, by model: of the update, of noise, and of none."""
        if table is None:
            return None
        found = {}
        for model, part in table[table.dtype == "bfloat16"].groupby("model"):
            change = part.set_index(["update", "stack", "merge_dtype"]).d_nll_mean20
            found[model] = {
                "stacked": change["trained", "stacked", ""],
                "merged": change["trained", "merged", "bfloat16"],
                "noise_stacked": change["noise", "stacked", ""],
                "noise_merged": change["noise", "merged", "bfloat16"],
                "floor": part[part["update"].isin(["none", "zero"])].d_nll_mean20.abs().max(),
            }
        return found

    def _sweep(self) -> dict[str, Any]:
        """What the whole sweep says beyond the pattern: recalls of undertrained cells, noise, disagreements."""
        table, cells = self.candidates, self.source.table("cells.csv")
        undertrained = cells[(cells.base != "full") & (cells["stack"] == "stacked")]
        recalled = undertrained[(undertrained[["hit_full", "hit_secret"]] > 0).any(axis=1)]
        low = table[table.kind == "undertrained"]
        contradictions = table.apply(verdicts.disagreement, axis=1)
        return {
            "cells": len(table),
            "undertrained": len(low),
            "undertrained_runs": len(undertrained[["cell", "seed"]].drop_duplicates()),
            "recalled": recalled[["cell", "seed", "modality", "hit_full_base", "hit_full", "hit_secret"]].to_dict(
                "records"
            ),
            "undertrained_strengthened": int((low["hex"] == verdicts.STRENGTHENED).sum()),
            "noise": int((table.kind == "noise").sum()),
            "noise_shown": int(table[table.kind == "noise"].shown.sum()),
            "noise_changed": int((table[table.kind == "noise"].change != verdicts.UNCHANGED).sum()),
            "disagreements": int((contradictions[table.kind != "noise"] != "").sum()),
            "noise_disagreements": int((contradictions[table.kind == "noise"] != "").sum()),
        }


def _first_apart(one: str, other: str) -> int:
    """Place of the first character in which two texts differ."""
    return len(os.path.commonprefix([one, other]))


RERUN_DECOYS = 31  # random ones a canary: exposure ends at log2(32) = 5 bits


def rerun(scale: Scale) -> dict[str, Result]:
    """The cells of the three cases run anew with their first seed, on text canaries with 31 random decoys each.

    Results lie in ``outputs/local/<scale>/rerun``; what is there is used again. Cells are those that the tables of this
    scale pick, or the committed laptop tables where there are none.
    """
    cells, settings = config.load_sweep(scale), rules.load_verdicts()
    picked = cases.picks(_tables(scale, "local") or _committed_tables(), settings)
    results, loaded = {}, None
    for case in CASES.values():
        run = CellRun(scale, cells, cells.cell(picked[case.pattern]["cell"]), cells.seeds[0], "local")
        folder = paths.local(scale.name) / "rerun" / case.id
        inputs = sweep.cell_inputs(run) | {"study": "rerun", "decoys": RERUN_DECOYS, "rules": settings}
        inputs["protocol"] |= {"case": PROTOCOL}
        with locked(folder):
            found = other_result_aside(folder, inputs)
            if found is None:
                loaded = loaded or Models(scale)
                with training.threads(scale.threads):
                    found = _rerun(loaded, run, case, settings, inputs, folder)
            results[case.id] = found
    return results


def _rerun(models: Models, run: CellRun, case: Case, settings: dict, inputs: dict, folder: Path) -> Result:
    started, base = time.perf_counter(), models.base(run.cell.base)
    adapter = models.cell_adapter(run)
    nll, recall = models.change(run.cell.base, adapter, run.cell.id, run.seed)
    sets = exposure.draw_decoys(models.encoder, models.text, ["random"], RERUN_DECOYS)
    asked = {"before": base.backbone, "after": stack(base.backbone, adapter)}
    decoys = pd.concat(
        [exposure.decoy_table(backbone.model, base, sets).assign(model=name) for name, backbone in asked.items()]
    )
    answer, _ = cases.decoy_reading(nll, recall, decoys, "before", ["after"], settings)
    judged = verdicts.judge_group(nll, recall, settings, answer)
    ranks = cases.exposures(decoys).groupby("model")[["exposure", "cap"]].mean()
    results = {
        "cell": run.cell.id,
        "seed": run.seed,
        "pattern": case.pattern,
        "shown": judged.patterns[case.pattern].holds,
        "change": dataclasses.asdict(judged.change),
        "decoys": answer,
        "exposure": {name: round(float(ranks.exposure[name]), 4) for name in asked},
        "cap": float(ranks.cap.iloc[0]),
    }
    seconds = time.perf_counter() - started
    record = provenance(str(training.accelerator().device), models.scale.threads, seconds, evaluation_dtype="float32")
    tables = {"token_nll.parquet": nll, "recall.parquet": recall, "decoys.parquet": decoys}
    return write_result(folder, inputs, plain(results), record, collection.writers(tables))
