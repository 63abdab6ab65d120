"""librdkafka's in-process Kafka: starts in a millisecond, speaks the real protocol.

By way of its C interface, since the one `test.mock.num.brokers` gives keeps every new group waiting
for three seconds and can neither fail nor size a topic. It has no topic administration.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

import confluent_kafka

PRODUCER = 0
PRODUCE, OFFSET_COMMIT = 0, 8
END, TOPIC, VALUE, HEADERS = 0, 1, 4, 10


class MockKafka:
    """A cluster of one broker. `down` and `refuse` make it misbehave."""

    def __init__(self) -> None:
        self._lib = library()
        error = ctypes.create_string_buffer(512)
        self._client = self._lib.rd_kafka_new(PRODUCER, None, error, len(error))
        assert self._client, error.value
        self._cluster = self._lib.rd_kafka_mock_cluster_new(self._client, 1)
        self._lib.rd_kafka_mock_group_initial_rebalance_delay_ms(self._cluster, 0)

    @property
    def bootstrap_servers(self) -> str:
        return self._lib.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()

    def create_topic(self, name: str, partitions: int) -> None:
        assert not self._lib.rd_kafka_mock_topic_create(self._cluster, name.encode(), partitions, 1)

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """No connection is accepted, and those there were are cut."""
        self._lib.rd_kafka_mock_broker_set_down(self._cluster, 1)
        try:
            yield
        finally:
            self.come_back()

    def come_back(self) -> None:
        """Accept connections again."""
        self._lib.rd_kafka_mock_broker_set_up(self._cluster, 1)

    def refuse(self, request: int, *codes: int) -> None:
        """Answer the next requests of a kind with these error codes."""
        self._lib.rd_kafka_mock_push_request_errors_array(
            self._cluster,
            ctypes.c_int16(request),
            ctypes.c_size_t(len(codes)),
            (ctypes.c_int * len(codes))(*codes),
        )

    def accept(self, *requests: int) -> None:
        """Refuse none of these kinds any more, whatever is left of what was to be refused."""
        for request in requests:
            self._lib.rd_kafka_mock_clear_request_errors(self._cluster, ctypes.c_int16(request))

    def publish_with_header(self, topic: str, value: bytes, header: bytes) -> None:
        """Publish what the Python client cannot: a header name of any bytes."""
        lib, text, size = self._lib, ctypes.create_string_buffer(512), 512
        config = lib.rd_kafka_conf_new()
        servers = self.bootstrap_servers.encode()
        assert not lib.rd_kafka_conf_set(config, b"bootstrap.servers", servers, text, size)
        client = ctypes.c_void_p(lib.rd_kafka_new(PRODUCER, config, text, size))
        headers = ctypes.c_void_p(lib.rd_kafka_headers_new(1))
        assert not lib.rd_kafka_header_add(headers, header, len(header), b"v", 1)
        fields = [TOPIC, topic.encode(), VALUE, value, ctypes.c_size_t(len(value))]
        assert not lib.rd_kafka_producev(client, *fields, HEADERS, headers, END)
        assert not lib.rd_kafka_flush(client, 10_000)
        lib.rd_kafka_destroy(client)

    def close(self) -> None:
        self._lib.rd_kafka_mock_cluster_destroy(self._cluster)
        self._lib.rd_kafka_destroy(self._client)


def library() -> ctypes.CDLL:
    """Return the librdkafka that confluent-kafka brought along."""
    site = Path(confluent_kafka.__file__).parent.parent
    bundled = [
        *site.glob("confluent_kafka.libs/librdkafka*.so*"),
        *site.glob("confluent_kafka/.dylibs/librdkafka*.dylib"),
    ]
    lib = ctypes.CDLL(str(bundled[0]) if bundled else "librdkafka.so.1")
    pointer, text, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
    signatures: dict[str, tuple[object, list[object]]] = {
        "rd_kafka_new": (pointer, [ctypes.c_int, pointer, ctypes.c_char_p, ctypes.c_size_t]),
        "rd_kafka_destroy": (None, [pointer]),
        "rd_kafka_conf_new": (pointer, []),
        "rd_kafka_conf_set": (ctypes.c_int, [pointer, text, text, text, size]),
        "rd_kafka_headers_new": (pointer, [size]),
        "rd_kafka_header_add": (ctypes.c_int, [pointer, text, ctypes.c_ssize_t, text, size]),
        "rd_kafka_producev": (ctypes.c_int, [pointer]),
        "rd_kafka_flush": (ctypes.c_int, [pointer, ctypes.c_int]),
        "rd_kafka_mock_cluster_new": (pointer, [pointer, ctypes.c_int]),
        "rd_kafka_mock_cluster_destroy": (None, [pointer]),
        "rd_kafka_mock_cluster_bootstraps": (ctypes.c_char_p, [pointer]),
        "rd_kafka_mock_group_initial_rebalance_delay_ms": (None, [pointer, ctypes.c_int32]),
        "rd_kafka_mock_topic_create": (
            ctypes.c_int,
            [pointer, ctypes.c_char_p, ctypes.c_int, ctypes.c_int],
        ),
        "rd_kafka_mock_broker_set_down": (ctypes.c_int, [pointer, ctypes.c_int32]),
        "rd_kafka_mock_broker_set_up": (ctypes.c_int, [pointer, ctypes.c_int32]),
        "rd_kafka_mock_clear_request_errors": (None, [pointer, ctypes.c_int16]),
        "rd_kafka_mock_push_request_errors_array": (
            None,
            [pointer, ctypes.c_int16, ctypes.c_size_t, pointer],
        ),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = arguments
    return lib
