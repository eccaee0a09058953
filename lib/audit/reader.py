"""Canary files of any origin: JSON Lines or CSV, every row used, or named with the reason why it is not."""

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lib.audit import formats
from lib.canaries import Canary, CanaryError
from lib.errors import cut, shown
from lib.files import decoded, read_json_lines
from lib.pictures import PictureError, is_file, picture

COLUMNS = ("id", "prompt", "target", "prefix", "secret", "suffix", "image", "generator")
ALIASES = {"preamble": "prefix"}  # what the testbed's own files call it
UNUSED = ("modality",)  # theirs, too: an audit reads it off the image
JSON_ENDINGS = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True)
class Item:
    """A canary of a file, the line on which it stands, and the format it was drawn by, where the file states one."""

    canary: Canary
    line: int
    generator: str | None


@dataclass(frozen=True)
class Skipped:
    """A row that is not audited, and why."""

    line: int
    id: str
    reason: str


@dataclass(frozen=True)
class CanaryFile:
    """What a file holds: the canaries that can be used, and the rows that cannot."""

    path: Path
    items: tuple[Item, ...]
    skipped: tuple[Skipped, ...]


def read(path: Path | str) -> CanaryFile:
    """Read canaries. A row has ``id``, ``prompt``, and either ``prefix``, ``secret`` and ``suffix`` or a ``target``.

    Prefix and suffix may be left out. In a target the ``secret`` is looked for; without one the whole target is the
    secret. ``image`` is a path, taken from the file's folder, or a picture that :func:`lib.pictures.picture` draws.
    ``generator`` states the format (:func:`lib.audit.formats.parse`) from which the secret was drawn at random: only
    then are ranks among decoys p-values. A file that is not what it should be is refused as a whole; a row whose
    content cannot be audited (an empty secret, say) is among ``skipped``.

    Raises:
        CanaryError: naming file, line and value: not UTF-8, no JSON Lines or CSV, an unknown or missing column, a value
            that is no string, an unknown generator; or no row that can be used.
    """
    path = Path(path)
    records = list(_records(path))
    items: list[Item] = []
    skipped: list[Skipped] = []
    seen: dict[str, dict] = {"id": {}, "text": {}}
    for line, record in records:
        fields = _fields(record, f"{path}, line {line}")
        reason = unusable(fields) or _repeated(fields, line, seen)
        if reason is None:
            item = Item(_canary(fields, path.parent), line, fields["generator"])
            reason = _unreadable_picture(item.canary)
        if reason is None:
            items.append(item)
        else:
            skipped.append(Skipped(line, _writable(fields["id"]), reason))
    if not items:
        why = f"; line {skipped[0].line}: {skipped[0].reason}" if skipped else ""
        raise CanaryError(f"{path}: no canary to audit among {len(records)} rows{why}")
    return CanaryFile(path, tuple(items), tuple(skipped))


def _records(path: Path) -> Iterator[tuple[int, dict]]:
    if path.suffix == ".csv":
        yield from _csv_rows(path)
    elif path.suffix in JSON_ENDINGS:
        yield from read_json_lines(path, "canary", CanaryError)
    else:
        raise CanaryError(f"canary file {path}: got the ending {shown(path.suffix)}, expected .jsonl or .csv")


def _csv_rows(path: Path) -> Iterator[tuple[int, dict]]:
    """Rows with the line on which each ends; an empty cell is a column left out, but for prompt and secret."""
    text = io.StringIO(decoded(path, "canary", CanaryError), newline="")
    limit = csv.field_size_limit(max(csv.field_size_limit(), len(text.getvalue())))  # a long cell is its row's matter
    rows = csv.reader(text, strict=True)
    try:
        header = next((row for row in rows if any(cell.strip() for cell in row)), [])
        if len(set(header)) < len(header):
            where = f"{path}, line {rows.line_num}"
            raise CanaryError(f"{where}: got the columns {cut(', '.join(header))}, expected every one once")
        for row in rows:
            if not row:
                continue
            if len(row) != len(header):
                raise CanaryError(f"{path}, line {rows.line_num}: got {len(row)} values, expected {len(header)}")
            record = dict(zip(header, row, strict=True))
            yield rows.line_num, {k: v for k, v in record.items() if v or k in ("id", "prompt", "secret")}
    except csv.Error as error:
        raise CanaryError(f"{path}, line {rows.line_num}: not CSV ({error})") from error
    finally:
        csv.field_size_limit(limit)


