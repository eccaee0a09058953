"""Notebooks and whole sweeps run as processes: one a run, its log kept, what failed named and the rest finished."""

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import papermill
from nbclient.exceptions import DeadKernelError
from tqdm import tqdm

from lib import config, paths
from lib.errors import LeakbookError
from lib.files import locked

# Its warning about local sockets says nothing a reader can act on.
KERNEL_ARGUMENTS = ["--log-level=ERROR"]
NOT_STARTED = ("Kernel died before replying", "Kernel didn't respond")


class RunError(LeakbookError, RuntimeError):
    """A notebook did not come to its end."""


def execute(notebook: str, output: Path, parameters: dict[str, Any], result: Path, stream: TextIO) -> None:
    """Run a notebook through papermill, what it prints shown live on ``stream``.

    Done means that ``result.json`` is there: a killed kernel leaves a page that looks finished.

    Raises:
        RunError: a cell raised, or the kernel ended without a result; the message says where the page is.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", config.ENVIRONMENT: "local"}  # the kernel inherits them
    try:
        papermill.execute_notebook(
            str(paths.NOTEBOOKS / f"{notebook}.ipynb"),
            str(output),
            parameters=parameters,
            progress_bar=False,
            stderr_file=stream,
            kernel_name="python3",
            extra_arguments=KERNEL_ARGUMENTS,
            cwd=str(paths.ROOT),
        )
    except papermill.PapermillExecutionError as error:
        page = f"(the page with the traceback: {paths.show(output)})"
        raise RunError(f"{error.ename}: {error.evalue}\n{page}") from error
    except DeadKernelError:
        pass  # said below: a killed kernel does not always raise
    if not (result / "result.json").exists():
        raise RunError(
            f"the kernel of {notebook} ended without a result (killed, or out of memory?); its page so far is "
            f"{paths.show(output)}. Run the same command again: it goes on where it was."
        )


def execute_cell(scale: str, cell: str, seed: int, stream: TextIO, grid: str | None = None, injection: int = 0) -> None:
    """Run the ``cell`` notebook for one cell and seed; ``grid`` is an absolute path.

    Raises:
        config.ConfigError: scale or cell are unknown; RunError: see :func:`execute`.
    """
    run = config.cell_run(scale, cell, seed, "local", grid, injection)
    page = run.sweep_folder / "pages" / f"{paths.run_name(cell, seed)}.ipynb"
    parameters = {"scale": scale, "cell": cell, "seed": seed}
    parameters |= ({} if grid is None else {"grid": grid}) | ({"injection": injection} if injection else {})
    execute("cell", page, parameters, run.folder, stream)


@dataclass(frozen=True)
class Task:
    """One process of a sweep: its name, its command line, and what says whether its result is there."""

    name: str
    command: list[str]
    is_done: Callable[[], bool]


@dataclass(frozen=True)
class Failure:
    """A task of the sweep that failed: its name, its log, and the log's last line."""

    run: str
    log: Path
    reason: str


def run_sweep(
    scale: str, jobs: int, only: Sequence[str] = (), grid: str | None = None, command: Callable | None = None
) -> list[Failure]:
    """Run what is missing of the sweep, one process a run and ``jobs`` at a time; write its tables if all is there.

    Failed tasks are given back and leave the others alone. A run whose kernel did not start is tried once more. A
    second sweep on the same folder waits for the first and says so. ``only`` names cells; the tables are then left as
    they are, ``grid`` is an absolute path. ``command`` makes the command line of a run.

    Raises:
        config.ConfigError: scale, grid or cell are unknown.
        results.ResultError: a result that is there is damaged, or was made with other parameters.
    """
    from lib import collection, models, sweep

    settings = config.load_scale(scale)
    cells = config.load_sweep(settings, grid)
    chosen = {cells.cell(name).id for name in only} or {cell.id for cell in cells.cells}
    runs = [run for run in collection.all_runs(settings, cells, grid) if run.cell.id in chosen]
    noise = {run.cell.id: run for run in runs if run.cell.kind == "noise"}
    model = models.identity(settings.backbone, settings.revision)
    command = command or _command

    def run_task(run: config.CellRun) -> Task:
        arguments = command(scale, run.cell.id, run.seed, grid)
        return Task(paths.run_name(run.cell.id, run.seed), arguments, lambda: sweep.finished(run, model) is not None)

    def draws_task(run: config.CellRun) -> Task:
        arguments = _draws_command(scale, run.cell.id, grid)
        return Task(f"{run.cell.id}-draws", arguments, lambda: sweep.finished_draws(run, model) is not None)

    folder = paths.sweep(scale, grid)
    with locked(folder):
        # Noise takes the size of the adapters that the others train.
        phases = [[run_task(run) for run in runs if run.cell.kind != "noise"]]
        phases.append(
            [run_task(run) for run in runs if run.cell.kind == "noise"] + list(map(draws_task, noise.values()))
        )
        _refuse_unusable([task for phase in phases for task in phase], folder)
        failures = _run_all(phases, jobs, folder / "logs")
        if not failures and not only:
            collection.collect(runs)
    return failures


def run_confirmation(scale: str, jobs: int) -> list[Failure]:
    """Run what is missing of the picked cells' confirmation, one process a run, and write its tables.

    The first run on the second injection trains it; the others wait for that.

    Raises:
        results.ResultError: there are no tables of a sweep to pick from, or a result that is there cannot be used.
    """
    from lib import cases, collection, sweep

    runs = cases.confirmation_runs(config.load_scale(scale), "auto")
    tasks = []
    for run in runs:
        name = f"confirm-{run.injection}-{run.folder.name}"
        command = [*_command(scale, run.cell.id, run.seed, None), "--injection", str(run.injection)]
        tasks.append(Task(name, command, functools.partial(lambda run: sweep.finished(run) is not None, run)))
    folder = paths.sweep(scale)
    with locked(folder):
        _refuse_unusable(tasks, folder)
        failures = _run_all([tasks], jobs, folder / "logs")
        if not failures:
            collection.collect_confirmation(runs)
    return failures


