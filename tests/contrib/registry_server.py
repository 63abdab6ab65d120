"""A schema registry on loopback: registers schemas, looks them up and gives them out by id."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit
from uuid import UUID

NO_SCHEMA = 404, {"error_code": 40403, "message": "Schema not found"}


class RegistryServer:
    """``answers`` is what every request is answered with instead, as a status and a body."""

    def __init__(self) -> None:
        self.schemas: list[tuple[str, dict[str, Any]]] = []
        """Subjects and schemas; the first one has the id 1."""
        self.requests: list[str] = []
        self.answers: tuple[int, Any] | None = None
        self._server: ThreadingHTTPServer | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Listen; again on the port of the first time."""
        registry = self

        class Request(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(None)

            def do_POST(self) -> None:
                size = int(self.headers["Content-Length"])
                self._answer(json.loads(self.rfile.read(size)))

            def log_message(self, *given: Any) -> None: ...

            def _answer(self, body: Any) -> None:
                parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
                registry.requests.append(f"{self.command} /{'/'.join(parts)}")
                status, answer = registry.answers or registry.answer(self.command, parts, body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Request)
        self._server.daemon_threads = True
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=[0.01], daemon=True).start()

    def stop(self) -> None:
        """Refuse connections from now on."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def answer(self, method: str, parts: list[str], body: Any) -> tuple[int, Any]:
        match method, parts:
            case "POST", ["subjects", subject, *versions]:
                entry = subject, body
                if entry not in self.schemas:
                    if not versions:
                        return NO_SCHEMA
                    self.schemas.append(entry)
                id = self.schemas.index(entry) + 1
                return 200, {
                    "id": id,
                    "guid": str(UUID(int=int(id))),
                    "subject": subject,
                    "version": id,
                    **body,
                }
            case "GET", ["schemas", "ids", id] if 0 < int(id) <= len(self.schemas):
                subject, schema = self.schemas[int(id) - 1]
                return 200, {"subject": subject, "guid": str(UUID(int=int(id))), **schema}
        return NO_SCHEMA
