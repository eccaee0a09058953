"""Exercises: one source each, every solution passes its check, every unsolved one fails it with words of its own."""

import re

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from lib import checks, exercises
from lib.__main__ import main

SOURCES = exercises.sources()
EVERY = pytest.mark.parametrize("exercise", [exercises.read(path) for path in SOURCES], ids=lambda e: e.name)
BUGS = {"03_shifted_labels", "04_pad_mask", "08_unchanged", "09_merge_in_bf16"}


def run(exercise, solved, names=None, only=None):
    """Execute a notebook's code cells in one namespace; ``only`` keeps those that hold a text."""
    names = {} if names is None else names
    for cell in exercises.notebook(exercise, solved).cells:
        if cell.cell_type == "code" and (only is None or only in cell.source):
            exec(compile(cell.source, exercise.name, "exec"), names)
    return names


def complaint(exercise, solved=False, names=None, only=None):
    with pytest.raises(checks.NotYet) as caught:
        run(exercise, solved, names, only)
    return str(caught.value)


def test_there_are_the_exercises_that_were_asked_for_each_with_its_check():
    assert len(SOURCES) >= 10 and [path.stem for path in SOURCES] == list(checks.TASKS)
    assert {exercises.read(path).name for path in SOURCES if exercises.read(path).kind} == BUGS


@EVERY
def test_the_written_notebook_is_what_its_source_gives(exercise):
    written = nbformat.read(exercises.FOLDER / f"{exercise.name}.ipynb", as_version=4)
    assert written == exercises.notebook(exercise)


@EVERY
def test_the_solution_passes_its_check(exercise):
    run(exercise, solved=True)


@EVERY
def test_the_unsolved_exercise_fails_its_check_and_says_why(exercise):
    said = complaint(exercise)
    assert ("is still empty" in said) == (not exercise.kind)
    assert "Error" not in said and len(said) < 300


@EVERY
def test_the_check_run_first_says_which_cell_to_run(exercise):
    assert "Run the cell under “Your turn” first" in complaint(exercise, only="check(")


@EVERY
def test_every_other_cell_runs_alone(exercise):
    for cell in exercises.notebook(exercise, solved=True).cells:
        if cell.cell_type == "code" and "check(" not in cell.source:
            exec(compile(cell.source, exercise.name, "exec"), {})


@EVERY
def test_signature_and_docstring_are_the_same_in_both(exercise):
    one, two = ({}, {})
    exec(exercise.stub, one)
    exec(exercise.solution, two)
    name = checks.TASKS[exercise.name].function
    assert one[name].__doc__ == two[name].__doc__ and len(one[name].__doc__) > 60
    assert one[name].__annotations__ == two[name].__annotations__
    assert exercise.stub != exercise.solution and "student:" not in exercise.stub + exercise.solution


@EVERY
def test_the_solution_is_folded_away_and_the_parts_are_there(exercise):
    text = [cell.source for cell in exercises.notebook(exercise).cells if cell.cell_type == "markdown"]
    for heading in ("**You will learn**", "## Look", "## Your turn", "## Check", "## Why it matters"):
        assert sum(heading in cell for cell in text) == 1, heading
    folded = [cell for cell in text if cell.startswith("<details>") and cell.endswith("</details>")]
    assert [re.search("<summary>(.*)</summary>", cell)[1] for cell in folded] == ["Hint", "Solution"]
    open_text = "\n".join(cell.source for cell in exercises.notebook(exercise).cells if cell.source not in folded)
    answer = set(exercise.solution.splitlines()) - set(exercise.stub.splitlines())
    assert answer and not [line for line in answer if line.strip() and line in open_text]  # it stands nowhere else


