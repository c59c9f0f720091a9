"""Known failures of training with offloading, as data: how a log shows them, why they happen, what mends them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from .finding import Severity


class Breadth(IntEnum):
    """How much a pattern says about the cause."""

    EXACT = 0
    """The text has one cause."""
    CONTEXT = 1
    """The text has many causes, and lines near it tell this one."""
    GENERAL = 2
    """The text has many causes."""
    CONSEQUENCE = 3
    """Something else came first, in this log or in that of another rank."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One known failure. Patterns are regular expressions, in lower case, over single lines in lower case."""

    name: str
    pattern: str
    what: str
    why: str
    fix: str
    source: str
    """Public threads that report it, or the guide that lists it."""
    breadth: Breadth = Breadth.EXACT
    near: str = ""
    """For CONTEXT: matches one of the lines around."""
    severity: Severity = Severity.ERROR


GUIDE = "Megatron Bridge's guide to CPU offloading, table of failures"
_GRAPHS = "model.cuda_graph_impl=none, or offload optimizer state alone, which graphs do not restrict"
_BUILT = "pip install hostward brings its kernels ready built; the instruction set is chosen when it runs"

OPTIONS = (
    Failure(
        "pipeline-activation-offload",
        r"no support for pipeline parallelism with cpu offloading",
        "activation offloading was refused because of pipeline parallelism",
        "layers' activations of several microbatches are in flight at once, which that implementation does not follow",
        "hostward train does both; elsewhere one pipeline stage, or offload optimizer state instead: "
        "model.cpu_offloading=false optimizer.optimizer_cpu_offload=true",
        f"{GUIDE}; NVIDIA/Megatron-LM#1668, NVIDIA-NeMo/Megatron-Bridge#2992",
    ),
    Failure(
        "recompute-activation-offload",
        r"cpu offloading does not work when activation recomputation is enabled",
        "activation offloading was refused because layers are recomputed",
        "in Megatron the two exclude each other; in hostward they do not: what leaves are the inputs of the layers",
        "in Megatron recompute_granularity=null; in hostward keep both (model.recompute_granularity=full "
        "model.cpu_offloading=true)",
        GUIDE,
    ),
    Failure(
        "two-activation-offloads",
        r"fine_grained_activation_offloading cannot be enabled with cpu_offloading",
        "two kinds of activation offloading are on",
        "layers and single modules would both own the same tensors",
        "set model.cpu_offloading or model.fine_grained_activation_offloading to false",
        GUIDE,
    ),
    Failure(
        "graphs-activation-offload",
        r"cuda ?graphs (?:are )?not supported(?: with cpu offloading)?",
        "activation offloading was refused because of CUDA graphs",
        "a captured graph replays fixed addresses, and offloaded activations come back to others",
        _GRAPHS,
        GUIDE,
    ),
    Failure(
        "all-state-on-host",
        r"optimizer[_-]offload[_-]fraction['\"]?[ .:=]{1,80}1(?:\.0+)?(?![\d.])",
        "all optimizer state is on the host",
        "with Megatron's host step a training step then takes about 4 times as long; hostward's runs behind the next "
        "forward, and shows the less, the more tokens a step has",
        "lower optimizer.optimizer_offload_fraction, keep optimizer.overlap_cpu_optimizer_d2h_h2d=true, stream a part "
        "(optimizer.offload_mix=auto), or take more tokens per step",
        f"{GUIDE}; deepspeedai/DeepSpeed#6695, ISEEKYAN/Megatron-LM#188",
        Breadth.GENERAL,
        severity=Severity.NOTE,
    ),
    Failure(
        "client-optimizer",
        r"you are using zero-offload with a client provided optimizer",
        "DeepSpeed refused the optimizer for its host step",
        "its host step knows its own Adam alone",
        "hostward.AdamW, or any torch.optim optimizer with its state streamed: hostward.offload_optimizer_states(...)",
        "deepspeedai/DeepSpeed#7524, deepspeedai/DeepSpeed#1194, hiyouga/LlamaFactory#7479",
    ),
    Failure(
        "fp8-parameters",
        r"one of the params is nonetype",
        "the host optimizer met parameters that are no plain tensors",
        "FP8 weights come as a subclass, or are empty on this rank",
        "train in bf16, or leave FP8 parameters out of the offloaded part",
        "NVIDIA/Megatron-LM#5083, NVIDIA/Megatron-LM#2407, modelscope/ms-swift#9822",
    ),
    Failure(
        "allocator-option",
        r"unrecognized (?:key|cachingallocator option)",
        "torch's allocator options cannot be read",
        "PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF holds a word that this torch does not know",
        "unset PYTORCH_CUDA_ALLOC_CONF, or write it as option:value,option:value",
        "torch's own error text",
    ),
    Failure(
        "expandable-segments",
        r"expandable.?segments? (?:is|are) not (?:supported|compatible)|not (?:supported|compatible) with "
        r"expandable.?segments",
        "an allocator that pauses memory met expandable segments",
        "allocators that give memory away between phases remap blocks themselves",
        "leave expandable_segments out of PYTORCH_ALLOC_CONF in that process",
        "fzyzcjy/torch_memory_saver#24, redai-studio/Relax#66, radixark/miles#2852",
    ),
)

