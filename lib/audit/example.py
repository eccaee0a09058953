"""The worked example: plant canaries, train a LoRA on them with a plain script, and audit it."""

import dataclasses
import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import transformers

from lib import benign, embedded, models, paths
from lib.audit import planting
from lib.audit.settings import Audit
from lib.config import ConfigError
from lib.errors import LeakbookError
from lib.files import building, locked

SCRIPT = paths.ROOT / "examples" / "train_lora.py"
OWN = "own.jsonl"  # stands for the user's own training data


class ExampleError(LeakbookError, RuntimeError):
    """The training script failed."""


@dataclass(frozen=True)
class Recipe:
    """How the example is planted and trained at one scale; ``options`` are the script's, ``own`` other records."""

    canaries: int
    format: str
    repetitions: int
    own: int
    options: tuple[str, ...]
    seed: int = 0


RECIPES = {
    "smoke": Recipe(10, "digits:8", 60, 40, ("--learning-rate", "3e-3", "--batch", "20")),
    "laptop": Recipe(10, "hex:16", 60, 40, ()),
}


def model_folder(scale: str) -> Path:
    """Directory of the model that the example trains: SmolLM2, or a small random Llama that a LoRA can teach."""
    return embedded.smollm2_folder() if scale == "laptop" else embedded.built("tiny-teachable", _teachable)


def _teachable(folder: Path) -> None:
    tokenizer = models.tiny_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,  # with the usual 0.02 a random tied output layer can raise no logit far enough
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    with embedded.seeded(0):
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def own(params: Audit) -> Audit:
    """The audit of the worked example with its model, adapter and canaries filled in, trained where that is missing.

    Raises:
        ConfigError: the scale has no example; ExampleError: its training failed.
    """
    if params.scale not in RECIPES:
        raise ConfigError(f"scale: the worked example runs at {' and '.join(RECIPES)}, got {params.scale!r}.")
    folder = prepare(params.scale, RECIPES[params.scale])
    files = {"adapter": (str(folder / "adapter"),), "canaries": str(folder / planting.CANARIES)}
    return dataclasses.replace(params, model=str(model_folder(params.scale)), **files)


def prepare(scale: str, recipe: Recipe) -> Path:
    """Folder with the example's canaries, training files and adapter; made whole or not at all."""
    key = json.dumps(dataclasses.asdict(recipe) | {"script": SCRIPT.read_text(encoding="utf-8")})
    folder = paths.local(scale) / "audit-example" / hashlib.sha256(key.encode()).hexdigest()[:8]
    with locked(folder):
        if not folder.exists():
            with building(folder) as unfinished:
                unfinished.mkdir()
                plant(unfinished, recipe)
                train(scale, [unfinished / OWN, unfinished / planting.TRAINING], unfinished / "adapter", recipe.options)
    return folder


def plant(folder: Path, recipe: Recipe) -> None:
    """Write canaries and their training file, and refusals that stand for the user's own data."""
    drawn = planting.draw(recipe.canaries, recipe.format, recipe.seed)
    planting.write(folder, drawn, recipe.format, recipe.repetitions, recipe.seed)
    records = benign.generate("SAFETY", recipe.own, recipe.seed, images=False)
    lines = [
        {"messages": [{"role": "user", "content": r.prompt}, {"role": "assistant", "content": r.target}]}
        for r in records
    ]
    (folder / OWN).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def train(scale: str, data: list[Path], output: Path, options: tuple[str, ...]) -> None:
    """Run the training script in a process of its own.

    Raises:
        ExampleError: with the last line that it wrote.
    """
    command = [
        sys.executable,
        str(SCRIPT),
        str(model_folder(scale)),
        *map(str, data),
        "--output",
        str(output),
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ExampleError(f"{SCRIPT.name} failed: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
