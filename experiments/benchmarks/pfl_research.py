"""The round of `benchmarks.pfl_setup` by pfl-research itself, with PyTorch.

  python experiments/benchmarks/pfl_research.py CLIENTS

Run by a Python that has both (`pip install pfl torch`), and neither TensorFlow nor this package.
Its images are random, which makes no difference to the time.
"""

import itertools
import sys
from importlib import metadata

import numpy as np
import processes  # Of this folder, which is the script's.
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

_CLIENTS, _IMAGES, _BATCH = 1000, 50, 10


class Cnn(torch.nn.Module):
    """The same layers."""

    def __init__(self):
        super().__init__()
        nn = torch.nn
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Dropout(0.25), nn.Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU()),
            *(nn.Dropout(0.5), nn.Linear(128, 10)),
        )

    def loss(self, x, y, is_eval=False):
        self.train(not is_eval)
        return torch.nn.functional.cross_entropy(self.layers(x), y)

    def metrics(self, x, y):
        return {}


class Requests(TrainingProcessCallback):
    """Answers a request after each round, and waits for the next one."""

    def __init__(self, answers):
        self._lines, self._answers = iter(sys.stdin.readline, ""), answers

    def wait(self) -> bool:
        """Waits for a request for a round, answering others; returns whether there is one."""
        for line in self._lines:
            if line.strip() == "round":
                return True
            versions = metadata.version("pfl"), torch.__version__
            print("pfl-research round, {}, PyTorch {}".format(*versions), file=self._answers)
        return False

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        print("done", file=self._answers)
        return not self.wait(), Metrics()


def main(cohort: int) -> None:
    answers = processes.answers()
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.random((_CLIENTS * _IMAGES, 3, 32, 32), np.float32))
    y = torch.tensor(rng.integers(0, 10, _CLIENTS * _IMAGES))

    def client(number: int) -> Dataset:
        rows = slice(number * _IMAGES, (number + 1) * _IMAGES)
        return Dataset(raw_data=[x[rows], y[rows]])

    order = itertools.cycle(rng.permutation(_CLIENTS).tolist())
    data = FederatedDataset(client, lambda: next(order))
    requests = Requests(answers)
    cnn = Cnn()
    assert sum(p.numel() for p in cnn.parameters()) == 1_626_442
    if not requests.wait():
        return
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=10**6,
            evaluation_frequency=10**7,
            train_cohort_size=cohort,
            val_cohort_size=None,
        ),
        SimulatedBackend(training_data=data, val_data=data),
        PyTorchModel(cnn, torch.optim.SGD, torch.optim.SGD(cnn.parameters(), lr=1.0)),
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=0.1, local_batch_size=_BATCH),
        callbacks=[requests],
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
