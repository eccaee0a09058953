"""English text without a download, to fit proposers on: docstrings of pinned packages, read as source, not imported."""

import ast
import importlib.metadata
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lib.errors import LeakbookError

FITTED = ("numpy", "scipy", "networkx", "sympy", "transformers")  # what proposers are fitted on
APART = ("pandas", "matplotlib")  # a second source for evaluation, from other packages
SHORTEST, LONGEST = 200, 4000  # characters of a docstring that is taken; longer ones are cut


class CorpusError(LeakbookError, ValueError):
    """A package to read is not installed, or there is too little text."""


def docstrings(packages: Sequence[str]) -> list[str]:
    """Docstrings of modules, classes and functions, once each, in order of package, file and line.

    Raises:
        CorpusError: a package is not installed.
    """
    found: dict[str, None] = {}
    for package in packages:
        for path in _sources(package):
            for text in _of_file(path):
                if len(text) >= SHORTEST:
                    found.setdefault(text[:LONGEST])
    return list(found)


def _sources(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise CorpusError(f"corpus: package {package!r} is not installed; expected those of requirements.txt")
    folder = Path(spec.submodule_search_locations[0])
    files = (path for path in folder.rglob("*.py") if "tests" not in path.parts)
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def _of_file(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):  # a template, or another encoding
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield text


def split_words(tokenizer: Any) -> list[list[int]]:
    """How words are split at a text's beginning, ids of each: those that the vocabulary itself holds behind a space, in
    three spellings: as they stand, capitalised, in capitals. Empty where no id holds a word with the space before it.
    """
    held = (tokenizer.decode([one]) for one in range(len(tokenizer)))
    words = {text[1:] for text in held if text[:1] == " " and text[1:].isalpha()}
    spelled = sorted({form for word in words for form in (word, word.capitalize(), word.upper())})
    return tokenizer(spelled, add_special_tokens=False)["input_ids"] if spelled else []


def continuations(words: Iterable[Sequence[int]]) -> dict[tuple[int, ...], list[int]]:
    """Which ids go on with a word that begins a text: for all ids of its beginning, those that may come next."""
    found: dict[tuple[int, ...], dict[int, None]] = {}
    for ids in words:
        for place in range(1, len(ids)):
            found.setdefault(tuple(ids[:place]), {})[ids[place]] = None
    return {begun: list(following) for begun, following in found.items()}


def versions(packages: Sequence[str]) -> list[str]:
    """What identifies a corpus: the packages and their versions."""
    return [f"{package} {importlib.metadata.version(package)}" for package in packages]
