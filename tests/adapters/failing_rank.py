"""`hostward` with a second rank that fails in its third iteration, while the others wait for it."""

import os
import sys

from hostward.cli import main
from hostward.errors import DataError
from hostward.train.data import TokenDataset

if __name__ == "__main__":
    read = TokenDataset.batch

    def batch(dataset: TokenDataset, first: int, count: int) -> object:
        if os.environ["RANK"] == "1" and first >= 16:
            raise DataError("the disk of this rank is gone", fix="mount it")
        return read(dataset, first, count)

    TokenDataset.batch = batch  # type: ignore[assignment, method-assign]
    sys.exit(main(sys.argv[1:]))
