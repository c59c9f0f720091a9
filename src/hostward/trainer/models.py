"""Models: transformers' own classes, with random weights or those of a local pretrained folder."""

from __future__ import annotations

import difflib
import inspect
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hostward.config.schema import Config, ModelConfig
from hostward.errors import ConfigError, HostwardError, ModelError, needed_for

if TYPE_CHECKING:
    import torch

# Constants of the Llama 3 frequency scaling; every published Llama 3.1 and 3.2 model has these.
LLAMA3_LOW_FREQ_FACTOR = 1.0
LLAMA3_HIGH_FREQ_FACTOR = 4.0
LLAMA3_ORIGINAL_CONTEXT_TOKENS = 8192
LLAMA3_CONTEXT_TOKENS = 131072
MASKLESS = "hostward_causal"
"""Name in transformers' table of the scaled_dot_product_attention that is causal by its own flag, without a mask."""


def build_model(
    config: Config, *, vocab_size: int | None, device: torch.device | str, dtype: torch.dtype, seed: int
) -> torch.nn.Module:
    """Build the causal language model that `config.model` describes, in training mode, with its cache off.

    Random weights are drawn on `device` at `dtype`, without a copy elsewhere, and depend on `seed`, the device type,
    the dtype and the sizes alone. With `model.hf_model_path` the weights are those of the folder, cast to `dtype`.
    The random number generators of the caller are left as they were. With sdpa and no windows layers attend without a
    mask, whatever forward is given for one: samples are whole sequences.

    Args:
        vocab_size: rows of the embedding where neither `model.vocab_size` nor the folder gives them.
        dtype: float32, bfloat16 or float16.

    Raises:
        ConfigError: no vocabulary size.
        ModelError: the pretrained folder is missing, unreadable or holds another architecture.
    """
    import torch

    device = torch.device(device)
    path = config.model.hf_model_path
    generators = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(generators):
        torch.manual_seed(seed)
        if path is None:
            described = transformers_config(config.model, vocab_size=vocab_size)
            with device:
                model = empty_model(described, dtype)
        else:
            model = load_pretrained(config.model, path, dtype).to(device)
    model.config.use_cache = False
    trained: torch.nn.Module = model.train()
    return trained


def named_shapes(config: Config, vocab_size: int | None) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by name, shared ones once, without allocating any.

    With `model.hf_model_path` the sizes are read from the folder.
    """
    import torch

    built = meta_model(config, vocab_size, torch.float32)
    return {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}


def parameter_count(config: Config, vocab_size: int | None) -> int:
    """Count the parameters of the model, shared ones once, without allocating any."""
    return sum(math.prod(shape) for shape in named_shapes(config, vocab_size).values())


def training_loss(model: torch.nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the next token, plus the load-balancing loss if the model has one.

    Args:
        inputs: int64 [batch, sequence].
        labels: int64 [batch, sequence]; `labels[:, i]` is the token after `inputs[:, i]`; -100 is left out.

    Returns:
        fp32 0-dim tensor.
    """
    # shift_labels says that the labels are aligned already; without it transformers would shift them once more. It
    # flattens them with view(), which a slice of a longer batch does not allow.
    labels = labels.contiguous()
    loss: torch.Tensor = model(input_ids=inputs, labels=labels, shift_labels=labels, use_cache=False).loss
    return loss


def layers_of(model: Any) -> list[tuple[str, torch.nn.Module]]:
    """Return (path, module) of the layers on this process, in order of use; a stage may have only one."""
    if not hasattr(model, "model"):
        from hostward.model.layers import find_layers

        return find_layers(model)
    return [(f"model.layers.{name}", layer) for name, layer in model.model.layers.named_children()]


def place_in_model(name: str) -> float:
    """Return a sort key: the parameter's layer; the embedding comes before the layers, the rest after."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    if found is None:
        return -1 if "embed_tokens" in name else math.inf
    return int(found[1])


def empty_model(described: Any, dtype: torch.dtype) -> Any:
    """Build a transformers model on torch's current default device, with weights drawn from its generator."""
    from transformers import AutoModelForCausalLM

    causal: Any = AutoModelForCausalLM
    return causal.from_config(described, dtype=dtype)


