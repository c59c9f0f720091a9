"""Every known failure is recognised in a log of the kind that shows it, and nothing else is made of it."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hostward.doctor.log import Breadth, is_bad, known_failures, recognise, render, to_dict

FAILURES = known_failures()
BY_NAME = {failure.name: failure for failure in FAILURES}

CUDA_OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total capacity of 79.11 GiB "
    "of which 1.05 GiB is free."
)
OF_OTHERS = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 200.00 MiB. GPU 1 has a total capacity of 23.65 GiB "
    "of which 100.00 MiB is free. Process 99 has 20.00 GiB memory in use. Including non-PyTorch memory, this process "
    "has 3.40 GiB memory in use. Of the allocated memory 3.01 GiB is allocated by PyTorch, and 12.00 MiB is reserved "
    "by PyTorch but unallocated."
)
IN_PIECES = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 79.11 GiB "
    "of which 1.05 GiB is free. Including non-PyTorch memory, this process has 78.00 GiB memory in use. Of the "
    "allocated memory 60.12 GiB is allocated by PyTorch, and 14.90 GiB is reserved by PyTorch but unallocated."
)
OLDER = (
    "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 79.20 GiB total capacity; 60.00 GiB already "
    "allocated; 1.00 GiB free; 70.00 GiB reserved in total by PyTorch)"
)
"""As torch had it before 2.1."""
ELASTIC_KILLED = "torch.distributed.elastic.multiprocessing.api: failed (exitcode: -9) local_rank: 3 (pid: 4711)"

# (failure, log, the line that shows it)
LOGS = [
    ("device-memory-of-others", OF_OTHERS, 1),
    ("device-memory-in-pieces", IN_PIECES, 1),
    ("device-memory", IN_PIECES.replace("14.90 GiB", "490.00 MiB"), 1),
    ("device-memory", OF_OTHERS.replace("20.00 GiB", "510.00 MiB"), 1),
    (
        "pipeline-activation-offload",
        """Traceback (most recent call last):
  File "megatron/core/transformer/transformer_config.py", line 1311, in __post_init__
    raise ValueError(
ValueError: Currently there is no support for Pipeline parallelism with CPU offloading""",
        4,
    ),
    (
        "recompute-activation-offload",
        "rank0: ValueError: CPU offloading does not work when activation recomputation is enabled",
        1,
    ),
    (
        "two-activation-offloads",
        """    assert (
AssertionError: fine_grained_activation_offloading cannot be enabled with cpu_offloading.""",
        2,
    ),
    ("graphs-activation-offload", "ValueError: CUDA graphs not supported with CPU offloading.", 1),
    ("graphs-activation-offload", "AssertionError: Cudagraphs not supported", 1),
    (
        "all-state-on-host",
        """  optimizer_cpu_offload ........................... True
  optimizer_offload_fraction ...................... 1.0
 iteration 10/ 20 | elapsed time per iteration (ms): 9120.4""",
        2,
    ),
    ("all-state-on-host", "  optimizer_offload_fraction: 1.0", 1),
    (
        "client-optimizer",
        (
            "ZeRORuntimeException: You are using ZeRO-Offload with a client provided optimizer (<class "
            "'torch.optim.adamw.AdamW'>) which in most cases will yield poor performance."
        ),
        1,
    ),
    (
        "fp8-parameters",
        """  File "megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py", line 118, in __init__
TypeError: optimizer can only optimize Tensors, but one of the params is NoneType""",
        2,
    ),
    ("allocator-option", "RuntimeError: Unrecognized key 'expandable_segment' in CUDA allocator config.", 1),
    ("allocator-option", "RuntimeError: Unrecognized CachingAllocator option: max_split", 1),
    (
        "expandable-segments",
        (
            "RuntimeError: TorchMemorySaver is disabled for the current process because expandable_segments is not "
            "supported yet."
        ),
        1,
    ),
    ("expandable-segments", "AssertionError: Expandable segments are not compatible with memory pool.", 1),
    (
        "lost-gradients",
        " iteration 12/ 100 | lm loss: 1.032149E+01 | grad norm: 0.000 | num zeros: 0 |",
        1,
    ),
    ("lost-gradients", "{'loss': 2.31, 'grad_norm': 0.0, 'learning_rate': 1e-05}", 1),
    ("nan-loss", "RuntimeError: Rank 3, node n1, device 3: found NaN in local grad norm in backward pass", 1),
    ("nan-loss", "{'loss': nan, 'learning_rate': 9.8e-06, 'epoch': 0.02}", 1),
    ("nan-loss", "step 40 | loss: nan | tokens/s 8123", 1),
    (
        "loss-device-assert",
        (
            "aten/src/ATen/native/cuda/Loss.cu:245: nll_loss_forward_reduce_cuda_kernel_2d: block: [0,0,0], thread: "
            "[3,0,0] Assertion `t >= 0 && t < n_classes` failed."
        ),
        1,
    ),
    ("norm-assertion", "    assert all_groups_norm > 0.\nAssertionError", 1),
    ("cpu-adam-build", "AttributeError: 'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'", 1),
    (
        "cpu-adam-build",
        "RuntimeError: Unable to JIT load the cpu_adam op due to it not being compatible due to hardware/software",
        1,
    ),
    ("no-compiler", "/bin/sh: 1: g++: not found", 1),
    ("unknown-instruction-set", "cc1plus: error: bad value 'native' for '-march=' switch", 1),
    (
        "old-driver",
        "RuntimeError: The NVIDIA driver on your system is too old (found version 12020). Please update your GPU",
        1,
    ),
    ("no-driver", "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory", 1),
    ("no-driver", "RuntimeError: Found no NVIDIA driver on your system.", 1),
    ("no-driver", "error: the CUDA driver library libcuda.so.1 cannot be loaded", 1),
    ("cpu-build-of-torch", "AssertionError: Torch not compiled with CUDA enabled", 1),
    ("no-kernel-image", "CUDA error: no kernel image is available for execution on the device", 1),
    (
        "one-omp-thread",
        """*****************************************
Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid your system being
overloaded, please further tune the variable""",
        2,
    ),
    ("numa-refused", "set_mempolicy: Operation not permitted\nsetting membind: Operation not permitted", 1),
    ("numa-refused", "state: pages could not be bound to NUMA node 1 (Operation not permitted); they lie", 1),
    (
        "page-locking-refused",
        (
            "error: exp_avg: 1,073,741,824 bytes could not be pinned\n  why: cuMemHostRegister: "
            "CUDA_ERROR_OUT_OF_MEMORY; this is host memory, not GPU memory"
        ),
        1,
    ),
    (
        "run-refused",
        "error: the run needs at least 98,304,000,000 bytes of device memory, and 84,987,740,160 are available",
        1,
    ),
    ("run-refused", "error: the run needs at least 1,455.0 GiB of host memory, and 22.7 GiB are available", 1),
    (
        "run-refused",
        """error: the run needs more device memory than there is: free are device 139.1 GiB
  why: by the memory model, compared with what is free:""",
        1,
    ),
    (
        "host-memory-refused",
        """error: exp_avg: 68,719,476,736 bytes of host memory asked, 21,632,086,016 available
  why: the limit is set by the container's cgroup (25,276,514,304 bytes in all)
  fix: lower optimizer.optimizer_offload_fraction, or give the process more memory""",
        1,
    ),
    (
        "hostward-error",
        """Traceback (most recent call last):
hostward.errors.UnknownNameError: no option optimizer.ofload_fraction
  fix: did you mean optimizer.optimizer_offload_fraction?""",
        2,
    ),
    ("hostward-error", "error: --trace x is a folder\n  fix: name a file", 1),
    (
        "rank-lost",
        "error: another rank ended or did not answer\n  why: Connection closed by peer\n  fix: see the other ranks",
        1,
    ),
    ("rank-lost", "hostward.errors.RankError: another rank ended or did not answer\n  fix: see the others", 1),
    (
        "ray-memory",
        (
            "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n"
            "Memory on the node was 452.10GB / 475.00GB (0.951789), which exceeds the memory usage threshold of 0.95."
        ),
        1,
    ),
    (
        "killed-while-saving",
        f"""[INFO] saving checkpoint at iteration 500 to ckpt/iter_0000500
W1121 torch/distributed/elastic/agent: Sending process 4712 closing signal SIGTERM
E1121 {ELASTIC_KILLED}""",
        3,
    ),
    (
        "killed-while-loading",
        """Loading checkpoint shards:  53%|#####3    | 9/17 [00:41<00:36]
[launch.py:315:sigkill_handler] Killing subprocess 3217
[launch.py:321:sigkill_handler] ['python', '-u', 'train.py'] exits with return code = -9""",
        2,
    ),
    (
        "page-locking-exhausted",
        """  File "unsloth_zoo/gradient_checkpointing.py", line 402, in initialize_unsloth_gradient_checkpointing
    x = torch.empty(128*1024, dtype = dtype, device = "cpu", pin_memory = True)
RuntimeError: CUDA error: out of memory""",
        3,
    ),
    (
        "pin-invalid-argument",
        """  File "torch/distributed/fsdp/_fully_shard/_fsdp_param.py", line 371, in _init_sharded_param
    self.padded_sharded_param_data = padded.cpu().pin_memory()
RuntimeError: CUDA error: invalid argument
CUDA kernel errors might be asynchronously reported at some other API call""",
        3,
    ),
    (
        "host-allocation",
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: "
            "you tried to allocate 34359738368 bytes. Error code 12 (Cannot allocate memory)"
        ),
        1,
    ),
    ("host-allocation", "OSError: [Errno 12] Cannot allocate memory", 1),
    (
        "shared-memory",
        (
            "RuntimeError: DataLoader worker (pid 88) is killed by signal: Bus error. It is possible that dataloader's "
            "workers are out of shared memory. Please try to raise your shared memory limit."
        ),
        1,
    ),
    ("shared-memory", "failed (exitcode: -7) local_rank: 0 (pid: 101) of binary: python\nSignal 7 (SIGBUS)", 1),
    ("killed", f"E1121 {ELASTIC_KILLED}", 1),
    ("killed", "step 3 done\nKilled", 2),
    ("killed", "container exited with exit code 137", 1),
    ("killed", "      Reason:       OOMKilled\n      Exit Code:    137", 1),
    (
        "killed",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=812.0. Some of the step tasks have been OOM Killed.",
        1,
    ),
    ("killed", "kernel: Out of memory: Killed process 4711 (python) total-vm:812345678kB", 1),
    (
        "rollout-memory-not-free",
        (
            "ValueError: Free memory on device (11.61/79.11 GiB) on startup is less than desired "
            "GPU memory utilization (0.5, 39.55 GiB). Decrease GPU memory utilization."
        ),
        1,
    ),
    (
        "device-memory-loading",
        f"""  File "trainer.py", line 88, in resume
    self.optimizer.load_state_dict(torch.load(path))
{CUDA_OOM}""",
        3,
    ),
    (
        "device-memory-step",
        f"""  File "torch/optim/adamw.py", line 188, in _init_group
    state["exp_avg"] = torch.zeros_like(p)
{CUDA_OOM}""",
        3,
    ),
    (
        "device-memory-activations",
        f"""  File "transformer_engine/pytorch/cpu_offload.py", line 512, in tensor_pop
    tensor = self.recover(state)
{CUDA_OOM}""",
        3,
    ),
    ("device-memory", f'  File "model.py", line 3, in forward\n{CUDA_OOM}', 2),
    ("device-or-locked-memory", "RuntimeError: CUDA error: out of memory", 1),
    (
        "resume-devices",
        "RuntimeError: Tensors of the same index must be on the same device and the same dtype except `step` tensors",
        1,
    ),
    (
        "resume-mismatch",
        "ValueError: loaded state dict contains a parameter group that doesn't match the size of optimizer's group",
        1,
    ),
    (
        "resume-names",
        """  File "megatron/core/optimizer/distrib_optimizer.py", line 712, in load_state_dict
    inner_state = self.optimizer.state[param]
KeyError: 'module.decoder.layers.0.self_attention.linear_qkv.weight'""",
        3,
    ),
    (
        "torn-checkpoint",
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
        1,
    ),
    (
        "torn-checkpoint",
        "SafetensorError: Error while deserializing header: incomplete metadata, file not fully covered",
        1,
    ),
    ("disk-full", "OSError: [Errno 28] No space left on device: 'ckpt/iter_10/model.safetensors'", 1),
    (
        "no-cpu-backend",
        """  File "torch/nn/utils/clip_grad.py", line 155, in _clip_grads_with_norm_
RuntimeError: No backend type associated with device type cpu""",
        2,
    ),
    ("wrong-device-kernel", "RuntimeError: expected input to be on cuda", 1),
    ("wrong-device-kernel", "ValueError: Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)", 1),
    ("meta-tensor", "NotImplementedError: Cannot copy out of meta tensor; no data!", 1),
    ("storage-resize", "RuntimeError: Trying to resize storage that is not resizable", 1),
    ("stream-capture", "CUDA error: operation not permitted when stream is capturing", 1),
    (
        "forward-without-backward",
        "RuntimeError: still have inflight params [{'id': 31, 'status': 'AVAILABLE', 'numel': 4096}]",
        1,
    ),
    ("forward-without-backward", "ValueError: Backward pass should have cleared tracker of all tensors", 1),
    (
        "collective-timeout",
        (
            "[rank3]:[E1121 ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=812, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600012 milliseconds before timing out."
        ),
        1,
    ),
    (
        "mixed-devices",
        "RuntimeError: Expected all tensors to be on the same device, but found at least two, cuda:0 and cpu!",
        1,
    ),
    ("illegal-access", "RuntimeError: CUDA error: an illegal memory access was encountered", 1),
    ("segmentation-fault", "Fatal Python error: Segmentation fault", 1),
    ("segmentation-fault", "failed (exitcode: -11) local_rank: 0", 1),
    (
        "pin-over-2-gib",
        """  File "modules/util/offload.py", line 412, in allocate
    self.cache = torch.zeros((self.num_bytes,), dtype=torch.int8, pin_memory=True)
torch.AcceleratorError: CUDA error: invalid argument
CUDA kernel errors might be asynchronously reported at some other API call""",
        3,
    ),
    ("gpu-failed", "kernel: NVRM: Xid (PCI:0000:9b:00): 79, pid=1234, name=python, GPU has fallen off the bus.", 1),
    ("launch-failure", "torch.AcceleratorError: CUDA error: unspecified launch failure", 1),
    (
        "inference-tensor",
        """  File "gradient_checkpointing.py", line 510, in forward
    x.copy_(hidden_states, non_blocking = True)
RuntimeError: Inplace update to inference tensor outside InferenceMode is not allowed.""",
        3,
    ),
    (
        "second-backward-checkpointed",
        """  File "unsloth_zoo/gradient_checkpointing.py", line 333, in backward
    torch.autograd.backward(output, dY)
RuntimeError: Trying to backward through the graph a second time (or directly access saved tensors after they have""",
        3,
    ),
    ("second-backward", "RuntimeError: Trying to backward through the graph a second time", 1),
    (
        "fused-step-mismatch",
        "RuntimeError: params, grads, exp_avgs, and exp_avg_sqs must have same dtype, device, and layout",
        1,
    ),
    (
        "moved-under-fsdp",
        """    params = self.module.state_dict()
RuntimeError: Attempted to set the storage of a tensor on device "cpu" to a storage on different device "cuda:0".""",
        2,
    ),
    ("mixed-dtypes", "RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16", 1),
    (
        "two-state-offloads",
        "AssertionError: --offload-optimizer-states and --optimizer-cpu-offload are mutually exclusive",
        1,
    ),
    ("not-an-optimizer", "TypeError: CPUOffloadOptimizer is not an Optimizer", 1),
    (
        "unequal-steps",
        """[rank58]:   File "megatron/core/optimizer/distrib_optimizer.py", line 630, in state_dict
[rank58]: AssertionError: steps: [10, 10, 0]""",
        2,
    ),
]


@pytest.mark.parametrize(("name", "log", "line_number"), LOGS, ids=[f"{i}-{row[0]}" for i, row in enumerate(LOGS)])
def test_a_log_of_the_failure_is_recognised_and_as_that_alone(name: str, log: str, line_number: int) -> None:
    lines = (
        ["launching 8 ranks", "iteration 1/ 20 | lm loss: 1.1E+01 | grad norm: 3.71 |"] + [""] * 50 + log.split("\n")
    )
    found = recognise(lines)
    assert [(r.failure.name, r.line_number) for r in found] == [(name, 52 + line_number)]
    assert lines[51 + line_number].strip().startswith(found[0].line)


# Other ways in which the same failures are spelt, one line each.
SPELLINGS = [
    ("unknown-instruction-set", "error: inlining failed in call to '_mm512_add_ps': target specific option mismatch"),
    ("no-compiler", "FileNotFoundError: [Errno 2] No such file or directory: '/usr/local/cuda/bin/nvcc'"),
    ("no-compiler", "RuntimeError: Ninja is required to load C++ extensions (pip install ninja to get it)"),
    ("unknown-instruction-set", "Illegal instruction (core dumped)"),
    ("unknown-instruction-set", "c++: error: unrecognized command-line option '-march=sapphirerapids'"),
    ("expandable-segments", "pausing memory is not supported with expandable_segments"),
    ("nan-loss", "FloatingPointError: the loss is NaN at step 3"),
    (
        "cpu-adam-build",
        "deepspeed.ops.op_builder.builder.CUDAMismatchException: >- Installed CUDA version 12.4 does not",
    ),
    ("cpu-adam-build", "undefined symbol: curandCreateGenerator"),
    ("cpu-adam-build", "ImportError: cpu_adam.so: cannot open shared object file: No such file or directory"),
    ("old-driver", "CUDA error: CUDA driver version is insufficient for CUDA runtime version"),
    ("ray-memory", "ray.exceptions.OutOfMemoryError: one of 16 workers"),
    ("ray-memory", "OutOfMemoryError: raised by ray on node 3"),
    ("ray-memory", "Memory on the node exceeds the memory usage threshold of 0.95"),
    ("ray-memory", "(raylet) 3 Workers (tasks / actors) killed due to memory pressure (OOM)"),
    ("host-allocation", "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    ("host-allocation", "terminate called after throwing an instance of 'std::bad_alloc'"),
    ("host-allocation", "MemoryError"),
    ("host-allocation", "OSError: [Errno 12]"),
    ("host-allocation", "mmap failed: Cannot allocate memory"),
    ("shared-memory", "RuntimeError: DataLoader worker is out: unable to write, insufficient shared memory (shm)"),
    ("shared-memory", "rank 3 got SIGBUS"),
    ("shared-memory", "received Signal 7 by PID 101"),
    ("killed", "Signal 9 received by PID 4711"),
    ("killed", "rank 3 got SIGKILL"),
    ("device-or-locked-memory", "cudaErrorMemoryAllocation"),
    ("resume-mismatch", "ValueError: optimizer length mismatch: 291 and 290"),
    ("resume-mismatch", "ValueError: loaded state dict has a different number of parameter groups"),
    ("torn-checkpoint", "SafetensorError: Error while deserializing header: HeaderTooLarge"),
    ("torn-checkpoint", "RuntimeError: invalid header or archive is corrupted"),
    ("disk-full", "tee: run.log: No space left on device"),
    ("disk-full", "OSError: [Errno 28] write"),
    ("disk-full", "OSError: [Errno 122] Disk quota exceeded"),
    ("stream-capture", "CUDA driver: cudaErrorStreamCaptureUnsupported"),
    ("segmentation-fault", "rank 3 got SIGSEGV"),
    ("segmentation-fault", "Signal 11 received by PID 4711"),
    ("gpu-failed", "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
    ("gpu-failed", "NVRM: Xid (PCI:0000:9b:00): 95, pid=1234, Uncontained"),
    ("gpu-failed", "Unable to determine the device handle for GPU 0000:9B:00.0: GPU is lost."),
    ("launch-failure", "cudaErrorLaunchFailure"),
    ("inference-tensor", "RuntimeError: Inference tensors cannot be saved for backward."),
    ("moved-under-fsdp", "FSDP parameters should be materialized on CPU when enabling CPU offloading."),
    ("moved-under-fsdp", "An FSDP-managed module with parameter CPU offloading enabled has parameters on cuda:0."),
    ("moved-under-fsdp", "attempting to assign a gradient with device type 'cpu' to a tensor with device type 'cuda'"),
    ("mixed-dtypes", "RuntimeError: expected scalar type Float but found BFloat16"),
    ("mixed-dtypes", "RuntimeError: expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16"),
    ("two-state-offloads", "optimizer_cpu_offload=True does not support offload_optimizer_states"),
    ("unequal-steps", "    assert all(s == steps[0] for s in steps)"),
]


@pytest.mark.parametrize(("name", "line"), SPELLINGS)
def test_other_spellings_are_recognised(name: str, line: str) -> None:
    assert [r.failure.name for r in recognise([line])] == [name]


# What tells the cause of a message that has many: failure, message, lines that each make it that one.
CONTEXTS = {
    ("page-locking-exhausted", "CUDA error: out of memory"): (
        "torch.empty(8, pin_memory=True)",
        "at cudaHostAlloc(&ptr, size, flags)",
        "cudaHostRegister failed",
        "cuMemHostRegister: CUDA_ERROR",
        "at::native::CachingHostAllocator",
        "copying to pinned buffers",
        "page-locked copies: 12 GiB",
    ),
    ("pin-over-2-gib", "CUDA error: invalid argument"): (
        "buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)",
        "cudaHostRegister failed",
        "cuMemHostRegister(address, size)",
    ),
    ("second-backward-checkpointed", "Trying to backward through the graph a second time"): (
        "torch/utils/checkpoint.py",
        "{'gradient_checkpointing': True}",
        "hf_checkpointing.py",
        "Unsloth 2026.9",
    ),
    ("pin-invalid-argument", "CUDA driver: cudaErrorInvalidValue"): (
        "cudaHostAlloc",
        "pinned",
        "page locked",
        "padded.cpu().pin_memory()",
        "torch/utils/data/_utils/pin_memory.py",
    ),
    ("killed-while-saving", "Killed"): (
        "saving the model to out/",
        "save_checkpoint(path)",
        "model.save_pretrained(out)",
        "torch.save(state, path)",
    ),
    ("killed-while-loading", "Killed"): (
        "Loading checkpoint shards: 10%",
        "AutoModel.from_pretrained(path)",
        "loading weights from base/",
        "before initialize_optimizer_states",
    ),
    ("device-memory-loading", CUDA_OOM): (
        "optimizer.load_state_dict(state)",
        "torch.load(path)",
        "engine.load_checkpoint(path)",
        "resume_from_checkpoint: run/3",
    ),
    ("device-memory-step", CUDA_OOM): (
        "self.optimizer.step()",
        "in optimizer_step",
        "in _init_group",
        "exp_avg = zeros",
        "fused_adam.py",
        "multi_tensor_adam(",
        "torch/optim/sgd.py",
    ),
    ("device-memory-activations", CUDA_OOM): (
        "cpu_offloading: true",
        "cpu_offload.py",
        "activation_offloading: true",
        "enable offload_activations",
        "with save_on_cpu():",
        "with OffloadActivations():",
    ),
}


@pytest.mark.parametrize(
    ("name", "message", "context"),
    [(name, message, line) for (name, message), lines in CONTEXTS.items() for line in lines],
)
def test_the_lines_around_tell_the_cause(name: str, message: str, context: str) -> None:
    assert [r.failure.name for r in recognise([context, message])] == [name]
    assert [r.failure.name for r in recognise([message, context])] == [name]
    assert [r.failure.name for r in recognise([message])] != [name]


def test_what_a_progress_bar_overwrote_stands_alone() -> None:
    assert [r.failure.name for r in recognise(["50%|###   \rKilled\r\n"])] == ["killed"]


def test_failures_of_one_breadth_come_in_the_order_of_the_log() -> None:
    log = ["OSError: [Errno 28]", "Torch not compiled with CUDA enabled", "MemoryError"]
    assert [r.line_number for r in recognise(log)] == [1, 2, 3]


def test_every_pattern_has_a_log() -> None:
    assert {name for name, _, _ in LOGS} == set(BY_NAME)


def test_names_are_unique_and_texts_are_there() -> None:
    assert len(BY_NAME) == len(FAILURES)
    for failure in FAILURES:
        assert min(len(t) for t in (failure.what, failure.why, failure.fix, failure.source)) > 5
        assert (failure.pattern + failure.near).islower()  # as the lines are that they see
        assert bool(failure.near) == (failure.breadth is Breadth.CONTEXT)


HEALTHY = """
Loading checkpoint shards: 100%|##########| 17/17 [00:41<00:00]
saving checkpoint at iteration 500
iteration 500/ 1000 | lm loss: 2.0E+00 | grad norm: 0.041 | loss scale: 1.0 | number of nan iterations: 0 |
{'loss': 1.9, 'grad_norm': 0.0312, 'learning_rate': 1e-05}
grad norm: 0.5 grad_norm=0.00012 grad norm 1e-3 'grad_norm': 0e1.
optimizer_offload_fraction ...................... 0.5
optimizer_offload_fraction: 1.05
Process finished with exit code: 0, return code = 0, exitcode: -9000
killed off the last bug; Killedby
offload_optimizer_states ........................ False
NVRM: Xid (PCI:0000:9b:00): 63, pid=1234, Row remapper: New row marked for remapping
--offload-optimizer-states keeps the GPU step, other than --optimizer-cpu-offload
"""


def test_a_healthy_log_shows_nothing() -> None:
    assert recognise(HEALTHY.splitlines()) == []


def test_the_narrowest_comes_first_and_hides_the_wider_of_its_line() -> None:
    log = [
        "RuntimeError: CUDA error: out of memory",
        *[""] * 60,
        "x = torch.empty(5, pin_memory=True)",
        "RuntimeError: CUDA error: out of memory",
        *[""] * 60,
        "ValueError: Currently there is no support for Pipeline parallelism with CPU offloading",
    ]
    assert [(r.failure.name, r.line_number) for r in recognise(log)] == [
        ("pipeline-activation-offload", 124),
        ("page-locking-exhausted", 63),
        ("device-or-locked-memory", 1),
    ]


def test_of_a_run_that_lost_a_rank_the_cause_comes_first() -> None:
    log = [
        "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default",
        "error: another rank ended or did not answer",
        "  fix: see the output of the other ranks",
        ELASTIC_KILLED,
    ]
    assert [r.failure.name for r in recognise(log)] == ["killed", "one-omp-thread", "rank-lost"]


def test_what_is_far_away_is_no_context() -> None:
    log = ["x.pin_memory()", *["" for _ in range(41)], "RuntimeError: CUDA error: out of memory"]
    assert [r.failure.name for r in recognise(log)] == ["device-or-locked-memory"]
    assert [r.failure.name for r in recognise(log[1:])] == ["device-or-locked-memory"]
    assert [r.failure.name for r in recognise(log[:1] + log[3:])] == ["page-locking-exhausted"]


def test_colours_do_not_hide_a_failure() -> None:
    found = recognise(["\x1b[31mRuntimeError\x1b[0m: \x1b[1mCUDA\x1b[0m error: out of memory\r\n"])
    assert [r.line for r in found] == ["RuntimeError: CUDA error: out of memory"]


@pytest.mark.parametrize("offset", [0, 3_960, 3_999])
def test_a_failure_in_a_line_without_end_is_found_in_time(offset: int) -> None:
    line = "g" * offset + " No backend type associated with device type cpu" + "loss exit code grad_norm " * 20_000
    assert [r.failure.name for r in recognise([line])] == ["no-cpu-backend"]


def test_remarks_are_no_failures() -> None:
    remark = recognise(["Setting OMP_NUM_THREADS environment variable for each process to be 1 in default"])
    assert remark
    assert not is_bad(remark)
    assert is_bad(recognise(["Killed"]))
    assert not is_bad([])


FRAGMENTS = st.sampled_from(sorted({word for _, log, _ in LOGS for word in log.split()}))


@given(lines=st.lists(st.text() | st.lists(FRAGMENTS).map(" ".join), max_size=30))
def test_no_text_is_too_odd(lines: list[str]) -> None:
    found = recognise(lines)
    assert len(render(found)) == len(found)
    rows = to_dict(found)["recognised"]
    assert all(1 <= row["line_number"] <= len(lines) for row in rows)
    breadths = [r.failure.breadth for r in found]
    assert breadths == sorted(breadths)


NUMBERS = {
    CUDA_OOM: "asked 2.3 GiB where 1.0 GiB of 79.1 GiB were free",
    OF_OTHERS: (
        "asked 200.0 MiB where 100.0 MiB of 23.7 GiB were free; torch's tensors take 3.0 GiB; torch keeps 12.0 MiB"
        " besides, in pieces; other processes have 20.0 GiB"
    ),
    # In a container torch names itself by a number.
    IN_PIECES.replace("this process has", "Process 41 has"): (
        "asked 4.0 GiB where 1.0 GiB of 79.1 GiB were free; torch's tensors take 60.1 GiB; torch keeps 14.9 GiB"
        " besides, in pieces"
    ),
    IN_PIECES: (
        "asked 4.0 GiB where 1.0 GiB of 79.1 GiB were free; torch's tensors take 60.1 GiB; torch keeps 14.9 GiB"
        " besides, in pieces"
    ),
    IN_PIECES.replace("capacity", "capacty"): (  # as torch 2.1 has it
        "asked 4.0 GiB where 1.0 GiB of 79.1 GiB were free; torch's tensors take 60.1 GiB; torch keeps 14.9 GiB"
        " besides, in pieces"
    ),
    OLDER: (
        "asked 2.0 GiB where 1.0 GiB of 79.2 GiB were free; torch's tensors take 60.0 GiB; torch keeps 10.0 GiB"
        " besides, in pieces; other processes, and what torch does not count, have 8.2 GiB"
    ),
    OLDER.replace("GiB reserved in total by PyTorch", "GiB cached"): (
        "asked 2.0 GiB where 1.0 GiB of 79.2 GiB were free; torch's tensors take 60.0 GiB; torch keeps 10.0 GiB"
        " besides, in pieces; other processes, and what torch does not count, have 8.2 GiB"
    ),
    OLDER.replace("70.00 GiB", "77.50 GiB").replace("60.00 GiB", "77.50 GiB"): (
        "asked 2.0 GiB where 1.0 GiB of 79.2 GiB were free; torch's tensors take 77.5 GiB"
    ),
    "error: the run needs at least 85,899,345,921 bytes of device memory, and 85,899,345,920 bytes are available": (
        "80.0 GiB of device memory asked, 80.0 GiB there: 1 B too few"
    ),
    "error: exp_avg: 68,719,476,736 bytes of host memory asked, 21,632,086,016 available": (
        "64.0 GiB of host memory asked, 20.1 GiB there: 43.9 GiB too few"
    ),
    "error: the run needs at least 214,748,364,800 bytes of device memory, and 141,733,920,768 are available": (
        "200.0 GiB of device memory asked, 132.0 GiB there: 68.0 GiB too few"
    ),
    "error: the run needs at least 1,455 GiB of host memory, and 512.0 MiB are available": (
        "1,455 GiB of host memory asked, 512.0 MiB there: 1,454 GiB too few"
    ),
}


@pytest.mark.parametrize("line", NUMBERS)
def test_the_numbers_of_a_message_are_told(line: str) -> None:
    """Seen red: those of other processes left out, this one taken for another, and bytes read with their commas."""
    found = recognise([line])[0]
    assert found.numbers == NUMBERS[line]
    assert to_dict([found])["recognised"][0]["numbers"] == NUMBERS[line]
    (table,) = render([found])
    assert ["numbers" in str(cell) for cell in table.columns[0].cells].count(True) == 1


def test_a_line_without_numbers_has_none() -> None:
    (found,) = recognise(["AssertionError: Torch not compiled with CUDA enabled"])
    assert found.numbers == ""
    (table,) = render([found])
    assert not any("numbers" in str(cell) for cell in table.columns[0].cells)
