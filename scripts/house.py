"""Print figures of the source tree: `python scripts/house.py [--json]`.

Everything is read from the source with `ast`; nothing is imported. `tests/test_house.py` holds the tree to them.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import networkx  # torch brings it

PACKAGE = "hostward"
ROOT = Path(__file__).resolve().parents[1]
SOURCE, TESTS = ROOT / "src" / PACKAGE, ROOT / "tests"

# Packages from the ground up: a module imports only from its own row and those above it.
FLOORS = (
    ("errors",),
    ("core", "files", "config"),
    ("kernels",),
    ("schedule",),
    ("plan",),
    ("runtime",),
    ("distributed",),
    ("model",),
    ("optim",),
    ("weights",),
    ("activations",),
    ("attachment", "profiler", "checkpoint", "convert"),
    ("recipes", "machine", "report"),
    ("trainer", "doctor"),
    ("cli", "integrations"),
    ("__main__",),
)
LEVELS = {name: level for level, row in enumerate(FLOORS) for name in row}
FACE_LEVEL = LEVELS["attachment"]
"""Of the package's own `__init__`, which leads to `hostward.AdamW` and `hostward.attach`."""

# Private names of other libraries that are used because there is no public way, and why.
OTHERS_PRIVATE: Mapping[str, tuple[str, ...]] = {
    "autograd's own bookkeeping of versions, views and storages": (
        "_base", "_cdata", "_is_zerotensor", "_use_count", "_version",
    ),
    "registries of modules, read or written without running __setattr__": (
        "_apply", "_backward_hooks", "_backward_pre_hooks", "_buffers", "_compiled_call_impl", "_forward_hooks",
        "_forward_pre_hooks", "_modules", "_non_persistent_buffers_set", "_parameters",
    ),
    "torch's bindings, which have no public names for the graph task, the hooks in force and raw storages": (
        "_C", "_execution_engine", "_make_wrapper_subclass", "_pop_saved_tensors_default_hooks",
        "_push_saved_tensors_default_hooks", "_schema", "_top_saved_tensors_default_hooks",
    ),
    "keeps torch.compile out of code that talks to streams": ("_compile", "_disable_dynamo"),
    "sees every operation of a model on meta tensors": ("_grouped_mm", "_local_scalar_dense", "_python_dispatch",
                                                        "_unsafe_view"),
    "a torch optimizer's hooks, which a wrapper of its step has to run or look for": (
        "_optimizer_state_dict_pre_hooks", "_optimizer_step_post_hooks", "_optimizer_step_pre_hooks",
        "_process_value_according_to_param_policy", "_wrapped_by_lr_sched",
    ),
    "FSDP2 tells nobody in public when it gathers and where its parts lie": (
        "_all_gather_result", "_fsdp_common", "_fsdp_flattened", "_fsdp_param_group", "_fsdp_param_groups",
        "_fsdp_state", "_fully_shard", "_get_module_fsdp_state", "_init_extensions", "_orig_dtype",
        "_reset_sharded_params", "_reshard_after_forward", "_sharded_param_data", "_spec", "_StridedShard",
        "_training_state", "_unsharded_param",
    ),
    "process groups: their timeouts, store and the forward that DDP is in": (
        "_active_ddp_module", "_device_types", "_distributed_c10d", "_functional_collectives", "_get_backend",
        "_get_default_store", "_set_pg_timeout", "_timeout",
    ),
    "Muon's arithmetic, which torch offers as a whole step": ("_adjust_lr", "_muon", "_zeropower_via_newtonschulz"),
    "the format of torch.save and of distributed checkpoints": ("_get_storage_alignment", "_save", "_StorageInfo"),
    "transformers' choice of kernels, which its config keeps private": (
        "_apply_gate", "_attn_implementation", "_experts_implementation",
    ),
    "documented by Python in spite of the underscore": ("_exit", "_getframe", "_NamedFuncPointer", "_replace"),
}  # fmt: skip
ALLOWED = {name: reason for reason, names in OTHERS_PRIVATE.items() for name in names}

FRAGMENT_OPENERS = """
    after although as at because before below beside but by except for from how if in neither of on only out same that
    those to what when where whether which who whom whose why with within without
"""
DETERMINERS = "a all an any both each every few many most no one our several some such the their these this two"
FINITE = """
    am are can cannot could did do does had has have is may might must need needs shall should was were will would
    accepts adds allocates allows applies asks becomes belongs brings builds calls causes changes checks chooses closes
    comes computes contains copies counts creates decides defines describes ends enters expects fails finds fits follows
    frees gathers gets gives goes happens holds installs keeps knows leads leaves lets lists lives loads loses makes
    means measures meets moves names offloads opens owns passes predicts prints produces puts raises reads refuses
    releases reloads removes replaces reports requires resolves restores returns runs saves says sees sends sets shows
    skips stands starts stays stops stores takes tells translates treats tries turns unpacks uses waits wants works
    wraps writes yields
"""
SUBORDINATE = re.compile(r"\b(that|which|who|whom|whose|where|when|while|if|because|as|until|so|unless|whether)\b")


