"""A model of several buckets with awkward parameters, gradients from a seed, and the whole step in numpy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import hostward
from hostward.kernels import reference
from hostward.kernels.cpu.adamw import bias_tables
from hostward.optim.bucket_state import same_bits
from hostward.runtime.backend import Lane
from hostward.runtime.simulated.backend import Order, SimulatedBackend

FRACTIONS = (0.0, 0.25, 0.5, 0.9, 1.0)
MIXED: Mapping[str, float] = {"offload_fraction": 0.5, "streamed_fraction": 0.5}
"""All three placements in `Model`: one bucket on the device, then three streamed and two host ones in turn."""
MIXES: Mapping[str, Mapping[str, float]] = {
    "half": {"offload_fraction": 0.5},
    "host": {"offload_fraction": 1.0},
    "streamed": {"offload_fraction": 1.0, "streamed_fraction": 1.0},
    "half streamed": {"offload_fraction": 0.5, "streamed_fraction": 1.0},
    "both": {"offload_fraction": 1.0, "streamed_fraction": 0.8},
    "mixed": MIXED,
}
"""Options that take something off the device."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LATE_SUBSETS = [frozenset(lane for i, lane in enumerate(Lane) if mask >> i & 1) for mask in range(1 << len(Lane))]
BETAS = (0.9, 0.95)
EPS = 1e-8
LR = 1e-2

SHAPES: Mapping[str, tuple[int, ...]] = {
    "embed.weight": (300, 256),  # above one bucket: split at 65,536
    "layers.0.weight": (129, 127),
    "layers.0.bias": (127,),
    "layers.0.scale": (),
    "layers.1.weight": (64, 130),
    "layers.1.expert": (33, 65),
    "layers.1.empty": (0, 7),
    "layers.1.bias": (3,),
    "layers.2.weight": (4096,),
    "layers.2.after": (4097,),
    "head.weight": (90, 100),
}
NEVER = "layers.1.expert"
"""In the middle of a bucket: the parameter that most tests leave without a gradient."""


class Model(torch.nn.Module):
    """Parameters of `SHAPES` under their dotted names; no forward."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            value = torch.randn(shape, generator=generator).to(dtype)
            *path, leaf = name.split(".")
            owner: torch.nn.Module = self
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, torch.nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(leaf, torch.nn.Parameter(value))


def adamw(params: object, **options: Any) -> hostward.AdamW:
    """hostward.AdamW with the defaults of these tests, on a simulated backend with one thread that runs as issued."""
    options = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": 0.1, **options}
    options.setdefault("backend", SimulatedBackend(order=Order(eager=True), threads=1))
    return hostward.AdamW(params, **options)


def backend(seed: int | None = None, late: Iterable[Lane] = (), threads: int = 1) -> SimulatedBackend:
    return SimulatedBackend(order=Order(seed=seed, late=frozenset(late)), threads=threads)


def set_gradients(model: torch.nn.Module, step: int, *, skip: Iterable[str] = (), factor: float = 1.0) -> None:
    """Random gradients of many magnitudes, a function of the name and the step alone; None for names in `skip`."""
    without = set(skip)
    for name, parameter in model.named_parameters():
        dtype = parameter.grad_dtype or parameter.dtype
        seed = sum(name.encode()) * 1000 + step
        generator = torch.Generator().manual_seed(seed)
        value = torch.randn(parameter.shape, generator=generator)
        value *= factor * torch.exp2(torch.randint(-8, 3, parameter.shape, generator=generator))
        parameter.grad = None if name in without else value.to(dtype)


def mlp(dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Sequential:
    """A network with a forward: three Linears over 32 features."""
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(32, 200), torch.nn.Tanh(), torch.nn.Linear(200, 400), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(400, 32)).to(dtype)


def mlp_loss(model: torch.nn.Module, step: int) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step)).to(dtype)
    return (model(x).float() - x.float()).square().mean()


def snapshot(model: torch.nn.Module, optimizer: hostward.AdamW) -> dict[str, torch.Tensor]:
    """Copies of all weights and all state, by "role name"."""
    optimizer.wait()
    found = {f"weight {name}": p.detach().clone() for name, p in model.named_parameters()}
    for name, entry in optimizer.state_dict()["state"].items():
        found |= {f"{role} {name}": value for role, value in entry.items()}
    return found


def assert_equal(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> None:
    """All entries have the same bits."""
    assert a.keys() == b.keys()
    assert [name for name in a if not same_bits(a[name], b[name])] == []


def differing(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> set[str]:
    assert a.keys() == b.keys()
    return {name for name in a if not same_bits(a[name], b[name])}


def to_numpy(tensor: torch.Tensor) -> Any:
    """A flat numpy copy; bf16 as its bits in uint16."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.dtype is torch.bfloat16:
        return flat.view(torch.int16).numpy().view(np.uint16).copy()
    return flat.numpy().copy()


