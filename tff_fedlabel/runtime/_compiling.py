"""Compiles TFF computations to the few TensorFlow graphs that one process needs to run them.

A computation over clients goes through TFF's map-reduce form: `prepare` makes what the server
sends, `work` is all that one client does, `zero`, `accumulate` and `report` aggregate the clients'
results, and `update` makes the final results. Everything else is one graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf
import tensorflow_federated as tff

from tff_fedlabel.runtime._graphs import Graph
from tff_fedlabel.runtime._runtime_errors import UnsupportedComputationError
from tff_fedlabel.runtime._secure_sums import SecureSums
from tff_fedlabel.runtime._tff_types import clients_of, has_clients, is_at, is_client_list, leaves


@dataclasses.dataclass(frozen=True)
class LocalPlan:
    """A computation without clients: one graph."""

    graph: Graph


@dataclasses.dataclass(frozen=True)
class RoundPlan:
    """A computation over clients.

    With state S, client data D, broadcast value C, a client's result U and an accumulator A:

      prepare: S -> C    work: (D, C) -> U    zero: () -> A    accumulate: (A, U) -> A
      report: A -> R     update: (S, R) -> results

    With secure sums, U ends with their summands and R with the sums.

    Attributes:
      secure_sums: Sums up the summands.
      server_type: S, without placement.
      client_type: D, without placement.
      split: Splits the argument: argument -> (value of S, sequence of values of D).
      skip: How many tensors of `update`'s results come before the computation's own.
    """

    prepare: Graph
    work: Graph
    zero: Graph
    accumulate: Graph
    report: Graph
    update: Graph
    secure_sums: SecureSums
    server_type: tff.Type
    client_type: tff.Type
    split: object
    skip: int


def compile_computation(
    comp: tff.framework.ConcreteComputation, simulate_secure_aggregation: bool = False
) -> LocalPlan | RoundPlan:
    """Compiles a computation.

    Args:
      comp: The computation.
      simulate_secure_aggregation: Whether it may use secure sums; see `_secure_sums`.

    Raises:
      UnsupportedComputationError: It uses something that this runtime cannot do.
    """
    proto = tff.framework.serialize_computation(comp)
    if proto.WhichOneof("computation") == "tensorflow":
        return LocalPlan(Graph(proto))
    if proto.WhichOneof("computation") == "xla":
        raise UnsupportedComputationError(
            "the device runtime runs only TensorFlow, and this is a JAX computation"
        )
    tree = comp.to_building_block()
    _refuse_intrinsics(tree, simulate_secure_aggregation)
    try:
        if has_clients(comp.type_signature) or _uses_clients(tree):
            return _compile_round(comp)
        local = tff.backends.mapreduce.consolidate_and_extract_local_processing(
            tree, _graph_options()
        )
        return LocalPlan(Graph(local.proto))
    except UnsupportedComputationError:
        raise
    except Exception as error:
        # TFF's compiler has no error class of its own for what it cannot convert to this form.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnsupportedComputationError(
            "the device runtime cannot run this computation: TFF's map-reduce form does not "
            f'support it ({reason[:300]}); use runtime.use("local")'
        ) from error


def _graph_options() -> tf.compat.v1.ConfigProto:
    """No optimization here: TensorFlow optimizes the graphs on first call, for their device."""
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return config


_SECURE = ("federated_secure_sum", "federated_secure_sum_bitwidth", "federated_secure_modular_sum")


def _refuse_intrinsics(tree, simulate_secure_aggregation: bool) -> None:
    found = set()

    def visit(block):
        if isinstance(block, tff.framework.Intrinsic):
            found.add(block.uri)
        return block, False

    tff.framework.transform_postorder(tree, visit)
    refused = ("federated_select", "federated_secure_select")
    if not simulate_secure_aggregation:
        refused = (*_SECURE, *refused)
    for uri in refused:
        if uri in found:
            raise UnsupportedComputationError(
                f"the device runtime cannot run {uri}: "
                + (
                    "one process has no secure aggregation; its arithmetic is simulated with "
                    'runtime.use("device", simulate_secure_aggregation=True), on the command line '
                    "--simulate_secure_aggregation"
                    if uri in _SECURE
                    else 'TFF\'s map-reduce form does not support it; use runtime.use("local")'
                )
            )


def _uses_clients(tree) -> bool:
    found = []

    def visit(block):
        found.append(has_clients(block.type_signature))
        return block, False

    tff.framework.transform_postorder(tree, visit)
    return any(found)


def _compile_round(comp) -> RoundPlan:
    if has_clients(comp.type_signature.result):
        raise UnsupportedComputationError(
            f"the device runtime cannot return values of clients ({comp.type_signature.result}); "
            'aggregate them, or use runtime.use("local")'
        )
    split, skip = _split_round, 0
    if not _is_round(comp.type_signature):
        comp, split = _as_round(comp)
        skip = len(leaves(comp.type_signature.parameter[0].member))
    form = tff.backends.mapreduce.get_map_reduce_form_for_computation(comp, _graph_options())

    def graph(computation):
        return Graph(tff.framework.serialize_computation(computation))

    server, clients = (
        t.member for _, t in tff.structure.iter_elements(form.type_signature.parameter)
    )
    return RoundPlan(
        prepare=graph(form.prepare),
        work=graph(form.work),
        zero=graph(form.zero),
        accumulate=graph(form.accumulate),
        report=graph(form.report),
        update=graph(form.update),
        secure_sums=SecureSums(
            plain=len(leaves(form.work.type_signature.result[0])),
            types=tuple(leaves(form.work.type_signature.result[i]) for i in (1, 2, 3)),
            bitwidth=graph(form.secure_sum_bitwidth),
            max_input=graph(form.secure_sum_max_input),
            modulus=graph(form.secure_modular_sum_modulus),
        ),
        server_type=server,
        client_type=clients,
        split=split,
        skip=skip,
    )


def _is_round(type_spec) -> bool:
    """Whether a computation is (S@SERVER, {D}@CLIENTS) -> (S@SERVER, X@SERVER)."""
    parameter, result = type_spec.parameter, type_spec.result
    for struct in (parameter, result):
        if not isinstance(struct, tff.StructType) or len(struct) != 2:
            return False
    return (
        is_at(parameter[0], tff.SERVER)
        and is_client_list(parameter[1])
        and all(is_at(element, tff.SERVER) for element in (result[0], result[1]))
        and parameter[0].is_assignable_from(result[0])
    )


def _split_round(argument):
    (_, server), (_, clients) = tff.structure.to_elements(tff.structure.from_container(argument))
    return server, clients_of(clients)


class _Columns(Sequence):
    """Clients whose data comes in several arguments; data is read only when its client is."""

    def __init__(self, columns: list[Sequence]):
        if len({len(column) for column in columns}) > 1:
            raise TypeError("the arguments at the clients have different numbers of clients")
        self._columns = columns

    def __len__(self):
        return len(self._columns[0])

    def __getitem__(self, client):
        return [column[client] for column in self._columns]


def _as_round(comp):
    """Gives a computation the parameters and results that the map-reduce form requires.

    Its arguments at the server become one struct, those at the clients another, and the first
    result is the server's argument itself.
    """
    parameter = comp.type_signature.parameter
    is_struct = isinstance(parameter, tff.StructType)
    if parameter is None:
        raise UnsupportedComputationError(
            "the device runtime takes the number of clients from the arguments, and this "
            'computation has no arguments; use runtime.use("local")'
        )
    types = [t for _, t in tff.structure.iter_elements(parameter)] if is_struct else [parameter]
    for type_spec in types:
        if not isinstance(type_spec, tff.FederatedType) or (
            is_at(type_spec, tff.CLIENTS) and type_spec.all_equal
        ):
            raise UnsupportedComputationError(
                f"the device runtime cannot take an argument of type {type_spec} in a computation "
                'over clients; use runtime.use("local")'
            )
    at = {
        placement: [i for i, t in enumerate(types) if t.placement is placement]
        for placement in (tff.SERVER, tff.CLIENTS)
    }
    if not at[tff.CLIENTS]:
        raise UnsupportedComputationError(
            "the device runtime takes the number of clients from the arguments, and this "
            'computation has no arguments at the clients; use runtime.use("local")'
        )
    member = {
        placement: tff.StructType([types[i].member for i in places])
        for placement, places in at.items()
    }
    original = comp

    @tff.federated_computation(
        tff.FederatedType(member[tff.SERVER], tff.SERVER),
        tff.FederatedType(member[tff.CLIENTS], tff.CLIENTS),
    )
    def as_round(server, clients):
        arguments = [None] * len(types)
        for placement, value in ((tff.SERVER, server), (tff.CLIENTS, clients)):
            for position, i in enumerate(at[placement]):
                arguments[i] = tff.federated_map(_select(member[placement], position), value)
        if is_struct:
            names = [name for name, _ in tff.structure.iter_elements(parameter)]
            positional = [a for a, n in zip(arguments, names, strict=True) if n is None]
            named = {n: a for a, n in zip(arguments, names, strict=True) if n is not None}
            result = original(*positional, **named)
        else:
            result = original(*arguments)
        if not is_at(original.type_signature.result, tff.SERVER):
            result = tff.federated_zip(result)
        return server, result

    def split(argument):
        if is_struct:
            container = tff.structure.from_container(argument)
            values = [value for _, value in tff.structure.iter_elements(container)]
        else:
            values = [argument]
        columns = [clients_of(values[i]) for i in at[tff.CLIENTS]]
        return [values[i] for i in at[tff.SERVER]], _Columns(columns)

    return as_round, split


def _select(struct_type, position):
    @tff.federated_computation(struct_type)
    def select(struct):
        return struct[position]

    return select
