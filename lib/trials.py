"""The scorecard's trials: models of which it is known what was done to their secrets, asked by every probe and checked.

One process makes all trials of one seed on models that are loaded once; every trial is a result of its own, so that
killed work goes on where it was.
"""

import dataclasses
import json
import tempfile
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from tqdm import tqdm

from lib import (
    benign,
    config,
    exposure,
    extraction,
    interventions,
    models,
    paths,
    plan,
    probes,
    rules,
    runs,
    sweep,
    training,
    truth,
    verdicts,
)
from lib.adapters import merge, noise_like, scaled, stack
from lib.collection import writers
from lib.config import LoraSettings
from lib.encoding import Encoded, Encoder
from lib.files import locked
from lib.models import Backbone
from lib.plan import CURVE, FULL, NOISE, UNDERTRAINED, Scorecard
from lib.results import Result, provenance, reusable, write_result
from lib.runs import Evaluation
from lib.verdicts import DAMAGED, STRENGTHENED

PROTOCOL = 1  # raised by hand when results of trials would change
SIZE_OF_NOISE = {FULL: "damage", UNDERTRAINED: "benign"}  # noise has the size of this intervention's adapter
SAME_MODEL = ("zero", "permuted")
RELEARNED = ("damage", "relearning", "zero")  # of the largest dose: checked by learning again
THRESHOLDS = ("lost", "learned", "untouched")  # read when trials are collected, not when they are made
VALUES = ["probe", "canary", "tokens", "base", "change"]


def folder_of(scale: str) -> Path:
    """Where this machine's scorecard lies."""
    return paths.local(scale) / "scorecard"


def trial_folder(scale: str, trial: str) -> Path:
    """Where this machine's result of a trial lies."""
    return folder_of(scale) / "trials" / trial


def trial_inputs(settings: Scorecard, row: dict[str, Any], model: str) -> dict[str, Any]:
    """What a trial is made from: its row of the plan, how it is made and measured, the testbed.

    ``params/verdicts.yaml`` is not in it, though its rules say for which trials decoys are scored; the tables that are
    collected from trials depend on it.
    """
    taught = {name: dataclasses.asdict(value) for name, value in settings.taught.items()}
    for value in taught.values():
        del value["doses"]  # which doses there are is the plan's matter
    measured = {key: value for key, value in dataclasses.asdict(settings.truth).items() if key not in THRESHOLDS}
    name = row["intervention"]
    like = SIZE_OF_NOISE[row["base"]] if name in ("zero", "gaussian", "spectral") else name
    inputs = {
        "study": "trial",
        "protocol": {"trial": PROTOCOL, "testbed": runs.PROTOCOL["testbed"]},
        "trial": {key: row[key] for key in ("seed", "base", "intervention", "dose", "marks")},
        "taught": taught.get(like),
        "undertrained": settings.own.undertrained,
        "truth": measured,
        "decoys": settings.own.decoys,
        "samples": settings.probes.extraction.samples,
        "scale": runs.scale_inputs(plan.injected_scale(settings, row["seed"])),
        "training": dataclasses.asdict(config.load_sweep(config.load_scale(settings.scale)).training),
        "model": model,
    }
    return json.loads(json.dumps(inputs))


def finished(settings: Scorecard, row: dict[str, Any], model: str) -> Result | None:
    """This machine's result of a trial if it is there.

    Raises:
        results.ResultError: it is damaged, or was made with other parameters.
    """
    return reusable(trial_folder(settings.scale, row["trial"]), trial_inputs(settings, row, model))


def run_seed(settings: Scorecard, seed: int) -> list[Result]:
    """Make what is missing of a seed's trials, in the plan's order.

    Raises:
        plan.PlanError: the plan has no such seed.
    """
    rows = [row for row in plan.draw(settings).to_dict("records") if row["seed"] == seed]
    if not rows:
        known = ", ".join(map(str, settings.seeds))
        raise plan.PlanError(f"seed: got {seed}, expected one of the plan's: {known}")
    scale = plan.injected_scale(settings, seed)
    model = models.identity(scale.backbone, scale.revision)
    found, ground = [], None
    with locked(folder_of(settings.scale) / f"seed-{seed:02d}"), training.threads(scale.threads):
        for row in tqdm(rows, desc=f"seed {seed}", unit="trial"):
            result = finished(settings, row, model)
            if result is None:
                ground = ground or _Ground(settings, seed)
                result = ground.run(row, trial_inputs(settings, row, model))
            found.append(result)
    return found


