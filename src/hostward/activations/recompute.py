"""Recompute regions of layers in backward, so that they save only their inputs: layer norms, activations, modules.

A *region* replaces the `forward` of one module instance and wraps it in torch's non-reentrant checkpoint. Gradients
stay bitwise identical, inputs are saved like any other tensor (so that they can be offloaded), and a recomputation
stops once backward has all that it needs. Inside another checkpoint, or without gradients, a region does nothing.

Regions are selected by Megatron's names, or by paths within a layer ("self_attn", "mlp.experts", `*` included), which
are recomputed as a whole. layernorm: layer norms save only their input. mlp_act: gated MLPs save only the outputs of
gate and up projection. moe_act: grouped experts likewise, and the input of their second projection. mlp, moe: the whole
module is recomputed from its input.
"""

from __future__ import annotations

import difflib
import fnmatch
import logging
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.utils.checkpoint import checkpoint

from hostward.activations.module_filter import paths_of
from hostward.errors import ConfigError, ModelError
from hostward.model.autograd import inside_checkpoint
from hostward.model.fence import plain_type, unfenced
from hostward.model.layer_hooks import call
from hostward.model.parameters import local_of
from hostward.plan.decisions import ELEMENTWISE_MODULES

# Names of recomputed modules, Megatron's names or paths, are resolved to modules of a layer.


class Found(Enum):
    """Name the way in which a module is recomputed."""

    WHOLE = auto()
    """Recompute everything from the module's input."""
    NORM = auto()
    GATED = auto()
    """Recompute the activation from the outputs of gate and up projection."""
    EXPERTS = auto()
    """Recompute the activation from the output of the first grouped projection."""


_GATED = ("gate_proj", "up_proj", "down_proj", "act_fn")
_NORMS = ("*_layernorm", "*.[qk]_norm")

Modules = Mapping[str, torch.nn.Module]
Parts = dict[str, Found]


def _layernorm(modules: Modules) -> Parts:
    return {path: Found.NORM for pattern in _NORMS for path in fnmatch.filter(modules, pattern)}


def _mlp(modules: Modules) -> Parts:
    return {"mlp": Found.WHOLE} if "mlp" in modules and not hasattr(modules["mlp"], "experts") else {}


def _moe(modules: Modules) -> Parts:
    return {path: Found.WHOLE for path, module in modules.items() if hasattr(module, "experts")}


def _mlp_act(modules: Modules) -> Parts:
    return {path: Found.GATED for path, m in modules.items() if all(hasattr(m, name) for name in _GATED)}


def _moe_act(modules: Modules) -> Parts:
    found = {path: Found.EXPERTS for path, module in modules.items() if hasattr(module, "_apply_gate")}
    for path in found:
        implementation = getattr(getattr(modules[path], "config", None), "_experts_implementation", None)
        if implementation in (None, "eager"):
            raise ConfigError(
                "moe_act in recompute_modules is only supported with moe_grouped_gemm.",
                why=f"the experts of a {type(modules[path]).__name__} run one by one",
                fix="experts_implementation=grouped_mm, or recompute moe as a whole",
            )
    return found


MEGATRON_RECOMPUTE: Mapping[str, Callable[[Modules], Parts]] = {
    "layernorm": _layernorm,
    "mlp": _mlp,
    "mlp_act": _mlp_act,
    "moe": _moe,
    "moe_act": _moe_act,
}
"""Megatron's names for recompute_modules, and how to find the modules in a layer of transformers."""


