"""Whether trainer and engine fit into this machine; what would, where they do not.

`memory.py` computes what is needed, `machine.py` sees what there is. A node that cannot fit is refused before it starts
anything, with the arithmetic and with the nearest settings that would fit: each was tried with the same arithmetic.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import structlog

from sapo_node import feasible
from sapo_node.config import InferenceSection, NodeConfig, TrainingSection
from sapo_node.datadir import DataDir
from sapo_node.errors import ConfigError
from sapo_node.inference.choice import choose_engine
from sapo_node.machine import Gpu, Machine, look
from sapo_node.memory import GIB, Layout, Needs, Part, Place, gpu_share, needs, sequence_kv_bytes
from sapo_node.model_shape import DamagedModel, ModelShape, UnknownShape, folder_here, missing, read_shape
from sapo_node.training import checkpoint
from sapo_node.workers import Refused

log = structlog.get_logger(__name__)

LEAST_MICRO_BATCH: Final = 256  # below, a pass is mostly overhead
LEAST_COMPLETION: Final = 32  # tokens; below, few models answer anything


@dataclass(frozen=True)
class Fit:
    """A model that fits."""

    needs: Needs | None
    """None: not computed, `notes` say why."""

    gpu_memory_share: float | None = None
    """What vLLM may take of its GPU; None without one."""

    notes: tuple[str, ...] = ()
    """What its owner should be warned of."""

    remarks: tuple[str, ...] = ()
    """What is as it should be, and may surprise."""


class Change(NamedTuple):
    """Another value of one setting."""

    name: str
    old: Any
    new: Any
    remark: str


class _Knob(NamedTuple):
    name: str
    values: Callable[[NodeConfig, Machine], Iterator[Any]]
    """Smaller and smaller values that might be set."""

    remark: str


def layout_of(config: NodeConfig, machine: Machine) -> Layout:
    """Who computes where, with these settings on this machine. Raises ConfigError as `choose_engine` does."""
    engine = choose_engine(config.inference.engine, machine).engine
    trainer_on_gpu = config.training.device != "cpu" and machine.trains_on_gpu
    engine_on_gpu = engine == "vllm" and machine.vllm == "vllm"
    return Layout(
        engine=engine,
        trainer_on_gpu=trainer_on_gpu,
        engine_on_gpu=engine_on_gpu,
        shared_gpu=trainer_on_gpu and engine_on_gpu and config.inference.weight_transfer != "nccl",
        shm_free=machine.shm_free,
    )


def check_start(config: NodeConfig, here: Machine) -> None:
    """What a node does before it starts anything: refuse what cannot work or fit, and log what is needed.

    Raises ConfigError for an engine that is not installed, for settings that cannot work here, and for a model on this
    machine that does not fit or cannot be loaded. A model that is still to be downloaded is checked by
    `refuse_before_loading`.
    """
    for note in here.notes:
        log.warning(note)
    fit = check_model(config, here)
    if checkpoint.latest(DataDir(config.node.data_dir).checkpoints) is None:  # a node resumes without the first model
        refuse_missing(config)
    if fit is None:
        log.info("the model is not on this machine yet: its memory is checked once it is", model=config.training.model)
        return
    for line in fit.notes:
        log.warning(line)
    for line in fit.remarks:
        log.info(line)
    if fit.needs is not None:
        log.info("memory", need_gib=float(_gib(fit.needs.total("memory"))), limit_gib=float(_gib(here.memory)))


def summary(config: NodeConfig, here: Machine) -> list[str]:
    """Lines on engine and memory, for `sapo-node init`. Raises ConfigError as `check_start` does."""
    chosen = choose_engine(config.inference.engine, here)
    lines = [f"Engine:   {chosen.engine}: {chosen.reason}"]
    fit = check_model(config, here)
    refuse_missing(config)
    if fit is None:
        lines.append(f"Memory:   {config.training.model} is not on this machine yet; it is checked once it is")
    elif fit.needs is not None:
        for place in fit.needs.places():
            has = f"{_called(place)}: {_gib(_capacity(place, here, config))} GiB"
            lines.append(f"Memory:   up to {_gib(fit.needs.total(place))} GiB are needed; {has}")
    if fit is not None and fit.gpu_memory_share is not None:
        lines.append(f"          vLLM may take a share of {fit.gpu_memory_share:.2f} of its GPU")
    return lines + [f"Note:     {note}" for note in (*here.notes, *((*fit.notes, *fit.remarks) if fit else ()))]


def refuse_missing(config: NodeConfig) -> None:
    """Raise ConfigError for a model whose folder is not there, or is not whole."""
    if fault := missing(config.training.model):
        raise ConfigError([f"training.model: {fault}"])


def gpu_memory_share(config: NodeConfig, before: Machine) -> float | None:
    """VLLM's part of its GPU, for a model that is on this machine; None where it uses no GPU. Raises ConfigError.

    `before` is the machine before trainer and engine took anything. Not run on a GPU yet.
    """
    fit = check_model(config, before)
    return None if fit is None else fit.gpu_memory_share


def check_model(config: NodeConfig, machine: Machine, nodes: int = 1) -> Fit | None:
    """Check a model that is on this machine; None: it is still to be downloaded, and is checked then.

    `nodes` of them are to run here. Raises ConfigError for what cannot work, and with the arithmetic where they do not
    fit.
    """
    layout = layout_of(config, machine)  # what is asked for and not installed is told without the model too
    if problems := list(feasible.machine_problems(config, layout, machine)):
        raise ConfigError(problems)
    folder = folder_here(config.training.model)
    return None if folder is None else check_folder(folder, config, machine, nodes)


def check_folder(folder: Path, config: NodeConfig, machine: Machine, nodes: int = 1) -> Fit:
    """Check the model in `folder`. Raises ConfigError as `check` does."""
    try:
        shape = read_shape(folder)
    except UnknownShape as error:
        return Fit(None, notes=(f"whether the model fits into memory was not computed: {error}",))
    return check(shape, config, machine, nodes)


def refuse_before_loading(folder: Path, training: TrainingSection, inference: InferenceSection) -> None:
    """Check a model that may just have been downloaded, in the policy worker, which knows two sections of the settings.

    Raises Refused where it is damaged, and with the arithmetic where it does not fit.
    """
    config = NodeConfig.model_construct(training=training, inference=inference)
    try:
        check(read_shape(folder), config, look())
    except ConfigError as error:
        raise Refused(str(error)) from error
    except DamagedModel as error:
        raise Refused(f"training.model: {error}") from error
    except UnknownShape:
        pass  # `check_start` told of an architecture whose sizes are not known


def check(shape: ModelShape, config: NodeConfig, machine: Machine, nodes: int = 1) -> Fit:
    """Check a model of this shape. Raises ConfigError for what it cannot do, and with the arithmetic where it does not
    fit."""
    layout = layout_of(config, machine)
    if impossible := list(feasible.model_problems(shape, config, layout)):
        raise ConfigError(impossible)
    needed = needs(shape, config, layout)
    problems = _problems(shape, config, machine, nodes)
    if problems:
        raise ConfigError(["\n".join([*problems, *_cures(shape, config, machine, nodes)])])
    notes = []
    for place in needed.places():
        total, free = nodes * needed.total(place), _free(place, machine)
        if total > free:
            notes.append(
                f"{_who(config, nodes)} may need {_gib(total)} GiB of {_called(place)}, of which {_gib(free)} GiB are "
                "free now; other programs use the rest"
            )
    remarks = tuple(feasible.remarks(shape, config, layout))
    return Fit(needed, _share(shape, config, layout, machine), tuple(notes), remarks)


# ---- refusing --------------------------------------------------------------------------------------------------------


def _problems(shape: ModelShape, config: NodeConfig, machine: Machine, nodes: int) -> list[str]:
    """Lines on all that does not fit; empty where all does."""
    layout = layout_of(config, machine)
    needed = needs(shape, config, layout)
    lines = []
    for place in needed.places():
        total, there = nodes * needed.total(place), _capacity(place, machine, config)
        if total > there:
            limit = machine.limit if place == "memory" else _called(place)
            lines += [
                f"{_who(config, nodes)} cannot fit: up to {_gib(total)} GiB are needed, and the {limit} is "
                f"{_gib(there)} GiB.",
                *table(needed, place, nodes),
            ]
    return lines or list(_vllm_problems(shape, config, layout, machine))


def _vllm_problems(shape: ModelShape, config: NodeConfig, layout: Layout, machine: Machine) -> Iterator[str]:
    """What vLLM would not start with."""
    settings = config.inference
    if layout.engine != "vllm":
        return
    one = sequence_kv_bytes(shape, config)
    if not layout.engine_on_gpu:
        if one > settings.kv_cache_gib * GIB:
            yield (
                f"inference.kv_cache_gib is {settings.kv_cache_gib:g}, but one completion with its prompt needs "
                f"{_gib(one)} GiB: set it to {one / GIB + 0.01:.2f} or more"
            )
        return
    gpu = _engine_gpu(config, layout, machine)
    if gpu is None:
        yield (
            f"inference.tensor_parallel is {settings.tensor_parallel} and weight_transfer {settings.weight_transfer}, "
            f"which {len(machine.gpus)} GPU(s) are too few for"
        )
        return
    most, least = gpu_share(shape, config, layout, gpu.total, gpu.total)
    given = settings.gpu_memory_share
    if given is not None and not least <= given <= most:
        side = f"vLLM needs at least {least:.2f}" if given < least else f"the trainer leaves at most {most:.2f}"
        yield f"inference.gpu_memory_share is {given:g}, but {side} of the {_gib(gpu.total)} GiB of the GPU"
        yield from table(needs(shape, config, layout), "gpu" if layout.shared_gpu else "engine gpu")
    elif most < least:
        yield (
            f"the GPU ({gpu.name}, {_gib(gpu.total)} GiB) is too small for trainer and vLLM: the trainer leaves a "
            f"share of {max(0.0, most):.2f}, and vLLM needs {least:.2f}"
        )
        yield from table(needs(shape, config, layout), "gpu" if layout.shared_gpu else "engine gpu")


def table(needed: Needs, place: Place, nodes: int = 1) -> list[str]:
    """The arithmetic at the worst moment, a line a part, in GiB."""
    parts = needed.at_peak(place)
    while_ = {
        "always": "",
        "training": ", while training",
        "prompts": ", while reading prompts",
        "saving": ", while saving",
    }
    times = f" x {nodes} nodes" if nodes > 1 else ""
    rows = [(part.name, _gib(part.size), part.how) for part in parts]
    end = f"at the worst moment{while_.get(needed.peak(place), ', while sampling')}"
    rows.append((f"together{times}", _gib(nodes * needed.total(place)), end))
    names, sizes = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    return [f"    {name:<{names}}  {size:>{sizes}} GiB  {how}".rstrip() for name, size, how in rows]


def _cures(shape: ModelShape, config: NodeConfig, machine: Machine, nodes: int) -> list[str]:
    alone, together = alternatives(shape, config, machine, nodes)
    lines = []
    if len(together) > 1:
        lines += ["These together would fit:", *map(_told, together)]
    if alone:
        head = "This would fit:" if len(alone) == 1 else "Each of these would fit:"
        lines += [("Or this alone:" if len(alone) == 1 else "Or one of these alone:") if lines else head]
        lines += map(_told, alone)
    if lines:
        return lines
    most = largest_model(shape, config, machine, nodes)
    if most < 1000:
        return ["No setting makes it fit: the programs alone need nearly all of it. Use a larger machine."]
    return [f"No setting makes it fit. A model of at most about {_rounded(most)} parameters does."]


def alternatives(
    shape: ModelShape, config: NodeConfig, machine: Machine, nodes: int = 1
) -> tuple[list[Change], list[Change]]:
    """The nearest settings that fit: those that do so alone, and those that do so together.

    The latter are empty where one that leaves results the same is enough. Both are empty where nothing fits.
    """

    def fits(settings: NodeConfig) -> bool:
        try:
            return not _problems(shape, settings, machine, nodes)
        except ConfigError:  # an engine that is not installed
            return False

    alone = []
    for knob in KNOBS:
        fitting = (v for v in knob.values(config, machine) if fits(_with(config, knob.name, v)))
        alone += [_change(knob, config, value) for value in islice(fitting, 1)]
    harmless = any(change.remark == SAME for change in alone)
    return alone, [] if harmless else _together(config, machine, fits)


def _together(config: NodeConfig, machine: Machine, fits: Callable[[NodeConfig], bool]) -> list[Change]:
    """Settings that fit when several change: all to their least until it fits, then each back as far as it may."""
    changed, used = config, []
    for knob in KNOBS:
        values = list(knob.values(changed, machine))
        if values:
            used.append(knob)
            changed = _with(changed, knob.name, values[-1])
        if fits(changed):
            break
    else:
        return []
    for knob in reversed(used):  # what harms most goes back first
        original = _with(changed, knob.name, _get(config, knob.name))
        ladder = [_get(config, knob.name), *knob.values(original, machine)]
        changed = next(again for value in ladder if fits(again := _with(changed, knob.name, value)))
    return [
        _change(knob, config, _get(changed, knob.name))
        for knob in used
        if _get(changed, knob.name) != _get(config, knob.name)
    ]


def largest_model(shape: ModelShape, config: NodeConfig, machine: Machine, nodes: int = 1) -> int:
    """About how many parameters a model of this build may have here, with the settings that need least."""
    for knob in KNOBS:
        values = list(knob.values(config, machine))
        if values:
            config = _with(config, knob.name, values[-1])
    needed = needs(shape, config, layout_of(config, machine))
    factors = []
    for place in needed.places():
        parts: list[Part] = needed.at_peak(place)
        fixed = nodes * sum(part.size for part in parts if not part.of_model)
        grows = nodes * sum(part.size for part in parts if part.of_model)
        if grows:
            factors.append((_capacity(place, machine, config) - fixed) / grows)
    return max(0, int(min(factors, default=0.0) * shape.params))


# ---- settings that may change ----------------------------------------------------------------------------------------


def _halves(value: int, least: int) -> Iterator[int]:
    while value // 2 >= least:
        value //= 2
        yield value


def _other_engine(config: NodeConfig, machine: Machine) -> Iterator[str]:
    if choose_engine(config.inference.engine, machine).engine == "vllm":
        yield "transformers"


def _smaller_cache(config: NodeConfig, machine: Machine) -> Iterator[float]:
    layout = layout_of(config, machine)
    if layout.engine == "vllm" and not layout.engine_on_gpu:
        yield from (quarters / 4 for quarters in _halves(int(4 * config.inference.kv_cache_gib), 1))


SAME: Final = "results stay the same"
KNOBS: Final = (
    _Knob(
        "inference.gpu_memory_share",
        lambda c, m: iter([None] if c.inference.gpu_memory_share is not None else []),
        "computed",
    ),
    _Knob("training.micro_batch_tokens", lambda c, m: _halves(c.training.micro_batch_tokens, LEAST_MICRO_BATCH), SAME),
    _Knob("inference.batch_completions", lambda c, m: _halves(c.inference.batch_completions, 1), SAME),
    _Knob(
        "training.gradient_checkpointing",
        lambda c, m: iter([True] if not c.training.gradient_checkpointing and c.training.devices == 1 else []),
        "results stay the same; a step takes about a third longer",
    ),
    _Knob("inference.kv_cache_gib", _smaller_cache, "fewer completions run at once"),
    _Knob(
        "training.producer_gradients",
        lambda c, m: iter([False] if c.training.producer_gradients else []),
        "a metric less",
    ),
    _Knob("inference.engine", _other_engine, "sampling and training take turns"),
    _Knob(
        "inference.max_completion_tokens",
        lambda c, m: _halves(c.inference.max_completion_tokens, LEAST_COMPLETION),
        "longer answers are cut",
    ),
    _Knob(
        "training.dtype",
        lambda c, m: iter(["bfloat16"] if c.training.dtype == "float32" else []),
        "small updates round away, and it is slow on most CPUs",
    ),
)
"""From what harms least to what harms most."""


def _told(change: Change) -> str:
    return f"    {change.name}: {_plain(change.new)}  (now {_plain(change.old)}; {change.remark})"


def _get(config: NodeConfig, name: str) -> Any:
    section, key = name.split(".")
    return getattr(getattr(config, section), key)


def _with(config: NodeConfig, name: str, value: Any) -> NodeConfig:
    section, key = name.split(".")
    return config.model_copy(update={section: getattr(config, section).model_copy(update={key: value})})


def _change(knob: _Knob, config: NodeConfig, value: Any) -> Change:
    return Change(knob.name, _get(config, knob.name), value, knob.remark)


# ---- machine and words -----------------------------------------------------------------------------------------------


def _share(shape: ModelShape, config: NodeConfig, layout: Layout, machine: Machine) -> float | None:
    """VLLM's share of its GPU: the one given, else what the trainer and other programs leave."""
    gpu = _engine_gpu(config, layout, machine)
    if not layout.engine_on_gpu or gpu is None:
        return None
    if config.inference.gpu_memory_share is not None:
        return config.inference.gpu_memory_share
    most, least = gpu_share(shape, config, layout, gpu.total, gpu.free)
    return max(most, min(1.0, int(least * 1000 + 1) / 1000))


