"""Files that appear whole or not at all."""

import contextlib
import errno
import glob
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from lib.errors import LeakbookError, cut, shown

STALE = 3600.0  # seconds
MARK = ".leakbook-"  # between a target's name and eight characters: only what is named so is ever removed


class StorageError(LeakbookError, OSError):
    """The disk is full; nothing half-written was left behind."""


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def building(target: Path) -> Iterator[Path]:
    """A path beside ``target`` to write a file or folder to; a rename makes it ``target`` when all went well.

    Raises:
        StorageError: the disk is full. What stood at ``target`` before stands there still.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target, older_than=STALE)
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}{MARK}") as folder:
            unfinished = Path(folder) / target.name
            yield unfinished
            if unfinished.is_file():
                with open(unfinished, "rb+") as file:
                    os.fsync(file.fileno())
            if target.is_dir():
                target.rename(Path(folder) / "replaced")
            unfinished.replace(target)
    except Exception as error:
        if _disk_is_full(error):
            free = shutil.disk_usage(target.parent).free // 2**20
            raise StorageError(
                f"no space left to write {target} ({free} MiB free there); nothing half-written was kept. "
                "Free some space and run the same command again: finished work is reused."
            ) from error
        raise


def _remove_leftovers(target: Path, older_than: float) -> None:
    """Delete what a killed process left beside ``target``; a younger one may still be written."""
    for leftover in _unfinished(target.parent, f".{glob.escape(target.name)}"):
        if time.time() - leftover.stat().st_mtime > older_than:
            shutil.rmtree(leftover, ignore_errors=True)


def _unfinished(folder: Path, name: str) -> list[Path]:
    """Folders in ``folder`` that :func:`building` made for targets of a name, a pattern."""
    exactly = re.compile(re.escape(MARK) + "[a-z0-9_]{8}")
    found = [path for path in folder.glob(f"{name}{MARK}????????") if exactly.fullmatch(path.name[-len(MARK) - 8 :])]
    return [path for path in found if path.is_dir() and not path.is_symlink()]


def _disk_is_full(error: Exception) -> bool:
    """Safetensors wraps the operating system's error in one of its own, and names it only in the text."""
    number = getattr(error, "errno", None)
    return number in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error)


@contextlib.contextmanager
def locked(target: Path) -> Iterator[None]:
    """One process at a time makes ``target``; the others say that they wait, and then find it made."""
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(target.with_name(f".{target.name}.lock"))
    try:
        lock.acquire(timeout=1)
    except Timeout:
        logging.getLogger(__name__).warning("another process is working on %s; waiting for it to end", target)
        lock.acquire()
    try:
        _remove_leftovers(target, older_than=-1.0)  # whoever made them, beside the target or in it, held this lock
        for unfinished in _unfinished(target, ".*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        yield
    finally:
        lock.release()


def read_json_lines(path: Path, what: str, error: type[LeakbookError]) -> list[tuple[int, dict]]:
    """Objects of a JSON Lines file with their line numbers; blank lines are passed over.

    Raises:
        error: the file does not exist, is not UTF-8, or a line is not a JSON object; ``what`` names the kind of file.
    """
    records = []
    for number, line in enumerate(decoded(path, what, error).split("\n"), 1):
        if line.strip():
            records.append((number, _json_object(line, f"{path}, line {number}", error)))
    return records


def decoded(path: Path, what: str, error: type[LeakbookError]) -> str:
    """Text of a UTF-8 file, without the mark that some editors put first.

    Raises:
        error: the file does not exist, or is not UTF-8 (the message names the line); ``what`` names the kind of file.
    """
    try:
        content = path.read_bytes()
        return content.decode("utf-8-sig")
    except OSError as missing:
        reason = "does not exist" if not path.exists() else "cannot be read"
        raise error(f"{what} file {path.resolve()} {reason}") from missing
    except UnicodeDecodeError as broken:
        line = content[: broken.start].count(b"\n") + 1
        raise error(
            f"{what} file {path}, line {line}: byte {broken.start} is not UTF-8; save the file as UTF-8"
        ) from broken


def _json_object(line: str, where: str, error: type[LeakbookError]) -> dict:
    try:
        record = json.loads(line, object_pairs_hook=_each_key_once)
    except json.JSONDecodeError as broken:
        raise error(f"{where}: not a JSON object ({broken.msg} at column {broken.colno})") from broken
    except (ValueError, RecursionError) as broken:  # a number of thousands of digits, or brackets in brackets
        raise error(f"{where}: not a JSON object ({cut(str(broken).splitlines()[0])})") from broken
    if not isinstance(record, dict):
        raise error(f"{where}: got {shown(record)}, expected a JSON object: one on every line, and no list around them")
    return record


def _each_key_once(pairs: list[tuple[str, object]]) -> dict:
    record: dict[str, object] = {}
    for key, value in pairs:
        if key in record:
            raise ValueError(f"the key {shown(key)} occurs twice")
        record[key] = value
    return record
