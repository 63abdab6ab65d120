"""A Kafka whose clients must speak TLS and give a password."""

from collections.abc import Sequence
from pathlib import Path

from tests.services.certificates import make_certificates
from tests.services.kafka import KafkaServer
from tests.services.ports import free_port
from tests.waiting import PATIENCE

USER, PASSWORD = "shop", "kjo-tests-s3cret"
PLAIN_MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"
SCRAM_MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule"


class SecuredKafkaServer(KafkaServer):
    """SASL_SSL with SCRAM-SHA-512 or PLAIN at `secured_servers`, for `USER` with `PASSWORD`.

    The listener without, at `bootstrap_servers`, is the broker's own and for tests to look.
    """

    def __init__(self) -> None:
        super().__init__()
        self.secured_port = free_port()

    @property
    def secured_servers(self) -> str:
        return f"127.0.0.1:{self.secured_port}"

    @property
    def authority(self) -> Path:
        """The certificate clients must trust (`ssl.ca.location`)."""
        return self.directory / "authority.pem"

    def client_options(self, **options: object) -> dict[str, object]:
        """What a client needs, as the docs have it."""
        return {
            "bootstrap.servers": self.secured_servers,
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": USER,
            "sasl.password": PASSWORD,
            "ssl.ca.location": str(self.authority),
            **options,
        }

    def add_user(self, name: str, password: str) -> None:
        """Let somebody in by SCRAM-SHA-512 who was refused so far."""
        from confluent_kafka.admin import (
            AdminClient,
            ScramCredentialInfo,
            ScramMechanism,
            UserScramCredentialUpsertion,
        )

        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        user = UserScramCredentialUpsertion(name, info, password.encode())
        client = AdminClient({"bootstrap.servers": self.bootstrap_servers})
        client.alter_user_scram_credentials([user])[name].result(PATIENCE)

    def _prepare(self) -> None:
        _, server = make_certificates(self.directory)
        controller = f"127.0.0.1:{self.controller_ports[self.node_id]}"
        own = "listener.name.secured"
        self.settings |= {
            "listeners": f"BROKER://{self.bootstrap_servers},SECURED://{self.secured_servers},"
            f"CONTROLLER://{controller}",
            "advertised.listeners": f"BROKER://{self.bootstrap_servers},"
            f"SECURED://{self.secured_servers}",
            "listener.security.protocol.map": "BROKER:PLAINTEXT,SECURED:SASL_SSL,"
            "CONTROLLER:PLAINTEXT",
            f"{own}.ssl.keystore.type": "PEM",
            f"{own}.ssl.keystore.location": str(server),
            f"{own}.sasl.enabled.mechanisms": "SCRAM-SHA-512,PLAIN",
            f"{own}.scram-sha-512.sasl.jaas.config": f"{SCRAM_MODULE} required;",
            f"{own}.plain.sasl.jaas.config": f'{PLAIN_MODULE} required user_{USER}="{PASSWORD}";',
        }
        super()._prepare()

    def _format_options(self) -> Sequence[str]:
        return ["--add-scram", f"SCRAM-SHA-512=[name={USER},password={PASSWORD}]"]
