"""Typed, validated parameters: the scale files in ``params/`` and the values papermill injects into a notebook."""

import ast
import dataclasses
import math
import os
import re
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from lib import paths
from lib.errors import LeakbookError

ENVIRONMENT = "LEAKBOOK_RESULTS"  # local | reference | auto: overrides where a notebook takes its results from
THREADS = "LEAKBOOK_THREADS"  # overrides a scale's threads, which no result's identity depends on
RESULT_SOURCES = ("auto", "local", "reference")


class ConfigError(LeakbookError, ValueError):
    """A parameter has an unknown name, a wrong type or a value out of range."""


def at_least(minimum: float) -> Any:
    return field(metadata={"minimum": minimum})


@dataclass(frozen=True)
class CanarySettings:
    """How canaries are drawn (:func:`lib.canaries.draw`).

    ``hex_tokens`` and ``preamble_tokens`` are the lengths in tokens to which secret and preamble are fitted under
    the active tokenizer; ``hex_tokens: null`` keeps every draw at its natural length.
    """

    n_text: int = at_least(0)
    n_image: int = at_least(0)
    seed: int = at_least(0)
    hex_tokens: int | None = at_least(1)
    preamble_tokens: int | None = at_least(1)


@dataclass(frozen=True)
class LoraSettings:
    """How a LoRA is trained: rank, alpha, schedule and data order.

    ``precision`` is that of training: ``auto`` takes bf16 where the hardware computes it. State is kept every
    ``check_every`` steps.
    """

    rank: int = at_least(1)
    alpha: int = at_least(1)
    learning_rate: float = at_least(0.0)
    warmup_steps: int = at_least(0)
    batch_size: int = at_least(1)
    max_steps: int = at_least(1)
    check_every: int = at_least(1)
    seed: int = at_least(0)
    precision: Literal["auto", "bf16", "fp32"] = field()


@dataclass(frozen=True)
class StoppedSettings(LoraSettings):
    """Training that also keeps the adapters of the ``stop_steps``."""

    stop_steps: tuple[int, ...] = at_least(1)


@dataclass(frozen=True)
class InjectionSettings(StoppedSettings):
    """How the canary LoRA is trained (:func:`lib.training.train`).

    Training ends at the first multiple of ``check_every`` steps after which all targets are decoded exactly in
    fp32 and the mean NLL is at most ``target_nll`` nats a token, and fails at ``max_steps``. ``stop_steps`` are the
    steps after which an undertrained adapter is kept.
    """

    target_nll: float = at_least(0.0)


@dataclass(frozen=True)
class Scale:
    """One scale of ``params/scales.yaml``: the backbone and every setting of the testbed."""

    name: str = field()
    backbone: str = field()
    revision: str | None = field()
    threads: int = at_least(1)
    evaluation_batch: int = at_least(1)
    canaries: CanarySettings = field()
    injection: InjectionSettings = field()


@dataclass(frozen=True)
class Testbed:
    """Parameters of a testbed notebook, checked.

    ``canaries`` is a JSONL file that replaces the drawn canaries. ``results`` says where results come from:
    ``local`` computes what is missing in ``outputs/local``, ``reference`` only reads the committed results, ``auto``
    takes local results if they are complete, else the reference, and computes only where neither exists.
    """

    scale: Scale
    canaries: str | None
    output: str
    results: Literal["auto", "local", "reference"]

    @property
    def is_standard(self) -> bool:
        """Whether nothing departs from the scale file, so that results can be held against the paper's."""
        return self.canaries is None and self.scale == load_scale(self.scale.name)


