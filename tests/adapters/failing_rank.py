"""`hostward` with a second rank that fails in its sixth iteration, unless torchrun has started it anew."""

import os
import sys

from hostward.cli import main
from hostward.errors import DataError
from hostward.train.data import TokenDataset

if __name__ == "__main__":
    read = TokenDataset.batch

    def batch(dataset: TokenDataset, first: int, count: int) -> object:
        if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and first >= 5 * 8:
            raise DataError("the disk of this rank is gone", fix="mount it")
        return read(dataset, first, count)

    TokenDataset.batch = batch  # type: ignore[assignment, method-assign]
    sys.exit(main(sys.argv[1:]))
