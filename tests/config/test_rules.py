"""Every rule: its exact text, and a neighbour that passes."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, strategies as st
from rule_cases import COMBINATION_CASES, SFT, TINY

from hostward import recipes
from hostward.config.overrides import apply_overrides
from hostward.config.rules.combinations import COMBINATIONS
from hostward.config.rules.table import (
    DEPENDENT,
    FROM_FOLDER,
    NOT_BUILT,
    NOT_BUILT_FOR_RANKS,
    RANGES,
    SIZES,
    Kind,
    Rule,
)
from hostward.config.schema import NAMESPACES, Config, get_option, options
from hostward.config.validate import check, shown, violations
from hostward.errors import ConfigError, NotBuiltError


def tiny(words: str = "") -> Config:
    return apply_overrides(recipes.load(TINY), words.split())


def found(config: Config, world_size: int = 1) -> dict[str, str]:
    return {violation.rule: violation.message for violation in violations(config, world_size=world_size)}


def test_every_combination_rule_has_a_case() -> None:
    ids = [rule.id for rule in COMBINATIONS]
    assert sorted(ids) == sorted(COMBINATION_CASES)
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("rule", COMBINATION_CASES)
def test_combination_rule_has_its_exact_text(rule: str) -> None:
    recipe, words, world_size, message = COMBINATION_CASES[rule]
    config = apply_overrides(recipes.load(recipe), words.split())
    assert found(config, world_size)[rule] == message
    assert rule not in found(tiny(), 1), "the rule must also be able to hold"


def test_every_fix_is_filled_in() -> None:
    for recipe, words, world_size, _ in COMBINATION_CASES.values():
        for violation in violations(apply_overrides(recipes.load(recipe), words.split()), world_size=world_size):
            assert violation.fix
            assert "{" not in violation.fix


@pytest.mark.parametrize("name", RANGES)
def test_t15_numbers_outside_their_range(name: str) -> None:
    bounds, info = RANGES[name], options()[name]
    below = bounds.low if bounds.low_excluded else bounds.low - 1
    outside = [below] if bounds.high is None else [below, bounds.high if bounds.high_excluded else bounds.high + 1]
    if info.kind is float:
        outside += [math.nan, math.inf, -math.inf]
    for number in outside:
        config = tiny()
        namespace, _, option = name.partition(".")
        setattr(getattr(config, namespace), option, number)
        expected = bounds.message or f"{name} must be {bounds.text}, not {number}"
        assert found(config)[f"range:{name}"] == expected


def test_range_texts_shared_with_megatron() -> None:
    assert RANGES["model.min_offloaded_tensor_size"].message == "min_offloaded_tensor_size must be non-negative."
    assert RANGES["model.activation_offload_fraction"].message == "activation_offload_fraction must be in range [0, 1]."
    assert (
        RANGES["optimizer.optimizer_state_offload_fraction"].message
        == "optimizer_state_offload_fraction must be in [0.0, 1.0]"
    )
    assert (
        RANGES["optimizer.optimizer_state_offload_chunk_size_mb"].message
        == "optimizer_state_offload_chunk_size_mb must be non-negative"
    )


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf])
def test_t15_fraction_names_its_range(value: float) -> None:
    config = tiny("optimizer.optimizer_cpu_offload=true")
    config.optimizer.optimizer_offload_fraction = value
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert caught.value.what == f"optimizer.optimizer_offload_fraction must be in [0.0, 1.0], not {value}"
    assert caught.value.fix == "set optimizer.optimizer_offload_fraction to a number in [0.0, 1.0]"


@pytest.mark.parametrize("value", [0, 0.0, 0.37, 1, 1.0])
def test_t15_fractions_inside_the_range_pass(value: float) -> None:
    config = tiny("optimizer.optimizer_cpu_offload=true")
    config.optimizer.optimizer_offload_fraction = value
    check(config)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "optimizer.optimizer_offload_fraction",
            "50%",
            "optimizer.optimizer_offload_fraction must be of type float, not '50%' (str)",
        ),
        (
            "optimizer.optimizer_offload_fraction",
            True,
            "optimizer.optimizer_offload_fraction must be of type float, not True (bool)",
        ),
        ("train.train_iters", 2.0, "train.train_iters must be of type int, not 2.0 (float)"),
        ("train.num_threads", "2", "train.num_threads must be of type int or None, not '2' (str)"),
        ("rng.seed", None, "rng.seed must be of type int, not None (NoneType)"),
        ("model.cpu_offloading", 1, "model.cpu_offloading must be of type bool, not 1 (int)"),
        (
            "model.offload_modules",
            "core_attn",
            "model.offload_modules must be of type list of str, not 'core_attn' (str)",
        ),
        ("model.params_dtype", "fp8", "model.params_dtype must be one of fp32, bf16, fp16, not 'fp8'"),
        ("train.device", "tpu", "train.device must be one of auto, cuda, cpu, not 'tpu'"),
    ],
)
def test_values_set_in_python_are_checked(name: str, value: object, message: str) -> None:
    config = tiny()
    namespace, _, option = name.partition(".")
    setattr(getattr(config, namespace), option, value)
    assert message in found(config).values()


@pytest.mark.parametrize("name", NOT_BUILT)
def test_known_options_that_are_not_built_are_refused(name: str) -> None:
    info, (built, why) = options()[name], NOT_BUILT[name]
    other = next(choice for choice in info.choices if choice != built) if info.choices else None
    value = other or {int: 2, float: 0.5}.get(info.kind, not built)
    config = tiny()
    namespace, _, option = name.partition(".")
    setattr(getattr(config, namespace), option, value)
    by_id = {violation.rule: violation for violation in violations(config)}
    violation = by_id[f"not-built:{name}"]
    assert violation.message == f"{name}={shown(value)} is known, but not built yet"
    assert (violation.why, violation.fix) == (why, f"set {name}={shown(built)}")
    assert violation.kind is Kind.UNTIL_BUILT
    assert info.default == built


@pytest.mark.parametrize("name", NOT_BUILT_FOR_RANKS)
def test_what_is_not_built_for_several_processes_is_refused_there_alone(name: str) -> None:
    switches, on = {
        "model.cuda_graph_impl": (
            (
                "model.architecture=qwen3 model.num_moe_experts=null model.moe_ffn_hidden_size=null "
                "model.moe_router_topk=2 model.moe_aux_loss_coeff=0 model.ffn_hidden_size=256"
            ),
            "full_iteration",
        ),
    }[name]
    config = tiny(f"train.micro_batch_size=1 {switches} {name}={on}")
    check(config)
    with pytest.raises(NotBuiltError) as caught:
        check(config, world_size=2)
    value = shown(get_option(config, name))
    assert caught.value.what == f"{name}={value} with 2 processes is known, but not built yet"
    check(tiny("train.micro_batch_size=1"), world_size=2)


@pytest.mark.parametrize(("switch", "name"), [(s, name) for s, names in DEPENDENT.items() for name in names])
def test_an_option_without_its_switch_is_refused(switch: str, name: str) -> None:
    info = options()[name]
    values: dict[type, object] = {bool: not info.default, int: 2, float: 0.5, str: "uniform", list: ["core_attn"]}
    config = tiny("train.manual_gc=false ddp.use_distributed_optimizer=false")
    namespace, _, option = name.partition(".")
    value = next((word for word in info.choices if word != info.default), values[info.kind])
    setattr(getattr(config, namespace), option, value)
    off = shown(get_option(config, switch))
    expected = f"{name}={shown(value)} has no effect while {switch}={off}"
    assert found(config)[f"switch:{name}"] == expected


def test_switch_with_fraction_zero_is_allowed() -> None:
    check(tiny("optimizer.optimizer_cpu_offload=true"))


HOST = "optimizer.optimizer_cpu_offload=true optimizer.optimizer_offload_fraction=0.5 "
STATES = "optimizer.offload_optimizer_states=true "


@pytest.mark.parametrize(
    "words",
    [
        HOST + "optimizer.pin_cpu_grads=false optimizer.pin_cpu_params=false",
        HOST + "optimizer.overlap_cpu_optimizer_d2h_h2d=false",
        HOST + "optimizer.offload_mix=auto",
        HOST + "optimizer.offload_mix=0",
        HOST + STATES + "optimizer.optimizer_state_offload_fraction=0.5",
        STATES + "optimizer.optimizer_state_offload_chunk_size_mb=64 optimizer.overlap_cpu_optimizer_d2h_h2d=false",
        "dataset.path=/data.jsonl dataset.text_key=body",
        "dataset.path=/data dataset.format=parquet dataset.text_key=body",
        "scheduler.lr_decay_style=constant optimizer.min_lr=0 scheduler.lr_decay_iters=null",
        "scheduler.lr_warmup_init=1e-6",
    ],
)
def test_settings_that_mean_something_pass(words: str) -> None:
    """What Megatron refuses as well: host-stepped and streamed state in one run."""
    check(tiny(words))


@pytest.mark.parametrize("value", [-0.1, 1.5, math.nan])
def test_t15_mix_names_its_range(value: float) -> None:
    config = tiny(HOST)
    config.optimizer.offload_mix = value
    assert found(config) == {"range:optimizer.offload_mix": f"optimizer.offload_mix must be in [0.0, 1.0], not {value}"}


def test_the_mix_takes_one_word() -> None:
    config = tiny(HOST)
    config.optimizer.offload_mix = "half"
    assert list(found(config).values()) == [
        "optimizer.offload_mix must be of type float or auto or None, not 'half' (str)"
    ]


def test_all_violations_come_at_once_with_their_fixes() -> None:
    config = tiny(
        "model.num_query_groups=3 train.global_batch_size=3 train.micro_batch_size=2 ddp.overlap_grad_reduce=false"
    )
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert not isinstance(caught.value, NotBuiltError)
    assert str(caught.value) == (
        "3 settings cannot be carried out:\n"
        "  1. model.num_attention_heads (4) is not divisible by model.num_query_groups (3)\n"
        "     fix: choose model.num_query_groups so that it divides the heads\n"
        "  2. global batch size (3) is not divisible by micro batch size (2) times data parallel size (1)\n"
        "     fix: set train.global_batch_size=2 or 4 (any multiple of 2), or train.micro_batch_size=1\n"
        "  3. ddp.overlap_grad_reduce=false is known, but not built yet\n"
        "     why: FSDP2 always overlaps its reductions with backward\n"
        "     fix: set ddp.overlap_grad_reduce=true"
    )


@pytest.mark.parametrize(
    ("batch", "micro_batch", "processes", "fix"),
    [
        (12, 8, 1, "set train.global_batch_size=8 or 16 (any multiple of 8), or train.micro_batch_size=3 or 4 or 6"),
        (1, 4, 1, "set train.global_batch_size=4 (any multiple of 4), or train.micro_batch_size=1"),
        (6, 4, 4, "set train.global_batch_size=16 (any multiple of 16)"),
        (8, 4, 4, "set train.global_batch_size=16 (any multiple of 16), or train.micro_batch_size=1 or 2"),
    ],
)
def test_a_batch_that_does_not_divide_is_told_what_would(
    batch: int, micro_batch: int, processes: int, fix: str
) -> None:
    """Seen red: a multiple below that is 0, microbatches that do not divide a rank's share."""
    words = f"train.global_batch_size={batch} train.micro_batch_size={micro_batch} ddp.use_distributed_optimizer=true"
    (found,) = [v for v in violations(tiny(words), world_size=processes) if v.rule == "batch"]
    assert found.fix == fix
    named = re.findall(r"(train\.\w+)=(\d+(?: or \d+)*)", fix)
    assert named
    for option, values in named:
        for value in values.split(" or "):
            fixed = violations(tiny(f"{words} {option}={value}"), world_size=processes)
            assert "batch" not in [v.rule for v in fixed], (option, value)


