"""Names of the plain module, and saved names that mean the same.

Seen red with: the trace taken out of the middle of a word, one trace of two in a row left, `module.` taken from some
names only, added or taken off never, exact names not tried first, folders of names not looked at apart, collisions let
through.
"""

from __future__ import annotations

import doctest

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hostward.errors import CheckpointError
from hostward.model import parameter_names
from hostward.model.parameter_names import by_plain_name, matched, plain_name

PLAIN = {
    "_orig_mod.w": "w",
    "layers.3._orig_mod.w": "layers.3.w",
    "_orig_mod._orig_mod.a._orig_mod.w": "a.w",
    "a._checkpoint_wrapped_module._orig_mod.w": "a.w",
    "model/_orig_mod.w": "model/w",
    "optimizer/_orig_mod.w/exp_avg": "optimizer/w/exp_avg",
    "layers.3._orig_mod": "layers.3",
    "_orig_mod": "",
    "": "",
    "my_orig_mod.w": "my_orig_mod.w",
    "a._orig_mod2.w": "a._orig_mod2.w",
    "module.w": "module.w",
}
words = st.sampled_from(["a", "b", "module", "layers", "0", "my_orig_mod", "_orig_mod_"])
dotted = st.lists(words, min_size=1, max_size=4).map(".".join)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_names(name: str) -> None:
    assert plain_name(name) == PLAIN[name]


@given(st.lists(st.sampled_from(["a", "module", "_orig_mod", "_checkpoint_wrapped_module"]), min_size=1, max_size=6))
def test_a_plain_name_has_the_other_words_in_order_and_stays(parts: list[str]) -> None:
    plain = plain_name(".".join(parts))
    assert plain == ".".join(p for p in parts if p in ("a", "module"))
    assert plain_name(plain) == plain


@given(st.sets(dotted, min_size=1, max_size=6))
def test_names_that_agree_are_found_as_they_are(saved: set[str]) -> None:
    assert matched(saved, saved) == {name: name for name in saved}


@given(st.sets(dotted, min_size=1, max_size=6))
def test_data_parallel_names_are_found_from_both_sides(plain: set[str]) -> None:
    wrapped = {f"_orig_mod.module.{name}": name for name in plain}
    if not plain & {f"module.{name}" for name in plain}:
        assert matched(plain, wrapped) == {name: w for w, name in wrapped.items()}
        assert matched(wrapped, plain) == wrapped


def test_module_is_added_to_all_names_or_to_none() -> None:
    assert matched(["x", "y"], ["module.x", "y"]) == {"y": "y"}
    assert matched(["module.x", "y"], ["x", "y"]) == {"y": "y"}
    assert matched(["x", "y"], ["module.x"]) == {}
    assert matched(["x"], ["module.x", "x"]) == {"x": "x"}


def test_each_folder_of_names_by_itself() -> None:
    saved = ["model/module.x", "model/module.y", "optimizer/x/step", "rng/torch"]
    wanted = ["model/x", "model/y", "optimizer/x/step", "rng/torch"]
    assert matched(wanted, saved) == dict(zip(wanted, saved, strict=True))
    assert matched(saved, wanted) == dict(zip(saved, wanted, strict=True))


@pytest.mark.parametrize("side", ["wanted", "saved"])
def test_names_that_become_equal_are_an_error(side: str) -> None:
    both = ["a.w", "a._orig_mod.w"]
    with pytest.raises(CheckpointError, match=r"'a\.w' and 'a\._orig_mod\.w' both name 'a\.w'"):
        matched(*((both, ["a.w"]) if side == "wanted" else (["a.w"], both)))
    assert by_plain_name(["a.w", "a.w"]) == {"a.w": "a.w"}


def test_examples() -> None:
    assert doctest.testmod(parameter_names).failed == 0
