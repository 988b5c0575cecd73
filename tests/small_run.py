"""The choices of a run that takes a moment."""

SMALL = {
    "width": 4,
    "num_clients": 6,
    "clients_per_round": 3,
    "tau": 2,
    "tau_unlabeled": 2,
    "batch_size": 8,
    "eval_every": 2,
    "client_accuracy": False,
}