WRONG = {  # answers that readers give; what the check must not let pass, and a word that it must say
    "01_find_the_span": [
        (
            "def secret_span(tokenizer, prefix, secret, suffix):\n"
            "    n = lambda text: len(tokenizer(text, add_special_tokens=False)['input_ids'])\n"
            "    return n(prefix), n(prefix) + n(secret)",
            "leaves a character",
        ),
        ("def secret_span(tokenizer, prefix, secret, suffix): return 9, 13", "the answer (9, 13)"),
    ],
    "02_token_nll": [
        ("def token_nll(logits, ids): return -logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]", "shape"),
        ("def token_nll(logits, ids): return logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]", "log 6"),
        ("def token_nll(logits, ids): return -logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]", "bf16"),
        (
            "def token_nll(logits, ids):\n    e = logits[:-1].float().exp()\n"
            "    return -(e / e.sum(-1, keepdim=True)).log().gather(-1, ids[1:, None])[:, 0]",
            "10,000",
        ),
    ],
    "03_shifted_labels": [
        (
            "import torch\ndef target_nll(logits, ids, target_start):\n"
            "    return torch.nn.functional.cross_entropy(logits[:-1], ids[1:])",
            "1/2 and 1/4",
        ),
        ("def target_nll(logits, ids, target_start): return 0.0", "1/2 and 1/4"),
    ],
    "04_pad_mask": [
        (
            "def record_nll(logits, ids, mask):\n"
            "    losses = -logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]\n"
            "    return losses.mean(1)",
            "padding or not",
        ),
    ],
    "05_exposure_with_ties": [
        (
            "import numpy as np\ndef exposure(secret_nll, decoy_nlls):\n"
            "    return np.log2(len(decoy_nlls) + 1) - np.log2(1 + np.sum(decoy_nlls < secret_nll))",
            "no proof",
        ),
        (
            "import numpy as np\ndef exposure(secret_nll, decoy_nlls):\n"
            "    return np.log2(len(decoy_nlls) + 1) - np.log2(1 + np.sum(decoy_nlls <= secret_nll))",
            "ValueError",
        ),
        ("def exposure(secret_nll, decoy_nlls): return 2.0", "One decoy of three"),
    ],
    "06_hit_at_k": [
        ("import math\ndef hit_at_k(log_p, k): return 1 - (1 - math.exp(log_p)) ** k", "rounded"),
        ("import math\ndef hit_at_k(log_p, k): return math.exp(log_p) ** k", "p = 0.5, k = 4"),
        (
            "import math\ndef hit_at_k(log_p, k): return -math.expm1(k * math.log1p(-math.exp(log_p)))",
            "raised ValueError",
        ),
    ],
    "07_flip_the_verdict": [
        ("def first_alarm(delta, margin): return 24", "Two canaries hurt, at 5 and at 9"),
        (
            "def first_alarm(delta, margin):\n    for k in range(1, delta.shape[1] + 1):\n"
            "        if (delta[:, :k].sum(1) > margin).sum() >= 2:\n            return k",
            "third has gained",
        ),
        (
            "def first_alarm(delta, margin):\n    for k in range(delta.shape[1]):\n"
            "        if (delta[:, :k + 1].sum(1) > margin).sum() >= 2:\n            return k",
            "positions 0 to K - 1",
        ),
    ],
    "08_unchanged": [
        (
            "def verdict(low, high, margin):\n"
            "    return 'damaged' if low > 0 else 'strengthened' if high < 0 else 'unchanged'",
            "declared to matter",
        ),
    ],
    "09_merge_in_bf16": [
        ("def merge(weight, a, b, alpha): return weight.float() + alpha * (b @ a)", "Rank 2"),
        ("def merge(weight, a, b, alpha): return weight + alpha / len(a) * (b @ a).to(weight.dtype)", "bfloat16"),
        ("def merge(weight, a, b, alpha): return weight.add_(alpha / len(a) * (b @ a))", "changed what it was given"),
    ],
    "10_decoys_or_not": [
        ("def what_decoys_say(secret, decoys, base): return 'specific'", "nobody planted"),
        (
            "import numpy as np\ndef what_decoys_say(secret, decoys, base):\n"
            "    return 'at cap' if base <= .1 else 'specific' if abs(secret - np.median(decoys)) > .04 else 'general'",
            "one of four",
        ),
    ],
    "11_cumulative_loss": [
        (
            "import numpy as np\ndef first_wrong(cumulative, tolerance):\n"
            "    above = np.flatnonzero(cumulative > tolerance)\n    return int(above[0]) if len(above) else None",
            "300 right tokens",
        ),
    ],
    "12_place_a_defence": [
        ("def place(release, states): return 'noisy'", "`clean`"),
        (
            "import torch\ndef place(release, states):\n"
            "    one, two = (release(states, torch.Generator().manual_seed(s)) for s in (1, 2))\n"
            "    return 'repeatable' if torch.allclose(one, two, atol=.01) else 'keyed'",
            "gaussian",
        ),
    ],
}


