"""A sweep runs what is missing, names what failed, and leaves the rest alone."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pandas as pd
import psutil
import pytest

from lib import config, paths, runner, sweep
from lib.__main__ import main
from lib.config import ConfigError
from lib.results import ResultError, read_result
from lib.runner import RunError

CELLS = ("gui-short", "noise-like-it")
GRID = """
seeds: [0]
training: {rank: 4, alpha: 8, batch_size: 8, warmup_steps: 3, records: 40, precision: fp32}
noise_draws: 2
cells:
  - {id: gui-short, kind: full, source: GUI, base: full, learning_rate: 2.0e-3, steps: 6, like: null}
  - {id: noise-like-it, kind: noise, source: gaussian, base: full, learning_rate: null, steps: null, like: gui-short}
"""


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """A file of two cells with one seed, and two further draws of noise."""
    path = tmp_path_factory.mktemp("grid") / "small.yaml"
    path.write_text(GRID)
    return str(path)


@pytest.fixture(scope="module")
def undisturbed(smoke, grid):
    """The sweep over that grid as `make sweep` runs it, from beginning to end."""
    assert runner.run_sweep("smoke", 1, grid=grid) == []
    return read_result(paths.sweep("smoke", grid))


def elsewhere(smoke, tmp_path):
    """Environment of processes with an outputs folder of their own, in which the testbed is done."""
    copy = tmp_path / "outputs" / "local" / "smoke"
    shutil.copytree(smoke.folder, copy / "testbed")
    shutil.copytree(paths.sweep("smoke") / "bases", copy / "sweep" / "bases")
    adapters = paths.local("smoke") / "adapters"
    shutil.copytree(
        adapters / smoke.content["provenance"]["adapters"], copy / "adapters" / smoke.content["provenance"]["adapters"]
    )
    return os.environ | {"LEAKBOOK_OUTPUTS": str(tmp_path / "outputs")}, copy / "sweep-small"


def assert_same_tables(folder, result):
    """All tables of the result in ``folder`` are those of ``result``, to the last digit."""
    again = read_result(folder)
    assert again.content["files"].keys() == result.content["files"].keys()
    for name in result.content["files"]:
        pd.testing.assert_frame_equal(again.table(name), result.table(name), check_exact=True)


def test_a_sweep_writes_its_tables_and_runs_only_what_is_missing(undisturbed, grid, monkeypatch):
    cells = undisturbed.table("cells.csv")
    assert cells["cell"].unique().tolist() == list(CELLS) and len(cells) == 2 * 2 * 2
    assert len(undisturbed.table("token_nll.parquet")) == 2 * 2 * 40 * 29
    assert len(undisturbed.table("recall.parquet")) == 2 * 2 * 40
    assert undisturbed.table("noise.csv")["seed"].tolist() == [0, 1]
    assert undisturbed.values["runs"] == 2 and undisturbed.values["noise_draws"] == 2
    assert undisturbed.values["stacked_against_merged"] < 1e-4
    assert (
        len(list(undisturbed.folder.glob("pages/*.ipynb"))) == 2 and len(list(undisturbed.folder.glob("logs/*"))) == 3
    )
    monkeypatch.setattr(runner.subprocess, "run", lambda *_, **__: pytest.fail("a finished run was started again"))
    assert runner.run_sweep("smoke", 1, grid=grid) == []


def test_a_sweep_survives_a_killed_kernel_its_own_death_and_a_second_sweep(undisturbed, smoke, grid, tmp_path):
    environment, folder = elsewhere(smoke, tmp_path)
    command = [sys.executable, "-m", "lib", "sweep", "--scale", "smoke", "--grid", grid]
    first = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    # The kernel of the first cell is killed when it has begun to train. The run fails, the others go on.
    wait_for(lambda: list(folder.glob("runs/.gui-short-s0.lock")))
    kernel_of(first).kill()
    wait_for(lambda: list(folder.glob("runs/.noise-like-it-s0.lock")))
    first.kill()  # the sweep alone: its worker goes on, and what it makes is used
    assert "failed: gui-short-s0:" in first.communicate()[1]
    assert "kernel" in (folder / "logs" / "gui-short-s0.log").read_text()
    pair = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate()[1] for process in pair]
    assert [process.returncode for process in pair] == [0, 0], said
    assert sum("another process is working on" in text for text in said) >= 1
    assert_same_tables(folder, undisturbed)
    assert not [path for path in folder.rglob(".*.leakbook-????????") if path.is_dir()]  # nothing half-written is left


def kernel_of(process):
    """The kernel that a sweep's worker has started."""
    kernels = []

    def started():
        children = psutil.Process(process.pid).children(recursive=True)
        kernels[:] = [child for child in children if "ipykernel_launcher" in child.cmdline()]
        return kernels

    wait_for(started)
    return kernels[0]


def test_an_interrupted_sweep_starts_nothing_more(grid, smoke, tmp_path):
    environment, _ = elsewhere(smoke, tmp_path)
    program = f"""
import pathlib, signal, sys
from lib import runner
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test worker may ignore it
started = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
command = lambda scale, cell, seed, grid: [sys.executable, "-c", started, {str(tmp_path)!r} + "/" + cell]
runner.run_sweep("smoke", 1, grid={grid!r}, command=command)
"""
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, start_new_session=True)
    wait_for(lambda: (tmp_path / "gui-short").exists())
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) != 0
    assert not (tmp_path / "noise-like-it").exists()