def run_scorecard(scale: str, jobs: int) -> list[Failure]:
    """Run what is missing of the scorecard, one process a seed or twin, and write its tables.

    Raises:
        plan.PlanError: the committed plan is not the one that ``params/scorecard.yaml`` draws.
        results.ResultError: a result that is there cannot be used.
    """
    from lib import grading, plan, trials

    settings, folder = plan.load(scale), trials.folder_of(scale)
    python = [sys.executable, "-m", "lib"]
    tasks = [Task(part.name, python + part.arguments, part.is_done) for part in grading.parts(settings)]
    with locked(folder):
        _refuse_unusable(tasks, folder)
        failures = _run_all([tasks], jobs, folder / "logs")
        if not failures:
            grading.collect(settings)
    return failures


def run_inversion(scale: str, jobs: int) -> list[Failure]:
    """Run what is missing of the inversion study, one process a run, and write its tables.

    Raises:
        config.ConfigError: ``params/inversion.yaml`` cannot be used.
        results.ResultError: a result that is there cannot be used.
    """
    from lib.inversion import settings, study

    chosen = settings.load(scale)
    inversion = study.Inversion(chosen)

    def task(run: settings.Run) -> Task:
        command = [sys.executable, "-m", "lib", "inversion", "--scale", scale, "--run", run.name]
        return Task(run.name, command, lambda: not inversion.missing(run))

    tasks = [task(run) for run in chosen.runs]
    with locked(inversion.folder):
        _refuse_unusable(tasks, inversion.folder)
        failures = _run_all([tasks], jobs, inversion.folder / "logs")
        if not failures:
            study.collect(chosen)
    return failures


def _refuse_unusable(tasks: list[Task], folder: Path) -> None:
    """Refuse a sweep in whose folder lie results that cannot be used, before anything runs.

    Raises:
        results.ResultError: with the first reason, the number of them, and what moves them all aside.
    """
    from lib.results import ResultError, set_aside_command

    refused = []
    for task in tasks:
        try:
            task.is_done()
        except ResultError as error:
            refused.append(str(error))
    if refused:
        raise ResultError(
            f"{refused[0]} {len(refused)} of {len(tasks)} results here cannot be used; to start afresh, move "
            f"all of it aside with `{set_aside_command(folder)}`."
        )


def _command(scale: str, cell: str, seed: int, grid: str | None) -> list[str]:
    return [sys.executable, "-m", "lib", "cell", "--scale", scale, "--cell", cell, "--seed", str(seed), *_grid(grid)]


def _draws_command(scale: str, cell: str, grid: str | None) -> list[str]:
    return [sys.executable, "-m", "lib", "noise", "--scale", scale, "--cell", cell, *_grid(grid)]


def _grid(grid: str | None) -> list[str]:
    return [] if grid is None else ["--grid", grid]


def _run_all(phases: list[list[Task]], jobs: int, logs: Path) -> list[Failure]:
    """Run what is missing of one phase after the other."""
    logs.mkdir(parents=True, exist_ok=True)
    failures: list[Failure] = []
    missing = [[task for task in phase if not task.is_done()] for phase in phases]
    total, done = sum(map(len, phases)), sum(map(len, phases)) - sum(map(len, missing))
    environment = os.environ | {"TQDM_DISABLE": "1"} | _share_of_cores(jobs)
    with tqdm(total=total, initial=done, desc="runs", unit="run", smoothing=0.1) as bar:
        for phase in missing:
            with ThreadPoolExecutor(max_workers=jobs) as pool:
                try:
                    for finished in as_completed([pool.submit(_run_one, task, logs, environment) for task in phase]):
                        failure = finished.result()
                        if failure is not None:
                            failures.append(failure)
                            bar.write(f"failed: {failure.run}: {failure.reason}", file=sys.stderr)
                        bar.update()
                except BaseException:  # Ctrl-C: what runs got it, too; what waits is not started
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
    return failures


def _share_of_cores(jobs: int) -> dict[str, str]:
    """Several processes share the cores out: with all threads each, they wait for one another and crawl."""
    if jobs == 1:
        return {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = str(max(1, cores // jobs))
    return {config.THREADS: threads, "OMP_NUM_THREADS": threads}


def _run_one(task: Task, logs: Path, environment: dict[str, str]) -> Failure | None:
    log = logs / f"{task.name}.log"
    try:
        return _run_and_check(task, log, environment)
    except (LeakbookError, OSError) as error:  # its result cannot be used, or the log cannot be written
        return Failure(task.name, log, str(error))


def _run_and_check(task: Task, log: Path, environment: dict[str, str]) -> Failure | None:
    for attempt in (1, 2):
        with open(log, "w" if attempt == 1 else "a", encoding="utf-8") as stream:
            code = subprocess.run(
                task.command, stdout=stream, stderr=subprocess.STDOUT, env=environment, cwd=paths.ROOT
            ).returncode
        text = log.read_text(encoding="utf-8", errors="replace")
        if not (code and any(sign in text for sign in NOT_STARTED)):
            break
    if code == 0 and task.is_done():
        return None
    if code < 0:
        return Failure(task.name, log, f"killed by signal {-code}")
    lines = [line for line in text.splitlines() if line.strip()]
    reason = next((line for line in lines if line.startswith("error:")), lines[-1] if lines else f"exit status {code}")
    return Failure(task.name, log, reason)