def meta_model(config: Config, vocab_size: int | None, dtype: torch.dtype) -> Any:
    """Build the model of `config.model`, or of `model.hf_model_path`, on torch's meta device, without any bytes.

    Raises:
        ConfigError: no vocabulary size. ModelError: the pretrained folder cannot be read.
    """
    model = config.model
    if model.hf_model_path is None:
        return on_meta(transformers_config(model, vocab_size=vocab_size), dtype)
    described = pretrained_config(model, model.hf_model_path)
    with describing(Path(model.hf_model_path) / "config.json", _CORRECT):
        return on_meta(described, dtype)


def on_meta(described: Any, dtype: torch.dtype) -> Any:
    """Build the model of a transformers configuration on torch's meta device."""
    import torch

    with torch.device("meta"):
        return empty_model(described, dtype)


def transformers_config(model: ModelConfig, *, vocab_size: int | None) -> Any:
    """Return the transformers configuration of a model that is built from sizes.

    Raises:
        ConfigError: neither `model.vocab_size` nor `vocab_size` is given.
    """
    with needed_for("a model", "train"):
        from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

    rows = model.vocab_size if model.vocab_size is not None else vocab_size
    if rows is None:
        raise ConfigError(
            "the vocabulary size is unknown",
            why="model.vocab_size is not set and no tokenizer gave one",
            fix="set model.vocab_size",
        )
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rotary_base}
    if model.rope_scaling:
        rope |= {
            "rope_type": "llama3",
            "factor": model.rope_scaling_factor,
            "low_freq_factor": LLAMA3_LOW_FREQ_FACTOR,
            "high_freq_factor": LLAMA3_HIGH_FREQ_FACTOR,
            "original_max_position_embeddings": LLAMA3_ORIGINAL_CONTEXT_TOKENS,
        }
    common: dict[str, Any] = {
        "vocab_size": rows,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups or model.num_attention_heads,
        "head_dim": model.kv_channels or model.hidden_size // model.num_attention_heads,
        # A statement about the model only: no table of this length is built.
        "max_position_embeddings": max(model.seq_length, LLAMA3_CONTEXT_TOKENS if model.rope_scaling else 0),
        "rope_parameters": rope,
        "rms_norm_eps": model.layernorm_epsilon,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": model.share_embeddings_and_output_weights,
        "attn_implementation": _attention(model, ()),
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    classes: dict[str, Any] = {"qwen3_moe": Qwen3MoeConfig, "qwen3": Qwen3Config, "llama": LlamaConfig}
    described = classes[model.architecture]
    if model.architecture == "qwen3_moe":
        # Every layer is experts, so the dense width is unused; transformers still wants a number.
        return described(
            **common,
            intermediate_size=model.ffn_hidden_size or 3 * model.hidden_size,
            num_experts=model.num_moe_experts,
            num_experts_per_tok=model.moe_router_topk,
            moe_intermediate_size=model.moe_ffn_hidden_size,
            norm_topk_prob=True,
            output_router_logits=model.moe_aux_loss_coeff > 0,
            router_aux_loss_coef=model.moe_aux_loss_coeff,
            experts_implementation=model.experts_implementation,
        )
    return described(**common, intermediate_size=model.ffn_hidden_size)


def _attention(model: ModelConfig, layer_types: Iterable[str]) -> str:
    """Return the name in transformers' table for `model.attn_implementation`.

    transformers asks the device in every forward whether sequences are packed, for which the host waits, and makes a
    mask where it may not ask, as in the capture of a CUDA graph: another kernel, and other bits. Without a mask the
    bits are those of what it finds.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if model.attn_implementation != "sdpa" or set(layer_types) - {"full_attention"}:
        return model.attn_implementation
    # No mask function is registered for this name, so no mask is made.
    AttentionInterface.register(MASKLESS, sdpa_attention_forward)
    return MASKLESS


def load_pretrained(model: ModelConfig, path: str, dtype: torch.dtype) -> Any:
    """Load the model of a local folder, on the CPU, at `dtype`.

    Raises:
        ModelError: the folder or its files cannot be read, or lack a weight that the model needs.
    """
    described = pretrained_config(model, path)
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    causal: Any = AutoModelForCausalLM
    try:
        loaded, info = causal.from_pretrained(
            path, config=described, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise unusable_weights(path, str(error).partition("\n")[0] or type(error).__name__) from error
    # transformers draws random numbers for a weight that it does not find.
    missing = sorted(info["missing_keys"])
    if missing:
        raise unusable_weights(path, f"{len(missing)} weights are missing, {missing[0]} among them")
    return loaded


def unusable_weights(path: str, why: str) -> ModelError:
    """Return the error for a pretrained folder whose weights cannot be used."""
    return ModelError(
        f"the weights in model.hf_model_path={path} cannot be loaded",
        why=why,
        fix="name a folder that save_pretrained wrote, with its config.json and its safetensors files",
    )


def type_of_folder(path: str) -> str | None:
    """Return the model type that the config.json of a pretrained folder names.

    Raises:
        ModelError: no such folder, no readable config.json in it, or sizes in that which no model has.
    """
    file = Path(path) / "config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        found: str | None = content.get("model_type")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        missing = not Path(path).exists()
        raise ModelError(
            f"model.hf_model_path={path} is not a pretrained folder",
            why="there is no such folder here, and nothing is downloaded" if missing else f"{file}: {error}",
            fix="name a local folder that holds config.json and the weights, or fetch the model into one first",
        ) from error
    require_sizes(file, content)
    return found


_CORRECT = "write the folder again with save_pretrained of the model, or name another one"
_SIZES = {
    "num_hidden_layers": (1, 4096),
    "hidden_size": (1, 1 << 20),
    "vocab_size": (1, 1 << 28),
    "num_attention_heads": (1, 1 << 16),
    "num_key_value_heads": (0, 1 << 16),
    "intermediate_size": (0, 1 << 24),
}
"""Sizes that most models have, by their name, and the least and the most that is built."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_SIZES_OF_SOME = {
    "head_dim": (0, 1 << 16),
    **dict.fromkeys((*_EXPERTS, "num_experts_per_tok"), (0, 1 << 16)),
    "moe_intermediate_size": (0, 1 << 24),
}
"""Those that some models have, and others do not."""
_NEAR = 0.85
"""Likeness of names from which on one is taken to be misspelt."""


