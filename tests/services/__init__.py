"""Real servers for tests, benchmarks and demos: Kafka, Redis, PostgreSQL, MariaDB and MySQL.

    python -m tests.services run -- pytest          # all three around one command
    with KafkaServer() as kafka: kafka.restart()    # one, to be stopped and killed at will
    with running(kafka=False) as environment: ...   # several, as environment variables

They listen on free loopback ports, keep their data in temporary directories, and end with the
process that started them, even if that is killed. `provision()` installs what is missing.
"""

from tests.services.environment import running
from tests.services.errors import ServerFailed, ServiceError, Unprovisionable
from tests.services.given import GivenServer
from tests.services.kafka import KafkaCluster, KafkaServer
from tests.services.kafka_secured import SecuredKafkaServer
from tests.services.mariadb import MariaDbServer
from tests.services.mysql import MySqlServer
from tests.services.pgbouncer import PgBouncerServer
from tests.services.postgres import PostgresServer
from tests.services.provisioning import provision
from tests.services.redis import RedisServer

__all__ = [
    "GivenServer",
    "KafkaCluster",
    "KafkaServer",
    "MariaDbServer",
    "MySqlServer",
    "PgBouncerServer",
    "PostgresServer",
    "RedisServer",
    "SecuredKafkaServer",
    "ServerFailed",
    "ServiceError",
    "Unprovisionable",
    "provision",
    "running",
]
