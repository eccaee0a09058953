"""Results: where they lie, how they appear whole or not at all, and when one may be used again.

A result is a folder whose ``result.json`` was written last. Its hash covers the resolved parameters, the identity of
model and data, and the study's protocol number; versions, threads and CPU are recorded beside it and never hashed.
"""

import hashlib
import importlib.metadata
import json
import platform
import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import torch

from lib import paths
from lib.errors import LeakbookError
from lib.files import building, sha256

LONGEST = 300  # characters of one difference in a message
RECORDED_VERSIONS = ("torch", "transformers", "tokenizers", "peft", "accelerate", "numpy", "pandas")


class ResultError(LeakbookError, RuntimeError):
    """A result folder is damaged, was made with other parameters, or does not exist."""


class MissingResult(ResultError):
    """There is no such result, damaged or otherwise."""


@dataclass(frozen=True)
class Result:
    """A finished run: its folder, and ``result.json`` as a mapping."""

    folder: Path
    content: dict[str, Any]

    @property
    def values(self) -> dict[str, Any]:
        """The figures."""
        return self.content["results"]

    @property
    def is_reference(self) -> bool:
        """Whether this is the committed reference."""
        return not _is_local(self.folder)

    def table(self, name: str) -> pd.DataFrame:
        """One of the run's tables by file name."""
        path = self.folder / name
        if path.suffix == ".parquet":
            return pd.read_parquet(path)
        if path.suffix == ".jsonl":
            lines = path.read_text(encoding="utf-8").split("\n")
            return pd.DataFrame([json.loads(line) for line in lines if line])  # not read_json: ids stay text
        return pd.read_csv(path)

    @property
    def origin(self) -> str:
        """One line that says which results these are."""
        kind = "the committed reference" if self.is_reference else "this machine's own run"
        return f"results: {kind}, {paths.show(self.folder)}"


def _is_local(folder: Path) -> bool:
    """Whether results there are the user's own: in ``outputs/local``, or in a folder of theirs elsewhere."""
    outputs = paths.outputs()
    return folder.is_relative_to(outputs / "local") or not folder.resolve().is_relative_to(outputs)


