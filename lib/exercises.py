"""Exercises from one source each: the reader's notebook, with its solution folded away, and the solved one.

A source is a py:percent file that runs from top to bottom with the solution in place. Tags tell its cells apart:
``solution`` (the function that is asked for), ``check`` and ``hint``; what has none is as it is. A comment
``# student:`` in the solution holds what the reader gets in place of the line below it: the bug that is to be found.
Where there is none the reader gets signature and docstring, and writes the rest.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from lib import files, paths
from lib.errors import LeakbookError

FOLDER = paths.NOTEBOOKS / "exercises"
TAGS = ("solution", "check", "hint")
KERNEL = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
_INSTEAD = re.compile(r"^( *)# student: ?(.*)\n.*$", re.M)
_FACTS = re.compile(r"^\*(\d+) minutes · difficulty ([123]) of 3(?: · ([^*]+))?\*$", re.M)


class ExerciseError(LeakbookError, ValueError):
    """A source that is no exercise."""


@dataclass(frozen=True)
class Exercise:
    """A source: its ``name``, ``title``, ``minutes``, ``difficulty`` (1 to 3), ``kind`` of tool with its bug, cells."""

    name: str
    title: str
    minutes: int
    difficulty: int
    kind: str
    cells: tuple[NotebookNode, ...]

    @property
    def solution(self) -> str:
        """Code of the solution."""
        code = next(cell.source for cell in self.cells if _tag(cell) == "solution")
        return re.sub(r"^ *# student:.*\n", "", code, flags=re.M)

    @property
    def stub(self) -> str:
        """What the reader begins with: the code with its bug, or signature and docstring."""
        code = next(cell.source for cell in self.cells if _tag(cell) == "solution")
        return _INSTEAD.sub(r"\1\2", code) if "# student:" in code else _emptied(code)


def _tag(cell: NotebookNode) -> str:
    return next(iter(cell.metadata.get("tags", [])), "")


def _emptied(code: str) -> str:
    """Imports, signature and docstring of the last function of ``code``, its body left to the reader."""
    function = ast.parse(code).body[-1]
    if not isinstance(function, ast.FunctionDef) or ast.get_docstring(function) is None:
        raise ExerciseError("a solution must end with a function that has a docstring")
    lines = code.splitlines()[: function.body[0].end_lineno]
    return "\n".join([*lines, '    raise NotImplementedError("yours to write")'])


def sources() -> list[Path]:
    """Every source, in order."""
    return sorted((FOLDER / "source").glob("*.py"))


def read(source: Path) -> Exercise:
    """Read a source.

    Raises:
        ExerciseError: a part is missing or doubled, or the first cell lacks title, minutes and difficulty.
    """
    cells = tuple(jupytext.read(source).cells)
    tags = [_tag(cell) for cell in cells]
    for tag in TAGS:
        if tags.count(tag) != 1:
            raise ExerciseError(f"{source.name}: got {tags.count(tag)} cells with the tag {tag!r}, expected one")
    head = cells[0].source
    facts, title = _FACTS.search(head), re.match(r"# (.+)", head)
    if not facts or not title:
        raise ExerciseError(f"{source.name}: the first cell lacks a title, or “*N minutes · difficulty D of 3*”")
    minutes, difficulty, kind = facts.groups()
    return Exercise(source.stem, title[1], int(minutes), int(difficulty), kind or "", cells)


def notebook(exercise: Exercise, solved: bool = False) -> NotebookNode:
    """The reader's notebook, hint and solution folded; or the solved one. Cells have no outputs."""
    made = []
    for cell in exercise.cells:
        if _tag(cell) == "solution":
            made.append(new_code_cell(exercise.solution if solved else exercise.stub))
        elif _tag(cell) == "hint":
            made.append(new_markdown_cell(_folded("Hint", cell.source)))
            made.append(new_markdown_cell(_folded("Solution", f"```python\n{exercise.solution}\n```")))
        else:
            new = new_code_cell if cell.cell_type == "code" else new_markdown_cell
            made.append(new(cell.source))
    for number, cell in enumerate(made):
        cell["id"] = f"cell-{number:02d}"
    return new_notebook(cells=made, metadata=nbformat.from_dict(KERNEL))


def _folded(title: str, text: str) -> str:
    return f"<details>\n<summary>{title}</summary>\n\n{text}\n\n</details>"


def write(folder: Path = FOLDER, solved: bool = False) -> list[Path]:
    """Write every exercise's notebook into ``folder``; returns their paths."""
    written = []
    for source in sources():
        target = folder / f"{source.stem}.ipynb"
        with files.building(target) as unfinished:
            nbformat.write(notebook(read(source), solved), unfinished)
        written.append(target)
    return written
