"""The book: built whole, offline and without warnings; what it shows in a browser is what the tables say."""

import code
import contextlib
import functools
import http.server
import io
import re
import threading
from html.parser import HTMLParser

import nbformat
import numpy as np
import pandas as pd
import pytest

from lib import book, cases, explorer, paper, paths, rules, verdicts
from lib.results import read_result

REFERENCE = paths.ROOT / "outputs" / "laptop"
WANTED = rules.load_verdicts()
PROBE = "#explorer-verdicts tr[data-probe=window] .verdict"


def pages(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.html") if "_static" not in path.parts)


class Loaded(HTMLParser):
    """What a page loads by itself, and the alternative texts of its figures."""

    def __init__(self, text):
        super().__init__()
        self.sources, self.texts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.sources += [attributes[key] for key in ("src", "data") if attributes.get(key)]
        if tag == "link" and attributes.get("rel") in ("stylesheet", "icon", "preload"):
            self.sources.append(attributes["href"])
        if tag == "img":
            self.texts.append(attributes.get("alt", ""))


def test_every_page_of_the_repository_is_in_the_book(built):
    made = set(pages(built))
    assert {f"notebooks/{path.stem}.html" for path in paths.NOTEBOOKS.glob("*.ipynb")} <= made
    assert {f"notebooks/exercises/{path.stem}.html" for path in (paths.NOTEBOOKS / "exercises").glob("*.ipynb")} <= made
    written = (paths.ROOT / "book").rglob("*.md")
    assert {path.relative_to(paths.ROOT / "book").with_suffix(".html").as_posix() for path in written} <= made


def test_links_between_pages_and_notebooks_hold_in_the_repository_too():
    """Sphinx sees to those of the built book: a broken one is a warning."""
    for page in [*(paths.ROOT / "book").rglob("*.md"), *paths.NOTEBOOKS.rglob("*.ipynb")]:
        text = page.read_text(encoding="utf-8")
        if page.suffix == ".ipynb":
            text = "\n".join(c.source for c in nbformat.reads(text, as_version=4).cells if c.cell_type == "markdown")
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", re.sub(r"`[^`]*`", "", text)):
            assert link.startswith("http") or (page.parent / link).exists(), (page.name, link)


def test_pages_load_nothing_from_elsewhere_and_what_they_load_is_there(built):
    for name in pages(built):
        for source in Loaded((built / name).read_text(encoding="utf-8")).sources:
            assert not re.match(r"(https?:)?//", source), (name, source)
            if not source.startswith("data:"):
                assert ((built / name).parent / source.partition("?")[0]).exists(), (name, source)


def test_every_figure_of_a_notebook_has_a_text_that_says_what_it_is(built):
    for path in paths.NOTEBOOKS.glob("*.ipynb"):
        stored = nbformat.read(path, as_version=4)
        figures = [
            output
            for cell in stored.cells
            if cell.cell_type == "code"
            for output in cell.outputs
            if "image/png" in output.get("data", {})
        ]
        texts = [t for t in Loaded((built / "notebooks" / f"{path.stem}.html").read_text()).texts if t]
        assert len(texts) >= len(figures) > 0, path.stem
        assert all(len(text) > 40 and ".png" not in text and "A figure." not in text for text in texts), path.stem


def test_a_figures_text_is_what_it_draws_and_the_prose_that_leads_to_it():
    figure = nbformat.v4.new_output("display_data", {"image/png": "AAAA"})
    cells = [
        nbformat.v4.new_markdown_cell(
            "Long ago.\n\n## A heading\n\nTable:\n\nEach *square* is `one` token. Red is a rise."
        ),
        nbformat.v4.new_code_cell("figures.delta_strip(strip, 20)", outputs=[figure]),
        nbformat.v4.new_markdown_cell("Something else.\n\n## The next one"),
        nbformat.v4.new_code_cell("plot()", outputs=[figure]),
    ]
    notebook = nbformat.v4.new_notebook(cells=cells)
    book.describe_figures(notebook)
    drawn, unknown = (cell.metadata.mystnb.image.alt for cell in notebook.cells if cell.cell_type == "code")
    assert drawn.startswith("Change of the NLL of every canary (row) at every target position (column)")
    assert drawn.endswith("one panel a modality. Each square is one token. Red is a rise.")
    assert unknown == "A figure. The next one"


def test_a_book_without_its_tables_names_them(monkeypatch, tmp_path):
    monkeypatch.setenv("LEAKBOOK_OUTPUTS", str(tmp_path))
    (tmp_path / "laptop" / "sweep").mkdir(parents=True)
    (tmp_path / "laptop" / "sweep" / "recall.parquet").write_text("")
    with pytest.raises(book.BookError, match="sweep/token_nll.parquet.*cases/c3/result.json") as caught:
        book.build(tmp_path / "book")
    assert "sweep/recall.parquet" not in str(caught.value) and not (tmp_path / "book").exists()


def test_mathjax_must_be_the_one_that_is_pinned_and_its_absence_is_said_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("LEAKBOOK_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(book.BookError, match=r"npm, which is not installed. Put mathjax-3.2.2.tgz \(`npm pack"):
        book.mathjax()
    (tmp_path / "mathjax-3.2.2.tgz").write_bytes(b"something else")
    with pytest.raises(book.BookError, match="its SHA-512 is .*, expected Bt"):
        book.mathjax()
    assert not (tmp_path / book.MATHJAX).exists()