SILENT = (
    Failure(
        "lost-gradients",
        r"grad[_ -]?norm['\"]?\s{0,4}[:=|]\s{0,4}0(?:\.0{1,12})?(?:e[+-]?0+)?(?![\d.e])",
        "the gradient norm is 0",
        "gradients had moved or were cleared before the norm was taken, or were lost under accumulation: clipping is "
        "then off, and nothing else shows it. (A step skipped for overflow, as at the start in fp16, is harmless.)",
        "let the optimizer clip (hostward.AdamW(max_grad_norm=1.0)), and do not call zero_grad between microbatches",
        "deepspeedai/DeepSpeed#7967, pytorch/pytorch#73784, instructlab/training#414",
        Breadth.GENERAL,
        severity=Severity.WARNING,
    ),
    Failure(
        "nan-loss",
        r"found (?:nan|inf) in local|(?:^|[\s{'\"])(?:lm )?loss['\"]?\s{0,4}[:=|]\s{0,4}nan\b|loss is nan",
        "the loss, or a gradient, is not finite",
        "overflow, a bad batch, or a copy that raced: weights or activations were read before they had arrived",
        "run hostward verify on the same options; with other tools compare with offloading off and the same data",
        "meta-pytorch/torchtune#1867, meta-pytorch/torchtune#2683, NVIDIA/Megatron-LM#7398",
    ),
    Failure(
        "loss-device-assert",
        r"assertion .{0,20}t >= 0 && t < n_classes",
        "the loss kernel met labels outside the vocabulary",
        "labels of another tokenizer; or labels that were offloaded and came back before their copy had ended",
        "check max(labels) < vocab_size; if it holds, the copies race: switch that activation offloading off",
        "axolotl-ai-cloud/axolotl#3833, haotian-liu/LLaVA#1231, hiyouga/LlamaFactory#8137",
    ),
    Failure(
        "norm-assertion",
        r"assert\b.{0,40}all_groups_norm",
        "DeepSpeed's clipping found a norm of 0 or below",
        "its bookkeeping for offloaded gradients marks an overflow with -1, and folds it into the norm",
        "update DeepSpeed; hostward keeps the overflow flag apart from the norm",
        "deepspeedai/DeepSpeed#5241, deepspeedai/DeepSpeed#7302",
    ),
)

