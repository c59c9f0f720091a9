"""Checks of software versions and of environment variables."""

from __future__ import annotations

import re

from hostward.doctor.finding import Finding, Severity
from hostward.machine.facts import Facts

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE

MINIMUM = {"python": (3, 11), "torch": (2, 11), "numpy": (1, 26), "transformers": (5, 17), "safetensors": (0, 4)}
"""As in pyproject.toml."""
_NEEDED = ("torch", "numpy")

ALLOCATOR_OPTIONS = frozenset(
    {
        "backend",
        "expandable_segments",
        "garbage_collection_threshold",
        "graph_capture_record_stream_reuse",
        "large_segment_size_mb",
        "max_non_split_rounding_mb",
        "max_split_size_mb",
        "per_process_memory_fraction",
        "pinned_free_catch_all",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "release_lock_on_cudamalloc",
        "roundup_power2_divisions",
        "throw_on_cudamalloc_oom",
    }
)
"""Those that torch 2.11 to 2.13 read."""
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def versions(facts: Facts) -> list[Finding]:
    found = []
    installed = {"python": facts.python, **facts.packages}
    for name, minimum in MINIMUM.items():
        least = ".".join(map(str, minimum))
        needed = name in (*_NEEDED, "python")
        use = "hostward needs it" if needed else "hostward train and hostward verify need it; the optimizer does not"
        version = installed.get(name)
        if version is None:
            command = f"pip install '{name}>={least}'" if needed else "pip install 'hostward[train]'"
            found.append(Finding(ERROR if needed else NOTE, f"{name} is not installed", use, command))
        elif (numbers := _numbers(version)) and numbers < minimum:
            what = f"{name} is {version}, at least {least} is needed"
            fix = "make an environment with a newer Python" if name == "python" else f"pip install '{name}>={least}'"
            found.append(Finding(ERROR if needed else WARNING, what, use, fix))
    return found


def triton(facts: Facts) -> list[Finding]:
    if not facts.devices.gpus:
        return []
    version, wanted = facts.packages.get("triton"), facts.triton_wanted
    if version is None:
        why = "the step on the device is a Triton kernel"
        fix = f"pip install triton=={wanted}" if wanted else "install torch for CUDA with its dependencies"
        return [Finding(ERROR, "triton is not installed", why, fix)]
    if wanted is not None and version.partition("+")[0] != wanted.partition("+")[0]:
        what = f"triton is {version}, torch {facts.packages.get('torch', '')} was built with {wanted}"
        why = "torch.compile, and kernels that are compiled at the first step, may fail"
        return [Finding(WARNING, what, why, f"pip install triton=={wanted}")]
    return []


def cuda(facts: Facts) -> list[Finding]:
    devices = facts.devices
    if devices.gpus and devices.error is not None:
        why = "its memory is full, another process has it for itself, or an earlier process left it broken"
        return [Finding(ERROR, devices.error, why, "nvidia-smi shows who uses it; end them, or choose another GPU")]
    hidden = _hides_all(facts.environ.get("CUDA_VISIBLE_DEVICES"))
    if devices.gpus or (hidden and devices.cuda_build is not None):
        return []
    if devices.error is not None and devices.cuda_build is None:
        return [Finding(ERROR, devices.error, "hostward works on torch", "pip install --force-reinstall torch")]
    there = facts.nvidia_addresses or facts.wsl
    if devices.cuda_build is not None:
        what = f"torch is built for CUDA {devices.cuda_build}, but sees no GPU: {devices.error}"
        if not there:
            why = "this machine has none; the device is simulated in host memory"
            return [Finding(NOTE, what, why, "nothing, to try things out; training wants a GPU")]
        fix = "nvidia-smi must work: install or update the driver; start containers with docker --gpus all"
        return [Finding(ERROR, what, "there is an NVIDIA GPU in this machine", fix)]
    if facts.nvidia_addresses and "torch" in facts.packages:
        what = f"torch {facts.packages['torch']} is a build without CUDA"
        why = f"there are NVIDIA GPUs in this machine ({', '.join(facts.nvidia_addresses)})"
        return [Finding(ERROR, what, why, "install torch for CUDA, as https://pytorch.org/get-started says")]
    why = "the device is simulated in host memory: results are right, speed says nothing"
    return [Finding(NOTE, "there is no GPU", why, "nothing, to try things out; training wants a GPU")]


def visible_devices(facts: Facts) -> list[Finding]:
    text = facts.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return []
    shown, fix = f"CUDA_VISIBLE_DEVICES={text}", "unset CUDA_VISIBLE_DEVICES, or list the GPUs that there are"
    count = len(facts.nvidia_addresses)
    if _hides_all(text):
        why = "it hides every GPU, also where it is set to nothing"
        return [Finding(WARNING if count or facts.wsl else NOTE, shown, why, fix)]
    words = [word.strip() for word in text.split(",")]
    odd = [w for w in words if not re.fullmatch(r"\d{1,4}|GPU-[0-9a-fA-F-]+|MIG-[\w/-]+", w)]
    if odd:
        why = f"{odd[0]!r} names no GPU, and what follows it is ignored"
        return [Finding(ERROR if odd[0] == words[0] else WARNING, shown, why, fix)]
    if len(set(words)) < len(words):
        return [Finding(ERROR, shown, "a GPU is named twice, and CUDA then shows none", fix)]
    beyond = [word for word in words if word.isdecimal() and int(word) >= count > 0]
    if beyond:
        why = f"there are {count} GPUs, so {beyond[0]} is none, and what follows it is ignored"
        return [Finding(ERROR if beyond[0] == words[0] else WARNING, shown, why, fix)]
    return []


