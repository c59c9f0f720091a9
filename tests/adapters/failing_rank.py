"""`hostward` with a second rank that fails in its third iteration, while the others wait for it.

It writes down when, in the file FAILED_AT.
"""

import os
import sys
import time
from pathlib import Path

from hostward.cli import main
from hostward.errors import DataError
from hostward.train.data import TokenDataset

if __name__ == "__main__":
    read = TokenDataset.batch

    def batch(dataset: TokenDataset, first: int, count: int) -> object:
        if os.environ["RANK"] == "1" and first >= 16:
            Path(os.environ["FAILED_AT"]).write_text(str(time.time()))
            raise DataError("the disk of this rank is gone", fix="mount it")
        return read(dataset, first, count)

    TokenDataset.batch = batch  # type: ignore[assignment, method-assign]
    sys.exit(main(sys.argv[1:]))