class _Before(NamedTuple):
    """What is known of a base before anything is done to it."""

    tables: tuple[pd.DataFrame, pd.DataFrame]
    log_p: np.ndarray
    recall: pd.DataFrame
    ranks: pd.DataFrame
    decoys: pd.DataFrame | None


class _Ground:
    """What all trials of one seed start from: bases, rows in every wording, decoys, adapters."""

    def __init__(self, settings: Scorecard, seed: int):
        self.settings, self.seed = settings, seed
        self.scale = plan.injected_scale(settings, seed)
        self.rules = rules.load_verdicts()
        self.benign = config.load_sweep(config.load_scale(settings.scale)).training
        self.encoder, self.rows = runs.load_testbed(self.scale)
        self.injected = runs.inject(self.scale, self.encoder, self.rows)
        self._bases: dict[str, Encoder] = {}
        self._before: dict[str, _Before] = {}

    @cached_property
    def reworded(self) -> list[Encoded]:
        """All canaries asked in all other wordings."""
        return truth.reworded_rows(self.encoder, self.rows, self.settings.truth.prompts)

    @cached_property
    def decoys(self) -> list[exposure.DecoySet]:
        """Random decoys of every canary."""
        return exposure.draw_decoys(self.encoder, self.rows, ["random"], self.settings.own.decoys, self.seed)

    def base(self, name: str) -> Encoder:
        """The model before the intervention."""
        if name not in self._bases:
            step = None if name == FULL else self.settings.own.undertrained
            self._bases[name] = Encoder(merge(self.encoder.backbone, self.injected.adapter(step)))
        return self._bases[name]

    def before(self, name: str) -> _Before:
        """Probes and truth on a base; scores of its decoys where they are needed later."""
        if name not in self._before:
            encoder = self.base(name)
            found = runs.evaluate_model(encoder.backbone, encoder, self.rows, self.scale.evaluation_batch)
            decoys = None if name == FULL else exposure.decoy_table(encoder.backbone.model, encoder, self.decoys)
            self._before[name] = _Before(
                (found.scores.table(), found.recall.table(self.rows)),
                extraction.log_probability(found.scores, with_preamble=True),
                self._recall(encoder.backbone),
                self._ranks(encoder.backbone, decoys),
                decoys,
            )
        return self._before[name]

    def run(self, row: dict[str, Any], inputs: dict[str, Any]) -> Result:
        """Make one trial and write its result."""
        started = time.perf_counter()
        before = self.before(row["base"])
        backbone, encoder = self._model(row), self.base(row["base"])
        after = self._evaluation(row, backbone)
        nll, recall = sweep.slices(row["trial"], self.seed, before.tables, {"stacked": after})
        values = verdicts.probe_values(nll, recall, self.rules)[VALUES]
        decoys, ranks = self._decoys(row, before, backbone, nll, recall)
        values = pd.concat([values, self._further(before, after, ranks)], ignore_index=True)
        said = before.recall.merge(self._recall(backbone), on=["canary", "samples"], suffixes=("_base", ""))
        results = {
            "trial": row["trial"],
            "decoys": self._answer(before, decoys, nll, recall),
            "base_hit_full": float(recall.hit_full_base.astype(float).mean()),
            "preamble_share": float(verdicts.span_shares(nll, probes.WINDOW).get("preamble", 0.0)),
        }
        tables = {"values.parquet": values, "reworded.csv": said.round(8)}
        if self._is_relearned(row):
            curve, regained = self._relearned(row)
            tables["relearning.csv"] = curve.round(6)
            results |= {"head_start": round(truth.head_start(curve), 6), "regained": round(regained, 6)}
        record = provenance(
            str(training.accelerator().device),
            self.scale.threads,
            time.perf_counter() - started,
            base=encoder.backbone.revision,
            evaluation_dtype="float32",
        )
        return write_result(trial_folder(self.settings.scale, row["trial"]), inputs, results, record, writers(tables))

    def _recall(self, backbone: Backbone) -> pd.DataFrame:
        """Sampled recall of every canary on other wordings."""
        samples = self.settings.truth.samples
        return truth.sampled_recall(backbone.model, self.encoder, self.reworded, samples, self.seed)

    def _ranks(self, backbone: Backbone, decoys: pd.DataFrame | None) -> pd.DataFrame:
        if decoys is None:
            found = exposure.ranks(backbone.model, self.encoder, self.decoys)
        else:
            found = exposure.exposure(decoys)
        return found.set_index("canary").loc[[row.canary.id for row in self.rows]].reset_index()

    def _decoys(
        self, row: dict[str, Any], before: _Before, backbone: Backbone, nll: pd.DataFrame, recall: pd.DataFrame
    ) -> tuple[pd.DataFrame | None, pd.DataFrame | None]:
        """Scores of all decoys, or None; and ranks among them, or None.

        Scores are had on the undertrained base, of counted trials, and of noise where the protocol asks for them (the
        secret's verdict has fired); a model that is the base has the base's. On the full base ranks are enough.
        """
        if row["intervention"] in SAME_MODEL:
            return before.decoys, before.ranks
        if before.decoys is None:
            return None, self._ranks(backbone, None)
        fired = verdicts.judge_group(nll, recall, self.rules).verdicts.verdict["hex"] in (DAMAGED, STRENGTHENED)
        if row["role"] == CURVE or (row["role"] == NOISE and not fired):
            return None, None
        decoys = exposure.decoy_table(backbone.model, self.base(row["base"]), self.decoys)
        return decoys, self._ranks(backbone, decoys)

    def _further(self, before: _Before, after: Evaluation, ranks: pd.DataFrame | None) -> pd.DataFrame:
        """Per-canary values of the probes that verdicts know no rule for."""
        k = self.settings.probes.extraction.samples
        by_canary = dict(
            zip(after.scores.ids, extraction.log_probability(after.scores, with_preamble=True), strict=True)
        )
        log_p = np.array([by_canary[row.canary.id] for row in self.rows])
        pairs = {"extraction": (extraction.hit_at_k(before.log_p, k), extraction.hit_at_k(log_p, k))}
        if ranks is not None:
            pairs["exposure"] = (before.ranks.exposure.to_numpy(), ranks.exposure.to_numpy())
        ids = [row.canary.id for row in self.rows]
        return pd.concat(
            [
                pd.DataFrame({"probe": probe, "canary": ids, "tokens": 0, "base": base, "change": now - base})
                for probe, (base, now) in pairs.items()
            ]
        )

    def _answer(self, before: _Before, decoys: pd.DataFrame | None, nll: pd.DataFrame, recall: pd.DataFrame) -> str:
        """What the decoys say of the change: by rule nothing on a base that has nothing left to correct."""
        if decoys is None:
            return "at_cap" if before.decoys is None else "not_run"
        changes = exposure.corrected_change(before.decoys, decoys)
        return verdicts.decoy_answer(
            changes, verdicts.judge_group(nll, recall, self.rules).verdicts.verdict["hex"], self.rules
        )

    def _evaluation(self, row: dict[str, Any], backbone: Backbone) -> Evaluation:
        """All canaries on a model; of permuted batches, in another order and other batches."""
        size, rows = self.scale.evaluation_batch, self.rows
        if row["intervention"] == "permuted":
            order = np.random.default_rng([self.seed, 5]).permutation(len(rows))
            rows, size = [rows[i] for i in order], max(1, size // 3)
        return runs.evaluate_model(backbone, self.base(row["base"]), rows, size)

    def _model(self, row: dict[str, Any], place: Callable[[Backbone, Path], Backbone] = stack) -> Backbone:
        """The model of a trial, its adapter stacked on the base or, with ``merge``, in its weights."""
        base, name, dose = self.base(row["base"]), row["intervention"], row["dose"]
        if name == "permuted":
            return base.backbone
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder) / "adapter"
            if name == "forgetting":
                return merge(self.encoder.backbone, scaled(self.injected.adapter(), dose, work))
            if name in ("gaussian", "spectral"):
                like = self._adapter(SIZE_OF_NOISE[row["base"]])
                return place(base.backbone, noise_like(like, name, 1000 + self.seed, work))
            adapter = self._adapter(SIZE_OF_NOISE[row["base"]] if name == "zero" else name)
            return place(base.backbone, adapter if dose == 1.0 else scaled(adapter, dose, work))

    def _adapter(self, name: str) -> Path:
        """The trained adapter of an intervention, from ``outputs/local`` where it was trained before."""
        base = self.base(plan.ON[name])
        lora = self._lora(name)
        if name == "benign":
            source = plan.SOURCES[self.seed % len(plan.SOURCES)]
            records = benign.generate(source, lora.batch_size * lora.max_steps, self.seed, base.backbone.takes_images)
            benign.screen_against(records, [row.canary for row in self.rows])
            return runs.trained(self.scale, base, base.encode(records), lora, PROTOCOL).adapter()
        lessons = self._lessons(name, base)
        key = training.lessons_key(base.backbone, lessons, lora, PROTOCOL)
        folder = paths.local(self.scale.name) / "adapters" / key
        with locked(folder):
            return training.teach(base, lessons, lora, folder).adapter()

    def _lessons(self, name: str, base: Encoder) -> list[training.Lesson]:
        weight, count = self.settings.taught[name].hold_weight, len(self.rows)
        planted = [row.canary for row in self.rows]
        if name == "damage":
            marks = plan.read_marks(plan.damage_marks(self.settings, self.seed))
            return interventions.damage(self.rows, marks, self.seed, weight)
        if name.startswith("drift"):
            return interventions.preamble_drift(base, self.rows, count, self.seed, name == "drift-held", weight)
        if name == "format":
            fresh = base.encode(interventions.new_records(base, planted, count, self.seed))
            return [training.lesson(row) for row in fresh]
        return [training.lesson(row) for row in self.rows]

    def _lora(self, name: str) -> LoraSettings:
        """An intervention's adapter has a benign one's rank, alpha, warm-up and precision."""
        taught, common = self.settings.taught[name], self.benign
        return LoraSettings(
            rank=common.rank,
            alpha=common.alpha,
            learning_rate=taught.learning_rate,
            warmup_steps=common.warmup_steps,
            batch_size=taught.batch_size,
            max_steps=taught.steps,
            check_every=taught.steps,
            seed=self.seed,
            precision=common.precision,
        )

    @staticmethod
    def _is_relearned(row: dict[str, Any]) -> bool:
        return row["intervention"] in RELEARNED and row["role"] != CURVE

    def _relearned(self, row: dict[str, Any]) -> tuple[pd.DataFrame, float]:
        """A few canaries, damaged ones first, taught again beside as many new records; the others are held out."""
        rule = self.settings.truth.relearning
        meant = plan.read_marks(row["marks"]) if row["intervention"] == "damage" else {}
        order = sorted(self.rows, key=lambda one: one.canary.id not in meant)
        taught, held_out = order[: rule.canaries], order[rule.canaries :]
        planted = [one.canary for one in self.rows]
        fresh = self.encoder.encode(interventions.new_records(self.encoder, planted, rule.canaries, 900 + self.seed))
        lora = dataclasses.replace(
            self._lora("relearning"),
            learning_rate=rule.learning_rate,
            max_steps=rule.steps,
            batch_size=2 * rule.canaries,
            check_every=rule.steps,
        )
        return truth.relearning(Encoder(self._model(row, merge)), taught, fresh, held_out, lora)