BUILDS = (
    Failure(
        "cpu-adam-build",
        r"no attribute 'ds_opt_adam'|unable to jit load the \w{1,40} op|cudamismatchexception|curandcreategenerator"
        r"|cpu_adam\.so: cannot open",
        "DeepSpeed's CPU Adam did not build on this machine",
        "it is compiled when first used, and needs a compiler and the CUDA toolkit of torch's own version; the first "
        "error is further up",
        f"ds_report shows what is missing; {_BUILT}",
        "deepspeedai/DeepSpeed#1846, deepspeedai/DeepSpeed#5677, ymcui/Chinese-LLaMA-Alpaca#368",
    ),
    Failure(
        "no-compiler",
        r"(?:c\+\+|g\+\+|gcc|clang|nvcc|ninja): (?:command )?not found"
        r"|no such file or directory: '?[^ ]{0,60}(?:c\+\+|g\+\+|nvcc)'|failed to find c compiler|no c\+\+ compiler"
        r"|ninja is required to load c\+\+ extensions",
        "something is compiled when it is first used, and the compiler is missing",
        "the image or machine has what runs programs, not what builds them",
        f"install g++ and ninja, and for CUDA the toolkit of torch's own version; {_BUILT}",
        "deepspeedai/DeepSpeed#1846",
    ),
    Failure(
        "unknown-instruction-set",
        r"bad value .{1,40} for .{0,3}-m(?:arch|tune)|unrecognized command[- ]line option .{0,3}-m(?:arch|avx|cpu)"
        r"|unknown target cpu|target specific option mismatch|illegal instruction",
        "code was built, or is to be built, for an instruction set that this compiler or this CPU does not have",
        "it was built on another machine, as in an image or a cache that machines share, or the compiler is older than "
        "the CPU",
        f"clear the cache of built extensions (~/.cache/torch_extensions) and build on the machine that runs; {_BUILT}",
        "deepspeedai/DeepSpeed#7556, deepspeedai/DeepSpeed#788",
    ),
    Failure(
        "old-driver",
        r"driver on your system is too old|cuda driver version is insufficient",
        "the NVIDIA driver is older than the CUDA version of torch",
        "torch brings its own CUDA runtime, and that needs a driver of its age",
        "update the driver, or install torch for an older CUDA",
        "the CUDA runtime's own error text (cudaErrorInsufficientDriver)",
    ),
    Failure(
        "no-driver",
        r"libcuda\.so\.1:? (?:cannot|could not)|found no nvidia driver",
        "there is no NVIDIA driver in this process's reach",
        "not installed, or the container was started without GPUs",
        "nvidia-smi must work; docker run --gpus all",
        "pytorch/ao#958",
    ),
    Failure(
        "cpu-build-of-torch",
        r"torch not compiled with cuda enabled",
        "torch is a build without CUDA",
        "pip found the CPU build",
        "install torch for CUDA, as https://pytorch.org/get-started says; hostward doctor shows which is there",
        "torch's own error text",
    ),
    Failure(
        "no-kernel-image",
        r"no kernel image is available",
        "torch or a library has no kernels for this GPU",
        "the GPU is newer or older than what it was built for",
        "install a build for this GPU's compute capability",
        "the CUDA runtime's own error text (cudaErrorNoKernelImageForDevice)",
    ),
    Failure(
        "one-omp-thread",
        r"setting omp_num_threads environment variable for each process to be 1\b",
        "torchrun sets OMP_NUM_THREADS=1",
        "host optimizers that run on torch's or OpenMP's threads then use one core, and are 15 to 80 times slower; "
        "hostward's own threads do not follow it",
        "export OMP_NUM_THREADS=N, N being the cores over the ranks of the machine",
        "PrimeIntellect-ai/prime-rl#3248, deepspeedai/DeepSpeed#6834",
        Breadth.GENERAL,
        severity=Severity.WARNING,
    ),
    Failure(
        "numa-refused",
        r"(?:set_mempolicy|mbind)[^.]{0,30}: operation not permitted|could not be bound to numa node",
        "memory could not be bound to the GPU's NUMA node",
        "containers forbid it by default, and the pages then lie wherever the system puts them",
        "docker --cap-add=SYS_NICE, or bind the whole process outside: numactl --cpunodebind=N --membind=N",
        "pytorch/pytorch#160420, deepspeedai/DeepSpeed#7478, PrimeIntellect-ai/prime-rl#3234",
        severity=Severity.WARNING,
    ),
)
