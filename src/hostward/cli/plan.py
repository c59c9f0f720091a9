"""Run `hostward plan`: predict what a run needs, before anything is allocated."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hostward.cli.options import complete_override, complete_recipe
from hostward.cli.output import (
    STDOUT,
    require_apart,
    require_replaceable,
    require_writable,
    text_stream,
    wrapped,
    write_json,
)
from hostward.cli.recipe import DEFAULT_RECIPE, configured
from hostward.cli.usage import usage_errors
from hostward.errors import ConfigError, ExitCode, HostwardError, UnknownNameError
from hostward.plan.hardware_profile import PROFILES
from hostward.trainer.garbage_collection import gc_disabled

if TYPE_CHECKING:
    from hostward.config.schema import Config
    from hostward.core.inventory import StateFormat
    from hostward.plan.budgets import Budgets
    from hostward.plan.cost_model import Speeds
    from hostward.plan.hardware_profile import Hardware
    from hostward.plan.plan_file import PlanFile
    from hostward.plan.result import Answer, Fix, Question
    from hostward.plan.solver import Forced
    from hostward.plan.workload import Workload
    from hostward.trainer.workload import ModelFile

DEFAULT_PROFILE = "h200"
MOST = 1 << 30
"""Tokens of a microbatch, and sequences of a step, at most."""
MOST_TOKENS = 1 << 24
"""Of a sequence, at most: a mask has the square of it."""
MOST_GPUS = 1 << 16

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[OVERRIDES]... | diff A B",
        help="Options of the recipe; with --config those of the state's dtypes alone, as in "
        "optimizer.exp_avg_dtype=bf16. Or two plan files to compare.",
        autocompletion=complete_override,
    ),
]
Recipe = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        help="A recipe by name; `hostward recipes` lists them.",
        autocompletion=complete_recipe,
        show_default=DEFAULT_RECIPE,
    ),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="PATH", help="A transformers config.json instead of a recipe.")
]
Sequence = Annotated[
    int | None,
    typer.Option("--seq", min=1, max=MOST_TOKENS, help="With --config: tokens in a sequence.", show_default="4096"),
]
Batch = Annotated[
    int | None,
    typer.Option(
        "--batch",
        min=1,
        max=MOST,
        help="With --config: sequences in a step, of all GPUs.",
        show_default="one microbatch of each GPU",
    ),
]
Reshard = Annotated[
    bool, typer.Option("--reshard", help="With --config and several GPUs: reshard layers after forward.")
]
Micro = Annotated[
    int | None,
    typer.Option("--micro-batch", min=1, max=MOST, help="With --config: sequences in a microbatch.", show_default="1"),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device-memory",
        metavar="SIZE",
        help="Of each GPU, as in 40GiB: all of it is used, so give about 2 GiB less than a card has.",
        show_default="what the GPU has, less a reserve",
    ),
]
Host = Annotated[
    str | None,
    typer.Option(
        "--host-memory",
        metavar="SIZE",
        help="Of the machine, all GPUs together: all of it is used, so give what `free` reports as available.",
        show_default="what a measured machine has, less a tenth; else no limit",
    ),
]
Pinned = Annotated[str | None, typer.Option("--pinned-memory", metavar="SIZE", help="Pinned, of the machine.")]
NoPin = Annotated[
    bool, typer.Option("--no-pin", help="With a CPU optimizer step neither gradients nor weights are pinned.")
]
StepEarly = Annotated[
    float | None,
    typer.Option(
        "--step-early",
        metavar="SHARE",
        min=0.0,
        max=1.0,
        help="CPU optimizer steps during backward, of so much of the CPU's share (optimizer.step_early).",
    ),
]
HardwareName = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        metavar="FILE|PROFILE",
        help=f"A file of `hostward bench machine`, or a shipped profile: {', '.join(PROFILES)}.",
        show_default=DEFAULT_PROFILE,
    ),
]
Gpus = Annotated[
    str,
    typer.Option(
        "--gpus", metavar="N[,N...]", help="GPUs of a machine that share all state; of several numbers, a line each."
    ),
]
Place = Annotated[
    list[str] | None,
    typer.Option(
        "--place",
        metavar="PATTERN=device|streamed|host",
        help="Chosen by hand: optimizer state of layers or buckets by name.",
    ),
]
KeepOption = Annotated[
    list[str] | None,
    typer.Option(
        "--keep",
        metavar="PATTERN=WHAT",
        help="Chosen by hand, of layers by name: keep, offload, recompute, recompute_offload, elementwise or "
        "elementwise_offload.",
    ),
]
Weights = Annotated[int | None, typer.Option("--weights", min=0, help="So many first layers' weights on the host.")]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw step time against device memory.")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the plan; - is standard output.")]


WhyNot = Annotated[
    list[str] | None,
    typer.Option(
        "--why-not", metavar="FLAGS", help='What other flags would change, as in --why-not "--weights 25"; repeatable.'
    ),
]


# Importing torch and transformers creates millions of permanent objects, and scanning them repeatedly for cyclic
# garbage takes a third of the time until the answer.
@gc_disabled()
def plan(
    context: typer.Context,
    words: Words = None,
    recipe: Recipe = None,
    config: ConfigFile = None,
    sequence: Sequence = None,
    batch: Batch = None,
    micro_batch: Micro = None,
    reshard: Reshard = False,
    device_memory: Device = None,
    host_memory: Host = None,
    pinned_memory: Pinned = None,
    no_pin: NoPin = False,
    step_early: StepEarly = None,
    hardware: HardwareName = None,
    gpus: Gpus = "1",
    place: Place = None,
    keep: KeepOption = None,
    weights: Weights = None,
    why_not: WhyNot = None,
    plot: Plot = None,
    json_file: JsonFile = None,
) -> None:
    """Predict a run: bytes by phase, placements, seconds per step, and the step time with less memory.

    Exit code 1 if it does not fit, with what is short and commands that fit, or a step cannot be divided among --gpus.
    Without --hardware an NVIDIA H200 is assumed. `hostward plan diff A B` compares two plans.
    """
    if words and words[0] == "diff":
        for name in sorted(_given(context).keys() - {"words"}):
            raise ConfigError(f"{_flag(name)} has no effect with plan diff", why="no plan is made", fix="leave it out")
        _diff(words[1:])
        return
    if words and difflib.get_close_matches(words[0], ["diff"]):
        raise UnknownNameError(f"hostward plan has no command {words[0]!r}", fix="hostward plan diff A.json B.json")
    written = {"--json": json_file, "--plot": plot}
    _require_outputs(written, config, hardware)
    from hostward.plan.render import compared, render
    from hostward.plan.solver import require_scipy

    require_scipy()
    places, keeps = tuple(place or ()), tuple(keep or ())
    given = hardware, gpus, device_memory, host_memory, pinned_memory, no_pin, step_early, places, keeps, weights
    flags = Flags(tuple(words or ()), recipe, config, sequence, batch, micro_batch, reshard, *given)
    counts = flags.counts()
    if len(counts) > 1 and (plot is not None or json_file is not None or why_not):
        raise ConfigError(
            f"--gpus {gpus} with --json, --plot or --why-not, which are about one plan", fix=f"--gpus {counts[-1]}"
        )
    others = [(text, _varied(context, flags, text)) for text in why_not or []]
    read = _read_once()
    chosen_by_hand = bool(place or keep or weights is not None)
    answers, undivided = _answers(counts, flags.asked(read), partial(_answer, plot, json_file, chosen_by_hand))
    varied = f"\n{_beside(answers[0], others, read)}" if others else ""

    def command(count: int, fix: Fix) -> str:
        return flags.of(count).fixed(fix).command(written)

    several = len(counts) > 1
    text = (
        compared(answers, undivided, command) if several else render(answers[0], partial(command, counts[0])) + varied
    )
    notes = f"{'' if hardware else _ASSUMED}{'' if config is None else _not_followed(read(config))}"
    print(wrapped(f"{notes}{text}"), end="", file=text_stream(json_file))
    if undivided or any(found.chosen is None for found in answers):
        raise typer.Exit(ExitCode.FAILED)


_PICTURES = ".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp"


def _require_outputs(written: Mapping[str, Path | None], config: Path | None, hardware: str | None) -> None:
    """Raise ConfigError for a file that cannot be written, that is read as well, or that is no picture."""
    json_file, plot = written["--json"], written["--plot"]
    require_replaceable("--json", json_file)
    require_writable("--plot", plot)
    if plot is not None and plot.suffix.lower() not in _PICTURES:
        raise ConfigError(
            f"--plot {plot} names no kind of picture that can be written",
            why=f"its end does, which is {', '.join(_PICTURES)}",
            fix=f"--plot {shlex.quote(str(plot.with_suffix('.png')))}",
        )
    if config is not None and os.path.isdir(config):
        config /= "config.json"
    file = None if hardware is None or hardware in PROFILES else Path(hardware)
    require_apart(written, {"--config": config, "--hardware": file})


_ASSUMED = (
    f"no --hardware is given: the shipped profile {DEFAULT_PROFILE} is assumed; --hardware takes "
    f"{', '.join(name for name in PROFILES if name != DEFAULT_PROFILE)}, or a file of `hostward bench machine`\n"
)


def _not_followed(model: ModelFile) -> str:
    """Return lines about what the file describes and the plan does not have; "" where there is nothing."""
    from hostward.trainer.workload import not_planned

    return "".join(f"{said}\n" for said in not_planned(model))


def _read_once() -> Callable[[Path], ModelFile]:
    """Return `read_model_file`, which reads each file once: of a pipe there is nothing to be read again."""
    from hostward.trainer.workload import read_model_file

    return cache(read_model_file)


@dataclass(frozen=True, slots=True)
class Flags:
    """Hold what is asked of `hostward plan`: the model, the machine, limits and choices by hand."""

    words: tuple[str, ...]
    recipe: str | None
    config: Path | None
    sequence: int | None
    batch: int | None
    micro_batch: int | None
    reshard: bool
    hardware: str | None
    gpus: str
    device_memory: str | None
    host_memory: str | None
    pinned_memory: str | None
    no_pin: bool
    step_early: float | None
    place: tuple[str, ...]
    keep: tuple[str, ...]
    weights: int | None

    def counts(self) -> list[int]:
        """Return the numbers of `--gpus`, each once. Raises ConfigError for another text."""
        words = self.gpus.split(",")
        if not all(word.isascii() and word.isdigit() and word.strip("0") for word in words):
            raise ConfigError(
                f"--gpus {self.gpus} is not a number of GPUs", fix="--gpus 8, or --gpus 1,4,8 for a line of each"
            )
        digits = [word.lstrip("0") for word in words]
        most = max(digits, key=lambda word: (len(word), word))
        if len(most) > len(str(MOST_GPUS)) or int(most) > MOST_GPUS:  # int takes no more than some thousand digits
            raise ConfigError(f"--gpus {most} are more than can be planned", fix=f"at most {MOST_GPUS:,}")
        return list(dict.fromkeys(map(int, digits)))

    def of(self, count: int) -> Flags:
        """Return the flags that ask for this number of GPUs alone."""
        return replace(self, gpus=str(count), reshard=self.reshard and count > 1)

    def fixed(self, fix: Fix) -> Flags:
        """Return the flags with the fix of a plan that does not fit."""
        from hostward.core.units import size_option

        sizes = {"device": fix.device_bytes, "host": fix.host_bytes, "pinned": fix.pinned_bytes}
        given: dict[str, Any] = {f"{name}_memory": size_option(size) for name, size in sizes.items() if size}
        given |= {"hardware": fix.hardware, "device_memory": None} if fix.hardware else {}
        given |= {"gpus": str(fix.gpus)} if fix.gpus else {}
        given |= {"no_pin": True} if fix.unpinned else {}
        given |= {"step_early": None} if fix.none_early else {}
        given |= {"place": (), "keep": (), "weights": None} if fix.unforced else {}
        given["words"] = self._fixed_words(fix)
        if self.config is None:
            return replace(self, **given)
        batch = fix.step_sequences if self.batch else None
        if fix.microbatch_sequences:  # without --batch a step has one microbatch of each GPU, but it stays as it is
            batch = self.batch or self.counts()[0] * (self.micro_batch or 1)
        sequence, micro_batch = fix.sequence_tokens, fix.microbatch_sequences
        changed: dict[str, Any] = {
            "sequence": sequence,
            "batch": batch,
            "micro_batch": micro_batch,
            "reshard": fix.resharded,
        }
        return replace(self, **given, **{name: value for name, value in changed.items() if value})

    def _fixed_words(self, fix: Fix) -> tuple[str, ...]:
        """Return the options with the fix; a model that `--config` describes has those of the state's dtypes alone."""
        from hostward.config.rules.combinations import STATE_OPTIONS
        from hostward.trainer.plan_request import forces

        of_recipe = {
            "model.seq_length": fix.sequence_tokens,
            "train.global_batch_size": fix.step_sequences,
            "train.micro_batch_size": fix.microbatch_sequences,
            "ddp.data_parallel_sharding_strategy": "optim_grads_params" if fix.resharded else None,
        }
        changed = {option: value for option, value in of_recipe.items() if value and self.config is None}
        changed |= {STATE_OPTIONS[name]: dtype for name, dtype in fix.state_dtypes.items()}
        names = {word: word.partition("=")[0] for word in self.words}
        gone = {*changed, *({"optimizer.step_early"} if fix.none_early else ())}
        kept = (w for w, name in names.items() if name not in gone and not (fix.unforced and forces(name)))
        return (*kept, *(f"{option}={value}" for option, value in changed.items()))

    def command(self, written: Mapping[str, Path | None]) -> str:
        """Return the command line that asks for this.

        Args:
            written: further flags by name, with the files that they write.
        """
        parts = ["hostward", "plan"]
        for name, flag in _FLAGS.items():
            value = getattr(self, name)
            if isinstance(value, tuple):
                parts += [part for each in value for part in (flag, each)] if flag else []
            elif value is True:
                parts.append(flag)
            elif value is not None and value is not False and (flag, value) != ("--gpus", "1"):
                parts += [flag, str(value)]
        for flag, file in written.items():
            parts += [flag, str(file)] if file else []
        return shlex.join([*parts, *self.words])

    def asked(self, read: Callable[[Path], ModelFile]) -> Callable[[int], Question]:
        """Return a function that makes the question for a number of GPUs; `read` reads a config.json.

        Raises ConfigError for flags that do not go together, before any model is traced.
        """
        from hostward.plan.cost_model import speeds_of
        from hostward.plan.result import Divided, Question
        from hostward.trainer.plan_request import by_hand, forced_by_hand, require_early

        machine = _hardware(self.hardware)
        hand = partial(by_hand, self.place, self.keep, self.weights)
        if self.config is not None and self.recipe is not None:
            raise ConfigError("--config does not go with --recipe", fix="leave one of them out")
        sizes = self.sequence, self.batch, self.micro_batch
        form = _state_format(() if self.config is None else self.words)
        traced = cache(partial(_traced, read, sequence=self.sequence, micro_batch=self.micro_batch, form=form))
        _require_tokens(self.sequence or 4096, self.micro_batch or 1)
        if self.reshard and self.counts() == [1]:
            raise ConfigError(
                "--reshard has no effect with one GPU", why="it holds all", fix="leave it out, or --gpus N"
            )
        if self.config is None:
            names = "--seq", "--batch", "--micro-batch", "--reshard"
            _require_none_of_a_file(dict(zip(names, (*sizes, self.reshard), strict=True)))

        divided = dict[int, Divided]()
        """By microbatches of a step: all else is the same for every number of GPUs."""

        def question(count: int) -> Question:
            budgets = _budgets(machine, count, self.device_memory, self.host_memory, self.pinned_memory)
            if self.config is not None:
                chosen = hand(None)
                of = partial(traced, self.config)
                whole, workload, forced, phases = _of_file(of, *sizes[1:], count, resharded=self.reshard)
            else:
                name = self.recipe or DEFAULT_RECIPE
                options = configured(name, self.words)
                _require_tokens(options.model.seq_length, options.train.micro_batch_size)
                chosen = hand(options.model.num_layers if options.model.hf_model_path is None else None)
                require_early(options, self.step_early or 0.0)
                whole, workload, forced, phases = _of_recipe(name, options, count, speeds_of(machine, count))
            if self.no_pin:
                whole, workload = (replace(w, pin_gradients=False, pin_weights=False) for w in (whole, workload))
            if self.step_early is not None:
                whole, workload = (replace(w, step_early=self.step_early) for w in (whole, workload))
            forced = forced_by_hand(workload, forced, chosen)
            budgets = replace(budgets, phases=phases)
            # Of several GPUs with all parameters each no plan is made.
            more = whole if self.config is not None or options.ddp.use_distributed_optimizer else None
            parts = None if more is None else divided.setdefault(more.microbatches, Divided(more))
            return Question(workload, machine, count, budgets, forced, parts)

        return question


