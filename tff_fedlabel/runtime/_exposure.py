"""Shields TFF's worker, which listens on every address without a password, from the network.

The worker has no option to listen on only one address, and a firewall needs root. But Linux gives
a connection to the listening socket bound to its exact address rather than to one bound to all
addresses, no matter which listened first, and lets sockets of one user share a port if both ask to
(SO_REUSEPORT, which the worker does). So a `Guard` listens on the worker's port on every address
of this machine by which the worker must not be reached. A socket filter that accepts nothing makes
the kernel drop every packet to that socket: from outside the port looks like one behind a firewall.
If the filter is refused, the listener remains: connections to it are never accepted or passed on.

It protects a worker from everybody who reaches this machine by one of its addresses.

It does not protect it from:

* Users of this machine, who reach loopback. Give them no account, or run the worker in a container.
* Connections to an address that this machine gets later, until the next `refresh`; a connection
  made before it stays.
* Connections to addresses that belong to no interface, such as a route of type `local`, and what
  other programs forward to loopback: port forwarding, proxies, `net.ipv4.conf.all.route_localnet`.
* Anyone who reaches an address that was left open (`serve --host`): they reach the worker without
  a password, and can see and change what others send to it, as TFF's protocol is not encrypted.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import ipaddress
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator

import psutil

from tff_fedlabel.runtime._runtime_errors import WorkerError

LOOPBACK = ("127.0.0.1", "::1")
_SO_ATTACH_FILTER = 26
_BPF_RET = 0x06  # return the constant k: how many bytes of the packet to keep
_REFRESH_SECONDS = 2.0


class _Instruction(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_uint16),
        ("jump_true", ctypes.c_uint8),
        ("jump_false", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    ]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction))]


class Guard:
    """The listeners that stand between the network and the worker on one port.

    Args:
      port: The worker's port; the worker itself may start later.
      open_to: Addresses left open to the worker besides loopback. Either of `0.0.0.0` and `::`
        leaves all addresses open, IPv4 and IPv6.

    Raises:
      WorkerError: An address cannot be guarded.
    """

    def __init__(self, port: int, open_to: tuple[str, ...] = ()):
        self._port = port
        self._open = {ipaddress.ip_address(address) for address in (*LOOPBACK, *open_to)}
        self._listeners: dict[str, socket.socket] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._next = 0.0
        try:
            self.refresh(now=True)
        except BaseException:
            self.close()
            raise

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses by which the worker cannot be reached."""
        return tuple(self._listeners)

    def refresh(self, now: bool = False) -> None:
        """Guards addresses that are new since the last call, unless that was a moment ago.

        An address that is gone keeps its listener, since it may come back.
        """
        with self._lock:
            if self._closed or not now and time.monotonic() < self._next:
                return
            self._next = time.monotonic() + _REFRESH_SECONDS
            for address in _addresses():
                if address not in self._listeners and not self._is_open(address):
                    with contextlib.suppress(_NotYet):
                        self._listeners[address] = _listen(address, self._port)

    @contextlib.contextmanager
    def inherited(self) -> Iterator[tuple[int, ...]]:
        """Descriptors for the worker to inherit, so that the guard outlives a killed Python.

        They are above 9, the highest that a shell uses itself.
        """
        copies = []
        try:
            for listener in self._listeners.values():
                copies.append(fcntl.fcntl(listener, fcntl.F_DUPFD_CLOEXEC, 10))
            yield tuple(copies)
        finally:
            for copy in copies:
                os.close(copy)

    def _is_open(self, address: str) -> bool:
        return ipaddress.ip_address(address) in self._open or any(
            other.is_unspecified for other in self._open
        )

    def close(self) -> None:
        """Ends the protection; the worker must be gone."""
        with self._lock:
            self._closed = True
            for listener in self._listeners.values():
                listener.close()
            self._listeners.clear()


def local_addresses() -> tuple[str, ...]:
    """This machine's IPv4 and IPv6 addresses; an IPv6 link-local one ends in `%interface`."""
    return tuple(dict.fromkeys(_addresses()))


def _addresses() -> Iterator[str]:
    for interface in psutil.net_if_addrs().values():
        for entry in interface:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                yield entry.address


class _NotYet(Exception):
    """The address is gone, or its interface is still checking that nobody else has it."""


def _listen(address: str, port: int) -> socket.socket:
    family, _, _, _, target = socket.getaddrinfo(
        address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
    )[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(target)
        _drop_every_packet(listener)
        listener.listen(0)
    except OSError as error:
        listener.close()
        if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
            raise _NotYet from error
        raise WorkerError(
            f"port {port} cannot be shielded from the network on {address}: {error.strerror}"
        ) from error
    return listener


def _drop_every_packet(listener: socket.socket) -> None:
    if sys.platform != "linux":
        return
    instruction = _Instruction(_BPF_RET, 0, 0, 0)
    program = _Program(1, ctypes.pointer(instruction))
    with contextlib.suppress(OSError):  # see the module's docstring
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, bytes(program))


def hold_port(port: int) -> socket.socket:
    """A socket that reserves a port for a worker, which shares it, and for no other program.

    A worker shares its port with any socket that asks to, so two workers on the same port would
    answer each other's calls. The reserving socket never listens.

    Args:
      port: The port, or 0 for one that is free.

    Raises:
      WorkerError: The port is in use, or this user may not use it.
    """
    try:
        if port:
            _check_free(port)
        holder = socket.socket()
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            holder.bind(("", port))
        except BaseException:
            holder.close()
            raise
    except OSError as error:
        reason = "it is in use" if error.errno == errno.EADDRINUSE else os.strerror(error.errno)
        raise WorkerError(f"port {port} is not available: {reason}") from error
    return holder


def _check_free(port: int) -> None:
    # Without SO_REUSEPORT, so that a port that another worker shares counts as in use.
    # SO_REUSEADDR only tolerates connections that ended a moment ago.
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            probe = socket.socket(family)
        except OSError:
            continue  # this kernel has no IPv6
        with probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind((address, port))
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:  # IPv6 may be switched off
                    raise
