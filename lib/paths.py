"""Every folder the package reads or writes, absolute, so that code runs from any working directory."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARAMS = ROOT / "params"
NOTEBOOKS = ROOT / "notebooks"
DATA = Path(__file__).resolve().parent / "data"


def cache() -> Path:
    """Folder of downloaded and built models: ``$LEAKBOOK_CACHE``, else ``leakbook`` in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leakbook"
    return Path(os.environ.get("LEAKBOOK_CACHE") or default).resolve()


def outputs() -> Path:
    """Folder of all results: ``$LEAKBOOK_OUTPUTS``, else ``outputs`` in the repository."""
    return Path(os.environ.get("LEAKBOOK_OUTPUTS") or ROOT / "outputs").resolve()


def reference(scale: str) -> Path:
    """The committed results of ``scale``; written only by ``make reference``."""
    return outputs() / scale


def local(scale: str) -> Path:
    """The git-ignored results of ``scale`` that this machine computed."""
    return outputs() / "local" / scale


def show(path: Path) -> str:
    """``path`` relative to the repository where it lies inside, so that no stored output names one machine."""
    path = Path(path)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def run_name(cell: str, seed: int) -> str:
    """Name of the run of a cell of the sweep with one seed."""
    return f"{cell}-s{seed}"


def sweep(scale: str, grid: str | None = None, injection: int = 0) -> Path:
    """Where this machine's sweep lies; one over a grid of the user's own, or on another injection, lies apart."""
    folder = local(scale) / ("sweep" if grid is None else f"sweep-{Path(grid).stem}")
    return folder / f"injection-{injection}" if injection else folder


def run_folder(scale: str, cell: str, seed: int, grid: str | None = None, injection: int = 0) -> Path:
    """Where this machine's run of a cell with one seed lies."""
    return sweep(scale, grid, injection) / "runs" / run_name(cell, seed)