def _varied(context: typer.Context, flags: Flags, text: str) -> Flags:
    """Return the flags with those of `--why-not TEXT` in their places; patterns and overrides are added.

    Raises UnknownNameError where the text has what is no flag of a plan, and ConfigError where it changes nothing.
    """
    may = "--weights 25, --keep '*=recompute', --host-memory 256GiB, --seq 8192, or another flag of hostward plan"
    try:
        parsed = context.command.make_context("hostward plan --why-not", shlex.split(text))
    except (ValueError, usage_errors()) as error:
        why = error.format_message() if isinstance(error, usage_errors()) else str(error)
        raise UnknownNameError(f"--why-not {text!r} is not what hostward plan takes", why=why, fix=may) from error
    given = _given(parsed)
    other = sorted(map(_flag, given.keys() - _FLAGS.keys()))
    if other or not given or given.get("words", [""])[0] == "diff":
        what = f"{', '.join(other)} is about what is written" if other else "it varies no flag"
        raise UnknownNameError(f"--why-not {text!r}: {what}", fix=may)
    for name in ("words", "place", "keep"):
        given[name] = (*getattr(flags, name), *(given.get(name) or ()))
    varied = replace(flags, **given)
    if len(varied.counts()) > 1:
        raise ConfigError(f"--why-not {text!r} asks for several plans", fix="name one number of GPUs in each --why-not")
    return varied


