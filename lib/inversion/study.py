"""The inversion study: its runs, unit by unit and resumable, and the tables that they make."""

import dataclasses
import functools
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from lib import config, models, paths
from lib.collection import writers
from lib.files import locked
from lib.inversion import analysis, channels, continuous, diagnostics, sipit
from lib.inversion.continuous import Settings
from lib.inversion.reader import Convention, InversionError, Reader
from lib.inversion.settings import LEAST_TOKENS, InversionRun, Prompt, Run, Study, checksum, prompts
from lib.inversion.settings import load as load_settings
from lib.results import (
    MissingResult,
    Result,
    ResultError,
    first_found,
    found_or_made,
    provenance,
    reusable,
    set_aside_command,
    write_result,
)
from lib.training import accelerator, threads

PROTOCOL = 1  # raised by hand when results would change
TABLES = ("prompts.parquet", "tokens.parquet", "trace.parquet", "path.parquet")
DRAW_SEED = 7  # of noise that a channel adds, with the prompt's number
KEPT_EVERY = 10  # steps of a search whose path is kept
CROWD = 1500  # vocabulary rows drawn behind a path
TOKENS = [
    "prompt",
    "method",
    "configuration",
    "mode",
    "layer",
    "norm",
    "start",
    "channel",
    "position",
    "true_id",
    "found_id",
    "accepted_id",
    "fallback",
    "rank_final",
    *(f"rank_{metric}" for metric in continuous.METRICS),
    "loss_final",
    "discrete_loss",
    "cumulative_loss",
    "steps",
    "candidates",
    "seconds",
    "token",
    "found_token",
    "category",
    "merge_rank",
    "neighbour_distance",
    "neighbour_cosine",
]


def folder_of(scale: str) -> Path:
    """Where this machine's inversion study lies."""
    return paths.local(scale) / "inversion"


