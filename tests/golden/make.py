"""Write the golden files anew: PYTHONPATH=src OMP_NUM_THREADS=1 python tests/golden/make.py, then read what changed.

The files in the repository were written at commit 3854693, with `PYTHONPATH` of a checkout of that commit: they hold
what the code did before its modules moved into rooms. Write them anew only where bits or formats change on purpose, and
say so in the changelog; a checkpoint, plan or report of an earlier version must still be read, so keep the old file.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from golden_cases import (
    ACCUMULATION,
    DIGESTS,
    DTYPES,
    PLACEMENTS,
    PLAN,
    PLAN_COMMAND,
    REPORT,
    RESUMED,
    RESUMED_STEPS,
    SAVED_STEPS,
    STEPS,
    Model,
    adamw,
    checkpoint_folder,
    digests,
    text_of,
    train,
    trained,
    write_json,
)

from hostward import checkpoint
from hostward.cli import main


def write_digests() -> None:
    """Placements agree in every bit, so one entry stands for all of them."""
    content = {}
    for dtype in DTYPES:
        for accumulation in ACCUMULATION:
            found = [trained(placement, dtype, accumulation) for placement in PLACEMENTS]
            assert all(one == found[0] for one in found), (dtype, accumulation)
            content[f"{dtype}, {accumulation}"] = found[0]
    write_json(DIGESTS, content)


def write_checkpoints() -> None:
    """Save after `SAVED_STEPS` steps at offload_fraction 0.5, then train on for the digests of a resumed run."""
    content = {}
    for dtype in DTYPES:
        folder = checkpoint_folder(dtype)
        shutil.rmtree(folder, ignore_errors=True)
        model = Model(DTYPES[dtype])
        optimizer = adamw(model, offload_fraction=0.5)
        train(model, optimizer, range(SAVED_STEPS), 1)
        optimizer.wait()
        parts = checkpoint.parts_of(model, optimizer)
        plain = {"optimizer": parts.optimizer, "step": SAVED_STEPS}
        checkpoint.save(folder, SAVED_STEPS, tensors=parts.tensors, plain=plain)
        (folder / ".save.lock").unlink(missing_ok=True)
        saved = digests(model, optimizer)
        norms = train(model, optimizer, range(STEPS, STEPS + RESUMED_STEPS), 1)
        content[dtype] = {"saved": saved, "grad_norms": norms, "resumed": digests(model, optimizer)}
    write_json(RESUMED, content)


def write_plan() -> None:
    assert main([*PLAN_COMMAND, "--json", str(PLAN)]) == 0


def write_report() -> None:
    words = "model.num_layers=2 model.hidden_size=64 model.moe_ffn_hidden_size=64 model.num_moe_experts=4"
    words += " model.seq_length=64 train.global_batch_size=4 train.micro_batch_size=2 train.train_iters=3"
    words += " train.device=cpu train.num_threads=1 optimizer.optimizer_cpu_offload=True"
    words += " optimizer.optimizer_offload_fraction=0.5"
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        assert main(["train", *words.split(), "--run-dir", str(run)]) == 0
        REPORT.parent.mkdir(exist_ok=True)
        REPORT.write_text(text_of((run / REPORT.name).read_text()))


if __name__ == "__main__":
    write_digests()
    write_checkpoints()
    write_plan()
    write_report()