_FLAGS = {
    field.name: {"words": "", "sequence": "--seq"}.get(field.name, f"--{field.name.replace('_', '-')}")
    for field in fields(Flags)
}
"""Flags by the name of their field; words have none."""


def _flag(name: str) -> str:
    """Return the flag of a parameter, by its name in Python."""
    return _FLAGS.get(name, f"--{name.replace('_', '-').removesuffix('-file')}")


def _given(context: Any) -> dict[str, Any]:
    """Return the parameters that the command line has, by their name in Python."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name: context.params[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def _beside(found: Answer, others: list[tuple[str, Flags]], read: Callable[[Path], ModelFile]) -> str:
    """Render the answers of other flags beside that of the plan."""
    from hostward.plan.rank_partition import required_of
    from hostward.plan.render import beside
    from hostward.plan.result import answer

    answers = []
    for text, flags in others:
        try:
            question = flags.asked(read)(flags.counts()[0])
        except HostwardError as error:
            raise type(error)(f"--why-not {text!r}: {error.what}", why=error.why, fix=error.fix) from error
        answers.append((text, answer(question, required_of(question.workload))))
    return beside(found, answers)


def _answers(
    counts: list[int], asked: Callable[[int], Question], answer: Callable[[Question], Answer]
) -> tuple[list[Answer], dict[int, HostwardError]]:
    """Return the answers for these numbers of GPUs, and the errors of those that cannot divide the step.

    Raises if none of them can.
    """
    from hostward.plan.rank_partition import UndividedError

    answers: list[Answer] = []
    undivided: dict[int, HostwardError] = {}
    for count in counts:
        try:
            answers.append(answer(asked(count)))
        except UndividedError as error:
            if count == counts[-1] and not answers:
                raise
            undivided[count] = error
    return answers, undivided


def _answer(plot: Path | None, json_file: Path | None, chosen_by_hand: bool, question: Question) -> Answer:
    from hostward.plan import plan_file
    from hostward.plan.rank_partition import required_of
    from hostward.plan.render import frontier_points
    from hostward.plan.result import answer

    found = answer(question, required_of(question.workload))
    if plot is not None:
        from hostward.plan.render import draw

        found.frontier.widen()  # its line extends beyond the device's memory
        draw(found, plot)
    if found.chosen is not None and (json_file is not None or chosen_by_hand):
        made = plan_file.plan_of(
            question.workload,
            question.hardware,
            question.gpus,
            question.budgets,
            found.chosen,
            frontier_points(found),
        )
        if json_file == STDOUT:
            write_json(json_file, made.to_json())
        elif json_file is not None:
            plan_file.save(made, json_file)
        if chosen_by_hand:
            _warn_unsupported(made)
    elif json_file is not None:
        typer.echo(f"{'--json' if json_file == STDOUT else json_file} is not written: no plan fits", err=True)
    return found


def _warn_unsupported(plan: PlanFile) -> None:
    """Print why training does not support a plan with choices made by hand."""
    from hostward.plan.plan_file import layers_of

    try:
        layers_of(plan)
    except ConfigError as error:
        typer.echo(f"hostward train --plan does not support this plan: {error.what}", err=True)


def _of_recipe(
    name: str, config: Config, gpus: int, speeds: Speeds
) -> tuple[Workload, Workload, Forced, tuple[str, ...]]:
    """Return the workload of one GPU with all parameters, a rank's, what options force, and the phases that count."""
    from hostward.config.rules.table import captured, resharded, widened
    from hostward.config.validate import check
    from hostward.plan.rank_partition import sharded
    from hostward.trainer.plan_request import asked_of, phases_of, require_by_rows, require_planned, unplanned_graphs
    from hostward.trainer.workload import recipe_workload, usual_folder

    require_by_rows(config, "hostward plan", gpus)
    check(config, world_size=1)
    if captured(config):
        raise unplanned_graphs("hostward plan")
    require_planned(config, "hostward plan")
    whole = recipe_workload(config, name=name, folder=usual_folder())
    workload = sharded(whole, gpus, reduced_in_fp32=widened(config, gpus), resharded=resharded(config))
    whole = replace(whole, reduced_in_fp32=widened(config, 2))
    return whole, workload, asked_of(config, workload, speeds), phases_of(config)


