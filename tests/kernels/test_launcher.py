"""Launches as the driver takes them: parameters by signature, and every reason to refuse a kernel.

The compiled kernels are named fakes here. Where Triton is installed, the real kernels of this package are compiled for
a GPU that need not be there, and their parameters compared with the compiled programs.

Seen red: None passed as a parameter, an integer of the wrong width, scratch pointers left out, each check left out.
"""

from __future__ import annotations

import importlib.util
import struct
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_driver import FakeDriver, streams

from hostward.errors import DeviceError
from hostward.kernels.cuda.launcher import KernelLaunch, native_launch
from hostward.runtime.cuda.commands import Command, CommandList, Verb

SIGNATURE = {"a": "*fp32", "n": "i32", "none": "constexpr", "m": "i64", "x": "fp32", "y": "fp64", "BLOCK": "constexpr"}
ARGUMENTS = (0x7F00_0000_0010, -3, None, 2**40, 0.1, 0.1, 1024)
PTX = """
.visible .entry fake_kernel(
	.param .u64 .ptr .global .align 1 fake_kernel_param_0,
	.param .u32 fake_kernel_param_1,
	.param .u64 fake_kernel_param_2,
	.param .f32 fake_kernel_param_3,
	.param .f64 fake_kernel_param_4,
	.param .u64 .ptr .global .align 1 fake_kernel_param_5,
	.param .u64 .ptr .global .align 1 fake_kernel_param_6
)
.reqntid 128
{
"""


@dataclass
class FakeCompiled:
    """Stands for Triton's CompiledKernel."""

    signature: dict[str, Any] = field(default_factory=lambda: dict(SIGNATURE))
    text: str = PTX
    function: object = 0xF00D
    name: str = "fake_kernel"
    run: object = "loads the kernel"
    changed: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.src = SimpleNamespace(signature=self.signature)
        self.asm = {"ptx": self.text}
        plain = dict.fromkeys(("global_scratch_size", "profile_scratch_size"), 0)
        plain |= {"launch_cooperative_grid": False, "launch_pdl": False, "num_ctas": 1, "num_warps": 4, "shared": 2048}
        self.metadata = SimpleNamespace(**{**plain, **self.changed})


def launch(compiled: FakeCompiled, arguments: tuple[Any, ...] = ARGUMENTS) -> KernelLaunch:
    return native_launch(compiled, 7, arguments)


def test_parameters_are_those_of_the_signature_and_two_null_pointers() -> None:
    made, fake = launch(FakeCompiled()), FakeDriver()
    found = bytes(made.words.cast("B"))
    assert found == b"".join(
        struct.pack(form, value).ljust(8, b"\0")
        for form, value in (
            ("Q", 0x7F00_0000_0010),
            ("i", -3),
            ("q", 2**40),
            ("f", 0.1),
            ("d", 0.1),
            ("Q", 0),
            ("Q", 0),
        )
    )
    CommandList([Command(Verb.KERNEL, 1, made.address)], fake.table()).issue(streams())
    assert fake.calls == [("kernel", 0, 0xF00D, (7, 1, 1, 128, 1, 1), 2048, 0x7F00_0000_0010)]


@pytest.mark.parametrize(
    "changed",
    [
        {"num_ctas": 2},
        {"global_scratch_size": 128},
        {"profile_scratch_size": 1},
        {"launch_cooperative_grid": True},
        {"launch_pdl": True},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_kernels_that_need_more_than_a_plain_launch_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(DeviceError, match=f"cannot be launched plainly: .*{next(iter(changed))}"):
        launch(FakeCompiled(changed=changed))


@pytest.mark.parametrize("function", [None, 0, "handle"])
def test_a_kernel_that_has_not_been_loaded_is_refused(function: object) -> None:
    with pytest.raises(DeviceError, match="its function is"):
        launch(FakeCompiled(function=function))


@pytest.mark.parametrize("missing", ["metadata", "src", "function", "run", "asm"])
def test_a_triton_that_lacks_what_is_relied_on_is_told(missing: str) -> None:
    compiled = SimpleNamespace(**{k: v for k, v in vars(FakeCompiled()).items() if k != missing})
    with pytest.raises(DeviceError, match=rf"(?s)has no .*{missing}.*use such a Triton"):
        native_launch(compiled, 7, ARGUMENTS)


def test_a_program_whose_text_is_missing_cannot_be_checked() -> None:
    compiled = FakeCompiled()
    compiled.asm.clear()
    with pytest.raises(DeviceError, match=r"(?s)has no 'ptx'.*TRITON_STORE_BINARY_ONLY"):
        launch(compiled)


@pytest.mark.parametrize(
    ("kind", "value"),
    [("i32", 2**31), ("i32", None), ("*i64", None), ("*i64", -1), ("tensordesc<fp32[1]>", 5), ("u1", 1), ("fp32", "x")],
)
def test_a_value_that_the_kernel_was_not_compiled_for_is_refused(kind: str, value: Any) -> None:
    compiled = FakeCompiled(signature={**SIGNATURE, "n": kind})
    with pytest.raises(DeviceError, match=r"argument 1 of kernel fake_kernel, .* cannot be passed as"):
        launch(compiled, (ARGUMENTS[0], value, *ARGUMENTS[2:]))
    with pytest.raises(DeviceError, match="takes 7 arguments, not 6"):
        launch(compiled, ARGUMENTS[1:])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (PTX.replace(".u32", ".u64"), r"\[8, 8, 8, 4, 8, 8, 8\] bytes and 128"),
        (PTX.replace(".param .f64 fake_kernel_param_4,", ""), r"\[8, 4, 8, 4, 8, 8\] bytes and 128"),
        (PTX.replace(".u64 fake_kernel_param_2", ".align 64 .b8 fake_kernel_param_2[128]"), r"\[8, 4, 0, 4, 8, 8, 8\]"),
        (PTX.replace(".f32 fake_kernel_param_3", ".b32 fake_kernel_param_3[1]"), r"\[8, 4, 8, 0, 8, 8, 8\]"),
        (PTX.replace("128", "256"), r"and 256 threads, not \[8, 4, 8, 4, 8, 8, 8\] and 128"),
        (PTX.replace(".reqntid 128", ""), r"and 0 threads"),
        (PTX.replace(".entry fake_kernel", ".entry other"), r"parameters of \[\] bytes"),
    ],
)
def test_a_program_with_other_parameters_is_refused(text: str, found: str) -> None:
    with pytest.raises(DeviceError, match=found):
        launch(FakeCompiled(text=text))


def test_older_programs_say_how_many_threads_in_another_word() -> None:
    launch(FakeCompiled(text=PTX.replace(".reqntid 128", ".maxntid 128, 1, 1")))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which CUDA builds of torch bring")
def test_every_kernel_of_this_package_has_the_parameters_that_are_passed() -> None:
    """In a process of its own, where Triton believes that there is a GPU."""
    script = Path(__file__).with_name("compile_kernels.py")
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert result.stdout.split() == [
        "step",
        "advance",
        "advance",
        "step-bf16",
        "step-rounded",
        "step-fp8",
        "partials",
        "totals",
        "finish",
        "finish",
    ]
