"""Options: names, defaults, assignment, JSON form, overrides."""

from __future__ import annotations

import contextlib
import json
import math
import re
import string
from pathlib import Path

import pytest
from hypothesis import example, given, settings, strategies as st

import hostward
from hostward import recipes
from hostward.config.overrides import DEEPSPEED, DROPPED, FLAGS, MOVED, apply_overrides, parse_value, unknown_flag
from hostward.config.schema import NAMESPACES, Config, OptionInfo, from_dict, get_option, options, to_dict
from hostward.config.validate import check
from hostward.errors import ConfigError, UnknownNameError

# Renaming or dropping an option breaks its users: this list changes only together with the changelog.
OPTION_NAMES = {
    "model": (
        "architecture hf_model_path num_layers hidden_size ffn_hidden_size num_moe_experts moe_ffn_hidden_size "
        "moe_router_topk moe_aux_loss_coeff num_attention_heads num_query_groups kv_channels seq_length vocab_size "
        "rotary_base rope_scaling rope_scaling_factor layernorm_epsilon share_embeddings_and_output_weights "
        "init_method_std params_dtype attn_implementation experts_implementation deterministic_mode "
        "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
        "context_parallel_size expert_model_parallel_size expert_tensor_parallel_size sequence_parallel "
        "cpu_offloading cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights "
        "cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers "
        "fine_grained_activation_offloading offload_modules min_offloaded_tensor_size activation_offload_fraction "
        "fine_grained_offloading_max_inflight_offloads "
        "recompute_granularity recompute_method recompute_num_layers recompute_modules cuda_graph_impl"
    ),
    "optimizer": (
        "optimizer lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps clip_grad "
        "exp_avg_dtype exp_avg_sq_dtype main_params_dtype decoupled_weight_decay "
        "optimizer_cpu_offload optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d "
        "use_torch_optimizer_for_cpu_offload gradients pin_cpu_grads pin_cpu_params offload_mix step_early "
        "offload_optimizer_states "
        "optimizer_state_offload_fraction optimizer_state_offload_chunk_size_mb host_threads"
    ),
    "scheduler": "lr_decay_style lr_decay_iters lr_warmup_iters lr_warmup_init",
    "train": "train_iters global_batch_size micro_batch_size device num_threads manual_gc manual_gc_interval "
    "exit_signal_handler",
    "ddp": "use_distributed_optimizer grad_reduce_in_fp32 data_parallel_sharding_strategy overlap_grad_reduce "
    "overlap_param_gather",
    "dist": "distributed_timeout_minutes",
    "dataset": "path format text_key random_seed",
    "tokenizer": "tokenizer_type tokenizer_model",
    "rng": "seed",
    "checkpoint": "save load save_interval most_recent_k ckpt_format async_save async_save_mode finetune load_optim "
    "load_rng",
    "logger": "log_interval tensorboard_dir",
}


def test_option_names_are_frozen() -> None:
    found = {name: [info.name for info in options().values() if info.namespace == name] for name in NAMESPACES}
    assert found == {name: listing.split() for name, listing in OPTION_NAMES.items()}


def test_no_option_is_accepted_and_ignored() -> None:
    """Each is read in the code or refused by a rule, unless it has one choice; listing it does not count."""
    root = Path(hostward.__file__).parent
    files = [f for f in root.rglob("*.py") if "recipes" not in f.parts and f.name not in ("schema.py", "reference.py")]
    words = {word for f in files for word in re.findall(r"[.\"'](\w+)", f.read_text())}
    assert [n for n, o in options().items() if o.name not in words and len(o.choices) != 1] == []


def test_megatron_defaults_of_the_offloading_options() -> None:
    config = Config()
    assert config.optimizer.optimizer_cpu_offload is False
    assert config.optimizer.optimizer_offload_fraction == 0.0
    assert config.optimizer.pin_cpu_grads is True
    assert config.optimizer.pin_cpu_params is True
    assert config.optimizer.optimizer_state_offload_fraction == 1.0
    assert config.optimizer.optimizer_state_offload_chunk_size_mb == 0
    assert config.model.cpu_offloading_activations is True
    assert config.model.cpu_offloading_weights is False
    assert config.model.min_offloaded_tensor_size == 1048576
    assert config.optimizer.clip_grad == 1.0


