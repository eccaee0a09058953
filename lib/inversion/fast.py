"""The study of exact inversion and of defences: its units, kept as they land, and the tables that they make."""

import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from lib import config, models, paths
from lib.collection import writers
from lib.files import locked
from lib.inversion import attackers, channels, continuous, corpus, defences, diagnostics, proposer, settings, verified
from lib.inversion.fast_settings import RANDOM, Fast, FastRun, Set
from lib.inversion.fast_settings import load as load_settings
from lib.inversion.reader import Convention, InversionError, Reader
from lib.results import (
    MissingResult,
    Result,
    ResultError,
    first_found,
    found_or_made,
    provenance,
    reusable,
    write_result,
)
from lib.training import accelerator, threads

PROTOCOL = 2  # raised by hand when results would change
RANDOM_SEED = 3  # of prompts of random ids
BENCH = "inversion_ratios.csv"  # of `make bench`: seconds a token by every method
CASCADED = ("nearest", "aware", "aware, prior")  # attackers that read whole prompts


class Unit(NamedTuple):
    """A part of the study that is kept by itself: where, what identifies it, and what makes its values and tables."""

    name: str
    inputs: dict[str, Any]
    make: Callable[[], tuple[dict, dict[str, pd.DataFrame]]]


def folder_of(scale: str) -> Path:
    """Where this machine's study lies."""
    return paths.local(scale) / "fast"


