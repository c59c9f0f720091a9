"""`hostward doctor` and `hostward bench machine`, called as a user calls them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hostward
from hostward.cli import machine, main
from hostward.doctor import Severity
from hostward.machine import facts, measure
from hostward.plan.hardware_profile import Hardware, load, profile, save

from machine_cases import ONE_GPU, sound

OOM = "RuntimeError: CUDA error: out of memory"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_doctor_on_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json", "report.json"])
    report = json.loads((tmp_path / "report.json").read_text())
    assert code == int(any(f["severity"] == Severity.ERROR for f in report["findings"]))
    assert report["facts"]["python"]
    assert report["versions"]["torch"]
    out = capsys.readouterr().out
    assert "this machine" in out
    assert f"hostward {hostward.__version__}, python {report['facts']['python']}" in out


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hostward {hostward.__version__}\n"


@pytest.mark.parametrize(
    ("changes", "code", "sentence"),
    [
        ({}, 0, "nothing to fix"),
        ({"transparent_huge_pages": "never", "shared_memory_bytes": 1}, 0, "2 warnings"),
        ({"native_error": "broken", "native_fix": "build", "locked_limit_bytes": 1}, 1, "1 error, 1 note"),
    ],
)
def test_the_exit_code_tells_of_errors(
    changes: dict[str, object],
    code: int,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(facts, "read_devices", lambda: ONE_GPU)
    monkeypatch.setattr(facts, "gather", lambda *_, **__: sound(**changes))
    assert main(["doctor"]) == code
    assert capsys.readouterr().out.splitlines()[-1] == sentence


def test_doctor_looks_at_measured_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(profile("h200"), Path("hardware.json"))
    main(["doctor", "--json", "report.json"])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["facts"]["hardware"]["name"] == "h200"
    Path("hardware.json").write_text("{}")
    main(["doctor", "--json", "report.json"])
    report = json.loads((tmp_path / "report.json").read_text())
    assert "hardware.json is no hardware file" in report["facts"]["hardware_error"]
    assert "hardware.json is no hardware file" in capsys.readouterr().out
    assert main(["doctor", "--hardware", "hardware.json"]) == 2


def test_doctor_reads_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.log").write_bytes(b"caf\xe9\n\xff\xfe\nx.pin_memory()\nbar 10%\rbar 20%\r" + OOM.encode() + b"\r\n")
    assert main(["doctor", "--log", "run.log", "--json", "found.json"]) == 1
    out = capsys.readouterr().out
    assert "page-locking-exhausted" in out
    assert "line 4" in out
    found = json.loads((tmp_path / "found.json").read_text())["recognised"]
    assert [(f["name"], f["line_number"], f["breadth"]) for f in found] == [("page-locking-exhausted", 4, "context")]


def test_doctor_says_plainly_that_it_knows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.log").write_text("all is well\n")
    assert main(["doctor", "--log", "run.log"]) == 0
    assert capsys.readouterr().out == "nothing in this log is a failure that hostward knows\n"
    Path("run.log").write_text("")
    assert main(["doctor", "--log", "run.log"]) == 0


def run(words: list[str], stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(Path(hostward.__file__).parents[1])}
    return subprocess.run([sys.executable, *words], input=stdin, env=environment, capture_output=True, timeout=60)


def test_doctor_reads_a_log_from_stdin_without_torch() -> None:
    code = (
        "import sys; from hostward.cli import main; code = main(['doctor', '--log', '-']); "
        "print('torch' in sys.modules); sys.exit(code)"
    )
    done = run(["-c", code], stdin=b"\xff\n" + OOM.encode())
    assert done.returncode == 1, done.stderr
    assert b"device-or-locked-memory" in done.stdout
    assert done.stdout.splitlines()[-1] == b"False"


def test_help_loads_no_torch() -> None:
    code = (
        "import sys; from hostward.cli import main\n"
        "for words in (['-h'], ['options'], ['doctor', '-h'], ['bench', '-h'], ['bench', 'machine', '-h']):\n"
        "    assert main(words) == 0\n"
        "print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    )
    done = run(["-c", code])
    assert done.stdout.splitlines()[-1] == b"[]", done.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["doctor", "--log", "none.log"], "--log none.log cannot be read"),
        (["doctor", "--log", "."], "--log . cannot be read"),
        (["doctor", "--log", "-", "--hardware", "x.json"], "--hardware has no effect with --log"),
        (["doctor", "--hardware", "h200"], "--hardware h200 is a shipped profile: h200, h100, "),
        (["doctor", "--hardware", "none.json"], "none.json cannot be read"),
        (["doctor", "--json", "none/x.json"], "its folder does not exist"),
        (["bench", "machine", "--json", "none/x.json"], "its folder does not exist"),
        (["bench", "machine", "--json", "."], "--json . is a folder"),
        (["bench", "machine", "--threads", "0"], "--threads"),
        (["bench", "nothing"], "nothing"),
    ],
)
def test_bad_input_is_refused(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert text in capsys.readouterr().err


def test_bench_machine_writes_the_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = {}

    def measured(**options: object) -> Hardware:
        asked.update(options)
        return profile("h200")

    monkeypatch.setattr(measure, "measure_machine", measured)
    assert main(["bench", "machine", "--quick", "--threads", "3"]) == 0
    assert load(machine.HARDWARE_FILE) == profile("h200")
    assert (asked["quick"], asked["threads"]) == (True, 3)
    assert capsys.readouterr().out.endswith("written to hardware.json\n")
    assert main(["bench", "machine", "--json", "mine.json"]) == 0
    assert load(Path("mine.json")) == profile("h200")


def test_the_command_line_stays_a_function_once_it_has_run(capsys: pytest.CaptureFixture[str]) -> None:
    import hostward.cli

    for _ in range(2):
        assert hostward.cli.main(["recipes"]) == 0
