"""What pip and an index page say of the package."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import index_metadata
import pytest
import torch

import hostward
from hostward.config.schema import Config, ModelConfig
from hostward.errors import MissingPackageError
from hostward.trainer.models import meta_model

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
BY_CODE = r'(?:needed_for\([^\n]*?, |install\()"([\w,]+)"'
"""How code names an extra: the text around it is that of `hostward.errors.install`."""
INSTALL = r"pip install (?:-\S+ |constraints\.txt )*'?(hostward|\.)\[([\w,]+)\]'?"


def texts() -> dict[str, str]:
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.py"), *ROOT.glob("src/**/*.toml")]
    files += ROOT.glob("examples/*.py")
    return {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in files}


def test_every_text_installs_an_extra_in_the_same_words() -> None:
    """An extra by its name, in quotes for zsh: in pages for a clone, with constraints; code names both."""
    found: set[str] = set()
    wrong: list[str] = []
    for name, text in texts().items():
        for match in re.finditer(INSTALL, text):
            found |= set(match[2].split(","))
            cloned = match[1] == "." and "-c constraints.txt" in match[0]
            if "'" not in match[0] or not (cloned or name == "docs/releasing.md"):
                wrong.append(f"{name}: {match[0]}")
        if name.startswith("src/"):
            found |= {extra for match in re.finditer(BY_CODE, text) for extra in match[1].split(",")}
    assert wrong == []
    assert found == EXTRAS.keys()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = set(re.findall(r"`'\.\[(\w+)\]'`", readme))
    assert {"transformers", "trl", "accelerate", "lightning"} <= table <= EXTRAS.keys()


def test_what_an_extra_brings_has_one_least_version() -> None:
    needs = {need for extra in EXTRAS.values() for need in extra}
    names = [re.split(r"[^\w-]", need)[0] for need in needs]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("accelerate", "accelerate"),
        ("transformers", "accelerate"),
        ("transformers", "transformers"),
        ("lightning", "lightning.fabric"),
    ],
)
def test_an_integration_without_its_package_names_the_extra(
    module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"hostward.integrations.{module}", raising=False)
    if package == "transformers":
        pytest.importorskip("accelerate")
    with pytest.raises(ImportError, match=f"needs the package {package}, which") as raised:
        importlib.import_module(f"hostward.integrations.{module}")
    assert isinstance(raised.value, MissingPackageError)
    assert f"pip install 'hostward[{module}]' (in a clone that is not installed: '.[{module}]')" in raised.value.fix


@pytest.mark.parametrize("pretrained", [False, True])
def test_a_model_without_transformers_names_the_extra(
    pretrained: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setitem(sys.modules, "transformers", None)
    model = ModelConfig(hf_model_path=str(tmp_path) if pretrained else None)
    with pytest.raises(MissingPackageError, match="a model needs the package transformers") as raised:
        meta_model(Config(model=model), 320, torch.bfloat16)
    assert "'hostward[train]'" in raised.value.fix


def test_no_text_names_a_package_of_an_extra_alone() -> None:
    packages = {re.split(r"\W", need)[0] for extra in EXTRAS.keys() - {"test", "docs", "dev"} for need in EXTRAS[extra]}
    alone = re.compile(rf"pip install '?({'|'.join(sorted(packages))})\b")
    assert [f"{name}: {match[0]}" for name, text in texts().items() for match in alone.finditer(text)] == []


def test_the_version_is_named_once() -> None:
    assert PROJECT["version"] == hostward.__version__
    assert f"## {hostward.__version__} (" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def metadata() -> tuple[str, dict[str, str]]:
    fields = index_metadata.dynamic_metadata({}, PROJECT)
    return fields["readme"]["text"], fields["urls"]


def test_links_of_the_index_page_are_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTWARD_REPOSITORY_URL", "https://example.org/a/hostward/")
    text, urls = metadata()
    at = f"v{hostward.__version__}"
    assert f"(https://example.org/a/hostward/blob/{at}/docs/how-it-works.md#reading-weights)" in text
    assert f"](https://example.org/a/hostward/raw/{at}/docs/images/step-8k-mix.svg)" in text
    assert re.findall(r"\]\((?!https:)[^)]*\)", text) == []
    assert urls["Changelog"] == f"https://example.org/a/hostward/blob/{at}/CHANGELOG.md"


def test_without_an_address_links_become_their_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOSTWARD_REPOSITORY_URL", raising=False)
    text, urls = metadata()
    assert urls == {}
    assert re.findall(r"\]\([^)]*\)", text) == []
    assert "Changelog · Apache-2.0" in text


@pytest.mark.skipif(shutil.which("cmake") is None, reason="pip brings cmake where the machine has none")
def test_a_build_without_a_compiler_says_in_one_line_what_to_install(tmp_path: Path) -> None:
    command = ["cmake", "-S", str(ROOT), "-B", str(tmp_path), "-G", "Unix Makefiles", "-DCMAKE_MAKE_PROGRAM=true"]
    environment = {**os.environ, "CXX": str(tmp_path / "g++")}
    built = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode != 0
    assert "hostward needs a C++ compiler: install g++, or set CXX to another" in built.stderr.splitlines()[1]
    assert len(built.stderr.splitlines()) < 8


def test_the_script_without_a_compiler_says_so_too(tmp_path: Path) -> None:
    environment = {**os.environ, "CXX": str(tmp_path / "g++")}
    command = [str(ROOT / "native/build.sh"), str(tmp_path / "native")]
    built = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 1
    assert (
        built.stderr
        == f"hostward needs a C++ compiler, and there is no {tmp_path}/g++: install g++, or set CXX to another\n"
    )
