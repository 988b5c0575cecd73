"""The builders of `tff.learning` processes, one per method, and the registry of methods.

A method is one `Method` in one file, plus one line here. This module and `tff_fedlabel` export its
`build_<name>` and the class of its parameters. Users add their own methods with `register`, in any
file that TFF_FEDLABEL_METHODS names for all commands; `local_training` has the loop over a client's
batches that all methods share.
"""

from tff_fedlabel import _own_methods, _parameters, _validation
from tff_fedlabel.algorithms import _local_training as local_training
from tff_fedlabel.algorithms import (
    _reserved_names,
    fedlabel,
    fedmatch,
    fedtrinet,
    fixmatch,
    rscfed,
    semifl,
    supervised,
    uda,
)
from tff_fedlabel.algorithms._method import (
    Client,
    ClientOutput,
    Clients,
    Method,
    MethodError,
    Server,
    ServerOutput,
    Setup,
)

# Name -> method. `ALGORITHMS` is derived from it: name -> the function `build_<name>`.
METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        fedlabel.METHOD,
        supervised.FEDAVG,
        supervised.FEDPROX,
        fedtrinet.METHOD,
        uda.FEDAVG,
        uda.FEDPROX,
        fixmatch.FEDAVG,
        fixmatch.FEDPROX,
        fedmatch.METHOD,
        semifl.METHOD,
        rscfed.METHOD,
    )
}

__all__ = [
    "ALGORITHMS",
    "Client",
    "ClientOutput",
    "Clients",
    "Method",
    "MethodError",
    "Server",
    "ServerOutput",
    "METHODS",
    "Setup",
    "local_training",
    "register",
    *(f"build_{name}" for name in METHODS),
    *(method.config_class.__name__ for method in METHODS.values()),
]


def register(method: Method) -> Method:
    """Adds a method to `METHODS`, which also adds it to the command line and the trainer.

    Raises:
      ValueError: Another method has that name, or a parameter has a name of the trainer's, or is
        of another kind than the parameter of that name of another method.
    """
    _validation.check_type("method", method, Method, "a tff_fedlabel.algorithms.Method")
    _reserved_names.check_parameters(method.name, method.config_class)
    _check_kinds(method)
    if METHODS.get(method.name, method) is not method:
        raise ValueError(f"a method named {method.name} already exists; choose another name.")
    METHODS[method.name] = method
    return method


def _check_kinds(method: Method) -> None:
    """A flag is one for all methods that have a parameter of its name."""
    known = {m.name: _parameters.of(m.config_class) for m in METHODS.values()}
    for name, parameter in _parameters.of(method.config_class).items():
        for other, parameters in known.items():
            if name in parameters and parameters[name].kind is not parameter.kind:
                raise ValueError(
                    f"{method.config_class.__name__}.{name} of the method {method.name} must be "
                    f"{parameters[name].kind.__name__}, as it is in {other}, or have another name."
                )


def __getattr__(name: str):
    if name == "ALGORITHMS":
        return {name: _builder_of(method) for name, method in METHODS.items()}
    for method in METHODS.values():
        if name == method.config_class.__name__:
            return method.config_class
        if name == f"build_{method.name}":
            return _builder_of(method)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _builder_of(method: Method):
    # Imported late because it imports TensorFlow Federated.
    from tff_fedlabel.algorithms import _builder

    return _builder.of(method)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def initial_memory(method: Method, model, client_optimizer, config=None):
    """The memory of a client that has not taken part yet; None for a method without memory.

    Args:
      method: The method.
      model, client_optimizer, config: As passed to its builder.

    Returns:
      A structure of NumPy arrays.
    """
    from tff_fedlabel.algorithms import _method_checks, _process

    config = method.config_class() if config is None else config
    setup = Setup(model, client_optimizer, config)
    with _method_checks.Checked(method, setup) as checked:
        return _process.initial_memory(checked, setup)


_own_methods.load()