MEASURED = {  # where a notebook's own peak of memory is recorded
    "00_testbed": "testbed",
    "01_case_c3_window_truncation": "cases/c3",
    "02_case_c4_preamble_drift": "cases/c4",
    "03_case_c5_undertrained": "cases/c5",
    "cell": "sweep/runs/safety-full-high-30-s0",
}


@pytest.mark.parametrize("path", sorted(paths.NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_the_top_of_a_notebook_says_minutes_memory_and_scales(path):
    top = nbformat.read(path, as_version=4).cells[0].source
    minutes, memory = re.search(
        r"^\*To compute anew: (\d+) minutes? on two CPU cores, (\d+) GB of memory", top, re.M
    ).groups()
    assert "· scales smoke, laptop, paper" in top
    readme = (paths.ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(rf"\[`{path.stem}`\].* \| {minutes} \|\n", readme)
    if path.stem in MEASURED:
        peak = read_result(REFERENCE / MEASURED[path.stem]).content["provenance"]["peak_memory_gb"]
        assert int(memory) - 1 <= peak <= int(memory)
    for link in re.findall(r"\]\((exercises/[^)]+)\)", top):
        assert (paths.NOTEBOOKS / link).exists(), link


def test_links_to_run_online_need_the_repositorys_address():
    assert book.online_links("notebooks/00_testbed.ipynb", None) == []
    binder, source = book.online_links("notebooks/00_testbed.ipynb", "someone/leakbook")
    assert "/v2/gh/someone/leakbook/HEAD?labpath=notebooks/00_testbed.ipynb" in binder
    assert source.endswith("someone/leakbook/blob/HEAD/notebooks/00_testbed.ipynb)")
    with pytest.raises(book.BookError, match="got 'leakbook', expected owner/name"):
        book.online_links("notebooks/00_testbed.ipynb", "leakbook")


def test_start_here_changes_a_verdict_as_it_says():
    """Its blocks, run in order, print what stands below them: steps 1 to 4, for which no torch is needed."""
    text = (paths.ROOT / "book" / "start_here.md").read_text(encoding="utf-8")
    text = text.partition("### 1. ")[2].partition("### 5. ")[0]
    blocks, said = re.findall(r"```(python|text)\n(.*?)```", text, re.S), None
    prompt = code.InteractiveConsole()
    for position, (kind, block) in enumerate(blocks):
        if kind == "text":
            continue
        printed, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            left_open = [prompt.push(line) for line in block.split("\n")[:-1]][-1]  # as it is pasted
        assert not left_open and not errors.getvalue(), (block, errors.getvalue())
        if position + 1 < len(blocks) and blocks[position + 1][0] == "text":
            said = printed.getvalue()
            assert said == blocks[position + 1][1]
    assert said == "protocol: secret damaged\n"  # of a model whose protocol verdict was "secret intact"


@pytest.mark.parametrize("name", ["paper-c3", "paper-c5", "late-damage", "preamble-drift", "noise-spectral-full"])
def test_the_explorer_says_what_the_rules_say_with_that_window(name):
    sweep = read_result(REFERENCE / "sweep")
    found = {case: read_result(REFERENCE / "cases" / case) for case in cases.CASES}
    group = next(group for group in explorer.groups(sweep, found, WANTED) if group.id == name)
    shown = explorer.view(*group.tables["text"], WANTED)
    assert len(shown["windows"]) == paper.TARGET and len(shown["changes"]) == paper.CANARIES
    for k in (1, 12, 20, 24, 27):
        mine = {**WANTED, "probes": WANTED["probes"] | {"mean20": {"kind": "nll", "window": k}}}
        judged = verdicts.judge_group(*group.tables["text"], mine)
        window, row = shown["windows"][k - 1], judged.verdicts.loc["mean20"]
        assert (window["verdict"], window["shown"]) == (row.verdict, judged.shown), k
        assert window["estimate"] == pytest.approx(row.estimate * k, rel=1e-3)
        assert {probe: one["verdict"] for probe, one in shown["probes"].items()} == judged.verdicts.verdict.drop(
            "mean20"
        ).to_dict()
        assert shown["protocol"] == judged.change.verdict


def errors_of(page):
    """Errors of the console, exceptions, and addresses that are not the book's own; filled while pages load."""
    log = []
    page.on("console", lambda message: log.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: log.append(str(error)))
    page.on("requestfailed", lambda request: log.append(f"failed: {request.url}"))
    page.on("request", lambda request: None if request.url.startswith(("file:", "data:")) else log.append(request.url))
    return log


def test_every_page_opens_from_a_file_without_errors_and_fits_a_phone(browser, built):
    context = browser.new_context(viewport={"width": 390, "height": 844})
    page = context.new_page()
    log = errors_of(page)
    for name in pages(built):
        page.goto((built / name).as_uri())
        page.wait_for_load_state("networkidle")
        assert not log, (name, log)
        assert page.locator("h1").count() == 1 or name == "search.html", name
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
    context.close()


def test_figures_keep_a_readable_width_on_a_phone(browser, built):
    page = browser.new_context(viewport={"width": 390, "height": 844}).new_page()
    page.goto((built / "notebooks" / "01_case_c3_window_truncation.html").as_uri())
    for figure in page.locator(".cell_output img").all():
        assert figure.bounding_box()["width"] >= 600
        box = figure.locator("xpath=ancestor::div[contains(@class, 'cell_output')][1]")
        assert box.bounding_box()["width"] <= 390  # it scrolls sideways in its own box


def test_formulas_are_drawn(page, built):
    page.goto((built / "notebooks" / "00_testbed.html").as_uri())
    page.wait_for_selector("mjx-container svg")
    assert page.locator("mjx-merror").count() == 0


@pytest.mark.parametrize("scheme", ["file", "http"])
def test_search_finds_exposure(page, built, scheme):
    with served(built) if scheme == "http" else contextlib.nullcontext(built.as_uri()) as address:
        page.goto(f"{address}/search.html?q=exposure")
        page.get_by_text("Search finished").wait_for()  # results come in one by one
        found = page.locator("#search-results li a").all_inner_texts()
    assert "Glossary" in found and "Exposure, with ties" in found


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A server of files that prints nothing."""

    def log_message(self, *_):
        """Say nothing."""


@contextlib.contextmanager
def served(folder):
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_the_dark_theme_is_dark(browser, built):
    light = {}
    for scheme in ("light", "dark"):
        page = browser.new_context(color_scheme=scheme).new_page()
        page.goto((built / "explorer.html").as_uri())
        for name, selector in (("page", "body"), ("letters", "#explorer-said")):
            which = "backgroundColor" if name == "page" else "color"
            shade = page.locator(selector).evaluate(f"e => getComputedStyle(e).{which}")
            light[scheme, name] = np.mean([float(part) for part in re.findall(r"[\d.]+", shade)[:3]])
    assert light["light", "page"] > 200 > 80 > light["dark", "page"]
    assert light["dark", "letters"] > 150 > light["light", "letters"]


def whole_damage_read(nll, margin):
    """The K from which on a window reads the damage of all canaries that lost half a nat or more, in plain NumPy."""
    delta = nll.assign(d=nll.nll - nll.nll_base).pivot_table(index=["canary", "seed"], columns="position", values="d")
    total = delta.cumsum(axis=1).groupby("canary").median().to_numpy()
    hurt = total[total[:, -1] > 0.5]
    assert len(hurt) == 3
    return 1 + int(np.flatnonzero((hurt > margin).all(axis=0))[0])


def late_damage():
    table = pd.read_parquet(REFERENCE / "cases" / "c3" / "token_nll.parquet")
    return table[table.cell == "late-damage"]


@pytest.mark.parametrize(
    "cell, table",
    [("paper-c3", paper.consistent_tables("c3")[0]), ("late-damage", late_damage())],
    ids=["paper-c3", "late-damage"],
)
def test_dragging_the_window_flips_c3_at_the_k_of_the_tables(page, built, cell, table):
    flips = whole_damage_read(table, margin=0.04)
    assert flips > 20  # behind the paper's window
    log = errors_of(page)
    page.goto((built / "explorer.html").as_uri())
    page.get_by_label("Case or cell").select_option(cell)
    slider, verdict = page.get_by_role("slider", name="Window K"), page.locator(PROBE)
    said = {}
    slider.focus()
    page.keyboard.press("Home")
    for k in range(1, 28):
        assert slider.input_value() == str(k)
        said[k] = verdict.inner_text()
        assert (
            f"K = {k}: the window says {said[k]}, the whole secret damaged"
            in page.locator("#explorer-said").inner_text()
        )
        page.keyboard.press("ArrowRight")
    assert said[20] == "unchanged"
    assert [k for k in said if said[k] == "damaged"] == list(range(flips, 28))
    assert not log


def test_the_explorer_follows_its_address_and_the_readers_choices(page, built):
    page.goto((built / "explorer.html").as_uri() + "#cell=preamble-drift&canaries=text&k=5")
    assert page.locator(PROBE).inner_text() == "damaged"
    assert page.get_by_label("Case or cell").input_value() == "preamble-drift"
    page.get_by_label("Case or cell").select_option("noise-gaussian-full")
    page.get_by_label("image").check()
    assert page.locator(PROBE).inner_text() == "unchanged"
    page.wait_for_url("**#cell=noise-gaussian-full&canaries=image&k=5")
    assert page.locator("#explorer-chart circle").count() == 20 * 27


def test_without_data_the_explorer_says_so(page, built):
    page.goto((built / "explorer.html").as_uri())
    page.get_by_label("image").check()
    said = page.locator("#explorer-said")
    assert said.inner_text().startswith("No data for this cell: C3") and page.locator("#explorer-found").is_hidden()
    page.get_by_label("Case or cell").select_option("gui-stop1")
    assert page.locator("#explorer-found").is_visible() and said.inner_text().startswith("K = 20")
    page.goto((built / "explorer.html").as_uri() + "#cell=no-such-cell")
    assert said.inner_text().startswith("No data for this cell: no-such-cell")
    page.get_by_label("Case or cell").select_option("paper-c3")  # the first of the menu is a choice as well
    assert said.inner_text().startswith("No data for this cell: C3")  # images, still
    page.get_by_label("text").check()
    assert page.locator("#explorer-found").is_visible()


def test_an_explorer_whose_data_did_not_load_says_so(page, built):
    page.route("**/explorer-data.js", lambda route: route.abort())
    page.goto((built / "explorer.html").as_uri())
    assert page.locator("#explorer").inner_text().startswith("The explorer's data did not load")


def test_hint_and_solution_are_folded_until_they_are_asked_for(page, built):
    page.goto((built / "notebooks" / "exercises" / "06_hit_at_k.html").as_uri())
    solution = page.locator("details", has_text="Solution").last
    assert not solution.locator("pre").is_visible()
    solution.locator("summary").click()
    assert "expm1" in solution.locator("pre").inner_text()