def test_defaults_that_differ_from_megatron_on_purpose() -> None:
    assert Config().optimizer.overlap_cpu_optimizer_d2h_h2d is True
    assert Config().optimizer.offload_mix is None


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("0.25", 0.25), ("1", 1.0), ("null", None)])
def test_a_number_that_may_be_a_word(text: str, value: object) -> None:
    found = apply_overrides(Config(), [f"optimizer.offload_mix={text}"]).optimizer.offload_mix
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("text", ["Auto", "half", "'auto'", "nan", ""])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.offload_mix=.* is not a value of type float or auto or None"):
        apply_overrides(Config(), [f"optimizer.offload_mix={text}"])


def test_every_option_has_a_help_text_and_a_default_of_its_type() -> None:
    for info in options().values():
        assert info.help.endswith((".", ")")), info.dotted
        assert info.kind in (bool, int, float, str, list), info.dotted
        assert (info.default is None and info.optional) or type(info.default) is info.kind, info.dotted
        assert not info.choices or info.default is None or info.default in info.choices, info.dotted


def test_lists_are_not_shared_between_configurations() -> None:
    first, second = Config(), Config()
    first.model.offload_modules.append("core_attn")
    assert second.model.offload_modules == []


def test_t17_misspelt_attribute_names_the_right_one() -> None:
    config = Config()
    with pytest.raises(UnknownNameError) as caught:
        config.optimizer.optimizer_offload_fractoin = 0.5  # type: ignore[attr-defined]
    assert str(caught.value) == (
        "OptimizerConfig has no option 'optimizer_offload_fractoin'\n  fix: did you mean optimizer_offload_fraction?"
    )
    with pytest.raises(UnknownNameError, match="did you mean optimizer"):
        config.optimiser = None  # type: ignore[attr-defined]


def test_dtype_spellings_mean_one_value() -> None:
    config = Config()
    for spelling in ("bf16", "bfloat16", "torch.bfloat16"):
        config.model.params_dtype = spelling
        assert config.model.params_dtype == "bf16"
        assert apply_overrides(Config(), [f"model.params_dtype={spelling}"]).model.params_dtype == "bf16"


def test_json_round_trip_of_every_recipe() -> None:
    for name in recipes.names():
        config = recipes.load(name)
        assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_from_dict_refuses_unknown_names() -> None:
    with pytest.raises(UnknownNameError, match="there is no namespace 'optimiser'\n  fix: did you mean optimizer"):
        from_dict({"optimiser": {}})
    with pytest.raises(UnknownNameError, match="did you mean lr"):
        from_dict({"optimizer": {"lrr": 1.0}})
    with pytest.raises(ConfigError, match="optimizer must hold options by name, not int"):
        from_dict({"optimizer": 3})  # type: ignore[dict-item]


def test_overrides_leave_the_given_configuration_alone() -> None:
    config = Config()
    changed = apply_overrides(config, ["train.train_iters=7", "model.offload_modules=[core_attn]"])
    assert (config.train.train_iters, config.model.offload_modules) == (100, [])
    assert (changed.train.train_iters, changed.model.offload_modules) == (7, ["core_attn"])


