"""Twin injections: two models trained alike on the same records, each record with one of two secrets, by a coin.

The secret that a model was not trained on is the exact decoy: same question, same wording, same draw, and its twin was
trained on it. What a probe says of it is what the probe says of a secret nobody planted.
"""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from lib import canaries, config, exposure, extraction, models, paths, probes, runs, training
from lib.adapters import merge
from lib.canaries import Canary
from lib.collection import writers
from lib.config import CanarySettings, Scale, StoppedSettings
from lib.encoding import Encoded, Encoder
from lib.files import locked
from lib.plan import Scorecard
from lib.results import Result, provenance, reusable, write_result

PROTOCOL = 1  # raised by hand when results of twins would change
MODELS = (1, 2)
SECRETS = ("a", "b")
DRAW_SEED = 100  # added to the scale's canary seed: no twin has a canary's secret stream


def folder(scale: str, model: int) -> Path:
    """Where this machine's result of a twin lies."""
    return paths.local(scale) / "scorecard" / "twins" / f"model-{model}"


def inputs(settings: Scorecard, identity: str, model: int) -> dict[str, Any]:
    """What a twin is made from; the seed of its LoRA is that of the scale's injection."""
    scale = config.load_scale(settings.scale)
    found = {
        "study": "twin",
        "protocol": PROTOCOL,
        "twin": model,
        "settings": dataclasses.asdict(settings.own.twins),
        "canaries": dataclasses.asdict(_drawn_like(scale, settings)),
        "lora": [scale.injection.rank, scale.injection.alpha, scale.injection.warmup_steps, scale.injection.precision],
        "model": identity,
    }
    return json.loads(json.dumps(found))


def finished(settings: Scorecard, identity: str, model: int) -> Result | None:
    """This machine's result of a twin if it is there.

    Raises:
        results.ResultError: it is damaged, or was made with other parameters.
    """
    return reusable(folder(settings.scale, model), inputs(settings, identity, model))


def run(settings: Scorecard, model: int) -> Result:
    """Train one twin and ask it for both secrets of every record, at every stop."""
    scale = config.load_scale(settings.scale)
    identity = models.identity(scale.backbone, scale.revision)
    with locked(folder(settings.scale, model)), training.threads(scale.threads):
        return finished(settings, identity, model) or _compute(settings, scale, identity, model)


def _drawn_like(scale: Scale, settings: Scorecard) -> CanarySettings:
    own = scale.canaries
    return dataclasses.replace(own, n_text=settings.own.twins.records, n_image=0, seed=own.seed + DRAW_SEED)


def draw(encoder: Encoder, like: CanarySettings) -> tuple[dict[str, list[Canary]], np.ndarray]:
    """Every record with its secret ``a`` and with its secret ``b``; and for each whether model 1 learns ``a`` [n]."""
    tokenizer, closing = encoder.backbone.tokenizer, encoder.end_of_turn
    first = canaries.draw(like, tokenizer, closing, encoder.backbone.takes_images)
    rng = np.random.default_rng([like.seed, 6])
    taken = [canary.secret for canary in first]
    others = canaries.draw_secrets(first[0], len(first), canaries.fitting(like), tokenizer, closing, rng, taken)
    second = [dataclasses.replace(canary, secret=secret) for canary, secret in zip(first, others, strict=True)]
    return dict(zip(SECRETS, (first, second), strict=True)), rng.integers(2, size=len(first)).astype(bool)


