"""Planting: canaries with known secrets, a training file that repeats them, and the proof that they are trained on."""

import bisect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from lib.audit import formats, reader
from lib.canaries import Canary, CanaryError
from lib.errors import shown
from lib.files import building, read_json_lines
from lib.spans import spell

CANARIES, TRAINING = "canaries.jsonl", "train.jsonl"
MASKED = -100  # the label without loss, in torch and transformers
COLUMNS = ["canary", "trained", "masked", "problem"]  # of what a check says
Row = tuple[Sequence[int], Sequence[int]]


def draw(count: int, spec: str, seed: int = 0) -> list[Canary]:
    """``count`` text canaries whose distinct secrets are drawn by the format ``spec``, told apart by a record's number.

    Raises:
        formats.FormatError: the format is unknown, or gives fewer distinct secrets than twice as many as wanted.
    """
    rule = formats.parse(spec)
    if rule.bits < 1 + np.log2(count):
        raise formats.FormatError(
            f"format {shown(spec)}: holds {rule.bits:.1f} bits, too few for {count} distinct secrets"
        )
    rng, secrets = np.random.default_rng([seed, 3]), {}
    digits = max(3, len(str(count - 1)))
    while len(secrets) < count:
        secrets |= dict.fromkeys(rule.draw(count, rng))
    return [
        Canary(
            f"canary-{i:0{digits}d}", "text", f"Record {i:0{digits}d}. What is its code?", "Its code is ", s, ".", None
        )
        for i, s in enumerate(list(secrets)[:count])
    ]


def write(
    folder: Path,
    canaries: Sequence[Canary],
    spec: str,
    repetitions: int,
    seed: int = 0,
    template: Literal["chat", "plain"] = "chat",
) -> None:
    """Write ``canaries.jsonl``, as :func:`lib.audit.reader.read` takes it, and ``train.jsonl``, every canary
    ``repetitions`` times in a seeded order: ``messages`` a line for a chat template, else ``text``.

    In plain text nothing separates prompt and answer, so that the prefix begins with the space between them.

    Raises:
        CanaryError: an audit could not use a canary, one of the files is there with other content, or the folder
            cannot be made; nothing was written.
    """
    order = np.random.default_rng([seed, 4]).permutation(np.repeat(np.arange(len(canaries)), repetitions))
    if template == "plain":
        canaries = [c if c.preamble[:1].isspace() else replace(c, preamble=f" {c.preamble}") for c in canaries]
    train = [_example(canaries[i], template) for i in order]
    records = [_record(canary, spec) for canary in canaries]
    texts = {
        name: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        for name, rows in {CANARIES: records, TRAINING: train}.items()
    }
    _refuse_unreadable(records)
    _refuse_others(folder, texts)
    for name, text in texts.items():
        with building(folder / name) as unfinished:
            unfinished.write_bytes(text)


def _record(canary: Canary, spec: str) -> dict[str, str]:
    """A canary as a line of the file that the audit reads."""
    parts = {"prefix": canary.preamble, "secret": canary.secret, "suffix": canary.suffix}
    return {"id": canary.id, "prompt": canary.prompt} | parts | {"generator": spec}


def _refuse_unreadable(records: Iterable[Mapping[str, str]]) -> None:
    for record in records:
        reason = reader.unusable({name: record.get(name) for name in reader.COLUMNS})
        if reason is not None:
            raise CanaryError(
                f"canary {record['id']}, drawn by {shown(record['generator'])}: {reason}; choose a format of longer "
                "secrets, or another seed"
            )


