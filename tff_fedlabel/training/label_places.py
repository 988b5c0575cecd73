"""Where the labels of a run are: what is asked for, what the method can use, what the data says."""

from tff_fedlabel import _validation
from tff_fedlabel.algorithms import Method


def checked(labels_at: str | None, method: Method) -> str:
    """`labels_at` of a `RunConfig`; the method's own if it is None.

    Raises:
      ValueError: There is no such place, or the method cannot be used with it.
    """
    if labels_at is None:
        return method.labels_at[0]
    _validation.check_name("labels_at", labels_at, _validation.LABELS_AT)
    if labels_at not in method.labels_at:
        raise ValueError(
            f"labels_at must be {' or '.join(method.labels_at)} with the algorithm {method.name}, "
            f"got {labels_at!r}."
        )
    return labels_at


def of_own_labels(labels_at: str | None, method: Method, owner: str, at_server=False) -> str:
    """Where the labels are if the clients' data says by itself which images have one.

    "every_client" then means: at the clients that have them.

    Args:
      labels_at: What is asked for; None is whatever suits the method.
      method: The method.
      owner: What says it, in a message: "one's own clients" or the name of the data.
      at_server: Whether the labelled images are at the server already.

    Raises:
      ValueError: Something else is asked for than the data says.
    """
    if labels_at == "some_clients":
        raise ValueError(
            f"labels_at must not be 'some_clients' for {owner}, which already decides which images "
            "have a label; leave it out."
        )
    if at_server and labels_at not in (None, "server"):
        raise ValueError(f"labels_at must be 'server', where the labels are, got {labels_at!r}.")
    if labels_at is not None or at_server:
        return labels_at or "server"
    possible = [place for place in method.labels_at if place != "some_clients"]
    return [*possible, *method.labels_at][0]