class Inversion:
    """A study with its model, which is loaded when something has to be computed."""

    def __init__(self, study: Study):
        self.study, self.folder = study, folder_of(study.scale)
        standard = load_settings(study.scale)
        self.is_standard = (study.model, study.source) == (standard.model, standard.source)
        self._released: dict[str, Tensor] = {}
        if not self.is_standard:
            self.folder = self.folder / "own"  # a user's model or prompts never mix with the scale's

    @functools.cached_property
    def identity(self) -> str:
        """What identifies the model's weights."""
        return models.identity(self.study.model, self.study.revision)

    @functools.cached_property
    def backbone(self) -> models.Backbone:
        """The attacked model in fp32."""
        return models.load(self.study.model, self.study.revision, device=accelerator().device)

    @functools.cached_property
    def prompts(self) -> list[Prompt]:
        """The most prompts that any run needs; the runs' are nested in them."""
        most = max(run.prompts for run in (*self.study.runs, self.study.short))
        return prompts(self.study.source, most, lambda text: len(self._encoded(text)) >= LEAST_TOKENS)

    def _encoded(self, text: str) -> list[int]:
        return self.backbone.tokenizer(text, add_special_tokens=False)["input_ids"]

    def ids(self, run: Run) -> Tensor:
        """Ids [n, T] of a run's prompts.

        Raises:
            InversionError: a prompt is shorter than the run's tokens.
        """
        rows = []
        for prompt in self.prompts[: run.prompts]:
            ids = self._encoded(prompt.text)
            if len(ids) < run.tokens:
                raise InversionError(f"prompt {prompt.id} has {len(ids)} tokens, expected at least {run.tokens}")
            rows.append(ids[: run.tokens])
        return torch.tensor(rows, device=self.backbone.model.device)

    @functools.cache  # noqa: B019 - one study a process
    def reader(self, convention) -> Reader:
        """The model cut for a convention; its vocabulary is what the tokenizer spells."""
        return Reader(self.backbone, convention, len(self.backbone.tokenizer))

    def released(self, run: Run) -> Tensor:
        """What the attacker is given: states [channels, n, T, d]."""
        if run.name not in self._released:
            states, parts = self.reader(run.convention).states(self.ids(run)), []
            for name in run.channels:
                noise = [torch.Generator().manual_seed(DRAW_SEED + 1000 * number) for number in range(run.prompts)]
                release = channels.named(name).release
                parts.append(torch.stack([release(row, one) for row, one in zip(states, noise, strict=True)]))
            self._released[run.name] = torch.stack(parts)
        return self._released[run.name]

    def unit_folder(self, run: Run, number: int) -> Path:
        """Where a unit of a run lies: a block of prompts, or a position of all of them."""
        kind = "prompts" if run.block else "position"
        return self.folder / "runs" / run.name.replace(" ", "-") / f"{kind}-{number:02d}"

    def inputs(self, run: Run, number: int) -> dict[str, Any]:
        """What a unit is made from."""
        found = {
            "study": "inversion",
            "protocol": PROTOCOL,
            "model": self.identity,
            "prompts": [self.study.source, run.prompts],
            "run": _settings(run),
            "search": [
                dataclasses.asdict(one.search(self.study.log_every)) for one in run.variants() if not run.is_control
            ],
            "unit": number,
        }
        if self.study.has_texts:
            found["prompts"].append(checksum(self.prompts[: run.prompts]))
        return json.loads(json.dumps(found))

    def finished(self, run: Run, number: int) -> Result | None:
        """A unit's result if it is there.

        Raises:
            ResultError: it is damaged, or was made with other parameters.
        """
        return reusable(self.unit_folder(run, number), self.inputs(run, number))

    def _refuse_other_prefixes(self, run: Run) -> None:
        """Refuse a position that was searched behind others than those that lie before it now."""
        units = [self.finished(run, number) for number in range(run.units)]
        for number, unit in enumerate(units):
            if unit is None or run.block or not number:
                continue
            found = _behind(units[:number])
            if unit.values.get("behind", found) != found:
                raise ResultError(
                    f"{paths.show(unit.folder)} was searched behind other tokens than now lie before it; move it aside "
                    f"with `{set_aside_command(unit.folder)}` and run again"
                )

    def missing(self, run: Run) -> list[int]:
        """Units of a run that are still to be computed."""
        self._refuse_other_prefixes(run)
        return [number for number in range(run.units) if self.finished(run, number) is None]

    def check(self, run: Run) -> None:
        """Refuse a run that the model or the prompts do not allow.

        Raises:
            InversionError: a layer that the model has not, more candidates than tokens, a prompt that is too short.
        """
        reader, vocabulary = self.reader(run.convention), len(self.backbone.tokenizer)
        if run.tokens > reader.context:
            raise InversionError(f"run {run.name!r}: {run.tokens} tokens, expected at most {reader.context}")
        for variant in run.variants():
            if not run.is_control:
                variant.search(self.study.log_every).check(vocabulary)
            elif run.candidates is not None and run.candidates > vocabulary:
                raise InversionError(f"run {run.name!r}: got C = {run.candidates}, expected at most {vocabulary}")
        self.ids(run)

    def compute(self, run: Run, progress: tqdm | None = None) -> None:
        """Compute a run's missing units; each is kept as soon as it is done. A second process waits for the first."""
        with locked(self.folder / "runs" / run.name.replace(" ", "-")):
            for number in self.missing(run):
                self._keep(run, number)
                if progress is not None:
                    progress.update(_work(run, [number]))

    def _keep(self, run: Run, number: int) -> None:
        self._prepare(run)
        started = time.perf_counter()
        tokens, trace = self._unit(run, number)
        seconds = time.perf_counter() - started
        record = provenance(str(accelerator().device), torch.get_num_threads(), seconds, evaluation_dtype="float32")
        tables = writers({"tokens.parquet": tokens, "trace.parquet": trace})
        write_result(
            self.unit_folder(run, number), self.inputs(run, number), self._values(run, number, tokens), record, tables
        )

    def _prepare(self, run: Run) -> None:
        """What is set up once: the model, its cut, the states, the table of first tokens; in no token's seconds."""
        reader = self.reader(run.convention)
        self.released(run)
        if run.first == "table":
            reader.first_states  # noqa: B018 - computed at first use

    def _values(self, run: Run, number: int, tokens: pd.DataFrame) -> dict[str, Any]:
        """What a unit's record says: its tokens, that their seconds are their own, and what it stood behind."""
        values = {"tokens": len(tokens), "timed": True}
        if not run.block and number:
            values["behind"] = _behind([self.finished(run, n) for n in range(number)])
        return values

    def _unit(self, run: Run, number: int) -> tuple[pd.DataFrame, pd.DataFrame]:
        if run.is_control:
            return self._control(run, number)
        return self._reference(run, number) if run.mode == "reference" else self._position(run, number)

    def _reference(self, run: Run, number: int) -> tuple[pd.DataFrame, pd.DataFrame]:
        """All positions of a block of prompts, each behind its true prefix, in every configuration and channel."""
        block, ids = range(run.prompts)[number * run.block : (number + 1) * run.block], self.ids(run)
        first = 1 if run.first == "table" else 0
        parts = []
        if first:
            rows = self._rows(run, block, [0])
            parts.append(self._search(run, rows, ids[:, :0][[row.prompt for row in rows]]))
        rows = self._rows(run, block, range(first, run.tokens))
        if rows:
            parts.append(self._search(run, rows, ids[:, :-1][[row.prompt for row in rows]]))
        tokens, trace = (
            pd.concat([part for part in kind if len(part)] or kind[:1]) for kind in zip(*parts, strict=True)
        )
        return tokens.reset_index(drop=True), trace.reset_index(drop=True)

    def _position(self, run: Run, position: int) -> tuple[pd.DataFrame, pd.DataFrame]:
        """One position of all prompts of a run, behind what was found before, in every configuration and channel.

        Where the run abandons failed prompts, of those alone that had no fallback before.
        """
        rows = self._rows(run, range(run.prompts), [position])
        before = [self.finished(run, number).table("tokens.parquet") for number in range(position)]
        if run.abandon:
            fell = {
                key for unit in before for key in unit[unit.fallback][list(_KEY)].itertuples(index=False, name=None)
            }
            rows = [row for row in rows if row.key(run) not in fell]
            if not rows:
                return before[-1][:0], continuous.NO_TRACE.assign(configuration=[], start=[], channel=[])
        known = {key: [] for key in (row.key(run) for row in rows)}
        for unit in before:
            for *key, one in unit[[*_KEY, "found_id"]].itertuples(index=False, name=None):
                if tuple(key) in known:
                    known[tuple(key)].append(one)
        prefix = torch.tensor(list(known.values()), dtype=torch.long).reshape(len(rows), position)
        return self._search(run, rows, prefix.to(self.backbone.model.device))

    def _rows(self, run: Run, block: Sequence[int], positions: Sequence[int]) -> list["_Row"]:
        every = itertools.product(run.variants(), range(len(run.channels)), block, positions)
        return [_Row(*one) for one in every]

    def _search(self, run: Run, rows: list["_Row"], prefix: Tensor) -> tuple[pd.DataFrame, pd.DataFrame]:
        """The rows' positions behind their prefixes, and what the tables call them."""
        reader, states, ids = self.reader(run.convention), self.released(run), self.ids(run)
        continuous.check_states(reader, states.flatten(0, 1), altered=run.channels != ("clean",))
        prompts, places = [row.prompt for row in rows], [row.position for row in rows]
        wanted = continuous.each(
            [row.variant.search(self.study.log_every) for row in rows], len(rows), len(reader.embedding)
        )
        targets = states[[row.channel for row in rows], prompts, places]
        lengths = None if set(places) == {prefix.shape[1]} else torch.tensor(places)
        _, tokens, trace = continuous.search(reader, prefix, targets, wanted, prompts, ids[prompts, places], lengths)
        return tuple(_labelled(table, run, rows) for table in (tokens, trace))

    def _control(self, run: Run, number: int) -> tuple[pd.DataFrame, pd.DataFrame]:
        """One prompt of a control."""
        reader, states = self.reader(run.convention), self.released(run)[0, number : number + 1]
        searches: dict[str, Callable] = {
            "sipit": lambda: sipit.sipit(reader, states, sipit.Sipit(seed=number)),
            "full-scan": lambda: sipit.full_scan(reader, states),
            "lm-order": lambda: sipit.lm_order(reader, states),
            "random-proxy": lambda: sipit.random_proxy(
                reader, states, run.candidates, run.metric, seed=number, reference=self.ids(run)[number : number + 1]
            ),
        }
        started = time.perf_counter()
        tokens = searches[run.mode]().tokens
        tokens["seconds"] = (time.perf_counter() - started) / len(tokens)
        tokens["true_id"] = self.ids(run)[number].tolist()
        rows = [_Row(run, 0, number, 0)]
        return _labelled(tokens, run, rows), _labelled(continuous.NO_TRACE, run, rows)

    def table(self, run: Run, name: str) -> pd.DataFrame:
        """All units of a run, rows named by the prompts' ids."""
        units = [self._timed(self.finished(run, n), name, run) for n in range(run.units)]
        table = pd.concat([unit for unit in units if len(unit)] or units[:1], ignore_index=True)
        table["prompt"] = np.array([prompt.id for prompt in self.prompts])[table.prompt.astype(int)]
        layer = "last" if run.layer is None else str(run.layer)
        return table.assign(method=run.method, mode=run.mode, layer=layer, norm=run.norm)

    def _timed(self, unit: Result, name: str, run: Run) -> pd.DataFrame:
        """A unit's table; where configurations side by side were timed together, their tokens have no seconds."""
        table = unit.table(name)
        if name == "tokens.parquet" and run.configurations and not unit.values.get("timed"):
            table["seconds"] = np.nan
        return table

    def path(self) -> pd.DataFrame:
        """The search of some tokens of the first prompt step by step, behind its true prefix, from zeros and from the
        prior mean, in the plane of the embedding matrix's two largest principal components; kept as a unit.

        Returns:
            ``kind`` (``proxy``, ``true``, ``crowd``: rows drawn at random, to show where the vocabulary lies),
            ``position, start, step, token, pc1, pc2, loss, rank``.
        """
        folder = self.folder / "runs" / "path"
        first = self.prompts[0]
        inputs = {"study": "inversion path", "protocol": PROTOCOL, "model": self.identity, "prompt": first.text}
        inputs = json.loads(json.dumps(inputs | dataclasses.asdict(self.study.path)))
        with locked(folder):
            kept = reusable(folder, inputs)
            if kept is None:
                started = time.perf_counter()
                table = self._path()
                seconds = time.perf_counter() - started
                record = provenance(str(accelerator().device), torch.get_num_threads(), seconds)
                kept = write_result(folder, inputs, {"rows": len(table)}, record, writers({"path.parquet": table}))
        return kept.table("path.parquet")

    def _path(self) -> pd.DataFrame:
        reader, decode = self.reader(Convention()), self.backbone.tokenizer.decode
        ids = torch.tensor([self._encoded(self.prompts[0].text)[: self.study.tokens]], device=reader.device)
        walks = list(itertools.product(self.study.path.positions, ("zeros", "prior")))
        places = torch.tensor([position for position, _ in walks])
        wanted = [
            Settings(steps=self.study.path.steps, candidates=1, start=start, log_every=KEPT_EVERY) for _, start in walks
        ]
        kept: list[tuple[int, int, Tensor]] = []

        def keep(step: int, alive: Tensor, proxies: Tensor) -> None:
            if step % KEPT_EVERY == 0:
                kept.extend((row, step, proxy) for row, proxy in zip(alive.tolist(), proxies.clone(), strict=True))

        prefix, true = ids[:, :-1].repeat(len(walks), 1), ids[0, places]
        begin = continuous.starts(reader, wanted, [0] * len(walks), prefix, places)
        driven = continuous.drive(
            reader, reader.read(prefix), reader.states(ids)[0, places], begin, wanted, true, places, keep
        )
        plane, middle = principal_plane(reader.embedding)

        def flat(embeddings: Tensor) -> dict[str, np.ndarray]:
            return dict(zip(("pc1", "pc2"), ((embeddings - middle) @ plane).T.cpu().numpy(), strict=True))

        walked = pd.DataFrame([(row, step) for row, step, _ in kept], columns=["prompt", "step"])
        walked = walked.assign(kind="proxy", **flat(torch.stack([proxy for *_, proxy in kept])))
        walked = walked.merge(driven.trace, on=["prompt", "step"], how="left")
        walked["position"] = walked.prompt.map(dict(enumerate(places.tolist())))
        walked["start"] = walked.prompt.map(dict(enumerate(start for _, start in walks)))
        aims = ids[0, list(self.study.path.positions)]
        ends = pd.DataFrame({"kind": "true", "position": self.study.path.positions, **flat(reader.embedding[aims])})
        ends["token"] = [decode([one]) for one in aims.tolist()]
        rows = np.random.default_rng(DRAW_SEED).choice(len(reader.embedding), min(CROWD, len(reader.embedding)), False)
        crowd = pd.DataFrame({"kind": "crowd", **flat(reader.embedding[rows])})
        columns = ["kind", "position", "start", "step", "token", "pc1", "pc2", "loss", "rank"]
        return pd.concat([crowd, walked, ends], ignore_index=True).reindex(columns=columns)


