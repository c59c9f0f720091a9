"""Train a recipe: `python scripts/training/run_recipe.py --recipe NAME [namespace.option=value ...]`.
 The same as `hostward train`, under the name and with the arguments that Megatron Bridge's users know. Starts under
torchrun too.
"""

import sys

from hostward.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