def find_parts(layers: Sequence[torch.nn.Module], counts: Mapping[str, int]) -> list[Parts]:
    """Return by layer the recomputed modules, by path within the layer, and how each is recomputed.

    Modules inside of one that is recomputed as a whole are left out. `counts`: by name, the number of layers, from the
    first on.

    Raises:
        ConfigError: a name matches no module of any layer, or only modules inside of others.
        ModelError: mlp_act in a model without gated MLPs.
    """
    held = [{path: module for path, module in layer.named_modules() if path} for layer in layers]
    by_name = {
        name: [_named(modules, name) if i < count else {} for i, modules in enumerate(held)]
        for name, count in counts.items()
    }
    for name, by_layer in by_name.items():
        if not any(by_layer):
            _refuse(name, held)
    found: list[Parts] = []
    for i in range(len(held)):
        parts: Parts = {}
        for by_layer in by_name.values():
            # Recomputing the whole module takes precedence over a part of it.
            parts |= {path: how for path, how in by_layer[i].items() if parts.get(path) is not Found.WHOLE}
        whole = [path for path, how in parts.items() if how is Found.WHOLE]
        found.append(
            {path: how for path, how in parts.items() if not any(path.startswith(f"{outer}.") for outer in whole)}
        )
    for name, by_layer in by_name.items():
        if not any(found[i].get(path) is how for i, parts in enumerate(by_layer) for path, how in parts.items()):
            raise ConfigError(
                f"recompute={tuple(counts)!r}: {name} is inside of what is recomputed as a whole",
                fix=f"leave {name} out, or the other",
            )
    return found


def _named(modules: Modules, name: str) -> Parts:
    if name == "core_attn":
        raise ConfigError(
            "recompute of core_attn",
            why="in transformers attention is a function that a module calls between its projections, not a module of "
            "its own; sdpa and flash attention save no probabilities that a recomputation would spare",
            fix="attn_implementation=sdpa, or 'self_attn' for attention with its projections",
        )
    known = MEGATRON_RECOMPUTE.get(name)
    if known is not None:
        return known(modules)
    return dict.fromkeys(fnmatch.filter(modules, name), Found.WHOLE)


def _refuse(name: str, held: Sequence[Modules]) -> None:
    paths = sorted({path for modules in held for path in modules})
    mlps = sorted({type(modules[path]).__name__ for modules in held for path in modules if path == "mlp"})
    if name == "mlp_act" and mlps:
        raise ModelError(
            f"mlp_act cannot be recomputed in a {mlps[0]}",
            why=f"it has not all of {', '.join(_GATED)}",
            fix="moe_act for grouped experts, or the module as a whole, by its path within the layer",
        )
    known = sorted({*paths, *MEGATRON_RECOMPUTE} - {name})
    if name == "mlp" and any(_moe(modules) for modules in held):
        known = ["moe"]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    raise ConfigError(
        f"no layer has a module {name!r} to recompute",
        why=f"paths within a layer are {', '.join(paths[:8])}{', ...' if len(paths) > 8 else ''}",
        fix=f"did you mean {', '.join(near)}?" if near else f"names are {', '.join(MEGATRON_RECOMPUTE)}, and paths",
    )


log = logging.getLogger("hostward")

_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")


class Region:
    """Replace the method `attribute` of a module instance by one that is recomputed in backward.

    A copy or pickle of the module has the plain method.
    """

    def __init__(self, module: torch.nn.Module, attribute: str = "forward") -> None:
        """Raises ModelError if the method was replaced on the instance by other code."""
        there = module.__dict__.get(attribute)
        if isinstance(there, Region):
            raise ModelError(
                f"a {type(module).__name__} is recomputed already", fix="detach() the attachment that does so first"
            )
        if there is not None and getattr(there, "__func__", None) is not getattr(type(module), attribute):
            raise ModelError(
                f"the {attribute} of a {type(module).__name__} has been replaced on the instance",
                why="recomputation has to replace the same method",
                fix="attach() first, or undo the replacement (kernels and device maps do such)",
            )
        self._module, self._attribute = module, attribute
        self._before = there
        self._on = True
        module.__dict__[attribute] = self

    def __reduce__(self) -> tuple[Any, ...]:
        # While a module is copied, the copy has no attributes of its own yet: getattr finds the method of the class.
        return getattr, (self._module, self._attribute)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _run(self, args, kwargs)

    def undo(self) -> None:
        """Restore the module's own method; calls that have already saved their inputs are still recomputed."""
        self._on = False
        attributes = self._module.__dict__
        if attributes.get(self._attribute) is not self:
            log.warning(
                "the %s of a %s has been wrapped since attach(); the wrapper stays, around what does nothing now",
                self._attribute, type(self._module).__name__,
            )  # fmt: skip
        elif self._before is None:
            del attributes[self._attribute]
        else:
            attributes[self._attribute] = self._before

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        plain = getattr(type(self._module), self._attribute).__get__(self._module)
        return self._again(plain, args, kwargs) if self._useful() else plain(*args, **kwargs)

    def draws(self) -> bool:
        """Return whether the region may draw random numbers, so that the generators' state is saved with it."""
        return True

    def owners(self) -> Sequence[object]:
        """Return the modules whose weights the region reads."""
        return (self._module,)

    def _useful(self) -> bool:
        if not self._on or not torch.is_grad_enabled():
            return False
        return torch._C._current_graph_task_id() == -1 and not inside_checkpoint()

    def _again(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if kwargs.get("past_key_values") is not None:
            raise ModelError(
                f"a cache of keys and values in a {type(self._module).__name__} that is recomputed",
                why="the recomputation would write to it once more",
                fix="use_cache=False",
            )
        draws = self.draws()
        if draws and _capturing([*args, *kwargs.values()]):
            raise ModelError(
                f"a {type(self._module).__name__} that is recomputed inside the capture of a CUDA graph",
                why="it may draw random numbers, and the generators' state of a capture is not that of a replay",
                fix="recompute layer norms and activations only (layernorm, mlp_act, moe_act), or nothing",
            )
        # A checkpoint saves tensors that are passed by position; those passed by keyword it only holds.
        names = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor)]
        rest = {name: value for name, value in kwargs.items() if name not in names}
        call = _Call(function, self.owners(), len(args), names, rest)
        inputs = (*args, *(kwargs[name] for name in names))
        return checkpoint(call, *inputs, use_reentrant=False, preserve_rng_state=draws)


