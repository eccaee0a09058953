"""Command line behind the Makefile: ``python -m lib --help``.

What needs torch is imported where it is used: a process that only starts a kernel should not load it.
"""

import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lib import config, files, paths
from lib.errors import LeakbookError
from lib.runner import (
    KERNEL_ARGUMENTS,
    Failure,
    execute,
    execute_cell,
    run_confirmation,
    run_inversion,
    run_scorecard,
    run_sweep,
)

if TYPE_CHECKING:
    import nbformat
    import pandas as pd

    from lib.results import Result

STUDIES = {"testbed": "00_testbed"}
CASES = {
    "c3": "01_case_c3_window_truncation",
    "c4": "02_case_c4_preamble_drift",
    "c5": "03_case_c5_undertrained",
}
SCORECARD = "04_probe_scorecard"
INVERSION = "05_inversion"
FAST = "06_inversion_fast_and_defended"
EXAMPLES = ("safety-full-high-30-s0",)  # runs of the sweep that the stored page of notebook `cell` needs
SCALE = click.option("--scale", default="laptop", show_default=True, help="a scale of params/scales.yaml")
JOBS = click.option("--jobs", default=1, show_default=True, type=click.IntRange(1), help="processes at a time")
GRID = click.option("--grid", type=click.Path(resolve_path=True), help="a file of cells instead of params/cells.yaml")


@click.group()
def main() -> None:
    """What a language model gives away: run the studies, write the reference."""


@main.command()
def fetch() -> None:
    """Download and build the embedded models into the cache folder, once."""
    from lib import embedded

    click.echo(f"embedded models: {paths.cache()}")
    embedded.smol_vl_folder()
    try:
        embedded.qwen_tokenizer_folder()
    except embedded.FetchError as error:
        click.echo(f"Without the Qwen vocabulary the tests of rehearsal-vl are skipped: {error}", err=True)


@main.command()
@SCALE
def run(scale: str) -> None:
    """Run the main job at one scale into outputs/local, and print paper against measurement."""
    settings = config.load_scale(scale)
    folder = paths.local(scale)
    click.echo(
        f"Testbed at {scale} scale: {settings.canaries.n_text} text and {settings.canaries.n_image} image canaries "
        f"into {settings.backbone}, on {settings.threads} threads.\nResults go to {paths.show(folder)}; what is there "
        "already is used again, and a run that was stopped goes on where it was."
    )
    started = time.perf_counter()
    _run_testbed(scale)
    from lib import casework

    click.echo("The cells that tell the three cases, run anew with one seed:", err=True)
    _report(scale, casework.rerun(settings), folder, started)


@main.command()
@SCALE
def testbed(scale: str) -> None:
    """Inject the canaries at one scale, into outputs/local: what every other run starts from."""
    _run_testbed(config.load_scale(scale).name)


def _run_testbed(scale: str) -> None:
    folder = paths.local(scale)
    for study, notebook in STUDIES.items():
        execute(notebook, folder / f"{notebook}.ipynb", {"scale": scale}, folder / study, sys.stderr)


def _report(scale: str, reruns: "dict[str, Result]", folder: Path, started: float) -> None:
    import pandas as pd

    from lib import paper, report
    from lib.inversion import settings, study

    results, origins = _case_results(scale)
    results |= {name: read_local(folder / name) for name in STUDIES}
    results |= _inversion_result(scale)
    table = paper.claims_table({name: result.values for name, result in results.items()}, scale)
    with files.building(folder / "claims.csv") as unfinished:
        table.to_csv(unfinished, index=False)
    click.echo("A short inversion: text from hidden states.", err=True)
    inverted = study.short(settings.load(scale))
    found = {case: results[case] for case in CASES if case in results}
    page = report.write(folder, scale, reruns, found, table, inverted)
    verdicts = {paper.REPRODUCED: "yes", paper.NOT_REPRODUCED: "NO", paper.NOT_TESTABLE: "not testable"}
    same = table.state.map(verdicts) + table.by_design.map({True: " (by design)", False: ""})
    shown = pd.DataFrame({"claim": table.claim, "paper": table.reported, "here": table.measured, "same?": same})
    click.echo("\n" + _aligned(shown) + "\n")
    for case, result in reruns.items():
        values, found = result.values, "shows" if result.values["shown"] else "does not show"
        click.echo(
            f"{case}, run anew: {values['cell']} with seed {values['seed']} {found} {values['pattern']}; the protocol "
            f"says {values['change']['verdict']} (exposure {values['exposure']['before']:.2f} to "
            f"{values['exposure']['after']:.2f} of at most {values['cap']:.0f} bits)"
        )
    right = sum(inverted.true[prompt] == inverted.found[prompt] for prompt in inverted.true)
    click.echo(f"Text from hidden states: {right} of {len(inverted.true)} prompts read back exactly.")
    click.echo(f"\nClaims about the sweep and its cases are decided from {origins}.")
    click.echo(f"{time.perf_counter() - started:.0f} s. Report: {paths.show(page)}. Read on:")
    for notebook in STUDIES.values():
        click.echo(f"  {paths.show(folder / f'{notebook}.ipynb')}")
    for notebook in CASES.values():
        click.echo(f"  {paths.show(paths.NOTEBOOKS / f'{notebook}.ipynb')}")