def test_only_unbuilt_options_raise_not_built() -> None:
    with pytest.raises(NotBuiltError, match=r"^2 settings cannot be carried out:"):
        check(tiny("ddp.overlap_grad_reduce=false ddp.overlap_param_gather=false"))


def test_nothing_is_edited() -> None:
    config = tiny("model.cpu_offloading=true")
    violations(config, world_size=4)
    assert config == tiny("model.cpu_offloading=true")


def test_recipes_pass() -> None:
    for name in recipes.names():
        words = ["model.hf_model_path=/folder"] if name == SFT else []
        assert violations(apply_overrides(recipes.load(name), words)) == []


def test_the_layout_of_the_published_measurements_is_taken() -> None:
    """Two nodes of eight; seen red while matrices were refused with stages, and with experts."""
    sizes = {"tensor_model": 2, "pipeline_model": 2, "expert_model": 4}
    options = [f"model.{name}_parallel_size={size}" for name, size in sizes.items()]
    options += ["model.sequence_parallel=True"]
    options += ["ddp.overlap_grad_reduce=True", "ddp.overlap_param_gather=True", "ddp.grad_reduce_in_fp32=True"]
    options += ["train.global_batch_size=8", "optimizer.optimizer_cpu_offload=True"]
    config = apply_overrides(recipes.load("qwen3_30b_a3b_pretrain_config"), options)
    assert violations(config, world_size=16) == []