def wait_for(happened, seconds=120):
    """Wait until ``happened()`` is true."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def test_snakemake_ends_with_the_same_tables(undisturbed, smoke, grid, tmp_path):
    environment, folder = elsewhere(smoke, tmp_path)
    command = [sys.executable, "-m", "snakemake", "--snakefile", paths.ROOT / "Snakefile", "--directory", tmp_path]
    command += ["--profile", paths.PARAMS / "profiles" / "local", "--config", "scale=smoke", f"grid={grid}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_tables(folder, undisturbed)
    assert (folder / "pages" / "gui-short-s0.ipynb").exists()


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """A sweep whose runs only write a file: what is looked at is how they end."""
    folder = lambda cell, seed: tmp_path / f"{cell}-s{seed}"  # noqa: E731
    monkeypatch.setattr(sweep, "finished", lambda run, _: folder(run.cell.id, run.seed).exists() or None)
    monkeypatch.setattr(sweep, "finished_draws", lambda *_: True)
    return folder


def test_runs_that_fail_are_named_with_their_logs_and_the_others_are_kept(counted, grid):
    def command(scale, cell, seed, grid):
        good = f"import pathlib; pathlib.Path({str(counted(cell, seed))!r}).touch()"
        return [sys.executable, "-c", good if cell == CELLS[1] else "raise ValueError('injected')"]

    (failure,) = runner.run_sweep("smoke", 2, CELLS, grid, command)
    assert failure.run == f"{CELLS[0]}-s0" and failure.reason == "ValueError: injected"
    assert "Traceback" in failure.log.read_text()
    assert counted(CELLS[1], 0).exists()


@pytest.mark.parametrize("jobs", [1, 2])
def test_several_processes_share_the_cores_out(counted, grid, tmp_path, monkeypatch, jobs):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.delenv(config.THREADS, raising=False)

    def command(scale, cell, seed, grid):
        text = "os.environ.get('LEAKBOOK_THREADS', ''), config.load_scale('smoke').threads"
        program = f"import os, pathlib; from lib import config; path = pathlib.Path({str(counted(cell, seed))!r})"
        return [sys.executable, "-c", f"{program}; path.write_text(repr(({text})))"]

    assert runner.run_sweep("smoke", jobs, CELLS, grid, command) == []
    own = config.load_scale("smoke").threads
    assert {counted(cell, 0).read_text() for cell in CELLS} == {repr(("2", 2) if jobs == 2 else ("", own))}


def test_a_kernel_that_did_not_start_is_tried_once_more(counted, grid):
    program = "raise RuntimeError('Kernel died before replying to kernel_info')"
    (failure,) = runner.run_sweep("smoke", 1, CELLS[:1], grid, lambda *_: [sys.executable, "-c", program])
    assert failure.log.read_text().count("Traceback") == 2


def test_a_killed_run_counts_as_failed(counted, grid):
    kill = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    (failure,) = runner.run_sweep("smoke", 1, CELLS[:1], grid, lambda *_: kill)
    assert failure.reason == "killed by signal 9"


def test_a_full_disk_leaves_nothing_half_written_and_is_named(undisturbed, smoke, grid, tmp_path, monkeypatch):
    _, folder = elsewhere(smoke, tmp_path)
    monkeypatch.setenv("LEAKBOOK_OUTPUTS", str(tmp_path / "outputs"))
    program = """
import errno, pandas
from lib import config, sweep
from lib.errors import LeakbookError
def to_parquet(self, path, **_):
    path.write_bytes(b"half")
    raise OSError(errno.ENOSPC, "No space left on device")
pandas.DataFrame.to_parquet = to_parquet
try:
    sweep.cell(config.cell_run("smoke", {cell!r}, {seed}, "local", {grid!r}))
except LeakbookError as problem:
    raise SystemExit(f"error: {{problem}}")
"""
    full = lambda scale, cell, seed, grid: [sys.executable, "-c", program.format(cell=cell, seed=seed, grid=grid)]  # noqa: E731
    (failure,) = runner.run_sweep("smoke", 1, CELLS[:1], grid, full)
    assert failure.reason.startswith("error: no space left to write") and "finished work is reused" in failure.reason
    (run,) = folder.glob("runs/gui-short-s0")
    assert list(run.iterdir()) == []


def test_a_sweep_of_another_protocol_is_refused_before_anything_runs(undisturbed, grid, monkeypatch):
    # One message for all results, and the command that moves them aside.
    monkeypatch.setattr(sweep, "PROTOCOL", sweep.PROTOCOL + 1)
    monkeypatch.setattr(runner.subprocess, "run", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(ResultError, match="protocol.cell is .* 3 of 3 results here cannot be used.*mv .*sweep-small"):
        runner.run_sweep("smoke", 1, grid=grid)


def test_only_a_noise_cell_has_further_draws(grid):
    with pytest.raises(ConfigError, match="cell: got 'gui-short', which is trained; expected one of noise-like-it."):
        main(["noise", "--scale", "smoke", "--cell", "gui-short", "--grid", grid], standalone_mode=False)


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
