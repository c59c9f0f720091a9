"""Compiles the kernels of this package with Triton for a GPU that is not there, and lays out their launches.

`native_launch` compares them with the compiled programs. Prints the kernels that passed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import GPUDriver

from hostward.kernels.cuda import adamw, norm
from hostward.kernels.cuda.launcher import Launch


class NoGpu(GPUDriver):
    """Loads nothing, and hands out a function all the same."""

    def __init__(self) -> None:
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda _: 0
        self.launcher_cls = lambda *_: "launcher"
        self.utils = SimpleNamespace(
            load_binary=lambda *_: ("module", 0xF00D, 0, 0, 1024),
            get_device_properties=lambda _: {"max_shared_mem": 227 * 1024},
        )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cuda

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    @staticmethod
    def is_active() -> bool:
        return True


def zeros(dtype: torch.dtype, n: int = 64) -> torch.Tensor:
    return torch.zeros(n, dtype=dtype)


def launches() -> list[tuple[str, Launch]]:
    i32, i64, f32, f64 = torch.int32, torch.int64, torch.float32, torch.float64
    table, blocks = zeros(i64, 10).view(2, 5), zeros(i32, 8).view(4, 2)
    state = zeros(f32), zeros(f32), zeros(torch.int16)
    found = []
    for length, error in ((1000, None), (2**40, zeros(i32, 1))):
        constants = zeros(f64, 5), zeros(f64), zeros(f64), length
        bound = adamw.bind(table, 2, blocks, (1, 1, 1), state, constants, zeros(f32, 1), zeros(i32, 1), error)
        found += list(zip(("step", "advance"), bound, strict=True))
    short = zeros(torch.bfloat16), zeros(torch.bfloat16), zeros(torch.int16)
    constants = zeros(f64, 5), zeros(f64), zeros(f64), 1000
    bound = adamw.bind(table, 2, blocks, (1, 1, 1), short, constants, zeros(f32, 1), zeros(i32, 1), None)
    found.append(("step-bf16", bound[0]))
    bound = adamw.bind(table, 2, blocks, (1, 1, 0), short, constants, zeros(f32, 1), zeros(i32, 1), None)
    found.append(("step-rounded", bound[0]))
    eighth = zeros(torch.uint8, 129), zeros(torch.uint8, 129), zeros(torch.int16)
    bound = adamw.bind(table, 2, blocks, (1, 1, 1), eighth, constants, zeros(f32, 1), zeros(i32, 1), None)
    found.append(("step-fp8", bound[0]))
    del found[2]  # its twin with the long table is the same program but for one width, as the second `advance` shows
    found.append(("partials", norm.bind_partials(zeros(i64, 6).view(2, 3), blocks, 1, zeros(i64), zeros(i32))[0]))
    found.append(("totals", norm.bind_totals(zeros(i64), zeros(i32), zeros(i32, 1), zeros(i64, 2))))
    outputs = zeros(f32, 1), zeros(i32, 1), zeros(f32, 1)
    for optional, limit in (((None, zeros(f32, 1)), 1.0), ((zeros(f32, 1), None), float("inf"))):
        found.append(("finish", norm.bind_finish(zeros(i64, 2), zeros(i32, 1), limit, optional, outputs)))
    return found


def main() -> None:
    triton.runtime.driver.set_active(NoGpu())
    torch.cuda.current_device = lambda: 0
    for name, launch in launches():
        made = launch.native()
        assert made.words[0] == launch._raw[0], name
        print(name)


if __name__ == "__main__":
    main()
