"""The order in which a save makes things durable."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hostward.checkpoint import api, files


def test_everything_is_durable_before_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut keeps what was synced and any part of the rest: first contents, then the name, then the pointer."""
    tensors = {"x": torch.ones(3)}
    api.save(tmp_path, 1, tensors=tensors, plain={})
    steps: list[str] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def shown(path: str | Path) -> str:
        return re.sub(r"\.(iter_\d+|latest)\.partial-.{8}", r"PARTIAL-\1", str(Path(path).relative_to(tmp_path)))

    def logging_fsync(descriptor: int) -> None:
        steps.append("sync " + shown(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def logging_rename(source: Any, target: Any) -> None:
        if Path(source).parent == tmp_path:
            steps.append(f"rename {shown(source)} {shown(target)}")
        rename(source, target)

    def logging_replace(source: Any, target: Any) -> None:
        steps.append(f"rename {shown(source)} {shown(target)}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", logging_fsync)
    monkeypatch.setattr(os, "rename", logging_rename)
    monkeypatch.setattr(os, "replace", logging_replace)
    api.save(tmp_path, 2, tensors=tensors, plain={})
    partial = "PARTIAL-iter_0000002"
    assert steps == [
        *(f"sync {partial}/{name}" for name in ("__0_0.distcp", ".metadata", "plain.json")),
        f"sync {partial}/manifest.json",
        f"sync {partial}",
        f"rename {partial} iter_0000002",
        "sync .",
        "sync PARTIAL-latest",
        "rename PARTIAL-latest latest",
        "sync .",
    ]


def test_what_cannot_be_looked_into_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever writes there says why it fails: an error here ended runs that a full disk does not end."""
    assert not files.is_checkpoint(tmp_path / ("x" * 300))

    def stale(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", stale)
        assert not files.is_checkpoint(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")  # of something else
    assert not files.is_checkpoint(tmp_path)
    assert files.is_checkpoint(api.save(tmp_path, 1, tensors={"x": torch.ones(3)}, plain={}))
    assert files.is_checkpoint(api.save(tmp_path, 2, tensors={}, plain={}))
