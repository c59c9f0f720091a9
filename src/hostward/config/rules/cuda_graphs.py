"""Rules on CUDA graphs, as data; see `hostward.config.rules.combinations`."""

from __future__ import annotations

from hostward.config.rules.table import DENSE, Kind, Rule, braces, captured, selective
from hostward.config.schema import Config

PERMANENT, UNTIL_BUILT = Kind.PERMANENT, Kind.UNTIL_BUILT
GRAPHS = "model.cuda_graph_impl"


def drawing_modules(config: Config) -> list[str]:
    """Entries of model.recompute_modules that may draw random numbers, whose generators a capture cannot read."""
    return sorted(set(config.model.recompute_modules) & {"core_attn", "mlp", "moe"})


GRAPH_RULES = (
    Rule(
        "graphs-of-layers",
        UNTIL_BUILT,
        (GRAPHS,),
        lambda c, _: c.model.cuda_graph_impl not in ("none", "full_iteration"),
        "model.cuda_graph_impl={model.cuda_graph_impl} captures parts of the model, forward and backward apart, and is "
        "not built",
        "set model.cuda_graph_impl=full_iteration, which captures them together, or none",
    ),
    Rule(
        "graphs-on-a-cpu",
        PERMANENT,
        (GRAPHS, "train.device"),
        lambda c, _: captured(c) and c.train.device == "cpu",
        "model.cuda_graph_impl=full_iteration with train.device=cpu, which has no CUDA graphs",
        "set model.cuda_graph_impl=none, or train.device=cuda",
    ),
    Rule(
        "graphs-of-experts",
        UNTIL_BUILT,
        (GRAPHS, "model.architecture"),
        lambda c, _: captured(c) and c.model.architecture not in DENSE,
        "model.cuda_graph_impl=full_iteration with model.architecture={model.architecture} is not built: how many "
        "tokens each expert gets may be asked by the host",
        "set model.cuda_graph_impl=none",
    ),
    Rule(
        "graphs-attention",
        PERMANENT,
        (GRAPHS, "model.attn_implementation"),
        lambda c, _: captured(c) and c.model.attn_implementation != "sdpa",
        "model.cuda_graph_impl=full_iteration with model.attn_implementation={model.attn_implementation}, whose mask "
        "comes from the host in every forward",
        "set model.attn_implementation=sdpa",
    ),
    Rule(
        "graphs-weights",
        UNTIL_BUILT,
        (GRAPHS, "model.cpu_offloading", "model.cpu_offloading_weights"),
        lambda c, _: captured(c) and c.model.cpu_offloading and c.model.cpu_offloading_weights,
        "model.cuda_graph_impl=full_iteration with model.cpu_offloading_weights=true is not built: weights that "
        "come and go have no fixed address",
        "set model.cpu_offloading_weights=false, or model.cuda_graph_impl=none",
    ),
    Rule(
        "graphs-host-memory",
        PERMANENT,
        (
            GRAPHS,
            "model.cpu_offloading",
            "model.cpu_offloading_num_layers",
            "model.cpu_offloading_activations",
            "model.cpu_offloading_retain_pinned_cpu_buffers",
        ),
        lambda c, _: (
            captured(c)
            and c.model.cpu_offloading
            and c.model.cpu_offloading_num_layers > 0
            and c.model.cpu_offloading_activations
            and not c.model.cpu_offloading_retain_pinned_cpu_buffers
        ),
        "model.cuda_graph_impl=full_iteration with activations whose host memory is given back between iterations: "
        "replays copy to fixed addresses",
        "set model.cpu_offloading_retain_pinned_cpu_buffers=true",
    ),
    Rule(
        "graphs-gradients",
        PERMANENT,
        (GRAPHS, "optimizer.gradients"),
        lambda c, _: captured(c) and c.optimizer.gradients == "host",
        "model.cuda_graph_impl=full_iteration with optimizer.gradients=host: gradients stay where the graph writes "
        "them, until the step",
        "set optimizer.gradients=device, or model.cuda_graph_impl=none",
    ),
    Rule(
        "graphs-recompute",
        UNTIL_BUILT,
        (GRAPHS, "model.recompute_granularity", "model.recompute_modules"),
        lambda c, _: captured(c) and selective(c) and bool(drawing_modules(c)),
        lambda c, _: (
            f"model.cuda_graph_impl=full_iteration with {braces(drawing_modules(c))} in model.recompute_modules: they"
            " may draw random numbers"
        ),
        "recompute norms and activations alone (layernorm, mlp_act), or whole layers",
        documented="model.cuda_graph_impl=full_iteration with {...} in model.recompute_modules: they may draw random"
        " numbers",
    ),
)