def _type_name(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(repr(option) for option in typing.get_args(kind))
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return " or ".join(_type_name(option) for option in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return f"a list of {_type_name(typing.get_args(kind)[0])}"
    return {
        int: "an integer",
        float: "a number",
        str: "a string",
        bool: "true or false",
        dict: "a mapping",
        types.NoneType: "null",
    }.get(kind, getattr(kind, "__name__", str(kind)))


def convert(kind: Any, value: Any, where: str, shown: Any = None) -> Any:
    """Return ``value`` as ``kind``, or raise :class:`ConfigError`; nothing is ever parsed out of a string.

    ``shown`` is the kind that the message names, where ``kind`` is one alternative of it.
    """
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return build(kind, value, where)
    if origin in (types.UnionType, typing.Union):
        if value is None and types.NoneType in options:
            return None
        (inner,) = (option for option in options if option is not types.NoneType)
        return convert(inner, value, where, shown=kind)
    if origin is Literal and value in options:
        return value
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(convert(options[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if kind is float and type(value) in (int, float):
        return float(value)
    if origin is None and type(value) is kind:
        return value
    hint = ""
    if isinstance(value, str) and kind in (int, float):
        hint = " A number without a dot and sign, like 1e-05, is a string in YAML: write 1.0e-5, without quotes."
    raise ConfigError(f"{where}: got {value!r} ({type(value).__name__}), expected {_type_name(shown or kind)}.{hint}")


def check_range(where: str, value: Any, minimum: float | None) -> None:
    values = value if isinstance(value, tuple) else (value,)
    for item in values:
        if minimum is not None and item is not None and not minimum <= item < math.inf:  # refuses NaN, too
            raise ConfigError(f"{where}: got {item!r}, expected at least {minimum}, and finite.")


def build(kind: type, values: Any, where: str) -> Any:
    """Build the dataclass ``kind`` from a mapping; every field must be given, none may be unknown.

    Raises:
        ConfigError: naming the parameter, the value seen and what would be right.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: got {values!r}, expected a mapping with the keys {_names(kind)}.")
    unknown, missing = sorted(set(values) - set(_names(kind))), sorted(set(_names(kind)) - set(values))
    if unknown:
        raise ConfigError(f"{where}: unknown parameter {unknown[0]!r}; known are {', '.join(_names(kind))}.")
    if missing:
        raise ConfigError(f"{where}: parameter {missing[0]!r} is missing.")
    hints = typing.get_type_hints(kind)
    converted = {}
    for item in dataclasses.fields(kind):
        converted[item.name] = convert(hints[item.name], values[item.name], f"{where}.{item.name}")
        check_range(f"{where}.{item.name}", converted[item.name], item.metadata.get("minimum"))
    return kind(**converted)


def _names(kind: type) -> list[str]:
    return [item.name for item in dataclasses.fields(kind)]


def scale_names() -> list[str]:
    """Names of the scales in ``params/scales.yaml``."""
    return sorted(_read_scales())


def _read_scales() -> dict:
    with open(paths.PARAMS / "scales.yaml", encoding="utf-8") as file:
        return yaml.safe_load(file)


def _override(values: dict, name: str, value: Any) -> None:
    """Set the dotted ``name`` (``injection.rank``) in nested ``values``."""
    *groups, last = name.split(".")
    for group in groups:
        if not isinstance(values.get(group), dict):
            raise ConfigError(f"overrides: unknown parameter {name!r}; {group!r} is not a group of settings.")
        values = values[group]
    if last not in values:
        raise ConfigError(f"overrides: unknown parameter {name!r}; known here are {', '.join(sorted(values))}.")
    values[last] = value


def load_scale(name: str, overrides: dict[str, Any] | None = None) -> Scale:
    """Read one scale of ``params/scales.yaml``, with settings replaced by dotted name (``{"canaries.n_text": 40}``).

    Raises:
        ConfigError: the scale is unknown, or a setting has an unknown name, a wrong type or a value out of range.
    """
    scales = _read_scales()
    if not isinstance(name, str) or name not in scales:
        raise ConfigError(f"scale: got {name!r}, expected one of {', '.join(sorted(scales))}.")
    values = {"name": name} | scales[name]
    for key, value in (_threads() | (overrides or {})).items():
        _override(values, key, value)
    scale = build(Scale, values, f"scale {name}")
    _check_injection(scale)
    return scale


def _threads() -> dict[str, int]:
    """``threads`` from the environment, where a runner shares the cores out."""
    given = os.environ.get(THREADS) or ""
    if given and not (given.isdecimal() and int(given) > 0):
        raise ConfigError(f"{THREADS}: got {given!r}, expected a number of threads.")
    return {"threads": int(given)} if given else {}


def _check_injection(scale: Scale) -> None:
    stops, where = scale.injection.stop_steps, f"scale {scale.name}.injection.stop_steps"
    if list(stops) != sorted(set(stops)) or (stops and stops[-1] >= scale.injection.max_steps):
        raise ConfigError(
            f"{where}: got {list(stops)}, expected rising steps below max_steps = {scale.injection.max_steps}."
        )
    for name in ("learning_rate", "target_nll"):
        if getattr(scale.injection, name) == 0.0:
            raise ConfigError(f"scale {scale.name}.injection.{name}: got 0.0, expected a number above 0.")
    if scale.canaries.n_text + scale.canaries.n_image == 0:
        raise ConfigError(f"scale {scale.name}.canaries: got no text and no image canary, expected at least one.")


@dataclass(frozen=True)
class Cell:
    """One benign fine-tuning cell of the sweep, or one of noise.

    ``base`` is ``full`` or ``stop-<n>``, the n-th stopping step of the injection. A noise cell has neither learning
    rate nor steps: it is ``like`` another cell, whose adapter of the same seed it has the size of.
    """

    id: str = field()
    kind: Literal["full", "undertrained", "long", "noise"] = field()
    source: str = field()
    base: str = field()
    learning_rate: float | None = at_least(0.0)
    steps: int | None = at_least(1)
    like: str | None = field()


@dataclass(frozen=True)
class BenignTraining:
    """What all cells share: the adapter, the batch, how many records are drawn."""

    rank: int = at_least(1)
    alpha: int = at_least(1)
    batch_size: int = at_least(1)
    warmup_steps: int = at_least(0)
    records: int = at_least(1)
    precision: Literal["auto", "bf16", "fp32"] = field()


@dataclass(frozen=True)
class Sweep:
    """``params/cells.yaml``: all cells, the seeds each is run with, what they share."""

    seeds: tuple[int, ...] = at_least(0)
    training: BenignTraining = field()
    noise_draws: int = at_least(0)
    cells: tuple[Cell, ...] = field()

    def cell(self, name: str) -> Cell:
        """The cell of that id.

        Raises:
            ConfigError: there is none.
        """
        found = [cell for cell in self.cells if cell.id == name]
        if not found:
            raise ConfigError(f"cell: got {name!r}, expected one of {', '.join(cell.id for cell in self.cells)}.")
        return found[0]


CELL_ID = re.compile(r"[a-z][a-z0-9-]*")
BENIGN_SOURCES = ("GUI", "SYNTH", "SAFETY", "RANDOM")
NOISE_KINDS = ("gaussian", "spectral")


def load_sweep(scale: Scale, grid: Path | str | None = None) -> Sweep:
    """Read and check the cells for a scale.

    Raises:
        ConfigError: the file cannot be read, a duplicate or unusable id, a base that the scale does not keep, noise
            like nothing, or a value of the wrong type.
    """
    path = paths.PARAMS / "cells.yaml" if grid is None else Path(grid)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"grid: {path} cannot be read ({reason}); expected a YAML file like params/cells.yaml."
        ) from error
    sweep = build(Sweep, values, path.name)
    if not sweep.cells or not sweep.seeds or len(set(sweep.seeds)) < len(sweep.seeds):
        raise ConfigError(
            f"{path.name}: got {len(sweep.cells)} cells and seeds {sweep.seeds}, expected some, seeds once."
        )
    cells = tuple(_with_own_file(cell, path.parent) for cell in sweep.cells)
    sweep = dataclasses.replace(sweep, cells=cells)
    bases = ["full", *(f"stop-{n}" for n in range(1, len(scale.injection.stop_steps) + 1))]
    ids: set[str] = set()
    for cell in sweep.cells:
        where = f"{path.name}, cell {cell.id!r}"
        if not CELL_ID.fullmatch(cell.id):
            raise ConfigError(f"{where}: this id is no plain name, expected lower-case letters, digits and hyphens.")
        if cell.id in ids:
            raise ConfigError(f"{where}: this id occurs twice, expected every id once.")
        if cell.base not in bases:
            raise ConfigError(f"{where}.base: got {cell.base!r}, expected one of {', '.join(bases)}.")
        _check_cell(sweep, cell, where)
        ids.add(cell.id)
    return sweep


def _with_own_file(cell: Cell, folder: Path) -> Cell:
    """The cell with the path of a user's own benign file taken from the folder of the grid."""
    if cell.source.endswith(".jsonl"):
        return dataclasses.replace(cell, source=str((folder / cell.source).resolve()))
    return cell


def _check_cell(sweep: Sweep, cell: Cell, where: str) -> None:
    known = NOISE_KINDS if cell.kind == "noise" else BENIGN_SOURCES
    if cell.source not in known and (cell.kind == "noise" or not cell.source.endswith(".jsonl")):
        own = "" if cell.kind == "noise" else ", or a file that ends in .jsonl"
        raise ConfigError(f"{where}.source: got {cell.source!r}, expected one of {', '.join(known)}{own}.")
    trained = {"learning_rate": cell.learning_rate, "steps": cell.steps}
    if cell.kind != "noise":
        for name, value in trained.items():
            if not value:
                raise ConfigError(f"{where}.{name}: got {value!r}, expected a number above 0.")
        return
    match = next((other for other in sweep.cells if other.id == cell.like), None)
    if match is None or match.kind == "noise" or match.base != cell.base:
        raise ConfigError(f"{where}.like: got {cell.like!r}, expected a trained cell on the base {cell.base!r}.")
    given = [name for name, value in trained.items() if value is not None]
    if given:
        raise ConfigError(f"{where}.{given[0]}: got {trained[given[0]]!r}, expected null, since noise is not trained.")


@dataclass(frozen=True)
class CellRun:
    """Parameters of the ``cell`` notebook, checked: one cell of the sweep with one seed. ``results`` as in Testbed.

    ``injection`` counts injections: 0 is the scale's own, every other one plants new secrets with another seed.
    """

    scale: Scale
    sweep: Sweep
    cell: Cell
    seed: int
    results: Literal["auto", "local", "reference"]
    grid: str | None = None  # file of the cells; params/cells.yaml where None
    injection: int = 0

    @property
    def sweep_folder(self) -> Path:
        """Where this machine keeps what the run shares with others of its sweep."""
        return paths.sweep(self.scale.name, self.grid, self.injection)

    @property
    def folder(self) -> Path:
        """Where this machine's result of the run lies."""
        return paths.run_folder(self.scale.name, self.cell.id, self.seed, self.grid, self.injection)


@dataclass(frozen=True)
class LateDamage:
    """Which canaries the constructed case of late damage hurts (:func:`lib.interventions.late_damage`)."""

    canaries: int = at_least(1)
    draw_seed: int = at_least(0)
    hold_weight: float = at_least(0.0)


@dataclass(frozen=True)
class PreambleDrift:
    """What the constructed case of drift teaches (:func:`lib.interventions.preamble_drift`)."""

    records: int = at_least(1)
    draw_seed: int = at_least(0)
    hold_weight: float = at_least(0.0)
    strength: float = at_least(0.0)


@dataclass(frozen=True)
class Constructed:
    """How constructed adapters are trained at one scale, one a seed."""

    seeds: tuple[int, ...] = at_least(0)
    steps: int = at_least(1)
    learning_rate: float = at_least(0.0)
    batch_size: int = at_least(1)


@dataclass(frozen=True)
class CaseSettings:
    """``params/cases.yaml`` for one scale: constructed cases, the repetition penalty, sampled hits."""

    late_damage: LateDamage = field()
    preamble_drift: PreambleDrift = field()
    repetition_penalty: float = at_least(1.0)
    samples: int = at_least(1)
    sampled_canaries: int = at_least(1)
    top_k: int = at_least(1)
    constructed: Constructed = field()


def load_cases(scale: str) -> CaseSettings:
    """Read and check ``params/cases.yaml`` for a scale.

    Raises:
        ConfigError: a name nobody reads, a value of the wrong type or out of range, or nothing for this scale.
    """
    path = paths.PARAMS / "cases.yaml"
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    if scale not in values["constructed"]:
        known = ", ".join(values["constructed"])
        raise ConfigError(f"{path.name}: constructed has nothing for the scale {scale!r}, only for {known}.")
    return build(CaseSettings, values | {"constructed": values["constructed"][scale]}, path.name)


@dataclass(frozen=True)
class CaseRun:
    """Parameters of a case notebook, checked. ``cell`` None: the one picked by rule. ``results`` as in Testbed."""

    scale: Scale
    sweep: Sweep
    settings: CaseSettings
    cell: str | None
    decoys: int
    results: Literal["auto", "local", "reference"]


@dataclass(frozen=True)
class _CaseValues:
    """What the ``parameters`` cell of a case notebook may set, with its types."""

    scale: str
    cell: str | None
    decoys: int = at_least(1)


@dataclass(frozen=True)
class _TestbedValues:
    """What the ``parameters`` cell of a testbed notebook may set, with its types."""

    scale: str
    model: str | None
    canaries: str | None
    output: str
    overrides: dict


@dataclass(frozen=True)
class _CellValues:
    """What the ``parameters`` cell of the ``cell`` notebook may set, with its types."""

    scale: str
    cell: str
    grid: str | None
    seed: int = at_least(0)
    injection: int = at_least(0)


_VALUES: dict[type, tuple[type, dict[str, Any]]] = {
    Testbed: (
        _TestbedValues,
        {"scale": "laptop", "model": None, "canaries": None, "output": "testbed", "overrides": {}},
    ),
    CellRun: (_CellValues, {"scale": "laptop", "cell": "safety-full-high-30", "seed": 0, "grid": None, "injection": 0}),
    CaseRun: (_CaseValues, {"scale": "laptop", "cell": None, "decoys": 255}),
}


def _parameters(namespace: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """What the parameters cell and papermill have set, as far as it has a plain value.

    IPython keeps the texts of all cells in ``In``. Names nobody reads are looked for in the latest cell that papermill
    injected and in the latest one that sets ``scale``, so that a cell can be edited and run again later on.
    """
    plain = {
        name: value
        for name, value in namespace.items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and not callable(value)
    }
    if "In" not in namespace:
        return plain
    assigned = [_assigned_names(str(cell)) for cell in namespace["In"]]
    injected = [names for names, cell in zip(assigned, namespace["In"], strict=True) if _is_injected(cell)]
    setting_scale = [names for names in assigned if "scale" in names]
    names = {*defaults}.union(*injected[-1:], *setting_scale[-1:])
    return {name: value for name, value in plain.items() if name in names}


def _assigned_names(cell: str) -> set[str]:
    """Names that a cell assigns at its top level."""
    try:
        statements = ast.parse(cell).body
    except SyntaxError:  # an IPython magic
        return set()
    targets = [target for s in statements if isinstance(s, ast.Assign) for target in s.targets]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _is_injected(cell: Any) -> bool:
    """Whether papermill wrote this cell: it marks it with a first line of its own."""
    return str(cell).startswith("# Parameters\n")


def _result_source(namespace: dict[str, Any]) -> str:
    """``$LEAKBOOK_RESULTS`` where set; ``local`` in a papermill run with parameters; else ``auto``."""
    source = os.environ.get(ENVIRONMENT) or ""
    if source and source not in RESULT_SOURCES:
        raise ConfigError(f"{ENVIRONMENT}: got {source!r}, expected one of {', '.join(RESULT_SOURCES)}.")
    return source or ("local" if any(map(_is_injected, namespace.get("In", ()))) else "auto")


def from_notebook(namespace: dict[str, Any], study: type = Testbed) -> Any:
    """Check the parameters of a notebook: ``params = config.from_notebook(globals())`` after the parameters cell.

    ``study`` is what the notebook is about: :class:`Testbed`, :class:`CellRun` for one cell of the sweep, or
    :class:`CaseRun` for a case.

    Raises:
        ConfigError: a name nobody reads, or a value of the wrong type (a number given as a string, say).
    """
    given, source = checked(namespace, *_VALUES[study])
    if study is CaseRun:
        return case_run(given.scale, source, given.cell, given.decoys)
    if study is CellRun:
        return cell_run(given.scale, given.cell, given.seed, source, given.grid, given.injection)
    overrides = given.overrides | ({} if given.model is None else {"backbone": given.model})
    if not given.output or os.path.basename(given.output) != given.output or given.output.startswith("."):
        raise ConfigError(f"notebook.output: got {given.output!r}, expected a plain folder name like 'testbed'.")
    return Testbed(load_scale(given.scale, overrides), given.canaries, given.output, source)


def checked(namespace: dict[str, Any], values: type, defaults: dict[str, Any]) -> tuple[Any, str]:
    """What a notebook's parameters cell and papermill have set, as ``values``, and where its results come from.

    Raises:
        ConfigError: a name nobody reads, or a value of the wrong type.
    """
    given = build(values, defaults | _parameters(namespace, defaults), "notebook")
    return given, _result_source(namespace)


def other_injection(scale: str, number: int) -> Scale:
    """The scale with the ``number``-th other injection: new secrets, another initialisation and order; 0 is its own."""
    own = load_scale(scale)
    seeds = {"canaries.seed": own.canaries.seed + number, "injection.seed": own.injection.seed + number}
    return load_scale(scale, seeds if number else None)


def cell_run(scale: str, cell: str, seed: int, results: str, grid: str | None = None, injection: int = 0) -> CellRun:
    """One cell of the sweep with one seed, by name; ``grid`` is a file of cells like ``params/cells.yaml``.

    Raises:
        ConfigError: scale or cell are unknown, or see :func:`load_sweep`.
    """
    settings = other_injection(scale, injection)
    sweep = load_sweep(settings, grid)
    return CellRun(settings, sweep, sweep.cell(cell), seed, results, grid, injection)


def case_run(scale: str, results: str, cell: str | None = None, decoys: int = 255) -> CaseRun:
    """A case study's parameters; ``cell`` replaces the cell that the rule picks.

    Raises:
        ConfigError: scale or cell are unknown.
    """
    settings = load_scale(scale)
    sweep = load_sweep(settings)
    if cell is not None:
        sweep.cell(cell)
    return CaseRun(settings, sweep, load_cases(scale), cell, decoys, results)
