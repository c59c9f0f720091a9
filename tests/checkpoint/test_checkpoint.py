"""Checkpoints: every bit comes back, and whatever does not agree is refused before a tensor is touched."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings

from hostward.checkpoint import api, files
from hostward.checkpoint.manifest import FORMAT
from hostward.checkpoint.saving import typed_failures
from hostward.checkpoint.validate import plain_bytes
from hostward.errors import CheckpointError

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dtype == second.dtype and first.shape == second.shape and torch.equal(bits(first), bits(second))


def make_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    slab = torch.randn(4096, generator=generator)
    return {
        "layer.0.weight": slab[16:80].view(8, 8),
        "layer.0.weight.exp_avg": slab[80:144].view(8, 8),
        "layer": torch.randn(3, generator=generator).bfloat16(),
        "step": torch.tensor(seed + 2**40),
        "rng": torch.randint(0, 255, (40,), generator=generator).to(torch.uint8),
    }


def empty_like(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}


def save(directory: Path, iteration: int, **options: Any) -> Path:
    tensors = options.pop("tensors", None) or make_tensors(iteration)
    return api.save(directory, iteration, tensors=tensors, plain={"iteration": iteration}, **options)


def hidden(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.startswith(".") and path.name != ".save.lock"]


def test_t48_save_and_load_return_every_bit(tmp_path: Path) -> None:
    tensors = make_tensors()
    path = save(tmp_path / "a" / "b", 50, tensors=tensors)
    assert path == tmp_path / "a" / "b" / "iter_0000050"
    assert api.latest(tmp_path / "a" / "b") == path
    assert api.read_plain(path) == {"iteration": 50}
    assert api.tensor_index(path) == {n: (tuple(t.shape), t.dtype) for n, t in tensors.items()}
    into = empty_like(tensors)
    pointers = {name: tensor.data_ptr() for name, tensor in into.items()}
    api.load(path, into)
    assert all(same_bits(into[name], tensors[name]) for name in tensors)
    assert {name: tensor.data_ptr() for name, tensor in into.items()} == pointers
    assert hidden(tmp_path / "a" / "b") == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_t48_every_dtype_and_shape_keeps_its_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (4 * 6 * dtype.itemsize,)).to(torch.uint8)
    base = raw.view(dtype).view(4, 6)
    tensors = {
        "whole": base,
        "transposed": base.t(),
        "strided": base[::2, 1::2],
        "expanded": base[:, :1].expand(4, 5),
        "scalar": base[1, 2],
        "none": base[:0],
        "parameter": torch.nn.Parameter(base.clone(), requires_grad=False),
    }
    into = {name: torch.zeros(tensor.shape, dtype=dtype) for name, tensor in tensors.items()}
    api.load(api.save(tmp_path, 0, tensors=tensors, plain={}), into)
    assert all(same_bits(into[name], tensors[name]) for name in tensors)


def test_t48_nan_payloads_denormals_and_zeros_keep_their_bits(tmp_path: Path) -> None:
    patterns = torch.tensor([0x7FC01234, 0x7F800001, -1, 1, -(2**31), 0x7F800000], dtype=torch.int32)
    into = {"x": torch.zeros(6)}
    api.load(api.save(tmp_path, 0, tensors={"x": patterns.view(torch.float32)}, plain={}), into)
    assert torch.equal(into["x"].view(torch.int32), patterns)


def test_load_fills_parameters_that_need_gradients_and_views(tmp_path: Path) -> None:
    path = save(tmp_path, 1, tensors={"w": torch.arange(6.0), "m": torch.arange(6.0) + 10})
    weight, slab = torch.nn.Parameter(torch.zeros(6)), torch.zeros(10)
    api.load(path, {"w": weight, "m": slab[2:8]})
    assert torch.equal(weight.detach(), torch.arange(6.0))
    assert torch.equal(slab, torch.tensor([0.0, 0, 10, 11, 12, 13, 14, 15, 0, 0]))


class InterruptedStream(io.RawIOBase):
    """A file whose user presses Ctrl-C while its second write runs."""

    writes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        self.writes += 1
        if self.writes > 1:
            raise KeyboardInterrupt
        return len(memoryview(data))


def test_ctrl_c_inside_torchs_zip_writer_stays_ctrl_c() -> None:
    """torch turns it into a RuntimeError."""
    with pytest.raises(RuntimeError, match="unexpected pos") as caught:
        torch.save(torch.zeros(9), InterruptedStream())  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt), typed_failures("cannot save"):
        raise caught.value


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_files_are_readable_by_plain_dcp(tmp_path: Path) -> None:
    tensors = make_tensors()
    into: dict[str, Any] = empty_like(tensors)
    dcp.load(into, checkpoint_id=save(tmp_path, 3, tensors=tensors), no_dist=True)
    assert all(same_bits(into[name], tensors[name]) for name in tensors)


def test_h67_a_view_is_saved_without_the_rest_of_its_storage(tmp_path: Path) -> None:
    slab = torch.randn(8 * 2**20)
    tensors = {f"v{index}": slab[index * 2**20 : index * 2**20 + 2**17] for index in range(8)}
    path = save(tmp_path, 1, tensors=tensors)
    size_bytes = sum(file.stat().st_size for file in path.iterdir())
    assert size_bytes <= 1.02 * sum(tensor.nbytes for tensor in tensors.values())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(max_size=5), json_values, max_size=4))
def test_plain_values_come_back_equal(plain: dict[str, Any]) -> None:
    back = json.loads(plain_bytes(plain))
    assert back == plain
    assert repr(back) == repr(plain)


def test_plain_values_that_are_not_finite_come_back(tmp_path: Path) -> None:
    path = api.save(tmp_path, 1, tensors={}, plain={"loss": math.nan, "norm": math.inf, "betas": (0.9, 0.95)})
    plain = api.read_plain(path)
    assert math.isnan(plain["loss"])  # type: ignore[arg-type]
    assert plain["norm"] == math.inf
    assert plain["betas"] == [0.9, 0.95]
    api.load(path, {})


@pytest.mark.parametrize(
    ("plain", "text"),
    [
        ({"a": {"b": [0, torch.zeros(1)]}}, r"plain\['a'\]\['b'\]\[1\]\n.*it is a Tensor\n.*tensors go into"),
        ({"a": {1: 2}}, r"plain\['a'\]\n.*keys that are no strings"),
        ({"a": Path("/x")}, r"plain\['a'\]\n.*PosixPath"),
        ({"a": {3}}, r"plain\['a'\]\n.*a set"),
    ],
)
def test_plain_values_that_json_would_lose_are_refused(tmp_path: Path, plain: Any, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        api.save(tmp_path / "new", 1, tensors={}, plain=plain)
    assert not (tmp_path / "new").exists()


def test_requests_that_cannot_be_met_are_refused_before_writing(tmp_path: Path) -> None:
    released = torch.ones(4)
    released.untyped_storage().resize_(0)
    requests: list[tuple[str, Callable[[], object]]] = [
        ("iteration -1", lambda: save(tmp_path, -1)),
        ("^most_recent_k is 0", lambda: save(tmp_path, 1, most_recent_k=0)),
        ("'x' as a tensor\n.*it is a float", lambda: save(tmp_path, 1, tensors={"x": 1.0})),
        ("'x'\n.*hold data", lambda: save(tmp_path, 1, tensors={"x": torch.empty(3, device="meta")})),
        ("'x'\n.*storage is empty", lambda: save(tmp_path, 1, tensors={"x": released})),
    ]
    for text, request in requests:
        with pytest.raises(CheckpointError, match=text):
            request()
    unknown: Any = "async"
    with pytest.raises(CheckpointError, match=r"no mode of saving 'async'\n  why: .*\n  fix: mode=None, 'snapshot' or"):
        api.Saver(tmp_path, mode=unknown)
    assert list(tmp_path.iterdir()) == []


def test_saving_an_iteration_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 5, tensors=make_tensors(1))
    path = save(tmp_path, 5, tensors=make_tensors(2))
    into = empty_like(make_tensors())
    api.load(path, into)
    assert same_bits(into["layer.0.weight"], make_tensors(2)["layer.0.weight"])
    assert sorted(p.name for p in tmp_path.iterdir()) == [".save.lock", "iter_0000005", "latest"]


def test_most_recent_k_keeps_the_newest_and_spares_later_and_foreign_folders(tmp_path: Path) -> None:
    for iteration in (1, 2, 3, 9):
        save(tmp_path, iteration)
    incomplete = tmp_path / "iter_0000000"
    incomplete.mkdir()
    (tmp_path / "notes").mkdir()
    save(tmp_path, 4, most_recent_k=2)
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert names == ["iter_0000000", "iter_0000003", "iter_0000004", "iter_0000009", "notes"]
    assert api.latest(tmp_path) == tmp_path / "iter_0000004"


def test_leftovers_are_removed_and_look_alikes_are_not(tmp_path: Path) -> None:
    ours = [".iter_0000007.partial-0123abcd", ".iter_0000007.discarded-0123abcd", ".latest.partial-0123abcd"]
    others = [
        ".iter_0000007.partial-0123ABCD",
        ".iter_7.partial-0123abcd",
        ".iter_0000007.partial-0123abcd.bak",
        ".git",
    ]
    for name in ours + others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    save(tmp_path, 1)
    assert sorted(hidden(tmp_path)) == sorted(others)


def test_a_replaced_checkpoint_counts_until_its_successor_is_there(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    aside = tmp_path / ".iter_0000007.replaced-0123abcd"
    path.rename(aside)
    found = api.latest(tmp_path)
    assert found == aside
    api.verify(found)
    save(tmp_path, 3)
    assert (tmp_path / "iter_0000007").is_dir()
    assert hidden(tmp_path) == []


def test_a_folder_is_locked_while_another_save_runs(tmp_path: Path) -> None:
    save(tmp_path, 1)
    text = r"cannot save into .*\n.*another process is saving there\n.*a folder of its own to save into"
    with files.locked(tmp_path), pytest.raises(CheckpointError, match=text):
        save(tmp_path, 2)
    assert api.latest(tmp_path) == tmp_path / "iter_0000001"
    save(tmp_path, 2)


def test_latest_is_none_where_nothing_was_saved(tmp_path: Path) -> None:
    assert api.latest(tmp_path) is None
    assert api.latest(tmp_path / "missing") is None


def test_latest_names_the_newest_complete_checkpoint_when_its_own_is_unusable(tmp_path: Path) -> None:
    paths = [save(tmp_path, iteration) for iteration in (1, 2, 30)]
    (paths[2] / "manifest.json").unlink()
    cure = f"write iter_0000002 into {tmp_path / 'latest'}"
    with pytest.raises(CheckpointError, match=r"iter_0000030, which is not complete\n.*no manifest.json") as caught:
        api.latest(tmp_path)
    assert cure in str(caught.value)
    shutil.rmtree(paths[2])
    with pytest.raises(CheckpointError, match="iter_0000030, which does not exist") as caught:
        api.latest(tmp_path)
    assert cure in str(caught.value)
    shutil.rmtree(paths[0])
    shutil.rmtree(paths[1])
    with pytest.raises(CheckpointError, match="no other complete one"):
        api.latest(tmp_path)


def test_the_way_out_of_a_damaged_checkpoint_leads_back_not_on(tmp_path: Path) -> None:
    """A run that went on from an older checkpoint has left later ones of the line that it gave up.

    Seen red: the newest of all was proposed, and called the newest complete one.
    """
    for iteration in (1, 3, 6):
        save(tmp_path, iteration)
    damaged = save(tmp_path, 2)
    (damaged / "__0_0.distcp").write_bytes(b"")
    latest = tmp_path / "latest"
    for look in (lambda: api.latest(tmp_path), lambda: api.verify(damaged)):
        with pytest.raises(CheckpointError) as caught:
            look()
        assert caught.value.fix == f"to go on from the newest complete one before it, write iter_0000001 into {latest}"
    shutil.rmtree(tmp_path / "iter_0000001")
    with pytest.raises(CheckpointError) as caught:
        api.latest(tmp_path)
    later = "to go on from a later one, as there is no complete one before it"
    assert caught.value.fix == f"{later}, write iter_0000006 into {latest}"
    latest.write_text("nonsense")
    with pytest.raises(CheckpointError) as caught:
        api.latest(tmp_path)
    assert caught.value.fix == f"to go on from the newest complete one, write iter_0000006 into {latest}"


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40))
def test_any_pointer_text_is_a_checkpoint_or_a_typed_error(
    tmp_path_factory: pytest.TempPathFactory, text: bytes
) -> None:
    directory = tmp_path_factory.getbasetemp() / "pointer"
    directory.mkdir(exist_ok=True)
    (directory / "latest").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"latest (holds|names)"):
        api.latest(directory)


@pytest.mark.parametrize("read", [api.verify, api.read_plain, api.tensor_index])
def test_a_path_that_is_no_checkpoint_is_a_typed_error(tmp_path: Path, read: Callable[[Path], object]) -> None:
    with pytest.raises(CheckpointError, match=r"missing is not a checkpoint\n.*no such folder"):
        read(tmp_path / "missing")
    inside, beside = save(tmp_path / "run", 1) / "__0_0.distcp", tmp_path / "run" / "latest"
    with pytest.raises(
        CheckpointError, match=f"distcp is not .*\n  why: it is a file of one, .*\n  fix: name {inside.parent}$"
    ):
        read(inside)
    with pytest.raises(
        CheckpointError, match=r"latest is not .*\n  why: it is a file, and .*\n  fix: name a folder DIR"
    ):
        read(beside)
    with pytest.raises(
        CheckpointError, match=r"not a complete checkpoint\n.*no manifest.json, which a save writes last"
    ):
        read(tmp_path)


def test_t51_a_checkpoint_of_another_model_lists_what_differs_and_touches_nothing(tmp_path: Path) -> None:
    saved = {f"layer.{index}": torch.ones(2, 3) for index in range(6)}
    path = save(tmp_path, 1, tensors=saved)
    into = {
        "layer.0": torch.zeros(2, 3),
        "layer.1": torch.zeros(3, 2),
        "layer.2": torch.zeros(2, 3, dtype=torch.bfloat16),
        "head": torch.zeros(1),
    }
    with pytest.raises(CheckpointError, match="is of another model") as caught:
        api.load(path, into)
    assert caught.value.why == (
        "1 missing in the checkpoint: head; 3 only in the checkpoint: layer.3, layer.4, layer.5; 2 of another shape "
        "or dtype: layer.1 (saved float32[2, 3], wanted float32[3, 2]), layer.2 (saved "
        "float32[2, 3], wanted bfloat16[2, 3])"
    )
    assert caught.value.fix == "build the model as the run did that saved it, or load a checkpoint of this model"
    assert all(not tensor.any() for tensor in into.values())
    with pytest.raises(CheckpointError, match=r"6 missing in the checkpoint: other.0, other.1, other.2 and 3 more"):
        api.load(path, {f"other.{index}": torch.zeros(1) for index in range(6)})


def test_t56_a_table_of_contents_that_names_other_code_is_refused_and_not_run(tmp_path: Path) -> None:
    class Touch:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "pwned"),)

    path = save(tmp_path, 1)
    (path / ".metadata").write_bytes(pickle.dumps(Touch()))
    (path / "manifest.json").unlink()
    files.seal(path, 1)
    for read in (api.tensor_index, lambda path: api.load(path, make_tensors())):
        with pytest.raises(CheckpointError, match=r"cannot read .metadata\n.*posix.mkdir"):
            read(path)
    assert not (tmp_path / "pwned").exists()


def test_a_manifest_of_a_newer_format_asks_for_an_upgrade(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    body = json.loads((path / "manifest.json").read_bytes())
    (path / "manifest.json").write_text(json.dumps(body | {"format": FORMAT + 1}))
    text = f"manifest.json has format {FORMAT + 1}\n.*reads formats up to {FORMAT}\n.*upgrade hostward"
    with pytest.raises(CheckpointError, match=text):
        api.load(path, empty_like(make_tensors()))


def test_files_get_the_permissions_of_the_umask(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    umask = os.umask(0)
    os.umask(umask)
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o666 & ~umask}
