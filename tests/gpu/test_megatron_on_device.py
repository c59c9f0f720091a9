"""Megatron-Core on one CUDA device: hostward's step gives the same bits at every fraction, near to Megatron's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron_ranks import is_installed

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not is_installed(), reason="megatron-core is not installed"),
]

SIZES = {"num_layers": 4, "hidden_size": 1024, "ffn_hidden_size": 4096, "num_attention_heads": 8}
"""25 million weights, so that copies and steps take longer than it takes to issue them."""
PRECISE = {"use_precision_aware_optimizer": True, "overlap_cpu_optimizer_d2h_h2d": True}


@pytest.fixture(scope="module")
def megatron() -> Iterator[Any]:
    import megatron_cases

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    with megatron_cases.without_transformer_engine():
        yield megatron_cases
    megatron_cases.parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    RotaryEmbedding.forward.cache_clear()  # it keeps models and their optimizers, for the tests behind these


def trained(megatron: Any, fraction: float | None, use: dict[str, Any] | None = None, **how: Any) -> Any:
    """Return the bits of the weights, losses and norms of five steps of four microbatches."""
    import hostward.integrations.megatron as integration

    integration.use(**(use or {}))
    try:
        run = megatron.build("single", offload_fraction=fraction, model=SIZES, bucket_size=4_000_000, **how)
    finally:
        integration.stop_using()
    told = megatron.train(run, 5)
    for part in megatron.inner_optimizers(run):
        if fraction is not None:
            part.shared.optimizer.wait()
    torch.cuda.synchronize()
    return megatron.digest(run.chunks), told.losses, told.grad_norms


@pytest.mark.parametrize(
    "how",
    [{**PRECISE, "overlap": True}, PRECISE, {}, {"precision": "fp16"}, {"precision": "fp32", "distributed": False}],
    ids=["overlapped", "precision-aware", "main weights", "fp16", "FP32Optimizer"],
)
def test_bits_are_equal_at_every_fraction(megatron: Any, how: dict[str, Any]) -> None:
    expected = trained(megatron, 0.0, **how)
    assert trained(megatron, 0.5, **how) == expected
    for streamed in (0.0, 0.5, 1.0):
        assert trained(megatron, 1.0, {"streamed_fraction": streamed}, **how) == expected
    _, losses, norms = trained(megatron, None, **{k: v for k, v in how.items() if k not in PRECISE})
    np.testing.assert_allclose(expected[1], losses, rtol=1e-3)
    np.testing.assert_allclose(expected[2], norms, rtol=2e-2)


def test_norm_and_clipping_by_megatron_too(megatron: Any) -> None:
    how = {**PRECISE, "overlap": True}
    expected = trained(megatron, 0.0, {"clip": "megatron"}, **how)
    assert trained(megatron, 1.0, {"clip": "megatron"}, **how) == expected
    np.testing.assert_allclose(expected[1], trained(megatron, 0.0, **how)[1], rtol=1e-3)
