"""docs/migrate.md: what it says to write runs, and trains as what it replaces."""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from networks import Net

import hostward
from hostward import recipes
from hostward.config.overrides import apply_overrides, deepspeed_name, unknown_flag
from hostward.config.validate import check
from hostward.errors import ConfigError
from hostward.integrations.deepspeed import from_deepspeed

PAGE = (Path(__file__).resolve().parents[2] / "docs/migrate.md").read_text(encoding="utf-8")


def blocks(section: str) -> list[str]:
    """The code of a section, before and after."""
    text = PAGE.partition(f"## From {section}")[2].partition("\n## ")[0]
    return [block.replace("\\\n", "") for block in re.findall(r"```\w+\n(.*?)```", text, flags=re.DOTALL)]


def words_of(command: str) -> list[str]:
    program, name, *words = shlex.split(command)
    assert (program, name) == ("hostward", "train")
    check(apply_overrides(recipes.load("qwen3_moe_tiny_pretrain_config"), words), world_size=1)
    return [word.partition("=")[0] for word in words]


def test_flags_of_megatron_are_the_options_of_the_command() -> None:
    flags, command = blocks("Megatron and Megatron Bridge")
    written = words_of(command)
    named = [word for word in shlex.split(flags) if word.startswith("--")]
    assert [unknown_flag(flag) for flag in named] == [
        f"options of training are written {option}=VALUE"
        for option in sorted(written, key=lambda option: flags.index(option.partition(".")[2].replace("_", "-")))
    ]


def test_keys_of_deepspeed_are_the_options_of_the_command() -> None:
    before, command = blocks("DeepSpeed")
    written = set(words_of(command))

    def paths(value: Any, path: str = "") -> Iterator[str]:
        if not isinstance(value, Mapping):
            yield path
            return
        for key, part in value.items():
            yield from paths(part, f"{path}.{key}".lstrip("."))

    meant = [set(re.findall(r"\b\w+\.\w+\b", deepspeed_name(path) or "")) for path in paths(json.loads(before))]
    assert all(options & written for options in meant)
    assert written <= set().union(*meant)


def test_from_deepspeed_takes_the_file_without_what_the_page_says() -> None:
    file = json.loads(blocks("DeepSpeed")[0])
    elsewhere = ("bf16", "train_batch_size", "train_micro_batch_size_per_gpu")
    with pytest.raises(ConfigError, match=f"^{len(elsewhere)} keys"):
        from_deepspeed(file)
    rest = {key: value for key, value in file.items() if key not in elsewhere}
    assert from_deepspeed(rest) == {"offload_fraction": 0.5, "max_grad_norm": 1.0}
    assert "takes the same file without `bf16` and the two batch sizes" in PAGE


def trained(code: str, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Weights after the steps of a piece of the page."""
    batches = [torch.randint(0, 2080, (4,), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    names = {"hostward": hostward, "torch": torch, "model": model, "batches": batches}
    exec(code, names | {"loss_of": lambda model, batch: model(batch).square().mean()})
    whole = {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in model.state_dict().items()}
    return {name: tensor.detach().clone() for name, tensor in whole.items()}


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("section", ["torchao", "FSDP2's CPUOffloadPolicy", "torch.optim.AdamW"])
def test_what_is_written_after_trains_as_what_was_there_before(section: str) -> None:
    before, after = blocks(section)[:2]
    model = Net()
    if section == "torchao":  # it has streams of a GPU; without it, the optimizer that it wraps
        before = re.sub(r"CPUOffloadOptimizer\(.*\)", "torch.optim.AdamW(model.parameters(), lr=3e-4)", before)
        before = before.replace("from torchao.optim import CPUOffloadOptimizer\n", "")
    if section.startswith("FSDP2"):
        before = before.replace("CPUOffloadPolicy()", "CPUOffloadPolicy(pin_memory=False)")
    expected, got = (trained(code, copy.deepcopy(model)) for code in (before, after))
    assert expected.keys() == got.keys()
    assert any(not torch.equal(expected[name], weight) for name, weight in model.state_dict().items())
    for name, weight in expected.items():
        torch.testing.assert_close(got[name], weight, rtol=1e-4, atol=1e-6)


def test_a_state_of_torch_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = Net()
    plain = torch.optim.AdamW(model.parameters(), lr=3e-4)
    model(torch.arange(4)).square().mean().backward()
    plain.step()
    torch.save(plain.state_dict(), "optimizer.pt")
    optimizer = hostward.AdamW(model, lr=3e-4, offload_fraction=0.5)
    exec(blocks("torch.optim.AdamW")[2], {"torch": torch, "model": model, "optimizer": optimizer})
    moment = plain.state[model.head.weight]["exp_avg"]
    assert torch.equal(optimizer.state_dict()["state"]["head.weight"]["exp_avg"], moment)
