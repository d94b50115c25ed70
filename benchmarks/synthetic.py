"""A workload as a fedplat task, `task.name = "benchmarks.synthetic:Synthetic"`, and the loss of a model of it.

python -m benchmarks.synthetic WORKLOAD [model.safetensors]      (without a file: of the initial model)
"""

import sys
from pathlib import Path

from torch import nn

from benchmarks.plain_training import final_loss, fresh_model, read_arrays
from benchmarks.workloads import WORKLOADS
from fedplat.task import Examples, Split
from fedplat.tasks.classification import Classification


class Synthetic(Classification):
    def __init__(self, data_dir: Path, workload: str) -> None:
        super().__init__(data_dir)
        self.workload = WORKLOADS[workload]

    def model(self) -> nn.Module:
        return fresh_model(self.workload)

    def data(self, split: Split) -> Examples:
        examples = Examples(*read_arrays(self.workload, self.data_dir))
        return examples if split == "train" else examples[slice(0, 100)]


def main(key: str, file: str | None = None) -> None:
    from safetensors.torch import load_file

    model = fresh_model(WORKLOADS[key])
    if file is not None:
        model.load_state_dict(load_file(file))
    print(final_loss(WORKLOADS[key], model))


if __name__ == "__main__":
    main(*sys.argv[1:])