class Norm(Region):
    """Recompute a layer norm."""

    def draws(self) -> bool:
        kind = type(self._module)
        return not kind.__name__.endswith("Norm") or next(self._module.children(), None) is not None


class ExpertGate(Region):
    """Recompute the activation and product of transformers' experts, between their two grouped projections."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module, "_apply_gate")

    def draws(self) -> bool:
        return _draws(self._module.act_fn)

    def owners(self) -> Sequence[object]:
        return (self._module.act_fn,)


class GatedMlp(Region):
    """Recompute `down_proj(act_fn(gate_proj(x)) * up_proj(x))` from the outputs of the first two projections.

    The down projection belongs to the region so that its input is not saved; the recomputation stops before it.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        require_gated(module)
        super().__init__(module)

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        mlp: Any = self._module
        if not self._useful() or len(args) != 1 or kwargs:
            return type(mlp).forward(mlp, *args, **kwargs)
        gate, up = mlp.gate_proj(args[0]), mlp.up_proj(args[0])
        return self._again(_Tail(mlp), (gate, up), {})

    def draws(self) -> bool:
        mlp: Any = self._module
        return type(mlp.down_proj) is not torch.nn.Linear or _draws(mlp.act_fn)

    def owners(self) -> Sequence[object]:
        return (self._module.down_proj, self._module.act_fn)


class _Tail:
    def __init__(self, mlp: Any) -> None:
        self._mlp = mlp

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        mlp = self._mlp
        out: torch.Tensor = mlp.down_proj(mlp.act_fn(gate) * up)
        return out


def _capturing(inputs: Sequence[object]) -> bool:
    """Return whether a CUDA graph is being captured on the stream that works on `inputs`."""
    on_device = any(isinstance(x, torch.Tensor) and x.is_cuda for x in inputs)
    return on_device and torch.cuda.is_current_stream_capturing()


