"""This module reads, writes, checks and re-seeds state by parameter name, wherever its ranges are stored."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import torch

from hostward.core.inventory import FP8_BLOCK, FP32_STATE, MAIN_PARAM, MOMENTS, Dtype, MasterKind, Range, StateFormat
from hostward.core.placement import Placement
from hostward.distributed.flat_shards import FlatPart
from hostward.errors import CheckpointError, ConfigError, ModelError
from hostward.model.deferred_weights import drop_value, is_away, value_of, waits
from hostward.model.parameter_names import matched
from hostward.model.parameters import ParamRecord
from hostward.optim.bucket_state import (
    BucketState,
    fp8_stored,
    fp8_values,
    join_master,
    rounded,
    same_bits,
    slab_views,
    split_master,
)
from hostward.optim.param_groups import NAMES, check_group, is_number, shown
from hostward.runtime.backend import DTYPES, STATE_DTYPES


class StateAccess:
    """StateAccess gives whole-parameter access over the ranges of all buckets.

    All streams must be idle while it is used.
    """

    def __init__(
        self,
        pieces: Mapping[str, Sequence[tuple[BucketState, int, Range]]],
        tracked: Mapping[str, ParamRecord],
        form: StateFormat = FP32_STATE,
    ) -> None:
        self._pieces = pieces
        self._form, self._dtypes = form, entry_dtypes(form)
        self._tracked = tracked
        self.empty_counts: Mapping[str, torch.Tensor] = {}
        """Step counts of parameters of which this process has no element, int64 [1]."""
        self.present: Callable[[str], AbstractContextManager[None]] | None = None
        """Context within which an offloaded weight is on the device: `present(name)`."""

    def _there(self, name: str) -> AbstractContextManager[None]:
        if is_away(self._tracked[name].parameter):
            raise waits(name)
        return nullcontext() if self.present is None else self.present(name)

    def require(self, name: str) -> None:
        """Raise ModelError for a name that is not tracked."""
        if name not in self._tracked:
            raise ModelError(f"the optimizer tracks no parameter {name!r}", fix="use names of optimizer.inventory")

    def kind(self, name: str) -> MasterKind:
        pieces = self._pieces.get(name)
        return pieces[0][0].bucket.kind if pieces else MasterKind.WEIGHT

    def has_master(self, name: str) -> bool:
        """Return whether the state of a parameter has an fp32 main weight besides the weight."""
        return self._form.master_kind(DTYPES[self._tracked[name].local.dtype]) is not MasterKind.WEIGHT

    def _is_fp8(self, name: str, role: str) -> bool:
        return self._form.of(self._tracked[name].parameter.dim()).moments.get(role) is Dtype.FP8

    def pieces(self, name: str) -> Sequence[tuple[BucketState, int, Range]]:
        """Return (bucket state, index within the bucket, range) of a parameter's parts, in order of start."""
        return self._pieces.get(name, ())

    def copied_bytes(self) -> int:
        """Return the host bytes that `read` allocates for all parameters together."""
        parameters = [t.local for t in self._tracked.values()]
        return sum(p.numel() * self._form.saved_element_bytes(DTYPES[p.dtype]) for p in parameters)

    def read(self, name: str, *, copy: bool = True) -> dict[str, torch.Tensor]:
        """Return CPU tensors: step int64 [], moments [shape] as stored (FP8 in bfloat16), fp32 main weight [shape].

        They are fresh ones; with copy=False those that are stored on the host in one piece are views of the state
        itself.
        """
        parameter = self._tracked[name].local
        found = [(state, r, dict(slab_views(state, index))) for state, index, r in self._pieces.get(name, ())]
        entry = {}
        for role in MOMENTS:
            whole = None if copy or self._is_fp8(name, role) else _one_view([views[role] for _, _, views in found])
            if whole is None:
                whole = torch.empty(parameter.numel(), dtype=self._dtypes[role], device="cpu")
                for _, r, views in found:
                    _read_moment(views, role, whole[r.start : r.stop])
            entry[role] = whole.view(parameter.shape)
        if self.has_master(name):
            with self._there(name):
                entry["master"] = _masters(parameter, found)
        like = self._tracked[name].like
        placed = {role: like(value) for role, value in entry.items()}
        return {"step": torch.tensor(self.count(name), dtype=torch.int64, device="cpu"), **placed}

    def count(self, name: str) -> int:
        """Return the number of steps of a parameter."""
        counts = [state.counts.data[i : i + 1] for state, i, _ in self._pieces.get(name, ())]
        return next((int(count.item()) for count in (*counts, *self._empty_count(name))), 0)

    def empty(self, name: str) -> dict[str, torch.Tensor]:
        """Return what `read` returns, without its contents."""
        tracked = self._tracked[name]
        roles = [*MOMENTS, *(["master"] if self.has_master(name) else [])]
        made = {r: tracked.like(torch.empty(tracked.local.shape, dtype=self._dtypes[r], device="cpu")) for r in roles}
        return {"step": torch.zeros((), dtype=torch.int64, device="cpu"), **made}

    def _empty_count(self, name: str) -> list[torch.Tensor]:
        return [self.empty_counts[name]] if name in self.empty_counts else []

    def write(self, name: str, saved: Mapping[str, torch.Tensor], rows: slice | None = None) -> bool:
        """Write a state that `check` has passed. Without a "master" an fp32 main weight is the weight that there is.

        Args:
            rows: of this process's part, the only ones that are written; in elements whole blocks of FP8 moments. None:
                all of them.

        Returns whether the weight was set, because it was not the rounded fp32 main weight.
        """
        with self._there(name):
            return self._write(name, saved, rows)

    def _write(self, name: str, saved: Mapping[str, torch.Tensor], rows: slice | None) -> bool:
        parameter = self._tracked[name].local
        span = _elements_of(rows, parameter)
        saved = {role: self._tracked[name].part_of(value) for role, value in saved.items() if role != "step"} | {
            "step": saved["step"]
        }
        for count in self._empty_count(name):
            count.fill_(int(saved["step"]))
        weight = _flat(parameter)
        master = saved["master"].reshape(-1) if "master" in saved and self.has_master(name) else None
        set_weight = False
        if master is not None:
            for part in _parts(span.stop, span.start):
                new_weight = rounded(master[part].to(weight.device), parameter.dtype)
                if not same_bits(new_weight, weight[part]):
                    weight[part].copy_(new_weight)
                    set_weight = True
            if set_weight and not parameter.data.is_contiguous():  # a contiguous one was written through its flat view
                parameter.data.copy_(weight.view(parameter.shape))
        for state, index, r in self._pieces.get(name, ()):
            state.counts.data[index] = int(saved["step"])
            here = slice(max(r.start, span.start), min(r.stop, span.stop))
            if here.start >= here.stop:
                continue
            part = slice(here.start - r.start, here.stop - r.start)
            views = _views_of(state, index, part)
            for role in MOMENTS:
                _write_moment(views, role, saved[role].reshape(-1)[here])
            if master is not None:
                _set_low(state, views, master[here])
            else:
                _seed_low(views, weight[here])
            _refresh_host_weight(state, index, weight[here], part)
        return set_weight

    def reseed(self, name: str) -> None:
        """Set the fp32 main weight to the weight, and its low 16 bits to 0; moments and counts stay."""
        parameter = self._tracked[name].parameter
        if is_away(parameter):
            self._reseed(name, value_of(parameter))
            if all(state.placement is Placement.HOST for state, _, _ in self._pieces.get(name, ())):
                drop_value(parameter)
            return
        with self._there(name):
            self._reseed(name, self._tracked[name].local)

    def _reseed(self, name: str, value: torch.Tensor) -> None:
        weight = _flat(value)
        for state, index, r in self._pieces.get(name, ()):
            views = dict(slab_views(state, index))
            piece = weight[r.start : r.stop]
            _seed_low(views, piece)
            _refresh_host_weight(state, index, piece)

    def _keys(self, name: str) -> list[str]:
        return ["step", *MOMENTS, *(["master"] if self.has_master(name) else [])]

    def merged(self, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a parameter with some of it replaced.

        Raises:
            CheckpointError: a key that the state does not have, or a value of another shape or dtype.
        """
        keys = self._keys(name)
        unknown = sorted(values.keys() - set(keys))
        if unknown:
            raise CheckpointError(
                f"the state of {name!r} has no {unknown[0]!r}", fix=f"give some of: {', '.join(keys)}"
            )
        merged = dict(values) if len(values) == len(keys) else {**self.read(name), **values}
        self._check_entry(name, merged)
        return merged

    def require_present(self) -> None:
        """Raise ModelError if a weight has no value here, because it waits for its layer."""
        for name, tracked in self._tracked.items():
            if is_away(tracked.parameter):
                raise waits(name)

    def check(self, saved: Mapping[str, Mapping[str, Any]], form: StateFormat = FP32_STATE) -> None:
        """Raise CheckpointError unless `saved` has the entries, shapes and dtypes of every tracked parameter.

        Args:
            form: the format in which it was saved, as `saved_form` returns it.
        """
        self.require_present()
        for name, tracked in self._tracked.items():
            entry = saved.get(name)
            wanted = self._keys(name)
            if form.main_param is Dtype.BF16 and tracked.local.dtype is torch.bfloat16:
                wanted = ["step", *MOMENTS]
            if entry is None or any(role not in entry for role in wanted):
                raise _lacks([role for role in wanted if role not in (entry or ())], name)
            if "master" in entry and tracked.local.dtype is torch.bfloat16 and not self.has_master(name):
                raise drops_masters(f"master of parameter {name!r}")
            self._check_entry(name, entry)

    def _check_entry(self, name: str, entry: Mapping[str, Any]) -> None:
        """Raise CheckpointError unless the values have the parameter's shape, in the dtypes of a state."""
        tracked = self._tracked[name]
        if not _is_count(entry["step"]):
            raise CheckpointError(
                f"step of parameter {name!r} is {entry['step']!r} in the saved state, expected a whole number >= 0",
                fix="load what AdamW.state_dict() returned",
            )
        for role in (role for role in (*MOMENTS, "master") if role in entry):
            value, shape, dtype = entry[role], tracked.parameter.shape, self._dtypes[role]
            if not isinstance(value, torch.Tensor) or value.shape != shape or not loads(value.dtype, dtype, role):
                found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value)
                if isinstance(value, torch.Tensor) and value.shape == shape and would_round(value.dtype, dtype):
                    stored = self._form.of(tracked.parameter.dim()).moments[role]
                    raise rounds(f"{role} of parameter {name!r}", stored, self._form.moments[role])
                expected = str(dtype).removeprefix("torch.")
                raise CheckpointError(
                    f"{role} of parameter {name!r} is {found} in the saved state, expected {expected} {tuple(shape)}",
                    fix="load a state of the same model",
                )
            part = tracked.part_of(value)
            if part.layout is not torch.strided or part.is_meta or part.is_neg():
                raise CheckpointError(
                    f"{role} of parameter {name!r} is no plain dense tensor in the saved state",
                    why="its values would be read while others have been written: it is sparse, on the meta device, or "
                    "a negative view",
                    fix="load dense tensors, with no map_location='meta'",
                )
            if self._is_fp8(name, role) and not _fits_fp8(part.reshape(-1), role):
                raise rounds_to_fp8(f"{role} of parameter {name!r}")