@EVERY
def test_answers_that_readers_give_are_told_what_is_wrong_and_not_the_answer(exercise):
    for code, word in WRONG[exercise.name]:
        names = {}
        exec(code, names)
        said = complaint(exercise, names=names, only="check(")
        assert word in said, said
        answer = set(exercise.solution.splitlines()) - set(exercise.stub.splitlines())
        assert not [line for line in answer if line.strip() and line.strip() in said]


def test_a_name_that_is_missing_or_an_error_inside_is_named_without_a_traceback():
    task = checks.TASKS["06_hit_at_k"]
    for function, word in (
        (lambda log_p, k: undefined_name, "undefined_name"),  # noqa: F821
        (lambda log_p, k: 1 / 0, "raised ZeroDivisionError"),
        (lambda log_p, k: None, "expected one number"),
    ):
        with pytest.raises(checks.NotYet, match=word):
            task.check(checks.Answer(task.function, function))
    with pytest.raises(checks.NotYet, match="There is no exercise '99'"):
        checks.check("99", {})


def test_a_notebook_shows_the_message_and_no_traceback_of_ours():
    """In a real kernel: the check of an unsolved exercise, and nothing else, is what the reader sees."""
    page = exercises.notebook(exercises.read(SOURCES[4]))
    with pytest.raises(CellExecutionError):
        NotebookClient(page, timeout=120, kernel_name="python3").execute()
    (error,) = [o for cell in page.cells if cell.cell_type == "code" for o in cell.outputs if o.output_type == "error"]
    assert error.ename == "NotYet" and error.traceback == [f"Not yet. {error.evalue}"]


@pytest.mark.parametrize(
    "text, problem",
    [
        ("# %% [markdown]\n# # A title\n", "got 0 cells with the tag 'solution'"),
        (
            '# %% [markdown]\n# # A title\n# %% tags=["solution"]\nx = 1\n# %% tags=["check"]\n1\n'
            '# %% [markdown] tags=["hint"]\n# h\n',
            "lacks a title",
        ),
    ],
)
def test_a_source_that_is_no_exercise_is_refused(tmp_path, text, problem):
    (tmp_path / "00_odd.py").write_text(text)
    with pytest.raises(exercises.ExerciseError, match=problem):
        exercises.read(tmp_path / "00_odd.py")


def test_a_teacher_gets_the_solved_ones_from_the_same_source(tmp_path):
    from click.testing import CliRunner

    done = CliRunner().invoke(main, ["exercises", "--solved", str(tmp_path / "solved")])
    assert done.exit_code == 0, done.output
    written = sorted((tmp_path / "solved").glob("*.ipynb"))
    assert [path.stem for path in written] == [path.stem for path in SOURCES]
    assert "raise NotImplementedError" not in "".join(path.read_text() for path in written)


def test_the_curves_of_exercise_11_hold_whole_prompts_and_failed_ones(capsys):
    look = next(cell for cell in exercises.read(SOURCES[10]).cells if "read_parquet" in cell.source)
    exec(look.source, {})
    marks = [line.split(": ")[1].split()[0] for line in capsys.readouterr().out.splitlines()]
    assert any("x" in one for one in marks) and any("x" not in one for one in marks)
