"""Aggregations in which every client of the cohort counts, such as differentially private ones."""

import tensorflow_federated as tff

from tff_fedlabel import _validation


class EveryClient(tff.aggregators.WeightedAggregationFactory):
    """Makes an unweighted factory a `model_aggregator` that is always applied as it is.

    The processes of this package otherwise leave the global weights alone in a round whose clients
    all have weight 0. That tells whether some client contributed, without noise, so a
    differentially private aggregation must not have it: here a client without an update contributes
    zeros, counts like any other, and the round's noise is applied whatever the clients sent.

    Args:
      factory: A `tff.aggregators.UnweightedAggregationFactory`, for example
        `tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(...)`.
    """

    def __init__(self, factory: tff.aggregators.UnweightedAggregationFactory):
        _validation.check_type(
            "factory",
            factory,
            tff.aggregators.UnweightedAggregationFactory,
            "a tff.aggregators.UnweightedAggregationFactory",
        )
        self._weighted = tff.aggregators.as_weighted_aggregator(factory)

    def create(self, value_type, weight_type) -> tff.templates.AggregationProcess:
        return self._weighted.create(value_type, weight_type)
