"""The function `build_<name>` of each method: its signature, docstring and argument checks."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow_federated as tff

from tff_fedlabel.algorithms import _builder_arguments, _method, _method_checks, _process


@functools.cache
def of(method: _method.Method) -> Callable[..., tff.learning.templates.LearningProcess]:
    """The function `build_<name>` of a method."""
    weighting = tff.learning.ClientWeighting
    default_weighting = weighting.UNIFORM if method.uniform_mean else weighting.NUM_EXAMPLES

    def build(
        model: tff.learning.models.FunctionalModel,
        client_optimizer: tff.learning.optimizers.Optimizer,
        config: Any = method.config_class(),  # noqa: B008 (frozen)
        *,
        server_optimizer: tff.learning.optimizers.Optimizer | None = None,
        client_weighting: tff.learning.ClientWeighting = default_weighting,
        model_distributor: tff.learning.templates.DistributionProcess | None = None,
        model_aggregator: tff.aggregators.WeightedAggregationFactory | None = None,
        metrics_aggregator: Callable[..., Any] | None = None,
        loop_implementation: tff.learning.LoopImplementation = (
            tff.learning.LoopImplementation.DATASET_ITERATOR
        ),
        diagnose: bool = False,
        server_data: Any = None,
    ) -> tff.learning.templates.LearningProcess:
        setup = _method.Setup(model, client_optimizer, config, loop_implementation, diagnose)
        options = {
            "server_optimizer": server_optimizer,
            "client_weighting": client_weighting,
            "model_distributor": model_distributor,
            "model_aggregator": model_aggregator,
            "metrics_aggregator": metrics_aggregator,
        }
        _builder_arguments.check(method, setup, options)
        data = _builder_arguments.check_server_data(method, setup, server_data)
        with _method_checks.Checked(method, setup) as checked:
            return _process.build_learning_process(checked, setup, data, **options)

    build.__name__ = build.__qualname__ = f"build_{method.name}"
    build.__module__ = "tff_fedlabel.algorithms"
    build.__doc__ = inspect.cleandoc(_DOCSTRING).format(
        name=method.name,
        config=method.config_class.__name__,
        about=inspect.getdoc(method.client_update) or "",
    )
    build.__annotations__["config"] = method.config_class
    return build


_DOCSTRING = """Builds the method `{name}` as a learning process.

    {about}

    With model weights W, model inputs x and labels y as in `model.input_spec`, the type of `next`
    is

    `(<state@SERVER, {{<labeled=<x=,y=>*, unlabeled=<x=>*>}}@CLIENTS> -> <state=, metrics=>@SERVER)`

    (`unlabeled=<x=,y=>*` with `diagnose`; a method with client memory also has
    `memory=<client=int32, value=>*`, one element, and `helpers=<value>*`). Both parts are batched;
    the number of batches is the number of local steps. A client's update is weighted by its r_k
    (`ClientWeighting.NUM_EXAMPLES`) or, with `UNIFORM`, by 1 if its r_k is not 0. An update that
    contains a NaN or an infinity, or is so large that a sum of a million of its size overflows, or
    whose r_k is negative, is set to zero together with its r_k, and counted in `rejected_clients`.
    If the r_k of a cohort
    sum to 0, the global weights, the server optimizer and the aggregator do not change (and the
    finalizer's `update_non_finite` is 1).

    Args:
      model: A functional model whose output is logits `[batch, num_classes]` and whose
        `input_spec` gives x and y. The labelled loss is `model.loss`; pseudo-labels use per-image
        softmax cross-entropy.
      client_optimizer: The optimizer of the local steps (eta); each phase starts from fresh state.
      config: The method's parameters, a `{config}`.
      server_optimizer: Applies the aggregated update; by default SGD with learning rate 1 and the
        method's `server_momentum`, 0 for most.
      client_weighting: `NUM_EXAMPLES` is r_k; `UNIFORM` gives every client that contributed the
        same weight, and is the default of methods whose authors say so.
      model_distributor: As in `tff.learning.algorithms.build_weighted_fed_avg`.
      model_aggregator: Any weighted factory of `tff.aggregators`; by default the weighted mean. An
        unweighted one wrapped by `tff.aggregators.as_weighted_aggregator` ignores weights, so
        clients of weight 0 still count in its denominator. One wrapped by
        `algorithms.every_client.EveryClient` is applied even if no client contributed, as
        differential privacy needs. Not allowed if the method has its own aggregation. With a
        secure one (all its aggregations are secure sums, as in
        `tff.learning.secure_aggregator`) everything that clients send is summed securely: whether
        their weight is above 0, and by default their metrics. Methods with state at the server or
        memory of clients do not allow that.
      metrics_aggregator: As in TFF; `tff.learning.metrics.sum_then_finalize` by default. With a
        secure `model_aggregator`, by default `secure_sum_then_finalize`: a client's unfinalized
        metrics are clipped to [-2**20, 2**20] and rounded to steps of 2**-11, and
        `secure_sum_measurements` counts the clients that were clipped.
      loop_implementation: `DATASET_ITERATOR` was faster on CPUs.
      diagnose: For simulations: unlabelled elements are `OrderedDict(x=, y=)` and methods that
        assign labels add `pseudo_label_accuracy`. The y cannot change the update.
      server_data: Labelled images at the server, a mapping with arrays x `[n, ...]` and y `[n]`,
        for methods that train there; others reject it. The images become part of the process.

    Returns:
      A `tff.learning.templates.LearningProcess`. `metrics["client_work"]["train"]` holds the
      model's own metrics on the labelled batches, the method's metrics, `images_used` (sum of
      r_k) and `rejected_clients`, float32 each; `metrics["client_work"]["memory"]`, for a method
      with memory, holds the stacked memories of the clients. `update_non_finite` and, where the
      method has such parts, `server_training_non_finite` (in `metrics["finalizer"]`) and
      `server_state_non_finite` (in `metrics["client_work"]`), int32, are 1 if the part stayed as it
      was because its new value was not finite.

    Raises:
      ValueError: An argument has the wrong type (a `TypeError` too), or does not fit the model or
        the method.
      algorithms.MethodError: A function of the method returned what it must not; a `ValueError`.
    """