class _Row(NamedTuple):
    """What one row of a search is: a configuration, the number of a channel, a prompt and a position."""

    variant: Run
    channel: int
    prompt: int
    position: int

    def key(self, run: Run) -> tuple[str, str, int]:
        """Which row of a unit's table it is."""
        return self.variant.name, run.channels[self.channel], self.prompt


_KEY = ("configuration", "channel", "prompt")


def _settings(run: Run) -> dict[str, Any]:
    """What a run's results depend on; ``abandon`` where it is so: runs were kept before there was such a thing."""
    found = dataclasses.asdict(run)
    return found if run.abandon else {name: value for name, value in found.items() if name != "abandon"}


def _labelled(table: pd.DataFrame, run: Run, rows: list[_Row]) -> pd.DataFrame:
    """A table whose ``prompt`` numbers rows, with what these are."""
    which = [rows[number] for number in table.prompt.astype(int)]
    names = {"configuration": [row.variant.name for row in which], "start": [row.variant.start for row in which]}
    names |= {"channel": [run.channels[row.channel] for row in which], "prompt": [row.prompt for row in which]}
    return table.assign(**names)


def _behind(units: Sequence[Result | None]) -> str:
    """What identifies the tokens that a position was searched behind."""
    before = [unit.content["files"]["tokens.parquet"] if unit else "" for unit in units]
    return hashlib.sha256("".join(before).encode()).hexdigest()[:16]


