"""Every method as a builder of `tff.learning` processes, and the registry of their names."""

from tff_fedlabel.algorithms.fedlabel import FedLabelConfig, build_fedlabel
from tff_fedlabel.algorithms.supervised import (
    FedAvgConfig,
    FedProxConfig,
    build_fedavg,
    build_fedprox,
)

# Name -> builder, called as `build(model, client_optimizer, config, ...)`.
ALGORITHMS = {
    "fedlabel": build_fedlabel,
    "fedavg": build_fedavg,
    "fedprox": build_fedprox,
}

# Name -> the dataclass of the method's parameters.
CONFIGS = {
    "fedlabel": FedLabelConfig,
    "fedavg": FedAvgConfig,
    "fedprox": FedProxConfig,
}

# The methods that never read unlabelled images.
SUPERVISED = ("fedavg", "fedprox")

__all__ = [
    "ALGORITHMS",
    "CONFIGS",
    "SUPERVISED",
    "FedAvgConfig",
    "FedLabelConfig",
    "FedProxConfig",
    "build_fedavg",
    "build_fedlabel",
    "build_fedprox",
]
