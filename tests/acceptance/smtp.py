"""A mail server that says what it is told to say."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Callable
from email import message_from_bytes
from email.message import Message


class MailServer:
    """Keeps what it accepts.

    :param judge: given a recipient, the answer to RCPT: "250 OK" accepts.
    """

    def __init__(self, judge: Callable[[str], str] = lambda recipient: "250 OK") -> None:
        self.accepted: list[Message] = []
        self.refused: list[str] = []
        self.judge = judge
        self._lock = threading.Lock()
        outer = self

        class Session(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                outer.serve(self)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            allow_reuse_address = True

        self._server = Server(("127.0.0.1", 0), Session)
        self.address = f"127.0.0.1:{self._server.server_address[1]}"

    def serve(self, session: socketserver.StreamRequestHandler) -> None:
        def say(line: str) -> None:
            session.wfile.write(line.encode() + b"\r\n")

        say("220 test")
        while line := session.rfile.readline():
            verb = line.decode().strip().upper()
            if verb.startswith("RCPT"):
                recipient = line.decode().partition("<")[2].partition(">")[0]
                with self._lock:
                    answer = self.judge(recipient)
                    if not answer.startswith("250"):
                        self.refused.append(recipient)
                say(answer)
            elif verb == "DATA":
                say("354 go on")
                body = b""
                while (part := session.rfile.readline()) not in (b".\r\n", b""):
                    body += part
                with self._lock:
                    self.accepted.append(message_from_bytes(body))
                say("250 OK")
            elif verb == "QUIT":
                say("221 bye")
                return
            else:
                say("250 OK")

    def __enter__(self) -> MailServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