def test_later_overrides_win() -> None:
    assert apply_overrides(Config(), ["rng.seed=1", "rng.seed=2"]).rng.seed == 2


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("optimizer.optimizer_cpu_offload=True", True),
        ("optimizer.optimizer_cpu_offload=true", True),
        ("model.cpu_offloading_activations=False", False),
        ("optimizer.optimizer_offload_fraction=.5", 0.5),
        ("optimizer.lr=5e-1", 0.5),
        ("optimizer.lr=3", 3.0),
        ("train.train_iters=20", 20),
        ("train.num_threads=null", None),
        ("train.num_threads=None", None),
        ("model.recompute_granularity=None", None),
        ("model.offload_modules=[]", []),
        ("model.offload_modules=[core_attn, moe_act]", ["core_attn", "moe_act"]),
        ("dataset.path=/a b/${HOME}=~#'x'", "/a b/${HOME}=~#'x'"),
        ("dataset.path=007", "007"),
        ("dataset.path=???", "???"),
        ("dataset.path=1e3", "1e3"),
        ("dataset.text_key=true", "true"),
        ("checkpoint.save=", ""),
    ],
)
def test_override_values(word: str, value: object) -> None:
    found = get_option(apply_overrides(Config(), [word]), word.partition("=")[0])
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("train.train_iters=1.5", "train.train_iters=1.5 is not a value of type int"),
        ("train.train_iters=1_000", "train.train_iters=1_000 is not a value of type int"),
        ("train.train_iters=true", "train.train_iters=true is not a value of type int"),
        ("train.train_iters=", "train.train_iters= is not a value of type int"),
        ("rng.seed=9223372036854775808", "rng.seed=9223372036854775808 is not a value of type int"),
        ("optimizer.lr=nan", "optimizer.lr=nan is not a value of type float"),
        ("optimizer.lr=inf", "optimizer.lr=inf is not a value of type float"),
        ("optimizer.lr=1e999", "optimizer.lr=1e999 is not a value of type float"),
        ("optimizer.lr=True", "optimizer.lr=True is not a value of type float"),
        ("optimizer.optimizer_offload_fraction=50%", "=50% is not a value of type float"),
        ("optimizer.lr=${optimizer.min_lr}", "is not a value of type float"),
        ("model.cpu_offloading=2", "model.cpu_offloading=2 is not a value of type bool"),
        ("model.cpu_offloading=yes", "model.cpu_offloading=yes is not a value of type bool"),
        ("rng.seed=null", "rng.seed=null is not a value of type int"),
        ("dataset.text_key=None", "dataset.text_key=None is not a value of type str"),
        ("model.offload_modules=core_attn", "is not a value of type list of str"),
        ("model.offload_modules=[a,,b]", "is not a value of type list of str"),
        ("model.offload_modules=['a']", "is not a value of type list of str"),
    ],
)
def test_t15_values_that_do_not_fit_are_errors(word: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_overrides(Config(), [word])
    assert text in caught.value.what
    assert caught.value.why
    assert caught.value.fix.startswith("write, for example, ")


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        (
            "ddp.data_parallel_sharding_strategy=optim_grad_params",
            "ddp.data_parallel_sharding_strategy=optim_grads_params",
        ),
        ("model.recompute_granularity=ful", "model.recompute_granularity=full"),
        ("model.recompute_granularity=Selectiv", "model.recompute_granularity=selective"),
        ("model.recompute_granularity=nul", "model.recompute_granularity=null"),
        ("model.params_dtype=bf61", "model.params_dtype=bf16"),
        ("model.params_dtype=BF16", "model.params_dtype=bf16"),
        ("model.params_dtype=bfloat61", "model.params_dtype=bf16"),
        ("train.device=CUDA", "train.device=cuda"),
        ("train.device=gpu", "train.device=cuda"),
        ("train.device=GPUs", "train.device=cuda"),
        ("train.device=cup", "train.device=cpu"),
        ("model.cpu_offloading=ture", "model.cpu_offloading=true"),
        ("model.cpu_offloading=TRUE", "model.cpu_offloading=true"),
        ("optimizer.offload_mix=atuo", "optimizer.offload_mix=auto"),
    ],
)
def test_t17_misspelt_values_propose_the_nearest(word: str, fix: str) -> None:
    """Seen red: the first of the values, whatever was written."""
    with pytest.raises(ConfigError) as caught:
        check(apply_overrides(Config(), [word]), world_size=1)
    assert f"fix: did you mean {fix}?" in str(caught.value)


