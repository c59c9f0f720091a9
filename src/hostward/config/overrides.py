"""Parse words `namespace.option=value` strictly, by the declared type of the option.

1.5 is no int, `2` is no bool, and NaN, interpolations and YAML's own reading of words raise.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from typing import Any

from hostward.config.schema import NAMESPACES, Config, OptionInfo, alike, nearest, options
from hostward.errors import ConfigError, UnknownNameError

INTEGER = re.compile(r"[+-]?[0-9]+", re.ASCII)
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)
BOOLEANS = {"true": True, "True": True, "false": False, "False": False}
NONE_WORDS = ("null", "None")

# Options of Megatron that hostward does not need. They are never checked; naming one raises with this reason.
DROPPED = {
    "model.transformer_impl": "models are transformers' own classes; there is no Transformer Engine layer to choose",
    "model.fp8": "fp8 training is not part of hostward",
    "model.fp8_recipe": "fp8 training is not part of hostward",
    "model.delta_offload_bytes_across_pp_ranks": "the plan decides per rank from byte budgets",
    "model.moe_paged_stash": "the plan covers the activations of experts",
    "optimizer.use_precision_aware_optimizer": "exp_avg_dtype, exp_avg_sq_dtype and main_params_dtype are enough",
    "optimizer.main_grads_dtype": "gradients are accumulated in fp32",
    "optimizer.store_param_remainders": "a bf16 weight and its low 16 bits are the only form of the fp32 main weight",
    "optimizer.chunked_optimizer_state_offload": "offload_optimizer_states covers it, with its chunk size",
    "ddp.use_megatron_fsdp": "sharding goes through PyTorch's own engine",
    "ddp.fp8_param_gather": "fp8 training is not part of hostward",
}

# Places where Megatron users look for an option that lives in another namespace here.
MOVED = {
    "optimizer.use_distributed_optimizer": "ddp.use_distributed_optimizer",
    "dataset.seq_length": "model.seq_length",
    "dataset.sequence_length": "model.seq_length",
    "train.seed": "rng.seed",
    "model.seed": "rng.seed",
    "train.max_steps": "train.train_iters",
    "train.lr": "optimizer.lr",
    "model.bf16": "model.params_dtype=bf16",
    "model.fp16": "model.params_dtype=fp16",
    "optimizer.bf16": "model.params_dtype=bf16",
    "optimizer.fp16": "model.params_dtype=fp16",
}

# DeepSpeed's names, and their replacements here.
DEEPSPEED = {
    "zero_optimization": "ddp.use_distributed_optimizer=true",
    "zero_optimization.stage": "ddp.use_distributed_optimizer=true for 1 and 2, with "
    "ddp.data_parallel_sharding_strategy=optim_grads_params for 3, and nothing for 0",
    "zero_optimization.cpu_offload": "optimizer.optimizer_cpu_offload=true optimizer.optimizer_offload_fraction=1.0",
    "zero_optimization.offload_optimizer": "optimizer.optimizer_cpu_offload=true "
    "optimizer.optimizer_offload_fraction=1.0",
    "zero_optimization.offload_optimizer.pin_memory": "optimizer.pin_cpu_grads and optimizer.pin_cpu_params",
    "zero_optimization.offload_optimizer.ratio": "optimizer.optimizer_offload_fraction",
    "zero_optimization.offload_param": "model.cpu_offloading=true model.cpu_offloading_weights=true "
    "model.cpu_offloading_num_layers=COUNT, with optimizer.optimizer_cpu_offload=true "
    "optimizer.optimizer_offload_fraction=1.0",
    "zero_optimization.overlap_comm": "ddp.overlap_grad_reduce and ddp.overlap_param_gather",
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.global_batch_size, over train.micro_batch_size and the processes",
    "gradient_clipping": "optimizer.clip_grad",
    "bf16": "model.params_dtype=bf16, and fp32 without",
    "fp16": "model.params_dtype=fp16, and fp32 without",
    "activation_checkpointing": "model.recompute_granularity=full model.recompute_method=uniform "
    "model.recompute_num_layers=1",
    "activation_checkpointing.cpu_checkpointing": "model.cpu_offloading=true model.cpu_offloading_num_layers=COUNT",
    "steps_per_print": "logger.log_interval",
}

# Flags of other launchers and trainers, without their dashes, and their replacements.
_NO_DEEPSPEED_FILE = (
    "leave it out, and write what its file says as namespace.option=value; `hostward options` lists them"
)
FLAGS = {
    "deepspeed": _NO_DEEPSPEED_FILE,
    "deepspeed_config": _NO_DEEPSPEED_FILE,
    "dry_run": "only hostward train has it; hostward plan reports what a run would need, and allocates nothing",
    "local_rank": "leave it out, and start with torchrun, which sets it in the environment",
}


def apply_overrides(config: Config, words: Sequence[str]) -> Config:
    """Return a copy of `config` with every `namespace.option=value` of `words` applied in order; the later one wins.

    Values, by the declared type: `true`/`false` (also capitalised) for bool; decimal digits for int; a finite decimal
    number for float; the characters exactly as typed for str; `[a,b]` for lists. `null` and `None` are None where the
    option allows it.

    Raises:
        UnknownNameError: a namespace or option does not exist; the text proposes the nearest one.
        ConfigError: a word has no `=`, or spaces around it, or its value does not fit the type of the option;
            several
            such words: one error that lists them all.
    """
    _require_unspaced(words)
    result = copy.deepcopy(config)
    errors: list[ConfigError] = []
    for word in words:
        try:
            _apply(result, word)
        except ConfigError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ConfigError(f"{len(errors)} words are invalid:\n" + "\n".join(f"- {error}" for error in errors))
    return result


def _require_unspaced(words: Sequence[str]) -> None:
    """Raise ConfigError for `optimizer.lr = 3`: three words arrive, each of them wrong for another reason."""
    for i, word in enumerate(words):
        before, after = words[max(0, i - 1) : i], words[i + 1 : i + 2]
        if word in options() and after and "=" not in after[0] and after[0] not in options():
            raise ConfigError(
                f"{word} {after[0]} has a space between option and value",
                why="an option and its value are one word of the command line",
                fix=f"write {word}={after[0]}",
            )
        if word.startswith("=") and before and "=" not in before[0]:
            parts = [*before, word, *(after if word == "=" else ())]
        elif word.endswith("=") and word != "=" and after and "=" not in after[0]:
            parts = [word, *after]
        else:
            continue
        raise ConfigError(
            f"{' '.join(parts)} has spaces around =",
            why="an option and its value are one word of the command line",
            fix=f"write {''.join(parts)}",
        )


def _apply(config: Config, word: str) -> None:
    info, text = split_word(word)
    setattr(getattr(config, info.namespace), info.name, parse_value(info, text))


def split_word(word: str) -> tuple[OptionInfo, str]:
    """Return the option that `word` names, and the characters after its first `=`.

    Raises:
        UnknownNameError: no such namespace or option.
        ConfigError: no `=`, or a leading `-`, `+` or `~`.
    """
    example = "write namespace.option=value, as in optimizer.optimizer_offload_fraction=0.5"
    if word.startswith("-"):
        raise ConfigError(f"Unknown option: {word}", fix=example)
    name, equals, text = word.partition("=")
    if not equals:
        fix = f"write {word}=VALUE" if word in options() else example
        raise ConfigError(f"Expected override in KEY=VALUE form, got {word!r}", fix=fix)
    if name.startswith(("+", "~")):
        raise ConfigError(
            f"{name!r} adds or removes an option",
            why="the set of options is fixed",
            fix=f"write {name.lstrip('+~')}={text}",
        )
    known = options()
    if name not in known:
        raise unknown_option(name)
    return known[name], text


def unknown_option(name: str) -> UnknownNameError:
    """Build the error for an option that does not exist, with the nearest name in any namespace."""
    if name in DROPPED:
        return UnknownNameError(f"hostward has no option {name}", why=DROPPED[name], fix="leave it out")
    namespace, dot, bare = name.partition(".")
    what = f"there is no option {name!r}"
    if not dot:
        what = f"{name!r} names no namespace"
    elif namespace not in NAMESPACES:
        what = f"there is no namespace {namespace!r} (in {name!r})"
    of_deepspeed = deepspeed_name(name)
    if of_deepspeed is not None:
        return UnknownNameError(what, why="the name is DeepSpeed's", fix=of_deepspeed)
    proposal = MOVED.get(name) or nearest_option(namespace, bare if dot else name)
    listing = f"the namespaces are {', '.join(NAMESPACES)}; `hostward options` lists them all"
    return UnknownNameError(what, fix=f"did you mean {proposal}?" if proposal else listing)


def deepspeed_name(name: str) -> str | None:
    """Return what replaces a name of DeepSpeed's; None where it is none."""
    section, _, last = name.rpartition(".")
    here = DEEPSPEED.get(section if last in ("enabled", "device") and name not in DEEPSPEED else name)
    if here is not None:
        return f"here it is {here}"
    while section and section not in DEEPSPEED:
        section = section.rpartition(".")[0]
    return f"leave it out: nothing here is like it; {section} itself is {DEEPSPEED[section]}" if section else None