def require_sizes(file: Path, content: Mapping[str, Any]) -> None:
    """Raise ModelError where a size of a model is none, or a name of one is misspelt: transformers would take both."""
    kind = content.get("model_type")
    for given in (content, content.get("text_config")):
        if isinstance(given, Mapping):
            of = str(given.get("model_type", kind))
            _require_sizes(file, given, of)
            _require_names(file, given, of)


def _require_sizes(file: Path, given: Mapping[str, Any], kind: str) -> None:
    for name, (least, most) in (_SIZES | _SIZES_OF_SOME).items():
        value = given.get(name)
        if isinstance(value, int) and not least <= value <= most:
            shown = value if abs(value) < 10**12 else f"a number of {len(str(abs(value)))} digits"
            raise ModelError(f"{file}: {name} is {shown}", fix=f"a whole number from {least} to {most:,}")
    for name, value in given.items():
        if "drop" in name and isinstance(value, (int, float)) and not 0 <= value <= 1 and _has_name(kind, name):
            raise ModelError(f"{file}: {name} is {value}", why="it is a probability", fix="a number from 0 to 1")
    heads, groups = given.get("num_attention_heads"), given.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(groups, int) and groups and heads % groups:
        raise ModelError(
            f"{file}: num_attention_heads is {heads}, and num_key_value_heads is {groups}",
            why="each key and value head serves as many attention heads as each other one",
            fix="a num_key_value_heads that divides num_attention_heads",
        )
    _require_experts(file, given, kind)


