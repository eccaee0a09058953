"""The house: one set of pins for pip and conda, two commands, no trace of one machine."""

import re
import subprocess
import tomllib

import pandas as pd
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from lib import cases, paper, paths, results, rules, verdicts
from lib.__main__ import CASES, results_table

REQUIREMENTS = [
    Requirement(line)
    for line in (paths.ROOT / "requirements.txt").read_text().splitlines()
    if line.strip() and not line.startswith("#")
]
REFERENCE = paths.ROOT / "outputs" / "laptop"
PROJECT = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())["project"]


def tracked():
    listed = subprocess.run(["git", "ls-files"], cwd=paths.ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [paths.ROOT / name for name in listed.stdout.splitlines() if (paths.ROOT / name).exists()]


def test_requirements_are_exact_pins():
    for requirement in REQUIREMENTS:
        assert [specifier.operator for specifier in requirement.specifier] == ["=="], str(requirement)
    assert "torch==2.13.0" in {str(requirement) for requirement in REQUIREMENTS}


def test_conda_takes_the_same_pins_as_pip():
    environment = yaml.safe_load((paths.ROOT / "environment.yml").read_text())
    conda = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert pip == ["-r requirements.txt", "-e ."]
    assert {re.split("[=<>]", entry)[0] for entry in conda} == {"python", "pip", "make"}  # nothing conda pins besides
    (python,) = [entry for entry in conda if entry.startswith("python")]
    assert Version(python.split("=")[-1]) in Requirement("python" + PROJECT["requires-python"]).specifier


def test_the_pins_satisfy_the_packages_own_bounds():
    pinned = {requirement.name.lower().replace("_", "-"): requirement for requirement in REQUIREMENTS}
    extras = [item for group in PROJECT["optional-dependencies"].values() for item in group]
    for bound in map(Requirement, PROJECT["dependencies"] + extras):
        version = str(pinned[bound.name.lower()].specifier).removeprefix("==")
        assert Version(version) in bound.specifier, str(bound)


def test_the_readme_shows_the_two_commands_and_they_exist():
    readme, makefile = (paths.ROOT / "README.md").read_text(), (paths.ROOT / "Makefile").read_text()
    for target in ("run", "test"):
        assert f"make {target}" in readme and f"\n{target}:" in "\n" + makefile
    steps = [line for line in (paths.ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")]
    assert steps == ["make test", "make test-book"]  # the last line is pytest's


def test_no_file_names_one_machine_or_holds_bulk():
    for path in tracked():
        assert path.stat().st_size < 3_000_000, path
        if path.suffix in {".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".json", ".jsonl", ".csv", ".ipynb"}:
            assert not re.search(r"/(home|root|work|Users)/\w", path.read_text()), path


def test_modules_import_one_way():
    order = [
        "errors",
        "paths",
        "config",
        "rules",
        "files",
        "embedded",
        "models",
        "spans",
        "pictures",
        "canaries",
        "benign",
        "encoding",
        "scoring",
        "adapters",
        "training",
        "interventions",
        "probes",
        "exposure",
        "extraction",
        "truth",
        "plan",
        "verdicts",
        "specification",
        "scorecard",
        "paper",
        "results",
        "runs",
        "sweep",
        "collection",
        "trials",
        "twins",
        "grading",
        "precision",
        "cases",
        "casework",
        "inversion.reader",
        "inversion.conventions",
        "inversion.continuous",
        "inversion.sipit",
        "inversion.channels",
        "inversion.diagnostics",
        "inversion.corpus",
        "inversion.fitting",
        "inversion.proposer",
        "inversion.attackers",
        "inversion.verified",
        "inversion.defences",
        "inversion.own",
        "inversion.settings",
        "inversion.analysis",
        "inversion.study",
        "inversion.fast_settings",
        "inversion.fast",
        "inversion.weighing",
        "runner",
        "figures",
        "inversion.figures",
        "inversion.defence_figures",
        "audit.formats",
        "audit.reader",
        "audit.settings",
        "audit.decoys",
        "audit.scoring",
        "audit.analysis",
        "audit.report",
        "audit.planting",
        "audit.example",
        "audit.study",
        "report",
        "checks",
        "exercises",
        "explorer",
        "book",
        "__main__",
    ]
    found = [path.relative_to(paths.ROOT / "lib").with_suffix("") for path in (paths.ROOT / "lib").rglob("*.py")]
    assert sorted(order) == sorted(".".join(name.parts) for name in found if name.name != "__init__")
    for place, name in enumerate(order):
        late = [other for other in imported_by(name) if order.index(other) >= place]
        assert not late, f"{name} imports {late}"


def imported_by(module):
    """Modules of the package that one imports, written ``errors`` or ``inversion.reader``."""
    text, found = (paths.ROOT / "lib" / f"{module.replace('.', '/')}.py").read_text(), set()
    for package, names in re.findall(r"^\s*from lib(\.inversion|\.audit)? import (\([^)]+\)|.+)$", text, re.M):
        listed = re.sub(r"#.*| as \w+", "", names).strip("()").split(",")
        found |= {f"{package}.{name.strip()}".strip(".") for name in listed if name.strip()}
    within = re.findall(r"^\s*from lib\.((?:inversion|audit)\.\w+|\w+) import", text, re.M)
    return found | set(within) - {"inversion", "audit"}


def test_the_readmes_results_are_the_committed_ones():
    claims = pd.read_csv(REFERENCE / "claims.csv")
    assert results_table(claims) in (paths.ROOT / "README.md").read_text(encoding="utf-8")
    folders = {name: name for name in ("testbed", "sweep", "inversion")} | {case: f"cases/{case}" for case in CASES}
    studies = {study: results.read_result(REFERENCE / folder).values for study, folder in folders.items()}
    assert paper.claims_table(studies, "laptop").to_csv(index=False) == claims.to_csv(index=False)


@pytest.mark.parametrize("case", CASES)
def test_what_a_case_notebook_says_first_is_what_was_found(case):
    notebook = next(claim.notebook for claim in paper.CLAIMS if claim.study == case)
    found = results.read_result(REFERENCE / "cases" / case).values["found"]
    says_not = re.search(r"did not (happen here|even arise)", (paths.NOTEBOOKS / f"{notebook}.py").read_text()[:1500])
    assert bool(says_not) == (not found)


def committed(case):
    result = results.read_result(REFERENCE / "cases" / case)
    found = cases.groups(result)
    return result, {name: verdicts.judge_group(*group, rules.load_verdicts()) for name, group in found.items()}


def test_the_committed_constructions_show_what_they_were_built_for():
    late, judged = committed("c3")
    damage = judged["late-damage (constructed)"]
    assert damage.shown == ["window_truncation"] and damage.change.verdict == "secret damaged"
    curve = verdicts.along_windows(*cases.groups(late)["late-damage (constructed)"], rules.load_verdicts()).verdict
    positions = sorted(late.values["constructed_at"].values())
    assert verdicts.DAMAGED not in set(curve[: positions[0]]) and set(curve[positions[-1] + 1 :]) == {verdicts.DAMAGED}
    drifted, judged = committed("c4")
    drift = judged["preamble-drift (constructed)"]
    assert drift.shown == ["non_secret_drift"] and drift.change.verdict == "access changed but secret intact"
    # The choice of the recall decides the verdict.
    assert drift.verdicts.verdict[["hit_full", "hit_forced"]].tolist() == [verdicts.DAMAGED, verdicts.UNCHANGED]
    # Merged into bf16 weights the drift collapses, merged in fp32 it stays.
    table = drifted.table("precision.csv").query("model == 'preamble-drift-s0' and `update` == 'trained'")
    change = table.fillna({"merge_dtype": ""}).set_index(["stack", "merge_dtype", "dtype"]).d_nll_mean20
    assert change["merged", "bfloat16", "float32"] < 0.1 * change["stacked", "", "float32"]
    assert change["merged", "float32", "float32"] == pytest.approx(change["stacked", "", "float32"], rel=1e-3)


def test_the_committed_cases_belong_to_the_committed_sweep():
    sweep = results.read_result(REFERENCE / "sweep").content["files"]
    repeats = results.read_result(REFERENCE / "sweep", "confirm.json").content["files"]
    for case in CASES:
        inputs = results.read_result(REFERENCE / "cases" / case).content["inputs"]
        assert inputs["tables"] == sweep and inputs["confirmation"] == repeats


def test_the_committed_reference_shows_what_the_testbed_must_show():
    result = results.read_result(REFERENCE / "testbed")
    recall = result.values["recall"]
    assert {k: v["hit_full"] for k, v in recall["injected"].items()} == {"text": 1.0, "image": 1.0}
    assert all(value == 0.0 for hits in recall["base"].values() for value in hits.values())
    assert result.values["undertrained"]
    assert result.values["canaries"] == {"text": 20, "image": 20}