def read_local(folder: Path) -> "Result":
    """A result that must be there."""
    from lib.results import ResultError, read_result

    result = read_result(folder)
    if result is None:
        raise ResultError(f"{paths.show(folder)} holds no result")
    return result


def _belongs(case: "Result", sweep: "Result", confirmation: "Result | None") -> bool:
    """Whether a case was computed by rule from these tables."""
    inputs = case.content["inputs"]
    repeats = None if confirmation is None else confirmation.content["files"]
    return inputs["cell"] is None and (inputs["tables"], inputs["confirmation"]) == (sweep.content["files"], repeats)


def _case_results(scale: str) -> "tuple[dict[str, Result], str]":
    """Results of the sweep and of the cases: this machine's where all are there, else the committed ones, or none."""
    from lib import collection
    from lib.results import read_result

    places = {
        "this machine's own runs": (paths.sweep(scale), paths.local(scale) / "cases"),
        "the committed reference": (paths.reference(scale) / "sweep", paths.reference(scale) / "cases"),
    }
    for origin, (sweep, cases) in places.items():
        found = {"sweep": read_result(sweep)} | {case: read_result(cases / case) for case in CASES}
        repeats = read_result(sweep, collection.CONFIRMATION)
        if None not in found.values() and all(_belongs(found[case], found["sweep"], repeats) for case in CASES):
            return found, origin
    return {}, "nothing: there are no tables of a sweep at this scale"


def _inversion_result(scale: str) -> "dict[str, Result]":
    """The inversion study, this machine's or the committed one, where there is one of these settings."""
    from lib.inversion import settings, study
    from lib.results import MissingResult, ResultError

    try:
        return {"inversion": study.load(settings.load(scale), "auto")}
    except MissingResult:
        return {}
    except ResultError as error:  # its claims are then not run; the main job goes on
        click.echo(f"The inversion study is left out: {error}", err=True)
        return {}


@main.command()
@click.argument("names", nargs=-1)
def notebooks(names: tuple[str, ...]) -> None:
    """Execute every notebook, or those with such NAMES, on the committed reference, and store its pages beside the
    source."""
    import nbformat
    from nbclient import NotebookClient

    sources = {source.stem: source for source in sorted(paths.NOTEBOOKS.glob("*.py"))}
    unknown = [name for name in names if name not in sources]
    if unknown:
        raise click.ClickException(f"notebooks: got {unknown[0]!r}, expected names of {', '.join(sources)}")
    for source in [sources[name] for name in names] or sources.values():
        notebook = _from_source(source)
        environment = os.environ | {config.ENVIRONMENT: "reference", "TQDM_DISABLE": "1"}
        client = NotebookClient(
            notebook,
            timeout=None,
            kernel_name="python3",
            record_timing=False,
            extra_arguments=KERNEL_ARGUMENTS,
            resources={"metadata": {"path": str(paths.NOTEBOOKS)}},
        )
        client.execute(env=environment)
        with files.building(source.with_suffix(".ipynb")) as unfinished:
            nbformat.write(notebook, unfinished)
        click.echo(f"executed {paths.show(source.with_suffix('.ipynb'))}")


@main.command()
@click.option("--solved", type=click.Path(path_type=Path), help="write the solved ones, for a teacher, to this folder")
def exercises(solved: Path | None) -> None:
    """Write the exercises' notebooks from their sources, beside them."""
    from lib import exercises

    written = exercises.write() if solved is None else exercises.write(solved, solved=True)
    click.echo(f"wrote {len(written)} exercises to {paths.show(written[0].parent)}")