def _work(run: Run, units: Sequence[int]) -> int:
    """Steps of all rows of some units of a run."""
    steps = sum(variant.steps or 0 for variant in run.variants()) * len(run.channels)
    if not run.block:
        return steps * run.prompts * len(units)
    prompts = sum(len(range(run.prompts)[unit * run.block : (unit + 1) * run.block]) for unit in units)
    return steps * prompts * run.tokens


def principal_plane(embedding: Tensor) -> tuple[Tensor, Tensor]:
    """The two largest principal components [d, 2] of the embedding matrix's rows, and their mean [d]."""
    middle = embedding.mean(0)
    centred = (embedding - middle).double()
    _, vectors = torch.linalg.eigh(centred.T @ centred)  # ascending
    return vectors[:, [-1, -2]].to(embedding.dtype), middle


def run_study(study: Study, only: str | None = None) -> None:
    """Compute what is missing of the study's runs, or of one, in their order.

    Raises:
        config.ConfigError: ``only`` is no run of the study.
        ResultError: a unit that is there is damaged, or was made with other parameters.
    """
    inversion = Inversion(study)
    chosen = [run for run in study.runs if only in (None, run.name)]
    if not chosen:
        raise config.ConfigError(f"run: got {only!r}, expected one of {', '.join(run.name for run in study.runs)}.")
    with threads(config.load_scale(study.scale).threads):
        left = {run.name: inversion.missing(run) for run in chosen}  # refuses what cannot be used before anything runs
        if any(left.values()):
            for run in chosen:
                inversion.check(run)
        total = sum(_work(run, left[run.name]) for run in chosen)
        with tqdm(total=total, unit="step", unit_scale=True, desc="inversion") as progress:
            for run in chosen:
                progress.set_description(run.name)
                inversion.compute(run, progress)