@dataclass(frozen=True)
class Module:
    name: str
    """Dotted, from the package on."""
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def package(self) -> list[str]:
        """In which its relative imports start."""
        parts = self.name.split(".")
        return parts if self.path.name == "__init__.py" else parts[:-1]

    @property
    def room(self) -> str:
        """The package or module of the root that it belongs to; the root's `__init__` is one of its own."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else "__init__"

    @cached_property
    def imports(self) -> set[str]:
        """As `imports_in`."""
        return imports_in(self.tree, self.package)


def read_modules(source: Path) -> dict[str, Module]:
    """All modules below `source`, the folder of a package, by dotted name."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = [source.name, *path.relative_to(source).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, path, path.read_text())
    return found


# Imports.


def imports_in(tree: ast.Module, package: Sequence[str]) -> set[str]:
    """Dotted names imported anywhere in a module of `package`, functions included; `from a import b` counts as a.b."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{stem}.{alias.name}" for alias in node.names}
    return found


def import_graph(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """By module, the modules of the same package that it imports; `__version__`, a constant of the root, is none."""
    graph: dict[str, set[str]] = {}
    for name, module in modules.items():
        graph[name] = set()
        for target in module.imports:
            if target.rpartition(".")[2] == "__version__":
                continue
            while target and target not in modules:
                target = target.rpartition(".")[0]
            if target and target != name:
                graph[name].add(target)
    return graph


def package_graph(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """The same between rooms."""
    graph: dict[str, set[str]] = {module.room: set() for module in modules.values()}
    for name, targets in import_graph(modules).items():
        own = modules[name].room
        graph[own] |= {modules[target].room for target in targets} - {own}
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of names that reach each other, each sorted."""
    groups = networkx.strongly_connected_components(networkx.DiGraph(graph))
    return sorted(sorted(group) for group in groups if len(group) > 1)


def level_of(room: str) -> int:
    """Of a room without a place in FLOORS: above all."""
    return FACE_LEVEL if room == "__init__" else LEVELS.get(room, len(FLOORS))


def upward_imports(modules: Mapping[str, Module]) -> list[tuple[str, str]]:
    """(module, imported module) where the second stands above the first in FLOORS."""
    graph = import_graph(modules)
    return [
        (name, target)
        for name in graph
        for target in sorted(graph[name])
        if level_of(modules[target].room) > level_of(modules[name].room)
    ]


# Reaches into private names.


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def own_names(tree: ast.Module) -> set[str]:
    """Names that a module defines: functions, classes, variables, fields, and what methods set on self."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            found.add(node.attr)
    return found


def _is_own(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def _is_within_allowed(value: ast.expr) -> bool:
    """Whether an allowed private module stands in front: torch._C.f is allowed when _C is."""
    while isinstance(value, ast.Attribute):
        if value.attr in ALLOWED:
            return True
        value = value.value
    return False


def private_reaches(tree: ast.Module) -> list[tuple[int, str]]:
    """(line, expression) of each use of a private name that the module does not define.

    An attribute of self, cls or super() is no reach, and neither is a name in OTHERS_PRIVATE. getattr, hasattr,
    setattr and delattr of a constant count, and imports of a private name or from a private module; what stands within
    a private module that is allowed does not.
    """
    own = own_names(tree) | set(ALLOWED)
    found = []
    for node in ast.walk(tree):
        names: Sequence[str] = ()
        if isinstance(node, ast.Attribute) and not _is_own(node.value):
            names = [] if _is_within_allowed(node.value) else [node.attr]
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            parts = (node.module or "").split(".")
            names = [] if set(parts) & set(ALLOWED) else [*parts, *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            word = node.args[1]
            if node.func.id in ("getattr", "hasattr", "setattr", "delattr") and isinstance(word, ast.Constant):
                names = [] if _is_own(node.args[0]) else [str(word.value)]
        if any(is_private(name) and name not in own for name in names):
            found.append((node.lineno, ast.unparse(node)))  # type: ignore[attr-defined]
    return sorted(found)


def reaches_of_tests(modules: Mapping[str, Module], tests: Path) -> list[str]:
    """Uses in tests, "file:line: expression", of private names that these modules define."""
    private = {name for module in modules.values() for name in own_names(module.tree) if is_private(name)}
    return [
        f"{path.relative_to(tests)}:{line}: {expression}"
        for path in sorted(tests.rglob("*.py"))
        for line, expression in private_reaches(ast.parse(path.read_text()))
        if private & set(re.findall(r"\b_\w+", expression))
    ]


# Names, functions and docstrings.


def named_like_the_standard_library(modules: Mapping[str, Module]) -> list[str]:
    return [name for name in modules if "." in name and name.rpartition(".")[2] in sys.stdlib_module_names]


def function_lengths(modules: Mapping[str, Module]) -> dict[str, int]:
    """Lines of each function, its decorators left out, by "module:Class.function"."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{prefix}{child.name}", (child.end_lineno or child.lineno) - child.lineno + 1
            named = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            yield from walk(child, f"{prefix}{child.name}." if named else prefix)  # type: ignore[attr-defined]

    return {name: n for module in modules.values() for name, n in walk(module.tree, f"{module.name}:")}