@main.command()
def book() -> None:
    """Build the book from the stored notebooks and pages into outputs/book; nothing is executed."""
    from lib import book

    click.echo(f"built {paths.show(book.build())}")


def _from_source(source: Path) -> "nbformat.NotebookNode":
    """The notebook of a ``.py`` source without outputs; cell ids count up, so that its diffs stay small."""
    import jupytext
    import nbformat

    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:02d}"
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    return notebook


def _aligned(table: "pd.DataFrame") -> str:
    widths = [max(len(str(value)) for value in [name, *table[name]]) for name in table]
    rows = [list(table.columns), ["-" * width for width in widths], *table.astype(str).to_numpy().tolist()]
    return "\n".join(
        "  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


@main.command()
@SCALE
@click.option("--cell", required=True, help="a cell of params/cells.yaml")
@click.option("--seed", required=True, type=int)
@GRID
@click.option(
    "--injection", default=0, type=click.IntRange(0), help="1, 2, ...: on another injection, with new secrets"
)
def cell(scale: str, cell: str, seed: int, grid: str | None, injection: int) -> None:
    """Run one cell of the sweep with one seed."""
    execute_cell(scale, cell, seed, sys.stderr, grid, injection)


@main.command()
@SCALE
@click.option("--cell", required=True, help="a noise cell of params/cells.yaml")
@GRID
def noise(scale: str, cell: str, grid: str | None) -> None:
    """Make the further draws of one noise cell."""
    run = config.cell_run(scale, cell, 0, "local", grid)
    if run.cell.kind != "noise":
        known = ", ".join(other.id for other in run.sweep.cells if other.kind == "noise")
        raise config.ConfigError(f"cell: got {cell!r}, which is trained; expected one of {known}.")
    from lib import sweep

    sweep.noise_draws(run)


@main.command()
@SCALE
@GRID
def collect(scale: str, grid: str | None) -> None:
    """Write the tables of a sweep whose runs are all there."""
    from lib import collection

    settings = config.load_scale(scale)
    result = collection.collect(collection.all_runs(settings, config.load_sweep(settings, grid), grid))
    click.echo(f"complete: {paths.show(result.folder)}")


@main.command()
@SCALE
@JOBS
@click.option("--cells", default="", help="only these cells, separated by commas")
@GRID
def sweep(scale: str, jobs: int, cells: str, grid: str | None) -> None:
    """Run what is missing of the sweep, and write its tables when all of it is there."""
    _refuse_failures(run_sweep(scale, jobs, [name.strip() for name in cells.split(",") if name.strip()], grid))
    if cells:
        click.echo(f"{cells}: done. The tables are written when every cell is there.")
    else:
        click.echo(f"complete: {paths.show(paths.sweep(scale, grid))}")


def _refuse_failures(failures: list[Failure]) -> None:
    for failure in failures:
        click.echo(f"{failure.run} failed: {failure.reason}\n    log: {paths.show(failure.log)}", err=True)
    if failures:
        raise click.ClickException(f"{len(failures)} runs failed; the others are kept. Run again to try them again.")


@main.command()
@SCALE
@JOBS
def confirm(scale: str, jobs: int) -> None:
    """Repeat the cells that tell the cases: with unused seeds, and on a second injection with new secrets."""
    _refuse_failures(run_confirmation(scale, jobs))
    click.echo(f"complete: {paths.show(paths.sweep(scale) / 'confirm.csv')}")


@main.command(name="cases")
@SCALE
@JOBS
def run_cases(scale: str, jobs: int) -> None:
    """Repeat the cells that tell the cases, then compute the three case notebooks into outputs/local."""
    confirm.callback(scale, jobs)
    folder = paths.local(scale)
    for case, notebook in CASES.items():
        execute(notebook, folder / f"{notebook}.ipynb", {"scale": scale}, folder / "cases" / case, sys.stderr)
    click.echo(f"complete: {paths.show(folder / 'cases')}")


@main.command()
@SCALE
def plan(scale: str) -> None:
    """Draw the scorecard's plan to where it is committed from, before any of it is run."""
    from lib import grading, plan

    click.echo(f"wrote {paths.show(grading.commit_plan(plan.load(scale)))}")


@main.command()
@SCALE
@click.option("--seed", required=True, type=int, help="a seed of the plan")
def trials(scale: str, seed: int) -> None:
    """Make what is missing of one seed's trials of the scorecard."""
    from lib import grading, plan, trials

    settings = plan.load(scale)
    grading.draw_plan(settings)
    trials.run_seed(settings, seed)


@main.command()
@SCALE
@click.option("--model", required=True, type=click.IntRange(1, 2))
def twin(scale: str, model: int) -> None:
    """Train one of the twins, and ask it for both secrets of every record."""
    from lib import plan, twins

    twins.run(plan.load(scale), model)


@main.command()
@SCALE
@JOBS
def scorecard(scale: str, jobs: int) -> None:
    """Run what is missing of the scorecard, write its tables, and its notebook into outputs/local."""
    _refuse_failures(run_scorecard(scale, jobs))
    folder = paths.local(scale)
    execute(SCORECARD, folder / f"{SCORECARD}.ipynb", {"scale": scale}, folder / "scorecard", sys.stderr)
    click.echo(f"complete: {paths.show(folder / 'scorecard')}")


@main.command(name="collect-scorecard")
@SCALE
def collect_scorecard(scale: str) -> None:
    """Write the tables of a scorecard whose trials and twins are all there."""
    from lib import grading, plan

    click.echo(f"complete: {paths.show(grading.collect(plan.load(scale)).folder)}")


@main.command()
@SCALE
@JOBS
@click.option("--run", "only", help="this run of params/inversion.yaml alone; the tables are then left as they are")
@click.option("--partly", is_flag=True, help="compute nothing: write the tables of the runs that are there")
def inversion(scale: str, jobs: int, only: str | None, partly: bool) -> None:
    """Compute what is missing of the inversion study, write its tables, and its notebook into outputs/local."""
    from lib.inversion import settings, study

    if partly:
        result = study.collect(settings.load(scale), partly=True)
        pending = ", ".join(result.values["pending"]) or "nothing"
        click.echo(f"{paths.show(result.folder)}: pending: {pending}")
        return
    if only is not None:
        study.run_study(settings.load(scale), only)
        click.echo(f"{only}: done. The tables are written when every run is there.")
        return
    _refuse_failures(run_inversion(scale, jobs))
    folder = paths.local(scale)
    execute(INVERSION, folder / f"{INVERSION}.ipynb", {"scale": scale}, folder / "inversion", sys.stderr)
    click.echo(f"complete: {paths.show(folder / 'inversion')}")


@main.command()
@SCALE
@click.option("--only", help="units alone whose name starts so: sets, sweep, cascade/4-bit; no tables are written")
def fast(scale: str, only: str | None) -> None:
    """Compute what is missing of exact inversion and defences, write tables and notebook into outputs/local."""
    from lib.inversion import fast as study
    from lib.inversion import fast_settings

    chosen = fast_settings.load(scale)
    study.run_study(chosen, only)
    if only is not None:
        click.echo(f"{only}: done. The tables are written when every unit is there.")
        return
    folder = study.collect(chosen).folder
    execute(FAST, paths.local(scale) / f"{FAST}.ipynb", {"scale": scale}, folder, sys.stderr)
    click.echo(f"complete: {paths.show(folder)}")


@main.command()
@click.argument("states", type=click.Path(path_type=Path))
@click.option("--model", required=True, help="a built-in name, a directory or a hub id: whose states they are")
@click.option("--layer", type=click.IntRange(1), help="behind how many layers they were taken; default: all")
@click.option("--norm", type=click.Choice(["pre", "post"]), default="post", show_default=True)
@click.option("--trusted", is_flag=True, help="do not check layer and norm against all one-token prompts first")
@click.option("--output", type=click.Path(path_type=Path), help="a CSV file for what was found, token by token")
def invert(states: Path, model: str, layer: int | None, norm: str, trusted: bool, output: Path | None) -> None:
    """Read prompts back from hidden STATES: a .npy, .safetensors or .pt file with an array [prompts, positions, width].

    hidden_states[-1] of transformers is behind all layers, post norm; hidden_states[k] is layer k, pre.
    """
    from lib.inversion import own
    from lib.inversion.reader import Convention

    table, found = own.read_back(model, own.load_states(states), Convention(layer, norm), trusted)
    for row in table.itertuples():
        click.echo(f"{row.prompt}\t{row.status}, {row.candidates} candidates\t{row.text!r}")
    if output is not None:
        with files.building(output) as unfinished:
            found.tokens.to_csv(unfinished, index=False)


@main.command()
@SCALE
@click.option("--model", help="a built-in name, a directory or a hub id; left out: the worked example of the scale")
@click.option("--adapter", multiple=True, help="a folder of peft; several are audited one by one")
@click.option("--baseline", help="a model, or an adapter on the model; default: the model without its adapter")
@click.option("--canaries", help="a .jsonl or .csv file: id, prompt, and target or prefix, secret, suffix")
@click.option("--n-decoys", type=click.IntRange(0), default=63, show_default=True, help="decoys a canary")
@click.option("--quick", is_flag=True, help="31 decoys a canary")
@click.option("--decoys", default="characters", show_default=True, help="characters, words, a file, or module:function")
@click.option("--hits", default="1,4,16", show_default=True, help="numbers of samples for the chance of a hit")
@click.option("--windows", default="20", show_default=True, help="lengths of the window probe, in tokens")
@click.option("--template", type=click.Choice(["auto", "chat", "plain"]), default="auto", show_default=True)
@click.option("--output", default="audit", show_default=True, help="a name in outputs/local/<scale>, or a path")
def audit(hits: str, windows: str, quick: bool, n_decoys: int, **given: object) -> None:
    """Audit a model of one's own: what it memorised of the canaries it was trained on."""
    from lib.audit import settings, study

    count = settings.QUICK if quick else n_decoys
    numbers = {"hits": settings.numbers("hits", hits), "windows": settings.numbers("windows", windows)}
    params = settings.audit(n_decoys=count, **numbers, **given)
    click.echo(settings.cost_of(count), err=True)
    result = study.find(params)
    for line in study.told(result):
        click.echo(line)
    click.echo(f"Report: {paths.show(result.folder / study.PAGE)}")


@main.command()
@click.option("--n", "count", type=click.IntRange(1), required=True, help="canaries")
@click.option(
    "--format", "spec", default="hex:16", show_default=True, help="hex:N, digits:N, words:N, email, like:EXAMPLE"
)
@click.option(
    "--repetitions", type=click.IntRange(1), default=60, show_default=True, help="of each in the training file"
)
@click.option("--template", type=click.Choice(["chat", "plain"]), default="chat", show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=Path("canaries"), show_default=True)
def canaries(count: int, spec: str, repetitions: int, template: str, seed: int, output: Path) -> None:
    """Write canaries to plant, and a training file that repeats them."""
    from lib.audit import planting

    planting.write(output, planting.draw(count, spec, seed), spec, repetitions, seed, template)
    click.echo(planting.how_to_mix(output, count, repetitions, template))


@main.command(name="check-canaries")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("tokenised", type=click.Path(path_type=Path))
@click.option("--model", required=True, help="whose tokenizer made the training set")
@click.option("--n-decoys", type=click.IntRange(0), default=63, show_default=True, help="as the audit will draw them")
@click.option("--decoys", "kind", default="characters", show_default=True)
@click.option("--template", type=click.Choice(["auto", "chat", "plain"]), default="auto", show_default=True)
def check_canaries(file: Path, tokenised: Path, **given: object) -> None:
    """Prove from a TOKENISED training set that every canary of FILE gets loss, and that no decoy is in it."""
    from lib.audit import study

    table = study.check_planted(file, tokenised, **given)
    failed = table[table.problem != ""]
    for row in failed.itertuples():
        click.echo(f"{row.canary}: {row.problem}")
    if len(failed):
        raise click.ClickException(f"{len(failed)} of {len(table)} canaries would not be planted as they should")
    times = " to ".join(map(str, sorted({table.trained.min(), table.trained.max()})))
    click.echo(f"{len(table)} canaries, each with loss on its whole secret {times} times; no decoy in its place.")


@main.command()
@SCALE
def reference(scale: str) -> None:
    """Make this machine's complete local results of one scale the committed reference: all of them or none."""
    from lib import cases, casework, collection, grading, paper, plan, report
    from lib.audit.study import RECORD
    from lib.inversion import fast, settings, study
    from lib.results import read_result

    local = paths.local(scale)
    parts = {name: (local / name, "result.json") for name in STUDIES} | {"sweep": (paths.sweep(scale), "result.json")}
    parts |= {f"sweep/runs/{name}": (paths.sweep(scale) / "runs" / name, "result.json") for name in EXAMPLES}
    parts |= {f"cases/{case}": (local / "cases" / case, "result.json") for case in CASES}
    parts |= {"confirmation": (paths.sweep(scale), collection.CONFIRMATION)}
    parts |= {name: (local / name, "result.json") for name in ("scorecard", "inversion", "fast")}
    parts |= {"audit": (local / "audit", RECORD)}
    results = {name: read_result(*place) for name, place in parts.items()}
    missing = [name for name, result in results.items() if result is None]
    if missing:
        raise click.ClickException(
            f"no complete local result of {', '.join(missing)}: run `make run`, `make sweep`, `make cases`, "
            f"`make scorecard`, `make inversion`, `make fast` and `make audit` with SCALE={scale}"
        )
    for case in CASES:
        if not _belongs(results[f"cases/{case}"], results["sweep"], results["confirmation"]):
            raise click.ClickException(
                f"case {case} was computed from other tables of the sweep: run `make cases` again"
            )
    grading.load(plan.load(scale), "local")  # refuses one of other settings
    pending = study.load(settings.load(scale), "local", partly=True).values["pending"]
    if pending:
        click.echo(f"The inversion study has runs pending: {', '.join(pending)}", err=True)
    reruns = casework.rerun(config.load_scale(scale))
    with files.building(paths.reference(scale)) as unfinished:
        for name, result in results.items():
            if not name.startswith("cases/"):
                _copy_files(result, unfinished / name.replace("confirmation", "sweep"), parts[name][1])
        cases.share_decoys([results[f"cases/{case}"] for case in CASES], unfinished / "cases")
        named = {name.removeprefix("cases/"): result for name, result in results.items()}
        claims = paper.claims_table({name: result.values for name, result in named.items()}, scale)
        claims.to_csv(unfinished / "claims.csv", index=False)
        if (local / "bench" / fast.BENCH).exists():
            (unfinished / "bench").mkdir()
            shutil.copy2(local / "bench" / fast.BENCH, unfinished / "bench" / fast.BENCH)
        found = {case: named[case] for case in CASES}
        report.write(unfinished, scale, reruns, found, claims, study.short(settings.load(scale)))
        report.write_scorecard(unfinished / "scorecard", named["scorecard"], named["sweep"])
    if scale == "laptop":
        _write_readme("results", results_table(claims))
        _write_readme("scorecard", scorecard_table(named["scorecard"]))
    click.echo(f"wrote {paths.show(paths.reference(scale))}")


@main.command()
@SCALE
def land(scale: str) -> None:
    """Copy this machine's finished runs of the sweep, whole ones only, to where they are committed from."""
    from lib import collection, sweep

    settings, target = config.load_scale(scale), paths.reference(scale) / "sweep" / "runs"
    runs = collection.all_runs(settings, config.load_sweep(settings))
    finished = [result for run in runs if (result := sweep.finished(run)) is not None]
    for result in finished:
        _copy_result(result, target / result.folder.name)
    click.echo(f"{len(finished)} runs in {paths.show(target)}")


def _copy_result(result: "Result", target: Path) -> None:
    with files.building(target) as unfinished:
        _copy_files(result, unfinished)


def _copy_files(result: "Result", target: Path, record: str = "result.json") -> None:
    target.mkdir(parents=True, exist_ok=True)
    for name in [*result.content["files"], record]:
        shutil.copy2(result.folder / name, target / name)


def _write_readme(name: str, table: str) -> None:
    """Put a table of the reference into the README, between the two comments of that name."""
    readme = paths.ROOT / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(f"<!-- {name}:")
    opening, _, rest = rest.partition("-->\n")
    after = rest.partition(f"<!-- end of {name} -->")[2]
    readme.write_text(f"{before}<!-- {name}:{opening}-->\n{table}<!-- end of {name} -->{after}", encoding="utf-8")


def scorecard_table(card: "Result") -> str:
    """Which probe finds what at which false-alarm rate, as a Markdown table."""
    from lib import scorecard

    found = scorecard.summary(scorecard.detection(card.table("runs.csv"), card.table("scores.csv")))
    tasks = dict(zip(scorecard.TASKS, ("damage", "learning"), strict=True))
    heads = [f"{tasks[base]}: {role}" for base, role in found.columns]
    lines = [f"| probe | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    lines += [f"| {probe} | {' | '.join(row)} |" for probe, row in zip(found.index, found.to_numpy(), strict=True)]
    return "\n".join(lines) + "\n"


def results_table(claims: "pd.DataFrame") -> str:
    """The claims as a Markdown table."""
    lines = ["| claim | the paper | here, at laptop scale | |", "|---|---|---|---|"]
    for row in claims.itertuples():
        state = row.state + (", by design" if row.by_design else "")
        lines.append(f"| {row.claim} | {row.reported} | {row.measured} | {state} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    try:
        main(standalone_mode=True)
    except LeakbookError as problem:
        raise SystemExit(f"error: {problem}") from problem