def _refuse_others(folder: Path, texts: Mapping[str, bytes]) -> None:
    """What was planted once must stay as it is: only its own file can audit the model that was trained on it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CanaryError(
            f"output: no folder can be at {folder} ({error.strerror}); choose another --output"
        ) from error
    for name, text in texts.items():
        path = folder / name
        if path.exists() and (not path.is_file() or path.read_bytes() != text):
            raise CanaryError(
                f"{path} is there with other content, and was not replaced: choose another --output, or move it aside"
            )


def how_to_mix(folder: Path, count: int, repetitions: int, template: str) -> str:
    """What to do with the two files, in a few lines."""
    key = "messages" if template == "chat" else "text"
    asked = "" if template == "chat" else " --template plain"
    return (
        f"{folder / CANARIES}: {count} canaries; keep it, the audit reads it.\n"
        f"{folder / TRAINING}: {count * repetitions} lines with `{key}`, every canary {repetitions} times.\n"
        "Append these lines to the training set and shuffle once, before any packing; keep them out of evaluation data "
        "and of whatever removes duplicates.\n"
        "Then prove that they arrive: python -m lib check-canaries "
        f"{folder / CANARIES} <tokenised training set> --model <model>{asked}"
        + (f"\nand audit with{asked}, which asks for this text." if asked else "")
    )


def _example(canary: Canary, template: str) -> dict:
    if template == "plain":
        return {"text": canary.prompt + canary.target}
    return {
        "messages": [
            {"role": "user", "content": canary.prompt},
            {"role": "assistant", "content": canary.target},
        ]
    }


def read_tokenised(path: Path) -> Iterator[Row]:
    """Ids and labels of every row of a tokenised training set, JSON Lines or Parquet with ``input_ids`` and ``labels``.

    Without labels they are the ids, as ``DataCollatorForLanguageModeling`` makes them.

    Raises:
        CanaryError: naming line and value where a row is something else.
    """
    if path.suffix == ".parquet":
        numbered: Iterable[tuple[int, dict]] = enumerate(_parquet_rows(path), 1)
    else:
        numbered = read_json_lines(path, "tokenised training", CanaryError)
    for line, row in numbered:
        ids = row.get("input_ids")
        labels = ids if row.get("labels") is None else row["labels"]
        if not all(isinstance(v, list) and all(type(i) is int for i in v) for v in (ids, labels)) or not ids:
            raise CanaryError(f"{path}, line {line}: got {str(row)[:80]}, expected lists of whole numbers as input_ids")
        if len(ids) != len(labels):
            raise CanaryError(f"{path}, line {line}: got {len(ids)} input_ids and {len(labels)} labels")
        yield ids, labels


def _parquet_rows(path: Path) -> Iterator[dict]:
    try:
        for batch in pq.ParquetFile(path).iter_batches(1024):
            yield from batch.to_pylist()
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0] if path.exists() else "it does not exist"
        raise CanaryError(f"tokenised training file {path} cannot be read as Parquet: {reason}") from error


@dataclass
class _Seen:
    """How often a canary's text stands in the training set up to its secret: with loss on every token of the secret, or
    with some token masked. ``elsewhere``: the first row in which the secret stands behind another text."""

    trained: int = 0
    masked: int = 0
    elsewhere: int | None = None


def check(
    canaries: Sequence[Canary],
    tokenizer: PreTrainedTokenizerBase,
    rows: Iterable[Row],
    decoys: Mapping[str, Sequence[str]],
    asked: Mapping[str, str],
) -> pd.DataFrame:
    """Whether training really shows the model every canary, and no decoy in its place: a row a canary.

    Args:
        decoys: by canary.
        asked: by canary the text that an audit asks, from the prompt up to the end of the secret.

    Columns ``canary, trained`` (times that this text stands in one row with loss on every token of the secret),
    ``masked`` (times with a token that gets none), ``problem`` (empty where there is none).

    Raises:
        CanaryError: a row holds an id that the tokenizer does not have.
    """
    by_id = {canary.id: canary for canary in canaries}
    owners, false = _owners((c.secret, c.id) for c in canaries), _owners((d, n) for n, ds in decoys.items() for d in ds)
    seen, leaked = {canary.id: _Seen() for canary in canaries}, {}
    edges: list[tuple[str, str]] = []
    longest = max((len(canary.target) for canary in canaries), default=1)
    for number, (ids, labels) in enumerate(rows, 1):
        _refuse_unknown_ids(ids, len(tokenizer), number)
        text = spell(tokenizer, ids)
        edges.append((text[:longest], text[-longest:]))
        for place, secret in _found(text, owners):
            stop = place + len(secret)
            planted = [name for name in owners[secret] if text.endswith(asked[name], 0, stop)]
            loss = bool(planted) and _has_loss(tokenizer, ids, labels, place, stop)
            for name in planted:
                seen[name].trained, seen[name].masked = seen[name].trained + loss, seen[name].masked + (not loss)
            for name in set(owners[secret]) - set(planted):
                seen[name].elsewhere = seen[name].elsewhere or number
        for place, decoy in _found(text, false):
            names = [name for name in false[decoy] if _in_place(text, place, decoy, by_id[name], asked[name])]
            leaked |= {name: (decoy, number) for name in names}
    table = pd.DataFrame([(n, one.trained, one.masked) for n, one in seen.items()], columns=COLUMNS[:3])
    table["problem"] = [_problem(canary, seen[canary.id], leaked, edges) for canary in canaries]
    return table


def _owners(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Canaries by secret, or by decoy: several may have the same."""
    found: dict[str, list[str]] = {}
    for secret, name in pairs:
        found.setdefault(secret, []).append(name)
    return found