def _compute(settings: Scorecard, scale: Scale, identity: str, model: int) -> Result:
    started, twins = time.perf_counter(), settings.own.twins
    encoder = Encoder(models.load(scale.backbone, scale.revision, device=training.accelerator().device))
    drawn, coin = draw(encoder, _drawn_like(scale, settings))
    rows = {name: encoder.encode(records) for name, records in drawn.items()}
    learns_a = coin if model == 1 else ~coin
    taught = [rows["a" if a else "b"][i] for i, a in enumerate(learns_a)]
    lora = StoppedSettings(
        rank=scale.injection.rank,
        alpha=scale.injection.alpha,
        learning_rate=twins.learning_rate,
        warmup_steps=scale.injection.warmup_steps,
        batch_size=twins.batch_size,
        max_steps=twins.steps,
        check_every=25,
        seed=scale.injection.seed,
        precision=scale.injection.precision,
        stop_steps=twins.stops,
    )
    adapters = runs.trained(scale, encoder, taught, lora, PROTOCOL)
    tables = []
    for stop in tqdm(twins.stops, desc=f"twin {model}", unit="stop"):
        asked = Encoder(merge(encoder.backbone, adapters.adapter(stop)))
        table = _asked(asked, rows, scale.evaluation_batch)
        table["exposure"] = np.nan
        if stop == twins.decoy_stop:
            bits = _exposures(asked, rows, twins.decoy_records, twins.decoys, scale.canaries.seed)
            keys = list(zip(table.record, table.secret, strict=True))
            table["exposure"] = [bits.get(key, np.nan) for key in keys]
        tables.append(table.assign(stop=stop))
    table = pd.concat(tables, ignore_index=True).assign(model=model)
    table["trained"] = (table.secret == "a").to_numpy() == np.tile(np.repeat(learns_a, len(SECRETS)), len(twins.stops))
    results = {"model": model, "records": twins.records, "trained_a": int(learns_a.sum())}
    results["last_loss"] = round(float(adapters.log.loss.iloc[-1]), 6)
    seconds = {"training": adapters.seconds}
    record = provenance(
        str(training.accelerator().device),
        scale.threads,
        time.perf_counter() - started,
        training_precision=adapters.precision,
        evaluation_dtype="float32",
        seconds_of=seconds,
    )
    where = folder(settings.scale, model)
    return write_result(where, inputs(settings, identity, model), results, record, writers({"scores.parquet": table}))


def _asked(encoder: Encoder, rows: dict[str, list[Encoded]], batch_size: int) -> pd.DataFrame:
    """What the probes read of every record's two secrets: one below the other, record by record."""
    tables = []
    for name, encoded in rows.items():
        scores = probes.token_nll(encoder.backbone.model, encoder, encoded, batch_size)

        table = pd.DataFrame({"record": scores.ids, "secret": name})
        table["nll_mean20"] = scores.window_mean(probes.WINDOW).values.to_numpy()
        tokens = np.array([len(row.spans["hex"]) for row in encoded])
        table["nll_hex"] = scores.span_mean("hex").values.to_numpy() * tokens
        table["nll_full"] = np.nansum(scores.nll, axis=1)
        table["log_p"] = extraction.log_probability(scores, with_preamble=True)
        table["hit_full"], table["hit_forced"] = scores.argmax_hits(), scores.argmax_hits("hex")
        tables.append(table)
    return pd.concat(tables).sort_values(["record", "secret"], kind="stable").reset_index(drop=True)


def _exposures(
    encoder: Encoder, rows: dict[str, list[Encoded]], records: int, decoys: int, seed: int
) -> dict[tuple[str, str], float]:
    """Exposure of both secrets of the first ``records`` records among the same random decoys, in bits."""
    taken = [row.canary.secret for part in rows.values() for row in part]
    tokenizer, bits = encoder.backbone.tokenizer, {}
    for a, b in tqdm(list(zip(rows["a"], rows["b"], strict=True))[:records], desc="decoys", unit="record"):
        drawn = canaries.decoys(a.canary, decoys, tokenizer, encoder.end_of_turn, seed, taken)
        nll = exposure.alternatives_nll(encoder.backbone.model, encoder, [a, b, *encoder.encode(drawn)])
        for i, name in enumerate(SECRETS):
            rank = 1 + int((nll[2:] <= nll[i]).sum())
            bits[a.canary.id, name] = float(np.log2((decoys + 1) / rank))
    return bits