def _fields(record: dict, where: str) -> dict[str, str | None]:
    """Every column of a row by its name, None where it is left out."""
    aliased = [name for name in record if name in ALIASES and ALIASES[name] in record]
    if aliased:
        raise CanaryError(f"{where}: got {ALIASES[aliased[0]]} and {aliased[0]}, expected one: they name the same part")
    if record.get("modality") == "image" and not record.get("image"):
        raise CanaryError(f"{where}: modality is 'image' and image is {record.get('image')!r}, expected a picture")
    record = {ALIASES.get(name, name): value for name, value in record.items() if name not in UNUSED}
    unknown = [name for name in record if name not in COLUMNS]
    if unknown:
        raise CanaryError(f"{where}: unknown column {shown(unknown[0])}; known are {', '.join(COLUMNS)}")
    fields = {name: record.get(name) for name in COLUMNS}
    for name, value in fields.items():
        if value is not None and not isinstance(value, str):
            raise CanaryError(f"{where}: {name} is {shown(value)}, expected a string (a number loses leading zeros)")
    missing = [name for name in ("id", "prompt") if fields[name] is None]
    if fields["target"] is None and fields["secret"] is None:
        missing.append("secret (or target)")
    if missing:
        raise CanaryError(
            f"{where}: the column {missing[0]} is missing; the row has {cut(', '.join(record)) or 'none'}"
        )
    both = [name for name in ("prefix", "suffix") if fields["target"] is not None and fields[name] is not None]
    if both:
        raise CanaryError(f"{where}: got target and {both[0]}, expected either a target or prefix, secret and suffix")
    if fields["generator"] is not None:
        try:
            formats.parse(fields["generator"])
        except formats.FormatError as error:
            raise CanaryError(f"{where}: {error}") from error
    return fields


def _parts(fields: Mapping[str, str | None]) -> tuple[str, str, str]:
    """Prefix, secret and suffix of a row that :func:`unusable` found usable."""
    if fields["target"] is None:
        return fields["prefix"] or "", fields["secret"], fields["suffix"] or ""
    secret = fields["target"] if fields["secret"] is None else fields["secret"]
    prefix, _, suffix = fields["target"].partition(secret)
    return prefix, secret, suffix


def unusable(fields: Mapping[str, str | None]) -> str | None:
    """Why a row, every one of :data:`COLUMNS` with its text or None, cannot be audited; None where it can."""
    for name, value in fields.items():
        if value is not None and not is_unicode(value):
            return f"{name} {shown(value)} is not valid Unicode text (half of a surrogate pair)"
    secret, target = fields["secret"], fields["target"]
    secret = target if secret is None else secret
    if not secret.strip():
        return f"the secret is {shown(secret)}, expected at least one visible character"
    if target is not None and target.count(secret) != 1:
        found = "does not occur" if secret not in target else f"occurs {target.count(secret)} times"
        return f"the secret {shown(secret)} {found} in the target {shown(target)}, expected once"
    prefix, _, suffix = _parts(fields)
    for name, text in {"prompt": fields["prompt"], "prefix": prefix, "suffix": suffix}.items():
        if secret in text:
            return f"the secret {shown(secret)} occurs in its own {name}, so repeating it shows no memory"
    if fields["generator"] is not None and not formats.parse(fields["generator"]).matches(secret):
        return f"the secret {shown(secret)} cannot have been drawn by its generator {shown(fields['generator'])}"
    return None


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8: it holds no half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _writable(text: str) -> str:
    """The text, half of a surrogate pair written out, so that a report can hold it."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _repeated(fields: dict[str, str | None], line: int, seen: dict[str, dict]) -> str | None:
    """Whether id or content of a row stood on an earlier line; if not, both are now remembered."""
    content = (fields["prompt"], fields["image"], "".join(_parts(fields)))
    for name, key in {"id": fields["id"], "text": content}.items():
        if key in seen[name]:
            what = f"the id {shown(key)}" if name == "id" else "the same prompt, image and target"
            return f"{what} stands on line {seen[name][key]} already"
    seen["id"][fields["id"]] = seen["text"][content] = line
    return None


def _canary(fields: dict[str, str | None], folder: Path) -> Canary:
    prefix, secret, suffix = _parts(fields)
    image = fields["image"]
    if image is not None and is_file(image):
        image = str((folder / image).resolve())
    modality = "text" if image is None else "image"
    return Canary(fields["id"], modality, fields["prompt"], prefix, secret, suffix, image)


def _unreadable_picture(canary: Canary) -> str | None:
    try:
        if canary.image is not None:
            picture(canary.image, "image")
    except PictureError as error:
        return str(error)
    return None
