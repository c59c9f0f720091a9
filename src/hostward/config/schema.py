"""Declare every option of hostward: one dataclass per namespace, one default per option, Megatron's names.

A configuration is plain values and nothing else: no derived fields, no validation on assignment (see `rules`), no
environment variables. A recipe returns a whole `Config`; the command line changes single options of it (see
`overrides.py`).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from hostward.errors import ConfigError, UnknownNameError

# How an option is declared: a field of a dataclass with one default and its description.


T = TypeVar("T")


def describe(
    help_text: str,
    *,
    unit: str = "",
    choices: tuple[str, ...] = (),
    aliases: Mapping[str, str] | None = None,
    words: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return the description of an option for documentation and parser.

    Args:
        aliases: other spellings of values.
        words: values besides numbers.
    """
    return {"help": help_text, "unit": unit, "choices": choices, "aliases": dict(aliases or {}), "words": words}


def option(
    default: T,
    help_text: str,
    *,
    unit: str = "",
    choices: tuple[str, ...] = (),
    aliases: Mapping[str, str] | None = None,
    words: tuple[str, ...] = (),
) -> T:
    """Declare a dataclass field with its one default and its description."""
    # A type checker takes the right-hand side of a field for its default, hence the type of `default`.
    metadata = describe(help_text, unit=unit, choices=choices, aliases=aliases, words=words)
    field: Any = dataclasses.field(default=default, metadata=metadata)
    return field  # type: ignore[no-any-return]


def alike(name: str, known: Iterable[str], share: float = 0.6) -> str | None:
    """Return the known name that is most like `name`, or None where none has this share in common with it."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=share)
    return found[0] if found else None


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` was probably meant for, or None.

    It is a name that is much alike, else one that `name` begins with, as `save_dir` begins with `save`, else one that
    is somewhat alike.
    """
    names = list(known)
    begun = [other for other in names if name.startswith(f"{other}_")]
    return alike(name, names, 0.8) or max(begun, key=len, default=None) or alike(name, names)


@functools.cache
def _fields_of(kind: type) -> dict[str, dataclasses.Field[Any]]:
    """Return the options of a namespace by name: every assignment, also those of a copy, asks for them."""
    return {field.name: field for field in dataclasses.fields(kind)}


class Options:
    """Raise `UnknownNameError` with the nearest name on assignment to an unknown one; base of the namespaces."""

    __slots__ = ()

    def __setattr__(self, name: str, value: Any) -> None:
        fields = _fields_of(type(self))  # type: ignore[arg-type]
        if name not in fields:
            closest = nearest(name, fields)
            raise UnknownNameError(
                f"{type(self).__name__} has no option {name!r}",
                fix=f"did you mean {closest}?" if closest else "`hostward options` lists them all",
            )
        if isinstance(value, str):
            value = fields[name].metadata.get("aliases", {}).get(value, value)
        object.__setattr__(self, name, value)


