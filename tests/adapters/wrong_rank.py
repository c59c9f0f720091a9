"""`hostward` with a second rank whose host step flips a bit; the code that each rank ends with is written down."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = "--here"

if __name__ == "__main__":
    if sys.argv[1] != HERE:
        ended = subprocess.run([sys.executable, __file__, HERE, *sys.argv[1:]])
        Path(f"code-{os.environ['RANK']}").write_text(str(ended.returncode))
        sys.exit(0)  # or torchrun would end the other before it has written
    import torch

    from hostward.cli import main
    from hostward.engine import simulated
    from hostward.engine.backend import Tier

    real = simulated.host_task

    def host_task(operands: Any, *rest: Any) -> Any:
        if operands.exp_avg.tier is Tier.HOST and os.environ["RANK"] == "1":
            operands.exp_avg_sq.data.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
        return real(operands, *rest)

    simulated.host_task = host_task
    sys.exit(main(sys.argv[2:]))
