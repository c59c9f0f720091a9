"""The options of a run as one of its ranks sees them.

Seen red: the option kept for a rank that is alone, and dropped for ranks that share matrices.
"""

from __future__ import annotations

import pytest

from hostward import recipes
from hostward.config.overrides import apply_overrides
from hostward.trainer.offload_options import accumulates_in_fp32, share_of


@pytest.mark.parametrize(
    ("data_ranks", "matrices", "kept"), [(1, 1, False), (2, 1, True), (1, 2, True)], ids=["one", "two", "shared"]
)
def test_gradients_stay_in_float32_where_ranks_reduce_them_so(data_ranks: int, matrices: int, kept: bool) -> None:
    words = ["ddp.grad_reduce_in_fp32=True", f"model.tensor_model_parallel_size={matrices}"]
    words += [f"train.global_batch_size={data_ranks}", "train.micro_batch_size=1"]
    config = apply_overrides(recipes.load("qwen3_moe_tiny_pretrain_config"), words)
    found = share_of(config, data_ranks)
    assert accumulates_in_fp32(found) == kept
    assert found.train.global_batch_size == 1
    assert config.ddp.grad_reduce_in_fp32