def inputs_hash(inputs: dict[str, Any]) -> str:
    """SHA-256 of a run's inputs, the same for equal inputs in any order of keys."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def write_result(
    folder: Path,
    inputs: dict,
    results: dict,
    provenance: dict,
    tables: dict[str, Callable],
    record: str = "result.json",
) -> Result:
    """Write ``tables`` (file name -> function that writes it) and then, as the last act, ``record``.

    Raises:
        files.StorageError: the disk is full; no half-written file stays and ``record`` does not appear.
    """
    for name, write in tables.items():
        with building(folder / name) as unfinished:
            write(unfinished)
    content = {
        "hash": inputs_hash(inputs),
        "inputs": inputs,
        "results": results,
        "provenance": provenance,
        "files": {name: sha256(folder / name) for name in tables},
    }
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    with building(folder / record) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    return Result(folder, json.loads(text))  # what a later reader gets, tuples as lists


def read_result(folder: Path, record: str = "result.json") -> Result | None:
    """The finished result in ``folder``, or None if there is none.

    Raises:
        ResultError: ``record`` cannot be read, or a table is missing or changed since it was written.
    """
    path = folder / record
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        files, stored, inputs = content["files"], content["hash"], content["inputs"]
        content["results"], content["provenance"]
    except (ValueError, KeyError, TypeError) as error:
        raise ResultError(_refusal(folder, f"is damaged: {record} cannot be read ({error!r})", record)) from error
    if stored != inputs_hash(inputs):
        reason = f"is damaged: the hash in {record} is not that of its inputs"
        raise ResultError(_refusal(folder, reason, record, files))
    for name, checksum in files.items():
        if not (folder / name).exists() or sha256(folder / name) != checksum:
            reason = f"is damaged: {name} is missing or not the file that was written"
            raise ResultError(_refusal(folder, reason, record, files))
    return Result(folder, content)


def _refusal(folder: Path, reason: str, record: str = "result.json", files: Iterable[str] = ()) -> str:
    shown = paths.show(folder if record == "result.json" else folder / record)
    if not _is_local(folder):
        return f"{shown} {reason}. It is the committed reference: restore it with `git checkout -- {shown}`."
    command = set_aside_command(folder, [*files, record] if files and record != "result.json" else ())
    return f"{shown} {reason}. Nothing was overwritten. Move it aside with `{command}` and run again."


def set_aside_command(folder: Path, files: Iterable[str] = ()) -> str:
    """Shell command that moves a result aside, to a name that is still free.

    The whole folder; only those of ``files`` that are there, where others may lie beside them.
    """
    number = 1
    while folder.with_name(f"{folder.name}.aside-{number}").exists():
        number += 1
    shown, aside = (shlex.quote(paths.show(folder) + end) for end in ("", f".aside-{number}"))
    moved = " ".join(shlex.quote(paths.show(folder / name)) for name in files if (folder / name).exists())
    return f"mkdir {aside} && mv {moved} {aside}" if moved else f"mv {shown} {aside}"


def reusable(folder: Path, inputs: dict[str, Any], record: str = "result.json") -> Result | None:
    """The result in ``folder`` if it was made from ``inputs``, None if there is none.

    Raises:
        ResultError: it was made from other inputs (the message names the keys that differ), or is damaged.
    """
    result = read_result(folder, record)
    if result is not None and result.content["hash"] != inputs_hash(inputs):
        differing = "; ".join(differences(result.content["inputs"], inputs))
        files = result.content["files"]
        raise ResultError(_refusal(folder, f"was made with other parameters: {differing}", record, files))
    return result


def first_found(
    folders: Mapping[str, Path], source: str, expected: dict[str, Any], usable: Callable[[Result], bool] | None = None
) -> Result | None:
    """The first result in ``folders`` (by source: local, reference) that ``source`` allows; ``auto`` allows all.

    Raises:
        ResultError: it is damaged, or some of its inputs are not as ``expected``.
    """
    for name, folder in folders.items():
        found = read_result(folder) if source in (name, "auto") else None
        if found is None or (usable is not None and not usable(found)):
            continue
        differing = differences({key: found.content["inputs"].get(key) for key in expected}, expected)
        if differing:
            raise ResultError(f"{paths.show(folder)} was made with other parameters: {'; '.join(differing)}")
        return found
    return None


def found_or_made(load: Callable[[str], Result], make: Callable[[], Result], source: str) -> Result:
    """What ``load(source)`` finds, or, where it finds nothing, what ``make()`` makes; the reference is never made.

    Raises:
        ResultError: ``reference`` was asked for and there is none; or what is there is damaged or of other parameters.
    """
    try:
        return load(source)
    except MissingResult:
        if source == "reference":
            raise
        return make()


def other_result_aside(folder: Path, inputs: dict[str, Any]) -> Result | None:
    """The result in ``folder`` if it was made from ``inputs``; one of other inputs is moved beside it, under its hash.

    For results that can be had again in minutes from what is kept elsewhere. An earlier one that was moved aside and
    has these inputs is moved back.
    """
    found = read_result(folder)
    if found is not None and found.content["hash"] != inputs_hash(inputs):
        aside = folder.with_name(f"{folder.name}.{found.content['hash'][:8]}")
        if aside.exists():
            shutil.rmtree(aside)  # the same result, made again
        folder.rename(aside)
        found = None
    earlier = folder.with_name(f"{folder.name}.{inputs_hash(inputs)[:8]}")
    if found is None and not folder.exists() and earlier.exists():
        earlier.rename(folder)
        found = reusable(folder, inputs)
    return found


def differences(there: Any, here: Any, key: str = "") -> list[str]:
    """What differs between two nested mappings, one text a dotted key."""
    if isinstance(there, dict) and isinstance(here, dict):
        names = sorted(set(there) | set(here))
        return [
            text
            for name in names
            for text in differences(there.get(name, "absent"), here.get(name, "absent"), f"{key}.{name}".lstrip("."))
        ]
    if there == here:
        return []
    text = f"{key} is {there!r} there and {here!r} here"
    return [text if len(text) <= LONGEST else f"{key} differs"]  # a list of cells would hide everything else


def plain(value: Any) -> Any:
    """Plain JSON values; what is no finite number is None."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    return None if isinstance(value, float) and not np.isfinite(value) else value


def provenance(device: str, threads: int, seconds: float, **others: str | float) -> dict[str, Any]:
    """What a result does not depend on by intent, recorded so that differences can be traced."""
    return {
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name).split("+")[0] for name in RECORDED_VERSIONS},
        "cpu": _cpu_name(),
        "device": device,
        "threads": threads,
        **others,
        "seconds": round(seconds, 1),
        "peak_memory_gb": round(_peak_memory() / 1e9, 2),
        "finished": time.strftime("%Y-%m-%d"),
    }


def _cpu_name() -> str:
    return str(torch.cpu.get_capabilities().get("cpu_name") or platform.processor() or platform.machine())


def _peak_memory() -> int:
    """Peak resident memory of this process in bytes, or the present one where the system does not keep the peak."""
    try:
        import resource
    except ImportError:
        return psutil.Process().memory_info().rss
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024