def unknown_flag(flag: str) -> str | None:
    """Return what replaces a flag that no command has; None where it is not known.

    It may be an option of training as Megatron's scripts spell it, or a word of another trainer.
    """
    name = flag.removeprefix("--").replace("-", "_")
    meant = [info.dotted for info in options().values() if name in (info.name, info.dotted)]
    if meant:
        return f"options of training are written {meant[0]}=VALUE"
    of_deepspeed = deepspeed_name(name)
    return FLAGS.get(name) if of_deepspeed is None else of_deepspeed


def nearest_option(namespace: str, bare: str) -> str | None:
    """Return the nearest dotted name: the same name elsewhere, else a close one here, else a close one elsewhere."""
    known = options().values()
    same = [info.dotted for info in known if info.name == bare]
    if same:
        return same[0]
    here_name = namespace if namespace in NAMESPACES else nearest(namespace, NAMESPACES)
    here = {info.name: info.dotted for info in known if info.namespace == here_name}
    anywhere = {info.name: info.dotted for info in known}
    closest = nearest(bare, here)
    if closest:
        return here[closest]
    elsewhere = alike(bare, anywhere)
    return anywhere[elsewhere] if elsewhere else None


def parse_value(info: OptionInfo, text: str) -> Any:
    """Return the value that `text` means for the option `info`.

    Raises:
        ConfigError: the text does not fit the type; the error names the option, the text and the type.
    """
    if text in NONE_WORDS and text not in info.choices:
        if info.optional:
            return None
        raise bad_value(info, text, "it always has a value")
    if text in info.words:
        return text
    if info.kind is str:
        return info.aliases.get(text, text)
    if info.kind is list:
        return parse_list(info, text)
    if info.kind is bool:
        if text not in BOOLEANS:
            raise bad_value(info, text, "only true and false are booleans")
        return BOOLEANS[text]
    if info.kind is int:
        if not INTEGER.fullmatch(text):
            raise bad_value(info, text, "it must be a whole number in decimal digits")
        if len(text) > 20 or abs(int(text)) >= 2**63:
            raise bad_value(info, text, "it does not fit 64 bits")
        return int(text)
    if not NUMBER.fullmatch(text) or not math.isfinite(float(text)):
        raise bad_value(info, text, "it must be a finite decimal number")
    return float(text)


def parse_list(info: OptionInfo, text: str) -> list[str]:
    """Parse `[a,b]` as ['a', 'b']; spaces around the names do not count; `[]` is empty."""
    if not (text.startswith("[") and text.endswith("]")):
        raise bad_value(info, text, "a list is written [a,b]")
    inner = text[1:-1].strip()
    items = [item.strip() for item in inner.split(",")] if inner else []
    if any(not item or set(item) & set("[]'\"") for item in items):
        raise bad_value(info, text, "the entries of a list are plain names")
    return items


def bad_value(info: OptionInfo, text: str, why: str) -> ConfigError:
    """Build the error for a value that does not fit its option."""
    example = {bool: "true", int: "4", float: "0.5", str: "text", list: "[a,b]"}[info.kind]
    if info.choices:
        example = info.choices[0]
    meant = info.nearest_value(text)
    return ConfigError(
        f"{info.dotted}={text} is not a value of type {info.type_text}",
        why=why,
        fix=f"did you mean {info.dotted}={meant}?" if meant else f"write, for example, {info.dotted}={example}",
    )
