"""`hostward` with a second rank that fails in its sixth iteration, unless torchrun has started it anew; the first one
then comes late, so that the second looks for it first, and must not do so where it was before.

Run by torchrun in its own processes (`--run-path`), which wait for what a rank that has succeeded returns.
"""

import os
import sys
import time
from datetime import timedelta

import torch

from hostward.cli import main, ranks
from hostward.errors import DataError
from hostward.trainer.data.dataset import TokenDataset
from hostward.trainer.process_group import Ranks

if __name__ == "__main__":
    read, meet = TokenDataset.batch, Ranks.join
    again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"

    def batch(dataset: TokenDataset, first: int, count: int) -> object:
        if os.environ["RANK"] == "1" and not again and first >= 5 * 8:
            raise DataError("the disk of this rank is gone", fix="mount it")
        return read(dataset, first, count)

    def join(of: Ranks, device: torch.device, limit: timedelta) -> None:
        if of.first and again:
            time.sleep(4.0)
        meet(of, device, limit)

    end_at_once = ranks.end_at_once
    ranks.end_at_once = lambda code: end_at_once(code) if code else sys.exit(0)
    TokenDataset.batch = batch  # type: ignore[assignment, method-assign]
    Ranks.join = join  # type: ignore[method-assign]
    sys.exit(main(sys.argv[1:]))