DTYPE_ALIASES = {
    prefix + word: short
    for word, short in {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.items()
    for prefix in ("", "torch.")
}

SYNONYMS = {"gpu": "cuda"}
"""Words that mean a value and look like another one. They raise an error with the value that they mean."""


@dataclass(slots=True)
class ModelConfig(Options):
    """The transformer, how it is split over devices, and what of it is offloaded."""

    architecture: str = option(
        "qwen3_moe", "Model class of transformers that is built.", choices=("qwen3_moe", "qwen3", "llama")
    )
    hf_model_path: str | None = option(
        None, "Local pretrained folder. The sizes then come from the folder and may not be set here."
    )
    num_layers: int = option(0, "Transformer layers. 0: not set.")
    hidden_size: int = option(0, "Width of the residual stream. 0: not set.")
    ffn_hidden_size: int | None = option(
        None, "Inner width of the dense MLP. A model whose layers are all experts keeps it in its configuration only."
    )
    num_moe_experts: int | None = option(None, "Experts per layer. None: a dense model.")
    moe_ffn_hidden_size: int | None = option(None, "Inner width of one expert.")
    moe_router_topk: int = option(2, "Experts that each token is sent to.")
    moe_aux_loss_coeff: float = option(0.0, "Weight of the load-balancing loss. 0: off.")
    num_attention_heads: int = option(0, "Query heads. 0: not set.")
    num_query_groups: int | None = option(None, "Key and value heads. None: as many as query heads.")
    kv_channels: int | None = option(None, "Width of one head. None: hidden_size / num_attention_heads.")
    seq_length: int = option(1024, "Length of a training sequence.", unit="tokens")
    vocab_size: int | None = option(None, "Rows of the embedding. None: the vocabulary of the tokenizer.")
    rotary_base: float = option(10000.0, "Base of the rotary position embedding.")
    rope_scaling: bool = option(False, "Llama 3 frequency scaling of the rotary embedding (llama only).")
    rope_scaling_factor: float = option(8.0, "Factor of rope_scaling.")
    layernorm_epsilon: float = option(1e-5, "Epsilon of the RMS norms.")
    share_embeddings_and_output_weights: bool = option(False, "One weight for the input and the output embedding.")
    init_method_std: float = option(0.02, "Standard deviation of the initial weights.")
    params_dtype: str = option(
        "fp32", "Dtype of weights and activations.", choices=("fp32", "bf16", "fp16"), aliases=DTYPE_ALIASES
    )
    attn_implementation: str = option("sdpa", "Attention of transformers.", choices=("sdpa", "eager"))
    experts_implementation: str = option(
        "grouped_mm",
        "Expert computation of transformers. batched_mm copies the experts of each token and is slow on a CPU.",
        choices=("eager", "grouped_mm", "batched_mm"),
    )
    deterministic_mode: bool = option(False, "Use deterministic algorithms only, where torch has them.")

    tensor_model_parallel_size: int = option(1, "Processes that share each weight matrix.")
    pipeline_model_parallel_size: int = option(1, "Pipeline stages.")
    virtual_pipeline_model_parallel_size: int | None = option(None, "Interleaved stages per pipeline rank.")
    context_parallel_size: int = option(1, "Processes that share each sequence.")
    expert_model_parallel_size: int = option(1, "Processes that share the experts of a layer.")
    expert_tensor_parallel_size: int = option(1, "Processes that share the matrices of an expert.")
    sequence_parallel: bool = option(False, "Split the activations outside the tensor-parallel regions too.")

    cpu_offloading: bool = option(False, "Offload activations, weights or both of the first layers.")
    cpu_offloading_num_layers: int = option(0, "Layers that are offloaded, counted from the first.")
    cpu_offloading_activations: bool = option(True, "Offload the activations of those layers.")
    cpu_offloading_weights: bool = option(False, "Offload the weights of those layers while they are not in use.")
    cpu_offloading_double_buffering: bool = option(False, "Two sets of device buffers for the reload.")
    cpu_offloading_retain_pinned_cpu_buffers: bool = option(False, "Keep the host buffers between iterations.")
    fine_grained_activation_offloading: bool = option(False, "Offload what the named modules save for backward.")
    offload_modules: list[str] = dataclasses.field(
        default_factory=list, metadata=describe("Modules of fine_grained_activation_offloading.")
    )
    min_offloaded_tensor_size: int = option(1048576, "Smaller tensors stay on the device.", unit="elements")
    activation_offload_fraction: float = option(1.0, "Share of these modules that is offloaded; the first stay.")
    fine_grained_offloading_max_inflight_offloads: int | None = option(
        None, "Most copies to the host whose device memory is still held. 0: each layer waits. None: no limit."
    )

    recompute_granularity: str | None = option(None, "Recompute in backward. None: off.", choices=("full", "selective"))
    recompute_method: str | None = option(None, "How full recomputation chooses layers.", choices=("uniform", "block"))
    recompute_num_layers: int | None = option(
        None, "Layers per recomputed block: 1 with uniform, the first so many with block."
    )
    recompute_modules: list[str] = dataclasses.field(
        default_factory=list, metadata=describe("Modules of selective recomputation.")
    )
    cuda_graph_impl: str = option(
        "none", "CUDA graphs: full_iteration only.", choices=("none", "local", "transformer_engine", "full_iteration")
    )


@dataclass(slots=True)
class OptimizerConfig(Options):
    """AdamW and where its state is stored."""

    optimizer: str = option("adam", "Update rule; adam means AdamW.", choices=("adam", "sgd"))
    lr: float = option(3e-4, "Highest learning rate.")
    min_lr: float = option(0.0, "Lowest learning rate of the schedule.")
    weight_decay: float = option(0.01, "Decoupled weight decay.")
    adam_beta1: float = option(0.9, "Decay of the first moment, in [0, 1).")
    adam_beta2: float = option(0.999, "Decay of the second moment, in [0, 1).")
    adam_eps: float = option(1e-8, "Term that keeps the update finite.")
    clip_grad: float = option(1.0, "Largest global L2 norm of the gradient. 0: no clipping.")
    exp_avg_dtype: str = option(
        "fp32",
        "Dtype in which the first moment is stored. fp8: of matrices; of vectors bf16.",
        choices=("fp32", "bf16", "fp8"),
        aliases=DTYPE_ALIASES,
    )
    exp_avg_sq_dtype: str = option(
        "fp32",
        "Dtype in which the second moment is stored. fp8: of matrices; of vectors bf16.",
        choices=("fp32", "bf16", "fp8"),
        aliases=DTYPE_ALIASES,
    )
    main_params_dtype: str = option(
        "fp32",
        "Dtype of the main weights of bf16 weights. bf16: the weight itself, rounded at random.",
        choices=("fp32", "bf16"),
        aliases=DTYPE_ALIASES,
    )
    decoupled_weight_decay: bool = option(True, "AdamW; False would be Adam with L2 regularisation.")

    optimizer_cpu_offload: bool = option(False, "Keep and step a share of the optimizer state on the host.")
    optimizer_offload_fraction: float = option(0.0, "That share of the state bytes, in [0, 1].")
    overlap_cpu_optimizer_d2h_h2d: bool = option(
        True,
        "Overlap the step: gradients are offloaded during backward, weights reloaded during the next forward. false: "
        "everything runs between the two, for comparison. Megatron's default is false.",
    )
    use_torch_optimizer_for_cpu_offload: bool = option(
        False, "Step the host share with torch.optim.AdamW, always between backward and forward."
    )
    gradients: str | None = option(
        None,
        "Where gradients of the host share are accumulated. None: device, or as planned.",
        choices=("device", "host"),
    )
    pin_cpu_grads: bool = option(True, "Pinned host memory for gradients of the host share.")
    pin_cpu_params: bool = option(True, "Pinned host memory for weights of the host share, which are copied back.")
    offload_mix: float | str | None = option(
        None,
        "Share of the offloaded state that is streamed, in [0, 1]; auto: by measured rates. None: the CPU steps all.",
        words=("auto",),
    )
    step_early: float = option(
        0.0,
        "Share of the host share that is stepped during backward, into a second set of its state on the host, in "
        "[0, 1].",
    )
    offload_optimizer_states: bool = option(
        False,
        "Offload state and step it on the GPU (streamed). With optimizer_cpu_offload: a share of the remaining state.",
    )
    optimizer_state_offload_fraction: float = option(1.0, "Share of offload_optimizer_states, in [0, 1].")
    optimizer_state_offload_chunk_size_mb: int = option(
        0, "Most device memory of streamed state, at least a bucket. 0: what backward frees and two.", unit="MiB"
    )
    host_threads: int | None = option(
        None, "Threads of the CPU optimizer step. None: the CPUs of this process over the local ranks, less two."
    )


@dataclass(slots=True)
class SchedulerConfig(Options):
    """Learning rate over the iterations."""

    lr_decay_style: str = option("constant", "Shape after the warm-up.", choices=("cosine", "linear", "constant"))
    lr_decay_iters: int | None = option(
        None, "Iteration that reaches min_lr. Needed by cosine and linear; never derived from train_iters."
    )
    lr_warmup_iters: int = option(0, "Iterations of linear warm-up.")
    lr_warmup_init: float = option(0.0, "Learning rate of the first warm-up iteration.")


@dataclass(slots=True)
class TrainConfig(Options):
    """Run length, batch and device."""

    train_iters: int = option(100, "Optimizer steps in all, those of a loaded checkpoint included.")
    global_batch_size: int = option(1, "Sequences per optimizer step, over all processes.")
    micro_batch_size: int = option(1, "Sequences per forward and backward in one process.")
    device: str = option("auto", "auto: cuda where there is one, else cpu.", choices=("auto", "cuda", "cpu"))
    num_threads: int | None = option(None, "Threads of torch on the CPU. None: torch's own default.")
    manual_gc: bool = option(False, "Python's garbage collector runs every manual_gc_interval iterations alone.")
    manual_gc_interval: int = option(100, "Iterations from one collection to the next. 0: none while training.")
    exit_signal_handler: bool = option(False, "On SIGTERM finish the iteration, save, and end with exit code 143.")


@dataclass(slots=True)
class DistributedDataParallelConfig(Options):
    """Data parallelism."""

    use_distributed_optimizer: bool = option(
        False, "Shard the optimizer state over the data-parallel processes. One process holds the only shard."
    )
    grad_reduce_in_fp32: bool = option(
        False, "Reduce gradients between processes in fp32, and keep them so until the step."
    )
    data_parallel_sharding_strategy: str = option(
        "optim_grads",
        "optim_grads: a sharded layer's weights stay unsharded from forward to backward; optim_grads_params: they are "
        "unsharded only while the layer runs.",
        choices=("optim_grads", "optim_grads_params"),
    )
    overlap_grad_reduce: bool = option(True, "Reduce gradients between processes while backward runs.")
    overlap_param_gather: bool = option(True, "Gather weights from processes while forward runs.")


@dataclass(slots=True)
class DistributedInitConfig(Options):
    """Process groups: how the processes of a run meet."""

    distributed_timeout_minutes: float = option(
        10.0,
        "A process that waits so long for the others ends with an error: one of them hangs.",
        unit="minutes",
    )


@dataclass(slots=True)
class DatasetConfig(Options):
    """Training text."""

    path: str | None = option(None, "File, folder or indexed prefix. None: the sources of Python's standard library.")
    format: str = option(
        "auto",
        "How the path is read. auto: by suffix.",
        choices=("auto", "text", "jsonl", "parquet", "indexed", "stdlib", "mock"),
    )
    text_key: str = option("text", "Column or key that holds the text, for jsonl and parquet.")
    random_seed: int | None = option(None, "Seed of the sample order. None: rng.seed.")


@dataclass(slots=True)
class TokenizerConfig(Options):
    """Text to token ids."""

    tokenizer_type: str = option(
        "byte", "null: the data holds token ids already.", choices=("byte", "huggingface", "null")
    )
    tokenizer_model: str | None = option(
        None, "Local folder of a huggingface tokenizer. None: the folder of model.hf_model_path."
    )


@dataclass(slots=True)
class RNGConfig(Options):
    """Random numbers."""

    seed: int = option(1234, "Seed of the initial weights and, unless set there, of the sample order.")


@dataclass(slots=True)
class CheckpointConfig(Options):
    """Saving and resuming."""

    save: str | None = option(None, "Folder that checkpoints are written to. None: nothing is saved.")
    load: str | None = option(None, "Folder that the run resumes from. None: a fresh start.")
    save_interval: int | None = option(None, "Iterations between saves. None: only after the last one.")
    most_recent_k: int | None = option(None, "Checkpoints that are kept. None: all.")
    ckpt_format: str = option("torch_dist", "torch.distributed.checkpoint's files.", choices=("torch_dist",))
    async_save: bool = option(False, "Save concurrently with training, as async_save_mode says.")
    async_save_mode: str = option(
        "stream",
        "stream: from where the state is, and the next step waits for the disk. snapshot: from a second host copy.",
        choices=("stream", "snapshot"),
    )
    finetune: bool = option(False, "Load weights only and start at iteration 0.")
    load_optim: bool = option(True, "Load the optimizer state.")
    load_rng: bool = option(True, "Load the state of the random number generators.")


@dataclass(slots=True)
class LoggerConfig(Options):
    """Progress on the terminal, and as scalars."""

    log_interval: int = option(10, "Iterations between progress lines; a line on a terminal is always the newest.")
    tensorboard_dir: str | None = option(None, "Folder that TensorBoard scalars are written to. None: none are.")


@dataclass(slots=True)
class Config(Options):
    """Hold a whole configuration: one attribute per namespace."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    ddp: DistributedDataParallelConfig = dataclasses.field(default_factory=DistributedDataParallelConfig)
    dist: DistributedInitConfig = dataclasses.field(default_factory=DistributedInitConfig)
    dataset: DatasetConfig = dataclasses.field(default_factory=DatasetConfig)
    tokenizer: TokenizerConfig = dataclasses.field(default_factory=TokenizerConfig)
    rng: RNGConfig = dataclasses.field(default_factory=RNGConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    logger: LoggerConfig = dataclasses.field(default_factory=LoggerConfig)


NAMESPACES: Mapping[str, type[Options]] = {
    field.name: typing.cast("type[Options]", field.default_factory) for field in dataclasses.fields(Config)
}


@dataclass(frozen=True, slots=True)
class OptionInfo:
    """Describe one option: its declared type taken apart, its default and its help."""

    namespace: str
    name: str
    kind: type  # bool, int, float, str or list (of str)
    optional: bool  # None is a value
    default: Any
    help: str
    unit: str
    choices: tuple[str, ...]
    aliases: Mapping[str, str]
    words: tuple[str, ...]

    @property
    def dotted(self) -> str:
        """Return `namespace.option`, as on the command line."""
        return f"{self.namespace}.{self.name}"

    @property
    def type_text(self) -> str:
        """Return the type as the documentation and the errors write it."""
        kind = "list of str" if self.kind is list else self.kind.__name__
        return " or ".join((kind, *self.words, *(("None",) if self.optional else ())))

    def nearest_value(self, text: str) -> str | None:
        """Return the value that `text` was probably meant for, as typed; None where there is no word like it."""
        words = [*self.choices, *self.words, *(("true", "false") if self.kind is bool else ())]
        known = {
            **{word: word for word in words},
            **self.aliases,
            **{word: value for word, value in SYNONYMS.items() if value in words},
            # Not for numbers: written out, "one" and "nine" resemble "none" and do not mean it.
            **({"null": "null", "none": "null"} if self.optional and words else {}),
        }
        closest = nearest(text.lower(), known)
        return None if closest is None else known[closest]


@functools.cache
def options() -> Mapping[str, OptionInfo]:
    """Return every option by its dotted name, in the order of declaration."""
    found: dict[str, OptionInfo] = {}
    for namespace, declared in NAMESPACES.items():
        hints = typing.get_type_hints(declared)
        for field in dataclasses.fields(declared):  # type: ignore[arg-type]
            arguments = typing.get_args(hints[field.name])
            optional = type(None) in arguments
            kind = next(a for a in arguments if a is not type(None)) if optional else hints[field.name]
            default = [] if field.default is dataclasses.MISSING else field.default
            kind = typing.get_origin(kind) or kind
            info = OptionInfo(namespace, field.name, kind, optional, default, **field.metadata)
            found[info.dotted] = info
    return found


def get_option(config: Config, dotted: str) -> Any:
    """Return the value of `namespace.option`."""
    namespace, _, name = dotted.partition(".")
    return getattr(getattr(config, namespace), name)


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Convert to plain values, ready for JSON: {namespace: {option: value}}."""
    return dataclasses.asdict(config)


def from_dict(values: Mapping[str, Mapping[str, Any]]) -> Config:
    """Invert `to_dict`; options that are not named keep their default.

    Raises:
        UnknownNameError: a namespace or option does not exist (a newer version wrote it, or it is misspelt).
        ConfigError: a namespace is not a mapping.
    """
    config = Config()
    for namespace, entries in values.items():
        if namespace not in NAMESPACES:
            closest = nearest(namespace, NAMESPACES)
            raise UnknownNameError(
                f"there is no namespace {namespace!r}",
                fix=f"did you mean {closest}?" if closest else f"the namespaces are {', '.join(NAMESPACES)}",
            )
        if not isinstance(entries, Mapping):
            raise ConfigError(
                f"{namespace} must hold options by name, not {type(entries).__name__}",
                fix=f'write {{"{namespace}": {{"option": value}}}}',
            )
        for name, value in entries.items():
            setattr(getattr(config, namespace), name, list(value) if isinstance(value, (list, tuple)) else value)
    return config
