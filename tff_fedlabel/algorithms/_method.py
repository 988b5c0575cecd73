"""What a method is: all that a method's file needs to know about the rest of the package.

A method's file has the dataclass of its parameters, a function that does one client's work in one
round, and one `Method` that names both. Further fields of `Method` cover what else a method may
need: server state, its own aggregation, client memory, labels at the server.
"""

from __future__ import annotations

import dataclasses
import keyword
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tff_fedlabel import _validation

if TYPE_CHECKING:
    import collections

    import tensorflow as tf
    import tensorflow_federated as tff


class MethodError(ValueError):
    """A function of a method returned what it must not; the message names both."""


class Setup(NamedTuple):
    """What a learning process is built from, for the functions of a method.

    Attributes:
      model: The `tff.learning.models.FunctionalModel`; its output is logits [batch, classes].
      optimizer: The optimizer of the local steps.
      config: The method's parameters, an instance of its `config_class`.
      loop_implementation: How the loop over a client's batches is written as a graph.
      diagnose: Whether unlabelled batches carry their hidden label y (metrics only).
    """

    model: tff.learning.models.FunctionalModel
    optimizer: tff.learning.optimizers.Optimizer
    config: Any
    loop_implementation: Any = None
    diagnose: bool = False


class Client(NamedTuple):
    """What a client receives.

    Attributes:
      weights: Tuple of trainable weights, the global model w.
      non_trainable: The model's other weights; no method changes them.
      labeled: Batches `OrderedDict(x=, y=)`.
      unlabeled: Batches `OrderedDict(x=)`.
      round_num: int32 [], 0 in the first round.
      hparams: The client optimizer's hyper-parameters.
      server_state: The method's state at the server, where it has one.
      memory: The memory that this client returned when it last took part, or the method's
        `initial_memory`; only for a method with memory.
      helpers: A dataset of the memories of the clients that `choose_helpers` returned.
    """

    weights: Any
    non_trainable: Any
    labeled: tf.data.Dataset
    unlabeled: tf.data.Dataset
    round_num: tf.Tensor
    hparams: Any
    server_state: Any = ()
    memory: Any = ()
    helpers: Any = None


class ClientOutput(NamedTuple):
    """What a client computed.

    Attributes:
      delta: Its weights after the round minus the weights it received (Delta w_k), a tuple.
      num_examples: float32 [], r_k: the number of images that took part in the update. A client
        whose r_k is negative is left out, like one whose update is not finite.
      model_metrics: The unfinalized metrics of the model over the labelled batches.
      metrics: The method's unfinalized metrics, `OrderedDict` name -> `(total,)` or
        `(numerator, denominator)`, float32 scalars that are summed over the clients; a pair is
        then divided (0 / 0 is reported as 0). Names of the trainer's own metrics, such as loss or
        images_used, and of the model's are refused.
      sent: What else goes to the server, a structure of float tensors. `server_update` gets its
        sum over the clients, `aggregate` gets it client by client.
      memory: What to remember about this client, in the structure of `initial_memory`.
    """

    delta: Any
    num_examples: tf.Tensor
    model_metrics: Any
    metrics: collections.OrderedDict
    sent: Any = ()
    memory: Any = ()


class Clients(NamedTuple):
    """What the clients of a cohort sent, client by client, for `Method.aggregate`.

    Attributes:
      delta: Tuple of `[n, ...]`, one row for each of n clients; 0 for a client that is left out.
      weights: float32 [n], r_k (or 1 for each client with UNIFORM weighting); 0 for a client to
        leave out: one that used no image, or whose update was not finite.
      sent: Like `ClientOutput.sent`, with a leading [n].
      round_num: int32 [].
    """

    delta: Any
    weights: tf.Tensor
    sent: Any
    round_num: tf.Tensor