def _require_tokens(sequence: int, sequences: int) -> None:
    """Raise ConfigError for a microbatch with more tokens than can be counted."""
    if (tokens := sequence * sequences) > MOST:
        raise ConfigError(f"a microbatch of {tokens:,} tokens is more than can be planned", fix=f"at most {MOST:,}")


def _require_none_of_a_file(given: dict[str, int | None]) -> None:
    """Raise ConfigError for options that belong to a `config.json`, if there is none."""
    for option, value in given.items():
        if value:
            raise ConfigError(
                f"{option} goes with --config",
                fix="for a recipe: model.seq_length, train.global_batch_size, train.micro_batch_size, "
                "ddp.data_parallel_sharding_strategy",
            )


def _of_file(
    traced: Callable[[], Workload], batch: int | None, micro_batch: int | None, gpus: int, *, resharded: bool
) -> tuple[Workload, Workload, Forced, tuple[str, ...]]:
    """Return what `_of_recipe` does, of a config.json whose workload `traced` returns."""
    from hostward.plan.memory_model import EVALUATION, RESUME, SAVE, TRAINING
    from hostward.plan.rank_partition import UndividedError, sharded
    from hostward.plan.solver import Forced

    size = micro_batch or 1
    total = batch or size * gpus
    if total % size:
        raise ConfigError(
            f"--batch {total} is not a multiple of --micro-batch {size}", fix=f"--batch {-(-total // size) * size}"
        )
    workload = replace(traced(), microbatches=total // size)
    try:
        part = sharded(workload, gpus, resharded=resharded)
    except UndividedError as error:
        if workload.microbatches % gpus == 0:
            raise
        fix = f"--batch {gpus * size}, or another multiple of it"
        raise UndividedError(error.what, why=error.why, fix=fix) from error
    # Who trains a model saves it, may have to resume, and evaluates it.
    return workload, part, Forced(), (*TRAINING, SAVE, RESUME, EVALUATION)


def _traced(
    read: Callable[[Path], ModelFile], path: Path, sequence: int | None, micro_batch: int | None, form: StateFormat
) -> Workload:
    """Return the workload of a config.json, traced once for several numbers of GPUs."""
    from hostward.plan.workload import in_format
    from hostward.trainer.workload import config_workload, usual_folder

    tokens, sequences, folder = sequence or 4096, micro_batch or 1, usual_folder()
    found = config_workload(read(path), sequence_tokens=tokens, microbatch_sequences=sequences, folder=folder)
    return in_format(found, form)


def _state_format(words: tuple[str, ...]) -> StateFormat:
    """Return how state is stored by the options that go with `--config`; raise ConfigError for others."""
    from hostward.config.overrides import apply_overrides, split_word
    from hostward.config.rules.combinations import STATE_OPTIONS
    from hostward.config.schema import Config, get_option
    from hostward.config.validate import value_violation
    from hostward.trainer.plan_request import state_format

    config = apply_overrides(Config(), words)
    asked = [info for info, _ in map(split_word, words)]
    names = [info.dotted for info in asked]
    if other := next((name for name in names if name not in STATE_OPTIONS.values()), None):
        raise ConfigError(
            f"{other} does not go with --config",
            why=f"of a recipe's options it takes {', '.join(STATE_OPTIONS.values())}; the file says what the model is",
            fix="leave it out, see the flags of hostward plan --help, or plan a recipe",
        )
    for info in asked:
        if wrong := value_violation(info, get_option(config, info.dotted)):
            raise ConfigError(wrong.message, why=wrong.why, fix=wrong.fix)
    return state_format(config)


def _hardware(text: str | None) -> Hardware:
    from hostward.plan import hardware_profile

    if text is None:
        return hardware_profile.profile(DEFAULT_PROFILE)
    if text in hardware_profile.PROFILES:
        return hardware_profile.profile(text)
    path = Path(text)
    if os.path.isdir(path) or (not os.path.exists(path) and path.suffix != ".json"):
        closest = difflib.get_close_matches(text, hardware_profile.PROFILES, n=1)
        raise ConfigError(
            f"--hardware {text} is neither a file nor a shipped profile",
            fix=f"did you mean --hardware {closest[0]}?"
            if closest
            else f"choose from {', '.join(hardware_profile.PROFILES)}, or write a file: hostward bench machine",
        )
    return hardware_profile.load(path)


def _budgets(machine: Hardware, gpus: int, device: str | None, host: str | None, pinned: str | None) -> Budgets:
    """Return the budgets of one GPU; by default the machine's memory less a reserve."""
    from hostward.core.units import size_bytes
    from hostward.plan.budgets import Budgets
    from hostward.plan.result import default_budgets

    usual = default_budgets(machine, gpus)
    return Budgets(
        usual.device_bytes if device is None else size_bytes(device, "--device-memory"),
        usual.host_bytes if host is None else size_bytes(host, "--host-memory") // gpus,
        usual.pinned_bytes if pinned is None else size_bytes(pinned, "--pinned-memory") // gpus,
    )


def _diff(words: list[str]) -> None:
    """Compare two plans; exit code 1 if they differ."""
    from hostward.plan import plan_file

    if len(words) != 2:
        raise ConfigError(f"plan diff takes two files, got {len(words)}", fix="hostward plan diff A.json B.json")
    plans = plan_file.load(Path(words[0])), plan_file.load(Path(words[1]))
    lines = plan_file.differences(*plans)
    if not lines:
        typer.echo("the plans are equal")
        return
    typer.echo(wrapped("\n".join([plan_file.summary(*plans), *lines])))
    raise typer.Exit(ExitCode.FAILED)
