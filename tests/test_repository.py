"""The house: one set of pins for pip and conda, two commands, no trace of one machine."""

import re
import subprocess
import tomllib

import pandas as pd
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from lib import paper, paths, results
from lib.__main__ import results_table

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
    assert "make test" in (paths.ROOT / ".ci" / "run").read_text()


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
        "verdicts",
        "results",
        "runs",
        "sweep",
        "collection",
        "runner",
        "figures",
        "paper",
        "__main__",
    ]
    assert sorted(order) == sorted(path.stem for path in (paths.ROOT / "lib").glob("*.py") if path.stem != "__init__")
    for place, name in enumerate(order):
        text = (paths.ROOT / "lib" / f"{name}.py").read_text()
        imported = {
            n.strip() for names in re.findall(r"^\s*from lib import (.+)$", text, re.M) for n in names.split(",")
        }
        imported |= set(re.findall(r"^\s*from lib\.(\w+) import", text, re.M))
        late = [other for other in imported if order.index(other) >= place]
        assert not late, f"{name} imports {late}"


def test_the_readmes_results_are_the_committed_ones():
    claims = pd.read_csv(REFERENCE / "claims.csv")
    assert results_table(claims) in (paths.ROOT / "README.md").read_text(encoding="utf-8")
    result = results.read_result(REFERENCE / "testbed")
    assert paper.claims_table({"testbed": result.values}, "laptop").to_csv(index=False) == claims.to_csv(index=False)


def test_the_committed_reference_shows_what_the_testbed_must_show():
    result = results.read_result(REFERENCE / "testbed")
    recall = result.values["recall"]
    assert {k: v["hit_full"] for k, v in recall["injected"].items()} == {"text": 1.0, "image": 1.0}
    assert all(value == 0.0 for hits in recall["base"].values() for value in hits.values())
    assert result.values["undertrained"]
    assert result.values["canaries"] == {"text": 20, "image": 20}