def collect(study: Study, partly: bool = False) -> Result:
    """Write the study's tables from its units, as one result beside them.

    Args:
        partly: take the runs that are complete; the others are named in the result as ``pending``.

    Raises:
        ResultError: a unit is missing (``partly``: of every run), damaged, or of other parameters.
    """
    inversion, started = Inversion(study), time.perf_counter()
    left = {run.name: len(inversion.missing(run)) for run in study.runs}
    if any(left.values()) and not (partly and 0 in left.values()):
        named = ", ".join(f"{name} ({count})" for name, count in left.items() if count)
        raise ResultError(
            f"units of the inversion study are missing: {named}. Run `make inversion SCALE={study.scale}`"
        )
    runs = [run for run in study.runs if not left[run.name]]
    with threads(config.load_scale(study.scale).threads):
        tokens, trace = (
            pd.concat([inversion.table(run, name) for run in runs], ignore_index=True)
            for name in ("tokens.parquet", "trace.parquet")
        )
        tokens = described(inversion, tokens)
        tables = {
            "prompts.parquet": prompt_table(inversion, tokens),
            "tokens.parquet": tokens[TOKENS],
            "trace.parquet": trace[
                ["prompt", "method", "configuration", "channel", "position", "step", "loss", "rank"]
            ],
            "path.parquet": inversion.path(),
        }
    units = [inversion.finished(run, n) for run in runs for n in range(run.units)]
    computed = round(sum(unit.content["provenance"]["seconds"] for unit in units), 1)
    record = provenance(
        str(accelerator().device),
        units[0].content["provenance"]["threads"],
        time.perf_counter() - started,
        computed_in=computed,
    )
    vocabulary = len(inversion.backbone.tokenizer)
    values = analysis.summary(tables["prompts.parquet"], tables["tokens.parquet"], vocabulary)
    values |= {"runs": {run.name: run.units for run in runs}, "pending": [name for name, n in left.items() if n]}
    values["vocabulary"] = vocabulary
    values["duplicate_rows"] = len(inversion_classes(inversion))
    record_file = inversion.folder / "result.json"
    record_file.unlink(missing_ok=True)  # none of the two, old or new, until all tables are there
    return write_result(inversion.folder, study_inputs(inversion), values, record, writers(tables))