def omp_threads(facts: Facts) -> list[Finding]:
    if facts.environ.get("OMP_NUM_THREADS", "").strip() != "1" or facts.cpu.affinity_cpus == 1:
        return []
    why = (
        "torchrun sets it. hostward's own threads do not follow it, but torch's do: torch optimizers on the host "
        "(use_torch_optimizer_for_cpu_offload), loading and data preparation run on one core"
    )
    ranks = facts.environ.get("LOCAL_WORLD_SIZE", "1")
    share = max(1, facts.cpu.affinity_cpus // int(ranks)) if ranks.isdecimal() and int(ranks) else 1
    return [Finding(WARNING, "OMP_NUM_THREADS=1", why, f"export OMP_NUM_THREADS={share}")]


def serial_cuda(facts: Facts) -> list[Finding]:
    found = []
    if facts.environ.get("CUDA_LAUNCH_BLOCKING", "0").strip() not in ("", "0"):
        why = "every kernel and copy waits for its end: nothing is hidden, and races do not show either"
        found.append(Finding(WARNING, "CUDA_LAUNCH_BLOCKING is on", why, "unset CUDA_LAUNCH_BLOCKING"))
    if facts.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip() == "1":
        why = (
            "all streams share one queue of the device: copies wait behind kernels, and a model's own small ones "
            "behind all state that is on its way. Megatron sets it to order tensor-parallel communication"
        )
        fix = "unset CUDA_DEVICE_MAX_CONNECTIONS unless tensor parallelism asks for it"
        found.append(Finding(WARNING, "CUDA_DEVICE_MAX_CONNECTIONS=1", why, fix))
    if facts.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "").strip():
        why = "every allocation asks the driver, and every free waits for the device"
        what, fix = "PYTORCH_NO_CUDA_MEMORY_CACHING is set", "unset PYTORCH_NO_CUDA_MEMORY_CACHING"
        found.append(Finding(WARNING, what, why, fix))
    return found


def allocator(facts: Facts) -> list[Finding]:
    found = []
    texts = {name: facts.environ[name].strip() for name in _ALLOCATOR_VARIABLES if facts.environ.get(name, "").strip()}
    if len(set(texts.values())) > 1:
        why = "they say different things, and torch takes some options from one and some from the other"
        found.append(
            Finding(WARNING, " and ".join(f"{k}={v}" for k, v in texts.items()), why, "unset PYTORCH_CUDA_ALLOC_CONF")
        )
    for name, text in texts.items():
        for key, value in _allocator_options(text):
            found += _allocator_option(name, key, value)
    return found


def _allocator_options(text: str) -> list[tuple[str, str]]:
    # Commas also part the entries of a list in brackets.
    parts = re.findall(r"[^,\[\]]+(?:\[[^\]]*\])?", text)
    pairs = (part.partition(":") for part in parts if part.strip())
    return [(key.strip(), value.strip()) for key, _, value in pairs]


def _allocator_option(name: str, key: str, value: str) -> list[Finding]:
    shown = f"{name}: {key}:{value}" if value else f"{name}: {key}"
    without = f"leave {key} out of {name}"
    if not value:
        return [Finding(ERROR, shown, "torch wants option:value, and refuses to start the device", without)]
    if key not in ALLOCATOR_OPTIONS:
        return [
            Finding(WARNING, shown, "no option of torch's allocator; torch may refuse to start the device", without)
        ]
    if key == "backend" and value != "native":
        why = "hostward is tested with torch's own pool; this one ignores other options, as expandable_segments"
        return [Finding(WARNING, shown, why, without)]
    if key == "max_split_size_mb" and value.isdecimal() and int(value) < 128:
        why = "blocks above this size are never split: large temporary tensors each keep their own memory"
        return [Finding(WARNING, shown, why, f"{without}; against fragmentation use expandable_segments:True")]
    if key == "per_process_memory_fraction":
        why = "torch reports out of memory at this share of the GPU, however much is free"
        return [Finding(NOTE, shown, why, f"{without} where it is not meant")]
    if key == "expandable_segments" and value.lower() == "true":
        why = "helps against fragmentation. Allocators that pause and resume memory (in colocated rollouts) refuse it"
        return [Finding(NOTE, shown, why, "nothing, unless such an allocator is in the process")]
    if key.startswith("pinned_"):
        why = "has no effect on hostward's page-locked memory, which does not come from torch"
        return [Finding(NOTE, shown, why, "nothing")]
    return []


def _hides_all(text: str | None) -> bool:
    return text is not None and (not text.strip() or text.strip().startswith("-"))


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"(\d{1,6})\.(\d{1,6})", version)
    return (int(match[1]), int(match[2])) if match else ()


ENVIRONMENT_CHECKS = (versions, triton, cuda, visible_devices, omp_threads, serial_cuda, allocator)