FP32S = (torch.float32,) * 3
NUMPY = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.uint8: np.uint8}


@dataclass
class NumpyOptimizer:
    """The whole step of docs/exactness.md over named parameters, with hostward.kernels.reference for the arithmetic."""

    dtypes: dict[str, torch.dtype]
    shapes: dict[str, torch.Size]
    master: dict[str, Any]
    exp_avg: dict[str, Any]
    exp_avg_sq: dict[str, Any]
    count: dict[str, int]
    tables: dict[tuple[float, float], Any] = field(default_factory=dict)
    norm: float = 0.0

    @classmethod
    def over(cls, named: Iterable[tuple[str, torch.Tensor]], form: tuple[torch.dtype, ...] = ()) -> NumpyOptimizer:
        """Begin with these weights; `form`: dtypes of exp_avg, exp_avg_sq and main_param, fp32 where it is shorter."""
        named = list(named)
        *moments, main = (NUMPY[d] for d in (*form, *FP32S)[:3])
        given = {name: to_numpy(p) for name, p in named}
        master = {n: v if main == v.dtype == np.uint16 else reference.float_of(v) for n, v in given.items()}
        return cls(
            {name: p.dtype for name, p in named},
            {name: p.shape for name, p in named},
            master,
            *({name: _zeros(p.shape, dtype) for name, p in named} for dtype in moments),
            {name: 0 for name, _ in named},
        )

    def step(
        self,
        gradients: Mapping[str, torch.Tensor | None],
        *,
        max_norm: float | None = None,
        inv_scale: float = 1.0,
        lr: float = LR,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = BETAS,
        eps: float = EPS,
    ) -> None:
        present = {name: to_numpy(g) for name, g in gradients.items() if g is not None and g.numel()}
        partials = [reference.norm_partials(g) for g in present.values()]
        norm, finite = reference.norm_from_partials(*(np.concatenate(column) for column in zip(*partials, strict=True)))
        self.norm = float(np.float32(norm) * np.float32(inv_scale))
        if not finite:
            return
        scale = reference.clip_scale(norm, max_norm, inv_scale)
        hyper = reference.Hyper(lr, weight_decay, *betas, eps)
        tables = self.tables.setdefault(betas, bias_tables(*betas, 64))
        for name, gradient in present.items():
            self.count[name] += 1
            self.master[name], self.exp_avg[name], self.exp_avg_sq[name] = reference.adamw(
                self.master[name],
                self.exp_avg[name],
                self.exp_avg_sq[name],
                gradient,
                self.count[name],
                hyper,
                tables,
                float(scale),
            )

    def snapshot(self) -> dict[str, torch.Tensor]:
        """In the form of `snapshot` above."""
        weights, state = {}, {}
        for name, dtype in self.dtypes.items():
            shape = self.shapes[name]
            weights[f"weight {name}"] = torch.from_numpy(_weight(self.master[name], dtype)).view(dtype).view(shape)
            state[f"step {name}"] = torch.tensor(self.count[name])
            state[f"exp_avg {name}"] = _moment(self.exp_avg[name], shape, signed=True)
            state[f"exp_avg_sq {name}"] = _moment(self.exp_avg_sq[name], shape, signed=False)
            if dtype is not torch.float32 and self.master[name].dtype == np.float32:
                state[f"master {name}"] = torch.from_numpy(self.master[name]).view(shape)
        return weights | state


def _zeros(shape: torch.Size, dtype: Any) -> Any:
    """A moment; that of a vector is bf16 where those of matrices are FP8."""
    if dtype is not np.uint8:
        return np.zeros(shape.numel(), dtype)
    return np.zeros(-(-shape.numel() // 128) * 129, dtype) if len(shape) > 1 else np.zeros(shape.numel(), np.uint16)


def _moment(values: Any, shape: torch.Size, *, signed: bool) -> torch.Tensor:
    if values.dtype == np.uint8:
        values = reference.bf16_bits(reference.float_of_fp8(values, signed=signed)[: shape.numel()])
    if values.dtype == np.uint16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16).view(shape)
    return torch.from_numpy(values).view(shape)


def _weight(master: Any, dtype: torch.dtype) -> Any:
    if master.dtype == np.uint16:
        return master.view(np.int16)
    if dtype is torch.bfloat16:
        return reference.bf16_bits(master).view(np.int16)
    return reference.fp16_weight(master) if dtype is torch.float16 else master
