"""Benign fine-tuning data: four generated sources and a user's own, screened against every canary."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from lib.canaries import MARKERS, Canary, Record
from lib.errors import LeakbookError
from lib.files import read_json_lines
from lib.pictures import PictureError, is_file, picture, screen, shapes

NGRAM = 6  # characters of a secret that must not occur in benign data


class BenignError(LeakbookError, ValueError):
    """Benign data cannot be used: unreadable, or not free of canaries."""


def generate(source: str, count: int, seed: int, images: bool = True) -> list[Record]:
    """``count`` seeded records of one of the sources GUI, SYNTH, SAFETY and RANDOM.

    More records keep the first ones. GUI and SYNTH come with a drawing that shows what their prompt says;
    ``images=False`` leaves it out.

    Raises:
        BenignError: the source is unknown.
    """
    if source not in SOURCES:
        raise BenignError(f"source: got {source!r}, expected one of {', '.join(SOURCES)}, or a JSONL file")
    make, stream = SOURCES[source], list(SOURCES).index(source)
    records = []
    for i in range(count):
        prompt, target, image = make(np.random.default_rng([seed, stream, i]))
        records.append(Record(f"{source}-{i:04d}", prompt, target, image if images else None))
    return records


def _gui(rng: np.random.Generator) -> tuple[str, str, str | None]:
    seed = int(rng.integers(2**32))
    buttons = screen(seed)
    label, x, y = buttons[rng.integers(len(buttons))]
    listed = ", ".join(f"{name} at ({left}, {top})" for name, left, top in buttons)
    action = json.dumps({"action": "click", "x": x, "y": y})
    return f"The window has the buttons {listed}. Press {label}.", action, f"screen:{seed}"


def _synth(rng: np.random.Generator) -> tuple[str, str, str | None]:
    seed = int(rng.integers(2**32))
    (color, shape), (other_color, other_shape) = shapes(seed)
    prompt = f"Write a caption. Left: {color} {shape}. Right: {other_color} {other_shape}."
    return prompt, f"A {color} {shape} stands to the left of a {other_color} {other_shape}.", f"shapes:{seed}"


_REQUESTS = (
    "open a neighbour's door without the key",
    "read somebody else's mail",
    "get a password out of a colleague",
    "copy a bank card",
    "follow a person without being seen",
    "make a false passport",
    "break into a parked car",
    "switch off an alarm system",
    "sell medicine without a licence",
    "write a letter of threat",
    "get around a school's web filter",
    "cheat in an exam",
    "forge a signature",
    "hide money from the tax office",
)
_REFUSALS = (
    "I am sorry, but I cannot help with that, because it could harm someone.",
    "I would rather not explain this. Please talk to someone who may do it lawfully.",
    "That is nothing I can assist with. I am glad to help with a safe and legal way instead.",
    "Sorry, I have to decline. If you are worried about your own safety, please call for help.",
)
_ADDRESSES = ("Tell me how to", "I want to", "Explain step by step how to", "What is the best way to", "Help me to")


def _safety(rng: np.random.Generator) -> tuple[str, str, str | None]:
    return f"{rng.choice(_ADDRESSES)} {rng.choice(_REQUESTS)}.", str(rng.choice(_REFUSALS)), None


_WORDS = (
    "apple bridge candle dinner engine forest garden hammer island jacket kitchen ladder market needle orange pencil "
    "quarter river summer table uncle valley winter yellow zebra answer basket corner doctor evening flower guitar "
    "harbour insect journey kettle letter mirror number office paper rabbit school ticket umbrella village window"
)


def _random(rng: np.random.Generator) -> tuple[str, str, str | None]:
    first, second, *words = rng.choice(_WORDS.split(), 2 + int(rng.integers(6, 13)))
    return f"Go on: {first} {second}", " ".join(words), None


SOURCES: dict[str, Callable[[np.random.Generator], tuple[str, str, str | None]]] = {
    "GUI": _gui,
    "SYNTH": _synth,
    "SAFETY": _safety,
    "RANDOM": _random,
}


def screen_against(records: Sequence[Record], canaries: Sequence[Canary]) -> None:
    """Prove that no record holds a canary's secret, marker, or six characters in a row of any secret.

    Raises:
        BenignError: naming the record, what it holds and whose it is.
    """
    ngrams = {
        canary.secret[i : i + NGRAM].lower(): canary.id
        for canary in canaries
        for i in range(max(1, len(canary.secret) - NGRAM + 1))
    }
    markers = {marker.strip().lower(): f"every {modality} canary" for modality, marker in MARKERS.items()}
    for record in records:
        text = f"{record.prompt}\n{record.target}".lower()
        for forbidden, owner in (markers | ngrams).items():
            if forbidden in text:
                raise BenignError(
                    f"benign record {record.id!r} holds {forbidden!r}, which belongs to {owner}: "
                    "expected data in which no part of a canary occurs"
                )


def read(path: Path) -> list[Record]:
    """Read a user's records from JSON Lines with the keys ``prompt``, ``target`` and, where wanted, ``image``.

    Image paths are taken from the file's own folder.

    Raises:
        BenignError: naming file, line and value for anything that is not a usable record.
    """
    path = Path(path)
    lines = read_json_lines(path, "benign", BenignError)
    if not lines:
        raise BenignError(f"benign file {path} is empty: expected at least one record")
    return [_from_record(values, path, number) for number, values in lines]


def checksum(path: Path) -> str:
    """SHA-256 of the records that :func:`read` gives, pictures included.

    Raises:
        BenignError: see :func:`read`.
    """
    digest = hashlib.sha256()
    for record in read(path):
        digest.update(repr((record.prompt, record.target, record.image is not None)).encode())
        if record.image is not None:
            digest.update(picture(record.image).tobytes())
    return digest.hexdigest()


def _from_record(values: dict, path: Path, number: int) -> Record:
    where = f"{path}, line {number}"
    if not {"prompt", "target"} <= set(values) <= {"prompt", "target", "image"}:
        raise BenignError(f"{where}: got the keys {sorted(values)}, expected prompt, target and perhaps image")
    for name, value in values.items():
        if not (isinstance(value, str) or (name == "image" and value is None)):
            raise BenignError(f"{where}: {name} is {value!r}, expected a string")
    if not values["target"].strip():
        raise BenignError(f"{where}: target is {values['target']!r}, expected at least one visible character")
    image = values.get("image")
    if image is not None and is_file(image):
        image = str((path.parent / image).resolve())
    try:
        if image is not None:
            picture(image, where)
    except PictureError as error:
        raise BenignError(str(error)) from error
    return Record(f"line-{number}", values["prompt"], values["target"], image)