def test_the_sft_recipe_asks_for_its_folder() -> None:
    with pytest.raises(ConfigError, match=r"name a local pretrained folder with model\.hf_model_path=FOLDER"):
        check(recipes.load(SFT))


def test_the_published_command_passes() -> None:
    words = (
        "optimizer.optimizer_cpu_offload=True optimizer.optimizer_offload_fraction=0.5 train.train_iters=20 "
        "train.global_batch_size=8 train.micro_batch_size=1"
    )
    check(apply_overrides(recipes.load("qwen3_30b_a3b_pretrain_config"), words.split()))


class RecordingNamespace:
    """A namespace that notes which of its options are read."""

    def __init__(self, name: str, options_: object, read: set[str]) -> None:
        self._name, self._options, self._read = name, options_, read

    def __getattr__(self, option: str) -> object:
        self._read.add(f"{self._name}.{option}")
        return getattr(self._options, option)


class RecordingConfig:
    """A configuration that notes which options are read."""

    def __init__(self, config: Config) -> None:
        self.read: set[str] = set()
        for namespace in NAMESPACES:
            setattr(self, namespace, RecordingNamespace(namespace, getattr(config, namespace), self.read))


@pytest.mark.parametrize("rule", COMBINATIONS, ids=lambda rule: rule.id)
def test_rules_read_only_the_options_that_they_name(rule: Rule) -> None:
    recipe, words, world_size, _ = COMBINATION_CASES[rule.id]
    recorder = RecordingConfig(apply_overrides(recipes.load(recipe), words.split()))
    assert rule.broken(recorder, world_size)  # type: ignore[arg-type]
    assert recorder.read <= set(rule.reads)
    if not isinstance(rule.message, str):
        rule.message(recorder, world_size)  # type: ignore[arg-type]
    assert recorder.read <= set(rule.reads)


def test_names_in_the_tables_exist() -> None:
    named = {*RANGES, *NOT_BUILT, *DEPENDENT, *SIZES, *FROM_FOLDER}
    named |= {name for names in DEPENDENT.values() for name in names}
    named |= {name for rule in COMBINATIONS for name in rule.reads}
    assert named <= set(options())


ANY_VALUE = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.text(), max_size=2))


@given(st.dictionaries(st.sampled_from(list(options())), ANY_VALUE, max_size=12), st.integers(1, 16))
def test_any_values_give_violations_and_never_another_error(values: dict[str, object], world_size: int) -> None:
    config = tiny()
    for name, value in values.items():
        namespace, _, option = name.partition(".")
        setattr(getattr(config, namespace), option, value)
    for violation in violations(config, world_size=world_size):
        assert violation.message
        assert violation.fix
