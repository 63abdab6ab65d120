"""Certificates for one run of a server: an authority of its own, and one it has signed."""

from pathlib import Path

from tests.services.errors import ServerFailed
from tests.services.tools import ran

DAYS = "2"
CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def make_certificates(directory: Path) -> tuple[Path, Path]:
    """The authority's certificate, and key and certificate for 127.0.0.1 in one file, as PEM."""
    authority, secret = directory / "authority.pem", directory / "authority.key"
    key, request, signed = (directory / f"server.{kind}" for kind in ("key", "csr", "crt"))
    names = directory / "names"
    names.write_text("subjectAltName = IP:127.0.0.1\n")
    _openssl(
        *("req", "-x509", *CURVE, "-subj", "/CN=kjo-tests", "-days", DAYS),
        *("-keyout", secret, "-out", authority),
    )
    _openssl("req", *CURVE, "-subj", "/CN=127.0.0.1", "-keyout", key, "-out", request)
    _openssl(
        *("x509", "-req", "-in", request, "-CA", authority, "-CAkey", secret, "-CAcreateserial"),
        *("-days", DAYS, "-extfile", names, "-out", signed),
    )
    both = directory / "server.pem"
    both.write_text(key.read_text() + signed.read_text())
    return authority, both


def _openssl(*arguments: str | Path) -> None:
    done = ran(["openssl", *map(str, arguments)])
    if done.returncode:
        raise ServerFailed(f"openssl {arguments[0]} failed:\n{done.stdout}")
