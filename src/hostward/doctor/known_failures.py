"""Known failures of training with offloading, as data: how a log shows them, why they happen, what mends them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from hostward.doctor.finding import Severity


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


# Known failures of memory, checkpoints, devices and processes.


CONTEXT, GENERAL, CONSEQUENCE = Breadth.CONTEXT, Breadth.GENERAL, Breadth.CONSEQUENCE

_KILLED = (
    r"(?:exit ?code|return code|exit status|returncode)['\"]?\s{0,4}[:=]?\s{0,4}(?:-9|137)\b|signal 9\b|sigkill"
    r"|oom[-_ ]?kill|out of memory: killed process|^\s{0,8}killed\s{0,8}$"
)
_PINNING = r"pin_memory|cudahostalloc|cudahostregister|cumemhostregister|hostallocator|pinned|page.?lock"
_CUDA_OOM = r"(?:cuda|hip) out of memory"
_SEGMENTS = "PYTORCH_ALLOC_CONF=expandable_segments:True (PYTORCH_CUDA_ALLOC_CONF before torch 2.9)"
_PLAIN_OOM = r"cuda error: out of memory|cudaerrormemoryallocation"
_LESS = "raise optimizer.optimizer_offload_fraction, or lower train.micro_batch_size or model.seq_length"

_GRAPH_FIX = "leave such modules out of offloading, or switch CUDA graphs off: model.cuda_graph_impl=none"

HOST_MEMORY = (
    Failure(
        "page-locking-refused",
        r"could not be page-locked",
        "the driver refused to page-lock host memory",
        "a limit on locked memory (WSL, ulimit -l), or too little host memory; it is not the GPU that is full",
        "step on the host instead of streaming, optimizer.pin_cpu_grads=False, optimizer.pin_cpu_params=False; "
        "ulimit -l unlimited; under WSL raise memory in .wslconfig",
        "unslothai/unsloth-zoo#1257, vllm-project/vllm#51080",
    ),
    Failure(
        "host-memory-refused",
        r"bytes of host memory asked, [\d,]{1,40} available",
        "hostward needs more host memory than there is, and took none",
        "the line after it says which limit: the machine's or the container's",
        "lower optimizer.optimizer_offload_fraction, or raise the limit: docker --memory, resources.limits.memory",
        "hostward's own error text",
    ),
    Failure(
        "run-refused",
        r"the run needs (?:at least [\d,.]{1,40} (?:bytes|[kmg]?i?b) of (?:host|device)|more (?:device|host|pinned))"
        r" memory",
        "hostward refused the run before it allocated anything: it needs more memory than is free",
        "weights, gradients and state were weighed first, and activations too unless it says 'at least'; the lines "
        "after it say how much of which",
        "hostward plan with the same recipe and options names the smallest change that fits; --force starts where the "
        "memory model alone refused",
        "hostward's own error text",
    ),
    Failure(
        "ray-memory",
        r"outofmemoryerror.{0,200}\bray\b|\bray\b.{0,200}outofmemoryerror|memory usage threshold"
        r"|killed due to (?:the node running low on memory|memory pressure)",
        "Ray ended a worker because the node's memory ran low",
        "host memory, not the GPU's: masters and state of every rank, page-locked copies and the object store add up; "
        "Ray ends workers at 95 %",
        "keep less on the host (optimizer.optimizer_offload_fraction), fewer ranks per node, or more memory",
        "verl-project/verl#3453, OpenRLHF/OpenRLHF#198, hiyouga/EasyR1#50",
    ),
    Failure(
        "killed-while-saving",
        _KILLED,
        "the process was killed while or soon after it saved a checkpoint",
        "the whole state was gathered in host memory, on top of what training holds",
        "save shards as they are (hostward writes straight from its slabs); count the save in the memory request",
        "deepspeedai/DeepSpeed#4571, deepspeedai/DeepSpeed#3448, hiyouga/EasyR1#50",
        CONTEXT,
        near=r"sav(?:e|ing)[ _](?:the )?(?:model|check|state|optim)|save_pretrained|torch\.save",
    ),
    Failure(
        "killed-while-loading",
        _KILLED,
        "the process was killed while or soon after it loaded the model",
        "each rank loads its own copy and makes fp32 masters and page-locked buffers beside it: more GPUs need more "
        "host memory",
        "hostward doctor shows what the container grants; lower the offloaded share, or load on one rank at a time",
        "deepspeedai/DeepSpeed#4380, deepspeedai/DeepSpeed#5290, hiyouga/LlamaFactory#6755",
        CONTEXT,
        near=r"from_pretrained|loading (?:model|weights|check)|initialize_optimizer_states",
    ),
    Failure(
        "page-locking-exhausted",
        _PLAIN_OOM,
        "page-locked host memory ran out",
        "the driver says 'out of memory' of host memory that it cannot lock: WSL grants 1 to 2 GiB, Windows about half "
        "of the memory, one registration must be below 512 GiB, and torch rounds blocks up to powers of two",
        "offload less or do not pin (pin_memory=False where there is such a switch); under WSL raise memory in "
        ".wslconfig; hostward pins exact sizes",
        "unslothai/unsloth-zoo#1257, Nerogar/OneTrainer#820, vllm-project/vllm#51080",
        CONTEXT,
        near=_PINNING,
    ),
    Failure(
        "pin-invalid-argument",
        r"cuda error: invalid argument|cudaerrorinvalidvalue",
        "pin_memory was refused with 'invalid argument'",
        "memory of a kind that cannot be pinned, pinned twice, or a device passed to pin_memory; or locked memory ran "
        "out earlier",
        "update torch, where FSDP's CPUOffloadPolicy was mended; until then CPUOffloadPolicy(pin_memory=False)",
        "pytorch/pytorch#157146, axolotl-ai-cloud/axolotl#2743, deepspeedai/DeepSpeed#7150",
        CONTEXT,
        near=_PINNING,
    ),
    Failure(
        "host-allocation",
        r"can't allocate memory: you tried to allocate|std::bad_alloc|^memoryerror\b|errno 12\b|cannot allocate memory",
        "the system refused host memory",
        "the machine, its container or ulimit -v has less left than was asked",
        "hostward doctor shows the limits; lower the offloaded share, or end other processes",
        "deepspeedai/DeepSpeed#7021, hiyouga/LlamaFactory#103",
    ),
    Failure(
        "shared-memory",
        r"insufficient shared memory \(shm\)|\bbus error\b|sigbus|exit ?code['\"]?\s{0,4}[:=]?\s{0,4}-7\b|signal 7\b",
        "shared memory ran out",
        "/dev/shm of a container has 64 MiB by default; NCCL and data loader workers want more",
        "docker --shm-size=8g, or --ipc=host",
        "deepspeedai/DeepSpeed#4002, hiyouga/LlamaFactory#7315, haotian-liu/LLaVA#739",
    ),
    Failure(
        "killed",
        _KILLED,
        "the process was killed, in most cases for host memory",
        "signal 9 leaves no message: the kernel, the container or the batch system ended it at its memory limit; or a "
        "launcher, that one which did not end when asked to (torchrun after 30 s)",
        "hostward doctor shows the limit; dmesg names the process; lower optimizer.optimizer_offload_fraction or ask "
        "for more memory",
        "deepspeedai/DeepSpeed#4571, deepspeedai/DeepSpeed#7021, AetherCortex/Llama-X#15",
        GENERAL,
    ),
)

DEVICE_MEMORY = (
    Failure(
        "rollout-memory-not-free",
        r"free memory on device .{0,120}less than desired gpu memory utilization",
        "the rollout engine found the GPU still taken",
        "training memory was not really given back: a second reference, gradient buffers, workspaces or caches stay",
        "lower gpu_memory_utilization; free gradients before; nvidia-smi shows what stays after the switch",
        "NVIDIA/Megatron-LM#3112, verl-project/verl#6953, verl-project/verl#5979",
    ),
    Failure(
        "device-memory-loading",
        _CUDA_OOM,
        "the GPU ran out of memory while a checkpoint was loaded",
        "state went through the GPU: no map_location, or the optimizer moved it to its parameters",
        "torch.load(..., map_location='cpu'); hostward reads into its host slabs in place",
        "PrimeIntellect-ai/prime-rl#2154, NVIDIA/Megatron-LM#4638, huggingface/transformers#17258",
        CONTEXT,
        near=r"load_state_dict|torch\.load|load_checkpoint|resume_from",
    ),
    Failure(
        "device-memory-step",
        _CUDA_OOM,
        "the GPU ran out of memory in the optimizer step",
        "masters and moments are made at the first step, and the step needs temporary memory; too much of it stays "
        "on the device at this fraction",
        "raise optimizer.optimizer_offload_fraction, optimizer.offload_optimizer_states=true, or add pipeline stages",
        f"{GUIDE}; bitsandbytes-foundation/bitsandbytes#1402",
        CONTEXT,
        near=r"optimizer\.step|optimizer_step|_init_group|exp_avg|fused_adam|multi_tensor_adam|torch/optim",
    ),
    Failure(
        "device-memory-activations",
        _CUDA_OOM,
        "the GPU ran out of memory although activations are offloaded",
        "what is left is weights, gradients and optimizer state, which activation offloading does not touch; without "
        "pipeline parallelism all of them are on one GPU",
        "offload optimizer state too: optimizer.optimizer_cpu_offload=true optimizer.optimizer_offload_fraction=1.0",
        GUIDE,
        CONTEXT,
        near=r"cpu_offloading|cpu_offload\.py|activation_offload|offload_activations|save_on_cpu|offloadactivations",
    ),
    Failure(
        "device-memory-of-others",
        # In a container torch takes this process for another one, and then names no "this process".
        _CUDA_OOM + r"(?=.*process \d+ has \d{2,}\.\d+ gib memory in use).*this process has",
        "the GPU ran out of memory, and other processes hold some of it",
        "the message says how much: what others hold, offloading in this process cannot free",
        "end them (nvidia-smi lists them) or choose another GPU: CUDA_VISIBLE_DEVICES, or one per rank by LOCAL_RANK",
        f"{GUIDE}; deepspeedai/DeepSpeed#6666",
    ),
    Failure(
        "device-memory-in-pieces",
        _CUDA_OOM + r".* [1-9]\d*\.\d+ gib is reserved by pytorch but unallocated",
        "the GPU ran out of memory that is in one piece",
        "the message says how much the allocator has that is free, in pieces too small for what was asked",
        f"where they and what is free are together as much as was asked, {_SEGMENTS}; else {_LESS}",
        f"{GUIDE}; deepspeedai/DeepSpeed#6666",
    ),
    Failure(
        "device-memory",
        _CUDA_OOM,
        "the GPU ran out of memory",
        "weights, gradients, state and activations together do not fit",
        f"{_LESS}; against fragmentation {_SEGMENTS}",
        f"{GUIDE}; deepspeedai/DeepSpeed#6666",
        GENERAL,
    ),
    Failure(
        "device-or-locked-memory",
        _PLAIN_OOM,
        "the driver ran out of memory: the GPU's, or page-locked host memory",
        "unlike torch's own message this one comes from the driver, also when it cannot lock host memory",
        "look at nvidia-smi: a GPU with room means host memory, so offload or pin less; else end what fills the GPU",
        "unslothai/unsloth#338, vllm-project/vllm#51081",
        GENERAL,
    ),
)

CHECKPOINTS = (
    Failure(
        "resume-devices",
        r"tensors of the same index must be on the same device",
        "after resuming, optimizer state and parameters are on different devices",
        "loaded state keeps the device that it was saved from, or was moved to its parameters'",
        "load with map_location of the parameters, then move; hostward's state loads at any placement",
        "verl-project/verl#7342, modelscope/ms-swift#8240, huggingface/transformers#17258",
    ),
    Failure(
        "resume-mismatch",
        r"doesn't match the size of optimizer's group|optimizer length mismatch|different number of parameter groups",
        "the checkpoint's optimizer state does not fit this optimizer",
        "state saved by position, at another fraction, world size or set of trained parameters",
        "resume with the settings of the save, then save anew; hostward saves by parameter name, at any fraction",
        "NVIDIA-NeMo/Speech#14574, hpcaitech/ColossalAI#4528, NVIDIA/Megatron-LM#4623",
    ),
    Failure(
        "resume-names",
        r"^ {0,8}(?:\[[^ ]{1,30}\]: ?)?keyerror: ",
        "the checkpoint does not have a name that the optimizer looks for",
        "state saved by another model or wrapper, under names with another prefix; or, where an optimizer keeps copies "
        "of its parameters by identity, a map of them that offloading has made stale",
        "compare the names on both sides (hostward checkpoint inspect FOLDER, model.named_parameters()); in hostward "
        "state is found by name, wherever it lies",
        "NovaSky-AI/SkyRL#1401, NovaSky-AI/SkyRL#1403, NVIDIA/Megatron-LM#3885",
        CONTEXT,
        r"load_state_dict|load_checkpoint|load_optimizer|optimizer_state|dist_checkpointing",
    ),
    Failure(
        "torn-checkpoint",
        r"failed finding central directory|incomplete metadata, file not fully covered|headertoolarge"
        r"|archive is corrupted",
        "a checkpoint file is incomplete",
        "the process ended, or the disk was full, while it was written",
        "resume from the one before; hostward publishes a checkpoint whole or not at all",
        "torch's and safetensors' own error texts",
    ),
    Failure(
        "disk-full",
        r"no space left on device|errno 28\b|disk quota exceeded",
        "the disk is full, or /dev/shm",
        "a checkpoint takes 12 to 14 bytes per parameter; where the path lies in /dev/shm, it is memory",
        "free space, or name another folder in checkpoint.save",
        "the system's own error text (ENOSPC)",
    ),
)

PROCESSES = (
    Failure(
        "hostward-error",
        r"(?:^error: |hostward\.errors\.\w{1,40}: )(?!another rank ended)",
        "hostward refused, and says itself what mends it",
        "an option, a file or a limit that cannot be met",
        "the line near it that begins with 'fix:'",
        "hostward's own error text",
        CONTEXT,
        near=r"^\s{1,12}fix: ",
    ),
    Failure(
        "rank-lost",
        r"another rank ended or did not answer",
        "this rank gave up, because another one was gone or stood still",
        "ranks wait for each other at every step; what ended or held the other one came first",
        "look for the first error or signal among the logs of all ranks; complete checkpoints are intact",
        "hostward's own error text",
        CONSEQUENCE,
    ),
    Failure(
        "no-cpu-backend",
        r"no backend type associated with device type cpu",
        "a collective met a tensor on the host, and the process group knows NCCL alone",
        "the gradient norm of host gradients is a host scalar",
        "torch.distributed.init_process_group('cpu:gloo,cuda:nccl')",
        "pytorch/pytorch#148532, meta-pytorch/torchtune#1977, pytorch/torchtitan#620",
    ),
    Failure(
        "wrong-device-kernel",
        r"expected input to be on cuda|cannot be accessed from triton \(cpu tensor",
        "a GPU kernel was given host memory",
        "a fused GPU optimizer or normalisation met offloaded tensors",
        "take an optimizer that knows where its state lies (hostward.AdamW), or keep that module's tensors on the GPU",
        "EleutherAI/gpt-neox#478, deepspeedai/DeepSpeed#4872, NVIDIA-NeMo/RL#3544",
    ),
    Failure(
        "meta-tensor",
        r"cannot copy out of meta tensor",
        "a module was moved while its weights were still on the meta device",
        "weights that were never loaded, as with adapters over a model that was built empty",
        "load the weights before moving the model: to_empty(device=...), then load_state_dict",
        "huggingface/peft#1538, axolotl-ai-cloud/axolotl#2409",
    ),
    Failure(
        "storage-resize",
        r"resize storage that is not resizable",
        "offloading tried to empty memory that is not its own",
        "memory of a CUDA graph, or shared with another tensor, cannot be resized",
        _GRAPH_FIX,
        "NVIDIA/Megatron-LM#7009",
    ),
    Failure(
        "stream-capture",
        r"not permitted when stream is capturing|cudaerrorstreamcapture",
        "something was done during CUDA graph capture that cannot be captured",
        "allocation, synchronisation or an event of another stream inside the captured part",
        _GRAPH_FIX,
        "NVIDIA/Megatron-LM#7014, NVIDIA/Megatron-LM#4350",
    ),
    Failure(
        "forward-without-backward",
        r"still have inflight params|should have cleared tracker",
        "offloading lost count after a forward without a backward",
        "evaluation, log-probabilities, generation or an exception moved counters that only a backward moves back",
        "run such passes under torch.no_grad(), and leave the offloading context after an exception",
        "deepspeedai/DeepSpeed#3156, deepspeedai/DeepSpeed#4175, meta-pytorch/torchtune#2709",
    ),
    Failure(
        "collective-timeout",
        r"watchdog caught collective operation timeout|timed out waiting \d+ms for (?:recv|send) operation",
        "a rank waited for the others until NCCL or gloo gave up",
        "a rank died or is slow: killed for memory, slow host step, or an expert without tokens whose hooks never ran",
        "look for the first error of every rank; with experts declare them as leaf modules",
        "deepspeedai/DeepSpeed#4808, deepspeedai/DeepSpeed#5066, hiyouga/LlamaFactory#2315",
        GENERAL,
    ),
    Failure(
        "mixed-devices",
        r"expected all tensors to be on the same device",
        "an operation met tensors on the GPU and on the host",
        "offloaded weights or state were used without being brought back, or moved by hand beside their owner",
        "let one tool own the placement: switch one of two offloading mechanisms off",
        "verl-project/verl#6690, hiyouga/LlamaFactory#3550, NVIDIA/Megatron-LM#1734",
        GENERAL,
    ),
    Failure(
        "illegal-access",
        r"illegal memory access",
        "the GPU read or wrote memory that is not there",
        "memory freed or emptied while a copy or kernel still used it; the line that reports it is seldom the cause",
        "CUDA_LAUNCH_BLOCKING=1 names the kernel; then the same run with offloading off",
        "modelscope/ms-swift#9554, meta-pytorch/torchtune#1867",
        GENERAL,
    ),
    Failure(
        "segmentation-fault",
        r"segmentation fault|sigsegv|signal 11\b|exit ?code['\"]?\s{0,4}[:=]?\s{0,4}-11\b",
        "native code touched memory that is not there",
        "a weight that was emptied for offloading, a buffer freed during a copy, or a library of another version",
        "python -X faulthandler shows where; pip check; then the same run with offloading off",
        "deepspeedai/DeepSpeed#1643",
        GENERAL,
    ),
)

FAILURES: tuple[Failure, ...] = (
    *OPTIONS,
    *SILENT,
    *BUILDS,
    *HOST_MEMORY,
    *DEVICE_MEMORY,
    *CHECKPOINTS,
    *PROCESSES,
)
"""All of them, each kind from the narrow to the wide."""