def study_inputs(inversion: Inversion) -> dict[str, Any]:
    """What the tables depend on."""
    settings = dataclasses.asdict(inversion.study)
    for name in ("bench", "short", "grid"):  # no table depends on them
        del settings[name]
    texts = checksum(inversion.prompts) if inversion.study.has_texts else None
    found = {"study": "inversion", "protocol": PROTOCOL, "settings": settings, "texts": texts}
    return json.loads(json.dumps(found | {"model": inversion.identity}))


def inversion_classes(inversion: Inversion) -> dict[int, tuple[int, ...]]:
    """Ids whose embedding rows are equal: no states tell them apart."""
    return diagnostics.duplicates(
        inversion.backbone.model.get_input_embeddings().weight[: len(inversion.backbone.tokenizer)]
    )


def described(inversion: Inversion, tokens: pd.DataFrame) -> pd.DataFrame:
    """The tokens with what may explain why they fail: kind, merge rank (a stand-in for frequency), and density."""
    tokens = tokens.copy()
    tokens["cumulative_loss"] = (
        tokens.sort_values("position").groupby(["configuration", "channel", "prompt"]).discrete_loss.cumsum()
    )
    decode, words = inversion.backbone.tokenizer.decode, diagnostics.function_words()
    ids = sorted(set(tokens.true_id))
    near = diagnostics.density(inversion.backbone.model.get_input_embeddings().weight, ids).set_index("id")
    spelled = {one: decode([one]) for one in ids}
    tokens["token"] = tokens.true_id.map(spelled)
    tokens["found_token"] = tokens.found_id.map(lambda one: decode([one]))
    tokens["category"] = tokens.token.map(lambda token: diagnostics.category(token, words))
    tokens["merge_rank"] = tokens.true_id  # ids of a byte-pair vocabulary count merges from the most frequent on
    tokens["neighbour_distance"] = tokens.true_id.map(near.distance)
    tokens["neighbour_cosine"] = tokens.true_id.map(near.cosine)
    whole = ["accepted_id", "rank_final", *(f"rank_{metric}" for metric in continuous.METRICS), "steps", "candidates"]
    return tokens.reindex(columns=TOKENS).astype(dict.fromkeys(whole, "Int64"))


