"""`hostward verify` on several ranks: one verdict, which names the rank whose bits differ. Two ranks, and four where a
layout needs them.

Seen red: a verdict of the first rank alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from train_cases import BATCH, LLAMA, MOE, QWEN3, SIZES, SMALL
from world import World, commands, torchrun

BF16 = "model.params_dtype=bf16"
STAGES_IN_FP16 = ("model.pipeline_model_parallel_size=2", "model.params_dtype=fp16")
TIED = (BF16, "model.pipeline_model_parallel_size=2", "model.share_embeddings_and_output_weights=True")
UNEVEN = ("model.vocab_size=4099", "model.ffn_hidden_size=97")


def verdicts(world: World, *words: str, **options: Any) -> Any:
    """The one that all ranks have come to, with two microbatches on each."""
    batch = [BATCH] if world.size == 2 else []
    first, *others = world.run("verify_cases.verdict", words=[*batch, *words], **options)
    assert all(other == first for other in others) or isinstance(first, str)
    return first


@pytest.mark.parametrize(
    ("ranks", "recipe", "words", "placements"),
    [
        ("pair", QWEN3, (BF16, *UNEVEN), ("mixed",)),
        ("pair", MOE, (BF16, "model.expert_model_parallel_size=2"), ("streamed",)),
        ("pair", LLAMA, ("model.tensor_model_parallel_size=2",), ("host",)),
        ("pair", QWEN3, ("model.pipeline_model_parallel_size=2",), ("host",)),
        ("world", LLAMA, ("model.pipeline_model_parallel_size=2",), ("host",)),
        ("pair", MOE, ("ddp.use_distributed_optimizer=False",), ("streamed",)),
    ],
    ids=["uneven", "experts", "matrices", "stages", "tied stages that are divided", "copies"],
)
def test_every_layout_is_verified(
    request: pytest.FixtureRequest, ranks: str, recipe: str, words: tuple[str, ...], placements: tuple[str, ...]
) -> None:
    world: World = request.getfixturevalue(ranks)
    found = verdicts(world, *words, recipe=recipe, placements=placements)
    assert found["passed"], found["sentence"]
    assert found["ranks"] == world.size
    assert found["sentence"].startswith(f"PASS: identical in every bit over 2 iterations on {world.size} ranks, ")
    assert [c["placed_fraction"] for c in found["comparisons"]] == [1.0] * len(placements)
    for claim in found["comparisons"][0]["claims"]:
        assert claim["detail"].startswith("rank 0 on ")
        assert claim["detail"].endswith(f"; held on {world.size} ranks")
        assert claim["broken_on"] == ()


def test_a_bit_that_differs_on_one_rank_fails_on_all_and_names_it(world: World) -> None:
    """Among four, of which three are right."""
    wrong = 2
    found = verdicts(world, BF16, BATCH, wrong=wrong)
    assert not found["passed"]
    assert f", on rank {wrong} on " in found["sentence"]
    assert not any(f"rank {other} on " in found["sentence"] for other in range(world.size) if other != wrong)
    (claim,) = [c for c in found["comparisons"][0]["claims"] if c["name"] == "final exp_avg_sq equal"]
    assert not claim["held"]
    assert claim["detail"].startswith(f"rank {wrong} on ")


def test_microbatches_are_those_of_a_rank(pair: World) -> None:
    found = verdicts(pair, microbatches=(1, 2))
    assert found["passed"], found["sentence"]
    assert [c["microbatches"] for c in found["comparisons"]] == [1, 2]
    told = verdicts(pair, microbatches=(4,))
    assert "--microbatches 4 does not divide train.global_batch_size=4, of which each rank has 2" in told


@pytest.mark.parametrize("words", [(BF16,), STAGES_IN_FP16, TIED], ids=["bf16", "stages in fp16", "tied stages"])
def test_without_a_deterministic_form_ranks_are_fed_the_same_gradients(pair: World, words: tuple[str, ...]) -> None:
    found = verdicts(pair, *words, undeterministic=True)
    assert found["passed"], found["sentence"]
    assert found["same_gradients"]
    if words != TIED:
        assert not verdicts(pair, *words, undeterministic=True, wrong=1)["passed"]


def test_what_cannot_be_verified_is_refused_on_every_rank(pair: World) -> None:
    for found in pair.run("verify_cases.verdict", words=[], fractions=(0.0001,)):
        assert "--fraction 0.0001 offloads no bucket" in found
    for found in pair.run("verify_cases.started_otherwise"):
        assert "the ranks of this run were started with different settings" in found
        assert "what is compared is 100% host, hidden, 4 microbatches on rank 0 on " in found
    copies = "ddp.use_distributed_optimizer=False"
    for found in pair.run("verify_cases.verdict", words=[copies], placements=("host",)):
        assert "needs ddp.use_distributed_optimizer" in found


def test_two_processes_end_alike_with_one_verdict(tmp_path: Path) -> None:
    words = ["verify", "--recipe", MOE, *SMALL, *SIZES[MOE], BF16, "--fraction", "0.5", "--json", "verdict.json"]
    first, second = commands(*words, folder=tmp_path)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert first.out.count("PASS: identical in every bit over 2 iterations on 2 ranks") == 1
    assert second.out == ""
    assert json.loads((tmp_path / "verdict.json").read_text())["passed"]


def test_all_ranks_end_with_one_code_where_one_of_them_differs_and_the_verdict_comes_first(tmp_path: Path) -> None:
    words = ["verify", "--recipe", MOE, *SMALL, *SIZES[MOE], "--fraction", "1", "--json", "verdict.json"]
    first, second = commands(*words, folder=tmp_path, before="verify_cases.flip_a_bit_on_rank_1")
    assert (first.code, second.code) == (1, 1), first.err + second.err
    assert first.out.count("FAIL: NOT verified in 1 of 1 cases") == 1
    assert first.out.startswith("FAIL: NOT verified in 1 of 1 cases")
    assert ", on rank 1 on " in first.out
    assert not json.loads((tmp_path / "verdict.json").read_text())["passed"]


# -------------------------------------------------------------------- torchrun

UNSIZED = tuple(word for word in (*SMALL, *SIZES[MOE]) if not word.startswith("train.micro_batch_size="))
STREAMED = ("--fraction", "1", "--placement", "streamed")


def test_no_size_of_a_microbatch_is_needed_and_the_verdict_is_the_first_line(tmp_path: Path) -> None:
    """Seen red: exit code 2, for the recipe's microbatch of 4 is more than one of three ranks has."""
    words = ["verify", "--recipe", MOE, *UNSIZED, "train.global_batch_size=4", *STREAMED]
    first, second = commands(*words, folder=tmp_path)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    told = (
        "PASS: identical in every bit over 2 iterations on 2 ranks, without offloading and with: 100% streamed, hidden,"
    )
    assert first.out.splitlines()[0] == f"{told} 1 microbatch"
    assert (first.out + second.out).count("PASS") == 1


