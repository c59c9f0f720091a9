"""Inspect checkpoints of `hostward train` and convert them: weights for transformers, state for torch.optim.AdamW."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hostward.checkpoint import api, files
from hostward.checkpoint.manifest import MANIFEST
from hostward.checkpoint.rounding import rounded_moment
from hostward.checkpoint.state_dict import MODEL, OPTIMIZER, is_master, is_moment
from hostward.checkpoint.torch_adamw import to_torch_adamw
from hostward.config.schema import from_dict
from hostward.core.units import GIB
from hostward.errors import CheckpointError, ConfigError
from hostward.optim.state_dict import saved_dtypes
from hostward.report.schema import REPORT_FILE, read_report
from hostward.trainer.plan_request import state_format

SHARD_BYTES = 4 * GIB
"""Size limit of a safetensors file, unless one tensor is larger; an export takes as much host memory."""
STATE_FORMATS = {
    "bf16-moments": {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    "fp8-moments": {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"},
    "bf16-main-params": {"main_params_dtype": "bf16"},
}
"""A run that goes on with a checkpoint in such a form has these options."""
FORMATS = ("safetensors", "torch", *STATE_FORMATS)
_FILE = re.compile(r"__(\d+)_\d+\.distcp")
_ERRNO = re.compile(r"\(os error (\d+)\)")


@dataclass(frozen=True, slots=True)
class Contents:
    """Summarizes a checkpoint, from its table of contents and its plain values."""

    path: Path
    size_bytes: int
    ranks: int
    """Processes that wrote it."""
    parameters: int
    weight_dtypes: tuple[str, ...]
    tensors: Mapping[str, int]
    """Tensors by kind: model, exp_avg, exp_avg_sq, master, step, rng."""
    plain: Mapping[str, Any]
    checked: bool
    """Every chunk of every file has been read and agrees with its checksum."""

    def to_dict(self) -> dict[str, Any]:
        kept = ("iteration", "consumed_samples", "recipe")
        return {
            "path": str(self.path),
            "bytes": self.size_bytes,
            "ranks": self.ranks,
            "parameters": self.parameters,
            "weight_dtypes": list(self.weight_dtypes),
            "tensors": dict(self.tensors),
            "checked": self.checked,
            **{key: self.plain[key] for key in kept if key in self.plain},
        }

    def to_text(self) -> str:
        lines = [
            f"{self.path}: {self.size_bytes:,} bytes, written by {self.ranks} process{'es' if self.ranks > 1 else ''}"
        ]
        known = {
            key: value for key, value in self.to_dict().items() if key in ("iteration", "consumed_samples", "recipe")
        }
        lines += [f"{key.replace('_', ' ')}: {value}" for key, value in known.items()]
        lines.append(f"parameters: {self.parameters:,} in {', '.join(self.weight_dtypes)}")
        lines.append("tensors: " + ", ".join(f"{count} {kind}" for kind, count in self.tensors.items()))
        lines.append("checksums: all agree" if self.checked else "checksums: not checked (--verify)")
        return "\n".join(lines)


def found(path: Path) -> Path:
    """Return the checkpoint at `path`, or the one that `path/latest` names.

    Raises CheckpointError for a folder without one.
    """
    if not path.exists():
        fix = "name a run's folder (checkpoint.save), for the one that its latest names, or one of DIR/iter_... in it"
        raise CheckpointError(f"{path} is not a checkpoint", why="the folder does not exist", fix=fix)
    if path.name.startswith("iter_") or files.is_checkpoint(path) or not path.is_dir():
        return path
    named = api.latest(path)
    if named is not None:
        return named
    what, fix = f"{path} holds no checkpoint", "name a folder that checkpoint.save named, or one of DIR/iter_... in it"
    if not (path / REPORT_FILE).is_file():
        raise CheckpointError(what, why=f"there is neither {files.LATEST} nor {MANIFEST} in it", fix=fix)
    elsewhere = _saved_by_run(path)
    why = f"it is a run's folder ({REPORT_FILE}) in which no save has completed"
    raise CheckpointError(what, why=why, fix=f"name {elsewhere}, which this run saved" if elsewhere else fix)


def _saved_by_run(folder: Path) -> str | None:
    """Return the newest checkpoint of the run of this folder, according to its report."""
    try:
        return read_report(folder).checkpoint
    except ConfigError:
        return None  # the caller asked about a checkpoint, not about this report


def inspect(path: Path, *, verify: bool = False) -> Contents:
    """Summarize a checkpoint.

    Raises CheckpointError for one that is missing or damaged.
    """
    path = found(path)
    if verify:
        api.verify(path)
    index = api.tensor_index(path)
    names = files.file_names(path)
    weights = {name: entry for name, entry in index.items() if name.startswith(MODEL)}
    kinds = Counter(_kind(name) for name in index)
    return Contents(
        path,
        sum((path / name).stat().st_size for name in names),
        len({match[1] for name in names if (match := _FILE.fullmatch(name))}),
        sum(torch.Size(shape).numel() for shape, _ in weights.values()),
        tuple(sorted({str(dtype).removeprefix("torch.") for _, dtype in weights.values()})),
        dict(sorted(kinds.items())),
        api.read_plain(path),
        verify,
    )


def _kind(name: str) -> str:
    kind, _, rest = name.partition("/")
    return rest.rsplit("/", 1)[-1] if f"{kind}/" == OPTIMIZER else kind


def convert(path: Path, out: Path, form: str) -> list[Path]:
    """Write a checkpoint in another form into the new folder `out` and return the files written.

    Args:
        form: "safetensors": the weights, as transformers loads them with `from_pretrained(out)`. "torch": `model.pt`
            and `optimizer.pt` for torch.optim.AdamW; 16-bit weights as their main weights, in fp32. "bf16-moments": a
            checkpoint whose moments are rounded to bf16, to nearest even, for a run that stores them so. "fp8-moments":
            the same with FP8 for matrices, which a checkpoint holds in bf16. "bf16-main-params": one of bf16 weights
            without their fp32 main weights.

    Raises:
        CheckpointError: a checkpoint that is missing or damaged, or was not saved by `hostward train`; `out` exists; an
            unknown form; a full disk, or another write that fails, which leaves nothing at `out`.
    """
    if form not in FORMATS:
        raise CheckpointError(f"form {form!r} is unknown", fix=f"one of {', '.join(FORMATS)}")
    path = found(path)
    plain = api.read_plain(path)
    missing = [key for key in ("optimizer", "config") if key not in plain]
    if missing:
        raise CheckpointError(f"{path} was not saved by `hostward train`", why=f"it lacks {', '.join(missing)}")
    with files.system_errors(f"cannot write {out}", "name"):
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
        if out.exists():
            raise CheckpointError(f"target folder {out} exists", fix="name a folder that does not exist, or remove it")
        partial.mkdir()
        try:
            if form in STATE_FORMATS:
                _rounded(path, partial, plain, form)
            else:
                {"safetensors": _safetensors, "torch": _torch}[form](path, partial, plain)
            partial.rename(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return sorted(out.iterdir())


def _safetensors(path: Path, out: Path, plain: Mapping[str, Any]) -> None:
    from safetensors.torch import save_file

    index = {n: entry for n, entry in api.tensor_index(path).items() if n.startswith(MODEL)}
    shards = list(_shards(index))
    held: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        into = {name: torch.empty(index[name][0], dtype=index[name][1]) for name in names}
        api.load_some(path, into)
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with _system_errors_shown():
            save_file({n.removeprefix(MODEL): t for n, t in into.items()}, out / name, metadata={"format": "pt"})
        held |= dict.fromkeys((n.removeprefix(MODEL) for n in names), name)
    if len(shards) > 1:
        size_bytes = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in index.values())
        listing = {"metadata": {"total_size": size_bytes}, "weight_map": held}
        (out / "model.safetensors.index.json").write_text(json.dumps(listing, indent=1))
    _described(index, plain).save_pretrained(out)
    for name in set(held.values()):
        shutil.copymode(out / "config.json", out / name)  # safetensors creates files that only the owner may read


def _shards(index: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Iterator[list[str]]:
    names: list[str] = []
    held_bytes = 0
    for name, (shape, dtype) in index.items():
        size_bytes = torch.Size(shape).numel() * dtype.itemsize
        if names and held_bytes + size_bytes > SHARD_BYTES:
            yield names
            names, held_bytes = [], 0
        names.append(name)
        held_bytes += size_bytes
    yield names


def _described(index: Mapping[str, tuple[tuple[int, ...], torch.dtype]], plain: Mapping[str, Any]) -> Any:
    """Return the transformers configuration that the weights belong to."""
    from hostward.trainer.models import pretrained_config, transformers_config

    model = from_dict({"model": plain["config"]["model"]}).model
    if model.hf_model_path is not None:
        described = pretrained_config(model, model.hf_model_path)
    else:
        rows = next((shape[0] for name, (shape, _) in index.items() if name.endswith("embed_tokens.weight")), None)
        described = transformers_config(model, vocab_size=rows)
    described.dtype = next(iter(index.values()))[1]
    return described


def _torch(path: Path, out: Path, plain: Mapping[str, Any]) -> None:
    index = {n: e for n, e in api.tensor_index(path).items() if n.startswith((MODEL, OPTIMIZER))}
    into = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in index.items()}
    api.load_some(path, into)
    state, masters = to_torch_adamw(api.optimizer_state(plain["optimizer"], into))
    weights = {n.removeprefix(MODEL): t for n, t in into.items() if n.startswith(MODEL)}
    trained = {name.removeprefix(OPTIMIZER).rsplit("/", 1)[0] for name in into if is_moment(name)}
    weights = {name: t.float() if name in trained and name not in masters else t for name, t in weights.items()}
    for name, content in (("model.pt", {**weights, **masters}), ("optimizer.pt", state)):
        # Opened by Python: its OSError is the context of the error that closing the zip file raises.
        with _system_errors_shown(), (out / name).open("xb") as stream:
            torch.save(content, stream)


def _rounded(path: Path, out: Path, plain: dict[str, Any], form: str) -> None:
    options = STATE_FORMATS[form]
    if "main_params_dtype" in options and plain["config"]["model"]["params_dtype"] != "bf16":
        raise CheckpointError(
            f"{path} has weights in {plain['config']['model']['params_dtype']}",
            why="bf16 weights alone can be their own main weights in bf16",
            fix="convert a checkpoint of a run with model.params_dtype=bf16",
        )
    if api.read_own(path):
        raise CheckpointError(
            f"{path} was saved by several ranks",
            why="what each of them saved for itself would be lost",
            fix="resume it on one rank and save again, or go on with its state as it is",
        )
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in api.tensor_index(path).items()}
    api.load_some(path, tensors)
    config = from_dict(plain["config"])
    for name, value in options.items():
        setattr(config.optimizer, name, value)
    stored = state_format(config)
    if "main_params_dtype" in options:
        tensors = {name: tensor for name, tensor in tensors.items() if not is_master(name)}
    else:
        tensors = {
            n: rounded_moment(t, n.rsplit("/", 1)[-1], stored) if is_moment(n) else t for n, t in tensors.items()
        }
    plain["config"]["optimizer"] |= options
    plain["optimizer"] |= saved_dtypes(stored)
    try:
        api.save(out, plain["iteration"], tensors=tensors, plain=plain)
    except CheckpointError as error:
        behind: BaseException | None = error
        while behind is not None and not isinstance(behind, OSError):
            behind = behind.__cause__ or behind.__context__
        raise behind or error from error  # of a write that fails: the caller names the folder that was asked for


@contextmanager
def _system_errors_shown() -> Iterator[None]:
    """Raise the OSError that safetensors reports as text, and torch's zip writer replaces by `unexpected pos`."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        number = _ERRNO.search(str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
    except RuntimeError as error:
        behind = error.__context__
        if not isinstance(behind, OSError):
            raise
        raise OSError(behind.errno, behind.strerror) from error