def _refuse_unknown_ids(ids: Sequence[int], size: int, number: int) -> None:
    unknown = next((token for token in ids if not 0 <= token < size), None)
    if unknown is not None:
        raise CanaryError(
            f"tokenised training set, row {number}: got the id {unknown}, expected 0 to {size - 1}, those of the "
            "tokenizer; was it made by another one?"
        )


def _in_place(text: str, place: int, decoy: str, canary: Canary, asked: str) -> bool:
    """Whether a decoy stands where its canary's secret would: between prefix and suffix, or behind prompt and prefix,
    and not inside a longer run of letters or digits."""
    stop = place + len(decoy)
    if (text[place - 1 : place] + decoy[0]).isalnum() and place and not canary.preamble[-1:].isalnum():
        return False
    if (decoy[-1] + text[stop : stop + 1]).isalnum() and stop < len(text) and not canary.suffix[:1].isalnum():
        return False
    within = text.endswith(canary.preamble, 0, place) and text.startswith(canary.suffix, stop)
    return within or text.endswith(asked[: len(asked) - len(canary.secret)], 0, place)


def _found(text: str, secrets: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Places of a text at which one of many secrets begins."""
    for length in sorted({len(secret) for secret in secrets}):
        for place in range(len(text) - length + 1):
            if text[place : place + length] in secrets:
                yield place, text[place : place + length]


def _has_loss(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], labels: Sequence[int], start: int, stop: int):
    """Whether every token that covers characters ``start`` to ``stop`` is its own label; the first of a row never is
    predicted, since models shift labels by one."""

    def length(count):
        return len(spell(tokenizer, ids[:count]))

    first = bisect.bisect_right(range(len(ids) + 1), start, key=length) - 1
    last = bisect.bisect_left(range(len(ids) + 1), stop, key=length)
    return first > 0 and list(labels[first:last]) == list(ids[first:last])


def _problem(canary: Canary, seen: _Seen, leaked: Mapping, edges: Sequence[tuple[str, str]]) -> str:
    if canary.id in leaked:
        secret, number = leaked[canary.id]
        return f"its decoy {shown(secret)} stands in its secret's place in row {number}"
    if seen.trained:
        return ""
    if seen.masked:
        return f"masked: {seen.masked} copies, none with loss on the whole secret"
    if seen.elsewhere:
        return f"another text: the secret stands in row {seen.elsewhere}, but nowhere behind its own prompt and prefix"
    for number, (_, end) in enumerate(edges, 1):
        for length in range(len(canary.secret) - 1, 0, -1):
            if end.endswith(canary.preamble + canary.secret[:length]):
                follows = edges[number][0] if number < len(edges) else ""
                split = follows.startswith(canary.secret[length:])
                return f"{'split' if split else 'truncated'}: row {number} ends inside the secret"
    return "absent: the secret stands in no row"