def test_t17_misspelt_modules_propose_the_nearest() -> None:
    for name, wrong, right in (("recompute", "layernrm", "layernorm"), ("offload", "core_atn", "core_attn")):
        with pytest.raises(ConfigError, match=f"fix: did you mean {right} instead of {wrong}\\?"):
            check(apply_overrides(Config(), [f"model.{name}_modules=[{wrong}]"]), world_size=1)
        with pytest.raises(ConfigError, match="fix: choose from the allowed modules"):
            check(apply_overrides(Config(), [f"model.{name}_modules=[zzz]"]), world_size=1)


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("optimizer.optimizer_offload_fracton=1", "did you mean optimizer.optimizer_offload_fraction?"),
        ("checkpoint.save_dir=run", "did you mean checkpoint.save?"),  # seen red: checkpoint.save_interval
        ("checkpoint.load_path=run", "did you mean checkpoint.load?"),
        ("checkpoint.load_optimizer=true", "did you mean checkpoint.load_optim?"),
        ("checkpoint.save_interval_steps=2", "did you mean checkpoint.save_interval?"),
        ("model.path_of_the_weights=x", "the namespaces are"),  # path is an option of another namespace
        ("optimizer.cpu_offloading=True", "did you mean model.cpu_offloading?"),
        ("optimizer.use_distributed_optimizer=True", "did you mean ddp.use_distributed_optimizer?"),
        ("optimiser.lr=1", "did you mean optimizer.lr?"),
        ("train_iters=1", "did you mean train.train_iters?"),
        ("train.seed=1", "did you mean rng.seed?"),
        ("model.bf16=True", "did you mean model.params_dtype=bf16?"),
        ("zzz.qqq=1", "the namespaces are model, optimizer, scheduler"),
    ],
)
def test_t17_unknown_options_propose_the_nearest(word: str, fix: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        apply_overrides(Config(), [word])
    assert caught.value.fix.startswith(fix)
    assert word.partition("=")[0] in caught.value.what


def test_words_without_a_value_get_megatrons_texts() -> None:
    with pytest.raises(ConfigError, match=r"^Unknown option: --lr=3\n"):
        apply_overrides(Config(), ["--lr=3"])
    with pytest.raises(ConfigError, match=r"^Expected override in KEY=VALUE form, got 'optimizer.lr'\n"):
        apply_overrides(Config(), ["optimizer.lr"])
    for word in ("+model.num_layers=3", "++model.num_layers=3", "~model.num_layers=3"):
        with pytest.raises(ConfigError, match=r"write model\.num_layers=3"):
            apply_overrides(Config(), [word])


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["optimizer.lr", "3"], "optimizer.lr=3"),
        (["optimizer.lr", "=", "3"], "optimizer.lr=3"),
        (["optimizer.lr", "=3"], "optimizer.lr=3"),
        (["model.num_layers=2", "optimizer.lr=", "3"], "optimizer.lr=3"),
        (["optimizer.lr", "="], "optimizer.lr="),
    ],
)
def test_spaces_around_the_sign_are_one_error(typed: list[str], meant: str) -> None:
    """Seen red: three, one of them that '' names no namespace."""
    with pytest.raises(ConfigError) as caught:
        apply_overrides(Config(), typed)
    assert re.search(" has (spaces around =|a space between option and value)$", caught.value.what)
    assert caught.value.fix == f"write {meant}"


def test_words_that_end_with_the_sign_are_empty_values() -> None:
    found = apply_overrides(Config(), ["dataset.text_key=", "model.num_layers=2"])
    assert (found.dataset.text_key, found.model.num_layers) == ("", 2)


def test_dropped_options_say_why_there_is_none() -> None:
    for name, reason in DROPPED.items():
        assert name not in options()
        with pytest.raises(UnknownNameError) as caught:
            apply_overrides(Config(), [f"{name}=1"])
        assert caught.value.what == f"hostward has no option {name}"
        assert caught.value.why == reason


def test_moved_options_point_at_existing_ones() -> None:
    assert not set(MOVED) & set(options())
    assert {target.partition("=")[0] for target in MOVED.values()} <= set(options())


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("zero_optimization.stage=3", "ddp.data_parallel_sharding_strategy=optim_grads_params"),
        ("zero_optimization.offload_optimizer.device=cpu", "optimizer.optimizer_cpu_offload=true "),
        ("zero_optimization.cpu_offload=true", "optimizer.optimizer_cpu_offload=true "),
        ("zero_optimization.offload_optimizer.ratio=0.3", "optimizer.optimizer_offload_fraction"),
        ("train_micro_batch_size_per_gpu=1", "train.micro_batch_size"),
        ("bf16.enabled=true", "model.params_dtype=bf16"),
    ],
)
def test_names_of_deepspeed_are_answered_with_ours(word: str, fix: str) -> None:
    """Seen red: "did you mean checkpoint.save?" for `stage`."""
    with pytest.raises(UnknownNameError) as caught:
        apply_overrides(Config(), [word])
    assert word.partition("=")[0] in caught.value.what
    assert caught.value.why == "the name is DeepSpeed's"
    assert caught.value.fix.startswith("here it is ")
    assert fix in caught.value.fix


