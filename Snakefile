"""Sweep, scorecard and inversion for Snakemake: the processes that their make targets start, spread by a profile.

    snakemake --profile params/profiles/local --config scale=laptop
    snakemake --profile params/profiles/slurm --config scale=paper
    snakemake --profile params/profiles/slurm --config scale=paper -- scorecard
    snakemake --profile params/profiles/slurm --config scale=paper -- inversion
"""

import shlex
import sys
from pathlib import Path

from lib import paths, plan
from lib.config import load_scale, load_sweep
from lib.inversion import fast, fast_settings
from lib.inversion import settings as inversion_settings
from lib.inversion.study import Inversion

scale = config.get("scale", "laptop")
grid = str(Path(config["grid"]).resolve()) if "grid" in config else None
settings = load_scale(scale)
cells = load_sweep(settings, grid)
folder = paths.sweep(scale, grid)
options = f"--scale {scale}" + (f" --grid {shlex.quote(grid)}" if grid else "")
noise = [cell.id for cell in cells.cells if cell.kind == "noise"]
python = f"{shlex.quote(sys.executable)} -m lib"
card = plan.load(scale)
card_folder = paths.local(scale) / "scorecard"
inverted = Inversion(inversion_settings.load(scale))
defended = fast.Study(fast_settings.load(scale))
BASE = paths.local(scale) / "testbed" / "result.json"


def runs_of(*ids):
    return [paths.run_folder(scale, cell, seed, grid) / "result.json" for cell in ids for seed in cells.seeds]


def needed(wildcards):
    """The testbed; and for noise the run whose adapter it has the size of."""
    cell = cells.cell(wildcards.cell)
    like = [] if cell.like is None else [paths.run_folder(scale, cell.like, int(wildcards.seed), grid) / "result.json"]
    return [ancient(path) for path in [BASE, *like]]


def draws_of(cell):
    return [folder / "noise" / cell / f"draw-{n:02d}" / "result.json" for n in range(cells.noise_draws)]


def units_of(run):
    return [inverted.unit_folder(run, number) / "result.json" for number in range(run.units)]


def parts_of(kind):
    return [defended.place(unit) / "result.json" for unit in defended.units() if unit.name.startswith(f"{kind}/")]


def trials_of(seed):
    drawn = plan.draw(card)
    return [card_folder / "trials" / name / "result.json" for name in drawn[drawn.seed == seed].trial]


wildcard_constraints:
    cell="[a-z][a-z0-9-]*",
    seed="[0-9]+",


localrules:
    all,
    tables,
    scorecard,
    inversion,
    fast,


rule all:
    input:
        folder / "result.json",


rule base:
    output:
        BASE,
    threads: settings.threads
    shell:
        f"{python} testbed --scale {scale}"


rule cell:
    input:
        needed,
    output:
        folder / "runs" / "{cell}-s{seed}" / "result.json",
    log:
        notebook=folder / "pages" / "{cell}-s{seed}.ipynb",
    threads: settings.threads
    shell:
        f"{python} cell {options}" + " --cell {wildcards.cell} --seed {wildcards.seed}"


rule noise:
    input:
        lambda wildcards: [ancient(path) for path in runs_of(cells.cell(wildcards.cell).like)],
    output:
        draws_of("{cell}"),
    threads: settings.threads
    shell:
        f"{python} noise {options}" + " --cell {wildcards.cell}"


rule tables:
    input:
        runs_of(*(cell.id for cell in cells.cells)),
        [path for cell in noise for path in draws_of(cell)],
    output:
        folder / "result.json",
    shell:
        f"{python} collect {options}"


for card_seed in card.seeds:

    rule:
        name:
            f"trials_{card_seed}"
        output:
            update(trials_of(card_seed)), # finished trials of a seed that was stopped are used again
        params:
            seed=card_seed,
        threads: settings.threads
        shell:
            f"{python} trials --scale {scale}" + " --seed {params.seed}"


rule twin:
    output:
        card_folder / "twins" / "model-{model}" / "result.json",
    wildcard_constraints:
        model="[12]",
    threads: settings.threads
    shell:
        f"{python} twin --scale {scale}" + " --model {wildcards.model}"


rule scorecard:
    input:
        [path for seed in card.seeds for path in trials_of(seed)],
        [card_folder / "twins" / f"model-{model}" / "result.json" for model in (1, 2)],
    output:
        card_folder / "result.json",
    shell:
        f"{python} collect-scorecard --scale {scale}"


for inversion_run in inverted.study.runs:

    rule:
        name:
            f"inversion_{inversion_run.name.replace(' ', '_').replace('-', '_')}"
        output:
            update(units_of(inversion_run)), # finished units of a run that was stopped are used again
        params:
            run=shlex.quote(inversion_run.name),
        threads: settings.threads
        shell:
            f"{python} inversion --scale {scale}" + " --run {params.run}"


rule inversion:
    input:
        [path for run in inverted.study.runs for path in units_of(run)],
    output:
        inverted.folder / "result.json",
    shell:
        f"{python} inversion --scale {scale} --partly"


for kind in ("sets", "peers", "proposals", "sweep", "swept", "cascade", "utility"):

    rule:
        name:
            f"fast_{kind}"
        output:
            update(parts_of(kind)),
        params:
            kind=kind,
        threads: settings.threads
        shell:
            f"{python} fast --scale {scale}" + " --only {params.kind}/"


rule fast:
    input:
        [path for kind in ("sets", "peers", "proposals", "sweep", "swept", "cascade", "utility") for path in parts_of(kind)],
    output:
        defended.folder / "result.json",
    shell:
        f"{python} fast --scale {scale}"
