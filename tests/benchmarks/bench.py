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
import numpy as np
import pandas as pd
from inversion import METHODS as INVERSIONS

from lib import config, files, paths, training
from lib.results import read_result

HERE = Path(__file__).resolve().parent
SOURCES = ("SAFETY", "GUI")  # without and with a picture a record
CELLS = ("safety-full-high-30", "gui-full-high-30")
DECOYS = (("ours", 128), ("harness", 16), ("harness", 64))  # method and batch
SAME_NLL = 1e-4  # nats a secret, by which two methods may differ: the order of sums in fp32


@click.command()
@click.option("--scale", default="laptop", show_default=True)
@click.option("--rounds", default=3, show_default=True, help="times that every method takes its turn")
@click.option("--canaries", default=4, show_default=True, help="canaries whose decoys are scored")
@click.option("--decoys", default=255, show_default=True, help="random decoys of each of them")
@click.option(
    "--only", type=click.Choice(["training", "cell", "decoys", "inversion"]), help="this benchmark, without the others"
)
def main(scale: str, rounds: int, canaries: int, decoys: int, only: str | None) -> None:
    folder = paths.local(scale) / "bench"
    if only in (None, "training"):
        steps = training_steps(scale, rounds)
        medians = steps.pivot_table("seconds", "source", ["method", "precision"])
        show("Training: seconds a step, median over rounds", medians)
        ratios = training_ratios(steps)
        show("Training: how many times the Trainer's throughput", ratios)
        keep(folder, training=steps, training_ratios=ratios)
    if only in (None, "cell"):
        cells = cell_times(scale)
        show("One cell of the sweep: seconds", cells)
        keep(folder, cell=cells)
    if only in (None, "decoys"):
        times = decoy_times(scale, rounds, canaries, decoys)
        ratios = decoy_ratios(times)
        show("Decoys: seconds, and how many times the harness's speed", ratios)
        click.echo(f"at the harness's better batch: {ratios.ratio['harness'].min():.1f} times")
        keep(folder, decoys=times, decoys_ratios=ratios)
        if not (times.difference <= SAME_NLL).all():  # NaN must not pass
            raise SystemExit(f"decoys: NLLs {times.difference.max():.1e} nats apart, expected at most {SAME_NLL:.0e}")
    if only in (None, "inversion"):
        tokens = inversion_times(scale)
        ratios = inversion_ratios(tokens)
        show("Inversion: seconds a token, and times exact inversion's; capped tokens are lower bounds", ratios)
        keep(folder, inversion=tokens, inversion_ratios=ratios)
    click.echo(f"\ntables: {paths.show(folder)}")


def keep(folder: Path, **tables: pd.DataFrame) -> None:
    """Write every table under its name."""
    for name, table in tables.items():
        with files.building(folder / f"{name}.csv") as unfinished:
            table.to_csv(unfinished)


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


def decoy_times(scale: str, rounds: int, canaries: int, decoys: int) -> pd.DataFrame:
    """Seconds to score all decoys and tokens read for it, a row a round, method and batch.

    ``difference`` is the largest one in nats between a secret's NLL and what the first measurement gave.
    """
    results, expected = [], None
    for turn in range(rounds):
        for method, batch in DECOYS:
            options = {"method": method, "batch": batch, "canaries": canaries, "decoys": decoys, "scale": scale}
            result = measured("decoys.py", *(f"--{name}={value}" for name, value in options.items()))
            nll = np.array(result.pop("nll"))
            expected = nll if expected is None else expected
            results.append(result | {"difference": np.abs(nll - expected).max(), "round": turn})
    return pd.DataFrame(results)


def decoy_ratios(times: pd.DataFrame) -> pd.DataFrame:
    """A row a method and batch: tokens read, largest difference, median seconds over rounds and their ratio to ours."""
    grouped = times.groupby(["method", "batch"])
    table = grouped[["strings", "fewest_tokens", "tokens"]].first()
    table["nats apart"] = grouped.difference.max().map("{:.0e}".format)
    table["seconds"] = grouped.seconds.median()
    return table.assign(ratio=table.seconds / table.seconds["ours"].item())


def inversion_times(scale: str) -> pd.DataFrame:
    """A row a token and method: ``method, forward`` (of a token), ``setup, seconds, right, candidates, capped``."""
    parts = []
    for method in INVERSIONS:
        result = measured("inversion.py", "--method", method, "--scale", scale)
        known = {name: result[name] for name in ("method", "forward", "setup")}
        parts.append(pd.DataFrame(result["rows"]).assign(**known))
    return pd.concat(parts, ignore_index=True)


def inversion_ratios(tokens: pd.DataFrame) -> pd.DataFrame:
    """A row a method: tokens, how many were capped and right, seconds, and their ratios to exact inversion together.

    ``overhead`` is the mean time over that of one plain forward pass of the same prompts; ``repaid`` the tokens after
    which a method's set-up is repaid against the language model's order.
    """
    grouped = tokens.groupby("method", sort=False)
    table = grouped[["capped", "right"]].sum().astype(int)
    table.insert(0, "tokens", grouped.size())
    table["mean"], table["median"] = grouped.seconds.mean(), grouped.seconds.median()
    table["worst"], table["candidates"] = grouped.seconds.max(), grouped.candidates.mean()
    table["overhead"] = table["mean"] / grouped.forward.first()
    table["set-up"] = grouped.setup.first()
    saved = table["mean"]["lm order"] - table["mean"]
    table["repaid"] = (table["set-up"] / saved).where((table["set-up"] > 0) & (saved > 0))
    return table.assign(ratio=table["mean"] / table["mean"]["exact, together"])


if __name__ == "__main__":
    main()
