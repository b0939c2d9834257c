"""A server that speaks S3 on loopback, moto's, behind a proxy with faults."""

import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

SECRET = "wJalrXUtnFEMI-never-to-be-shown"
BUCKET = "bucket"


class Server:
    """moto in a child, and the proxy to it, which is the endpoint.

    Attributes:
      requests: (method, path) of all since `clear`.
      fault: the fault of a request, from its method and path; None for none.
    """

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as unused:
            self._port = unused.getsockname()[1]
        words = [sys.executable, "-m", "moto.server", "-p", str(self._port)]
        self._child = subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **KEYS}
        )
        self.requests: list[tuple[str, str]] = []
        self.fault: Callable[[str, str], Fault | None] = lambda method, path: None
        self._proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._proxy.daemon_threads = True
        Handler.server_of_s3 = self
        threading.Thread(target=self._proxy.serve_forever, daemon=True).start()
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", self._port)):
            assert self._child.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)

    @property
    def environment(self) -> dict[str, str]:
        endpoint = f"http://127.0.0.1:{self._proxy.server_port}"
        return {**KEYS, "AWS_ENDPOINT_URL": endpoint}

    def clear(self) -> None:
        """An empty bucket, without faults."""
        self.fault = lambda method, path: None
        self.send("POST", "/moto-api/reset")
        self.send("PUT", f"/{BUCKET}")
        self.requests.clear()

    def send(self, method: str, path: str, body: bytes = b"", headers: Any = ()) -> Any:
        """(status, headers, body) of the answer to a request, past the proxy."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        connection.request(method, path, body, dict(headers) or _SIGNED)
        answer = connection.getresponse()
        read = answer.read()
        connection.close()
        return answer.status, answer.getheaders(), read

    def objects(self) -> dict[str, bytes]:
        """All that is in the bucket."""
        listed = self.send("GET", f"/{BUCKET}?list-type=2")[2].decode()
        keys = [part.partition("</Key>")[0] for part in listed.split("<Key>")[1:]]
        answers = {key: self.send("GET", f"/{BUCKET}/{key}") for key in keys}
        assert all(status == 200 for status, _, _ in answers.values())
        return {key: body for key, (_, _, body) in answers.items()}

    def close(self) -> None:
        self._proxy.shutdown()
        self._child.terminate()
        self._child.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_DEFAULT_REGION": "us-east-1",
}

_WHO = f"Credential={KEYS['AWS_ACCESS_KEY_ID']}/20260101/us-east-1/s3/aws4_request"
_SIGNED = {"Authorization": f"AWS4-HMAC-SHA256 {_WHO}, SignedHeaders=host, Signature=0"}


class Handler(BaseHTTPRequestHandler):
    """One request; a fault is a function of it, called in place of `pass_on`."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer is one packet
    disable_nagle_algorithm = True
    server_of_s3: Server

    def handle_request(self) -> None:
        server = self.server_of_s3
        server.requests.append((self.command, self.path))
        (server.fault(self.command, self.path) or Handler.pass_on)(self)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_request

    def handle_expect_100(self) -> bool:
        proceeds = super().handle_expect_100()
        self.wfile.flush()
        return proceeds

    @property
    def length(self) -> int:
        return int(self.headers.get("Content-Length", 0))

    def sent(self) -> Any:
        """The server's answer."""
        body, headers = self.rfile.read(self.length), self.headers.items()
        return self.server_of_s3.send(self.command, self.path, body, headers)

    def pass_on(self) -> None:
        self.answer(*self.sent())

    def answer(self, status: int, headers: Any, body: bytes) -> None:
        self.send_response_only(status)
        headers = {name.lower(): value for name, value in headers}
        headers = {"content-length": len(body)} | headers
        for name in headers.keys() - {"connection", "transfer-encoding"}:
            self.send_header(name, str(headers[name]))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def log_message(self, *_: Any) -> None:
        pass


Fault = Callable[[Handler], None]


def broken(handler: Handler) -> None:
    """The connection breaks in the middle of an upload."""
    handler.rfile.read(handler.length // 2)
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def unavailable(handler: Handler) -> None:
    handler.rfile.read(handler.length)
    _refuse(handler)


def lost(handler: Handler) -> None:
    """The request is served, and its answer does not arrive."""
    handler.sent()
    _refuse(handler)


def slow(handler: Handler) -> None:
    time.sleep(2)
    handler.pass_on()


def _refuse(handler: Handler) -> None:
    body = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
    handler.answer(503, [("Content-Type", "application/xml")], body)