def test_torchrun_ends_with_the_refusal_that_it_would_bury(tmp_path: Path) -> None:
    """Seen red: thirty lines of torchrun below it, which told how to enable a traceback."""
    words = ["verify", "--recipe", MOE, *UNSIZED, "train.global_batch_size=4", "train.micro_batch_size=4"]
    done = torchrun("--nproc-per-node", "2", "-m", "hostward", *words, folder=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    what = "error: global batch size (4) is not divisible by micro batch size (4) times data parallel size (2)"
    above, _, below = done.stderr.partition("ChildFailedError")
    assert [above.count(what), below.count(what)] == [1, 1]
    assert below.split("Root Cause")[1].count(f"traceback : {what}") == 1
    assert "fix: set train.global_batch_size=8" in below
    assert "rank 1: error" not in done.stderr
    assert "To enable traceback" not in below.split("Root Cause")[1]


def test_a_refusal_of_ranks_that_have_met_is_told_once_with_the_same_code(tmp_path: Path) -> None:
    words = ["verify", "--recipe", MOE, *SMALL, *SIZES[MOE], "--fraction", "0.0001"]
    first, second = commands(*words, folder=tmp_path)
    assert (first.code, second.code) == (2, 2), first.err + second.err
    assert first.err.count("error: --fraction 0.0001 offloads no bucket") == 1
    assert "error" not in second.err
    assert first.out == second.out == ""


def test_activations_alone_are_verified_on_ranks(pair: World) -> None:
    """Layers of one stage leave, those of the other stay: the claim is that of all ranks together."""
    words = ("model.num_layers=4", "model.fine_grained_activation_offloading=True", "model.offload_modules=[core_attn]")
    for more in ((), ("model.pipeline_model_parallel_size=2",)):
        found = verdicts(pair, *words, "model.min_offloaded_tensor_size=1", *more, recipe=QWEN3, fractions=())
        assert found["passed"], found["sentence"]
        (comparison,) = found["comparisons"]
        assert comparison["asked_fraction"] == 0
        (claim,) = [c for c in comparison["claims"] if c["name"] == "saved activations were offloaded"]
        assert claim["held"]


def test_what_a_loop_does_after_each_step_is_compared_on_ranks(pair: World) -> None:
    """FSDP2 refuses deep copies; stages without it do not."""
    for words, copies in (((), False), (("model.pipeline_model_parallel_size=2",), True)):
        found = verdicts(pair, *words, recipe=QWEN3, placements=("streamed",))
        assert found["passed"], found["sentence"]
        names = {claim["name"] for claim in found["comparisons"][0]["claims"]}
        assert {"norms of weights equal", "weights clamped through .data equal"} <= names
        assert ("deep copies of the model equal" in names) is copies
