"""Notebooks and whole sweeps run as processes: one a run, its log kept, what failed named and the rest finished."""

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


def execute_cell(scale: str, cell: str, seed: int, stream: TextIO) -> None:
    """Run the ``cell`` notebook for one cell and seed.

    Raises:
        config.ConfigError: scale or cell are unknown; RunError: see :func:`execute`.
    """
    config.cell_run(scale, cell, seed, "local")
    name = paths.run_name(cell, seed)
    page = paths.local(scale) / "sweep" / "pages" / f"{name}.ipynb"
    execute("cell", page, {"scale": scale, "cell": cell, "seed": seed}, paths.run_folder(scale, cell, seed), stream)


@dataclass(frozen=True)
class Failure:
    """A run of the sweep that failed: its name, its log, and the log's last line."""

    run: str
    log: Path
    reason: str


def run_sweep(scale: str, jobs: int, only: Sequence[str] = (), command: Callable | None = None) -> list[Failure]:
    """Run what is missing of the sweep, one process a run and ``jobs`` at a time; write its tables if all is there.

    Failed runs are given back and leave the others alone. A run whose kernel did not start is tried once more. A
    second sweep on the same folder waits for the first and says so. ``command`` makes the command line of a run.

    Raises:
        config.ConfigError: scale or cell are unknown.
    """
    from lib.results import read_result  # torch and pandas are not loaded to start a single run
    from lib.sweep import collect, write_tables

    settings = config.load_scale(scale)
    grid = config.load_sweep(settings)
    cells = [grid.cell(name) for name in only] or list(grid.cells)
    cells.sort(key=lambda cell: cell.kind == "noise")  # noise needs the adapters of the others
    folder = paths.local(scale) / "sweep"
    with locked(folder):
        wanted = [(cell.id, seed) for cell in cells for seed in grid.seeds]
        missing = [key for key in wanted if read_result(paths.run_folder(scale, *key)) is None]
        failures = _run_all(scale, missing, jobs, folder / "logs", command or _command, len(wanted))
        if not failures and not only:
            results = [read_result(paths.run_folder(scale, *key)) for key in wanted]
            write_tables(folder, collect(grid, results))
    return failures


def _command(scale: str, cell: str, seed: int) -> list[str]:
    return [sys.executable, "-m", "lib", "cell", "--scale", scale, "--cell", cell, "--seed", str(seed)]


def _run_all(
    scale: str, missing: list[tuple[str, int]], jobs: int, logs: Path, command: Callable, total: int
) -> list[Failure]:
    logs.mkdir(parents=True, exist_ok=True)
    failures: list[Failure] = []
    bar = tqdm(total=total, initial=total - len(missing), desc="sweep", unit="run", smoothing=0.1)
    with bar, ThreadPoolExecutor(max_workers=jobs) as pool:
        pending = {pool.submit(_run_one, scale, *key, logs, command): key for key in missing}
        for done in as_completed(pending):
            failure = done.result()
            if failure is not None:
                failures.append(failure)
                bar.write(f"failed: {failure.run}: {failure.reason}")
            bar.update()
    return failures


def _run_one(scale: str, cell: str, seed: int, logs: Path, command: Callable) -> Failure | None:
    name = paths.run_name(cell, seed)
    log = logs / f"{name}.log"
    for attempt in (1, 2):
        with open(log, "w" if attempt == 1 else "a", encoding="utf-8") as stream:
            environment = os.environ | {"TQDM_DISABLE": "1"}
            code = subprocess.run(
                command(scale, cell, seed), stdout=stream, stderr=subprocess.STDOUT, env=environment, cwd=paths.ROOT
            ).returncode
        text = log.read_text(encoding="utf-8", errors="replace")
        if not (code and any(sign in text for sign in NOT_STARTED)):
            break
    if code == 0 and (paths.run_folder(scale, cell, seed) / "result.json").exists():
        return None
    lines = [line for line in text.splitlines() if line.strip()]
    reason = next((line for line in lines if line.startswith("error:")), lines[-1] if lines else f"exit status {code}")
    return Failure(name, log, reason)