class ServerOutput(NamedTuple):
    """What `Method.server_training` may return, to report metrics beside the weights.

    Attributes:
      weights: Tuple of trainable weights.
      metrics: `OrderedDict` name -> `(total,)` or `(numerator, denominator)`, float32 scalars, as
        in `ClientOutput`. They are of the server's images, and take the place of metrics of the
        same name of the clients'.
      model_metrics: The unfinalized metrics of the model over the server's batches, or None.
    """

    weights: Any
    metrics: collections.OrderedDict
    model_metrics: Any = None


class Server(NamedTuple):
    """What the server trains with, for `Method.server_training`.

    Attributes:
      weights: Tuple of trainable weights, the clients' updates included.
      non_trainable: The model's other weights.
      data: `OrderedDict(x=[n, ...], y=[n])`, the labelled images at the server.
      round_num: int32 [].
      hparams: The hyper-parameters of `Setup.optimizer`.
    """

    weights: Any
    non_trainable: Any
    data: collections.OrderedDict
    round_num: tf.Tensor
    hparams: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Method:
    """One published method. Calling it like its `build_<name>` function builds a process.

    Functions are traced inside a `tf.function`. Only the first three fields are required. What the
    functions return is checked when a process is built, against the types given here; NumPy arrays
    and Python numbers are converted.

    Attributes:
      name: Its name in `ALGORITHMS` and on the command line: lower-case letters, digits, "_", and
        no keyword of Python.
      config_class: The frozen dataclass of its parameters, all with defaults, `seed` among
        them. The first sentence about a field in the class's docstring, or the field's
        `metadata["help"]`, explains its flag on the command line. `register` refuses names of the
        trainer's choices and flags, such as lr, but for seed, strong_augment and weak_augment,
        which the run sets.
      client_update: `(Setup, Client) -> ClientOutput`, a client's work in a round.
      reads_unlabeled: Whether it reads unlabelled images.
      initial_weights: `(Setup) -> tuple of trainable weights`; the model's own by default.
      server_state: `(Setup) -> structure of tensors`, the initial state that the method keeps at
        the server. It is broadcast to the clients with the weights.
      server_update: `(Setup, state, sum of ClientOutput.sent) -> state`, after each round in which
        a client took part. If a finite number of the state would become NaN or infinite, the state
        stays as it was and `server_state_non_finite` of the round is 1.
      aggregate: `(Setup, Clients) -> delta`, a tuple like the weights: replaces the weighted mean.
        The server then holds all updates of a cohort in memory at once. If delta is not finite,
        the weights stay as they were and `update_non_finite` of the round is 1.
      initial_memory: `(Setup) -> structure of tensors` of known shapes: the memory of a client
        that has not taken part yet.
      choose_helpers: `(memories, client, round_num) -> client numbers`: the clients whose memories
        the client receives. `memories` maps the number of each client that has taken part to its
        memory (NumPy arrays); both are read-only. It runs where the training loop runs.
      server_training: `(Setup, Server) -> tuple of trainable weights`, or a `ServerOutput`: trains
        at the server after each aggregation, on the data given to the builder as `server_data`.
        Weights that are not finite are dropped, and `server_training_non_finite` of the round is 1.
      advice: `(parameters, rounds) -> str | None`: what to know before a run of so many rounds, in
        one line, such as that it ends before the method uses an unlabelled image; mostly None. The
        trainer shows it when the run starts.
      uniform_mean: Whether clients count equally by default: the builder's `client_weighting` is
        then `UNIFORM`.
      server_momentum: The momentum of the server's SGD where none is given, in [0, 1].
      labels_at: Where the labels can be in its runs, one or more of "every_client",
        "some_clients" and "server" (for methods with `server_training`, whose clients then have no
        labelled images); the first is the default.

    Raises:
      ValueError: A field is of the wrong type or lacks the field that it goes with; the message
        names it.
    """

    name: str
    config_class: type
    client_update: Callable[[Setup, Client], ClientOutput]
    reads_unlabeled: bool = True
    initial_weights: Callable[[Setup], Any] | None = None
    server_state: Callable[[Setup], Any] | None = None
    server_update: Callable[[Setup, Any, Any], Any] | None = None
    aggregate: Callable[[Setup, Clients], Any] | None = None
    initial_memory: Callable[[Setup], Any] | None = None
    choose_helpers: Callable[[Any, int, int], Sequence[int]] | None = None
    server_training: Callable[[Setup, Server], Any] | None = None
    advice: Callable[[Any, int], str | None] | None = None
    uniform_mean: bool = False
    server_momentum: float = 0.0
    labels_at: tuple[str, ...] = ("every_client", "some_clients")

    def __post_init__(self):
        name = self.name
        if not isinstance(name, str) or not re.fullmatch("[a-z][a-z0-9_]*", name):
            raise ValueError(f"name must be lower-case letters, digits and '_', got {name!r}.")
        if keyword.iskeyword(name):
            raise ValueError(f"name must be no keyword of Python, got {name!r}.")
        _check_config_class(name, self.config_class)
        names = [f.name for f in dataclasses.fields(self)]
        functions = names[names.index("reads_unlabeled") + 1 : names.index("uniform_mean")]
        for field in functions:
            _validation.check_callable_or_none(
                f"{field} of the method {name}", getattr(self, field), "a function"
            )
        if not callable(self.client_update):
            raise _validation.WrongTypeError(
                f"client_update of the method {name} must be a callable, got "
                f"{self.client_update!r}."
            )
        for field in ("reads_unlabeled", "uniform_mean"):
            flag = _validation.check_flag(f"{field} of the method {name}", getattr(self, field))
            object.__setattr__(self, field, flag)
        momentum = _validation.check_number(
            f"server_momentum of the method {name}", self.server_momentum, 0.0, 1.0
        )
        object.__setattr__(self, "server_momentum", momentum)
        if not isinstance(self.labels_at, tuple) or not self.labels_at:
            raise _validation.WrongTypeError(
                f"labels_at of the method {name} must be a tuple of names, got {self.labels_at!r}."
            )
        for place in self.labels_at:
            _validation.check_name(f"labels_at of the method {name}", place, _validation.LABELS_AT)
        if "server" in self.labels_at and self.server_training is None:
            raise ValueError(f"the method {name} has labels at the server but no server_training.")
        for one, other in (
            ("server_state", "server_update"),
            ("server_update", "server_state"),
            ("choose_helpers", "initial_memory"),
        ):
            if getattr(self, one) is not None and getattr(self, other) is None:
                raise ValueError(f"the method {name} has {one} but no {other}.")

    def __call__(self, model, client_optimizer, config=None, **options):
        """Builds the learning process, as `build_<name>` does."""
        from tff_fedlabel.algorithms import _builder

        config = self.config_class() if config is None else config
        return _builder.of(self)(model, client_optimizer, config, **options)


def _check_config_class(method_name: str, config_class: Any) -> None:
    """Raises `ValueError` if the parameters of a method cannot be made by name."""
    wanted = f"config_class of the method {method_name} must be a frozen dataclass"
    if not isinstance(config_class, type) or not dataclasses.is_dataclass(config_class):
        raise _validation.WrongTypeError(f"{wanted}, got {config_class!r}.")
    class_name = config_class.__name__
    if not config_class.__dataclass_params__.frozen:
        raise ValueError(f"{wanted}; write @dataclasses.dataclass(frozen=True) at {class_name}.")
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    if "seed" not in fields:
        raise ValueError(f"{class_name} needs a field seed.")
    for name, field in fields.items():
        if field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{class_name}.{name} of the method {method_name} needs a default.")
        if not field.init:
            raise ValueError(
                f"{class_name}.{name} of the method {method_name} must be an argument of "
                f"{class_name}; leave out init=False, or make it a property."
            )