def _require_experts(file: Path, given: Mapping[str, Any], kind: str) -> None:
    # Models of one expert or none have dense layers, whatever else is said of experts.
    name = next((n for n in _EXPERTS if isinstance(given.get(n), int) and given[n] > 1 and _has_name(kind, n)), None)
    widths = ("moe_intermediate_size", "intermediate_size")[0 if name else 1 :]
    width = next((w for w in widths if given.get(w) is not None), None)
    if width is not None and given[width] == 0 and not given.get("shared_intermediate_size"):
        raise ModelError(f"{file}: {width} is 0", why="weights of that size have no elements", fix="a size from 1 on")
    chosen = given.get("num_experts_per_tok")
    if name is not None and isinstance(chosen, int) and not 1 <= chosen <= given[name]:
        raise ModelError(
            f"{file}: num_experts_per_tok is {chosen}, and {name} is {given[name]}",
            why="each token chooses its experts among them",
            fix=f"a num_experts_per_tok from 1 to {given[name]}",
        )


def require_described(file: Path, described: Any) -> None:
    """Raise as `require_sizes` for a transformers configuration, whose file may have sizes by other names."""
    for part in (described, *(getattr(described, name) for name in described.sub_configs)):
        if part is not None:
            given = part.to_dict()
            named = given | {name: given.get(own) for name, own in part.attribute_map.items()}
            _require_sizes(file, named, part.model_type)


def _require_names(file: Path, given: Mapping[str, Any], kind: str) -> None:
    for name in sorted(given.keys() - _SIZES.keys()):
        near = difflib.get_close_matches(name, _SIZES.keys() - given.keys(), n=1, cutoff=_NEAR)
        if near and not _has_name(kind, name):
            raise ModelError(
                f"{file}: a model of type {kind} has no {name}",
                why=f"transformers would ignore it, and take its own {near[0]}",
                fix=f"did you mean {near[0]}?",
            )


def _has_name(kind: str, name: str) -> bool:
    """Return whether models of a type, or their text part, have a size of this name; True for an unknown type."""
    with needed_for("a model", "train"):
        from transformers import CONFIG_MAPPING
    if kind not in CONFIG_MAPPING:
        return True
    made = CONFIG_MAPPING[kind]
    parts = made, made.sub_configs.get("text_config", made)
    return any(name in inspect.signature(part).parameters or name in part.attribute_map for part in parts)


@contextmanager
def describing(file: Path, fix: str) -> Iterator[None]:
    """Turn what transformers and torch raise in the block into a ModelError: the configuration describes no model."""
    with needed_for("a model", "train"):
        from huggingface_hub.errors import StrictDataclassError
    wrong = (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ImportError,
        ArithmeticError,
        RuntimeError,
        AssertionError,
    )
    try:
        yield
    except HostwardError:
        raise
    except (*wrong, StrictDataclassError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split("\nException raised from")[0].split())
        raise ModelError(f"{file} does not describe a model", why=why, fix=fix) from error


def return_loss_alone(described: Any) -> None:
    """Let a transformers model return what training reads, by name, and nothing that it would keep for it."""
    for part in (described, getattr(described, "text_config", described)):
        part.return_dict, part.output_hidden_states, part.output_attentions = True, False, False


def pretrained_config(model: ModelConfig, path: str) -> Any:
    """Return the transformers configuration of a local folder, with the implementations that the options ask for.

    Raises:
        ModelError: no readable config.json, or another architecture than `model.architecture`.
    """
    found = type_of_folder(path)
    with needed_for("a model", "train"):
        from transformers import AutoConfig
    if found != model.architecture:
        raise ModelError(
            f"model.hf_model_path={path} holds a model of type {found!r}, not {model.architecture!r}",
            fix=f"set model.architecture={found}, or name another folder",
        )
    with describing(Path(path) / "config.json", _CORRECT):
        described: Any = AutoConfig.from_pretrained(
            path, local_files_only=True, attn_implementation=model.attn_implementation
        )
    return_loss_alone(described)
    described._attn_implementation = _attention(model, getattr(described, "layer_types", None) or ())
    if model.architecture == "qwen3_moe":
        described._experts_implementation = model.experts_implementation
        described.output_router_logits = model.moe_aux_loss_coeff > 0
        described.router_aux_loss_coef = model.moe_aux_loss_coeff
    return described
