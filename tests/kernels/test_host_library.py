"""Finding and checking the native library, first touch, and the benchmark's roof."""

from __future__ import annotations

import ctypes
import ctypes.util
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from hostward.errors import NativeError
from hostward.kernels.cpu.library import (
    ABI_VERSION,
    AccumulateRangeStruct,
    AccumulateTaskStruct,
    Isa,
    NormTaskStruct,
    Range,
    Task,
    first_touch,
    library_path,
    load,
    open_library,
)

REPOSITORY = Path(__file__).resolve().parents[2]


def test_missing_library_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(NativeError, match="does not exist") as caught:
        open_library(tmp_path / "libhostward_native.so")
    for command in ("pip install .", "cmake --install build --prefix src", "native/build.sh src/hostward/_native"):
        assert command in caught.value.fix


def test_the_library_is_found_in_either_folder_of_an_editable_install(tmp_path: Path) -> None:
    """Seen red: looked for beside its Python file alone, where only a build by hand puts it."""
    site, source = tmp_path / "site-packages" / "hostward", tmp_path / "src" / "hostward"
    assert library_path([str(site), str(source)]) == source / "_native" / "libhostward_native.so"
    for folder in (site, source):
        built = folder / "_native" / "libhostward_native.so"
        built.parent.mkdir(parents=True)
        built.touch()
        assert library_path([str(site), str(source)]) == built
        built.unlink()


def test_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "libhostward_native.so"
    path.write_bytes(b"not a library")
    with pytest.raises(NativeError, match="cannot be loaded"):
        open_library(path)


def test_library_of_another_version_is_refused(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source = tmp_path / "other.c"
    source.write_text(
        f"int hostward_abi_version(void) {{ return {ABI_VERSION + 1}; }}\n"
        "long hostward_task_bytes(void) { return 8; }\n"
    )
    path = tmp_path / "libother.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(path), str(source)], check=True)
    with pytest.raises(NativeError, match=f"version {ABI_VERSION + 1}, this package needs {ABI_VERSION}"):
        open_library(path)


def test_library_is_opened_once_and_its_structs_agree() -> None:
    library = load()
    assert load() is library
    assert ctypes.sizeof(Range) == 56
    assert ctypes.sizeof(Task) == 208
    structs = (NormTaskStruct, AccumulateRangeStruct, AccumulateTaskStruct)
    assert [ctypes.sizeof(struct) for struct in structs] == [56, 32, 64]
    functions = {
        library.adamw_host_function,
        library.norm_host_function,
        library.accumulate_host_function,
    }
    assert len(functions - {0}) == 3


def test_instruction_sets() -> None:
    library = load()
    supported = library.supported_isas()
    assert supported[0] is Isa.SCALAR
    assert Isa(library.isa_best()) is supported[-1]
    assert library.isa_supported(int(Isa.BEST)) == 1
    assert library.isa_supported(99) == 0


def test_only_the_declared_names_are_exported() -> None:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("needs nm")
    lines = subprocess.run(
        [nm, "-D", "--defined-only", str(load().path)], check=True, capture_output=True, text=True
    ).stdout
    names = {line.split()[-1] for line in lines.splitlines() if line}
    header = (REPOSITORY / "native/include/hostward.h").read_text()
    assert names
    assert all(name.startswith("hostward_") and f"{name}(" in header for name in names)


@pytest.mark.parametrize("threads", [1, 3])
def test_first_touch_writes_one_byte_of_each_page(threads: int) -> None:
    pages = 9000  # more than two of the pieces that are shared out
    memory = np.full(pages * 4096 + 1, 7, dtype=np.uint8)
    first_touch(memory.ctypes.data, pages * 4096, threads)
    assert (memory[: pages * 4096 : 4096] == 0).all()
    assert int((memory == 0).sum()) == pages


def test_first_touch_refuses_bad_arguments() -> None:
    with pytest.raises(NativeError, match="negative"):
        first_touch(0, -1, 1)
    with pytest.raises(NativeError, match="null"):
        first_touch(0, 1, 1)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_the_roof_loop_touches_every_element_once(prefetch: int) -> None:
    n = 3 * 65536 + 5
    library = load()
    for isa in library.supported_isas():
        dtypes = (np.uint32, np.uint32, np.uint16, np.uint16, np.uint16)
        streams = [np.arange(n, dtype=dtype) for dtype in dtypes]
        pointers = np.array([stream.ctypes.data for stream in streams], dtype=np.int64)
        assert library.bench_rmw(pointers.ctypes.data, n, 2, int(isa), prefetch) == 0
        index = np.arange(n)
        assert (streams[0] == index + 1).all()
        assert (streams[1] == index + 1).all()
        assert (streams[2] == 0).all()
        assert (streams[3] == (index + 1).astype(np.uint16)).all()
        assert (streams[4] == index.astype(np.uint16)).all()
