"""The book: notebooks and short pages, brought together and built by Sphinx without executing anything.

Nothing of a built book comes from a network: MathJax is copied in from its npm package, fetched once and checked.
"""

import ast
import base64
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell

from lib import cases, exercises, explorer, files, paths, rules
from lib.errors import LeakbookError
from lib.results import read_result

SOURCE = paths.ROOT / "book"
TABLES = (
    "sweep/result.json",
    *(f"sweep/{name}" for name in cases.TABLES),
    *(f"cases/{case}/{name}" for case in cases.CASES for name in ("result.json", *cases.TABLES)),
)
MATHJAX = "mathjax-3.2.2"
MATHJAX_SHA512 = "Bt+SSVU8eBG27zChVewOicYs7Xsdt40qm4+UpHyX7k0/O9NliPc+x77k1/FEsPsjKPZGJvtRZM1vO+geW0OhGw=="
MATHJAX_PARTS = ("tex-svg.js", "a11y", "input", "sre", "ui")  # what its page script may ask for
REPOSITORY = "LEAKBOOK_REPOSITORY"  # owner/name on GitHub: where it is set, notebooks get links to run them online
DRAWN = re.compile(r"\b(?:figures|report)\.(\w+)\(")
DRAWING = ("figures.py", "inversion/figures.py", "inversion/defence_figures.py", "audit/report.py")  # modules that draw


class BookError(LeakbookError, RuntimeError):
    """The book cannot be built from what is here."""


def build(target: Path | None = None) -> Path:
    """Build the book into ``target`` (``outputs/book``), warnings being errors; returns its first page.

    Raises:
        BookError: committed tables are missing (the message names them), MathJax cannot be had, a part of Sphinx is not
            installed, or Sphinx warns.
    """
    target = target or paths.outputs() / "book"
    missing = missing_tables()
    if missing:
        command = f"git checkout -- {' '.join(missing)}"
        raise BookError(f"tables are missing: {', '.join(missing)}. Restore them: `{command}`")
    needed = [
        name for name in ("sphinx", "myst_nb", "furo", "sphinx_copybutton") if importlib.util.find_spec(name) is None
    ]
    if needed:
        raise BookError(f"not installed: {', '.join(needed)}. Run `pip install -r requirements.txt`")
    with tempfile.TemporaryDirectory(prefix="leakbook-") as folder, files.building(target) as unfinished:
        source = stage(Path(folder) / "source", math=mathjax())
        _sphinx(source, unfinished, Path(folder) / "doctrees")
    return target / "index.html"


def missing_tables(folder: Path | None = None) -> list[str]:
    """Committed tables that the book is made from and that are not there, as paths in the repository."""
    folder = folder or paths.reference("laptop")
    return [paths.show(folder / name) for name in TABLES if not (folder / name).exists()]


def _sphinx(source: Path, target: Path, doctrees: Path) -> None:
    from sphinx.cmd.build import main

    arguments = ["-b", "html", "-W", "--keep-going", "-q", "-d", str(doctrees), str(source), str(target)]
    if main(arguments) != 0:
        raise BookError("Sphinx warned: see the lines above. Warnings count as errors here.")
    shutil.rmtree(target / "_sources", ignore_errors=True)
    (target / ".buildinfo").unlink(missing_ok=True)


def stage(folder: Path, math: Path) -> Path:
    """Bring pages, notebooks, exercises, the explorer's data and MathJax (a folder) together in a new folder."""
    shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(math, folder / "_static" / "mathjax")
    for page in folder.rglob("*.md"):
        page.write_text(relinked(page.read_text(encoding="utf-8")), encoding="utf-8")
    notebooks = sorted(paths.NOTEBOOKS.glob("*.ipynb"))
    for path in [*notebooks, *(exercises.FOLDER / f"{source.stem}.ipynb" for source in exercises.sources())]:
        _stage(path, folder / path.relative_to(paths.ROOT))
    (folder / "exercise_table.md").write_text(exercise_table(), encoding="utf-8")
    data = json.dumps(explorer_data(), separators=(",", ":"), allow_nan=False)
    script = f"window.EXPLORER = {data};\n"  # a script, since a page opened from a file may not fetch one
    (folder / "_static" / "explorer-data.js").write_text(script, encoding="utf-8")
    return folder


def relinked(text: str) -> str:
    """Links between pages and notebooks as they are in the book, where the pages lie one folder higher."""
    text = re.sub(r"\]\(\.\./((?:\.\./)*notebooks/)", r"](\1", text)
    return re.sub(r"\]\(((?:\.\./)+)book/", r"](\1", text)


def explorer_data() -> dict[str, Any]:
    """The window explorer's data, from the committed tables."""
    reference = paths.reference("laptop")
    found = {case: read_result(reference / "cases" / case) for case in cases.CASES}
    return explorer.page_data(read_result(reference / "sweep"), found, rules.load_verdicts())


