"""Benchmarks, each against what a user would pick instead, as ratios measured in this one run: ``make bench``.

Every measurement is a process of its own, and methods take turns, so that a machine that slows down slows all of them.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import pandas as pd

from lib import config, files, paths, training
from lib.results import read_result

HERE = Path(__file__).resolve().parent
SOURCES = ("SAFETY", "GUI")  # without and with a picture a record
CELLS = ("safety-full-high-30", "gui-full-high-30")


@click.command()
@click.option("--scale", default="laptop", show_default=True)
@click.option("--rounds", default=3, show_default=True, help="times that every method takes its turn")
def main(scale: str, rounds: int) -> None:
    folder = paths.local(scale) / "bench"
    steps = training_steps(scale, rounds)
    show(
        "Training: seconds a step, median over rounds", steps.pivot_table("seconds", "source", ["method", "precision"])
    )
    ratios = training_ratios(steps)
    show("Training: how many times the Trainer's throughput", ratios)
    cells = cell_times(scale)
    show("One cell of the sweep: seconds", cells)
    for name, table in {"training": steps, "training_ratios": ratios, "cell": cells}.items():
        with files.building(folder / f"{name}.csv") as unfinished:
            table.to_csv(unfinished)
    click.echo(f"\ntables: {paths.show(folder)}")


def show(title: str, table: pd.DataFrame) -> None:
    """Print a table under its title."""
    click.echo(f"\n{title}\n{table.round(2).to_string()}")


def training_steps(scale: str, rounds: int) -> pd.DataFrame:
    """Seconds a step, a row a round, source, method and precision."""
    precisions = ("fp32", "bf16") if training.bf16_in_hardware() else ("fp32",)
    results = []
    for turn in range(rounds):
        for source in SOURCES:
            for precision in precisions:
                for method in ("trainer", "ours"):
                    arguments = ["--method", method, "--precision", precision, "--source", source, "--scale", scale]
                    results.append(measured("training_step.py", *arguments) | {"round": turn})
    return pd.DataFrame(results)


def measured(script: str, *arguments: str) -> dict:
    """What a script prints as its last line, JSON."""
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TQDM_DISABLE": "1"})
    if done.returncode:
        raise SystemExit(f"{script} {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def training_ratios(steps: pd.DataFrame) -> pd.DataFrame:
    """The Trainer's seconds over ours, each the median over rounds: as both come, and at equal precision."""
    medians = steps.groupby(["source", "method", "precision"]).seconds.median().unstack(["method", "precision"])
    best = "bf16" if ("ours", "bf16") in medians else "fp32"
    ratios = {"as both come": medians["trainer", "fp32"] / medians["ours", best]}
    for precision in medians["ours"].columns:
        ratios[f"both {precision}"] = medians["trainer", precision] / medians["ours", precision]
    return pd.DataFrame(ratios)


def cell_times(scale: str) -> pd.DataFrame:
    """Wall time of whole cells, in a folder of their own beside which the injected canaries are there already."""
    config.load_scale(scale)
    testbed = read_result(paths.local(scale) / "testbed")
    if testbed is None:
        raise SystemExit(f"the cells need an injected model: run `make run SCALE={scale}` first")
    rows = {}
    with tempfile.TemporaryDirectory() as outputs:
        local = Path(outputs) / "local" / scale
        (local / "adapters").mkdir(parents=True)
        canaries = testbed.content["provenance"]["adapters"]
        (local / "adapters" / canaries).symlink_to(paths.local(scale) / "adapters" / canaries)
        for name in (CELLS[0], *CELLS):  # the first one also evaluates the base, once for all cells: it is shown apart
            seed = len(rows)
            started = time.perf_counter()
            command = [sys.executable, "-m", "lib", "cell", "--scale", scale, "--cell", name, "--seed", str(seed)]
            environment = os.environ | {"LEAKBOOK_OUTPUTS": outputs, "TQDM_DISABLE": "1"}
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL, env=environment)
            wall = time.perf_counter() - started
            record = read_result(local / "sweep" / "runs" / paths.run_name(name, seed)).content["provenance"]
            parts = record["seconds_of"]
            startup = wall - parts["training"] - parts["evaluation"]
            label = name if rows else f"{name}, with its base"
            rows[label] = {"start-up": startup, **parts, "wall": wall}
    return pd.DataFrame(rows).T.drop(columns="loading")


if __name__ == "__main__":
    main()
