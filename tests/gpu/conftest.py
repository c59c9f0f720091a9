"""Tests here need a CUDA device. With TRITON_INTERPRET=1 those of the kernels run on the CPU, interpreted."""

from __future__ import annotations

import fcntl
import gc
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

# Workers of a test run take the GPUs in turn (scripts/gpu_tests.sh), before CUDA starts.
if gpus := os.environ.get("HOSTWARD_TEST_GPUS"):
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    os.environ["CUDA_VISIBLE_DEVICES"] = str(int(worker) % int(gpus))

# Torch's default, which `hostward train` in a test's process would else change for the tests behind it.
if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:False"

# Equal runs have equal bits only so: cuBLAS reads its variable when it starts, and cuDNN's attention adds in any order.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
torch.backends.cuda.enable_cudnn_sdp(False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    here = Path(__file__).parent
    for item in items:
        if here not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available() and not (interpreted and item.path.name.startswith("test_kernels")):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _beside_others(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests of other processes of this test run share the device, but not with what is marked `alone`."""
    if not torch.cuda.is_available():
        yield
        return
    with device_shared(alone=request.node.get_closest_marker("alone") is not None):
        yield


@contextmanager
def device_shared(*, alone: bool) -> Iterator[None]:
    """Others in this test run may use the devices that it sees, or nobody else. Not to be entered twice."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "all").replace(",", "-")
    path = Path(tempfile.gettempdir()) / f"hostward-tests-{os.getuid()}-{seen}"
    with path.with_suffix(".lock").open("w") as file:
        with path.with_suffix(".queue").open("w") as queue:  # else who wants it alone waits while others come and go
            fcntl.flock(queue, fcntl.LOCK_EX)
            fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


@pytest.fixture
def no_host_waits() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """A context in which torch raises where it would wait for the device."""

    @contextmanager
    def forbidden() -> Iterator[None]:
        gc.collect()  # optimizers of other tests drain their lanes when they go
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    yield forbidden
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def quiet_numpy() -> Iterator[None]:
    """Overflow and NaN are what is tested, and the interpreter computes in numpy."""
    with np.errstate(all="ignore"):
        yield