@pytest.mark.parametrize("name", ["zero_optimization.reduce_bucket_size", "zero_optimization.a.b", "fp16.loss_scale"])
def test_a_name_of_deepspeed_is_not_answered_with_that_of_its_section(name: str) -> None:
    """Seen red: a bucket's size was said to be ddp.use_distributed_optimizer here."""
    with pytest.raises(UnknownNameError) as caught:
        apply_overrides(Config(), [f"{name}=1"])
    assert caught.value.fix.startswith("leave it out: nothing here is like it; ")


def test_what_is_written_for_deepspeeds_names_can_be_written() -> None:
    for text in DEEPSPEED.values():
        found = re.findall(r"([a-z]+\.\w+)(?:=(\S*[^\s,]))?", text)
        assert found
        for name, value in found:
            assert name in options()
            if value not in ("", "COUNT"):
                parse_value(options()[name], value)


@pytest.mark.parametrize("flag", ["--deepspeed", "--deepspeed_config", "--dry-run", "--local_rank", "--bf16"])
def test_flags_of_other_trainers_have_a_fix(flag: str) -> None:
    assert unknown_flag(flag)


def test_other_flags_have_none() -> None:
    assert not set(FLAGS) & {info.name for info in options().values()}
    assert unknown_flag("--recipy") is None
    assert unknown_flag("") is None


TEXT_OPTIONS = [info for info in options().values() if info.kind is str and not info.choices]
NUMBER_OPTIONS = [info for info in options().values() if info.kind in (int, float)]


@given(st.text(alphabet=st.characters(exclude_characters="\0"), max_size=40), st.sampled_from(TEXT_OPTIONS))
@example("a=b=c", options()["dataset.path"])
@example("[1,2]", options()["dataset.path"])
@example("{a: b}", options()["checkpoint.save"])
def test_text_is_kept_as_typed(text: str, info: OptionInfo) -> None:
    name = info.dotted
    if text in ("null", "None"):
        return
    assert get_option(apply_overrides(Config(), [f"{name}={text}"]), name) == text


@given(st.integers(min_value=-(2**63) + 1, max_value=2**63 - 1))
def test_every_integer_round_trips(value: int) -> None:
    assert apply_overrides(Config(), [f"rng.seed={value}"]).rng.seed == value


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_finite_float_round_trips(value: float) -> None:
    found = apply_overrides(Config(), [f"optimizer.lr={value!r}"]).optimizer.lr
    assert found == value
    assert math.copysign(1, found) == math.copysign(1, value)


@given(st.text(alphabet=string.printable, max_size=12), st.sampled_from(NUMBER_OPTIONS))
def test_any_text_is_a_finite_number_or_a_typed_error(text: str, info: OptionInfo) -> None:
    try:
        value = parse_value(info, text)
    except ConfigError:
        return
    assert value is None or (type(value) is info.kind and math.isfinite(value))


@given(st.text(max_size=30))
def test_no_word_raises_anything_but_a_typed_error(word: str) -> None:
    with contextlib.suppress(ConfigError):
        apply_overrides(Config(), [word])


@given(st.lists(st.from_regex(r"[a-z_0-9]{1,8}", fullmatch=True), max_size=5))
def test_lists_round_trip(items: list[str]) -> None:
    found = apply_overrides(Config(), [f"model.offload_modules=[{','.join(items)}]"])
    assert found.model.offload_modules == items


@settings(deadline=None)  # parsing is slow where others have the cores, and time is not what is tested
@given(st.dictionaries(st.sampled_from(list(options())), st.integers(min_value=0, max_value=9), max_size=6))
def test_order_of_different_options_does_not_matter(values: dict[str, int]) -> None:
    numbers = {name: value for name, value in values.items() if options()[name].kind in (int, float)}
    words = [f"{name}={value}" for name, value in numbers.items()]
    assert apply_overrides(Config(), words) == apply_overrides(Config(), words[::-1])