class _Call:
    """Run a region in forward and again in backward, and raise if its weights have changed in between.

    It holds the weights of forward, so that no other one is taken for one of them.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        owners: Sequence[object],
        positional: int,
        names: Sequence[str],
        rest: Mapping[str, Any],
    ) -> None:
        self._function, self._owners = function, owners
        self._positional, self._names, self._rest = positional, names, rest
        self._weights = self._present()
        self._memory = _memory_of(self._weights)
        self._versions = [weight._version for weight in self._weights]

    def _present(self) -> list[torch.nn.Parameter]:
        modules = [owner for owner in self._owners if isinstance(owner, torch.nn.Module)]
        return [weight for module in modules for weight in module.parameters()]

    def __call__(self, *inputs: Any) -> Any:
        weights = self._present()
        if list(map(id, weights)) != list(map(id, self._weights)) or _memory_of(weights) != self._memory:
            raise ModelError(
                "a weight of a module that is recomputed was replaced between forward and backward",
                why="recomputed tensors would have other values than in forward",
                fix="leave recompute= out where forward runs with other weights (functional_call), or run backward "
                "before they are replaced",
            )
        if [weight._version for weight in weights] != self._versions:
            raise ModelError(
                "a weight was modified by an in-place operation between forward and backward",
                why="recomputed tensors would have other values than in forward",
                fix="step after backward",
            )
        named = dict(zip(self._names, inputs[self._positional :], strict=True))
        return self._function(*inputs[: self._positional], **named, **self._rest)


@unfenced
def _memory_of(weights: Sequence[torch.Tensor]) -> list[int]:
    """Return what identifies each weight's memory: its storage object, which stays where weights are offloaded."""
    parts = map(local_of, weights)
    plain = torch.Tensor, torch.nn.Parameter
    return [part.untyped_storage()._cdata if plain_type(part) in plain else 0 for part in parts]