def exercise_table() -> str:
    """Exercises as a Markdown table: title, minutes, difficulty, and of what kind of tool a bug is."""
    lines = ["| exercise | minutes | difficulty | a bug seen in |", "|---|---|---|---|"]
    for exercise in map(exercises.read, exercises.sources()):
        stars = "●" * exercise.difficulty + "○" * (3 - exercise.difficulty)
        kind, link = exercise.kind.removeprefix("seen in "), f"notebooks/exercises/{exercise.name}.ipynb"
        lines.append(f"| [{exercise.title}]({link}) | {exercise.minutes} | {stars} | {kind} |")
    return "\n".join(lines) + "\n"


def _stage(path: Path, target: Path) -> None:
    """Copy a notebook: its figures with alternative texts, links under its title, itself as a download."""
    notebook = nbformat.read(path, as_version=4)
    describe_figures(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = relinked(cell.source)
    original = target.parent / "original" / path.name
    original.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path, original)
    links = [f"{{download}}`Download this notebook <original/{path.name}>`"]
    links += online_links(path.relative_to(paths.ROOT).as_posix(), os.environ.get(REPOSITORY))
    notebook.cells.insert(1, new_markdown_cell(" · ".join(links), id="links"))
    nbformat.write(notebook, target)


def online_links(path: str, repository: str | None) -> list[str]:
    """Links that run a notebook online; none where it is not said where the repository is.

    Binder builds the whole repository, so that ``lib`` is there. Colab opens a notebook alone, without ``lib``, and is
    left out for that.

    Raises:
        BookError: not of the form owner/name.
    """
    if not repository:
        return []
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise BookError(f"{REPOSITORY}: got {repository!r}, expected owner/name, as in an address on GitHub")
    binder = f"https://mybinder.org/v2/gh/{repository}/HEAD?labpath={path}"
    return [f"[Run on Binder]({binder})", f"[Source](https://github.com/{repository}/blob/HEAD/{path})"]


def describe_figures(notebook: NotebookNode) -> None:
    """Give every figure an alternative text: what kind of figure it is, and the prose that leads to it."""
    prose = ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            prose = cell.source
        elif any("image/png" in output.get("data", {}) for output in cell.outputs):
            drawn = DRAWN.search(cell.source)
            parts = [_says(drawn[1]) if drawn else "A figure.", _last_paragraph(prose)]
            cell.metadata["mystnb"] = {"image": {"alt": " ".join(filter(None, parts))}}


def _says(function: str) -> str:
    """First sentence of the docstring of a function that draws; the module is read, not imported."""
    for path in (paths.ROOT / "lib" / name for name in DRAWING):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name == function:
                return _plain(ast.get_docstring(node) or "A figure").partition(". ")[0].rstrip(".") + "."
    return "A figure."


def _last_paragraph(prose: str) -> str:
    """What is said last before a figure, in whole sentences; the heading where nothing stands below it."""
    below = re.split(r"^#+ (.+)$", prose, flags=re.M)[-2:]  # the last heading, if any, and what follows it
    paragraphs = [part for part in re.split(r"\n\s*\n", below[-1].strip()) if not re.match(r"(\||>|```|\$\$)", part)]
    return _sentences(_plain(paragraphs[-1] if any(paragraphs) else below[0]), longest=300)


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r":\w+:|[*`$\\]", "", text)).strip()


def _sentences(text: str, longest: int) -> str:
    """The first sentence, and further ones as long as there is room for them."""
    kept, *rest = re.split(r"(?<=[.:?!]) (?=[A-Z])", text)
    for sentence in rest:
        if len(kept) + len(sentence) > longest:
            break
        kept = f"{kept} {sentence}"
    return kept


def mathjax() -> Path:
    """Folder of MathJax's built files in the cache, fetched with npm on first use and checked by its SHA-512.

    Raises:
        BookError: npm is missing or cannot fetch it, or the archive is not the one that is pinned.
    """
    folder = paths.cache() / MATHJAX
    if folder.exists():
        return folder
    archive = paths.cache() / f"{MATHJAX}.tgz"
    with tempfile.TemporaryDirectory() as scratch:
        if not archive.exists():
            archive = _npm_pack(Path(scratch))
        found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        if found != MATHJAX_SHA512:
            raise BookError(f"{archive.name}: its SHA-512 is {found}, expected {MATHJAX_SHA512}")
        with tarfile.open(archive) as packed, files.building(folder) as unfinished:
            packed.extractall(scratch, filter="data")
            unfinished.mkdir()
            for part in (*(f"es5/{name}" for name in MATHJAX_PARTS), "LICENSE"):
                subject = Path(scratch) / "package" / part
                copy = shutil.copytree if subject.is_dir() else shutil.copy2
                copy(subject, unfinished / subject.name)
    return folder


def _npm_pack(folder: Path) -> Path:
    package = "@".join(MATHJAX.rsplit("-", 1))
    advice = f"Put {MATHJAX}.tgz (`npm pack {package}` on a connected machine) into {paths.cache()}"
    try:
        subprocess.run(["npm", "pack", package], cwd=folder, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise BookError(f"MathJax comes from npm, which is not installed. {advice}") from None
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise BookError(f"npm could not fetch {package} ({last[0]}). {advice}") from error
    return folder / f"{MATHJAX}.tgz"
