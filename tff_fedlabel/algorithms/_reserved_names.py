"""Names that a method cannot give to its parameters or its metrics, since the trainer has them."""

import dataclasses
from collections.abc import Iterable

# Choices of every run. `seed`, `strong_augment` and `weak_augment`, too, go on to the method.
_CHOICES = """
    task source model num_clients clients_per_round alpha labeled_fraction labels_at rounds lr
    batch_size tau tau_unlabeled eval_every width algorithm partition split image_size
    mixed_precision lr_schedule early_stopping_patience server_lr server_momentum parameters
    dp_noise_multiplier dp_clipping_norm dp_delta init_from client_accuracy
"""
# What else config.json holds.
_RECORDS = "versions runtimes data images"
# Other flags of the trainer, of the commands for many runs, and those that absl adds.
_FLAGS = """
    data_dir output_dir runtime workers max_concurrent_clients deterministic require_gpu
    simulate_secure_aggregation resume
    checkpoint_every verbose
    algorithms accounting by_method include_all_labels search search_rounds search_extend
    search_columns seeds alphas labeled_fractions vary jobs results_dir name output
    alsologtostderr flagfile h help helpfull helpshort helpxml log_dir logger_levels logtostderr
    only_check_args pdb pdb_post_mortem profile_file run_with_pdb run_with_profiling
    showprefixforinfo stderrthreshold undefok use_cprofile_for_profiling v verbosity
"""
PARAMETERS = frozenset(f"{_CHOICES} {_RECORDS} {_FLAGS}".split())

# Columns that the trainer and the learning process add to a round's metrics, and those that the
# trainer takes for the model's own.
METRICS = frozenset(
    """
    images_used rejected_clients update_non_finite server_state_non_finite
    server_training_non_finite secure_sum_measurements round seconds memory_bytes
    validation_accuracy validation_loss test_accuracy test_loss
    labeled_accuracy accuracy loss num_examples
    """.split()
)


def check_parameters(method_name: str, config_class: type) -> None:
    """Raises `ValueError` if a field of a method's configuration has a name of the trainer's."""
    if method_name == "all":
        raise ValueError("a method cannot be called all, which stands for every method.")
    taken = [f.name for f in dataclasses.fields(config_class) if f.name in PARAMETERS]
    if taken:
        raise ValueError(
            f"{_both(config_class.__name__, taken)} of the method {method_name} must have another "
            "name: the trainer has a choice, a flag or a record of that name."
        )


def _both(owner: str, names: Iterable[str]) -> str:
    return " and ".join(f"{owner}.{name}" for name in names)