def _engine_gpu(config: NodeConfig, layout: Layout, machine: Machine) -> Gpu | None:
    """The smallest GPU that vLLM uses; None where there are too few."""
    first = config.training.devices if layout.trainer_on_gpu and not layout.shared_gpu else 0
    used = machine.gpus[first : first + config.inference.tensor_parallel]
    return min(used, key=lambda gpu: gpu.total) if len(used) == config.inference.tensor_parallel else None


def _capacity(place: Place, machine: Machine, config: NodeConfig) -> int:
    if place == "memory":
        return machine.memory
    if place == "gpu":
        return min(gpu.total for gpu in machine.gpus[: config.training.devices])
    gpu = _engine_gpu(config, layout_of(config, machine), machine)
    return gpu.total if gpu else 1 << 62  # too few GPUs: told elsewhere


def _free(place: Place, machine: Machine) -> int:
    if place == "memory":
        return machine.available
    return machine.gpus[0].free if place == "gpu" else machine.gpus[-1].free


def _called(place: Place) -> str:
    return {"memory": "memory", "gpu": "memory of the GPU", "engine gpu": "memory of vLLM's GPU"}[place]


def _who(config: NodeConfig, nodes: int) -> str:
    model = f"training.model {config.training.model}"
    return model if nodes == 1 else f"{nodes} nodes with {model}"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}" if size < 10 * GIB else f"{size / GIB:.1f}"


def _plain(value: Any) -> str:
    """As YAML has it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _rounded(number: float) -> str:
    for unit, factor in (("billion", 1e9), ("million", 1e6), ("thousand", 1e3)):
        if number >= factor:
            return f"{float(f'{number / factor:.2g}'):g} {unit}"
    return str(int(number))