def prompt_table(inversion: Inversion, tokens: pd.DataFrame) -> pd.DataFrame:
    """One row a prompt, run and channel. Where the true prefix was committed there is nothing found to compare."""
    classes, decode = inversion_classes(inversion), inversion.backbone.tokenizer.decode
    sources = {prompt.id: prompt.source for prompt in inversion.prompts}
    rows, sizes, runs = [], {}, {}
    for run in inversion.study.runs:
        runs |= dict.fromkeys([one.name for one in run.variants()], run)
        together = 1 if run.is_control else run.block * run.tokens or run.prompts * len(run.channels)
        sizes |= dict.fromkeys([one.name for one in run.variants()], together * len(run.variants()))
    for (configuration, channel, prompt), part in tokens.groupby(["configuration", "channel", "prompt"], sort=False):
        part = part.sort_values("position")
        first = part.iloc[0]
        found, true = part.found_id.tolist(), part.true_id.tolist()
        row = {"prompt": prompt, "source": sources[prompt], "model": inversion.study.model, "layer": first.layer}
        row |= {"norm": first.norm, "n_tokens": len(part), "method": first.method, "configuration": configuration}
        row |= {"batch": sizes[configuration], "mode": first["mode"]}
        row |= {"channel": channel, "attacker": "nearest token" if first["mode"] == "blind" else "fixed tolerance"}
        row |= {"seconds": part.seconds.sum(skipna=False), "candidates": int(part.candidates.sum())}
        row["start"] = first.start
        row["cumulative_loss"] = part.cumulative_loss.iloc[-1]
        if first["mode"] == "reference":
            row |= {"status": "true prefix committed"}
        else:
            run = runs[configuration]
            whole = len(part) == run.tokens  # else it was abandoned
            row["exact_match"] = whole and found == true
            same = [a == b or a in classes.get(b, ()) for a, b in zip(found, true, strict=True)]
            row |= {"exact_up_to_class": whole and all(same)}
            if not run.abandon:
                row |= {"similarity": diagnostics.similarity(decode(found), decode(true))}
            row |= {"first_error": diagnostics.first_error(found, true), "status": _status(part, first["mode"])}
        rows.append(row)
    columns = ["prompt", "source", "model", "layer", "norm", "n_tokens", "batch", "method", "configuration", "mode"]
    columns += [
        "start",
        "channel",
        "attacker",
        "exact_match",
        "exact_up_to_class",
        "similarity",
        "first_error",
        "seconds",
    ]
    columns += ["candidates", "cumulative_loss", "status", "margin"]
    table = pd.DataFrame(rows).reindex(columns=columns)
    table["margin"] = table.margin.astype(float)
    return table.astype({"exact_match": "boolean", "exact_up_to_class": "boolean", "first_error": "Int64"})


def _status(part: pd.DataFrame, mode: str) -> str:
    if mode == "blind":
        return "not verified"
    return f"fallback at {part.position[part.fallback].min()}" if part.fallback.any() else "consistent"


def load(study: Study, source: str, partly: bool = False) -> Result:
    """The study where ``source`` says (see :class:`lib.config.Testbed`); ``auto``: this machine's, else committed.

    This machine's tables of a part of the runs are passed over, unless ``partly`` is given.

    Raises:
        MissingResult: there is none.
        ResultError: it is damaged, or was made with other parameters.
    """
    inversion = Inversion(study)
    folders = {"local": inversion.folder}
    if inversion.is_standard or source == "reference":
        folders["reference"] = paths.reference(study.scale) / "inversion"

    def usable(result: Result) -> bool:
        return partly or result.is_reference or not result.values["pending"]

    found = first_found(folders, source, study_inputs(inversion), usable)
    if found is not None:
        return found
    raise MissingResult(f"there is no inversion study at {study.scale} scale: run `make inversion SCALE={study.scale}`")


def find(params: InversionRun) -> Result:
    """The study: found where ``params.results`` says, or computed, unit by unit, in this process.

    Raises:
        ResultError: ``reference`` was asked for and there is none; or what is there is damaged or of other parameters.
    """

    def make() -> Result:
        run_study(params.study)
        return collect(params.study)

    return found_or_made(lambda source: load(params.study, source), make, params.results)


@dataclasses.dataclass(frozen=True)
class Short:
    """The short inversion of the main job: its tokens, true and found texts by prompt, and what was done, in words."""

    tokens: pd.DataFrame
    true: dict[str, str]
    found: dict[str, str]
    what: str
    seconds: float
    tolerance: float


def short(study: Study) -> Short:
    """Invert a handful of prompts, or find them inverted on this machine."""
    inversion, run = Inversion(study), study.short
    with threads(config.load_scale(study.scale).threads):
        inversion.compute(run)
        tokens = described(inversion, inversion.table(run, "tokens.parquet"))
    decode = inversion.backbone.tokenizer.decode
    ordered = tokens.sort_values("position").groupby("prompt", sort=False)
    spelled = {name: {key: decode(part[name].tolist()) for key, part in ordered} for name in ("true_id", "found_id")}
    what = (
        f"The first {run.tokens} tokens of {run.prompts} prompts, from states of {study.model} ({run.convention}) by "
        f"continuous search: K = {run.steps}, C = {run.candidates}, started from {run.start}."
    )
    seconds = [inversion.finished(run, number).content["provenance"]["seconds"] for number in range(run.units)]
    return Short(tokens, spelled["true_id"], spelled["found_id"], what, sum(seconds), run.search(1).tolerance)