def entry_dtypes(form: StateFormat) -> dict[str, torch.dtype]:
    """Return the dtypes of a state's tensors, moments and fp32 main weights, by role."""
    return {role: saved_dtype(dtype) for role, dtype in form.moments.items()} | {"master": torch.float32}


def saved_dtype(dtype: Dtype) -> torch.dtype:
    """Return the dtype in which a moment is saved: its own, and bfloat16 for FP8, whose values it holds exactly."""
    return torch.bfloat16 if dtype is Dtype.FP8 else STATE_DTYPES[dtype]


def state_dtypes(form: StateFormat) -> dict[str, torch.dtype]:
    """Return the dtypes of a state's parts by name, as `AdamW(state_dtypes=...)` takes them."""
    return {name: STATE_DTYPES[dtype] for name, dtype in form.dtypes.items()}


def loads(saved: torch.dtype, wanted: torch.dtype, role: str) -> bool:
    """Return whether a saved tensor of a state loads into one of dtype `wanted`: as it is, or a moment exactly."""
    return saved is wanted or (role in MOMENTS and saved is torch.bfloat16 and wanted is torch.float32)


def would_round(saved: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether a saved moment is fp32 where it is stored in bf16."""
    return saved is torch.float32 and wanted is torch.bfloat16


def _on_purpose(form: str) -> str:
    """Say how to take this loss, a form of `hostward checkpoint convert`."""
    return (
        f"or take the loss: hostward.convert.rounded(state, state_dtypes), or of a checkpoint of hostward train "
        f"hostward checkpoint convert FOLDER OUT --to {form}"
    )


def rounds(what: str, stored: Dtype = Dtype.BF16, asked: Dtype = Dtype.BF16) -> CheckpointError:
    """Return the error for fp32 moments that this optimizer would store in bf16 or FP8.

    stored: dtype of this moment here. asked: dtype of such moments in matrices, to which a state is converted.
    """
    name, lost = ("FP8", "all but 3 bits of its mantissa") if stored is Dtype.FP8 else ("bfloat16", "16 of its 32 bits")
    return CheckpointError(
        f"{what} is float32 in the saved state, and this optimizer stores it in {name}",
        why=f"{lost} would be lost, and training would not go on as it was",
        fix="leave state_dtypes out (in a run: optimizer.exp_avg_dtype and optimizer.exp_avg_sq_dtype); "
        + _on_purpose(f"{asked.value}-moments"),
    )


def rounds_to_fp8(what: str) -> CheckpointError:
    """Return the error for moments that FP8 does not hold as they are."""
    return CheckpointError(
        f"{what} in the saved state has values that FP8 does not hold, in which this optimizer stores it",
        why="of each but 3 bits of mantissa would be lost, or it was stored in FP8 in other blocks",
        fix="leave state_dtypes out (in a run: optimizer.exp_avg_dtype and optimizer.exp_avg_sq_dtype); "
        + _on_purpose("fp8-moments"),
    )


def drops_masters(what: str) -> CheckpointError:
    """Return the error for fp32 main weights in a saved state where this optimizer has bf16 ones."""
    return CheckpointError(
        f"{what} is the fp32 main weight in the saved state, and this optimizer keeps main weights in bfloat16",
        why="the low 16 of its 32 bits would be lost, and training would not go on as it was",
        fix="leave main_param out of state_dtypes (in a run: optimizer.main_params_dtype); "
        + _on_purpose("bf16-main-params"),
    )


def _lacks(roles: Sequence[str], name: str) -> CheckpointError:
    what = f"the saved state has no {'/'.join(roles)} for parameter {name!r}"
    if roles == ["master"]:
        return CheckpointError(
            what,
            why="the weight is 16-bit, so the state holds its fp32 main weight besides",
            fix="load a state of the same params_dtype; from_torch_adamw(..., masters={name: fp32 weight}) adds them",
        )
    return CheckpointError(
        what,
        why="it is of another model, or of one with other weight dtypes",
        fix="load a state of the same model and params_dtype",
    )


def _is_count(value: object) -> bool:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_floating_point() and not value.is_meta:
        value = value.item()
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _flat(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.data.reshape(-1)


def _elements_of(rows: slice | None, part: torch.Tensor) -> slice:
    """Return the elements of these rows, which follow one another; of all for None."""
    if rows is None:
        return slice(0, part.numel())
    below = part.numel() // len(part)
    return slice(rows.start * below, rows.stop * below)


def _views_of(state: BucketState, index: int, part: slice) -> dict[str, torch.Tensor]:
    """Return `slab_views` of some elements of a range, which begin with a block of FP8 moments."""
    blocks = slice(part.start // FP8_BLOCK, -(-part.stop // FP8_BLOCK))
    return {role: view[blocks if role.endswith("_scales") else part] for role, view in slab_views(state, index)}


def _parts(stop: int, start: int = 0) -> Iterator[slice]:
    """Return slices in which fp32 main weights are split, joined and rounded.

    They bound the memory for intermediate results, on the device as well.
    """
    return (slice(first, min(first + _PART_ELEMENTS, stop)) for first in range(start, stop, _PART_ELEMENTS))


_PART_ELEMENTS = 4 << 20
"""About 80 MB of intermediate results; whole blocks of FP8 moments."""


def _one_view(views: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return one flat tensor over views that are stored on the host end to end; None where they are not."""
    if not views or views[0].device.type != "cpu":
        return None
    storage, end = views[0].untyped_storage().data_ptr(), views[0].data_ptr()
    for view in views:
        if view.data_ptr() != end or view.untyped_storage().data_ptr() != storage:
            return None
        end += view.nbytes
    return views[0].as_strided((sum(view.numel() for view in views),), (1,))


def _masters(
    parameter: torch.Tensor, found: Sequence[tuple[BucketState, Range, Mapping[str, torch.Tensor]]]
) -> torch.Tensor:
    master, weight = torch.empty(parameter.numel(), dtype=torch.float32, device="cpu"), _flat(parameter)
    for state, r, views in found:
        _read_master(state, views, weight[r.start : r.stop], master[r.start : r.stop])
    return master.view(parameter.shape)


def _read_master(
    state: BucketState, views: Mapping[str, torch.Tensor], weight: torch.Tensor, into: torch.Tensor
) -> None:
    if state.bucket.kind is MasterKind.PLAIN:
        into.copy_(views["master"])
        return
    for part in _parts(len(weight)):
        into[part].copy_(join_master(weight[part], views["remainder"][part].to(weight.device)))


def _read_moment(views: Mapping[str, torch.Tensor], role: str, into: torch.Tensor) -> None:
    scales = views.get(f"{role}_scales")
    if scales is None:
        into.copy_(views[role])
        return
    for part in _parts(len(into)):
        blocks = scales[part.start // FP8_BLOCK : -(-part.stop // FP8_BLOCK)]
        into[part].copy_(fp8_values(views[role][part], blocks, role))


def _write_moment(views: Mapping[str, torch.Tensor], role: str, value: torch.Tensor) -> None:
    scales = views.get(f"{role}_scales")
    if scales is None:
        views[role].copy_(value)
        return
    for part in _parts(len(value)):
        stored = fp8_stored(value[part], role)
        if stored is None:
            raise rounds_to_fp8(role)
        views[role][part].copy_(stored[0])
        scales[part.start // FP8_BLOCK : part.start // FP8_BLOCK + len(stored[1])].copy_(stored[1])


def _fits_fp8(value: torch.Tensor, role: str) -> bool:
    return all(fp8_stored(value[part], role) is not None for part in _parts(len(value)))


def _set_low(state: BucketState, views: Mapping[str, torch.Tensor], master: torch.Tensor) -> None:
    if state.bucket.kind is MasterKind.SPLIT:
        for part in _parts(len(master)):
            views["remainder"][part].copy_(split_master(master[part])[1])
    elif state.bucket.kind is MasterKind.PLAIN:
        views["master"].copy_(master)


def _seed_low(views: Mapping[str, torch.Tensor], weight: torch.Tensor) -> None:
    """Make the fp32 main weight, if there is one, that of this weight."""
    if "remainder" in views:
        views["remainder"].zero_()
    elif "master" in views:
        views["master"].copy_(weight.to(torch.float32))


def _refresh_host_weight(state: BucketState, index: int, weight: torch.Tensor, part: slice = slice(None)) -> None:
    if state.placement is Placement.HOST:
        state.weights[index].data[part].copy_(weight)


# The form of a state dict.


STATE_FORMAT = 1
OWNER = "hostward.AdamW"
"""Owner recorded in a state dict."""


def plain(key: str, value: object) -> object:
    """Return a value of a group as a state dict may hold it. Raises ModelError."""
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, tuple):
        return [item.item() if isinstance(item, torch.Tensor) else item for item in value]
    if value is None or isinstance(value, (bool, int, float, str, list)):
        return value
    raise ModelError(f"parameter group key {key!r} holds a {type(value).__name__}", fix="keep plain values in groups")


def saved_parts(
    state_dict: Mapping[str, Any],
) -> tuple[Mapping[str, Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Return (state, groups) of a saved state. Raises CheckpointError for anything else."""
    theirs = state_dict.get("optimizer", OWNER)
    if theirs != OWNER:
        raise CheckpointError(
            f"a state of {theirs}, not of {OWNER}", fix="load what state_dict() of this kind of optimizer returned"
        )
    state, groups = state_dict.get("state"), state_dict.get("param_groups")
    numbered = None if "format" in state_dict else _by_name(state, groups)
    if numbered is not None:
        return numbered
    if state_dict.get("format") != STATE_FORMAT:
        raise CheckpointError(
            "not an optimizer state of hostward",
            why=f"its format is {state_dict.get('format')!r}, expected {STATE_FORMAT}",
            fix="convert a torch.optim.AdamW state with hostward.convert.from_torch_adamw",
        )
    if not _is_whole(state, groups):
        raise CheckpointError(
            "the optimizer state is incomplete",
            why="it needs 'state' by parameter name and 'param_groups' with their 'params'",
            fix="load what AdamW.state_dict() returned",
        )
    return state or {}, list(groups or ())


def saved_cut(parts: Mapping[str, FlatPart]) -> dict[str, Any]:
    """Return what a state dict says of parameters that are parts of larger ones; nothing where none is."""
    cut = {name: asdict(part) for name, part in parts.items() if not part.is_whole}
    return {"parts": cut} if cut else {}


SAID_BY_GROUPS = ("moments", MAIN_PARAM)
"""Keys of `saved_dtypes` that stand in a saved group; they are no options of it, and loading drops them."""


def saved_dtypes(form: StateFormat) -> dict[str, Any]:
    """Return what a state dict says of the dtypes of its parts; nothing of those in fp32.

    torch.distributed.checkpoint copies what it reads into tensors of any dtype, and rounds. It raises for a key that
    was not saved, and replaces a value that was. Each saved group says this as well, since
    torch.distributed.checkpoint.state_dict, which trainers use, keeps state and groups alone.
    """
    said: dict[str, Any] = {}
    if not form.fp32_moments:
        said["moments"] = {role: dtype.value for role, dtype in form.moments.items()}
    if form.main_param is not Dtype.FP32:
        said[MAIN_PARAM] = form.main_param.value
    return said


def dtypes_for_torch() -> dict[str, Any]:
    """Return what groups say in the state that torch.distributed.checkpoint.state_dict asks for before it sets one.

    It puts tensors into that state, of whatever dtype, replaces what groups say there, and keeps what the state that it
    sets does not say: that one was saved in fp32.
    """
    return {"moments": dict.fromkeys(MOMENTS, Dtype.FP32.value), MAIN_PARAM: Dtype.FP32.value}


def saved_form(state_dict: Mapping[str, Any]) -> StateFormat:
    """Return the format that a saved state says it has, fp32 where it says nothing. Raises CheckpointError."""
    dtypes = _said_dtypes(state_dict)
    try:
        first, second, main = (Dtype(dtypes.get(name, Dtype.FP32)) for name in (*MOMENTS, MAIN_PARAM))
        return StateFormat(first, second, main)
    except (ValueError, ConfigError) as error:
        raise CheckpointError(f"a saved state has parts of dtypes {dtypes}", why=str(error)) from error


def _said_dtypes(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    groups = state_dict.get("param_groups")
    first = groups[0] if isinstance(groups, list) and groups and isinstance(groups[0], Mapping) else {}
    moments, main_param = ({**first, **state_dict}.get(key) for key in SAID_BY_GROUPS)
    return {**(moments if isinstance(moments, Mapping) else {}), MAIN_PARAM: main_param or Dtype.FP32}


def without_master(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a parameter that was saved without an fp32 main weight.

    Where torch.distributed.checkpoint.state_dict finds none, it leaves in the one of the optimizer that loads.
    """
    return {role: value for role, value in entry.items() if role != "master"}


def checked_dtypes(state_dict: Mapping[str, Any], form: StateFormat) -> StateFormat:
    """Return the format that a saved state says it has, fp32 where it says nothing.

    Raises:
        CheckpointError: parts were saved in fp32 that are stored in bf16 here; or it says what is no dtype.
    """
    saved, dtypes = saved_form(state_dict), _said_dtypes(state_dict)
    if is_set_by_torch() and saved.main_param is Dtype.FP32 and form.main_param is Dtype.BF16:
        raise drops_masters("the master of a parameter")  # which torch may give to one rank alone
    for role, dtype in form.moments.items():
        if role in dtypes and dtypes[role] == Dtype.FP32 and dtype is not Dtype.FP32:
            raise rounds(role) if dtype is Dtype.BF16 else rounds_to_fp8(role)
    return saved


def require_fp8(saved: StateFormat, form: StateFormat) -> None:
    """Raise CheckpointError unless moments were saved from FP8 where they are stored in FP8 here."""
    for role, dtype in form.moments.items():
        if dtype is Dtype.FP8 and saved.moments[role] is not Dtype.FP8:
            raise rounds_to_fp8(role)


def check_same_cut(state_dict: Mapping[str, Any], parts: Mapping[str, FlatPart], names: Sequence[str]) -> None:
    """Raise CheckpointError where a saved state is of other elements of the parameters `names` than these are.

    Shapes do not tell: parts of one size may lie anywhere.
    """
    theirs, mine = state_dict.get("parts", {}), saved_cut(parts).get("parts", {})
    if not isinstance(theirs, Mapping):
        raise CheckpointError(f"parts of a saved state are {theirs!r}", fix="load what AdamW.state_dict() returned")
    theirs = {name: theirs[saved] for name, saved in matched(names, theirs).items()}
    for name in sorted(theirs.keys() | mine.keys()):
        if theirs.get(name) != mine.get(name):
            saved, here = (cut.get(name, "a whole parameter") for cut in (theirs, mine))
            raise CheckpointError(
                f"the saved state of {name!r} is of {saved}, and here it is {here}",
                why="parameters were cut in another way when it was saved",
                fix="load it with the same number of processes, or put parts together: state_of(), set_state_of()",
            )


def require_uncut(parts: Mapping[str, FlatPart]) -> None:
    """Raise ModelError where a parameter is a part of a larger one."""
    cut = next((name for name, part in parts.items() if not part.is_whole), None)
    if cut is not None:
        raise ModelError(
            f"parameter {cut!r} is a part of {parts[cut].whole!r}, which hostward.checkpoint does not write",
            why="its files hold whole parameters, or DTensors, which say where their parts lie",
            fix="state_dict(), or state_of() and `parts`, for files that the owner of the buffers writes",
        )


def _by_name(state: Any, groups: Any) -> tuple[Mapping[str, Mapping[str, Any]], list[Mapping[str, Any]]] | None:
    """Return (state, groups) by name from a state that torch.distributed.checkpoint has numbered.

    None for anything else. `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` makes the keys of a state
    of hostward numbers, maybe as texts, and leaves the format out. torch's own step counts are floats, those of
    hostward int64.
    """
    if not isinstance(state, Mapping) or not isinstance(groups, (list, tuple)):
        return None
    names: dict[str, str] = {}
    for group in groups:
        numbers, given = map(group.get, NAMES) if isinstance(group, Mapping) else (None, None)
        if not isinstance(numbers, list) or not isinstance(given, list) or len(numbers) != len(given):
            return None
        if not all(isinstance(number, int) for number in numbers):
            return None
        names |= zip(map(str, numbers), given, strict=True)
    steps = [entry.get("step") if isinstance(entry, Mapping) else None for entry in state.values()]
    if not steps or not all(isinstance(step, torch.Tensor) and step.dtype is torch.int64 for step in steps):
        return None
    renamed = {names.get(str(number), str(number)): entry for number, entry in state.items()}
    return renamed, [{**group, "params": list(group["param_names"])} for group in groups]


def require_known(state: Mapping[str, object], known: Collection[str]) -> None:
    """Raise CheckpointError for a saved state that holds more than the parameters of this optimizer."""
    extra = [name for name in state if name not in known]
    if extra:
        raise CheckpointError(
            f"the saved state holds {len(extra)} parameters that this optimizer does not have: {shown(extra)}",
            why="it is of another model, or of an optimizer over more of it",
            fix="make the optimizer over the same parameters, or take these entries out of the state",
        )


def _is_whole(state: object, groups: object) -> bool:
    if not isinstance(state, Mapping) or not isinstance(groups, (list, tuple)):
        return False
    if not all(isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple)) for group in groups):
        return False
    return all(isinstance(name, str) for name in (*state, *(name for group in groups for name in group["params"])))


def checked_settings(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a saved group sets in `mine`.

    What is a tensor in `mine` stays one, of the same dtype: schedulers round what they compute to it.

    Raises CheckpointError for hyper-parameters that no step can be made with.
    """
    left_out = (*NAMES, *SAID_BY_GROUPS)
    settings = {key: _as_in_mine(value, mine.get(key)) for key, value in saved.items() if key not in left_out}
    if isinstance(settings.get("betas"), list):
        settings["betas"] = tuple(settings["betas"])
    try:
        check_group({**mine, **settings})
    except ConfigError as error:
        raise CheckpointError("a parameter group of the saved state is unusable", why=error.what) from error
    return settings


def _as_in_mine(value: Any, mine: Any) -> Any:
    """Return a saved number as a tensor where `mine` is one, and so both of betas; a new tensor, as torch loads it."""
    if isinstance(mine, torch.Tensor) and is_number(value):
        return torch.full_like(mine, value)
    if isinstance(mine, (tuple, list)) and isinstance(value, list) and len(mine) == len(value):
        return [_as_in_mine(*pair) for pair in zip(value, mine, strict=True)]
    return value


def check_same_names(what: str, theirs: Sequence[Sequence[str]], mine: Sequence[Sequence[str]]) -> None:
    """Raise CheckpointError unless both have the same names in the same groups and order."""
    if [list(x) for x in theirs] == [list(x) for x in mine]:
        return
    missing = sorted({n for g in mine for n in g} - {n for g in theirs for n in g})[:5]
    extra = sorted({n for g in theirs for n in g} - {n for g in mine for n in g})[:5]
    raise CheckpointError(
        f"the {what}s of the saved state are not those of this optimizer",
        why=f"missing: {missing or 'none'}; not expected: {extra or 'none'}; order and grouping count as well",
        fix="make the optimizer over the same parameters, in the same groups",
    )


# Callers whose use of a state dict differs from that of all others.


@dataclass(frozen=True, slots=True)
class Rows:
    """Name some rows of this process's part of a parameter, or all of it (None)."""

    name: str
    rows: slice | None = None


class PiecewiseState(Mapping[str, Mapping[str, Any]]):
    """A saved state in the place of `state`, read a piece at a time while it is loaded: no second copy of it exists.

    Its names, shapes and dtypes have been compared with the optimizer's by whoever made it. Its values are step counts.

    Args:
        steps: step counts by the optimizer's names, int64 [].
        read: returns the other entries of some parameters by name, as `StateAccess.read` names them, with the rows
            that were asked for filled; they are no longer used when it is called again.
        pieces: what is read together, in order. No name comes twice in one of them.
    """

    def __init__(
        self,
        steps: Mapping[str, torch.Tensor],
        read: Callable[[Sequence[Rows]], Mapping[str, Mapping[str, torch.Tensor]]],
        pieces: Sequence[Sequence[Rows]],
    ) -> None:
        self._steps, self._read, self._pieces = steps, read, pieces

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        return {"step": self._steps[name]}

    def __iter__(self) -> Iterator[str]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def whole(self) -> Iterator[tuple[Rows, Mapping[str, torch.Tensor]]]:
        """Yield all rows of all entries, and the entry whose rows they are. Raises what reading raises."""
        for piece in self._pieces:
            entries = dict(self._read(piece))
            for rows in piece:
                entry = {"step": self._steps[rows.name], **entries.pop(rows.name)}
                yield rows, entry
                entry.clear()  # whoever still has it keeps no memory while the next piece is read


class Unmoved:
    """Unmoved stands in a state dict for the state that the optimizer has, wherever it is stored.

    It is no dict, list or tensor, so no other library moves it.

    Args:
        optimizer: whose state it stands for.
    """

    __slots__ = ("_optimizer",)

    def __init__(self, optimizer: object) -> None:
        self._optimizer = optimizer

    def is_of(self, optimizer: object) -> bool:
        return self._optimizer is optimizer


def is_being_wrapped(optimizer: object) -> bool:
    """Return whether accelerate is creating its wrapper of the optimizer at this moment.

    `AcceleratedOptimizer.__init__` takes the state, moves every tensor in dicts and lists to the device and loads it
    back; this cannot be switched off for a single optimizer. No other reader may be given something else than tensors
    in dicts (torch.distributed.checkpoint fills the dicts that it is given, and no other mappings), so the caller
    decides.
    """
    wrapper = getattr(sys.modules.get("accelerate.optimizer"), "AcceleratedOptimizer", None)
    return any(f.f_locals.get("optimizer") is optimizer for f in _frames_of(getattr(wrapper, "__init__", None)))


def require_not_flattened() -> None:
    """Refuse to be flattened by `torch.distributed.checkpoint.state_dict`, for the result could not be loaded.

    torch flattens by parameter numbers, and unflattens by the names of the entries in `optimizer.state`, which are
    empty here because the state is stored elsewhere.

    Raises:
        CheckpointError: `StateDictOptions(flatten_optimizer_state_dict=True)` is what asks for the state.
    """
    for frame in _frames_in_torch("get_optimizer_state_dict", "get_state_dict"):
        options = frame.f_locals.get("options")
        if options is not None and options.flatten_optimizer_state_dict:
            raise CheckpointError(
                "hostward.AdamW's state cannot be flattened by StateDictOptions(flatten_optimizer_state_dict=True)",
                why="torch could not load the result into any optimizer",
                fix="leave flatten_optimizer_state_dict out: names of parameters are the keys already, at any sharding",
            )


def is_set_by_torch() -> bool:
    """Return whether `torch.distributed.checkpoint.state_dict` is about to set a state."""
    return any(True for _ in _frames_in_torch("set_optimizer_state_dict", "set_state_dict"))


def _frames_in_torch(*names: str) -> Iterator[FrameType]:
    """Yield the frames of these functions of torch.distributed.checkpoint.state_dict on the stack."""
    module = sys.modules.get("torch.distributed.checkpoint.state_dict")
    for name in names:
        yield from _frames_of(getattr(module, name, None))


def _frames_of(function: object) -> Iterator[FrameType]:
    """Yield the frames of this function on the stack, the innermost first."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    frame: FrameType | None = None if code is None else sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            yield frame
        frame = frame.f_back
