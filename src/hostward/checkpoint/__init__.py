"""Save and load training state: atomic, sharded, checksummed, beside training."""

from __future__ import annotations

from hostward.checkpoint.api import (
    Mode as Mode,
    Saver as Saver,
    latest as latest,
    load as load,
    load_some as load_some,
    read_own as read_own,
    read_plain as read_plain,
    restore as restore,
    save as save,
    tensor_index as tensor_index,
    verify as verify,
)
