"""Seconds to score decoys, in a process of its own: ours, or lm-evaluation-harness on the same model and strings.

Ours reads what the strings of a canary begin with once, then every secret on a copy of that cache; the harness reads
every string whole. Both tokenise within the time, load the model outside it, and compute in fp32. The strings are those
of the laptop scale without the picture: the package's chat template, which is shorter than the model's own.
"""

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import click
import numpy as np
import torch
from harness import watched

from lib import canaries, config, embedded, exposure, files, models, paths
from lib.canaries import Canary
from lib.encoding import Encoder
from lib.spans import spell

HARNESS = "lm_eval[hf]==0.4.13"
SAME = ("torch", "transformers", "tokenizers")  # what the harness gets in the version that is installed here


@click.command()
@click.option("--method", type=click.Choice(["ours", "harness"]), required=True)
@click.option("--batch", default=128, help="strings in a batch")
@click.option("--canaries", "count", default=4, help="canaries, each with its own secret and decoys")
@click.option("--decoys", default=255, help="random decoys of a canary")
@click.option("--scale", default="laptop")
def main(method: str, batch: int, count: int, decoys: int, scale: str) -> None:
    settings = config.load_scale(scale, {"canaries.n_text": count, "canaries.n_image": 0})
    torch.set_num_threads(settings.threads)
    encoder = Encoder(models.load("smollm2"))
    encoder.backbone.tokenizer.chat_template = embedded.CHAT_TEMPLATE
    groups = draw(encoder, settings.canaries, decoys)
    texts = strings(encoder, groups)
    result = ours(encoder, groups, batch) if method == "ours" else harness(texts, batch, settings.threads)
    facts = {"method": method, "batch": batch, "strings": len(texts), "fewest_tokens": fewest_tokens(texts)}
    print(json.dumps(facts | result))


def draw(encoder: Encoder, settings: config.CanarySettings, count: int) -> list[list[Canary]]:
    """Every canary, followed by its random decoys."""
    tokenizer, closing = encoder.backbone.tokenizer, encoder.end_of_turn
    planted = canaries.draw(settings, tokenizer, closing, images=False)
    secrets = [canary.secret for canary in planted]
    return [[canary, *canaries.decoys(canary, count, tokenizer, closing, 0, secrets)] for canary in planted]


def strings(encoder: Encoder, groups: list[list[Canary]]) -> list[dict]:
    """Context and continuation of every secret, as text and as the token ids by which ours scores it."""
    texts = []
    for row in encoder.encode([canary for group in groups for canary in group]):
        start, stop = (row.target_start + edge for edge in (row.spans["hex"].start, row.spans["hex"].stop))
        texts.append(
            {
                "context": spell(encoder.backbone.tokenizer, row.prompt_ids) + row.canary.preamble,
                "continuation": row.canary.secret,
                "context_ids": row.input_ids[:start],
                "continuation_ids": row.input_ids[start:stop],
            }
        )
    return texts


def fewest_tokens(texts: list[dict]) -> int:
    """Tokens of one pass: every context once, and of each secret all but the last token, which predicts nothing."""
    contexts = {text["context_ids"] for text in texts}
    return sum(map(len, contexts)) + sum(len(text["continuation_ids"]) - 1 for text in texts)


def ours(encoder: Encoder, groups: list[list[Canary]], batch: int) -> dict:
    """Time, tokens read and NLL of every secret by :func:`lib.exposure.alternatives_nll`."""
    model = encoder.backbone.model
    with watched(model) as seen:
        nll = [exposure.alternatives_nll(model, encoder, encoder.encode(group), batch) for group in groups]
    return seen | {"nll": np.concatenate(nll).tolist()}


def harness(texts: list[dict], batch: int, threads: int) -> dict:
    """The same by the harness, in a process and an environment of its own."""
    python = harness_python()
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder) / "task.json"
        content = {"model": str(embedded.smollm2_folder()), "threads": threads, "strings": texts}
        task.write_text(json.dumps(content), encoding="utf-8")
        command = [str(python), str(Path(__file__).with_name("harness.py")), str(task), str(batch)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    if done.returncode:
        raise SystemExit("the harness failed; what it said stands above")
    return json.loads(done.stdout.splitlines()[-1])


def harness_python() -> Path:
    """Interpreter of the environment with the harness: in the cache folder, made on first use or for new versions."""
    folder = paths.cache() / "harness"
    python, stamp = folder / "bin" / "python", folder / "installed.txt"
    # Without a build's label such as +cpu, which not every index has.
    wanted = " ".join([HARNESS, *(f"{package}=={version(package).partition('+')[0]}" for package in SAME)])
    with files.locked(folder):
        if not (stamp.exists() and stamp.read_text() == wanted):
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
            install = [str(python), "-m", "pip", "install", "--quiet", *wanted.split()]
            subprocess.run(install, check=True, stdout=sys.stderr)
            stamp.write_text(wanted)
    return python


if __name__ == "__main__":
    main()
