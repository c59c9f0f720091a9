"""Evaluate every rule and report every violation at once; nothing is edited and nothing allocated.

There are three classes. Permanent rules hold for good. Rules until built reject what this version does not do yet,
instead of ignoring it. Dropped rules of Megatron are never checked; `overrides.DROPPED` lists their options.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hostward.config.rules.combinations import COMBINATIONS
from hostward.config.rules.table import DEPENDENT, IDLE, NOT_BUILT, NOT_BUILT_FOR_RANKS, RANGES, Kind, Rule, Text
from hostward.config.schema import NAMESPACES, Config, OptionInfo, get_option, options
from hostward.errors import ConfigError, NotBuiltError


@dataclass(frozen=True, slots=True)
class Violation:
    """Describe one rule that a configuration breaks."""

    rule: str
    kind: Kind
    message: str
    fix: str
    why: str = ""


def violations(config: Config, *, world_size: int = 1) -> list[Violation]:
    """Return what `config` asks for and `world_size` processes cannot carry out; empty when it can run."""
    found: list[Violation] = []
    wrong: set[str] = set()
    for info in options().values():
        violation = value_violation(info, get_option(config, info.dotted))
        if violation is not None:
            found.append(violation)
            wrong.add(info.dotted)
    found.extend(dependent_violations(config, wrong))
    for rule in COMBINATIONS:
        if wrong.isdisjoint(rule.reads) and rule.broken(config, world_size):
            found.append(rule_violation(rule, config, world_size))
    found.extend(not_built_violations(config, wrong, world_size))
    return found


def check(config: Config, *, world_size: int = 1) -> None:
    """Raise one error that lists every violation of `config`; return when there is none.

    Raises:
        NotBuiltError: each violation asks for something that is known and not built yet.
        ConfigError: at least one violation is permanent.
    """
    found = violations(config, world_size=world_size)
    if not found:
        return
    kind = NotBuiltError if all(v.kind is Kind.UNTIL_BUILT for v in found) else ConfigError
    error = kind(found[0].message, why=found[0].why, fix=found[0].fix) if len(found) == 1 else kind(_listed(found))
    error.everywhere = True  # all ranks have the same options, or another check raises
    raise error


def _listed(found: Sequence[Violation]) -> str:
    lines = [f"{len(found)} settings cannot be carried out:"]
    for number, violation in enumerate(found, start=1):
        lines.append(f"  {number}. {violation.message}")
        lines += [f"     why: {violation.why}"] if violation.why else []
        lines.append(f"     fix: {violation.fix}")
    return "\n".join(lines)


def value_violation(info: OptionInfo, value: Any) -> Violation | None:
    """Check the value of one option by itself: its type, its choice and its range."""
    if (value is None and info.optional) or (isinstance(value, str) and value in info.words):
        return None
    example = f"set {info.dotted} to {shown(info.choices[0] if info.choices else info.default)}"
    if not has_type(value, info.kind):
        message = f"{info.dotted} must be of type {info.type_text}, not {value!r} ({type(value).__name__})"
        return Violation(f"type:{info.dotted}", Kind.PERMANENT, message, f"give {info.dotted} a {info.type_text}")
    if info.choices and value not in info.choices:
        meant = info.nearest_value(value)
        example = f"did you mean {info.dotted}={meant}?" if meant else example
        message = f"{info.dotted} must be one of {', '.join(info.choices)}, not {value!r}"
        return Violation(f"choice:{info.dotted}", Kind.PERMANENT, message, example)
    bounds = RANGES.get(info.dotted)
    if bounds is not None and not bounds.holds(value):
        message = bounds.message or f"{info.dotted} must be {bounds.text}, not {value}"
        fix = f"set {info.dotted} to a number {bounds.text}"
        return Violation(f"range:{info.dotted}", Kind.PERMANENT, message, fix)
    return None


def has_type(value: Any, kind: type) -> bool:
    """Return whether `value` is of the declared `kind`; a bool is no number, an int is a float."""
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is float:
        return isinstance(value, (int, float))
    if kind is list:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    return isinstance(value, kind)


def dependent_violations(config: Config, wrong: set[str]) -> Iterator[Violation]:
    """Find options that are set and mean nothing, because their switch is off."""
    for switch, dependents in DEPENDENT.items():
        if switch in wrong or get_option(config, switch) not in (False, None):
            continue
        for name in dependents:
            value, info = get_option(config, name), options()[name]
            if name in wrong or value == info.default:
                continue
            message = f"{name}={shown(value)} has no effect while {switch}={shown(get_option(config, switch))}"
            missing = _switched_on(config, switch, name)
            fix = f"set {missing} too, or leave {name} at {shown(info.default)}"
            yield Violation(f"switch:{name}", Kind.PERMANENT, message, fix)


def idle_switches(config: Config) -> list[str]:
    """Describe switches that are on and do nothing, with the option that is missing.

    They are no error: a sweep from zero has such a run.
    """
    return [
        f"{switch}=true does nothing while {name}={shown(get_option(config, name))}: add {name}={example}, for example,"
        f" or leave {switch} at false"
        for switch, (name, example) in IDLE.items()
        if get_option(config, switch) and get_option(config, name) == options()[name].default
    ]


def _switched_on(config: Config, switch: str, name: str) -> str:
    """Return the words that turn on the switch of `name`, with what the switch needs besides."""
    needed, example = IDLE.get(switch, ("", ""))
    words = [f"{switch}=true" if get_option(config, switch) is False else switch]
    if needed not in ("", name) and get_option(config, needed) == options()[needed].default:
        words.append(f"{needed}={example}")
    return " ".join(words)


def not_built_violations(config: Config, wrong: set[str], world_size: int) -> Iterator[Violation]:
    """Find options that are known and that this version does not carry out."""
    for name, (built, why) in NOT_BUILT.items():
        value = get_option(config, name)
        if name not in wrong and value != built:
            message = f"{name}={shown(value)} is known, but not built yet"
            yield Violation(f"not-built:{name}", Kind.UNTIL_BUILT, message, f"set {name}={shown(built)}", why)
    for name, built in NOT_BUILT_FOR_RANKS.items() if world_size > 1 else ():
        value = get_option(config, name)
        if name not in wrong and value != built:
            message = f"{name}={shown(value)} with {world_size} processes is known, but not built yet"
            fix = f"set {name}={shown(built)}, or start one process (torchrun: --nproc-per-node 1)"
            yield Violation(f"not-built:{name}", Kind.UNTIL_BUILT, message, fix)


def rule_violation(rule: Rule, config: Config, world_size: int) -> Violation:
    """Build the violation of a combination rule, its texts filled in."""
    values: dict[str, Any] = {namespace: getattr(config, namespace) for namespace in NAMESPACES}
    values["world_size"] = world_size

    def fill(text: Text) -> str:
        return text.format(**values) if isinstance(text, str) else text(config, world_size)

    return Violation(rule.id, rule.kind, fill(rule.message), fill(rule.fix))


def shown(value: Any) -> str:
    """Format a value as one types it on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(value)}]"
    return str(value)
