"""Fixtures of the data tests."""

import contextlib
import http.server
import os
import pathlib
import threading

import pytest


@pytest.fixture(scope="session")
def real_data_dir():
    """Where CIFAR-10 and Fashion-MNIST lie in tensorflow-datasets' prepared form."""
    named = os.environ.get("TFF_FEDLABEL_DATA_DIR")
    beside = pathlib.Path(__file__).resolve().parents[3] / "shared" / "data" / "tfds"
    path = pathlib.Path(named) if named else beside
    if not (path / "cifar10").is_dir() or not (path / "fashion_mnist").is_dir():
        pytest.skip(f"no real data at {path}; name its folder in TFF_FEDLABEL_DATA_DIR")
    return str(path)


@pytest.fixture
def no_network(monkeypatch):
    """Fails the test when Python opens a connection."""
    import socket

    def refuse(*args, **kwargs):
        raise AssertionError(f"the network was touched: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


class _Server(http.server.ThreadingHTTPServer):
    content = b""
    honours_range = True
    status = None
    hold_after = None  # bytes sent before the first answer stops until `go_on` is set
    break_after = ()  # bytes sent before each of the first answers is cut off
    requests: list


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        asked = self.headers.get("Range")
        server.requests.append(asked)
        if server.status:
            self.send_error(server.status)
            return
        start = 0
        if asked and server.honours_range:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            if start >= len(server.content):
                self.send_error(416)
                return
            self.send_response(206)
        else:
            self.send_response(200)
        body = server.content[start:]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        number = len(server.requests) - 1
        if number < len(server.break_after):
            body = body[: server.break_after[number]]
            self.close_connection = True
        if number == 0 and server.hold_after is not None:
            self.wfile.write(body[: server.hold_after])
            server.go_on.wait(60)
            body = body[server.hold_after :]
        with contextlib.suppress(ConnectionError):  # The process that asked may be gone.
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    """A server on this machine that misbehaves on demand."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = _Server(("127.0.0.1", 0), _Handler)
    server.requests = []
    server.go_on = threading.Event()
    server.url = f"http://127.0.0.1:{server.server_address[1]}/file.npz?download=1"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.go_on.set()
    server.shutdown()
    thread.join()
    server.server_close()