@_disable_dynamo
def _run(region: Region, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a region outside of compiled code: a compiled caller breaks its graph here."""
    return region.run(args, kwargs)


def _draws(activation: object) -> bool:
    """Return whether an activation may draw random numbers; of the known ones only RReLU does."""
    return type(activation).__module__ not in _ACTIVATIONS or isinstance(activation, torch.nn.RReLU)


_REGIONS: Mapping[Found, Callable[[torch.nn.Module], Region]] = {
    Found.WHOLE: Region,
    Found.NORM: Norm,
    Found.GATED: GatedMlp,
    Found.EXPERTS: ExpertGate,
}


class Regions:
    """Install all regions of a model.

    Args:
        layers: name and module, in order of use.
        how: names, or names with the number of layers, from the first on (None: all).

    Raises:
        ConfigError: unknown names, names inside of others, or more layers than the model has.
        ModelError: a module that cannot be recomputed as its name says; compiled layers.
    """

    def __init__(
        self, layers: Sequence[tuple[str, torch.nn.Module]], how: Sequence[str] | Mapping[str, int | None]
    ) -> None:
        counts = _counts(how, layers)
        most = max(counts.values())
        self._asked = tuple(counts)
        chosen = layers[:most]
        parts = find_parts([layer for _, layer in chosen], counts)
        self._whole = [[path for path, kind in found.items() if kind is Found.WHOLE] for found in parts]
        # A checkpoint imports the compiler. Within a forward that would keep the forward's frames alive in tracebacks.
        call(None, "pre_forward")
        self._regions: dict[torch.nn.Module, Region] = {}
        self.names: list[str] = []
        """Module paths."""
        try:
            for (name, layer), found in zip(chosen, parts, strict=True):
                for path, kind in found.items():
                    module = layer.get_submodule(path)
                    if module not in self._regions:
                        self._regions[module] = _REGIONS[kind](module)
                        self.names.append(f"{name}.{path}")
        except ModelError:
            self.undo()
            raise

    def warn_of_idle(self, layers: Sequence[tuple[str, torch.nn.Module]]) -> None:
        """Warn if the model checkpoints whole layers itself: recomputing parts of them has no effect."""
        chosen = [layer for _, layer in layers[: len(self._whole)]]
        idle = [layer for layer in chosen if layer.training and getattr(layer, "gradient_checkpointing", False)]
        if idle:
            log.warning(
                "recompute=%s has no effect in %d of %d layers, which are checkpointed as a whole",
                self._asked, len(idle), len(chosen),
            )  # fmt: skip

    def undo(self) -> None:
        """Restore the methods of all modules."""
        for region in self._regions.values():
            region.undo()
        self._regions.clear()

    def require_outside(self, layers: Sequence[torch.nn.Module], names: Sequence[str]) -> None:
        """Raise ConfigError for a name of offloaded modules that matches only modules inside of recomputed ones."""
        for name in names:
            inside = []
            for i, layer in enumerate(layers):
                outers = self._whole[i] if i < len(self._whole) else ()
                for path in paths_of(layer, [name]):
                    inside.append(any(path.startswith(f"{outer}.") for outer in outers))
            if inside and all(inside):
                raise ConfigError(
                    f"Cannot offload {name} while recomputing the entire module that holds it.",
                    why="a recomputed module saves nothing in forward but its input",
                    fix=f"leave {name} out of the offloaded modules, or recompute less",
                )


def elementwise_in(layers: Sequence[tuple[str, torch.nn.Module]]) -> list[str]:
    """Return those of ELEMENTWISE_MODULES that can be recomputed in these layers; planning and `attach` share this."""
    found = []
    for name in ELEMENTWISE_MODULES:
        try:
            Regions(layers, (name,)).undo()
        except (ConfigError, ModelError):
            continue  # the model has no such modules, or they compute something else
        found.append(name)
    return found


def _counts(how: object, layers: Sequence[tuple[str, torch.nn.Module]]) -> dict[str, int]:
    """Return by name the number of layers in which it is recomputed. Raises as `Regions` does."""
    if isinstance(how, str):
        raise ConfigError(f"recompute={how!r} is a string", fix=f"recompute=({how!r},)")
    if not isinstance(how, (Sequence, Mapping)) or not all(isinstance(name, str) for name in how):
        raise ConfigError(f"recompute={how!r} names no modules", fix='recompute=("layernorm", "mlp_act")')
    if not how:
        raise ConfigError("recompute names no modules", fix='recompute=("layernorm", "mlp_act")')
    counts: dict[str, int] = {}
    for name in how:
        count = how[name] if isinstance(how, Mapping) else None
        count = len(layers) if count is None else count
        if not isinstance(count, int) or isinstance(count, bool) or not 0 < count <= len(layers):
            raise ConfigError(
                f"recompute of {name} in {count!r} of {len(layers)} layers", fix=f"a number between 1 and {len(layers)}"
            )
        counts[name] = count
    require_not_compiled(layers[: max(counts.values())])
    return counts


def require_not_compiled(layers: Sequence[tuple[str, torch.nn.Module]]) -> None:
    """Raise ModelError for compiled layers."""
    for name, layer in layers:
        for module in layer.modules():
            if module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule":
                raise ModelError(
                    f"layer {name} is compiled, and parts of it are to be recomputed",
                    why="the compiler itself chooses what it saves and what it recomputes",
                    fix="leave recompute= out, or do not compile the layers",
                )


_WIDTH = 8


def require_gated(mlp: Any) -> None:
    """Check on small projections that a module's forward is `down_proj(act_fn(gate_proj(x)) * up_proj(x))`.

    Output and gradients have to be bitwise identical.

    Raises:
        ModelError: they differ, or forward raises; the message names the class.
    """
    weight = next((p for p in mlp.parameters() if p.is_floating_point() and p.device.type != "meta"), None)
    device = torch.device("cpu") if weight is None else weight.device
    dtype = torch.float32 if weight is None or weight.element_size() == 1 else weight.dtype
    kind: Any = type(mlp)
    own = kind.__new__(kind)
    own.__dict__.update(mlp.__dict__)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.inference_mode(False):
        torch.manual_seed(0)
        parts = {
            name: torch.nn.Linear(_WIDTH, _WIDTH, bias=False, device=device, dtype=dtype)
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        own.__dict__["_modules"] = {**mlp._modules, **parts}
        x = torch.randn(1, _WIDTH, _WIDTH, device=device, dtype=dtype)
        try:
            same = _equal(_tried(kind.forward, own, x), _tried(_gated_forward, own, x))
            why = "its forward is not bitwise identical to down_proj(act_fn(gate_proj(x)) * up_proj(x))"

        except (AttributeError, TypeError, ValueError, RuntimeError, LookupError) as error:
            same, why = False, f"its forward, tried with small projections, raised {type(error).__name__}: {error}"
    if not same:
        raise ModelError(
            f"mlp_act cannot be recomputed in a {type(mlp).__name__}",
            why=why,
            fix="recompute the module as a whole, by its path within the layer",
        )


def _gated_forward(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    return _Tail(mlp)(gate, up)


def _tried(forward: Callable[..., Any], mlp: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        out = forward(mlp, x)
        parts = [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        weights = [weight for part in parts for weight in part.parameters()]  # type: ignore[union-attr]
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), [x, *weights])]


def _equal(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