class Study:
    """A study with its model, which is loaded when something has to be computed."""

    def __init__(self, fast: Fast):
        self.fast, self.folder = fast, folder_of(fast.scale)
        self.is_standard = fast.model == load_settings(fast.scale).model
        if not self.is_standard:
            self.folder = self.folder / "own"

    @functools.cached_property
    def identity(self) -> str:
        """What identifies the model's weights."""
        return models.identity(self.fast.model, self.fast.revision)

    @functools.cached_property
    def backbone(self) -> models.Backbone:
        """The attacked model in fp32."""
        return models.load(self.fast.model, self.fast.revision, device=accelerator().device)

    @functools.cache  # noqa: B019 - one study a process
    def reader(self, convention: Convention) -> Reader:
        """The model cut for a convention; its vocabulary is what the tokenizer spells."""
        return Reader(self.backbone, convention, len(self.backbone.tokenizer))

    @functools.cache  # noqa: B019 - one study a process
    def proposer(self, convention: Convention) -> proposer.Proposer:
        """The proposer of a convention, with its table of first tokens."""
        return proposer.fitted(self.reader(convention), self.fast.proposer.tokens, self.fast.proposer.packages)

    @functools.cached_property
    def encoded(self) -> list[tuple[str, str, list[int]]]:
        """Name, source and ids of every written prompt."""
        tokenizer = self.backbone.tokenizer
        return [
            (one.id, one.source, tokenizer(one.text, add_special_tokens=False)["input_ids"])
            for one in settings.written()
        ]

    def prompts(self, wanted: Set) -> list[tuple[str, str, list[int]]]:
        """Name, source and ids of a set's prompts: the first that are long enough, or random ids.

        Raises:
            InversionError: there are fewer.
        """
        if wanted.source == RANDOM:
            usable = torch.tensor(self.ordinary_ids)
            generator = torch.Generator().manual_seed(RANDOM_SEED)
            drawn = usable[torch.randint(len(usable), (wanted.prompts, wanted.tokens), generator=generator)]
            return [(f"random-{number}", RANDOM, row) for number, row in enumerate(drawn.tolist())]
        long = [(name, source, ids[: wanted.tokens]) for name, source, ids in self.encoded if len(ids) >= wanted.tokens]
        if len(long) < wanted.prompts:
            raise InversionError(
                f"set {wanted.name!r}: {len(long)} prompts have {wanted.tokens} tokens, expected {wanted.prompts}"
            )
        return long[: wanted.prompts]

    @functools.cached_property
    def ordinary_ids(self) -> list[int]:
        """Ids that are neither special nor share their embedding row."""
        tokenizer, embedding = self.backbone.tokenizer, self.reader(Convention()).embedding
        left_out = set(tokenizer.all_special_ids) | set(diagnostics.duplicates(embedding))
        return [one for one in range(len(embedding)) if one not in left_out]

    def units(self) -> Iterator[Unit]:
        """All parts, in the order in which they are computed."""
        for wanted in self.fast.sets:
            for number in range(wanted.units):
                yield self._set_unit(wanted, number)
        for name, count in self.fast.peers.items():
            yield self._peer_unit(next(one for one in self.fast.sets if one.name == name), count)
        for name in self.fast.proposals:
            yield self._proposal_unit(next(one for one in self.fast.sets if one.name == name))
        plan = self.fast.defences
        for prompt in range(plan.prompts):
            yield self._sweep_unit(f"sweep/prompt-{prompt:02d}", prompt, range(plan.tokens), plan.candidates)
        for place in plan.swept:
            yield self._sweep_unit(f"swept/position-{place:02d}", 0, [place], None)
        for name in plan.cascade.channels:
            for attacker in CASCADED:
                if attackers.named(attacker).suits(channels.named(name)):
                    yield self._cascade_unit(name, attacker)
        for source in ("docstrings", "written"):
            yield self._utility_unit(source)

    def _common(self, kind: str, **others: Any) -> dict[str, Any]:
        found = {"study": "fast", "protocol": PROTOCOL, "kind": kind, "model": self.identity, **others}
        return json.loads(json.dumps(found))

    @functools.cached_property
    def texts(self) -> str:
        """What identifies the written prompts."""
        return settings.checksum(settings.written())

    def _set_unit(self, wanted: Set, number: int) -> Unit:
        known = {"set": wanted, "search": verified.Settings(), "proposer": self.fast.proposer}
        known = {name: dataclasses.asdict(one) for name, one in known.items()}
        inputs = self._common("set", batch=number, texts=self.texts, **known)
        return Unit(f"sets/{_plain(wanted.name)}/batch-{number:02d}", inputs, lambda: self._invert(wanted, number))

    def _invert(self, wanted: Set, number: int) -> tuple[dict, dict[str, pd.DataFrame]]:
        """Invert a batch; what is set up once lies outside its seconds."""
        chosen = self.prompts(wanted)[number * wanted.batch : (number + 1) * wanted.batch]
        ids = torch.tensor([ids for *_, ids in chosen], device=self.backbone.model.device)
        reader, own = self.reader(wanted.convention), self.proposer(wanted.convention)
        verified.numerical_floor(reader)
        states = reader.states(ids)
        started = time.perf_counter()
        reader.states(ids)
        forward = time.perf_counter() - started
        started = time.perf_counter()
        found = verified.invert(reader, states, own)
        seconds = time.perf_counter() - started
        tokens = found.tokens.assign(true_id=ids[found.tokens.prompt.tolist(), found.tokens.position.tolist()].tolist())
        tokens["source"] = tokens.prompt.map({i: source for i, (_, source, _) in enumerate(chosen)})
        tokens["prompt"] = tokens.prompt.map({i: name for i, (name, *_) in enumerate(chosen)})
        values = {"seconds": seconds, "forward": forward, "read": found.read, "tolerance": found.tolerance}
        return values | {"setup": own.seconds}, {"tokens.parquet": tokens}

    def _peer_unit(self, wanted: Set, count: int) -> Unit:
        inputs = self._common("peer", set=dataclasses.asdict(wanted), prompts=count, texts=self.texts)
        return Unit(f"peers/{_plain(wanted.name)}", inputs, lambda: self._peer(wanted, count))

    def _peer(self, wanted: Set, count: int) -> tuple[dict, dict[str, pd.DataFrame]]:
        """The language model's own order, token by token behind the true prefix, the first one left out.

        Its expectations and the cache of the prefix lie outside its seconds.
        """
        reader, rows = self.reader(wanted.convention), []
        for name, _, ids in self.prompts(wanted)[:count]:
            prompt = torch.tensor([ids], device=reader.device)
            states = reader.states(prompt)[0]
            for position in range(1, wanted.tokens):
                cache = reader.read(prompt[:, :position])
                order = reader.next_probabilities(prompt[:, :position])[0].argsort(descending=True)
                started = time.perf_counter()
                chosen, tried, _ = continuous.verify(reader, cache, states[position], order, attackers.TOLERANCE)
                row = {"prompt": name, "position": position, "true_id": ids[position], "found_id": int(chosen)}
                rows.append(row | {"candidates": tried, "seconds": time.perf_counter() - started})
        return {"tokens": len(rows)}, {"tokens.parquet": pd.DataFrame(rows).assign(configuration=wanted.name)}

    def _proposal_unit(self, wanted: Set) -> Unit:
        known = {"set": dataclasses.asdict(wanted), "proposer": dataclasses.asdict(self.fast.proposer)}
        inputs = self._common("proposals", texts=self.texts, **known)
        return Unit(f"proposals/{_plain(wanted.name)}", inputs, lambda: self._proposals(wanted))

    def _proposals(self, wanted: Set) -> tuple[dict, dict[str, pd.DataFrame]]:
        """Where the true token stands at first sight, behind its true prefix, by each part of the proposal alone and by
        both."""
        reader, own, rows = self.reader(wanted.convention), self.proposer(wanted.convention), []
        for name, _, ids in self.prompts(wanted):
            true = torch.tensor(ids, device=reader.device)
            states = reader.states(true[None])[0]
            for position in range(1, len(ids)):
                here, before = states[position][None], states[position - 1][None]
                expected = reader.expected(before)
                if expected is None:
                    expected = reader.next_probabilities(true[None, :position])
                scores = {
                    "language model": torch.log(expected),
                    "states": own.scores(position, here, before, None),
                    "both": own.scores(position, here, before, own.word_prior(expected[0], true[:position])[None]),
                }
                for order, score in scores.items():
                    rank = int((score[0] > score[0, true[position]]).sum())
                    rows.append({"prompt": name, "position": position, "order": order, "rank": rank})
        return {"tokens": len(rows) // 3}, {"ranks.parquet": pd.DataFrame(rows).assign(configuration=wanted.name)}

    def _sweep_unit(self, name: str, prompt: int, positions, size: int | None) -> Unit:
        plan = self.fast.defences
        inputs = self._common(
            "sweep",
            prompt=prompt,
            positions=list(positions),
            candidates=size,
            tokens=plan.tokens,
            channels=plan.channels,
            draws=plan.draws,
            texts=self.texts,
        )

        def make() -> tuple[dict, dict[str, pd.DataFrame]]:
            own, whole = self.proposer(Convention()), size or len(self.backbone.tokenizer)
            ids = self._swept_ids()[prompt]
            found, margins = defences.sweep(own, ids, plan.channels, plan.draws, whole, prompt, positions)
            return {"rows": len(found)}, {"sweep.parquet": found, "margins.parquet": margins}

        return Unit(name, inputs, make)

    def _swept_ids(self) -> Tensor:
        plan = self.fast.defences
        like = Set("defences", "written", plan.prompts, plan.tokens, 1, None, "post")
        return torch.tensor([ids for *_, ids in self.prompts(like)], device=self.backbone.model.device)

    def _cascade_unit(self, name: str, attacker: str) -> Unit:
        plan = self.fast.defences
        inputs = self._common(
            "cascade",
            channel=name,
            attacker=attacker,
            prompts=plan.cascade.prompts,
            tokens=plan.tokens,
            candidates=plan.cascade.candidates,
            proposer=dataclasses.asdict(self.fast.proposer),
            texts=self.texts,
        )
        return Unit(f"cascade/{_plain(name)}/{_plain(attacker)}", inputs, lambda: self._cascade(name, attacker))

    def _cascade(self, name: str, attacker: str) -> tuple[dict, dict[str, pd.DataFrame]]:
        plan, channel = self.fast.defences.cascade, channels.named(name)
        reader, own = self.reader(Convention()), self.proposer(Convention())
        ids = self._swept_ids()[: plan.prompts]
        states = reader.states(ids)
        given = torch.stack([defences.released(channel, row, number, 0) for number, row in enumerate(states)])
        stages = tuple(stage for stage in (8, 64, 256) if stage < plan.candidates) + (plan.candidates,)
        proven = attacker == "aware" and not channel.likelihood  # else nothing is ever accepted: the tries are bounded
        bounded = verified.Settings(ahead=1, stages=stages, steps=0, scan=proven)
        found = verified.invert(reader, given, own, bounded, channel, attacker)
        truth = ids[found.tokens.prompt.tolist(), found.tokens.position.tolist()].tolist()
        tokens = found.tokens.assign(true_id=truth, channel=name, attacker=attacker)
        return {"read": found.read}, {"tokens.parquet": tokens}

    def _utility_unit(self, source: str) -> Unit:
        plan = self.fast.defences
        text = corpus.versions(plan.utility_packages) if source == "docstrings" else self.texts
        inputs = self._common("utility", source=source, text=text, tokens=plan.utility_tokens, channels=plan.channels)
        return Unit(f"utility/{source}", inputs, lambda: self._utility(source))

    def _utility(self, source: str) -> tuple[dict, dict[str, pd.DataFrame]]:
        ids, plan = self._held_out(source), self.fast.defences
        table = defences.utility(self.reader(Convention()), ids, plan.channels).assign(source=source)
        return {"tokens": ids.numel()}, {"utility.csv": table}

    def _held_out(self, source: str) -> Tensor:
        """Held-out sequences [n, 128]: docstrings of packages that no proposer was fitted on, or written prompts."""
        wanted = max(1, self.fast.defences.utility_tokens // defences.SEQUENCE)
        if source == "written":
            rows = [ids for *_, ids in self.encoded if len(ids) >= defences.SEQUENCE]
        else:
            texts = corpus.docstrings(self.fast.defences.utility_packages)
            rows = (self.backbone.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
            rows = (ids for ids in rows if len(ids) >= defences.SEQUENCE)
        kept = [ids[: defences.SEQUENCE] for ids, _ in zip(rows, range(wanted), strict=False)]
        if not kept:
            raise InversionError(f"utility: no text of {source} has {defences.SEQUENCE} tokens")
        return torch.tensor(kept)

    def place(self, unit: Unit) -> Path:
        """Where a unit lies."""
        return self.folder / "units" / unit.name

    def finished(self, unit: Unit) -> Result | None:
        """A unit's result if it is there.

        Raises:
            ResultError: it is damaged, or was made with other parameters.
        """
        return reusable(self.place(unit), unit.inputs)

    def compute(self, unit: Unit) -> Result:
        """A unit's result, made and kept where it is not there. A second process waits for the first."""
        folder = self.place(unit)
        with locked(folder):
            kept = self.finished(unit)
            if kept is None:
                started = time.perf_counter()
                values, tables = unit.make()
                record = provenance(str(accelerator().device), torch.get_num_threads(), time.perf_counter() - started)
                kept = write_result(folder, unit.inputs, values, record, writers(tables))
        return kept


def _plain(name: str) -> str:
    return name.replace(",", "").replace(" ", "-")


def run_study(fast: Fast, only: str | None = None) -> None:
    """Compute what is missing, or those units alone whose name starts with ``only``.

    Raises:
        config.ConfigError: no unit's name does.
        ResultError: a unit that is there is damaged, or was made with other parameters.
    """
    study = Study(fast)
    chosen = [unit for unit in study.units() if unit.name.startswith(only or "")]
    if not chosen:
        kinds = sorted({unit.name.rsplit("/", 1)[0] for unit in study.units()})
        raise config.ConfigError(f"only: got {only!r}, expected the beginning of one of {', '.join(kinds)}.")
    left = [unit for unit in chosen if study.finished(unit) is None]  # refuses what cannot be used before anything runs
    with threads(config.load_scale(fast.scale).threads), tqdm(left, unit="unit") as progress:
        for unit in progress:
            progress.set_description(unit.name)
            study.compute(unit)


def collect(fast: Fast) -> Result:
    """Write the study's tables from its units, as one result beside them.

    Raises:
        ResultError: a unit is missing, damaged, or of other parameters.
    """
    study, started = Study(fast), time.perf_counter()
    found = {unit.name: study.finished(unit) for unit in study.units()}
    missing = [name for name, result in found.items() if result is None]
    if missing:
        raise ResultError(
            f"{len(missing)} units are missing, {missing[0]} among them: run `make fast SCALE={fast.scale}`"
        )
    tokens = exact_tokens(study, found)
    tables = {
        "tokens.parquet": tokens,
        "prompts.parquet": exact_prompts(study, tokens, found),
        "peers.parquet": _stacked(found, "peers/", "tokens.parquet"),
        "proposals.parquet": _stacked(found, "proposals/", "ranks.parquet"),
        "sweep.parquet": _stacked(found, "sweep/", "sweep.parquet"),
        "margins.parquet": _stacked(found, "sweep/", "margins.parquet"),
        "swept.parquet": _stacked(found, "swept/", "sweep.parquet"),
        "swept_margins.parquet": _stacked(found, "swept/", "margins.parquet"),
        "cascade.parquet": _stacked(found, "cascade/", "tokens.parquet"),
        "utility.csv": _stacked(found, "utility/", "utility.csv"),
    }
    first = next(iter(found.values())).content["provenance"]
    computed = round(sum(result.content["provenance"]["seconds"] for result in found.values()), 1)
    record = provenance(
        str(accelerator().device), first["threads"], time.perf_counter() - started, computed_in=computed
    )
    values = {"vocabulary": len(study.backbone.tokenizer), "ordinary_ids": len(study.ordinary_ids)}
    values["width"] = study.reader(Convention()).width
    (study.folder / "result.json").unlink(missing_ok=True)
    return write_result(study.folder, study_inputs(study), values, record, writers(tables))


def _stacked(found: dict[str, Result], kind: str, name: str) -> pd.DataFrame:
    parts = [result.table(name) for unit, result in found.items() if unit.startswith(kind)]
    return pd.concat(parts, ignore_index=True)


def _of_set(found: dict[str, Result], wanted: Set) -> list[Result]:
    return [found[f"sets/{_plain(wanted.name)}/batch-{number:02d}"] for number in range(wanted.units)]


def exact_tokens(study: Study, found: dict[str, Result]) -> pd.DataFrame:
    """One row a token of every set, with what it is called."""
    parts = []
    for wanted in study.fast.sets:
        for number, result in enumerate(_of_set(found, wanted)):
            parts.append(result.table("tokens.parquet").assign(configuration=wanted.name, batch_number=number))
    tokens = pd.concat(parts, ignore_index=True)
    decode = study.backbone.tokenizer.decode
    names = {"token": "true_id", "found_token": "found_id", "guess": "guess_id"}
    spelled = {one: decode([one]) for column in names.values() for one in set(tokens[column])}
    return tokens.assign(**{name: tokens[column].map(spelled) for name, column in names.items()})


def exact_prompts(study: Study, tokens: pd.DataFrame, found: dict[str, Result]) -> pd.DataFrame:
    """One row a prompt of every set. ``seconds``, ``forward`` and ``read`` are its batch's, divided evenly."""
    rows = []
    for wanted in study.fast.sets:
        results = _of_set(found, wanted)
        own = tokens[tokens.configuration == wanted.name]
        for (number, prompt), part in own.groupby(["batch_number", "prompt"], sort=False):
            values, size = results[number].values, own[own.batch_number == number].prompt.nunique()
            part = part.sort_values("position")
            row = {"prompt": prompt, "source": part.source.iloc[0], "model": study.fast.model}
            row |= {"layer": "last" if wanted.layer is None else str(wanted.layer), "norm": wanted.norm}
            row |= {"n_tokens": len(part), "batch": size, "method": "verified", "configuration": wanted.name}
            row |= {"channel": "clean", "attacker": "aware"}
            row["exact_match"] = bool((part.found_id == part.true_id).all())
            row["similarity"] = diagnostics.similarity("".join(part.found_token), "".join(part.token))
            row["first_error"] = diagnostics.first_error(part.found_id.tolist(), part.true_id.tolist())
            row |= {name: values[name] / size for name in ("seconds", "forward", "read")}
            row |= {"candidates": int(part.candidates.sum()), "status": _least_certain(part.status)}
            rows.append(row | {"margin": part.margin.min(), "tolerance": values["tolerance"], "setup": values["setup"]})
    return pd.DataFrame(rows).astype({"first_error": "Int64"})


def _least_certain(status: pd.Series) -> str:
    return next(kind for kind in verified.UNCERTAIN_FIRST if (status == kind).any())


def study_inputs(study: Study) -> dict[str, Any]:
    """What the tables depend on."""
    units = {unit.name: unit.inputs for unit in study.units()}
    digest = hashlib.sha256(json.dumps(units, sort_keys=True).encode()).hexdigest()
    return {"study": "fast", "protocol": PROTOCOL, "model": study.identity, "units": len(units), "digest": digest}


def load(fast: Fast, source: str) -> Result:
    """The study where ``source`` says (see :class:`lib.config.Testbed`); ``auto``: this machine's, else committed.

    Raises:
        MissingResult: there is none.
        ResultError: it is damaged, or was made with other parameters.
    """
    study = Study(fast)
    folders = {"local": study.folder}
    if study.is_standard:
        folders["reference"] = paths.reference(fast.scale) / "fast"
    found = first_found(folders, source, study_inputs(study))
    if found is None:
        raise MissingResult(
            f"there is no study of exact inversion at {fast.scale} scale: run `make fast SCALE={fast.scale}`"
        )
    return found


def find(params: FastRun) -> Result:
    """The study: found where ``params.results`` says, or computed, unit by unit, in this process.

    Raises:
        ResultError: ``reference`` was asked for and there is none; or what is there is damaged or of other parameters.
    """

    def make() -> Result:
        run_study(params.fast)
        return collect(params.fast)

    return found_or_made(lambda source: load(params.fast, source), make, params.results)


def bench(params: FastRun) -> pd.DataFrame | None:
    """What `make bench` measured of every method on one bench set, on the machine that ``params.results`` says; None
    where it was not run: ``method, tokens, capped, right, mean, median, worst, candidates, overhead, set-up, repaid,
    ratio``."""
    folders = {"local": paths.local(params.fast.scale), "reference": paths.reference(params.fast.scale)}
    places = [folder / "bench" / BENCH for name, folder in folders.items() if params.results in (name, "auto")]
    found = next((place for place in places if place.exists()), None)
    return None if found is None else pd.read_csv(found)
