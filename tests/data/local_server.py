"""A web server on this machine whose mirrors behave as a test wants them to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """Answers by the first part of the path: what stands in `mirrors` under that name, given the rest of the path."""

    def __init__(self) -> None:
        self.mirrors: dict[str, Callable[[BaseHTTPRequestHandler, str], None]] = {}
        self.asked: list[tuple[str, str | None]] = []  # path and Range header
        self.done = threading.Event()  # set when the test is over: nothing waits longer
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                _, mirror, name = self.path.split("/", 2)
                server.asked.append((self.path, self.headers["Range"]))
                self.close_connection = True
                server.mirrors[mirror](self, name)

            def log_message(self, *_: object) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/"

    def good(self, mirror: str, files: dict[str, bytes], ranges: bool = True) -> str:
        """A mirror that holds these files, and can send the rest of one."""

        def answer(request: BaseHTTPRequestHandler, name: str) -> None:
            body, start = files.get(name), 0
            if body is None:
                reply(request, b"no such file", status=404)
                return
            if ranges and request.headers["Range"]:
                start = int(request.headers["Range"].removeprefix("bytes=").removesuffix("-"))
            reply(request, body[start:], status=206 if start else 200)

        return self.add(mirror, answer)

    def add(self, mirror: str, answer: Callable[[BaseHTTPRequestHandler, str], None]) -> str:
        self.mirrors[mirror] = answer
        return f"{self.url}{mirror}/"


def reply(request: BaseHTTPRequestHandler, body: bytes, status: int = 200, length: int | None = None) -> None:
    request.send_response(status)
    if length != -1:
        request.send_header("Content-Length", str(len(body) if length is None else length))
    request.send_header("Connection", "close")
    request.end_headers()
    request.wfile.write(body)