def docstrings_in(tree: ast.Module) -> list[str]:
    """Of the module, its classes and functions, and texts that stand below a variable or a field."""
    found = []
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            found += [
                item.value.value
                for item in body
                if isinstance(item, ast.Expr)
                and isinstance(item.value, ast.Constant)
                and isinstance(item.value.value, str)
            ]
    return found


def opens_with_fragment(docstring: str) -> bool:
    """Guess whether the first sentence of a docstring is none.

    It is taken for a fragment if its first word is one of FRAGMENT_OPENERS, or if it opens like a noun phrase (with a
    determiner, or with "Something of") and has no word of FINITE in front of its first subordinate clause. Noun phrases
    that open otherwise ("Hooks of layers" is found, "Saved tensors" is not) are missed; a main verb that FINITE lacks,
    or that stands behind a clause, makes a sentence a fragment wrongly. Read the share as a trend.
    """
    sentence = re.split(r"(?<=[.:;!?])\s|\n\s*\n", docstring.strip(), maxsplit=1)[0]
    words = re.findall(r"[\w-]+", sentence.lower())
    if not words or words[0] in FRAGMENT_OPENERS.split():
        return True
    noun_phrase = words[0] in DETERMINERS.split() or words[1:2] == ["of"]
    main = re.findall(r"[\w-]+", SUBORDINATE.split(sentence, maxsplit=1)[0].lower())
    return noun_phrase and not set(main) & set(FINITE.split())


@dataclass(frozen=True)
class Figures:
    modules: int
    lines: int
    root_modules: list[str]
    module_circles: list[list[str]]
    package_circles: list[list[str]]
    upward_imports: list[tuple[str, str]]
    private_reaches: list[str]
    reaches_of_tests: int
    named_like_the_standard_library: list[str]
    fragments_percent: float
    """Share of docstrings."""
    longest_function: tuple[str, int]


def figures_of(source: Path, tests: Path) -> Figures:
    modules = read_modules(source)
    docstrings = [text for module in modules.values() for text in docstrings_in(module.tree)]
    lengths = function_lengths(modules)
    return Figures(
        modules=len(modules),
        lines=sum(len(module.text.splitlines()) for module in modules.values()),
        root_modules=sorted(path.stem for path in source.glob("*.py")),
        module_circles=circles(import_graph(modules)),
        package_circles=circles(package_graph(modules)),
        upward_imports=upward_imports(modules),
        private_reaches=[
            f"{module.path.relative_to(source)}:{line}: {expression}"
            for module in modules.values()
            for line, expression in private_reaches(module.tree)
        ],
        reaches_of_tests=len(reaches_of_tests(modules, tests)),
        named_like_the_standard_library=named_like_the_standard_library(modules),
        fragments_percent=round(100 * sum(map(opens_with_fragment, docstrings)) / max(1, len(docstrings)), 1),
        longest_function=max(lengths.items(), key=lambda item: item[1], default=("", 0)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    figures = vars(figures_of(SOURCE, TESTS))
    if parser.parse_args().json:
        print(json.dumps(figures, indent=2))
        return
    for name, value in figures.items():
        words = name.replace("_", " ")
        if isinstance(value, list):
            print(f"{words}: {len(value)}")
            for item in value:
                print(f"    {item if isinstance(item, str) else ' '.join(item)}")
        else:
            print(f"{words}: {' '.join(map(str, value)) if isinstance(value, tuple) else value}")


if __name__ == "__main__":
    main()
