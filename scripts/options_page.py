"""Write docs/options.md from the declarations: `python scripts/options_page.py docs/options.md`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from hostward.config.overrides import DEEPSPEED, DROPPED
from hostward.config.reference import meaning, status
from hostward.config.rules.combinations import COMBINATIONS
from hostward.config.rules.table import DEPENDENT, DIFFERENCES, Kind, Rule
from hostward.config.schema import NAMESPACES, OptionInfo, options
from hostward.config.validate import shown

HEAD = """# Options

For looking up an option: its name, type, default, and the rules that it keeps with others.
In a terminal, `hostward options WORD` lists the options that have a word in their name or meaning.

This page is generated from the declarations in `src/hostward`
(`python scripts/options_page.py docs/options.md`); a test keeps it equal to them.

An option is set as `namespace.option=value` on the command line, or as `config.namespace.option = value` in Python. The
names are Megatron's. Each option has one default; a recipe sets some of them; words on the command line come last.

- bool takes `true` and `false`, also capitalised, and nothing else.
- int takes decimal digits; float a finite decimal number.
- str takes the characters exactly as typed: nothing is unquoted, expanded or read as YAML.
- A list is written `[a,b]`.
- `null` and `None` both mean None, where the option may be None. (A file of that name is `./None`.)

An unknown name is an error that proposes the nearest one. All rules are checked at once, before anything is allocated.
"""

STATUS_NOTE = """
Status: *works*; *only V* means that every other value is refused, with a message, until it is built; *with X* means
that the option waits for X, which is not built yet.
"""


def render() -> str:
    """The whole page."""
    parts = [HEAD, STATUS_NOTE]
    for namespace, declared in NAMESPACES.items():
        parts.append(f"\n## {namespace}\n\n{(declared.__doc__ or '').strip()}\n\n")
        parts.append("| Option | Type | Default | Status | Meaning |\n|---|---|---|---|---|\n")
        parts.extend(option_row(info) for info in options().values() if info.namespace == namespace)
    parts.append(rules_section())
    parts.append("\n## Where hostward differs from Megatron\n\n| Megatron | hostward |\n|---|---|\n")
    parts.extend(f"| {megatron} | {here} |\n" for megatron, here in DIFFERENCES.items())
    parts.append("\n## Options of Megatron without a counterpart\n\n")
    parts.append("They are never checked; naming one on the command line is an error that gives the reason.\n\n")
    parts.append("| Option | Why there is none |\n|---|---|\n")
    parts.extend(f"| `{name}` | {reason} |\n" for name, reason in DROPPED.items())
    parts.append("\n## DeepSpeed's names\n\nNaming one is an error that gives what is written here.\n\n")
    parts.append("| DeepSpeed | hostward |\n|---|---|\n")
    parts.extend(f"| `{name}` | {here} |\n" for name, here in DEEPSPEED.items())
    return "".join(parts)


def option_row(info: OptionInfo) -> str:
    """One line of the table of a namespace."""
    return f"| `{info.name}` | {info.type_text} | `{shown(info.default)}` | {status(info.dotted)} | {meaning(info)} |\n"


def rules_section() -> str:
    """The rules on combinations, by class."""
    text = "\n## Rules on combinations\n\nA text marked M is Megatron's, word for word. Besides these, an option whose "
    text += "switch is off must be left at its default:\n\n"
    text += "| Switch | Options that mean something only with it |\n|---|---|\n"
    for switch, dependents in DEPENDENT.items():
        text += f"| `{switch}` | {', '.join(f'`{name}`' for name in dependents)} |\n"
    titles = {Kind.PERMANENT: "Permanent", Kind.UNTIL_BUILT: "Until built"}
    for kind, title in titles.items():
        text += f"\n### {title}\n\n| Rule | Message | |\n|---|---|---|\n"
        text += "".join(rule_row(rule) for rule in COMBINATIONS if rule.kind is kind)
    return text


def rule_row(rule: Rule) -> str:
    """One line of the table of rules; values that a message quotes are shown as `...`."""
    message = rule.documented or (re.sub(r"\{[^}]*\}", "...", rule.message) if isinstance(rule.message, str) else "")
    return f"| {rule.id} | {message} | {'M' if rule.shared_with_megatron else ''} |\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
