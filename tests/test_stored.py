"""The committed notebooks: executed top to bottom, paired with their source, reproduced by nbval without a model."""

import os
import subprocess
import sys
from statistics import median

import jupytext
import nbformat
import pytest

from lib import paths

NOTEBOOKS = sorted(paths.NOTEBOOKS.glob("*.ipynb"))
EVERY = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path):
    cells = nbformat.read(path, as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code" and cell.source.strip()]


def test_every_source_has_its_notebook():
    assert NOTEBOOKS and [p.stem for p in NOTEBOOKS] == [p.stem for p in sorted(paths.NOTEBOOKS.glob("*.py"))]


@EVERY
def test_the_source_gives_the_notebooks_inputs_and_tags(path):
    stored, source = nbformat.read(path, as_version=4).cells, jupytext.read(path.with_suffix(".py")).cells
    assert [(c.cell_type, c.source) for c in stored] == [(c.cell_type, c.source) for c in source]
    tagged = [c.metadata.get("tags") for c in stored]
    assert tagged == [c.metadata.get("tags") for c in source]
    assert tagged.count(["parameters"]) == 1


@EVERY
def test_it_was_executed_in_one_go_and_has_no_error(path):
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs and not any(output.output_type == "error" for output in outputs)
    assert not any(output.get("name") == "stderr" for output in outputs)


@EVERY
def test_it_carries_neither_pairing_nor_machine_paths(path):
    notebook = nbformat.read(path, as_version=4)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert str(paths.ROOT) not in path.read_text()
    assert "the committed reference" in path.read_text()


@EVERY
def test_prose_leads_and_cells_are_short(path):
    cells = nbformat.read(path, as_version=4).cells
    lengths = [len(cell.source.splitlines()) for cell in cells if cell.cell_type == "code"]
    assert sum(cell.cell_type == "markdown" for cell in cells) >= len(lengths)
    assert median(lengths) <= 8 and max(lengths) <= 25


def nbval(*arguments, **environment):
    blocked = str(paths.ROOT / "tests" / "no_models")
    environment = os.environ | {"LEAKBOOK_RESULTS": "reference", "PYTHONPATH": blocked} | environment
    environment.pop("LEAKBOOK_OUTPUTS", None)
    command = [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "-q", "-p", "no:cacheprovider"]
    return subprocess.run(command + list(arguments), capture_output=True, text=True, env=environment, cwd=paths.ROOT)


def test_nbval_reproduces_the_stored_outputs_from_the_committed_tables_without_loading_a_model():
    done = nbval(*map(str, NOTEBOOKS))
    assert done.returncode == 0, done.stdout[-3000:]
    cells = sum(len(code_cells(path)) for path in NOTEBOOKS)
    assert f"{cells} passed" in done.stdout


def test_nbval_notices_a_changed_output(tmp_path):
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    printed = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs if o.output_type == "stream"]
    printed[1].text = printed[1].text.replace("1", "2")
    nbformat.write(notebook, tmp_path / "changed.ipynb")
    done = nbval(str(tmp_path / "changed.ipynb"))
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout[-2000:]


def test_the_block_really_stops_a_model_from_loading():
    program = "from lib import models; models.load('tiny-vl')"
    environment = os.environ | {"PYTHONPATH": str(paths.ROOT / "tests" / "no_models")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode != 0 and "a notebook loaded a model" in done.stderr
