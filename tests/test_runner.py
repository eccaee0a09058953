"""A sweep runs what is missing, names what failed, and leaves the rest alone."""

import dataclasses
import os
import subprocess
import sys

import pandas as pd
import pytest

from lib import config, paths, runner
from lib.results import read_result
from lib.runner import RunError

CELLS = ("gui-full-low-10", "synth-full-low-10")


@pytest.fixture
def small_grid(monkeypatch, smoke):
    """The grid cut down to two cells and one seed."""
    whole = config.load_sweep(config.load_scale("smoke"))
    small = dataclasses.replace(whole, seeds=(0,), cells=tuple(map(whole.cell, CELLS)))
    monkeypatch.setattr(config, "load_sweep", lambda *_: small)
    return small


def direct(scale, cell, seed):
    """The command line of a run that computes in one process, without a notebook."""
    program = f"from lib import config, sweep; sweep.cell(config.cell_run({scale!r}, {cell!r}, {seed}, 'local'))"
    return [sys.executable, "-c", program]


def test_a_sweep_runs_what_is_missing_and_writes_its_tables(small_grid):
    assert runner.run_sweep("smoke", 1, command=direct) == []
    folder = paths.local("smoke") / "sweep"
    cells = pd.read_csv(folder / "cells.csv")
    assert list(cells["cell"].unique()) == list(CELLS) and len(cells) == 2 * 2 * 2
    assert len(pd.read_parquet(folder / "token_nll.parquet")) == 2 * 2 * 40 * 29
    never = runner.run_sweep("smoke", 1, command=lambda *_: pytest.fail("a finished run was started again"))
    assert never == []


def test_a_run_that_fails_is_named_with_its_log_and_the_others_are_kept(small_grid, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "run_folder", lambda scale, cell, seed: tmp_path / f"{cell}-s{seed}")

    def command(scale, cell, seed):
        good = f"import pathlib; p = pathlib.Path({str(tmp_path)!r}) / '{cell}-s{seed}'; p.mkdir(); "
        good += "(p / 'result.json').write_text('{}')"
        return [sys.executable, "-c", good if cell == CELLS[1] else "raise ValueError('injected')"]

    (failure,) = runner.run_sweep("smoke", 2, CELLS, command)
    assert failure.run == f"{CELLS[0]}-s0" and failure.reason == "ValueError: injected"
    assert "Traceback" in failure.log.read_text()
    assert (tmp_path / f"{CELLS[1]}-s0" / "result.json").exists()


def test_a_kernel_that_did_not_start_is_tried_once_more(small_grid, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "run_folder", lambda scale, cell, seed: tmp_path / f"{cell}-s{seed}")
    tries = []

    def command(scale, cell, seed):
        tries.append(cell)
        return [sys.executable, "-c", "raise RuntimeError('Kernel died before replying to kernel_info')"]

    (failure,) = runner.run_sweep("smoke", 1, CELLS[:1], command)
    assert len(tries) == 2 and failure.log.read_text().count("Traceback") == 2


def test_a_killed_run_counts_as_failed(small_grid, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "run_folder", lambda scale, cell, seed: tmp_path / f"{cell}-s{seed}")
    kill = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    (failure,) = runner.run_sweep("smoke", 1, CELLS[:1], lambda *_: kill)
    assert failure.reason == "exit status -9"


def test_an_unknown_cell_is_refused_before_anything_runs(smoke_outputs):
    done = subprocess.run(
        [sys.executable, "-m", "lib", "cell", "--scale", "smoke", "--cell", "../gui", "--seed", "0"],
        capture_output=True,
        text=True,
        env=os.environ.copy(),
    )
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "error: cell: got '../gui', expected one of gui-full-low-10" in done.stderr


def test_a_notebook_that_raises_is_reported_in_its_own_words(smoke, tmp_path):
    with pytest.raises(RunError, match="(?s)ConfigError: notebook.seed: got 'x'.*the page with the traceback"):
        runner.execute("cell", tmp_path / "page.ipynb", {"scale": "smoke", "seed": "x"}, tmp_path, sys.stderr)


def test_the_command_line_starts_a_run_without_loading_torch():
    program = "import lib.__main__, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_a_cells_command_leaves_a_result_and_a_page(smoke):
    done = subprocess.run(
        [sys.executable, "-m", "lib", "cell", "--scale", "smoke", "--cell", "random-stop1", "--seed", "2"],
        capture_output=True,
        text=True,
        env=os.environ.copy(),
    )
    assert done.returncode == 0, done.stderr
    assert read_result(paths.run_folder("smoke", "random-stop1", 2)).values["rows"][0]["seed"] == 2
    assert (paths.local("smoke") / "sweep" / "pages" / "random-stop1-s2.ipynb").exists()
